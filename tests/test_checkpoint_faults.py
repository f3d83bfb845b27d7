"""Bad checkpoints are refused by name on every rank, and a save that fails anywhere changes nothing."""

import errno
import json
import os
import pickle
import resource
import shutil

import pytest
import torch

from checkpoint_ranks import (
    assert_hold_together,
    assert_holds,
    in_fork,
    load,
    raised,
    save,
    save_alone,
    scramble,
    split_copies,
)
from families import FAMILIES
from penstock.checkpoint import files
from penstock.checkpoint.untrusted import CheckpointError


def build(family: str = "gpt2", seed: int = 0, **settings) -> torch.nn.Module:
    return scramble(FAMILIES[family].build(dtype=torch.float32, **settings), seed)


def assert_all_refuse(results, *parts: str) -> None:
    """Every rank raised, and every message has all of `parts`."""
    for result in results:
        assert isinstance(result, CheckpointError), result
        for part in parts:
            assert part in str(result), str(result)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of three stages."""
    raised(save(split_copies(build(seed=1), 3), tmp_path / "saved"))
    return tmp_path / "saved"


def refuse(directory, *parts: str, family: str = "gpt2", num_stages: int = 2, **settings) -> None:
    """Loading fails on all ranks with such a message, and leaves the models as they were."""
    before = build(family, seed=9, **settings)
    models = split_copies(before, num_stages)
    assert_all_refuse(load(models, directory), *parts)
    assert_hold_together(models, before)


def test_a_missing_file_is_named(saved) -> None:
    os.remove(saved / "pytorch_model_tp_0_pp_2.bin")
    refuse(saved, "pytorch_model_tp_0_pp_2.bin is missing", "rank 0", "rank 1")


def test_a_truncated_file_is_named(saved) -> None:
    path = saved / "pytorch_model_tp_0_pp_1.bin"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    refuse(saved, f"{path} is truncated: it has {size - 100} bytes, the checkpoint's has {size}")


@pytest.mark.parametrize("extension", ["bin", "safetensors"])
def test_a_file_of_another_checkpoint_is_named(extension: str, tmp_path) -> None:
    """Same names, same shapes, same size: only the checksums tell."""
    for seed in (1, 2):
        models = split_copies(build(seed=seed), 3)
        raised(save(models, tmp_path / str(seed), safe_serialization=extension == "safetensors"))
    name = f"pytorch_model_tp_0_pp_1.{extension}"
    shutil.copy(tmp_path / "2" / name, tmp_path / "1" / name)
    refuse(tmp_path / "1", f"{name} is not the file that was saved")


@pytest.mark.parametrize("extension", ["bin", "safetensors"])
def test_a_damaged_file_is_named(extension: str, tmp_path) -> None:
    raised(save(split_copies(build(seed=1), 3), tmp_path, safe_serialization=extension == "safetensors"))
    path = tmp_path / f"pytorch_model_tp_0_pp_0.{extension}"
    content = bytearray(path.read_bytes())
    content[:200] = bytes(200)
    path.write_bytes(content)
    refuse(tmp_path, str(path))


def test_a_checkpoint_of_another_class_is_refused(saved) -> None:
    refuse(saved, "holds a GPT2LMHeadModel, but the model is a LlamaForCausalLM", family="llama")


def test_other_shapes_are_refused(saved) -> None:
    refuse(
        saved, "tensors of other shapes", "transformer.wpe.weight: [64, 32]", "[32, 32] in the model", n_positions=32
    )


def test_more_and_fewer_layers_are_refused(saved) -> None:
    refuse(saved, "lacks tensors of the model: transformer.h.4.", n_layer=5, num_stages=1)
    refuse(saved, "has tensors that the model does not have: transformer.h.3.", n_layer=3, num_stages=1)


def test_an_untied_checkpoint_is_not_loaded_into_a_tied_model(tmp_path) -> None:
    (model,) = split_copies(build(seed=1, tie_word_embeddings=False), 1)
    save_alone(model, tmp_path)
    refuse(tmp_path, "different values for ['lm_head.weight', 'transformer.wte.weight']")


def test_a_folder_without_a_parallel_checkpoint_is_explained(tmp_path) -> None:
    refuse(tmp_path / "nowhere", "nowhere is no directory")
    build().save_pretrained(tmp_path / "plain")
    refuse(tmp_path / "plain", "parallel_checkpoint.json is missing", "model.safetensors", "from_pretrained")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot read"),
        (lambda text: "[]", "is not the table of contents"),
        (lambda text: text.replace('"version": 2', '"version": 1'), "has format version 1; this Penstock reads 2"),
        (lambda text: text.replace('"shape"', '"form"'), "is damaged"),
        (lambda text: text.replace("pytorch_model_tp_0_pp_0.bin", "../elsewhere.bin"), "leads elsewhere"),
    ],
)
def test_a_damaged_table_of_contents_is_refused(change, message: str, saved) -> None:
    path = saved / "parallel_checkpoint.json"
    path.write_text(change(path.read_text()))
    refuse(saved, str(path), message)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["PENSTOCK_TEST_EVIL"],)


def test_loading_runs_no_code_from_a_file(saved, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_EVIL", str(tmp_path / "ran"))
    path = saved / "pytorch_model_tp_0_pp_0.bin"
    filler = torch.zeros(path.stat().st_size // 4)  # so that the file is as large as what it should hold
    torch.save({"transformer.wte.weight": Evil(), "filler": filler}, path)
    table = json.loads((saved / "parallel_checkpoint.json").read_text())
    table["files"][path.name]["size"] = path.stat().st_size
    (saved / "parallel_checkpoint.json").write_text(json.dumps(table))
    refuse(saved, str(path), "asks to run code when it is loaded (posix.mkdir)")
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)  # the file is as evil as was meant
    assert (tmp_path / "ran").exists()


def test_a_fault_that_one_rank_alone_sees_is_raised_on_all(saved, monkeypatch) -> None:
    """Damage in a tensor that only the last stage reads."""
    path = saved / "pytorch_model_tp_0_pp_2.bin"
    content = bytearray(path.read_bytes())
    values = build(seed=1).transformer.ln_f.bias.detach().numpy().tobytes()
    at = bytes(content).index(values)
    content[at : at + 8] = bytes(8)
    path.write_bytes(content)
    refuse(saved, "rank 1:", "transformer.ln_f.bias differs")


# ---------------------------------------------------------------- saving


def fail_on(monkeypatch, module, name: str, path_part: str, error: Exception) -> None:
    """Let `module.name(path, ...)` raise for paths with `path_part`."""
    original = getattr(module, name)

    def failing(path, *args, **kwargs):
        if path_part in str(path):
            raise error
        return original(path, *args, **kwargs)

    monkeypatch.setattr(module, name, failing)


def assert_save_fails_and_changes_nothing(directory, old: torch.nn.Module, *parts: str, **options) -> None:
    before = {name: (directory / name).read_bytes() for name in os.listdir(directory)}
    assert_all_refuse(save(split_copies(build(seed=2), 3), directory, **options), *parts)
    assert {name: (directory / name).read_bytes() for name in os.listdir(directory)} == before
    if not options.get("merge_checkpoints"):
        models = split_copies(build(seed=9), 2)
        raised(load(models, directory))
        assert_hold_together(models, old)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(13, "denied")])
def test_a_disk_that_fills_on_one_rank_fails_all_and_keeps_the_previous_checkpoint(
    merge: bool, error: OSError, saved, monkeypatch
) -> None:
    part = "pytorch_model-00002-of" if merge else "pp_1.bin"
    fail_on(monkeypatch, files, "flush_file", part, error)
    options = {"merge_checkpoints": True, "max_shard_size": "60KB"} if merge else {}
    # Merging, whichever rank assembles the second shard; it goes on taking part in the transfers of the others.
    said = os.strerror(error.errno)
    assert_save_fails_and_changes_nothing(saved, build(seed=1), part, said, "rank ", "is intact", **options)


def test_a_full_disk_is_named_whatever_library_writes(tmp_path) -> None:
    """A real one: the operating system refuses to let the file grow."""

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        for safe in (False, True):
            for merge in (False, True):
                results = save(
                    split_copies(build(seed=1), 2), tmp_path, safe_serialization=safe, merge_checkpoints=merge
                )
                assert_all_refuse(results, "cannot write", str(tmp_path))
        assert os.listdir(tmp_path) == []

    split_copies(build(), 2)  # in the parent, so that it is quick in the child
    assert in_fork(attempt) == 0


def test_an_unwritable_place_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("not a folder")
    results = save(split_copies(build(), 2), tmp_path / "file" / "below")
    assert_all_refuse(results, "rank 0", str(tmp_path / "file"))


def test_a_failure_just_before_the_commit_changes_nothing(saved, monkeypatch) -> None:
    """What writes the table of contents."""
    original, name = open, "manifest.staged"

    def failing(path, *mode, **options):
        if name in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *mode, **options)

    monkeypatch.setattr("builtins.open", failing)
    assert_save_fails_and_changes_nothing(saved, build(seed=1), "rank 0", name)


def test_ranks_that_were_asked_for_different_things_all_raise(tmp_path) -> None:
    from checkpoint_ranks import on_ranks
    from penstock.checkpoint.plan import SavingRank
    from penstock.checkpoint.save import save_parallelized

    models = split_copies(build(), 2)

    def work(rank: int, comm) -> None:
        place = SavingRank(rank, 2)
        save_parallelized(models[rank], tmp_path / str(rank), world_comm=comm, place=place)

    assert_all_refuse(on_ranks(2, work), "rank 0", "rank 1", "was asked for")


def test_state_that_is_no_tensor_is_refused_by_name(tmp_path) -> None:
    model = build()
    state = {**model.state_dict(), "transformer.note": "text"}
    with pytest.raises(CheckpointError, match=r"cannot save transformer\.note: it is a str"):
        save_alone(model, tmp_path, state_dict=state)


def test_the_error_can_travel_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(CheckpointError("text")))) == "text"


def test_after_a_failed_save_the_next_one_succeeds(saved, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        fail_on(patch, files, "flush_file", "pp_1.bin", OSError(errno.ENOSPC, "No space left on device"))
        assert_all_refuse(save(split_copies(build(seed=2), 3), saved), "No space left")
    new = build(seed=3)
    raised(save(split_copies(new, 3), saved))
    (model,) = split_copies(build(), 1)
    raised(load([model], saved))
    assert_holds(model, new)
