"""Single forwards through all stages of one pipeline, with the result on every rank: what generation runs on.

Every rank runs the same code, such as generate(), and runs each forward to its end. A stage receives its values when
the forward first needs them, sends its own as soon as they are there, and goes on with placeholders; then the last
stage's result goes to every other rank, or with `tokens_only` the tokens that are chosen of it. So all ranks go on
alike, and what could make them differ is shared: the random state, decisions, errors.

The code may run once for each of several groups of a batch, in threads (see `turns`). A rank passes the turn on where a
forward goes to other ranks: when it has sent its part, between two of its stages, and, on the rank of the last stage,
before it receives. So another group's forward is under way while this one's is on other ranks. The last rank has the
most to do: where `P2PChannels.receives_ahead` allows it, it posts its receives before it passes the turn on, and they
are over when its turn comes again. Which stage of which group is due when follows from a clock that all ranks have
alike (`Clock`), so no two ranks wait for each other, and messages of different groups need not be told apart.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from penstock.generation.series import ExpectedMessage, series_of_results
from penstock.generation.single_forwards import Forward, Prefill, SingleForwards
from penstock.generation.turns import LoopStopped, Turns
from penstock.layout.layout import PipelineLayout
from penstock.modeling.graph.plan import DataflowPlan, refusal
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.tensor_spec import TensorSpec
from penstock.random_state import generators_of, set_states
from penstock.runtime.boundary.p2p import P2PChannels
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.comm.settings import compare_plans
from penstock.runtime.context import RankContext
from penstock.runtime.engine import Engine
from penstock.runtime.failures.board import PipelineFailure, noting_on
from penstock.runtime.failures.position import Among
from penstock.runtime.formation import adopt_random_state
from penstock.runtime.gradients.gradients import autocast, autocast_now

T = TypeVar("T")

# What the rank of the last stage sends in place of tokens that it failed to choose.
NO_TOKEN = -1
# Prompts are worked on in parts of at least so many tokens, as smaller ones would read all weights for too few: on a
# CPU, and on accelerators, where not measured.
LEAST_TOKENS = 256
LEAST_TOKENS_ELSEWHERE = 2048
# Seconds that ranks on which a generation failed wait for the others to have stopped at the same place.
AGREEMENT_WAIT = 3.0


def decoding_of(engine: Engine) -> Decoding:
    """An engine's single forwards, of the present formation."""
    return engine.of_formation(_new)


def _new(engine: Engine) -> Decoding:
    return Decoding(
        engine.context,
        engine.split,
        engine.channels,
        partial(engine.together, Call.GENERATE, among=Among.PIPELINE),
        lambda: autocast(engine.device, engine.autocast),
    )


@dataclass
class Group:
    """The state of one group of a batch while it is decoded. `tokens_only`: whether the rank of the last stage alone
    chooses tokens from logits; the others get the tokens. `token`: what the tokens are like that are chosen after the
    last forward; None once they are here, or were sent. `expected`: the message with them, where they are received.
    `forwards`: how many have been on this rank's stages."""

    forwards: int = 0
    tokens_only: bool = False
    token: TensorSpec | None = None
    expected: ExpectedMessage | None = None


@dataclass(frozen=True)
class Clock:
    """When each group of a batch is on each stage, if every stage takes one unit of time. `spacing`: the units between
    two groups; as many as the most stages that follow one another on a rank. `period`: those between two forwards of
    a group."""

    spacing: int
    period: int

    @classmethod
    def of(cls, pipeline: PipelineLayout, number: int) -> Clock:
        """The clock of `number` groups."""
        ranks = pipeline.stage_to_rank
        spacing = max(len(list(stages)) for _, stages in groupby(ranks))
        return cls(spacing, max(len(ranks), spacing * number))

    def time(self, forward: int, group: int, stage: int) -> int:
        return forward * self.period + group * self.spacing + stage


def in_turns(pipeline: PipelineLayout) -> bool:
    """Whether groups may be on the stages by `Clock`: no rank comes to its first stage behind another's later one.

    Otherwise ranks that compare the plan of a group's next forward might wait for a rank that still waits for them."""
    ranks = pipeline.stage_to_rank
    behind = [stage - ranks.index(rank) for stage, rank in enumerate(ranks)]
    return behind == sorted(behind)


