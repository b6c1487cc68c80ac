"""The page of a run, from its rows alone: ``docs/gpu.md``, and the table ``gpu.md`` beside the rows.

``python -m gpu.page`` writes the page of the rows that are committed; ``--from FOLDER`` first takes over those of a run
(``--from FIRST SECOND`` of two). What was
not measured has no figure: its line says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from markdown import table

from gpu.plan import ALONE, CACHE, CEILING, DECODES, FACTOR, NO_ECHO_BELOW, PLAIN, SHARED, STAGES, TENSORSOCKET
from gpu.rows import COLUMNS, add_row, key_of, read_rows

__all__ = ["RESULTS", "is_evidence", "page_of", "take_over", "write_page"]

_ROOT = Path(__file__).parents[2]
RESULTS, PAGE = _ROOT / "benchmarks" / "results" / "gpu", _ROOT / "docs" / "gpu.md"
OF_BOUND, PREDICTED_WITHIN, IDLE_WITHIN = 0.9, 0.10, 0.03
TIMES_ALONE, OF_TENSORSOCKET = 3.0, 0.95
Row = dict[str, str]

_HEAD = """# On a GPU

What `bash benchmarks/gpu/run.sh` found in about ten minutes on one card. A program (`python -m gpu.page`) makes this page from
the rows in `benchmarks/results/gpu`, and it says only what stands there. How each figure is measured:
[`benchmarks/gpu/README.md`](../benchmarks/gpu/README.md).
"""
_NOTHING = """**None was measured.** The command is there and was tried on a processor in miniature, but no machine with a GPU has
run it so far. So there is no GPU figure on this page, and no other page has one.
"""


def is_evidence(folder: Path) -> bool:
    """Whether a folder has rows that were measured on a GPU."""
    said = _said_of_machine(folder)
    return said.get("scale") == "full" and said.get("card") not in (None, "none", "not known")


def page_of(folder: Path) -> str:
    """Returns the page.

    Args:
        folder: Of the rows.
    """
    if not read_rows(folder, "machine"):
        return f"{_HEAD}\n{_NOTHING}"
    warning = "" if is_evidence(folder) else "**No evidence**: everything as small as can be, on a processor.\n\n"
    sections = [
        _section("Where", _machine(folder)),
        _section("The answer", warning + _answer(folder)),
        *_notes(folder),
        _section("Is it right on a GPU?", _tests(folder)),
        _section("All cores but one cannot feed the card: what cures it?", _feed(folder)),
        _section("Several trainings on one card", _sharing(folder)),
        _section("Accuracy at equal time", _accuracy(folder)),
        _section("What did not run", _stages(folder)),
    ]
    return _HEAD + "\n" + "\n".join(sections)


def write_page(folder: Path, page: Path) -> None:
    """Writes the page of a folder's rows."""
    page.write_text(page_of(folder))


def take_over(runs: Sequence[Path], results: Path = RESULTS) -> None:
    """Copies the rows of a run, or of several on machines of one kind, in place of those before.

    Of each table, the run with the most rows counts: a second run for one stage has few of the others.

    Raises:
        ValueError: Rows were not measured on a GPU, or on different cards.
    """
    for run in runs:
        if not is_evidence(run):
            raise ValueError(f"{run} has no rows that were measured on a GPU: see its machine.csv")
    cards = {_said_of_machine(run)["card"] for run in runs}
    if len(cards) > 1:
        raise ValueError(f"a page must not mix machines, got rows of {' and '.join(sorted(cards))}: take over one of them")
    results.mkdir(parents=True, exist_ok=True)
    for name, columns in COLUMNS.items():
        (results / f"{name}.csv").unlink(missing_ok=True)
        rows = _all_stages(runs) if name == "stages" else max((read_rows(run, name) for run in runs), key=len)
        for row in rows:
            add_row(results, name, **{key_of(column): row[column] for column in columns})


def _notes(folder: Path) -> list[str]:
    """What whoever ran it knows of the run: written by hand."""
    file = folder / "notes.md"
    return [_section("About this run", file.read_text().strip())] if file.exists() else []


def _said_of_machine(folder: Path) -> dict[str, str]:
    return {row["what"]: row["value"] for row in read_rows(folder, "machine")}


def _all_stages(runs: Sequence[Path]) -> list[Row]:
    """The outcome of each part: that of a run in which it ran; else of one that tried it, which says why it did not."""
    worth = {"not run": 0, "ran": 2}
    found: dict[tuple[str, str], Row] = {}
    for row in (row for run in runs for row in read_rows(run, "stages")):
        part = row["stage"], row["part"]
        if part not in found or worth.get(row["outcome"], 1) > worth.get(found[part]["outcome"], 1):
            found[part] = row
    return list(found.values())


# ---------------------------------------------------------------------- the answer


