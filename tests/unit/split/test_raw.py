"""Splits after reading: what is read is reused, decoding and augmenting are redone; proved like any other split.

The expectation is always the data set itself: under the same seeds, ``dataset[i]`` is what the stages have to return.
"""

import io
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torchvision
from PIL import Image
from raw_cases import RANDOM, BatchedRaws, Loads, NotAugmented, Raws, ShapeOfWords, Words, noisy, proved
from split_cases import behaves_like
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, random_split
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.datasets import folder as torchvision_folder

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.split.describe import Convention, ReadRefused, SplitRefused
from lightning_echo.split.make import method_stages
from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import StagedDataset, is_raw, is_staged


class TestProtocol:
    def test_an_item_of_a_staged_data_set_is_read_then_decoded_then_augmented(self):
        class Digits(StagedDataset):
            def read(self, index):
                return str(index).encode()

            def decode(self, raw):
                return int(raw) * 10

            def augment(self, example):
                return -example

        dataset = Digits()
        assert (dataset.read(3), dataset.decode(b"3"), dataset.load(3), dataset[3]) == (b"3", 30, 30, -30)

    @pytest.mark.parametrize("call", ["read", "decode", "load"])
    def test_a_missing_stage_is_named_with_both_ways_to_write_it(self, call):
        class Empty(StagedDataset):
            pass

        with pytest.raises(NotImplementedError, match=r"Empty must implement load\(index\), or read\(index\) and decode\(raw\)"):
            getattr(Empty(), call)(0)

    @pytest.mark.parametrize(
        ("dataset", "redone"),
        [
            (Words(), ("decode", "augment")),
            (ShapeOfWords(), ("decode", "augment")),
            (NotAugmented(), ("decode",)),
            (StagedDataset.of(Raws(), decode=int, augment=noisy), ("decode", "augment")),
            (Subset(Words(), [5, 2]), ("decode", "augment")),
            (random_split(ShapeOfWords(), [3, 4])[1], ("decode", "augment")),
            (ConcatDataset([NotAugmented(), Subset(Words(), [1])]), ("decode", "augment")),
            (StagedDataset.of(NotAugmented(), augment=str.upper), ("decode", "augment")),
            (StagedDataset.of(ConcatDataset([NotAugmented(), NotAugmented()]), augment=str.upper), ("decode", "augment")),
            (StagedDataset.of(Subset(Words(), [3, 1]), augment=repr), ("decode", "augment", "augment")),
        ],
        ids=[
            *("inherited", "protocol", "no augment", "named cut", "subset", "random_split", "concat"),
            *("named augmentation", "named augmentation of a concat", "named augmentation of a subset"),
        ],
    )
    def test_each_use_is_decoded_and_augmented_anew(self, dataset, redone):
        split, stages = proved(dataset)
        assert (split.reused, split.redone) == (("read",), redone)
        assert behaves_like(dataset, stages)
        assert isinstance(stages.load(0), bytes), "what is reused is raw"

    def test_a_named_augmentation_reaches_each_part_of_a_concat_inside(self):
        dataset = StagedDataset.of(ConcatDataset([Subset(NotAugmented(), [6, 5]), NotAugmented()]), augment=str.upper)
        assert find_split(dataset, [1], raw=True).redone == ("decode", "augment")
        assert find_split(dataset, [8, 2, 0], raw=True).redone == ("decode", "augment")
        assert proved(dataset)[1].load(0) == b"word number 6"

    def test_a_subset_of_a_named_augmentation_leads_each_raw_item_to_the_decoder_that_it_is_for(self):
        class Backwards(NotAugmented):
            def decode(self, raw):
                return raw.decode()[::-1]

        dataset = Subset(StagedDataset.of(ConcatDataset([NotAugmented(), Backwards()]), augment=str.upper), [8, 0, 13, 6])
        stages = proved(dataset)[1]
        assert stages.augment(0, stages.load(0)) == "1 REBMUN DROW"
        assert behaves_like(dataset, stages)

    def test_decoding_may_draw_also_from_a_generator_of_the_data_set(self):
        class OwnGenerator(Words):
            def __init__(self):
                self.rng = np.random.default_rng(1)

            def decode(self, raw):
                return raw.decode() + str(self.rng.random())

        dataset = OwnGenerator()
        assert find_split(dataset, raw=True).redone == ("decode", "augment")
        assert dataset.rng.random() == np.random.default_rng(1).random(), "the proof draws from a copy"

    def test_before_augmentation_decoding_is_loading(self):
        class Exact(ShapeOfWords):
            def decode(self, raw):
                return raw.decode()

        split = find_split(Exact())
        assert (split.reused, split.redone, split.raw) == (("load",), ("augment",), False)
        assert make_stages(Exact(), split.conventions).load(2) == "word number 2"

    def test_before_augmentation_decoding_that_draws_is_refused(self):
        for dataset in (Words(), ShapeOfWords()):
            with pytest.raises(SplitRefused, match=r"would be reused \(load\) draws random numbers from random"):
                find_split(dataset)

    @pytest.mark.parametrize(
        ("attributes", "raw", "staged"),
        [
            ({"read": lambda index: index, "decode": lambda raw: raw, "augment": lambda example: example}, True, True),
            ({"read": lambda index: index, "decode": lambda raw: raw}, True, False),
            ({"read": lambda index: index, "decode": lambda raw: raw, "augment": True}, True, False),
            ({"read": lambda index: index, "decode": lambda file: file}, True, False),
            ({"read": lambda path: path, "decode": lambda raw: raw, "augment": lambda example: example}, False, False),
            ({"read": lambda index: index, "decode": lambda raw, mode: raw}, False, False),
            ({"read": lambda: 0, "decode": lambda raw: raw}, False, False),
            ({"read": lambda index: index, "decode": lambda raw: raw, "augment": lambda a, b: a}, False, False),
            ({"read": lambda index: index}, False, False),
            ({"decode": lambda raw: raw, "read": "r"}, False, False),
        ],
    )
    def test_only_callables_that_take_no_path_count_as_the_protocol(self, attributes, raw, staged):
        dataset = Raws()
        vars(dataset).update(attributes)
        assert (is_raw(dataset), is_staged(dataset)) == (raw, staged)

    def test_a_staged_data_set_that_loads_may_call_a_helper_read(self):
        class Reads(Loads):
            def read(self, path):
                raise AssertionError("open(0) would close standard input")

            def decode(self, data):
                return data

        assert not is_raw(Reads())
        with pytest.raises(ReadRefused, match=r"Reads has no read\(index\) and decode\(raw\)"):
            find_split(Reads(), raw=True)
        assert find_split(Reads()).reused == ("load",)

    def test_a_data_set_that_has_all_of_them_is_split_either_way(self):
        class All(Words):
            def decode(self, raw):
                return raw.decode()

            def load(self, index):
                return f"word number {index}"

        assert find_split(All()).reused == ("load",)
        assert proved(All())[0].redone == ("decode", "augment")

    def test_a_data_set_that_loads_by_itself_has_nothing_to_read(self):
        with pytest.raises(ReadRefused, match=r"Loads has no read\(index\) and decode\(raw\)"):
            find_split(Loads(), raw=True)


