"""``lightning-echo run --tune``: settings are tried before a program trains, and it uses what is proved to be faster."""

import json

import pytest
import run_tune_program as program
from run_command_program import EPOCHS
from run_tune_program import BATCH, LENGTH
from test_run_command import counts, ran, summary

from lightning_echo import StallAnalysis
from lightning_echo.analysis.result import to_keep

pytestmark = pytest.mark.program

STEPS = EPOCHS * LENGTH // BATCH


def tuned(folder, what, *options, status=0):
    folder.mkdir(exist_ok=True)
    return ran(
        folder, "-m", "lightning_echo", "run", *(options or ["--tune=3"]), program.__file__, str(folder), what, status=status
    )


def facts(folder):
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("what", ["passed", "asked", "module", "passed, validates"])
def test_the_training_uses_what_is_proved_to_be_faster_wherever_its_loader_comes_from(tmp_path, what):
    """A batch takes a worker 16 ms, a step about 1. More than one worker and echoes both make it faster."""
    done = tuned(tmp_path, what, "--tune=8")  # with few blocks, beside other tests, nothing is proved
    kept = to_keep(StallAnalysis.from_json(tmp_path / "analysis.json").proved)
    assert kept is not None, done.stderr
    assert kept.low > 1
    found = facts(tmp_path)
    assert len(found["seen"]) == STEPS
    assert found["trainers"] == 1, "the program's model has seen none of the trial"
    assert found["workers"] == (1 if kept.setting.workers is None else kept.setting.workers)
    fresh, echoed = counts(tmp_path)
    assert fresh + echoed == STEPS * BATCH
    assert (echoed > 0) == (kept.setting.factor > 1)
    first = [example for batch in found["seen"][: STEPS // EPOCHS] for example in batch]
    if kept.setting.factor == 1:
        assert sorted(first) == list(range(LENGTH))
    for line in (*kept.setting.lines_of_loader, kept.setting.line):
        assert line in done.stderr
    assert "the training uses " in done.stderr
    assert done.stderr.count("the same effect in the program itself") == 1
    assert f"lightning-echo report {tmp_path}/analysis.json" in done.stderr


def test_where_nothing_is_faster_the_training_is_the_same_as_without_the_command(tmp_path):
    plain, tried = tmp_path / "plain", tmp_path / "tried"
    plain.mkdir()
    ran(plain, program.__file__, str(plain), "fast")
    done = tuned(tried, "fast")
    kept = to_keep(StallAnalysis.from_json(tried / "analysis.json").proved)
    if kept is None:
        assert "nothing is proved to be faster, so the training runs as it is" in done.stderr
        assert facts(tried) == facts(plain)
        assert summary(tried)["reports"][-1]["echoed_examples"] == 0


def test_no_cache_is_tried_for_a_training_that_takes_each_example_once(tmp_path):
    """A batch takes a worker 16 ms, and a cache feeds the step: a gain that only a second pass has."""
    done = tuned(tmp_path, "loaded, once")
    analysis = StallAnalysis.from_json(tmp_path / "analysis.json")
    assert [remedy.setting.hold for remedy in analysis.verdict.remedies if remedy.name == "cache"] == ["loaded"]
    assert analysis.proved
    assert {each.setting.hold for each in analysis.proved} == {None}
    assert "no cache was tried: it gains nothing before the second pass" in done.stderr
    assert "cache" not in done.stderr.partition("the same effect in the program itself")[2]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("ddp", "it tries on one device, and this Trainer has DDPStrategy"),
        ("module, transfer", "the data module has a hook on_after_batch_transfer"),
        ("own loader", "got Batches"),
        ("several", "it tries a single loader, and this training has a collection of them"),
        ("several, asked", "it tries a single loader, and this training has a collection of them"),
        (
            "module, needs",
            "raised AttributeError: 'NoneType' object has no attribute 'loader' (training_step, run_tune_program.py, ",
        ),
        ("lock", "raised TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_where_nothing_can_be_tried_it_says_why_and_the_training_is_only_measured(tmp_path, what, says):
    done = tuned(tmp_path, what)
    assert "--tune has tried nothing, and the training runs as it is: " in done.stderr
    assert says in done.stderr.partition("tried nothing")[2]
    assert counts(tmp_path)[1] == 0
    assert not (tmp_path / "analysis.json").exists()
    assert len(facts(tmp_path)["seen"]) == STEPS


def test_a_resumed_training_is_not_tried(tmp_path):
    tuned(tmp_path, "saves", "--factor=2")
    done = tuned(tmp_path, "resumes")
    assert "the training is resumed. Give run the options that it has begun with" in done.stderr
    assert not (tmp_path / "analysis.json").exists()


def test_only_the_first_training_of_a_program_is_tried(tmp_path):
    done = tuned(tmp_path, "twice")
    assert done.stderr.count("lightning_echo: run: tried what would help:") == 1
    assert "each has counts and a summary of its own, and --tune has tried the first one alone" in done.stderr
    assert counts(tmp_path / "second")[1] == 0


def test_an_analysis_within_a_program_is_none_of_the_trainings_of_run(tmp_path):
    done = tuned(tmp_path, "analyzes", "--factor=2")
    assert "this is Trainer number 2" not in done.stderr
    assert done.stderr.count("these two lines have the same effect") == 1
