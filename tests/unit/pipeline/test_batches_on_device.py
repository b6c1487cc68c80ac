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


class TestPreparing:
    def test_the_host_batch_is_changed_once(self):
        live, calls = LiveBatch([1]), []

        def change(batch):
            calls.append(batch)
            return [*batch, 2]

        for _ in range(3):
            live.prepare(live.use(False).host, change)
        assert calls == [[1]]
        assert live.transfer(list, is_last=False) == [1, 2]

    def test_a_change_to_nothing_is_one_too(self):
        live, calls = LiveBatch([1]), []
        for _ in range(2):
            live.prepare(live.use(False).host, calls.append)
        assert len(calls) == 1
        assert live.transfer(lambda batch: batch, is_last=True) is None

    def test_uses_carry_the_host_batch_until_one_of_them_has_prepared_it(self):
        """Lightning may drop a batch that it has fetched."""
        host = {"x": torch.zeros(1)}
        live = LiveBatch(host)
        dropped, used = live.use(False), live.use(False)
        assert dropped.host is used.host is host
        live.prepare(used.host, lambda batch: batch)
        assert live.use(True) == BatchUse(live, None, True)

    def test_a_precision_plugin_reaches_the_host_batch_and_nothing_else(self):
        live = LiveBatch({"x": torch.zeros(2), "i": torch.arange(2), "name": "a"})
        use = apply_to_collection(live.use(False), torch.Tensor, lambda tensor: tensor.double())
        assert type(use) is BatchUse
        assert use.live is live
        live.prepare(use.host, lambda batch: batch)
        assert live.transfer(dict, is_last=False)["x"].dtype is torch.float64
        echo = apply_to_collection(live.use(True), torch.Tensor, lambda tensor: tensor.half())
        assert echo == BatchUse(live, None, True)
        assert live.transfer(dict, is_last=True)["x"].dtype is torch.float64


class TestTransferring:
    def test_it_is_transferred_once_and_shared_by_all_uses(self):
        live, move = live_batch(x=torch.arange(3)), Moves()
        uses = [live.transfer(move, is_last=is_last) for is_last in (False, False, True)]
        assert move.count == 1
        assert len({use["x"].data_ptr() for use in uses}) == 1
        assert [use["x"].tolist() for use in uses] == [[0, 1, 2]] * 3
        assert len({id(use) for use in uses}) == 3

    def test_a_popped_key_comes_back_at_every_use_the_last_one_too(self):
        live, move = live_batch(x=torch.zeros(1), y=torch.zeros(1)), Moves()
        for is_last in (False, False, True):
            use = live.transfer(move, is_last=is_last)
            assert list(use) == ["x", "y"]
            use.clear()
        assert move.count == 1

    @pytest.mark.parametrize("move", [Moves(), dict], ids=["another device", "the same memory"])
    def test_an_edit_is_answered_by_a_fresh_transfer_of_the_host_batch(self, move):
        live = live_batch(x=torch.zeros(2), y=torch.ones(2))
        edited = []
        for is_last in (False, False, False, True):
            edited.append(live.let_go_if_edited())
            use = live.transfer(move, is_last=is_last)
            assert (use["x"].tolist(), use["y"].tolist()) == ([0, 0], [1, 1])
            use["x"].add_(7)
        assert edited == [False, True, True, True]
        assert isinstance(move, type) or move.count == 4

    def test_without_an_edit_nothing_is_transferred_anew(self):
        live, move = live_batch(x=torch.zeros(2)), Moves()
        for _ in range(4):
            assert not live.let_go_if_edited()
            live.transfer(move, is_last=False)
        assert move.count == 1

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
        """A hook that leaves the lengths on the host, say."""
        host = {"x": torch.zeros(2), "lengths": torch.ones(2)}
        live = live_batch(**host)
        for is_last in (False, False, True):
            live.let_go_if_edited()
            use = live.transfer(lambda batch: {**batch, "x": batch["x"].clone()}, is_last=is_last)
            assert (use["x"].tolist(), use["lengths"].tolist()) == ([0, 0], [1, 1])
            assert use["x"].data_ptr() != host["x"].data_ptr()
            use["lengths"].add_(1)

    def test_the_only_use_is_transferred_as_it_is(self):
        x = torch.zeros(2)
        live = live_batch(x=x)
        assert live.transfer(lambda batch: batch, is_last=True)["x"] is x

    def test_bytes_on_the_device(self):
        live, move = live_batch(x=torch.zeros(5), i=torch.arange(2)), Moves()
        assert live.nbytes == 0
        live.transfer(move, is_last=False)
        assert live.nbytes == 36
        live.transfer(move, is_last=True)
        assert live.nbytes == 0

    def test_the_last_use_keeps_nothing(self):
        host = torch.zeros(2)
        live, move = live_batch(x=host), Moves()
        for is_last in (False, True):
            use = live.transfer(move, is_last=is_last)
        gone = weakref.ref(host), weakref.ref(use["x"])
        del host, use
        assert [ref() for ref in gone] == [None, None]


