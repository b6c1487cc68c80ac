"""What a release says of itself: one version, one date, one address, in every file that has them."""

import datetime
import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lightning_echo

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
EXTRAS = PROJECT["optional-dependencies"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
SECTIONS = re.findall(r"^## (\S+) - (\S+)$", CHANGELOG, flags=re.MULTILINE)  # of releases, the newest first


def test_package_and_changelog_and_citation_have_the_same_version():
    released = SECTIONS[0][0] if SECTIONS else PROJECT["version"]
    assert {lightning_echo.__version__, released, str(CITATION["version"])} == {PROJECT["version"]}


def test_changelog_and_citation_have_the_same_date_of_the_release():
    released = datetime.date.fromisoformat(SECTIONS[0][1]) if SECTIONS else None
    assert CITATION.get("date-released") == released


def test_the_changelog_has_only_sections_of_releases_and_one_for_what_is_not_released():
    titles = re.findall(r"^## (.+)$", CHANGELOG, flags=re.MULTILINE)
    assert set(titles) <= {"Unreleased", *(f"{version} - {date}" for version, date in SECTIONS)}
    assert [date for _, date in SECTIONS] == sorted((date for _, date in SECTIONS), reverse=True)


@pytest.mark.parametrize("kind", ["Added", "Changed", "Fixed"])
def test_a_section_of_the_changelog_names_each_kind_of_change_once(kind):
    newest = CHANGELOG.split("\n## ")[1]
    assert re.findall(r"^### (.+)$", newest, flags=re.MULTILINE).count(kind) == 1


def test_the_citation_has_what_the_format_demands():
    assert {"cff-version", "message", "title", "authors"} <= set(CITATION)
    for reference in CITATION["references"]:
        assert {"type", "title", "authors", "year", "url"} <= set(reference)
        assert all({"given-names", "family-names"} == set(author) for author in reference["authors"])


def papers():
    """Returns the papers on arXiv that pages and docstrings name."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "lightning_echo").rglob("*.py"), *(ROOT / "lightning_echo").rglob("*.md")]
    texts += [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    return {paper for text in texts for paper in re.findall(r"\b\d{4}\.\d{5}\b", text.read_text())}


def test_the_papers_that_pages_and_docstrings_name_are_cited():
    named = papers()
    assert named > {"1907.05550", "2007.06775", "2409.18749"}
    cited = {each["url"].removeprefix("https://arxiv.org/abs/") for each in CITATION["references"] if "arXiv" in str(each)}
    # The evidence tests a finding that it only heard of, and says so.
    assert named - cited == {"2609.13922"}
    assert cited <= named


def test_licence_and_authors_and_addresses_are_the_same_everywhere():
    assert PROJECT["license"] == CITATION["license"] == "Apache-2.0"
    assert [each["name"] for each in PROJECT["authors"]] == [each["name"] for each in CITATION["authors"]]
    assert PROJECT["urls"]["Source"] == CITATION["repository-code"]
    assert PROJECT["urls"]["Documentation"] == CITATION["url"]


def minima_of(requirements):
    """Returns the oldest versions that are declared, by name."""
    found = {}
    for requirement in map(Requirement, requirements):
        oldest = [each.version for each in requirement.specifier if each.operator == ">="]
        found |= dict.fromkeys([canonicalize_name(requirement.name)], Version(oldest[0])) if oldest else {}
    return found


MINIMA = minima_of([*PROJECT["dependencies"], *EXTRAS["vision"], *EXTRAS["examples"]])


def test_the_oldest_declared_versions_are_those_that_are_tested():
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    pinned = {
        canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines if line[0] != "#")
    }
    assert pinned.pop("pytorch-lightning") == pinned["lightning"]
    assert pinned == MINIMA


def test_the_page_about_versions_tells_the_minima_that_are_declared():
    page = (ROOT / "docs" / "about" / "versions.md").read_text()
    rows = dict(re.findall(r"^\| (\w+)(?:, an extra)? \| ([\d.]+)", page, flags=re.MULTILINE))
    assert f">={rows.pop('Python')}" == PROJECT["requires-python"]
    assert set(rows) >= {"torch", "lightning", "torchmetrics", "torchvision"}
    assert {name: Version(version) for name, version in rows.items()} == {name: MINIMA[name] for name in rows}


def jobs_of(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"]


def targets_called_by(workflow):
    """Yields the targets of the Makefile that a workflow runs, also those that its matrix names."""
    for job in jobs_of(workflow).values():
        named = job.get("strategy", {}).get("matrix", {}).get("target", [])
        for step in job["steps"]:
            for target in re.findall(r"^make (\$\{\{ [a-z.]+ \}\}|\S+)", step.get("run", ""), flags=re.MULTILINE):
                yield from named if target == "${{ matrix.target }}" else [target]


def targets_of_the_makefile():
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_workflows_call_targets_that_the_makefile_has():
    called = {target for workflow in WORKFLOWS for target in targets_called_by(workflow)}
    assert called <= targets_of_the_makefile()
    assert called >= {
        "lint",
        "docs",
        "test",
        "test-all",
        "test-oldest",
        "test-ray",
        "dist",
        "links",
        "test-outside",
        "test-mosaic",
    }


def test_what_runs_in_every_fresh_clone_runs_on_github_too():
    run = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert set(run) <= set(targets_called_by(ROOT / ".github" / "workflows" / "ci.yml"))


def test_the_declared_versions_of_python_are_those_that_are_tested():
    tested = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]["python"]
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["classifiers"]]
    assert [each[1] for each in found if each] == tested
    assert PROJECT["requires-python"] == f">={tested[0]}"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends_in_time_and_publishes_nothing(workflow):
    text = workflow.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 120 for job in jobs_of(workflow).values())
    assert re.search(r"twine|pypi-publish|secrets\.|gh release", text) is None


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_demands(form):
    loaded = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(loaded)
    asked = [field for field in loaded["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in asked} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in asked)
    assert len({field["id"] for field in asked}) == len(asked) > 0


def test_whoever_says_that_the_accelerator_waits_is_asked_for_the_doctors_output():
    fields = {field.get("id"): field for field in yaml.safe_load(FORMS[0].read_text())["body"]}
    assert "lightning-echo doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]
