"""Hugging Face's ``Trainer`` and accelerate: an `EchoLoader` around a plain loader or a prepared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo import EchoLoader

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'lightning-echo[test-outside]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'lightning-echo[test-outside]'"
)

EXAMPLES, BATCH, EPOCHS, SAVED_AT = 32, 4, 3, 11
STEPS = EPOCHS * EXAMPLES // BATCH
STATE = "echo.pt"


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.zeros(1)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Numbers()[index] for index in range(EXAMPLES))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[list[int]]()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x[:, 0].int().tolist())
        return {"loss": (self.layer(x) - labels).pow(2).mean() * 1e-6, "logits": x}


class Echoing(transformers.Trainer):
    """Echoes what ``super()`` returns, which accelerate has prepared, or a plain loader."""

    is_prepared = False
    echoed: EchoLoader | None = None

    def get_train_dataloader(self) -> Any:
        if self.echoed is None:
            prepared, plain = super().get_train_dataloader(), DataLoader(self.train_dataset, BATCH, shuffle=True)
            self.echoed = EchoLoader(prepared if self.is_prepared else plain, 2, seed=1)
        return self.echoed


class SavesState(transformers.TrainerCallback):
    def __init__(self, trainer: Echoing) -> None:
        self.trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer.echoed is not None
        torch.save(self.trainer.echoed.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE)


def trainer(folder: Path, is_prepared: bool, **options: Any) -> Echoing:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        save_steps=SAVED_AT,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    made = Echoing(model=Model(), args=arguments, train_dataset=Numbers())
    made.is_prepared = is_prepared
    made.add_callback(SavesState(made))
    return made


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_trainer_of_transformers_is_echoed_and_resumes_exactly_with_our_state(is_prepared: bool, tmp_path: Path) -> None:
    full = trainer(tmp_path, is_prepared)
    full.train()
    assert full.echoed is not None
    assert full.echoed.insertion_point == ("after_batching" if is_prepared else "after_augmentation")
    assert len(full.model.seen) == STEPS
    assert full.echoed.counts.fresh < EXAMPLES * EPOCHS == full.echoed.counts.delivered
    assert {index for batch in full.model.seen for index in batch} == set(range(EXAMPLES))

    checkpoint = tmp_path / f"checkpoint-{SAVED_AT}"
    resumed = trainer(tmp_path, is_prepared, ignore_data_skip=True)
    resumed.get_train_dataloader().load_state_dict(torch.load(checkpoint / STATE))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == STEPS
    assert resumed.model.seen == full.model.seen[SAVED_AT:]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_resume_that_would_build_a_plain_loader_is_refused(is_prepared: bool, tmp_path: Path) -> None:
    trainer(tmp_path, is_prepared, max_steps=SAVED_AT).train()
    with pytest.raises(AttributeError, match="ignore_data_skip=True"):
        trainer(tmp_path, is_prepared).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED_AT}"))


@pytest.mark.parametrize("dataset", [Numbers(), Stream()])
def test_accelerate_builds_no_plain_loader_of_an_echoed_one(dataset: Any) -> None:
    echoed = EchoLoader(DataLoader(dataset, BATCH), 2, seed=1)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare(echoed) is echoed
    with pytest.raises(AttributeError, match="ignore_data_skip=True"):
        accelerate.skip_first_batches(echoed, 3)


def test_a_prepared_stream_says_that_it_cannot_resume_within_a_pass() -> None:
    prepared = accelerate.Accelerator(cpu=True).prepare(DataLoader(Stream(), BATCH))
    echoed = EchoLoader(prepared, 2, seed=1)
    next(iter(echoed))
    with pytest.raises(ValueError, match="within a pass"):
        EchoLoader(prepared, 2, seed=1).load_state_dict(echoed.state_dict())
