"""Sharing under Lightning's Trainer: a callback, a data module, a checkpoint, a collection of loaders."""

import re
import threading
from collections import deque
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
from callback_cases import Remembering
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sharing_runs import status, wait_until
from torch.utils.data import DataLoader
from trainer_runs import At, Data, Killed, Scans, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, ShareConfig

LENGTH = 42
SHARE: dict[str, Any] = {"name": "fit", "linger_seconds": 0.5, "window": "1MiB"}


pytestmark = pytest.mark.usefixtures("own_folder")


def indices(epoch: Any) -> list[int]:
    return [index for batch in epoch for index in batch[0]]


@pytest.mark.parametrize("by", ["callback", "data module"])
def test_a_fit_that_shares_gets_whole_passes_and_validates(by: str) -> None:
    data: Any = Data(length=LENGTH)
    callback, logger = EchoCallback(), Remembering()
    if by == "callback":
        callback = EchoCallback(echo=EchoConfig(share=ShareConfig(**SHARE)))
    else:
        data = EchoDataModule(data, 1, share=SHARE)
    run = fit(data, callbacks=[callback], val_check_interval=4, logger=logger, log_every_n_steps=5)
    assert run.model.steps == [11, 11, 11]
    for epoch in run.model.by_epoch:
        assert sorted(indices(epoch)) == list(range(LENGTH))
    assert run.model.validated_at == [4, 8, 15, 19, 26, 30]
    assert [report.factor for report in callback.reports] == [1, 1, 1]
    logged = [metrics for _, metrics in logger.metrics if "echo/shared_trainings" in metrics]
    for metrics in logged:
        assert (metrics["echo/shared_trainings"], metrics["echo/missed_examples"], metrics["echo/peer_wait_fraction"]) == (
            1,
            0,
            0,
        )
    assert len(logged) == 3
    assert [params["echo"]["share"] for params in logger.params if "echo" in params] == ["fit"]


class Alike(Scans):
    """Examples that are the same whichever process reads them, as two trainings that share must have them."""

    def read(self, index: Any) -> Any:
        return f"{index} 0".encode()


def test_the_examples_that_are_read_again_for_a_fit_that_comes_late_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """How many there are follows from its place, without a cache."""
    caplog.set_level("INFO", logger="lightning_echo")
    length, share = 200, {**SHARE, "window": "8KiB", "late": 0.6, "linger_seconds": 5}
    first = EchoLoader(DataLoader(Alike(length), 4, shuffle=True), 1, share=share)
    epoch = iter(first)
    had = [next(epoch)["index"].tolist() for _ in range(20)]

    def goes_on() -> None:
        try:
            wait_until(lambda: status("fit")["count"] == 2, "the fit has joined")
            had.extend(batch["index"].tolist() for batch in epoch)
            deque(first, maxlen=0)
        finally:
            first.close()

    beside, logger = threading.Thread(target=goes_on), Remembering()
    beside.start()
    late = DataLoader(Alike(length), 4, shuffle=True)
    run = fit(late, callbacks=[EchoCallback(share=share)], max_epochs=2, logger=logger)
    beside.join()
    assert [sorted(indices(epoch)) for epoch in run.model.by_epoch] == [list(range(length))] * 2
    assert indices(run.model.by_epoch[0]) == [index for batch in had for index in batch]
    (count,) = map(int, re.findall(r"it gets (\d+) examples first", caplog.text))
    assert 40 < count <= 0.6 * length
    logged = [metrics for _, metrics in logger.metrics if "echo/read_again_examples" in metrics]
    assert [metrics["echo/read_again_examples"] for metrics in logged] == [count] * 2
    assert [metrics["echo/missed_examples"] for metrics in logged] == [0] * 2


def test_limits_and_max_steps_hold_and_the_pass_goes_on() -> None:
    run = fit(Data(length=LENGTH), callbacks=[EchoCallback(share=SHARE)], limit_train_batches=5, max_epochs=None, max_steps=13)
    assert run.model.steps == [5, 5, 3]
    assert sorted(indices(run.model.batches[:11])) == list(range(LENGTH))


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_fit_that_ends_early_or_fails_has_left_its_reader(is_killed: bool) -> None:
    def end(trainer: pl.Trainer) -> None:
        trainer.should_stop = True  # as early stopping does
        if is_killed:
            raise Killed

    callback = EchoCallback(share={**SHARE, "linger_seconds": 60})
    with pytest.raises(Killed) if is_killed else nullcontext():
        fit(Data(length=LENGTH), callbacks=[callback, At({0: end})])
    wait_until(lambda: status("fit")["count"] == 0, "the training has left")


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ({"a": DataLoader(Scans(20), 4), "b": DataLoader(Scans(20), 4)}, "share='fit' is impossible for several loaders"),
        ([DataLoader(Scans(20), 4)], "a list or dict of one loader: .* Return the loader itself"),
    ],
)
def test_several_loaders_and_a_list_of_one_are_refused_with_a_hint(loaders: Any, message: str) -> None:
    data = Data()
    data.train_dataloader = lambda: loaders  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match=message):
        fit(data, callbacks=[EchoCallback(share=SHARE)])
