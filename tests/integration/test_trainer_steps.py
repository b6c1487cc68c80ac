"""An epoch has as many steps as without echoing: with a limit over a stream, and where the model fetches its batches itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_saved_within_a_step import Place
from torch.utils.data import DataLoader, IterableDataset
from trainer_runs import trainer

from lightning_echo import EchoCallback, EchoLoader

EXAMPLES = 10


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(i) for i in range(EXAMPLES))


class Noted(pl.LightningModule):
    """Notes each batch with its epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.seen = False, list[tuple[int, ...]]()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.current_epoch, *batch.tolist()))

    def configure_optimizers(self) -> list[Any]:
        return []

    @property
    def steps(self) -> list[int]:
        return [[epoch for epoch, *_ in self.seen].count(number) for number in range(3)]


class Fetching(Noted):
    """Fetches its batches itself. It notes what the loader has counted."""

    counts: Any = None

    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        super().training_step(batch, 0)
        if isinstance(loader := self.trainer.train_dataloader, EchoLoader):
            self.counts = loader.counts


pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*dataloader_iter")


def fit(model: Any, loader: Any, factor: float | None, *, with_callback: bool = True, **options: Any) -> Any:
    echo: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 0}
    callbacks = [EchoCallback(factor=factor, **echo)] if factor and with_callback else []
    if factor and not with_callback:
        loader = EchoLoader(loader, factor, **echo)
    trainer(max_epochs=3, callbacks=callbacks, **options).fit(model, loader)
    return model


@pytest.mark.parametrize(("limit", "with_callback"), [(7, True), (13, False)])
def test_with_a_limit_a_pass_over_a_stream_goes_on_across_epochs(limit: Any, with_callback: bool) -> None:
    plain = fit(Noted(), DataLoader(Stream(), 1), None, limit_train_batches=limit)
    echoed = fit(Noted(), DataLoader(Stream(), 1), 1, with_callback=with_callback, limit_train_batches=limit)
    assert echoed.steps == plain.steps
    assert [index for _, index in echoed.seen] == [i % EXAMPLES for i in range(sum(plain.steps))]


def test_a_run_with_a_limit_resumes_where_a_pass_goes_on(tmp_path: Any) -> None:
    limit = 13

    class Saves(pl.Callback):
        def on_train_batch_start(self, runner: pl.Trainer, *_: Any) -> None:
            runner.save_checkpoint(tmp_path / f"{runner.fit_loop.total_batch_idx}.ckpt")

    class Batches(Place):
        def __iter__(self) -> Iterator[Any]:
            for i in range(self.at, EXAMPLES):
                self.at = i + 1
                yield torch.tensor([i])
            self.at = 0

    def run(*callbacks: Any, ckpt_path: Any = None) -> Any:
        model = Noted()
        callbacks = (EchoCallback(factor=2, seed=0), *callbacks)
        trainer(max_epochs=3, callbacks=list(callbacks), limit_train_batches=limit).fit(model, Batches(), ckpt_path=ckpt_path)
        return model.seen

    whole = run(Saves())
    assert len(whole) == 3 * limit
    for at in (limit - 1, limit, limit + 3):
        assert run(ckpt_path=tmp_path / f"{at}.ckpt") == whole[at:]


@pytest.mark.parametrize(("workers", "factor", "with_callback"), [(0, 2, False), (2, 1, True)])
def test_a_model_that_fetches_its_batches_itself_gets_all_of_them(workers: int, factor: float, with_callback: bool) -> None:
    def make() -> Any:
        return DataLoader([torch.tensor(i) for i in range(16)], 4, num_workers=workers)

    plain = fit(Fetching(), make(), None)
    echoed = fit(Fetching(), make(), factor, with_callback=with_callback)
    assert echoed.steps == plain.steps == [4, 4, 4]
    if factor == 1:
        assert echoed.seen == plain.seen
    assert echoed.counts.delivered == 3 * 16
    over_stream = fit(Fetching(), DataLoader(Stream(), 2), 1)
    assert (over_stream.steps, over_stream.counts.delivered) == ([5, 5, 5], 3 * EXAMPLES)
