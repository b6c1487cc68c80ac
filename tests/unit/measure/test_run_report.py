"""A run as text, page and picture: the verdict comes first, also where it is not known."""

from dataclasses import replace

import pytest
from runs import FIRST, RUN, SHARED, USES, VERDICT

from lightning_echo.measure.run_report import page, picture, report, save_page, save_png
from lightning_echo.measure.summary import EpochReport, RunSummary


def blocks(summary):
    return report(summary).split("\n\n")


def test_the_verdict_why_and_what_to_paste_come_first():
    assert blocks(RUN)[:4] == [
        "Verdict\n  Echo with factor 2.",
        "Why\n  idle 40% of the time\n  6 of 8 cores are free",
        "Next\n  EchoCallback(factor=2)",
        "Training, 2 epochs: the accelerator is busy 74% of the time",
    ]
    assert [block.splitlines()[0] for block in blocks(RUN)[4:]] == ["Epochs", "Factors"]


def test_without_a_verdict_the_run_is_told_alone():
    assert blocks(replace(RUN, verdict=None))[0].startswith("Training, 2 epochs")
    short = replace(RUN, verdict=replace(VERDICT, why=(), next_line=""))
    assert blocks(short)[:2] == ["Verdict\n  Echo with factor 2.", blocks(RUN)[3]]


def test_a_line_to_paste_is_never_broken():
    line = "EchoCallback(" + ", ".join(f"option_{number}={number}" for number in range(20)) + ")"
    assert f"\n  {line}\n" in report(replace(RUN, verdict=replace(VERDICT, next_line=line)))


def test_no_other_line_is_longer_than_a_hundred_columns():
    large = EpochReport(
        10**6,
        10**9,
        12.25,
        10**11,
        10**11,
        passes=1e4,
        idle_fraction=0.5,
        examples_per_second=1e6,
        first_batch_seconds=123.4,
        cache_hit_fraction=1.0,
        missed_examples=10**11,
    )
    why = replace(USES[1], message="many words " * 30)
    text = report(RunSummary([large], (USES[0], why)))
    assert max(map(len, text.splitlines())) <= 100


def test_a_thousand_epochs_are_no_thousand_lines():
    text = report(RunSummary([replace(FIRST, epoch=epoch) for epoch in range(1000)]))
    assert len(text.splitlines()) < 60
    assert "960 earlier rows are left out here" in text


def test_the_page_shows_the_verdict_once_and_the_picture_has_it_as_title():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    text = page(SHARED)
    for words in ('<p class="verdict">Echo with factor 2.</p>', "<code>EchoCallback(factor=2)</code>", "<td>75%</td>"):
        assert text.count(words) == 1
    assert [each.get_text() for each in picture(RUN).texts] == ["Echo with factor 2."]
    older = replace(RUN, verdict=None)
    assert [each.get_text() for each in picture(older).texts] == [blocks(older)[0]]
    assert 'class="verdict"' not in page(older)


def test_files_hold_what_is_shown(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    save_page(RUN, tmp_path / "page.html")
    save_png(RUN, tmp_path / "figure.png")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(RUN)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
