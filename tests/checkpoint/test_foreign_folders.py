"""A folder that is damaged, or that somebody else made: what is wrong is named on every rank; nothing outside it is
read, no file of the user is lost, and nothing hangs."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.files import open_tensors
from penstock.checkpoint.load import load_ordinary
from penstock.checkpoint.ranks import CheckpointRanks
from penstock.checkpoint.training_state import TrainingState, load_object, load_training_state, save_object
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.audit import only_within
from tests.support.checkpoint_ranks import (
    assert_hold_together,
    content,
    flip,
    gpt2,
    load,
    raised,
    save,
    save_alone,
    scramble,
    split_copies,
    stages_of,
)
from tests.support.families import FAMILIES

STAGING = ".saving-" + "0" * 32
FIRST, LAST, TABLE = "pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin", "parallel_checkpoint.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two stages, beside a file of the user."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "victim").write_text("precious")
    raised(save(split_copies(gpt2(1), 2), tmp_path / "saved"))
    return tmp_path / "saved"


def assert_all_refuse(results: Sequence[Any], *parts: str) -> None:
    for result in results:
        assert isinstance(result, CheckpointError), result
        assert all(part in str(result) for part in parts), f"{parts}: {result}"


def refuse(folder: Path, *parts: str, num_stages: int = 2, before: torch.nn.Module | None = None) -> None:
    """Loading is refused on all ranks in these words, within a second of work, and changes no model."""
    before = before or gpt2(9)
    models = split_copies(before, num_stages)
    start = time.process_time()
    with only_within(folder):
        results = load(models, folder)
    seconds = time.process_time() - start
    assert_all_refuse(results, *parts)
    assert_hold_together(models, before)
    assert seconds < 1.0


def edit(folder: Path, change: Callable[[dict], object]) -> Path:
    path = folder / TABLE
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    return path


def plant(folder: Path, *staged: str) -> None:
    """Make the folder's table of contents name a staging folder with these files."""
    (folder / STAGING).mkdir()
    for name in staged:
        (folder / STAGING / name).write_text("foreign")
    edit(folder, lambda table: table.update(staging=STAGING))


# ---------------------------------------------------------------- what is damaged or does not fit


def test_a_missing_and_a_truncated_file_are_named(saved: Path) -> None:
    path = saved / LAST
    size = path.stat().st_size
    os.truncate(path, size - 100)
    refuse(saved, f"{path} is truncated: it has {size - 100} bytes, the checkpoint's has {size}")
    path.unlink()
    refuse(saved, f"{LAST} is missing", "ranks 0, 1")


@pytest.mark.parametrize("safe", [False, True])
def test_a_damaged_file_and_one_of_another_checkpoint_are_named(safe: bool, tmp_path: Path) -> None:
    """The other has the same names, shapes and size: only the checksums tell."""
    for seed in (1, 2):
        raised(save(split_copies(gpt2(seed), 3), tmp_path / str(seed), safe_serialization=safe))
    name = f"pytorch_model_tp_0_pp_1.{'safetensors' if safe else 'bin'}"
    shutil.copy(tmp_path / "2" / name, tmp_path / "1" / name)
    refuse(tmp_path / "1", f"{name} is not the file that was saved")
    path = tmp_path / "2" / name
    path.write_bytes(bytes(200) + path.read_bytes()[200:])
    refuse(tmp_path / "2", str(path))


def test_what_does_not_fit_the_model_is_refused(saved: Path, tmp_path: Path) -> None:
    llama = scramble(FAMILIES["llama"].build(dtype=torch.float32), 9)
    refuse(saved, "holds a GPT2LMHeadModel, but the model is a LlamaForCausalLM", before=llama)
    shapes = ("tensors of other shapes", "transformer.wpe.weight: [64, 32]", "[32, 32] in the model")
    refuse(saved, *shapes, before=gpt2(9, n_positions=32))
    for layers, words in ((3, "lacks tensors of the model: "), (1, "has tensors that the model does not have: ")):
        refuse(saved, f"{words}transformer.h.{2 if layers == 3 else 1}.", before=gpt2(9, n_layer=layers), num_stages=1)
    save_alone(gpt2(1, tie_word_embeddings=False), tmp_path / "untied")
    refuse(tmp_path / "untied", "different values for ['lm_head.weight', 'transformer.wte.weight']")


