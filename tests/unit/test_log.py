"""The one logger: its lines are seen once, in the way that the program has chosen, whenever it has chosen it."""

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

import lightning_echo
from lightning_echo.training.trainer import rank_zero_info

pytestmark = pytest.mark.own_interpreter  # programs set up logging at their begin

IMPORT = "import lightning_echo\n"
BASIC = "import logging\nlogging.basicConfig(format='mine: %(message)s', level=logging.INFO)\n"
SAY = "from lightning_echo.log import LOGGER\nLOGGER.info('chosen')\nLOGGER.warning('careful')\n"
DICT = """
import logging.config
logging.config.dictConfig({
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"hydra": {"format": "[%(name)s][%(levelname)s] %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "hydra", "stream": "ext://sys.stderr"}},
    "root": {"level": "INFO", "handlers": ["console"]},
})
"""
OWN_HANDLER = """
import logging
logging.getLogger("lightning_echo").addHandler(logging.StreamHandler())
"""
DEFAULT = ["lightning_echo: chosen", "lightning_echo: careful"]
MINE = ["mine: chosen", "mine: careful"]
AS_HYDRA = ["[lightning_echo][INFO] chosen", "[lightning_echo][WARNING] careful"]


def stderr_of(program, folder):
    """What a program of its own has written to stderr, line by line."""
    path = folder / "program.py"
    path.write_text(program)
    root = str(Path(lightning_echo.__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); import runpy; runpy.run_path({str(path)!r})"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr.splitlines()


@pytest.mark.program
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(IMPORT + SAY, DEFAULT, id="no set-up"),
        pytest.param(IMPORT + BASIC + SAY, MINE, id="import, then basicConfig"),
        pytest.param(BASIC + IMPORT + SAY, MINE, id="basicConfig, then import"),
        pytest.param(IMPORT + DICT + SAY, AS_HYDRA, id="import, then dictConfig"),
        pytest.param(IMPORT + OWN_HANDLER + SAY, ["chosen", "careful"], id="a handler for this logger alone"),
        pytest.param(
            "import logging\nlogging.getLogger('lightning_echo').setLevel(logging.WARNING)\n" + IMPORT + SAY,
            ["lightning_echo: careful"],
            id="a level that was set before the import",
        ),
        pytest.param(IMPORT + SAY + BASIC + SAY, DEFAULT + MINE, id="set up between two lines"),
    ],
)
def test_a_line_is_seen_once_in_the_format_of_the_program(program, expected, tmp_path):
    assert stderr_of(program, tmp_path) == expected


@pytest.mark.program
def test_a_spawned_worker_says_its_lines_once_as_its_program_has_set_up(tmp_path):
    (tmp_path / "spawned_says.py").write_text(f"def say():\n{indent(BASIC + SAY, '    ')}")
    program = f"""
import multiprocessing, sys
sys.path.insert(0, {str(tmp_path)!r})
import lightning_echo, spawned_says
worker = multiprocessing.get_context("spawn").Process(target=spawned_says.say)
worker.start()
worker.join()
"""
    assert stderr_of(program, tmp_path) == MINE


def test_a_line_is_said_by_the_first_rank_once_and_names_the_function_that_says_it(caplog, capsys, monkeypatch):
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_info("lightning_echo: chosen")
    (record,) = caplog.records
    assert (record.name, record.message, record.funcName) == (
        *("lightning_echo", "lightning_echo: chosen"),
        "test_a_line_is_said_by_the_first_rank_once_and_names_the_function_that_says_it",
    )
    assert capsys.readouterr().err == "", "pytest sees the lines, so that the fallback is quiet"
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    rank_zero_info("lightning_echo: chosen")
    assert len(caplog.records) == 1


def test_no_file_of_the_package_has_a_logger_of_its_own_or_lightnings():
    root = Path(lightning_echo.__file__).parent
    wrong = []
    for path in root.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source if "getLogger" in source or "rank_zero_info" in source else "")):
            is_own = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger") and path.name != "log.py"
            # analysis/sources.py and the fallback look loggers up by a variable
            if is_own and not (node.args and isinstance(node.args[0], ast.Name)):
                wrong.append(f"{path.relative_to(root)}:{node.lineno} {ast.unparse(node)}")
            if (
                isinstance(node, ast.ImportFrom)
                and str(node.module).startswith("lightning.")
                and "rank_zero_info" in {alias.name for alias in node.names}
            ):
                wrong.append(f"{path.relative_to(root)}:{node.lineno} imports Lightning's rank_zero_info")
    assert wrong == []
