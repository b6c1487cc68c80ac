"""Batches reused on the device: prepared and transferred once, transferred anew after an edit, let go at the last use."""

import gc
import weakref
from collections import UserDict
from contextlib import closing

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.state import EchoCounts
from lightning_echo.pipeline.batches import BatchUse, LiveBatch
from lightning_echo.split.staged import StagedDataset

LENGTH, BATCH_SIZE, STEPS = 43, 6, 8


class Moves:
    """Stands in for a transfer to another device: a copy; counts its calls."""

    def __init__(self):
        self.count = 0

    def __call__(self, batch):
        self.count += 1
        return {key: value.clone() for key, value in batch.items()}


def live_batch(**tensors):
    live = LiveBatch(tensors)
    live.prepare(live.use(False).host, lambda batch: batch)
    return live


def test_a_precision_plugin_reaches_the_host_batch_which_uses_carry_until_one_of_them_has_prepared_it():
    live = LiveBatch({"x": torch.zeros(2), "i": torch.arange(2), "name": "a"})
    dropped, used = live.use(False), live.use(False)
    assert dropped.host is used.host
    use = apply_to_collection(used, torch.Tensor, lambda tensor: tensor.double())
    assert type(use) is BatchUse
    assert use.live is live
    live.prepare(use.host, lambda batch: batch)
    assert live.transfer(dict, is_last=False)["x"].dtype is torch.float64
    echo = apply_to_collection(live.use(True), torch.Tensor, lambda tensor: tensor.half())
    assert echo == BatchUse(live, None, True)
    assert live.transfer(dict, is_last=True)["x"].dtype is torch.float64


class TestTransferring:
    def test_it_is_transferred_once_and_its_memory_shared_by_all_uses_where_a_popped_key_comes_back(self):
        live, move, addresses = live_batch(x=torch.arange(3), y=torch.zeros(1)), Moves(), set()
        for is_last in (False, False, True):
            assert not live.let_go_if_edited()
            use = live.transfer(move, is_last=is_last)
            assert (list(use), use["x"].tolist()) == (["x", "y"], [0, 1, 2])
            addresses.add(use["x"].data_ptr())
            use.clear()
        assert (move.count, len(addresses)) == (1, 1)

    @pytest.mark.parametrize("move", [Moves(), dict], ids=["another device", "the same memory"])
    def test_an_edit_is_answered_by_a_fresh_transfer_of_the_host_batch(self, move):
        live, edited = live_batch(x=torch.zeros(2), y=torch.ones(2)), []
        for is_last in (False, False, False, True):
            edited.append(live.let_go_if_edited())
            use = live.transfer(move, is_last=is_last)
            assert (use["x"].tolist(), use["y"].tolist()) == ([0, 0], [1, 1])
            use["x"].add_(7)
        assert edited == [False, True, True, True]
        assert isinstance(move, type) or move.count == 4

    def test_a_container_that_moves_itself_can_be_moved_again(self):
        host, moved = torch.zeros(2), []

        class Encoding(UserDict):
            def to_device(self):
                moved.append(self.data["x"])
                self.data = {key: value.clone() for key, value in self.data.items()}
                return self

        live = LiveBatch(Encoding(x=host))
        live.prepare(live.use(False).host, lambda batch: batch)
        for is_last in (False, False, True):
            live.let_go_if_edited()
            use = live.transfer(Encoding.to_device, is_last=is_last)
            assert use["x"].tolist() == [0, 0]
            use["x"].fill_(3)
        assert [each is host for each in moved] == [True] * 3

    def test_what_shares_memory_only_in_part_is_apart_in_that_part(self):
        host = {"x": torch.zeros(2), "lengths": torch.ones(2)}
        live = live_batch(**host)
        for is_last in (False, False, True):
            live.let_go_if_edited()
            use = live.transfer(lambda batch: {**batch, "x": batch["x"].clone()}, is_last=is_last)
            assert (use["x"].tolist(), use["lengths"].tolist()) == ([0, 0], [1, 1])
            assert use["x"].data_ptr() != host["x"].data_ptr()
            use["lengths"].add_(1)


