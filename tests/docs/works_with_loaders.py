"""The loaders of the page "Works with": each is trained with at each insertion point, and killed within an epoch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_echo import EchoCallback, EchoDataModule, StagedDataset
from lightning_echo.insertion import POINTS
from lightning_echo.schema import EchoStateError

LENGTH, BATCH, STEP = 24, 4, 2  # a run is killed after that step of its first epoch, or after its last one


def noisy(value: Tensor) -> Tensor:
    return value + torch.rand(1)


class Whole(Dataset[Tensor]):
    """Does everything in ``__getitem__``."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return noisy(torch.tensor([float(index)]))


class Plain(Whole):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Batches:
    """Any iterable of batches."""

    def __len__(self) -> int:
        return LENGTH // BATCH

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(LENGTH)).reshape(-1, BATCH))


class Staged(StagedDataset):
    def load(self, index: Any) -> Any:
        return torch.tensor([float(index)])

    def augment(self, example: Any) -> Any:
        return noisy(example)

    def __len__(self) -> int:
        return LENGTH


class Raw(Staged):
    def read(self, index: Any) -> Any:
        return bytes([index])

    def decode(self, raw: Any) -> Any:
        return torch.tensor([float(raw[0])])

    def load(self, index: Any) -> Any:
        return self.decode(self.read(index))


class Stream(IterableDataset[Tensor]):
    """Has no state: nobody can ask it where it stands."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(LENGTH)))


class StreamWithState(Stream):
    """Says where it stands, and goes on there."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < LENGTH:
            self.place += 1
            yield torch.tensor(float(self.place))
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def image_folder(folder: Path) -> Any:
    from torchvision import datasets
    from torchvision.transforms import v2

    for index in range(LENGTH):
        path = folder / "images" / "class" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (index, 0, 0)).save(path)
    transform = v2.Compose([v2.RandomCrop(8), v2.PILToTensor(), v2.ToDtype(torch.float32)])
    return DataLoader(datasets.ImageFolder(str(folder / "images"), transform), BATCH, shuffle=True)


def monai(folder: Path) -> Any:
    from monai.data import Dataset as Listed
    from monai.transforms import Compose, Lambda, RandGaussianNoise

    items = [torch.full((1, 4, 4), float(number)) for number in range(LENGTH)]
    return DataLoader(Listed(items, Compose([Lambda(torch.clone), RandGaussianNoise(prob=1.0)])), BATCH, shuffle=True)


def with_transform(examples: dict[str, list[int]]) -> dict[str, Any]:
    return {"number": [noisy(torch.tensor([float(number)])) for number in examples["number"]]}


def hugging_face(folder: Path) -> Any:
    from datasets import Dataset as Table

    table = Table.from_dict({"number": list(range(LENGTH))})
    table.set_transform(with_transform)
    return DataLoader(table, BATCH, shuffle=True)


def hugging_face_stream(folder: Path) -> Any:
    from datasets import Dataset as Table

    return DataLoader(Table.from_dict({"number": list(range(LENGTH))}).to_iterable_dataset(num_shards=4), BATCH)


def webdataset_stream(folder: Path) -> Any:
    import webdataset

    with webdataset.TarWriter(str(folder / "shard-0.tar")) as tar:
        for index in range(LENGTH):
            tar.write({"__key__": f"{index:03d}", "number.cls": index})
    stream = webdataset.WebDataset([str(folder / "shard-0.tar")], shardshuffle=False).decode()
    return DataLoader(stream.map(lambda sample: float(sample["number.cls"])), BATCH)


def webdataset_loader(folder: Path) -> Any:
    import webdataset

    batches = webdataset_stream(folder).dataset.batched(BATCH, collation_fn=torch.tensor)
    return webdataset.WebLoader(batches, batch_size=None)


def litdata_loader(folder: Path) -> Any:
    import litdata
    from litdata.streaming import Cache

    if not (chunks := folder / "chunks").exists():
        cache = Cache(str(chunks), chunk_size=5)
        for index in range(LENGTH):
            cache[index] = {"number": index}
        cache.done()
        cache.merge()
    return litdata.StreamingDataLoader(litdata.StreamingDataset(str(chunks), shuffle=True), batch_size=BATCH)


def stateful(folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Plain(), BATCH, shuffle=True)  # what its workers draw is not set back


def buckets(folder: Path) -> Any:
    order = RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(0))
    return DataLoader(Whole(), batch_sampler=BatchSampler(order, BATCH, drop_last=False))


class Kind(NamedTuple):
    """A row of the table: a kind of loader."""

    name: str
    make: Callable[[Path], Any]
    in_readme: str = ""  # its name there; empty: it is left out


def mapped(data: Dataset[Any]) -> Callable[[Path], Any]:
    return lambda folder: DataLoader(data, BATCH, shuffle=True)


def streamed(make: Callable[[], IterableDataset[Any]]) -> Callable[[Path], Any]:
    return lambda folder: DataLoader(make(), BATCH)


def two_loaders(folder: Path) -> Any:
    return {"a": DataLoader(Whole(), BATCH, shuffle=True), "b": DataLoader(Staged(), BATCH)}


