"""Two runs side by side. The figures are worked out by hand, from steps that take round numbers of seconds."""

import re
from dataclasses import replace

import pytest

from lightning_echo.__main__ import main
from lightning_echo.measure.compare import Point, compare, read_run
from lightning_echo.measure.summary import EpochReport, FactorUse, RunSummary

STEPS = 10
METRIC = "val_loss"


def save(folder, *, wait, fresh, echoed, losses=None, first_epoch=0, epochs=4, cached_bytes=None):
    """Writes what a run leaves: ``epochs`` of 10 steps, each of 0.1 s and ``wait``, with so many examples a step."""
    folder.mkdir()
    reports = [
        EpochReport(
            epoch=first_epoch + number,
            steps=STEPS,
            factor=(fresh + echoed) / fresh,
            fresh_examples=(number + 1) * STEPS * fresh,
            echoed_examples=(number + 1) * STEPS * echoed,
            idle_fraction=wait / (wait + 0.1),
            data_wait_seconds=wait,
            step_seconds=0.1,
            cache_bytes=cached_bytes,
        )
        for number in range(epochs)
    ]
    (folder / "echo_summary.json").write_text(RunSummary(reports, [FactorUse(0, 0, 1.0)]).to_json())
    if losses is not None:
        write_log(folder, [(number, (number + 1) * STEPS - 1, loss) for number, loss in enumerate(losses)], fresh)
    return folder


def write_log(folder, values, fresh, *, batches_per_step=1, metric=METRIC):
    """Writes a CSV log: a row of the metric for each epoch, step and value; and our own row at the end of each of four epochs."""
    rows = [(step, 0, f"{epoch},{step},{value},,a note") for epoch, step, value in values]
    for number in range(4):
        step = (number + 1) * STEPS // batches_per_step - 1
        rows.append((step, 1, f"{number},{step},,{(number + 1) * STEPS * fresh},"))
    lines = [line for _, _, line in sorted(rows)]
    (folder / "metrics.csv").write_text("\n".join([f"epoch,step,{metric},echo/fresh_examples,note", *lines, ""]))


@pytest.fixture
def runs(tmp_path):
    plain = save(tmp_path / "plain", wait=0.3, fresh=4, echoed=0, losses=(8, 7, 6, 5))  # 4 s an epoch
    echoed = save(tmp_path / "echoed", wait=0.0, fresh=2, echoed=2, losses=(8, 6, 5, 4), cached_bytes=3 * 2**30)  # 1 s
    return plain, echoed


def rows(comparison):
    return {row[0]: row[1:] for row in comparison.table().rows}


def test_speed_idle_and_counts_stand_side_by_side(runs):
    comparison = compare(*map(read_run, runs))
    assert comparison.speedup == pytest.approx(4)
    found = rows(comparison)
    assert found["steps a second"] == ("2.5", "10", "4")
    assert found["idle fraction"] == ("75%", "0%", "")
    assert found["fresh examples"] == ("160", "80", "0.5")
    assert found["echoed examples"] == ("0", "80", "")
    assert found["factor, last epoch"] == ("1", "2", "2")
    assert found["cache, memory of a node"] == ("", "3 GiB", "")
    assert "cache hits, last epoch" not in found, "neither run has it"
    assert comparison.headline.endswith(
        "echoed takes 4 times as many steps a second as " + str(runs[0]) + "; idle 0% in place of 75%"
    )


def test_a_metric_is_compared_at_equal_time_and_at_equal_fresh_examples(runs):
    found = rows(compare(*map(read_run, runs)))
    assert found[f"{METRIC}, the last one up to 4 s"][:2] == ("8 at 4 s", "4 at 4 s"), (
        "one epoch of the slow run, all four of the fast one"
    )
    assert found[f"{METRIC}, the last one up to 80 fresh examples"][:2] == ("7 at 80", "4 at 80"), (
        "two epochs of one, four of the other"
    )


