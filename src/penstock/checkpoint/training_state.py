"""What a training run needs besides the model to go on: optimizer, schedulers, random generators, the step.

All of it is plain data: it is loaded without running code.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.random_state import capture_random_state, check_random_state, restore_random_state

from .comm import Comm, together
from .files import flush_file, load_data, write_bytes, writing
from .load import check_class
from .manifest import TRAINING, Manifest, read_manifest
from .names import check_variant
from .optimizer_state import collect_optimizer, reshardings_of, restore_optimizer
from .reader import Resharding, ShardReader
from .tensors import tensor_parallel_place
from .untrusted import CheckpointError, Field, describe, is_regular, open_plain, refused_global


@dataclass(frozen=True)
class TrainingState:
    """The state of a run beside its model.

    Attributes:
        optimizer: over this rank's parameters; it may also hold those of other stages that were emptied.
        objects: anything else with `state_dict()` and `load_state_dict()` that is the same on all ranks: learning-rate
            schedulers, a GradScaler, a data loader.
        step: how many steps were done.
        extra: values of your own, of simple types or tensors, the same on all ranks.
    """

    optimizer: Optimizer | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTrainingState:
    """One rank's share: `report` is small and goes to the rank that writes the common file, `tensors` stay here."""

    report: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def collect_training_state(model: nn.Module, state: TrainingState) -> RankTrainingState:
    """Read this rank's share. See `optimizer_state.collect_optimizer` for what is refused."""
    report: dict[str, Any] = {"random": capture_random_state()}
    if state.optimizer is None:
        return RankTrainingState(report, {})
    collected = collect_optimizer(model, state.optimizer)
    report |= {"groups": collected.groups, "members": collected.members, "values": collected.values}
    return RankTrainingState(report, collected.tensors)


def common_content(
    state: TrainingState, reports: Sequence[Mapping[str, Any]], pipeline: Sequence[Mapping[str, Any]]
) -> bytes:
    """The file that every rank reads whole when it loads.

    Args:
        reports: of all ranks of the world, in order.
        pipeline: of the ranks of the pipeline that writes, in order.

    Raises:
        CheckpointError: something in the state could only be loaded by running code.
    """
    members: list[list[str]] = []
    values: dict[str, dict[str, Any]] = {}
    for report in pipeline:
        for number, names in enumerate(report.get("members", [])):
            if number == len(members):
                members.append([])
            members[number] = list(dict.fromkeys([*members[number], *names]))
        values = {**report.get("values", {}), **values}
    content = {
        "step": state.step,
        "extra": dict(state.extra),
        "objects": {name: stateful.state_dict() for name, stateful in state.objects.items()},
        "random": [report["random"] for report in reports],
        "groups": pipeline[0].get("groups"),
        "members": members,
        "values": values,
    }
    return _plain_data(content, "the training state")


def _plain_data(content: Any, what: str) -> bytes:
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


def load_training_state(
    model: nn.Module,
    directory: str | os.PathLike[str],
    state: TrainingState,
    *,
    world_comm: Comm,
    variant: str | None = None,
) -> TrainingState:
    """Load the training state that `save_parallelized(..., training_state=...)` saved, into the objects of `state`.

    The number of stages and the tensor-parallel size may differ. Each rank's random generators continue where they were
    if the number of ranks is that of the saving run; otherwise all continue as the first rank's.

    Returns:
        `state` with the saved `step` and `extra`.

    Raises:
        CheckpointError: a file is missing, truncated or foreign, the optimizer's groups are not the saved ones, or
            something of its state cannot be sharded for another tensor-parallel size.
    """
    directory = os.path.abspath(directory)
    readers: list[ShardReader] = []
    contents: list[dict[str, Any]] = []
    mine: dict[str, Resharding] = {}

    def check() -> list[str]:
        check_variant(variant)
        manifest = read_manifest(directory, variant)
        check_class(manifest, directory, type(model).__name__)
        manifest.check_files(directory)
        contents.append(_read_common(manifest, directory))
        if missing := sorted(state.objects.keys() - contents[0]["objects"].keys()):
            raise CheckpointError(f"{directory} has no state for {missing}; it has {sorted(contents[0]['objects'])}")
        if state.optimizer is None:
            return []
        if contents[0]["groups"] is None:
            raise CheckpointError(f"{directory} has no optimizer state")
        readers.append(ShardReader(directory, manifest, TRAINING, tensor_parallel_place(model)))
        first = readers[0].readers[0]
        saved_shapes = {key: location.info.shape for key, location in first.locations.items()}
        mine.update(reshardings_of(model, state.optimizer, manifest, saved_shapes))
        readers[0].verify(mine)
        return [name for group in collect_optimizer(model, state.optimizer).members for name in group]

    def apply() -> None:
        content = contents[0]
        if state.optimizer is not None:
            saved = {name for group in content["members"] for name in group}
            if lost := sorted(saved - {name for names in held for name in names}):
                raise CheckpointError(f"the optimizer lacks parameters that it had when it was saved: {lost[:5]}")
            tensors = ((key, readers[0].read(key, sharding)) for key, sharding in mine.items())
            groups = (content["groups"], content["members"], content["values"])
            restore_optimizer(model, state.optimizer, *groups, tensors)
        for name, stateful in state.objects.items():
            restore_object(stateful, content["objects"][name], f"the state of {name!r} in {directory}")
        generators = content["random"]
        restore_random_state(generators[world_comm.rank if len(generators) == world_comm.size else 0])

    doing = f"load {directory}"
    try:
        held = together(world_comm, doing, "checking the training state", check)
        before = _Snapshot(state)
        try:
            together(world_comm, doing, "restoring the training state", apply)
        except BaseException:
            before.put_back()
            raise
    finally:
        for reader in readers:
            reader.close()
    return TrainingState(state.optimizer, state.objects, contents[0]["step"], contents[0]["extra"])