class TestNamedCut:
    def test_items_are_decoded_then_augmented_items_of_the_inner_data_set(self):
        dataset = StagedDataset.of(Raws(), decode=int, augment=lambda example: -example)
        assert [dataset[index] for index in range(len(dataset))] == [0, -1, -2, -3, -4, -5]
        assert (dataset.read(4), dataset.decode(b"4"), dataset.load(4)) == (b"4", 4, 4)

    def test_before_augmentation_the_decoded_item_is_reused(self):
        dataset = StagedDataset.of(Raws(), decode=int, augment=noisy)
        split = find_split(dataset)
        assert (split.reused, split.redone) == (("load",), ("augment",))
        assert make_stages(dataset, split.conventions).load(4) == 4

    def test_batched_reading_is_kept_at_both_points_and_by_a_plain_loader(self):
        inner = BatchedRaws()
        dataset = StagedDataset.of(inner, decode=int, augment=lambda example: -example)
        assert make_stages(dataset, raw=True).load_many([5, 2]) == [b"5", b"2"]
        assert method_stages(dataset).load_many([3]) == [3]
        assert [batch.tolist() for batch in DataLoader(dataset, batch_size=4)] == [[0, -1, -2, -3], [-4, -5]]
        assert inner.calls == [[5, 2], [3], [0, 1, 2, 3], [4, 5]]
        assert find_split(dataset, raw=True).redone == ("decode", "augment")

    def test_batched_reading_is_kept_under_another_augmentation_too(self):
        inner = BatchedRaws()
        dataset = StagedDataset.of(StagedDataset.of(inner, decode=int, augment=abs), augment=lambda example: -example)
        stages = make_stages(dataset, raw=True)
        assert stages.load_many([5, 2]) == [b"5", b"2"]
        assert inner.calls == [[5, 2]]
        assert stages.augment(5, b"5") == -5

    def test_a_decoder_with_a_generator_of_its_own_is_redone_but_not_reused(self):
        class OwnGenerator:
            def __init__(self):
                self.rng = np.random.default_rng(1)

            def __call__(self, raw):
                return int(raw) + self.rng.random()

        decode = OwnGenerator()
        dataset = StagedDataset.of(Raws(), decode=decode, augment=abs)
        assert find_split(dataset, raw=True).redone == ("decode", "augment")
        with pytest.raises(SplitRefused, match=r"would be reused \(load\) draws random numbers from a generator that"):
            find_split(dataset)
        assert decode.rng.random() == np.random.default_rng(1).random(), "the proof draws from a copy"

    def test_methods_have_no_batched_form(self):
        assert make_stages(Words(), raw=True).load_many is None

    def test_it_can_be_pickled(self):
        assert pickle.loads(pickle.dumps(StagedDataset.of(Raws(), decode=int, augment=abs)))[3] == 3

    def test_a_decoder_that_is_not_callable_is_refused(self):
        with pytest.raises(TypeError, match="decode must be callable or None, got 'utf-8'"):
            StagedDataset.of(Raws(), decode="utf-8", augment=abs)

    def test_without_a_decoder_the_data_set_inside_says_where_to_cut(self):
        with pytest.raises(ReadRefused, match=r"Raws has no read\(index\) and decode\(raw\)"):
            find_split(StagedDataset.of(Raws(), augment=len), raw=True)


