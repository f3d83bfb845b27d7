"""What a rank tells of a training step: a report of what it took, and names in torch's profiler for what it does.

Names are made only while a profiler is on. For actions and messages this is asked once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from penstock.schedule.actions import Action


@dataclass(frozen=True)
class ReductionReport:
    """What the reduction of a step cost.

    Attributes:
        num_bytes: size of the gradients.
        intervals: for each bucket, when it was launched and when its sum was complete (on an accelerator: was waited
            for).
        seconds_waited: how long the step waited for them at its end; None on an accelerator, whose host does not wait.
    """

    num_bytes: int
    intervals: tuple[tuple[float, float], ...]
    seconds_waited: float | None

    @property
    def num_buckets(self) -> int:
        return len(self.intervals)

    @property
    def seconds(self) -> float:
        """How long any bucket was under way: the union of the intervals."""
        total = end = 0.0
        for start, stop in sorted(self.intervals):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    @property
    def hidden(self) -> float | None:
        """Share of the reduction's time that was hidden behind computation, between 0 and 1; None on an accelerator."""
        if self.seconds_waited is None:
            return None
        return 1.0 if self.seconds <= 0 else max(0.0, 1.0 - self.seconds_waited / self.seconds)


@dataclass(frozen=True, repr=False)
class StepReport:
    """A training step as this rank saw it.

    The losses are tensors of shape () where the stage computes, so that no host waits for them until it reads `loss` or
    `global_loss`.

    Attributes:
        own_sum: sum of the losses it yielded: this pipeline's share of the global batch's loss, or the loss of its own
            batch with `Engine.own_means`.
        global_sum: the sum of these over all pipelines, the same on every rank: the global batch's loss, unless with
            `own_means`.
        seconds: duration, with the loop's body.
        bubble: share of it this rank spent waiting for other stages; None on an accelerator, whose host does not wait.
        num_microbatches: microbatches of this pipeline.
        num_samples: of the global batch, over all pipelines.
        num_tokens: of these, padding counted: elements of `input_ids`, or positions of `inputs_embeds`; 0 without both.
        reduction: what gradient reduction took; None under `no_sync` or where nothing is shared.
    """

    own_sum: torch.Tensor
    global_sum: torch.Tensor
    seconds: float
    bubble: float | None
    num_microbatches: int
    num_samples: int
    num_tokens: int
    reduction: ReductionReport | None

    @property
    def loss(self) -> float:
        """The value of `own_sum`."""
        return float(self.own_sum)

    @property
    def global_loss(self) -> float:
        """The value of `global_sum`."""
        return float(self.global_sum)

    @property
    def samples_per_second(self) -> float:
        """Samples of the global batch a second."""
        return self.num_samples / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the global batch a second; None where there are none."""
        return self.num_tokens / self.seconds if self.num_tokens else None

    def __repr__(self) -> str:
        """On one line. Reads the losses."""
        parts = [f"loss {self.global_loss:.6g}"]
        if self.loss != self.global_loss:
            parts[0] += f" ({self.loss:.6g} of it here)"
        parts.append(f"{self.seconds:.4g} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        parts.append(f"{self.samples_per_second:,.4g} samples/s")
        parts.append(f"{self.num_microbatches} microbatch" + "es" * (self.num_microbatches != 1))
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.1%}")
        if self.reduction is not None:
            parts.append(f"{self.reduction.num_bytes / 1e6:.3g} MB reduced")
            if self.reduction.hidden is not None:
                parts.append(f"{self.reduction.hidden:.0%} of the time hidden")
        return f"<step: {', '.join(parts)}>"


PREFIX = "penstock: "


def profiling() -> bool:
    """Whether a profiler of torch is on in this process."""
    return bool(torch.autograd._profiler_enabled())


def label(*words: object) -> contextlib.AbstractContextManager[object]:
    """Around what `words` name in the profile, if there is one."""
    return record_function(PREFIX + " ".join(map(str, words))) if profiling() else contextlib.nullcontext()


def numbered(actions: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    """`actions` with their positions, each labelled in the profile, if there is one, until the next is asked for."""
    return _labelled(actions) if profiling() else enumerate(actions)


def _labelled(actions: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    for position, action in enumerate(actions):
        with record_function(f"{PREFIX}{action.kind.value} stage {action.stage} microbatch {action.microbatch}"):
            yield position, action
