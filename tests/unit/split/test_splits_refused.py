"""What only looks as if it could be split is refused, and why is said; exceptions are the data set's own."""

import random
import threading

import pytest
import torch
from split_cases import CALLED, CROP_AND_FLIP, Arrays, behaves_like, proved, proved_in_process, sent
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split, make_stages


class TestLookAlikes:
    def test_attributes_that_are_not_callable(self):
        dataset = Arrays(transform=CROP_AND_FLIP, augment=True, load="data.csv")
        split, stages = proved(dataset)
        assert split.conventions == (Convention.transform,)
        assert behaves_like(dataset, stages)

    @pytest.mark.parametrize(
        "load",
        [
            lambda self, path: open(path),  # noqa: SIM115 - never called: open(0) would close standard input
            lambda self, image_file: open(image_file),  # noqa: SIM115
            lambda self, name, mode: open(name, mode),  # noqa: SIM115
            lambda self, name: {}[name],  # tried, and refused by the proof
        ],
        ids=["path", "file", "two arguments", "name"],
    )
    def test_an_unrelated_load_and_augment(self, load):
        kind = type("Unrelated", (Arrays,), {"load": load, "augment": lambda self, factor: self.images * factor})
        dataset = kind(transform=CROP_AND_FLIP)
        split, stages = proved_in_process(dataset)
        assert split.conventions == (Convention.transform,)
        assert split.redone == ("RandomCrop", "RandomHorizontalFlip")
        assert behaves_like(dataset, stages)

    def test_an_annotated_load(self):
        class Unrelated(Arrays):
            def load(self, name: str):
                raise AssertionError("called")

            def augment(self, factor):
                raise AssertionError("called")

        assert find_split(Unrelated(transform=CROP_AND_FLIP)).conventions == (Convention.transform,)

    def test_an_unrelated_load_and_augment_without_a_transform(self):
        class Unrelated(Arrays):
            def load(self, name):
                raise FileNotFoundError(name)

            def augment(self, factor):
                return factor

            def __getitem__(self, index):
                return self.image(index)

        dataset = Unrelated()
        del dataset.transform
        with pytest.raises(SplitRefused, match=r"loading .* raised FileNotFoundError: 0") as refused:
            find_split(dataset)
        assert isinstance(refused.value.__cause__, FileNotFoundError)

    def test_both_reasons_are_given_when_both_ways_fail(self):
        class Both(Arrays):
            def load(self, name):
                raise FileNotFoundError(name)

            def augment(self, factor):
                return factor

            def __getitem__(self, index):
                return self.transform(self.transform(self.image(index))), index

        with pytest.raises(SplitRefused, match=r"by load.*FileNotFoundError.*; by transform.* 2 times"):
            find_split(Both(transform=v2.RandomHorizontalFlip()))

    @pytest.mark.parametrize("value", ["resize", True, {"size": 3}])
    def test_a_transform_that_is_not_callable(self, value):
        class Configured(Arrays):
            def __getitem__(self, index):
                return self.image(index)

        with pytest.raises(SplitRefused, match="Configured has neither"):
            find_split(Configured(transform=value))


WRONG = {
    "twice": (lambda self, index: (self.transform(self.transform(self.image(index))), index), "2 times"),
    "on image and mask": (
        lambda self, index: (self.transform(self.image(index)), self.transform(self.image(index) > 9)),
        "2 times",
    ),
    "never": (lambda self, index: (self.image(index), index), "0 times where 1 would be expected"),
    "through another attribute": (
        lambda self, index: (self.hidden(self.image(index)), index),
        "0 times where 1 would be expected",
    ),
    "after another random one": (
        lambda self, index: (self.transform(self.hidden(self.image(index))), index),
        "draws random numbers from torch",
    ),
    "with more behind": (
        lambda self, index: (self.transform(self.image(index)).float() / 255, index),
        r"looks at what its transform returns \(float\)",
    ),
    "with an edit in place behind": (
        lambda self, index: (self.transform(self.image(index).float()).div_(255), index),
        r"looks at what its transform returns \(div_\)",
    ),
    "on the second element": (
        lambda self, index: (index, self.transform(self.image(index))),
        "does not return the result of its transform where transform.image. and target_transform.target. would",
    ),
    "by keyword": (
        lambda self, index: (self.transform(image=self.image(index)), index),
        r"by keyword \(image\)",
    ),
    "inside a dict": (
        lambda self, index: {"image": self.transform(self.image(index)), "label": index},
        "does not return the result of its transform where transform.image. and target_transform.target. would",
    ),
    "beside a draw of its own": (
        lambda self, index: (self.transform(self.image(index)), index + random.random()),
        "draws random numbers from random",
    ),
}


