"""The layout of the package with at most 100 files, and the one move to it.

    python benchmarks/house_move.py check     # sizes, names that two merged files both define, circles of imports
    python benchmarks/house_move.py move      # writes the new files, removes the old ones, rewrites imports in all folders

Afterwards: ``ruff check --fix .``, ``ruff format .``, mypy, and by hand the maps, the layers of
tests/unit/test_layering.py and the folders of tests/unit. Delete this program after the move.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_echo"
# The new file: the old ones, in the order of its text. What is not named stays where it is.
PLAN = """
log: log training.rank_zero
schema: saved loading.schema
config: config loading.options
cli: cli training.share_command
attachment: checkpoints attachment
plan.plan: planning.hashing planning.ratio planning.shape planning.buffer planning.plan
plan.each: planning.each_plan
plan.memory: planning.memory_plan planning.plans
plan.order: planning.order
data.machine: caching.free_memory monitoring.cores
data.objects: protecting.objects
data.copies: protecting.memory protecting.copies protecting.protect
data.difference: protecting.difference protecting.aliases protecting.overlaps
data.randomness: protecting.randomness protecting.generators protecting.seeding
data.elsewhere: protecting.elsewhere
data.contents: protecting.fingerprints.contents protecting.fingerprints.walk
data.fingerprint: protecting.fingerprints.code protecting.fingerprints.fingerprint protecting.fingerprints.changes
split.staged: splitting.stages splitting.decoding splitting.staged splitting.sizes
split.describe: splitting.chains splitting.describe splitting.cut
split.make: splitting.make
split.check: splitting.read_check splitting.fallback
split.prove: splitting.prove splitting.calls splitting.splits
cache.arena: caching.arena_file caching.arena
cache.record: caching.records.reading caching.record caching.records.writing
cache.reads: caching.keys caching.example_store caching.cached_reads
cache.holding: caching.holding
cache.kept: caching.cache_config caching.records.made_from caching.records.own_changes caching.kept
cache.node_cache: caching.node_cache
cache.loader_cache: caching.loader_cache caching.cached_dataset
cache.board: caching.nodes.partition caching.nodes.board
cache.exchange: caching.nodes.exchange caching.nodes.joining
pipeline.worker: workers.errors workers.seconds workers.dataset
pipeline.source: fetching.source fetching.layout fetching.choice
pipeline.prefetch: fetching.prefetch fetching.worker_processes
pipeline.requests: fetching.sampler_order fetching.requests fetching.rounds
pipeline.pipelines: fetching.index_pipeline fetching.stream_pipeline fetching.restartable_pipeline
pipeline.streams: workers.stream_reader workers.streams
pipeline.batches: fetching.passes fetching.batches
share.config: sharing.share_config sharing.folder sharing.wire
share.window: sharing.packing sharing.window
share.same_data: sharing.reader.by_value sharing.reader.loader_parts sharing.same_data
share.sharing: sharing.idle_runs sharing.loader_sharing sharing.serving
share.process: sharing.reader.process sharing.starting
share.server: sharing.reader.agreeing sharing.reader.trainings sharing.reader.server
share.reading: sharing.reader.worker_start sharing.reader.reading sharing.reader.stream_reading
share.attachment: sharing.taking.connecting sharing.taking.attachment
share.pipeline: sharing.taking.pace sharing.taking.rows sharing.taking.shared_order sharing.taking.shared_pipeline
share.stream: sharing.taking.shared_stream
share.ray: sharing.cluster.chunk sharing.cluster.handing sharing.cluster.ray_cluster sharing.cluster.relay sharing.cluster.process
loader.loader: loading.loader
loader.run: loading.factor loading.succession loading.echo_run
loader.epochs: loading.epochs loading.delivery
loader.state: loading.pipeline_state loading.state
loader.resuming: loading.resuming
ranks: loading.ranks
loader.setting: loading.setting
loader.sizing: loading.sizing
measure.control: measuring.words measuring.control measuring.cost measuring.recent
measure.target_idle: measuring.trials measuring.target_idle
measure.guard: measuring.guard measuring.schedule
measure.timing: measuring.timing measuring.metrics
measure.summary: measuring.report measuring.echo_summary measuring.summary
measure.page: reporting.figure reporting.table reporting.html_page
measure.run_report: reporting.run_tables reporting.run_plot reporting.run_report
training.loaders: training.collection training.wrapping
training.hooks: training.hooks training.transfer training.stand_in
training.trainer: training.refusals training.lengths training.trainer_link
training.training_echo: training.training_echo
training.meters: monitoring.profiler_tap monitoring.loader_meter monitoring.run_meter
training.counts: monitoring.run_counts monitoring.cache_meter monitoring.share_meter monitoring.asking monitoring.decider
training.logged: monitoring.logger_figures monitoring.logger_texts monitoring.logged
analysis.analyzer: analysis.progress analysis.outputs analysis.advice analysis.analyzer analysis.command
analysis.checks: analysis.checks
analysis.result: analysis.result
analysis.predict: analysis.measured analysis.caches analysis.predict
analysis.verdict: analysis.remedies analysis.verdict
analysis.report: analysis.report.saved analysis.report.questions analysis.report.tables \
    analysis.report.text analysis.report.plot analysis.report.page