class Noisy(StagedDataset):
    """Examples are (index, noise)."""

    def load(self, index):
        return torch.tensor([float(index), 0.0])

    def augment(self, example):
        example[1] = torch.rand(())
        return example

    def __len__(self):
        return LENGTH


def plain_loader(**options):
    return DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, **options)


def echo(point="after_transfer", factor=3.0, loader=None, **options):
    made = EchoLoader(plain_loader() if loader is None else loader, factor, insertion_point=point, **{"seed": 5, **options})
    made.is_transferred = point == "after_transfer"
    return made


def on_device(item):
    """What a Trainer makes of what the loader yields; with a precision plugin and a transfer that copies."""
    if not isinstance(item, BatchUse):
        return item
    use = apply_to_collection(item, torch.Tensor, lambda tensor: tensor)
    use.live.prepare(use.host, lambda batch: batch)
    return use.live.transfer(torch.clone, is_last=use.is_last)


def steps(loader, epochs=1):
    """Of each step the batch, its counts, and the factor in force."""
    return [
        (on_device(item).tolist(), loader.last_batch_counts, loader.factor_in_force) for _ in range(epochs) for item in loader
    ]


def both(**options):
    return echo("after_batching", **options), echo("after_transfer", **options)


def state_of(loader):
    return {name: value for name, value in loader.state_dict().items() if name != "insertion_point"}