def test_it_says_when_runs_began_if_that_is_known(runs):
    assert "began" not in rows(compare(*map(read_run, runs)))
    other = read_run(runs[1])
    dated = replace(other, summary=replace(other.summary, began="2026-01-31T09:05:00+01:00"))
    assert rows(compare(read_run(runs[0]), dated))["began"] == ("", "2026-01-31 09:05:00+01:00", "")


def test_a_value_within_an_epoch_has_its_share_of_time_and_examples(runs):
    write_log(runs[0], [(0, 4, 9), (0, 9, 8), (1, 19, 7)], 4)
    assert read_run(runs[0]).points(METRIC)[:2] == [Point(2.0, 20.0, 9.0), Point(4.0, 40.0, 8.0)]


def test_where_optimizer_steps_are_fewer_than_batches_epochs_end_where_the_log_says(runs):
    write_log(runs[0], [(0, 4, 8), (1, 9, 7), (2, 14, 6), (3, 19, 5)], 4, batches_per_step=2)
    assert [point.seconds for point in read_run(runs[0]).points(METRIC)] == pytest.approx([4, 8, 12, 16])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([(0, 9, 8), (1, 19, 7), (4, 45, 1)], [4, 8]),
        ([(0, 9, 8), (3, 40, 1)], [4]),
        ([(0, 0, 8), (1, 1, 7), (2, 2, 6)], [0.4, 8, 12]),
        ([(1, 1, 7), (1, 2, 6)], []),
    ],
    ids=["after the last whole epoch", "validated after fit", "the program logs the epoch as its step", "twice in such an epoch"],
)
def test_a_row_outside_its_epoch_is_at_its_end_if_it_is_the_only_one_and_else_left_out(runs, values, expected):
    write_log(runs[0], values, 4)
    assert [point.seconds for point in read_run(runs[0]).points(METRIC)] == pytest.approx(expected)


def test_the_log_of_another_run_is_not_taken(runs):
    write_log(runs[0], [(0, 9, 8), (1, 19, 7)], 3)
    assert read_run(runs[0]).points(METRIC) == []


def test_where_no_metric_can_be_compared_the_reason_is_said(runs, tmp_path):
    for name, says, how in (
        ("resumed", "was resumed in epoch 2, and how long the epochs before took is not known", {"first_epoch": 2}),
        ("silent", "has no metrics.csv", {"losses": None}),
        ("longer", "does not have all of its epochs", {"epochs": 5}),
    ):
        other = save(tmp_path / name, **{"wait": 0.1, "fresh": 4, "echoed": 0, "losses": (8, 7, 6, 5), **how})
        comparison = compare(read_run(runs[0]), read_run(other))
        assert not [row for row in rows(comparison) if row.startswith(METRIC)]
        said = " ".join(comparison.text().split())
        assert "No metric is compared: " in said
        assert says in said
    write_log(runs[0], [(0, 9, 8)], 4, metric="loss")
    assert "none whose name begins with val" in " ".join(compare(*map(read_run, runs)).text().split())


def test_another_metric_may_be_chosen(runs):
    for folder, fresh, values in zip(runs, (4, 2), ((1, 2, 3, 4), (2, 4, 6, 8)), strict=True):
        write_log(folder, [(number, number * STEPS + 9, value) for number, value in enumerate(values)], fresh, metric="accuracy")
    found = rows(compare(*map(read_run, runs), metric="accuracy"))
    assert found["accuracy, the last one up to 4 s"][:2] == ("1 at 4 s", "8 at 4 s")


@pytest.mark.parametrize(
    ("bounds", "status", "says"),
    [
        ([], 0, ""),
        (["--max-idle", "0.05", "--min-speedup", "3.9"], 0, ""),
        (
            ["--min-speedup", "4.1"],
            1,
            "missed: .*echoed takes 4 times as many steps .*plain, and --min-speedup is 4.1",
        ),
        (["--max-idle", "2"], 2, "error: --max-idle must be a share between 0 and 1, got 2"),
        (["--min-speedup", "0"], 2, "error: --min-speedup must be a positive number, got 0"),
        (
            ["--metric", "nothing"],
            2,
            "error: --metric nothing: it must be in the metrics.csv of both runs.*: val_loss, echo/fresh_examples",
        ),
    ],
    ids=["no bound", "kept", "too slow", "bad idle", "bad speed-up", "no such metric"],
)
def test_a_bound_that_is_missed_is_the_exit_status(runs, capsys, bounds, status, says):
    assert main(["compare", *map(str, runs), *bounds]) == status
    captured = capsys.readouterr()
    assert bool(captured.out) == (status != 2)
    assert re.search(says, captured.err)


