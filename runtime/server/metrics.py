"""Counters for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from runtime.prefix_cache import PrefixCache
from runtime.scheduler import Scheduler
from runtime.spec_stats import SpecStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """One registry per server. Methods may be called by any thread."""

    def __init__(self, scheduler: Scheduler, prefixes: PrefixCache | None) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"nextn_{name}", text, labels, registry=registry)

        self._requests = counter("requests", "Generations that ended, by how", "finish_reason")
        self._refused = counter("refused", "Requests that were not served, by status", "status")
        self._prompt = counter("prompt_tokens", "Prompt tokens that were processed")
        self._cached = counter("cached_tokens", "Prompt tokens whose state was kept from earlier requests")
        self._predicted = counter("predicted_tokens", "Tokens that were generated")
        self._passes = counter("verify_passes", "Rounds")
        self._offered = counter("drafts_offered", "Drafts that were verified, by place in the round", "position")
        self._accepted = counter("drafts_accepted", "Drafts that were accepted, by place in the round", "position")
        self._first = Histogram(
            "nextn_first_token_seconds", "From arrival to the first token", buckets=_SECONDS, registry=registry
        )

        def gauge(name: str, text: str, read: object) -> None:
            Gauge(f"nextn_{name}", text, registry=registry).set_function(read)  # type: ignore[arg-type]

        gauge("sequences_active", "Sequences being generated", lambda: scheduler.num_active)
        gauge("sequences_max", "Sequences that can be generated at once", lambda: scheduler.num_slots)
        gauge("requests_queued", "Requests that wait for a sequence to end", lambda: scheduler.num_queued)
        gauge("prefix_cache_bytes", "Memory of kept state", lambda: prefixes.nbytes if prefixes else 0)
        gauge("prefix_cache_entries", "Prefixes that can be taken up", lambda: prefixes.num_saved if prefixes else 0)

    def ended(self, stats: SpecStats, reason: str, first_token_s: float | None) -> None:
        """A generation ended."""
        self._requests.labels(reason).inc()
        self._prompt.inc(stats.prompt_n)
        self._cached.inc(stats.cache_n)
        self._predicted.inc(stats.predicted_n)
        self._passes.inc(stats.verify_steps)
        for by_place, counts in ((self._offered, stats.offered), (self._accepted, stats.accepted)):
            for i, count in enumerate(counts):
                by_place.labels(str(i + 1)).inc(count)
        if first_token_s is not None:
            self._first.observe(first_token_s)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
