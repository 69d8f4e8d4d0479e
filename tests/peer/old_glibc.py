"""Let the peer's libraries load on a glibc older than 2.38 (for example Debian 12).

Of GLIBC_2.38 they need __isoc23_strtol, strtoul, strtoull and sscanf only. The libraries are copied, the version is
marked as weak in the copies, and a small C library supplies the four functions. Needs a C compiler; the installed
package is left as it was.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

_SHIM = r"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
long __isoc23_strtol(const char *s, char **end, int base) { return strtol(s, end, base); }
unsigned long __isoc23_strtoul(const char *s, char **end, int base) { return strtoul(s, end, base); }
unsigned long long __isoc23_strtoull(const char *s, char **end, int base) { return strtoull(s, end, base); }
int __isoc23_sscanf(const char *s, const char *format, ...)
{ va_list list; va_start(list, format); int n = vsscanf(s, format, list); va_end(list); return n; }
"""
_VERSION = b"GLIBC_2.38"
_SECTION_VERSIONS_NEEDED = 0x6FFFFFFE  # SHT_GNU_verneed
_WEAK = 2  # VER_FLG_WEAK


def loadable_copy(library: Path) -> Path:
    """Path of a copy of ``library`` that loads here, with its neighbours beside it; the four functions are loaded.

    Copies are kept in the temporary folder for the next run. Raises OSError or CalledProcessError."""
    source = library.parent
    folder = Path(tempfile.gettempdir()) / f"llamacpp-{os.getuid()}-{source.stat().st_mtime_ns}"
    if not folder.is_dir():
        part = Path(tempfile.mkdtemp(prefix=folder.name))
        for file in source.glob("lib*.so*"):
            _mark_weak(Path(shutil.copy(file, part / file.name)))
        (part / "shim.c").write_text(_SHIM)
        command = ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", "shim.so", "shim.c"]
        subprocess.run(command, cwd=part, check=True)
        try:
            part.rename(folder)
        except OSError:  # another run was first
            shutil.rmtree(part)
    ctypes.CDLL(str(folder / "shim.so"), ctypes.RTLD_GLOBAL)
    return folder / library.name


def _mark_weak(path: Path) -> None:
    """Mark every need of the version in an ELF file as weak, in place.   Source: LSB, symbol versioning."""
    data = bytearray(path.read_bytes())
    if data[:5] != b"\x7fELF\x02":
        raise OSError(f"{path}: not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    for section in sections:
        if section[1] == _SECTION_VERSIONS_NEEDED:
            _mark_section(data, section[4], sections[section[6]][4])
    path.write_bytes(data)


def _mark_section(data: bytearray, offset: int, names: int) -> None:
    """``offset`` of the section's first entry, ``names`` of its string table."""
    while True:
        _, num_versions, _, first, following = struct.unpack_from("<HHIII", data, offset)
        entry = offset + first
        for _ in range(num_versions):
            _, flags, _, name, step = struct.unpack_from("<IHHII", data, entry)
            if data[names + name : data.index(0, names + name)] == _VERSION:
                struct.pack_into("<H", data, entry + 4, flags | _WEAK)
            entry += step
        if not following:
            return
        offset += following