def test_the_idle_fraction_of_the_second_run_is_held_against_its_bound(runs, capsys):
    assert main(["compare", str(runs[1]), str(runs[0]), "--max-idle", "0.7"]) == 1
    assert "plain is idle 0.75 of the time, and --max-idle is 0.7" in capsys.readouterr().err


def test_runs_that_cannot_be_compared_are_named(runs, tmp_path, capsys):
    empty, unfinished, large = tmp_path / "empty", tmp_path / "unfinished", tmp_path / "large"
    empty.mkdir()
    unfinished.mkdir()
    (unfinished / "echo_summary.json").write_text(RunSummary().to_json())
    save(large, wait=0.1, fresh=8, echoed=0)
    for other, says in (
        (empty, "a run must be a folder with echo_summary.json, got .*empty, which has none: EchoCallback writes it"),
        (unfinished, "the run ended within its first epoch, so there is nothing to compare"),
        (runs[0], "are the same run: give two runs"),
        (large, "--min-speedup: a step takes 4 examples in .*plain and 8 in .*large: steps a second say little"),
    ):
        assert main(["compare", str(runs[0]), str(other), "--min-speedup", "1"]) == 2
        assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "echo_summary.json",
            lambda text: text.replace("0.3", "NaN", 1),
            r"data_wait_seconds of epoch 0 must be .*, got nan",
        ),
        ("echo_summary.json", lambda text: text.replace("0.3", "-0.3", 1), r"data_wait_seconds of epoch 0 must .* got -0\.3"),
        ("echo_summary.json", lambda text: text.replace("160", "1" + "0" * 400, 1), r"fresh_examples of epoch 3 must be"),
        ("echo_summary.json", lambda text: "epoch,step", r"this is not an echo_summary\.json"),
        ("metrics.csv", lambda text: text + "x" * 200_000, r"metrics\.csv: field larger than field limit"),
    ],
    ids=["NaN", "negative", "too large", "another file", "a long field"],
)
def test_a_damaged_file_is_named(runs, capsys, name, text, says):
    file = runs[0] / name
    file.write_text(text(file.read_text()))
    assert main(["compare", *map(str, runs), "--max-idle", "1"]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_row_with_more_cells_than_the_heading_is_read(runs):
    with (runs[0] / "metrics.csv").open("a") as file:
        file.write("3,39,1,,a,b,c\n")
    assert rows(compare(*map(read_run, runs)))[f"{METRIC}, the last one up to 4 s"][:2] == ("8 at 4 s", "4 at 4 s")


def test_steps_of_different_sizes_are_remarked_on_where_no_bound_is_asked_for(runs, tmp_path, capsys):
    large = save(tmp_path / "large", wait=0.1, fresh=8, echoed=0)
    assert main(["compare", str(runs[0]), str(large)]) == 0
    assert "steps a second say little" in " ".join(capsys.readouterr().out.split())


def test_page_and_picture_have_both_runs(runs, tmp_path, capsys):
    html, png = tmp_path / "compared.html", tmp_path / "compared.png"
    assert main(["compare", *map(str, runs), "--html", str(html), "--png", str(png)]) == 0
    assert capsys.readouterr().out.count("written: ") == 2
    assert png.read_bytes().startswith(b"\x89PNG")
    text = html.read_text()
    assert text.count("<svg") == 2, "for broad pages and for narrow ones"
    assert f"<td>{METRIC}, the last one up to 4 s</td><td>8 at 4 s</td><td>4 at 4 s</td>" in text.replace("\n", "")
