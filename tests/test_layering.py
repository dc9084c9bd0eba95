"""Who may import whom: parent and worker processes stay apart, and each library has its owners."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipeline"

# What each module may import from `pipeline`. L0 first: nothing there looks upward.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "combinations": {"config"},
    "datafiles": set(),
    "errors": set(),
    "paths": set(),
    "processes": {"errors"},
    "stores": {"processes"},
    "throughput": set(),
    "record": {"config"},
    "nvml": set(),
    "cards": {"errors"},
    "prediction": {"config", "record"},
    "estimate": {"cards", "config", "launcher", "nvml", "prediction", "worker.start"},
    "foresight": {"cards", "config", "estimate", "launcher", "prediction", "record"},
    "curves": {"record"},
    "report": {"record"},
    "ledger": {"record"},
    "recorder": {"config", "ledger", "record", "throughput"},
    "figures": {"record", "recorder"},
    "progress": {"record", "recorder"},
    "layers": {"errors", "paths"},
    "reserved": {"layers"},
    "merge": {"config", "layers", "reserved"},
    "presets": {"config", "errors", "layers", "merge", "paths", "reserved"},
    "preflight": {"config", "datafiles", "errors", "layers", "nvml", "paths"},
    "doctor": {"nvml"},
    "launcher": {"config", "errors", "record", "recorder", "worker.start"},
    "writer": {"curves"},
    "tracking": {"config", "curves", "errors", "processes", "record", "stores", "writer"},
    "artifacts": {"config", "figures", "launcher", "record"},
    "handover": set(),
    "run": {
        "artifacts",
        "config",
        "errors",
        "foresight",
        "handover",
        "launcher",
        "processes",
        "progress",
        "record",
        "recorder",
        "report",
        "tracking",
    },
    "comparison": {"config", "presets", "record"},
    "comparison_text": {"comparison", "report"},
    "comparison_figure": {"comparison", "figures"},
    "comparison_page": {"comparison", "comparison_figure", "comparison_text"},
    "compare": {
        "comparison",
        "comparison_figure",
        "comparison_page",
        "comparison_text",
        "config",
        "errors",
        "handover",
        "presets",
        "run",
        "tracking",
        "writer",
    },
    "script_run": {"record", "tracking", "writer"},
    "search.space": {"combinations", "config", "errors", "layers"},
    "search.judge": {"config", "errors", "record"},
    "search.monotone": {"record", "search.judge", "search.space"},
    "search.expected": set(),
    "search.model": {"search.expected", "search.space"},
    "search.sampler": {"search.judge", "search.model", "search.monotone", "search.space"},
    "search.jobs": {"search.judge", "search.monotone", "search.sampler", "search.space"},
    "search.answer": {
        "config",
        "record",
        "search.jobs",
        "search.judge",
        "search.monotone",
        "search.space",
    },
    "search.study": {"errors", "processes", "search.jobs", "search.judge", "search.space"},
    "search.asking": {"search.judge", "search.monotone", "search.space", "search.study"},
    "search.loop": {
        "config",
        "errors",
        "processes",
        "record",
        "search.jobs",
        "search.judge",
        "search.monotone",
        "search.study",
        "throughput",
    },
    "search.figure": {"search.answer"},
    "search.prepare": {
        "config",
        "errors",
        "nvml",
        "preflight",
        "search",
        "search.asking",
        "search.jobs",
        "search.judge",
        "search.sampler",
        "search.space",
        "throughput",
    },
    "search.command": {
        "artifacts",
        "config",
        "errors",
        "handover",
        "run",
        "search.answer",
        "search.figure",
        "search.jobs",
        "search.loop",
        "search.prepare",
        "search.study",
        "stores",
        "tracking",
        "writer",
    },
    "search.cli": {"config", "errors", "options", "search.command", "search.prepare"},
    "search.__init__": set(),
    "options": {"config", "errors", "preflight", "presets"},
    "cli": {
        "compare",
        "comparison",
        "comparison_text",
        "config",
        "doctor",
        "errors",
        "estimate",
        "launcher",
        "options",
        "prediction",
        "presets",
        "processes",
        "record",
        "report",
        "run",
        "search.cli",
        "tracking",
    },
    "__main__": {"cli"},
    # The one door for people's own scripts; opened when MemoryCallback is asked for.
    "__init__": {"worker.callback"},
    "worker.__init__": set(),
    "worker.start": {"cards", "worker.entry", "worker.estimate"},
    "worker.preload": {"worker.entry", "worker.estimate"},
    "worker.versions": {"nvml"},
    "worker.steps": {"record"},
    "worker.watch": {"nvml"},
    "worker.memory": {"nvml", "record", "worker.watch"},
    "worker.models": {"config", "errors", "paths"},
    "worker.data": {"config", "datafiles", "errors", "worker.models"},
    "worker.flops": {"config", "worker.models"},
    "worker.support": {"combinations", "config", "errors"},
    "worker.adaptive": {"config", "record", "throughput"},
    "worker.limit": {"record"},
    "worker.ledger": {"record"},
    "worker.proof": {"config", "errors", "record", "worker.ledger"},
    "worker.training": {"config", "errors", "worker.data", "worker.models"},
    "worker.caching_allocator": set(),
    "worker.cuda_ops": set(),
    "worker.cuda_temporaries": {"cards"},
    "worker.trace": {"cards", "record", "worker.cuda_temporaries"},
    "worker.rehearsal": {
        "cards",
        "config",
        "worker.cuda_ops",
        "worker.trace",
        "worker.training",
    },
    "worker.replay": {"record", "worker.caching_allocator", "worker.rehearsal", "worker.trace"},
    "worker.estimate": {
        "cards",
        "config",
        "errors",
        "prediction",
        "record",
        "worker.rehearsal",
        "worker.replay",
        "worker.support",
        "worker.trace",
    },
    "worker.script": {
        "config",
        "record",
        "recorder",
        "script_run",
        "worker.memory",
        "worker.versions",
    },
    "worker.callback": {
        "config",
        "record",
        "worker.adaptive",
        "worker.ledger",
        "worker.memory",
        "worker.proof",
        "worker.script",
        "worker.steps",
    },
    "worker.entry": {
        "config",
        "errors",
        "record",
        "worker.callback",
        "worker.flops",
        "worker.limit",
        "worker.memory",
        "worker.proof",
        "worker.support",
        "worker.training",
        "worker.versions",
    },
}
# Which modules may import a library at all.
OWNERS = {
    "mlflow": {"script_run", "tracking", "writer"},
    "pynvml": {"nvml"},
    "matplotlib": {"comparison_figure", "figures", "search.figure"},
    "optuna": {"search.asking", "search.study"},
    "plotly": {"comparison_page", "search.figure"},
    "yaml": {"layers", "artifacts"},
    "pydantic": {"config", "record", "merge", "presets", "search.space"},
    "bitsandbytes": {"worker.training"},
}
TRAINING_LIBRARIES = {"torch", "transformers", "datasets", "accelerate", "bitsandbytes"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of all that is imported in this tree, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            names = (alias.name for alias in node.names)
            is_folder = (ROOT / node.module.replace(".", "/")).is_dir()
            yield from (f"{node.module}.{n}" for n in names) if is_folder else (node.module,)


SOURCES = {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
WORKER = sorted(name for name in SOURCES if name.startswith("worker."))
PARENT = sorted(set(SOURCES) - set(WORKER))


def own(name: str) -> set[str]:
    return {i.removeprefix("pipeline.") for i in imports(SOURCES[name]) if i.startswith("pipeline")}


def libraries(tree: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imports(tree)}


def test_table_names_every_module() -> None:
    assert set(SOURCES) == set(ALLOWED)


@pytest.mark.parametrize("name", SOURCES)
def test_module_imports_what_the_table_allows(name: str) -> None:
    assert own(name) <= ALLOWED[name]


@pytest.mark.parametrize("name", PARENT)
def test_parent_module_never_imports_a_training_library(name: str) -> None:
    assert libraries(SOURCES[name]) & TRAINING_LIBRARIES == set()


@pytest.mark.parametrize("name", sorted(set(PARENT) - {"__init__"}))
def test_parent_module_knows_only_the_start_of_a_worker(name: str) -> None:
    assert {other for other in own(name) if other.startswith("worker")} <= {"worker.start"}


@pytest.mark.parametrize("name", WORKER)
def test_worker_module_knows_no_runs_and_no_studies(name: str) -> None:
    known = own(name) & {"tracking", "script_run", "search", "launcher", "run", "cli"}
    assert known <= ({"script_run"} if name == "worker.script" else set())
    assert libraries(SOURCES[name]) & {"mlflow", "optuna"} == set()


def at_import(tree: ast.Module) -> set[str]:
    """Return what is imported as soon as the module is: nothing in functions or for types alone."""

    def inside(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        for child in ast.iter_child_nodes(node):
            yield from inside(child)

    return set(inside(tree))


@pytest.mark.parametrize("name", WORKER)
def test_worker_module_brings_no_mlflow_when_it_is_imported(name: str) -> None:
    owners = {f"pipeline.{owner}" for owner in OWNERS["mlflow"]}
    assert at_import(SOURCES[name]) & owners == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from pipeline.script_run import RunLogger", True),
        ("import pipeline.script_run", True),
        ("from pipeline import script_run", True),
        ("class A:\n    from pipeline.script_run import RunLogger", True),
        ("try:\n    import pipeline.script_run\nexcept ImportError:\n    pass", True),
        ("def f():\n    from pipeline.script_run import RunLogger", False),
        ("if TYPE_CHECKING:\n    from pipeline.script_run import RunLogger", False),
    ],
)
def test_import_of_a_run_is_noticed_where_it_happens_at_once(source: str, found: bool) -> None:
    assert ("pipeline.script_run" in at_import(ast.parse(source))) is found


def test_worker_is_imported_without_mlflow() -> None:
    code = "import sys, pipeline.worker.entry; print('mlflow' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize("library", OWNERS)
def test_library_is_imported_by_its_owners_alone(library: str) -> None:
    users = {name for name, tree in SOURCES.items() if library in libraries(tree)}
    assert users <= OWNERS[library]


@pytest.mark.parametrize("module", ["pipeline.cli", "pipeline.run", "pipeline.worker.start"])
def test_torch_stays_out_of_the_parent_process(module: str) -> None:
    code = (
        f"import sys, {module}; "
        f"print(sorted({TRAINING_LIBRARIES | {'optuna'}!r} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_command_line_answers_without_mlflow() -> None:
    code = "import sys, pipeline.cli; print('mlflow' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"
