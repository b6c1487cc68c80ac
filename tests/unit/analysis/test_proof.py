"""Proofs: a gain and its interval from blocks that took turns, which settings are worth one, and which one is kept."""

import math
from dataclasses import replace

import pytest
from analyses import ANALYSIS
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.report import in_words, report
from lightning_echo.analysis.result import ProvedGain, StallAnalysis, promising, to_keep
from lightning_echo.analysis.verdict import Remedy, Verdict, VerdictKind

WORKERS, READS, ECHO = TrainingSetting(4), TrainingSetting(4, reads_in_flight=16), TrainingSetting(4, factor=3.0)


def test_the_gain_is_the_mean_ratio_of_blocks_side_by_side():
    """Ratios 2, 2.2, 1.8, by hand: logarithms of mean 0.68980, deviation 0.10038; 4.303 * 0.10038 * sqrt(2 / 3) = 0.35266."""
    proved = ProvedGain.of(WORKERS, [0.2, 0.22, 0.18], [0.1, 0.1, 0.1])
    assert (proved.setting, proved.blocks) == (WORKERS, 3)
    assert proved.gain == pytest.approx(math.exp(0.68980), rel=1e-4)
    assert (proved.low, proved.high) == pytest.approx((math.exp(0.33714), math.exp(1.04246)), rel=1e-4)


def test_a_machine_that_gets_slower_for_both_changes_nothing():
    proved = ProvedGain.of(WORKERS, [0.2, 0.4, 0.8, 1.6], [0.1, 0.2, 0.4, 0.8])
    assert (proved.gain, proved.low, proved.high) == pytest.approx((2, 2, 2))


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=16), st.floats(0.1, 10))
def test_the_interval_has_the_gain_and_follows_a_change_of_units(blocks, times):
    tried = [0.01] * len(blocks)
    proved = ProvedGain.of(WORKERS, blocks, tried)
    scaled = ProvedGain.of(WORKERS, [each * times for each in blocks], tried)
    assert proved.low <= proved.gain * (1 + 1e-9)
    assert proved.gain <= proved.high * (1 + 1e-9)
    assert (scaled.gain, scaled.low, scaled.high) == pytest.approx(
        (proved.gain * times, proved.low * times, proved.high * times), rel=1e-6
    )


def verdict(*remedies):
    found = tuple(Remedy(name, setting, is_enough=False) for name, setting in remedies)
    return Verdict(VerdictKind.not_enough, "", TrainingSetting(), found)


@pytest.mark.parametrize(
    ("remedies", "expected"),
    [
        ([], ()),
        ([("workers", WORKERS)], (WORKERS,)),
        ([("echo", ECHO)], (ECHO,)),
        ([("workers", WORKERS), ("reads", READS)], (READS, WORKERS)),
        ([("workers", WORKERS), ("reads", READS), ("echo", ECHO)], (ECHO, READS)),
    ],
)
def test_all_remedies_and_those_without_echoing_are_worth_a_proof(remedies, expected):
    assert promising(verdict(*remedies)) == expected


def test_a_factor_that_seldom_pays_is_not_tried():
    (tried,) = promising(verdict(("echo", replace(ECHO, factor=15.0))))
    assert tried == replace(ECHO, factor=8.0)


def gain(setting, low, middle, high):
    return ProvedGain(setting, middle, low, high, 4)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ((1.8, 2.0, 2.2), (1.1, 1.2, 1.3), 0),  # the faster one
        ((1.8, 2.0, 2.2), (1.5, 1.7, 1.9), 1),  # about as fast, with less of a change
        ((0.9, 1.1, 1.3), (1.02, 1.05, 1.08), 1),  # only what is proved
        ((0.9, 1.1, 1.3), (0.8, 0.9, 1.1), None),
    ],
)
def test_the_fastest_is_kept_or_one_with_less_of_a_change(first, second, kept):
    proved = [gain(ECHO, *first), gain(WORKERS, *second)]
    assert to_keep(proved) is (None if kept is None else proved[kept])


def test_the_report_has_the_gains_and_the_lines_to_keep(tmp_path):
    proved = replace(ANALYSIS, proved=(gain(ECHO, 1.8, 2.0, 2.2), gain(WORKERS, 1.1, 1.2, 1.3)))
    text = " ".join(report(proved).split())
    assert "2.00x 1.80 to 2.20 4" in text
    assert "1.20x 1.10 to 1.30 4" in text
    assert "num_workers=4; EchoCallback(factor=3" in text
    none = replace(ANALYSIS, proved=(gain(WORKERS, 0.9, 1.0, 1.1),))
    assert "None of them is proved to be faster: keep what you have." in " ".join(report(none).split())
    proved.to_json(tmp_path / "analysis.json")
    assert StallAnalysis.from_json(tmp_path / "analysis.json") == proved


@pytest.fixture
def analyzer(monkeypatch):
    """An analyzer after an analysis. Each setting takes 10 ms a step, the training as it is 20; a faster storage is refused."""

    def try_setting(training, setting, steps, as_mean):
        assert as_mean
        if setting.storage_speedup > 1:
            raise ValueError("there is no faster storage")
        return Spread.exactly(0.02 if setting == TrainingSetting() else 0.01)

    monkeypatch.setattr("lightning_echo.analysis.analyzer.try_setting", try_setting)
    made = StallAnalyzer(None, say=[].append)
    made._training = object()
    return made


def said_by(analyzer, monkeypatch):
    said = []
    monkeypatch.setattr(analyzer, "_tell", said.append)
    return said


def advising(monkeypatch, *settings):
    monkeypatch.setattr("lightning_echo.analysis.analyzer.promising", lambda verdict: settings)


def test_a_verdict_that_changes_nothing_leaves_nothing_to_prove(analyzer, monkeypatch):
    said = said_by(analyzer, monkeypatch)
    advising(monkeypatch)
    assert analyzer.prove(ANALYSIS) is ANALYSIS
    assert said == ["nothing to prove: the verdict changes nothing"]


def test_advice_that_cannot_be_tried_here_is_left_out_and_the_other_is_proved(analyzer, monkeypatch):
    said, faster = said_by(analyzer, monkeypatch), TrainingSetting(storage_speedup=2)
    advising(monkeypatch, faster, WORKERS)
    (proved,) = analyzer.prove(ANALYSIS, seconds=0.1).proved
    assert (proved.setting, proved.gain) == (WORKERS, pytest.approx(2))
    assert proved.blocks >= 4
    assert [line for line in said if "not tried" in line] == [f"{in_words(faster)}: not tried: there is no faster storage"]


def test_if_none_of_the_advice_can_be_tried_nothing_is_proved(analyzer, monkeypatch):
    advising(monkeypatch, TrainingSetting(storage_speedup=2))
    assert analyzer.prove(ANALYSIS).proved == ()


def test_a_setting_that_was_asked_for_is_refused_if_it_cannot_be_tried(analyzer):
    with pytest.raises(ValueError, match="there is no faster storage"):
        analyzer.prove(ANALYSIS, WORKERS, TrainingSetting(storage_speedup=2))


def test_verify_is_yes_or_no():
    with pytest.raises(TypeError, match="verify must be True or False, got 'yes'"):
        StallAnalyzer(None, verify="yes")
