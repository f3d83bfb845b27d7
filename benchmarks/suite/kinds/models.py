"""The benchmark's models: one GPT as a whole, as a sequence over devices and sharded, with equal weights; and ResNet.

The weights of every form are drawn parameter by parameter, each from a generator seeded by the run's seed and the
parameter's name. So a form, a stage or a shard can be made alone and still equals its part of the whole model.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, ResNetForImageClassification

from kinds.configs import GPTConfig, ResNetSize
from penstock.layout.partition import partition, split_into

INITIALIZER_RANGE = 0.02
# What happens to a block's activations between its forward and its backward.
NOOP, CHECKPOINT, OFFLOAD = "noop", "checkpoint", "offload"
POLICIES = (NOOP, CHECKPOINT, OFFLOAD)

Device = torch.device | str | int


class GPT(GPT2LMHeadModel):
    """The whole model on one device: a transformers GPT-2 of a `GPTConfig`'s size.

    Args:
        config: the size.
        device: where to make it; by default torch's current default device. "meta" makes no weights.
        dtype: of its parameters, by default torch's default.
        seed: of its weights.
    """

    def __init__(
        self,
        config: GPTConfig | GPT2Config,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        target = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):
            super().__init__(config.to_transformers() if isinstance(config, GPTConfig) else config)
        self.loss_type = "ForCausalLM"  # transformers derives it from the class's name, and warns at GPT-2's own
        if dtype is not None:
            self.to(dtype)
        if target.type != "meta":
            self.materialize(target, seed)

    def materialize(self, device: Device, seed: int) -> None:
        """Give this model's meta parameters, all or those of a stage, memory and their values."""
        self.to_empty(device=torch.device(device))
        tied = self.config.tie_word_embeddings
        if tied and isinstance(self.transformer.wte.weight, nn.Parameter) and "weight" in self.lm_head._parameters:
            self.lm_head.weight = self.transformer.wte.weight
        # A tied weight has the name that it is drawn for wherever it is held.
        shared = {"lm_head.weight": "transformer.wte.weight"} if tied else {}
        parameters = ((shared.get(name, name), parameter) for name, parameter in self.named_parameters())
        fill(parameters, self.config.n_layer, seed)

    def materialize_part(self, name: str, device: Device, seed: int) -> None:
        """The same for one module; a tied output layer is the embedding's, so nothing is made for it."""
        if name == "lm_head" and self.config.tie_word_embeddings:
            return
        module = self.get_submodule(name).to_empty(device=torch.device(device))
        parameters = ((f"{name}.{inner}", parameter) for inner, parameter in module.named_parameters())
        fill(parameters, self.config.n_layer, seed)


def mix_seed(seed: int, what: object) -> int:
    """A seed for one part of a run, of 32 bits: the CPU's generator reads no more."""
    return zlib.crc32(f"{seed}/{what}".encode())


def fill(named_parameters: Iterable[tuple[str, torch.Tensor]], num_layers: int, seed: int) -> None:
    """Draw the weights of a GPT's parameters, given under their names in `GPT`.

    Normal with standard deviation 0.02, that of the projections into the residual stream divided by sqrt(2 layers)
    (Radford et al. 2019, section 2.3); biases zero, norms one.
    """
    for name, parameter in named_parameters:
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in name:
                parameter.fill_(1.0)
            else:
                deviation = INITIALIZER_RANGE / (math.sqrt(2 * num_layers) if "c_proj" in name else 1.0)
                generator = torch.Generator(parameter.device).manual_seed(mix_seed(seed, name))
                parameter.normal_(0.0, deviation, generator=generator)


# ---------------------------------------------------------------- a sequence over devices


class Embedding(nn.Module):
    """Token ids (batch, tokens) -> hidden states (batch, tokens, width)."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.wte, self.wpe = gpt.transformer.wte, gpt.transformer.wpe

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))


class Head(nn.Module):
    """Hidden states -> logits (batch, tokens, vocabulary). A tied weight may live on another device."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.ln_f = gpt.transformer.ln_f
        self.weight = gpt.lm_head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.ln_f(hidden), self.weight.to(hidden.device))


class DeviceLayers(nn.Sequential):
    """The layers on one device; takes its input from any."""

    def __init__(self, device: torch.device, layers: Sequence[nn.Module]) -> None:
        super().__init__(*layers)
        self.device = device

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.to(self.device, non_blocking=True))


