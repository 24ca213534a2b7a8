"""When host and device were busy during a step, and for how long both were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvsift.runtime.split import HOST_SPAN

Spans = Sequence[tuple[float, float]]  # from and until

SHOWN = 80  # spans of a timeline, from its start


def union(spans: Spans) -> list[tuple[float, float]]:
    """The same time, in spans that do not touch."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Spans) -> float:
    """How much time that is, what is in several spans once."""
    return sum(end - begin for begin, end in union(spans))


def overlap(one: Spans, other: Spans) -> float:
    """How much time is in a span of each."""
    return length(one) + length(other) - length([*one, *other])


def timeline(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Of one step: seconds of device kernels, of host attention, and of both at the same time; empty without a GPU,
    where the host does one after the other."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
    host, kernels = [], []
    for event in recorded.events():
        span = (event.time_range.start, event.time_range.end)
        if event.name == HOST_SPAN and event.device_type == torch.autograd.DeviceType.CPU:
            host.append(span)
        elif event.device_type == torch.autograd.DeviceType.CUDA and "kvsift" not in event.name:
            kernels.append(span)
    return summary(host, kernels)


def summary(host: Spans, kernels: Spans) -> dict[str, Any]:
    """Of spans in microseconds: seconds of each and of both, and the first of them in order."""
    begun = min((span[0] for span in [*host, *kernels]), default=0.0)
    until = max((span[1] for span in sorted(host)[:3]), default=0.0)
    spans = sorted([("host", *span) for span in host] + [("device", *span) for span in kernels], key=lambda s: s[1])
    return {
        "host_s": length(host) / 1e6,
        "device_s": length(kernels) / 1e6,
        "both_s": overlap(host, kernels) / 1e6,
        "timeline_us": [[who, round(a - begun, 1), round(b - begun, 1)] for who, a, b in spans if a <= until][:SHOWN],
    }
