"""Under tensor parallelism only slices are kept: initialised and loaded, they are the whole model's, bit for bit."""

import collections
import contextlib
import copy
import ctypes
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Transpose, WeightConverter

import penstock
from families import FAMILIES
from launch import run_python
from penstock.modeling.graph.units import list_units
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.initialise import init_stage, meta_model
from penstock.modeling.weights.load import load_stage
from penstock.modeling.weights.names import alias_groups
from penstock.tensor_parallel import Sharding, TensorParallel
from penstock.tensor_parallel.loading import ShardKeeper, _pairs_of_ties
from pool import Pool
from stage_driver import cut
from tensor_parallel_ranks import SETTINGS, VOCABULARY, from_config_against_unsplit
from test_materialize_load import build as build_scrambled

WITH_A_PLAN = ["bert_mlm", "gpt2", "llama", "mistral", "mixtral", "opt", "qwen3", "vit"]


def configuration(family: str) -> tuple[Any, Any]:
    row = FAMILIES[family]
    settings = {**row.settings, **SETTINGS.get(family, VOCABULARY)}
    return getattr(transformers, row.model_class), getattr(transformers, row.config_class)(**settings)


def places(model_class: Any, config: Any, size: int = 2) -> Any:
    """Stages, and for each stage and index the cut of the whole model."""
    skeleton = meta_model(model_class, config)
    stages = cut(list_units(skeleton), 2)
    for stage in range(2):
        for index in range(size):
            yield stages, stage, TensorParallel(skeleton, index, size, alias_groups(skeleton))


