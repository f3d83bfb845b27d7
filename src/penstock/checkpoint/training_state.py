"""What a training run needs besides the model to go on: optimizer, schedulers, random generators, the step.

All of it is plain data: it is loaded without running code. Single objects may have a file of their own.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.checkpoint.file_specs import SavingReport, writers_of
from penstock.checkpoint.files import load_data, plain_content, replace_file, writing
from penstock.checkpoint.manifest import SEPARATOR, TRAINING, Manifest, whole_manifest
from penstock.checkpoint.optimizer_state import (
    OptimizerState,
    collect_optimizer,
    names_in_groups,
    parameters_by_name,
    reshardings_of,
    restore_optimizer,
    written_elsewhere,
)
from penstock.checkpoint.ranks import CheckpointRanks
from penstock.checkpoint.reader import CheckpointReader, Resharding
from penstock.checkpoint.tensors import bytes_of
from penstock.checkpoint.untrusted import (
    CheckpointError,
    CheckpointMismatch,
    Count,
    Place,
    damaged,
    describe,
    open_plain,
    refused_global,
    typed,
)
from penstock.modeling.weights.whole import tensor_parallel_place
from penstock.random_state import seed_as_new

# Of objects that may have no saved state: the float16 loss scale of a run that was in another precision.
LOSS_SCALE = "optimizer.loss_scale"
OPTIONAL = frozenset({LOSS_SCALE})


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, which decides its random numbers. `evaluations`: since the latest training step."""

    seed: Count
    steps_begun: Count
    evaluations: Count = 0


@dataclass(frozen=True)
class TrainingState:
    """The state of a run beside its model. `optimizer`: over this rank's parameters; it may also hold those of other
    stages that were emptied. `objects`, with `state_dict()` and `load_state_dict()`, and the values in `extra` are the
    same on all ranks."""

    optimizer: Optimizer | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    run: RunProgress | None = None


@dataclass(frozen=True)
class CommonState:
    """What is in the file that every rank reads whole: the fields of `TrainingState`; for each rank of the world in
    `pipelines` which batch its pipeline takes; and of the optimizer its class and what `OptimizerState` has of the
    whole model, without tensors."""

    step: Count
    extra: dict[str, Any]
    objects: dict[str, Any]
    pipelines: list[Place]  # of each rank the replica; the name is the file's
    members: list[list[str]]
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]] | None = None
    optimizer: str | None = None
    run: RunProgress | None = None


def collect_training_state(
    model: nn.Module, state: TrainingState, is_writer: bool
) -> tuple[torch.Tensor, OptimizerState]:
    """Read this rank's share: the states of its random generators, which go to the leader, and what it writes of its
    optimizer's state."""
    optimizer_state = OptimizerState() if state.optimizer is None else collect_optimizer(model, state.optimizer)
    data = bytearray(plain_data(capture_random_state(), "the state of the random generators"))
    if not is_writer:
        optimizer_state = written_elsewhere(model, optimizer_state)
    return torch.frombuffer(data, dtype=torch.uint8), optimizer_state


def random_key(rank: int) -> str:
    """The name of the states of a rank's random generators among the optimizer's tensors: no parameter has such."""
    return f"{SEPARATOR}random.{rank}"


def common_content(state: TrainingState, groups: Sequence[Mapping[str, Any]], reports: Sequence[SavingReport]) -> bytes:
    """The file that every rank reads whole, from the reports of all ranks. Raises CheckpointError if something in the
    state could only be loaded by running code."""
    members: list[list[str]] = []
    values: dict[str, dict[str, Any]] = {}
    for report in (reports[rank] for rank in writers_of(reports)):
        for number, names in enumerate(report.members):
            if number == len(members):
                members.append([])
            members[number] = list(dict.fromkeys([*members[number], *names]))
        values = {**report.values, **values}
    common = CommonState(
        step=state.step,
        extra=dict(state.extra),
        objects={name: state_of(stateful) for name, stateful in state.objects.items()},
        pipelines=[report.place.replica for report in reports],
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
) -> CommonState:
    """Load a training state into the objects of `state`, on any layout; the saved numbers are in what is returned.
    Raises CheckpointError if a file is missing, truncated or foreign, the optimizer's groups are not the saved ones, or
    something of its state cannot be sharded for another tensor-parallel size. Nothing has changed then."""
    directory = os.path.abspath(directory)
    apply, common = checked_training_state(model, directory, state, world_comm, variant)
    with undone_if_it_fails(state):
        world_comm.together(f"restoring the training state to load {directory}", apply)
    return common