def test_further_names_in_an_older_table_are_read(saved: Path) -> None:
    other, stored = "transformer.h.0.ln_2.weight", "transformer.h.0.ln_1.weight"

    def change(table: dict[str, Any]) -> None:
        table["files"][FIRST]["aliases"] = {other: stored}
        del table["files"][FIRST]["tensors"][other]

    edit(saved, change)
    models = split_copies(gpt2(9), 2)
    raised(load(models, saved))
    expected = gpt2(1)
    with torch.no_grad():
        expected.transformer.h[0].ln_2.weight.copy_(expected.transformer.h[0].ln_1.weight)
    assert_hold_together(models, expected)
    edit(saved, lambda table: table["files"][FIRST].update(aliases={other: "nowhere"}))
    refuse(saved, f"lacks tensors of the model: {other}")


def test_a_folder_without_a_parallel_checkpoint_is_explained(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "nowhere is no directory")
    gpt2().save_pretrained(tmp_path / "plain")
    refuse(tmp_path / "plain", f"{TABLE} is missing", "model.safetensors", "from_pretrained")


def test_a_fault_that_one_rank_alone_sees_is_raised_on_all(saved: Path) -> None:
    """Damage in a tensor that only the last stage reads."""
    content = bytearray((saved / LAST).read_bytes())
    at = bytes(content).index(gpt2(1).transformer.ln_f.bias.detach().numpy().tobytes())
    content[at : at + 8] = bytes(8)
    (saved / LAST).write_bytes(content)
    refuse(saved, "rank 1:", "transformer.ln_f.bias differs")


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("merge", [False, True])
def test_a_planted_staging_folder_moves_nothing_but_files_of_weights(merge: bool, saved: Path, tmp_path: Path) -> None:
    """The folder's own table of contents names it; what an interrupted save left there would be put in place."""
    mine = ["train.py", ".bashrc", "thesis.bin", "pytorch_model.bin" if not merge else "notes.bin"]
    for name in mine:
        (saved / name).write_text("mine")
    config = (saved / "config.json").read_bytes()
    journal = json.dumps([["remove", "", "train.py"], ["replace", "payload", "../home/victim"]])
    plant(saved, *mine, "config.json", "payload", "pytorch_model_tp_0_pp_7.bin", "model.safetensors")
    (saved / STAGING / "journal.json").write_text(journal)
    with only_within(saved):
        raised(save(split_copies(gpt2(2), 2), saved, merge_checkpoints=merge))
    assert (tmp_path / "home" / "victim").read_text() == "precious"
    assert {(saved / name).read_text() for name in mine} == {"mine"}
    assert (saved / "config.json").read_bytes() == config
    names = {"payload", "journal.json", "pytorch_model_tp_0_pp_7.bin", "model.safetensors", STAGING}
    assert not names & set(os.listdir(saved))


def test_only_the_folders_own_table_of_contents_makes_a_staging_folder_count(tmp_path: Path) -> None:
    (tmp_path / FIRST).write_text("mine")
    for other in ("notes.json", "config.json", f"{TABLE}.bak"):
        (tmp_path / other).write_text(json.dumps({"staging": STAGING, "note": f"{STAGING}/x"}))
    (tmp_path / STAGING).mkdir()
    (tmp_path / STAGING / FIRST).write_text("foreign")
    raised(save(split_copies(gpt2(2), 2), tmp_path, merge_checkpoints=True))
    assert (tmp_path / FIRST).read_text() == "mine"
    assert not (tmp_path / STAGING).exists()


