"""`EchoCallback` on demand: what it logs and says, and how controllers set the bound."""

from __future__ import annotations

from itertools import pairwise
from operator import mul
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from callback_cases import Falling, Recording, Remembering
from collection_runs import Several, SeveralRecorder
from demand_runs import BATCH, LENGTH, STEPS, Slow, on_demand, run_on_demand
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, SaveAt, Scans, first_uses, fit, fresh_stream, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule, MetricGuard, TargetIdle
from lightning_echo.measure.summary import RunSummary, seconds_of

pytestmark = pytest.mark.usefixtures("read_here", "one_thread")


def uses_until(model: Recorder, first: int, end: int) -> float:
    """Uses per fresh example in some steps, from what the model saw."""
    fresh = [len(new) for new in first_uses(model.batches)]
    return sum(len(indices) for indices, _ in model.batches[first:end]) / sum(fresh[first:end])


def test_the_factor_that_is_logged_is_the_mean_of_the_uses_so_far_and_the_effective_one_that_of_the_epoch() -> None:
    logger, callback = Remembering(), on_demand(max_factor=6)
    model = run_on_demand(callback, logger=logger, log_every_n_steps=3, max_epochs=2).model
    assert callback.reports[-1].echoed_examples > 0, "the test tests something"
    for step, values in logger.metrics:
        assert step is not None
        assert values["echo/factor"] == pytest.approx(uses_until(model, 0, step + 1))
    ends = [values for _, values in logger.metrics if "echo/passes" in values]
    for epoch, values in enumerate(ends):
        assert values["echo/effective_factor"] == pytest.approx(uses_until(model, epoch * STEPS, (epoch + 1) * STEPS))
    assert not any("echo/recommended_factor" in values for _, values in logger.metrics)
    assert [report.max_factor for report in callback.reports] == [6, 6]
    assert callback.factor == 6
    (said,) = [params["echo"] for params in logger.params if "echo" in params]
    assert (said["factor"], said["max_factor"]) == ("demand", 6)


class SlowStages(Scans):
    """To read an example takes 10 ms, and so does its augmentation, which an echo repeats."""

    def read(self, index: Any) -> Any:
        sleep(0.01)
        return super().read(index)

    def augment(self, example: Any) -> Any:
        sleep(0.01)
        return super().augment(example)


def test_the_seconds_bridged_are_those_for_which_the_workers_would_have_made_every_batch_fresh() -> None:
    """They follow from the workers' time. Fewer fresh examples arrive than these could read, since they augment echoes, too."""
    callback = EchoCallback(factor="demand", insertion_point="before_augmentation", seed=7)
    loader = DataLoader(SlowStages(LENGTH), BATCH, num_workers=2, shuffle=True)
    fit(loader, model=Recorder(delay=0.004), callbacks=[callback], max_epochs=3)
    reports, passed = callback.reports, sum(seconds_of(callback.reports))
    counts = [(0, 0), *((report.fresh_examples, report.echoed_examples) for report in reports)]
    fresh = [STEPS * (b[0] - a[0]) / (sum(b) - sum(a)) for a, b in pairwise(counts)]
    assert [report.fresh_batches for report in reports] == pytest.approx(fresh)
    seconds = [report.fresh_batch_seconds or 0 for report in reports]
    assert min(seconds) >= LENGTH / STEPS * 0.02 / 2
    of_batch = sum(map(mul, fresh, seconds)) / sum(fresh)
    assert sum(fresh) < 0.9 * passed / of_batch, "the test tests something"
    assert reports[-1].stalls_bridged_seconds == pytest.approx(3 * STEPS * of_batch - passed)
    assert reports[-1].logged()["echo/stalls_bridged_seconds"] == reports[-1].stalls_bridged_seconds


