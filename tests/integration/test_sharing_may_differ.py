"""The table of docs/sharing.md, what may differ between trainings that share: each row is tried. They share, or it is refused."""

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sharing_cache_runs import Shots
from sharing_runs import Numbers, closing, examples, in_process, status, together
from torch.utils.data import DataLoader, Sampler, Subset, SubsetRandomSampler, WeightedRandomSampler, random_split

from lightning_echo import EchoCallback, EchoLoader, ShareConfig
from lightning_echo.share.connecting import SharedDataDiffers

pytestmark = pytest.mark.usefixtures("own_folder")

PAGE = Path(__file__).parents[2] / "docs" / "sharing.md"
LENGTH, PASSES = 64, 6
HALF = list(range(0, LENGTH, 2))
SCALE = 1


class Data(Numbers):
    """As a user's: it has a transform, reads a file, and its code names a variable of its module."""

    def __init__(self, offset=0, transform=None, path=None, log_dir="logs/0"):
        super().__init__(LENGTH)
        self.offset, self.transform, self.path, self.log_dir = offset, transform, path, log_dir

    def __getitem__(self, index):
        return self.finished(super().__getitem__((index + self.offset) % LENGTH))

    def finished(self, example):
        text = "" if self.path is None else Path(self.path).read_text()
        example = {**example, "more": SCALE * len(text)}
        return example if self.transform is None else self.transform(example)


def doubled(example):
    return {**example, "more": 2 * example["more"]}


def edited(self, example):
    return {**example, "more": 0}


def edit_code(_, patch):
    patch.setattr(edited, "__qualname__", Data.finished.__qualname__)
    patch.setattr(Data, "finished", edited)


def collated(several):
    return {**torch.utils.data.default_collate(several), "count": len(several)}


class Backwards(Sampler):
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(range(LENGTH - 1, -1, -1))


def training(dataset=None, size=8, factor=1, sampler=None, shuffle=True, share=(), options=(), **of_loader):
    order = {"shuffle": shuffle} if sampler is None else {"sampler": sampler}
    plain = DataLoader(Data() if dataset is None else dataset, size, **{"num_workers": 1, **order, **of_loader})
    share = {"name": "data", "linger_seconds": 0.5, "window": 2**13, **dict(share)}
    return EchoLoader(plain, factor, share=share, **{"seed": 0, **dict(options)})


def rows_of_page():
    """Of each row of the table: whether it may differ, and the words in the message if it must not."""
    lines = PAGE.read_text().split("<!-- may differ:begin -->\n")[1].split("\n<!-- may differ:end -->")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: (answer, re.findall(r"`([^`]+)`", said)) for name, answer, said in rows}


YES: dict[str, Any] = {  # what the second training has that the first one does not; and its part
    "batch size": ({"size": 7}, range(LENGTH)),
    "collate function": ({"collate_fn": collated}, range(LENGTH)),
    "`drop_last`": ({"size": 7, "drop_last": True}, range(LENGTH)),
    "number of workers": ({"num_workers": 2}, range(LENGTH)),
    "seed": ({"options": {"seed": 9}}, range(LENGTH)),
    "echo factor": ({"factor": 2}, range(LENGTH)),
    "insertion point": ({"factor": 2, "options": {"insertion_point": "after_batching"}}, range(LENGTH)),
    "attributes that all of them name in `ignore`": ({"dataset": lambda: Data(log_dir="logs/1")}, range(LENGTH)),
    "part of the data: `Subset`, also nested": ({"dataset": lambda: Subset(Subset(Data(), HALF), range(10))}, HALF[:10]),
    "part of the data: `random_split`": (
        {"dataset": lambda: random_split(Data(), [20, 44], torch.Generator().manual_seed(0))[0]},
        random_split(range(LENGTH), [20, 44], torch.Generator().manual_seed(0))[0].indices,
    ),
    "part of the data: `SubsetRandomSampler`": ({"sampler": SubsetRandomSampler(HALF)}, HALF),
}
IGNORING = {"ignore": ("log_dir",)}


