"""What the package works with: loaders at each insertion point, filled by trainings; all else, with the tests that show it.

``python tests/docs/works_with.py`` trains with each loader at each point (``works_with_loaders.py``), and writes the tables into
README.md and docs/about/works_with.md, those of ``works_with_claims.py`` too. ``test_works_with.py`` does the same and compares.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from textwrap import wrap

from works_with_claims import CLAIMS
from works_with_loaders import KINDS, Row, fill

from lightning_echo.insertion import POINTS

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "about" / "works_with.md", ROOT / "README.md"
WIDTH = 130  # of a line of the README
IN_README = ("Ranks and nodes", "Configuration", "Loggers", "Data of other projects")


# ---------------------------------------------------------------------- Markdown


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def cells_of(row: Row) -> tuple[str, ...]:
    taken = row.auto.split(" and ")
    return (*("**auto**" if point in taken else "yes" if works else "-" for point, works in row.points.items()), row.resumes)


def loaders(rows: dict[str, Row]) -> str:
    """The table of the page: rows by name of their kind."""
    head = ("loader", *(f"`{point.value}`" for point in POINTS), "resumes within an epoch")
    return table(head, [(kind.name, *cells_of(rows[kind.name])) for kind in KINDS])


def loaders_in_readme(rows: dict[str, Row]) -> str:
    """The table of the README: kinds of which the same is true stand in one row."""
    together: dict[tuple[str, ...], list[str]] = {}
    for kind in KINDS:
        if kind.in_readme:
            together.setdefault(cells_of(rows[kind.name]), []).append(kind.in_readme)
    head = ("loader", *(f"`{point.value}`" for point in POINTS), "resumes")
    return table(head, [(", ".join(names), *cells) for cells, names in together.items()])


def claims() -> str:
    parts = []
    for section, rows in CLAIMS.items():
        cells = [(claim.name, claim.how_far, ", ".join(dict.fromkeys(map(link, claim.tests))) or "none") for claim in rows]
        parts.append(f"### {section}\n\n{table(('what', 'how far', 'tests'), cells)}")
    return "\n\n".join(parts)


def link(test: str) -> str:
    file = test.partition("::")[0]
    return f"[`{Path(file).stem}`](../../{file})"


def claims_in_readme() -> str:
    lines = []
    for section in IN_README:
        names = ", ".join(claim.in_readme for claim in CLAIMS[section] if claim.in_readme)
        lines += wrap(f"* {section}: {names}.", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def versions() -> str:
    """The oldest versions, which `make test-oldest` installs."""
    pinned = [line.split("#")[0].strip().split("==") for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines()]
    rows = [(pin[0], _in_words(pin[1])) for pin in pinned if len(pin) == 2 and pin[0] != "pytorch-lightning"]
    return table(("package", "oldest version"), rows)


def _in_words(version: str) -> str:
    """
    >>> _in_words("1.2; python_version >= '3.12'"), _in_words("2.5")
    ('1.2 (Python >= 3.12)', '2.5')
    """
    version, _, marker = version.replace("'", "").partition("; python_version ")
    return f"{version} (Python {marker})" if marker else version


def between(text: str, mark: str, new: str) -> str:
    """Returns a page with what stands between two marks replaced."""
    begin, end = f"<!-- {mark}:begin -->\n", f"\n<!-- {mark}:end -->"
    assert text.count(begin) == text.count(end) == 1, f"the page needs {begin.strip()} and {end.strip()} once"
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}{new}{end}", text, flags=re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = {kind.name: fill(kind, Path(folder, str(number))) for number, kind in enumerate(KINDS)}
    page = PAGE.read_text()
    for mark, new in (("loaders", loaders(rows)), ("claims", claims()), ("versions", versions())):
        page = between(page, mark, new)
    PAGE.write_text(page)
    readme = README.read_text()
    for mark, new in (("loaders", loaders_in_readme(rows)), ("claims", claims_in_readme())):
        readme = between(readme, mark, new)
    README.write_text(readme)


if __name__ == "__main__":
    main()
