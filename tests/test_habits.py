"""What users of transformers do from habit, on a parallelised model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from families import FAMILIES
from pool import Pool
from training import parallelize

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
    with pytest.raises(ValueError, match="push_to_hub"):
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
