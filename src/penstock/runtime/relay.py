"""Single forwards through all stages of one pipeline, with the result on every rank: what generation runs on.

Every rank walks the whole forward. A stage takes its values from the stage before it when the walk first needs them,
hands its own on as soon as they are there, and walks to the end with placeholders; then the last stage's result is
broadcast. Nothing is under way between two forwards, so the lines of the pipeline's channel serve here too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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

from .channel import Channel, Kind
from .crossing import refuse_elsewhere
from .engine import Pipeline
from .lockstep import Lockstep
from .rollcall import Call
from .transfer import TensorSpec, broadcast_specs, broadcast_tensor, decode_header, encode_header, header_buffer

# Shapes remembered for one line. Both of its ends see the same forwards, so both forget at the same time.
MAX_REMEMBERED = 4096
RESULT = -1  # the broadcast of the result, where a line is named by its cut


class Relay:
    """One rank's part in the forwards of its pipeline. Every rank of the pipeline calls every method alike.

    Attributes:
        running: whether a session is open, so that calling the model means `forward`.
        inside: whether a forward is being planned or run, so that the model's inner calls are its own.
        every_position: whether the logits of all positions are wanted on all ranks, not of the last position only.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        place = pipeline.place
        mine = pipeline.layout.pipelines[place.pipeline]
        peer_of = partial(mine.global_rank, tensor_parallel_rank=place.tensor_parallel_rank)
        self.lockstep = Lockstep(pipeline)
        self.running = False
        self.inside = False
        self.every_position = False
        self._split = pipeline.split
        self._together = pipeline.together
        self._board = pipeline.board
        self._groups = pipeline.groups
        self._device = pipeline.device
        self._stage_to_rank = mine.stage_to_rank
        self._stages = mine.stages_of(place.rank_in_pipeline)
        self._source = peer_of(mine.num_stages - 1)
        self._is_source = self._source == pipeline.rank
        self._channel = Channel(pipeline.groups.line, peer_of, pipeline.device, pipeline.board)
        self._specs: dict[int, dict[Hashable, tuple[TensorSpec, ...]]] = {}
        self._handed_over: dict[int, Sequence[torch.Tensor]] = {}
        self._seed: int | None = None
        pipeline.board.on_abort(self._channel.clear)

    @contextmanager
    def session(self) -> Iterator[None]:
        """One generation: the code of all ranks in lockstep, see `Lockstep.section`."""
        with self._together(Call.GENERATE, everyone=False):
            pass
        self.running, self.every_position, self._seed = True, False, None
        try:
            with self.lockstep.section():
                yield
        finally:
            self.running = False

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
            with self.lockstep.exchange():
                output = self._run_stages(plan, inputs, call)
                self._share(output, plan, inputs)
                self._channel.flush()
            return output
        finally:
            self.inside = False
            self._handed_over.clear()

    def _run_stages(self, plan: Plan, inputs: Mapping[str, Any], call: Callable[..., Any] | None) -> Any:
        key = (plan.digest, torch.is_autocast_enabled(self._device.type), *_shapes(inputs))
        seed = self._forward_seed()
        caches = StageCaches(plan, self._stages, inputs) if len(self._stages) > 1 else None
        output = None
        for stage in self._stages:
            received = self._arriving(plan, stage, key)
            output, _ = self._split.forward(
                plan,
                stage,
                inputs if caches is None else caches.inputs(stage),
                received,
                seed=seed,
                early_exit=stage != self._stages[-1],
                call=call,
                hand_over=partial(self._send, stage, key),
            )
            received.arrive()  # also what the walk had no use for
        if caches is not None:
            caches.merge(output)
        return output

    def _forward_seed(self) -> int | None:
        """In training mode with dropout: a seed of its own for every forward, so that no rank's generator moves."""
        if not (self._split.random and self._split.model.training):
            return None
        self._seed = int(torch.randint(1 << 62, ())) if self._seed is None else mixed(self._seed, 1)
        return self._seed

    def _arriving(self, plan: Plan, stage: int, key: Hashable) -> Arriving:
        """The values that cross into `stage`. Receives are posted now and waited for when a value is asked for."""
        cut = stage - 1
        count = len(plan.boundaries[cut]) if stage else 0
        if not count:
            return Arriving(0, list)
        if self._is_local(cut):
            values = self._handed_over.pop(cut)
            return Arriving(count, lambda: values)
        values_line, header_line = (
            self._channel.line(cut, kind, upper=True) for kind in (Kind.ACTIVATION, Kind.HEADER)
        )
        specs = self._known(cut, key)
        if specs is None:
            header_line.post_receive([header_buffer(count)])
        else:
            values_line.post_receive([spec.empty(self._device) for spec in specs])

        def receive() -> list[torch.Tensor]:
            if specs is None:
                learned = decode_header(header_line.receive()[0])
                self._remember(cut, key, learned)
                values_line.post_receive([spec.empty(self._device) for spec in learned])
            return values_line.receive()

        return Arriving(count, receive)

    def _send(self, stage: int, key: Hashable, values: Sequence[torch.Tensor]) -> None:
        """Hand the values that cross out of `stage` to the next one."""
        if not values:
            return
        if self._is_local(stage):
            self._handed_over[stage] = values
            return
        specs = tuple(TensorSpec(tuple(value.shape), value.dtype) for value in values)
        known = self._known(stage, key)
        if known is None:
            refuse_elsewhere(values, self._device, stage)
            self._channel.line(stage, Kind.HEADER, upper=False).send([encode_header(specs)])
            self._remember(stage, key, specs)
        elif known != specs:
            raise RuntimeError(
                f"the tensors between stages {stage} and {stage + 1} are {specs}, but for inputs of these shapes they "
                f"were {known} before; a shape that depends on the inputs' values cannot cross a cut"
            )
        self._channel.line(stage, Kind.ACTIVATION, upper=False).send(values)

    def _is_local(self, cut: int) -> bool:
        return self._stage_to_rank[cut] == self._stage_to_rank[cut + 1]

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
        group = self._groups.pipeline
        if dist.get_world_size(group) == 1 or not tensors:
            return tensors
        key = (plan.digest, torch.is_autocast_enabled(self._device.type), *(tensor.shape for tensor in tensors))
        specs = self._known(RESULT, key)
        with self._board.guard("broadcasting the result", self.lockstep.ranks):
            if specs is None:  # a placeholder's dtype may be wrong, under autocast
                own = [TensorSpec(tuple(t.shape), t.dtype) for t in tensors] if self._is_source else None
                control = self._groups.pipeline_control
                specs = tuple(broadcast_specs(own, len(tensors), self._source, control))
                self._remember(RESULT, key, specs)
            shared = [
                tensor.contiguous() if self._is_source else spec.empty(self._device)
                for tensor, spec in zip(tensors, specs, strict=True)
            ]
            for tensor in shared:
                broadcast_tensor(tensor, self._source, group)
        return shared

    def _known(self, line: int, key: Hashable) -> tuple[TensorSpec, ...] | None:
        return self._specs.setdefault(line, {}).get(key)

    def _remember(self, line: int, key: Hashable, specs: tuple[TensorSpec, ...]) -> None:
        known = self._specs[line]
        if len(known) >= MAX_REMEMBERED:
            known.clear()
        known[key] = specs


class Arriving(Sequence[torch.Tensor]):
    """Values on their way: their number is known, they are waited for when the first one is asked for."""

    def __init__(self, count: int, receive: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._count = count
        self._receive: Callable[[], Sequence[torch.Tensor]] = receive
        self._values: Sequence[torch.Tensor] | None = None

    def arrive(self) -> Sequence[torch.Tensor]:
        if self._values is None:
            self._values = self._receive()
        return self._values

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.arrive()[index]


def _shapes(inputs: Mapping[str, Any]) -> Iterator[Hashable]:
    """What decides the shapes at every cut: those of the inputs, and the lengths of caches."""
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
