"""A stage that is loaded alone, or a slice of it, is what `from_pretrained` of the whole model gives, bit for bit."""

import copy
import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Transpose, WeightConverter

import penstock
from penstock.modeling.graph.units import list_units
from penstock.modeling.sharding import Sharding
from penstock.modeling.weights.initialise import init_stage, meta_model
from penstock.modeling.weights.load import forget_ties, load_config, load_stage
from penstock.modeling.weights.whole import alias_groups
from penstock.tensor_parallel.apply import TensorParallel
from penstock.tensor_parallel.loading import ShardKeeper
from tests.modeling.test_materialize_init import EACH, assert_is_part_of, assert_right, parts, settings_of
from tests.support.checkpoint_ranks import scramble, split_copies
from tests.support.families import FAMILIES
from tests.support.launch import run_python
from tests.support.peaks import peak_growth, sampled_peak
from tests.support.pool import Pool
from tests.support.stage_driver import cut
from tests.support.tensor_parallel_ranks import VOCABULARY, from_config_against_unsplit


def build(family: str, **settings) -> transformers.PreTrainedModel:
    return scramble(FAMILIES[family].build(dtype=torch.float32, **settings), 4)


def damage_others(folder: Path, stages: list[list[str]], local: list[int], keep: Set[str]) -> int:
    """Spoil every file of a checkpoint that has nothing but weights of other stages that are not in `keep`."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    foreign = tuple(f"{unit}." for stage, units in enumerate(stages) if stage not in local for unit in units)
    needed = {file for name, file in places.items() if name in keep or not name.startswith(foreign)}
    damaged = set(places.values()) - needed
    for file in damaged:
        (folder / file).unlink()  # it is linked to from elsewhere
        (folder / file).write_bytes(b"damaged")
    return len(damaged)


@pytest.mark.parametrize(("family", "size"), EACH)
def test_every_part_is_loaded_as_in_the_whole_model_and_reads_only_its_own(family: str, size: int, tmp_path) -> None:
    """Each tensor but the smallest is in a file of its own."""
    model = build(family, **settings_of(family, size))
    model.save_pretrained(tmp_path / "whole", max_shard_size=3000)
    whole = type(model).from_pretrained(tmp_path / "whole")
    ties = whole.all_tied_weights_keys
    names: set[str] = set()
    damaged = 0
    for number, (stages, local, tp) in enumerate(parts(type(model), whole.config, 3 if size == 1 else 2, size)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder, copy_function=os.link)
        damaged += damage_others(folder, stages, local, {*ties, *ties.values()})
        loaded, info = load_stage(type(model), str(folder), stages, local, tp)
        assert type(loaded) is type(model) and not loaded.training
        assert loaded.all_tied_weights_keys == ties
        assert (info.missing_keys, info.unexpected_keys, info.mismatched_keys, info.untied) == ((), (), (), ())
        assert_right(loaded, whole, stages, local, tp)
        names |= set(dict(loaded.named_parameters(remove_duplicate=False)))
    assert damaged > 1
    assert names >= set(dict(whole.named_parameters(remove_duplicate=False)))


def test_a_tensor_that_the_index_does_not_list_is_named(tmp_path) -> None:
    """transformers finds it, as it reads every file."""
    reference = build("llama", vocab_size=98)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    assert torch.equal(type(reference).from_pretrained(tmp_path).model.norm.weight, reference.model.norm.weight)
    stages = cut(list_units(meta_model(type(reference), reference.config)), 2)
    load_stage(type(reference), str(tmp_path), stages, [0], dtype=torch.float32)
    with pytest.raises(ValueError, match=f"not list 1 tensors of {file}, such as model.norm.weight"):
        load_stage(type(reference), str(tmp_path), stages, [1], dtype=torch.float32)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shorten(folder: Path, rows: dict[str, int]) -> None:
    """Leave so many rows of these weights, counted as slices are."""
    change = {name: slice(number) for name, number in rows.items()}
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][at].clone() for name, at in change.items()}))


def load_each(model_class: Any, directory: Path, num_stages: int, size: int = 1, **kwargs: Any) -> Any:
    """The whole model and what transformers says about it, and (model, info) of each part; all from one seed, and found
    to be the same."""
    torch.manual_seed(3)
    whole, expected = model_class.from_pretrained(directory, output_loading_info=True, **kwargs)
    state, loaded, mismatched = torch.get_rng_state(), [], set()
    for stages, local, tp in parts(model_class, whole.config, num_stages, size):
        torch.manual_seed(3)
        model, info = load_stage(model_class, str(directory), stages, local, tp, **kwargs)
        assert torch.equal(torch.get_rng_state(), state)
        assert set(info.missing_keys) == expected["missing_keys"]
        assert set(info.unexpected_keys) == expected["unexpected_keys"]
        mismatched |= {name for name, *_ in info.mismatched_keys}
        assert_right(model, whole, stages, local, tp)
        loaded.append((model, info))
    assert mismatched == {name for name, *_ in expected["mismatched_keys"]}
    return whole, expected, loaded


@pytest.mark.parametrize("size", [1, 2])
def test_a_bin_checkpoint_loads_too_and_its_slices_have_memory_of_their_own(size: int, tmp_path: Path) -> None:
    reference = build("gpt2", **VOCABULARY)
    reference.config.save_pretrained(tmp_path)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    whole, _, loaded = load_each(type(reference), tmp_path, 2, size)
    assert_is_part_of(whole, reference)
    for model, _ in loaded:
        for name, parameter in model.named_parameters():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name


@pytest.mark.parametrize(
    ("family", "head", "size"),
    [
        ("bert_mlm", "BertForSequenceClassification", 1),
        ("bert_mlm", "BertForMaskedLM", 1),
        ("llama", "LlamaForCausalLM", 2),
    ],
)
def test_what_the_checkpoint_lacks_is_initialised_as_in_the_whole_model(
    family: str, head: str, size: int, tmp_path: Path
) -> None:
    """From a checkpoint of the bare model, whose names lack the prefix; and a layer in the middle."""
    build(family, **settings_of(family, size)).base_model.save_pretrained(tmp_path)
    if family == "llama":
        rewrite(tmp_path, lambda tensors: tensors.pop("layers.1.mlp.down_proj.weight"))
    _, expected, _ = load_each(getattr(transformers, head), tmp_path, 3 if size == 1 else 2, size)
    assert expected["missing_keys"]
    if family == "llama":
        assert expected["missing_keys"] == {"lm_head.weight", "model.layers.1.mlp.down_proj.weight"}


def test_missing_and_unexpected_keys_are_those_of_the_whole_model_on_every_stage(tmp_path) -> None:
    """Weights missing on several stages draw from one random stream, in the whole model's order."""
    build("gpt2").save_pretrained(tmp_path)
    removed = {f"transformer.h.{at}.weight" for at in ("0.attn.c_attn", "1.mlp.c_fc", "3.mlp.c_proj")}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in removed:
            del tensors[name]
        tensors |= {"transformer.h.9.ln_1.weight": torch.zeros(32), "strange": torch.zeros(1)}

    rewrite(tmp_path, change)
    _, expected, loaded = load_each(transformers.GPT2LMHeadModel, tmp_path, 3)
    assert expected["missing_keys"] == removed
    for _, info in loaded:
        assert set(info.unexpected_keys) == {"strange", "transformer.h.9.ln_1.weight"}


