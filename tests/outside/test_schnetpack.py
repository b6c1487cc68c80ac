"""SchNetPack: molecules of different size in a data module of ``pytorch_lightning``, put together by a collate of its own.

It runs with torch and torchmetrics of its time alone: ``make test-oldest``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from library_runs import QUIET, train_with_library
from project_runs import BATCH, LENGTH, assert_right

schnetpack = pytest.importorskip("schnetpack", reason="SchNetPack is not installed: make test-oldest")

import pytorch_lightning  # noqa: E402
import torch  # noqa: E402
from ase import Atoms  # noqa: E402
from schnetpack import properties, transform  # noqa: E402

VALIDATED = 4


def see(batch: Any) -> Any:
    """A molecule is known by its number, and seen with its energy and the atoms that it has."""
    numbers, energies, sizes = (batch[name].tolist() for name in (properties.idx, "energy", properties.n_atoms))
    return zip(numbers, zip(energies, sizes, strict=True), strict=True)


def energy_of(molecule: int) -> float:
    return 0.5 * molecule


@pytest.fixture
def data(tmp_path: Path) -> Any:
    path = str(tmp_path / "molecules.db")
    table = schnetpack.data.ASEAtomsData.create(path, distance_unit="Ang", property_unit_dict={"energy": "eV"})
    count = LENGTH + VALIDATED
    molecules = [Atoms(f"H{2 + one % 3}", positions=[[0, 0, 0.9 * atom] for atom in range(2 + one % 3)]) for one in range(count)]
    table.add_systems([{"energy": numpy.array([energy_of(one)])} for one in range(count)], molecules)
    return lambda workers: schnetpack.data.AtomsDataModule(
        path,
        batch_size=BATCH,
        num_train=LENGTH,
        num_val=VALIDATED,
        num_test=0,
        transforms=[transform.ASENeighborList(cutoff=5.0), transform.CastTo32()],
        num_workers=workers,
        split_file=str(tmp_path / "split.npz"),
    )


def task() -> Any:
    network = schnetpack.representation.SchNet(
        n_atom_basis=4,
        n_interactions=1,
        radial_basis=schnetpack.nn.GaussianRBF(n_rbf=4, cutoff=5.0),
        cutoff_fn=schnetpack.nn.CosineCutoff(5.0),
    )
    model = schnetpack.model.NeuralNetworkPotential(
        representation=network,
        input_modules=[schnetpack.atomistic.PairwiseDistances()],
        output_modules=[schnetpack.atomistic.Atomwise(n_in=4, output_key="energy")],
    )
    energy = schnetpack.task.ModelOutput(name="energy", loss_fn=torch.nn.MSELoss(), loss_weight=1.0, metrics={})
    return schnetpack.task.AtomisticTask(
        model=model, outputs=[energy], optimizer_cls=torch.optim.SGD, optimizer_args={"lr": 1e-6}
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_molecules_come_as_they_are(workers: int, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it leaves a lock there
    module = data(workers)

    def fit(callbacks: Any) -> None:
        pytorch_lightning.Trainer(max_epochs=4, callbacks=callbacks, **QUIET).fit(task(), datamodule=module)

    run = train_with_library(see, fit)
    trained = module.train_idx
    plain = {one: (pytest.approx(energy_of(one)), 2 + one % 3) for one in trained}
    steps = LENGTH // BATCH if module.train_dataloader().drop_last else -(-LENGTH // BATCH)
    assert_right(run, trained, point="after_augmentation", steps=steps, values=plain)
