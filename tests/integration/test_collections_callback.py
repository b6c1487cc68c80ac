"""EchoCallback on several loaders: what it measures, logs and decides, of each and of all."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from callback_cases import PER_EPOCH, Recording, Remembering
from collection_runs import SEED, Several, SeveralRecorder, alone, echoed, plain_loader
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import Run, SaveAt, Scans, first_uses, fit, trainer

from lightning_echo import Controller, EchoCallback, EchoConfig, EchoLoader, FactorSchedule, TargetIdle
from lightning_echo.measure.control import Reason

NAMES = ("long", "short")


def callback(factor: float = 2.5, controller: Controller | None = None, **options: Any) -> EchoCallback:
    return EchoCallback(controller, echo=EchoConfig(factor, "after_augmentation", seed=SEED, **options))


def named(controller: Controller | None = None, **factors: float) -> EchoCallback:
    configs = {name: EchoConfig(factor, "after_augmentation", seed=SEED) for name, factor in factors.items()}
    return EchoCallback(controller, echo=configs)


def several(data: Any, echo: EchoCallback, **options: Any) -> Run:
    callbacks = [echo, *options.pop("callbacks", [])]
    return fit(data, model=options.pop("model", None) or SeveralRecorder(), callbacks=callbacks, **options)


def counts_until(model: Any, position: int, step: int) -> tuple[int, int]:
    """Fresh and echoed examples of one loader in the first steps of the run, from what the model saw."""
    batches = [each[position] for each in model.batches[:step] if each[position] is not None]
    fresh = sum(map(len, first_uses(batches)))
    return fresh, sum(len(indices) for indices, _ in batches) - fresh


@pytest.mark.parametrize("kind", ["dict", "max_size"])
@pytest.mark.parametrize("workers", [0, 1])
def test_counts_are_logged_of_each_loader_and_of_all(kind: str, workers: int) -> None:
    logger, echo = Remembering(), callback()
    model = several(Several(kind, workers), echo, logger=logger, log_every_n_steps=5).model
    assert [step for step, _ in logger.metrics] == [4, 5, 9, 11, 14, 17]
    for step, values in logger.metrics:
        assert step is not None
        of_each = [counts_until(model, position, step + 1) for position in (0, 1)]
        for name, (fresh, echoes) in zip(NAMES, of_each, strict=True):
            assert values[f"echo/{name}/fresh_examples"] == fresh
            assert values[f"echo/{name}/echoed_examples"] == echoes
            assert values[f"echo/{name}/factor"] == 2.5
        assert values["echo/fresh_examples"] == sum(fresh for fresh, _ in of_each)
        assert values["echo/echoed_examples"] == sum(echoes for _, echoes in of_each)
        assert values["echo/factor"] == 2.5
        assert all(type(value) in (int, float) and math.isfinite(value) for value in values.values())
        is_end = step % 6 == 5
        assert {f"echo/{name}/passes" in values for name in NAMES} == {is_end}
        if is_end:
            for position, (name, length) in enumerate(zip(NAMES, (22, 10), strict=True)):
                assert values[f"echo/{name}/passes"] == pytest.approx(of_each[position][0] / length)
    known = {f"echo/{key}" for key in PER_EPOCH} | {
        f"echo/{name}/{key}" for name in NAMES for key in ("factor", "fresh_examples", "echoed_examples", "passes")
    }
    assert set().union(*(values for _, values in logger.metrics)) <= known - {"echo/passes"} | {"epoch"}
    assert [report.passes for report in echo.reports] == [None] * 3


def test_batches_are_those_that_an_echo_data_module_gives_and_the_users_hook_is_given_back() -> None:
    data = Several("min_size")
    run = several(data, callback())
    assert run.model.batches == fit(echoed("min_size"), model=SeveralRecorder()).model.batches
    assert "train_dataloader" not in vars(data)


def test_a_models_own_collection_is_echoed_too() -> None:
    class Own(SeveralRecorder):
        def train_dataloader(self) -> Any:
            return Several("list").train_dataloader()

        def val_dataloader(self) -> Any:
            return Several().val_dataloader()

    run = Run(Own(), None, trainer(callbacks=[callback()]))
    run.trainer.fit(run.model)
    assert run.model.of(1) == alone("short", "1", 18)


def test_only_those_named_are_echoed() -> None:
    logger = Remembering()
    run = several(Several("max_size"), named(short=4), logger=logger, log_every_n_steps=0, max_epochs=2)
    assert type(run.trainer.train_dataloader["long"]) is DataLoader  # type: ignore[index]
    assert run.model.of(1) == alone("short", "short", 6, factor=4)
    values = logger.metrics[-1][1]
    assert values["echo/fresh_examples"] == values["echo/short/fresh_examples"] == counts_until(run.model, 1, 12)[0]
    assert not any(key.startswith("echo/long") for key in values)


def test_options_of_each_loader_go_to_the_hyperparameters() -> None:
    logger = Remembering()
    run = several(Several(), named(long=2, short=4), logger=logger, log_every_n_steps=0, max_epochs=1)
    (said,) = [params["echo"] for params in logger.params if "echo" in params]
    loaders: Any = run.trainer.train_dataloader
    for name, factor in (("long", 2), ("short", 4)):
        assert said[name] == {
            "factor": factor,
            "insertion_point": "after_augmentation",
            "buffer_size": loaders[name].buffer_size,
            "reuse": "memory",
            "epoch_length": "fixed",
            "seed": loaders[name].seed,
            "cache": None,
            "share": None,
        }
    assert said["controller"] is None


def test_factors_of_their_own_have_their_harmonic_mean_and_no_recommendation(caplog: Any) -> None:
    echo = named(long=2, short=4)
    several(Several(), echo, max_epochs=2)
    assert [report.factor for report in echo.reports] == [pytest.approx(2 / (1 / 2 + 1 / 4))] * 2
    assert [report.recommended_factor for report in echo.reports] == [None] * 2
    assert [report.upstream_seconds for report in echo.reports] == [None] * 2


# ---------------------------------------------------------------------- deciding


def test_a_controller_decides_on_one_factor_for_all() -> None:
    controller = Recording({0: 3.0, 1: 1.5})
    echo = callback(1, controller)
    run = several(Several(), echo)
    assert [seen.factor for seen in controller.seen] == [1, 3, 1.5]
    assert {loader.factor for loader in run.trainer.train_dataloader.values()} == {1.5}  # type: ignore[union-attr]


def test_a_schedule_begins_with_its_first_factor_for_all_and_full_passes_follow_it() -> None:
    echo = callback(1, FactorSchedule({0: 2.0, 1: 3.0}), epoch_length="full_pass")
    run = several(Several("min_size"), echo, max_epochs=3)
    assert run.model.steps == [6, 9, 9]
    assert run.model.validated_at == [6, 15, 24]


@pytest.mark.parametrize("controller", [TargetIdle(), FactorSchedule({0: 2.0})])
def test_a_controller_beside_factors_of_their_own_is_refused_before_training(controller: Controller) -> None:
    message = r"different echo factors \(long 2, short 4\).*give all of them the same factor"
    with pytest.raises(MisconfigurationException, match=message):
        several(Several(), named(controller, long=2, short=4))
    data = echoed("dict", loaders={"long": EchoConfig(2), "short": EchoConfig(4)})
    with pytest.raises(MisconfigurationException, match=message):
        several(data, EchoCallback(controller))


def test_a_controller_drives_an_echo_data_module_of_several_loaders() -> None:
    data = echoed("dict", factor=1)
    several(data, EchoCallback(Recording({0: 3.0})), max_epochs=2)
    assert data.factor == 3


def in_fit(loaders: Any, echo: EchoCallback, **options: Any) -> Run:
    run = Run(SeveralRecorder(), None, trainer(callbacks=[echo], **options))
    run.trainer.fit(run.model, loaders, Several().val_dataloader())
    return run


def test_a_controller_drives_echo_loaders_that_are_passed_to_fit_as_a_collection() -> None:
    loaders = {name: EchoLoader(plain_loader(name), 1, seed=1) for name in NAMES}
    in_fit(loaders, EchoCallback(Recording({0: 3.0})), max_epochs=2)
    assert {loader.factor for loader in loaders.values()} == {3}
    assert {loader.factor_owner for loader in loaders.values()} == {""}  # let go of after fit
    for loader in loaders.values():  # the next epoch is one of its own, which a state within it can tell
        next(iter(loader))
        assert loader.state_dict()["epoch_goes_on"] is None


def test_a_schedules_first_factor_is_that_of_all_echo_loaders_passed_to_fit() -> None:
    loaders = {name: EchoLoader(plain_loader(name), 1, seed=1) for name in NAMES}
    echo = EchoCallback(FactorSchedule({0: 3.0}))
    in_fit(loaders, echo, max_epochs=1)
    assert [report.factor for report in echo.reports] == [3]


def test_after_a_resume_echo_loaders_passed_to_fit_take_the_new_length_of_a_new_factor(tmp_path: Path) -> None:
    def make(callbacks: Any = (), ckpt_path: Any = None) -> Any:
        options = {"insertion_point": "after_augmentation", "epoch_length": "full_pass", "seed": 1}
        loaders = {name: EchoLoader(plain_loader(name), 1, **options) for name in NAMES}
        model, echo = SeveralRecorder(), EchoCallback(Recording({1: 2.0}))
        runner = trainer(callbacks=[echo, *callbacks])
        runner.fit(model, loaders, Several().val_dataloader(), ckpt_path=ckpt_path)
        return model

    save = SaveAt(tmp_path, [2])
    whole = make([save])
    assert whole.steps == [6, 6, 12]
    assert make(ckpt_path=save.path(2)).batches == whole.batches[2:]


def test_a_controller_refuses_echo_loaders_with_factors_of_their_own_in_fit() -> None:
    loaders = {name: EchoLoader(plain_loader(name), factor, seed=1) for factor, name in enumerate(NAMES, 1)}
    with pytest.raises(MisconfigurationException, match=r"different echo factors \(long 1, short 2\)"):
        in_fit(loaders, EchoCallback(TargetIdle()))


def test_plain_loaders_passed_to_fit_as_a_collection_are_refused_with_the_way_out() -> None:
    with pytest.raises(MisconfigurationException, match=r"passed to fit.*Use EchoLoader\(loader, 2\.5\)"):
        in_fit(Several().train_dataloader(), callback())


class Slow(Several):
    """Both loaders read slowly, slower than a step on a busy machine: 12 ms an example of the long one, 8 ms of the short one."""

    def train_dataloader(self) -> Any:
        self.asked["train"] += 1
        short = 20 if self.kind == "max_size" else 40
        made = {"long": Sleeping(Scans(40), 0.012), "short": Sleeping(Scans(short), 0.008)}
        loaders = {name: DataLoader(each, 4, num_workers=self.workers) for name, each in made.items()}
        return loaders if self.kind == "dict" else CombinedLoader(loaders, self.kind)  # type: ignore[arg-type]


class Sleeping:
    def __init__(self, scans: Any, seconds: float) -> None:
        self.scans, self.seconds = scans, seconds

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.scans[index]


def test_costs_are_those_of_the_slowest_loader_and_the_controller_sees_them() -> None:
    controller = Recording()
    run = several(Slow(workers=1), callback(1, controller), max_epochs=1)
    (seen,) = controller.seen
    assert seen.costs is not None
    assert seen.costs.workers == 1
    loaders: Any = run.trainer.train_dataloader
    long, short = (4 * each.seconds.source / each.seconds.examples for each in (loaders["long"], loaders["short"]))
    assert abs(seen.costs.source_seconds - long) < short / 2  # a batch of the long one, not of both
    assert seen.idle_fraction is not None
    assert seen.idle_fraction > 0.3


def test_without_workers_the_costs_of_the_loaders_add_up() -> None:
    controller = Recording()
    several(Slow(workers=0), callback(1, controller), max_epochs=1)
    assert controller.seen[0].costs is not None
    assert controller.seen[0].costs.workers == 0
    assert controller.seen[0].costs.source_seconds >= 4 * (0.012 + 0.008)


def test_where_steps_do_not_take_a_batch_of_each_the_costs_are_not_known() -> None:
    controller = Recording()
    several(Slow("max_size", workers=1), callback(1, controller), max_epochs=1)
    assert controller.seen[0].idle_fraction is not None
    assert controller.seen[0].costs is None


def test_with_a_loader_beside_a_controller_says_that_it_does_not_know() -> None:
    echo = named(TargetIdle(), short=1)
    several(Slow(workers=1), echo, max_epochs=1)
    (report,) = echo.reports
    assert report.reason == Reason.not_measured.value
    assert report.next_factor == report.factor == 1
    assert "not known" in report.message


def test_measuring_alone_counts_the_examples_of_all_loaders() -> None:
    logger, echo = Remembering(), EchoCallback()
    run = several(Several("max_size"), echo, logger=logger, log_every_n_steps=0, max_epochs=2)
    assert [report.fresh_examples for report in echo.reports] == [32, 64]
    assert [report.factor for report in echo.reports] == [1, 1]
    assert run.trainer.train_dataloader is not None


def test_counts_of_each_loader_go_on_after_a_resume(tmp_path: Path) -> None:
    def make(folder: Path, callbacks: Any = (), **options: Any) -> Any:
        logger = Remembering()
        several(Several("max_size"), callback(), callbacks=callbacks, logger=logger, log_every_n_steps=0, **options)
        return [values for _, values in logger.metrics]

    save = SaveAt(tmp_path, [8])
    whole = make(tmp_path, [save])
    resumed = make(tmp_path, ckpt_path=save.path(8))
    keys = [f"echo/{name}/{key}" for name in NAMES for key in ("factor", "fresh_examples", "echoed_examples", "passes")]
    for key in [*keys, "echo/fresh_examples", "echo/echoed_examples", "echo/effective_factor"]:
        assert [values[key] for values in resumed] == [values[key] for values in whole[1:]], key


@pytest.mark.parametrize(
    ("echo", "error", "message"),
    [
        ({}, ValueError, "echo is empty"),
        ({"a": 4}, TypeError, "echo has no option 'a'"),
        ({"a": EchoConfig(), "b": 4}, TypeError, "must map names of loaders to an EchoConfig each, got 'b': int 4"),
        ({"a": {"factr": 4}}, TypeError, r"echo\['a'\] has no option 'factr'"),
        ({"a": EchoConfig(), "b": EchoConfig("auto")}, ValueError, "'auto' for 'b' alone, .* one factor for all"),
        ({0: EchoConfig()}, TypeError, "got 0: EchoConfig"),
        ([EchoConfig()], TypeError, "echo must be an EchoConfig, a dict or DictConfig of its options, a dict of these by names"),
    ],
)
def test_impossible_options_are_refused_when_the_callback_is_made(echo: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        EchoCallback(echo=echo)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(MisconfigurationException, match=r"EchoCallback has .* named 'shrt', but .* named 'long', 'short'"):
        several(Several(), named(shrt=2))


def test_the_progress_bar_shows_the_factor_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            assert trainer.progress_bar_callback is not None
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module)["echo"])

    several(Several(), named(long=2, short=4), callbacks=[Look()], max_epochs=1, enable_progress_bar=True)
    assert shown[0].startswith("2.7x")