@pytest.mark.parametrize("name", [FIRST, "train.py", "model.safetensors"])
def test_an_index_moves_only_what_goes_with_an_index(name: str, saved: Path) -> None:
    """The index of a merged checkpoint is no reason to replace files of a parallel one."""
    (saved / "train.py").write_text("mine")
    before = {one: (saved / one).read_bytes() for one in (FIRST, "train.py")}
    (saved / STAGING).mkdir()
    (saved / STAGING / name).write_text("foreign")
    index = {"metadata": {}, "weight_map": {"w": f"{STAGING}/{name}"}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    raised(save(split_copies(gpt2(2), 2), saved, merge_checkpoints=True))
    assert {one: (saved / one).read_bytes() for one in before} == before
    assert not (saved / STAGING).exists() and not (saved / "model.safetensors").exists()


def test_a_table_of_contents_that_lists_files_of_the_user_does_not_cost_them(saved: Path) -> None:
    names = ["train.py", ".bashrc", "thesis.bin", "pytorch_model.bin"]
    for name in names:
        (saved / name).write_text("mine")
    edit(saved, lambda table: table["files"].update(dict.fromkeys(names, table["files"][LAST])))
    raised(save(split_copies(gpt2(2), 3), saved))
    assert {(saved / name).read_text() for name in names} == {"mine"}


def test_a_staging_folder_that_is_a_link_is_neither_followed_nor_emptied(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    raised(save(split_copies(gpt2(3), 2), other))
    before = content(other)
    (saved / STAGING).symlink_to(other)
    edit(saved, lambda table: table.update(staging=STAGING))
    models = split_copies(gpt2(9), 2)
    with only_within(saved):
        raised(load(models, saved))
    assert_hold_together(models, gpt2(1))
    raised(save(split_copies(gpt2(2), 2), saved))
    assert content(other) == before


def test_a_link_in_a_found_staging_folder_is_not_put_in_place(saved: Path, tmp_path: Path) -> None:
    victim = tmp_path / "home" / "victim"
    plant(saved)
    path = saved / STAGING / FIRST
    path.symlink_to(victim)
    assert_all_refuse(save(split_copies(gpt2(2), 2), saved), str(path))
    assert victim.read_text() == "precious"


def test_a_folder_in_the_way_is_named_before_anything_changes(saved: Path) -> None:
    before = content(saved)
    path = saved / "pytorch_model_tp_0_pp_2.bin"
    path.mkdir()
    assert_all_refuse(save(split_copies(gpt2(2), 3), saved), f"{path}: it is a directory")
    path.rmdir()
    assert content(saved) == before


def test_saving_replaces_a_link_and_not_the_file_it_leads_to(saved: Path, tmp_path: Path) -> None:
    (saved / FIRST).unlink()
    (saved / FIRST).symlink_to(tmp_path / "home" / "victim")
    raised(save(split_copies(gpt2(2), 2), saved))
    assert (tmp_path / "home" / "victim").read_text() == "precious" and not (saved / FIRST).is_symlink()


@pytest.mark.parametrize("name", ["config.json", TABLE, "model.safetensors.index.json"])
def test_a_pipe_in_the_folder_does_not_hold_up_a_save(name: str, saved: Path) -> None:
    (saved / name).unlink(missing_ok=True)
    os.mkfifo(saved / name)
    for merge in (False, True):
        for result in save(split_copies(gpt2(2), 2), saved, merge_checkpoints=merge):
            assert not isinstance(result, Exception) or (isinstance(result, CheckpointError) and name in str(result))


def test_an_object_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "object.bin.draft").symlink_to(victim)
    save_object({"step": 1}, tmp_path / "object.bin", world_comm=CheckpointRanks())
    assert victim.read_text() == "precious"
    assert load_object(tmp_path / "object.bin", world_comm=CheckpointRanks()) == {"step": 1}
    assert sorted(os.listdir(tmp_path)) == ["object.bin", "object.bin.draft", "victim"]


# ---------------------------------------------------------------- reading a table of contents

WEIGHT = "transformer.wte.weight"


def tensor(table: dict) -> dict:
    found: dict = table["files"][FIRST]["tensors"][WEIGHT]
    return found


ABSURD: list[tuple[Callable[[dict], object], str]] = [
    (lambda t: t.update(version=1), "has format version 1; this Penstock reads 2"),
    (lambda t: t.update(tensor_parallel_size=10**9), "tensor_parallel_size is 1000000000"),
    (lambda t: t.update(tensor_parallel_size=True), "tensor_parallel_size is True"),
    (lambda t: t.update(num_stages=3), "num_stages 3"),
    (lambda t: t.update(staging=".."), "staging folder leads elsewhere: '..'"),
    (lambda t: t.update(files=[]), "files is [], expected an object"),
    (lambda t: t.pop("files"), "expected an object with 'files'"),
    (lambda t: t.update(tied=[[["x"]]]), "tied[0][0] is ['x']"),
    (lambda t: t.update(model_class="A\x1b[2J"), "model_class is 'A\\x1b[2J'"),
    (lambda t: t["files"][FIRST].update(stage=7), "stage is 7, expected an integer from 0 to 1"),
    (lambda t: t["files"][FIRST].update(stage=1), LAST),
    (lambda t: t["files"][FIRST].update(size=10**40), "size is 1000000"),
    (lambda t: t["files"].update({".bashrc": t["files"].pop(FIRST)}), "files['.bashrc'] is"),
    (lambda t: t["files"].update({"a/b": t["files"].pop(FIRST)}), "leads elsewhere: 'a/b'"),
    (lambda t: t["files"].update({"a\0b": t["files"].pop(FIRST)}), "printable keys"),
    (lambda t: t["files"].update({"\ud800": t["files"].pop(FIRST)}), "printable keys"),
    (lambda t: tensor(t).update(shape=[10**12, 10**12]), f"{WEIGHT}'].shape is [1000000000000"),
    (lambda t: tensor(t).update(shape=[-1]), "shape[0] is -1"),
    (lambda t: tensor(t).update(shape=[1] * 100), "64 dimensions at most"),
    (lambda t: tensor(t).update(dtype="os"), "dtype is 'os'"),
    (lambda t: tensor(t).pop("checksum"), "expected an object with 'checksum'"),
]


# What shows only when it is compared with other values, or with the model.
UNFIT: list[tuple[Callable[[dict], object], str]] = [
    (lambda t: t.update(files={}), "lacks tensors of the model"),
    (lambda t: t.update(shards={WEIGHT: [7, 1]}), f"shards['{WEIGHT}'] is [7, 1], which does not go with the shape"),
    (lambda t: t.update(shards={WEIGHT: [0, 10**15]}), "1000000000000000"),
    (lambda t: tensor(t).update(dtype="int32"), f"{WEIGHT}: int32 in the checkpoint, float32 in the model"),
]


def test_an_absurd_field_is_named_with_its_value_and_file(saved: Path) -> None:
    before = (saved / TABLE).read_text()
    for number, (change, part) in enumerate(ABSURD + UNFIT):
        (saved / TABLE).write_text(before)
        edit(saved, change)
        refuse(saved, part, str(saved / TABLE) if number < len(ABSURD) else str(saved))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 200_000, "nested too deeply"),
        ("9" * 10_000, "cannot read"),
        ('{"format": NaN}', "NaN is no JSON"),
        ('{"format": 1, "format": 2}', "'format' stands twice"),
        ("\udcff\udcfe", "cannot read"),
        ("", "cannot read"),
        ("7", "is not the table of contents"),
    ],
)
def test_a_table_of_contents_that_is_no_json_is_refused(text: str, part: str, saved: Path) -> None:
    (saved / TABLE).write_bytes(text.encode(errors="surrogateescape"))
    refuse(saved, str(saved / TABLE), part)


