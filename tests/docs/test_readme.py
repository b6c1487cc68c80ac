"""The README stays short, its links lead somewhere, and its figures are those that a command has printed."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SECTIONS = [
    "Is it for you?",
    "Works with",
    "Limits",
    "Measure: it changes nothing, and says whether echoing pays",
    "Echo, cache, share",
    "What to expect",
    "What changes for your training",
    "Without an edit, LightningCLI and Hydra",
    "More",
]
FIRST_SCREEN = README.split("## ")[0]


def test_it_is_short_and_its_sections_are_in_their_order() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 130] == []
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_a_link_leads_somewhere(link: str) -> None:
    path, _, heading = link.partition("#")
    if not path.startswith("https://"):
        assert (ROOT / path).exists()
    if heading:
        anchors = [line.lstrip("# ").lower() for line in (ROOT / path).read_text().splitlines() if line.startswith("#")]
        assert heading in [re.sub(r"[^a-z0-9 -]", "", anchor).strip().replace(" ", "-") for anchor in anchors]


def rows_of(results: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / "results" / f"{results}.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_first_screen_has_a_picture_an_installation_three_lines_and_two_commands() -> None:
    assert FIRST_SCREEN.index("](docs/time_to_target.svg)") < FIRST_SCREEN.index("pip install .")
    assert FIRST_SCREEN.index("pip install .") < FIRST_SCREEN.index("EchoCallback(") < FIRST_SCREEN.index("make demo")
    assert "make test" in FIRST_SCREEN
    (code,) = re.findall(r"```python\n(.*?)```", FIRST_SCREEN, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 3
    assert len(FIRST_SCREEN.splitlines()) <= 30


def test_the_badges_are_true() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert (ROOT / ".github" / "workflows" / "ci.yml").read_text().splitlines()[1] == "name: CI"
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f"badge/python-{pythons[0]}_to_{pythons[-1]}-blue" in FIRST_SCREEN
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "badge/licence-Apache_2.0-blue" in FIRST_SCREEN
    for name in ("Source", "Documentation"):
        (address,) = re.findall(rf'^{name} = "(.*)"', project, re.MULTILINE)
        assert address in FIRST_SCREEN


def test_the_picture_shows_what_make_wallclock_has_printed() -> None:
    picture = (ROOT / "docs" / "time_to_target.svg").read_text()
    lines = [line for line in rows_of("wallclock/wallclock_demand_times") if (line["source"], line["R"]) == ("steady", "8")]
    printed = {(line["task"], line["arm"]): line["time (s)"].split(" [")[0] for line in lines}
    arms = [(task, arm) for task in ("language_model", "glyphs") for arm in ("no echo", "factor R", "on demand")]
    assert re.findall(r">([\d.]+) s", picture) == [printed[arm] for arm in arms]
    bars = [float(width) for width in re.findall(r'<rect x="150" y="\d+" width="([\d.]+)"', picture)]
    longest = max(float(printed[arm]) for arm in arms)
    assert bars == pytest.approx([480 * float(printed[arm]) / longest for arm in arms], rel=0.01)
    assert 'fill="#ffffff"' in picture, "it is read on a dark page, too"


@pytest.mark.parametrize(
    "page",
    ["README", "CHANGELOG", *(f"docs/{page}" for page in ("index", "quick_start", "methods/echo_on_demand", "how_to/factor"))],
)
def test_on_demand_is_said_in_the_same_words(page: str) -> None:
    text = " ".join((ROOT / f"{page}.md").read_text().split())
    assert re.search(r"f no fresh example has arrived, (it|the training) trains on one from memory instead of waiting", text)


def test_its_real_output_is_that_of_the_quick_start() -> None:
    (shown,) = re.findall(r"```text\n(lightning_echo: .*?)```", README, re.DOTALL)
    assert shown in (ROOT / "docs" / "quick_start.md").read_text()


def test_the_figures_that_it_quotes_stand_in_the_evidence() -> None:
    readme, evidence = (" ".join(text.split()) for text in (README, (ROOT / "docs" / "evidence.md").read_text()))
    for quoted, stands in (
        ("It took 0.17 (language model) and 0.16 (CNN) of the plain time; the goal was 0.18", "0.17 [0.152, 0.176]"),
        ("It took 0.17 (language model) and 0.16 (CNN) of the plain time; the goal was 0.18", "0.159 [0.146, 0.221]"),
        (
            "At factors 4 and 8, with 64 batches or more in the buffer, the old rate was as good as any in 11 of 12 cases",
            'With `"memory"` and 64 batches or more, at e = 4 and 8, the rate without echoing is as good '
            "as any other in eleven of twelve arms",
        ),
    ):
        assert quoted in readme
        assert stands in evidence
    assert "the buffer takes up to a tenth of the free memory" in readme
    assert "a tenth of the free memory" in (ROOT / "docs" / "how_to" / "buffer_and_cache.md").read_text()


def test_the_figures_of_a_gpu_are_those_of_the_rows() -> None:
    quoted = " ".join(README.split("## What to expect")[1].split("The picture above")[0].split())
    rate = {row["arm"]: f"{float(row['images per second']):,.0f}" for row in rows_of("gpu/feed") if row["how"] == "measured"}
    assert f"factor 9.29 took a ResNet-18 from {rate['plain']} to {rate['factor R']} images per second" in quoted
    assert f"Decoded on the card they were {rate['plain, decoded on the device']}." in quoted
    best = {(row["arm"], row["seed"]): 0.0 for row in rows_of("gpu/accuracy")}
    for row in rows_of("gpu/accuracy"):
        of = row["arm"], row["seed"]
        if row["arm"] == "plain" or float(row["clock (s)"]) < 20.5:
            best[of] = max(best[of], float(row["accuracy"]))
    assert best["factor R", "1"] == best["factor R", "2"] == 0.9995
    assert (round(best["plain", "1"], 2), round(best["plain", "2"], 2)) == (0.88, 0.96)
