"""Folders of checkpoints: whole or not there after a kill, rotated, passed over when damaged, written meanwhile."""

from __future__ import annotations

import copy
import json
import os
import threading
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import penstock
from penstock.checkpoint import files
from penstock.checkpoint.contents import find_checkpoints, inspect_folder, merge_checkpoint
from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.reader import CheckpointReader
from penstock.checkpoint.save import save_run_state
from penstock.checkpoint.tensors import bytes_of
from penstock.checkpoint.training_state import TrainingState
from penstock.checkpoint.untrusted import CheckpointError
from penstock.cli import app
from tests.support.audit import only_within
from tests.support.checkpoint_ranks import (
    assert_hold_together,
    assert_holds,
    assert_same_state,
    flip,
    give_state,
    gpt2,
    loaded,
    on_ranks,
    raised,
    save_alone,
    scramble,
    split_copies,
    trained,
)
from tests.support.families import FAMILIES
from tests.support.launch import run_python
from tests.support.peaks import sampled_peak
from tests.support.pool import Pool
from tests.support.training import parallelize

pytestmark = pytest.mark.slow


def test_the_newest_whole_one_is_loaded_and_damaged_ones_are_named(tmp_path: Path) -> None:
    pairs = {}
    for number in (10, 20, 30, 40):
        pairs[number] = model, optimizer = trained(number)
        path = penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=number, keep_last=3)
        assert path == str(tmp_path / f"step-{number:08d}")
    (tmp_path / "step-00000050").mkdir()  # a save that was killed
    (tmp_path / "notes.txt").write_text("mine")
    found, model, _ = loaded(tmp_path)
    assert (found.step, found.damaged) == (40, {})

    flip(tmp_path / "step-00000040" / "optimizer_tp_0_pp_0.safetensors")
    (tmp_path / "step-00000030" / "training_state.bin").unlink()
    found, model, optimizer = loaded(tmp_path)
    assert found.step == 20 and found.path == str(tmp_path / "step-00000020")
    assert_holds(model, pairs[20][0])
    assert_same_state(optimizer, pairs[20][1])
    damaged = {os.path.basename(path): reason for path, reason in found.damaged.items()}
    assert "optimizer_tp_0_pp_0.safetensors is not the file that was saved" in damaged["step-00000040"]
    assert "training_state.bin is missing" in damaged["step-00000030"]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: .*step-00000040"):
        loaded(tmp_path, 40)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 10"):
        loaded(tmp_path, 10)
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        loaded(tmp_path / "nowhere")
    assert loaded(tmp_path / "step-00000020")[0].step == 20

    (tmp_path / "step-00000020" / "mine.txt").write_text("mine")
    penstock.save_checkpoint(tmp_path, model=model, step=60, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-00000020", "step-00000060"]
    assert os.listdir(tmp_path / "step-00000020") == ["mine.txt"]
    assert [found.step for found in find_checkpoints(tmp_path)] == [60]


def test_a_whole_one_that_does_not_fit_is_an_error_and_no_older_one_is_loaded(tmp_path: Path) -> None:
    """Saved without the optimizer, by a version to come, or of another model."""
    (model, optimizer), (again, adam) = trained(1), trained(2)
    for number in (1, 2):
        given = {"optimizer": optimizer} if number == 1 else {}
        penstock.save_checkpoint(tmp_path, model=model, step=number, **given)
    newest = tmp_path / "step-00000002"
    with pytest.raises(CheckpointError, match=r"step-00000002 has no optimizer state"):
        penstock.load_checkpoint(tmp_path, model=again, optimizer=adam)
    with pytest.raises(CheckpointError, match=r"step-00000002 lacks tensors of the model: transformer\.h\.2\.ln_1"):
        penstock.load_checkpoint(tmp_path, model=FAMILIES["gpt2"].build(n_layer=3, dtype=torch.float32))
    assert_holds(again, trained(2)[0])
    assert penstock.load_checkpoint(tmp_path, model=again).step == 2
    table = json.loads((newest / "parallel_checkpoint.json").read_text())
    (newest / "parallel_checkpoint.json").write_text(json.dumps(table | {"version": table["version"] + 1}))
    with pytest.raises(CheckpointError, match=r"step-00000002.* has format version"):
        penstock.load_checkpoint(tmp_path, model=again)
    (newest / "parallel_checkpoint.json").write_text("{}")
    assert penstock.load_checkpoint(tmp_path, model=again).step == 1


def load_without_an_object_on_one_rank(folder: Path) -> str:
    model = parallelize(gpt2(), 2)
    given = {"mine": torch.optim.SGD(model.parameters(), lr=1.0)} if torch.distributed.get_rank() else {}
    for number in (1, 2):
        penstock.save_checkpoint(folder, model=model, step=number)
    with pytest.raises(CheckpointError) as caught:
        penstock.load_checkpoint(folder, model=model, **given)
    return str(caught.value)


def test_what_does_not_fit_on_one_rank_is_an_error_on_all(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(2, load_without_an_object_on_one_rank, tmp_path, timeout=60):
        assert (
            "rank 1:" in error and "step-00000002 has no state for ['mine']" in error and "step-00000001" not in error
        )


def test_each_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(1)
    penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1)
    read, names = CheckpointReader.read, list[str]()
    monkeypatch.setattr(CheckpointReader, "read", lambda reader, *which: names.append(which[0]) or read(reader, *which))
    loaded(tmp_path)
    assert len(names) == len(set(names)) > 4 * len(list(model.parameters()))


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    loader = torch.utils.data.DataLoader([1, 2])
    for options, message in (
        (
            {"dataloader": loader},
            r"dataloader cannot be saved or loaded: a DataLoader has no state; make it with model",
        ),
        ({"mine": 3}, r"mine cannot be saved or loaded: a int has no state"),
        ({"optimizer": "adam"}, "optimizer must be a torch optimizer, got str"),
    ):
        for function in (penstock.save_checkpoint, penstock.load_checkpoint):
            with pytest.raises(TypeError, match=message):
                function(tmp_path, model=model, **options)
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        penstock.save_checkpoint(tmp_path, model="gpt2")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="model is a OptimizedModule, whose weights may have other names: give the model itself"
    ):
        penstock.save_checkpoint(tmp_path, model=torch.compile(model), step=1)
    with pytest.raises(ValueError, match="step is missing: without pipelines nobody counts the steps"):
        penstock.save_checkpoint(tmp_path, model=model)
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        penstock.save_checkpoint(tmp_path, model=model, keep_last=0)
    for wrong in (1.5, "2", True):
        with pytest.raises(TypeError, match="keep_last must be an integer, got"):
            penstock.save_checkpoint(tmp_path, model=model, keep_last=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be a whole number of steps done, got -1"):
        penstock.save_checkpoint(tmp_path, model=model, step=-1)
    assert not os.listdir(tmp_path)
    penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1, lr_scheduler=None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(CheckpointError, match=r"has no state for \['lr_scheduler'\]"):
        penstock.load_checkpoint(tmp_path, model=model, lr_scheduler=scheduler)


def test_a_scheduler_takes_no_state_of_another_class(tmp_path: Path) -> None:
    """Also one that consists of others. Nothing has changed, and the right class goes on."""
    scheduler = torch.optim.lr_scheduler
    model, optimizer = trained(1)

    def sequence(last: type, **options: Any) -> Any:
        parts = [scheduler.LinearLR(optimizer), last(optimizer, **options)]
        return scheduler.SequentialLR(optimizer, parts, milestones=[3])

    for made, others in (
        (scheduler.StepLR(optimizer, 2), [scheduler.ExponentialLR(optimizer, 0.5), sequence(scheduler.ConstantLR)]),
        (sequence(scheduler.ConstantLR), [sequence(scheduler.ExponentialLR, gamma=0.5)]),
    ):
        penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, lr_scheduler=made, step=1)
        for other in others:
            before = copy.deepcopy(other.state_dict())
            with pytest.raises(CheckpointError, match=r"'lr_scheduler'.* is that of a (\w+).*, but .*: make a \1"):
                penstock.load_checkpoint(tmp_path, model=model, optimizer=optimizer, lr_scheduler=other)
            assert other.state_dict() == before
        saved = copy.deepcopy(made.state_dict())
        made.last_epoch = 17
        penstock.load_checkpoint(tmp_path, model=model, optimizer=optimizer, lr_scheduler=made)
        assert made.state_dict() == saved