class TestFolders:
    @pytest.mark.parametrize(
        ("options", "names"),
        [
            ({}, ()),
            ({"transform": RANDOM}, ("Resize", "RandomHorizontalFlip", "PILToTensor")),
            ({"transform": v1.RandomCrop(20)}, ("RandomCrop",)),
            ({"target_transform": noisy}, ("target noisy",)),
            ({"transform": v1.ToTensor(), "target_transform": noisy}, ("ToTensor", "target noisy")),
        ],
    )
    def test_an_image_folder_is_split_as_it_is(self, images, options, names):
        dataset = datasets.ImageFolder(images, **options)
        split, stages = proved(dataset)
        assert (split.reused, split.redone, split.conventions) == (("read",), ("decode", *names), (Convention.folder,))
        assert behaves_like(dataset, stages)
        for index, (path, target) in enumerate(dataset.samples):
            with open(path, "rb") as file:
                assert stages.load(index) == (file.read(), target)

    def test_files_of_every_kind_are_decoded_as_torchvision_does(self, tmp_path):
        (tmp_path / "kinds").mkdir()
        pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8))
        for mode, kind in [("RGB", "png"), ("RGBA", "png"), ("P", "png"), ("1", "bmp"), ("L", "jpg"), ("CMYK", "jpg")]:
            (pixels if mode == "RGBA" else pixels.convert("RGB").convert(mode)).save(tmp_path / "kinds" / f"{mode}.{kind}")
        dataset = datasets.ImageFolder(tmp_path)
        assert len(dataset) == 6
        assert behaves_like(dataset, make_stages(dataset, raw=True))

    def test_inside_subset_concat_and_a_named_augmentation(self, images):
        dataset = datasets.ImageFolder(images, RANDOM)
        bare = datasets.ImageFolder(images)
        for nested in (
            Subset(dataset, [6, 1, 2]),
            random_split(dataset, [3, 5])[0],
            ConcatDataset([dataset, Subset(bare, [0, 7])]),
            StagedDataset.of(Subset(bare, [4, 5]), augment=lambda sample: (RANDOM(sample[0]), sample[1])),
        ):
            split, stages = proved(nested)
            assert split.reused == ("read",)
            assert behaves_like(nested, stages)

    def test_a_dataset_folder_and_a_subclass_that_reads_as_its_base(self, images):
        class Pets(datasets.ImageFolder):
            def find_classes(self, directory):
                return ["dog"], {"dog": 5}

        general = datasets.DatasetFolder(images, loader=torchvision_folder.default_loader, extensions=(".jpg",), transform=RANDOM)
        for dataset in (general, Pets(images, RANDOM)):
            assert behaves_like(dataset, proved(dataset)[1])
        assert make_stages(Pets(images), raw=True).load(0)[1] == 5

    def test_what_is_set_on_it_later_counts(self, images):
        """A ``worker_init_fn`` may do so, and without workers anybody."""
        dataset = datasets.ImageFolder(images)
        stages = proved(dataset)[1]
        dataset.samples = dataset.samples[::-1]
        dataset.transform = RANDOM
        assert behaves_like(dataset, stages)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"loader": Image.open}, r"its loader is open, not torchvision's default_loader"),
            ({"loader": torchvision_folder.pil_loader}, r"its loader is pil_loader, not torchvision's default_loader"),
        ],
    )
    def test_another_loader_is_refused(self, images, options, reason):
        with pytest.raises(ReadRefused, match=rf"{reason}, so it is not known how its files are decoded\. Give it read\(index\)"):
            find_split(datasets.ImageFolder(images, **options), raw=True)

    @pytest.mark.parametrize("method", ["__getitem__", "__getitems__"])
    def test_a_subclass_that_reads_by_itself_is_refused(self, images, method):
        own = type("WithPaths", (datasets.ImageFolder,), {method: lambda self, index: index})
        with pytest.raises(ReadRefused, match="WithPaths reads examples by a method of its own, not by DatasetFolder's"):
            find_split(own(images), raw=True)

    def test_a_subclass_that_reads_by_itself_may_have_the_protocol(self, images):
        class WithPaths(datasets.ImageFolder):
            def read(self, index):
                with open(self.samples[index][0], "rb") as file:
                    return file.read()

            def decode(self, raw):
                return Image.open(io.BytesIO(raw)).convert("L")

            def __getitem__(self, index):
                return self.decode(self.read(index))

        split, stages = proved(WithPaths(images))
        assert split.conventions == (Convention.read,)
        assert behaves_like(WithPaths(images), stages)

    def test_another_image_backend_is_refused(self, images):
        dataset = datasets.ImageFolder(images)
        torchvision.set_image_backend("accimage")
        try:
            with pytest.raises(ReadRefused, match="torchvision's image backend is accimage"):
                find_split(dataset, raw=True)
        finally:
            torchvision.set_image_backend("PIL")
        assert find_split(dataset, raw=True).redone == ("decode",)

    def test_a_default_loader_that_decodes_otherwise_is_found_by_the_proof(self, images, monkeypatch):
        monkeypatch.setattr(torchvision_folder, "default_loader", lambda path: Image.open(path).convert("L"))
        with pytest.raises(ReadRefused, match=r"dataset\[0\] is not what its stages return .*images of mode L and RGB"):
            find_split(datasets.ImageFolder(images, loader=torchvision_folder.default_loader), raw=True)

    def test_in_a_worker_it_is_refused_if_it_is_no_longer_what_it_was(self, images):
        dataset = datasets.ImageFolder(images)
        conventions = find_split(dataset, raw=True).conventions
        dataset.loader = Image.open
        with pytest.raises(ReadRefused, match="its loader is open"):
            make_stages(dataset, conventions, raw=True)
        dataset.read, dataset.decode = dataset.samples.__getitem__, lambda raw: raw
        with pytest.raises(SplitRefused, match="ImageFolder no longer has files that torchvision's default loader decodes"):
            make_stages(dataset, conventions, raw=True)