def test_a_tie_is_found_under_whichever_name_the_checkpoint_has_unless_values_differ(tmp_path) -> None:
    reference = build("gpt2")
    reference.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("transformer.wte.weight")}))
    whole, _, loaded = load_each(transformers.GPT2LMHeadModel, tmp_path, 3)
    assert torch.equal(whole.transformer.wte.weight, reference.transformer.wte.weight)
    assert not any(info.missing_keys or info.untied for _, info in loaded)
    rewrite(tmp_path, lambda tensors: tensors.update({"transformer.wte.weight": tensors["lm_head.weight"] + 1}))
    whole, _, loaded = load_each(transformers.GPT2LMHeadModel, tmp_path, 3)
    assert not whole.all_tied_weights_keys
    untied = set().union(*(info.untied for _, info in loaded))
    assert untied == {"lm_head.weight"}
    for model, _ in loaded:
        forget_ties(model, untied)
        assert not model.all_tied_weights_keys


@pytest.mark.parametrize("untied", [(), ("lm_head.weight",)], ids=["equal", "last row"])
def test_slices_of_names_that_are_tied_are_compared_as_a_whole(untied: tuple[str, ...], tmp_path: Path) -> None:
    """A checkpoint with both: ranks with equal slices must find what those with unequal ones do."""
    model = build("llama", tie_word_embeddings=True, **VOCABULARY)
    model.config.save_pretrained(tmp_path)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    if untied:
        tensors["lm_head.weight"][-1] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole, _, loaded = load_each(type(model), tmp_path, 1, 2)
    assert all(info.untied == untied for _, info in loaded)
    for one in (whole, *(found for found, _ in loaded)):
        assert (one.lm_head.weight is one.get_input_embeddings().weight) == (not untied)