analysis.sources: analysis.probing.data analysis.probing.transfers analysis.probing.fits
analysis.parts: analysis.probing.files analysis.probing.transforms analysis.probing.parts analysis.probing.part_runs
analysis.phases: analysis.probing.process analysis.probing.ranks analysis.probing.steps \
    analysis.probing.phases analysis.probing.streams
doctor.command: doctor.command doctor.examining
doctor.looking: doctor.target doctor.looking doctor.loader_checks doctor.memory_checks
doctor.traps: doctor.traps
doctor.machine: doctor.findings doctor.machine doctor.resources doctor.versions
"""
MERGED = {new: olds.split() for new, olds in (line.split(": ") for line in PLAN.strip().splitlines())}
NEW_OF = {old: new for new, olds in MERGED.items() for old in olds}


# Names that two files of one new file define for different things, and modules that are imported as such: file, pattern, new.
RENAMES = [
    ("saved.py", r"\b_record\b", "_read_record"),
    ("protecting/seeding.py", r"\b_DEEP\b", "_DEEP_IN_DATA"),
    ("protecting/seeding.py", r"\b_parts\b", "_seeded_parts"),
    ("analysis/probing/transfers.py", r"\b_HOOK\b", "_TRANSFER"),
    ("monitoring/logger_texts.py", r"\b_to_(tensorboard|wandb|mlflow)\b", r"_text_to_\1"),
    ("monitoring/logger_texts.py", r"\b_TAKERS\b", "_TAKERS_OF_TEXT"),
    ("analysis/report/tables.py", r"\bfigures\b", "figures_of"),
    ("analysis/report/page.py", r"import figures, headline", "import figures_of, headline"),
    ("analysis/report/page.py", r"why=figures\(", "why=figures_of("),
    ("analysis/report/text.py", r"import figures, headline", "import figures_of, headline"),
    ("analysis/report/text.py", r", figures\(analysis\)", ", figures_of(analysis)"),
    (
        "analysis/report/saved.py",
        r"from lightning_echo.analysis.report import page, plot, text",
        "from lightning_echo.analysis.report.page import save_page\n"
        "from lightning_echo.analysis.report.plot import save_png\n"
        "from lightning_echo.analysis.report.text import report",
    ),
    ("analysis/report/saved.py", r"\b(?:page|plot|text)\.(save_page|save_png|report)", r"\1"),
    (
        "config.py",
        r"from lightning_echo.loading import options\n",
        "from lightning_echo.loading.options import check_buffer_size, check_epoch_length, check_factor\n"
        "from lightning_echo.loading.options import check_point, check_reuse, check_seed\n",
    ),
    ("config.py", r"\boptions\.(check_[a-z_]*)", r"\1"),
]


def path_of(module: str) -> Path:
    return ROOT / PACKAGE / (module.replace(".", "/") + ".py")


def all_modules() -> list[str]:
    base = ROOT / PACKAGE
    found = [".".join(path.relative_to(base).with_suffix("").parts) for path in sorted(base.rglob("*.py"))]
    return [name for name in found if name.rpartition(".")[2] != "__init__"]


class Old:
    """One file, taken apart."""

    def __init__(self, name: str) -> None:
        self.name, self.text = name, path_of(name).read_text()
        self.tree = ast.parse(self.text)
        self.lines = self.text.splitlines(keepends=True)
        self.imports: list[ast.stmt] = []
        self.checked_imports: list[ast.stmt] = []  # under TYPE_CHECKING
        self.exported: list[str] = []
        self.defined: dict[str, ast.stmt] = {}
        out = set[int]()
        for place, node in enumerate(self.tree.body):
            lines = range(node.lineno - 1, node.end_lineno or node.lineno)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imports.append(node)
                out.update(lines)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                self.checked_imports += node.body
                out.update(lines)
            elif place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self.docstring = self.text.splitlines()[node.lineno - 1 : node.end_lineno]
                out.update(lines)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                self.exported = ast.literal_eval(node.value)
                out.update(lines)
            else:
                for each in ast.walk(node) if isinstance(node, (ast.If, ast.Try)) else [node]:
                    if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                        self.defined[each.name] = node
                    elif isinstance(each, (ast.Assign, ast.AnnAssign)):
                        targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                        for target in targets:
                            for part in ast.walk(target):
                                if isinstance(part, ast.Name):
                                    self.defined[part.id] = node
        self.body = "".join(line for number, line in enumerate(self.lines) if number not in out).strip("\n") + "\n"


def module_of(dotted: str) -> str | None:
    """Returns the old module of a dotted name of the package, without the package's name."""
    name = dotted.removeprefix(PACKAGE + ".")
    while name:
        if name in KNOWN:
            return name
        name = name.rpartition(".")[0]
    return None


