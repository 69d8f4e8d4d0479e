"""The trunk on TensorRT. State stays on the device: rolling back is a slot number and a position.

The engines of several sequences share everything but `SequenceMemory`, and write into the control block whatever a pass
reads, as they are used in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.engine_manifest import EngineManifest
from engines.errors import EngineError, NumericError
from engines.manifest import Geometry
from engines.memory_plan import MemoryPlan, check_one_more
from runtime.control_block import ControlBlock
from runtime.cuda import DeviceBuffer, Stream, free_and_total_bytes
from runtime.device_rows import DeviceRows
from runtime.engine import NO_CHOICE, Pass, Sampler, SavedState, any_token, choices_that_count, of_finite
from runtime.host_copies import HostCopies
from runtime.queued_work import Queued, UnderWay
from runtime.recurrent_slots import RecurrentSlots
from runtime.sampling import ParamsSampler, SamplingParams, check_logits
from runtime.tensorrt_sequence import SequenceMemory
from runtime.tensorrt_session import EngineSession
from runtime.token_choice import TokenChoice, device_params, sampling_bytes

_NO_SLOT = -1  # start from zeros
_F32_BYTES = 4
GREEDY = ParamsSampler(SamplingParams())


@dataclass(frozen=True)
class Shared:
    """What trunk and draft engine of all sequences have in common. plan: the memory of all."""

    stream: Stream
    control: ControlBlock
    choice: TokenChoice
    geometry: Geometry
    manifest: EngineManifest
    logits: DeviceBuffer  # of the trunk's last pass
    row_numbers: DeviceBuffer  # 0, 1, 2, ... int32
    under_way: UnderWay  # on the stream; uses control block and logits
    host: HostCopies
    slots: RecurrentSlots
    plan: MemoryPlan

    def sequence_memory(self, roles: Sequence[str]) -> SequenceMemory:
        """Of one more sequence. Raises ResourceError."""
        return SequenceMemory(self.stream, self.host, self.slots, self.manifest, self.geometry, roles)


class TensorrtTrunk:
    """The trunk of one sequence (see `runtime.engine.SharedTrunk`). Passes over prompts round otherwise than rounds."""

    resumes_anywhere = False

    def __init__(
        self, session: EngineSession, shared: Shared, memory: SequenceMemory, context_size: int, max_rows: int
    ) -> None:
        self.context_size, self.max_rows, self.memory = context_size, max_rows, memory
        self.prefill_chunk = shared.manifest.options.prefill_chunk
        self.plan, self.num_sequences = shared.plan, shared.plan.sequences
        self._session, self._shared = session, shared
        self._num_slots = shared.manifest.options.max_rows
        self._hidden, self._logits = memory.hidden, shared.logits
        self._sampling = sampling_bytes(GREEDY.params)
        self.start(GREEDY)

    def another(self) -> TensorrtTrunk:
        shared = self._shared
        check_one_more(shared.manifest, shared.geometry, self.memory.roles, *free_and_total_bytes())
        memory = shared.sequence_memory(self.memory.roles)
        return TensorrtTrunk(self._session, shared, memory, self.context_size, self.max_rows)

    def fixed_addresses(self) -> dict[str, int]:
        """What `EngineSession.bind` is to be told beside weights."""
        control = self._shared.control
        return {"position": control.at("position"), "slot": control.at("slot"), "logits": self._logits.address}

    @property
    def position(self) -> int:
        return self._position

    @property
    def hidden_rows(self) -> DeviceRows:
        """Where a verify pass of several rows leaves its hidden rows."""
        return self._hidden

    @property
    def logits(self) -> np.ndarray:
        """Of the last pass, [rows, V] f32, copied to the host. Not after a pass of another sequence."""
        shape = (self._rows_of_logits, self._shared.geometry.vocab_size)
        return self._shared.stream.read(self._logits.address, shape, np.float32)

    @property
    def chooses_on_device(self) -> bool:
        return self._on_device

    def start(self, sampler: Sampler) -> None:
        self._shared.under_way.settle()
        self._given, self._of_finite = sampler, of_finite(sampler)
        self._position, self._pending, self._slot = 0, 0, _NO_SLOT
        self._rows_of_logits = self._turn = self._num_sound = 0
        self._damage: NumericError | None = None  # of the row after those
        params = device_params(sampler)
        self._on_device = params is not None
        if params is not None:
            self._sampling = sampling_bytes(params)

    def prefill(self, tokens: Sequence[int]) -> Pass:
        count = len(tokens)
        self._shared.under_way.settle()
        assert 1 <= count <= self.prefill_chunk and not self._pending, (count, self._pending)
        control = self._shared.control
        self._point(control)
        control.row[0] = count - 1
        control.prompt[:count] = list(tokens)
        control.send()
        short = count <= self._num_slots
        hidden = self.memory.prefill_hidden
        addresses = {"tokens": control.at("prompt"), "rows": control.at("row"), "hidden.out": hidden.address}
        self._session.use(self.memory.addresses["trunk"])
        self._session.enqueue("decode" if short else "prefill", count, 1, addresses)
        self._choose(1, offset=count)
        control.fetch()
        self._shared.stream.synchronize()
        self._rows_of_logits = 1
        choices = self._choices(1, self._position + count)
        self._slot = count - 1 if short else 0
        self._position += count
        return Pass(choices, DeviceRows(hidden.address, count, self._hidden.width, hidden))

    def verify(self, tokens: Sequence[int]) -> Pass:
        return self.begin_verify(tokens).outcome()

    def begin_verify(self, tokens: Sequence[int]) -> Queued[Pass]:
        count = self.prepare_verify(tokens)
        rows = self._rows_of(count)
        self.memory.recorder.replay(("verify", count, rows.address), lambda: self._whole_verify(rows))

        def finish() -> Pass:
            self._shared.stream.synchronize()
            return self.finish_verify(rows)

        return self._shared.under_way.begin(finish)

    def commit(self, n_keep: int) -> None:
        assert 1 <= n_keep <= self._pending, (n_keep, self._pending)
        if n_keep > self._num_sound and self._damage is not None:
            raise self._damage
        self._slot = n_keep - 1
        self._position += n_keep
        self._pending = 0

    def prepare_verify(self, tokens: Sequence[int], num_drafts: int = 0) -> int:
        """Write what a verify pass of ``tokens`` and ``num_drafts`` more, which the device knows, reads; its rows."""
        self._shared.under_way.settle()
        count = len(tokens) + num_drafts
        assert 1 <= count <= self.max_rows and not self._pending, (count, self._pending)
        control = self._shared.control
        self._point(control)
        control.tokens[: len(tokens)] = list(tokens)
        return count

    def enqueue_verify(self, hidden: DeviceRows) -> None:
        """Queue the pass, its rows to ``hidden``, and its choices, without the copies to and from the device."""
        control, count = self._shared.control, len(hidden)
        addresses = {
            "tokens": control.at_token(0),
            "rows": self._shared.row_numbers.address,
            "hidden.out": hidden.address,
        }
        self._session.use(self.memory.addresses["trunk"])
        self._session.enqueue("decode", count, count, addresses)
        self._choose(count, offset=1)

    def finish_verify(self, hidden: DeviceRows) -> Pass:
        """The outcome, once the stream is idle."""
        self._rows_of_logits = count = len(hidden)
        choices = self._choices(count, self._position + 1, self._shared.control.tokens_back[:count])
        self._pending = count
        return Pass(choices, hidden)

    def time_verify(self, rows: int, repeats: int) -> list[float]:
        self.start(GREEDY)
        self.prepare_verify([0] * rows)
        hidden = self._rows_of(rows)
        key = "verify", rows, hidden.address
        times = self.memory.recorder.time_replays(key, lambda: self._whole_verify(hidden), repeats)
        self.start(GREEDY)
        return times

    def state(self) -> dict[str, np.ndarray]:
        """Copies of everything the committed tokens left behind, named and shaped as the canonical graph's state:
        GDN state, conv window, KV rows below ``position`` (as they are kept: float16, or int8 with their scales)."""
        copies: dict[str, np.ndarray] = {}
        self._settle()
        for prefix, (state, window) in self.memory.read_recurrent().items():
            fresh = self._slot == _NO_SLOT
            copies[f"{prefix}.state"] = np.zeros_like(state) if fresh else state
            copies[f"{prefix}.conv"] = np.zeros_like(window) if fresh else window
        for prefix, rows in self.memory.read_rows("trunk", self._position).items():
            for name, plane in zip(("key_cache", "value_cache"), rows, strict=True):
                copies[f"{prefix}.{name}"] = np.swapaxes(plane, 0, 1)[None]
        return copies

    def save_rows(self, first: int) -> SavedState:
        return self.memory.save_rows("trunk", first, self._position)

    def save_recurrent(self) -> SavedState:
        assert self._slot != _NO_SLOT
        self._settle()
        return self.memory.save_recurrent()

    def load(self, rows: Sequence[SavedState], recurrent: SavedState) -> None:
        assert not self._position and not self._pending, (self._position, self._pending)
        self._position = self.memory.load_rows("trunk", rows)
        self.memory.load_recurrent(recurrent)
        self._slot = 0

    def warm_up(self) -> None:
        """Run every size of pass once, so that none has anything left to load or compile while it is recorded."""
        for count in range(1, self._num_slots + 1):
            self._point(self._shared.control)
            self._whole_verify(self._rows_of(count))
            self._shared.stream.synchronize()
        self.start(self._given)
        self.prefill([0] * self.prefill_chunk)
        self.start(self._given)

    def _settle(self) -> None:
        """Have the state of the committed tokens whole, in slot 0."""
        self._shared.under_way.settle()
        assert not self._pending, self._pending
        if self._slot > 0:
            self.memory.settle(self._slot)
            self._slot = 0

    def _rows_of(self, count: int) -> DeviceRows:
        """Where the next verify pass leaves its hidden rows; one alone not where the pass before left its."""
        if count > 1:
            return self._hidden[:count]
        self._turn = (self._turn + 1) % len(self.memory.one_row)
        return self.memory.one_row[self._turn]

    def _whole_verify(self, hidden: DeviceRows) -> None:
        self._shared.control.send()
        self.enqueue_verify(hidden)
        self._shared.control.fetch()

    def _point(self, control: ControlBlock) -> None:
        control.slot[0], control.position[0] = self._slot, self._position
        control.trunk_sampling[:] = self._sampling

    def _choose(self, rows: int, offset: int) -> None:
        control, vocab = self._shared.control, self._shared.geometry.vocab_size
        sampling, position = control.at("trunk_sampling"), control.at("position")
        self._shared.choice.enqueue(self._logits.address, rows, vocab, sampling, position, offset, control.at_choices)

    def _choices(self, count: int, place: int, tokens: Sequence[int] = ()) -> list[int]:
        """The choices of the pass just done, the first for ``place``; tokens: of the pass, if it is to be verified."""
        choices = self._shared.control.choices_back[:count]
        damaged, self._damage = NO_CHOICE in choices, None
        if self._on_device and not damaged:
            return choices
        # The device looks at every logit, whoever chooses, but only says that there are bad ones: the host names them.
        places = place + np.arange(count)
        if damaged and self._given is not any_token:
            self._num_sound, self._damage = choices.index(NO_CHOICE), self._named(places)
        sampler = self._of_finite if damaged else self._given
        on_host = choices_that_count(sampler, self.logits, places, tokens)
        if not self._on_device:
            return on_host
        if any(own not in (NO_CHOICE, chosen) for own, chosen in zip(on_host, choices, strict=True)):
            raise EngineError(f"the device chose {choices}, the host {on_host}; build the plugins again")
        return choices

    def _named(self, places: np.ndarray) -> NumericError:
        """What is wrong with the logits of the pass just done."""
        try:
            check_logits(self.logits, places)
        except NumericError as damage:
            return damage
        raise EngineError("the device refused logits that are finite; build the plugins again")