def _answer(folder: Path) -> str:
    rows = [("goal", "wanted", "found", "met"), *_goals(folder)]
    ratio = _ratio(folder)
    sentences = []
    if ratio is not None and ratio < NO_ECHO_BELOW:
        sentences.append(f"**Do not echo here**: R is {ratio:.3g}, so that the card hardly waits.")
    decoded, plain, echoed = (_images(folder, arm) for arm in (DECODES, PLAIN, FACTOR))
    if decoded and plain and decoded > max(plain, echoed or 0):
        sentences.append(
            f'**Decode on the device here**: with `torchvision.io.decode_jpeg(device="cuda")` the training gets '
            f"{decoded:,.0f} images per second, plain {plain:,.0f}"
            + (f", with factor R {echoed:,.0f}." if echoed else ".")
            + " All of them are fresh. It needs images of one size to be resized together, and a decoder on the card."
        )
    return "\n\n".join([*sentences, _table(rows)])


def _goals(folder: Path) -> list[tuple[str, str, str, str]]:
    """What the run was to show, and what it shows."""
    ceiling, plain, echoed = _images(folder, CEILING), _steady_plain(folder), _images(folder, FACTOR)
    ratio = _ratio(folder)
    goals: list[tuple[str, str, float | None, bool | None]] = []
    bound = min(ratio, ceiling / plain) if ratio and ceiling and plain else None
    reached = echoed / plain / bound if echoed and plain and bound else None
    goals.append(
        (
            "speed-up with factor R, as a share of min(R, ceiling / plain)",
            f"{OF_BOUND:g} or more",
            reached,
            _least(reached, OF_BOUND),
        )
    )
    for arm in (PLAIN, FACTOR, CACHE):
        predicted, measured = _images(folder, arm, "predicted"), plain if arm == PLAIN else _images(folder, arm)
        error = abs(predicted / measured - 1) if predicted and measured else None
        goals.append((f"prediction of *{arm}* is off by", f"{PREDICTED_WITHIN:g} or less", error, _most(error, PREDICTED_WITHIN)))
    for arm in (CEILING, PLAIN, FACTOR):
        row = _feed_row(folder, arm)
        ours, theirs = (_number(row.get(column, "")) for column in COLUMNS["feed"][11:13])
        apart = abs(ours - theirs) if ours is not None and theirs is not None else None
        goals.append(
            (
                f"idle fraction and share without a kernel differ, *{arm}*, by",
                f"{IDLE_WITHIN:g} or less",
                apart,
                _most(apart, IDLE_WITHIN),
            )
        )
    ways = {row["how"]: row for row in read_rows(folder, "sharing")}
    rate = {how: _number(row["images per second in all"]) for how, row in ways.items()}
    for other, least in ((ALONE, TIMES_ALONE), (TENSORSOCKET, OF_TENSORSOCKET)):
        ours, theirs = rate.get(SHARED), rate.get(other)
        times = ours / theirs if ours and theirs else None
        goals.append((f"images per second that share, over *{other}*", f"{least:g} or more", times, _least(times, least)))
    lost = _number(ways.get(SHARED, {}).get("lost", ""))
    goals.append(("images lost in a shared pass", "0", lost, _most(lost, 0)))
    return [
        (what, wanted, "not measured" if found is None else f"{found:.3g}", "-" if met is None else "yes" if met else "**no**")
        for what, wanted, found, met in goals
    ]


def _least(value: float | None, least: float) -> bool | None:
    return None if value is None else value >= least


def _most(value: float | None, most: float) -> bool | None:
    return None if value is None else value <= most


# ---------------------------------------------------------------------- sections


def _machine(folder: Path) -> str:
    return _table([("what", "value"), *((row["what"], row["value"]) for row in read_rows(folder, "machine"))])


def _tests(folder: Path) -> str:
    rows = read_rows(folder, "tests")
    if not rows:
        return _none("tests")
    count = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in sorted({row["outcome"] for row in rows})}
    others = [row for row in rows if row["outcome"] != "passed"]
    said = f"{len(rows)} tests: " + ", ".join(f"{number} {outcome}" for outcome, number in count.items()) + "."
    if not others:
        return said
    alike: dict[tuple[str, str], list[str]] = {}  # those that say the same, wherever in the code
    for row in others:
        alike.setdefault((row["outcome"], re.sub(r"^\S+:\d+: ", "", row["said"])), []).append(row["test"])
    shown = [(_and_others(tests), outcome, why) for (outcome, why), tests in alike.items()]
    return f"{said}\n\n" + _table([("test", "outcome", "said"), *shown])


def _and_others(tests: Sequence[str]) -> str:
    return tests[0] if len(tests) == 1 else f"{tests[0]} and {len(tests) - 1} more"