KNOWN = set(all_modules())


def new_name(old: str) -> str:
    return NEW_OF.get(old, old)


def rewritten(text: str) -> str:
    """Rewrites all dotted names of modules in a text, and imports of modules from their folder."""

    def of_folder(match: re.Match[str]) -> str:
        folder, names = match[2].removeprefix(PACKAGE).lstrip("."), match[3]
        kept, lines = [], []
        for name in (each.strip() for each in names.strip("()").replace("\n", " ").split(",")):
            if not name:
                continue
            first, _, alias = name.partition(" as ")
            old = f"{folder}.{first}".lstrip(".")
            if old in KNOWN and new_name(old) != old:
                new_folder, _, new_file = new_name(old).rpartition(".")
                local = alias or first
                source = f"{PACKAGE}.{new_folder}".rstrip(".")
                lines.append(f"{match[1]}from {source} import {new_file}" + ("" if local == new_file else f" as {local}"))
            else:
                kept.append(name)
        if not lines:
            return match[0]
        if kept:
            lines.insert(0, f"{match[1]}from {match[2]} import {', '.join(kept)}")
        return "\n".join(lines)

    text = re.sub(rf"^([ \t]*)from ({PACKAGE}(?:\.\w+)*) import (\([^)]*\)|[^\n(]+)$", of_folder, text, flags=re.MULTILINE)

    def of_name(match: re.Match[str]) -> str:
        old = module_of(match[0])
        if old is None or new_name(old) == old:
            return match[0]
        rest = match[0].removeprefix(f"{PACKAGE}.{old}")
        return f"{PACKAGE}.{new_name(old)}{rest}"

    text = re.sub(rf"\b{PACKAGE}(?:\.\w+)+", of_name, text)
    return text


def same_in(olds: list[Old], name: str) -> set[str]:
    """Returns the name if all these files define it with the same text: the second definition is left out."""
    texts = {ast.unparse(old.defined[name]) for old in olds if name in old.defined}
    return {name} if len(texts) == 1 else set()


