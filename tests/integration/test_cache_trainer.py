"""A Trainer's batches and weights are the same with and without a cache, at every insertion point."""

import os

import pytest
from torch.utils.data import DataLoader
from trainer_runs import POINTS, Data, Killed, SaveAt, Scans, fit

from lightning_echo import EchoDataModule

HOLDS = {point: ("raw",) if point == "after_read" else ("raw", "loaded") for point in POINTS}


class Still(Scans):
    """An example does not say which process has read it."""

    def read(self, index):
        reader, read = os.getpid(), super().read(index)
        return read.replace(str(reader).encode(), b"0")


class StillData(Data):
    def train_dataloader(self):
        self.asked["train"] += 1
        return DataLoader(Still(**self.scans), self.batch_size, num_workers=self.workers, **self.loader_options)


def trained(point, workers, cache, factor=2.5, **options):
    data = EchoDataModule(StillData(workers=workers), factor, insertion_point=point, seed=7, cache=cache)
    run = fit(data, max_epochs=5, **options)
    return run.model.batches, run.model.weights, run


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.parametrize(("point", "hold"), [(point, hold) for point in POINTS for hold in HOLDS[point]])
def test_a_training_is_the_same_with_a_cache(one_thread, point, hold, reload, workers):
    options = {"reload_dataloaders_every_n_epochs": reload}
    batches, weights, _ = trained(point, workers, None, **options)
    cached, its_weights, run = trained(point, workers, {"size": "2MiB", "hold": hold}, **options)
    assert cached == batches
    assert its_weights == weights
    counts, delivered = run.loader.cache_counts, run.loader.counts
    assert counts.examples == 22
    assert counts.hits > 0
    assert counts.hits + counts.misses == delivered.fresh


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_alone_gives_the_batches_of_a_plain_training_from_the_second_epoch_on_without_a_read(
    tmp_path, one_thread, workers
):
    log = tmp_path / "reads"

    def run(cache):
        data = EchoDataModule(StillData(workers=workers, log=log), 1, seed=7, cache=cache)
        model = fit(data, max_epochs=6).model
        reads = len(log.read_text().split()) if log.exists() else 0
        log.unlink(missing_ok=True)
        return model.batches, model.weights, reads

    batches, weights, _ = run(None)
    cached, its_weights, reads = run("2MiB")
    assert (cached, its_weights) == (batches, weights)
    at_construction, audits = 16 + 2 * 8, 3 * max(workers, 1)  # the proofs, and the sizes of eight each at the point and held
    assert 22 <= reads <= 22 + at_construction + audits


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_was_saved_with_a_cache_goes_on_without_one_and_the_reverse(tmp_path, one_thread, point):
    hold = HOLDS[point][-1]
    whole = fit(EchoDataModule(StillData(), 2.5, insertion_point=point, seed=7), max_epochs=4).model
    for cache in ({"size": "2MiB", "hold": hold}, None):
        first = EchoDataModule(StillData(), 2.5, insertion_point=point, seed=7, cache=cache)
        save = SaveAt(tmp_path, [9], dies=True)
        with pytest.raises(Killed):
            fit(first, max_epochs=4, callbacks=[save])
        other = None if cache else {"size": "2MiB", "hold": hold}
        second = EchoDataModule(StillData(), 2.5, insertion_point=point, seed=7, cache=other)
        resumed = fit(second, max_epochs=4, ckpt_path=save.path(9)).model
        assert resumed.batches == whole.batches[9:]
        assert resumed.weights == whole.weights
