"""What a report asks of the model: settings, and the words for them."""

from __future__ import annotations

from lightning_echo.analysis.predict import Setting
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.measuring.words import percent, three_digits

__all__ = ["in_words", "questions"]

_FACTORS = (2.0, 4.0, 8.0)


def questions(analysis: StallAnalysis) -> list[tuple[str, Setting]]:
    """Each question in words and as a setting; first the training as it was measured.

    Nothing is asked of workers where the data set fails in them; nor of caches and storages where reading could not be measured:
    the answer would be that they change nothing.
    """
    stages = analysis.stages
    numbers = _numbers_of_workers(stages.cores) if stages.can_have_workers else []
    asked = [Setting(), *(Setting(workers=workers) for workers in numbers)]
    if analysis.cached is not None and (stages.read.median or stages.read_cached.median):
        asked += [Setting(cached_fraction=0.5), Setting(cached_fraction=1.0), Setting(storage_speedup=2.0)]
    asked.append(Setting(step_speedup=2.0))
    asked += [Setting(factor=factor, insertion_point=point) for point in stages.points for factor in _FACTORS]
    return [(in_words(setting), setting) for setting in asked]


def in_words(setting: Setting) -> str:
    """A setting, by how it differs from the one that was measured.

    >>> in_words(Setting()), in_words(Setting(workers=4, cached_fraction=0.5)), in_words(Setting(factor=2))
    ('as measured', 'num_workers=4, 50 % of the data set in memory', 'factor 2 at after_batching')
    """
    said = []
    if setting.workers is not None:
        said.append(f"num_workers={setting.workers}")
    if setting.cached_fraction:
        said.append(f"{percent(setting.cached_fraction)} of the data set in memory")
    if setting.storage_speedup != 1:
        said.append(f"storage {three_digits(setting.storage_speedup)}x as fast")
    if setting.step_speedup != 1:
        said.append(f"accelerator {three_digits(setting.step_speedup)}x as fast")
    if setting.factor != 1:
        said.append(f"factor {three_digits(setting.factor)} at {setting.insertion_point}")
    return ", ".join(said) or "as measured"


def _numbers_of_workers(cores: int) -> list[int]:
    """Powers of two up to the number of cores, and that number."""
    return [*(2**power for power in range(cores.bit_length()) if 2**power < cores), cores]