def merged_text(new: str) -> tuple[str, list[str]]:
    """Returns the text of a new file, and what needs a look."""
    olds, notes = [Old(name) for name in MERGED[new]], []
    seen = dict[str, str]()
    for old in olds:
        for name in old.defined:
            if name in seen and seen[name] != old.name and name not in same_in(olds, name):
                notes.append(f"{new}: {name} is defined in {seen[name]} and {old.name}")
            seen[name] = old.name
    inside = set(MERGED[new])
    plain, checked = list[str](), list[str]()
    aliases = defaultdict(set)
    for old in olds:
        for node in old.imports + old.checked_imports:
            into = plain if node in old.imports else checked
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
                module = module_of(node.module)
                kept = []
                for alias in node.names:
                    its = module or module_of(f"{node.module}.{alias.name}")
                    if its in inside:
                        if module is None:
                            notes.append(f"{new}: {old.name} imports the module {its}")
                        elif alias.asname:
                            notes.append(f"{new}: {old.name} imports {alias.name} as {alias.asname} of {its}")
                        continue
                    kept.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
                    aliases[alias.asname or alias.name].add(f"{node.module}.{alias.name}")
                if kept:
                    into.append(f"from {node.module} import {', '.join(kept)}")
            else:
                into.append(ast.unparse(node))
                for alias in node.names:  # type: ignore[attr-defined]
                    aliases[alias.asname or alias.name].add(f"{getattr(node, 'module', '')}.{alias.name}")
    for name, sources in aliases.items():
        if len(sources) > 1:
            notes.append(f"{new}: {name} is imported as {sorted(sources)}")
        if name in seen:
            notes.append(f"{new}: {name} is defined in {seen[name]} and imported from {sorted(sources)}")
    exported = sorted({name for old in olds for name in old.exported})
    head = "\n".join(olds[-1].docstring)
    text = head + "\n\nfrom __future__ import annotations\n\n"
    text += "\n".join(line for line in dict.fromkeys(plain) if "__future__" not in line) + "\n"
    if checked:
        text += "\nif TYPE_CHECKING:\n" + "".join(f"    {line}\n" for line in dict.fromkeys(checked))
    if exported:
        text += f"\n__all__ = {json.dumps(exported)}\n"
    for old in olds:
        if old is not olds[-1] and len(olds) > 1:
            said = " ".join(line.strip() for line in old.docstring).strip('"').strip()
            text += f"\n\n# {said[:110]}"
        body = old.body
        for name, node in old.defined.items():
            if old is not next(each for each in olds if name in each.defined):  # the same text has been written already
                body = body.replace("".join(old.lines[node.lineno - 1 : node.end_lineno]), "", 1)
        text += "\n\n" + body
    text = rewritten(text)
    text = re.sub(rf"^[ \t]+from {PACKAGE}\.{re.escape(new)} import (\([^)]*\)|[^\n]+)\n", "", text, flags=re.MULTILINE)
    return text, notes


def imports_of(new: str) -> set[str]:
    """New modules that a new one imports when it is imported."""
    found = set()
    for old in MERGED.get(new, [new]):
        for node in Old(old).imports:
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]  # type: ignore
            for name in names:
                if name and name.startswith(PACKAGE + "."):
                    modules = [module_of(name)] if module_of(name) else [module_of(f"{name}.{a.name}") for a in node.names]  # type: ignore
                    found |= {new_name(module) for module in modules if module}
    return found - {new}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    index, low, stack, found = {}, {}, [], []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = []
            while True:
                circle.append(stack.pop())
                if circle[-1] == node:
                    break
            if len(circle) > 1:
                found.append(circle)

    sys.setrecursionlimit(10000)
    for node in graph:
        if node not in index:
            visit(node)
    return found


