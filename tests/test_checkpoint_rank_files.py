"""A model saved by any number of stages loads into any other number of stages."""

import json
import os

import pytest
import torch

from checkpoint_ranks import (
    assert_hold_together,
    assert_holds,
    load,
    on_ranks,
    raised,
    save,
    save_alone,
    scramble,
    split_copies,
)
from families import FAMILIES
from penstock.checkpoint import reader
from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.plan import CheckpointRanks, SavingRank
from penstock.checkpoint.save import save_parallelized


def build(family: str) -> torch.nn.Module:
    return FAMILIES[family].build(dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "safe"),
    [("gpt2", False), ("gpt2", True), ("mixtral", True), ("t5", False), ("t5", True), ("bert_mlm", False)],
)
def test_a_checkpoint_moves_through_3_2_1_and_4_stages(family: str, safe: bool, tmp_path) -> None:
    reference = build(family)
    models = split_copies(reference, 3)
    for step, next_size in enumerate([2, 1, 4]):
        directory = tmp_path / str(step)
        raised(save(models, directory, safe_serialization=safe))
        models = split_copies(scramble(build(family), 5), next_size)
        raised(load(models, directory))
        assert_hold_together(models, reference)


def test_every_rank_writes_the_state_dict_it_holds_under_unsplit_names(tmp_path) -> None:
    reference = build("gpt2")
    models = split_copies(reference, 3)
    raised(save(models, tmp_path))
    assert sorted(os.listdir(tmp_path)) == [
        "config.json",
        "generation_config.json",
        "parallel_checkpoint.json",
        *(f"pytorch_model_tp_0_pp_{stage}.bin" for stage in range(3)),
    ]
    for stage, model in enumerate(models):
        content = torch.load(tmp_path / f"pytorch_model_tp_0_pp_{stage}.bin", weights_only=True)
        assert content.keys() == model.state_dict().keys()
        for name, tensor in content.items():
            assert torch.equal(tensor, reference.state_dict()[name])


def test_the_configuration_is_the_one_save_pretrained_writes(tmp_path) -> None:
    reference = build("gpt2")
    reference.generation_config.num_beams = 7
    raised(save(split_copies(reference, 2), tmp_path / "parallel"))
    reference.save_pretrained(tmp_path / "plain")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "parallel" / name).read_text() == (tmp_path / "plain" / name).read_text()


def test_only_the_writing_pipeline_writes(tmp_path) -> None:
    reference, other = build("gpt2"), scramble(build("gpt2"), 3)
    models = [*split_copies(other, 2), *split_copies(reference, 2)]

    def work(rank: int, comm) -> None:
        place = SavingRank(rank % 2, 2, is_writer=rank >= 2)
        save_parallelized(models[rank], tmp_path, world_comm=comm, place=place)

    raised(on_ranks(4, work))
    loaded = split_copies(other, 1)
    raised(load(loaded, tmp_path))
    assert_hold_together(loaded, reference)


def test_loading_copies_into_the_existing_parameters(tmp_path) -> None:
    reference = build("gpt2")
    raised(save(split_copies(reference, 2), tmp_path))
    (model,) = split_copies(scramble(build("gpt2"), 1), 1)
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    raised(load([model], tmp_path))
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_holds(model, reference)


def test_all_holders_of_a_tied_weight_load_the_same_values(tmp_path) -> None:
    """Also when the holders had drifted apart before they were saved: the first stage's values win."""
    models = split_copies(build("gpt2"), 3)
    with torch.no_grad():
        models[2].lm_head.weight.add_(1)
    raised(save(models, tmp_path))
    loaded = split_copies(scramble(build("gpt2"), 4), 2)
    raised(load(loaded, tmp_path))
    assert torch.equal(loaded[0].transformer.wte.weight, models[0].transformer.wte.weight)
    assert torch.equal(loaded[1].lm_head.weight, models[0].transformer.wte.weight)


def test_a_weight_that_was_untied_by_hand_stays_untied(tmp_path) -> None:
    reference, other = build("gpt2"), scramble(build("gpt2"), 5)
    for model in (reference, other):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    raised(save(split_copies(reference, 3), tmp_path))
    models = split_copies(other, 2)
    raised(load(models, tmp_path))
    assert_hold_together(models, reference)


def test_a_tied_checkpoint_loads_into_an_untied_model(tmp_path) -> None:
    raised(save(split_copies(build("gpt2"), 3), tmp_path))
    untied = FAMILIES["gpt2"].build(dtype=torch.float32, tie_word_embeddings=False)
    models = split_copies(scramble(untied, 2), 2)
    raised(load(models, tmp_path))
    assert torch.equal(models[1].lm_head.weight, build("gpt2").transformer.wte.weight)


