"""EchoCallback on several loaders: what it measures, logs and decides, of each and of all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from callback_cases import PER_EPOCH, Recording, Remembering
from collection_runs import SEED, Several, SeveralRecorder, echoed, plain_loader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from trainer_runs import Run, SaveAt, first_uses, fit, trainer

from lightning_echo import Controller, EchoCallback, EchoConfig, EchoLoader, FactorSchedule, TargetIdle

pytestmark = pytest.mark.usefixtures("read_here")
NAMES = ("long", "short")


def callback(factor: float = 2.5, controller: Controller | None = None, **options: Any) -> EchoCallback:
    return EchoCallback(controller, echo=EchoConfig(factor, "after_augmentation", seed=SEED, **options))


def named(controller: Controller | None = None, **factors: float) -> EchoCallback:
    configs = {name: EchoConfig(factor, "after_augmentation", seed=SEED) for name, factor in factors.items()}
    return EchoCallback(controller, echo=configs)


def several(data: Any, echo: EchoCallback, **options: Any) -> Run:
    callbacks = [echo, *options.pop("callbacks", [])]
    return fit(data, model=SeveralRecorder(), callbacks=callbacks, **options)


def counts_until(model: Any, position: int, step: int) -> tuple[int, int]:
    """Fresh and echoed examples of one loader in the first steps of the run, from what the model saw."""
    batches = [each[position] for each in model.batches[:step] if each[position] is not None]
    fresh = sum(map(len, first_uses(batches)))
    return fresh, sum(len(indices) for indices, _ in batches) - fresh


def test_counts_are_logged_of_each_loader_and_of_all() -> None:
    logger, echo = Remembering(), callback()
    model = several(Several("max_size", 1), echo, logger=logger, log_every_n_steps=5).model
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


def test_factors_of_their_own_are_logged_with_their_harmonic_mean_and_no_recommendation() -> None:
    logger, echo = Remembering(), named(long=2, short=4)
    run = several(Several(), echo, logger=logger, log_every_n_steps=0, max_epochs=1)
    (said,) = [params["echo"] for params in logger.params if "echo" in params]
    loaders: Any = run.trainer.train_dataloader
    for name, factor in (("long", 2), ("short", 4)):
        expected = {"factor": factor, "buffer_size": loaders[name].buffer_size, "seed": loaders[name].seed}
        assert expected.items() <= said[name].items()
    assert said["controller"] is None
    (report,) = echo.reports
    assert report.factor == pytest.approx(2 / (1 / 2 + 1 / 4))
    assert (report.recommended_factor, report.upstream_seconds) == (None, None)


@pytest.mark.parametrize("through_module", [False, True])
def test_a_controller_decides_on_one_factor_for_all(through_module: bool) -> None:
    controller = Recording({0: 3.0, 1: 1.5})
    data, echo = (echoed(factor=1), EchoCallback(controller)) if through_module else (Several(), callback(1, controller))
    run = several(data, echo)
    assert [seen.factor for seen in controller.seen] == [1, 3, 1.5]
    assert {loader.factor for loader in run.trainer.train_dataloader.values()} == {1.5}  # type: ignore[union-attr]


DIFFERENT = r"different echo factors \(long 2, short 4\).*give all of them the same factor"


def test_a_controller_beside_factors_of_their_own_is_refused_before_training() -> None:
    controller = FactorSchedule({0: 2.0})
    with pytest.raises(MisconfigurationException, match=DIFFERENT):
        several(Several(), named(controller, long=2, short=4))
    with pytest.raises(MisconfigurationException, match=DIFFERENT):
        several(echoed(loaders={"long": EchoConfig(2), "short": EchoConfig(4)}), EchoCallback(controller))
    with pytest.raises(MisconfigurationException, match=DIFFERENT):
        in_fit(passed(long=2, short=4), EchoCallback(TargetIdle()))


def passed(long: float = 1, short: float = 1, **options: Any) -> dict[str, EchoLoader]:
    factors = {"long": long, "short": short}
    return {name: EchoLoader(plain_loader(name), factor, seed=1, **options) for name, factor in factors.items()}


def in_fit(loaders: Any, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Run:
    run = Run(SeveralRecorder(), None, trainer(callbacks=list(callbacks), **options))
    run.trainer.fit(run.model, loaders, Several().val_dataloader(), ckpt_path=ckpt_path)
    return run


def test_a_controller_drives_echo_loaders_that_are_passed_to_fit_as_a_collection() -> None:
    loaders, echo = passed(), EchoCallback(FactorSchedule({0: 2.0, 1: 3.0}))
    in_fit(loaders, echo, max_epochs=2)
    assert [report.factor for report in echo.reports] == [2, 3]
    assert {loader.factor for loader in loaders.values()} == {3}
    assert {loader.factor_owner for loader in loaders.values()} == {""}  # let go of after fit
    for loader in loaders.values():  # the next epoch is one of its own, which a state within it can tell
        next(iter(loader))
        assert loader.state_dict()["epoch_goes_on"] is None


def test_after_a_resume_echo_loaders_passed_to_fit_take_the_new_length_of_a_new_factor(tmp_path: Path) -> None:
    def make(*callbacks: Any, ckpt_path: Any = None) -> Any:
        loaders = passed(insertion_point="after_augmentation", epoch_length="full_pass")
        return in_fit(loaders, EchoCallback(Recording({1: 2.0})), *callbacks, ckpt_path=ckpt_path).model

    save = SaveAt(tmp_path, [2])
    whole = make(save)
    assert whole.steps == [6, 6, 12]
    assert make(ckpt_path=save.path(2)).batches == whole.batches[2:]


def test_with_a_loader_beside_a_controller_says_that_it_does_not_know() -> None:
    echo = named(TargetIdle(), short=1)
    several(Several(), echo, max_epochs=1)
    (report,) = echo.reports
    assert report.reason == "not_measured"
    assert report.next_factor == report.factor == 1
    assert "not known" in report.message


def test_counts_of_each_loader_go_on_after_a_resume(tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Any:
        logger = Remembering()
        several(Several("max_size"), callback(), callbacks=callbacks, logger=logger, log_every_n_steps=0, **options)
        return [values for _, values in logger.metrics]

    save = SaveAt(tmp_path, [8])
    whole, resumed = make(save), make(ckpt_path=save.path(8))
    keys = [f"echo/{name}/{key}" for name in NAMES for key in ("factor", "fresh_examples", "echoed_examples", "passes")]
    for key in [*keys, "echo/fresh_examples", "echo/echoed_examples", "echo/effective_factor"]:
        assert [values[key] for values in resumed] == [values[key] for values in whole[1:]], key
