"""Every mode computes the unsplit model's losses on the same tokens, step after step."""

from collections.abc import Sequence

import pytest
import torch
from kinds.configs import GPTConfig
from kinds.models import GPT
from kinds.options import World, read_options
from kinds.trainer import HALF_EPSILON, LEARNING_RATE, make_batch

from tests.support.benchmark_ranks import TINY, losses_of
from tests.support.pool import Pool

pytestmark = pytest.mark.slow


def reference(arguments: str, num_steps: int = 3) -> list[float]:
    """The losses of the unsplit model trained on the whole global batches."""
    options = read_options(arguments.split(), World(1, 1, 0, 0, "cpu", 4))
    assert isinstance(options.config, GPTConfig)
    model = GPT(options.config, "cpu", options.torch_dtype, options.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, eps=HALF_EPSILON if options.dtype == "fp16" else 1e-8
    )
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        loss = model(**make_batch(options, number)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def global_losses(parts: Sequence[Sequence[float]]) -> list[float]:
    return [sum(step) for step in zip(*parts, strict=True)]


# The plain modes are run by test_launch.py.
CASES = [
    (2, "--mode ddp --chunks 3 --activation checkpoint"),
    (2, "--mode fsdp"),
    (2, "--mode fsdp --chunks 2 --prefetch --activation checkpoint"),
    (2, "--mode fsdp --cpu-offload --activation offload --untied"),
    (2, "--mode pdp --ndevice_per_proc 2 --chunks 3 --activation offload"),
    (1, "--mode pdp --ndevice_per_proc 3 --chunks 4 --untied --activation checkpoint"),
    (2, "--mode pp --schedule zb-h1 --chunks 6 --untied"),
    (2, "--mode pp --schedule interleaved-1f1b --activation checkpoint"),
    (2, "--mode pp --pipelines 1x4,1x2 --activation offload"),
    (3, "--mode pp --pipelines 1x4,2x8"),
]


@pytest.mark.parametrize(("world_size", "arguments"), CASES, ids=[f"{arguments}-{size}" for size, arguments in CASES])
def test_every_mode_has_the_losses_of_the_unsplit_model(pool: Pool, world_size: int, arguments: str) -> None:
    common = f"{TINY} --batch_size 12"
    untied = " --untied" if "--untied" in arguments else ""
    expected = reference(common + untied)
    found = global_losses(pool.run(world_size, losses_of, f"{arguments} {common}"))
    assert found == pytest.approx(expected, rel=2e-6)
    assert found[-1] != pytest.approx(found[0], rel=2e-6)  # it has trained


@pytest.mark.parametrize(("mode", "dtype"), [("ddp", "fp16"), ("fsdp", "bf16"), ("pdp", "bf16"), ("pp", "fp16")])
def test_half_precision_agrees_to_its_rounding(pool: Pool, mode: str, dtype: str) -> None:
    tolerance = {"bf16": 2e-2, "fp16": 2e-3}[dtype]
    common = f"{TINY} --batch_size 4 --dtype {dtype}"
    found = global_losses(pool.run(2, losses_of, f"--mode {mode} {common}"))
    assert found == pytest.approx(reference(common), rel=tolerance)


def test_resnet_is_the_same_replicated_and_sharded(pool: Pool) -> None:
    common = "--model resnet18 --image_size 32 --batch_size 8"
    found = {mode: global_losses(pool.run(2, losses_of, f"--mode {mode} {common}", 2)) for mode in ("ddp", "fsdp")}
    assert found["fsdp"] == pytest.approx(found["ddp"], rel=1e-5)
    assert found["ddp"][1] != found["ddp"][0]
