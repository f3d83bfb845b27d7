"""One rank of a pipeline alone, over a transport that does nothing: what is left is the executor itself.

Run by `processes.Contestant`. The rank's stage is one multiplication. Two steps run the same actions: Penstock's
executor, and the same calls of torch in a plain loop. Messages go to torch's "fake" process group, which completes
everything at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import Figures, Step, serve

from penstock.layout.layout import Layout
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.boundaries import LOSS_DTYPE, Boundaries
from penstock.runtime.boundary.p2p import Message, P2PChannel, P2PChannels, encode_header
from penstock.runtime.comm.totals import Totals
from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.interrupts import Interrupts
from penstock.runtime.gradients.gradients import Gradients
from penstock.runtime.gradients.holders import HeldParameter
from penstock.runtime.inputs import StepInputs
from penstock.runtime.loss_proxy import StageOutput, copied, hook_loss, proxy_loss
from penstock.runtime.program import Program
from penstock.runtime.step import TrainingStep
from penstock.schedule import Schedule, build
from penstock.schedule import actions as compute

SHAPE = (4, 16)
# Says of one gradient that it is there.
PRESENT = torch.ones(1, dtype=torch.int64)
CPU = torch.device("cpu")


class Stage(nn.Module):
    """Stands for the `SplitModel` of a rank: any of its stages is a multiplication by a weight."""

    dtype = torch.float32

    def __init__(self, last: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE[-1]))
        self._last = last
        self._input = torch.ones(SHAPE)

    def draws(self, plan: Any) -> bool:
        return False

    def forward(
        self, plan: Any, stage: int, inputs: Any, received: Sequence[torch.Tensor], **options: Any
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        output = (received[0] if received else self._input) * self.weight
        return (StageOutput(output.sum()), ()) if stage == self._last else (None, (output,))


class ScriptedChannel(P2PChannel):
    """A channel on which the neighbour seems to say the same each time."""

    def __init__(self, channels: P2PChannels, boundary: int, kind: Message, answer: torch.Tensor):
        super().__init__(channels, boundary, kind, dist.group.WORLD, 0)
        self._answer = answer

    def receive(self) -> list[torch.Tensor]:
        buffers = super().receive()
        buffers[0].copy_(self._answer)
        return buffers


class FreeChannels(P2PChannels):
    """Nothing is written into the buffers of a receive, but for headers, and that all gradients are there."""

    def __init__(self, header: torch.Tensor, board: FailureBoard):
        super().__init__(lambda boundary, kind: dist.group.WORLD, lambda stage: 0, CPU, board)
        self._answers = {Message.HEADER: header, Message.PRESENCE: PRESENT}

    def channel(self, boundary: int, kind: Message, downstream: bool, peer: int | None = None) -> P2PChannel:
        if kind in self._answers and (boundary, kind) not in self._channels:
            self._channels[boundary, kind] = ScriptedChannel(self, boundary, kind, self._answers[kind])
        return super().channel(boundary, kind, downstream, peer)


def with_executor(arguments: dict[str, Any]) -> Step:
    """Penstock's executor."""
    schedule, rank = _schedule(arguments)
    stage = Stage(schedule.num_stages - 1)
    rule = SimpleNamespace(shares=lambda counts, totals: (1.0,), fields=())
    plan = SimpleNamespace(boundaries=[("hidden",)] * (schedule.num_stages - 1), loss=rule, fields=())
    count = schedule.num_microbatches
    inputs = StepInputs([{}] * count, [plan] * count, [()] * count, [(1,)] * count, [1] * count, 0, 0, [{}] * count)
    board = FailureBoard(rank, "free")
    layout = Layout.place([[[f"u{stage}"] for stage in range(schedule.num_stages)]], [schedule.stage_to_rank])
    groups = SimpleNamespace(reduction={}, world=dist.group.WORLD, world_control=dist.group.WORLD, closed=False)
    context = RankContext(layout, rank, CPU, groups, board, Interrupts())
    header = encode_header([TensorSpec(SHAPE, torch.float32, requires_grad=True)])
    boundaries = Boundaries(FreeChannels(header, board), schedule.stage_to_rank, rank, CPU)
    gradients, totals = Gradients([HeldParameter("weight", stage.weight, (rank,))], context), Totals(context)
    stage_states = [()] * schedule.num_stages
    program = Program.of(schedule, rank, far_ahead=True)

    def step() -> Figures:
        stage.weight.grad = None
        for output in TrainingStep(context, stage, boundaries, gradients, totals, program, inputs).run(
            lambda: stage_states
        ):
            output.loss.backward()
        return {}

    return step


