"""What users of transformers do from habit, on a parallelised model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import penstock
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import parallelize

FREEZING = ("transformer.wte.weight", "transformer.h.2.mlp.c_fc.weight")


def build() -> Any:
    model = FAMILIES["gpt2"].build(dtype=torch.float32, vocab_size=98)  # even, to be sharded
    for name in FREEZING:
        model.get_parameter(name).requires_grad = False
    return model


def counts(model: Any, **options: Any) -> list[int]:
    return [
        model.num_parameters(only_trainable, exclude_embeddings, **options)
        for only_trainable in (False, True)
        for exclude_embeddings in (False, True)
    ]


def save_and_count(folder: str, stages: int, tensor_parallel_size: int) -> tuple[list[int], list[int], str]:
    model = parallelize(build(), stages, tensor_parallel_size=tensor_parallel_size)
    model.save_pretrained(f"{folder}/split", is_main_process=dist.get_rank() == 0)
    model.save_pretrained(f"{folder}/sharded", max_shard_size="20KB", state_dict=model.state_dict())
    with pytest.raises(NotImplementedError, match=r"push_to_hub.*upload_folder"):
        model.push_to_hub("me/model")
    with pytest.raises(ValueError, match=r"push_to_hub .*: leave it out, and then upload the folder"):
        model.save_pretrained(folder, push_to_hub=True)
    return counts(model, whole=True), counts(model), repr(model)


@pytest.mark.parametrize(("ranks", "stages", "size"), [(2, 2, 1), (4, 2, 1), (2, 1, 2)])
def test_save_pretrained_and_num_parameters_are_of_the_whole_model(
    pool: Pool, ranks: int, stages: int, size: int, tmp_path: Path
) -> None:
    found = pool.run(ranks, save_and_count, str(tmp_path), stages, size)
    model = build()
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "plain_sharded", max_shard_size="20KB")
    for split, plain in (("split", "plain"), ("sharded", "plain_sharded")):
        names = sorted(path.name for path in (tmp_path / plain).iterdir())
        assert sorted(path.name for path in (tmp_path / split).iterdir()) == names
        for name in names:
            if name.endswith(".safetensors"):
                saved, expected = load_file(tmp_path / split / name), load_file(tmp_path / plain / name)
                assert saved.keys() == expected.keys()
                assert all(torch.equal(saved[key], expected[key]) for key in saved)
            else:
                assert (tmp_path / split / name).read_bytes() == (tmp_path / plain / name).read_bytes()
    _, report = type(model).from_pretrained(tmp_path / "split", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for rank, (whole, own, printed) in enumerate(found):
        assert whole == counts(model)
        assert stages == 1 or own[0] < whole[0]
        stage = rank % stages if size == 1 else 0
        assert f"stage {stage} of {stages} (counted from 0), on rank {rank}: holds " in printed
        assert ("holds transformer.wte, " in printed) == (stage == 0) and "(lm_head)" in printed


class User:
    def loss(self, outputs: Any, inputs: Any) -> Any:
        return outputs.loss


def initialize_again() -> list[str]:
    """What is refused of second calls, on a worker."""
    inputs, user = batch("causal", 2), User()
    first: dict[str, Any] = {"pipeline_parallel_size": 1, "criterion": user.loss, "example_inputs": inputs}
    model = penstock.initialize(FAMILIES["gpt2"].build(), **first)
    first["criterion"] = user.loss  # the same method
    for again in (first, {"pipeline_parallel_size": 1}, {**first, "example_inputs": batch("causal", 2, seed=1)}):
        assert penstock.initialize(model, **again) is model
    others = {"num_microbatches": 2}, {"criterion": User().loss}, {"example_inputs": batch("causal", 3)}
    refused = []
    for other in others:
        with pytest.raises(ValueError) as error:
            penstock.initialize(model, **{**first, **other})
        refused.append(str(error.value))
    return refused


def test_a_second_call_of_initialize_is_refused_if_it_asks_for_something_else(pool: Pool) -> None:
    (refused,) = pool.run(1, initialize_again)
    for error, what in zip(refused, ("configuration", "criterion", "example_inputs"), strict=True):
        assert error.startswith(f"this model is parallelised already, with another {what}")


def write_the_unchanged_loop() -> dict[str, Any]:
    model = parallelize(build(), 2, num_microbatches=2)
    inputs = batch("causal", 4)
    found: dict[str, Any] = {}
    uses = {
        "loss": lambda outputs: outputs.loss,
        "logits": lambda outputs: outputs.logits,
        "0": lambda outputs: outputs[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, use in uses.items():
            try:
                use(model(**inputs))
            except (AttributeError, TypeError) as error:
                found[name] = str(error)
        outputs = model(**inputs)
        assert not hasattr(outputs, "loss")
        found["logits of the loop"] = []
        for out in outputs:  # the same iterator still runs the step
            out.loss.backward()
            found["logits of the loop"].append(None if out.logits is None else tuple(out.logits.shape))
            assert not hasattr(out, "losses")
        found["past_key_values"] = out.past_key_values
    with torch.no_grad():
        found["loss without gradients"] = model(**inputs).loss.item()
    return found


def test_the_unchanged_loop_is_told_how_to_write_it(pool: Pool) -> None:
    first, last = pool.run(2, write_the_unchanged_loop)
    for found in (first, last):
        for name, place in (("loss", "model(...).loss"), ("logits", "model(...).logits"), ("0", "model(...)[0]")):
            assert found[name].startswith(f"{place}: in training")
            assert "for out in model(...): out.loss.backward()" in found[name] and "torch.no_grad()" in found[name]
        assert found["past_key_values"] is None
    assert first["logits of the loop"] == [None, None]
    assert all(shape[-1] == 98 for shape in last["logits of the loop"])
    expected = build()(**batch("causal", 4)).loss.item()
    assert first["loss without gradients"] == pytest.approx(expected, rel=1e-5)
