"""mosaicml-streaming's ``StreamingDataset``: in its own loader a sized one with a state, in a plain loader a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from project_runs import BATCH, LENGTH, OwnOrder

streaming = pytest.importorskip(
    "streaming", reason="mosaicml-streaming is not installed, which needs an older numpy: make test-mosaic"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """A folder of small shards."""
    path = str(tmp_path / "shards")
    with streaming.MDSWriter(out=path, columns={"index": "int"}, size_limit=300) as writer:
        for index in range(LENGTH):
            writer.write({"index": index})
    yield path
    streaming.base.util.clean_stale_shared_memory()


class TestMosaicmlStreaming(OwnOrder):
    def data(self, folder: str) -> Any:
        own: dict[str, Any] = {"shuffle_seed": 5, "num_canonical_nodes": 1, "shuffle_block_size": 1 << 18}
        return streaming.StreamingDataset(local=folder, batch_size=BATCH, shuffle=True, **own)

    def loader(self, folder: str, workers: int, **options: Any) -> Any:
        return streaming.StreamingDataLoader(self.data(folder), batch_size=BATCH, num_workers=workers, **options)
