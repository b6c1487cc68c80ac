"""Hugging Face's ``Trainer`` and accelerate: an `EchoLoader` around a plain loader or a prepared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'lightning-echo[test-outside]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'lightning-echo[test-outside]'"
)

# torchdata 0.11 calls a torch function that torch 2.15 deprecates, in every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EXAMPLES, BATCH, EPOCHS, SAVED_AT = 32, 4, 3, 11
STEPS = EPOCHS * EXAMPLES // BATCH


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)]), "labels": torch.zeros(1)}


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
        torch.save(self.trainer.echoed.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / "echo.pt")


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
    with pytest.raises(AttributeError, match="ignore_data_skip=True"):  # it would build a plain loader
        trainer(tmp_path, is_prepared).train(resume_from_checkpoint=str(checkpoint))
    resumed = trainer(tmp_path, is_prepared, ignore_data_skip=True)
    resumed.get_train_dataloader().load_state_dict(torch.load(checkpoint / "echo.pt"))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == STEPS
    assert resumed.model.seen == full.model.seen[SAVED_AT:]


def prepared() -> EchoLoader:
    plain = DataLoader(Numbers(), BATCH, shuffle=True)
    return EchoLoader(accelerate.Accelerator(cpu=True).prepare(plain), 1, insertion_point="after_batching", seed=1)


def after(taken: int) -> dict[str, Any]:
    """The state after so many batches: eight are a pass."""
    killed = prepared()
    for _ in range(taken // 8):
        list(killed)
    batches = iter(killed)
    for _ in range(taken % 8):
        next(batches)
    return killed.state_dict()


def numbers(loader: EchoLoader, epochs: int) -> list[list[float]]:
    return [batch["x"][:, 0].tolist() for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("taken", [3, 8, 11])
def test_a_prepared_loader_resumes_in_the_order_of_its_pass(taken: int) -> None:
    full, resumed = numbers(prepared(), 3), prepared()
    resumed.load_state_dict(after(taken))
    assert sorted(index for batch in full[:8] for index in batch) == list(range(EXAMPLES))
    assert numbers(resumed, 3)[: len(full) - taken] == full[taken:]
