"""The package's front door: public names, and what importing it costs."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock.moved import PLACES
from tests.support.launch import run_python

PACKAGE = Path(penstock.__file__).parent
# What each package may import of the others, for types too, lowest first. `__init__` and `moved` name all of them.
BASICS = {"arguments", "nested", "random_state", "tables"}
CORE = BASICS | {"schedule", "layout", "data", "modeling", "runtime"}
SHARING = {"tensor_parallel", "context_parallel", "sharded_optimizer"}
ON_ENGINE = CORE | SHARING | {"config", "generation", "checkpoint", "simulation"}
BELOW = {
    "arguments": set[str](),
    "nested": set[str](),
    "random_state": set[str](),
    "tables": set[str](),
    "schedule": set[str](),
    "layout": {"schedule"},
    "data": BASICS,
    "modeling": BASICS | {"layout", "data"},
    "quantisation": {"modeling"},
    "runtime": CORE,
    "tensor_parallel": CORE,
    "context_parallel": CORE,
    "generation": CORE,
    "sharded_optimizer": CORE,
    "config": CORE | {"sharded_optimizer"},
    "checkpoint": CORE | {"tensor_parallel"},
    "simulation": CORE,
    "model": ON_ENGINE,
    "planning": CORE | {"simulation", "sharded_optimizer"},
    "elastic": CORE | {"config", "planning"},
    "integrations": ON_ENGINE | {"model"},
    "api": ON_ENGINE | {"model", "planning", "elastic", "integrations"},
    "checking": ON_ENGINE | {"api"},
    "trainer": ON_ENGINE | {"model", "api"},
    "cli": ON_ENGINE | {"planning", "api", "checking"},
}
# Names for what is elsewhere.
DOORS = {"", "__main__", "integrations.transformers", "integrations.trl"}
# Libraries that need not be installed, and the modules that import one at their top.
OPTIONAL = {"accelerate", "bitsandbytes", "datasets", "diffusers", "matplotlib", "peft", "trl"}
NEED_OPTIONAL = {"penstock.integrations.diffusers", "penstock.integrations.peft"}


def test_every_public_name_is_there() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name).__name__ == name
        assert name in dir(penstock)


def test_a_module_is_found_under_its_old_name_with_a_warning() -> None:
    for name, place in PLACES.items():
        sys.modules.pop(name, None)
        with pytest.warns(DeprecationWarning, match=f"{name} is {place} since 0.4"):
            module = importlib.import_module(name)
        assert module is importlib.import_module(place)
        assert module.__spec__ is not None and module.__spec__.name == place
        assert module.__loader__ is module.__spec__.loader


def test_a_function_that_names_the_package_can_be_sent_to_another_process() -> None:
    assert type(penstock) is ModuleType  # which cloudpickle, and so Ray, sends by its name


NEED_NO_TORCH = ("schedule", "config", "cli", "planning", "data.sampler")  # planning has the templates


def test_what_only_plans_starts_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {NEED_NO_TORCH}:\n"
        "    importlib.import_module(f'penstock.{name}')\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), name"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'initialise'"):
        _ = penstock.initialise


@dataclass(frozen=True)
class Import:
    """One module of the package that a file names: when it is loaded, inside a function, or for types alone."""

    module: str
    inside: bool
    types: bool


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


@cache
def trees() -> dict[Path, ast.Module]:
    """The package's files, parsed."""
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports() -> dict[str, list[Import]]:
    """What each module of the package imports of it."""
    files = {module_of(file): (file, tree) for file, tree in trees().items()}

    def found(node: ast.AST, package: str, inside: bool, types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [
                    (alias.name.removeprefix("penstock."), "") for alias in child.names if "penstock." in alias.name
                ]
            elif isinstance(child, ast.ImportFrom) and child.level:
                names = [(f"{package}.{child.module}", alias.name) for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "penstock":
                names = [((child.module or "")[len("penstock.") :], alias.name) for alias in child.names]
            else:
                names = []
            for base, name in names:
                whole = f"{base}.{name}".strip(".")
                yield Import(whole if whole in files else base, inside, types)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from found(child, package, inside or function, types or for_types)

    return {
        module: list(
            found(
                tree,
                module if file.stem == "__init__" else module.rpartition(".")[0],
                False,
                False,
            )
        )
        for module, (file, tree) in files.items()
    }


def reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    """All that one comes to from a module's imports, the packages around each included."""
    seen: set[str] = set()
    todo = [*graph[start]]
    while todo:
        if (module := todo.pop()) not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


def test_the_first_line_of_each_file_says_what_it_is_for() -> None:
    """docs/architecture.md promises it."""
    first = {path: path.read_text().partition("\n")[0] for path in PACKAGE.rglob("*.py")}
    cut = [path for path, line in first.items() if not re.fullmatch(r'""".+\.(""")?', line)]
    assert cut == []


def test_no_two_classes_share_a_name() -> None:
    files: dict[str, list[str]] = {}
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_no_package_imports_one_above_it() -> None:
    found = {
        (module.split(".")[0], one.module.split(".")[0])
        for module, all in imports().items()
        for one in all
        if module not in DOORS and one.module and not (one.inside and f"penstock.{one.module}" in NEED_OPTIONAL)
    }
    assert {("runtime", "modeling"), ("checkpoint", "data")} <= found, "imports are found"
    assert {(package, other) for package, other in found if other not in BELOW[package] | {package}} == set()
    above = set(BELOW)
    for package, below in BELOW.items():
        above.remove(package)
        assert not below & above, f"{package} comes before what it may import"


def test_imports_stand_at_the_top_of_a_file() -> None:
    """Aside from commands, which start without torch, and from what need not be installed."""
    inside = set[tuple[str, str]]()
    for file, tree in trees().items():
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        for statement in (one for function in functions for one in ast.walk(function)):
            if isinstance(statement, ast.Import):
                inside |= {(module_of(file), alias.name) for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                inside.add((module_of(file), statement.module or ""))
    inside = {(module, name) for module, name in inside if not module.startswith("cli")}
    assert ("planning.report", "matplotlib.figure") in inside, "imports are found"
    assert {one for one in inside if one[1].split(".")[0] not in OPTIONAL and one[1] not in NEED_OPTIONAL} == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    optional = {name.removeprefix("penstock.") for name in NEED_OPTIONAL}
    graph = {
        module: {one.module for one in all if not (one.inside and one.module in optional)}
        for module, all in imports().items()
    }
    circles = {module: module in reached(module, graph) for module in graph}
    assert [module for module, circular in circles.items() if circular] == []


# Private names of libraries, where there is no public way to what is needed.
OF_LIBRARIES = {
    "tables of a module, which also tell what is None, shared, or no part of a checkpoint": {
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl", "_apply",
    },
    "hooks that others have put on a module, a parameter or an optimizer": {
        "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_register_state_dict_hook", "_post_accumulate_grad_hooks", "_backward_hooks", "_optimizer_step_post_hooks",
        "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
    },
    "what a module's own code saves, and loads": {"_metadata", "_save_to_state_dict", "_load_from_state_dict"},
    "whether a tensor was written to, and which memory it has": {
        "_version", "_cdata", "_values", "_make_subclass", "_has_compatible_shallow_copy_type",
    },
    "operations of torch, and what they say of themselves": {
        "_schema", "_overloadname", "_local_scalar_dense", "_to_copy", "_safe_softmax", "_foreach_norm",
        "_foreach_mul_", "_foreach_copy_", "_C", "_pytree",
    },
    "modes under way": {
        "_get_current_dispatch_mode", "_get_current_function_mode", "_pop_mode_temporarily", "_profiler_enabled",
        "_execution_engine", "_active_collector",
    },
    "process groups: their store, their backends, their number, and how to give one up": {
        "_world", "_get_default_store", "_get_default_group", "_get_backend", "_device_types", "_rank_not_in_group",
        "_get_object_coll_device", "_abort_process_group",
    },
    "base classes": {"_NormBase", "_DropoutNd"},
    "gradients of a GradScaler": {"_unscale_grads_"},
    "Python's own, and fields of a named tuple": {"_exit", "_getframe", "_current_frames", "_fields", "_replace"},
    "models of transformers": {
        "_from_config", "_is_hf_initialized", "_keys_to_ignore_on_save", "_experts_implementation", "_sample",
        "_get_logits_processor", "_get_stopping_criteria", "_pad_token_tensor", "_eos_token_tensor",
    },
    "state and steps of the Trainer, and of TRL's": {
        "_get_lr", "_train_batch_size", "_prepare_inputs", "_created_lr_scheduler", "_n_gpu", "_tr_loss",
        "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_remove_unused_columns",
        "_get_collator_with_removed_columns", "_load_optimizer_and_scheduler", "_save_checkpoint",
        "_get_num_items_in_batch", "_total_train_tokens", "_metrics", "_precompute_ref_logps",
        "_generate_and_score_completions", "_calculate_rewards", "_compute_kl_logps", "_is_vision_dataset",
        "_is_vlm", "_pending_metrics",
    },
}  # fmt: skip


def test_no_file_uses_the_private_names_of_another() -> None:
    known = set[str]().union(*OF_LIBRARIES.values())
    used, found = set[str](), set[tuple[str, str]]()
    for file, tree in trees().items():
        own = set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
                own.add(node.attr)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
                used.add(node.attr)
                if node.attr not in known | own:
                    found.add((module_of(file), ast.unparse(node)))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                found |= {(module_of(file), alias.name) for alias in node.names if is_private(alias.name)}
    assert found == set()
    assert known <= used, "a name that nobody uses any more"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(value: ast.expr) -> bool:
    """Whether an attribute's object is `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")
