"""The few numbers that a pass reads from device memory, so that recorded passes serve any position, slot and token.

All are written on the host, into pinned memory, and travel in one copy at the start of a pass. What comes back are the
tokens of a verify pass, the trunk's choices and the head's guesses, side by side, in one copy as well. Read them when
the stream is idle, and write only then.
"""

from __future__ import annotations

from ctypes import Array, c_int32

from runtime.cuda import ALIGNMENT, DeviceBuffer, PinnedBuffer, Stream
from runtime.token_choice import SAMPLING_NBYTES

_I32 = 4
DRAFT_POSITION = ALIGNMENT // _I32  # numbers from one step's position to the next one's
MAX_STEPS = 8  # drafts in a row
_TOKENS = 32  # tokens of a pass that is verified, as many choices, and as many guesses


class ControlBlock:
    """Arrays on the host, and with the prefix ``at_`` the addresses of their device copies.

    Those of integers are ctypes arrays: for the few numbers of a round, between which the device waits, that takes less
    time than NumPy, and slices of them are lists."""

    def __init__(self, stream: Stream, prefill_chunk: int) -> None:
        self._stream = stream
        sizes = {
            "trunk_sampling": SAMPLING_NBYTES,
            "draft_sampling": SAMPLING_NBYTES,
            "slot": _I32,
            "position": _I32,
            "row": _I32,
            "draft_row": _I32,
            "guess_rows": _TOKENS * _I32,
            "zero": _I32,
            "draft_positions": MAX_STEPS * ALIGNMENT,
            "verified": 3 * _TOKENS * _I32,
            "prompt": prefill_chunk * _I32,
            "draft_tokens": prefill_chunk * _I32,
        }
        offsets, end = {}, 0
        for name, nbytes in sizes.items():
            offsets[name] = end
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = end
        self._host, self._device = PinnedBuffer(end), DeviceBuffer(end)
        self._host.array[:] = 0
        self._back = PinnedBuffer(sizes["verified"])
        self._at = {name: self._device.address + offset for name, offset in offsets.items()}

        def integers(name: str) -> Array[c_int32]:
            return (c_int32 * (sizes[name] // _I32)).from_address(self._host.address + offsets[name])

        def view(name: str) -> memoryview:
            return self._host.array.data[offsets[name] : offsets[name] + sizes[name]]

        self.trunk_sampling, self.draft_sampling = view("trunk_sampling"), view("draft_sampling")
        self.slot, self.position, self.row = integers("slot"), integers("position"), integers("row")
        self.draft_row, self.guess_rows = integers("draft_row"), integers("guess_rows")
        self.draft_positions = integers("draft_positions")  # that of a step at step * DRAFT_POSITION
        self.prompt, self.draft_tokens = integers("prompt"), integers("draft_tokens")
        self.tokens = integers("verified")  # and room for choices and guesses
        self.tokens_back, self.choices_back, self.guesses_back = (
            (c_int32 * _TOKENS).from_address(self._back.address + part * _TOKENS * _I32) for part in range(3)
        )

    def at(self, name: str) -> int:
        """Device address of an array."""
        return self._at[name]

    def at_draft_position(self, step: int) -> int:
        return self._at["draft_positions"] + step * ALIGNMENT

    def at_token(self, index: int) -> int:
        return self._at["verified"] + index * _I32

    @property
    def at_choices(self) -> int:
        return self.at_token(_TOKENS)

    @property
    def at_guesses(self) -> int:
        return self.at_token(2 * _TOKENS)

    def send(self) -> None:
        """Queue the copy to the device."""
        self._stream.to_device(self._device.address, self._host, self.nbytes)

    def fetch(self) -> None:
        """Queue the copy of tokens, choices and guesses to the host."""
        self._stream.to_host(self._back, self._at["verified"], self._back.nbytes)
