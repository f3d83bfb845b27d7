"""A stage that is loaded alone has what `from_pretrained` of the whole model gives it, and nothing else is read."""

import collections
import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoint_ranks import in_fork, scramble, split_copies
from families import FAMILIES
from penstock.modeling.graph.units import list_units
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights import load as stage_loading
from penstock.modeling.weights.initialise import meta_model
from penstock.modeling.weights.load import forget_ties, load_config, load_stage
from penstock.modeling.weights.names import alias_groups
from penstock.tensor_parallel import TensorParallel
from stage_driver import cut
from test_materialize_init import assert_is_part_of, peak_growth


def build(family: str, **settings) -> transformers.PreTrainedModel:
    return scramble(FAMILIES[family].build(dtype=torch.float32, **settings), 4)


def stages_of(model, num_stages: int) -> list[list[str]]:
    return cut(list_units(meta_model(type(model), model.config)), num_stages)


@pytest.fixture
def reads(monkeypatch) -> collections.Counter:
    """Counts, by name, how often a tensor's bytes were asked for while transformers loads safetensors files."""
    counter: collections.Counter = collections.Counter()
    original = transformers.modeling_utils.safe_open

    class Slice:
        def __init__(self, name, inner) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, key):
            counter[self.name] += 1
            return self.inner[key]

        def __getattr__(self, name):
            assert name in ("get_shape", "get_dtype"), name
            return getattr(self.inner, name)

    class File:
        def __init__(self, *args, **kwargs) -> None:
            self.inner = original(*args, **kwargs)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *args):
            return self.inner.__exit__(*args)

        def keys(self):
            return self.inner.keys()

        def metadata(self):
            return self.inner.metadata()

        def get_slice(self, name):
            return Slice(name, self.inner.get_slice(name))

        def get_tensor(self, name):
            counter[name] += 1
            return self.inner.get_tensor(name)

    monkeypatch.setattr(transformers.modeling_utils, "safe_open", File)
    monkeypatch.setattr(stage_loading, "safe_open", File)
    return counter


@pytest.mark.parametrize("sharded", [False, True])
def test_a_stage_opens_only_the_files_that_have_its_own_tensors(sharded: bool, tmp_path) -> None:
    """All others may be damaged."""
    reference = build("llama", vocab_size=98)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    stages = stages_of(reference, 3)
    own = {file for name, file in places.items() if name.startswith(tuple(f"{unit}." for unit in stages[1]))}
    assert 1 < len(own) < len(set(places.values()))
    for file in set(places.values()) - own:
        (tmp_path / file).write_bytes(b"damaged")
    skeleton = meta_model(type(reference), reference.config)
    tensor_parallel = TensorParallel(skeleton, 0, 2, alias_groups(skeleton)) if sharded else None
    model, info = load_stage(type(reference), str(tmp_path), stages, [1], tensor_parallel, dtype=torch.float32)
    assert (info.missing_keys, info.unexpected_keys) == ((), ())
    assert any(not parameter.is_meta for parameter in model.parameters())
    if not sharded:
        assert_is_part_of(model, reference)


