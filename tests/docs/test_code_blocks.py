"""The code blocks of README, CONTRIBUTING, SECURITY and the site work: Python runs, commands parse, YAML loads.

The Python blocks of a page run one after another in one namespace, in an empty folder, with what `stand_ins.py` defines. A block
that cannot run here has a comment before it, with the reason: ``<!-- skip: next, needs a GPU -->``.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from stand_ins import Classifier, Images

from lightning_echo import EchoCLI, EchoConfig
from lightning_echo.__main__ import _parser
from lightning_echo.run import read_options, read_tune, split

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not {"_build", "generated"} & set(path.parts)
]
SHOWN = {"text", "ini", "{eval-rst}", "{toctree}", "{glossary}", "{index}", "{include}", "{image}", "{figure}", "{code-block}"}
OTHERS_PROGRAMS = {"pip", "git", "srun", "sbatch", "torchrun", "watch", "cd", "export", "rm", "ls", "kill", "tensorboard", "cat"}
SKIPPED = re.compile(r"<!-- skip: next, (?P<reason>.{10,}) -->")


@dataclass
class Block:
    """A fenced block: its language, its text, and the line of the page that its text begins in."""

    language: str
    text: str
    line: int
    skipped: bool


@cache
def blocks(page: Path) -> list[Block]:
    skipped, found = False, []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence":
            assert token.map is not None
            found.append(Block(token.info.split(" ")[0], token.content, token.map[0] + 1, skipped))
        if token.type in ("fence", "html_block"):
            skipped = token.type == "html_block" and SKIPPED.search(token.content) is not None
    return found


def of_language(*languages: str) -> list[object]:
    found = [(page, block) for page in PAGES for block in blocks(page) if block.language in languages and not block.skipped]
    return [pytest.param(block, id=f"{page.relative_to(ROOT)}:{block.line}") for page, block in found]


def test_each_block_has_a_language_that_is_looked_at() -> None:
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert languages - SHOWN == {"python", "bash", "yaml"}


@pytest.mark.program
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.language == "python" and not block.skipped for block in blocks(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
@pytest.mark.filterwarnings("default")  # a page may show what warns
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    datamodule = Images()
    namespace = {
        "__name__": "__main__",
        "model": Classifier(),
        "datamodule": datamodule,
        "train_loader": datamodule.train_dataloader(),
        "val_loader": datamodule.val_dataloader(),
        "dataset": datamodule.train_dataloader().dataset,
    }
    for block in blocks(page):
        if block.language == "python" and not block.skipped:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("block", of_language("yaml"))
def test_yaml_loads_and_options_of_echoing_and_arguments_of_objects_are_valid(block: Block) -> None:
    for document in yaml.safe_load_all(block.text):
        for path, arguments in objects_in(document):
            module, _, name = path.rpartition(".")
            signature(getattr(import_module(module), name)).bind(**arguments)
        options = document.get("echo") if isinstance(document, dict) else None
        if isinstance(options, dict):
            known = set(EchoConfig.__dataclass_fields__)
            EchoConfig(**{name: value for name, value in options.items() if name in known})
            assert set(options) - known <= {"controller", "enabled", "loaders", "summary", "plot"}


def objects_in(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of this package that a configuration makes, with their arguments: Hydra's way and jsonargparse's."""
    if isinstance(document, list):
        for each in document:
            yield from objects_in(each)
    elif isinstance(document, dict):
        if str(document.get("_target_", "")).startswith("lightning_echo."):
            yield document["_target_"], {name: value for name, value in document.items() if not name.startswith("_")}
        elif str(document.get("class_path", "")).startswith("lightning_echo."):
            yield document["class_path"], document.get("init_args", {})
        for value in document.values():
            yield from objects_in(value)


def test_configurations_of_both_kinds_are_looked_at() -> None:
    texts = [block.text for page in PAGES for block in blocks(page) if block.language == "yaml"]
    found = [path for text in texts for path, _ in objects_in(list(yaml.safe_load_all(text)))]
    assert {"lightning_echo.EchoCallback", "lightning_echo.MetricGuard"} <= set(found)


class _Made(Exception):
    """A command line has its parser, which takes half a second."""


class _OnlyParses(EchoCLI):
    def before_instantiate_classes(self) -> None:
        raise _Made(self)


@cache
def command_line() -> EchoCLI:
    with pytest.raises(_Made) as made:
        _OnlyParses(Classifier, Images, args=["fit"], seed_everything_default=1)  # Lightning warns where it chooses a seed
    return made.value.args[0]  # type: ignore[no-any-return]


def words_of(block: Block) -> Iterator[list[str]]:
    """The commands of a block, each without its comment, its variables, and what follows a ``|``, ``>``, ``&`` or ``;``."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        ends = [number for number, word in enumerate(words) if word in ("|", ">", "&", "&&", ";", "2>&1") or word.endswith(";")]
        if words := words[: ends[0] if ends else None]:
            yield words[1:] if words[0] in ("srun", "watch") else words


@pytest.mark.filterwarnings("ignore:No seed found")  # Lightning, of a command without a seed
@pytest.mark.parametrize("block", of_language("bash"))
def test_commands_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for words in words_of(block):
        check(words)


def check(words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert next((word for word in arguments if "=" not in word), "help") in targets
    elif program == "lightning-echo" or (program in ("python", "python3") and arguments[:2] == ["-m", "lightning_echo"]):
        arguments = arguments if program == "lightning-echo" else arguments[2:]
        if arguments[:1] == ["run"] and "--help" not in arguments:
            options, program_of_user = split(arguments[1:])
            assert program_of_user
            read_options(read_tune(options)[1])
        elif "--version" not in arguments and "--help" not in arguments:
            _parser().parse_args(arguments)
    elif program in ("python", "python3") and arguments[0] == "-m":
        assert arguments[1] in ("pip", "venv", "pytest", "sphinx", "build", "learning")
    elif program in ("python", "python3"):
        script, *arguments = arguments
        if "/" in script:
            assert (ROOT / script).is_file(), f"{script} is not in the repository"
        elif arguments and not arguments[0].startswith("-") and "=" not in arguments[0]:
            understood_by_echo_cli(arguments)
        else:  # Hydra's overrides, or a program without arguments
            assert all("=" in word or word in ("--multirun", "-m") for word in arguments)
    else:
        assert program in OTHERS_PROGRAMS or program.startswith("#SBATCH"), f"nobody checks {program}"


def understood_by_echo_cli(arguments: list[str]) -> None:
    for name in (value for option, value in pairwise(arguments) if option == "--config"):
        Path(name).write_text("{}\n")
    cli = command_line()
    cli.parse_arguments(cli.parser, arguments)  # a message of the parser would end the program
