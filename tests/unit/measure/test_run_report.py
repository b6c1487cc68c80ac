"""A run as text, page and picture: the verdict comes first, what was measured is in the tables, nothing grows without end."""

from dataclasses import replace

import pytest
from saved_runs import FIRST, RUN, SECOND, SHARED, USES, VERDICT

from lightning_echo.measure.report import headline, page, picture, report, save_page, save_png, tables
from lightning_echo.measure.summary import FactorUse, RunSummary


def blocks(summary):
    return report(summary).split("\n\n")


def rows_of(summary, title):
    table = next(each for each in tables(summary) if each.title == title)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_verdict_why_and_what_to_paste_come_first():
    # 50 steps of 20 ms, half of them waiting, and 50 of 30 ms with 3 ms: 0.65 s of 2.5 s
    line = "Training, 2 epochs: the accelerator is busy 74% of the time"
    first = [
        "Verdict\n  Echo with factor 2.",
        "Why\n  idle 40% of the time\n  6 of 8 cores are free",
        "Next\n  EchoCallback(factor=2)",
    ]
    assert blocks(RUN)[:4] == [*first, line]
    assert [block.splitlines()[0] for block in blocks(RUN)[4:]] == ["Epochs", "Factors"]
    assert blocks(replace(RUN, verdict=None))[0] == line
    assert blocks(replace(RUN, verdict=replace(VERDICT, why=(), next_line="")))[:2] == [first[0], line]
    unknown = RunSummary([replace(FIRST, data_wait_seconds=None, step_seconds=None)])
    assert headline(unknown).endswith("1 epoch: how long the accelerator waited for input is not known")
    assert headline(RunSummary([], USES)) == "Training that ended within its first epoch"


def test_each_epoch_has_a_row_with_its_own_examples_and_a_row_has_those_of_all():
    assert rows_of(RUN, "Epochs") == [
        {"epoch": "0", "factor": "2", "idle": "50%", "fresh": "160", "echoed": "40", "passes": "0.8"},
        {"epoch": "1", "factor": "4", "idle": "10%", "fresh": "50", "echoed": "150", "passes": "1.05"},
        {"epoch": "in all", "factor": "", "idle": "26%", "fresh": "210", "echoed": "190", "passes": "1.05"},
    ]
    large = replace(FIRST, fresh_in_epoch=9_999_999, echoed_in_epoch=1_281_167_000, first_batch_seconds=1.5)
    large = replace(large, fresh_examples=9_999_999, echoed_examples=1_281_167_000)
    after = replace(SECOND, idle_fraction=None, fresh_examples=10_000_049, echoed_examples=1_281_167_150)
    found = rows_of(RunSummary([large, after]), "Epochs")
    assert [(row["fresh"], row["echoed"], row["start s"], row["idle"]) for row in found] == [
        ("9,999,999", "1,281 M", "1.5", "50%"),
        ("50", "150", "", ""),
        ("10 M", "1,281 M", "", ""),
    ]
    (alone,) = tables(RunSummary([large]))
    assert len(alone.rows) == 1, "one epoch is all there is"
    assert alone.remarks[-1].startswith("start s: the wait for the first batch")


def test_examples_of_epochs_without_a_row_are_told():
    """A loader that had delivered 100 examples before this run, 30 of them echoes."""
    later = [replace(each, epoch=each.epoch + 3) for each in RUN.reports]
    later = [replace(each, fresh_examples=each.fresh_examples + 70, echoed_examples=each.echoed_examples + 30) for each in later]
    for reports, first in ((later, "3"), (later[:1], "3")):
        table = tables(RunSummary(reports))[0]
        assert (table.rows[0][0], table.rows[0][table.columns.index("fresh")]) == (first, "160")
        assert table.rows[-1][0] == "in all"
        assert table.rows[-1][table.columns.index("fresh")] == f"{reports[-1].fresh_examples}"
        assert "In all has 70 fresh and 30 echoed examples of epochs that have no row." in table.remarks
    assert not any("no row" in remark for remark in tables(RUN)[0].remarks)


