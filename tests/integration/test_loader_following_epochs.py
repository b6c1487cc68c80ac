"""A sampler whose length and difficulty follow ``set_epoch``: each pass has all of its examples, and no other is blamed."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_echo import EchoLoader

LENGTHS = {"grows": [8, 16, 24, 24], "shrinks": [24, 16, 8, 8], "does both": [8, 8, 20, 4]}
KINDS = ["sampler", "batch sampler"]
PASS = 100  # more than the longest pass


class Indices(Dataset):
    def __getitem__(self, index):
        return torch.tensor(index)

    def __len__(self):
        return 5 * PASS


class Curriculum(Sampler):
    """In pass ``n`` the indices from ``100 n`` on: so many as the epoch that was told has."""

    def __init__(self, lengths, size=None):
        self.lengths, self.size, self.epoch = lengths, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _indices(self):
        return [PASS * self.epoch + i for i in range(self.lengths[min(self.epoch, len(self.lengths) - 1)])]

    def __iter__(self):
        indices = self._indices()
        yield from indices if self.size is None else [indices[i : i + self.size] for i in range(0, len(indices), self.size)]

    def __len__(self):
        return len(self._indices()) // (self.size or 1)


def make(kind, lengths, workers=0):
    if kind == "batch sampler":
        return DataLoader(Indices(), batch_sampler=Curriculum(lengths, 4), num_workers=workers)
    return DataLoader(Indices(), 4, sampler=Curriculum(lengths), num_workers=workers)


def plain_epochs(kind, lengths, epochs):
    """What a plain loop gets that tells the epoch, as Lightning does."""
    loader, found = make(kind, lengths), []
    for epoch in range(epochs):
        getattr(loader, kind.replace(" ", "_")).set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:.*a pass has")
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1])
def test_without_echoing_the_epochs_are_those_of_the_plain_loader(kind, name, workers):
    loader = EchoLoader(make(kind, LENGTHS[name], workers), 1, seed=0)
    found = [[batch.tolist() for batch in loader] for _ in range(4)]
    loader.close()
    assert found == plain_epochs(kind, LENGTHS[name], 4)


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:.*a pass has")
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1])
def test_with_echoing_each_pass_is_gone_through_whole(kind, name, workers):
    loader = EchoLoader(make(kind, LENGTHS[name], workers), 2, buffer_size=8 if kind == "sampler" else 2, seed=0)
    fresh = {}
    while max(fresh, default=0) < 4 * PASS:
        for batch in loader:
            fresh |= dict.fromkeys(batch.tolist())
    loader.close()
    expected = set(itertools.chain(*itertools.chain(*plain_epochs(kind, LENGTHS[name], 4))))
    left_out = expected - fresh.keys()
    assert len(left_out) < 4 * 3, "a pass that ends within a batch may lose what that batch would have had of it"
    if kind != "sampler":
        assert not left_out


@pytest.mark.filterwarnings("ignore:.*a pass has")
@pytest.mark.parametrize(("kind", "workers", "factor"), [("batch sampler", 0, 1), ("sampler", 0, 2), ("sampler", 2, 1)])
def test_a_run_resumes_at_each_batch(kind, workers, factor):
    def make_loader():
        point = "after_augmentation" if kind == "sampler" else "auto"
        return EchoLoader(make(kind, [8, 8, 20, 4, 12], workers), factor, insertion_point=point, seed=0)

    first, states, batches = make_loader(), [], []
    while len(batches) < 10 * factor:
        for batch in first:
            batches.append(batch.tolist())
            states.append(first.state_dict())
    first.close()
    for at, state in enumerate(states, 1):
        if at not in (3, 4, 8):  # within a pass, and where lengths change
            continue
        second, found = make_loader(), []
        second.load_state_dict(state)
        while len(found) < len(batches) - at:
            found += [batch.tolist() for batch in second]
        second.close()
        assert found[: len(batches) - at] == batches[at:], at


@pytest.mark.parametrize(("kind", "workers"), [("sampler", 0), ("batch sampler", 1)])
def test_an_error_of_the_sampler_comes_after_the_batches_before_it(kind, workers):
    class Fails(Curriculum):
        def __iter__(self):
            for place, entry in enumerate(super().__iter__()):
                if place == (20 if kind == "sampler" else 5):
                    raise LookupError("no more indices")
                yield entry

    sampler = Fails([40], None if kind == "sampler" else 4)
    options = {"batch_size": 4, "sampler": sampler} if kind == "sampler" else {"batch_sampler": sampler}
    loader, found = EchoLoader(DataLoader(Indices(), num_workers=workers, **options), 1, seed=0), []
    with pytest.raises(LookupError, match="no more indices"):
        found.extend(batch.tolist() for batch in loader)
    assert found == [list(range(4 * i, 4 * i + 4)) for i in range(5)]
    loader.close()


def test_a_length_that_never_settles_is_an_error():
    class Never(Curriculum):
        def __len__(self):
            self.size_said = getattr(self, "size_said", 8) + 4
            return self.size_said

    loader = EchoLoader(DataLoader(Indices(), 4, sampler=Never([8])), 1, seed=0)
    with pytest.raises(RuntimeError, match="changes each time it is asked for"):
        list(loader)
