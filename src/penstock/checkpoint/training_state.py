"""What a training run needs besides the model to go on: optimizer, schedulers, random generators, the step.

All of it is plain data: it is loaded without running code. Single objects may have a file of their own.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.modeling.weights.whole import tensor_parallel_place

from .files import flush_file, load_data, plain_content, write_bytes, writing
from .manifest import SEPARATOR, TRAINING, Manifest, whole_manifest
from .optimizer_state import (
    OptimizerState,
    collect_optimizer,
    parameters_by_name,
    reshardings_of,
    restore_optimizer,
    written_elsewhere,
)
from .plan import CheckpointRanks, TrainingReport
from .random_states import capture_random_state, check_random_state, restore_random_state
from .reader import CheckpointReader, Resharding
from .tensors import bytes_of
from .untrusted import CheckpointError, Count, Place, damaged, describe, open_plain, refused_global, typed

# Of objects that may have no saved state: the float16 loss scale of a run that was in another precision.
LOSS_SCALE = "optimizer.loss_scale"
OPTIONAL = frozenset({LOSS_SCALE})


@dataclass(frozen=True)
class Run:
    """What decides a run's dropout."""

    seed: Count
    steps_begun: Count


@dataclass(frozen=True)
class TrainingState:
    """The state of a run beside its model. `optimizer`: over this rank's parameters; it may also hold those of other
    stages that were emptied. `objects`, with `state_dict()` and `load_state_dict()`, and the values in `extra` are the
    same on all ranks."""

    optimizer: Optimizer | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    run: Run | None = None


@dataclass(frozen=True)
class Common:
    """What is in the file that every rank reads whole: the fields of `TrainingState`, the pipeline of each rank of the
    world, and of the optimizer its class and what `OptimizerState` has of the whole model."""

    step: Count
    extra: dict[str, Any]
    objects: dict[str, Any]
    pipelines: list[Place]
    members: list[list[str]]
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]] | None = None
    optimizer: str | None = None
    run: Run | None = None


def collect_training_state(
    model: nn.Module, state: TrainingState, pipeline: int, is_writer: bool
) -> tuple[TrainingReport, torch.Tensor, OptimizerState]:
    """Read the share of a rank of this pipeline: what the others are told, the states of its random generators, which
    go to the rank that leads, and what its optimizer holds."""
    found = OptimizerState() if state.optimizer is None else collect_optimizer(model, state.optimizer)
    found = found if is_writer else written_elsewhere(model, found)
    data = bytearray(plain_data(capture_random_state(), "the state of the random generators"))
    report = TrainingReport(pipeline, len(data), found.members, found.values)
    return report, torch.frombuffer(data, dtype=torch.uint8), found


def random_key(rank: int) -> str:
    """The name of a rank's random generators' states among those of the optimizer, which is no parameter's."""
    return f"{SEPARATOR}random.{rank}"


def common_content(
    state: TrainingState,
    groups: Sequence[Mapping[str, Any]],
    reports: Sequence[TrainingReport],
    pipeline: Sequence[TrainingReport],
) -> bytes:
    """The file that every rank reads whole, from the reports of all ranks, and of those that write. Raises
    CheckpointError if something in the state could only be loaded by running code."""
    members: list[list[str]] = []
    values: dict[str, dict[str, Any]] = {}
    for report in pipeline:
        for number, names in enumerate(report.members):
            if number == len(members):
                members.append([])
            members[number] = list(dict.fromkeys([*members[number], *names]))
        values = {**report.values, **values}
    common = Common(
        step=state.step,
        extra=dict(state.extra),
        objects={name: state_of(stateful) for name, stateful in state.objects.items()},
        pipelines=[report.pipeline for report in reports],
        members=members,
        values=values,
        groups=None if state.optimizer is None else [dict(group) for group in groups],
        optimizer=None if state.optimizer is None else type(state.optimizer).__name__,
        run=state.run,
    )
    return plain_data(vars(common) | {"run": state.run and vars(state.run)}, "the training state")


def load_training_state(
    model: nn.Module,
    directory: str | os.PathLike[str],
    state: TrainingState,
    *,
    world_comm: CheckpointRanks,
    variant: str | None = None,
    pipeline: int = 0,
) -> TrainingState:
    """Load a training state into the objects of `state`, which is returned with the saved numbers, on any layout.
    Raises CheckpointError if a file is missing, truncated or foreign, the optimizer's groups are not the saved ones, or
    something of its state cannot be sharded for another tensor-parallel size. Nothing has changed then."""
    directory = os.path.abspath(directory)
    load = TrainingStateLoad(model, directory, state, world_comm, pipeline, variant)
    with undone_if_it_fails(state):
        world_comm.together(f"restoring the training state to load {directory}", load.apply)
    return load.result()


