"""Gradients packed into flat buffers and summed over the ranks that hold copies of their parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

# Large enough to amortise a collective's latency, small enough that the first leaves while backward still runs.
BUCKET_BYTES = 25 * 2**20


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype whose gradients are summed together over `ranks`.

    The flat buffer ends with one number for each parameter: 1 from a rank that has a gradient for it, so that a
    parameter without a gradient anywhere keeps None, as it would in the unsplit model.
    """

    parameters: list[torch.nn.Parameter]
    ranks: tuple[int, ...]
    pending: set[int] = field(default_factory=set)
    work: dist.Work | None = None
    launched_at: float = 0.0
    finished_at: float = 0.0
    _flat: torch.Tensor | None = None
    _views: list[torch.Tensor] = field(default_factory=list)
    _absent: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Expect every trainable parameter's gradient again."""
        self.pending = {id(parameter) for parameter in self.parameters if parameter.requires_grad}

    def launch(self, group: dist.ProcessGroup) -> None:
        """Copy the gradients in and start their sum."""
        flat, views = self._buffer()
        presence = flat[len(flat) - len(views) :]
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
        # The sum of complex numbers is that of their parts; no backend has a sum of its own for them.
        self.work = group.allreduce([torch.view_as_real(flat) if flat.is_complex() else flat])
        if flat.device.type == "cpu":
            self.work.get_future().add_done_callback(self._note_finished)

    def finish(self) -> None:
        """Wait for the sum and make the parameters' gradients views of it."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        flat, views = self._buffer()
        if flat.device.type != "cpu":
            self.finished_at = time.perf_counter()
        # Reading the flags waits for an accelerator; a rank that has every gradient need not read them.
        present = flat[len(flat) - len(views) :].tolist() if self._absent else []
        for index, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            if index in self._absent and not present[index]:
                continue
            parameter.grad = view
        self._absent = []

    def _note_finished(self, _: object) -> None:
        self.finished_at = time.perf_counter()

    def _buffer(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        first = self.parameters[0]
        if self._flat is None or self._flat.dtype != first.dtype or self._flat.device != first.device:
            sizes = [parameter.numel() for parameter in self.parameters]
            self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
            pieces = self._flat.split([*sizes, len(sizes)])[:-1]
            self._views = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        return self._flat, self._views


def make_buckets(
    parameters: Sequence[tuple[torch.nn.Parameter, tuple[int, ...]]], capacity: int = BUCKET_BYTES
) -> list[Bucket]:
    """Pack (parameter, ranks that hold it) pairs, given in forward order, into buckets in backward order.

    Parameters held by this rank alone need no sum and are left out. All ranks of a group make the same buckets for it,
    because each keeps the forward order.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[tuple[int, ...], torch.dtype], tuple[Bucket, int]] = {}
    for parameter, ranks in reversed(parameters):
        if len(ranks) < 2:
            continue
        key = (ranks, parameter.dtype)
        size = parameter.numel() * parameter.element_size()
        bucket, used = open_buckets.get(key, (None, 0))
        if bucket is None or used + size > capacity:
            bucket, used = Bucket([], ranks), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_buckets[key] = (bucket, used + size)
    return buckets
