"""The draft head on TensorRT, its drafts chained on the device, and whole rounds of drafting and verifying at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.errors import NumericError
from runtime.control_block import DRAFT_POSITION, MAX_STEPS
from runtime.cuda import DeviceBuffer, Event
from runtime.device_rows import DeviceRows, RowPool
from runtime.draft_tokens import DraftTokens
from runtime.engine import NO_CHOICE, DraftedPass, Sampler, SavedState, of_finite
from runtime.queued_work import Queued
from runtime.tensorrt_sequence import SequenceMemory
from runtime.tensorrt_session import EngineSession
from runtime.tensorrt_trunk import GREEDY, Shared, TensorrtTrunk
from runtime.token_choice import device_params, sampling_bytes

_F32_BYTES = 4


class DraftBuffers:
    """What the heads of all sequences share: nothing in here outlives a call, but rows of ``pool``."""

    def __init__(self, shared: Shared, tokens: DraftTokens) -> None:
        options, width = shared.manifest.options, shared.geometry.hidden_size
        self.tokens = tokens
        self.num_guesses = max(profile.max_rows for profile in shared.manifest.engines["draft"].profiles)
        self.logits = DeviceBuffer(self.num_guesses * tokens.count * _F32_BYTES)
        self.ids = None if tokens.ids is None else shared.stream.upload(tokens.ids)
        # A step reads the last row that the step before wrote, so they take turns.
        self.hidden_out = [DeviceBuffer(n * width * _F32_BYTES) for n in (options.prefill_chunk, 1)]
        taken = DeviceBuffer(options.max_rows * width * _F32_BYTES)
        self.taken = DeviceRows(taken.address, options.max_rows, width, taken)
        self.pool = RowPool(shared.stream, width)
        self.events = Event(), Event(), Event()


class TensorrtDraft:
    """The NextN head of one sequence (see `runtime.engine.SharedDraft`). Its own KV cache; rows come from the trunk."""

    def __init__(self, session: EngineSession, shared: Shared, memory: SequenceMemory, buffers: DraftBuffers) -> None:
        self.prefill_chunk = shared.manifest.options.prefill_chunk
        self._session, self._shared, self._memory, self._buffers = session, shared, memory, buffers
        self._num_rows = shared.manifest.options.max_rows  # of the decode profile
        self._row_nbytes = shared.geometry.hidden_size * _F32_BYTES
        self._tokens, self._taken, self._pool = buffers.tokens, buffers.taken, buffers.pool
        self._sampling = sampling_bytes(GREEDY.params)
        self._num_logits = self._position = 0
        self.start(GREEDY)

    def another(self, trunk: TensorrtTrunk) -> TensorrtDraft:
        return TensorrtDraft(self._session, self._shared, trunk.memory, self._buffers)

    def save_rows(self, first: int) -> SavedState:
        return self._memory.save_rows("draft", first, self._position)

    def load(self, rows: Sequence[SavedState]) -> None:
        assert not self._position, self._position
        self._position = self._memory.load_rows("draft", rows)

    def fixed_addresses(self) -> dict[str, int]:
        """What `EngineSession.bind` is to be told beside weights."""
        return {"logits": self._buffers.logits.address}

    @property
    def position(self) -> int:
        return self._position

    @property
    def logits(self) -> np.ndarray:
        """Of the last step, [1, V] f32 (of guesses: a row each), copied to the host; -inf where the head cannot tell.
        Not after a step of another sequence's head."""
        return self._tokens.whole_rows(self._read_logits())

    def start(self, sampler: Sampler) -> None:
        self._shared.under_way.settle()
        self._given, self._sampler = sampler, of_finite(sampler, self._tokens.whole_rows)
        self._position = self._num_logits = 0
        params = device_params(sampler)
        self._on_device = params is not None
        if params is not None:
            self._sampling = sampling_bytes(params)

    def prefill(self, tokens: Sequence[int], hidden: DeviceRows) -> None:
        count = len(tokens)
        assert 1 <= count <= self.prefill_chunk and len(hidden) == count, (count, len(hidden))
        self._write(tokens)
        self._shared.control.send()
        self._step(0, count, self._shared.control.at("draft_tokens"), hidden.address)
        self._shared.stream.synchronize()
        self._num_logits = 1
        self._position += count

    def draft(self, tokens: Sequence[int], hidden: DeviceRows, n: int) -> np.ndarray:
        tokens, hidden = self._shortened(tokens, hidden)
        if not self._on_device:
            return self._draft_by_host(tokens, hidden, n)
        count = len(tokens)
        self._write(tokens, steps=n)
        self._shared.stream.on_device(self._taken.address, hidden.address, hidden.nbytes)
        self._memory.recorder.replay(("draft", count, n), lambda: self._whole_draft(count, n))
        self._shared.stream.synchronize()
        return np.array(self._finish_draft(count, n), np.int64)

    def guess(self, tokens: Sequence[int], hidden: DeviceRows) -> np.ndarray | None:
        if not self._on_device:
            return None
        guesses = self._guesses(tokens, hidden)
        if NO_CHOICE in guesses.tolist():
            raise self._not_finite(self._position - len(guesses) + 1 + guesses.tolist().index(NO_CHOICE))
        return guesses

    def _guesses(self, tokens: Sequence[int], hidden: DeviceRows) -> np.ndarray:
        count, control = len(tokens), self._shared.control
        assert 1 <= count <= self.prefill_chunk and len(hidden) == count, (count, len(hidden))
        rows = min(count, self._buffers.num_guesses)
        self._write(tokens)
        control.guess_rows[:rows] = list(range(count - rows, count))
        control.send()
        address = control.at("draft_tokens")
        self._enqueue("prefill", 0, count, address, hidden.address, rows=control.at("guess_rows"), num_rows=rows)
        self._choose(rows, 0, count - rows + 1, control.at_guesses)
        control.fetch()
        self._shared.stream.synchronize()
        self._num_logits = rows
        self._position += count
        return np.array(control.guesses_back[:rows], np.int64)

    def begin_round(
        self, trunk: TensorrtTrunk, tokens: Sequence[int], hidden: DeviceRows, n: int
    ) -> Queued[DraftedPass] | None:
        """`draft`, and the trunk's verify pass of the last token and the drafts, in one recorded graph.

        None: not possible, because a sampler needs the host."""
        assert trunk.memory is self._memory
        if not (self._on_device and trunk.chooses_on_device):
            return None
        tokens, hidden = self._shortened(tokens, hidden)
        count = len(tokens)
        self._write(tokens, steps=n)
        trunk.prepare_verify(tokens[-1:], num_drafts=n)
        # Mostly the rows still lie where the last verify pass left them.
        rows = trunk.hidden_rows
        if hidden.address != rows.address:
            self._shared.stream.on_device(rows.address, hidden.address, hidden.nbytes)
        self._memory.recorder.replay(("round", count, n), lambda: self._whole_round(trunk, count, n))
        verified = rows[: n + 1]

        def finish() -> DraftedPass:
            self._shared.stream.synchronize()
            drafts = self._finish_draft(count, n)
            result = trunk.finish_verify(verified)
            began, drafted, ended = self._buffers.events
            share = drafted.ms_since(began) / max(ended.ms_since(began), 1e-6)
            return DraftedPass(drafts, result, share)

        return self._shared.under_way.begin(finish)

    def zero_hidden(self) -> DeviceRows:
        return self._pool.zeros()

    def join(self, parts: Sequence[DeviceRows]) -> DeviceRows:
        return self._pool.joined(parts)

    def put_aside(self, kept: DeviceRows | None, rows: DeviceRows) -> DeviceRows:
        return self._pool.extended(kept, rows, capacity=self.prefill_chunk + self._num_rows)

    def time_draft(self, n: int, repeats: int) -> list[float]:
        self.start(GREEDY)
        self._write([0], steps=n)
        self._shared.stream.clear(self._taken.address, self._row_nbytes)
        times = self._memory.recorder.time_replays(("draft", 1, n), lambda: self._whole_draft(1, n), repeats)
        self.start(GREEDY)
        return times

    def warm_up(self) -> None:
        """Run every size of pass once (see `TensorrtTrunk.warm_up`)."""
        rows = self._pool.joined([self.zero_hidden()] * self.prefill_chunk)
        for count in (*range(1, self._num_rows + 1), self.prefill_chunk):
            self.prefill([0] * count, rows[:count])
            self.start(self._given)
        self._guesses([0] * self.prefill_chunk, rows)
        self.start(self._given)

    def _shortened(self, tokens: Sequence[int], hidden: DeviceRows) -> tuple[Sequence[int], DeviceRows]:
        """The rows to draft after, at most as many as the decode profile takes; those before them are taken here."""
        assert 1 <= len(tokens) <= self.prefill_chunk and len(hidden) == len(tokens), (len(tokens), len(hidden))
        if len(tokens) <= self._num_rows:
            return tokens, hidden
        self.prefill(tokens[:-1], hidden[: len(tokens) - 1])
        return tokens[-1:], hidden[len(tokens) - 1 :]

    def _write(self, tokens: Sequence[int], steps: int = 1) -> None:
        """Rows for the next step, and the positions of the steps after it."""
        self._shared.under_way.settle()
        control, count = self._shared.control, len(tokens)
        control.draft_sampling[:] = self._sampling
        control.draft_tokens[:count] = list(tokens)
        control.draft_row[0] = count - 1
        positions, position = control.draft_positions, self._position
        for step in range(steps):
            positions[step * DRAFT_POSITION] = position + (count + step - 1 if step else 0)

    def _whole_draft(self, count: int, n: int) -> None:
        self._shared.control.send()
        self._steps(count, n, self._taken.address)
        self._shared.control.fetch()

    def _whole_round(self, trunk: TensorrtTrunk, count: int, n: int) -> None:
        stream, (began, drafted, ended) = self._shared.stream, self._buffers.events
        self._shared.control.send()
        stream.record(began)
        self._steps(count, n, trunk.hidden_rows.address)
        stream.record(drafted)
        trunk.enqueue_verify(trunk.hidden_rows[: n + 1])
        stream.record(ended)
        self._shared.control.fetch()

    def _steps(self, count: int, n: int, hidden: int) -> None:
        """Queue n chained steps, the first over ``count`` rows; draft i becomes token i of the verify pass."""
        assert 1 <= n <= MAX_STEPS, n
        control, tokens = self._shared.control, self._shared.control.at("draft_tokens")
        for step in range(n):
            hidden = self._step(step, count, tokens, hidden)
            tokens = control.at_token(step + 1)
            self._choose(1, step, count, tokens)
            count = 1

    def _choose(self, rows: int, step: int, offset: int, tokens: int) -> None:
        """Queue the choice of ``rows`` tokens, for places from ``offset`` past the position of ``step`` on."""
        control, ids = self._shared.control, self._buffers.ids.address if self._buffers.ids else 0
        sampling, position = control.at("draft_sampling"), control.at_draft_position(step)
        logits = self._buffers.logits.address
        self._shared.choice.enqueue(logits, rows, self._tokens.count, sampling, position, offset, tokens, ids)

    def _step(self, step: int, count: int, tokens: int, hidden: int) -> int:
        """Queue one pass; address of its last row's hidden."""
        rows = self._shared.control.at("zero" if step else "draft_row")
        return self._enqueue("decode" if count <= self._num_rows else "prefill", step, count, tokens, hidden, rows)

    def _enqueue(
        self, profile: str, step: int, count: int, tokens: int, hidden: int, rows: int, num_rows: int = 1
    ) -> int:
        """Queue one pass of a profile, with logits of ``num_rows`` rows; address of its last row's hidden."""
        out = self._buffers.hidden_out[step % 2].address
        addresses = {
            "tokens": tokens,
            "position": self._shared.control.at_draft_position(step),
            "rows": rows,
            "hidden": hidden,
            "hidden.out": out,
        }
        self._session.use(self._memory.addresses["draft"])
        self._session.enqueue(profile, count, num_rows, addresses)
        return out + (count - 1) * self._row_nbytes

    def _read_logits(self) -> np.ndarray:
        shape = (self._num_logits, self._tokens.count)
        return self._shared.stream.read(self._buffers.logits.address, shape, np.float32)

    def _finish_draft(self, count: int, n: int) -> list[int]:
        self._num_logits = 1
        self._position += count
        drafts = self._shared.control.tokens_back[1 : n + 1]
        if drafts[0] == NO_CHOICE:
            raise self._not_finite(self._position)
        return drafts

    def _not_finite(self, position: int) -> NumericError:
        return NumericError(
            f"the draft head's logits for position {position} are not finite; the model file or its engine is damaged"
        )

    def _draft_by_host(self, tokens: Sequence[int], hidden: DeviceRows, n: int) -> np.ndarray:
        """As `draft`, each token chosen by the sampler from a copy of the logits."""
        drafts: list[int] = []
        stream, true_rows = self._shared.stream, len(tokens)
        began, address = self._position, hidden.address
        for _ in range(n):
            self._write(tokens)
            self._shared.control.send()
            rows = DeviceRows(address, len(tokens), hidden.width, hidden)
            last = self._step(0, len(tokens), self._shared.control.at("draft_tokens"), rows.address)
            self._num_logits = 1
            self._position += len(tokens)
            try:
                tokens = [int(self._sampler(self._read_logits(), np.array([self._position]))[0])]
            except NumericError:
                if not drafts:
                    raise
                drafts += [NO_CHOICE] * (n - len(drafts))
                break
            drafts.append(tokens[0])
            address = self._taken.address
            stream.on_device(address, last, self._row_nbytes)
        self._position = began + true_rows
        return np.array(drafts, np.int64)
