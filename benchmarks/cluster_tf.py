"""tf.data service with so many workers: ``python cluster_tf.py OPTIONS``, with a Python that has TensorFlow.

Needs nothing but TensorFlow, which has an environment of its own (``make peers`` makes it). Starts a dispatcher and the workers,
each in a process of its own on this machine. Its last line is what it has found: examples a second.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

# The processes are forks of one that has imported it, and has no threads: an import in each would take two cores a minute.
_TENSORFLOW = ("tensorflow", "tensorflow.python.data.experimental.ops.testing")
_AHEAD = 4  # batches that the training has fetched, as the other ones have in this benchmark


def _dispatch(said: Any) -> None:
    import tensorflow as tf

    server = tf.data.experimental.service.DispatchServer()
    said.put(server.target)
    server.join()


def _work(target: str, said: Any) -> None:
    import tensorflow as tf

    address = target.partition("://")[2]
    server = tf.data.experimental.service.WorkerServer(tf.data.experimental.service.WorkerConfig(dispatcher_address=address))
    said.put("registered")
    server.join()


def _batches(target: str, sleep_seconds: float, example_bytes: int, batch_size: int) -> Any:
    """What a training takes: each worker sleeps in TensorFlow's own code, in one thread, and sends whole batches."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    service = tf.data.experimental.service
    slow = tf.data.Dataset.range(10**6).apply(sleep(round(1e6 * sleep_seconds)))
    images = slow.map(lambda index: tf.fill([example_bytes], tf.cast(index % 251, tf.uint8))).batch(batch_size)
    far = images.apply(service.distribute(processing_mode=service.ShardingPolicy.DYNAMIC, service=target))
    return far.prefetch(_AHEAD).as_numpy_iterator()


def main(workers: int, seconds: float, sleep_seconds: float, example_bytes: int, batch_size: int) -> float:
    """Returns the examples a second, from when each worker has sent two batches."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_TENSORFLOW))
    said = context.SimpleQueue()
    context.Process(target=_dispatch, args=(said,), daemon=True).start()
    target = said.get()
    for _ in range(workers):
        context.Process(target=_work, args=(target, said), daemon=True).start()
    for _ in range(workers):
        said.get()
    batches = _batches(target, sleep_seconds, example_bytes, batch_size)
    for _ in range(2 * workers):
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(workers):  # they send at the same time
            count += len(next(batches))
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    print(main(**json.loads(sys.argv[1])))
