"""llama.cpp on the CPU, through the library in the wheel `llama-cpp-py-sync`: the peer that numbers are compared with.

Two contexts over one model, with a float32 KV cache and no flash attention: the trunk, and one of type MTP that holds
the NextN head. The head is reached through C++-mangled names, so the wheel is pinned.

Give dequantised files where numbers matter: for quantised weights ggml rounds activations to 8 bits, and then even one
row and a batch differ.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp_py_sync import _cffi_bindings as bindings
from numpy.typing import NDArray

from tests.peer import old_glibc

F32 = NDArray[np.float32]

_ffi = bindings.get_ffi()
_SET_HIDDEN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_GET_HIDDEN = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"
_LOG_ERROR = 4
_CONTEXT_MTP = 1


@cache
def _library() -> Any:
    """libllama, loaded once; the last of its errors go into what is raised, the rest of its log nowhere."""
    path = bindings._find_library()
    try:
        ctypes.CDLL(path)
    except OSError as error:
        if "GLIBC_" not in str(error):
            raise
        path = str(old_glibc.loadable_copy(Path(path)))
    library = _ffi.dlopen(path)
    library.llama_log_set(_on_log, _ffi.NULL)
    library.llama_backend_init()
    pointer, mangled = ctypes.c_void_p, ctypes.CDLL(path)
    set_hidden, get_hidden = mangled[_SET_HIDDEN], mangled[_GET_HIDDEN]
    set_hidden.argtypes, set_hidden.restype = [pointer, ctypes.c_bool, ctypes.c_bool], None
    get_hidden.argtypes, get_hidden.restype = [pointer, ctypes.c_int32], pointer
    _mangled.update(set_hidden=set_hidden, get_hidden=get_hidden)
    return library


_mangled: dict[str, Any] = {}
_errors: deque[str] = deque(maxlen=5)


@_ffi.callback("void(enum ggml_log_level, const char *, void *)")
def _on_log(level: int, text: Any, _: Any) -> None:
    if level == _LOG_ERROR:
        _errors.append(_ffi.string(text).decode("utf-8", "replace").strip())


def _refused(what: str) -> RuntimeError:
    said = " ".join(_errors)
    _errors.clear()
    return RuntimeError(f"llama.cpp {what}" + (f": {said}" if said else ""))


class LlamaCpp:
    """One model and one sequence.

    max_drafts: the deepest rollback of the trunk. mtp: load the NextN head. fast: llama.cpp's own
    defaults (weights repacked, KV in half precision, flash attention) instead of its exact ways. threads: more than
    there are idle cores is very slow.
    """

    def __init__(
        self,
        path: Path,
        n_ctx: int = 1024,
        threads: int = 1,
        max_drafts: int = 0,
        mtp: bool = True,
        fast: bool = False,
    ) -> None:
        self._lib = _library()
        self._size, self._threads, self._max_drafts, self._fast = n_ctx, threads, max_drafts, fast
        options = self._lib.llama_model_default_params()
        options.n_gpu_layers = 0
        options.load_mtp = mtp
        if not fast:
            options.use_extra_bufts = False
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), options)
        if self._model == _ffi.NULL:
            raise _refused(f"cannot load {path}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.vocab_size = self._lib.llama_vocab_n_tokens(self._vocab)
        self.hidden_size = self._lib.llama_model_n_embd(self._model)
        self._has_head = mtp and self._lib.llama_model_n_layer_nextn(self._model) > 0
        self.trunk = self._context(_ffi.NULL)
        self.head = self._context(self.trunk) if self._has_head else None

    def close(self) -> None:
        for context in (self.head, self.trunk):
            if context is not None:
                self._lib.llama_free(context)
        self._lib.llama_model_free(self._model)

    def _context(self, trunk: Any) -> Any:
        """A trunk context, or, given one, that of the head over it."""
        options = self._lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = self._size
        options.n_seq_max = 1
        options.n_threads = options.n_threads_batch = self._threads
        if not self._fast:
            options.type_k = options.type_v = 0  # float32
            options.flash_attn_type = 0
        options.no_perf = True
        if trunk == _ffi.NULL:
            options.n_rs_seq = self._max_drafts
        else:
            options.ctx_type, options.ctx_other = _CONTEXT_MTP, trunk
        context = self._lib.llama_init_from_model(self._model, options)
        if context == _ffi.NULL:
            raise _refused("cannot make a context")
        if self._has_head:
            _mangled["set_hidden"](int(_ffi.cast("uintptr_t", context)), True, False)
        return context

    def clear(self) -> None:
        """Forget the sequence."""
        for context in (self.trunk, self.head):
            if context is not None:
                self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)

    def forget(self, context: Any, position: int) -> None:
        """Drop everything at ``position`` and after."""
        if not self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(context), 0, position, -1):
            raise _refused(f"cannot roll back to {position}")

    def step(
        self, context: Any, tokens: Sequence[int], position: int, hidden: F32 | None = None, last_only: bool = False
    ) -> tuple[F32, F32 | None]:
        """Run tokens, for the head with a hidden row each.   -> logits [T, V] ([1, V] of the last), hidden [T, D]

        hidden is None for a model without a head, or when only the last row was wanted."""
        batch, kept = self._lib.llama_batch_ext_init(context), []
        try:
            for i, token in enumerate(tokens):
                row = self._lib.llama_batch_ext_add_token(batch, 0, int(token))
                # Time, height, width: text has all three alike.
                place = _ffi.new("llama_pos[4]", [position + i] * 3 + [0])
                kept.append(place)
                if row != i or not self._lib.llama_batch_ext_set_pos(batch, row, place):
                    raise RuntimeError(f"llama.cpp refused token {i} of a batch")
                wanted = not last_only or i == len(tokens) - 1
                self._lib.llama_batch_ext_set_output_logits(batch, row, wanted)
                if hidden is not None:
                    kept += self._set_hidden(batch, row, hidden[i])
            status = self._lib.llama_process(context, 1, batch)
            if status:
                raise RuntimeError(f"llama.cpp failed with status {status}")
        finally:
            self._lib.llama_batch_ext_free(batch)
        if last_only:
            return self._logits(context, -1)[None], None
        rows = range(len(tokens))
        logits = np.stack([self._logits(context, i) for i in rows])
        return logits, np.stack([self._hidden(context, i) for i in rows]) if self._has_head else None

    def _set_hidden(self, batch: Any, row: int, values: F32) -> list[Any]:
        """Give a row its hidden; what is returned must live as long as the batch."""
        values = np.ascontiguousarray(values, np.float32)
        view = _ffi.new("struct llama_embd *")
        view.data = _ffi.cast("const float *", values.ctypes.data)
        view.n_rows, view.n_embd = 1, self.hidden_size
        if not self._lib.llama_batch_ext_set_embd_state(batch, row, view[0]):
            raise RuntimeError(f"llama.cpp refused the hidden of row {row}")
        return [values, view]

    def _logits(self, context: Any, row: int) -> F32:
        values = self._lib.llama_get_logits_ith(context, row)
        return np.frombuffer(_ffi.buffer(values, 4 * self.vocab_size), np.float32).copy()

    def _hidden(self, context: Any, row: int) -> F32:
        address = _mangled["get_hidden"](int(_ffi.cast("uintptr_t", context)), row)
        if not address:
            raise RuntimeError(f"llama.cpp gives no hidden for row {row}")
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (self.hidden_size,)).copy()

    def trunk_rows(self, tokens: Sequence[int], chunk: int = 0) -> tuple[F32, F32]:
        """Logits [T, V] and hidden [T, D] of a fresh sequence, taken whole or ``chunk`` tokens at a time."""
        self.clear()
        step = chunk or len(tokens)
        parts = [self.step(self.trunk, tokens[i : i + step], i) for i in range(0, len(tokens), step)]
        return np.concatenate([logits for logits, _ in parts]), np.concatenate([_rows(hidden) for _, hidden in parts])

    def head_rows(self, tokens: Sequence[int], hidden_before: F32) -> F32:
        """The head's logits [T, V] over a fresh sequence of true rows."""
        self.clear()
        return self.step(self.head, tokens, 0, hidden_before)[0]

    def plain(self, prompt: Sequence[int], n: int) -> list[int]:
        """n greedy tokens."""
        self.clear()
        logits, _ = self.step(self.trunk, prompt, 0)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < n:
            logits, _ = self.step(self.trunk, tokens[-1:], len(prompt) + len(tokens) - 1)
            tokens.append(int(logits[0].argmax()))
        return tokens

    def speculate(self, prompt: Sequence[int], n: int, n_drafts: int) -> tuple[list[int], list[int]]:
        """llama.cpp's draft-mtp loop, greedy: n tokens, and how many drafts each round accepted.

        Every round drafts ``n_drafts`` tokens, the last ones too. Needs max_drafts >= n_drafts."""
        self.clear()
        logits, hidden = self.step(self.trunk, prompt, 0)
        pending = _rows(hidden)
        self.step(self.head, prompt, 0, np.concatenate([np.zeros_like(pending[:1]), pending[:-1]]))
        pending = pending[-1:]
        tokens, accepted, position = [int(logits[-1].argmax())], [], len(prompt)
        while len(tokens) < n:
            drafts = self._draft(tokens[-1], position, pending, n_drafts)
            self.forget(self.head, position)
            block = [tokens[-1], *drafts]
            logits, hidden = self.step(self.trunk, block, position)
            # The head's rows once more, now with the trunk's own hiddens.
            self.step(self.head, block, position, np.concatenate([pending, _rows(hidden)[:-1]]))
            choices = logits.argmax(axis=1).tolist()
            n_accept = 0
            while n_accept < n_drafts and choices[n_accept] == drafts[n_accept]:
                n_accept += 1
            accepted.append(n_accept)
            tokens += choices[: n_accept + 1]
            position += n_accept + 1
            pending = _rows(hidden)[n_accept : n_accept + 1]
            if n_accept < n_drafts:
                self.forget(self.trunk, position)
                self.forget(self.head, position)
        return tokens[:n], accepted

    def follow(self, text: Sequence[int], n_drafts: int) -> tuple[F32, list[int]]:
        """Logits [T, V] over a text from passes of its next token and ``n_drafts`` drafts, of which those stay that are
        the text's; and how many did, round by round. Needs max_drafts >= n_drafts."""
        self.clear()
        logits: list[F32] = []
        accepted: list[int] = []
        position, pending = 0, np.zeros((1, self.hidden_size), np.float32)
        while position < len(text):
            drafts = self._draft(text[position], position, pending, n_drafts)
            self.forget(self.head, position)
            block = [text[position], *drafts]
            got, hidden = self.step(self.trunk, block, position)
            self.step(self.head, block, position, np.concatenate([pending, _rows(hidden)[:-1]]))
            count = 0
            while count < n_drafts and position + count + 1 < len(text) and drafts[count] == text[position + count + 1]:
                count += 1
            logits.append(got[: count + 1])
            accepted.append(count)
            position += count + 1
            pending = _rows(hidden)[count : count + 1]
            if count < n_drafts:
                self.forget(self.trunk, position)
                self.forget(self.head, position)
        return np.concatenate(logits), accepted

    def tokenize(self, text: str) -> list[int]:
        """Token ids, special tokens recognised, nothing put in front."""
        raw = text.encode()
        ids = _ffi.new("llama_token[]", len(raw) + 8)
        n = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, len(raw) + 8, False, True)
        return [ids[i] for i in range(n)]

    def _draft(self, token: int, position: int, hidden: F32, n: int) -> list[int]:
        drafts: list[int] = []
        for i in range(n):
            logits, out = self.step(self.head, [token], position + i, hidden)
            token, hidden = int(logits[0].argmax()), _rows(out)
            drafts.append(token)
        return drafts


def _rows(hidden: F32 | None) -> F32:
    assert hidden is not None, "the model has no NextN head"
    return hidden
