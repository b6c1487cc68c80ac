"""What the package works with: loaders at each insertion point, filled by trainings; all else, with the tests that show it.

``python tests/docs/works_with.py`` trains with each loader at each point, and writes the tables into README.md and
docs/about/works_with.md. ``test_works_with.py`` does the same and compares.
"""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import wrap
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
from lightning_echo.loading.state import EchoStateError

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "about" / "works_with.md", ROOT / "README.md"
LENGTH, BATCH, STEP = 24, 4, 2  # a run is killed after that step of its first epoch, or after its last one


# ---------------------------------------------------------------------- loaders


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


KINDS = (
    Kind("torchvision's data sets and their convention (`transform`, `transforms`)", image_folder, "torchvision's data sets"),
    Kind("`StagedDataset` with `load` and `augment`", lambda _: DataLoader(Staged(), BATCH, shuffle=True)),
    Kind(
        "`StagedDataset` with `read`, `decode` and `augment`",
        lambda _: DataLoader(Raw(), BATCH, shuffle=True),
        "a `StagedDataset` that can `read`",
    ),
    Kind("MONAI's `Dataset` with its `Compose`", monai, "MONAI's `Dataset`"),
    Kind(
        "a data set that does everything in `__getitem__`",
        lambda _: DataLoader(Whole(), BATCH, shuffle=True),
        "any other data set",
    ),
    Kind("Hugging Face `datasets` with `set_transform`", hugging_face, "Hugging Face `datasets`"),
    Kind("an `IterableDataset` without a state", lambda _: DataLoader(Stream(), BATCH), "an `IterableDataset` without a state"),
    Kind(
        "an `IterableDataset` with `state_dict` and `load_state_dict`",
        lambda _: DataLoader(StreamWithState(), BATCH),
        "an `IterableDataset` with a state",
    ),
    Kind("Hugging Face `datasets`, streaming", hugging_face_stream),
    Kind("WebDataset in a `DataLoader`", webdataset_stream),
    Kind("WebDataset's `WebLoader`", webdataset_loader),
    Kind("litdata's `StreamingDataLoader`", litdata_loader),
    Kind("torchdata's `StatefulDataLoader`", stateful),
    Kind("a `batch_sampler` of your own", buckets, "a `batch_sampler` of your own"),
    Kind("any other iterable of batches", lambda _: Batches(), "any other iterable of batches"),
    Kind(
        "a dict of loaders",
        lambda _: {"a": DataLoader(Whole(), BATCH, shuffle=True), "b": DataLoader(Staged(), BATCH)},
        "a dict of loaders",
    ),
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


class Quiet:
    """What libraries say and warn of while the table is filled is their business."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def __exit__(self, *error: object) -> None:
        logging.disable(logging.NOTSET)
        self._warnings.__exit__(None, None, None)


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
    with Quiet():
        points = {point.value: works_at(kind, point.value, folder / point.value) for point in POINTS}
        return Row(points, taken_by_auto(kind, folder / "auto"), resumes(kind, folder / "resumed"))


# ---------------------------------------------------------------------- everything else


class Claim(NamedTuple):
    """A row: what works, how far, and the tests that show it."""

    name: str
    how_far: str
    tests: tuple[str, ...]  # as ``file::function``
    in_readme: str = ""  # its name there; empty: it is left out


def integration(*tests: str) -> tuple[str, ...]:
    return tuple("tests/integration/test_" + test.replace("::", ".py::test_") for test in tests)


def outside(*tests: str) -> tuple[str, ...]:
    return tuple("tests/outside/test_" + test.replace("::", ".py::test_") for test in tests)


NOT_TESTED = "not tested"
EACH_CELL = "nodes::each_cell_of_the_table_of_strategies_says_what_a_run_shows"
LOGGED = "logger_files::what_is_logged_is_in_the_loggers_files"

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "Where the loader comes from": (
        Claim(
            "a data module",
            "yes",
            integration("callback_attachment::the_users_data_module_is_echoed_as_by_an_echo_data_module"),
        ),
        Claim(
            "the model's own `train_dataloader`",
            "yes",
            integration("callback_attachment::every_fresh_example_of_a_models_own_loader_is_used_factor_times"),
        ),
        Claim(
            "one loader that is passed to `fit`",
            "yes",
            integration("loaders_passed_to_fit::a_loader_is_echoed_as_by_an_echo_data_module"),
        ),
        Claim(
            "several loaders that are passed to `fit`",
            "refused by `EchoCallback`; `EchoDataModule.from_dataloaders` takes them",
            integration(
                "loaders_passed_to_fit::several_loaders_are_refused_before_the_first_step_with_the_ways_out",
                "collections::a_collection_can_be_passed_to_from_dataloaders",
            ),
        ),
        Claim(
            "Fabric",
            "yes, by `EchoLoader`",
            integration("data_examples::each_rank_of_fabric_echoes_its_part_of_the_data"),
        ),
        Claim(
            "the package `pytorch_lightning`",
            "`EchoCallback` is refused; `EchoLoader` works",
            integration("callback_attachment::a_trainer_of_the_package_pytorch_lightning_is_refused_with_the_ways_out"),
        ),
    ),
    "Ranks and nodes": (
        Claim(
            "`ddp`, on one node and on several",
            "yes",
            integration("ddp::fresh_examples_of_two_ranks_are_disjoint_and_together_complete", EACH_CELL),
            "`ddp` on one node and several",
        ),
        Claim("`ddp_spawn`, `ddp_fork`, `ddp_notebook`", "yes", integration(EACH_CELL), "`ddp_spawn`, `ddp_fork`"),
        Claim("`ModelParallelStrategy` with FSDP2", "yes", integration(EACH_CELL), "FSDP2"),
        Claim(
            "`ModelParallelStrategy` with tensor parallelism",
            "yes",
            integration("tensor_parallel::echoed_too_both_ranks_get_the_same_batches_the_noise_included", EACH_CELL),
            "tensor parallelism",
        ),
        Claim("started by torchrun, by Slurm, or by Lightning", "yes", integration(EACH_CELL), "torchrun, Slurm"),
        Claim(
            "torchrun starts the job again after a rank was killed",
            "yes, exactly",
            integration("elastic::after_a_rank_is_killed_the_job_goes_on_from_its_last_checkpoint_bit_by_bit"),
        ),
        Claim("Ray Train", "yes", integration("ray_train::two_workers_on_two_nodes_divide_the_data"), "Ray Train"),
        Claim("`fsdp`, PyTorch's first FSDP, which needs a GPU", NOT_TESTED, ()),
        Claim("`deepspeed`", NOT_TESTED, ()),
        Claim(
            "one GPU",
            "the tests are there, but no machine with a GPU was at hand",
            integration("after_transfer_gpu::a_fresh_batch_is_copied_once_and_an_echo_never", "idle_gpu::no_step_synchronises"),
        ),
    ),
    "Resuming": (
        Claim(
            "a run with workers that was killed within an epoch",
            "exactly",
            integration("resume::a_killed_run_with_workers_resumes_exactly"),
        ),
        Claim(
            "a checkpoint of `ModelCheckpoint` after a validation",
            "exactly",
            integration("resume::a_checkpoint_that_model_checkpoint_wrote_after_validation_resumes_exactly"),
        ),
        Claim("several ranks", "exactly", integration("ddp::two_ranks_resume_exactly_from_what_rank_zero_saved")),
        Claim(
            "another number of workers or ranks, another batch size",
            "with a warning; nothing of the pass is left out",
            integration(
                "resume::another_number_of_workers_resumes_with_a_warning_and_leaves_nothing_out",
                "resume::another_batch_or_buffer_size_resumes_with_a_warning_and_leaves_nothing_out",
                "ddp::a_checkpoint_of_two_ranks_resumes_on_one_with_a_warning_and_leaves_nothing_out",
            ),
        ),
        Claim("another data set", "refused", integration("resume::another_data_set_is_refused")),
        Claim(
            "with echoing after a run without, and the reverse",
            "yes",
            integration("callback_resume::a_run_resumes_with_and_without_echoing_the_data_modules_state_included"),
        ),
        Claim(
            "a checkpoint of an earlier version of this package",
            "exactly",
            integration("stored_checkpoints::a_stored_checkpoint_goes_on_with_the_batches_of_its_run"),
        ),
    ),
    "What a Trainer does besides": (
        Claim(
            "`limit_train_batches`, `max_steps`, `val_check_interval`",
            "yes",
            integration(
                "trainer_epochs::a_limited_epoch_is_followed_by_the_batch_where_it_stopped",
                "trainer_epochs::max_steps_ends_the_run_at_that_batch",
                "trainer_epochs::validation_within_an_epoch_moves_nothing",
            ),
        ),
        Claim(
            "`accumulate_grad_batches`, manual optimization",
            "yes",
            integration(
                "trainer_epochs::accumulated_gradients_step_after_the_same_batches",
                "trainer_epochs::manual_optimization_sees_the_same_batches_and_ends_at_the_same_weights",
            ),
        ),
        Claim(
            "`OneCycleLR` over `trainer.estimated_stepping_batches`",
            "yes",
            integration("trainer_epochs::a_one_cycle_schedule_of_the_estimated_length_ends_with_the_run"),
        ),
        Claim(
            "`EarlyStopping`, `ModelCheckpoint`, `LearningRateMonitor`, stochastic weight averaging",
            "yes",
            integration(
                "trainer_callbacks::early_stopping_ends_the_run_after_whole_epochs",
                "trainer_callbacks::model_checkpoint_saves_within_epochs_at_their_ends_and_for_the_best",
                "trainer_callbacks::the_learning_rate_monitor_logs_what_it_logs_without_echoing",
                "trainer_callbacks::stochastic_weight_averaging_takes_its_extra_epoch_over_the_data",
            ),
        ),
        Claim(
            "`Tuner.lr_find`, `Tuner.scale_batch_size`",
            "yes, with `EchoDataModule` or `EchoCallback`",
            integration(
                "tuner::the_learning_rate_finder_leaves_position_and_counts_as_they_were",
                "tuner::every_batch_size_that_is_tried_takes_effect",
            ),
        ),
        Claim("`overfit_batches`", "switches echoing off", integration("callback_attachment::overfit_batches_are_not_echoed")),
        Claim(
            "a precision plugin, at `after_transfer`",
            "converts each fresh batch once",
            integration("after_transfer::a_precision_plugin_converts_each_fresh_batch_once"),
        ),
        Claim(
            "two Trainers in threads of one process",
            "yes, with a data module and a callback each",
            integration("two_trainers::two_trainers_with_data_modules_and_callbacks_of_their_own_do_not_disturb_each_other"),
        ),
    ),
    "Configuration": (
        Claim(
            "LightningCLI",
            "yes",
            integration("examples::an_unchanged_cli_program_echoes_by_a_callback_on_its_command_line"),
            "LightningCLI",
        ),
        Claim("`EchoCLI`", "yes", integration("cli::a_factor_on_the_command_line_echoes_the_data_module")),
        Claim(
            "Hydra",
            "yes",
            integration("hydra_example::a_run_echoes_by_its_overrides_and_the_saved_config_reproduces_it"),
            "Hydra",
        ),
        Claim(
            "OmegaConf",
            "yes",
            integration("examples::an_omegaconf_program_echoes_by_its_yaml_file_and_the_saved_config_reproduces_the_run"),
            "OmegaConf",
        ),
        Claim(
            "Slurm's requeueing",
            "yes, exactly",
            integration("slurm::a_job_that_is_requeued_in_mid_epoch_twice_ends_as_one_that_nobody_interrupts"),
            "Slurm's requeueing",
        ),
        Claim(
            "Optuna",
            "yes, its trials share their reading",
            integration("sharing_studies::the_study_of_the_example_has_one_reader_in_processes_and_in_threads"),
            "Optuna",
        ),
        Claim(
            "Ray Tune",
            "yes, its trials share their reading",
            integration("ray_sharing::four_trials_of_ray_tune_on_two_nodes"),
            "Ray Tune",
        ),
    ),
    "Loggers": (
        Claim("CSV", "metrics, options", integration(LOGGED), "CSV"),
        Claim(
            "TensorBoard",
            "metrics, options, summary, picture",
            integration(
                LOGGED,
                "callback::tensorboard_has_the_summary_as_a_text",
                "run_pictures::tensorboard_has_it_at_the_last_step",
            ),
            "TensorBoard",
        ),
        Claim(
            "Weights & Biases, offline",
            "metrics, options, summary, picture",
            integration(
                LOGGED,
                "logger_files::the_summary_is_a_text_in_the_files_of_mlflow_and_wandb",
                "run_pictures::weights_and_biases_has_it_among_the_files_that_it_would_send",
            ),
            "W&B",
        ),
        Claim(
            "MLflow",
            "metrics, options, summary, picture",
            integration(
                LOGGED,
                "logger_files::the_summary_is_a_text_in_the_files_of_mlflow_and_wandb",
                "run_pictures::mlflow_has_it_among_the_artifacts",
            ),
            "MLflow",
        ),
        Claim(
            "Comet",
            "the summary, tested with a stand-in for the logger",
            ("tests/unit/monitoring/test_logger_texts.py::test_each_logger_is_given_the_text_as_it_takes_it",),
        ),
    ),
    "Cache and shared reading": (
        Claim(
            "a cache that the ranks of a node share",
            "yes",
            integration("cache_ranks::the_ranks_of_a_node_hold_each_example_once_and_the_other_node_holds_its_own"),
        ),
        Claim(
            "a cache that is divided among nodes (`partitioned=True`)",
            "yes",
            integration("partitioned_trainer::a_training_sees_the_same_and_learns_the_same_as_without_a_cache"),
        ),
        Claim(
            "a cache in a file, for the next job",
            "yes",
            integration("cache_kept::the_next_job_has_no_miss_and_the_same_batches"),
        ),
        Claim(
            "trainings that share their reading, each with a batch size and factor of its own",
            "yes",
            integration(
                "sharing::each_training_gets_every_example_once_in_one_order",
                "sharing::each_training_echoes_as_much_as_it_wants",
            ),
        ),
        Claim(
            "trainings that share a stream",
            "yes",
            integration("sharing_streams::each_training_gets_every_example_once_in_one_order"),
        ),
        Claim(
            "shared reading on the ranks of one node",
            "yes",
            integration("sharing_ranks::the_ranks_divide_each_pass_and_have_equally_many_steps"),
        ),
        Claim(
            "shared reading on another system than Linux",
            "refused",
            integration("sharing::on_another_system_it_is_refused_with_the_reason"),
        ),
        Claim("`cache` and `share` together", "refused", integration("sharing::share_and_cache_are_refused_together")),
    ),
    "Data of other projects": (
        Claim(
            "PyTorch Geometric",
            "yes",
            outside("torch_geometric::its_data_module_is_echoed_before_its_random_transform"),
            "PyTorch Geometric",
        ),
        Claim(
            "MONAI",
            "yes",
            outside("monai_data::the_deterministic_part_is_reused_and_the_noise_redone"),
            "MONAI",
        ),
        Claim(
            "TorchIO",
            "yes; its `Queue` ignores its index, which is said",
            outside("torchio::its_random_transforms_are_redone"),
            "TorchIO",
        ),
        Claim(
            "Lhotse",
            "yes, by whole batches; resumes within a pass in torchdata's `StatefulDataLoader`",
            outside("lhotse::in_torchdatas_loader_a_killed_run_goes_on_exactly"),
            "Lhotse",
        ),
        Claim(
            "Kornia",
            "yes, in the hooks of model or data module, and in a data set",
            outside("kornia::augmentation_in_the_models_hook_is_redone_for_each_use_at_any_point"),
            "Kornia",
        ),
        Claim("Lightly", "yes", outside("lightly::the_views_are_redone_where_they_are_taken_out_as_the_message_says"), "Lightly"),
        Claim("TorchGeo", "yes", outside("torchgeo::its_data_module_for_scenes_augments_every_use"), "TorchGeo"),
        Claim(
            "Albumentations", "yes, seeded from the plan", outside("albumentations::it_is_redone_for_each_use"), "Albumentations"
        ),
        Claim("PyTorch Forecasting", "yes", outside("pytorch_forecasting::windows_come_as_they_are"), "PyTorch Forecasting"),
        Claim(
            "PyTorch Metric Learning",
            "yes",
            outside("pytorch_metric_learning::whole_batches_stay_as_they_were_arranged"),
            "PyTorch Metric Learning",
        ),
        Claim(
            "mosaicml-streaming",
            "yes; a new loader for each resume",
            ("tests/outside/test_mosaicml_streaming.py::TestMosaicmlStreaming",),
            "mosaicml-streaming",
        ),
        Claim("litdata", "yes", ("tests/outside/test_litdata.py::TestLitdata",), "litdata"),
        Claim("WebDataset", "yes; it has no state", outside("webdataset::every_way_in_takes_it"), "WebDataset"),
    ),
}
WIDTH = 130  # of a line of the README
IN_README = ("Ranks and nodes", "Configuration", "Loggers", "Data of other projects")


# ---------------------------------------------------------------------- Markdown


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def cells_of(row: Row) -> tuple[str, ...]:
    taken = row.auto.split(" and ")
    return (*("**auto**" if point in taken else "yes" if works else "-" for point, works in row.points.items()), row.resumes)


def loaders(rows: dict[str, Row]) -> str:
    """The table of the page: rows by name of their kind."""
    head = ("loader", *(f"`{point.value}`" for point in POINTS), "goes on within an epoch")
    return table(head, [(kind.name, *cells_of(rows[kind.name])) for kind in KINDS])


def loaders_in_readme(rows: dict[str, Row]) -> str:
    """The table of the README: kinds of which the same is true stand in one row."""
    together: dict[tuple[str, ...], list[str]] = {}
    for kind in KINDS:
        if kind.in_readme:
            together.setdefault(cells_of(rows[kind.name]), []).append(kind.in_readme)
    head = ("loader", *(f"`{point.value}`" for point in POINTS), "resumes")
    return table(head, [(", ".join(names), *cells) for cells, names in together.items()])


def claims() -> str:
    parts = []
    for section, rows in CLAIMS.items():
        cells = [(claim.name, claim.how_far, ", ".join(dict.fromkeys(map(link, claim.tests))) or "none") for claim in rows]
        parts.append(f"### {section}\n\n{table(('what', 'how far', 'tests'), cells)}")
    return "\n\n".join(parts)


def link(test: str) -> str:
    file = test.partition("::")[0]
    return f"[`{Path(file).stem}`](../../{file})"


def claims_in_readme() -> str:
    lines = []
    for section in IN_README:
        names = ", ".join(claim.in_readme for claim in CLAIMS[section] if claim.in_readme)
        lines += wrap(f"* {section}: {names}.", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def versions() -> str:
    """The oldest versions, which `make test-oldest` installs."""
    pinned = [line.split("#")[0].strip().split("==") for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines()]
    rows = [(f"{pin[0]}", pin[1]) for pin in pinned if len(pin) == 2 and pin[0] != "pytorch-lightning"]
    return table(("package", "oldest version"), rows)


def between(text: str, mark: str, new: str) -> str:
    """Returns a page with what stands between two marks replaced."""
    begin, end = f"<!-- {mark}:begin -->\n", f"\n<!-- {mark}:end -->"
    assert text.count(begin) == text.count(end) == 1, f"the page needs {begin.strip()} and {end.strip()} once"
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}{new}{end}", text, flags=re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = {kind.name: fill(kind, Path(folder, str(number))) for number, kind in enumerate(KINDS)}
    page = PAGE.read_text()
    for mark, new in (("loaders", loaders(rows)), ("claims", claims()), ("versions", versions())):
        page = between(page, mark, new)
    PAGE.write_text(page)
    readme = README.read_text()
    for mark, new in (("loaders", loaders_in_readme(rows)), ("claims", claims_in_readme())):
        readme = between(readme, mark, new)
    README.write_text(readme)


if __name__ == "__main__":
    main()
