"""A loaded model, ready to generate: what the command lines and the server share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engines.errors import EngineError, UsageError
from engines.manifest import Manifest, load_manifest
from runtime.controller import AdaptiveDraft, Controller, FixedDraft
from runtime.engine import SEQUENCES_DEFAULT, DraftEngine, EngineLimits, Sampler, TrunkEngine
from runtime.host_memory import available_bytes
from runtime.pass_costs import measure_pass_costs
from runtime.sampling import ParamsSampler, SamplingParams
from runtime.speculative import SpecStats, generate
from runtime.tokenizer import Tokenizer

BACKENDS = ("auto", "onnxruntime", "tensorrt")
SPEC_TYPES = ("auto", "none", "draft-mtp")
DRAFT_N_DEFAULT = 3
_ID_DIGITS_MAX = 32  # far more than any vocabulary needs, far fewer than Python refuses
DRAFT_N_LIMIT = 64  # each draft asks for one more row of every buffer


class _OpenEngines(Protocol):
    def __call__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        context_size: int,
        threads: int,
        max_rows: int,
        draft: bool,
        num_sequences: int,
    ) -> tuple[TrunkEngine, DraftEngine | None]: ...


@dataclass(frozen=True)
class SpecOptions:
    """Drafting as asked for: a type of SPEC_TYPES and the most drafts of a round."""

    spec_type: str = "auto"
    draft_n_max: int = DRAFT_N_DEFAULT

    def validate(self) -> None:
        if self.spec_type not in SPEC_TYPES:
            raise UsageError(f"--spec-type {self.spec_type}: wanted one of {', '.join(SPEC_TYPES)}")
        if not 0 <= self.draft_n_max <= DRAFT_N_LIMIT:
            raise UsageError(
                f"--spec-draft-n-max {self.draft_n_max}: wanted 0 (no drafting) to {DRAFT_N_LIMIT} drafts a round"
            )

    @property
    def wants_draft(self) -> bool:
        return self.spec_type != "none" and self.draft_n_max > 0


@dataclass
class Session:
    """One sequence at a time over one pair of engines. spec_type: "draft-mtp" or "none", what really runs."""

    folder: Path
    manifest: Manifest
    backend: str
    spec_type: str
    context_size: int
    trunk: TrunkEngine
    draft: DraftEngine | None
    tokenizer: Tokenizer
    controller: Controller

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        stats: SpecStats,
        cancelled: Callable[[], bool] = lambda: False,
        plain: bool = False,
        heed_ends: bool = True,
        controller: Controller | None = None,
    ) -> Generator[int, None, None]:
        """Yield the tokens after ``prompt`` (`runtime.speculative.generate`).

        plain: without the draft head. heed_ends False: end tokens are text like any other. controller: instead of the
        session's.
        """
        return generate(
            self.trunk,
            None if plain else self.draft,
            prompt,
            sampler=make_sampler(params),
            controller=controller or self.controller,
            max_tokens=max_tokens,
            end_token_ids=self.tokenizer.end_token_ids if heed_ends else (),
            context_size=self.context_size,
            stats=stats,
            cancelled=cancelled,
            message_ends=self.tokenizer.end_token_ids,
        )


def open_session(
    folder: Path,
    *,
    backend: str = "auto",
    context_size: int | None = None,
    threads: int = 0,
    spec: SpecOptions | None = None,
    sequences: int = 1,
    kept_bytes: int = 0,
) -> Session:
    """Load an exported folder.

    context_size: tokens that prompt and text together may have; 0: what model and engines hold; None: as many of these
    as there is memory for, when ``sequences`` run at once and ``kept_bytes`` are taken for something else. threads 0:
    one per core. sequences 0: SEQUENCES_DEFAULT, or as many of these as a GPU has memory for. Raises UsageError,
    ResourceError, or EngineError when the folder or the backend is not usable.
    """
    spec = spec or SpecOptions()
    spec.validate()
    cores = os.cpu_count() or 1
    if not 0 <= threads <= cores:  # more than cores only wait for each other
        raise UsageError(f"--threads {threads}: wanted 1 to {cores}, the cores of this machine, or 0 for one per core")
    manifest = load_manifest(folder)
    manifest.verify(folder)
    _check_context_size(context_size, manifest)
    if spec.spec_type == "draft-mtp" and not manifest.has_draft:
        raise UsageError(f"{manifest.model_name} has no NextN draft head; use --spec-type none or auto")
    chosen, open_engines, limits_of = _backend(backend, manifest)
    limits = limits_of(folder)
    draft = spec.wants_draft and manifest.has_draft
    if chosen == "onnxruntime":
        context_size = _context_in_memory(manifest, context_size, draft, sequences or SEQUENCES_DEFAULT, kept_bytes)
    context_size = context_size or int(min(limits.context, manifest.geometry.context_length))
    draft_n_max = spec.draft_n_max if spec.wants_draft else 0
    if spec.spec_type == "auto":  # at most as many as asked for
        draft_n_max = int(min(draft_n_max, limits.draft_n))
    trunk, head = open_engines(
        folder,
        manifest,
        context_size=context_size,
        threads=threads,
        max_rows=draft_n_max + 1,
        draft=draft,
        num_sequences=sequences,
    )
    controller: Controller = FixedDraft(draft_n_max)
    if spec.spec_type == "auto" and head is not None:
        controller = AdaptiveDraft(draft_n_max, measure_pass_costs(trunk, head, draft_n_max))
    return Session(
        folder=folder,
        manifest=manifest,
        backend=chosen,
        spec_type="none" if head is None else "draft-mtp",
        context_size=context_size,
        trunk=trunk,
        draft=head,
        tokenizer=Tokenizer(folder, manifest.tokenizer),
        controller=controller,
    )


def make_sampler(params: SamplingParams) -> Sampler:
    """Token choice with resolved ``params``, for trunk and draft head alike."""
    return ParamsSampler(params)


def token_id(text: str) -> int | None:
    """The number that plain decimal digits stand for; None for anything else that `int` would take."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _ID_DIGITS_MAX else None