@pytest.mark.slow
@pytest.mark.parametrize("what", YES)
def test_what_may_differ_is_not_refused_and_both_take_from_one_reader(what):
    assert rows_of_page()[what] == ("yes", [])
    (differs, part), counts = YES[what], []
    share = {"wait_for": 2, **IGNORING}
    dataset = differs.get("dataset", lambda: None)()
    one, other = training(share=share), training(**{**differs, "dataset": dataset}, share=share)
    look = lambda: counts.append(status()["count"]) if not counts else None  # noqa: E731
    of_one, of_other = together(closing(one, PASSES), closing(other, PASSES, look))
    assert counts == [2], "one reader for both"
    assert [sorted(index for index, _ in examples(epoch)) for epoch in of_one] == [list(range(LENGTH))] * PASSES
    size, is_cut = differs.get("size", 8), differs.get("drop_last", False)
    expected = []
    for epoch in of_one:  # in the same order and with the same noise
        of_part = [example for example in examples(epoch) if example[0] in part]
        expected += of_part[: len(of_part) // size * size] if is_cut else of_part
    had = [example for epoch in of_other for example in examples(epoch)]
    fresh = list(dict.fromkeys(had))
    if "factor" in differs:
        assert len(expected) / 2 <= len(fresh) < len(had) == len(expected)
        assert set(fresh) == set(expected[: len(fresh)])
    else:
        assert had == expected


class Model(pl.LightningModule):
    def __init__(self, width, learning_rate):
        super().__init__()
        self.layers, self.learning_rate, self.seen = torch.nn.Linear(64, width), learning_rate, []

    def training_step(self, batch):
        self.seen += batch["index"].tolist()
        return self.layers(batch["data"].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.learning_rate)


def fits(connection, width, learning_rate):
    share = ShareConfig("data", wait_for=2, window=2**13, linger_seconds=0.5)
    model, callback = Model(width, learning_rate), EchoCallback(share=share)
    trainer = pl.Trainer(
        max_epochs=2, callbacks=[callback], logger=False, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Data(), 8, shuffle=True, num_workers=1))
    connection.send((model.seen, callback.reports[0].shared_trainings))


MODEL = "model, learning rate"


@pytest.mark.slow
def test_trainings_of_different_models_share():
    assert rows_of_page()[MODEL] == ("yes", [])
    with in_process(fits, 2, 0.1) as (_, one), in_process(fits, 3, 0.01) as (_, other):
        (seen, trainings), (of_other, trainings_of_other) = one.recv(), other.recv()
    assert [sorted(seen[:LENGTH]), sorted(seen[LENGTH:])] == [list(range(LENGTH))] * 2
    assert seen == of_other
    assert trainings == trainings_of_other == 2


def weighted(weight):
    return WeightedRandomSampler([1.0] * (LENGTH - 1) + [weight], LENGTH)


NO: dict[str, Any] = {  # what each of the two trainings has, and what happens between their starts
    "transforms": ({"dataset": lambda _: Data(transform=doubled)}, {"dataset": lambda _: Data()}, None),
    "contents of the data set": ({"dataset": lambda _: Data(offset=1)}, {"dataset": lambda _: Data()}, None),
    "files that it reads": (
        *({"dataset": lambda folder: Data(path=str(folder / "file"))},) * 2,
        lambda folder, patch: (folder / "file").write_text("another"),
    ),
    "code of the data set": ({}, {}, edit_code),
    "variables of modules that this code names": ({}, {}, lambda _, patch: patch.setattr(sys.modules[__name__], "SCALE", 2)),
    "order: `shuffle`": ({}, {"shuffle": False}, None),
    "order: a sampler of your own": ({}, {"sampler": Backwards()}, None),
    "weights of a sampler": ({"sampler": weighted(1.0)}, {"sampler": weighted(2.0)}, None),
    "part of the data without `shuffle`": (
        {"shuffle": False},
        {"shuffle": False, "dataset": lambda _: Subset(Data(), HALF)},
        None,
    ),
    "part of the data that has an index twice": ({}, {"dataset": lambda _: Subset(Data(), [0, 0, 1])}, None),
    "cache of the reader": (
        {"dataset": lambda _: Shots(LENGTH)},
        {"dataset": lambda _: Shots(LENGTH), "options": {"cache": "1MiB"}},
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NO)
def test_what_must_not_differ_is_refused_and_the_message_names_it(what, tmp_path, monkeypatch):
    answer, said = rows_of_page()[what]
    assert answer == "no"
    assert said, "the page says what the message names"
    (tmp_path / "file").write_text("one")
    of_one, of_other, between = NO[what]
    one, other = (training(**{**each, "dataset": each.get("dataset", lambda _: None)(tmp_path)}) for each in (of_one, of_other))
    epoch = iter(one)
    next(epoch)  # it is at work, and stays there
    if between is not None:
        between(tmp_path, monkeypatch)
    with pytest.raises(SharedDataDiffers) as refused:
        next(iter(other))
    assert [words for words in said if words not in str(refused.value)] == []
    for loader in (one, other):
        loader.close()


@pytest.mark.slow
def test_the_page_has_these_rows_and_no_others():
    assert list(rows_of_page()) == [*YES, MODEL, *NO]
