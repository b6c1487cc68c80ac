"""Each trap is seen where it is, and not in a loader without it."""

import lightning.pytorch as pl
import pytest
from loaders_with_traps import Batches, Examples, Holding, OwnIteration, Stream, good_loader
from torch.utils.data import BatchSampler, ConcatDataset, DistributedSampler, SequentialSampler, Subset

from lightning_echo.doctor.looking import FirstBatch, look
from lightning_echo.doctor.machine import Status
from lightning_echo.doctor.traps import Surroundings, check_hooks, check_traps

AROUND = Surroundings(has_cuda=False, sharing_strategy="file_descriptor", open_files=1024)
BATCH = FirstBatch(seconds=0.1, bytes=100, tensors=2)


def traps_of(loader, around=AROUND, first=BATCH):
    found = check_traps(look(loader), first, around)
    return {finding.name: finding for finding in found}


def test_a_good_loader_has_no_trap():
    (found,) = traps_of(good_loader()).values()
    assert (found.name, found.status) == ("traps", Status.ok)


def stream_without_length(**options):
    return good_loader(Stream(), shuffle=None, **options)


def own_batches():
    return good_loader(batch_sampler=BatchSampler(SequentialSampler(range(8)), 4, drop_last=False), batch_size=1, shuffle=None)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Batches, {"not_a_dataloader", "iterator_attribute"}),
        (lambda: OwnIteration(Examples(), 4, shuffle=True, num_workers=1, persistent_workers=True), {"own_iteration"}),
        (own_batches, {"batch_sampler"}),
        (lambda: good_loader(batch_size=None), {"no_batch_size"}),
        (lambda: stream_without_length(num_workers=1), {"stream_without_length"}),
        (stream_without_length, {"stream_without_length", "stream_not_divided"}),
        (lambda: stream_without_length(worker_init_fn=print), {"stream_without_length"}),
        (lambda: good_loader(persistent_workers=False), {"persistent_workers"}),
        (lambda: good_loader(shuffle=False), {"not_shuffled"}),
        (lambda: good_loader(shuffle=None, sampler=DistributedSampler(range(8), 2, 0)), {"divided_sampler"}),
        (lambda: good_loader(Examples(9)), {"last_batch_of_one"}),
        (lambda: good_loader(Examples(9), drop_last=True), {"traps"}),
        (lambda: good_loader(Examples(10)), {"traps"}),
        (lambda: good_loader(Holding([0] * 1_000_000)), {"many_objects"}),
        (lambda: good_loader(Holding([0] * 999_999)), {"traps"}),
    ],
)
def test_a_trap_is_seen_where_it_is(make, names):
    found = traps_of(make())
    assert set(found) == names
    for finding in found.values():
        assert (finding.status is Status.ok) == (finding.name == "traps")
        assert bool(finding.hint) == (finding.status is Status.warning)


@pytest.mark.parametrize("wrap", [lambda dataset: Subset(dataset, range(4)), lambda dataset: ConcatDataset([dataset])])
def test_an_open_file_is_seen_in_each_data_set_inside_if_there_are_workers(wrap, tmp_path):
    with open(tmp_path / "records", "wb") as file:
        (found,) = traps_of(good_loader(wrap(Holding(file)))).values()
        assert found.name == "open_files"
        assert "Holding.held" in found.sentence
        assert "open_files" not in traps_of(good_loader(wrap(Holding(file)), num_workers=0, persistent_workers=False))


def test_with_a_device_memory_should_be_pinned():
    around = Surroundings(has_cuda=True, sharing_strategy="file_descriptor", open_files=1024)
    assert set(traps_of(good_loader(), around)) == {"pin_memory"}
    assert set(traps_of(good_loader(pin_memory=True), around)) == {"traps"}
    assert set(traps_of(good_loader(pin_memory=True))) == {"pin_memory"}


@pytest.mark.parametrize(
    ("tensors", "strategy", "limit", "names"),
    [
        (206, "file_descriptor", 1024, {"traps"}),  # 2 workers prefetch 2 batches each: 824 tensors, and 200 files beside them
        (207, "file_descriptor", 1024, {"file_descriptors"}),
        (207, "file_system", 1024, {"traps"}),
        (207, "file_descriptor", None, {"traps"}),
    ],
)
def test_many_tensors_in_flight_need_many_files(tensors, strategy, limit, names):
    first = FirstBatch(seconds=0.1, bytes=100, tensors=tensors)
    assert set(traps_of(good_loader(), Surroundings(False, strategy, limit), first)) == names


def test_hooks_of_a_data_module_that_hide_those_of_the_model_are_named():
    class Moving(pl.LightningDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    (found,) = check_hooks(Moving())
    assert (found.name, found.status) == ("transfer_hooks", Status.warning)
    assert "on_after_batch_transfer" in found.sentence
    assert check_hooks(pl.LightningDataModule()) == []
    assert check_hooks(good_loader()) == []