def checked_training_state(
    model: nn.Module,
    directory: str,
    state: TrainingState,
    world: CheckpointRanks,
    variant: str | None = None,
    manifest: Manifest | None = None,
) -> tuple[Callable[[], None], CommonState]:
    """Check on all ranks that a training state is whole and fits. Returns what gives everything its saved state on this
    rank, and what every rank reads whole. `manifest`: the table of contents, if it is known. Raises CheckpointMismatch
    if it does not fit, CheckpointError if it is damaged. Whether its groups fit the optimizer shows only when the state
    is given back, which then raises CheckpointError."""
    loading = _Loading(model, directory, state, world, variant, manifest)
    checked = world.together(f"checking the training state to load {directory}", loading.check)
    return partial(loading.apply, [replica for replica, _ in checked], [names for _, names in checked]), loading.common


class _Loading:
    """The loading of a training state on one rank: first it is checked, then applied."""

    common: CommonState
    _reader: CheckpointReader
    # States of random generators by the rank of the saving run; the one to go on from on another layout comes first.
    _random_states: dict[int, dict[str, Any]]
    # The optimizer's tensors that this rank reads.
    _tensors: dict[str, Resharding]

    def __init__(
        self,
        model: nn.Module,
        directory: str,
        state: TrainingState,
        world: CheckpointRanks,
        variant: str | None,
        manifest: Manifest | None,
    ) -> None:
        self._model, self._directory, self._state, self._world = model, directory, state, world
        self._variant, self._manifest = variant, manifest

    def check(self) -> tuple[int, list[str]]:
        """Check what this rank needs. Returns the replica that this rank is in, and the names of the parameters in its
        optimizer. Raises as `checked_training_state`."""
        model, directory, optimizer = self._model, self._directory, self._state.optimizer
        manifest = self._manifest or whole_manifest(directory, self._variant, type(model).__name__)
        self.common = common = read_common(manifest, directory)
        self._reader = reader = CheckpointReader(directory, manifest, TRAINING, tensor_parallel_place(model))
        if missing := sorted(self._state.objects.keys() - common.objects.keys() - OPTIONAL):
            raise CheckpointMismatch(
                f"{directory} has no state for {missing}; it has {sorted(common.objects)}: load without {missing}"
            )
        saved, replica = common.pipelines, self._world.place.replica
        first = saved.index(replica) if replica in saved else 0
        needed = dict.fromkeys([first, min(self._world.rank, len(saved) - 1)])
        self._random_states = {rank: read_random_state(reader, rank) for rank in needed}
        self._tensors = {}
        if optimizer is None:
            return replica, []
        if common.groups is None:
            raise CheckpointMismatch(f"{directory} has no optimizer state: load without an optimizer")
        saved_shapes = {key: location.info.shape for key, location in reader.locations.items()}
        self._tensors = reshardings_of(model, optimizer, manifest, saved_shapes)
        reader.verify(self._tensors)
        return replica, [name for group in names_in_groups(model, optimizer) for name in group]

    def apply(self, replicas: Sequence[int], held: Sequence[Sequence[str]]) -> None:
        """Give everything its saved state. `replicas`, `held`: what `check` has returned on each rank."""
        model, common, optimizer = self._model, self.common, self._state.optimizer
        if optimizer is not None:
            saved = {name for group in common.members for name in group}
            if lost := sorted(saved.difference(*held)):
                raise CheckpointMismatch(
                    f"the optimizer lacks parameters that it had when it was saved: {lost[:5]}"
                    ". Give it these, or load without it"
                )
            tensors = ((key, self._reader.read(key, sharding)) for key, sharding in self._tensors.items())
            whole = OptimizerState(common.groups or [], common.members, common.values)
            restore_optimizer(model, optimizer, whole, tensors, common.optimizer or "another optimizer")
            for parameter in parameters_by_name(model, optimizer).values():
                parameter.grad = None  # of another run's step
        for name, stateful in self._state.objects.items():
            if name in common.objects:
                restore_object(stateful, common.objects[name], f"the state of {name!r} in {self._directory}")
        # On another layout those that take a batch go on as the first rank did that took it. A pipeline that is new
        # begins with numbers of its own, which follow from those of the first rank of all.
        alike, replica = common.pipelines == list(replicas), self._world.place.replica
        restore_random_state(self._random_states[self._world.rank if alike else next(iter(self._random_states))])
        if replica not in common.pipelines:
            seed_as_new(replica)


