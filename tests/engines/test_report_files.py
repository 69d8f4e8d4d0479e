"""Where reports may go, which is looked at before the work whose outcome they are to hold."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.errors import ResourceError, UsageError
from engines.report_files import check_places
from runtime import eval as evaluation
from tests.exported import Exported
from tests.runtime.command import run_main

_NOBODY = 65534


@contextlib.contextmanager
def no_root() -> Iterator[None]:
    """Root may write everywhere: inside the block, what a process may do is looked up for another user."""
    if os.geteuid():
        yield
        return
    os.setresuid(_NOBODY, -1, -1)
    try:
        yield
    finally:
        os.setresuid(0, -1, -1)


def test_a_folder_that_takes_no_file() -> None:
    with tempfile.TemporaryDirectory() as name, no_root():
        folder, other = Path(name), Path(name, "link")
        other.symlink_to(folder / "old")
        (folder / "old").touch()
        folder.chmod(0o777)
        check_places(json=folder / "new", csv=folder / "old")
        folder.chmod(0o555)
        for path in (folder / "new", folder / "old", other):
            with pytest.raises(ResourceError, match=f"^--json {path}: cannot be written there"):
                check_places(json=path)


def test_one_file_for_two(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for second in ("x", "link"):
        with pytest.raises(UsageError, match=f"--csv .*{second}: is the file of --json too"):
            check_places(json=tmp_path / "x", csv=tmp_path / second)


def test_pipes_and_devices(tmp_path: Path) -> None:
    """They take several."""
    os.mkfifo(tmp_path / "pipe")
    check_places(json=Path("/dev/null"), csv=Path("/dev/null"), html=tmp_path / "pipe", chart=None)
    receiving, sending = os.pipe()
    with contextlib.closing(os.fdopen(receiving)), contextlib.closing(os.fdopen(sending, "w")):
        check_places(json=Path(f"/dev/fd/{sending}"))


def test_the_table_is_shown_all_the_same(exported: Callable[[str], Exported]) -> None:
    """Though the disk is full by then."""
    flags = ("--per-category", 1, "--temps", 0, "-n", 2, "--json", "/dev/full")
    result = run_main(evaluation.main, exported("trained").folder, *flags)
    assert result.code == 6 and "tokens/s" in result.out
