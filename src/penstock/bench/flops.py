"""What a step costs in arithmetic, and how much of it a device can do at best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ResNetForImageClassification

from penstock.bench.configs import GPTConfig, ModelConfig

# A product must take this long to be measured well, and is then repeated.
LEAST_SECONDS = 0.02
REPETITIONS = 8
LARGEST_SIDE = {"cpu": 2048, "cuda": 16384}


def model_flops(config: ModelConfig, batch_size: int) -> float:
    """Operations of a training step on `batch_size` samples: a multiply-add counts two, the backward twice the forward.

    GPT: 72 B s l h^2 (1 + s/6h + V/12lh) (Narayanan et al. 2021, SC21, section 5.1, whose 96 is 72 and a recomputed
    forward). Recomputation is no progress, so it gets no credit. ResNet: counted over the operations of a forward.
    """
    if isinstance(config, GPTConfig):
        tokens, width, layers = config.block_size, config.n_embd, config.n_layer
        rest = 1 + tokens / (6 * width) + config.vocab_size / (12 * layers * width)
        return 72 * batch_size * tokens * layers * width**2 * rest
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        ResNetForImageClassification(config.to_transformers()).eval()(torch.empty(1, 3, *[config.image_size] * 2))
    return 3.0 * counter.get_total_flops() * batch_size


def measured_peak(devices: Sequence[torch.device], dtype: torch.dtype) -> float:
    """Operations per second of the best square matrix product, per device, with all of `devices` at work together.

    Other processes should measure at the same time, as they will compute at the same time.
    """
    with ThreadPoolExecutor(len(devices)) as threads:
        peaks = list(threads.map(lambda device: _peak_of(device, dtype), devices))
    return sum(peaks) / len(peaks)


def _peak_of(device: torch.device, dtype: torch.dtype) -> float:
    side, seconds = 128, 0.0
    while True:
        first, second = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        _time_product(first, second)  # the first one sets up libraries
        seconds = _time_product(first, second)
        if seconds >= LEAST_SECONDS or side >= LARGEST_SIDE[device.type]:
            break
        side *= 2
    best = min(_time_product(first, second) for _ in range(REPETITIONS))
    return 2 * side**3 / best


def _time_product(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.device.type == "cuda":
        torch.cuda.synchronize(first.device)
    start = time.perf_counter()
    torch.mm(first, second)
    if first.device.type == "cuda":
        torch.cuda.synchronize(first.device)
    return time.perf_counter() - start