def test_half_precision_survives_and_is_cast_only_by_the_model_it_is_loaded_into(tmp_path) -> None:
    reference = build("llama").to(torch.bfloat16)
    raised(save(split_copies(reference, 2), tmp_path, safe_serialization=True))
    models = split_copies(scramble(build("llama").to(torch.bfloat16), 2), 3)
    raised(load(models, tmp_path))
    assert_hold_together(models, reference)
    (single,) = split_copies(build("llama"), 1)
    raised(load([single], tmp_path))
    assert_holds(single, reference.float())


def test_a_rank_reads_only_files_and_tensors_it_needs(tmp_path, monkeypatch) -> None:
    raised(save(split_copies(build("llama"), 4), tmp_path))
    read = []
    original = reader.CheckpointReader._read
    monkeypatch.setattr(
        reader.CheckpointReader, "_read", lambda self, location: read.append(location) or original(self, location)
    )
    first_of_two, _ = split_copies(build("llama"), 2)
    from_parallelized(first_of_two, tmp_path, world_comm=CheckpointRanks())
    assert {location.stored_name for location in read} == set(first_of_two.state_dict())
    assert {location.file_name for location in read} == {f"pytorch_model_tp_0_pp_{stage}.bin" for stage in (0, 1)}


def test_a_given_state_dict_is_saved_instead_of_the_models(tmp_path) -> None:
    reference = build("gpt2")
    doubled = {name: tensor * 2 for name, tensor in reference.state_dict().items()}
    save_alone(reference, tmp_path, state_dict=doubled)
    (model,) = split_copies(build("gpt2"), 1)
    raised(load([model], tmp_path))
    assert torch.equal(model.transformer.h[0].ln_1.weight, doubled["transformer.h.0.ln_1.weight"])


def test_variants_stand_side_by_side(tmp_path) -> None:
    first, second = scramble(build("gpt2"), 1), scramble(build("gpt2"), 2)
    raised(save(split_copies(first, 2), tmp_path, variant="one"))
    raised(save(split_copies(second, 3), tmp_path, variant="two"))
    assert (tmp_path / "pytorch_model_tp_0_pp_1.one.bin").exists()
    for variant, reference in (("one", first), ("two", second)):
        models = split_copies(build("gpt2"), 2)
        raised(load(models, tmp_path, variant=variant))
        assert_hold_together(models, reference)


def test_a_save_function_writes_the_files(tmp_path) -> None:
    written = []

    def write(content, path) -> None:
        written.append(os.path.basename(path))
        torch.save(content, path)

    raised(save(split_copies(build("gpt2"), 2), tmp_path, save_function=write))
    assert sorted(written) == ["pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin"]


def test_fewer_stages_leave_no_files_of_more_and_the_users_files_stay(tmp_path) -> None:
    reference = build("gpt2")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "runs").mkdir()
    raised(save(split_copies(reference, 4), tmp_path))
    raised(save(split_copies(reference, 2), tmp_path))
    assert sorted(os.listdir(tmp_path)) == [
        *("config.json", "generation_config.json", "notes.txt", "parallel_checkpoint.json"),
        *("pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin", "runs"),
    ]


def test_saving_leaves_the_random_generators_alone(tmp_path) -> None:
    (model,) = split_copies(build("gpt2"), 1)
    before = torch.get_rng_state()
    save_alone(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_views_are_saved_without_the_memory_around_them(tmp_path) -> None:
    model = build("gpt2")
    block = torch.zeros(1_000_000)
    weight = model.transformer.h[0].ln_1.weight
    block[: weight.numel()] = weight.detach()
    weight.data = block[: weight.numel()]
    save_alone(model, tmp_path)
    size = (tmp_path / "pytorch_model_tp_0_pp_0.bin").stat().st_size
    assert size < 1.5 * sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"push_to_hub": True}, ValueError, "push_to_hub"),
        ({"distributed_checkpoint": True}, ValueError, "distributed_checkpoint"),
        ({"max_shards": 3}, TypeError, "max_shards"),
        ({"safe_serialization": True, "save_function": torch.save}, ValueError, "save_function"),
        ({"variant": "a/b"}, ValueError, "a/b"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(options, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message):
        save_alone(build("gpt2"), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_arguments_of_save_pretrained_that_make_no_difference_are_accepted(tmp_path) -> None:
    save_alone(build("gpt2"), tmp_path, is_main_process=False, token="x", save_peft_format=True, max_shard_size="1GB")
    assert json.loads((tmp_path / "parallel_checkpoint.json").read_text())["model_class"] == "GPT2LMHeadModel"
