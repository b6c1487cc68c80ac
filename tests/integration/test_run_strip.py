"""What a run tells of itself: an epoch's own examples, the strip, name and date. Against the batches that the model got."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from demand_runs import STEPS, on_demand, run_on_demand
from lightning.pytorch.loggers import CSVLogger
from test_trainer_streams import Stream
from torch.utils.data import DataLoader
from trainer_runs import Batch, Data, Killed, Recorder, SaveAt, Scans, first_uses, fit

from lightning_echo import EchoCallback, EchoLoader
from lightning_echo.__main__ import main
from lightning_echo.measure.report import FromJournal, from_journal
from lightning_echo.measure.summary import EpochReport, RunSummary
from lightning_echo.pipeline.journal import fresh_counts
from lightning_echo.training import logged
from lightning_echo.training.logged import local_time, program_name, run_name

pytestmark = pytest.mark.usefixtures("read_here", "one_thread")


def own(reports: Sequence[EpochReport]) -> list[tuple[int | None, int | None]]:
    return [(report.fresh_in_epoch, report.echoed_in_epoch) for report in reports]


def counted(model: Recorder, ends: Sequence[int]) -> list[tuple[int, int]]:
    """Fresh and echoed examples of each epoch, from the batches of the whole run."""
    fresh = [len(new) for new in first_uses(model.batches)]
    sizes = [len(indices) for indices, _ in model.batches]
    return [(sum(fresh[a:b]), sum(sizes[a:b]) - sum(fresh[a:b])) for a, b in pairwise([0, *ends])]


def echo(factor: Any = 2.5) -> EchoCallback:
    return EchoCallback(factor=factor, insertion_point="after_augmentation", seed=7)


EPOCH = 6  # steps: 22 examples in batches of 4


@pytest.mark.parametrize("step", [1, EPOCH - 1, EPOCH, EPOCH + 2])
def test_each_epoch_has_its_own_examples_also_after_a_resume(tmp_path: Path, step: int) -> None:
    saving = SaveAt(tmp_path, [step])
    first = echo()
    whole = fit(Data(), callbacks=[first, saving])
    expected = counted(whole.model, [EPOCH, 2 * EPOCH, 3 * EPOCH])
    assert own(first.reports) == expected
    again = echo()
    fit(Data(), callbacks=[again], ckpt_path=saving.path(step))
    assert own(again.reports) == expected
    assert again.reports[-1].fresh_examples == sum(fresh for fresh, _ in expected)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")  # a plain loader
@pytest.mark.parametrize(("step", "is_known"), [(2, False), (EPOCH + 2, False), (EPOCH, True)])
def test_an_epoch_whose_beginning_nobody_counted_says_so(tmp_path: Path, step: int, is_known: bool) -> None:
    """The checkpoint was saved without a callback."""
    with pytest.raises(Killed):
        fit(Data(), callbacks=[SaveAt(tmp_path, [step], dies=True)])
    callback = EchoCallback()
    run = fit(Data(), callbacks=[callback], ckpt_path=SaveAt(tmp_path, []).path(step))
    sizes = [sum(len(indices) for indices, _ in epoch) for epoch in run.model.by_epoch]
    expected: list[tuple[int | None, int | None]] = [(size, 0) for size in sizes]
    assert own(callback.reports) == (expected if is_known else [(None, None), *expected[1:]])


def summary_of(folder: Path) -> RunSummary:
    return RunSummary.from_json((folder / "run" / "echo_summary.json").read_text())


def journal_of(folder: Path) -> FromJournal:
    return from_journal(summary_of(folder), partial(fresh_counts, str(folder / "run")))


def logger(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name="", version="run")


def expected_shares(batches: Sequence[Batch], epochs: Sequence[int]) -> list[Any]:
    """The share of fresh examples in each slice, from the batches of a run and the numbers of steps of its epochs."""
    fresh, found = [len(new) for new in first_uses(batches)], []
    for begin, end in pairwise([0, *accumulate(epochs)]):
        count = max(1, (end - begin) // 10)
        edges = [begin + (end - begin) * number // count for number in range(count + 1)]
        mean = sum(len(indices) for indices, _ in batches[begin:end]) / (end - begin)
        found.append(pytest.approx([min(sum(fresh[a:b]) / (mean * (b - a)), 1.0) for a, b in pairwise(edges)]))
    return found


def test_the_strip_on_demand_has_the_fresh_examples_that_the_model_got(tmp_path: Path) -> None:
    callback, steps = on_demand(), 25
    data = Data(2, 4, length=4 * steps, delay=0.03)
    run = fit(data, model=Recorder(delay=0.004), callbacks=[callback], log_every_n_steps=5, logger=logger(tmp_path), max_epochs=2)
    assert callback.reports[-1].echoed_examples > 0, "the test tests something"
    found = journal_of(tmp_path)
    assert found.note == ""
    assert list(found.shares) == expected_shares(run.model.batches, [steps, steps])
    assert [len(each) for each in found.shares] == [2, 2]
    for report in summary_of(tmp_path).reports:
        assert sum(seconds for _, seconds in report.slices) == pytest.approx(
            report.steps * ((report.data_wait_seconds or 0) + (report.step_seconds or 0)), abs=1e-4
        )


@pytest.mark.parametrize("step", [3, STEPS + 3])
def test_a_run_that_was_killed_and_resumed_in_another_folder_has_its_whole_strip(tmp_path: Path, step: int) -> None:
    models = [Recorder(delay=0.004) for _ in range(2)]
    with pytest.raises(Killed):
        run_on_demand(
            on_demand(),
            SaveAt(tmp_path, [step], dies=True),
            model=models[0],
            max_epochs=3,
            log_every_n_steps=5,
            logger=logger(tmp_path / "first"),
        )
    path = SaveAt(tmp_path, []).path(step)
    run_on_demand(
        on_demand(), model=models[1], max_epochs=3, log_every_n_steps=5, logger=logger(tmp_path / "second"), ckpt_path=path
    )
    found = journal_of(tmp_path / "second")
    assert (found.note, len(found.shares)) == ("", 3)
    assert list(found.shares) == expected_shares(models[0].batches[:step] + models[1].batches, [STEPS] * 3)


class SlowStream(Stream):
    def example(self, index: int) -> Any:
        time.sleep(0.01)
        return super().example(index)


def test_over_a_stream_the_strip_has_the_fresh_examples_that_the_model_got(tmp_path: Path) -> None:
    callback, loader = on_demand(), DataLoader(SlowStream(60), 4, num_workers=2)
    run = fit(
        loader, model=Recorder(delay=0.004), callbacks=[callback], log_every_n_steps=5, logger=logger(tmp_path), max_epochs=2
    )
    assert callback.reports[-1].echoed_examples > 0, "the test tests something"
    found = journal_of(tmp_path)
    assert found.note == ""
    assert list(found.shares) == expected_shares(run.model.batches, run.model.steps)


def test_of_whole_batches_the_journal_is_believed(tmp_path: Path) -> None:
    loader = DataLoader(Scans(40, delay=0.03), 4, num_workers=2, shuffle=True)
    callback = on_demand(insertion_point="after_batching")
    fit(loader, model=Recorder(delay=0.004), callbacks=[callback], log_every_n_steps=5, logger=logger(tmp_path), max_epochs=3)
    found = journal_of(tmp_path)
    assert found.note == ""
    for shares, report in zip(found.shares, summary_of(tmp_path).reports, strict=True):
        (share,) = shares
        assert share == pytest.approx((report.fresh_in_epoch or 0) / (4 * report.steps))


def test_a_loader_that_the_user_keeps_has_written_its_journal_when_the_picture_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    seen: list[FromJournal] = []
    monkeypatch.setattr(logged, "picture", lambda summary, journal: seen.append(journal))
    monkeypatch.setattr(logged, "_TAKERS", {"CSVLogger": lambda logger, figure, step: None})
    loader = EchoLoader(
        DataLoader(Scans(22, delay=0.01), 4, num_workers=2), "demand", insertion_point="after_augmentation", seed=0
    )
    run = fit(loader, callbacks=[EchoCallback(plot=True)], log_every_n_steps=5, logger=logger(tmp_path), max_epochs=2)
    assert run.trainer.state.finished
    assert [(journal.note, len(journal.shares)) for journal in seen] == [("", 2)]
    assert seen[0].shares == journal_of(tmp_path).shares
    loader.close()


def test_a_missing_or_damaged_journal_is_told_on_the_page_and_the_report_is_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pages need matplotlib")
    run_on_demand(on_demand(), max_epochs=2, log_every_n_steps=5, logger=logger(tmp_path))
    path, html = tmp_path / "run" / "echo_journal_rank0.bin", tmp_path / "page.html"
    data = path.read_bytes()
    changed = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    for content, says in ((changed, "is damaged"), (b"", "is not a journal"), (None, "is not there")):
        path.write_bytes(content) if content is not None else path.unlink()
        assert main(["report", str(tmp_path / "run"), "--html", str(html)]) == 0
        text = html.read_text()
        assert text.count("The strip shows the mean of each epoch, since the journal of the run could not be read: ") == 1
        assert says in text


# ---------------------------------------------------------------------- name and date


def test_the_summary_names_the_program_the_run_and_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/somebody/train.py", "--fast"])
    monkeypatch.setattr("lightning_echo.callback.local_time", lambda: "2026-01-31T09:05:00+01:00")
    saving = SaveAt(tmp_path, [EPOCH + 1])
    fit(Data(), callbacks=[echo(), saving], log_every_n_steps=5, logger=CSVLogger(tmp_path, name="digits", version=3))
    found = json.loads((tmp_path / "digits" / "version_3" / "echo_summary.json").read_text())
    assert (found["program"], found["name"], found["began"]) == ("train.py", "digits/version_3", "2026-01-31T09:05:00+01:00")
    monkeypatch.setattr("lightning_echo.callback.local_time", lambda: "2026-02-01T00:00:00+01:00")
    fit(
        Data(),
        callbacks=[echo()],
        log_every_n_steps=5,
        logger=CSVLogger(tmp_path, name="digits", version=4),
        ckpt_path=saving.path(EPOCH + 1),
    )
    found = json.loads((tmp_path / "digits" / "version_4" / "echo_summary.json").read_text())
    assert (found["name"], found["began"]) == ("digits/version_4", "2026-01-31T09:05:00+01:00"), "when it began the first time"


def test_a_time_is_local_and_has_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    for zone, expected in (("Asia/Kolkata", "1970-01-02T05:30:00+05:30"), ("UTC", "1970-01-02T00:00:00+00:00")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert local_time(86_400.25) == expected
    assert datetime.fromisoformat(local_time()).tzinfo is not None
    monkeypatch.undo()
    time.tzset()


def test_a_program_is_named_by_its_file_and_a_package_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (
        ("/a/train.py", "train.py"),
        ("/a/training/__main__.py", "training"),
        ("", "python"),
        ("-c", "-c"),
        ("__main__.py", "__main__.py"),
    ):
        monkeypatch.setattr("sys.argv", [given])
        assert program_name() == expected


class Named:
    def __init__(self, name: Any, version: Any) -> None:
        self.name, self.version = name, version


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("lightning_logs", 0, "lightning_logs/version_0"),
        ("project", "x7", "project/x7"),
        (None, None, ""),
        ("", "run", "run"),
        ("a", "", "a"),
    ],
)
def test_a_run_is_named_as_its_first_logger_names_it(name: Any, version: Any, expected: str) -> None:
    loggers = [Named(name, version), Named("another", 1)]
    for loggers_of, is_global_zero, found in ((loggers, True, expected), (loggers, False, ""), ([], True, "")):
        trainer: Any = type("Trainer", (), {"loggers": loggers_of, "is_global_zero": is_global_zero})
        assert run_name(trainer) == found
