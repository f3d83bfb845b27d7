"""The real executor of every rank of a layout, one after another in one process, over groups that write calls down.

What a rank posts, sends and waits for never depends on what it receives, so that each rank runs alone. Stages are
linear layers; every unit is one. The answers to headers are made up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from penstock.generation.decoding import Decoding
from penstock.layout.layout import Layout
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.boundary.boundaries import Boundaries
from penstock.runtime.boundary.p2p import TAGS_PER_CHANNEL, Message, P2PChannels, encode_header
from penstock.runtime.comm import gloo, groups
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.groups import Groups
from penstock.runtime.comm.totals import StepFacts, Totals
from penstock.runtime.context import RankContext
from penstock.runtime.evaluation import run_forwards
from penstock.runtime.failures.board import FailureBoard
from penstock.runtime.failures.interrupts import Interrupts
from penstock.runtime.gradients.gradients import Gradients
from penstock.runtime.gradients.holders import find_holders
from penstock.runtime.gradients.weight_gradients import install
from penstock.runtime.inputs import StepInputs
from penstock.runtime.loss_proxy import StageOutput
from penstock.runtime.program import Program
from penstock.runtime.step import TrainingStep
from penstock.schedule import Schedule
from tests.support.device_order import Do, Event

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WIDTH = 4


@dataclass(eq=False)
class Work:
    """What a call on a group gives back. Waiting for it is an event, once."""

    log: list[Event]
    position: int

    def wait(self, timeout: Any = None) -> bool:
        self.log.append(Event(Do.WAIT, of=self.position))
        return True

    def is_completed(self) -> bool:
        return True  # what waits has to wait nevertheless

    def get_future(self) -> Any:
        return SimpleNamespace(add_done_callback=lambda callback: None)


@dataclass(eq=False)
class Group:
    """A process group that writes calls down. `answers`: what seems to arrive, by kind of message."""

    name: str
    ranks: tuple[int, ...]
    on_host: bool
    log: list[Event]
    answers: dict[Message, torch.Tensor]

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._event(Do.SEND, tensors[0], peer=self.ranks[peer], tag=tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        kind = Message(tag // TAGS_PER_CHANNEL % len(Message))
        if kind is Message.HEADER:  # of as many values as there is room for
            tensors[0].copy_(encode_header([SPEC] * (len(tensors[0]) - 1)))
        elif (answer := self.answers.get(kind)) is not None:
            tensors[0].copy_(answer)
        return self._event(Do.RECEIVE, tensors[0], peer=self.ranks[peer], tag=tag)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        return self._event(Do.COLLECTIVE, tensors[0], tag="all_reduce")

    def _event(self, do: Do, tensor: torch.Tensor, tag: Any, peer: int = -1) -> Work:
        what = (tag, str(tensor.dtype), tuple(tensor.shape))
        self.log.append(Event(do, self.name, self.on_host, self.ranks, peer, what))
        return Work(self.log, len(self.log) - 1)


@dataclass
class World:
    """Stands for torch.distributed on one rank."""

    rank: int
    size: int
    log: list[Event] = field(default_factory=list)
    answers: dict[Message, torch.Tensor] = field(default_factory=dict)
    num_groups: int = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        def exchange(ranks: Ranks, mine: Any, doing: str) -> list[Any]:
            """All ranks say what this one says, by two sums."""
            for _ in range(2 * (ranks.size > 1)):
                self.all_reduce(torch.zeros(1), group=ranks._group)
            return [mine] * ranks.size

        replaced = {
            "new_group": self.new_group,
            "get_rank": lambda group=None: self.rank,
            "get_world_size": lambda group: len(group.ranks),
            "get_group_rank": lambda group, peer: group.ranks.index(peer),
            "get_process_group_ranks": lambda group: list(group.ranks),
            "all_gather": self.all_gather,
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
            "barrier": lambda group: self.all_reduce(torch.zeros(1), group=group),
        }
        nothing = dict.fromkeys(("await_ranks", "connect", "note_new"), lambda *_: None)
        counted = dist.distributed_c10d._world
        before, counted.group_count = counted.group_count, self.num_groups
        try:
            with (
                mock.patch.multiple(dist, **replaced),
                mock.patch.object(Ranks, "exchange", exchange),
                mock.patch.multiple(gloo, **nothing),
                mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: None),
                mock.patch.object(groups, "_unbound", contextlib.nullcontext),
            ):
                yield
        finally:
            self.num_groups, counted.group_count = counted.group_count, before

    def new_group(self, ranks: Sequence[int], backend: str, timeout: Any) -> Group:
        """As torch does, named by the number of groups that this rank has made or counted."""
        dist.distributed_c10d._world.group_count += 1
        name = f"{backend} {dist.distributed_c10d._world.group_count} of {tuple(ranks)}"
        return Group(name, tuple(ranks), backend == "gloo", self.log, self.answers)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        work = group.allreduce([tensor])
        return work if async_op else work.wait()

    def all_gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
        """All ranks seem to have what this one has."""
        for each in gathered:
            each.copy_(tensor)
        group._event(Do.COLLECTIVE, tensor, tag="all_gather").wait()

    def broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        group._event(Do.COLLECTIVE, tensor, tag="broadcast").wait()


# How many values of a microbatch cross each boundary, by its signature, where it is not one.
NUM_VALUES = {3: 0, 4: 2}
SPEC = TensorSpec((1, WIDTH), torch.float32, requires_grad=True)
RESULT = TensorSpec((1, 1, WIDTH), torch.float32)


class _Computing(torch.autograd.Function):
    """Notes when it is computed, forward and backward."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[str], None], name: str, value: torch.Tensor) -> torch.Tensor:
        ctx.note, ctx.name = note, name
        note(f"F {name}")
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.note(f"B {ctx.name}")
        return None, None, gradient


