"""Who may import whom. A new arrow fails here; whoever needs one adds it to the table, in sight.

A stage sees the shared rooms and never another stage. Roots see several stages. A name in brackets
may only be imported inside a function, where it is needed.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SHARED = {
    "types": "",
    "config": "",
    "config_file": "config",
    "kernels": "",
    "_native": "",
    "ops": "_native [kernels]",
    "files": "config",
}

STAGES = {
    # prompts: files, sources and templates are one stage in four files.
    "sources": "config [tasks]",
    "layouts": "sources",
    "templates": "types config",
    "data": "types layouts sources templates",
    "prompt_sampler": "",
    "planner": "_native",
    "branching": "types config",
    "exemplars": "types",
    "rollouts": "types",
    "rewards": "types [tasks]",
    "advantages": "types config ops",
    "batching": "types",
    "objectives": "",
    "policy": "types config ops [tasks]",
    "tasks": "",
    "estimators": "",
    "metrics": "files",
    "step_metrics": "types",
    "doctor": "",
    "records": "types ops files",
    "checkpoint": "",
    "run_dir": "config config_file files",
    "display": "",
}

EVERY_STAGE = " ".join([*SHARED, *STAGES])

ROOTS = {
    "schedule": "types metrics planner rewards",
    "tree": "types config branching metrics planner rewards schedule",
    "seeding": "types exemplars prompt_sampler templates schedule",
    "update": "types config metrics batching objectives policy",
    "trainer": f"{EVERY_STAGE} schedule tree seeding update",
    "evaluator": "types estimators rewards schedule",
    "inputs": "types config data sources rewards tasks templates",
    "assemble": f"{EVERY_STAGE} schedule tree seeding update trainer evaluator inputs",
    "dry_run": "config inputs policy metrics assemble",
    "session": f"{EVERY_STAGE} trainer assemble evaluator [report]",
    "train": f"{EVERY_STAGE} [dry_run] [assemble] [session]",
    "eval_store": "types config files evaluator",
    "eval_parts": f"{EVERY_STAGE} assemble inputs evaluator eval_store",
    "eval_report": "types config metrics estimators evaluator eval_store",
    "evaluate": f"{EVERY_STAGE} evaluator train [eval_store] [eval_parts] [eval_report]",
    "report": EVERY_STAGE,
    "replay": EVERY_STAGE,
    "study": f"{EVERY_STAGE} inputs train report",
    "integrations": EVERY_STAGE,
    "__init__": "",
}

TABLE = {**SHARED, **STAGES, **ROOTS}


def rooms() -> Iterator[tuple[str, Path]]:
    """(room, file) of every Python file of the package; a folder is one room."""
    for path in sorted((ROOT / "xrpo_fast").rglob("*.py")):
        parts = path.relative_to(ROOT / "xrpo_fast").parts
        yield parts[0].removesuffix(".py"), path
    for path in sorted((ROOT / "kernels").glob("*.py")):
        yield "kernels", path


def arrows(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(imported room, whether inside a function, line) of each import of ours."""
    tree = ast.parse(path.read_text())
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        for name in imported_names(node):
            package, _, rest = name.partition(".")
            if package == "xrpo_fast" and rest:
                yield rest.split(".")[0], id(node) in inside, node.lineno  # pyright: ignore


def imported_names(node: ast.AST) -> list[str]:
    """Full names that a statement imports; relative imports have the form ..name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, (
            f"relative import of {node.module}: the package imports by full name"
        )
        module = node.module or ""
        return (
            [f"{module}.{alias.name}" for alias in node.names]
            if module == "xrpo_fast"
            else [module]
        )
    is_dynamic = (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("import_module", "importlib.import_module")
        and isinstance(node.args[0], ast.Constant)
    )
    return [node.args[0].value] if is_dynamic else []  # pyright: ignore


@pytest.mark.parametrize("room", TABLE)
def test_imports_are_those_of_the_table(room):
    words = TABLE[room].split()
    anywhere = {word for word in words if not word.startswith("[")}
    when_needed = anywhere | {word.strip("[]") for word in words}
    for owner, path in rooms():
        if owner != room:
            continue
        for target, is_inside, line in arrows(path):
            if target == room:
                continue
            allowed = when_needed if is_inside else anywhere
            where = f"{path.relative_to(ROOT)}:{line}"
            assert target in allowed, f"{where} imports {target}; {room} may import {words}"


def test_every_room_is_in_the_table():
    assert {room for room, _ in rooms()} <= TABLE.keys()


def test_no_stage_sees_another():
    """Guards the table itself: a stage may import what is shared and files of its own stage."""
    prompts = {"data", "layouts", "sources", "templates"}
    for stage, words in STAGES.items():
        for word in words.split():
            if word == "[tasks]":
                continue
            name = word.strip("[]")
            assert name in SHARED or {stage, name} <= prompts, f"{stage} -> {name}"


def test_roots_form_no_circle():
    seen: list[str] = []
    for root, words in ROOTS.items():
        later = {word.strip("[]") for word in words.split()} & (ROOTS.keys() - set(seen))
        assert later <= {"report"}, f"{root} sees {later}, which come after it in the table"
        seen.append(root)


HEAVY = ("torch", "triton", "transformers", "vllm", "datasets", "sklearn", "pyarrow", "matplotlib")


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("xrpo_fast", ("numpy", *HEAVY)),
        ("xrpo_fast.config", HEAVY),
        ("xrpo_fast.rewards", HEAVY),
        ("xrpo_fast.ops", ("triton", "transformers", "vllm", "datasets", "sklearn", "pyarrow")),
        ("xrpo_fast.trainer", ("triton", "transformers", "vllm", "datasets", "sklearn")),
    ],
)
def test_importing_costs_nothing_heavy(module, unwanted):
    code = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert not loaded & set(unwanted)


def test_public_names_load_on_first_use():
    code = (
        "import sys, xrpo_fast; assert 'torch' not in sys.modules; "
        "assert callable(xrpo_fast.group_advantages); assert 'torch' in sys.modules; "
        "assert set(dir(xrpo_fast)) == set(xrpo_fast.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_unknown_public_name_is_an_attribute_error():
    import xrpo_fast

    with pytest.raises(AttributeError, match="module 'xrpo_fast' has no attribute 'grpo'"):
        xrpo_fast.grpo  # noqa: B018
