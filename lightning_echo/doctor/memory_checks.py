"""How much memory an example takes, and how many examples a buffer, a cache and the workers' queues can hold."""

from __future__ import annotations

from typing import Any

from lightning_echo.doctor.findings import Figure, Finding, error, ok, warning
from lightning_echo.doctor.looking import FirstBatch, Looked
from lightning_echo.insertion import Needs, earliest
from lightning_echo.protecting.memory import bytes_in_words

__all__ = ["check_memory", "check_queues"]

_MOST_OF_FREE = 0.75  # share that a cache may take, as the analysis advises; the rest is for the buffer and for the training
_WEIGHED = {
    earliest(Needs.raw_items): "as it is read",
    earliest(Needs.split): "decoded",
    earliest(Needs.examples): "after all transforms",
}


def check_memory(looked: Looked, free_bytes: int | None) -> list[Finding]:
    """Returns the findings about examples, buffer and cache.

    Args:
        looked: What is known of the loader.
        free_bytes: Free memory; None if the system does not tell.
    """
    if looked.choice is None:
        return []
    return [_weight(looked), _buffer(looked, free_bytes), _cache(looked, free_bytes)]


def check_queues(looked: Looked, first: FirstBatch, free_shared_bytes: int | None) -> Finding | None:
    """Returns the finding whether the batches that workers prefetch fit into shared memory; None if no worker uses it.

    Args:
        looked: What is known of the loader.
        first: Its first batch.
        free_shared_bytes: Free bytes of ``/dev/shm``; None if it does not exist.
    """
    batches = looked.source.prefetched_batches
    if not batches or free_shared_bytes is None or not first.tensors:
        return None
    needed = batches * first.bytes
    figures = {"batches": batches, "needed_bytes": needed, "free_bytes": free_shared_bytes}
    sentence = (
        f"Workers prefetch {batches} batches, {bytes_in_words(needed)}; /dev/shm has {bytes_in_words(free_shared_bytes)} free."
    )
    if needed > free_shared_bytes:
        way_out = (
            "Workers would die with 'Bus error': enlarge /dev/shm (docker run --shm-size=8g), or set a smaller num_workers, "
            "prefetch_factor or batch_size."
        )
        return error("prefetched_batches", sentence, way_out, **figures)
    return ok("prefetched_batches", sentence, **figures)


def _weight(looked: Looked) -> Finding:
    known = {words: looked.possible[point].item_bytes for point, words in _WEIGHED.items() if point in looked.possible}
    known = {words: size for words, size in known.items() if size}
    figures: dict[str, Figure] = {
        f"{point.value}_bytes": looked.possible[point].item_bytes or None if point in looked.possible else None
        for point in _WEIGHED
    }
    if not known:
        return ok("example_bytes", "What an example weighs is not known before a batch is read.", **figures)
    listed = ", ".join(f"{bytes_in_words(size)} {words}" for words, size in known.items())
    return ok("example_bytes", f"An example weighs {listed}.", **figures)


def _buffer(looked: Looked, free_bytes: int | None) -> Finding:
    assert looked.choice is not None
    size, item, point = looked.buffer_size, looked.choice.item_bytes, looked.choice.point
    what = "batches" if point.by_batches else "examples"
    sentence = f"The default buffer at {point.value} holds {size:,} {what}"
    figures: dict[str, Any] = {"items": size, "item_bytes": item or None, "items_in_free_memory": None}
    if not item or free_bytes is None:
        return ok("buffer", f"{sentence}.", **figures)
    figures["items_in_free_memory"] = fitting = free_bytes // item
    return ok("buffer", f"{sentence} ({bytes_in_words(size * item)}); the free memory has room for {fitting:,}.", **figures)


def _cache(looked: Looked, free_bytes: int | None) -> Finding:
    if not looked.holds:
        return ok("cache", f"A cache can hold nothing of it: {looked.no_cache.rstrip('.')}.", possible=False)
    examples = looked.examples or 0
    figures: dict[str, Any] = {"possible": True, "examples": examples}
    said, fits = [], False
    for hold in looked.holds:
        whole = hold.example_bytes * examples
        figures[f"{hold.name}_bytes"] = whole
        line = f"hold='{hold.name}' takes {bytes_in_words(whole)}"
        if free_bytes is not None and whole:
            share = min(_MOST_OF_FREE * free_bytes / whole, 1.0)
            figures[f"{hold.name}_fraction"] = share
            fits = fits or share == 1
            line += f", of which {100 * share:.0f} % fit"
        said.append(line)
    sentence = f"A cache of all {examples:,} examples: {'; '.join(said)}."
    if free_bytes is not None and not fits:
        way_out = "A cache would hold a part of it; every example that it holds is one that need not be read."
        return warning("cache", sentence, way_out, **figures)
    return ok("cache", sentence, **figures)
