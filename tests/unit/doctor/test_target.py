"""The user's data by name and by configuration: what is found, and which mistakes are told apart."""

import sys

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_echo import EchoDataModule, EchoLoader
from lightning_echo.doctor.looking import UserCodeError, data_of, in_short, training_loaders

MODULE = """
import lightning.pytorch as pl
from torch.utils.data import DataLoader

class Numbers(pl.LightningDataModule):
    def __init__(self, size: int = 8):
        super().__init__()
        self.size, self.calls = size, []
        if size < 0:
            raise OSError("a disk is missing")
    def prepare_data(self):
        self.calls.append("prepare_data")
    def setup(self, stage):
        self.calls.append(stage)
    def train_dataloader(self):
        return DataLoader(range(self.size), batch_size=4)

class Needy(pl.LightningDataModule):
    def __init__(self, size: int):
        super().__init__()

numbers = Numbers(12)
a_number = 3
def loader():
    return DataLoader(range(6), batch_size=2)
def fails():
    raise KeyError("no images")
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """The name of a module in the present folder, another one for each test."""
    name = f"users_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "size"), [("Numbers", 8), ("numbers", 12)])
def test_a_data_module_its_class_or_a_function_is_found_in_the_present_folder(name, size, module):
    data = data_of(f"{module}:{name}")
    assert isinstance(data, pl.LightningDataModule)
    assert data.size == size
    assert not data.calls
    assert len(training_loaders(data)[""].dataset) == size
    assert data.calls == ["prepare_data", "fit"]
    assert len(data_of(f"{module}:loader").dataset) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}", "must be given as module:name"),
        ("no_such_module:loader", "there is no module 'no_such_module'"),
        ("{}:missing", "has no 'missing'"),
        ("{}:a_number", "got int"),
        ("{}:Needy", r"needs arguments, \(size: int\)"),
    ],
)
def test_a_wrong_name_is_a_mistake_of_the_command(name, message, module):
    with pytest.raises(ValueError, match=message):
        data_of(name.format(module))


@pytest.mark.parametrize("text", ["import no_such_package", "1 / 0", "def f(:"])
def test_a_module_that_cannot_be_imported_is_one_of_the_users_code(text, module, tmp_path):
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(UserCodeError, match=f"^import of {module} raised (ModuleNotFound|ZeroDivision|Syntax)Error"):
        data_of(f"{module}:loader")


def config(tmp_path, text):
    (tmp_path / "train.yaml").write_text(text)
    return str(tmp_path / "train.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "data:\n  class_path: {}.Numbers\n  init_args:\n    size: 20\n",
        "fit:\n  data:\n    class_path: {}.Numbers\n    init_args:\n      size: 20\n",
        "size: 20\nmodel: ${{no.such.key}}\ndata:\n  class_path: {}.Numbers\n  init_args:\n    size: ${{size}}\n",
    ],
)
def test_a_data_module_is_built_of_the_section_data_alone(text, module, tmp_path):
    assert data_of(None, config(tmp_path, text.format(module))).size == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: 3\n", "there is no data: in it"),
        ("data: 3\n", "data: must be a mapping"),
        ("data:\n  size: 20\n", "data: has no class_path"),
        ("data:\n  class_path: {}.Numbers\n  init_args:\n    sizes: 20\n", "sizes"),
        ("data:\n  class_path: {}.Missing\n", "Missing"),
        ("data: [\n", "train.yaml: ParserError"),
        ("data:\n  size: ${{missing}}\n", "missing"),
    ],
)
def test_a_wrong_configuration_is_a_mistake_of_the_command(text, message, module, tmp_path):
    with pytest.raises(ValueError, match=message):
        data_of(None, config(tmp_path, text.format(module)))


def test_a_file_that_is_not_there_or_a_function_beside_one_is_refused(module, tmp_path):
    with pytest.raises(ValueError, match=r"no\.yaml: cannot be read: No such file"):
        data_of(None, str(tmp_path / "no.yaml"))
    with pytest.raises(ValueError, match="must be of a class of LightningDataModule, got <function loader"):
        data_of(f"{module}:loader", config(tmp_path, "data:\n  size: 20\n"))


def test_exceptions_of_a_function_or_a_constructor_are_of_the_users_code(module, tmp_path):
    with pytest.raises(UserCodeError, match=r"^fails\(\) raised KeyError: 'no images'$"):
        data_of(f"{module}:fails")
    path = config(tmp_path, f"data:\n  class_path: {module}.Numbers\n  init_args:\n    size: -1\n")
    with pytest.raises(UserCodeError, match="OSError: a disk is missing"):
        data_of(None, path)


def test_loaders_are_found_in_a_collection_without_echoing_around_them():
    plain = DataLoader(range(8), batch_size=4)
    echoed = EchoLoader(plain, 2)
    assert training_loaders({"a": plain, "b": [echoed]}) == {"a": plain, "b/0": plain}
    assert training_loaders(EchoDataModule.from_dataloaders(plain, factor=2))[""] is plain


def test_an_exception_of_a_hook_names_the_hook():
    class Broken(pl.LightningDataModule):
        def setup(self, stage):
            raise RuntimeError("no disk\n\nmore\nlast line")

    with pytest.raises(UserCodeError, match=r"^setup\('fit'\) of Broken raised RuntimeError: no disk last line$"):
        training_loaders(Broken())
    assert in_short(StopIteration()) == "StopIteration"
