"""Made-up and damaged folders: each is loaded right or refused; nothing outside it is touched, nothing in it is run.

`PENSTOCK_FUZZ=50 pytest tests/checkpoint/test_fuzz.py` tries fifty times as many.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import penstock
from penstock.checkpoint.contents import inspect_folder, merge_checkpoint
from penstock.checkpoint.load import from_parallelized, load_ordinary
from penstock.checkpoint.ranks import CheckpointRanks
from penstock.checkpoint.training_state import TrainingState, load_object, load_training_state
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.audit import only_within
from tests.support.checkpoint_ranks import give_state, gpt2, save_alone, split_copies, stages_of

pytestmark = pytest.mark.slow

SCALE = int(os.environ.get("PENSTOCK_FUZZ", "1"))
STAGING = ".saving-" + "0" * 32
USERS = {"train.py": "mine", ".bashrc": "mine", "notes.txt": "mine", "data.bin": "mine"}


def fuzz(examples: int) -> settings:
    unchecked = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples * SCALE, suppress_health_check=unchecked)


def training(model: torch.nn.Module) -> dict[str, Any]:
    """An optimizer and a scheduler, as arguments of a save or a load."""
    optimizer = torch.optim.AdamW(model.parameters())
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


class World:
    """A folder with every kind of checkpoint, its neighbours that must not change, and a model that is loaded into."""

    def __init__(self, root: Path) -> None:
        self.root, self.whole, self.outside = root, root / "whole", root / "outside"
        self.reference = gpt2(1, n_layer=1)
        (self.model,) = split_copies(gpt2(9, n_layer=1), 1)
        self.before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        (reference,) = split_copies(self.reference, 1)
        for safe in (False, True):
            save_alone(reference, self.whole / f"parallel-{safe}", safe_serialization=safe)
            options = {"merge_checkpoints": True, "max_shard_size": "20KB"}
            save_alone(reference, self.whole / f"merged-{safe}", safe_serialization=safe, **options)
        state = training(self.model)
        give_state(self.model, state["optimizer"], 1)
        self.reset()
        objects = {"scheduler": state["lr_scheduler"]}
        save_alone(
            self.model, self.whole / "training", training_state=TrainingState(state["optimizer"], objects, step=3)
        )
        torch.save({"last_epoch": 3, "lrs": [0.5]}, self.whole / "object.bin")
        state = training(reference)
        give_state(reference, state["optimizer"], 1)
        reference.load_state_dict(self.reference.state_dict())
        for number in (1, 2):
            penstock.save_checkpoint(self.whole / "run", model=reference, **state, step=number)
        self.values = {self._sum(tensor) for tensor in self.reference.state_dict().values()}
        self.outside.mkdir()
        (self.outside / "victim").write_text("precious")
        shutil.copy(self.whole / "parallel-False" / "pytorch_model_tp_0_pp_0.bin", self.outside)
        self.number = 0

    def reset(self) -> None:
        """Undo what was loaded or trained."""
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(self.before[name])

    @staticmethod
    def _sum(tensor: torch.Tensor) -> int:
        return zlib.crc32(tensor.detach().contiguous().numpy().tobytes())

    def copy(self, name: str) -> Path:
        """A fresh copy of one of the folders, with files of the user."""
        self.number += 1
        folder = self.root / f"case-{self.number}"
        shutil.copytree(self.whole / name, folder, symlinks=True)
        for user, text in USERS.items():
            (folder / user).write_text(text)
        return folder

    def attempt(self, folder: Path, load: Callable[[], Any], same_values: bool = True) -> None:
        """Load: either the values that were saved are there now, or nothing has changed and it was said why.

        Args:
            same_values: whether what was changed can be told from what was saved. A table of contents that somebody
                wrote may say what it likes about which tensor is which.
        """
        try:
            with only_within(folder):
                load()
        except CheckpointError as error:
            assert str(folder) in str(error) or "damaged" in str(error)
            for name, tensor in self.model.state_dict().items():
                assert torch.equal(tensor, self.before[name])
        else:
            if same_values:
                assert {self._sum(tensor) for tensor in self.model.state_dict().values()} <= self.values
            self.reset()
        for user, text in USERS.items():
            assert (folder / user).read_text() == text
        assert (self.outside / "victim").read_text() == "precious"
        assert sorted(os.listdir(self.outside)) == ["pytorch_model_tp_0_pp_0.bin", "victim"]
        shutil.rmtree(folder)

    def load(self, folder: Path) -> None:
        """A parallel checkpoint, or a merged one."""
        if "parallel_checkpoint.json" in os.listdir(folder):
            from_parallelized(self.model, folder, world_comm=CheckpointRanks())
            return
        stages = stages_of(self.reference, 1)
        load_ordinary(self.model, folder, type(self.model), stages, [0], world_comm=CheckpointRanks())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("fuzz"))


NAMES = st.sampled_from(
    [
        *("", ".", "..", "/", "/etc/passwd", "../outside/victim", "../outside/pytorch_model_tp_0_pp_0.bin", "train.py"),
        *(".bashrc", "config.json", "pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_1_pp_0.bin", "MODEL.BIN"),
        *("pytorch_model.bin", "model.safetensors", "model-00001-of-00004.safetensors", "data.bin", "manifest.staged"),
        *("parallel_checkpoint.json", "index.staged", "journal.json", STAGING, f"{STAGING}/../train.py", "a\0b"),
        *("x" * 300, "~/.bashrc", "file:///etc/passwd", "con\\..\\x", "link", "pipe", "a\nb", "\ud800"),
    ]
)  # fmt: skip
ABSURD = st.one_of(
    NAMES,
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 10**9, 2**31, 2**63 - 1, 2**63, 10**30, -(10**18)]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(NAMES, st.integers(-3, 10**12)), max_size=4),
    st.dictionaries(NAMES, st.one_of(NAMES, st.integers()), max_size=3),
    st.integers(1, 5).map(lambda depth: [[[]]] * depth),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a tree."""
    yield at
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*at, key))


