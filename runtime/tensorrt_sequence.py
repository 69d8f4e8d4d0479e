"""What the GPU holds of one sequence: state of trunk and head, rows of the last passes, recorded passes. Copies of the
state on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from engines.engine_manifest import ONE_ROW_PLACES, Binding, EngineManifest, pool_size
from engines.manifest import Geometry
from engines.memory_plan import nbytes_of, state_bindings
from runtime.cuda import DeviceBuffer, Recorder, Stream
from runtime.device_rows import DeviceRows
from runtime.engine import SavedState
from runtime.host_copies import HostCopies, Span
from runtime.recurrent_slots import RecurrentSlots

_F32_BYTES = 4


class SequenceMemory:
    """State of the engines ``roles``, by the name of the input: KV caches [2, L, KV, D] of a type each, and of each
    Gated DeltaNet layer a pool, f32: a state [HV, DK, DV], S - 1 steps from it, S windows [kernel - 1, C].

    addresses: by role, for `EngineSession.use`. hidden, prefill_hidden: where the trunk's passes leave their rows;
    one_row: where verify passes of one row do, in turns.
    recorder: of passes, which hold the addresses."""

    def __init__(
        self,
        stream: Stream,
        host: HostCopies,
        slots: RecurrentSlots,
        manifest: EngineManifest,
        geometry: Geometry,
        roles: Iterable[str],
    ) -> None:
        """Raises ResourceError when there is not the memory."""
        self._stream, self._host, self._recurrent, self._geometry = stream, host, slots, geometry
        self._bindings = {role: state_bindings(manifest.engines[role]) for role in roles}
        self.states = {
            binding.name: DeviceBuffer(nbytes_of(binding)) for each in self._bindings.values() for binding in each
        }
        self.addresses = {
            role: {binding.name: self.states[binding.name].address for binding in each}
            for role, each in self._bindings.items()
        }
        self.num_slots, width = manifest.options.max_rows, geometry.hidden_size
        self.prefill_hidden = DeviceBuffer(manifest.options.prefill_chunk * width * _F32_BYTES)
        hidden = DeviceBuffer((self.num_slots + ONE_ROW_PLACES) * width * _F32_BYTES)
        rows = DeviceRows(hidden.address, self.num_slots + ONE_ROW_PLACES, width, hidden)
        self.hidden = rows[: self.num_slots]
        self.one_row = [rows[at : at + 1] for at in range(self.num_slots, len(rows))]
        self.recorder = Recorder(stream)

    @property
    def roles(self) -> list[str]:
        return list(self._bindings)

    def settle(self, slot: int) -> None:
        """Bring the recurrent state of a slot to slot 0, where all that follows reads or writes it."""
        for (states, _), (windows, _) in self._slot_0().values():
            self._recurrent.settle(states, windows, slot)

    def read_recurrent(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """State [1, HV, DK, DV] and window [1, kernel - 1, C] of each layer, by its prefix."""
        read, shapes = self._stream.read, (self._state_shape, self._window_shape)
        return {
            name: (read(state, shapes[0], np.float32), read(window, shapes[1], np.float32))
            for name, ((state, _), (window, _)) in self._slot_0().items()
        }

    def read_rows(self, role: str, end: int) -> dict[str, np.ndarray]:
        """Rows 0 .. end - 1 of each cache, [2, end, KV, D], by the layer's prefix."""
        copies = {}
        for binding, spans in self._caches(role, 0, end):
            _, _, heads, dim = (int(size) for size in binding.shape)
            planes = [self._stream.read(at, (end, heads, dim), np.dtype(binding.dtype)) for at, _ in spans]
            copies[binding.name.rsplit(".", 1)[0]] = np.stack(planes)
        return copies

    def save_recurrent(self) -> SavedState:
        """A copy of the recurrent state, on the host."""
        copy = self._host.fetch(list(chain(*self._slot_0().values())))
        return SavedState(copy, copy.nbytes)

    def load_recurrent(self, saved: SavedState) -> None:
        self._host.put(list(chain(*self._slot_0().values())), saved.data)

    def save_rows(self, role: str, first: int, end: int) -> SavedState:
        """A copy of rows first .. end - 1 of all caches of an engine, on the host."""
        copy = self._host.fetch(list(chain(*(spans for _, spans in self._caches(role, first, end)))))
        return SavedState(copy, copy.nbytes, end - first)

    def load_rows(self, role: str, parts: Sequence[SavedState]) -> int:
        """Write rows from 0 on, part by part; how many."""
        first = 0
        for part in parts:
            end = first + part.count
            self._host.put(list(chain(*(spans for _, spans in self._caches(role, first, end)))), part.data)
            first = end
        return first

    def _caches(self, role: str, first: int, end: int) -> Iterator[tuple[Binding, list[Span]]]:
        """Each cache of an engine, and where keys and values of some rows lie."""
        for binding in self._bindings[role]:
            if binding.name.endswith(".cache"):
                _, capacity, heads, dim = (int(size) for size in binding.shape)
                row = heads * dim * np.dtype(binding.dtype).itemsize
                begin = self.states[binding.name].address + first * row
                yield binding, [(begin + plane * capacity * row, (end - first) * row) for plane in (0, 1)]

    def _slot_0(self) -> dict[str, list[Span]]:
        """Where state and window of each pool's first slot lie, by the layer's prefix."""
        state, window = (int(np.prod(shape)) * _F32_BYTES for shape in (self._state_shape, self._window_shape))
        before_windows = pool_size(self._geometry, self.num_slots) * _F32_BYTES - self.num_slots * window
        spans = {}
        for name in self.addresses["trunk"]:
            if name.endswith(".pool"):
                pool = self.states[name]
                spans[name.rsplit(".", 1)[0]] = [(pool.address, state), (pool.address + before_windows, window)]
        return spans

    @property
    def _state_shape(self) -> tuple[int, ...]:
        return 1, self._geometry.gdn_v_heads, self._geometry.gdn_head_dim, self._geometry.gdn_head_dim

    @property
    def _window_shape(self) -> tuple[int, ...]:
        return 1, self._geometry.conv_kernel - 1, self._geometry.conv_channels
