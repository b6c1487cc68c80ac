import math
from types import SimpleNamespace

import pytest
from gpu.busy import idle_share, kernel_intervals
from torch.autograd import DeviceType


def test_gaps_between_kernels_are_idle_and_kernels_that_overlap_count_once() -> None:
    assert idle_share([(10, 12), (14, 16), (17, 20)]) == pytest.approx(3 / 10)
    assert idle_share([(1, 4), (0, 2), (2, 3), (8, 10)]) == pytest.approx(4 / 10)
    assert math.isnan(idle_share([]))


def test_copies_named_ranges_and_work_of_the_processor_are_not_kernels() -> None:
    def event(name: str, begin: float, end: float, on: DeviceType = DeviceType.CUDA, annotates: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=begin, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=on, is_user_annotation=annotates)

    events = [
        event("sgemm", 0, 2),
        event("Memcpy HtoD (Pinned -> Device)", 2, 4),
        event("Memset (Device)", 4, 5),
        event("Optimizer.step#SGD.step", 0, 10, annotates=True),
        event("aten::mm", 0, 10, on=DeviceType.CPU),
    ]
    assert kernel_intervals(SimpleNamespace(events=lambda: events)) == [(0, 2)]
