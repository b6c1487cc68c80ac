"""`factor="auto"` echoes on demand where that is possible; otherwise `TargetIdle` decides. The log says which, and why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from callback_cases import WAYS, Recording, fit_by
from collection_runs import Several, SeveralRecorder
from demand_runs import STEPS, Slow, assert_fresh_once_per_pass
from omegaconf import OmegaConf
from trainer_runs import Data, Recorder, SaveAt, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, TargetIdle
from lightning_echo.training.loaders import echoed_in, parts_of

pytestmark = pytest.mark.usefixtures("read_here", "one_thread")
POINT: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 7}
ON_DEMAND, BY_CONTROLLER = (
    "factor='auto' echoes on demand: ",
    "factor='auto' is TargetIdle() here, because on demand is impossible: ",
)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of auto."""
    lines = [record.getMessage() for record in caplog.records]
    return [line.removeprefix("lightning_echo: ") for line in lines if "factor='auto'" in line]


def modes(run: Any) -> dict[str, tuple[bool, float]]:
    """Of each loader that is echoed, whether it echoes on demand, and its factor."""
    return {name: (part.on_demand, part.factor) for name, part in parts_of(echoed_in(run.trainer.train_dataloader)).items()}


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.grid
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"max_factor": 5}, {"max_factor": 3, "seed": 1}], ids=str)
def test_a_loader_that_can_echoes_on_demand_and_the_controller_rests(
    way: str, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    callback = EchoCallback(factor="auto", **options)
    run = fit_by(way, callback, data=Slow(), model=None, max_epochs=2)
    assert modes(run) == {"": (True, options.get("max_factor", 8))}
    assert [report.reason for report in callback.reports] == ["", ""], "no controller was asked"
    (line,) = said(caplog)
    assert line.startswith(ON_DEMAND)


@pytest.mark.parametrize("way", WAYS)
def test_a_loader_that_cannot_is_driven_by_target_idle_and_the_log_says_why(way: str, caplog: pytest.LogCaptureFixture) -> None:
    callback = EchoCallback(factor="auto", max_factor=5, reuse="each", **POINT)
    run = fit_by(way, callback, data=Slow(), model=None, max_epochs=2)
    ((on_demand, factor),) = modes(run).values()
    assert not on_demand
    assert callback.reports[0].factor == 1
    assert callback.reports[-1].next_factor == factor
    assert all(report.reason for report in callback.reports), "a controller was asked"
    assert said(caplog) == [f"{BY_CONTROLLER}reuse='each' fixes the uses of each example"]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1.5, None])
@pytest.mark.parametrize("by", ["callback", "data module"])
def test_target_idle_chooses_no_factor_above_the_bound_that_was_given(by: str, bound: float | None) -> None:
    data, options = Slow(0.06), {"max_factor": bound, "reuse": "each", **POINT}
    callback = EchoCallback(factor="auto", **options) if by == "callback" else EchoCallback()
    run = fit(data if by == "callback" else EchoDataModule(data, "auto", **options), callbacks=[callback], max_epochs=5)
    assert not any(on_demand for on_demand, _ in modes(run).values())
    largest = max(report.next_factor for report in callback.reports)
    assert largest == bound if bound else 2 <= largest <= 8  # reading a batch takes several times as long as a step


def test_of_several_loaders_the_smallest_bound_counts() -> None:
    both: Any = {"long": EchoConfig("auto", max_factor=4, **POINT), "short": EchoConfig("auto", max_factor=3, **POINT)}
    controller: Any = EchoCallback(echo=both).controller
    assert controller.max_factor == 3


def test_several_loaders_echo_on_demand_together_or_none_does(caplog: pytest.LogCaptureFixture) -> None:
    both: Any = {"long": EchoConfig("auto", max_factor=4, **POINT), "short": EchoConfig("auto", **POINT)}
    run = fit(Several("dict", 1), model=SeveralRecorder(), callbacks=[EchoCallback(echo=both)], max_epochs=1)
    assert modes(run) == {"long": (True, 4), "short": (True, 8)}
    one: Any = {"long": both["long"], "short": EchoConfig("auto", reuse="each", **POINT)}
    run = fit(Several("dict", 1), model=SeveralRecorder(), callbacks=[EchoCallback(echo=one)], max_epochs=1)
    assert {on_demand for on_demand, _ in modes(run).values()} == {False}
    first, second = said(caplog)
    assert first.startswith(ON_DEMAND)
    assert second == f"{BY_CONTROLLER}the loader 'short': reuse='each' fixes the uses of each example"