def test_what_was_not_counted_is_empty_and_there_is_no_sum_with_it():
    unknown = replace(FIRST, fresh_in_epoch=None, echoed_in_epoch=None)
    found = rows_of(RunSummary([unknown, SECOND]), "Epochs")
    assert [(row["epoch"], row["fresh"], row["echoed"]) for row in found] == [("0", "", ""), ("1", "50", "150")]
    table = tables(RunSummary([unknown, SECOND]))[0]
    assert any(remark.startswith("An empty cell of fresh and echoed is not known") for remark in table.remarks)
    bare = tables(RunSummary([unknown]))[0]
    assert not {"fresh", "echoed"} & set(bare.columns)


def test_how_the_examples_came_has_a_table_where_it_was_measured():
    assert [table.title for table in tables(SHARED)] == ["Epochs", "Reading", "Factors"]
    assert rows_of(SHARED, "Reading") == [
        {"epoch": "0", "cache hits": "0%", "missed": "3"},
        {"epoch": "1", "cache hits": "75%", "missed": "8"},
    ]
    values = {"reads_in_flight": 6.25, "cache_received_fraction": 0.5, "shared_trainings": 2, "peer_wait_fraction": 0.125}
    every = replace(SHARED.reports[0], **values, read_again_examples=1300)
    (reading,) = [table for table in tables(RunSummary([every])) if table.title == "Reading"]
    headings = ("epoch", "in flight", "cache hits", "other nodes", "shared by", "peer wait", "missed", "read again")
    assert (reading.columns, reading.rows) == (headings, (("0", "6.25", "0%", "50%", "2", "12%", "3", "1,300"),))
    assert [remark.partition(":")[0] for remark in reading.remarks] == list(headings[1:])
    assert max(map(len, report(RunSummary([every])).splitlines())) <= 100


def test_program_name_and_date_stand_with_the_headline_and_on_the_page():
    named = replace(RUN, program="train.py", name="logs/version_3 <b>", began="2026-01-31T09:05:00+01:00")
    which = "train.py, logs/version_3 <b>, began 2026-01-31 09:05:00+01:00"
    assert f"\n\nTraining, 2 epochs: the accelerator is busy 74% of the time\n  {which}\n\n" in report(named)
    assert replace(named, name="", began="").title == "train.py"
    assert RUN.title == ""
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert page(named).count("train.py, logs/version_3 &lt;b&gt;, began 2026-01-31 09:05:00+01:00") == 1
    assert [each.get_text() for each in picture(named).texts] == [f"Echo with factor 2.\n{which}"]


def test_each_factor_has_its_reason_and_its_batches_and_one_factor_needs_no_table():
    several = FactorUse(None, {"a": 70, "b": 65, "c": 68}, 1.5, message="not set by the controller")
    found = rows_of(replace(RUN, decisions=(*USES, several)), "Factors")
    assert [list(row.values()) for row in found] == [
        ["at the beginning", "1", "0", "0"],
        ["idle 67%", "2", "20", "25"],
        ["idle 50%", "4", "50", "60"],
        ["not set by the controller", "1.5", "", "65 to 70"],
    ]
    assert list(found[0]) == ["why", "factor", "decided after batch", "from batch"]
    assert [table.title for table in tables(replace(RUN, decisions=USES[:1]))] == ["Epochs"]


def test_page_and_picture_show_the_verdict_once_and_files_hold_what_is_shown(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    text = page(SHARED)
    for words in ('<p class="verdict">Echo with factor 2.</p>', "<code>EchoCallback(factor=2)</code>", "<td>75%</td>"):
        assert text.count(words) == 1
    assert [each.get_text() for each in picture(RUN).texts] == ["Echo with factor 2."]
    older = replace(RUN, verdict=None)
    assert [each.get_text() for each in picture(older).texts] == [blocks(older)[0]]
    assert 'class="verdict"' not in page(older)
    save_page(RUN, tmp_path / "page.html")
    save_png(RUN, tmp_path / "figure.png")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(RUN)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_on_demand_the_table_has_the_uses_of_the_epoch_and_not_of_the_run():
    """200 examples of 160 fresh ones, then 200 of 50, and 400 of 210 in all. ``factor`` is that of the run so far."""
    first, second = (
        replace(each, factor=so_far, effective_factor=uses, max_factor=8.0)
        for each, so_far, uses in ((FIRST, 1.25, 1.25), (SECOND, 400 / 210, 4.0))
    )
    found = rows_of(RunSummary([first, second]), "Epochs")
    assert [row["uses"] for row in found] == ["1.25", "4", "1.905"]
    assert "factor" not in found[0]
