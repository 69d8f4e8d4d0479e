"""The TensorRT module and our plugin library: chosen and loaded here, once per process, and nowhere else."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engines.errors import EngineError
from plugins.ops import OPS, VERSION

LIBRARY_NAME = "libnextn_plugins.so"
KERNELS_NAME = "libnextn_kernels.so"  # beside it
_LISTEN = "nextn_listen"
_HERE = Path(__file__).resolve().parent
# Where an installation leaves the library, and, if this is a source tree, a build there.
LIBRARY_PLACES = (
    _HERE / LIBRARY_NAME,
    *([_HERE.parent / "build" / "plugins" / LIBRARY_NAME] if (_HERE / "CMakeLists.txt").is_file() else []),
)
# TensorRT-RTX first: it is what pip installs whole, and the smaller requirement.
_MODULES = ("tensorrt_rtx", "tensorrt")
_OLDEST = {"tensorrt_rtx": (1, 6), "tensorrt": (10, 8)}


@dataclass(frozen=True)
class TensorRT:
    """The TensorRT in use. ``name``: tensorrt_rtx or tensorrt."""

    module: Any
    name: str
    version: str

    @property
    def imports_by_name(self) -> bool:
        """Whether its ONNX importer takes custom ops by name; TensorRT-RTX before 1.7 does not."""
        return self.name == "tensorrt" or _version(self.version) >= (1, 7)


@cache
def tensorrt() -> TensorRT:
    """The installed TensorRT. Raises EngineError when there is none, or only one that is too old."""
    for name in _MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            module: ModuleType = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineError(f"the {name} package does not load ({error}); reinstall it") from error
        version = str(module.__version__)
        if _version(version) < _OLDEST[name]:
            wanted = ".".join(map(str, _OLDEST[name]))
            raise EngineError(f"{name} {version} lacks in-place plugin state; install {name} >= {wanted}")
        return TensorRT(module, name, version)
    raise EngineError(
        "no TensorRT package found (tensorrt_rtx or tensorrt); install one, for example "
        "`pip install tensorrt-rtx-cu13`, or run the .gguf itself, on ONNX Runtime"
    )


class _Chosen:
    """Has the attributes of the TensorRT in use, which is chosen when one of them is first asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tensorrt().module, name)


# TensorRT's API, whichever package it is of: `trt.Builder(...)`. A type checker sees full TensorRT's, if its stubs are
# there (`make lint` brings them).
if TYPE_CHECKING:
    import tensorrt as trt
else:
    trt = _Chosen()


def find_library(path: Path | None = None) -> Path:
    """The plugin library: ``path``, or the first of LIBRARY_PLACES. Raises EngineError naming what was tried."""
    tried = (path,) if path is not None else LIBRARY_PLACES
    for each in tried:
        if each.is_file():
            return each.resolve()
    raise EngineError(
        f"plugin library not found: {' and '.join(map(str, tried))} {'is' if len(tried) == 1 else 'are'} missing; "
        "`make plugins` builds it in a source tree, `pip install .` on Linux, without NEXTN_PLUGINS=0, installs it"
    )


def load_plugins(path: Path | None = None) -> Path:
    """Register our ops with TensorRT; the library's path. Must come before an engine is built or loaded.

    A second call does nothing, but must not name another library. Raises EngineError."""
    library = find_library(path)
    loaded = _load(library)
    if loaded != library:
        raise EngineError(f"{library}: the plugins of {loaded} are loaded already, and one process takes one library")
    return loaded


# Called with each line that a plugin reports; stderr has it where nobody listens.
report_listeners: list[Callable[[str], None]] = []


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _on_report(line: bytes) -> None:
    text = line.decode(errors="replace")
    for listener in report_listeners:
        listener(text)
    if not report_listeners:
        print(text, file=sys.stderr)


_loaded: list[Path] = []


def _load(library: Path) -> Path:
    if _loaded:
        return _loaded[0]
    chosen = tensorrt()
    try:
        # First by the system's loader: it says what is wrong with a library, the registry does not.
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise EngineError(f"{library}: the plugin library does not load ({error}); build it again") from error
    registry: trt.IPluginRegistry = trt.get_plugin_registry()
    if registry.load_library(str(library)) is None:
        raise EngineError(
            f"{library}: {chosen.name} {chosen.version} refuses the plugin library (no creators in it, or another "
            "library has registered ops of the same names); build it again"
        )
    missing = [name for name in OPS if registry.get_creator(name, VERSION, "") is None]
    if missing or not hasattr(loaded, _LISTEN):
        lacks = f"the ops {', '.join(missing)}" if missing else _LISTEN
        raise EngineError(f"{library}: lacks {lacks}; it is of another version, build it again")
    getattr(loaded, _LISTEN)(_on_report)
    _loaded.append(library)
    return library


def prepare_parser() -> None:
    """Make TensorRT-RTX's ONNX parser usable: it opens its core library by the unversioned name, which the wheel does
    not bring, and ends the process when that fails. Puts a link beside it. Raises EngineError."""
    chosen = tensorrt()
    if chosen.name != "tensorrt_rtx":
        return
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    for folder in map(Path, spec.submodule_search_locations or () if spec else ()):
        link, core = folder / "libtensorrt_rtx.so", folder / "libtensorrt_rtx.so.1"
        if link.exists() or not core.exists():
            continue
        try:
            link.symlink_to(core.name)
        except FileExistsError:  # another process was faster
            continue
        except OSError as error:
            raise EngineError(
                f"{link}: missing, and {chosen.name} {chosen.version} cannot parse without it ({error.strerror}); "
                f"run `ln -s {core.name} {link}` as the owner of that folder"
            ) from error


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def library_digest(library: Path) -> str:
    """Hex digest of the plugin library and the kernels beside it: what an engine was built against.

    Raises EngineError when either cannot be read."""
    import hashlib

    digest = hashlib.blake2b(digest_size=16)
    for path in (library, library.with_name(KERNELS_NAME)):
        try:
            digest.update(path.read_bytes())
        except OSError as error:
            raise EngineError(f"{path}: cannot be read ({error.strerror}); build the plugins again") from error
    return digest.hexdigest()
