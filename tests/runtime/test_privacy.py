"""Running a model leaves nothing outside its own folders and reports to nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from export.exporter import export_model


def test_no_usage_report_is_prepared(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """ONNX Runtime, left alone, writes a device id and a queue of reports below the user's cache folder."""
    export_model(tiny("bigram_ring"), tmp_path / "model")
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    command = [sys.executable, "-m", "runtime.generate", str(tmp_path / "model"), "--prompt-ids", "40", "-n", "4"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert list(home.rglob("*")) == []