def mutated(draw: Callable[[Any], Any], content: Any, most: int = 3) -> Any:
    """A copy of a tree in which a few values are replaced, removed, doubled, or known by another name."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, most))):
        # Shallow places as often as the many deep ones.
        every = list(places(content))
        depth = draw(st.sampled_from(sorted({len(place) for place in every})))
        place = draw(st.sampled_from([place for place in every if len(place) == depth]))
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename", "add"]))
        if not place:
            if change == "replace" and draw(st.integers(0, 9)) == 0:
                return draw(ABSURD)
            continue
        *way, key = place
        owner = content
        for step in way:
            owner = owner[step]
        if change == "replace":
            owner[key] = draw(ABSURD)
        elif change == "remove":
            del owner[key]
        elif change == "rename" and isinstance(owner, dict):
            owner[draw(NAMES)] = owner.pop(key)
        elif change == "add" and isinstance(owner, list):
            owner.append(draw(ABSURD))
        elif change == "add":
            owner[draw(NAMES)] = draw(ABSURD)
    return content


def spoiled(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """Bytes of which some are changed, cut off, doubled or added."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        change = draw(st.sampled_from(["flip", "cut", "insert", "zeros", "double"]))
        if change == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
        elif change == "cut":
            content = content[:at]
        elif change == "insert":
            content = content[:at] + draw(st.binary(min_size=1, max_size=9)) + content[at:]
        elif change == "zeros":
            content = content[:at] + bytes(min(16, len(content) - at)) + content[at + 16 :]
        else:
            content = content[:at] + content[:at][-50:] + content[at:]
    return content


def add_specials(folder: Path) -> None:
    """What names may lead to: a link out of the folder, and a pipe."""
    (folder / "link").symlink_to(folder.parent / "outside")
    os.mkfifo(folder / "pipe")


def dump(content: Any) -> bytes:
    return json.dumps(content).encode()


def say_sizes(folder: Path, *paths: Path) -> None:
    """Let the table of contents, where there is one, agree with the sizes of files, and the checksums that it has."""
    table = folder / "parallel_checkpoint.json"
    if table.exists():
        content = json.loads(table.read_text())
        for path in paths:
            entry = content["files"][path.name]
            entry["size"] = path.stat().st_size
            if entry["checksum"] is not None:
                entry["checksum"] = zlib.crc32(path.read_bytes())
        table.write_bytes(dump(content))


@fuzz(90)
@given(data=st.data(), kind=st.sampled_from(["parallel", "merged"]), safe=st.booleans())
def test_tables_of_contents_and_indices(world: World, data: st.DataObject, kind: str, safe: bool) -> None:
    folder = world.copy(f"{kind}-{safe}")
    add_specials(folder)
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    path = folder / ("parallel_checkpoint.json" if kind == "parallel" else index)
    if data.draw(st.integers(0, 3)):
        path.write_bytes(dump(mutated(data.draw, json.loads(path.read_text()))))
    else:
        path.write_bytes(spoiled(data.draw, path.read_bytes()))
    world.attempt(folder, lambda: world.load(folder), same_values=kind == "merged")


STAGED = st.lists(
    st.sampled_from(
        [
            *("train.py", "payload", "config.json", ".bashrc", "manifest.staged", "index.staged", "journal.json"),
            *("pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_5.bin", "model-00001-of-00004.safetensors"),
        ]
    ),
    unique=True,
)