class TestLoader:
    """Which batch is used when is that of `after_batching`, whose tests say that it is right."""

    @pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
    @pytest.mark.parametrize("factor", [1, 1.5, 2.5, 4])
    def test_batches_counts_lengths_and_states_are_those_of_after_batching(self, factor, epoch_length):
        batching, transfer = both(factor=factor, epoch_length=epoch_length, buffer_size=5)
        for _ in range(3):
            assert len(batching) == len(transfer)
            assert steps(batching) == steps(transfer)
            assert state_of(batching) == state_of(transfer)
        assert (batching.counts, batching.passes) == (transfer.counts, transfer.passes)
        assert transfer.counts.fresh > 0

    def test_of_the_uses_of_a_batch_the_last_one_is_marked_at_factor_1_each(self):
        loader = echo(factor=3, reuse="each")
        uses = [use for _ in range(6) for use in loader]
        whole = [[use.is_last for use in uses if use.live is live] for live in dict.fromkeys(use.live for use in uses)]
        assert {tuple(marks) for marks in whole[:-4]} <= {(*[False] * others, True) for others in range(4)}
        assert len(whole) > 12
        assert all(use.is_last for use in echo(factor=1, reuse="each"))

    def test_with_reuse_from_memory_none_is_marked_but_at_factor_1(self):
        """A batch leaves a full buffer when another one is read, and so not at a use of its own."""
        loader = echo(factor=3, reuse="memory", buffer_size=4)
        uses = [use for _ in range(6) for use in loader]
        assert not any(use.is_last for use in uses)
        assert len({use.live for use in uses}) > 12, "many have left"
        assert all(use.is_last for use in echo(factor=1, reuse="memory"))

    def test_a_new_factor_counts_from_the_same_batch(self):
        runs = []
        for loader in both(factor=2.0):
            seen = steps(loader)
            for factor in (1.0, 4.0, 1.5):
                loader.factor = factor
                seen += steps(loader)
            runs.append(seen)
        assert runs[0] == runs[1]
        assert {factor for _, _, factor in runs[1]} == {2, 1, 4, 1.5}

    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_with_workers_and_the_thread_too(self, workers):
        runs = []
        for loader in both(loader=plain_loader(num_workers=workers)):
            with closing(loader):
                runs.append(steps(loader, 2))
        assert runs[0] == runs[1]

    def test_any_iterable_of_batches(self):
        batches = [torch.full((size, 2), float(size)) for size in (4, 4, 3)]
        runs = [steps(loader, 4) for loader in both(loader=batches)]
        assert runs[0] == runs[1]
        assert {counts.delivered for _, counts, _ in runs[1]} == {3, 4}

    @pytest.mark.parametrize("step", [1, 5, 8, 13, 20])
    def test_a_run_resumes_exactly_and_live_batches_are_read_again(self, step):
        whole = steps(echo(), 4)
        first = echo()
        items = (item for _ in range(4) for item in first)
        for _ in range(step):
            on_device(next(items))
        resumed = echo()
        resumed.load_state_dict(first.state_dict())
        rest = steps(resumed, 4)[: len(whole) - step]
        assert [batch for batch, *_ in rest] == [batch for batch, *_ in whole[step:]]
        refetched = sum(counts.refetched for _, counts, _ in rest)
        live = {tuple(map(tuple, batch)) for batch, *_ in whole[:step]} & {tuple(map(tuple, batch)) for batch, *_ in rest}
        assert refetched == sum(len(batch) for batch in live)
        assert [(c.fresh, c.echoed) for _, c, _ in rest] == [(c.fresh, c.echoed) for _, c, _ in whole[step:]]

    def test_a_batch_that_was_fetched_and_dropped_comes_with_its_next_use(self):
        loader = echo()
        expected = [batch for batch, *_ in steps(echo(), 3)]
        seen = [
            None if number % 3 == 0 else on_device(item).tolist() for number, item in enumerate(i for _ in "abc" for i in loader)
        ]
        assert [batch for batch in seen if batch] == [batch for number, batch in enumerate(expected) if number % 3]

    @pytest.mark.parametrize("reuse", ["each", "memory"])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_no_more_batches_are_on_the_device_than_the_buffer_holds_and_the_one_in_use(self, workers, reuse):
        held, largest = weakref.WeakSet(), 0
        with closing(echo(factor=3, buffer_size=4, reuse=reuse, loader=plain_loader(num_workers=workers))) as loader:
            for _ in range(4):
                for use in loader:
                    use.live.prepare(use.host, lambda batch: batch)

                    def move(batch):
                        moved = batch.clone()
                        held.add(moved)
                        return moved

                    batch = use.live.transfer(move, is_last=use.is_last)
                    largest = max(largest, len(held))
                    del use, move, batch
        assert 2 <= largest <= 5
        gc.collect()
        assert len(held) == 0, "closed: nothing is left"

    def test_a_lower_factor_lets_device_memory_go(self):
        held = weakref.WeakSet()

        def move(batch):
            moved = batch.clone()
            held.add(moved)
            return moved

        loader = echo(factor=8)
        for epoch in range(2):
            for use in loader:
                use.live.prepare(use.host, lambda batch: batch)
                use.live.transfer(move, is_last=use.is_last)
            del use
            gc.collect()
            assert bool(held) == (epoch == 0)
            loader.factor = 1

    def test_nobody_there_to_transfer_is_said_at_the_first_batch_and_not_before(self):
        loader = EchoLoader(plain_loader(), 2, insertion_point="after_transfer")
        iterator = iter(loader)
        assert (len(loader), loader.counts) == (STEPS, EchoCounts())
        ways_out = "Train a single loader.*EchoDataModule.*EchoCallback.*'after_batching'"
        with pytest.raises(
            RuntimeError, match=f"insertion_point='after_transfer' reuses batches on the device, and this loop .*{ways_out}"
        ):
            next(iterator)

    @pytest.mark.parametrize(
        ("options", "live", "mebibytes"),
        [({"reuse": "each"}, 4, 16), ({}, 2, 8)],  # by default a whole pass of two batches
    )
    def test_it_says_where_its_memory_is(self, options, live, mebibytes):
        options = {"insertion_point": "after_transfer", **options}
        loader = EchoLoader(DataLoader(torch.zeros(8, 2**18), batch_size=4), 4, **options)
        assert repr(loader) == (
            "after_transfer, factor 4: reuse [load, augment, collate, transfer], redo [on_after_batch_transfer]; "
            f"{live} live batches, {mebibytes} MiB of device memory; 0 workers"
        )
        assert repr(EchoLoader([1, 2], 2, **options)).endswith(f"; {live} live batches; 0 workers")

    def test_auto_never_takes_it(self):
        for loader in (plain_loader(), [1, 2, 3], DataLoader(range(8), batch_size=None)):
            assert str(EchoLoader(loader, 2).insertion_point) != "after_transfer"