def test_a_data_module_leaves_it_to_the_callback(caplog: pytest.LogCaptureFixture) -> None:
    data, callback = EchoDataModule(Slow(), "auto", max_factor=6, **POINT), EchoCallback()
    assert modes(fit(data, callbacks=[callback], max_epochs=2)) == {"": (True, 6)}
    assert callback.reports[0].max_factor == 6
    driven, recording = EchoDataModule(Slow(), "auto", max_factor=6, **POINT), Recording({0: 2.0})
    assert modes(fit(driven, callbacks=[EchoCallback(recording)], max_epochs=2)) == {"": (False, 2)}
    assert [seen.factor for seen in recording.seen] == [1, 2]
    assert len(said(caplog)) == 1, "a controller of the user's needs no words"


def test_loaders_that_the_user_echoes_keep_their_factor(caplog: pytest.LogCaptureFixture) -> None:
    loader = EchoLoader(Slow().train_dataloader(), 2, **POINT)
    callback = EchoCallback(factor="auto")
    assert not modes(fit(loader, callbacks=[callback], max_epochs=1))[""][0]
    assert callback.reports[0].reason
    demand = EchoLoader(Slow().train_dataloader(), "demand", **POINT)
    callback = EchoCallback(factor="auto")
    assert modes(fit(demand, callbacks=[callback], max_epochs=1)) == {"": (True, 8)}
    assert callback.reports[0].reason == ""


@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 1}], ids=["kept", "reloaded"])
def test_a_run_goes_on_on_demand_with_its_bound(tmp_path: Path, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    step = STEPS + 3
    first, save = EchoCallback(factor="auto", max_factor=4, **POINT), SaveAt(tmp_path, [step])
    whole = fit(Slow(), model=Recorder(delay=0.004), callbacks=[first, save], **options)
    assert modes(whole) == {"": (True, 4)}
    second = EchoCallback(factor="auto", max_factor=4, **POINT)
    run = fit(Slow(), model=Recorder(delay=0.004), callbacks=[second], ckpt_path=save.path(step), **options)
    assert modes(run) == {"": (True, 4)}
    loader: Any = run.trainer.train_dataloader
    assert_fresh_once_per_pass(whole.model.batches[:step] + run.model.batches, loader)
    assert len(said(caplog)) == 2, "once in each run"


def test_a_checkpoint_of_a_constant_factor_goes_on_on_demand_with_the_bound_of_the_run(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [STEPS + 3])
    fit(Slow(), callbacks=[EchoCallback(TargetIdle(), factor=3, **POINT), save])
    callback = EchoCallback(factor="auto", **POINT)
    with pytest.warns(UserWarning, match="saved with a constant factor: the run continues on demand"):
        run = fit(Slow(), callbacks=[callback], ckpt_path=save.path(STEPS + 3))
    assert modes(run) == {"": (True, 8)}
    assert callback.reports[-1].passes == pytest.approx(callback.reports[-1].fresh_examples / 30)


def test_a_callback_decides_anew_in_each_fit(caplog: pytest.LogCaptureFixture) -> None:
    callback = EchoCallback(factor="auto", max_factor=4, **POINT)
    assert modes(fit(Slow(), callbacks=[callback], max_epochs=1)) == {"": (True, 4)}
    assert modes(fit(Slow(), callbacks=[callback], max_epochs=1)) == {"": (True, 4)}
    assert len(said(caplog)) == 1


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_factor=4 is the bound of factor='demand' and of 'auto', got factor=2"):
        EchoCallback(factor=2, max_factor=4)
    with pytest.raises(ValueError, match=r"chooses between echo on demand and TargetIdle.*leave one of the two out"):
        EchoCallback(TargetIdle(), factor="auto")
    with pytest.raises(ValueError, match=r"factor='auto' is impossible here: .* a Trainer with EchoCallback\(factor='auto'\)"):
        EchoLoader(Data().train_dataloader(), "auto")


@pytest.mark.parametrize("given", [{"factor": "auto", "max_factor": 4}, {"factor": "demand", "max_factor": 4.5}], ids=str)
def test_the_options_come_from_omega_conf_too(given: dict[str, Any]) -> None:
    structured = OmegaConf.merge(OmegaConf.structured(EchoConfig), given)
    for options in (OmegaConf.create(given), OmegaConf.to_object(structured)):
        callback = EchoCallback(echo=options)  # type: ignore[arg-type]
        run = fit(Slow(0), callbacks=[callback], max_epochs=1)
        assert modes(run) == {"": (True, given["max_factor"])}
