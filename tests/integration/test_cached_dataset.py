"""A `CachedDataset` in loaders: workers of any kind, a Trainer's validation, ranks, an `EchoLoader`."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_echo import CacheConfig, CachedDataset, EchoLoader, StagedDataset

COUNT, BATCH = 24, 4


class Images(StagedDataset):
    """Counts its reads, in whichever process they happen."""

    def __init__(self, values=300):
        self.values = values
        self.reads = torch.zeros(COUNT, dtype=torch.long).share_memory_()

    def load(self, index):
        self.reads[index] += 1
        return {"image": torch.full((self.values,), float(index)), "index": index}

    def augment(self, example):
        example["image"] += torch.rand(())  # in place
        return example

    def __len__(self):
        return COUNT


class Plain(Dataset):
    """As of torchvision: with a transform that it calls."""

    def __init__(self):
        self.reads = torch.zeros(COUNT, dtype=torch.long).share_memory_()
        self.transform = add_noise

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.transform(torch.full((30,), float(index))), index

    def __len__(self):
        return COUNT


def add_noise(image):
    return image.add_(torch.rand(()))


def batches_of(dataset, workers, method=None, epochs=3, **options):
    """All batches of some epochs under a seed."""
    torch.manual_seed(3)
    loader = DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
        generator=torch.Generator().manual_seed(1),
        **options,
    )
    return [batch for _ in range(epochs) for batch in loader]


def equal(left, right):
    for one, other in zip(left, right, strict=True):
        parts = zip(*(batch.values() if isinstance(batch, dict) else batch for batch in (one, other)), strict=True)
        assert all(torch.equal(first, second) for first, second in parts)


@pytest.mark.parametrize(
    ("make", "workers", "method", "options"),
    [
        (Images, 0, None, {}),
        (Plain, 0, None, {}),
        (Images, 1, "fork", {}),
        (Plain, 3, "fork", {"persistent_workers": True}),
        (Images, 2, "spawn", {"persistent_workers": True}),
        (Plain, 2, "forkserver", {"persistent_workers": True}),
    ],
)
def test_batches_are_those_of_the_data_set_itself_and_are_read_once(make, workers, method, options):
    dataset = make()
    cached = CachedDataset(dataset, "1MiB")
    # A worker's seed does not depend on how it is started, and a fork is quicker.
    equal(batches_of(make(), workers, method and "fork", **options), batches_of(cached, workers, method, **options))
    counts = cached.cache_counts
    assert (counts.examples, counts.hits, counts.misses) == (COUNT, 2 * COUNT, COUNT)
    audits = 2 * max(workers, 1) * (2 if workers and not options else 1)  # the 1st and 10th hit of each process
    assert COUNT < int(dataset.reads.sum()) <= COUNT + audits


def test_what_does_not_fit_is_read_in_each_pass_by_all_workers():
    dataset = Images(50_000)
    cached = CachedDataset(dataset, "1MiB")
    batches_of(cached, 2, "fork")
    counts = cached.cache_counts
    assert (counts.examples, counts.is_full) == (5, True)
    assert counts.hits + counts.misses == 3 * COUNT
    assert counts.hits == 10


def test_two_loaders_and_a_subset_have_one_cache():
    cached = CachedDataset(Images(), "1MiB")
    batches_of(cached, 2, "fork", epochs=1)
    before = cached.cache_counts
    equal(batches_of(Subset(Images(), range(8)), 1, "fork"), batches_of(Subset(cached, range(8)), 1, "fork"))
    after = cached.cache_counts
    assert (after.hits - before.hits, after.misses - before.misses) == (24, 0)


def test_attributes_are_there_in_workers():
    def init(number):
        inside = torch.utils.data.get_worker_info().dataset
        assert inside.values == 300
        inside.values = 301

    cached = CachedDataset(Images(), "1MiB")
    assert len(batches_of(cached, 1, "fork", epochs=1, worker_init_fn=init)) == COUNT // BATCH
    assert cached.values == 300, "it was set in the worker"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_validation_and_prediction_of_a_trainer(tmp_path, workers):
    import lightning  # spawned workers of the other tests need not wait for it

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(300, 1)
            self.seen = []

        def training_step(self, batch, number):
            return self.layer(batch["image"]).mean()

        def validation_step(self, batch, number):
            self.seen.append(batch["image"][:, 0].tolist())
            batch["image"].zero_()

        def predict_step(self, batch, number):
            return batch["index"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    seen = []
    for wrapped in (False, True):
        dataset = Images()
        validated = CachedDataset(dataset, CacheConfig("1MiB")) if wrapped else dataset
        options = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
        lightning.seed_everything(1, verbose=False)
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
        )  # fmt: skip
        model = Model()
        trainer.fit(model, DataLoader(Images(), BATCH), DataLoader(validated, **options))
        predicted = trainer.predict(model, DataLoader(validated, **options))
        assert torch.cat(predicted).tolist() == list(range(COUNT))
        seen.append(model.seen)
    assert seen[0] == seen[1]
    counts = validated.cache_counts
    assert (counts.hits, counts.misses) == (3 * COUNT, COUNT)


@pytest.mark.parametrize("point", ["auto", "after_augmentation", "after_batching"])
def test_an_echo_loader_over_it_reuses_what_is_held(point):
    dataset = Images()
    cached = CachedDataset(dataset, "1MiB")
    loader = EchoLoader(DataLoader(cached, BATCH, num_workers=2), 2, insertion_point=point)
    batches = [batch for _ in range(4) for batch in loader]
    assert loader.insertion_point == ("before_augmentation" if point == "auto" else point)
    assert len(batches) == 4 * COUNT // BATCH
    for batch in batches:
        noise = batch["image"] - batch["index"][:, None]
        assert ((noise >= 0) & (noise < 1)).all()
        assert torch.allclose(noise, noise[:, :1].expand_as(noise), atol=1e-5), "augmented once"
    assert int(dataset.reads.sum()) < COUNT + 10
    assert cached.cache_counts.examples == COUNT
    loader.close()


def test_an_echo_loader_over_it_redoes_the_augmentation_and_cannot_cut_after_reading():
    cached = CachedDataset(Images(), "1MiB")
    uses = {}
    for batch in EchoLoader(DataLoader(cached, BATCH), 2, seed=1):
        for index, image in zip(batch["index"].tolist(), batch["image"], strict=True):
            uses.setdefault(index, []).append(image[0].item() - index)
    twice = [noises for noises in uses.values() if len(noises) == 2]
    assert twice
    assert all(one != other for one, other in twice)
    with pytest.raises(ValueError, match="CachedDataset has no read"):
        EchoLoader(DataLoader(cached, BATCH), 2, insertion_point="after_read")


class TestUnderAName:
    def test_the_next_one_has_no_miss(self, tmp_path):
        config = CacheConfig("1MiB", path=str(tmp_path), name="val")
        expected = batches_of(Images(), 2, "fork", epochs=1)
        for misses in (None, 0):
            cached = CachedDataset(Images(), config)
            equal(expected, batches_of(cached, 2, "fork", epochs=1))
            assert misses in (None, cached.cache_counts.misses)
            del cached
            gc.collect()
        assert len(os.listdir(tmp_path)) == 1

    @pytest.mark.program
    def test_ranks_that_each_make_their_own_have_one_file(self, tmp_path):
        program = (
            "import sys, torch.distributed\n"
            f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
            "from test_cached_dataset import *\n"
            "rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]\n"
            "torch.distributed.init_process_group('gloo', init_method='file://' + store, rank=rank, world_size=2)\n"
            "if rank == 0:\n"  # no collective is in it
            "    alone = CachedDataset(Images(), '1MiB')\n"
            "cached = CachedDataset(Images(), CacheConfig('1MiB', path=path, name='val'))\n"
            "batches_of(Subset(cached, range(rank, COUNT, 2)), 1, 'fork', epochs=1)\n"
            "torch.distributed.barrier()\n"
            "print(cached.cache_counts.examples)\n"
            "torch.distributed.destroy_process_group()\n"
        )
        path = tmp_path / "kept"
        path.mkdir()
        arguments = [str(tmp_path / "store"), str(path)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank), *arguments], **options) for rank in range(2)]
        for rank in ranks:
            told, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
            assert told.split() == [str(COUNT)]
        assert len(os.listdir(path)) == 1


def _read_all(rank, cached):
    for index in range(rank, COUNT, 2):
        cached[index]


def test_ranks_that_are_started_with_it_have_its_cache():
    cached = CachedDataset(Images(), "1MiB")
    torch.multiprocessing.spawn(_read_all, (cached,), nprocs=2)
    counts = cached.cache_counts
    assert (counts.examples, counts.hits, counts.misses) == (COUNT, 0, COUNT)