def by_hand(arguments: dict[str, Any]) -> Step:
    """The same calls of torch, one after the other: buffers, messages, forwards, gates, backwards."""
    schedule, rank = _schedule(arguments)
    stage, top, last = Stage(schedule.num_stages - 1), schedule.top_stage(rank), schedule.num_stages - 1
    local = [schedule.is_local(boundary, boundary + 1) for boundary in range(last)]
    group = dist.group.WORLD
    at_end = torch.autograd.Variable._execution_engine.queue_callback

    def received(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=dtype, device=CPU)
        group.recv([buffer], 0, 0).wait()
        return buffer

    def step() -> Figures:
        stage.weight.grad = None
        live: dict[tuple[int, int], tuple] = {}
        handed_down: dict[tuple[int, int], torch.Tensor] = {}
        losses, sends = [], []
        present: set[int] = set()  # boundaries whose gradients are known to be there, once a step

        def gradients_of(index: int, microbatch: int) -> list[torch.Tensor]:
            if local[index]:
                return [handed_down.pop((index, microbatch))]
            gradient = received()
            if index not in present:
                received((1,), torch.int64)
                present.add(index)
            return [gradient]

        def on_backward(
            index: int, microbatch: int, sent: Sequence[torch.Tensor], has_input: bool, _: Any
        ) -> Sequence[torch.Tensor]:
            if has_input:
                at_end(lambda: None)
            connected, gradients = index in present, gradients_of(index, microbatch) if index < last else []
            if gradients and not connected:
                torch.autograd.backward(sent, gradients)
                return ()
            return gradients

        for action in schedule.actions[rank]:
            index, microbatch = key = (action.stage, action.microbatch)
            if action.kind is compute.Kind.F:
                inputs = []
                if index and local[index - 1]:
                    inputs = [live[index - 1, microbatch][2][0].detach().requires_grad_()]
                elif index:
                    inputs = [received().requires_grad_()]
                output, sent = stage(None, index, None, inputs)
                if sent and not local[index]:
                    sends.append(group.send([sent[0].detach().contiguous()], 0, 0))
                live[key] = inputs, output, sent
            elif action.kind is compute.Kind.B:
                inputs, output, sent = live.pop(key)
                callback = partial(on_backward, index, microbatch, sent, bool(inputs))
                if index < top:
                    torch.autograd.backward(sent, gradients_of(index, microbatch))
                else:
                    if output is not None:
                        value = copied(output.loss.detach(), LOSS_DTYPE)
                        loss = hook_loss(output.loss, callback)
                    else:
                        value = received((), LOSS_DTYPE)
                        loss = proxy_loss(value, torch.float32, callback, sent if index in present else ())
                    if index and index > last - schedule.num_ranks + 1 and not local[index - 1]:
                        sends.append(group.send([value], 0, 0))
                    losses.append(value)
                    loss.backward()
                for tensor in inputs:
                    if local[index - 1]:
                        handed_down[index - 1, microbatch] = tensor.grad
                    else:
                        if index - 1 not in present:
                            sends.append(group.send([PRESENT.clone()], 0, 0))
                            present.add(index - 1)
                        sends.append(group.send([tensor.grad.contiguous()], 0, 0))
            else:
                with torch.no_grad():  # where weight gradients are computed
                    pass
        for work in sends:
            work.wait()
        float(torch.stack(losses).sum())
        return {}

    return step


def compared(arguments: dict[str, Any]) -> Step:
    """A step of both, one after the other, with the seconds of each."""
    steps = {"executor": with_executor(arguments), "by_hand": by_hand(arguments)}

    def step() -> Figures:
        figures = {}
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            figures[name] = time.perf_counter() - start
        return figures

    return step


def _schedule(arguments: dict[str, Any]) -> tuple[Schedule, int]:
    """The schedule and the rank that `arguments` name, in a job that this process alone pretends to be."""
    size, rank = arguments["num_ranks"], arguments["rank"]
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    return build(arguments["schedule"], size, arguments["num_microbatches"]), rank


if __name__ == "__main__":
    serve({"compared": compared})