def check_prompt_ids(ids: Sequence[int], manifest: Manifest) -> None:
    """Raise UsageError at the first id that the model does not know."""
    vocab_size = manifest.geometry.vocab_size
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise UsageError(f"token {place} of the prompt is {token}; this model has ids 0 to {vocab_size - 1}")


def _check_context_size(asked: int | None, manifest: Manifest) -> None:
    """The context in tokens. A file whose rope is scaled says so in its own context length: that is the bound."""
    longest = manifest.geometry.context_length
    if asked is not None and not 0 <= asked <= longest:
        raise UsageError(
            f"--ctx-size {asked}: {manifest.model_name} was made for 1 to {longest} tokens (0: all of them, auto: what "
            "fits the memory)"
        )


def _context_in_memory(manifest: Manifest, asked: int | None, draft: bool, sequences: int, kept_bytes: int) -> int:
    """The context that ONNX Runtime's engines are to have. They take memory as texts grow: what would not last is said
    before anything is loaded. Raises ResourceError."""
    from runtime.onnx_memory import plan_onnx_memory

    longest = manifest.geometry.context_length
    available = available_bytes()
    if available is None:  # a system that does not tell
        return asked or longest
    plan = plan_onnx_memory(manifest, asked or longest, draft=draft, sequences=sequences, other=kept_bytes)
    fits = plan.largest_context(available)
    if asked is None and fits:
        return min(longest, fits)
    plan.check(available)
    return plan.context


def _backend(asked: str, manifest: Manifest) -> tuple[str, _OpenEngines, Callable[[Path], EngineLimits]]:
    """Its name, what opens its engines, and what tells the limits of a folder's engines."""
    if asked not in BACKENDS:
        raise UsageError(f"--backend {asked}: wanted one of {', '.join(BACKENDS)}")
    chosen = manifest.target if asked == "auto" else asked
    if chosen == "onnxruntime":
        if manifest.target != chosen:
            raise EngineError(
                f"{manifest.model_name} was exported for {manifest.target}; export it with --target onnxruntime"
            )
        if importlib.util.find_spec("onnxruntime") is None:
            raise EngineError("onnxruntime is not installed; pip install onnxruntime (needs Python 3.11 or newer)")
        from runtime.engine_onnxruntime import open_engines

        return chosen, open_engines, lambda folder: EngineLimits()
    if manifest.target != chosen:
        raise EngineError(
            f"{manifest.model_name} was exported for {manifest.target}; build tensorrt engines with `python -m "
            "engines.build MODEL.gguf -o DIR` and give DIR, or use --backend onnxruntime"
        )
    from runtime import engine_tensorrt

    return chosen, engine_tensorrt.open_engines, engine_tensorrt.engine_limits
