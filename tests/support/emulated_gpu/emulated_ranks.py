"""What one rank with an emulated GPU does in these tests; the same without one is the oracle, or half of it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from penstock import HeterogeneousParallelPlugin, PipelineTemplate
from penstock.generation.decoding import decoding_of
from penstock.modeling.placeholders.ghosts import is_ghost
from penstock.random_state import generators_of
from penstock.runtime.comm.settings import SettingsMismatch
from tests.support.emulated_gpu import emulated_device, emulated_nccl
from tests.support.emulated_gpu.emulated_device import host_waits
from tests.support.emulated_gpu.one_card import count_as_own
from tests.support.families import FAMILIES, batch
from tests.support.training import Step, kept_in_double, parallelize, rows, unsplit_step

# In the environment of the session: the number of a real GPU, which the ranks share in place of the emulated ones.
REAL = "PENSTOCK_REAL_GPU"


def use_gpu() -> torch.device:
    """This process has a GPU from here on, emulated or real, if its pool says so; otherwise it computes on the CPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") and REAL in os.environ:
        count_as_own()
        return torch.device("cuda", 0)
    if emulated_device.LIBRARY not in os.environ:
        return torch.device("cpu")
    device = emulated_device.load()
    emulated_nccl.register()
    # A Parameter stays the same object when a model moves to the device, as it does on CUDA.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return device


def to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def on(device: torch.device, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to(value, device) for name, value in values.items()}


def host_gradients(model: Any) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients on the CPU; a tied weight under each of its names."""
    return {
        name: None if parameter.grad is None else parameter.grad.cpu().clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@dataclass(frozen=True)
class Case:
    """A model, how it is spread, and how it trains.

    Attributes:
        stages: of the pipeline; or of each of several, in a tuple.
        options: those of `initialize`.
        checkpointing: None, or `use_reentrant`.
        autocast: the type, or None.
        synchronize: wait for the device in the loop's body.
    """

    stages: int | tuple[int, ...] = 2
    family: str = "gpt2"
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool | None = None
    autocast: torch.dtype | None = None
    synchronize: bool = False

    def build(self) -> Any:
        return FAMILIES[self.family].build(dropout=self.dropout, dtype=self.dtype, **self.settings)

    def batch(self) -> dict[str, Any]:
        return batch(FAMILIES[self.family].kind, size=8)


def spread(case: Case) -> Any:
    """The model of `case` on this rank."""
    model = case.build()
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing})
    if isinstance(case.stages, int):
        return parallelize(model, case.stages, **case.options)
    plugin = HeterogeneousParallelPlugin(**case.options)
    templates = {stages: PipelineTemplate.balanced(model, stages) for stages in sorted(set(case.stages))}
    plugin.set_pipelines([templates[stages] for stages in case.stages], dict.fromkeys(templates.values(), 4))
    return plugin.configure(model)[0]


def train(case: Case, num_steps: int = 2) -> list[Step]:
    """Losses and gradients of `num_steps` steps, and this rank's parameters under their names."""
    device = use_gpu()
    with kept_in_double():
        model = spread(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps, sent_before = [], emulated_nccl.counts.get("send", 0)
        for _ in range(num_steps):
            losses = []
            mine = rows(case.batch(), model.data_parallel_rank, model.data_parallel_size)
            context = contextlib.nullcontext() if case.autocast is None else torch.autocast(device.type, case.autocast)
            with context:
                outputs = model(**on(device, mine))
            for output in outputs:
                if case.synchronize:
                    torch.get_device_module(device).synchronize()
                output.loss.backward()
                losses.append(output.loss.item())
                assert output.loss.device == device
            steps.append(Step(losses, host_gradients(model)))
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        reduction = model.pipeline.last_step.reduction
        if reduction is not None and device.type != "cpu":
            assert reduction.seconds > 0 and reduction.hidden is None, "the host does not know what was hidden"
        if device.type != "cuda":
            sends = emulated_nccl.counts.get("send", 0) > sent_before
            crosses = len(set(model.pipeline.context.pipeline.stage_to_rank)) > 1
            assert sends == (device.type == "gpu" and crosses), "values travel by its own transport"
        model.pipeline.close()
        return steps


def unsplit(case: Case, num_steps: int = 2) -> list[Step]:
    """The oracle: the same steps of the model in one piece, on the CPU, or on a worker's GPU."""
    device = use_gpu()
    model, steps = case.build().to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        step = unsplit_step(model, (on(device, case.batch()), 1.0))
        steps.append(Step(step.losses, host_gradients(model)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return steps


def evaluate_and_generate(case: Case) -> tuple[float, torch.Tensor, list[tuple[int, torch.Tensor, torch.Tensor]]]:
    """On a worker, or in one piece on the CPU where no pool has set RANK: loss, logits, and generations.

    Of each generation the number of groups, the tokens, and the state of the device's generator afterwards.
    """
    device = use_gpu()
    model = case.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # or it would repeat one token
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    if "RANK" in os.environ:
        model = parallelize(model, case.stages, **case.options)
    inputs = on(device, case.batch())
    with torch.no_grad(), kept_in_double():
        output = model(**inputs)
    found = []
    for size, groups in ((3, 1), (7, case.stages)):
        wanted = {"generation_groups": groups} if "RANK" in os.environ else {}
        prompt = {name: inputs[name][:size].flip(1) for name in ("input_ids", "attention_mask")}
        for options in GENERATIONS:
            torch.manual_seed(3)
            tokens = model.generate(**prompt, max_new_tokens=5, **options, **wanted).cpu()
            number = len(decoding_of(model.pipeline).groups) if "RANK" in os.environ else 1
            found.append((number, tokens, generators_of(device)[-1].get_state()))
    return float(output.loss), output.logits.cpu(), found


GENERATIONS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 2},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 2, "top_k": 9},
    {"do_sample": True, "num_beams": 2},
    {"do_sample": False, "cache_implementation": "static"},
]


