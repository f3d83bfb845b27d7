"""The figures of a run: gathered from all ranks, and written with the whole configuration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kinds.configs import GPTConfig
from kinds.measure import model_flops
from kinds.options import Options, World
from kinds.result_files import FORMAT, environment, speed_figures
from penstock.planning.memory import MemoryEstimate, readable

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Sample:
    """One step on one rank: seconds in all and by phase, the share of time its devices computed, its part of the
    loss."""

    seconds: float
    phases: dict[str, float]
    efficiency: float | None
    loss: float


@dataclass(frozen=True)
class RankFigures:
    """What one rank has measured. Memory in bytes; losses include the warm-up's."""

    samples: list[Sample]
    losses: list[float]
    peak_memory: int
    memory_before: int
    matmul_peak: float
    parameters: int


def assemble(options: Options, world: World, needed: MemoryEstimate, ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """The result file's content.

    A step takes as long as on its slowest rank; phases and pipeline efficiency are means over the ranks.
    """
    steps = list(zip(*(figures.samples for figures in ranks), strict=True))
    seconds = [max(sample.seconds for sample in step) for step in steps]
    devices = options.num_devices(world)
    flops = model_flops(options.config, options.batch_size)
    peak = statistics.mean(figures.matmul_peak for figures in ranks)
    tokens = options.batch_size * options.config.block_size if isinstance(options.config, GPTConfig) else None
    losses = [sum(parts) for parts in zip(*(figures.losses for figures in ranks), strict=True)]
    return {
        "format": FORMAT,
        "environment": environment(torch.cuda.get_device_name() if world.device_type == "cuda" else None),
        "options": options.record(),
        "world": {**asdict(world), "devices": devices},
        "figures": {
            "devices": devices,
            "parameters": _whole_parameters(options, ranks),
            **speed_figures(seconds, options.batch_size, tokens, devices, flops, peak),
            **{f"{name}_seconds": _mean_of_medians(ranks, name) for name in PHASES},
            "peak_memory_bytes": max(figures.peak_memory for figures in ranks),
            "memory_before_model_bytes": max(figures.memory_before for figures in ranks),
            "estimated_memory_bytes": {**asdict(needed), "total": needed.total},
            "model_flops_per_step": flops,
            "matmul_peak_flops_per_device": peak,
            "pipeline_efficiency": _efficiency(ranks),
        },
        "step_seconds": seconds,
        "losses": losses,
    }


def summary(result: Mapping[str, Any]) -> str:
    """The result in a few lines."""
    options, figures = result["options"], result["figures"]
    rate = figures["tokens_per_second_per_device"]
    speed = f"{figures['samples_per_second_per_device']:.4g} samples/s per device"
    if rate is not None:
        speed = f"{rate:.5g} tokens/s, {speed}"
    phases = ", ".join(f"{name} {figures[f'{name}_seconds'] * 1e3:.4g}" for name in PHASES)
    efficiency = figures["pipeline_efficiency"]
    return "\n".join(
        [
            f"{options['mode']}: {options['model']} ({figures['parameters'] / 1e6:.4g} M parameters), "
            f"{options['dtype']}, batch {options['batch_size']}, {figures['devices']} devices",
            f"  {figures['seconds'] * 1e3:.5g} ms a step ({figures['seconds_least'] * 1e3:.5g} to "
            f"{figures['seconds_most'] * 1e3:.5g}; {phases})",
            f"  {speed}",
            f"  {figures['mfu']:.1%} of a matrix product's {figures['matmul_peak_flops_per_device']:.3g} FLOP/s"
            + (f"; pipeline efficiency {efficiency:.1%}" if efficiency is not None else ""),
            f"  {readable(figures['peak_memory_bytes'])} at most on a rank; last loss {result['losses'][-1]:.6f}",
        ]
    )


def _whole_parameters(options: Options, ranks: Sequence[RankFigures]) -> int:
    if isinstance(options.config, GPTConfig):
        return options.config.num_parameters
    return max(figures.parameters for figures in ranks)


def _mean_of_medians(ranks: Sequence[RankFigures], phase: str) -> float:
    return statistics.mean(
        statistics.median(sample.phases.get(phase, 0.0) for sample in figures.samples) for figures in ranks
    )


def _efficiency(ranks: Sequence[RankFigures]) -> float | None:
    values = [sample.efficiency for figures in ranks for sample in figures.samples if sample.efficiency is not None]
    return statistics.mean(values) if values else None
