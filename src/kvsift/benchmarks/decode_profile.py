"""Where the time of a step goes: kernels by name, from torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME_CHARACTERS = 100  # of templates with all their arguments, this much tells them apart


def kernel_times(run: Callable[[], None], steps: int) -> list[dict[str, Any]]:
    """Kernels of ``run``, which makes so many steps: launches and seconds per step, slowest first.

    Kernels that start before the one in front of them ends overlap, so their sum may exceed the step.
    """
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    launches: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in found.events() or []:
        if event.device_type == DeviceType.CUDA:
            name = event.name[:NAME_CHARACTERS]
            launches[name] += 1
            seconds[name] += event.time_range.elapsed_us() / 1e6
    slowest = sorted(seconds, key=lambda name: -seconds[name])
    return [
        {"name": name, "launches": launches[name] / steps, "seconds": float(f"{seconds[name] / steps:.4g}")}
        for name in slowest
    ]
