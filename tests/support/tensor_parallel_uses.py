"""What the ranks of further tensor-parallel tests run: unlike pipelines, plans of one's own, and what it costs."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock import Booster, TensorParallelPlan
from penstock.checkpoint.untrusted import CheckpointError
from penstock.runtime.comm.settings import BatchMismatch
from tests.runtime.test_optimizer_trial import ByNorms
from tests.support.hetero import make_plugin, pad, samples
from tests.support.tensor_parallel_ranks import (
    build,
    config,
    difference_to,
    gather,
    gather_gradients,
    inputs_of,
    one_step,
    parameters_of,
    train_against_unsplit,
)


def unlike_pipelines(family: str, pipelines: str, number: int, folder: str, schedule: str) -> dict[str, Any]:
    """Two steps with unlike pipelines of stages that two ranks share, against the unsplit model; then the optimizer's
    state saved and loaded."""
    model, data = build(family), samples(family, number)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    plugin = make_plugin(model, pipelines, schedule, tp_size=2, max_norm=0.5)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(data, collate_fn=pad)
    model, optimizer, _, loader, _ = booster.boost(model, optimizers[1], None, loader)
    batches, worst, size = iter(loader), 0.0, number // 2
    for step in range(2):
        optimizers[0].zero_grad()
        optimizer.zero_grad()
        expected = reference(**pad(data[step * size : (step + 1) * size])).loss
        expected.backward()
        loss = float(booster.execute_pipeline(batches, model, None, optimizer)["loss"])
        worst = max(worst, abs(loss - float(expected)))
        worst = max(worst, difference_to(reference, gather_gradients(model), gradients=True))
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizers[0].step()
        optimizer.step()
    parameters = difference_to(reference, gather(model, parameters_of(model)))
    before = [state["exp_avg"].clone() for state in optimizer.unwrap().state.values()]
    booster.save_optimizer(optimizer, folder)
    for state in optimizer.unwrap().state.values():
        state["exp_avg"].zero_()
    booster.load_optimizer(optimizer, folder)
    after = [state["exp_avg"] for state in optimizer.unwrap().state.values()]
    restored = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return {"step": worst, "parameters": parameters, "restored": restored}


def go_on_with_another_size(folder: str, before: tuple[str, int], after: list[tuple[str, int]]) -> list[float]:
    """A step on one layout, a second one on each of others from its checkpoint: the largest difference of a parameter
    to the unsplit model's after two."""
    data = samples("gpt2", 16)
    reference = build("gpt2")
    adam = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(2):
        adam.zero_grad()
        reference(**pad(data[8 * step : 8 * (step + 1)])).loss.backward()
        adam.step()
    differences = []
    for step, (pipelines, size) in enumerate([before, *after]):
        model = build("gpt2")
        plugin = make_plugin(model, pipelines, tp_size=size)
        booster = Booster(plugin=plugin)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        first = data[:8] if step == 0 else data[8:]
        loader = plugin.prepare_dataloader(first, collate_fn=pad)
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
        if step:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(7.0)
            booster.load_model(model, folder)
            booster.load_optimizer(optimizer, folder)
        booster.execute_pipeline(iter(loader), model, None, optimizer)
        optimizer.step()
        if step:
            differences.append(difference_to(reference, gather(model, parameters_of(model))))
        else:
            model.save_parallelized(folder)
            booster.save_optimizer(optimizer, folder)
        model.pipeline.close()
    return differences


def optimizers_of_whole_matrices(folder: str) -> list[str]:
    """What a step says where weights are cut, and what loading says there of Adafactor's factors, saved whole."""
    messages = []
    for size in (1, 2):
        model = build("gpt2", dtype=torch.float32)
        plugin = make_plugin(model, "1x2" if size == 2 else "1x1,1x1", tp_size=size)
        booster = Booster(plugin=plugin)
        optimizer: Any = torch.optim.Adafactor(model.parameters())
        loader = plugin.prepare_dataloader(samples("gpt2", 4), collate_fn=pad)
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
        booster.execute_pipeline(iter(loader), model, None, optimizer)
        if size == 1:
            optimizer.step()
            booster.save_optimizer(optimizer, folder)
        else:
            muon = torch.optim.Muon(weight for weight in model.parameters() if weight.dim() == 2)
            lars = ByNorms(model.parameters(), lr=0.1)
            for attempt in (optimizer.step, muon.step, lars.step, partial(booster.load_optimizer, optimizer, folder)):
                with pytest.raises((NotImplementedError, CheckpointError)) as caught:
                    attempt()
                messages.append(str(caught.value))
        model.pipeline.close()
    return messages


def with_a_plan_of_its_own(stages: int) -> dict[str, float]:
    penstock.register_tensor_parallel_plan(
        "gptj",
        TensorParallelPlan(
            styles={
                "h.*.attn.q_proj": "colwise",
                "h.*.attn.k_proj": "colwise",
                "h.*.attn.v_proj": "colwise",
                "h.*.attn.out_proj": "rowwise",
                "h.*.mlp.fc_in": "colwise",
                "h.*.mlp.fc_out": "rowwise",
            },
            divided={"h.*.attn": ("num_attention_heads",)},
        ),
    )
    return train_against_unsplit("gptj", stages, 2)


def recomputed_with_dropout() -> float:
    """Gradient checkpointing draws the same masks again: the largest difference of a gradient to that without."""
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        model = build("gpt2", 0.3)
        if checkpointing:
            model.gradient_checkpointing_enable()
        penstock.initialize(model, config(1, 2))
        one_step(model, inputs_of("gpt2"))
        gradients.append(gather_gradients(model))
        model.pipeline.close()
    return max(float((gradients[0][name] - gradients[1][name]).abs().max()) for name in gradients[0])


def different_batches() -> str:
    model = build("gpt2")
    penstock.initialize(model, config(1, 2))
    inputs = inputs_of("gpt2")
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][0, 0] = 3 + dist.get_rank()
    try:
        one_step(model, inputs)
    except BatchMismatch as error:
        return str(error)
    return "nothing"


def costs(family: str, stages: int, size: int) -> dict[str, Any]:
    """Parameters on this rank over an equal share of the model's, and collectives of one microbatch."""
    model = build(family, dtype=torch.float32)
    whole, layers = sum(p.numel() for p in model.parameters()), model.config.num_hidden_layers
    penstock.initialize(model, config(stages, size, 1))
    counters = model.pipeline.split.tensor_parallel.region.collectives
    one_step(model, inputs_of(family))  # shows that the loss takes the head's output itself
    before = counters.num_sums, counters.num_gathers, counters.num_bytes
    one_step(model, inputs_of(family))
    held = sum(p.numel() for p in model.parameters())
    return {
        "share": held * stages * size / whole,
        "sums": counters.num_sums - before[0],
        "gathers": counters.num_gathers - before[1],
        "bytes": counters.num_bytes - before[2],
        "layers": layers,
    }