class Decoding:
    """One rank's part in the forwards of its pipeline. Every rank of the pipeline calls every method alike.

    Args:
        begin: gives a context in which all ranks of the pipeline have agreed to generate.
        autocast: gives the context in which the model's own forward runs. As in a Trainer, that is all it is for: of an
            encoder that generate() calls by itself it is not, nor of a user's processor.

    Attributes:
        ranks: those of the pipeline, in pipeline order; all that share a stage's weights too.
        chooses_tokens: whether this rank holds the last stage.
        logged_reasons: why batches were not decoded in groups, as far as the log says so.
        running: whether a session is open; a generate() called inside it is part of it.
        inside: whether a forward is being planned or run, so that the model's inner calls are its own.
        every_position: whether the logits of all positions are wanted on all ranks, not of the last position only.
        exchanges: how many exchanges this rank has begun in the session.
    """

    def __init__(
        self,
        context: RankContext,
        split: SplitModel,
        channels: P2PChannels,
        begin: Callable[[], AbstractContextManager[Any]],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.rank, self.ranks = context.rank, context.pipeline_ranks
        self.logged_reasons: set[str] = set()
        self.chooses_tokens = context.holds_output
        self.running = False
        self.inside = False
        self.every_position = False
        self.exchanges = 0
        self.groups: Sequence[Group] = [Group()]
        # On the rank of the last stage: the tokens that it still has to send, in the order of their forwards.
        self._owed: deque[TensorSpec] = deque()
        self._context, self._board, self._process_groups = context, context.board, context.groups
        self._device = context.device
        self._split = split
        self._channels = channels
        self._results = series_of_results(self._channels, context)
        self._forwards = SingleForwards(context, split, channels)
        self._begin, self._autocast = begin, autocast
        self._turns: Turns | None = None
        self._clock = Clock.of(context.pipeline, 1)
        self._num_sessions = 0
        # The checksums of plans that all ranks have alike. One that is new on some ranks alone is an error there: they
        # compare it where the others do not, which the watcher finds, but for groups of a batch.
        self._compared: set[int] = set()
        self._board.on_close(self._results.clear)
        # For the loss only; where experts' shapes are assumed, each token would take a run of their meta copies.
        unread = {"output_router_logits": False}
        self._switched_off = unread if unread.keys() <= inspect.signature(split.model.forward).parameters.keys() else {}

    # -- the code that all ranks run -------------------------------------------------------------------------------

    @contextmanager
    def session(self) -> Iterator[None]:
        """One generation. All ranks draw the first rank's random numbers in it; an error on one becomes one on all.

        An error that every rank meets at the same point (a wrong argument, say) is only raised, and the pipeline stays
        usable. A rank whose random state was not the first rank's has its own again afterwards.
        """
        with self._begin():
            pass
        self._board.check()
        self.running, self.every_position, self._forwards.seed, self.exchanges = True, False, None, 0
        self.groups, self._turns = [Group()], None
        self._owed.clear()
        self._num_sessions += 1
        try:
            with (
                self._board.position.call("generation", among=Among.PIPELINE, detail=self),
                autocast_now(self._device)(),  # so that weights that a forward casts stay for the next one
                self._one_random_state(),
            ):
                yield
                self._settle()
        except PipelineFailure:
            raise
        except BaseException as error:
            # An exchange that failed has closed the pipeline already.
            if self._board.failed is None:
                if isinstance(error, Exception) and self._all_stopped_here():
                    with noting_on(error):
                        self._settle()
                else:
                    self._board.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.running = False

    def _all_stopped_here(self) -> bool:
        """Whether every rank says within some seconds that it has stopped at this place."""
        key, place, ours = f"generation/{self._num_sessions}", str(self.exchanges), self._board.keys
        if len(self.ranks) == 1 or ours is None:
            return len(self.ranks) == 1
        keys, deadline = [f"{key}/{rank}" for rank in self.ranks], time.monotonic() + AGREEMENT_WAIT
        with suppress(Exception):  # the store may be gone
            ours.put(f"{key}/{self._context.rank}", place)
            # Not the store's own wait: it prints a long message when it times out.
            while not ours.ask(lambda: ours.store.check(keys)):
                if time.monotonic() > deadline or self._board.failed is not None:
                    return False
                time.sleep(0.005)
            return all(ours.get(each) == place for each in keys)
        return False

    def in_groups(self, loops: Sequence[Callable[[], T]]) -> list[T]:
        """Run one loop for each group of a batch, all of which make their forwards on the stages; return their results.

        The first error of a loop ends all of them and is raised: each at the end of the forward that it has begun, as
        other ranks have done their part of that, or wait for this rank's. Every rank passes equal loops.
        """
        self.groups = [Group() for _ in loops]
        settled = [partial(self._completed, loop) for loop in loops]
        if len(loops) == 1:
            return [settled[0]()]
        self._clock = Clock.of(self._context.pipeline, len(loops))
        # On a rank with only the last stage, all groups first ask for their first messages. So each group's first turn
        # is one forward earlier.
        forward = -1 if self._context.stages == (self._context.pipeline.num_stages - 1,) else 0
        due = [self._clock.time(forward, number, self._context.stages[0]) for number in range(len(loops))]
        self._turns = Turns(due, self._board.position.follow)
        try:
            return self._turns.run(
                settled, self._device, lambda error: self._board.abort(f"{type(error).__name__}: {error}")
            )
        finally:
            self._turns = None
            self._board.position.follow()

    @property
    def group(self) -> Group:
        """The group whose turn it is."""
        return self.groups[self.number]

    @property
    def number(self) -> int:
        """The number of the group whose turn it is."""
        return 0 if self._turns is None else self._turns.current

    @property
    def progress(self) -> int:
        """See `position.Progress`."""
        return self.exchanges

    @property
    def place(self) -> str:
        """See `position.Progress`."""
        return f"at exchange {self.exchanges}"

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's `numbers`, in pipeline order."""
        ranks = Ranks(self._process_groups.model_parallel_control, lambda doing, peers: self._exchange(doing))
        return ranks.exchange(list(numbers), "comparing arguments")

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Which of `flags` (bool, any shape) are set on at least one rank."""
        if len(self.ranks) == 1:
            return flags
        numbers = flags.to(self._device, torch.uint8, copy=True)
        with self._exchange("agreeing when to stop"):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._process_groups.model_parallel)
        return numbers.to(flags.device, torch.bool)

    def adopt_random_state(self) -> None:
        """Go on from the random state of the rank that chose the tokens."""
        if len(self.ranks) > 1:
            pipeline = self._context.pipeline
            with self._exchange("sharing the random state"):
                rank = pipeline.global_rank(pipeline.num_stages - 1, 0)
                adopt_random_state(rank, self._process_groups.model_parallel_control, self._device)

    @contextmanager
    def _exchange(self, doing: str) -> Iterator[None]:
        """Around communication: an error in here is an error on every rank, as the others wait for this one."""
        self.exchanges += 1
        if self._turns is None:  # groups' exchanges come in an order of each rank's own
            self._board.position.begin_part(doing)
        with self._board.guard(doing, self.ranks):
            yield

    def _completed(self, loop: Callable[[], T]) -> T:
        """What `loop` returns. If it fails where the other ranks wait for tokens, they hear of it.

        Not on an accelerator, where to look for that would make the host wait: there it ends the pipeline.
        """
        try:
            return loop()
        except (Exception, LoopStopped) as error:
            spec = self.group.token
            ends_here = self._board.failed is not None or (self._turns is not None and self._turns.interrupted)
            if spec is not None and self.chooses_tokens and not ends_here and self._device.type == "cpu":
                with noting_on(error):
                    self._give(torch.full(spec.shape, NO_TOKEN, dtype=spec.dtype))
            raise

    def _settle(self) -> None:
        """Receive what is on its way and let what was sent arrive: nothing is left for the next session."""
        with self._board.guard("ending a generation", self.ranks):
            while self._owed:  # of loops that all ranks have ended before these tokens were chosen
                spec = self._owed.popleft()
                self._results.give([torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)], specs=[spec])
            self._results.drain()
            self._channels.flush()

    @contextmanager
    def _one_random_state(self) -> Iterator[None]:
        if len(self.ranks) == 1:
            yield
            return
        with self._exchange("sharing the random state"):
            before = adopt_random_state(self.ranks[0], self._process_groups.model_parallel_control, self._device)
        try:
            yield
        finally:
            if before is not None:
                set_states(generators_of(self._device), before)

    # -- a forward -------------------------------------------------------------------------------------------------

    def forward(self, inputs: Mapping[str, Any], call: Callable[..., Any] | None = None) -> Any:
        """Run the model's forward, or `call`, on all stages.

        Args:
            inputs: arguments by name, the same on every rank; a cache among them holds each rank's own layers.
            call: what to run in place of the model, such as its encoder's forward.

        Returns:
            An output of the model's own class. Its tensors are the last stage's on every rank; of logits with several
            positions only the last one is left, unless `every_position`. With `tokens_only`, the logits are the last
            stage's only, and `tokens` is due on every rank: `ExchangeTokens` (`choosing.py`) calls it. A cache in the
            output holds the rank's own layers.
        """
        if call is not None:
            return self._forward(inputs, call)
        with self._autocast():
            return self._forward({**self._switched_off, **inputs})

    def _forward(self, inputs: Mapping[str, Any], call: Callable[..., Any] | None = None) -> Any:
        """`forward`, under the autocast that is active."""
        tokens_only = self.group.tokens_only and call is None
        plan = self._plan(inputs, call)
        prefill = None if self._turns is None or call is not None else self._prefill(inputs)
        parts = self._run_stages(plan, [inputs] if prefill is None else prefill.parts, call)
        with self._board.guard("exchanging values in generation", self.ranks):
            output = _whole_output([part.output for part in parts], prefill)
            leaves, structure = self._shared_fields(output, inputs, tokens_only)
            expected = self._offer(leaves, plan, tokens_only)
            if tokens_only:
                self._expect_tokens(output)
            # Messages of earlier forwards have arrived, as what answers them is here.
            self._channels.flush(keep=len(self.groups) * len(parts))
        if not self.chooses_tokens:
            self._yield_turn(self._forwards.consecutive_stages[0][0])
        if self._turns is not None and self._turns.error is not None:
            raise LoopStopped
        if expected is not None:
            with self._board.guard("receiving results in generation", self.ranks):
                taken = iter(self._results.take(expected))
            leaves = [next(taken) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for name, value in pytree.tree_unflatten(leaves, structure).items():
            output[name] = value
        return output

    def _plan(self, inputs: Mapping[str, Any], call: Callable[..., Any] | None) -> DataflowPlan:
        """What each stage does in a forward; the same on all ranks."""
        self.inside = True
        try:
            plan = self._split.plan(inputs, call=call)
        finally:
            self.inside = False
        if plan.last_stage_decides:
            raise refusal(
                self._split.model,
                "what its code does next depends on values that one stage alone has"
                ": generate in one process, with the whole model",
            )
        if plan.checksum not in self._compared:
            self._compare(plan)
        return plan

    def _run_stages(
        self, plan: DataflowPlan, inputs: Sequence[Mapping[str, Any]], call: Callable[..., Any] | None
    ) -> list[Forward]:
        """Run the stages of this rank, each when its group is due, on each part of the prompts in turn."""
        with self._exchange("exchanging values in generation"):
            parts = [self._forwards.begin(plan, part) for part in inputs]
        for stages in self._forwards.consecutive_stages:
            self._yield_turn(stages[0])
            with self._board.guard("exchanging values in generation", self.ranks), torch.no_grad():
                self.inside = True
                try:
                    for stage, part in product(stages, parts):
                        self._forwards.run(part, stage, call)
                finally:
                    self.inside = False
        self.group.forwards += 1
        return parts

    def _compare(self, plan: DataflowPlan) -> None:
        """Raise SettingsMismatch, on every rank, if the others' plan is another one.

        The ranks meet here, each when its first stage is due; see `in_turns`. A rank that chooses tokens and has the
        first stage, too, as under `zb-v`, would come at once. So it passes the turn on first, and another group may
        compare the plan meanwhile."""
        if self.chooses_tokens and len(self._context.stages) > 1:
            self._yield_turn(self._forwards.consecutive_stages[0][0])
        if len(self.ranks) > 1 and plan.checksum not in self._compared:
            by_rank = self.gather([plan.checksum])
            compare_plans({rank: checksum for rank, (checksum,) in zip(self.ranks, by_rank, strict=True)})
        self._compared.add(plan.checksum)

    def tokens(self, chosen: torch.Tensor) -> torch.Tensor:
        """After a forward with `tokens_only`: the tokens that the rank of the last stage has chosen, which sends them
        here. `chosen`: these tokens there, shape (samples,); of no meaning on other ranks."""
        group = self.group
        if self.chooses_tokens:
            self._give(chosen)
            return chosen
        expected, group.expected, group.token = group.expected, None, None
        assert expected is not None
        with self._board.guard("receiving tokens in generation", self.ranks):
            (tokens,) = self._results.take(expected)
        if tokens.is_cpu and bool((tokens == NO_TOKEN).any()):
            rank = self._context.output_rank
            raise RuntimeError(f"rank {rank}, which holds the last stage, failed to choose the next tokens: see there")
        return tokens.to(chosen.device)

    def _expect_tokens(self, output: Any) -> None:
        """Tokens are due for the last position of the output's logits, which no other rank needs."""
        group, logits = self.group, output["logits"]
        group.token = TensorSpec((logits.shape[0],), torch.int64)
        if self.chooses_tokens:
            self._owed.append(group.token)
        else:
            output["logits"] = torch.zeros((logits.shape[0], 1, 1), dtype=logits.dtype, device=logits.device)
            group.expected = self._results.expect(1, specs=[group.token])

    def _give(self, chosen: torch.Tensor) -> None:
        """Send the tokens."""
        group = self.group
        assert group.token is not None
        with self._board.guard("sending tokens in generation", self.ranks):
            self._results.give([chosen.to(self._device, torch.int64)], specs=[group.token])
        group.token = None
        self._owed.popleft()

    def _yield_turn(self, stage: int) -> None:
        """Let other groups go first that are due here before this group is on `stage`, in a forward that it has begun
        or, after that, in its next one."""
        if self._turns is not None:
            self._turns.yield_until(self._clock.time(self.group.forwards, self.number, stage))

    def _prefill(self, inputs: Mapping[str, Any]) -> Prefill | None:
        """How the prompts of a group are worked on in parts, so that the next stage need not wait for all of them."""
        return Prefill.of(inputs, LEAST_TOKENS if self._device.type == "cpu" else LEAST_TOKENS_ELSEWHERE)

    # -- the result ------------------------------------------------------------------------------------------------

    def _shared_fields(
        self, output: Any, inputs: Mapping[str, Any], tokens_only: bool
    ) -> tuple[list[Any], pytree.TreeSpec]:
        """The leaves of those fields of an output that every rank needs, and how they are put together."""
        encoded = inputs.get("encoder_outputs") is not None  # known everywhere, since it was given
        fields = {
            name: value
            for name, value in output.items()
            if value is not None
            and not isinstance(value, Cache)
            and not (encoded and name.startswith("encoder_"))
            and not (tokens_only and name == "logits")
        }
        logits = fields.get("logits")
        if isinstance(logits, torch.Tensor) and logits.dim() == 3 and not self.every_position:
            fields["logits"] = logits[:, -1:]
        return pytree.tree_flatten(fields)

    def _offer(self, leaves: Sequence[Any], plan: DataflowPlan, tokens_only: bool) -> ExpectedMessage | None:
        """Send the last stage's tensors to the other ranks, whose own are placeholders of the same shapes."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or not self._results.needed:
            return None
        key = (plan.digest, torch.is_autocast_enabled(self._device.type), *(tensor.shape for tensor in tensors))
        if self.chooses_tokens:
            self._results.give(tensors, None if tokens_only else key)
            return None
        return self._results.expect(len(tensors), None if tokens_only else key)


def _whole_output(outputs: Sequence[Any], prefill: Prefill | None) -> Any:
    """The output of the whole forward from those of its parts."""
    if not all(isinstance(each, dict) for each in outputs):
        raise TypeError(
            f"generation needs outputs with named fields, not a {type(outputs[0]).__name__}"
            ": let the model's forward return a ModelOutput"
        )
    return outputs[0] if prefill is None else prefill.joined(outputs)
