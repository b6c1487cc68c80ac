"""Workers that inherit nothing: started by spawn and forkserver, and loaders sent to other processes.

Starting such a worker takes seconds, so that each run here proves several things.
"""

import multiprocessing
import pickle
import zipfile

import pytest
import torch
from loader_cases import Values, epochs, nothing_left_behind, same, take
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info
from torchvision.transforms import v2

from lightning_echo import EchoLoader

LENGTH = 24


class ZipDataset(Dataset):
    """An open archive cannot be pickled: the data set must arrive in the workers as nobody had read from it."""

    def __init__(self, path, transform):
        self.path, self.transform, self.archive, self.shift = path, transform, None, 0

    def __getitem__(self, index):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        image = torch.frombuffer(bytearray(self.archive.read(str(index))), dtype=torch.uint8).reshape(1, 4, 4)
        return self.transform(image), torch.tensor([index, self.shift]), type(multiprocessing.current_process()).__name__

    def __len__(self):
        return LENGTH


def set_shift(worker):
    get_worker_info().dataset.dataset.shift = worker + 1


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "examples.zip"
    with zipfile.ZipFile(path, "w") as file:
        for index in range(LENGTH):
            file.writestr(str(index), bytes([index] * 16))
    transform = v2.Compose(
        [v2.Resize(8), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32), v2.GaussianNoise(0.0, 0.1, False)]
    )
    return Subset(ZipDataset(path, transform), range(LENGTH))


@pytest.mark.parametrize(
    ("method", "point", "process"),
    [("spawn", "before_augmentation", "SpawnProcess"), ("forkserver", "after_augmentation", "ForkServerProcess")],
    ids=["spawn", "forkserver"],
)
def test_workers_that_inherit_nothing_deliver_what_forked_ones_do(dataset, method, point, process):
    def run(context):
        plain = DataLoader(
            dataset,
            batch_size=4,
            shuffle=True,
            num_workers=2,
            multiprocessing_context=context,
            worker_init_fn=set_shift,
        )
        loader = EchoLoader(plain, 2, insertion_point=point, seed=1)
        assert dataset.dataset.archive is None
        delivered = epochs(loader, 3)
        loader.close()
        return delivered

    delivered = run(method)
    for epoch in delivered:
        for number, (images, index_and_shift, processes) in enumerate(epoch):
            assert processes == (process,) * 4
            assert (images.flatten(1).mean(1).round() == index_and_shift[:, 0]).all()
            assert (index_and_shift[:, 1] == number % 2 + 1).all()
    forked = run("fork")
    assert same([batch[:2] for epoch in delivered for batch in epoch], [batch[:2] for epoch in forked for batch in epoch])


@pytest.mark.parametrize(("point", "workers"), [("before_augmentation", 0), ("after_batching", 1)])
def test_a_pickled_loader_goes_on_where_it_was_pickled_without_taking_workers_along(point, workers):
    def make():
        return EchoLoader(
            DataLoader(Values(LENGTH), batch_size=4, shuffle=True, num_workers=workers), 2, insertion_point=point, seed=1
        )

    expected = take(make(), 18)
    loader = make()
    unused = pickle.loads(pickle.dumps(loader))
    take(loader, 8)
    with nothing_left_behind():
        copied = pickle.loads(pickle.dumps(loader))
        assert copied.counts == loader.counts
        assert copied.state_dict() == loader.state_dict()
    assert same(take(loader, 4), expected[8:12]), "pickling does not disturb it"
    assert same(take(unused, 8), expected[:8])
    goes_on = take(copied, 10)  # the iteration under way stays behind: this is the next epoch
    assert same(goes_on, expected[8:])
