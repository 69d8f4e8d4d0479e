"""The same prompts to any server that speaks OpenAI's chat completions. What it tells of itself is taken: llama.cpp's
`timings` (ours sends them too), else the request is timed here."""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from engines.errors import EngineError
from runtime.evaluation.measure import Run
from runtime.evaluation.prompts import Prompt
from runtime.server_address import server_address

_PATH = "/v1/chat/completions"
_ERROR_CHARACTERS = 300
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Server:
    """url: with or without /v1. api_key: "" for none. Raises UsageError for what is no address."""

    url: str
    predict: int
    seed: int
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        server_address("--server", self.url)

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        """Name of the first model it serves. Raises EngineError when it does not answer."""
        reply = self._ask("/v1/models", None)
        models = reply.get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise EngineError(f"{self.base}/v1/models: names no model; is it a server of OpenAI's kind?")
        return str(models[0]["id"])

    def run(self, prompt: Prompt, number: int, temperature: float, model: str) -> Run:
        """One reply. Raises EngineError for an error or a reply without a text."""
        request: dict[str, Any] = {
            "model": model,
            "messages": list(prompt.messages),
            "max_tokens": self.predict,
            "temperature": temperature,
            "seed": self.seed,
            "stream": False,
        }
        if temperature > 0:  # what its own defaults would cut off
            request |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        began = time.perf_counter()
        reply = self._ask(_PATH, request)
        request_ms = 1000.0 * (time.perf_counter() - began)
        return self._run(reply, request_ms, prompt, number, temperature)

    def _run(self, reply: dict[str, Any], request_ms: float, prompt: Prompt, number: int, temperature: float) -> Run:
        try:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            timings = reply.get("timings") or {}
            tokens = int(timings.get("predicted_n") or usage["completion_tokens"])
            prompt_tokens = int(usage.get("prompt_tokens") or timings.get("prompt_n") or 0)
            ms = timings.get("predicted_ms")
            drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
            if timings and drafted is None:  # llama.cpp leaves them out where nothing was drafted
                drafted = accepted = 0
            rounds = timings.get("verify_steps")
            if rounds is None:  # the first token comes from the prompt's pass
                rounds = max(0, tokens - 1 - int(accepted or 0))
            numbers = (tokens, prompt_tokens, ms or 0, rounds, drafted or 0, accepted or 0)
            if not all(0 <= float(number) < math.inf for number in numbers):
                raise ValueError(f"numbers {numbers}")
            return Run(
                source=self.base,
                temperature=temperature,
                prompt=number,
                category=prompt.category,
                prompt_tokens=prompt_tokens,
                tokens=tokens,
                ms=request_ms if ms is None else float(ms),
                ms_kind="request" if ms is None else "rounds",
                rounds=int(rounds),
                drafted=None if drafted is None else int(drafted),
                accepted=None if accepted is None else int(accepted),
                finish_reason=str(choice.get("finish_reason") or ""),
                text=str((choice.get("message") or {}).get("content") or ""),
            )
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise EngineError(
                f"{self.base}{_PATH}: the reply to {prompt.place} is none of OpenAI's kind ({error!r})"
            ) from None

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.base + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                content = answer.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise EngineError(f"{self.base}{path}: its answer has more than {_MOST_BYTES >> 20} MiB")
            reply = json.loads(content)
        except urllib.error.HTTPError as error:
            text = " ".join(error.read(_MOST_BYTES).decode("utf-8", "replace").split())[:_ERROR_CHARACTERS]
            raise EngineError(f"{self.base}{path}: answers {error.code}: {text}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise EngineError(f"{self.base}{path}: does not answer ({reason}); is the server running?") from None
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.base}{path}: answers no JSON ({error})") from None
        if not isinstance(reply, dict):
            raise EngineError(f"{self.base}{path}: answers no JSON object")
        return reply
