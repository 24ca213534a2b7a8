"""Counters of the server, for Prometheus."""

from __future__ import annotations

from functools import partial
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvsift.server.jobs import ServerJob
from kvsift.server.supervisor import Supervisor

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAUGES = {
    "sequences": ("state", ("waiting", "prefilling", "decoding")),
    "pages": ("owner", ("free", "kept", "unshared")),
    "state_bytes": ("owner", ("kept", "pinned")),
}
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.999, 1)


class Metrics:
    """Counters of responses, tokens and times, and gauges of the engine process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.responses = Counter("kvsift_responses", "Responses.", ["route", "status"], registry=registry)
        self._tokens = Counter("kvsift_tokens", "Tokens: prompt, cached, generated.", ["kind"], registry=registry)
        self._bytes = Counter("kvsift_kv_bytes", "Bytes of KV in decode: read, dense.", ["kind"], registry=registry)
        self._cancelled = Counter("kvsift_cancelled", "Requests whose client left.", registry=registry)
        self._ttft = Histogram("kvsift_ttft_seconds", "To the first token.", buckets=SECONDS, registry=registry)
        self._total = Histogram("kvsift_request_seconds", "To the end.", buckets=SECONDS, registry=registry)
        self._density = Histogram("kvsift_density", "Visible share of contexts.", buckets=SHARES, registry=registry)

    def follow(self, supervisor: Supervisor) -> None:
        """Add gauges of an engine process, which are evaluated with each scrape."""
        numbers = {
            "kvsift_requests_waiting": lambda: supervisor.num_waiting,
            "kvsift_requests_running": lambda: supervisor.num_running,
            "kvsift_engine_restarts": lambda: supervisor.restarts,
            "kvsift_engine_ready": lambda: supervisor.state == "ready",
        }
        for name, number in numbers.items():
            gauge = Gauge(name, name.replace("_", " "), registry=self._registry)
            gauge.set_function(number)
        for kind, (label, values) in GAUGES.items():
            title = kind.replace("_", " ").capitalize()
            gauge = Gauge(f"kvsift_{kind}", f"{title} of the engine.", [label], registry=self._registry)
            for value in values:
                gauge.labels(value).set_function(partial(_gauge, supervisor, kind, value))

    def ended(self, job: ServerJob) -> None:
        """Count a request that has ended, or whose client left."""
        if not job.is_ended:
            self._cancelled.inc()
        if job.first_token:
            self._ttft.observe(job.first_token - job.submitted)
            self._total.observe(monotonic() - job.submitted)
        self._tokens.labels("prompt").inc(sum(job.prompt_tokens or ()))
        for answer in job.answers:
            self._tokens.labels("generated").inc(len(answer.ids))
            if answer.usage:
                self._tokens.labels("cached").inc(answer.usage["cached_tokens"])
                self._bytes.labels("read").inc(answer.usage["bytes_read"])
                self._bytes.labels("dense").inc(answer.usage["bytes_dense"])
                if answer.usage["density"] is not None:
                    self._density.observe(answer.usage["density"])

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


def _gauge(supervisor: Supervisor, kind: str, value: str) -> int:
    return supervisor.gauges.get(kind, {}).get(value, 0)
