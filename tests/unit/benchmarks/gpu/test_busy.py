import math

import pytest
from gpu.busy import idle_share


def test_gaps_between_kernels_are_idle() -> None:
    assert idle_share([(10, 12), (14, 16), (17, 20)]) == pytest.approx(3 / 10)


def test_kernels_that_overlap_count_once() -> None:
    assert idle_share([(1, 4), (0, 2), (2, 3), (8, 10)]) == pytest.approx(4 / 10)


def test_without_a_kernel_it_is_not_known() -> None:
    assert math.isnan(idle_share([]))
