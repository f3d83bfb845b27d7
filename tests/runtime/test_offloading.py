"""What of torch's means against short memory works in a stage: exact, and how many bytes fewer live at once."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.planning.unit_cost import LiveBytes
from tests.support.pool import Pool
from tests.support.training import (
    Step,
    assert_steps_equal,
    gradients_of,
    kept_in_double,
    parallelize,
    run_step,
    unsplit_step,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
}  # fmt: skip
WAYS = ("nothing", "files", "recomputed", "recomputed, files", "products kept")


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**SIZES)).double().train()
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (8, 48), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def saved_in_files(folder: Path, model: torch.nn.Module) -> Iterator[None]:
    """What autograd saves is in files until the backward, as save_on_cpu() keeps it in the host's memory."""
    numbers = itertools.count()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def pack(tensor: torch.Tensor) -> Path | torch.Tensor:
        if tensor.untyped_storage().data_ptr() in weights or tensor.numel() < 1000:
            return tensor
        path = folder / f"{next(numbers)}.pt"
        torch.save(tensor.clone(), path)
        return path

    with torch.autograd.graph.saved_tensors_hooks(
        pack, lambda kept: torch.load(kept) if isinstance(kept, Path) else kept
    ):
        yield


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def trained(schedule: str, folder: Path) -> dict[str, tuple[Step, int]]:
    """Of each way a step, and the most bytes that live at once in it besides what was there before."""
    folder = folder / str(torch.distributed.get_rank())
    folder.mkdir(parents=True)
    told = {}
    for way in WAYS:
        with kept_in_double():
            model = parallelize(build(), 2, schedule=schedule, num_microbatches=8)
            if way != "nothing" and way != "files":
                kept = {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_products)}
                model.gradient_checkpointing_enable({"use_reentrant": False, **(kept if "products" in way else {})})
            run_step(model, batch())  # shapes are learned
            model.zero_grad(set_to_none=False)
            with saved_in_files(folder, model) if "files" in way else contextlib.nullcontext(), LiveBytes() as live:
                losses = run_step(model, batch())
            told[way] = Step(losses, gradients_of(model)), live.peak
    return told


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_offloading_and_recomputing_are_exact_and_hold_less(pool: Pool, tmp_path: Path, schedule: str) -> None:
    expected = unsplit_step(build(), (batch(), 1.0))
    ranks = pool.run(2, trained, schedule, tmp_path, timeout=240)
    for way in WAYS:
        assert_steps_equal([told[way][0] for told in ranks], expected)
    first = {way: ranks[0][way][1] for way in WAYS}
    ratios = {way: first[way] / first["nothing"] for way in WAYS}
    assert ratios["recomputed, files"] < ratios["recomputed"] < ratios["products kept"] < 1, ratios
    assert ratios["files"] < 0.7, ratios


def test_files_hold_activations_and_no_weights(tmp_path: Path) -> None:
    """A linear layer saves a view of its weight."""
    model = build()
    with saved_in_files(tmp_path, model):
        model(**batch())
    saved = [torch.load(path).flatten().sort().values for path in tmp_path.iterdir()]
    assert saved
    for name, weight in model.named_parameters():
        values = weight.detach().flatten().sort().values
        assert not any(torch.equal(values, one) for one in saved), name


def with_weights_elsewhere() -> str:
    with pytest.raises(ValueError, match="on the meta device, without values") as caught:
        parallelize(accelerate.cpu_offload(build(), execution_device=torch.device("cpu")), 2)
    return str(caught.value)


def test_weights_that_accelerate_keeps_elsewhere_are_refused_with_what_to_do(pool: Pool) -> None:
    assert all("penstock.from_pretrained()" in said for said in pool.run(2, with_weights_elsewhere))
