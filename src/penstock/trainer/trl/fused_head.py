"""TRL's fused head over stages: log-probabilities of the labels in place of logits.

TRL's multiplies the hidden states with the head's weight, which is on the last stage only. This one takes the logits
that the model's own forward makes. So the model's output is a few numbers for each token, which all ranks can be sent.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from penstock.trainer.trainer_adapter import not_over_pipelines

IGNORED = -100
# What TRL's losses may ask for: figures of each token, by the names of TRL's fields.
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Logits are looked at in parts of so many numbers, as each part is copied a few times.
PART = 1 << 24


def add_fused_head(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: Collection[str] = ("log_probs",)
) -> None:
    """In place of TRL's `add_fused_lm_head`, with its arguments: a call with `labels` and `fused_lm_head=True` gives a
    `FusedCausalLMOutput`.

    Raises:
        ValueError: `cast_lm_head_to_fp32`, as the model's own forward calls the head in its own type; or `outputs` has
            a name that is unknown here.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    if cast_lm_head_to_fp32:
        raise not_over_pipelines("cast_lm_head_to_fp32", "load the whole model in float32")
    if unknown := sorted(set(outputs) - set(OUTPUTS)):
        raise not_over_pipelines(
            f"the output {unknown[0]} of TRL's fused head",
            f"known are {', '.join(OUTPUTS)}. Use the TRL that was tested",
        )
    original = model.forward

    @functools.wraps(original)
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs, **({} if labels is None else {"labels": labels}))
        assert labels is not None
        output = original(*args, **kwargs)
        following = labels[:, 1:]
        values = per_token(output.logits[:, :-1], following, temperature, outputs)
        return FusedCausalLMOutput(**values, aux_loss=output.get("aux_loss"))

    model.forward = types.MethodType(forward, model)


def per_token(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """What is known of each label's prediction, by the names of TRL's fields, zero where the label is -100: each of
    shape (samples, tokens). `logits`: (samples, tokens, vocabulary)."""
    kept = labels != IGNORED
    rows, targets = logits.flatten(0, -2), labels.clamp(min=0).flatten()
    count = max(1, PART // logits.shape[-1])
    of_part = functools.partial(_of_part, temperature, tuple(wanted))
    if len(rows) > count and torch.is_grad_enabled():  # so that the backward has the copies of one part at a time
        of_part = functools.partial(checkpoint, of_part, use_reentrant=False, preserve_rng_state=False)
    parts = [of_part(chunk, target) for chunk, target in zip(rows.split(count), targets.split(count), strict=True)]
    return {
        name: torch.cat([part[name] for part in parts]).view(labels.shape).masked_fill(~kept, 0) for name in parts[0]
    }


def _of_part(
    temperature: float, wanted: Collection[str], logits: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    raised = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    log_probs = raised.log_softmax(-1)
    figures = {"log_probs": log_probs.gather(-1, labels[:, None])[:, 0]}
    if "entropy" in wanted:
        # Not p log p: a token that cannot be is -inf in the logits.
        figures["entropy"] = torch.special.entr(log_probs.exp()).sum(-1)
    with torch.no_grad():
        if "log_sum_sq_probs" in wanted:
            figures["log_sum_sq_probs"] = (2 * log_probs).logsumexp(-1)
        if "mean_logits" in wanted:
            figures["mean_logits"] = raised.mean(-1)
        if "is_top1" in wanted:
            figures["is_top1"] = raised.argmax(-1) == labels
    return figures


@contextmanager
def with_fused_head_of_stages(kind: type) -> Iterator[None]:
    """Inside, the modules of TRL's classes among the bases of `kind` have `add_fused_head` in the place of theirs."""
    with ExitStack() as patches:
        for module in {inspect.getmodule(cls) for cls in kind.__mro__ if cls.__module__.startswith("trl.")}:
            if hasattr(module, "add_fused_lm_head"):
                patches.enter_context(mock.patch.object(module, "add_fused_lm_head", add_fused_head))
        yield
