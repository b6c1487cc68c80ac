"""The strip of a run: its pieces against times and examples that were worked out by hand, and a journal, believed or not."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from lightning_echo.measure.control import slice_ends
from lightning_echo.measure.report import FromJournal, draw, from_journal, page, report, strip
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary

# Two epochs of 20 steps with 8 examples each, in two slices of 10. In the first slice of an epoch, half of the time is waited.
SLICES = ((1.0, 2.0), (0.0, 1.0))
FIRST = EpochReport(
    0,
    20,
    4.0,
    40,
    120,
    fresh_in_epoch=40,
    echoed_in_epoch=120,
    idle_fraction=1 / 3,
    data_wait_seconds=0.05,
    step_seconds=0.1,
    slices=SLICES,
    max_factor=8.0,
)
SECOND = replace(FIRST, epoch=1, fresh_examples=200, echoed_examples=120, fresh_in_epoch=160, echoed_in_epoch=0)
RUN = RunSummary((FIRST, SECOND), (FactorUse(0, 0, 8.0),))
# Four fresh examples in each batch of the first slice, none in those of the second; then only fresh ones.
COUNTS = [4] * 10 + [0] * 10 + [8] * 20


def told(counts, first=0, ranks=1, are_batches=False, run=RUN):
    return from_journal(run, lambda: (first, counts, ranks, are_batches))


def test_the_time_of_work_is_divided_as_the_examples_of_the_epoch_are():
    assert strip(RUN) == [[(2.0, 1.0, 0.25, 0.75), (1.0, 0.0, 0.25, 0.75)], [(2.0, 1.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0)]]


def test_with_a_journal_it_is_divided_as_those_of_each_slice_are():
    journal = told(COUNTS)
    assert journal == FromJournal([[0.5, 0.0], [1.0, 1.0]])
    assert strip(RUN, journal) == [[(2.0, 1.0, 0.5, 0.5), (1.0, 0.0, 0.0, 1.0)], [(2.0, 1.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0)]]


def test_without_slices_an_epoch_is_one_piece_and_what_is_not_known_is_not_coloured():
    whole = replace(FIRST, slices=())
    unknown = replace(whole, fresh_in_epoch=None, echoed_in_epoch=None)
    some = replace(unknown, effective_factor=4.0)
    silent = replace(whole, data_wait_seconds=None, step_seconds=None)
    wrong = replace(FIRST, slices=((3.0, 2.0), (float("nan"), 1.0), (0.0, float("inf")), (0.0, 0.0), (0.5, 1.0)))
    found = strip(RunSummary((whole, unknown, some, silent, wrong)))
    assert found == [
        [pytest.approx((3.0, 1.0, 0.5, 1.5))],
        [pytest.approx((3.0, 1.0, 0.0, 0.0))],
        [pytest.approx((3.0, 1.0, 0.5, 1.5))],
        [],
        [(1.0, 0.5, 0.125, 0.375)],
    ]


def test_a_run_that_goes_on_or_has_begun_earlier_is_found_in_its_journal():
    later = replace(RUN, reports=(SECOND,), decisions=(FactorUse(20, 20, 8.0),))
    assert told(COUNTS, run=later).shares == [[1.0, 1.0]]
    assert told(COUNTS[5:], first=5, run=later).shares == [[1.0, 1.0]]
    assert told([*COUNTS, 3, 3], run=RUN).shares == [[0.5, 0.0], [1.0, 1.0]], "and batches of an epoch that did not end"


def test_two_ranks_and_whole_batches_have_the_shares_of_their_batches():
    """Each of two ranks has batches of 4. Of 20 batches of a rank, 5 are fresh in the first epoch and all in the second."""
    batches = [1] * 10 + [0] * 10 + [2] * 20
    assert told(batches, ranks=2, are_batches=True) == FromJournal([[0.5, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("counts", "first", "unlike"),
    [
        ([4] * 9 + [3] + [0] * 10 + [8] * 20, 0, "epoch 0"),  # one example less than was counted
        (COUNTS[:39], 0, "epoch 1"),  # cut off
        (COUNTS[1:], 0, "2 epochs from 0 on"),  # of other batches
        (COUNTS, 7, "2 epochs from 0 on"),  # begins later
        ([], 0, "2 epochs from 0 on"),
    ],
    ids=["another count", "cut off", "shifted", "late", "empty"],
)
def test_an_epoch_that_was_counted_otherwise_shows_its_mean_and_the_page_says_so(counts, first, unlike):
    journal = told(counts, first)
    mean = strip(RUN)
    for epoch, (pieces, shares) in enumerate(zip(strip(RUN, journal), journal.shares, strict=True)):
        assert bool(shares) == (unlike == f"epoch {1 - epoch}")
        assert shares or pieces == mean[epoch]
    assert journal.note.startswith(f"The strip shows the mean of {unlike}: ")


def test_an_epoch_whose_beginning_nobody_counted_is_not_taken_from_the_journal():
    late = replace(RUN, reports=(replace(FIRST, fresh_in_epoch=None, echoed_in_epoch=None), SECOND))
    assert told(COUNTS, run=late).shares == [[], [1.0, 1.0]]


def refused():
    raise ValueError("journal.bin is damaged")


def absent():
    raise FileNotFoundError("journal.bin is not there")


def test_a_journal_that_cannot_be_read_ends_nothing_and_is_said_on_the_page():
    for read, says in ((refused, "is damaged"), (absent, "is not there")):
        found = from_journal(RUN, read)
        assert not found.shares
        assert (
            found.note
            == f"The strip shows the mean of each epoch, since the journal of the run could not be read: journal.bin {says}."
        )
        assert strip(RUN, found) == strip(RUN)
    several = replace(RUN, decisions=(FactorUse(0, {"a": 0, "b": 0}, 8.0),))
    assert from_journal(several, refused).note.startswith("The strip shows the mean of each epoch, since several loaders")
    plain = replace(RUN, reports=(replace(FIRST, max_factor=None),))
    assert from_journal(plain, refused) == FromJournal(), "a run that is not on demand has no journal, and none is looked for"
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert page(RUN, from_journal(RUN, refused)).count("journal.bin is damaged") == 1
    assert "Notes" not in page(RUN, told(COUNTS))


@pytest.mark.parametrize("steps", [*range(60), 399, 400, 401, 12_345])
def test_slices_are_equally_many_steps_and_at_least_ten_where_there_are_so_many(steps):
    ends = slice_ends(steps)
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    assert sum(sizes) == steps
    assert len(sizes) == (0 if not steps else 1 if steps < 10 else min(40, steps // 10))
    assert all(abs(size - Fraction(steps, len(sizes))) < 1 for size in sizes)


# ---------------------------------------------------------------------- drawn

THE_STRIP = "the time of the steps"


def layers(figure):
    """The corners of each patch of the strip, by its label."""
    axes = next(axes for axes in figure.axes if axes.get_title(loc="left") == THE_STRIP)
    return axes, {
        each.get_label(): [tuple(corner) for corner in each.get_paths()[0].vertices.tolist()] for each in axes.collections
    }


def covered(corners, at):
    """The lowest and the highest point of a patch at a place between its corners."""
    edges = list(pairwise(corners))
    heights = [y for (x, y), (other, same) in edges if min(x, other) < at < max(x, other) and y == same]
    return (min(heights), max(heights)) if heights else None


def test_each_patch_has_its_share_of_the_time_where_it_was_spent():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    axes, found = layers(draw(RUN, journal=told(COUNTS)))
    assert list(found) == ["work on fresh", "on echoed", "waiting"]
    # Pieces of 2, 1, 2 and 1 s: the first has 1 s of waiting, and 0.5 s each of work on fresh and on echoed examples.
    expected = {1.0: (0.25, 0.5, 0.5), 2.5: (0.0, 1.0, 1.0), 4.0: (0.5, 0.5, 0.5), 5.5: (1.0, 1.0, 1.0)}
    for at, (fresh, worked, waits) in expected.items():
        assert covered(found["work on fresh"], at) == pytest.approx((0, fresh))
        assert covered(found["on echoed"], at) == pytest.approx((fresh, worked))
        assert covered(found["waiting"], at) == pytest.approx((waits, 1))
    assert axes.get_xlim() == (0, 6)
    assert axes.get_xlabel() == "seconds of steps and of their waiting"
    assert [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1] == [3], "the end of the first epoch"


def test_the_axis_is_in_seconds_minutes_or_hours_and_long_runs_have_fewer_pieces():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for factor, unit, end in ((10, "seconds", 60), (120, "minutes", 12), (3600, "hours", 6)):
        slower = [
            replace(each, slices=tuple((waited * factor, seconds * factor) for waited, seconds in SLICES)) for each in RUN.reports
        ]
        axes, _ = layers(draw(replace(RUN, reports=slower)))
        assert axes.get_xlabel().startswith(unit)
        assert axes.get_xlim()[1] == pytest.approx(end)
    many = replace(RUN, reports=[replace(FIRST, epoch=epoch, slices=SLICES * 20) for epoch in range(200)])
    axes, found = layers(draw(many))
    assert axes.get_xlim()[1] == pytest.approx(200 * 60 / 3600)
    assert len(found["waiting"]) < 5000
    assert covered(found["waiting"], 1.001) == pytest.approx((2 / 3, 1)), "20 s of each 60 were waited"


def test_a_run_without_times_has_no_strip_and_the_text_of_a_report_needs_no_journal():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    silent = replace(FIRST, slices=(), data_wait_seconds=None, step_seconds=None)
    assert THE_STRIP not in [axes.get_title(loc="left") for axes in draw(RunSummary((silent,))).axes]
    assert "Epochs" in report(RUN)