def test_a_huge_table_of_contents_is_refused_unread(saved: Path) -> None:
    os.truncate(saved / TABLE, 10**12)  # it takes no room on the disk
    refuse(saved, f"{saved / TABLE} has 1000000000000 bytes")


# ---------------------------------------------------------------- reading files


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((FIRST, kind) for kind in ("pipe", "directory", "link", "loop", "device")), (TABLE, "pipe"), (TABLE, "link")],
)
def test_what_is_no_regular_file_of_the_folder_is_not_opened(name: str, kind: str, saved: Path, tmp_path: Path) -> None:
    path = saved / name
    shutil.move(path, tmp_path / "outside")  # a whole and right file, which a link would find
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"link": tmp_path / "outside", "loop": path, "device": Path("/dev/zero")}[kind])
    refuse(saved, str(path), {"pipe": "a named pipe", "directory": "a directory"}.get(kind, name))


def test_links_within_the_folder_and_of_a_hubs_cache_are_followed(saved: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(os.listdir(saved)):
        shutil.copy(saved / name, blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    (saved / FIRST).rename(saved / "moved.bin")
    (saved / FIRST).symlink_to("moved.bin")
    for folder in (saved, snapshot):
        models = split_copies(gpt2(9), 2)
        raised(load(models, folder))
        assert_hold_together(models, gpt2(1))


def rewrite(folder: Path, content: object) -> Path:
    """Put other content into a rank's file, and say so in the table of contents."""
    path = folder / FIRST
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    edit(folder, lambda table: table["files"][FIRST].update(size=path.stat().st_size))
    return path


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["PENSTOCK_TEST_EVIL"],)


def error_of(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        call()
    return error.value


def test_a_pickle_that_wants_to_run_code_is_refused_without_advice_to_let_it(
    saved: Path, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_EVIL", str(tmp_path / "ran"))
    buffer = io.BytesIO()
    torch.save({"state": Evil(), "filler": torch.zeros(100_000)}, buffer)
    evil, alone = buffer.getvalue(), CheckpointRanks()
    path, single, ordinary = rewrite(saved, evil), tmp_path / "object.bin", tmp_path / "ordinary"
    ordinary.mkdir()
    for other in (single, ordinary / "pytorch_model.bin"):
        other.write_bytes(evil)
    messages = [(str(path), result) for result in load(split_copies(gpt2(9), 2), saved)]
    messages.append((str(single), error_of(lambda: load_object(single, world_comm=alone))))
    messages.append((str(ordinary / "pytorch_model.bin"), error_of(lambda: load_whole(ordinary))))
    save_evil = lambda: save_object({"evil": Evil()}, tmp_path / "other.bin", world_comm=alone)  # noqa: E731
    messages.append(("plain data", error_of(save_evil)))
    for words, message in messages:
        assert words in str(message) and "posix.mkdir" in str(message)
        while message is not None:  # what a traceback shows
            assert "weights_only" not in str(message)
            message = message.__cause__ or (None if message.__suppress_context__ else message.__context__)
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)  # the file is as evil as was meant
    assert (tmp_path / "ran").exists()


def test_a_tensor_without_memory_of_its_own_is_not_expanded(saved: Path) -> None:
    """Four bytes that claim to be a hundred gigabytes."""
    content = torch.load(saved / FIRST)
    content[WEIGHT] = torch.zeros(1).expand(97, 2**31)
    refuse(saved, str(rewrite(saved, {**content, "filler": torch.zeros(100_000)})))


def test_an_archive_with_a_giant_table_of_contents_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path, number = tmp_path / "pytorch_model.bin", 400_000
    with path.open("wb") as file:
        file.write(struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, *[0] * 14) * number)
        size = file.tell()
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, number, number, size, 0))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, size, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="table of contents has 18,400,000 bytes"):
        open_tensors(str(path), path.name)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_compressed_file_is_refused(saved: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(saved / FIRST) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        target.writestr("filler", os.urandom(200_000))
    refuse(saved, str(rewrite(saved, packed.getvalue())), "is compressed")


# ---------------------------------------------------------------- ordinary checkpoints


def load_whole(folder: Path) -> torch.nn.Module:
    """`load_ordinary` into a model of one stage."""
    (model,) = split_copies(gpt2(9), 1)
    stages = stages_of(gpt2(9), 1)
    try:
        with only_within(folder):
            load_ordinary(model, folder, type(model), stages, [0], world_comm=CheckpointRanks())
    except CheckpointError:
        assert_hold_together([model], gpt2(9))
        raise
    return model


@pytest.fixture
def ordinary(tmp_path: Path) -> Path:
    gpt2(1).save_pretrained(tmp_path / "ordinary", max_shard_size="40KB")
    assert (tmp_path / "ordinary" / "model.safetensors.index.json").exists()
    return tmp_path / "ordinary"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize(
    "outside", ["../outside.safetensors", "{root}/outside.safetensors", f"{STAGING}/../../outside.safetensors"]
)
def test_an_index_cannot_name_files_outside_its_folder(outside: str, ordinary: Path, tmp_path: Path) -> None:
    moved = shards(ordinary)[0]
    path = ordinary / "model.safetensors.index.json"
    path.write_text(path.read_text().replace(moved.name, outside.replace("{root}", str(tmp_path))))
    shutil.move(moved, tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="leads elsewhere") as error:
        load_whole(ordinary)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("kind", "place"), [("pipe", "index"), ("link", "shard"), ("link", "index")])