class TestRefused:
    def test_a_read_that_draws(self):
        class Drawing(Words):
            def read(self, index):
                return str(random.random()).encode()

        with pytest.raises(ReadRefused, match=r"would be reused \(read\) draws random numbers from random\. Give it"):
            find_split(Drawing(), raw=True)

    def test_an_item_that_is_not_what_its_stages_return(self):
        class Upper(ShapeOfWords):
            def __getitem__(self, index):
                return self.augment(self.decode(self.read(index)).upper())

        with pytest.raises(ReadRefused, match=r"dataset\[0\] is not what its stages return under the same seeds"):
            find_split(Upper(), raw=True)

    def test_an_item_that_is_augmented_where_augment_is_missing(self):
        class Transformed(NotAugmented):
            def __getitem__(self, index):
                return noisy(len(super().__getitem__(index)))

        with pytest.raises(ReadRefused, match=r"dataset\[0\] is not what its stages return"):
            find_split(Transformed(), raw=True)

    def test_a_decoder_that_needs_what_reading_left(self):
        class Remembers(NotAugmented):
            def read(self, index):
                self.last = index
                return b"word"

            def decode(self, raw):
                return raw, self.last

        with pytest.raises(ReadRefused, match=r"dataset\[0\] is not what its stages return"):
            find_split(Remembers(), raw=True)

    def test_what_decoding_raises_says_that_it_was_decoding(self):
        class Closes(NotAugmented):
            def __getitem__(self, index):
                return "word"

            def decode(self, raw):
                raise OSError("truncated")

        with pytest.raises(ReadRefused, match=r"decoding and augmenting dataset\[0\] in stages raised OSError: truncated"):
            find_split(Closes(), raw=True)

    def test_a_look_alike_by_two_conventions_says_why_neither_is_right(self, images, monkeypatch):
        class Both(datasets.ImageFolder):
            def read(self, index):
                return b"nothing"

            def decode(self, raw):
                return raw

        monkeypatch.setattr(torchvision_folder, "default_loader", lambda path: Image.open(path).convert("L"))
        with pytest.raises(ReadRefused) as refused:
            find_split(Both(images, loader=torchvision_folder.default_loader), raw=True)
        for convention in ("by read(index) and decode(raw): ", "by files that torchvision's default loader decodes: "):
            assert convention in refused.value.reason

    def test_a_stream(self):
        class Stream(IterableDataset):
            read, decode = Words.read, Words.decode

            def __iter__(self):
                return iter([])

        with pytest.raises(ReadRefused, match="Stream is a stream"):
            find_split(Stream(), raw=True)

    def test_the_refusal_of_a_loader_says_what_to_implement_and_hides_no_way_out(self):
        with pytest.raises(ValueError, match=r"^insertion_point='after_read' is impossible here: ") as refused:
            EchoLoader(DataLoader(Raws(), batch_size=2), 2, insertion_point="after_read")
        for way in ("read(index)", "decode(raw)", "StagedDataset", "StagedDataset.of(", "decode=...", "'before_augmentation'"):
            assert way in str(refused.value)
        assert "before its augmentation" not in str(refused.value)
        assert str(refused.value).count("Raws") == 1


class TestWithoutTorchvision:
    @pytest.mark.own_interpreter  # blocks imports
    def test_it_is_neither_needed_nor_imported(self):
        program = (
            "import sys\n"
            "sys.modules['torchvision'] = sys.modules['PIL'] = None\n"  # importing them raises
            "from torch.utils.data import DataLoader, Dataset\n"
            "from lightning_echo import EchoLoader\n"
            "class Own(Dataset):\n"
            "    def read(self, index): return b'%d' % index\n"
            "    def decode(self, raw): return int(raw)\n"
            "    def __getitem__(self, index): return self.decode(self.read(index))\n"
            "    def __len__(self): return 4\n"
            "print(repr(EchoLoader(DataLoader(Own(), batch_size=2), 2, insertion_point='after_read', seed=0)).split(';')[0])\n"
            "try: EchoLoader(DataLoader([1, 2], batch_size=2), 2, insertion_point='after_read')\n"
            "except ValueError as error: print('read(index)' in str(error))\n"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert run.stdout.splitlines() == ["after_read, factor 2: reuse [read], redo [decode]", "True"]
