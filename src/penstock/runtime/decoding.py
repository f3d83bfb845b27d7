"""Single forwards through all stages of one pipeline, with the result on every rank: what generation runs on.

Every rank runs the same code, such as generate(), and walks each forward whole. A stage receives its values when the
walk first needs them, sends its own as soon as they are there, and walks to the end with placeholders; then the last
stage's result is broadcast. So all ranks have the same values, and what could make them differ is shared: the random
state, decisions, errors. Nothing is under way between two forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, EncoderDecoderCache

from penstock.modeling.graph.plan import Plan
from penstock.modeling.graph.units import refusal
from penstock.modeling.placeholders.caches import past_length
from penstock.modeling.randomness import mixed
from penstock.modeling.stage.caches import StageCaches
from penstock.modeling.tensor_spec import TensorSpec
from penstock.random_state import generators_of, set_states
from penstock.runtime.boundary.tensors import broadcast_specs, broadcast_tensor
from penstock.runtime.comm.forming import adopt_random_state
from penstock.runtime.context import RankContext
from penstock.runtime.failures.board import PipelineFailure
from penstock.runtime.labels import label
from penstock.runtime.stages import StageExecutor

# Shapes of results that are remembered. All ranks see the same forwards, so all forget at the same time.
MAX_REMEMBERED = 4096


class Decoding:
    """One rank's part in the forwards of its pipeline. Every rank of the pipeline calls every method alike.

    Args:
        begin: gives a context in which all ranks of the pipeline have agreed to generate.

    Attributes:
        ranks: the global ranks, in pipeline order; all that share a stage's weights too.
        running: whether a session is open, so that calling the model means `forward`.
        inside: whether a forward is being planned or run, so that the model's inner calls are its own.
        every_position: whether the logits of all positions are wanted on all ranks, not of the last position only.
        exchanges: how many exchanges this rank has begun in the session.
    """

    def __init__(
        self, context: RankContext, stages: StageExecutor, begin: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.ranks = context.pipeline_ranks
        self.running = False
        self.inside = False
        self.every_position = False
        self.exchanges = 0
        self._context, self._board, self._groups = context, context.board, context.groups
        self._device = context.device
        self._stages, self._split = stages, stages.split
        self._own_stages = context.stages
        self._begin = begin
        self._num_sessions = 0
        self._results: dict[Hashable, tuple[TensorSpec, ...]] = {}
        self._seed: int | None = None

    # -- the code that all ranks run -------------------------------------------------------------------------------

    @contextmanager
    def session(self) -> Iterator[None]:
        """One generation. All ranks draw the first rank's random numbers in it; an error on one becomes one on all.

        An error that every rank meets at the same point (a wrong argument, say) is only raised: nothing is under way,
        and the pipeline stays usable. A rank whose random state was not the first rank's has its own again afterwards.
        """
        with self._begin():
            pass
        self._board.check()
        self.running, self.every_position, self._seed, self.exchanges = True, False, None, 0
        self._num_sessions += 1
        try:
            with self._board.position.call("generation", world=False, detail=self), self._one_random_state():
                yield
        except PipelineFailure:
            raise
        except BaseException as error:
            # An exchange that failed has closed the pipeline already.
            if self._board.failed is None and not (isinstance(error, Exception) and self._all_stopped_here()):
                self._board.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.running = False

    @property
    def progress(self) -> int:
        """See `position.Inside`."""
        return self.exchanges

    @property
    def place(self) -> str:
        """See `position.Inside`."""
        return f"at exchange {self.exchanges}"

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's `numbers` (up to 63 bits each, equally many on every rank), in pipeline order."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in self.ranks]
        with self._exchange("comparing arguments"):
            dist.all_gather(every, mine, group=self._groups.model_parallel_control)
        return [theirs.tolist() for theirs in every]

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Which of `flags` (bool, any shape) are set on at least one rank."""
        if len(self.ranks) == 1:
            return flags
        numbers = flags.to(self._device, torch.uint8, copy=True)
        with self._exchange("agreeing when to stop"):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._groups.model_parallel)
        return numbers.to(flags.device, torch.bool)

    @contextmanager
    def _exchange(self, doing: str) -> Iterator[None]:
        """Around communication: an error in here is an error on every rank, as the others wait for this one."""
        self.exchanges += 1
        with self._board.guard(doing, self.ranks):
            yield

    def _all_stopped_here(self) -> bool:
        return self._board.agree(f"generation/{self._num_sessions}", str(self.exchanges), self.ranks, patience=0.0)

    @contextmanager
    def _one_random_state(self) -> Iterator[None]:
        if len(self.ranks) == 1:
            yield
            return
        with self._exchange("sharing the random state"):
            own = adopt_random_state(self.ranks[0], self._groups.model_parallel_control, self._device)
        try:
            yield
        finally:
            if own is not None:
                set_states(generators_of(self._device), own)

    # -- a forward -------------------------------------------------------------------------------------------------

    def forward(self, inputs: Mapping[str, Any], call: Callable[..., Any] | None = None) -> Any:
        """Run the model's forward, or `call`, on all stages.

        Args:
            inputs: arguments by name, the same on every rank; a cache among them holds each rank's own layers.
            call: what to run in place of the model, such as its encoder's forward.

        Returns:
            An output of the model's own class. Its tensors are the last stage's on every rank; of logits with several
            positions only the last one is left, unless `every_position`. A cache in it holds the rank's own layers.

        Raises:
            NotImplementedError: these inputs cannot be run on these stages; says why.
            PipelineFailure: a rank was lost or failed.
        """
        self.inside = True
        try:
            plan = self._split.plan(inputs, call=call)
            if plan.controlled:
                raise refusal(self._split.model, "what its code does next depends on values that one stage alone has")
            with self._exchange("exchanging values in generation"), torch.no_grad():
                output = self._run_stages(plan, inputs, call)
                self._share(output, plan, inputs)
                self._stages.boundaries.channels.flush()
            return output
        finally:
            self.inside = False

    def _run_stages(self, plan: Plan, inputs: Mapping[str, Any], call: Callable[..., Any] | None) -> Any:
        boundaries = self._stages.boundaries
        boundaries.begin(
            dict.fromkeys(self._own_stages, ((0,), ())),
            [(plan.digest, *_shapes(inputs))],
            [len(values) for values in plan.boundaries],
            [("decoding", torch.is_autocast_enabled(self._device.type))] * plan.num_stages,
        )
        seed = self._forward_seed()
        caches = StageCaches(plan, self._own_stages, inputs) if len(self._own_stages) > 1 else None
        output = None
        for stage in self._own_stages:
            with label(f"F stage {stage}"):
                output = self._stages.walk(
                    plan,
                    stage,
                    inputs if caches is None else caches.inputs(stage),
                    seed=seed,
                    early_exit=stage != self._own_stages[-1],
                    call=call,
                )
        if caches is not None:
            caches.merge(output)
        return output

    def _forward_seed(self) -> int | None:
        """In training mode with dropout: a seed of its own for every forward, so that no rank's generator moves."""
        if not (self._split.random and self._split.model.training):
            return None
        self._seed = int(torch.randint(1 << 62, ())) if self._seed is None else mixed(self._seed, 1)
        return self._seed

    # -- the result ------------------------------------------------------------------------------------------------

    def _share(self, output: Any, plan: Plan, inputs: Mapping[str, Any]) -> None:
        """Put the last stage's tensors in place of the others' placeholders."""
        if not isinstance(output, dict):
            raise TypeError(f"generation needs outputs with named fields, not a {type(output).__name__}")
        encoded = inputs.get("encoder_outputs") is not None  # known everywhere, since it was given
        fields = {
            name: value
            for name, value in output.items()
            if value is not None and not isinstance(value, Cache) and not (encoded and name.startswith("encoder_"))
        }
        logits = fields.get("logits")
        if isinstance(logits, torch.Tensor) and logits.dim() == 3 and not self.every_position:
            fields["logits"] = logits[:, -1:]
        leaves, structure = pytree.tree_flatten(fields)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shared = self._broadcast([leaves[position] for position in positions], plan)
        for position, tensor in zip(positions, shared, strict=True):
            leaves[position] = tensor
        for name, value in pytree.tree_unflatten(leaves, structure).items():
            output[name] = value

    def _broadcast(self, tensors: Sequence[torch.Tensor], plan: Plan) -> Sequence[torch.Tensor]:
        """The last stage's tensors, on every rank. The others' are placeholders of the same shapes."""
        group, source = self._groups.pipeline, self._context.output_rank
        if dist.get_world_size(group) == 1 or not tensors:
            return tensors
        is_source = self._context.rank == source
        key = (plan.digest, torch.is_autocast_enabled(self._device.type), *(tensor.shape for tensor in tensors))
        specs = self._results.get(key)
        with self._board.guard("broadcasting the result", self.ranks):
            if specs is None:  # a placeholder's dtype may be wrong, under autocast
                own = [TensorSpec.shape_of(t) for t in tensors] if is_source else None
                specs = tuple(broadcast_specs(own, len(tensors), source, self._groups.pipeline_control))
                if len(self._results) >= MAX_REMEMBERED:
                    self._results.clear()
                self._results[key] = specs
            shared = [
                tensor.contiguous() if is_source else spec.empty(self._device)
                for tensor, spec in zip(tensors, specs, strict=True)
            ]
            for tensor in shared:
                broadcast_tensor(tensor, source, group)
        return shared


def _shapes(inputs: Mapping[str, Any]) -> Iterator[Hashable]:
    """What decides the shapes at every boundary: those of the inputs, and the lengths of caches."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            yield name, value.shape, value.dtype
        elif isinstance(value, Cache):
            part = value.self_attention_cache if isinstance(value, EncoderDecoderCache) else value
            limits = {getattr(layer, "max_cache_len", None) for layer in part.layers}
            yield name, type(value), past_length(value), frozenset(limits)
        elif value is not None:
            yield (
                name,
                *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(value)),
            )
