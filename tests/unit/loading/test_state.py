"""Where a changed run goes on, and what is said to have changed."""

import pytest
from states import echo_state, plan_state

from lightning_echo.fetching.index_pipeline import Layout
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.state import Conditions, where_to_go_on


@pytest.mark.parametrize("by_batches", [False, True])
@pytest.mark.parametrize("saved_at", ["before_augmentation", "after_augmentation", "after_batching", "after_transfer"])
def test_what_all_ranks_had_taken_is_skipped_in_whole_batches(by_batches, saved_at):
    saved_by_batches = saved_at in ("after_batching", "after_transfer")
    before, now = Layout(103, 2, 4, 4, 13), Layout(103, 3, 5, 5, 7)
    for number in range(3):
        for taken in range(0, 13):  # batches of the pass, on each of the two ranks
            position = number * 13 + taken if saved_by_batches else (number * 13 + taken) * 4
            saved_for = Conditions(InsertionPoint(saved_at), before, 0, 16)
            stream, batch = where_to_go_on(echo_state(plan=plan_state(position)), saved_for, now, by_batches)
            skipped = (batch - number * 7) * 5 * 3
            assert skipped <= taken * 4 * 2, "nothing is left out"
            assert skipped > taken * 4 * 2 - 5 * 3 or batch == number * 7 + 6, "and no more than a batch comes again"
            assert stream == (batch if by_batches else batch * 5)


def conditions(**changes):
    return Conditions(InsertionPoint.after_augmentation, Layout(103, 2, 4, 4, 13), 2, 16)._replace(**changes)


def test_nothing_is_said_of_a_run_that_is_the_same():
    assert conditions().differences(conditions()) == ""


def test_each_difference_is_named_with_both_values():
    now = conditions(workers=0, layout=Layout(103, 3, 5, 5, 7))
    assert conditions().differences(now) == (
        "workers=2 (now 0), batch_size=4 (now 5), batches_per_pass=13 (now 7), last_batch_size=4 (now 5), replicas=2 (now 3)"
    )
    now = conditions(insertion_point=InsertionPoint.after_batching)
    assert conditions().differences(now) == "insertion_point='after_augmentation' (now 'after_batching')"
