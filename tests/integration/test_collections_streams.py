"""Collections with streams and loaders without a length: Lightning fetches a batch ahead of all of them, sized ones too."""

from __future__ import annotations

from typing import Any

import pytest
from collection_runs import SeveralRecorder
from lightning.pytorch.utilities import CombinedLoader
from test_trainer_streams import Batches, Stateful, StatefulBatches, Stream
from torch.utils.data import DataLoader, Dataset
from trainer_runs import Data, Killed, SaveAt, Scans, fit

from lightning_echo import EchoDataModule


class Whole(Dataset):  # type: ignore[type-arg]
    """Cannot be split, so that all uses of an example share its noise."""

    def __getitem__(self, index: int) -> Any:
        return Scans(40)[index]

    def __len__(self) -> int:
        return 40


class Mixed(Data):
    """A loader with a length, a stream, and an iterable of batches, combined by one of Lightning's modes."""

    def __init__(self, mode: str, stateful: bool = True, sized: bool = True) -> None:
        super().__init__()
        self.mode, self.stateful, self.sized = mode, stateful, sized

    def train_dataloader(self) -> Any:
        loaders: dict[str, Any] = {
            "stream": DataLoader(Stateful(30) if self.stateful else Stream(30), 4),
            "batches": StatefulBatches(9) if self.stateful else Batches(9),
        }
        if self.sized:
            loaders["sized"] = DataLoader(Whole(), 4, shuffle=True)
        return CombinedLoader(loaders, self.mode)  # type: ignore[arg-type]


def train(mode: str, **options: Any) -> Any:
    data = EchoDataModule(Mixed(mode, options.pop("stateful", True), options.pop("sized", True)), 2, buffer_size=4, seed=7)
    return fit(data, model=SeveralRecorder(), **options)


def fresh(batches: Any) -> list[int]:
    """Indices of all examples by the first time that they were seen."""
    seen: dict[Any, int] = {}
    for indices, noises in batches:
        seen.update((noise, index) for index, noise in zip(indices, noises, strict=True) if noise not in seen)
    return list(seen.values())


@pytest.mark.parametrize(("mode", "sized"), [("min_size", False), ("max_size_cycle", True), ("max_size_cycle", False)])
def test_each_loader_gives_every_example_of_its_passes_once_and_then_echoes(mode: str, sized: bool) -> None:
    run = train(mode, stateful=False, sized=sized)
    leaves = run.data.loader.iterables
    for position, name in enumerate(leaves):
        batches = run.model.of(position)
        indices = fresh(batches)
        counts = leaves[name].counts
        unused = counts.delivered - sum(len(batch[0]) for batch in batches)
        assert 0 <= counts.fresh - len(indices) <= unused <= 4  # a batch that Lightning asked for when another loader had ended
        length = {"stream": 30, "batches": 36, "sized": 40}[name]
        whole = len(indices) // length * length
        assert sorted(indices[:whole]) == sorted(list(range(length)) * (whole // length))


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("step", [3, 8])
def test_with_states_of_their_own_all_of_them_resume_exactly_where_lightning_does(tmp_path: Any, sized: bool, step: int) -> None:
    """Of ``min_size`` Lightning has no state but the loaders'."""
    whole = train("min_size", sized=sized)
    assert whole.model.steps[0] > 8
    saver = SaveAt(tmp_path, [step], dies=True)
    with pytest.raises(Killed):
        train("min_size", sized=sized, callbacks=[saver])
    rest = train("min_size", sized=sized, ckpt_path=saver.path(step))
    assert rest.model.batches == whole.model.batches[step:]
    assert rest.model.epochs == whole.model.epochs[step:]
    for name, leaf in rest.data.loader.iterables.items():
        assert leaf.counts.fresh == whole.data.loader.iterables[name].counts.fresh
