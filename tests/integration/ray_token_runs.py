"""Two trainings that share one reader on a cluster that asks for a token. It is run by ``python ray_token_runs.py FOLDER``.

A process of its own, since Ray reads whether there are tokens when it is imported. It prints, as JSON, for each training the
indices of its epoch and the warnings about tokens, and the logs of the readers.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(FOLDER / "token")}
os.environ.update(TOKEN)

import ray  # noqa: E402
from ray_runs import cluster_of  # noqa: E402
from sharing_runs import Numbers, epochs_of, indices, loader_of  # noqa: E402

LENGTH = 48


def one_epoch(length: int) -> tuple[list[int], list[str]]:
    loader = loader_of(Numbers(length), 8, name="token", cluster="ray", linger_seconds=60)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (epoch,) = epochs_of(loader, 1)
        loader.close()
    return indices(epoch), [str(each.message) for each in said if "RAY_AUTH_MODE" in str(each.message)]


def main() -> None:
    token = FOLDER / "token"
    token.touch(mode=0o600)
    token.write_text("3f" * 32)
    nodes = FOLDER / "nodes"
    nodes.mkdir()
    train: Any = ray.remote(num_cpus=0.5)(one_epoch)
    with cluster_of(nodes, {"a": 1, "b": 1}, **TOKEN) as found:
        results = [ray.get(train.options(resources={node: 1}).remote(LENGTH), timeout=120) for node in "ab"]
        logs = [found.log(node, "token") for node in "ab"]
    print(json.dumps({"results": results, "logs": logs}))


if __name__ == "__main__":
    main()
