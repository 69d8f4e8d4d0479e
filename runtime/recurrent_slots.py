"""Slots of recurrent state on the device. The first holds a state whole, the others what leads on from it, token by
token (plugins/README.md); here the first takes over the state of another."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

from engines.errors import EngineError
from engines.manifest import Geometry
from plugins.load import KERNELS_NAME
from runtime.cuda import Stream, check_launch


class RecurrentSlots:
    """The kernel that does it. Raises EngineError when the library lacks it."""

    def __init__(self, library: Path, stream: Stream, geometry: Geometry) -> None:
        """``library``: the plugin library, beside which the kernels lie."""
        path = library.with_name(KERNELS_NAME)
        try:
            self._settle = ctypes.CDLL(str(path)).nextn_gated_delta_net_settle
        except (OSError, AttributeError) as error:
            raise EngineError(f"{path}: the kernel library does not load ({error}); build it again") from error
        self._settle.argtypes = (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int64, c_void_p)
        self._stream, self._geometry = stream, geometry

    def settle(self, states: int, windows: int, slot: int) -> None:
        """Queue that slot 0 of a layer's pool gets state and window of ``slot``; the others are of no more use then.

        states, windows: device addresses of the pool's two parts."""
        g = self._geometry
        window = (g.conv_kernel - 1) * g.conv_channels
        status = self._settle(states, windows, slot, g.gdn_v_heads, g.gdn_head_dim, window, self._stream.handle)
        check_launch(status, "recurrent state could not be brought to its first slot")
