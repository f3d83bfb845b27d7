"""Gradient reduction between pipelines and between the holders of tied weights, overlapped with cool-down.

Every parameter has a set of ranks that hold it: one in each pipeline for an ordinary parameter, more for a tied weight.
Gradients are *summed* over that set: each microbatch's loss is already its share of the global batch's loss (see
docs/exactness.md). Parameters of one set share buckets. A bucket is launched as soon as the step's last backward has
completed it, or the last action W if its weight gradients are deferred; always in one order, last units first, which is
the order in which cool-down completes them.

A launched sum can block what this rank sends later. So a sum is launched early, before the step's last gradients are
sent to the previous stage, only if no other holder waits for these before it joins the sum:

- A sum of several pipelines' copies is launched early. A holder in another pipeline joins as soon as its own backward
  has passed the unit, for which it waits for later stages only; what this rank still sends goes to an earlier stage.
- A tied weight that several stages of one pipeline hold is summed last on all ranks, after a rank's last message: the
  earlier of these stages joins only after it has received what this rank sends.
- On a rank with several stages all sums are launched after its last message: its last backward is not that of its last
  units.

Frozen parameters are in no bucket, unless steps under `no_sync` have left gradients: a step sums what is trainable in
it, on which all holders have agreed by then."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.comm.gloo import MOST_FULLY_CONNECTED, wait_for_all
from penstock.runtime.context import RankContext
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.gradients.weight_gradients import knows_deferral
from penstock.runtime.loss_proxy import requires_grad
from penstock.runtime.report import ReductionReport, label


class GradientReducer:
    """Sums this rank's gradients with those of the other holders, once for each step that is not under `no_sync`.

    `held`: what this rank holds, in forward order. `awaits`: says of a parameter whether a part of its gradient was
    deferred. Where a parameter has owners, they alone want its sum: the others have no gradient then.
    """

    def __init__(self, held: Sequence[HeldParameter], context: RankContext, awaits: Callable[[torch.Tensor], bool]):
        self._context, self._awaits = context, awaits
        self._shared = [weight for weight in held if len(weight.ranks) > 1]
        self._parameters = [weight.parameter for weight in self._shared]
        self._arrange(tuple(map(requires_grad, self._parameters)))
        # Nothing is launched before the final backward of a step. From then on the reducer is armed: a parameter whose
        # gradient is complete is not pending in its bucket any more, and a bucket in which none is pending is launched
        # if it is the next one. Those still pending at the end of the step are launched there.
        self._armed = False
        # The bucket to launch next.
        self._next = 0
        # Parameters accumulated in the backward under way. Those accumulated several times in one (a reentrant
        # checkpoint runs backwards of its own inside) are piecemeal, and stay pending. A backward must have been
        # observed to know which ones these are, so the reducer is never armed in the first one.
        self._accumulated: set[int] = set()
        self._piecemeal: set[int] = set()
        self._observed = False
        # Parameters whose gradients on this rank are sums over all holders.
        self._summed_already: set[int] = set()
        # Parameters with gradients of this rank alone, from steps under `no_sync`: summed even if frozen by then.
        self._to_be_summed: set[int] = set()
        # The garbage collector does not see a parameter's reference to its hook, so the hook must reference nothing.
        note = weakref.WeakMethod(self._note)

        @knows_deferral
        def hook(parameter: torch.Tensor) -> None:
            method = note()
            if method is not None:
                method(parameter)

        self._hooks = [
            _register(parameter, hook)
            for parameter in self._parameters
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    @property
    def active(self) -> bool:
        """Whether anything is held by more than one rank."""
        return bool(self._shared)

    def _arrange(self, included: tuple[bool, ...]) -> None:
        """Make buckets of the shared parameters that are `included`."""
        self._included = included
        buckets = make_buckets(list(compress(self._shared, included)))
        late = [bucket for bucket in buckets if self._context.layout.are_of_several_stages(bucket.ranks)]
        self.buckets = [bucket for bucket in buckets if bucket not in late] + late
        # How many may be launched before the last message, and now.
        self._num_early = 0 if len(self._context.stages) > 1 else len(buckets) - len(late)
        self._num_allowed = self._num_early
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}

    def prepare(self) -> None:
        """Before a step's first backward.

        Gradients left from an earlier step are sums over all holders already. They must be counted once in the next
        sum, so only the first holder, or owner, keeps its copy.
        """
        self._armed = False
        self._next = 0
        included = tuple(
            requires_grad(parameter) or id(parameter) in self._to_be_summed for parameter in self._parameters
        )
        if included != self._included:
            self._arrange(included)
        self._num_allowed = self._num_early
        for bucket in self.buckets:
            bucket.drop_unused_buffer()
        others = (bucket for bucket in self.buckets if bucket.keepers[0] != self._context.rank)
        for parameter in (parameter for bucket in others for parameter in bucket.parameters):
            if parameter.grad is not None and id(parameter) in self._summed_already:
                parameter.grad.zero_()
        self._summed_already.difference_update(self._bucket_of)
        self._to_be_summed.update(self._bucket_of)

    def enter_backward(self, final: bool) -> None:
        """A backward on this rank begins. In the `final` one of a step, gradients become complete."""
        self._accumulated.clear()
        if final and self._observed:
            for bucket in self.buckets:
                bucket.expect_all()
            self._armed = True
        self._observed = True

    def _note(self, parameter: torch.Tensor) -> None:
        """Autograd has accumulated `parameter`'s gradient, or would have if its layer had not deferred it."""
        if self._awaits(parameter):
            return
        key = id(parameter)
        if key in self._accumulated:
            self._piecemeal.add(key)
            if self._bucket_of.get(key) in self.buckets[: self._next]:
                raise RuntimeError(
                    "a parameter's gradient was accumulated after it had been summed over the replicas: gradient "
                    "checkpointing was switched on between two steps, on a model that uses a parameter several times; "
                    "switch it on before the first step, or use use_reentrant=False"
                )
        self._accumulated.add(key)
        if key not in self._piecemeal:
            self.ready(parameter)

    def ready(self, parameter: torch.Tensor) -> None:
        """`parameter`'s gradient is complete for this step; launch what is complete and may be launched, in order."""
        bucket = self._bucket_of.get(id(parameter))
        if not self._armed or bucket is None:
            return
        bucket.pending.discard(id(parameter))
        self._launch_complete()

    def after_last_message(self) -> None:
        """The final backward of a step is over, and its gradients were sent."""
        self._num_allowed = len(self.buckets)
        if self._armed:
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next < self._num_allowed and not self.buckets[self._next].pending:
            self._launch(self.buckets[self._next])

    def launch_rest(self) -> None:
        """Launch what is left: on a rank without any microbatch, everything."""
        self._armed = False
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])

    def finish(self) -> ReductionReport:
        """Launch what is left and wait for all sums. Every holder calls this, also one without any microbatch."""
        self.launch_rest()
        waited = 0.0
        for bucket in self.buckets:
            start = time.perf_counter()
            with self._summing(bucket), label("wait for the sum of", bucket):
                group = self._context.groups.reduction[bucket.ranks]
                bucket.finish(group, self._context.rank, self._context.board.check)
            waited += time.perf_counter() - start
        self._summed_already.update(self._bucket_of)
        self._to_be_summed.clear()
        intervals = tuple((bucket.launched_at, bucket.finished_at) for bucket in self.buckets)
        host_waits = self._context.device.type == "cpu"
        num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        return ReductionReport(num_bytes, intervals, waited if host_waits else None)

    def forget_sums(self) -> None:
        """Forget all sums under way, so that nothing keeps a dead group's connections open."""
        for bucket in self.buckets:
            bucket.works.clear()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        with self._summing(bucket), label("reduce", bucket):
            bucket.launch(self._context.groups.reduction[bucket.ranks], self._context.rank)

    def _summing(self, bucket: Bucket) -> AbstractContextManager[None]:
        return self._context.board.guard("summing gradients", bucket.ranks)