def assert_is_slice_of(model: nn.Module, whole: nn.Module, stages: Any, stage: int, cut: TensorParallel) -> None:
    """Cut weights are meta tensors until the model is split; then all are this rank's part of the whole model's."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.is_meta == (name in cut.shards), name
        assert parameter.shape == expected[name].shape, name
    SplitModel(model, stages, [stage], cut)
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found
    for name, parameter in found.items():
        theirs = expected[name].detach()
        if name in cut.shards:
            theirs = cut.shards[name].take(theirs, cut.index, cut.size)
        assert torch.equal(parameter, theirs), name
        assert parameter.dtype == theirs.dtype and parameter.requires_grad == expected[name].requires_grad
    names_of: dict[int, set[str]] = collections.defaultdict(set)
    for name, parameter in expected.items():
        names_of[id(parameter)].add(name)
    for names in names_of.values():
        here = {id(found[name]) for name in names if name in found}
        assert len(here) <= 1, f"{names} are tied"


@pytest.mark.parametrize("family", WITH_A_PLAN)
def test_slices_are_initialised_as_in_the_whole_model(family: str) -> None:
    model_class, config = configuration(family)
    torch.manual_seed(7)
    whole = model_class._from_config(copy.deepcopy(config))
    state = torch.get_rng_state()
    for stages, stage, tensor_parallel in places(model_class, config):
        model = init_stage(model_class, config, stages, [stage], 7, tensor_parallel)
        assert torch.equal(torch.get_rng_state(), state)
        assert_is_slice_of(model, whole, stages, stage, tensor_parallel)


@pytest.mark.parametrize("family", WITH_A_PLAN)
def test_slices_are_loaded_as_in_the_whole_model(family: str, tmp_path: Path) -> None:
    build_scrambled(family, **SETTINGS.get(family, VOCABULARY)).save_pretrained(tmp_path, max_shard_size="20KB")
    model_class, config = configuration(family)
    whole = model_class.from_pretrained(tmp_path)
    for stages, stage, tensor_parallel in places(model_class, config):
        model, info = load_stage(model_class, str(tmp_path), stages, [stage], tensor_parallel)
        assert (info.missing_keys, info.unexpected_keys, info.mismatched_keys, info.untied) == ((), (), (), ())
        assert_is_slice_of(model, whole, stages, stage, tensor_parallel)


def test_slices_of_a_bin_checkpoint_have_memory_of_their_own(tmp_path: Path) -> None:
    reference = build_scrambled("gpt2", **VOCABULARY)
    reference.config.save_pretrained(tmp_path)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    for stages, stage, tensor_parallel in places(type(reference), reference.config):
        model, _ = load_stage(type(reference), str(tmp_path), stages, [stage], tensor_parallel)
        assert_is_slice_of(model, reference, stages, stage, tensor_parallel)
        for name, parameter in model.named_parameters():
            if name in tensor_parallel.shards:
                assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name


def test_cut_weights_that_the_checkpoint_lacks_are_initialised_as_in_the_whole_model(tmp_path: Path) -> None:
    """A head with a vocabulary, from a checkpoint of the bare model, and a layer in the middle."""
    build_scrambled("llama", **VOCABULARY).model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    model_class, config = configuration("llama")
    torch.manual_seed(3)
    whole, expected = model_class.from_pretrained(tmp_path, output_loading_info=True)
    state = torch.get_rng_state()
    assert expected["missing_keys"] == {"lm_head.weight", "model.layers.1.mlp.down_proj.weight"}
    for stages, stage, tensor_parallel in places(model_class, config):
        torch.manual_seed(3)
        model, info = load_stage(model_class, str(tmp_path), stages, [stage], tensor_parallel)
        assert torch.equal(torch.get_rng_state(), state)
        assert set(info.missing_keys) == expected["missing_keys"]
        assert_is_slice_of(model, whole, stages, stage, tensor_parallel)


@pytest.mark.parametrize("rows", [50, 90])
def test_a_weight_of_another_shape_is_named_with_the_whole_shapes(rows: int, tmp_path: Path) -> None:
    """Also one whose whole is as large as the slice that is wanted."""
    build_scrambled("llama", **VOCABULARY).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:rows].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    model_class, config = configuration("llama")
    *_, (stages, stage, tensor_parallel) = places(model_class, config)
    width = tensors["lm_head.weight"].shape[1]
    message = rf"lm_head.weight: \[{rows}, {width}\] in the checkpoint, \[100, {width}\] in the model"
    with pytest.raises(ValueError, match=message):
        load_stage(model_class, str(tmp_path), stages, [stage], tensor_parallel)
    torch.manual_seed(3)
    whole = model_class.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    torch.manual_seed(3)
    arguments: dict[str, Any] = {"ignore_mismatched_sizes": True}
    model, _ = load_stage(model_class, str(tmp_path), stages, [stage], tensor_parallel, **arguments)
    assert_is_slice_of(model, whole, stages, stage, tensor_parallel)


@pytest.mark.parametrize("change", ["none", "last row"])
def test_names_that_are_tied_are_compared_as_a_whole(change: str, tmp_path: Path) -> None:
    """A checkpoint with both: ranks with equal slices must find what those with unequal ones do."""
    model = build_scrambled("llama", tie_word_embeddings=True, **VOCABULARY)
    model.config.save_pretrained(tmp_path)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    if change != "none":
        tensors["lm_head.weight"][-1] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = type(model).from_pretrained(tmp_path)
    assert (whole.lm_head.weight is whole.get_input_embeddings().weight) == (change == "none")
    skeleton = meta_model(type(model), model.config)
    units = list_units(skeleton)
    for index in range(2):
        tensor_parallel = TensorParallel(skeleton, index, 2, alias_groups(skeleton))
        loaded, info = load_stage(type(model), str(tmp_path), [units], [0], tensor_parallel)
        assert info.untied == (() if change == "none" else ("lm_head.weight",))
        assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == (change == "none")
        assert_is_slice_of(loaded, whole, [units], 0, tensor_parallel)


def test_all_of_several_tied_names_are_compared_with_one_that_is_there() -> None:
    ties = {"encoder": "shared", "decoder": "shared", "head": "shared"}
    assert list(_pairs_of_ties(ties, {"shared", "encoder", "head"})) == [("encoder", "shared"), ("head", "shared")]
    assert list(_pairs_of_ties(ties, {"encoder", "decoder", "head"})) == [("decoder", "encoder"), ("head", "encoder")]
    assert not list(_pairs_of_ties(ties, {"decoder"})) and not list(_pairs_of_ties(ties, {"shared"}))


def test_a_tied_weight_of_another_shape_is_initialised_once(tmp_path: Path) -> None:
    """As in the whole model: one draw for the embedding, none for the head, and the rest of the stream as it was."""
    model = build_scrambled("llama", tie_word_embeddings=True, **VOCABULARY)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        tensors[name] = tensors[name][:-4].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    arguments: dict[str, Any] = {"ignore_mismatched_sizes": True}
    torch.manual_seed(3)
    whole, expected = type(model).from_pretrained(tmp_path, output_loading_info=True, **arguments)
    state = torch.get_rng_state()
    skeleton = meta_model(type(model), model.config)
    units = list_units(skeleton)
    tensor_parallel = TensorParallel(skeleton, 1, 2, alias_groups(skeleton))
    torch.manual_seed(3)
    loaded, info = load_stage(type(model), str(tmp_path), [units], [0], tensor_parallel, **arguments)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name for name, *_ in info.mismatched_keys} == {name for name, *_ in expected["mismatched_keys"]}
    assert set(info.missing_keys) == expected["missing_keys"]
    assert_is_slice_of(loaded, whole, [units], 0, tensor_parallel)


def test_conversions_see_the_shapes_of_whole_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that transposes only if the checkpoint's shape is not the model's."""
    model = build_scrambled("llama", **VOCABULARY)
    model.save_pretrained(tmp_path)
    converter = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1, check_dims=True)])
    original = transformers.modeling_utils.get_model_conversion_mapping
    monkeypatch.setattr(
        transformers.modeling_utils,
        "get_model_conversion_mapping",
        lambda *args, **kwargs: [*original(*args, **kwargs), converter],
    )
    model_class, config = configuration("llama")
    for stages, stage, tensor_parallel in places(model_class, config):
        loaded, info = load_stage(model_class, str(tmp_path), stages, [stage], tensor_parallel)
        assert not info.missing_keys and not info.mismatched_keys
        assert_is_slice_of(loaded, model, stages, stage, tensor_parallel)