class Stages(nn.Module):
    """Stands for the `SplitModel` of a rank: each unit is a linear layer. `tied`: units with one weight."""

    dtype = torch.float32

    def __init__(self, stages: Sequence[Sequence[str]], mine: Sequence[int], tied: Sequence[str], world: World):
        super().__init__()
        self._stages, self._world = stages, world
        self.units = nn.ModuleDict()
        for stage in mine:
            for unit in stages[stage]:
                self.units[unit] = nn.Linear(WIDTH, WIDTH, bias=False)
        held = [unit for unit in tied if unit in self.units]
        for unit in held[1:]:
            self.units[unit].weight = self.units[held[0]].weight
        self.model = self

    def forward(self, plan: Any, stage: int, inputs: Any, received: Sequence[torch.Tensor], **options: Any) -> Any:
        value: Any = sum(received[number] for number in range(len(received)))
        if not len(received):
            value = torch.ones(1, WIDTH, requires_grad=True)
        for unit in self._stages[stage]:
            value = self.units[unit](_Computing.apply(self._note, unit, value))
        if stage == len(self._stages) - 1:
            return StageOutput(value.sum()), ()
        return None, tuple(value * 1 if number else value for number, _ in enumerate(plan.boundaries[stage]))

    def run_to_end(self, plan: Any, stage: int, inputs: Any, received: Any, hand_over: Any, **options: Any) -> Any:
        _, sent = self.forward(plan, stage, inputs, received)
        if sent:
            hand_over([value.detach() for value in sent])
        return {"logits": torch.zeros(RESULT.shape)}

    def plan(self, inputs: Any, call: Any = None) -> Any:
        return SimpleNamespace(
            boundaries=[("hidden",)] * (len(self._stages) - 1),
            num_stages=len(self._stages),
            last_stage_decides=False,
            digest=0,
            checksum=0,
            calls=(),
        )

    def draws(self, plan: Any) -> bool:
        return False

    def _note(self, name: str) -> None:
        self._world.log.append(Event(Do.COMPUTE, what=name))