def _register(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a hook on a parameter that may be frozen now and trained later, which torch refuses."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trainable)


# -- buckets -----------------------------------------------------------------------------------------------------------


# Large enough to amortise a collective's latency, small enough that the first leaves while backward still runs.
BUCKET_BYTES = 25 * 2**20


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype whose gradients are summed together over `ranks`, for those of them that are `keepers`.

    The flat buffer ends with one number for each parameter: 1 from a rank that has a gradient for it, so that a
    parameter without a gradient anywhere keeps None, as it would in the unsplit model. A large gradient, alone in its
    bucket, is summed where it is, without a copy; its number is summed by itself.
    """

    parameters: list[torch.nn.Parameter]
    ranks: tuple[int, ...]
    keepers: tuple[int, ...]
    pending: set[int] = field(default_factory=set)
    works: list[dist.Work] = field(default_factory=list)
    launched_at: float = 0.0
    finished_at: float = 0.0
    _flat: torch.Tensor | None = None
    _presence: torch.Tensor | None = None
    _views: list[torch.Tensor] = field(default_factory=list)
    _absent: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e6:.3g} MB of gradients over ranks {', '.join(map(str, self.ranks))}"

    def expect_all(self) -> None:
        """Expect every trainable parameter's gradient again."""
        self.pending = {id(parameter) for parameter in self.parameters if parameter.requires_grad}

    @property
    def in_place(self) -> bool:
        """Whether its one gradient is summed where it is."""
        return len(self.parameters) == 1 and self.num_bytes >= BUCKET_BYTES

    def drop_unused_buffer(self) -> None:
        """Drop the buffer, unless gradients of earlier steps are in it."""
        if all(parameter.grad is None for parameter in self.parameters):
            self._drop_buffer()

    def _drop_buffer(self) -> None:
        self._flat, self._views, self._presence = None, [], None

    def launch(self, group: dist.ProcessGroup, rank: int) -> None:
        """Move the gradients in and start their sum, which this rank's become, or, if it is no keeper, drop its own."""
        flat, views, presence = self._buffer()
        presence.fill_(1)
        self._absent = []
        sources, targets = [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
                presence[index] = 0
                self._absent.append(index)
            elif gradient.data_ptr() != view.data_ptr():
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
                targets.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.launched_at = self.finished_at = time.perf_counter()
        for parameter, view in zip(self.parameters, views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view if rank in self.keepers else None
        sources.clear()  # makes room
        on_cpu = flat.device.type == "cpu"
        to_one_keeper = len(self.keepers) == 1 and (not on_cpu or len(self.ranks) <= MOST_FULLY_CONNECTED)
        target = self.ranks.index(self.keepers[0]) if to_one_keeper else None
        for tensor in (flat, presence) if self.in_place else (flat,):
            # The sum of complex numbers is that of their parts; no backend has a sum of its own for them.
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            self.works.append(group.allreduce([real]) if target is None else group.reduce(real, target))
        if on_cpu:
            self.works[0].get_future().add_done_callback(lambda _: setattr(self, "finished_at", time.perf_counter()))

    def finish(self, group: dist.ProcessGroup, rank: int, check: Callable[[], object]) -> None:
        """Wait for the sum, which keepers then have as the parameters' gradients; `check` ends the wait."""
        device = self.parameters[0].device
        for work in self.works:
            wait_for_all(work, group, device, check)
        self.works = []
        if device.type != "cpu":
            self.finished_at = time.perf_counter()
        if rank not in self.keepers:
            self._absent = []
            self.drop_unused_buffer()
            return
        _, views, presence = self._buffer()
        # Reading the flags waits for an accelerator; a rank that has every gradient need not read them.
        present = presence.tolist() if self._absent else []
        for index in self._absent:
            if present[index]:
                self.parameters[index].grad = views[index]
        self._absent = []
        if self.in_place:
            self._drop_buffer()

    def _buffer(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """What is summed, each gradient's part of it, and the numbers that say who has one."""
        first, sizes = self.parameters[0], [parameter.numel() for parameter in self.parameters]
        if self.in_place and (gradient := _dense(first)) is not None:
            self._flat, self._views = gradient.view(-1), [gradient]
        elif self._flat is None or self._flat.dtype != first.dtype or self._flat.device != first.device:
            if not self.in_place:
                sizes.append(len(sizes))
            self._flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
            pieces = self._flat.split(sizes)[: len(self.parameters)]
            self._views = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        if not self.in_place:
            self._presence = self._flat[len(self._flat) - len(self._views) :]
        elif self._presence is None:
            self._presence = self._flat.new_empty(1)
        return self._flat, self._views, self._presence


def _dense(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """A parameter's gradient, if it has one whose memory can be summed as it is."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or gradient.dtype != parameter.dtype:
        return None
    return gradient if gradient.is_contiguous() else None


def make_buckets(held: Sequence[HeldParameter], capacity: int = BUCKET_BYTES) -> list[Bucket]:
    """Pack parameters with several holders, given in forward order, into buckets in backward order.

    All ranks of a group make the same buckets for it, because each keeps the forward order. All parameters of a bucket
    have the same keepers. A group's buckets for different keepers share the capacity, so that what is filled side by
    side is complete as early as one bucket.
    """
    buckets: list[Bucket] = []
    latest: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], tuple[Bucket, int]] = {}
    side_by_side = Counter(ranks for ranks, _ in {(weight.ranks, weight.keepers) for weight in held})
    for weight in reversed(held):
        key = weight.ranks, weight.keepers, weight.parameter.dtype
        size = weight.parameter.numel() * weight.parameter.element_size()
        bucket, used = latest.get(key, (None, 0))
        if bucket is None or used + size > capacity // side_by_side[weight.ranks]:
            bucket, used = Bucket([], weight.ranks, weight.keepers), 0
            buckets.append(bucket)
        bucket.parameters.append(weight.parameter)
        latest[key] = bucket, used + size
    return buckets