def test_dtype_and_other_arguments_reach_from_pretrained(tmp_path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    kwargs = {"dtype": torch.bfloat16, "attn_implementation": "eager", "device_map": "cpu"}
    _, _, loaded = load_each(transformers.GPT2LMHeadModel, tmp_path, 2, **kwargs)
    assert all(model.config._attn_implementation == "eager" for model, _ in loaded)


@pytest.mark.parametrize(("size", "rows"), [(1, 90), (2, 50), (2, 90)])
def test_a_weight_of_another_shape_is_an_error_of_its_stage_that_names_the_whole_shapes(
    size: int, rows: int, tmp_path: Path
) -> None:
    """Also one whose whole is as large as the slice that is wanted."""
    model = build("llama", **VOCABULARY)
    model.save_pretrained(tmp_path)
    shorten(tmp_path, {"lm_head.weight": rows})
    first, *_, last = parts(type(model), model.config, 2, size)
    load_stage(type(model), str(tmp_path), *first)
    width, ignore = model.config.hidden_size, {"ignore_mismatched_sizes": True}
    message = rf"lm_head.weight: \[{rows}, {width}\] in the checkpoint, \[100, {width}\] in the model"
    with pytest.raises(ValueError, match=message):
        load_stage(type(model), str(tmp_path), *last)
    torch.manual_seed(3)
    whole = type(model).from_pretrained(tmp_path, **ignore)
    torch.manual_seed(3)
    assert_right(load_stage(type(model), str(tmp_path), *last, **ignore)[0], whole, *last)


def test_a_tied_weight_of_another_shape_is_initialised_once(tmp_path: Path) -> None:
    """As in the whole model: one draw for the embedding, none for the head, and the rest of the stream as it was."""
    model = build("llama", tie_word_embeddings=True, **VOCABULARY)
    model.save_pretrained(tmp_path)
    shorten(tmp_path, {"model.embed_tokens.weight": -4, "model.layers.1.mlp.down_proj.weight": -4})
    load_each(type(model), tmp_path, 1, 2, ignore_mismatched_sizes=True)


def test_conversions_see_the_shapes_of_whole_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that transposes only if the checkpoint's shape is not the model's."""
    model = build("llama", **VOCABULARY)
    model.save_pretrained(tmp_path)
    converter = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1, check_dims=True)])
    original = transformers.modeling_utils.get_model_conversion_mapping
    with_it = lambda *args, **kwargs: [*original(*args, **kwargs), converter]  # noqa: E731
    monkeypatch.setattr(transformers.modeling_utils, "get_model_conversion_mapping", with_it)
    whole, _, _ = load_each(type(model), tmp_path, 2, 2)
    assert_is_part_of(whole, model)


@pytest.mark.parametrize(
    ("name", "value"),
    [("device_map", "auto"), ("device_map", {"": "cpu"}), ("tp_plan", "auto"), ("gguf_file", "x"), ("state_dict", {})],
)
def test_arguments_that_cannot_be_combined_with_stages_are_named(name: str, value, tmp_path) -> None:
    with pytest.raises(ValueError, match=name):
        load_stage(transformers.GPT2LMHeadModel, tmp_path, [["lm_head"]], [0], **{name: value})


def test_the_configuration_is_the_one_the_model_will_have(tmp_path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    config = load_config(tmp_path, n_positions=16, dtype="auto", attn_implementation="eager")
    assert config.n_positions == 16
    assert meta_model(transformers.GPT2LMHeadModel, config).config._attn_implementation == "eager"
    given = transformers.GPT2Config(n_layer=1)
    assert load_config(tmp_path, config=given) is given


def test_the_loaded_model_saves_and_trains_like_any_other(tmp_path) -> None:
    """Nothing of the loading is left on it."""
    reference = build("llama")
    reference.save_pretrained(tmp_path)
    stages = cut(list_units(meta_model(type(reference), reference.config)), 2)
    model, _ = load_stage(type(reference), tmp_path, stages, [0])
    (split, _) = split_copies(reference, 2)
    assert model.state_dict().keys() == split.state_dict().keys()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


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
    build("llama").save_pretrained(tmp_path)
    shorten(tmp_path, {"lm_head.weight": -1})
    first, second = pool.run(2, loading_what_does_not_fit, str(tmp_path), outcomes=True)
    assert isinstance(second, ValueError) and "lm_head.weight: [" in str(second)
    assert isinstance(first, RuntimeError) and "rank 1 failed while making its part of the model: ValueError" in str(
        first
    )


def measure(folder: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=512, n_embd=512, n_layer=12, n_head=8, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model_class = transformers.GPT2LMHeadModel
    skeleton = meta_model(model_class, config)
    whole = copy.deepcopy(skeleton).to_empty(device="cpu")
    for parameter in whole.parameters():
        parameter.data.zero_()
    whole.tie_weights()
    whole.save_pretrained(folder / "safetensors")
    config.save_pretrained(folder / "bin")
    torch.save(whole.state_dict(), folder / "bin" / "pytorch_model.bin")
    del whole
    units, layer = list_units(skeleton), 12 * 512 * 512 * 4
    # Of twelve layers three are the stage's own; or six, of which this rank has a quarter. Whole weights (a third of a
    # layer at most) come and go: one that is created, one that is written, one that only draws its numbers.
    for kind, num_stages, stage, size, least, most in (
        ("init", 6, 2, 1, 3, 6),
        ("safetensors", 6, 2, 1, -1, 7),  # it maps pages of the file, some only when they are used
        ("bin", 6, 2, 1, -1, 7),
        ("init", 2, 0, 4, 1.5, 2.8),
        ("safetensors", 2, 0, 4, 1.5, 2.2),
    ):
        stages = cut(units, num_stages)
        tensor_parallel = TensorParallel(skeleton, 1, size, alias_groups(skeleton)) if size > 1 else None
        if kind == "init":
            make = partial(init_stage, model_class, config, stages, [stage], 0, tensor_parallel)
        else:
            make = partial(load_stage, model_class, str(folder / kind), stages, [stage], tensor_parallel)
        if size == 1:
            peak = [peak_growth(make)]
        else:
            with sampled_peak() as peak:
                made = make()
            del made  # not before memory was looked at for the last time
        assert least * layer < peak[0] < most * layer, (kind, size, peak[0] / layer)


def test_memory_holds_the_stage_and_not_the_model_and_the_slices_and_not_the_stage(tmp_path: Path) -> None:
    """In a process of its own, whose weights are given back when freed, as those of large models always are."""
    result = run_python("-m", "tests.modeling.test_materialize_load", tmp_path)
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    M_MMAP_THRESHOLD = -3  # from malloc.h
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536) == 1
    measure(Path(sys.argv[1]))
