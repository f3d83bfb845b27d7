"""The package's front door: public names, and what importing it costs."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import penstock
from launch import run_python

PACKAGE = Path(penstock.__file__).parent
# What each room may import of the others. `random_state.py` lies below all that import torch. Any other file is a face,
# which may import all of them.
CORE = {"schedule", "layout", "data", "modeling", "runtime", "random_state"}
BELOW = {
    "schedule": set[str](),
    "layout": {"schedule"},
    "data": {"random_state"},
    "modeling": {"layout", "random_state"},
    "runtime": CORE,
    "tensor_parallel": CORE,
    "generation": CORE,
    "checkpoint": CORE | {"tensor_parallel", "pipeline_model", "optimizer"},
    "pictures": CORE | {"pipeline_template"},
    "checking": CORE | {"pictures", "tensor_parallel"},
    "planning": CORE | {"pictures", "checking", "pipeline_template"},
    "elastic": CORE | {"planning", "pipeline_template"},
}


def test_every_public_name_is_there() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name).__name__ == name
        assert name in dir(penstock)


def test_initialize_stays_the_function_when_its_module_is_imported() -> None:
    module = importlib.import_module("penstock.initialize")
    assert penstock.initialize is module.initialize


def test_schedules_and_the_command_line_start_without_torch() -> None:
    code = "import sys, penstock.schedule, penstock.config, penstock.cli; assert 'torch' not in sys.modules, 'torch'"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_unknown_names_are_attribute_errors() -> None:
    result = run_python("-c", "import penstock; penstock.initialise")
    assert "AttributeError: module 'penstock' has no attribute 'initialise'" in result.stderr


def imported_rooms(tree: ast.AST, file: Path) -> Iterator[str]:
    """The rooms that a file imports when it is imported itself."""
    todo = list(ast.iter_child_nodes(tree))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom):
            package = file.relative_to(PACKAGE.parent).parent.parts
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = (*base, *(node.module or "").split("."))
            if parts[0] == "penstock" and len(parts) > 1:
                yield parts[1]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("penstock."))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def test_no_two_classes_share_a_name() -> None:
    files: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_imports_point_one_way() -> None:
    seen = set()
    for room, below in BELOW.items():
        for file in (PACKAGE / room).rglob("*.py"):
            for other in imported_rooms(ast.parse(file.read_text()), file):
                seen.add((room, other))
                assert other in below | {room}, f"{file.relative_to(PACKAGE)} imports {other}"
    assert ("runtime", "modeling") in seen and ("runtime", "runtime") in seen, "imports were found"
