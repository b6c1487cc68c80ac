"""Splitting leaves no trace in the user's objects or in files that are opened late; whole batches are read as before."""

import random
import zipfile

import numpy as np
import pytest
import torch
from split_cases import CALLED, CROP_AND_FLIP, Arrays, Staged, behaves_like, flip_or_not, proved, same, seed, sent
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import Split, find_split, make_stages
from lightning_echo.split.staged import StagedDataset


class TestNoTrace:
    def test_the_users_objects_stay_as_they_were(self, folder):
        dataset = datasets.ImageFolder(folder, transform=CROP_AND_FLIP)
        subset = Subset(dataset, [1, 2])
        before = {id(one): dict(vars(one)) for one in (dataset, subset)}
        stages = make_stages(subset, find_split(subset).conventions)
        stages.augment(0, stages.load(0))
        assert {id(one): dict(vars(one)) for one in (dataset, subset)} == before
        assert dataset.transform is CROP_AND_FLIP

    @pytest.mark.parametrize("kind", [Arrays, type("Broken", (Arrays,), {"__getitem__": lambda self, index: 1 / 0})])
    def test_the_random_states_are_put_back(self, kind):
        seed(3)
        expected = torch.rand(1), np.random.rand(), random.random()
        seed(3)
        try:
            find_split(kind(transform=CROP_AND_FLIP))
        except ZeroDivisionError:
            assert kind is not Arrays
        assert (torch.rand(1), np.random.rand(), random.random()) == expected

    def test_each_example_is_read_once_by_itself_and_twice_in_stages(self):
        reads = []

        class Recorded(Arrays):
            def image(self, index):
                reads.append(index)
                return super().image(index)

        find_split(Recorded(transform=CROP_AND_FLIP))
        assert reads == [0, 5, 0, 5, 0, 5]
        reads.clear()
        find_split(Subset(Recorded(transform=CROP_AND_FLIP), [4]))
        assert reads == [4, 4, 4]

    def test_making_stages_reads_nothing(self):
        class Unreadable(Arrays):
            def __getitem__(self, index):
                raise AssertionError("read")

        for dataset in (Unreadable(transform=CROP_AND_FLIP), Staged()):
            assert make_stages(ConcatDataset([Subset(dataset, [0, 1]), dataset])).redone

    def test_indices_in_a_tensor_stay_as_they_are(self):
        dataset = ConcatDataset([Arrays(2, transform=CROP_AND_FLIP), Arrays(3, transform=CROP_AND_FLIP)])
        subset = Subset(dataset, torch.tensor([-1, 1, -4]))
        stages = make_stages(subset, find_split(subset).conventions)
        assert behaves_like(subset, stages)
        assert subset.indices.tolist() == [-1, 1, -4]

    def test_stages_follow_what_a_worker_init_fn_has_set(self):
        dataset = Arrays(transform=v2.RandomHorizontalFlip())
        split = find_split(dataset)
        dataset.transform = v2.Compose([v2.Pad(1), v2.RandomVerticalFlip()])
        dataset.images = dataset.images + 1
        stages = make_stages(dataset, split.conventions)
        assert stages.redone == ("RandomVerticalFlip",)
        assert behaves_like(dataset, stages)

    def test_a_split_can_be_sent_to_workers(self):
        split = find_split(Arrays(transform=CROP_AND_FLIP))
        assert sent(split) == split
        assert str(split) == "reuse [load, Resize], redo [RandomCrop, RandomHorizontalFlip]"
        assert isinstance(split, Split)


class Zipped(Dataset):
    """Opens its file at the first read, as h5py users are told to, or has an object that does."""

    def __init__(self, path, held, transform=None):
        self.path, self.transform = path, transform
        self.archive = Archive(path) if held else None

    def read(self, index):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        return np.frombuffer(self.archive.read(str(index)), dtype=np.uint8).copy()

    def is_open(self):
        handle = self.archive.opened if isinstance(self.archive, Archive) else self.archive
        return handle is not None

    def __getitem__(self, index):
        pixels = torch.from_numpy(self.read(index)).view(1, 2, 2)
        return self.transform(pixels) if self.transform else pixels

    def __len__(self):
        return 4


class Archive:
    def __init__(self, path):
        self.path, self.opened = path, None

    def read(self, name):
        if self.opened is None:
            self.opened = zipfile.ZipFile(self.path)
        return self.opened.read(name)


class InWorker(Dataset):
    """What a worker does, in short: make the stages at the first read, load once, augment."""

    def __init__(self, dataset, conventions):
        self.dataset, self.conventions, self.stages = dataset, conventions, None

    def __getitem__(self, index):
        if self.stages is None:
            self.stages = make_stages(self.dataset, self.conventions)
        return self.stages.augment(index, self.stages.load(index))

    def __len__(self):
        return len(self.dataset)


