"""The settings that a report asks about, and the words for them."""

from __future__ import annotations

from lightning_echo.analysis.caches import fitting_fraction, possible_holds
from lightning_echo.analysis.measured import MeasuredStages
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.measuring.words import percent, three_digits

__all__ = ["HELD", "in_words", "questions"]

HELD = {"raw": "raw items", "loaded": "loaded examples"}
"""What a cache holds, by its ``hold``, in words."""

_FACTORS = (2.0, 4.0, 8.0)
_TRAININGS = 4  # that share one process that reads
_UNKNOWN_SHARE = 0.5  # asked about if it is not known how much memory holds


def questions(analysis: StallAnalysis) -> list[tuple[str, TrainingSetting]]:
    """Returns each question in words and as a setting. The measured setting comes first.

    * The questions about workers and sharing are left out if the data set fails in workers.
    * The questions about storages are left out if reading could not be measured.
    * For each form in which a cache can hold examples, there is a question about the largest share that memory holds, and one
      about the whole data set. If the data set cannot be cut, these are about a share in the page cache.
    """
    stages = analysis.stages
    numbers = _numbers_of_workers(stages.cores) if stages.can_have_workers else []
    asked = [TrainingSetting(), *(TrainingSetting(workers=workers) for workers in numbers)]
    if analysis.cached is not None and (stages.read.median or stages.read_cached.median):
        if not possible_holds(stages):
            asked += [TrainingSetting(cached_fraction=share) for share in (_UNKNOWN_SHARE, 1.0)]
        asked.append(TrainingSetting(storage_speedup=2.0))
    asked += [
        TrainingSetting(cached_fraction=share, hold=hold) for hold in possible_holds(stages) for share in _shares(stages, hold)
    ]
    if stages.can_have_workers:
        asked.append(TrainingSetting(shared_by=_TRAININGS))
    asked.append(TrainingSetting(step_speedup=2.0))
    asked += [TrainingSetting(factor=factor, insertion_point=point) for point in stages.points for factor in _FACTORS]
    return [(in_words(setting), setting) for setting in asked]


def in_words(setting: TrainingSetting) -> str:
    """Returns the differences between a setting and the measured one, in words.

    >>> in_words(TrainingSetting()), in_words(TrainingSetting(factor=2))
    ('as measured', 'factor 2 at after_batching')
    >>> in_words(TrainingSetting(workers=4, cached_fraction=0.5))
    'num_workers=4, 50 % of the data set in memory'
    >>> in_words(TrainingSetting(cached_fraction=0.5, hold="raw"))
    '50 % of the data set in a cache of raw items'
    >>> in_words(TrainingSetting(shared_by=4))
    '4 such trainings that share the reading'
    """
    words = []
    if setting.workers is not None:
        words.append(f"num_workers={setting.workers}")
    if setting.cached_fraction:
        where = "memory" if setting.hold is None else f"a cache of {HELD[setting.hold]}"
        words.append(f"{percent(setting.cached_fraction)} of the data set in {where}")
    if setting.shared_by > 1:
        words.append(f"{setting.shared_by} such trainings that share the reading")
    if setting.storage_speedup != 1:
        words.append(f"storage {three_digits(setting.storage_speedup)}x as fast")
    if setting.step_speedup != 1:
        words.append(f"accelerator {three_digits(setting.step_speedup)}x as fast")
    if setting.factor != 1:
        words.append(f"factor {three_digits(setting.factor)} at {setting.insertion_point}")
    return ", ".join(words) or "as measured"


def _shares(stages: MeasuredStages, hold: str) -> list[float]:
    """Returns the shares of the data set that are asked about: the share that memory holds (half, if not known), and 1."""
    fitting = fitting_fraction(stages, hold)
    return [share for share in dict.fromkeys((_UNKNOWN_SHARE if fitting is None else fitting, 1.0)) if share]


def _numbers_of_workers(cores: int) -> list[int]:
    """Returns the powers of two below the number of cores, and that number."""
    return [*(2**power for power in range(cores.bit_length()) if 2**power < cores), cores]