def warned(save: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save()
    return [str(one.message) for one in caught if "gradients are not saved" in str(one.message)]


def save_in_an_accumulation(folder: Path) -> tuple[list[int], list[bool]]:
    """How many warnings come after a step's backwards, its update, and the dropping of its gradients; and whether
    gradients are left once the first is loaded."""
    model = parallelize(gpt2(1), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts, ids = [], torch.arange(32).view(4, 8)

    def backward() -> None:
        for out in model(input_ids=ids, labels=ids):
            out.loss.backward()

    for number, work in enumerate((backward, optimizer.step, optimizer.zero_grad)):
        work()
        save = partial(penstock.save_checkpoint, folder, model=model, optimizer=optimizer, step=number)
        counts.append(len(warned(save)))
    backward()
    penstock.load_checkpoint(folder, 0, model=model, optimizer=optimizer)
    return counts, [parameter.grad is not None for parameter in model.parameters()]


def test_a_save_in_the_middle_of_an_accumulation_says_that_it_leaves_the_gradients_out(
    pool: Pool, tmp_path: Path
) -> None:
    """On every rank; a run that is taken up begins without any."""
    for counts, left in pool.run(2, save_in_an_accumulation, tmp_path, timeout=60):
        assert counts == [1, 0, 0]
        assert left and not any(left)


def test_one_process_that_cannot_tell_whether_gradients_were_used_says_so(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save = partial(penstock.save_checkpoint, tmp_path, model=model, optimizer=optimizer, step=1)
    (words,) = warned(save)
    assert "unless it has used them already: then call zero_grad() first" in words
    optimizer.zero_grad()
    assert not warned(save)


# -- files of tensors --------------------------------------------------------------------------------------------------


def test_the_files_are_those_of_safetensors_and_the_sums_those_of_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dtype of the format, no dimension and no element, and tensors of several pieces."""
    monkeypatch.setattr(files, "_CHUNK", 1000)
    monkeypatch.setattr(files, "_FLUSHED", 3000)
    tensors = {"none": torch.empty(0, 3), "one": torch.tensor(2.5, dtype=torch.bfloat16), "ü": torch.arange(2500)}
    for dtype in files.DTYPES:
        tensors[f"of {dtype}"] = torch.arange(-8, 9).abs().to(torch.float32).to(dtype)
    path = tmp_path / "file.safetensors"
    infos = files.write_tensors(str(path), tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys() == infos.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes(bytes_of(found[name])) == bytes(bytes_of(tensor)), name
        assert infos[name]["checksum"] == zlib.crc32(bytes(bytes_of(tensor)))
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "the first tensor's place is aligned"
    with pytest.raises(CheckpointError, match=r"safetensors has no dtype for x, which is torch.complex128"):
        files.write_tensors(str(tmp_path / "other.safetensors"), {"x": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="File exists"):
        files.write_tensors(str(path), tensors)
    assert os.listdir(tmp_path) == ["file.safetensors"]


# -- asynchronous ------------------------------------------------------------------------------------------------------


def test_an_asynchronous_save_holds_the_values_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(1)
    before = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    go_on, original = threading.Event(), files.write_safetensors
    monkeypatch.setattr(files, "write_safetensors", lambda *args: go_on.wait(60) and original(*args))
    penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1, asynchronous=True)
    give_state(model, optimizer, 5)  # while nothing is written yet
    assert not (tmp_path / "step-00000001" / "parallel_checkpoint.json").exists()
    go_on.set()
    penstock.finish_saving(model)
    found, again, adam = loaded(tmp_path)
    assert found.step == 1
    assert_holds(again, before[0])
    assert torch.equal(adam.state_dict()["state"][0]["exp_avg"], before[1]["state"][0]["exp_avg"])


@pytest.mark.parametrize("keep_last", [1, 2])
def test_what_was_just_saved_is_kept_also_if_there_are_later_steps(tmp_path: Path, keep_last: int) -> None:
    """A run has gone back from a damaged one, or from one that led astray."""
    model, _ = trained(1)
    for number in (100, 200, 300):
        penstock.save_checkpoint(tmp_path, model=model, step=number)
    flip(tmp_path / "step-00000200" / "pytorch_model_tp_0_pp_0.safetensors")
    path = penstock.save_checkpoint(tmp_path, model=model, step=150, keep_last=keep_last)
    kept = [150, 100][:keep_last]
    assert path.endswith("step-00000150")
    assert [found.step for found in find_checkpoints(tmp_path)] == [300, 200, *kept]


def test_a_folder_that_is_itself_a_checkpoint_may_hold_a_run(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save_alone(model, tmp_path)
    manager = penstock.CheckpointManager(tmp_path, model=model, optimizer=optimizer, every=1)
    assert manager.resume() == 0
    with pytest.raises(CheckpointError, match="it holds weights without a training state: load them alone"):
        penstock.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    for number in (7, 8, 9):
        penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=number, keep_last=2)
    assert [found.step for found in find_checkpoints(tmp_path)] == [9, 8, None]
    assert [each["step"] for each in inspect_folder(tmp_path)] == [9, 8, None]
    for which in ("latest", 8):
        found = penstock.load_checkpoint(tmp_path, which, model=model, optimizer=optimizer)
        assert found.step == (9 if which == "latest" else 8)
    assert penstock.load_checkpoint(tmp_path / "step-00000008", 8, model=model).step == 8
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of step 9, but of 8$"):
        penstock.load_checkpoint(tmp_path / "step-00000008", 9, model=model)
    penstock.save_checkpoint(tmp_path / "step-00000008", model=model, step=4)  # inside of one of a later step
    assert [found.step for found in find_checkpoints(tmp_path / "step-00000008")] == [8, 4]
    merge_checkpoint(tmp_path, tmp_path / "whole")  # the weights of the folder itself
    assert_holds(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole"), model)


def test_an_optimizer_whose_present_state_could_not_be_saved_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1)
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["when"] = object()
    with pytest.raises(CheckpointError, match="cannot save state 'when' of"):
        penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=2)
    assert penstock.load_checkpoint(tmp_path, model=model, optimizer=optimizer).damaged == {}
    assert "when" not in optimizer.state[first]


def test_an_asynchronous_save_removes_older_ones_of_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the program has gone to another folder meanwhile, in which there is one of the same name."""
    model, _ = trained(1)
    go_on, original = threading.Event(), files.write_safetensors
    for place in ("there", "here"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        penstock.save_checkpoint("run", model=model, step=1)
    penstock.save_checkpoint("run", model=model, step=2)
    monkeypatch.setattr(files, "write_safetensors", lambda *args: go_on.wait(60) and original(*args))
    penstock.save_checkpoint("run", model=model, step=3, keep_last=1, asynchronous=True)
    monkeypatch.chdir(tmp_path / "there")
    monkeypatch.setattr(files, "write_safetensors", original)
    penstock.save_checkpoint("run", model=trained(2)[0], step=2)
    go_on.set()
    penstock.finish_saving(model)
    assert [found.step for found in find_checkpoints(tmp_path / "here" / "run")] == [3]
    assert [found.step for found in find_checkpoints(tmp_path / "there" / "run")] == [2, 1]


def advice_around_an_asynchronous_save(folder: Path) -> list[bool]:
    """Whether an error after a loss would say to load a model, and to load a checkpoint: while one is written, and
    after it."""
    model = parallelize(gpt2(1), 1)
    model.save_parallelized(folder / "model")
    penstock.save_checkpoint(folder / "run", model=model, step=1, asynchronous=True)
    ways = "from_parallelized", "load_checkpoint"
    meanwhile = [way in model.pipeline.board.advice() for way in ways]
    penstock.finish_saving(model)
    return meanwhile + [way in model.pipeline.board.advice() for way in ways]


def test_a_checkpoint_is_advised_once_it_is_whole(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, advice_around_an_asynchronous_save, tmp_path) == [[True, False, False, True]]


def advice_after_saves(folder: Path) -> list[str]:
    """Of a run, then of weights alone, then of weights and the optimizer, as the booster saves them."""
    model = parallelize(gpt2(1), 1)
    penstock.save_checkpoint(folder / "run", model=model, step=1)
    model.save_pretrained(folder / "best")
    advices = [model.pipeline.board.advice()]
    resume = model.pipeline.board.resume
    resume["model"], resume["optimizer"] = "the newer model", "its optimizer"
    return [*advices, model.pipeline.board.advice()]


def test_the_advice_is_one_state_of_the_run(pool: Pool, tmp_path: Path) -> None:
    ((of_run, of_parts),) = pool.run(1, advice_after_saves, tmp_path)
    assert of_run.endswith(f"load the last checkpoint: penstock.load_checkpoint('{tmp_path}/run', ...)")
    assert of_parts.endswith("load the last checkpoint: the newer model and its optimizer")


def test_what_goes_wrong_meanwhile_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(1)
    penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_safetensors", full)
        penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=2, asynchronous=True)
        with pytest.raises(CheckpointError, match=r"step-00000002.*No space left on device"):
            penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=3, asynchronous=True)
    assert loaded(tmp_path)[0].step == 1
    penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=4, asynchronous=True)
    penstock.finish_saving(model)
    assert loaded(tmp_path)[0].step == 4


def test_what_goes_wrong_at_the_very_end_ends_the_program_with_an_error(tmp_path: Path) -> None:
    code = """
import sys, penstock, transformers
from penstock.checkpoint import files
if sys.argv[2] == "fail":
    files.write_safetensors = lambda *args, **options: 1 / 0
config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=5, n_positions=4)
penstock.save_checkpoint(sys.argv[1], model=transformers.GPT2LMHeadModel(config), step=1, asynchronous=True)
"""
    (tmp_path / "script.py").write_text(code)
    for fate, status in (("fail", 1), ("write", 0)):
        ended = run_python(tmp_path / "script.py", tmp_path / fate, fate, timeout=120)
        assert ended.returncode == status, ended.stderr
        assert ("ZeroDivisionError" in ended.stderr) == (fate == "fail")
    assert (tmp_path / "write" / "step-00000001" / "parallel_checkpoint.json").exists()


# -- what is in them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("shard_size", ["4KB", "1GB"])
def test_weights_of_an_ordinary_checkpoint_are_not_hidden(shard_size: str, safe: bool, tmp_path: Path) -> None:
    """transformers prefers safetensors files, of which a run's are, to .bin files."""
    reference = FAMILIES["gpt2"].build(dtype=torch.float32)
    save_alone(reference, tmp_path, merge_checkpoints=True, max_shard_size=shard_size, safe_serialization=safe)
    before = sorted(os.listdir(tmp_path))
    models = split_copies(scramble(copy.deepcopy(reference), 1), 2)

    def work(rank: int, comm: Any) -> None:
        with pytest.raises(CheckpointError, match="is of an ordinary checkpoint"):
            save_run_state(models[rank], tmp_path, TrainingState(None, step=3), world_comm=comm)

    raised(on_ranks(2, work))
    assert sorted(os.listdir(tmp_path)) == before
    assert_holds(type(reference).from_pretrained(tmp_path), reference)


@pytest.mark.parametrize("family", ["t5", "mixtral"])
def test_plain_transformers_loads_the_folder_and_everything_is_in_it_once(family: str, tmp_path: Path) -> None:
    """Tied weights, several names of one weight, and a family whose files are converted when they are loaded."""
    reference = scramble(FAMILIES[family].build(dtype=torch.float32), 1)
    models = split_copies(reference, 3)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    reference.load_state_dict({name: value for model in models for name, value in model.state_dict().items()})

    def work(rank: int, comm: Any) -> None:
        save_run_state(models[rank], tmp_path, TrainingState(optimizers[rank], step=3), world_comm=comm)

    raised(on_ranks(3, work))
    again = type(reference).from_pretrained(tmp_path)
    assert_holds(again, reference)
    (found,) = inspect_folder(tmp_path)
    assert found["whole"] and found["training"]["step"] == 3
    held = {value.data_ptr() for value in reference.state_dict().values()}
    stored = [name for file in found["files"] if file["part"] == "model" for name in range(file["tensors"])]
    assert len(stored) == len(found["parameters"]) == len(held)
    states = sum(file["tensors"] for file in found["files"] if file["part"] == "training")
    expected = 3 * len(list(reference.parameters())) + 3
    assert states == expected, "exp_avg, exp_avg_sq and step of each, and the generators of each rank"

    fresh = split_copies(scramble(copy.deepcopy(reference), 5), 2)
    raised(on_ranks(2, lambda rank, comm: from_parallelized(fresh[rank], tmp_path, world_comm=comm)))
    assert_hold_together(fresh, reference)

    runner = CliRunner()
    shown = runner.invoke(app, ["inspect", str(tmp_path), "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)[0]["parameters"] == found["parameters"]
    for options, extension in ((["--no-safetensors"], ".bin"), ([], ".safetensors")):
        out = tmp_path / f"merged{extension}"
        merged = runner.invoke(app, ["merge", str(tmp_path), str(out), "--max-shard-size", "30KB", "--json", *options])
        assert merged.exit_code == 0, merged.output
        every = json.loads(merged.stdout)["files"]
        files_written = [name for name in every if name.endswith((".bin", ".safetensors"))]
        assert set(every) == {path.name for path in out.iterdir()}
        assert len(files_written) > 1 and all(name.endswith(extension) for name in files_written)
        assert_holds(type(reference).from_pretrained(out), reference)


def test_inspect_names_what_is_damaged_and_merge_refuses_it(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    for number in (1, 2):
        penstock.save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=number)
    newest = tmp_path / "step-00000002"
    flip(newest / "pytorch_model_tp_0_pp_0.safetensors")
    runner = CliRunner()
    with only_within(tmp_path):
        shown = runner.invoke(app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 1
    words = " ".join(shown.stdout.split())  # lines are wrapped
    assert "step-00000002: NOT WHOLE" in words and "step-00000001: whole" in words
    assert "pytorch_model_tp_0_pp_0.safetensors is not the file that was saved" in words
    assert runner.invoke(app, ["inspect", str(tmp_path), "--quick"]).exit_code == 0, "the sizes are right"
    refused = runner.invoke(app, ["merge", str(newest), str(tmp_path / "out")])
    assert refused.exit_code == 1 and not list((tmp_path / "out").glob("*"))
    assert runner.invoke(app, ["inspect", str(tmp_path / "nowhere")]).exit_code == 1


class Derived(transformers.GPT2LMHeadModel):
    """A class of the user's own, which the command does not know."""


@pytest.mark.parametrize("lacking", [False, True])
def test_merge_says_where_a_model_that_it_does_not_know_can_be_merged(tmp_path: Path, lacking: bool) -> None:
    model = (transformers.GPT2LMHeadModel if lacking else Derived)(gpt2().config)
    penstock.save_checkpoint(tmp_path / "run", model=model, step=1)
    if lacking:
        (tmp_path / "run" / "step-00000001" / "config.json").unlink()
    refused = CliRunner().invoke(app, ["merge", str(tmp_path / "run"), str(tmp_path / "out")])
    said = " ".join(refused.output.split())  # lines are wrapped
    assert refused.exit_code == 1 and not (tmp_path / "out").exists()
    if lacking:
        assert "holds a GPT2LMHeadModel of transformers, but no config.json" in said
    else:
        assert "holds a Derived, which is no class of transformers: where it is defined, call" in said
        assert "model.from_parallelized(" in said and "model.save_pretrained(folder)" in said


def large() -> Any:
    """A model with weights of 100 MB."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=9, num_attention_heads=4, vocab_size=512
    )
    return transformers.LlamaForCausalLM(config)


def save_sharded(folder: Path) -> None:
    penstock.save_checkpoint(folder, model=parallelize(large(), 1, tensor_parallel_size=2), step=1)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_merging_holds_one_shard_of_the_result_in_memory(pool: Pool, tmp_path: Path) -> None:
    """Weights of 100 MB in shards of 10 MB, also of a checkpoint that tensor parallelism has cut."""
    model = large()
    assert sum(parameter.nbytes for parameter in model.parameters()) > 90e6
    penstock.save_checkpoint(tmp_path / "whole", model=model, step=1)
    pool.run(2, save_sharded, tmp_path / "cut", timeout=60)
    penstock.save_checkpoint(tmp_path / "small", model=gpt2(), step=1)
    merge_checkpoint(tmp_path / "small", tmp_path / "small-merged")  # what this imports stays in memory
    for kind in ("whole", "cut"):
        with sampled_peak() as peak:
            names = merge_checkpoint(tmp_path / kind, tmp_path / f"{kind}-merged", max_shard_size="10MB")
        assert len(names) >= 9
        assert peak[0] < 35e6, f"{kind}: {peak[0]:,} bytes more at times"
    for kind in ("whole", "cut"):
        assert_holds(transformers.LlamaForCausalLM.from_pretrained(tmp_path / f"{kind}-merged"), model)
