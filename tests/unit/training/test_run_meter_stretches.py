"""A stretch of an epoch, after which a controller is asked, is measured by itself; with fakes as in `meters`."""

import pytest
import torch
from meters import Loader, Run, saved


def test_a_stretch_is_measured_by_itself_and_the_epoch_as_a_whole():
    run = Run(Loader(workers=0))
    run.meter.begin_epoch(run.loader)
    for wait, work in [(0.0, 1.0)] * 4 + [(1.0, 1.0)] * 6:
        run.step(wait=wait, work=work)
    judged, costs = run.meter.end_stretch(run.loader)
    assert (judged.steps, judged.idle_fraction) == (10, pytest.approx(6 / 16))
    assert (costs.source_seconds, costs.device_seconds) == (pytest.approx(0.8), pytest.approx(1.0))
    for _ in range(5):
        run.step(wait=3.0, work=1.0, stages=(4.0, 0.2, 0.1))
    judged, costs = run.meter.end_stretch(run.loader)
    assert (judged.steps, judged.idle_fraction) == (5, pytest.approx(0.75))
    assert costs.source_seconds == pytest.approx(8.0), "of these steps alone"
    for _ in range(2):
        run.step(wait=0.0, work=1.0)
    measures = run.meter.end_epoch(run.loader)
    assert (measures.whole.steps, measures.judged.steps) == (17, 2)
    assert measures.whole.idle_fraction == pytest.approx((6 + 15) / (6 + 15 + 17))
    assert measures.judged.idle_fraction == 0
    assert run.epoch(4).judged.steps == 4, "the next epoch begins anew"


def test_a_stretch_is_whole_rounds_of_the_workers():
    """Three of them deliver at the same time: each third step waits. The first batch of each is not judged."""
    run = Run(Loader(workers=3))
    run.meter.begin_epoch(run.loader)
    for wait in [0.0, 0.0, 0.0, *[6.0, 0.0, 0.0] * 3, 6.0]:
        run.step(wait=wait, work=1.0)
    judged, _ = run.meter.end_stretch(run.loader)
    assert (judged.steps, judged.idle_fraction) == (9, pytest.approx(18 / 27))
    assert run.meter.end_stretch(run.loader)[0] is None, "no step is in two of them"


def test_rounds_are_those_of_the_rank_with_the_most_workers():
    """All ranks have to judge the same steps, and all wait for that rank."""
    run = Run(Loader(workers=1))
    run.module.all_gather = lambda values: torch.stack([values, torch.tensor([0.0, 3.0])])
    run.meter.begin_epoch(run.loader)
    run.module.all_gather = run.all_gather
    for wait in [0.0, 0.0, *[6.0, 0.0, 0.0] * 3]:
        run.step(wait=wait, work=1.0)
    judged, _ = run.meter.end_stretch(run.loader)
    assert (judged.steps, judged.idle_fraction) == (9, pytest.approx(18 / 27))


def test_waiting_is_proved_by_a_stretch_or_by_it_and_as_many_steps_before():
    run = Run(Loader(workers=1))
    run.meter.begin_epoch(run.loader)
    lows = []
    for waits in ([9.0] * 4, [1.0] * 4, [1.0] * 8, [0.0] * 4):
        for wait in waits:
            run.step(wait=wait, work=1.0)
        lows.append(run.meter.end_stretch(run.loader)[0].idle_low)
    assert lows[0] is None, "three steps that count"
    assert lows[1] is None, "seven"
    assert 0.2 < lows[2] < 0.5, "by itself: with the steps before there are waits of 9"
    assert lows[3] == 0


def test_a_stretch_goes_on_after_a_resume(tmp_path):
    run = Run(workers=0)
    run.meter.begin_epoch(None)
    for _ in range(8):
        run.step()
    run.meter.end_stretch(None)
    for _ in range(3):
        run.step()
    resumed = Run(workers=0, state=saved(run, tmp_path))
    for _ in range(5):
        resumed.step()
    measures = resumed.meter.end_epoch(None)
    assert (measures.whole.steps, measures.judged.steps) == (16, 8)