def save_and_load(case: Case, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's parameters before saving, and those of another model after loading."""
    device = use_gpu()
    model = spread(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.5)
    model.save_parallelized(folder)
    model.save_parallelized(f"{folder}/merged", merge_checkpoints=True)
    other = spread(case)
    other.from_parallelized(folder)
    assert all(parameter.device == device for parameter in other.parameters())
    return tuple({n: p.detach().cpu() for n, p in m.named_parameters()} for m in (model, other))  # type: ignore[return-value]  # two


def waits_of_steps(
    case: Case, num_steps: int = 3, where: str = "cpu", item: bool = False, without: str = ""
) -> list[dict[str, int]]:
    """For each step, what the host would have waited for; the last step is one of shapes seen before. `without` is an
    input that is left out."""
    device = use_gpu()
    model = spread(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if item:  # in one block of each stage
        block = next(
            module for name, module in model.named_modules() if name.endswith("mlp.act") and not is_ghost(module)
        )
        block.register_forward_pre_hook(lambda module, arguments: arguments[0].sum().item() and None)
    mine = rows(case.batch(), model.data_parallel_rank, model.data_parallel_size)
    mine = {name: value for name, value in mine.items() if name != without}
    if where == "gpu":
        mine = on(device, mine)
    found = []
    for _ in range(num_steps):
        with host_waits() as waits:
            context = contextlib.nullcontext() if case.autocast is None else torch.autocast(device.type, case.autocast)
            with context:
                outputs = model(**mine)
            for output in outputs:
                output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(dict(waits))
    model.pipeline.close()
    return found


def waits_of_generation(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """What the host waits for while it generates 4 tokens, and 14, of forms seen before."""
    device = use_gpu()
    model = spread(case).eval()
    prompt = {name: case.batch()[name][:3, :4].to(device) for name in ("input_ids", "attention_mask")}
    found = []
    for number in (14, 4, 14):
        with host_waits() as waits:
            model.generate(**prompt, max_new_tokens=number, min_new_tokens=number, do_sample=False)
        found.append(dict(waits))
    return found[1], found[2]


def told_of_unlike_copies(case: Case, folder: str) -> tuple[str, str]:
    """What a save says, and an evaluation after it, once one rank has changed its copy of the tied weight."""
    use_gpu()
    model = spread(case)
    rank = model.pipeline.rank
    with torch.no_grad():
        tied = model.lm_head if rank else model.transformer.wte
        tied.weight.mul_(1 + rank)
    for output in model(**case.batch()):
        output.loss.backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.save_parallelized(folder)
    with torch.no_grad(), pytest.raises(SettingsMismatch) as error:
        model(**case.batch())
    return " ".join(str(one.message) for one in seen), str(error.value)


def refused_on_two_devices(case: Case) -> str:
    """What `initialize` says of a model that is partly on the GPU and partly on the CPU, as accelerate leaves it."""
    device = use_gpu()
    model = case.build()
    model.transformer.h[0].to(device)
    with pytest.raises(ValueError) as error:
        parallelize(model, 1)
    return str(error.value)


def sums_of_steps(case: Case, scale: float) -> list[int]:
    """How many all-reduces there were between devices in each of four steps, under a loss scale of the user's."""
    use_gpu()
    model = spread(case)
    found = []
    for _ in range(4):
        before = emulated_nccl.counts.get("allreduce", 0)
        for output in model(**case.batch()):
            (output.loss * scale).backward()
        found.append(emulated_nccl.counts["allreduce"] - before)
    return found
