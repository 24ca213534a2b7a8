"""Busy times of host and device during a step, and their overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvsift.stores.split import HOST_SPAN

Spans = Sequence[tuple[float, float]]  # (start, stop)

SHOWN = 80  # spans of a timeline, from its start


def union(spans: Spans) -> list[tuple[float, float]]:
    """Return the same time in spans that do not touch."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def length(spans: Spans) -> float:
    """Return the time in at least one span."""
    return sum(stop - start for start, stop in union(spans))


def overlap(one: Spans, other: Spans) -> float:
    """Return the time in a span of each."""
    return length(one) + length(other) - length([*one, *other])


def timeline(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return seconds of device kernels, of host attention, and of both at once in one step; nothing without a GPU."""
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
    """Return seconds of each and of both, from microseconds, and the first spans in order."""
    first = min((span[0] for span in [*host, *kernels]), default=0.0)
    last = max((span[1] for span in sorted(host)[:3]), default=0.0)
    spans = sorted([("host", *span) for span in host] + [("device", *span) for span in kernels], key=lambda s: s[1])
    return {
        "host_s": length(host) / 1e6,
        "device_s": length(kernels) / 1e6,
        "both_s": overlap(host, kernels) / 1e6,
        "timeline_us": [[who, round(a - first, 1), round(b - first, 1)] for who, a, b in spans if a <= last][:SHOWN],
    }