def test_a_tensor_that_the_index_does_not_list_is_named(tmp_path) -> None:
    """transformers finds it, as it reads every file."""
    reference = build("llama", vocab_size=98)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    assert torch.equal(type(reference).from_pretrained(tmp_path).model.norm.weight, reference.model.norm.weight)
    stages = stages_of(reference, 2)
    load_stage(type(reference), str(tmp_path), stages, [0], dtype=torch.float32)
    with pytest.raises(ValueError, match=f"not list 1 tensors of {file}, such as model.norm.weight"):
        load_stage(type(reference), str(tmp_path), stages, [1], dtype=torch.float32)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_stage_is_loaded_as_in_the_whole_model_and_reads_only_its_own(family: str, tmp_path, reads) -> None:
    build(family).save_pretrained(tmp_path, max_shard_size="20KB")
    model_class = type(build(family))
    whole = model_class.from_pretrained(tmp_path)
    everything = dict(reads)
    assert set(everything.values()) == {1}
    stages = stages_of(whole, 3)
    ties = whole.all_tied_weights_keys
    tied = {*ties, *ties.values()}
    names, times = set(), collections.Counter()
    for stage in range(3):
        reads.clear()
        model, info = load_stage(model_class, tmp_path, stages, [stage])
        assert type(model) is model_class and not model.training
        assert model.all_tied_weights_keys == ties
        assert (info.missing_keys, info.unexpected_keys, info.mismatched_keys, info.untied) == ((), (), (), ())
        own = assert_is_part_of(model, whole)
        names |= own
        foreign = tuple(f"{unit}." for other in stages if other is not stages[stage] for unit in other)
        assert not [name for name in reads if name.startswith(foreign) and name not in tied]
        times.update(reads)
        SplitModel(model, stages, [stage])
        assert assert_is_part_of(model, whole) == own
    assert names >= set(dict(whole.named_parameters(remove_duplicate=False)))
    assert times.keys() == everything.keys()
    outside = {
        name for name in everything if not name.startswith(tuple(f"{unit}." for part in stages for unit in part))
    }
    if family != "mixtral":  # whose files have other names than the model
        assert {name for name, count in times.items() if count > 1} <= tied | outside


def test_experts_that_are_fused_while_loading_are_read_by_their_stage_only(tmp_path, reads) -> None:
    reference = build("mixtral")
    reference.save_pretrained(tmp_path)
    stages = stages_of(reference, 2)
    first, _ = load_stage(type(reference), tmp_path, stages, [0])
    layers = {int(unit.rpartition(".")[2]) for unit in stages[0] if ".layers." in unit}
    experts = reference.config.num_local_experts
    expected = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w{part}.weight"
        for layer in layers
        for expert in range(experts)
        for part in (1, 2, 3)
    }
    assert {name for name in reads if ".experts." in name} == expected
    assert_is_part_of(first, reference)


def test_a_bin_checkpoint_loads_too(tmp_path) -> None:
    reference = build("gpt2")
    reference.config.save_pretrained(tmp_path)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    stages = stages_of(reference, 2)
    for stage in range(2):
        model, info = load_stage(type(reference), tmp_path, stages, [stage])
        assert_is_part_of(model, reference)
        assert not info.missing_keys and not info.unexpected_keys


def rewrite(directory, change) -> None:
    """Change the tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def load_both(model_class, directory, num_stages: int = 3, **kwargs):
    """The whole model and what transformers says about it, and (model, info) of each stage; all from one seed."""
    torch.manual_seed(3)
    whole, expected = model_class.from_pretrained(directory, output_loading_info=True, **kwargs)
    state = torch.get_rng_state()
    stages = cut(list_units(meta_model(model_class, whole.config)), num_stages)
    loaded = []
    for stage in range(num_stages):
        torch.manual_seed(3)
        loaded.append(load_stage(model_class, directory, stages, [stage], **kwargs))
        assert torch.equal(torch.get_rng_state(), state)
    return whole, expected, loaded


@pytest.mark.parametrize(
    "head",
    ["BertForSequenceClassification", "BertForMaskedLM", "BertForQuestionAnswering", "BertForTokenClassification"],
)
def test_a_head_that_the_checkpoint_lacks_is_initialised_as_in_the_whole_model(head: str, tmp_path) -> None:
    """From a checkpoint of the bare model, whose names lack the prefix."""
    bare = build("bert_mlm").bert
    bare.save_pretrained(tmp_path)
    whole, expected, loaded = load_both(getattr(transformers, head), tmp_path)
    assert expected["missing_keys"]
    for model, info in loaded:
        assert_is_part_of(model, whole)
        assert set(info.missing_keys) == expected["missing_keys"]
        assert set(info.unexpected_keys) == expected["unexpected_keys"]


def test_missing_and_unexpected_keys_are_those_of_the_whole_model_on_every_stage(tmp_path) -> None:
    """Weights missing on several stages draw from one random stream, in the whole model's order."""
    build("gpt2").save_pretrained(tmp_path)
    removed = [
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.1.mlp.c_fc.weight",
        "transformer.h.3.mlp.c_proj.weight",
    ]

    def change(tensors) -> None:
        for name in removed:
            del tensors[name]
        tensors["transformer.h.9.ln_1.weight"] = torch.zeros(32)
        tensors["strange"] = torch.zeros(1)

    rewrite(tmp_path, change)
    whole, expected, loaded = load_both(transformers.GPT2LMHeadModel, tmp_path)
    assert expected["missing_keys"] == set(removed)
    for model, info in loaded:
        assert_is_part_of(model, whole)
        assert set(info.missing_keys) == set(removed)
        assert set(info.unexpected_keys) == {"strange", "transformer.h.9.ln_1.weight"}