@fuzz(30)
@given(data=st.data(), kind=st.sampled_from(["parallel-False", "merged-True"]))
def test_staging_folders(world: World, data: st.DataObject, kind: str) -> None:
    """The save that finds one succeeds or says why not; the user's files and those elsewhere stay."""
    folder = world.copy(kind)
    add_specials(folder)
    (folder / STAGING).mkdir()
    for name in data.draw(STAGED):
        if data.draw(st.integers(0, 4)):
            (folder / STAGING / name).write_text("foreign")
        else:
            (folder / STAGING / name).symlink_to(folder.parent / "outside" / "victim")
    table = folder / ("parallel_checkpoint.json" if kind.startswith("parallel") else "model.safetensors.index.json")
    content = json.loads(table.read_text())
    if kind.startswith("parallel"):
        content["staging"] = STAGING
    else:
        content["weight_map"] = {name: f"{STAGING}/{shard}" for name, shard in content["weight_map"].items()}
    table.write_bytes(dump(mutated(data.draw, content) if data.draw(st.booleans()) else content))
    merge = data.draw(st.booleans())
    world.attempt(folder, lambda: save_alone(world.model, folder, merge_checkpoints=merge), same_values=False)


def with_header(content: bytes, change: Callable[[Any], Any]) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack("<Q", content[:8])
    header = dump(change(json.loads(content[8 : 8 + length])))
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


@fuzz(60)
@given(data=st.data(), kind=st.sampled_from(["parallel", "merged"]), safe=st.booleans())
def test_files_of_weights(world: World, data: st.DataObject, kind: str, safe: bool) -> None:
    """The header of safetensors; the pickle of torch and the archive around it. What the table of contents says of the
    size is made to agree."""
    folder = world.copy(f"{kind}-{safe}")
    path = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors" if safe else "pytorch_model*.bin"))))
    content = path.read_bytes()
    if safe and data.draw(st.integers(0, 3)):
        content = with_header(content, lambda header: mutated(data.draw, header, most=2))
    elif safe:
        length = 8 + struct.unpack("<Q", content[:8])[0]
        content = spoiled(data.draw, content[:length]) + content[length:]
    elif data.draw(st.booleans()):
        start = content.index(b"data.pkl")
        stop = content.index(b"PK", start)
        content = content[:start] + spoiled(data.draw, content[start:stop]) + content[stop:]
    else:
        content = spoiled(data.draw, content)
    path.write_bytes(content)
    say_sizes(folder, path)
    # Without checksums an ordinary checkpoint may hold any values.
    world.attempt(folder, lambda: world.load(folder), same_values=kind == "parallel")


def restore(world: World, load: Callable[[dict[str, Any]], Any]) -> Any:
    """Load into a new optimizer and scheduler; if that is refused, all of the run is as it was."""
    state = training(world.model)
    for parameter in world.model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = copy.deepcopy([one.state_dict() for one in state.values()]), torch.get_rng_state()
    try:
        return load(state)
    except CheckpointError:
        assert [one.state_dict() for one in state.values()] == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
        assert all(bool((parameter.grad == 7.0).all()) for parameter in world.model.parameters())
        raise
    finally:
        torch.set_rng_state(before[1])


@fuzz(30)
@given(data=st.data())
def test_training_states(world: World, data: st.DataObject) -> None:
    """The optimizer's tensors, the file that every rank reads whole, and the table of contents around them."""
    folder = world.copy("training")
    table = folder / "parallel_checkpoint.json"
    path = folder / data.draw(st.sampled_from(["training_state.bin", "optimizer_tp_0_pp_0.bin"]))
    change = data.draw(st.sampled_from(["content", "bytes", "table"]))
    if change == "table":
        table.write_bytes(dump(mutated(data.draw, json.loads(table.read_text()))))
    else:
        if change == "content":
            torch.save(mutated(data.draw, torch.load(path, weights_only=True)), path)
        else:
            path.write_bytes(spoiled(data.draw, path.read_bytes()))
        say_sizes(folder, path)

    def load(given: dict[str, Any]) -> None:
        state = TrainingState(given["optimizer"], {"scheduler": given["lr_scheduler"]})
        load_training_state(world.model, folder, state, world_comm=CheckpointRanks())

    world.attempt(folder, lambda: restore(world, load), same_values=False)


def resume(world: World, folder: Path, older: bool) -> None:
    """Load the newest checkpoint of a run.

    Args:
        older: whether there is one before that is whole, so that it loads if the newest is passed over.
    """
    try:
        found = restore(world, lambda state: penstock.load_checkpoint(folder, model=world.model, **state))
    except CheckpointError as error:
        # What shows only as it is restored ends the search, as it may be the objects given here that do not fit.
        assert not (older and "no checkpoint in" in str(error)), error
        raise
    assert found.path.startswith(f"{folder}/step-")


