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


def test_each_epoch_has_a_row_and_a_quantity_that_was_measured_a_column():
    assert rows_of(RUN, "Epochs") == [
        {"epoch": "0", "factor": "2", "idle": "50%", "fresh": "160", "echoed": "40", "passes": "0.8"},
        {"epoch": "1", "factor": "4", "idle": "10%", "fresh": "210", "echoed": "190", "passes": "1.05"},
    ]
    assert [(row["cache hits"], row["missed"]) for row in rows_of(SHARED, "Epochs")] == [("0%", "3"), ("75%", "8")]
    large = replace(FIRST, fresh_examples=9_999_999, echoed_examples=1_281_167_000, first_batch_seconds=1.5)
    found = rows_of(RunSummary([large, replace(SECOND, idle_fraction=None)]), "Epochs")
    assert [(row["fresh"], row["echoed"], row["start s"], row["idle"]) for row in found] == [
        ("9,999,999", "1,281 M", "1.5", "50%"),
        ("210", "190", "", ""),
    ]
    (starting,) = tables(RunSummary([large]))
    assert starting.remarks[1].startswith("start s: the wait for the first batch")
    assert len(tables(RUN)[0].remarks) == 1


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
