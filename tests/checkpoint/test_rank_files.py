"""A model saved by any number of stages loads into any other number of stages."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.ranks import CheckpointRanks, SavingRank
from penstock.checkpoint.save import save_parallelized, save_run_state
from penstock.checkpoint.training_state import TrainingState
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.checkpoint_ranks import (
    assert_hold_together,
    assert_holds,
    gpt2,
    load,
    on_ranks,
    raised,
    save,
    save_alone,
    scramble,
    split_copies,
)
from tests.support.families import FAMILIES


def loaded(directory: Path, num_stages: int = 1, **options: Any) -> list[torch.nn.Module]:
    """A pipeline with other weights of its own, into which what is in the folder was loaded."""
    models = split_copies(gpt2(9), num_stages)
    raised(load(models, directory, **options))
    return models


@pytest.mark.parametrize(("family", "safe"), [("gpt2", False), ("mixtral", True), ("t5", True), ("bert_mlm", False)])
def test_a_checkpoint_moves_through_3_2_1_and_4_stages(family: str, safe: bool, tmp_path) -> None:
    reference = FAMILIES[family].build(dtype=torch.float32)
    models = split_copies(reference, 3)
    for step, next_size in enumerate([2, 1, 4]):
        directory = tmp_path / str(step)
        raised(save(models, directory, safe_serialization=safe))
        models = split_copies(scramble(FAMILIES[family].build(dtype=torch.float32), 5), next_size)
        raised(load(models, directory))
        assert_hold_together(models, reference)


def test_every_rank_writes_what_it_holds_under_unsplit_names_and_the_configuration_as_save_pretrained(tmp_path) -> None:
    reference = gpt2()
    reference.generation_config.num_beams = 7
    models = split_copies(reference, 3)
    raised(save(models, tmp_path / "parallel"))
    weights = [f"pytorch_model_tp_0_pp_{stage}.bin" for stage in range(3)]
    configurations = ["config.json", "generation_config.json"]
    assert sorted(os.listdir(tmp_path / "parallel")) == [*configurations, "parallel_checkpoint.json", *weights]
    for name, model in zip(weights, models, strict=True):
        content = torch.load(tmp_path / "parallel" / name, weights_only=True)
        assert content.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, reference.state_dict()[name]) for name, tensor in content.items())
    reference.save_pretrained(tmp_path / "plain")
    for name in configurations:
        assert (tmp_path / "parallel" / name).read_text() == (tmp_path / "plain" / name).read_text()


def test_only_the_writing_pipeline_writes(tmp_path) -> None:
    reference = gpt2(1)
    models = [*split_copies(gpt2(3), 2), *split_copies(reference, 2)]

    def work(rank: int, comm) -> None:
        comm.place = SavingRank((rank + 2) % 4, 2, pipeline=int(rank < 2))
        save_parallelized(models[rank], tmp_path, world_comm=comm)

    raised(on_ranks(4, work))
    assert_hold_together(loaded(tmp_path), reference)


@pytest.mark.parametrize(
    "differing",
    [
        {"folder": ("0", "1")},
        {"max_shard_size": ("50GB", "20KB")},
        {"save_original_format": (True, False)},
    ],
)
def test_ranks_that_were_asked_for_different_things_all_raise(differing: dict[str, tuple[Any, Any]], tmp_path) -> None:
    models = split_copies(gpt2(), 2)

    def work(rank: int, comm) -> None:
        options = {name: values[rank] for name, values in differing.items()}
        folder = tmp_path / options.pop("folder", "same")
        save_parallelized(models[rank], folder, world_comm=comm, merge_checkpoints=True, **options)

    for error in on_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert all(part in str(error) for part in ("rank 0", "rank 1", "was asked for"))


def test_loading_copies_into_the_existing_parameters(tmp_path) -> None:
    reference = gpt2()
    raised(save(split_copies(reference, 2), tmp_path))
    (model,) = split_copies(gpt2(1), 1)
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    raised(load([model], tmp_path))
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_holds(model, reference)


def test_all_holders_of_a_tied_weight_load_the_same_values(tmp_path, caplog) -> None:
    """Also when the holders had drifted apart before they were saved: the first stage's values win."""
    models = split_copies(gpt2(), 3)
    with torch.no_grad():
        models[2].lm_head.weight.add_(1)
    raised(save(models, tmp_path))
    assert "lm_head.weight on pipeline rank 2 is not what an earlier rank holds" in caplog.text
    first, last = loaded(tmp_path, 2)
    assert torch.equal(first.transformer.wte.weight, models[0].transformer.wte.weight)
    assert torch.equal(last.lm_head.weight, models[0].transformer.wte.weight)


def test_a_weight_that_was_untied_by_hand_stays_untied_and_a_tied_one_loads_into_an_untied_model(tmp_path) -> None:
    reference, other = gpt2(), gpt2(5)
    raised(save(split_copies(reference, 3), tmp_path / "tied"))
    for model in (reference, other):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    for number, saved in enumerate([split_copies(reference, 3), [reference]]):
        raised(save(saved, tmp_path / f"untied {number}", safe_serialization=number == 1))
        models = split_copies(other, 2)
        raised(load(models, tmp_path / f"untied {number}"))
        assert_hold_together(models, reference)
    models = split_copies(gpt2(2, tie_word_embeddings=False), 2)
    raised(load(models, tmp_path / "tied"))
    assert torch.equal(models[1].lm_head.weight, reference.transformer.wte.weight)