def sequential_gpt(
    config: GPTConfig, devices: Sequence[Device], dtype: torch.dtype | None = None, seed: int = 0
) -> nn.Sequential:
    """The GPT as an `nn.Sequential` of one `DeviceLayers` per device, balanced by cost. Token ids -> logits.

    Raises:
        ValueError: there are more devices than layers.
    """
    places = [torch.device(device) for device in devices]
    gpt = GPT(config, device="meta", dtype=dtype)
    blocks = [[f"transformer.h.{index}"] for index in range(config.n_layer)]
    names = [["transformer.wte", "transformer.wpe"], *blocks, ["transformer.ln_f", "lm_head"]]
    sizes = partition(layer_costs(config), [1.0] * len(places)).sizes
    for place, layers_there in zip(places, split_into(names, sizes), strict=True):
        for name in chain.from_iterable(layers_there):
            gpt.materialize_part(name, place, seed)
    gpt.tie_weights()
    layers: list[nn.Module] = [Embedding(gpt), *gpt.transformer.h, Head(gpt)]
    return nn.Sequential(*map(DeviceLayers, places, split_into(layers, sizes)))


def layer_costs(config: GPTConfig) -> list[float]:
    """Forward operations per token of the embedding, each block and the head, in the units of 2 h^2."""
    block = 12 + 2 * config.block_size / config.n_embd
    return [0.0, *[block] * config.n_layer, config.vocab_size / config.n_embd]


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each next token, in single precision at least; what `GPT` computes from labels."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# ---------------------------------------------------------------- sharded


class ShardedGPT(GPT):
    """The GPT recursively wrapped by FSDP2: every block is sharded as a unit, and the rest with the root.

    Blocks are made and sharded one after another, so no rank ever holds more than its shards and one whole block.

    Args:
        config, device, dtype, seed: as for `GPT`.
        mesh: the ranks to shard over.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        prefetch: blocks that are gathered ahead of the one that computes; 0 leaves it to FSDP.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: DeviceMesh,
        device: Device,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        cpu_offload: bool = False,
        prefetch: int = 0,
    ) -> None:
        super().__init__(config, device="meta", dtype=dtype)
        place = torch.device(device)
        pinned = place.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
        blocks = list(self.transformer.h)
        for index, block in enumerate(blocks):
            self.materialize_part(f"transformer.h.{index}", place, seed)
            fully_shard(block, mesh=mesh, offload_policy=offload)
        for name in ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"):
            self.materialize_part(name, place, seed)
        self.tie_weights()
        fully_shard(self, mesh=mesh, offload_policy=offload)
        if prefetch:
            set_prefetch(blocks, prefetch)


def set_prefetch(blocks: Sequence[Any], depth: int) -> None:
    """Let every sharded block gather the next `depth` in forward order, and the `depth` before it in backward."""
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - depth) : index][::-1])


# ---------------------------------------------------------------- ResNet


def resnet(
    size: ResNetSize, device: Device, dtype: torch.dtype | None = None, seed: int = 0
) -> ResNetForImageClassification:
    """A ResNet of transformers, initialised on the CPU so that its weights do not depend on the device."""
    torch.manual_seed(seed)
    return ResNetForImageClassification(size.to_transformers()).to(device=torch.device(device), dtype=dtype)


def sharded_resnet(
    size: ResNetSize, mesh: DeviceMesh, device: Device, dtype: torch.dtype | None = None, seed: int = 0
) -> FSDPModule:
    """The same ResNet with each of its four stages, and the rest, sharded by FSDP2."""
    model = resnet(size, device, dtype, seed)
    for stage in model.resnet.encoder.stages:
        fully_shard(stage, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---------------------------------------------------------------- activations


def apply_policy(blocks: Iterable[nn.Module], policy: str) -> None:
    """Keep the activations of `blocks` ("noop"), recompute them in backward ("checkpoint", Chen et al. 2016), or
    move them to host memory and back ("offload").

    Raises:
        ValueError: an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown activation policy {policy!r}: known are {', '.join(POLICIES)}")
    if policy == NOOP:
        return
    wrap = _checkpointed if policy == CHECKPOINT else _offloaded
    for block in blocks:
        # The forward, not the module's call: hooks on the call (FSDP, a stage) stay outside.
        block.forward = wrap(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    return run