TORCHVISION = "torchvision's data sets and their convention (`transform`, `transforms`)"
WITHOUT_STATE, WITH_STATE = "an `IterableDataset` without a state", "an `IterableDataset` with `state_dict` and `load_state_dict`"
KINDS = (
    Kind(TORCHVISION, image_folder, "torchvision's data sets"),
    Kind("`StagedDataset` with `load` and `augment`", mapped(Staged())),
    Kind("`StagedDataset` with `read`, `decode` and `augment`", mapped(Raw()), "a `StagedDataset` that can `read`"),
    Kind("MONAI's `Dataset` with its `Compose`", monai, "MONAI's `Dataset`"),
    Kind("a data set that does everything in `__getitem__`", mapped(Whole()), "any other data set"),
    Kind("Hugging Face `datasets` with `set_transform`", hugging_face, "Hugging Face `datasets`"),
    Kind(WITHOUT_STATE, streamed(Stream), WITHOUT_STATE),
    Kind(WITH_STATE, streamed(StreamWithState), "an `IterableDataset` with a state"),
    Kind("Hugging Face `datasets`, streaming", hugging_face_stream),
    Kind("WebDataset in a `DataLoader`", webdataset_stream),
    Kind("WebDataset's `WebLoader`", webdataset_loader),
    Kind("litdata's `StreamingDataLoader`", litdata_loader),
    Kind("torchdata's `StatefulDataLoader`", stateful),
    Kind("a `batch_sampler` of your own", buckets, "a `batch_sampler` of your own"),
    Kind("any other iterable of batches", lambda folder: Batches(), "any other iterable of batches"),
    Kind("a dict of loaders", two_loaders, "a dict of loaders"),
)


class Sees(pl.LightningModule):
    """Learns nothing, and keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[float]] = []
        self.end = 0  # of the first epoch, in steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append([value for tensor in tensors_of(batch) for value in tensor.flatten().tolist()])
        return self.weight

    def on_train_epoch_end(self) -> None:
        self.end = self.end or self.trainer.global_step
        self.loader = self.trainer.train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    else:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_of(part)


class Run(NamedTuple):
    """A training that is over."""

    seen: list[list[float]]
    end: int  # of its first epoch, in steps
    echoed: int
    point: str  # of each loader, if there are several


def train(loader: Any, folder: Path, point: str, *, epochs: int = 1, ckpt_path: str | None = None) -> Run:
    """Trains by a callback, or by a data module if there are several loaders."""
    options = {"insertion_point": point, "seed": 0}
    several = isinstance(loader, dict)
    callback = EchoCallback(summary=False) if several else EchoCallback(factor=2, summary=False, **options)
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[callback, save],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Sees()
    if several:
        datamodule = EchoDataModule.from_dataloaders(loader, factor=2, **options)
        trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    else:
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    parts = list(model.loader.values()) if several else [model.loader]
    echoed, points = min(part.counts.echoed for part in parts), dict.fromkeys(str(part.insertion_point) for part in parts)
    return Run(model.seen, model.end, echoed, " and ".join(points))


@contextmanager
def quiet() -> Iterator[None]:
    """What libraries say and warn of while the table is filled is their business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def works_at(kind: Kind, point: str, folder: Path) -> bool:
    """Whether a training echoes with this loader at this point; if not, it must be refused before the first step."""
    folder.mkdir()
    try:
        run = train(kind.make(folder), folder / "saved", point)
    except (ValueError, MisconfigurationException):
        return False
    assert run.echoed > 0, f"{kind.name}, {point}: nothing was echoed"
    return True


def taken_by_auto(kind: Kind, folder: Path) -> str:
    folder.mkdir()
    return train(kind.make(folder), folder / "saved", "auto").point


def resumes(kind: Kind, folder: Path) -> str:
    """With which batches a run goes on that was killed: after a step within an epoch, or only after an epoch."""
    folder.mkdir()
    whole = train(kind.make(folder), folder / "saved", "auto", epochs=2)

    def rest(step: int) -> list[list[float]]:
        return train(kind.make(folder), folder / "again", "auto", epochs=2, ckpt_path=f"{folder}/saved/step={step}.ckpt").seen

    try:
        went_on = rest(STEP)
    except EchoStateError:
        next_pass = {value for batch in rest(whole.end) for value in batch}
        assert next_pass == {value for batch in whole.seen for value in batch}, f"{kind.name}: not all of the next pass"
        return "with the next pass"
    assert went_on == whole.seen[STEP:], f"{kind.name}: goes on with other batches"
    return "exactly"


class Row(NamedTuple):
    """What trainings show of a kind of loader."""

    points: dict[str, bool]
    auto: str
    resumes: str


def fill(kind: Kind, folder: Path) -> Row:
    """Trains with a kind of loader at each point, and resumes with it."""
    folder.mkdir(exist_ok=True)
    with quiet():
        points = {point.value: works_at(kind, point.value, folder / point.value) for point in POINTS}
        return Row(points, taken_by_auto(kind, folder / "auto"), resumes(kind, folder / "resumed"))