def test_a_weight_that_is_written_in_parts_between_others_is_refused_not_wrong() -> None:
    first, second = (nn.Parameter(torch.empty(4, 4, device="meta")) for _ in range(2))
    keeper = ShardKeeper(1, 2)
    for parameter in (first, second):
        keeper.watch(parameter, Sharding(0))
    aten = torch.ops.aten
    with torch.no_grad():
        assert keeper.write(aten.fill_.Scalar, (first, 1.0), {})
        assert keeper.write(aten.zero_.default, (first[2],), {}), "a row right after the whole"
        assert keeper.write(aten.fill_.Scalar, (second, 2.0), {})
        with pytest.raises(NotImplementedError, match="changed in part"):
            keeper.write(aten.zero_.default, (first[3],), {})
        with pytest.raises(NotImplementedError, match="changed in part"):
            keeper.write(aten.mul_.Tensor, (first, torch.tensor(2.0)), {})
        with pytest.raises(NotImplementedError, match="computed from one that is not here"):
            keeper.write(aten.copy_.default, (first, second), {})
        with pytest.raises(NotImplementedError, match="computed from a weight that is sharded"):
            keeper.write(aten.copy_.default, (torch.ones(4, 4), first), {})
        assert not keeper.write(aten.mul.Tensor, (first, torch.tensor(2.0)), {})
        assert not keeper.write(aten.zero_.default, (torch.ones(2),), {})
    kept = keeper.shard_of(second)
    assert kept is not None and torch.equal(kept, torch.full((2, 4), 2.0))
    second.data = second.data.clone()
    with pytest.raises(NotImplementedError, match="got other data"):
        keeper.shard_of(second)


def test_a_model_is_trained_from_its_configuration_as_the_unsplit_one(pool: Pool) -> None:
    for differences in pool.run(4, from_config_against_unsplit, "gpt2", 2, 2):
        assert differences["weights"] == 0 and differences["loss"] < 1e-5


def loading_what_does_not_fit(folder: str) -> None:
    penstock.from_pretrained(folder, config={"model_parallelism": {"pipeline_parallel_size": 2}})


def test_a_weight_that_fits_on_one_rank_only_is_an_error_on_both(pool: Pool, tmp_path: Path) -> None:
    build_scrambled("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    first, second = pool.run(2, loading_what_does_not_fit, str(tmp_path), outcomes=True)
    assert isinstance(second, ValueError) and "lm_head.weight: [" in str(second)
    assert isinstance(first, RuntimeError) and "rank 1 failed while making its part of the model: ValueError" in str(
        first
    )


def tiny_gpt2() -> transformers.GPT2Config:
    return transformers.GPT2Config(
        vocab_size=512, n_embd=512, n_layer=12, n_head=8, n_positions=64, bos_token_id=1, eos_token_id=2
    )


def measure_growth(kind: str, folder: str) -> None:
    config, model_class = tiny_gpt2(), transformers.GPT2LMHeadModel
    skeleton = meta_model(model_class, config)
    stages = cut(list_units(skeleton), 2)
    tensor_parallel = TensorParallel(skeleton, 1, 4, alias_groups(skeleton))
    layer = 12 * 512 * 512 * 4
    with sampled_peak() as peak:
        if kind == "init":
            made = init_stage(model_class, config, stages, [0], 0, tensor_parallel)
        else:
            made = load_stage(model_class, folder, stages, [0], tensor_parallel)
    del made  # not before memory was looked at for the last time
    # Six layers are the stage's, of twelve, and a quarter of them this rank's. Whole weights (a third of a layer at
    # most) come and go: one that is created, one that is written, one that only draws its numbers.
    assert 1.5 * layer < peak[0] < (2.8 if kind == "init" else 2.2) * layer, peak[0] / layer


@contextlib.contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """By how many bytes memory grows at its highest that is no page of a file."""

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    def watch() -> None:
        while not over.wait(0.0005):
            peak[0] = max(peak[0], resident() - before)

    before, peak, over = resident(), [0], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        peak[0] = max(peak[0], resident() - before)


@pytest.mark.parametrize("kind", ["init", "load"])
def test_memory_holds_the_slices_and_not_the_stage(kind: str, tmp_path: Path) -> None:
    """In a process of its own, whose weights are given back when freed, as those of large models always are."""
    if kind == "load":
        transformers.GPT2LMHeadModel(tiny_gpt2()).save_pretrained(tmp_path)
    result = run_python("-m", "test_materialize_slices", kind, tmp_path)
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    M_MMAP_THRESHOLD = -3  # from malloc.h
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536) == 1
    measure_growth(*sys.argv[1:])
