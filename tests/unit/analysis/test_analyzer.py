"""What a `StallAnalyzer` refuses, the model that it trains, its progress, advice and files. Whole analyses: tests/integration."""

from dataclasses import replace
from unittest.mock import PropertyMock

import lightning.pytorch as pl
import pytest
import yaml
from analyses import ANALYSIS
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_echo import EchoConfig, StallAnalyzer
from lightning_echo.analysis.analyzer import Progress, _copy_of
from lightning_echo.analysis.command import advice_yaml, check_new
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import ProvedGain, StallAnalysis


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "steps must be >= 4, got 3"),
        ({"seconds": 0}, "seconds must be > 0, got 0"),
        ({"seconds": float("nan")}, "seconds must be > 0, got nan"),
    ],
)
def test_impossible_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StallAnalyzer(BoringModel()).run(**options)


def test_a_setting_is_tried_only_after_an_analysis():
    with pytest.raises(RuntimeError, match=r"nothing was analyzed yet: call run\(\) first"):
        StallAnalyzer(BoringModel()).check(ANALYSIS, workers=2)


def test_the_copy_of_a_model_ends_silently_and_brings_no_callbacks():
    class Ends(BoringModel):
        def __init__(self):
            super().__init__()
            self.ended = []

        def on_train_end(self):
            self.ended.append("training")

        on_train_epoch_end = on_fit_end = on_train_end

        def configure_callbacks(self):
            return [pl.Callback()]

    model = Ends()
    copied = _copy_of(model)
    for hook in ("on_train_epoch_end", "on_train_end", "on_fit_end"):
        getattr(copied, hook)()
    assert (model.ended, copied.ended, copied.configure_callbacks()) == ([], [], [])
    model.on_train_end()
    assert (model.ended, len(model.configure_callbacks())) == (["training"], 1), "the user's model is left as it is"
    assert copied.layer.weight.data_ptr() != model.layer.weight.data_ptr()


@pytest.mark.parametrize(
    ("durations", "of_last", "said"),
    [
        ([], {}, "the last (0 s, about 70 s left)"),
        ([500.0], {}, "the last (500 s, about 60 s left)"),  # the first phase does not tell how long the others take
        ([8.0, 1.0, 3.0], {}, "the last (12 s, about 8 s left)"),  # four more, this one included, of two seconds each
        ([8.0, 1.0, 3.0], {"to_come": 2}, "the last (12 s, about 4 s left)"),
        ([8.0, 1.0, 3.0], {"to_come": 0}, "the last (12 s)"),
        ([2.0] * 9, {}, "the last (18 s, about 2 s left)"),  # more phases than expected
    ],
)
def test_the_time_left_is_that_of_the_phases_before(durations, of_last, said):
    now, lines = [100.0], []
    progress = Progress(70.0, 7, lines.append, lambda: now[0])
    for duration in durations:
        progress.phase("reading")
        now[0] += duration
    progress.phase("the last", **of_last)
    assert lines[-1] == said


def comments_of(text):
    return " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))


@pytest.mark.parametrize("workers", [None, ANALYSIS.stages.workers, 5])
@pytest.mark.parametrize("cached", [True, False])
def test_advice_is_the_group_echo_and_the_rest_are_comments_in_short_lines(workers, cached, monkeypatch):
    echoes = {"factor": 2.5, "insertion_point": "after_read", "cached_fraction": 0.5, "hold": "raw", "cache_size": "3GiB"}
    message = "Do this: " + 40 * "a reason, "
    verdict = replace(ANALYSIS.verdict, setting=TrainingSetting(workers, **(echoes if cached else {})), message=message)
    monkeypatch.setattr(StallAnalysis, "verdict", PropertyMock(return_value=verdict))
    text = advice_yaml(ANALYSIS)
    options = {"factor": 2.5, "insertion_point": "after_read", "cache": {"size": "3GiB", "hold": "raw"}}
    assert yaml.safe_load(text) == ({"echo": options} if cached else {})
    assert EchoConfig(**options).cache == options["cache"]
    assert message.strip() in comments_of(text)
    assert max(map(len, text.splitlines())) <= 120
    assert ("There is nothing to set in the group echo: this file changes nothing." in comments_of(text)) is not cached
    assert ("Set num_workers=5 where your program sets it" in comments_of(text)) == (workers == 5)
    assert ("num_workers" in text) == ("(now 2)" in comments_of(text)) == (workers == 5)


def test_the_advice_of_settings_that_were_proved_is_the_one_to_keep():
    """The verdict's factor was not tried: in its place, 8 was."""
    keep = TrainingSetting(workers=5, factor=8.0, insertion_point="after_read")
    faster, not_faster = ProvedGain(keep, 4.0, 3.0, 5.0, 4), ProvedGain(keep, 1.1, 0.9, 1.3, 4)
    text = advice_yaml(ANALYSIS.with_proof([faster]))
    assert yaml.safe_load(text) == {"echo": {"factor": 8.0, "insertion_point": "after_read"}}
    assert "Set num_workers=5 where your program sets it" in comments_of(text)
    assert "Proved, and so in this file: num_workers=5, factor 8 at after_read." in comments_of(text)
    text = advice_yaml(ANALYSIS.with_proof([not_faster]))
    assert yaml.safe_load(text) == {}
    assert "None of what was tried is proved to be faster: keep what you have." in comments_of(text)


def test_options_of_the_loader_are_comments_with_what_they_are_now(monkeypatch):
    setting = TrainingSetting(5, prefetch_factor=8, pin_memory=True)
    verdict = replace(ANALYSIS.verdict, setting=setting, message="Do this.")
    monkeypatch.setattr(StallAnalysis, "verdict", PropertyMock(return_value=verdict))
    text = advice_yaml(ANALYSIS)
    assert yaml.safe_load(text) == {}
    where = "where your program sets it: only you know the name of that option"
    for option, now in (("num_workers=5", 2), ("prefetch_factor=8", 2), ("pin_memory=True", False)):
        assert f"Set {option} {where} (now {now})." in comments_of(text)


def test_names_of_files_that_exist_or_are_equal_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(ValueError, match=r"html must be a new file, got '.*page\.html', which exists: give another name, or rem"):
        check_new(json=str(tmp_path / "other.json"), html=str(tmp_path / "page.html"), png=None)
    with pytest.raises(ValueError, match="json and png must be different files, got 'same' for both"):
        check_new(json=str(tmp_path / "same"), html=None, png="same")