def check() -> None:
    unknown = [old for old in NEW_OF if old not in KNOWN]
    assert not unknown, unknown
    rest = [name for name in KNOWN if name not in NEW_OF]
    news = [*MERGED, *rest]
    folders = {new.rpartition(".")[0] for new in news} - {""}
    print(len(news), "files and", len(folders) + 1, "__init__; not moved:", rest)
    for new, olds in MERGED.items():
        lines = sum(len(path_of(old).read_text().splitlines()) for old in olds)
        if lines > 700:
            print(f"{lines:5} {new}")
    for new in MERGED:
        for note in merged_text(new)[1]:
            print("NOTE", note)
    graph = {new: imports_of(new) for new in news}
    for circle in circles(graph):
        print("CIRCLE", circle)
        for one in circle:
            for other in graph[one] & set(circle):
                print("   ", one, "->", other)
    by_folder = defaultdict(set)
    for one, others in graph.items():
        for other in others:
            a, b = one.rpartition(".")[0] or one, other.rpartition(".")[0] or other
            if a != b:
                by_folder[a].add(b)
    for circle in circles(by_folder):
        print("FOLDERS", circle)
        for one, others in graph.items():
            for other in others:
                a, b = one.rpartition(".")[0] or one, other.rpartition(".")[0] or other
                if a != b and a in circle and b in circle:
                    print("   ", one, "->", other)


FOLDERS = {
    "plan": "Which example is used when: arithmetic, without torch and without data.",
    "data": "The user's objects: copies, differences, fingerprints, random states. Nothing of the user's is changed.",
    "split": "How a data set is cut into what an echo reuses and what runs for each use, and the proof that this is right.",
    "cache": "Examples that are kept for good: what fits into memory is read once (the MinIO cache of CoorDL, section 4.1).",
    "pipeline": "From the plan to batches: what runs in workers, and the pipelines in the main process.",
    "share": "Several trainings on a machine share one process that reads (CoorDL; TensorSocket, arXiv 2409.18749).",
    "loader": "`EchoLoader`: epochs, their length, counts, the state, and how a run resumes.",
    "measure": "Clocks, costs, controllers and reports: they decide from seconds alone what to do about a stall.",
    "training": "Lightning's side: the loaders of a Trainer are echoed, and the training is measured from its hooks.",
    "analysis": "Stall analysis: where the time for input goes, what would help, and when not to echo.",
    "doctor": "The doctor finds problems of this machine, or of a data module, before a training has them.",
}
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".rst", ".sh", ".cff", ".csv"}


def rename() -> None:
    """Applies the table of new names, in the package and in the tests that use one of them."""
    for name, pattern, new in RENAMES:
        path = ROOT / PACKAGE / name
        text, count = re.subn(pattern, new, path.read_text())
        assert count, f"{name} has no {pattern}"
        path.write_text(text)
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        if "report.tables import" in (text := path.read_text()):
            path.write_text(
                re.sub(r"\bfigures\(|(?<=import )figures\b", lambda match: match[0].replace("figures", "figures_of"), text)
            )


def move() -> None:
    rename()
    texts, notes = dict[str, str](), list[str]()
    for new in MERGED:
        texts[new], more = merged_text(new)
        notes += more
    if notes:
        sys.exit("\n".join(notes))
    kept = {path_of(name) for name in KNOWN if name not in NEW_OF} | {ROOT / PACKAGE / "__init__.py"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        path = ROOT / name
        if (
            path.suffix in SUFFIXES
            and path.name != "CHANGELOG.md"
            and (not name.startswith(PACKAGE + "/") or path in kept or path.suffix != ".py")
        ):
            text = path.read_text()
            if (changed := rewritten(text)) != text:
                path.write_text(changed)
    for name in listed:
        path = ROOT / name
        if name.startswith(PACKAGE + "/") and path.suffix == ".py" and path not in kept:
            path.unlink()
    for new, text in texts.items():
        path = path_of(new)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for folder, said in FOLDERS.items():
        (ROOT / PACKAGE / folder / "__init__.py").write_text(f'"""{said}"""\n')


if __name__ == "__main__":
    {"check": check, "move": move}[sys.argv[1]]()