class _Snapshot:
    """What loading changes, as it was: kept by reference where loading makes something new."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        # `load_state_dict` gives an optimizer new tensors, so the old ones need no copies.
        self._optimizer = None if state.optimizer is None else state.optimizer.state_dict()
        self._objects = {name: copy.deepcopy(stateful.state_dict()) for name, stateful in state.objects.items()}
        self._random = capture_random_state()

    def put_back(self) -> None:
        if self._state.optimizer is not None and self._optimizer is not None:
            self._state.optimizer.load_state_dict(self._optimizer)
        for name, stateful in self._state.objects.items():
            with contextlib.suppress(Exception):  # it cannot even take its own state
                stateful.load_state_dict(self._objects[name])
        restore_random_state(self._random)


def restore_object(stateful: Any, content: Any, what: str) -> None:
    """Give an object the state that was saved for it.

    A learning-rate scheduler takes whatever names it is given as its attributes, its own methods' names too.

    Raises:
        CheckpointError: that would happen, or the object does not take it.
    """
    if isinstance(stateful, LRScheduler):
        fields = dict(Field(content, what).items())
        if hidden := sorted(name for name in fields if callable(getattr(type(stateful), name, None))):
            raise CheckpointError(f"{what} is damaged: it would replace {', '.join(hidden[:5])} of the scheduler")
    try:
        stateful.load_state_dict(content)
    except Exception as error:
        raise CheckpointError(f"{what} does not fit: {describe(error)}") from error


def _read_common(manifest: Manifest, directory: str) -> dict[str, Any]:
    """The content of the file that every rank reads whole.

    Raises:
        CheckpointError: it is not the file that was saved, or something in it is not what a save writes.
    """
    for name, entry in manifest.files.items():
        if entry.part != TRAINING or entry.checksum is None:
            continue
        path = manifest.path_of(directory, name)
        with open_plain(path) as file:
            if zlib.crc32(file.read()) != entry.checksum:
                raise CheckpointError(f"{path} is not the file that was saved")
        content = Field(load_data(path), path)
        content["step"].integer(0, 2**63 - 1)
        for part in ("extra", "objects", "values"):
            for _, value in content[part].items():
                if part == "values":
                    dict(value.items())
        for group in content["groups"].elements() if content.get("groups") else ():
            dict(group.items())
        members = [[name.text() for name in group.elements()] for group in content["members"].elements()]
        if content.get("groups") and len(members) > len(content.value["groups"]):
            content["members"].refuse(f"one list for each of the {len(content.value['groups'])} parameter groups")
        generators = list(content["random"].elements())
        if not generators:
            content["random"].refuse("the states of random generators of at least one rank")
        for states in generators:
            for name in ("python", "numpy", "torch", *(["cuda"] if states.get("cuda") else [])):
                try:
                    check_random_state(name, states[name].value)
                except ValueError:
                    states[name].refuse(f"the state of {name}'s random generator")
        found: dict[str, Any] = content.value
        return found
    raise CheckpointError(f"{directory} has no training state")


# ---------------------------------------------------------------- an object in a file of its own


def save_object(content: Any, path: str | os.PathLike[str], *, world_comm: Comm) -> None:
    """Write plain data to a file, from the first rank. A kill at any moment leaves the previous file whole.

    Raises:
        CheckpointError: it cannot be written, or is no plain data that can be loaded without running code.
    """
    path = os.path.abspath(path)

    def write() -> None:
        if world_comm.rank:
            return
        data = _plain_data(content, "it")
        folder, name = os.path.split(path)
        with writing(path, "plain data", len(data)):
            os.makedirs(folder, exist_ok=True)
            # Nobody can have put a link to another file under this name.
            draft = os.path.join(folder, f".{name}.saving-{uuid.uuid4().hex}")
            try:
                write_bytes(draft, data)
                os.replace(draft, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(draft)
                raise
            flush_file(folder)
        _remove_drafts(folder, name)

    together(world_comm, f"save {path}", "writing the file", write, unchanged=f"what was in {path} before is intact")


def load_object(path: str | os.PathLike[str], *, world_comm: Comm) -> Any:
    """What `save_object` wrote. No code in the file is run. Raises CheckpointError if some rank cannot read it."""
    path = os.path.abspath(path)
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(load_data(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None

    together(world_comm, f"load {path}", "reading the file", read)
    return found[0]


def _remove_drafts(folder: str, name: str) -> None:
    """Tidy up behind killed saves."""
    pattern = re.compile(re.escape(f".{name}.saving-") + r"[0-9a-f]{32}")
    for draft in os.listdir(folder):
        if pattern.fullmatch(draft) and is_regular(os.path.join(folder, draft)):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, draft))
