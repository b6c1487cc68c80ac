"""The settings that a report asks about, and the words for them."""

from __future__ import annotations

from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.measuring.words import percent, three_digits

__all__ = ["in_words", "questions"]

_FACTORS = (2.0, 4.0, 8.0)


def questions(analysis: StallAnalysis) -> list[tuple[str, TrainingSetting]]:
    """Returns each question in words and as a setting; the measured setting comes first.

    Two kinds of questions are left out, since their answer would be that nothing changes: the number of workers, if the data set
    fails in workers; caches and storages, if reading could not be measured.
    """
    stages = analysis.stages
    numbers = _numbers_of_workers(stages.cores) if stages.can_have_workers else []
    asked = [TrainingSetting(), *(TrainingSetting(workers=workers) for workers in numbers)]
    if analysis.cached is not None and (stages.read.median or stages.read_cached.median):
        asked += [
            TrainingSetting(cached_fraction=0.5),
            TrainingSetting(cached_fraction=1.0),
            TrainingSetting(storage_speedup=2.0),
        ]
    asked.append(TrainingSetting(step_speedup=2.0))
    asked += [TrainingSetting(factor=factor, insertion_point=point) for point in stages.points for factor in _FACTORS]
    return [(in_words(setting), setting) for setting in asked]


def in_words(setting: TrainingSetting) -> str:
    """Returns the differences between a setting and the measured one, in words.

    >>> in_words(TrainingSetting()), in_words(TrainingSetting(factor=2))
    ('as measured', 'factor 2 at after_batching')
    >>> in_words(TrainingSetting(workers=4, cached_fraction=0.5))
    'num_workers=4, 50 % of the data set in memory'
    """
    words = []
    if setting.workers is not None:
        words.append(f"num_workers={setting.workers}")
    if setting.cached_fraction:
        words.append(f"{percent(setting.cached_fraction)} of the data set in memory")
    if setting.storage_speedup != 1:
        words.append(f"storage {three_digits(setting.storage_speedup)}x as fast")
    if setting.step_speedup != 1:
        words.append(f"accelerator {three_digits(setting.step_speedup)}x as fast")
    if setting.factor != 1:
        words.append(f"factor {three_digits(setting.factor)} at {setting.insertion_point}")
    return ", ".join(words) or "as measured"


def _numbers_of_workers(cores: int) -> list[int]:
    """Returns the powers of two below the number of cores, and that number."""
    return [*(2**power for power in range(cores.bit_length()) if 2**power < cores), cores]