def test_a_tie_is_found_under_whichever_name_the_checkpoint_has(tmp_path) -> None:
    reference = build("gpt2")
    reference.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("transformer.wte.weight")}))
    whole, _, loaded = load_both(transformers.GPT2LMHeadModel, tmp_path)
    assert torch.equal(whole.transformer.wte.weight, reference.transformer.wte.weight)
    for model, info in loaded:
        assert_is_part_of(model, whole)
        assert not info.missing_keys and not info.untied


def test_a_checkpoint_with_different_values_for_tied_names_is_not_tied(tmp_path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1}))
    whole, _, loaded = load_both(transformers.GPT2LMHeadModel, tmp_path)
    assert not whole.all_tied_weights_keys
    untied = set().union(*(info.untied for _, info in loaded))
    assert untied == {"lm_head.weight"}
    for model, _ in loaded:
        assert_is_part_of(model, whole)
        forget_ties(model, untied)
        assert not model.all_tied_weights_keys


def test_dtype_and_other_arguments_reach_from_pretrained(tmp_path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    kwargs = {"dtype": torch.bfloat16, "attn_implementation": "eager", "device_map": "cpu"}
    whole, _, loaded = load_both(transformers.GPT2LMHeadModel, tmp_path, **kwargs)
    for model, _ in loaded:
        assert_is_part_of(model, whole)
        assert model.config._attn_implementation == "eager"


def test_shapes_that_do_not_fit_are_an_error_of_their_stage(tmp_path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"transformer.ln_f.weight": torch.zeros(31)}))
    stages = stages_of(build("gpt2"), 2)
    load_stage(transformers.GPT2LMHeadModel, tmp_path, stages, [0])
    with pytest.raises(ValueError, match=r"transformer.ln_f.weight: \[31\] in the checkpoint, \[32\] in the model"):
        load_stage(transformers.GPT2LMHeadModel, tmp_path, stages, [1])
    load_stage(transformers.GPT2LMHeadModel, tmp_path, stages, [1], ignore_mismatched_sizes=True)


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
    stages = stages_of(reference, 2)
    model, _ = load_stage(type(reference), tmp_path, stages, [0])
    (split, _) = split_copies(reference, 2)
    assert model.state_dict().keys() == split.state_dict().keys()
    assert not [name for name in vars(model) if name in ("_held", "_declared_ties")]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert "_load_pretrained_model" not in vars(type(model)) and stage_loading._stage_class


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_memory_holds_the_stage_and_not_the_checkpoint(kind: str, tmp_path) -> None:
    config = transformers.GPT2Config(
        vocab_size=512, n_embd=512, n_layer=12, n_head=8, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    if kind == "bin":
        config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        model.save_pretrained(tmp_path)
    assert os.listdir(tmp_path)
    stages = cut(list_units(meta_model(transformers.GPT2LMHeadModel, config)), 6)
    layer = 12 * 512 * 512 * 4
    del model

    def measure() -> None:
        grown = peak_growth(lambda: load_stage(transformers.GPT2LMHeadModel, tmp_path, stages, [2]))
        # Three layers of twelve are the stage's own. safetensors also maps their pages of the file while it copies.
        assert grown < 7 * layer, grown / layer

    assert in_fork(measure) == 0
