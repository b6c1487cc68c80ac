"""The tables of a run: what was measured is there, in the words of the terminal and of the page."""

from dataclasses import replace

from runs import FIRST, RUN, SECOND, SHARED, USES

from lightning_echo.measure.run_report import headline, tables
from lightning_echo.measure.summary import FactorUse, RunSummary


def rows_of(summary, title, **options):
    table = next(each for each in tables(summary, **options) if each.title == title)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_headline_joins_the_epochs_by_their_time():
    # 50 steps of 20 ms, half of them waiting, and 50 of 30 ms with 3 ms: 0.65 s of 2.5 s
    assert headline(RUN) == "Training, 2 epochs: the accelerator is busy 74% of the time"


def test_the_headline_says_what_is_not_known():
    assert headline(RunSummary([replace(FIRST, data_wait_seconds=None, step_seconds=None)])).endswith(
        "1 epoch: how long the accelerator waited for input is not known"
    )
    assert headline(RunSummary([], USES)) == "Training that ended within its first epoch"


def test_each_epoch_has_a_row_and_a_quantity_that_was_measured_a_column():
    assert rows_of(RUN, "Epochs") == [
        {"epoch": "0", "factor": "2", "idle": "50%", "fresh": "160", "echoed": "40", "passes": "0.8"},
        {"epoch": "1", "factor": "4", "idle": "10%", "fresh": "210", "echoed": "190", "passes": "1.05"},
    ]
    assert [(row["cache hits"], row["missed"]) for row in rows_of(SHARED, "Epochs")] == [("0%", "3"), ("75%", "8")]


def test_many_examples_are_counted_in_millions():
    found = rows_of(RunSummary([replace(FIRST, fresh_examples=9_999_999, echoed_examples=1_281_167_000)]), "Epochs")
    assert [(row["fresh"], row["echoed"]) for row in found] == [("9,999,999", "1,281 M")]


def test_a_column_that_needs_it_is_explained():
    (starting,) = tables(RunSummary([replace(FIRST, first_batch_seconds=1.5), SECOND]))
    assert [row[starting.columns.index("start s")] for row in starting.rows] == ["1.5", ""]
    assert starting.remarks[1].startswith("start s: the wait for the first batch")
    assert len(tables(RUN)[0].remarks) == 1


def test_what_was_not_measured_in_some_epoch_is_an_empty_cell():
    found = rows_of(replace(RUN, reports=(FIRST, replace(SECOND, idle_fraction=None))), "Epochs")
    assert [row["idle"] for row in found] == ["50%", ""]


def test_each_factor_has_its_reason_and_its_batches():
    several = FactorUse(None, {"a": 70, "b": 65, "c": 68}, 1.5, message="not set by the controller")
    assert rows_of(replace(RUN, decisions=(*USES, several)), "Factors") == [
        {"why": "at the beginning", "factor": "1", "decided after batch": "0", "from batch": "0"},
        {"why": "idle 67%", "factor": "2", "decided after batch": "20", "from batch": "25"},
        {"why": "idle 50%", "factor": "4", "decided after batch": "50", "from batch": "60"},
        {"why": "not set by the controller", "factor": "1.5", "decided after batch": "", "from batch": "65 to 70"},
    ]


def test_one_factor_needs_no_table():
    assert [table.title for table in tables(replace(RUN, decisions=USES[:1]))] == ["Epochs"]


def test_of_a_long_table_the_end_is_shown_and_the_rest_is_counted():
    long = RunSummary([replace(FIRST, epoch=epoch) for epoch in range(100)])
    (shown,) = tables(long, most_rows=40)
    assert [row[0] for row in shown.rows] == [str(epoch) for epoch in range(60, 100)]
    assert shown.remarks[0] == "60 earlier rows are left out here; the page (--html) has all."
    (whole,) = tables(long)
    assert len(whole.rows) == 100