def test_behind_a_source_that_keeps_up_nothing_is_echoed() -> None:
    callback = on_demand()
    run = run_on_demand(callback, delay=0, model=Recorder(delay=0.04), max_epochs=2)
    assert len(fresh_stream(run.model.batches)) == 2 * LENGTH
    assert [report.stalls_bridged_seconds for report in callback.reports] == [0, 0]


def test_without_workers_the_verdict_asks_for_some() -> None:
    callback = on_demand()
    run_on_demand(callback, workers=0)
    assert callback.verdict is not None
    assert callback.verdict.next_line.startswith("num_workers=")
    assert callback.reports[-1].echoed_examples == 0


def test_the_progress_bar_shows_the_uses_of_the_epoch_so_far() -> None:
    shown: list[tuple[int, str]] = []

    class Showing(Recorder):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            bar = self.trainer.progress_bar_callback
            assert bar is not None
            shown.append((len(self.batches), bar.get_metrics(self.trainer, self)["echo"]))

    model = run_on_demand(on_demand(), model=Showing(delay=0.004), enable_progress_bar=True, max_epochs=2).model
    assert len(shown) == 2 * STEPS
    fresh = [len(new) for new in first_uses(model.batches)]
    for step, text in shown:
        first = (step - 1) // STEPS * STEPS
        expected = uses_until(model, first, step) if sum(fresh[first:step]) else 1.0
        assert text.split()[0] == f"{expected:.1f}x"


def test_each_of_several_loaders_has_its_uses() -> None:
    callback = on_demand()
    run = fit(Several("dict", 1), model=SeveralRecorder(), callbacks=[callback], max_epochs=2)
    values = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    of_each = [run.model.of(position) for position in (0, 1)]
    for name, batches in zip(("long", "short"), of_each, strict=True):
        delivered = sum(len(indices) for indices, _ in batches)
        assert values[f"echo/{name}/factor"] == pytest.approx(delivered / len(fresh_stream(batches)))
    everything, fresh = (sum(len(b[0]) for part in of_each for b in part), sum(len(fresh_stream(part)) for part in of_each))
    assert values["echo/factor"] == pytest.approx(everything / fresh)
    assert values["echo/stalls_bridged_seconds"] >= 0


# ---------------------------------------------------------------------- controllers


def test_a_guard_lowers_the_bound_from_the_uses_of_its_epoch() -> None:
    """Its losses are 5, 4, 6, 7, 3: the fourth epoch is the second in a row without improvement."""
    callback = on_demand(MetricGuard(patience=2), max_factor=8)
    model = run_on_demand(callback, model=Falling(delay=0.004), max_epochs=5).model
    uses = uses_until(model, 3 * STEPS, 4 * STEPS)
    assert uses > 1, "the test tests something"
    assert [report.next_factor for report in callback.reports[:3]] == [8, 8, 8]
    assert callback.reports[3].next_factor == pytest.approx(max(1, min(uses, 8) / 2))
    assert [use.factor for use in callback.decisions] == [8, callback.reports[3].next_factor]
    assert f"at most max_factor {max(1, uses / 2):g} instead of 8" in callback.reports[3].message


def test_a_resumed_guard_keeps_its_bound(tmp_path: Path) -> None:
    first = on_demand(MetricGuard(patience=2))
    save = SaveAt(tmp_path, [4 * STEPS + 3])
    run_on_demand(first, save, model=Falling(delay=0.004), max_epochs=5)
    lowered = first.reports[3].next_factor
    assert lowered is not None
    resumed = on_demand(MetricGuard(patience=2))
    run_on_demand(resumed, model=Falling(delay=0.004), max_epochs=5, ckpt_path=save.path(4 * STEPS + 3))
    assert resumed.reports[3].state() == first.reports[3].state()
    assert (resumed.factor, resumed.reports[4].max_factor) == (lowered, lowered)


