"""Both packages: what a program has imported decides; our classes are subclasses of both; mixing is refused in Lightning's words.

Each test that needs an interpreter in which the other package was not imported is a program of its own.
"""

import subprocess
import sys
from textwrap import dedent

import lightning.pytorch as pl
import pytest
import pytorch_lightning as other
from lightning.pytorch.demos.boring_classes import BoringDataModule as Data
from pytorch_lightning.demos.boring_classes import BoringDataModule as OtherData
from pytorch_lightning.utilities.exceptions import MisconfigurationException as OtherMisconfiguration

from lightning_echo import EchoCallback, EchoDataModule
from lightning_echo.training import package
from lightning_echo.training.package import LIGHTNING, OTHER, MisconfigurationException, classes, is_overridden, package_of


def printed(program):
    ran = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_a_class_is_looked_up_in_both_packages():
    assert classes("Trainer") == (pl.Trainer, other.Trainer)
    assert classes("loggers.CSVLogger") == (pl.loggers.CSVLogger, other.loggers.CSVLogger)


@pytest.mark.parametrize(
    ("thing", "expected"),
    [(Data(), LIGHTNING), (OtherData(), OTHER), (OtherData, OTHER), (object(), LIGHTNING), (pl.Trainer, LIGHTNING)],
    ids=["lightning", "other", "class", "neither", "Trainer"],
)
def test_the_package_of_an_object_is_that_of_its_base_class(thing, expected):
    assert package_of(thing) is expected


def test_a_hook_is_compared_with_the_base_class_of_its_package():
    for data in (Data(), OtherData()):
        assert is_overridden("train_dataloader", data)
        assert not is_overridden("on_exception", data)


def test_our_classes_are_subclasses_of_both():
    assert issubclass(EchoCallback, pl.Callback)
    assert issubclass(EchoCallback, other.Callback)
    for data in (Data(), OtherData()):
        echoed = EchoDataModule(data, 2)
        assert isinstance(echoed, pl.LightningDataModule)
        assert isinstance(echoed, other.LightningDataModule)
    assert issubclass(MisconfigurationException, OtherMisconfiguration)


@pytest.mark.parametrize(("data", "package_of_trainer"), [(Data, other), (OtherData, pl)], ids=["other Trainer", "other data"])
def test_a_data_module_of_the_other_package_is_refused_as_lightning_says_it(data, package_of_trainer):
    ours, theirs = package_of(data()).name, {pl: "lightning.pytorch", other: "pytorch_lightning"}[package_of_trainer]
    trainer = package_of_trainer.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    sentence = rf"^you passed a `{ours}` object \(BoringDataModule\) to a `{theirs}` Trainer: please switch to a single import"
    with pytest.raises(TypeError, match=sentence):
        EchoDataModule(data(), 2).trainer = trainer


def test_an_old_version_of_the_other_package_is_refused(monkeypatch):
    monkeypatch.setattr(other, "__version__", "2.4.9.post0")
    with pytest.raises(RuntimeError, match=r"uses pytorch_lightning 2\.4\.9\.post0, which is older than 2\.5"):
        package._check_version()


@pytest.mark.parametrize("version", ["2.5.0", "2.10.0rc1", "3.0"])
def test_a_later_version_is_taken(monkeypatch, version):
    monkeypatch.setattr(other, "__version__", version)
    assert package._check_version() is None


def test_the_other_package_is_not_imported_where_the_user_has_not_imported_it():
    program = """
        import sys
        from torch.utils.data import DataLoader
        from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        from lightning_echo import EchoCallback, EchoCLI, EchoDataModule, StallAnalyzer
        import lightning.pytorch as pl
        options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
        data = EchoDataModule.from_dataloaders(DataLoader(RandomDataset(32, 8)), factor=2)
        pl.Trainer(**options, callbacks=[EchoCallback()]).fit(BoringModel(), data)
        print(sorted(name for name in sys.modules if name.partition(".")[0] in ("pytorch_lightning", "lightning_fabric")))
    """
    assert printed(program)[-1] == "[]"


@pytest.mark.parametrize("when", ["before", "between"])
def test_an_object_that_is_made_before_the_other_package_is_imported_is_taken(when):
    first, second = ("import pytorch_lightning", "") if when == "before" else ("", "import pytorch_lightning")
    program = f"""
        {first}
        from torch.utils.data import DataLoader
        from lightning_echo import EchoCallback, EchoDataModule
        loader = DataLoader([[float(number)] * 32 for number in range(16)], batch_size=4)
        callback, data = EchoCallback(), EchoDataModule.from_dataloaders(loader, factor=2)
        {second}
        import torch
        import pytorch_lightning as pl
        class Model(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(32, 2)
            def training_step(self, batch, batch_idx):
                return self.layer(torch.stack(batch, 1).float()).sum()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=2, callbacks=[callback])
        trainer.fit(Model(), data)
        counts = data.loader.counts
        print(counts.fresh + counts.echoed, isinstance(callback, pl.Callback), isinstance(data, pl.LightningDataModule))
    """
    assert printed(program)[-3:] == ["32", "True", "True"]


def test_lines_of_a_program_that_uses_the_other_package_keep_their_logger():
    program = """
        import lightning_utilities.core.rank_zero as rank_zero
        import pytorch_lightning
        before = rank_zero.log.name
        from lightning_echo import EchoCallback
        EchoCallback()
        print(before == rank_zero.log.name, before.partition(".")[0])
    """
    assert printed(program) == ["True", "pytorch_lightning"]


def test_a_subclass_with_the_other_base_before_ours_is_named():
    program = """
        from lightning_echo import EchoCallback
        import pytorch_lightning
        class Mine(pytorch_lightning.Callback, EchoCallback): pass
        try:
            EchoCallback()
        except TypeError as error:
            print(error)
    """
    sentence = " ".join(printed(program))
    assert sentence == (
        "Mine has pytorch_lightning's Callback before EchoCallback in its bases: leave it out, since EchoCallback is one, too"
    )