def test_half_precision_survives_and_is_cast_only_by_the_model_it_is_loaded_into(tmp_path) -> None:
    def build() -> torch.nn.Module:
        return FAMILIES["llama"].build(dtype=torch.float32)

    reference = build().to(torch.bfloat16)
    raised(save(split_copies(reference, 2), tmp_path, safe_serialization=True))
    models = split_copies(scramble(build().to(torch.bfloat16), 2), 3)
    raised(load(models, tmp_path))
    assert_hold_together(models, reference)
    (single,) = split_copies(build(), 1)
    raised(load([single], tmp_path))
    assert_holds(single, reference.float())


def test_a_rank_reads_only_files_that_it_needs(tmp_path) -> None:
    reference = FAMILIES["llama"].build(dtype=torch.float32)
    raised(save(split_copies(reference, 4), tmp_path))
    for stage in (2, 3):
        path = tmp_path / f"pytorch_model_tp_0_pp_{stage}.bin"
        path.write_bytes(bytes(path.stat().st_size))
    first, last = split_copies(scramble(FAMILIES["llama"].build(dtype=torch.float32), 3), 2)
    assert_holds(from_parallelized(first, tmp_path, world_comm=CheckpointRanks()), reference)
    with pytest.raises(CheckpointError, match=r"pp_[23]\.bin"):
        from_parallelized(last, tmp_path, world_comm=CheckpointRanks())


def test_a_given_state_dict_is_saved_instead_of_the_models(tmp_path) -> None:
    reference = gpt2()
    doubled = {name: tensor * 2 for name, tensor in reference.state_dict().items()}
    save_alone(reference, tmp_path, state_dict=doubled)
    (model,) = loaded(tmp_path)
    assert torch.equal(model.transformer.h[0].ln_1.weight, doubled["transformer.h.0.ln_1.weight"])
    state = {**reference.state_dict(), "transformer.note": object()}
    with pytest.raises(CheckpointError, match=r"cannot save transformer\.note: it is, or holds, a object"):
        save_alone(reference, tmp_path, state_dict=state)


def test_variants_stand_side_by_side(tmp_path) -> None:
    for number, variant in enumerate(("one", "two"), start=1):
        raised(save(split_copies(gpt2(number), 1 + number), tmp_path, variant=variant))
    assert (tmp_path / "pytorch_model_tp_0_pp_1.one.bin").exists()
    for number, variant in enumerate(("one", "two"), start=1):
        assert_hold_together(loaded(tmp_path, 2, variant=variant), gpt2(number))


@pytest.mark.parametrize("safe", [False, True])
def test_an_ordinary_checkpoint_in_shards_stays_whole_beside_a_parallel_one(safe: bool, tmp_path) -> None:
    model = split_copies(gpt2(1), 2)
    raised(save(model, tmp_path, merge_checkpoints=True, max_shard_size="30KB", safe_serialization=safe))
    for extension in (False, True):
        raised(save(split_copies(gpt2(2), 2), tmp_path, safe_serialization=extension))
    assert_holds(type(gpt2()).from_pretrained(tmp_path), gpt2(1))
    assert_hold_together(loaded(tmp_path, 2), gpt2(2))


def test_no_index_leads_to_rank_files_of_an_earlier_save(tmp_path) -> None:
    models = split_copies(gpt2(1), 3)
    raised(on_ranks(3, lambda rank, comm: save_run_state(models[rank], tmp_path, TrainingState(), world_comm=comm)))
    assert_holds(type(gpt2()).from_pretrained(tmp_path), gpt2(1))
    raised(save(split_copies(gpt2(2), 2), tmp_path))
    assert not list(tmp_path.glob("*.index.json")) and not list(tmp_path.glob("*.safetensors"))


def test_fewer_stages_leave_no_files_of_more_and_the_users_files_stay(tmp_path) -> None:
    """Written by a function of the user's."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "runs").mkdir()
    written = []

    def write(content, path) -> None:
        written.append(os.path.basename(path))
        torch.save(content, path)

    raised(save(split_copies(gpt2(), 4), tmp_path))
    raised(save(split_copies(gpt2(), 2), tmp_path, save_function=write))
    assert sorted(written) == ["pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin"]
    others = ["config.json", "generation_config.json", "notes.txt", "parallel_checkpoint.json", "runs"]
    assert sorted(os.listdir(tmp_path)) == sorted([*written, *others])


def test_saving_leaves_the_random_generators_alone_and_the_memory_around_views(tmp_path) -> None:
    model = gpt2()
    block, weight = torch.zeros(1_000_000), model.transformer.h[0].ln_1.weight
    block[: weight.numel()] = weight.detach()
    weight.data = block[: weight.numel()]
    before = torch.get_rng_state()
    save_alone(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
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
        save_alone(gpt2(), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_arguments_of_save_pretrained_that_make_no_difference_are_accepted(tmp_path) -> None:
    save_alone(gpt2(), tmp_path, is_main_process=False, token="x", save_peft_format=True, max_shard_size="1GB")
    assert json.loads((tmp_path / "parallel_checkpoint.json").read_text())["model_class"] == "GPT2LMHeadModel"
