"""torch.compile: each block by itself, exact over stages; the model as a whole says so."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn

import penstock
from tests.support.families import FAMILIES, batch
from tests.support.own_models import OWN_MODELS, OwnModel, Regression
from tests.support.pool import Pool
from tests.support.training import EXACT, Step, assert_steps_equal, gradients_of, kept_in_double, run_step, unsplit_step

pytestmark = pytest.mark.slow


def num_blocks(backend: str) -> int:
    return 2 if backend == "aot_eager" else 4  # of which each takes a second


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(super().forward(x))


class Small(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(6, 6) for _ in range(num_blocks("inductor")))


def compiled_units(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


def build(backend: str) -> tuple[Any, Any]:
    """A model and its batch. To machine code, which takes seconds for each kernel, small blocks are compiled."""
    if backend == "inductor":
        return OwnModel(Small).build(), OwnModel(Small).inputs()
    return FAMILIES["gpt2"].build(n_layer=num_blocks(backend)), batch("causal", 4)


def train_compiled(how: str, backend: str, schedule: str) -> tuple[Step, float, list[str], int]:
    """A step and an evaluation, which units are compiled, and how many graphs were made."""
    torch._dynamo.reset()
    graphs = 0

    def counting(graph: Any, example_inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, example_inputs)

    # No interpreters that compile in parallel, and scalar code: it is made much faster than vectorised. For so few
    # kernels headers are not worth to be compiled before.
    options = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    inductor = torch._inductor.config.patch(options)
    with kept_in_double(), inductor if backend == "inductor" else contextlib.nullcontext():
        model, inputs = build(backend)
        config = {"model_parallelism": {"pipeline_parallel_size": 2, "schedule": schedule, "num_microbatches": 2}}
        if how == "blocks before":
            for block in model.transformer.h:
                block.compile(backend=counting)
        model = penstock.initialize(model, config)
        if how == "blocks after":
            for block in model.transformer.h:
                block.compile(backend=counting)
        elif how == "model":
            model.compile(backend=counting)
        step = Step(run_step(model, inputs), gradients_of(model))
        with torch.no_grad():
            loss = model(**inputs).loss.item()
        return step, loss, compiled_units(model), graphs


@pytest.mark.parametrize(
    ("how", "backend", "schedule"),
    [
        ("blocks before", "eager", "1f1b"),
        ("blocks after", "aot_eager", "1f1b"),
        ("model", "eager", "zb-h1"),
        ("model", "inductor", "1f1b"),
    ],
)
def test_compiled_blocks_are_exact(pool: Pool, how: str, backend: str, schedule: str) -> None:
    found = pool.run(2, train_compiled, how, backend, schedule, timeout=240)
    model, inputs = build(backend)
    expected = unsplit_step(model, (inputs, 1.0))
    assert_steps_equal([step for step, *_ in found], expected)
    for rank, (_, loss, units, graphs) in enumerate(found):
        assert loss == pytest.approx(expected.losses[0], rel=EXACT)
        assert graphs > 0
        blocks = [name for name in units if name.startswith(("transformer.h.", "layers."))]
        assert any(name.endswith(f".{rank * (num_blocks(backend) - 1)}") for name in blocks)
        if how == "model":
            assert len(blocks) == num_blocks(backend) // 2 and "lm_head" not in units


def compile_whole() -> list[str]:
    config = {"model_parallelism": {"pipeline_parallel_size": 2}}
    own = OWN_MODELS["gpt"]
    model: Any = penstock.initialize(own.build(), config)
    found = []
    for options in ({}, {"fullgraph": True}):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="communicat") as caught:
            torch.compile(model, backend="eager", **options)(**own.inputs())
        found.append(str(caught.value))
    for out in model(**own.inputs()):  # it still trains
        out.loss.backward()
    return found


def test_torch_compile_of_the_whole_model_says_what_to_do(pool: Pool) -> None:
    for plain, full in pool.run(2, compile_whole, timeout=120):
        assert "torch.compile() of a parallelised GPT" in plain and "model.compile()" in plain
        assert "model.compile()" in full