class Noisy(StagedDataset):
    def load(self, index):
        return torch.tensor([float(index), 0.0])

    def augment(self, example):
        example[1] = torch.rand(())
        return example

    def __len__(self):
        return LENGTH


def echo(point="after_transfer", factor=3.0, workers=0, loader=None, **options):
    loader = loader or DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)
    made = EchoLoader(loader, factor, insertion_point=point, **{"seed": 5, **options})
    made.is_transferred = point == "after_transfer"
    return made


def on_device(item, move=torch.clone):
    """What a Trainer makes of what the loader yields; with a precision plugin and a transfer that copies."""
    if not isinstance(item, BatchUse):
        return item
    use = apply_to_collection(item, torch.Tensor, lambda tensor: tensor)
    use.live.prepare(use.host, lambda batch: batch)
    return use.live.transfer(move, is_last=use.is_last)


def steps(loader, epochs=1):
    """Of each step the batch, its counts, and the factor in force."""
    return [
        (on_device(item).tolist(), loader.last_batch_counts, loader.factor_in_force) for _ in range(epochs) for item in loader
    ]


def state_of(loader):
    return {name: value for name, value in loader.state_dict().items() if name != "insertion_point"}


# Which batch is used when is that of `after_batching`, whose tests say that it is right.


@pytest.mark.parametrize(
    ("factors", "options"),
    [
        ([1.5, 1.5], {"buffer_size": 5}),
        ([2.5, 2.5], {"buffer_size": 5, "epoch_length": "full_pass"}),
        ([2.0, 1.0, 4.0, 1.5], {"workers": 1}),
        ([3.0], {"loader": [torch.full((size, 2), float(size)) for size in (4, 4, 3)]}),
    ],
    ids=["fixed", "full pass", "workers and new factors", "any iterable"],
)
def test_batches_counts_lengths_and_states_are_those_of_after_batching(factors, options):
    with (
        closing(echo("after_batching", factors[0], **options)) as batching,
        closing(echo("after_transfer", factors[0], **options)) as transfer,
    ):
        for factor in factors:
            batching.factor = transfer.factor = factor
            assert len(batching) == len(transfer)
            assert steps(batching) == steps(transfer)
            assert state_of(batching) == state_of(transfer)
        assert (batching.counts, batching.passes) == (transfer.counts, transfer.passes)
        assert transfer.counts.fresh > 0


@pytest.mark.parametrize("reuse", ["each", "memory"])
def test_no_more_batches_are_on_the_device_than_the_buffer_holds_and_the_one_in_use_and_a_lower_factor_lets_them_go(reuse):
    held, largest = weakref.WeakSet(), 0

    def move(batch):
        moved = batch.clone()
        held.add(moved)
        return moved

    with closing(echo(factor=3, buffer_size=4, reuse=reuse, workers=1)) as loader:
        for _ in range(3):
            for use in loader:
                on_device(use, move)
                largest = max(largest, len(held))
    del use
    gc.collect()
    assert 2 <= largest <= 5
    assert not held, "closed"
    loader = echo(factor=8, reuse=reuse)
    for factor in (8, 1):
        loader.factor = factor
        for use in loader:
            on_device(use, move)
        del use
        gc.collect()
        assert bool(held) == (factor > 1)


def test_nobody_there_to_transfer_is_said_at_the_first_batch_and_not_before():
    loader = echo(factor=2)
    loader.is_transferred = False
    iterator = iter(loader)
    assert (len(loader), loader.counts) == (STEPS, EchoCounts())
    ways_out = "Train a single loader.*EchoDataModule.*EchoCallback.*'after_batching'"
    with pytest.raises(RuntimeError, match=f"insertion_point='after_transfer' reuses batches on the device.*{ways_out}"):
        next(iterator)