class TestLazilyOpenedFiles:
    @pytest.fixture(params=[False, True], ids=["in the data set", "in an object inside"])
    def dataset(self, request, tmp_path):
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            for index in range(4):
                archive.writestr(str(index), bytes([index, index + 10, index + 20, index + 30]))
        augmentation = v2.Compose([v2.Pad(1), v2.RandomHorizontalFlip(1.0)])
        return Zipped(tmp_path / "data.zip", request.param, augmentation)

    def test_the_proof_opens_nothing_that_workers_would_inherit(self, dataset):
        find_split(ConcatDataset([Subset(dataset, [0, 1]), dataset]))
        assert not dataset.is_open()
        assert not sent(dataset).is_open()

    @pytest.mark.grid
    @pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
    def test_workers_open_it_themselves(self, dataset, context, workers):
        subset = Subset(dataset, [3, 2, 1, 0])
        split = find_split(subset)
        loader = DataLoader(
            InWorker(subset, split.conventions), batch_size=1, num_workers=workers, multiprocessing_context=context
        )
        pixels = [batch[0, 0, 1:3, 1:3].tolist() for batch in loader]
        # Padded, then flipped from left to right.
        assert pixels == [[[n + 10, n], [n + 30, n + 20]] for n in (3, 2, 1, 0)]


class Rows(Dataset):
    """A data set that reads whole batches."""

    calls = []  # noqa: RUF012 - of all copies

    def __init__(self, transform=None):
        self.transform = transform

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        rows = [torch.full((1, 1, 4), float(index)) for index in indices]
        if self.transform is not None:
            rows = [self.transform(row) for row in rows]
        return list(zip(rows, indices, strict=True))

    def __len__(self):
        return 20


class TestBatchedReading:
    @pytest.fixture(autouse=True)
    def _fresh_calls(self):
        Rows.calls.clear()

    def test_a_batch_stays_one_call(self):
        noise = v1.Compose([v2.Identity(), v2.GaussianNoise()]) if hasattr(v2, "GaussianNoise") else CALLED
        subset = Subset(Subset(Rows(transform=noise), range(10, 20)), [5, 3, 1])
        stages = make_stages(subset, find_split(subset).conventions)
        assert Rows.calls == [[15, 11]] * 3  # by itself, and twice in stages

        Rows.calls.clear()
        loaded = stages.load_many([2, 0])
        assert Rows.calls == [[11, 15]]
        seed(1)
        augmented = [stages.augment(index, example) for index, example in zip([2, 0], loaded, strict=True)]
        seed(1)
        assert same(augmented, subset.__getitems__([2, 0]))

    def test_transforms_before_the_cut_are_applied_to_each_example(self):
        stages = make_stages(Rows(transform=v2.Compose([v2.Pad(1), v2.RandomHorizontalFlip()])))
        assert [image.shape for image, _ in stages.load_many([0, 1])] == [(1, 3, 6), (1, 3, 6)]

    def test_a_named_cut(self):
        dataset = StagedDataset.of(Rows(), augment=flip_or_not)
        split, stages = proved(dataset)
        assert split.redone == ("augment",)
        Rows.calls.clear()
        assert [label for _, label in stages.load_many([4, 6, 2])] == [4, 6, 2]
        assert Rows.calls == [[4, 6, 2]]

    def test_without_a_getitems_of_its_own_there_is_no_batched_loading(self):
        assert make_stages(Subset(Arrays(transform=CROP_AND_FLIP), [0, 1])).load_many is None

    def test_augmentation_of_a_whole_batch_at_once_is_refused(self):
        class Mixed(Rows):
            def __getitems__(self, indices):
                rows = torch.stack([torch.full((1, 1, 4), float(index)) for index in indices])
                if self.transform is not None:
                    rows = self.transform(rows)
                return list(zip(rows, indices, strict=True))

        with pytest.raises(SplitRefused, match=r"looks at what its transform returns \(__iter__\)"):
            find_split(Mixed(transform=v2.RandomHorizontalFlip()))


class TestClosedWhenCollected:
    def test_neither_the_proof_nor_stages_close_what_the_user_has_open(self, tmp_path):
        (tmp_path / "data").write_bytes(bytes(range(9)))

        class Closing(Arrays):
            def __init__(self, path, transform):
                super().__init__(transform=transform)
                self.file = open(path, "rb")  # noqa: SIM115 - held on purpose

            def __del__(self):
                self.file.close()

            def image(self, index):
                self.file.seek(index)
                return torch.full((1, 4, 4), self.file.read(1)[0])

        dataset = Closing(tmp_path / "data", CROP_AND_FLIP)
        split = find_split(dataset)
        stages = make_stages(dataset, split.conventions)
        assert stages.load(3)[0][0, 0, 0] == 3
        del stages
        assert dataset[4][0].unique().tolist() == [4]