class RecordedRank:
    """One rank of `layout`, each of whose pipelines runs its own of `schedules`; on a GPU, or with gloo alone."""

    def __init__(
        self, layout: Layout, schedules: Sequence[Schedule], rank: int, tied: Sequence[str] = (), gpu: bool = True
    ):
        self.world = World(rank, layout.world_size)
        self.place = layout.place_of(rank)
        self.mine = layout.pipelines[self.place.pipeline]
        self.schedule = schedules[self.place.pipeline]
        own = self.mine.stages_of(self.place.pipeline_rank)
        self.stages = Stages(self.mine.stages, own, tied, self.world)
        local = {
            f"{unit}.weight": parameter for unit, layer in self.stages.units.items() for parameter in layer.parameters()
        }
        aliases: list[tuple[str, ...]] = []
        for unit in layout.units:
            if unit == (tied[0] if tied else None):
                aliases.append(tuple(f"{name}.weight" for name in tied))
            elif unit not in tied:
                aliases.append((f"{unit}.weight",))
        held, shared = find_holders(layout, 0, aliases, local)
        with self.world.patched():
            device = GPU if gpu else CPU
            self.groups = Groups(layout, rank, device, shared)
            self.groups._device = CPU
            self.board = FailureBoard(rank, "recorded")
            self.context = RankContext(layout, rank, CPU, self.groups, self.board, Interrupts())
            self.channels = P2PChannels(self.groups.p2p_group, self.context.rank_of, CPU, self.board)
            if gpu:  # the values are on the CPU all the same
                self.channels.receives_ahead = 0
            self.boundaries = Boundaries(self.channels, self.mine.stage_to_rank, self.place.pipeline_rank, CPU)
            self.gradients = Gradients(held, self.context)
            self.totals = Totals(self.context)
            self.decoding = Decoding(
                self.context, self.stages, self.channels, contextlib.nullcontext, contextlib.nullcontext
            )
        if self.schedule.splits_backward:
            install(self.stages, self.gradients.queues)
        self.program, self.forwards = (
            Program.of(schedule, self.place.pipeline_rank, far_ahead=not gpu)
            for schedule in (self.schedule, self.schedule.forwards())
        )
        self.world.answers[Message.RESULT_HEADER] = encode_header([RESULT])
        self.world.answers[Message.PRESENCE] = torch.ones(1, dtype=torch.int64)
        self.states = [()] * self.schedule.num_stages

    @contextlib.contextmanager
    def events(self) -> Iterator[list[Event]]:
        """What is done inside."""
        self.world.log.clear()
        taken: list[Event] = []
        with self.world.patched():
            yield taken
        taken.extend(self.world.log)

    def warm_up(self) -> list[Event]:
        with self.events() as events:
            self.groups.warm_up()
            cuts = [cut for cut, (a, b) in enumerate(pairwise(self.mine.stage_to_rank)) if a != b]
            self.channels.warm_up(cuts, self.mine.stages_of(self.place.pipeline_rank))
        return events

    def train(
        self, signatures: Sequence[int] | None = None, left_at: int | None = None, called: bool = False
    ) -> list[Event]:
        """A step; by default all microbatches have one shape.

        `left_at`: the microbatch at which all ranks leave the loop, with backward() `called` or not.
        """
        # The groups sum nothing, so they cannot tell how many ranks left: here all do, or none.
        found, finish = StepFacts(num_left=0 if left_at is None else self.world.size), self.totals.finish
        with self.events() as events, mock.patch.object(self.totals, "finish", lambda: (finish()[0], found)):
            inputs = self._inputs(signatures)
            parts = self.context, self.stages, self.boundaries, self.gradients, self.totals
            step = TrainingStep(*parts, self.program, inputs).run(lambda: self.states)
            for microbatch, output in enumerate(step):
                self.world.log.append(Event(Do.COMPUTE, what="the loop's body"))
                if microbatch != left_at or called:
                    output.loss.backward()
                if microbatch == left_at:
                    step.close()  # type: ignore[attr-defined]  # a generator
        return events

    def evaluate(self, signatures: Sequence[int] | None = None) -> list[Event]:
        with self.events() as events, torch.no_grad():
            run_forwards(
                self.stages,
                self.boundaries,
                self.forwards,
                self._inputs(signatures),
                [("evaluating",)] * len(self.states),
            )
        return events

    def generate(self, num_tokens: int) -> list[Event]:
        """Forwards of one shape."""
        self.stages.training = False
        with self.events() as events:
            for _ in range(num_tokens):
                self.decoding.forward({"input_ids": torch.zeros(1, 1)})
        return events

    def _inputs(self, signatures: Sequence[int] | None) -> StepInputs:
        count = self.schedule.num_microbatches
        rule = SimpleNamespace(shares=lambda counts, totals: (1.0,), fields=())
        signatures = list(signatures or [0] * count)
        boundaries = [
            [("hidden",) * NUM_VALUES.get(signature, 1)] * (self.schedule.num_stages - 1) for signature in signatures
        ]
        plans = [SimpleNamespace(boundaries=each, loss=rule, fields=()) for each in boundaries]
        return StepInputs(
            [{}] * count, plans, signatures, [(1,)] * count, [1] * count, 0, 0, [{}] * count,
        )  # fmt: skip


def one_pipeline(schedule: Schedule) -> Layout:
    """Of one unit a stage."""
    return Layout.place([[[f"u{stage}"] for stage in range(schedule.num_stages)]], [schedule.stage_to_rank])


def recorded(layout: Layout, schedules: Sequence[Schedule], **options: Any) -> list[RecordedRank]:
    """All ranks of a layout."""
    return [RecordedRank(layout, schedules, rank, **options) for rank in range(layout.world_size)]