@contextlib.contextmanager
def undone_if_it_fails(state: TrainingState) -> Iterator[None]:
    """Around `apply` and what follows it: if an error is raised, the training state is put back as it was. Weights,
    which are copied last, are not."""
    random_states, optimizers = capture_random_state(), [] if state.optimizer is None else [state.optimizer]
    # `load_state_dict` gives an optimizer new tensors, so the old ones need no copies.
    before: list[tuple[Any, Any]] = [(optimizer, optimizer.state_dict()) for optimizer in optimizers]
    before += [(value, copy.deepcopy(value.state_dict())) for value in state.objects.values()]
    gradients = [
        (parameter, parameter.grad)
        for each in optimizers
        for group in each.param_groups
        for parameter in group["params"]
    ]
    try:
        yield
    except BaseException:
        for value, content in before:
            with contextlib.suppress(Exception):  # it cannot even take its own state
                value.load_state_dict(content)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        restore_random_state(random_states)
        raise


def read_common(manifest: Manifest, directory: str) -> CommonState:
    """The content of the file that every rank reads whole. Raises CheckpointError unless it is what a save writes."""
    for name, entry in manifest.files.items():
        if entry.part != TRAINING or entry.checksum is None:
            continue
        path = manifest.path_of(directory, name)
        with open_plain(path) as file:
            if zlib.crc32(file.read()) != entry.checksum:
                raise CheckpointError(f"{path} is not the file that was saved")
        common: CommonState = typed(CommonState, load_data(path), path)
        if common.groups and len(common.members) > len(common.groups):
            expected = f"one list for each of the {len(common.groups)} parameter groups"
            raise damaged(path, ["members"], common.members, expected)
        if not common.pipelines:
            raise damaged(path, ["pipelines"], [], "the pipeline of each rank")
        return common
    raise CheckpointMismatch(
        f"{directory} has no training state: load its weights alone, with model.from_parallelized()"
    )


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
    fields = vars(typed(_RandomStates, plain_content(data, path), path))
    states = {name: state for name, state in fields.items() if name != "cuda" or state is not None}
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
        reason = describe(error) if name is None else f"a {name}"
        raise CheckpointError(f"{what} has something that is no plain data: {reason}") from None
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
        with writing(path, "plain data", len(data)):
            os.makedirs(folder, exist_ok=True)
            replace_file(path, data, os.path.join(folder, f".{name}.saving"))

    world_comm.together(f"writing the file to save {path}", write, f"what was in {path} before is intact")


def load_object(path: str | os.PathLike[str], *, world_comm: CheckpointRanks) -> Any:
    """What `save_object` wrote. No code in the file is run. Raises CheckpointError if some rank cannot read it."""
    path = os.path.abspath(path)
    contents: list[Any] = []

    def read() -> None:
        try:
            contents.append(load_data(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None

    world_comm.together(f"reading the file to load {path}", read)
    return contents[0]


_BIT_GENERATOR = "MT19937"  # numpy's global one, always


def capture_random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators (of the CPU, and of the current GPU once it is in use).
    Returns plain data and tensors, which can be loaded from a file without running code."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `capture_random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(_numpy_state(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def check_random_state(name: str, state: Any) -> None:
    """Raise ValueError if `state` cannot be the entry `name` of what `capture_random_state` returned."""
    try:
        if name == "python":
            random.Random().setstate(state)
        elif name == "numpy":
            np.random.RandomState().set_state(_numpy_state(state))
        else:
            if not (isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1):
                raise TypeError("no bytes")
            if name == "torch":
                torch.Generator().set_state(state)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"this is no state of {name}'s random generator") from error


def _numpy_state(saved: Any) -> tuple[str, np.ndarray, int, int, float]:
    keys, position, has_gauss, cached = saved
    return _BIT_GENERATOR, keys.numpy().astype(np.uint32), position, has_gauss, cached
