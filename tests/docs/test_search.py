"""Who types one of these phrases into the site's search finds the page that answers it first.

The pages are chosen by hand. The index is that of the built site (`make docs`); where that is missing or older than a page, the
pages are built without their notebooks and the API. Phrases are looked up as Sphinx's `searchtools.js` does in the browser.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BUILT = DOCS / "_build" / "html" / "searchindex.js"
LEADS = {
    "troubleshooting": "faq",
    "migrate": "how_to/migrate",
    "migration": "how_to/migrate",
    "alternatives": "alternatives",
    "DALI": "alternatives",
    "litdata": "alternatives",
    "slow dataloader": "how_to/bottleneck",
    "GPU utilization": "how_to/bottleneck",
    "GPU utilisation": "how_to/bottleneck",
    "low GPU utilization": "faq",
    "data loading bottleneck": "how_to/bottleneck",
    "data stall": "reference/glossary",
    "num_workers": "how_to/bottleneck",
    "cross-validation": "methods/overlapping_data",
}
TITLE, ENTRY = 15, 100  # what a heading and a main entry of the index count in searchtools.js, if they are the phrase
PARTS = (("terms", 5, 2), ("titleterms", 15, 7))  # words of texts and of headings: what a word counts, and a part of one


def found(index: dict[str, Any], phrase: str) -> list[str]:
    """The pages that the search shows, the best first. Names of the API, which count 26 at most, are left out."""
    asked, names, titles = phrase.lower(), index["docnames"], index["titles"]
    hits: list[tuple[int, str, int]] = []  # score, what is shown, page
    for title, places in index["alltitles"].items():
        if asked in title.lower() and len(asked) >= len(title) / 2:
            score = round(TITLE * len(asked) / len(title))
            hits += [(score + (titles[page] == title), title, page) for page, _ in places]
    for entry, places in index["indexentries"].items():
        if asked in entry and len(asked) >= len(entry) / 2:
            score = round(ENTRY * len(asked) / len(entry))
            hits += [(score, titles[page], page) for page, _, is_main in places if is_main]
    english = SearchEnglish({})
    words = [english.stem(word) for word in re.findall(r"\w+", asked) if word not in english.stopwords]
    scores = [scores_of(index, word) for word in words]
    for page in set.intersection(*map(set, scores)) if scores else ():
        hits.append((max(of_word[page] for of_word in scores), titles[page], page))
    return list(dict.fromkeys(names[page] for _, _, page in sorted(hits, key=lambda hit: (-hit[0], hit[1].lower()))))


def scores_of(index: dict[str, Any], word: str) -> dict[int, int]:
    """What a stemmed word counts in each page that has it: what is looked up later wins."""
    hits = [(index[part][word], whole) for part, whole, _ in PARTS if word in index[part]]
    for part, _, piece in PARTS:
        if word not in index[part]:
            hits += [(pages, piece) for longer, pages in index[part].items() if word in longer]
    return {page: score for pages, score in hits for page in ([pages] if isinstance(pages, int) else pages)}


def read(file: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(file.read_text().removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    return written


def site_index(folder: Path) -> dict[str, Any]:
    pages = [path for kind in ("*.md", "*.ipynb") for path in DOCS.rglob(kind) if "_build" not in path.parts]
    if BUILT.exists() and BUILT.stat().st_mtime > max(path.stat().st_mtime for path in pages):
        return read(BUILT)
    settings = {"nb_execution_mode": "off", "autosummary_generate": "0", "exclude_patterns": "_build,reference/api.md"}
    options = [word for name, value in settings.items() for word in ("-D", f"{name}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-Q", "-b", "html", *options, str(DOCS), str(folder / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return read(folder / "html" / "searchindex.js")


@pytest.mark.program
def test_a_phrase_leads_to_the_page_that_answers_it(tmp_path: Path) -> None:
    index = site_index(tmp_path)
    assert {phrase: next(iter(found(index, phrase)), "nothing") for phrase in LEADS} == LEADS


def test_each_page_that_a_phrase_leads_to_is_there() -> None:
    assert [page for page in set(LEADS.values()) if not (DOCS / f"{page}.md").is_file()] == []


def test_a_main_entry_comes_before_a_heading_before_a_word_and_nothing_is_found_of_what_is_not_there() -> None:
    index = {
        "docnames": ["entry", "heading", "title", "word"],
        "titles": ["Z", "Y", "Stalls", "X"],
        "alltitles": {"Z": [[0, None]], "Y": [[1, None]], "Stalls": [[2, None]], "X": [[3, None]], "Why it stalls": [[1, "a"]]},
        "indexentries": {"stalls": [[0, "index-0", True]], "stall": [[3, "index-1", False]]},
        "terms": {"stall": 3, "slow": [1, 3]},
        "titleterms": {"stall": [1, 2]},
    }
    assert found(index, "Stalls") == ["entry", "title", "heading", "word"]
    assert found(index, "stal") == ["entry", "title", "heading", "word"]  # a part of each
    assert found(index, "slow stall") == ["heading", "word"]
    assert found(index, "slow migration") == []