def test_an_ordinary_checkpoint_of_other_than_regular_files_is_refused(kind, place, ordinary: Path, tmp_path) -> None:
    path = ordinary / "model.safetensors.index.json" if place == "index" else shards(ordinary)[0]
    shutil.move(path, tmp_path / "outside")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="a named pipe" if kind == "pipe" else "leads out of its folder"):
        load_whole(ordinary)


def test_the_configurations_of_an_ordinary_checkpoint_are_not_read(ordinary: Path) -> None:
    """They could name files elsewhere, or block; the model has its own."""
    for name in ("config.json", "generation_config.json"):
        (ordinary / name).unlink()
        os.mkfifo(ordinary / name)
    assert_hold_together([load_whole(ordinary)], gpt2(1))


@pytest.mark.parametrize("name", ["adapter_config.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_a_folder_that_sends_transformers_elsewhere_is_refused(name: str, ordinary: Path) -> None:
    (ordinary / name).write_text(json.dumps({"base_model_name_or_path": "../other"}))
    with pytest.raises(CheckpointError, match=name):
        load_whole(ordinary)


def test_a_damaged_shard_is_named(ordinary: Path) -> None:
    path = shards(ordinary)[-1]
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    assert str(path) in str(error_of(lambda: load_whole(ordinary)))


# ---------------------------------------------------------------- training states


@pytest.fixture
def run(tmp_path: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer whose state is saved."""
    model = split_copies(gpt2(1), 1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainingState(optimizer, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}, step=4)
    save_alone(model, tmp_path, training_state=state)
    return model, optimizer


def change_common(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the common file of a training state, checksum and all."""
    path = folder / "training_state.bin"
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    data = path.read_bytes()
    edit(folder, lambda t: t["files"][path.name].update(size=len(data), checksum=zlib.crc32(data)))


def change_random(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the states of the random generators, checksum and all."""
    path, key = folder / "optimizer_tp_0_pp_0.bin", "//random.0"
    tensors = torch.load(path)
    content = torch.load(io.BytesIO(tensors[key].numpy().tobytes()))
    change(content)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    tensors[key] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    torch.save(tensors, path)
    info = {"shape": list(tensors[key].shape), "dtype": "uint8", "checksum": zlib.crc32(buffer.getvalue())}
    edit(folder, lambda t: t["files"][path.name]["tensors"].update({key: info}))
    edit(folder, lambda t: t["files"][path.name].update(size=path.stat().st_size))


class Failing:
    """A scheduler that takes no state."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        torch.rand(1)
        raise KeyError("not mine")


@pytest.mark.parametrize(
    ("rewritten", "change", "part"),
    [
        (change_common, lambda c: c.update(step="four"), "step is 'four'"),
        (change_common, lambda c: c.update(pipelines=[]), "pipelines is []"),
        (change_common, lambda c: c.update(pipelines=[-1]), "pipelines[0] is -1"),
        (change_common, lambda c: c.update(members=[["x"], ["y"]]), "members is"),
        (change_common, lambda c: c.update(groups=[3]), "groups[0] is 3"),
        (change_common, lambda c: c["groups"][0].update(lr="much"), "lr is 'much'"),
        (change_common, lambda c: c["groups"][0].pop("betas"), "'betas'"),
        (change_common, lambda c: c["objects"].update(scheduler={"step": 3}), "would replace step of the scheduler"),
        (change_common, lambda c: c["objects"].update(scheduler=[1]), "scheduler"),
        (change_common, lambda c: c.pop("extra"), "'extra'"),
        (change_random, lambda c: c.clear(), "its content is {}"),
        (change_random, lambda c: c.update(python=(3, (1, 2), None)), "python is"),
        (change_random, lambda c: c.update(numpy=(torch.zeros(2), 0, 0, 0.0)), "numpy is"),
        (change_random, lambda c: c.update(torch=torch.zeros(3)), "torch is"),
        (change_random, lambda c: c.update(torch=Evil()), "asks to run code"),
        # The optimizer would take it; the scheduler fails after that.
        (change_common, lambda c: c["groups"][0].update(lr=0.125), "not mine"),
    ],
    ids=range(16),
)
def test_an_absurd_training_state_is_named_and_nothing_is_restored(
    rewritten, change, part: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_EVIL", str(tmp_path / "ran"))
    model, optimizer = run
    rewritten(tmp_path, change)
    scheduler = Failing() if part == "not mine" else torch.optim.lr_scheduler.StepLR(optimizer, 3)
    before = {**optimizer.state_dict()["state"][0]}, torch.get_rng_state(), dict(scheduler.state_dict())
    state = TrainingState(optimizer, {"scheduler": scheduler})
    error = error_of(lambda: load_training_state(model, tmp_path, state, world_comm=CheckpointRanks()))
    assert part in str(error) and str(tmp_path) in str(error)
    after = optimizer.state_dict()["state"][0]
    assert all(torch.equal(after[key], value) for key, value in before[0].items())
    assert torch.equal(torch.get_rng_state(), before[1]) and scheduler.state_dict() == before[2]
    assert optimizer.param_groups[0]["lr"] == 0.5 and not (tmp_path / "ran").exists()


def test_a_damaged_training_state_is_named(run, tmp_path: Path) -> None:
    flip(tmp_path / "training_state.bin")
    load_it = lambda: load_training_state(run[0], tmp_path, TrainingState(), world_comm=CheckpointRanks())  # noqa: E731
    assert "training_state.bin is not the file that was saved" in str(error_of(load_it))


def test_a_pipe_in_place_of_an_object_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "object.bin")
    with pytest.raises(CheckpointError, match="a named pipe"):
        load_object(tmp_path / "object.bin", world_comm=CheckpointRanks())
