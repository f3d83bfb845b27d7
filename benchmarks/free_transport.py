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

from penstock.runtime.channel import Channel, Kind, Line
from penstock.runtime.cuts import LOSS_DTYPE
from penstock.runtime.exchange import Exchange
from penstock.runtime.executor import TrainingStep
from penstock.runtime.failure import FailureBoard
from penstock.runtime.gate import copied, gate_loss, proxy_loss
from penstock.runtime.inputs import StepInputs
from penstock.runtime.notice import Notice
from penstock.runtime.precision import ScaleWatch
from penstock.runtime.program import Program
from penstock.runtime.reduction import GradientReducer
from penstock.runtime.station import Station
from penstock.runtime.step import StageOutput
from penstock.runtime.transfer import TensorSpec, encode_header
from penstock.runtime.weight_gradients import WeightGradientQueues
from penstock.schedule import Schedule, build
from penstock.schedule import actions as compute

SHAPE = (4, 16)
CPU = torch.device("cpu")


class Stage(nn.Module):
    """Stands for the `SplitModel` of a rank: any of its stages is a multiplication by a weight."""

    random = False
    dtype = torch.float32

    def __init__(self, last: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE[-1]))
        self._last = last
        self._input = torch.ones(SHAPE)

    def forward(
        self, plan: Any, stage: int, inputs: Any, received: Sequence[torch.Tensor], **options: Any
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        output = (received[0] if received else self._input) * self.weight
        return (StageOutput(output.sum()), ()) if stage == self._last else (None, (output,))


class ScriptedLine(Line):
    """A line on which the neighbour seems to say `message` each time."""

    def __init__(self, channel: Channel, cut: int, kind: Kind, message: torch.Tensor):
        super().__init__(channel, cut, kind, dist.group.WORLD, 0)
        self._message = message

    def receive(self) -> list[torch.Tensor]:
        buffers = super().receive()
        buffers[0].copy_(self._message)
        return buffers


class ScriptedChannel(Channel):
    """`messages`: what arrives on lines of these kinds. On the others nothing is written into the buffers."""

    def __init__(self, messages: dict[Kind, torch.Tensor], board: FailureBoard):
        super().__init__(lambda cut, kind: dist.group.WORLD, lambda stage: 0, CPU, board)
        self._messages = messages

    def line(self, cut: int, kind: Kind, upper: bool) -> Line:
        if kind in self._messages:
            return ScriptedLine(self, cut, kind, self._messages[kind])
        return super().line(cut, kind, upper)


def with_executor(arguments: dict[str, Any]) -> Step:
    """Penstock's executor."""
    schedule, rank = _schedule(arguments)
    stage = Stage(schedule.num_stages - 1)
    parameters = list(stage.parameters())
    rule = SimpleNamespace(shares=lambda counts, totals: (1.0,), fields=())
    plan = SimpleNamespace(cuts=[["hidden"]] * (schedule.num_stages - 1), loss=rule)
    count = schedule.num_microbatches
    inputs = StepInputs([{}] * count, [plan] * count, [()] * count, [(1,)] * count, [1] * count, 0, 0, [{}] * count)
    board = FailureBoard(None, rank, "free")
    header = encode_header([TensorSpec(SHAPE, torch.float32, requires_grad=True)])
    notice = torch.tensor(Notice.of(parameters, CPU))
    channel = ScriptedChannel({Kind.STEP: notice, Kind.HEADER: header}, board)
    queues = WeightGradientQueues()
    station = Station(
        split=stage,
        parameters=parameters,
        exchange=Exchange(channel, schedule.stage_to_rank, rank, CPU),
        channel=channel,
        reducer=GradientReducer([], {}, rank, board, queues.awaits),
        queues=queues,
        board=board,
        device=CPU,
        everyone=range(schedule.num_ranks),
        seed=0,
        totals=SimpleNamespace(shared=False, counts=lambda counts: counts),
        scaling=ScaleWatch(),
        share_overflow=lambda: None,
    )
    program = Program.of(schedule, rank, far_ahead=True)

    def step() -> Figures:
        stage.weight.grad = None
        for output in TrainingStep(station, program, inputs).run():
            output.loss.backward()
        return {}

    return step


def by_hand(arguments: dict[str, Any]) -> Step:
    """The same calls of torch, one after the other: buffers, messages, forwards, gates, backwards."""
    schedule, rank = _schedule(arguments)
    stage, top, last = Stage(schedule.num_stages - 1), schedule.top_stage(rank), schedule.num_stages - 1
    local = [schedule.is_local(cut, cut + 1) for cut in range(last)]
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

        def gradients_of(index: int, microbatch: int) -> list[torch.Tensor]:
            return [handed_down.pop((index, microbatch)) if local[index] else received()]

        def on_backward(index: int, microbatch: int, has_input: bool, gradient: Any) -> Sequence[torch.Tensor]:
            if has_input:
                at_end(lambda: None)
            return () if index == last else gradients_of(index, microbatch)

        for action in schedule.actions_of(rank):
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
                callback = partial(on_backward, index, microbatch, bool(inputs))
                if index < top:
                    torch.autograd.backward(sent, gradients_of(index, microbatch))
                else:
                    if output is not None:
                        value = copied(output.loss.detach(), LOSS_DTYPE)
                        loss = gate_loss(output.loss, callback)
                    else:
                        value = received((), LOSS_DTYPE)
                        loss = proxy_loss(value, torch.float32, sent, callback)
                    if index and index > last - schedule.num_ranks + 1 and not local[index - 1]:
                        sends.append(group.send([value], 0, 0))
                    losses.append(value)
                    loss.backward()
                for tensor in inputs:
                    if local[index - 1]:
                        handed_down[index - 1, microbatch] = tensor.grad
                    else:
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
