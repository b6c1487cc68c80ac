"""PyTorch Tabular: makes data module and ``pytorch_lightning.Trainer`` from data frames and configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from library_runs import train_with_library
from project_runs import BATCH, LENGTH, assert_right

pytorch_tabular = pytest.importorskip(
    "pytorch_tabular", reason="pytorch_tabular is not installed: pip install 'lightning-echo[test-outside]'"
)

import pandas  # noqa: E402
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig  # noqa: E402
from pytorch_tabular.models import CategoryEmbeddingModelConfig  # noqa: E402


def see(batch: Any) -> Any:
    """A row is known by its target, and seen with the column beside it."""
    return [(int(target[0]), row[0]) for target, row in zip(batch["target"].tolist(), batch["continuous"].tolist(), strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_come_as_they_are(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = pandas.DataFrame({"x": [0.5 * row for row in range(LENGTH)], "y": [float(row) for row in range(LENGTH)]})

    def fit(callbacks: Any) -> None:
        model = pytorch_tabular.TabularModel(
            data_config=DataConfig(
                target=["y"], continuous_cols=["x"], normalize_continuous_features=False, num_workers=workers, pin_memory=False
            ),
            model_config=CategoryEmbeddingModelConfig(task="regression", layers="8"),
            optimizer_config=OptimizerConfig(),
            trainer_config=TrainerConfig(
                batch_size=BATCH,
                max_epochs=4,
                accelerator="cpu",
                early_stopping=None,
                checkpoints=None,
                load_best=False,
                progress_bar="none",
                trainer_kwargs={"enable_model_summary": False, "log_every_n_steps": 1},
            ),
        )
        model.fit(train=table, validation=table[:4], callbacks=callbacks)

    run = train_with_library(see, fit)
    plain = {row: 0.5 * row for row in range(LENGTH)}
    assert_right(run, range(LENGTH), point="after_augmentation", steps=-(-LENGTH // BATCH), values=plain)
