"""The fast Python of the tests starts programs like the real one, or leaves them to the real one."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fast_python
import psutil
import pytest

# The server imports first: up to a minute under load.
pytestmark = [pytest.mark.program, pytest.mark.own_interpreter, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def python():
    with fast_python.start() as path:
        yield path


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, **options)


SEEN = "import json, os, sys; print(json.dumps([sys.argv, os.getcwd(), os.environ.get('MARK'), 'lightning' in sys.modules]))"


def test_a_program_gets_arguments_folder_and_environment_and_has_all_loaded(python, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SEEN)
    for command, argv in (([script, "a", "b"], [str(script), "a", "b"]), (["-c", SEEN, "a"], ["-c", "a"])):
        done = run(python, *command, cwd=tmp_path, env={**os.environ, "MARK": "here"})
        assert json.loads(done.stdout) == [argv, str(tmp_path), "here", True], done.stderr


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise ValueError(7)", 1, 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nValueError: 7\n'),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV, ""),
        ("import atexit; atexit.register(print, 'ended')", 0, ""),
    ],
)
def test_it_ends_as_the_real_one_does(python, text, status, error):
    fast, real = run(python, "-c", text), run(sys.executable, "-c", text)
    assert (fast.returncode, fast.stderr) == (status, error)
    assert (fast.returncode, fast.stdout) == (real.returncode, real.stdout)


def test_input_and_open_files_arrive_under_their_numbers_also_beside_many_other_programs(python):
    """A connection of the server has the number of a file of the program: its destructor must not close that."""

    def one(number):
        reads, writes = os.pipe()
        text = f"import gc, os, sys; gc.collect(); os.write({writes}, sys.stdin.buffer.read())"
        done = run(python, "-c", text, input=str(number), pass_fds=[writes])
        os.close(writes)
        with os.fdopen(reads) as file:
            return done.stderr, file.read()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(40))) == [("", str(number)) for number in range(40)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_program(python, number):
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([python, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        program = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(30) == -number
        process.communicate()
    _, alive = psutil.wait_procs([program], timeout=30)
    assert alive == []


WHO = "import sys; print(sys.executable)"


def test_with_other_options_variables_limits_or_without_a_server_the_real_one_runs(python, tmp_path):
    assert run(python, "-c", WHO).stdout == f"{python}\n"
    assert run(python, "-W", "error", "-c", WHO).stdout == f"{sys.executable}\n"
    assert run(python, "-c", WHO, env={**os.environ, "PYTHONHASHSEED": "7"}).stdout == f"{sys.executable}\n"
    assert run("sh", "-c", f"ulimit -f 1000; exec {python} -c '{WHO}'").stdout == f"{sys.executable}\n"
    with fast_python.start() as path:
        alone = tmp_path / "python"
        alone.write_text(Path(path).read_text())
        alone.chmod(0o700)
    assert run(alone, "-c", WHO).stdout == f"{sys.executable}\n"
