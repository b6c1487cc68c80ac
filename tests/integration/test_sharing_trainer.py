"""Sharing under Lightning's Trainer: a callback, a data module, a checkpoint, a collection of loaders."""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
from callback_cases import Remembering
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sharing_runs import end_readers, status, wait_until
from torch.utils.data import DataLoader
from trainer_runs import Data, Killed, Recorder, SaveAt, Scans, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, ShareConfig

LENGTH = 42
SHARE: dict[str, Any] = {"name": "fit", "linger_seconds": 0.5, "window": "1MiB"}


pytestmark = pytest.mark.usefixtures("own_folder")


def indices(epoch: Any) -> list[int]:
    return [index for batch in epoch for index in batch[0]]


@pytest.mark.parametrize(
    "data_and_callback",
    [
        lambda: (Data(length=LENGTH), EchoCallback(share=SHARE)),
        lambda: (Data(length=LENGTH), EchoCallback(echo=EchoConfig(share=ShareConfig(**SHARE)))),
        lambda: (EchoDataModule(Data(length=LENGTH), 1, share=SHARE), EchoCallback()),
    ],
    ids=["option", "config", "data module"],
)
def test_a_fit_that_shares_gets_whole_passes_and_validates(data_and_callback: Any) -> None:
    data, callback = data_and_callback()
    logger = Remembering()
    run = fit(data, callbacks=[callback], val_check_interval=4, logger=logger, log_every_n_steps=5)
    assert run.model.steps == [11, 11, 11]
    for epoch in run.model.by_epoch:
        assert sorted(indices(epoch)) == list(range(LENGTH))
    assert run.model.validated_at == [4, 8, 15, 19, 26, 30]
    assert [report.factor for report in callback.reports] == [1, 1, 1]
    logged = [metrics for _, metrics in logger.metrics if "echo/shared_trainings" in metrics]
    assert [metrics["echo/shared_trainings"] for metrics in logged] == [1, 1, 1]
    assert [metrics["echo/missed_examples"] for metrics in logged] == [0, 0, 0]
    assert all(metrics["echo/peer_wait_fraction"] == 0 for metrics in logged)
    assert [params["echo"]["share"] for params in logger.params if "echo" in params] == ["fit"]


def test_limits_and_max_steps_hold_and_the_pass_goes_on() -> None:
    run = fit(Data(length=LENGTH), callbacks=[EchoCallback(share=SHARE)], limit_train_batches=5, max_epochs=None, max_steps=13)
    assert run.model.steps == [5, 5, 3]
    assert sorted(indices(run.model.batches[:11])) == list(range(LENGTH))


@pytest.mark.parametrize("point", ["after_augmentation", "after_transfer"])
def test_it_echoes_on_top_of_what_is_shared(point: str) -> None:
    callback = EchoCallback(factor=2, insertion_point=point, share=SHARE, seed=7)
    run = fit(Data(length=LENGTH), callbacks=[callback], max_epochs=4)
    report = callback.reports[-1]
    assert run.model.steps == [11] * 4
    # The last batch of a pass is smaller.
    assert report.fresh_examples + report.echoed_examples == pytest.approx(4 * LENGTH, abs=4)
    assert report.fresh_examples == pytest.approx(2 * LENGTH, abs=8)


@pytest.mark.parametrize("ending", [None, Killed, KeyboardInterrupt])
def test_a_fit_that_ends_in_any_way_has_left_its_reader(ending: type[BaseException] | None) -> None:
    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            del args
            if trainer.global_step == 5:
                if ending is None:
                    trainer.should_stop = True  # as early stopping does
                else:
                    raise ending

    callback = EchoCallback(share={**SHARE, "linger_seconds": 60})
    with nullcontext() if ending is None else pytest.raises((Killed, SystemExit, KeyboardInterrupt)):
        fit(Data(length=LENGTH), callbacks=[callback, Ends()])
    wait_until(lambda: status("fit")["count"] == 0, "the training has left")


@pytest.mark.parametrize(("factor", "step"), [(1, 7), (2, 16)])
def test_a_checkpoint_resumes_exactly_with_another_reader(tmp_path: Any, factor: float, step: int) -> None:
    def callback() -> EchoCallback:
        return EchoCallback(factor=factor, share=SHARE, seed=7)

    whole = fit(Data(length=LENGTH), callbacks=[callback()])
    end_readers()
    with pytest.raises(Killed):
        fit(Data(length=LENGTH), callbacks=[callback(), SaveAt(tmp_path, [step], dies=True)])
    end_readers()
    resumed = fit(Data(length=LENGTH), callbacks=[callback()], ckpt_path=str(tmp_path / f"step-{step}.ckpt"))
    assert resumed.model.batches == whole.model.batches[step:]
    assert resumed.model.weights == whole.model.weights


class TwoLoaders(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return {name: DataLoader(Scans(20), 4) for name in ("a", "b")}

    def val_dataloader(self) -> Any:
        return DataLoader(Scans(6), 3)


def test_several_loaders_are_refused_with_the_way_out() -> None:
    with pytest.raises(MisconfigurationException, match="share='fit' is impossible for several loaders"):
        fit(TwoLoaders(), model=Recorder(), callbacks=[EchoCallback(share=SHARE)])


class ListOfOne(TwoLoaders):
    def train_dataloader(self) -> Any:
        return [DataLoader(Scans(20), 4)]


def test_a_list_of_one_loader_is_refused_as_what_it_is() -> None:
    with pytest.raises(MisconfigurationException, match=r"a list or dict of one loader: .* Return the loader itself"):
        fit(ListOfOne(), model=Recorder(), callbacks=[EchoCallback(share=SHARE)])