KEYS = st.sampled_from(["//.gradient", "//exp_avg", "//exp_avg_sq//", "//step", "//x", "//", "", "//\n"])


def renamed(draw: Callable[[Any], Any], header: dict[str, Any]) -> dict[str, Any]:
    """The names of some states changed, as a table of contents and a file may both have them."""
    keys = [key for key in header if "//" in key]
    return {key: key.partition("//")[0] + draw(KEYS) for key in draw(st.lists(st.sampled_from(keys), max_size=3))}


@fuzz(60)
@given(data=st.data(), older=st.booleans())
def test_folders_of_a_run(world: World, data: st.DataObject, older: bool) -> None:
    """Tables of contents, indices and states of the newest checkpoint; names that may lead elsewhere."""
    folder = world.copy("run")
    newest = folder / "step-00000002"
    if not older:
        shutil.rmtree(folder / "step-00000001")
    path = newest / "parallel_checkpoint.json"
    table = json.loads(path.read_text())
    change = data.draw(st.sampled_from(["table", "bytes", "index", "state", "header", "names", "folder"]))
    if change == "table":
        path.write_bytes(dump(mutated(data.draw, table)))
    elif change == "bytes":
        spoil = data.draw(st.sampled_from(sorted(newest.iterdir())))
        spoil.write_bytes(spoiled(data.draw, spoil.read_bytes()))
    elif change == "index":
        index = newest / "model.safetensors.index.json"
        index.write_bytes(dump(mutated(data.draw, json.loads(index.read_text()))))
    elif change == "folder":
        add_specials(newest)
        (folder / "step-00000003").symlink_to(folder.parent / "outside")
        os.mkfifo(folder / "step-00000004")
        (folder / f"step-{data.draw(st.integers(0, 10**9)):0{data.draw(st.integers(1, 20))}d}x").mkdir()
        newest.rename(folder / data.draw(st.sampled_from(["step-99999999", "step-999999999999999", "step-00000005"])))
    else:
        name = "training_state.bin" if change == "state" else "optimizer_tp_0_pp_0.safetensors"
        file, entry = newest / name, table["files"][name]
        if change == "state":
            torch.save(mutated(data.draw, torch.load(file, weights_only=True)), file)
        elif change == "header":
            file.write_bytes(with_header(file.read_bytes(), lambda header: mutated(data.draw, header, most=2)))
        else:
            names = renamed(data.draw, entry["tensors"])
            file.write_bytes(
                with_header(file.read_bytes(), lambda header: {names.get(key, key): header[key] for key in header})
            )
            entry["tensors"] = {names.get(key, key): info for key, info in entry["tensors"].items()}
            path.write_bytes(dump(table))
        say_sizes(newest, file)
    world.attempt(folder, lambda: resume(world, folder, older), same_values=change != "table")


@fuzz(30)
@given(data=st.data())
def test_inspecting_and_merging(world: World, data: st.DataObject) -> None:
    """Without a run; what is merged has the values that were saved."""
    folder = world.copy("run")
    shutil.rmtree(folder / "step-00000001")
    newest = folder / "step-00000002"
    table = newest / "parallel_checkpoint.json"
    change = data.draw(st.sampled_from(["table", "bytes", "training"]))
    if change == "table":
        add_specials(newest)
        table.write_bytes(dump(mutated(data.draw, json.loads(table.read_text()))))
    else:
        name = "training_state.bin" if change == "training" else "pytorch_model_tp_0_pp_0.safetensors"
        (newest / name).write_bytes(spoiled(data.draw, (newest / name).read_bytes()))

    def examine() -> None:
        said = inspect_folder(folder)
        json.dumps(said)
        merge_checkpoint(folder, folder / "out", max_shard_size="20KB")
        if change == "bytes":
            assert said[0]["whole"], "what is damaged is not merged"
        merged = [load_file(file) for file in (folder / "out").glob("*.safetensors")]
        names = {name for part in merged for name in part}
        assert names == set(world.reference.state_dict()) - {"lm_head.weight"}
        if change != "table":
            assert {world._sum(tensor) for part in merged for tensor in part.values()} <= world.values

    world.attempt(folder, examine, same_values=False)


@fuzz(30)
@given(data=st.data())
def test_objects(world: World, data: st.DataObject) -> None:
    folder = world.copy("parallel-False")
    path = folder / "object.bin"
    path.write_bytes(spoiled(data.draw, (world.whole / "object.bin").read_bytes()))
    world.attempt(folder, lambda: load_object(path, world_comm=CheckpointRanks()), same_values=False)
