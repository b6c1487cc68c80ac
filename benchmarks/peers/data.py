"""The data that everybody reads: how often, is written down by whoever reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from workloads import Sleeping


class CountedReads(Sleeping):
    """Example ``index`` is an image and its index; each read appends the index to a file.

    Appending is atomic, so that worker processes, threads and ranks may do it at once.

    Args:
        log: The file; may be missing.
        length: Examples.
    """

    def __init__(self, log: Path, length: int) -> None:
        super().__init__(0.0, length)
        self.log = log

    def read(self, index: Any) -> Any:
        file = os.open(self.log, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
        try:
            os.write(file, f"{int(index)}\n".encode())
        finally:
            os.close(file)
        return super().read(index)

    def reads(self) -> list[int]:
        """The indices in the order in which they were read."""
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []
