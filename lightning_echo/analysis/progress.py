"""`Progress`: tells at the begin of each phase of an analysis how much time was spent, and about how much is left.

Each phase may take an equal share of the time. It takes less if its steps are done earlier. So the estimate assumes that the
phases to come take as long as those before them. The first phase does not count: it waits for the data module, which may download
data.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Progress"]


class Progress:
    """The progress of one analysis, a line for each phase.

    Args:
        seconds: About how long the analysis may take.
        phases: Largest number of phases.
        tell: Gets each line.
        clock: Returns the present time in seconds.

    Example:
        >>> times = iter([0.0, 0.0, 2.0, 5.0])
        >>> progress = Progress(60, 6, print, clock=lambda: next(times))
        >>> progress.phase("the data")
        the data (0 s, about 60 s left)
        >>> progress.phase("reading")
        reading (2 s, about 50 s left)
        >>> progress.phase("the step", to_come=2)
        the step (5 s, about 6 s left)
    """

    def __init__(
        self, seconds: float, phases: int, tell: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._share, self._to_come, self._tell, self._clock = seconds / phases, phases + 1, tell, clock
        self._begun = clock()
        self._begins: list[float] = []

    def phase(self, what: str, to_come: int | None = None) -> None:
        """Tells that a phase begins.

        Args:
            what: What is done in it.
            to_come: Number of phases that are left, this one included. None: one fewer than before, but at least one. 0: nobody
                knows how long this phase takes, so the line says nothing about the time left.
        """
        now = self._clock()
        self._to_come = max(self._to_come - 1, 1) if to_come is None else to_come
        self._begins.append(now)
        ended = len(self._begins) - 2  # but for the first phase
        each = (now - self._begins[1]) / ended if ended > 0 else self._share
        left = f", about {self._to_come * each:.0f} s left" if self._to_come else ""
        self._tell(f"{what} ({now - self._begun:.0f} s{left})")