class Rare:
    """A flip that hardly ever happens, so that equal values prove nothing."""

    def __init__(self):
        self.flip = v2.RandomHorizontalFlip(1e-6)

    def __call__(self, image):
        return self.flip(image)


class TestRefused:
    @pytest.mark.parametrize("way", WRONG)
    def test_a_transform_that_is_used_in_another_way(self, way):
        use, reason = WRONG[way]
        kind = type("Wrong", (Arrays,), {"__getitem__": use})
        with pytest.raises(SplitRefused, match=reason) as refused:
            find_split(kind(transform=Rare(), hidden=Rare()))
        assert str(refused.value).endswith("or use insertion_point='after_augmentation'")
        assert "StagedDataset" in str(refused.value)
        assert "StagedDataset" not in refused.value.reason

    def test_the_order_of_image_and_target_counts_where_both_draw(self):
        """Also where it is another one than in the examples that the proof has read."""

        class TargetFirst(Arrays):
            def __getitem__(self, index):
                target = self.target_transform(index)
                return self.transform(self.image(index)), target

        def noise(value):
            return value + random.random()

        with pytest.raises(SplitRefused, match="it calls its target_transform before the transform of the image"):
            make_stages(TargetFirst(transform=noise, target_transform=noise)).load(1)
        for transforms in (
            {"transform": v2.Identity(), "target_transform": noise},
            {"transform": noise, "target_transform": v2.Identity()},
        ):
            assert make_stages(TargetFirst(**transforms)).load(1)[1] == 1

    def test_a_transform_whose_draws_cannot_be_repeated(self):
        generator = random.Random(0)
        with pytest.raises(SplitRefused, match="differently when read again under the same seeds"):
            find_split(Arrays(transform=lambda image: image + generator.randrange(10**6)))

    def test_a_transform_that_cannot_be_replaced(self):
        class Fixed(Arrays):
            transform = property(lambda self: CROP_AND_FLIP, lambda self, value: None)

            def __setattr__(self, name, value):
                raise AttributeError(name)

        dataset = Fixed.__new__(Fixed)
        vars(dataset).update(images=torch.zeros(3, 1, 8, 8), reads=[])
        with pytest.raises(SplitRefused, match=r"Fixed\.transform cannot be replaced"):
            find_split(dataset)

    @pytest.mark.parametrize(
        ("dataset", "reason"),
        [
            (TensorDataset(torch.zeros(3)), "TensorDataset has neither load"),
            (Subset([1, 2, 3], [0]), "list has neither load"),
            (Subset(Arrays(transform=abs), []), "it holds no example"),
        ],
    )
    def test_nothing_to_split(self, dataset, reason):
        with pytest.raises(SplitRefused, match=reason):
            find_split(dataset)

    def test_a_stream(self):
        class Stream(IterableDataset):
            transform = abs

            def __iter__(self):
                return iter([1])

        with pytest.raises(SplitRefused, match="Stream is a stream"):
            make_stages(Stream())

    def test_an_example_that_cannot_be_copied(self):
        class Locked(Arrays):
            def __getitem__(self, index):
                return super().__getitem__(index)[0], threading.Lock()

        with pytest.raises(SplitRefused, match=r"augmenting dataset\[0\] .* TypeError: .*_thread.lock"):
            find_split(Locked(transform=CROP_AND_FLIP))

    def test_the_exception_is_the_same_after_pickling(self):
        refused = sent(SplitRefused("it is round"))
        assert refused.reason == "it is round"
        assert str(refused).startswith("the data set cannot be split before its augmentation: it is round. ")
        assert isinstance(refused, ValueError)


class TestExceptions:
    def test_the_data_sets_own_exception_comes_through(self):
        class Broken(Arrays):
            def __getitem__(self, index):
                raise OSError(f"cannot read {index}")

        with pytest.raises(OSError, match="cannot read 0"):
            find_split(Broken(transform=CROP_AND_FLIP))

    def test_the_transforms_own_exception_comes_through(self):
        with pytest.raises(ZeroDivisionError):
            find_split(Arrays(transform=lambda image: image + 1 // 0))

    def test_an_exception_of_the_stages_alone_is_a_refusal(self):
        class Picky(Arrays):
            def __getitem__(self, index):
                assert self.transform is CALLED  # a placeholder is not
                return self.transform(self.image(index)), index

        with pytest.raises(SplitRefused, match=r"loading dataset\[0\] .* raised Assertion") as got:
            find_split(Picky(transform=CALLED))
        assert isinstance(got.value.__cause__, AssertionError)
