"""An analysis on a busy machine: the report says so, and processor time stands beside wall time. Figures worked out by hand."""

import re
import time
from dataclasses import replace

import pytest
import torch
from analyses import ANALYSIS, STREAM
from measured_stages import MS
from torch.utils.data import DataLoader, Dataset

from lightning_echo.analysis.measured import ProcessorTime
from lightning_echo.analysis.parts import BatchSeconds, Spent, TimedTransforms, mean_of, run_part, whole
from lightning_echo.analysis.phases import measure_loader
from lightning_echo.analysis.report import page, report
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.data.machine import Load

QUIET, BUSY = Load(2, 1.9, 0.1, 0.7), Load(2, 0.5, 1.5, 0.75)
STOPPED = Load(2, 1.9, 0.1, 0.7, stopped=0.5)


def times(**milliseconds):
    """Processor time, and wall time without the waiting for a processor."""
    return {name: ProcessorTime(cpu * MS, undelayed * MS) for name, (cpu, undelayed) in milliseconds.items()}


# The wall times are 10, 4, 2 and 1 ms.
STAGE_CPU = times(read=(0.2, 1.0), decode=(3.0, 3.0), augment=(1.9, 2.0), collate=(0.1, 0.1))
KNOWN = replace(ANALYSIS, stage_cpu=STAGE_CPU, load=QUIET)
WITH_TRANSFORMS = replace(
    KNOWN, transforms={"Crop": 3 * MS, "Flip": 1 * MS}, transform_cpu=times(Crop=(0.5, 0.5), Flip=(1.1, 1.2))
)


def costs(analysis):
    """Name, wall milliseconds and processor milliseconds, in the order of the analysis."""
    return [(each.name[:6], *(None if s is None else round(1000 * s, 6) for s in each[1:])) for each in analysis.costliest]


@pytest.mark.parametrize(
    ("analysis", "expected"),
    [
        (ANALYSIS, [("read", 10, None), ("decode", 4, None), ("augmen", 2, None)]),
        (KNOWN, [("read", 10, 0.2), ("decode", 4, 3), ("augmen", 2, 1.9)]),
        (replace(KNOWN, load=None), [("read", 10, 0.2), ("decode", 4, 3), ("augmen", 2, 1.9)]),
        (replace(KNOWN, load=BUSY), [("decode", 4, 3), ("augmen", 2, 1.9), ("read", 10, 0.2)]),
        (replace(KNOWN, load=STOPPED), [("decode", 4, 3), ("augmen", 2, 1.9), ("read", 10, 0.2)]),
        (replace(ANALYSIS, load=BUSY), [("read", 10, None), ("decode", 4, None), ("augmen", 2, None)]),
        # What is left of decoding and augmentation: 6 - 4 ms, 4.9 - 1.6 of a processor, 5 - 1.7 without waiting for one.
        (WITH_TRANSFORMS, [("read", 10, 0.2), ("Crop", 3, 0.5), ("decode", 2, 3.3)]),
        (replace(WITH_TRANSFORMS, load=BUSY), [("decode", 2, 3.3), ("Flip", 1, 1.1), ("read", 10, 0.2)]),
        (replace(STREAM, load=BUSY), [("the lo", 4, None)]),
    ],
)
def test_on_a_busy_machine_the_costliest_is_what_takes_longest_with_a_processor(analysis, expected):
    assert costs(analysis) == expected


def test_a_file_has_the_processor_times_and_the_load(tmp_path):
    found = replace(WITH_TRANSFORMS, load=BUSY)
    found.to_json(tmp_path / "analysis.json")
    assert StallAnalysis.from_json(tmp_path / "analysis.json") == found
    with pytest.raises(ValueError, match="cpu_seconds must be"):
        ProcessorTime(-1.0, 0.0)


def test_text_and_page_show_processor_time_and_say_that_the_figures_are_worth_little():
    note = f"{BUSY.sentence}."
    found = replace(KNOWN, load=BUSY, notes=(note,))
    said = "The cores were not this program's alone: these figures are worth little (see the notes)."
    order = "In the order of the times without the waiting for a processor."
    text, html = re.sub(r"\s+", " ", report(found)), page(found)
    assert text.index(said) < text.index("The accelerator is idle 75%")
    assert "ms per example processor ms decode 4 3 augment 2 1.9 read 10 0.2 " + order in text
    assert note in text
    for each in (said.replace("'", "&#x27;"), order, note, "processor ms"):
        assert each in html
    text = re.sub(r"\s+", " ", report(KNOWN))
    assert "ms per example processor ms read 10 0.2 decode 4 3 augment 2 1.9" in text
    assert said not in text
    assert order not in text


def test_what_batches_spent_is_a_mean_without_the_waiting_for_a_processor():
    spent = [Spent(5.0, 2.0, 1.0), Spent(9.0, 4.0, 3.0)]
    assert mean_of(spent, 2) == ProcessorTime(1.5, 2.5)
    assert BatchSeconds(*spent, Spent(1.0, 1.0, 0.5)).all == Spent(15.0, 7.0, 4.5)
    assert mean_of([Spent(1.0, -0.1, 2.0)], 1) == ProcessorTime(0.0, 0.0), "clocks of different resolution"
    assert Spent(9.0, 4.0, 7.0).undelayed == 4.0, "it has waited while the clocks were read"
    assert Spent(9.0, 30.0, 0.0).undelayed == 9.0, "threads"


class Works(Dataset):
    """An example sleeps for 20 ms and computes for 10."""

    def __getitem__(self, index):
        time.sleep(0.02)
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return torch.full((4,), float(index))

    def __len__(self):
        return 64


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_has_the_processor_time_of_its_worker_however_busy_the_machine_is(workers):
    looks = []
    run = run_part(DataLoader(Works(), num_workers=workers), whole, [[1, 2]] * 4, look=lambda: looks.append(0))
    assert len(looks) == 4
    for batch in run.batches:
        assert 0.02 <= batch.first.cpu < 0.06 <= batch.first.seconds
        assert 0 <= batch.first.queued <= batch.first.seconds - 0.05
    found = run.processor("first", 2)
    assert 0.01 <= found.cpu_seconds <= 0.03
    assert found.undelayed_seconds >= 0.025  # of 30 ms: wall time less the queue, each of another clock


def test_transforms_are_timed_with_their_processor_time():
    class Compose:
        def __init__(self):
            self.transforms = [lambda example: time.sleep(0.01) or example, lambda example: 0 * sum(range(10**6)) + example]

    holder = Works()
    holder.transform = compose = Compose()
    timed = TimedTransforms(holder)
    compose.transforms[1](compose.transforms[0](1))
    sleeps, computes = timed.take().values()
    assert sleeps.seconds >= 0.01 > sleeps.cpu
    assert 0 < computes.cpu <= computes.seconds + 0.001


def test_the_phases_give_each_stage_its_processor_time_and_look_at_the_cores_meanwhile():
    looks = []
    loader = DataLoader(Works(), 2)
    batches = [[number, number + 1] for number in range(0, 16, 2)]
    found = measure_loader(loader, batches, 2, 60.0, str, 1, lambda: looks.append(0))
    assert len(looks) >= 6
    assert list(found.stage_cpu) == ["read", "decode", "augment", "collate"]
    decode = found.stage_cpu["decode"]  # sleeps for 20 ms, and computes for 10
    assert 0.01 <= decode.cpu_seconds <= 0.03
    assert decode.undelayed_seconds >= 0.025  # of 30 ms: wall time less the queue, each of another clock
    assert found.stage_cpu["augment"] == ProcessorTime(0.0, 0.0), "it cannot be cut there"
