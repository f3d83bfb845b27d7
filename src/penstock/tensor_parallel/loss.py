"""The language-model loss on logits that are sharded by vocabulary: no rank needs them whole.

Vocabulary-parallel cross entropy: Shoeybi et al., "Megatron-LM", 2019, section 3. Exchanged are three numbers per token
instead of one per token and vocabulary entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.loss.loss_utils import ForCausalLMLoss

from penstock.tensor_parallel.region import Region


class ShardedLoss:
    """In place of a model's language-model loss: the same function, which also takes this rank's shard of the logits.

    Attributes:
        calls, direct_calls: how often it was called, and how often of these with the head's output itself.
        is_trained: whether a training step runs, on this loss alone.
    """

    def __init__(self, region: Region, vocabulary: int) -> None:
        self._region = region
        self._vocabulary = vocabulary
        self.calls = self.direct_calls = 0
        self.is_trained = False

    def install(self, model: nn.Module) -> None:
        """Serve a model whose loss is transformers' causal language-model loss; leave any other alone."""
        if getattr(model, "loss_function", None) is ForCausalLMLoss:
            model.loss_function = self._loss  # type: ignore[assignment]  # a property

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        direct = logits is self._region.logits
        self.direct_calls += direct
        if not self._region.keep_logits_sharded and direct and self.is_trained:
            # Gathered they are the same shards. The steps of one run, and of one that resumes it, are to be alike to
            # the last bit, whether they are the first of their kind in a process or not.
            logits = self._region.own_part(logits).contiguous()
        elif logits.shape[-1] == self._vocabulary or not self._region.keep_logits_sharded:
            whole: torch.Tensor = ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
            return whole
        with _ShardedCrossEntropy(self._region):
            loss: torch.Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1], **kwargs)
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLoss:
        return self


class _ShardedCrossEntropy(TorchFunctionMode):
    """Computes `cross_entropy(logits [tokens, shard], targets [tokens])` over all ranks' shards."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.cross_entropy:
            return sharded_cross_entropy(self._region, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def sharded_cross_entropy(
    region: Region,
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` on logits of which this rank has a shard of the last dimension.

    Args:
        logits: shape [tokens, vocabulary / ranks]. targets: shape [tokens], entries of the whole vocabulary.
        weight, ignore_index, reduction, label_smoothing: as for torch's function; with the first or the last, or
            without a reduction, the logits are gathered.
    """
    if weight is not None or label_smoothing or reduction not in ("mean", "sum") or targets.is_floating_point():
        whole = region.gather(logits)
        return functional.cross_entropy(
            whole, targets, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    total: torch.Tensor = _CrossEntropy.apply(region, logits, targets, ignore_index)  # type: ignore[no-untyped-call]  # torch's has no types
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """The sum over tokens."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        collectives, width = region.ready, logits.shape[-1]
        top = logits.amax(-1).contiguous()
        collectives.largest(top)
        exponentials = (logits - top.unsqueeze(-1)).exp()
        local = targets - region.index * width
        here = (local >= 0) & (local < width)
        local = local.masked_fill(~here, 0).unsqueeze(-1)
        sums = torch.stack([exponentials.sum(-1), logits.gather(-1, local).squeeze(-1).masked_fill(~here, 0)])
        collectives.sum(sums)
        valid = targets != ignore_index
        losses = (sums[0].log() + top - sums[1]).masked_fill(~valid, 0)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), local, here, valid)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        softmax, local, here, valid = ctx.saved_tensors
        result = softmax.scatter_add(-1, local, -here.to(softmax.dtype).unsqueeze(-1))
        return None, result.mul_(valid.unsqueeze(-1)).mul_(gradient), None, None
