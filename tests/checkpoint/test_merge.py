"""Merging writes what `save_pretrained` of the unsplit model would write, and no rank gathers more than a shard."""

import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.checkpoint.file_specs import SaveOptions
from penstock.checkpoint.formats import ModelFormat
from penstock.checkpoint.ranks import SavingRank
from tests.support.checkpoint_ranks import assert_holds, gpt2, raised, save, scramble, split_copies
from tests.support.families import FAMILIES


def build(family: str) -> torch.nn.Module:
    return scramble(FAMILIES[family].build(dtype=torch.float32), 11)


def content_of(directory, extension: str) -> dict[str, torch.Tensor]:
    read = load_file if extension == ".safetensors" else lambda path: torch.load(path, weights_only=True)
    files = [name for name in os.listdir(directory) if name.endswith(extension)]
    parts = [read(os.path.join(directory, name)) for name in files]
    assert sum(map(len, parts)) == len(set().union(*parts))
    return {name: tensor for part in parts for name, tensor in part.items()}


def assert_same_content(merged, plain) -> dict[str, torch.Tensor]:
    """What was merged into .bin files is what `save_pretrained` wrote."""
    one, other = content_of(merged, ".bin"), content_of(plain, ".safetensors")
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name
    return one


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_merged_file_is_what_save_pretrained_writes(family: str, tmp_path) -> None:
    reference = build(family)
    reference.save_pretrained(tmp_path / "plain")
    raised(save(split_copies(reference, 3), tmp_path / "merged", merge_checkpoints=True))
    plain = set(os.listdir(tmp_path / "plain"))
    assert set(os.listdir(tmp_path / "merged")) == plain - {"model.safetensors"} | {"pytorch_model.bin"}
    for name in plain - {"model.safetensors"}:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert_same_content(tmp_path / "merged", tmp_path / "plain")


@pytest.mark.parametrize(
    ("family", "size", "safe"), [("gpt2", "50GB", False), ("mixtral", "30KB", False), ("t5", "30KB", True)]
)
def test_plain_transformers_loads_the_merged_folder(family: str, size: str, safe: bool, tmp_path) -> None:
    reference = build(family)
    options = {"max_shard_size": size, "safe_serialization": safe}
    raised(save(split_copies(reference, 3), tmp_path, merge_checkpoints=True, **options))
    assert any(name.endswith(".index.json") for name in os.listdir(tmp_path)) == (size == "30KB")
    model, info = type(reference).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert assert_holds(model, reference) == set(reference.state_dict())


def test_shards_and_index_are_those_of_save_pretrained(tmp_path) -> None:
    reference = build("llama")
    reference.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    options = {"max_shard_size": "20KB", "safe_serialization": True}
    raised(save(split_copies(reference, 3), tmp_path / "merged", merge_checkpoints=True, **options))
    assert set(os.listdir(tmp_path / "merged")) == set(os.listdir(tmp_path / "plain"))
    indices = [json.loads((tmp_path / at / "model.safetensors.index.json").read_text()) for at in ("plain", "merged")]
    assert indices[0] == indices[1]


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_no_rank_gathers_more_than_a_shard(family: str, tmp_path) -> None:
    models = split_copies(build(family), 4)
    limit = 60_000
    folders = [ModelFormat(model, SaveOptions(max_shard_size=limit)) for model in models]
    reports = [folder.report(SavingRank(rank, 4), str(tmp_path)) for rank, folder in enumerate(folders)]
    files = folders[0].plan(reports, 0)
    assert len(files) > 4
    received = [0, 0, 0, 0]
    for file in files:
        sizes = {name: torch.Size(source.holding.shape).numel() * 4 for name, source in file.inputs.items()}
        # A fused weight that is cut at the border of two shards is needed whole by both.
        largest = max(sizes.values())
        assert sum(sizes.values()) <= max(limit, largest) + 2 * largest * (family == "mixtral")
        received[file.writer] += sum(size for name, size in sizes.items() if file.writer not in file.inputs[name].ranks)
    comms = raised(save(models, tmp_path, merge_checkpoints=True, max_shard_size=limit))
    assert [comm.received for comm in comms] == received
    total = sum(tensor.nbytes for tensor in build(family).state_dict().values())
    assert max(received) < total / 2


def test_a_weight_that_was_renamed_when_it_was_loaded_gets_its_old_name_back(tmp_path) -> None:
    """transformers remembers on the model which conversions its checkpoint needed."""
    reference = build("mixtral")
    reference.save_pretrained(tmp_path / "plain")
    loaded = type(reference).from_pretrained(tmp_path / "plain")
    raised(save(split_copies(loaded, 2), tmp_path / "merged", merge_checkpoints=True))
    raised(save(split_copies(loaded, 2), tmp_path / "own", merge_checkpoints=True, save_original_format=False))
    assert_same_content(tmp_path / "merged", tmp_path / "plain")
    assert content_of(tmp_path / "own", ".bin").keys() == reference.state_dict().keys()


def test_an_auto_class_loads_the_merged_folder_with_its_generation_settings_beside_a_parallel_one(tmp_path) -> None:
    reference = gpt2(1)
    reference.generation_config.update(do_sample=True, top_k=3)
    raised(save(split_copies(gpt2(2), 2), tmp_path))
    raised(save(split_copies(reference, 2), tmp_path, merge_checkpoints=True))
    assert (tmp_path / "parallel_checkpoint.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is type(reference)
    assert model.generation_config.top_k == 3
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_holds(model, reference)


def test_a_weight_that_was_untied_by_hand_is_written_under_both_names(tmp_path) -> None:
    """The configuration still says that it is tied; what counts is what the model is."""
    reference = gpt2(1)
    reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.detach() + 1)
    reference.save_pretrained(tmp_path / "plain")
    raised(save(split_copies(reference, 3), tmp_path / "merged", merge_checkpoints=True))
    assert "lm_head.weight" in assert_same_content(tmp_path / "merged", tmp_path / "plain")


def test_variants_have_the_names_transformers_looks_for(tmp_path) -> None:
    reference = gpt2(1)
    options = {"merge_checkpoints": True, "variant": "fp16"}
    raised(save(split_copies(reference, 2), tmp_path, **options))
    assert (tmp_path / "pytorch_model.fp16.bin").exists()
    assert_holds(type(reference).from_pretrained(tmp_path, variant="fp16"), reference)
    raised(save(split_copies(reference, 2), tmp_path, max_shard_size="30KB", safe_serialization=True, **options))
    assert_holds(type(reference).from_pretrained(tmp_path, variant="fp16", use_safetensors=True), reference)


def test_a_new_checkpoint_replaces_one_of_another_form(tmp_path) -> None:
    """transformers prefers safetensors and single files; an old one must not be found instead of the new one."""
    (tmp_path / "notes.txt").write_text("mine")
    forms = [(safe, size) for safe in (False, True) for size in ("50GB", "30KB")]
    # After each form comes each other one, and itself with more shards.
    order = [0, 1, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 3, 0]
    for seed, number in enumerate(order):
        safe, size = forms[number]
        size = "25KB" if seed and order[seed - 1] == number else size
        options = {"safe_serialization": safe, "max_shard_size": size}
        raised(save(split_copies(gpt2(seed), 2), tmp_path, merge_checkpoints=True, **options))
        assert_holds(type(gpt2()).from_pretrained(tmp_path), gpt2(seed))
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
        extension = "safetensors" if safe else "bin"
        indices = [name for name in os.listdir(tmp_path) if name.endswith(f"{extension}.index.json")]
        assert bool(indices) == (size != "50GB")
