"""litdata's ``StreamingDataLoader``: a sized ``DataLoader`` with an ``__iter__``, an order and a state of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from project_runs import BATCH, LENGTH, OwnOrder

litdata = pytest.importorskip("litdata", reason="litdata is not installed: pip install 'lightning-echo[test-loaders]'")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder of five chunks as ``litdata.optimize`` writes it, which itself starts processes and takes eight seconds."""
    from litdata.streaming import Cache

    path = tmp_path / "chunks"
    cache = Cache(str(path), chunk_size=5)
    for index in range(LENGTH):
        cache[index] = {"index": index}
    cache.done()
    cache.merge()
    return str(path)


class TestLitdata(OwnOrder):
    def data(self, folder: str) -> Any:
        return litdata.StreamingDataset(folder, shuffle=True)

    def loader(self, folder: str, workers: int, **options: Any) -> Any:
        return litdata.StreamingDataLoader(self.data(folder), batch_size=BATCH, num_workers=workers, **options)
