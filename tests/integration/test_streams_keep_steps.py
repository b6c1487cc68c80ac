"""A stream with a state keeps the steps of its epochs: as many as without echoing, from the second one on; nothing is lost."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import node_launch
import pytest
import stream_ranks_runs
from kept_steps_cases import BATCH, LENGTH, OF_PASS, Plain, Stateful, Streaming, fresh, stream_of, without_echoing
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from trainer_runs import Recorder, Run, SaveAt, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, EchoStateError
from lightning_echo.loader import loader as loader_module


def train(
    workers: int = 0, factor: Any = 2.5, make: Any = Stateful, loader: Any = None, ckpt_path: Any = None, **options: Any
) -> Run:
    config = {"epoch_length": options.pop("epoch_length", "fixed"), "buffer_size": 2 * BATCH * max(workers, 1), "seed": 7}
    data = EchoDataModule(Streaming(make, workers, **(loader or {})), factor, **config)
    model = options.pop("model", None)
    return fit(data, model=model, ckpt_path=ckpt_path, **{"max_epochs": 4, **options})


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("factor", [2.5, 4])
def test_epochs_have_the_plain_loaders_steps_from_the_second_one_on_and_each_example_is_read_once_in_order(
    workers: int, factor: float
) -> None:
    run, steps, parts = train(workers, factor), without_echoing(workers), max(workers, 1)
    first, *others = run.model.steps
    assert others == [steps] * 3
    assert first > 1.3 * steps, "a first epoch is a pass: nobody knows its length before"
    assert run.model.validated_at == [first, first + steps, first + 2 * steps, first + 3 * steps]
    of_workers = fresh(run.model.batches, parts)
    assert of_workers == [stream_of(worker, parts, len(each)) for worker, each in enumerate(of_workers)]
    of_first = fresh(run.model.by_epoch[0], parts)
    assert [len(each) for each in of_first] == [len(range(worker, LENGTH, parts)) for worker in range(parts)]
    assert sum(map(len, of_workers)) == run.loader.counts.fresh
    of_epoch = sum(map(len, of_workers)) - LENGTH
    assert of_epoch == pytest.approx(3 * steps * BATCH / factor, abs=2 * BATCH), "one in factor is fresh"


@pytest.mark.parametrize("workers", [0, 2])
def test_with_drop_last_the_plain_loader_has_fewer_steps_and_so_has_the_echoed_one(workers: int) -> None:
    run = train(workers, 2, loader={"drop_last": True}, max_epochs=3)
    assert run.model.steps[1:] == [without_echoing(workers, drop_last=True)] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_from_the_middle_of_an_epoch_of_a_pass_and_from_ends_a_run_resumes_exactly(workers: int, tmp_path: Path) -> None:
    probe, steps = train(workers).model.steps[0], without_echoing(workers)
    at = [3, probe - 1, probe, probe + 1, probe + steps // 2, probe + steps - 1, probe + steps, probe + steps + 3]
    saver = SaveAt(tmp_path, at)
    whole = train(workers, callbacks=[saver])
    for step in at:
        rest = train(workers, ckpt_path=saver.path(step))
        assert rest.model.batches == whole.model.batches[step:], step
        assert rest.model.epochs == whole.model.epochs[step:], step
        assert rest.model.weights == whole.model.weights, step
        assert rest.model.validated_at == [each for each in whole.model.validated_at if each > step], step
        assert rest.loader.counts.fresh == whole.loader.counts.fresh, step


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_of_an_epochs_end_goes_on_within_the_pass(workers: int, tmp_path: Path) -> None:
    class SaveEnds(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = train(workers, callbacks=[SaveEnds()])
    done = 0
    for epoch, steps in enumerate(whole.model.steps[:-1]):
        done += steps
        rest = train(workers, ckpt_path=tmp_path / f"{epoch}.ckpt")
        assert rest.model.batches == whole.model.batches[done:]
        assert rest.model.steps == whole.model.steps[epoch + 1 :]


def test_passes_of_other_lengths_do_not_change_the_steps_and_lose_nothing() -> None:
    lengths = (LENGTH, 13, 90, 1)
    run = train(2, 2, lambda: Stateful(lengths), max_epochs=8)
    assert run.model.steps[1:] == [without_echoing(2)] * 7
    of_workers = fresh(run.model.batches, 2)
    assert of_workers == [stream_of(worker, 2, len(each), lengths) for worker, each in enumerate(of_workers)]
    assert max(map(max, of_workers)) > 2 * OF_PASS


def test_on_demand_epochs_keep_their_steps_and_a_resumed_run_loses_nothing(tmp_path: Path) -> None:
    def run(**options: Any) -> Run:
        return train(2, "demand", model=Recorder(delay=0.005), **options)

    steps, saver = without_echoing(2), SaveAt(tmp_path, range(5, 100, 7))
    whole = run(callbacks=[saver])
    first, *others = whole.model.steps
    assert others == [steps] * 3
    saved = [step for step in saver.steps if step < len(whole.model.batches) - 2]
    for step in (min(saved), max(saved)):
        rest = run(ckpt_path=saver.path(step))
        assert rest.model.epochs[0] == whole.model.epochs[step]
        assert rest.model.steps[1:] == [steps] * (3 - rest.model.epochs[0])
        assert step <= first or rest.model.steps[0] == whole.model.epochs[step:].count(rest.model.epochs[0])
        of_workers = fresh([*whole.model.batches[:step], *rest.model.batches], 2)
        assert of_workers == [stream_of(worker, 2, len(each)) for worker, each in enumerate(of_workers)]


def test_at_factor_1_a_stream_is_the_plain_loaders_epoch_by_epoch() -> None:
    lengths = (LENGTH, 13, 90)
    run = train(2, 1, lambda: Stateful(lengths), max_epochs=3)
    plain = DataLoader(Plain(lengths), BATCH, num_workers=2, persistent_workers=True)
    expected = [[tuple(batch["index"].tolist()) for batch in plain] for _ in range(3)]
    assert [[indices for indices, _ in epoch] for epoch in run.model.by_epoch] == expected


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"make": Plain}, "it has no state"),
        ({"epoch_length": "full_pass"}, "the user asks for passes"),
        ({"reload_dataloaders_every_n_epochs": 1}, "another loader may have other data"),
    ],
)
def test_elsewhere_an_epoch_is_a_pass_and_that_is_said_at_the_start(options: Any, why: str, caplog: Any) -> None:
    with caplog.at_level("INFO", logger="lightning_echo"):
        run = train(0, 2, **options)
    steps = run.model.steps
    assert all(each > 1.5 * without_echoing(0) for each in steps), why
    assert run.loader.counts.fresh == 4 * LENGTH
    said = [record.getMessage() for record in caplog.records]
    expected = (
        "an epoch ends when the stream ends, after about 2 times as many steps as without echoing; "
        "Trainer(limit_train_batches=...) sets another number"
    )
    assert sum(expected in line for line in said) == run.data.datamodule.asked["train"], "once for each loader"
    assert not any("times as many steps" in line for line in said if expected not in line)


def test_that_steps_are_kept_is_said_at_the_start(caplog: Any) -> None:
    with caplog.at_level("INFO", logger="lightning_echo"):
        train(0, 2, max_epochs=1)
    said = [record.getMessage() for record in caplog.records]
    expected = (
        "the first epoch ends when the stream ends, after about 2 times as many steps as without echoing; later epochs have as "
        "many as without echoing, and the rest of a pass follows in the next one"
    )
    assert sum(expected in line for line in said) == 1


def test_with_a_limit_of_the_trainers_all_epochs_have_as_many_steps_and_the_first_one_too() -> None:
    run = train(2, 2, limit_train_batches=5)
    assert run.model.steps == [5] * 4
    of_workers = fresh(run.model.batches, 2)
    assert of_workers == [stream_of(worker, 2, len(each)) for worker, each in enumerate(of_workers)]


def test_with_the_callback_and_a_factor_that_changes_the_number_stays() -> None:
    class Raises(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 15:
                echo.factor = 4

    echo = EchoCallback(echo=EchoConfig(2, buffer_size=16, seed=7), summary=False)
    run = fit(Streaming(workers=2), callbacks=[echo, Raises()], max_epochs=4)
    assert run.model.steps[1:] == [without_echoing(2)] * 3
    assert [report.steps for report in echo.reports] == run.model.steps
    of_workers = fresh(run.model.batches, 2)
    assert of_workers == [stream_of(worker, 2, len(each)) for worker, each in enumerate(of_workers)]


def test_a_loop_of_its_own_has_the_same_epochs_and_an_iteration_that_is_cut_short_loses_nothing() -> None:
    with closing(EchoLoader(DataLoader(Stateful(), BATCH), 2, seed=7)) as loader:
        whole = [[tuple(batch["index"].tolist()) for batch in loader] for _ in range(4)]
        assert loader.epoch_length == "fixed"
        with pytest.raises(TypeError, match="has no length, since its loader has none"):
            len(loader)
    assert [len(epoch) for epoch in whole[1:]] == [without_echoing(0)] * 3
    with closing(EchoLoader(DataLoader(Stateful(), BATCH), 2, seed=7)) as loader:
        first = [tuple(batch["index"].tolist()) for batch in loader]
        cut = [tuple(batch["index"].tolist()) for batch in islice(loader, 5)]
        rest = [tuple(batch["index"].tolist()) for batch in loader]
    assert [*first, *cut, *rest] == [batch for epoch in whole for batch in epoch][: len(first) + 5 + without_echoing(0)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_own_loader_and_a_second_fit_keep_the_steps_and_the_place(workers: int) -> None:
    loader = EchoLoader(DataLoader(Stateful(), BATCH, num_workers=workers), 2.5, seed=7)
    echo, plain = EchoCallback(factor=2.5, summary=False), DataLoader(Stateful(), BATCH, num_workers=workers)
    fits = [fit(loader, max_epochs=4), fit(plain, callbacks=[echo], max_epochs=2), fit(plain, callbacks=[echo], max_epochs=2)]
    steps = [each for run in fits for each in run.model.steps]
    assert steps[1:4] == steps[5:] == [without_echoing(workers)] * 3
    for batches in (fits[0].model.batches, [*fits[1].model.batches, *fits[2].model.batches]):
        of_workers = fresh(batches, max(workers, 1))
        assert of_workers == [stream_of(worker, max(workers, 1), len(each)) for worker, each in enumerate(of_workers)]


def test_in_a_collection_and_on_ranks_without_a_trainer_an_epoch_is_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, other loaders decide when an epoch ends, or nobody knows whether all ranks begin epochs together."""

    class OfFirst(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["one"], batch_idx)

    echoed = {name: EchoLoader(DataLoader(Stateful(), BATCH), 2, seed=7) for name in ("one", "two")}
    run = fit(CombinedLoader(echoed, "max_size_cycle"), model=OfFirst())
    assert all(each > 1.5 * without_echoing(0) for each in run.model.steps)
    monkeypatch.setattr(loader_module, "world", lambda: (2, 0))
    alone = EchoLoader(DataLoader(Stateful(), BATCH), 2, seed=7, num_replicas=1, rank=0)
    assert all(sum(1 for _ in alone) > 1.5 * without_echoing(0) for _ in range(3))


