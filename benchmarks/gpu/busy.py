"""The share of time in which a device ran no kernel, from the intervals in which it ran one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

__all__ = ["idle_share", "kernel_intervals"]


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Of the time from the first beginning to the last end; intervals may overlap, as on several streams. nan without any.

    Example:
        >>> idle_share([(0, 2), (1, 4), (8, 10)])  # busy 0 to 4 and 8 to 10
        0.4
    """
    ordered = sorted(intervals)
    if not ordered:
        return float("nan")
    begin, until = ordered[0][0], ordered[0][0]
    busy = 0.0
    for start, end in ordered:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return 1 - busy / (until - begin)


def kernel_intervals(profile: Any) -> list[tuple[float, float]]:
    """Microseconds, of a finished ``torch.profiler.profile``. Copies and fills are not kernels, nor are ranges with a name, such
    as that of an optimizer's step, which the trace shows on the device, too."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
        and not getattr(event, "is_user_annotation", False)
    ]