def _feed(folder: Path) -> str:
    rows = read_rows(folder, "feed")
    if not rows:
        return _none("feed")
    ratio = _ratio(folder)
    shown = [
        ("network", "arm", "workers", "factor", "images per second", "times plain", "fresh", "hits", "idle", "without a kernel"),
        *(_feed_cells(folder, row) for row in rows if row["how"] == "measured" and row["arm"] != "loader alone"),
    ]
    predicted = [
        ("arm", "predicted", "measured"),
        *((row["arm"], _rate(row), _rate(_feed_row(folder, row["arm"]))) for row in rows if row["how"] == "predicted"),
    ]
    files = "; ".join(row["said"] for row in rows if row["arm"] == "loader alone")
    return "\n\n".join(
        [
            f"R, the time of a batch over the time of a step, is {ratio:.3g}: {files}." if ratio else "R was not measured.",
            "Images per second are those of an epoch in steady state. *Idle* is what `EchoCallback` measures, *without a kernel* "
            "what `torch.profiler` does, both in one further epoch.",
            _table(shown),
            "What `StallAnalyzer` said, in images per second:" if len(predicted) > 1 else _none("prediction"),
            *([_table(predicted)] if len(predicted) > 1 else []),
        ]
    )


def _feed_cells(folder: Path, row: Row) -> tuple[str, ...]:
    plain = _images(folder, PLAIN, network=row["network"])
    mine = _number(row["images per second"])
    times = f"{mine / plain:.3g}" if mine and plain else "-"
    idle, kernels = (row[column] or "-" for column in COLUMNS["feed"][11:13])
    cells = (row["network"], row["arm"], row["workers"], row["factor"], _rate(row), times)
    return (*cells, row["fresh share"] or "-", row["cache hits"] or "-", idle, kernels)


def _sharing(folder: Path) -> str:
    rows = read_rows(folder, "sharing")
    if not rows:
        return _none("sharing")
    columns = COLUMNS["sharing"]
    return _table([columns, *(tuple(row[column] or "-" for column in columns) for row in rows)])


def _accuracy(folder: Path) -> str:
    rows = read_rows(folder, "accuracy")
    if not rows:
        return _none("accuracy")
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["arm"], row["seed"]), []).append(row)
    shown: list[Sequence[str]] = [
        ("arm", "seed", "learning rate", "clock (s)", "steps", "fresh images", "accuracy", "seconds to plain's last accuracy")
    ]
    for (arm, seed), run in runs.items():
        last = run[-1]
        plain = runs.get((PLAIN, seed))
        reached = "-"
        if plain is not None:
            goal = float(plain[-1]["accuracy"])
            reached = next((row["clock (s)"] for row in run if float(row["accuracy"]) >= goal), "not reached")
        cells = (last["clock (s)"], last["steps"], last["fresh images"], last["accuracy"])
        shown.append((arm, seed, last["learning rate"], *cells, reached))
    return _table(shown)


def _stages(folder: Path) -> str:
    rows = read_rows(folder, "stages")
    others = [row for row in rows if row["outcome"] != "ran"]
    known = {row["stage"] for row in rows}
    missing = [(stage.name, "all of it", "not asked for", "") for stage in STAGES if stage.name not in known]
    shown = [*((row["stage"], row["part"], row["outcome"], row["said"]) for row in others), *missing]
    return _table([("stage", "part", "outcome", "said"), *shown]) if shown else "Every part ran."


# ---------------------------------------------------------------------- inside


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text.strip()}\n"


def _none(what: str) -> str:
    return f"Not measured: stage {what} has no rows."


def _table(lines: Iterable[Sequence[str]]) -> str:
    columns, *rows = lines
    return table(columns, rows)


def _ratio(folder: Path) -> float | None:
    """R of the files that were taken in the end."""
    found = [row["R"] for row in read_rows(folder, "feed") if row["arm"] == "loader alone"]
    return _number(found[-1]) if found else None


def _feed_row(folder: Path, arm: str, how: str = "measured", network: str = "") -> Row:
    """The first row of an arm, which is that of the small network; an empty one if there is none."""
    rows = read_rows(folder, "feed")
    return next((r for r in rows if (r["arm"], r["how"]) == (arm, how) and network in ("", r["network"])), {})


def _images(folder: Path, arm: str, how: str = "measured", network: str = "") -> float | None:
    return _number(_feed_row(folder, arm, how, network).get("images per second", ""))


def _steady_plain(folder: Path) -> float | None:
    """Plain's images per second without what the ends of short epochs cost it: those of the loader alone, if they are more."""
    plain = _images(folder, PLAIN)
    alone = [_number(row["images per second"]) for row in read_rows(folder, "feed") if row["arm"] == "loader alone"]
    return max(plain, alone[-1] or 0.0) if plain and alone else plain


def _rate(row: Row) -> str:
    value = _number(row.get("images per second", ""))
    return "-" if value is None else f"{value:,.0f}"


def _number(text: str) -> float | None:
    return float(text) if text else None


def main() -> int:
    """Writes ``docs/gpu.md``."""
    parser = argparse.ArgumentParser("python -m gpu.page", description=__doc__)
    parser.add_argument(
        "--from", dest="runs", nargs="+", type=Path, help="folders of runs on a GPU, whose rows are taken over first"
    )
    options = parser.parse_args()
    if options.runs:
        take_over(options.runs)
    write_page(RESULTS, PAGE)
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