@pytest.mark.parametrize("options", [{"insertion_point": "after_batching"}, {"epoch_length": "full_pass"}])
def test_where_an_epoch_is_a_pass_the_loader_says_so(options: Any) -> None:
    assert EchoLoader(DataLoader(Stateful(), BATCH), 2, **options).epoch_length == "full_pass"


def test_within_a_pass_another_number_of_workers_is_refused_in_words() -> None:
    with closing(EchoLoader(DataLoader(Stateful(), BATCH, num_workers=2), 2, seed=7)) as loader:
        for _ in range(2):
            list(loader)
        state = loader.state_dict()
    with pytest.raises(EchoStateError, match=r"within a pass of a stream, with workers=2 \(now 1\).*epoch_length='full_pass'"):
        EchoLoader(DataLoader(Stateful(), BATCH, num_workers=1), 2).load_state_dict(state)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return node_launch.once(
        tmp_path_factory, "stream_ranks", lambda folder: node_launch.with_ranks(2, folder, stream_ranks_runs.__file__)[1]
    )


def test_ranks_whose_later_passes_differ_take_as_many_steps_and_lose_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank, lengths in zip(ranks, stream_ranks_runs.LENGTHS, strict=True):
        assert rank["own"]["steps"][1:] == [without_echoing(2)] * 3
        of_workers = fresh(rank["own"]["batches"], 2)
        assert of_workers == [stream_of(worker, 2, len(each), lengths) for worker, each in enumerate(of_workers)]
        assert max(map(max, of_workers)) >= 2 * OF_PASS
    assert ranks[0]["own"]["epochs"] == ranks[1]["own"]["epochs"]


def test_ranks_resume_within_an_epoch_within_a_pass_exactly(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        whole, resumed = rank["whole"], rank["resumed"]
        assert resumed["batches"] == whole["batches"][stream_ranks_runs.SAVED_AT :] != []
        assert resumed["epochs"] == whole["epochs"][stream_ranks_runs.SAVED_AT :]
        assert whole["steps"][1:] == [without_echoing(2)] * 3