def test_a_schedule_sets_the_bound_and_with_1_nothing_is_echoed() -> None:
    """A bound counts from the first batch that was not planned: with these workers, within an epoch."""
    callback = on_demand(FactorSchedule({0: 1, 1: 4, 3: 1}))
    model = run_on_demand(callback, max_epochs=5, delay=0.03).model
    assert [report.max_factor for report in callback.reports][:2] == [1, 4]
    epochs = [sum(len(new) for new in first_uses(model.batches)[e * STEPS : (e + 1) * STEPS]) for e in range(5)]
    assert (epochs[0], epochs[4]) == (LENGTH, LENGTH)
    assert callback.verdict is not None
    assert "with max_factor=1, which FactorSchedule has set, nothing is echoed" in callback.verdict.message
    assert epochs[2] < LENGTH


def test_a_controller_sees_the_bound_and_the_uses_also_within_an_epoch(tmp_path: Path) -> None:
    recording = Recording()
    recording.every_n_steps = 4
    model = run_on_demand(on_demand(recording, max_factor=5), max_epochs=2).model
    assert [seen.factor for seen in recording.seen] == [5] * 4
    assert [seen.batches for seen in recording.seen] == [4, 8, 12, 16]
    for seen in recording.seen:
        first = (seen.batches - 1) // STEPS * STEPS
        assert seen.mean_uses == pytest.approx(uses_until(model, first, seen.batches))
    plain = Recording()
    fit(Data(), callbacks=[EchoCallback(plain, factor=2, insertion_point="after_augmentation")], max_epochs=1)
    assert [seen.mean_uses for seen in plain.seen] == [None]


REFUSED = r"is impossible with factor='demand': it chooses the factor .*Leave the controller out"


@pytest.mark.parametrize("controller", [TargetIdle(), MetricGuard(TargetIdle())], ids=repr)
def test_what_decides_by_idle_time_is_refused(controller: Any) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        EchoCallback(controller, factor="demand")
    with pytest.raises(ValueError, match=REFUSED):
        EchoCallback(controller, echo={"long": EchoConfig("demand"), "short": EchoConfig(2)})
    for data in (
        EchoDataModule(Slow(), "demand", insertion_point="after_augmentation"),
        EchoLoader(Slow().train_dataloader(), "demand", insertion_point="after_augmentation"),
    ):
        model = Recorder()
        with pytest.raises(MisconfigurationException, match=REFUSED):
            fit(data, model=model, callbacks=[EchoCallback(controller)])
        assert model.batches == []


def test_a_controller_sets_no_bound_and_a_factor_at_once() -> None:
    options = {"insertion_point": "after_augmentation", "seed": 7}
    configs = {"long": EchoConfig("demand", max_factor=2, **options), "short": EchoConfig(2, **options)}  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="some of them echo on demand, where it is a bound"):
        fit(Several("dict", 1), model=SeveralRecorder(), callbacks=[EchoCallback(FactorSchedule({1: 3.0}), echo=configs)])


@pytest.mark.parametrize("factor", ["demand", "auto"])
def test_a_loader_of_the_users_own_is_advised_with_demand(factor: str) -> None:
    loaders = [Slow().train_dataloader() for _ in range(2)]
    with pytest.raises(MisconfigurationException, match=r"Use EchoLoader\(loader, 'demand'\) for each .* factor='demand'\)"):
        trainer(callbacks=[EchoCallback(factor=factor)]).fit(SeveralRecorder(), loaders, Data().val_dataloader())


def test_the_file_of_the_run_has_bounds_and_uses(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    callback = on_demand(FactorSchedule({0: 4, 1: 2}))
    run_on_demand(callback, logger=CSVLogger(tmp_path), log_every_n_steps=2, max_epochs=2)
    (path,) = tmp_path.rglob("echo_summary.json")
    found = RunSummary.from_json(path.read_text())
    assert [use.factor for use in found.decisions] == [4, 2]
    assert list(found.reports) == callback.reports
    assert found.verdict is not None
    assert "factor" not in found.verdict.message.replace("max_factor", "").replace("factor='demand'", "")