class TrainingStateLoad:
    """What `load_training_state` does on one rank, which checks with all others that the state is whole and fits, or
    raises CheckpointError. Nothing has changed before `apply`."""

    def __init__(
        self,
        model: nn.Module,
        directory: str,
        state: TrainingState,
        world: CheckpointRanks,
        pipeline: int = 0,
        variant: str | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self._model, self._directory, self._state = model, directory, state
        self._world, self._pipeline, self._variant, self._manifest = world, pipeline, variant, manifest
        self._random: dict[int, dict[str, Any]] = {}
        self._mine: dict[str, Resharding] = {}
        # Of each rank its pipeline, and the parameters in its optimizer.
        self._held = world.together(f"checking the training state to load {directory}", self._check)

    def _check(self) -> tuple[int, list[str]]:
        model, directory, state = self._model, self._directory, self._state
        manifest = self._manifest or whole_manifest(directory, self._variant, type(model).__name__)
        self._common = common = read_common(manifest, directory)
        if missing := sorted(state.objects.keys() - common.objects.keys() - OPTIONAL):
            raise CheckpointError(f"{directory} has no state for {missing}; it has {sorted(common.objects)}")
        self._reader = CheckpointReader(directory, manifest, TRAINING, tensor_parallel_place(model))
        saved = common.pipelines
        first = saved.index(self._pipeline) if self._pipeline in saved else 0
        for rank in dict.fromkeys([first, min(self._world.rank, len(saved) - 1)]):
            self._random[rank] = read_random_state(self._reader, rank)
        if state.optimizer is None:
            return self._pipeline, []
        if common.groups is None:
            raise CheckpointError(f"{directory} has no optimizer state")
        saved_shapes = {key: location.info.shape for key, location in self._reader.locations.items()}
        self._mine = reshardings_of(model, state.optimizer, manifest, saved_shapes)
        self._reader.verify(self._mine)
        members = collect_optimizer(model, state.optimizer).members  # which refuses parameters that are not the model's
        return self._pipeline, [name for group in members for name in group]

    def apply(self) -> None:
        """Give everything its saved state."""
        common, state = self._common, self._state
        if state.optimizer is not None:
            saved = {name for group in common.members for name in group}
            if lost := sorted(saved - {name for _, names in self._held for name in names}):
                raise CheckpointError(f"the optimizer lacks parameters that it had when it was saved: {lost[:5]}")
            tensors = ((key, self._reader.read(key, sharding)) for key, sharding in self._mine.items())
            groups = (common.groups or [], common.members, common.values)
            kind = common.optimizer or "another optimizer"
            restore_optimizer(self._model, state.optimizer, *groups, tensors, kind)
            for parameter in parameters_by_name(self._model, state.optimizer).values():
                parameter.grad = None  # of another run's step
        for name, stateful in state.objects.items():
            if name in common.objects:
                restore_object(stateful, common.objects[name], f"the state of {name!r} in {self._directory}")
        # On another layout those of a pipeline go on as its first rank's, or the first of all if there was none such.
        alike = common.pipelines == [pipeline for pipeline, _ in self._held]
        first = next(iter(self._random))
        restore_random_state(self._random[self._world.rank if alike else first])

    def result(self) -> TrainingState:
        """The state with the saved numbers."""
        return replace(self._state, step=self._common.step, extra=self._common.extra, run=self._common.run)


@contextlib.contextmanager
def undone_if_it_fails(state: TrainingState) -> Iterator[None]:
    """Around `apply`, here and elsewhere: everything is put back as it was."""
    random, optimizers = capture_random_state(), [] if state.optimizer is None else [state.optimizer]
    # `load_state_dict` gives an optimizer new tensors, so the old ones need no copies.
    before: list[tuple[Any, Any]] = [(one, one.state_dict()) for one in optimizers]
    before += [(one, copy.deepcopy(one.state_dict())) for one in state.objects.values()]
    gradients = [(one, one.grad) for each in optimizers for group in each.param_groups for one in group["params"]]
    try:
        yield
    except BaseException:
        for one, content in before:
            with contextlib.suppress(Exception):  # it cannot even take its own state
                one.load_state_dict(content)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore_random_state(random)
        raise


def read_common(manifest: Manifest, directory: str) -> Common:
    """The content of the file that every rank reads whole. Raises CheckpointError unless it is what a save writes."""
    for name, entry in manifest.files.items():
        if entry.part != TRAINING or entry.checksum is None:
            continue
        path = manifest.path_of(directory, name)
        with open_plain(path) as file:
            if zlib.crc32(file.read()) != entry.checksum:
                raise CheckpointError(f"{path} is not the file that was saved")
        common: Common = typed(Common, load_data(path), path)
        if common.groups and len(common.members) > len(common.groups):
            expected = f"one list for each of the {len(common.groups)} parameter groups"
            raise damaged(path, ["members"], common.members, expected)
        if not common.pipelines:
            raise damaged(path, ["pipelines"], [], "the pipeline of each rank")
        return common
    raise CheckpointError(f"{directory} has no training state")


@dataclass(frozen=True)
class _RandomStates:
    """What `capture_random_state` returns."""

    python: Any
    numpy: Any
    torch: Any
    cuda: Any = None


def read_random_state(reader: CheckpointReader, rank: int) -> dict[str, Any]:
    """The states of the random generators of a rank of the saving run. Raises CheckpointError if they are none."""
    key = random_key(rank)
    if (location := reader.locations.get(key)) is None:
        raise CheckpointError(f"the checkpoint's table of contents is damaged: it has no {key}")
    path = f"{reader.path_of(location)}, {key}"
    reader.verify({key: Resharding()})
    data = io.BytesIO(bytes_of(reader.read(key, Resharding())))
    found = vars(typed(_RandomStates, plain_content(data, path), path))
    states = {name: state for name, state in found.items() if name != "cuda" or state is not None}
    for name, state in states.items():
        try:
            check_random_state(name, state)
        except ValueError:
            expected = f"the state of {name}'s random generator of rank {rank}"
            raise damaged(path, [name], state, expected) from None
    return states


# -- single objects ----------------------------------------------------------------------------------------------------

# Under which key the name of a scheduler's class stands beside its state.
_CLASS = "scheduler_class"


def plain_data(content: Any, what: str) -> bytes:
    """The content of a file that can be loaded without running code; raises CheckpointError if there is none."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        name = refused_global(error)
        found = describe(error) if name is None else f"a {name}"
        raise CheckpointError(f"{what} has something that is no plain data: {found}") from None
    return buffer.getvalue()


def state_of(stateful: Any) -> Any:
    """The state of an object; of a learning-rate scheduler with the name of its class."""
    state = stateful.state_dict()
    return {**state, _CLASS: _class_of(stateful)} if isinstance(stateful, LRScheduler) else state


def _class_of(scheduler: LRScheduler) -> str:
    """The name of its class, and of those that it consists of."""
    parts = ", ".join(map(_class_of, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({parts})" if parts else type(scheduler).__name__


def restore_object(stateful: Any, content: Any, what: str) -> None:
    """Give an object the state that was saved for it, or raise CheckpointError. A learning-rate scheduler takes
    whatever names it is given as its attributes: its own methods' names too, and those of another class. That is
    refused."""
    if isinstance(stateful, LRScheduler):
        content = typed(dict[str, Any], content, what)
        if _CLASS in content:
            saved, here = typed(str, content.pop(_CLASS), what, _CLASS), _class_of(stateful)
            if saved != here:
                raise CheckpointError(f"{what} is that of a {saved}, but is loaded into a {here}: make a {saved}")
        if hidden := sorted(name for name in content if callable(getattr(type(stateful), name, None))):
            raise CheckpointError(f"{what} is damaged: it would replace {', '.join(hidden[:5])} of the scheduler")
    try:
        stateful.load_state_dict(content)
    except Exception as error:
        raise CheckpointError(f"{what} does not fit: {describe(error)}") from error


def save_object(content: Any, path: str | os.PathLike[str], *, world_comm: CheckpointRanks) -> None:
    """Write plain data to a file, from the first rank. A kill at any moment leaves the previous file whole."""
    path = os.path.abspath(path)

    def write() -> None:
        if world_comm.rank:
            return
        data = plain_data(content, "it")
        folder, name = os.path.split(path)
        draft = os.path.join(folder, f".{name}.saving")
        with writing(path, "plain data", len(data)):
            os.makedirs(folder, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.remove(draft)  # of a save that was killed
            try:
                write_bytes(draft, data)
                flush_file(draft)
                os.replace(draft, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(draft)
                raise
            flush_file(folder)

    world_comm.together(f"writing the file to save {path}", write, f"what was in {path} before is intact")


def load_object(path: str | os.PathLike[str], *, world_comm: CheckpointRanks) -> Any:
    """What `save_object` wrote. No code in the file is run. Raises CheckpointError if some rank cannot read it."""
    path = os.path.abspath(path)
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(load_data(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None

    world_comm.together(f"reading the file to load {path}", read)
    return found[0]
