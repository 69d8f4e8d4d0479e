"""The trunk on TensorRT. State stays on the device: rolling back is a slot number and a position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.engine_manifest import EngineManifest
from engines.errors import EngineError
from engines.manifest import Geometry
from engines.memory_plan import MemoryPlan, state_bindings
from runtime.control_block import ControlBlock
from runtime.cuda import DeviceBuffer, Stream
from runtime.device_rows import DeviceRows
from runtime.engine import NO_CHOICE, Pass, Sampler, choices_that_count
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.tensorrt_session import EngineSession
from runtime.token_choice import TokenChoice, device_params, sampling_bytes

_NO_SLOT = -1  # start from zeros
_F32_BYTES = 4
GREEDY = ParamsSampler(SamplingParams())


@dataclass(frozen=True)
class Shared:
    """What trunk and draft engine have in common."""

    stream: Stream
    control: ControlBlock
    choice: TokenChoice
    geometry: Geometry
    manifest: EngineManifest
    states: dict[str, DeviceBuffer]  # of both engines, by the name of the input
    row_numbers: DeviceBuffer  # 0, 1, 2, ... int32


class TensorrtTrunk:
    """The trunk of one sequence (see `runtime.engine.TrunkEngine`). Hidden rows are valid until its next pass.

    plan: the memory of both engines."""

    def __init__(
        self, session: EngineSession, shared: Shared, context_size: int, max_rows: int, plan: MemoryPlan
    ) -> None:
        self.plan = plan
        self.context_size, self.max_rows = context_size, max_rows
        self.prefill_chunk = shared.manifest.options.prefill_chunk
        self._session, self._shared = session, shared
        self._num_slots = shared.manifest.options.max_rows
        geometry = shared.geometry
        self._logits = DeviceBuffer(self._num_slots * geometry.vocab_size * _F32_BYTES)
        self._prefill_hidden = DeviceBuffer(self.prefill_chunk * geometry.hidden_size * _F32_BYTES)
        hidden = DeviceBuffer(self._num_slots * geometry.hidden_size * _F32_BYTES)
        self._hidden = DeviceRows(hidden.address, self._num_slots, geometry.hidden_size, hidden)
        self._rows_of_logits = 0
        self.start(GREEDY)

    def fixed_addresses(self) -> dict[str, int]:
        """What `EngineSession.bind` is to be told beside weights and state."""
        control = self._shared.control
        return {"position": control.at("position"), "slot": control.at("slot"), "logits": self._logits.address}

    @property
    def position(self) -> int:
        return self._position

    @property
    def hidden_rows(self) -> DeviceRows:
        """Where a verify pass leaves its hidden rows."""
        return self._hidden

    @property
    def logits(self) -> np.ndarray:
        """Of the last pass, [rows, V] f32, copied to the host."""
        shape = (self._rows_of_logits, self._shared.geometry.vocab_size)
        return self._shared.stream.read(self._logits.address, shape, np.float32)

    @property
    def chooses_on_device(self) -> bool:
        return self._on_device

    def start(self, sampler: Sampler) -> None:
        self._sampler, self._position, self._pending, self._slot = sampler, 0, 0, _NO_SLOT
        self._rows_of_logits = 0
        params = device_params(sampler)
        self._on_device = params is not None
        if params is not None:
            self._shared.control.trunk_sampling[:] = np.frombuffer(sampling_bytes(params), np.uint8)

    def prefill(self, tokens: Sequence[int]) -> Pass:
        count = len(tokens)
        assert 1 <= count <= self.prefill_chunk and not self._pending, (count, self._pending)
        control = self._shared.control
        self._point(control)
        control.row[0] = count - 1
        control.prompt[:count] = tokens
        control.send()
        short = count <= self._num_slots
        hidden = self._prefill_hidden.address
        addresses = {"tokens": control.at("prompt"), "rows": control.at("row"), "hidden.out": hidden}
        self._session.enqueue("decode" if short else "prefill", count, 1, addresses)
        self._choose(1, offset=count)
        control.fetch()
        self._shared.stream.synchronize()
        self._rows_of_logits = 1
        choices = self._choices([], self._position + count + np.arange(1))
        self._slot = count - 1 if short else 0
        self._position += count
        return Pass(choices, DeviceRows(hidden, count, self._hidden.width, self._prefill_hidden))

    def verify(self, tokens: Sequence[int]) -> Pass:
        count = self.prepare_verify(tokens)
        self._shared.stream.replay(("verify", count), lambda: self._whole_verify(count))
        self._shared.stream.synchronize()
        return self.finish_verify(count)

    def commit(self, n_keep: int) -> None:
        assert 1 <= n_keep <= self._pending, (n_keep, self._pending)
        self._slot = n_keep - 1
        self._position += n_keep
        self._pending = 0

    def prepare_verify(self, tokens: Sequence[int], num_drafts: int = 0) -> int:
        """Write what a verify pass of ``tokens`` and ``num_drafts`` more, which the device knows, reads; its rows."""
        count = len(tokens) + num_drafts
        assert 1 <= count <= self.max_rows and not self._pending, (count, self._pending)
        control = self._shared.control
        self._point(control)
        control.tokens[: len(tokens)] = tokens
        return count

    def enqueue_verify(self, count: int) -> None:
        """Queue the pass and its choices, without the copies to and from the device."""
        control = self._shared.control
        addresses = {
            "tokens": control.at_token(0),
            "rows": self._shared.row_numbers.address,
            "hidden.out": self._hidden.address,
        }
        self._session.enqueue("decode", count, count, addresses)
        self._choose(count, offset=1)

    def finish_verify(self, count: int) -> Pass:
        """The outcome, once the stream is idle."""
        self._rows_of_logits = count
        tokens = self._shared.control.tokens_back[:count].tolist()
        choices = self._choices(tokens, self._position + 1 + np.arange(count))
        self._pending = count
        return Pass(choices, self._hidden[:count])

    def time_verify(self, rows: int, repeats: int) -> list[float]:
        self.start(GREEDY)
        self.prepare_verify([0] * rows)
        times = self._shared.stream.time_replays(("verify", rows), lambda: self._whole_verify(rows), repeats)
        self.start(GREEDY)
        return times

    def state(self) -> dict[str, np.ndarray]:
        """Copies of everything the committed tokens left behind, named and shaped as the canonical graph's state:
        GDN state, conv window, KV rows below ``position`` (as they are kept: float16, or int8 with their scales)."""
        copies: dict[str, np.ndarray] = {}
        for binding in state_bindings(self._shared.manifest.engines["trunk"]):
            prefix, kind = binding.name.rsplit(".", 1)
            address = self._shared.states[binding.name].address
            if kind == "pool":
                copies[f"{prefix}.state"], copies[f"{prefix}.conv"] = self._read_slot(address)
                continue
            _, capacity, heads, dim = (int(size) for size in binding.shape)
            dtype = np.dtype(binding.dtype)
            for name in ("key_cache", "value_cache"):
                rows = self._shared.stream.read(address, (self._position, heads, dim), dtype)
                copies[f"{prefix}.{name}"] = np.swapaxes(rows, 0, 1)[None]
                address += capacity * heads * dim * dtype.itemsize
        return copies

    def warm_up(self) -> None:
        """Run every size of pass once, so that none has anything left to load or compile while it is recorded."""
        for count in range(1, self._num_slots + 1):
            self._point(self._shared.control)
            self._whole_verify(count)
            self._shared.stream.synchronize()
        self.start(self._sampler)
        self.prefill([0] * self.prefill_chunk)
        self.start(self._sampler)

    def _whole_verify(self, count: int) -> None:
        self._shared.control.send()
        self.enqueue_verify(count)
        self._shared.control.fetch()

    def _point(self, control: ControlBlock) -> None:
        control.slot[0], control.position[0] = self._slot, self._position

    def _choose(self, rows: int, offset: int) -> None:
        control, vocab = self._shared.control, self._shared.geometry.vocab_size
        sampling, position = control.at("trunk_sampling"), control.at("position")
        self._shared.choice.enqueue(self._logits.address, rows, vocab, sampling, position, offset, control.at_choices)

    def _choices(self, tokens: Sequence[int], places: np.ndarray) -> np.ndarray:
        """The choices of the pass just done, over ``tokens`` if it is to be verified; ``places``: of chosen tokens."""
        choices = self._shared.control.choices_back[: len(places)].astype(np.int64)
        if self._on_device and (choices != NO_CHOICE).all():
            return choices
        # The host's sampler names the bad logits where the device only says that there are some.
        on_host = choices_that_count(self._sampler, self.logits, places, tokens)
        if not self._on_device:
            return on_host
        if (choices != on_host)[on_host != NO_CHOICE].any():
            raise EngineError(f"the device chose {choices}, the host {on_host}; build the plugins again")
        return choices

    def _read_slot(self, pool: int) -> tuple[np.ndarray, np.ndarray]:
        """State [1, HV, DK, DV] and window [1, kernel - 1, C] of the current slot of the pool at an address."""
        geometry = self._shared.geometry
        state = (1, geometry.gdn_v_heads, geometry.gdn_head_dim, geometry.gdn_head_dim)
        window = (1, geometry.conv_kernel - 1, geometry.conv_channels)
        if self._slot == _NO_SLOT:
            return np.zeros(state, np.float32), np.zeros(window, np.float32)
        slot, read = self._slot * _F32_BYTES, self._shared.stream.read
        windows = pool + self._num_slots * int(np.prod(state)) * _F32_BYTES
        return (
            read(pool + slot * int(np.prod(state)), state, np.float32),
            read(windows + slot * int(np.prod(window)), window, np.float32),
        )
