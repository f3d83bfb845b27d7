"""SplitModel: the stages of a model that one rank holds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.modeling.collectives import RefusedCollectives
from penstock.modeling.graph.chunked_loss import head_unit
from penstock.modeling.graph.forwards import Forwards, TracedForward
from penstock.modeling.graph.loss import Criterion, loss_by
from penstock.modeling.graph.plan import DataflowPlan, StagePlan, make_plan, make_stage_plan, refusal
from penstock.modeling.graph.shapes import ShapeFunctions
from penstock.modeling.instrumentation import known_of, record_of
from penstock.modeling.libraries import configuration_of
from penstock.modeling.placeholders.ghosts import (
    absent_parameters,
    guard_ghosts,
    is_ghost,
    make_absent_real,
    restore,
    strip,
)
from penstock.modeling.placeholders.partial_states import mark_states
from penstock.modeling.placeholders.unreceived import refuse_unreceived
from penstock.modeling.sharding import WeightSharding
from penstock.modeling.stage.host_values import HostValues
from penstock.modeling.stage.kept_state import KeptState
from penstock.modeling.stage.outputs import Shapes, output_with_loss
from penstock.modeling.stage.run import StageDone, StageRun
from penstock.modeling.weights.whole import alias_groups, alias_groups_by_identity, refuse_common_memory
from penstock.nested import map_tensors
from penstock.random_state import (
    OUTSIDE_TORCH,
    TORCH,
    RandomSource,
    draws_from_now,
    held_sources,
    seedable,
    sources_of,
)

_NOTHING = nullcontext()


class SplitModel:
    """The part of a model that one rank of a pipeline holds, and how to run it.

    The model is shrunk in place and stays the same object of the same class. Units of other stages become ghosts: their
    parameters leave the model and give up their storage, also when an optimizer holds them. A parameter that a local
    unit shares with a foreign one stays the very same object. Parameters outside of all units stay on every stage.

    Args:
        model: a whole model, one whose foreign units are ghosts already, or one on the meta device.
        stages: for each stage of the pipeline the names of its units, as `list_units(model)` gives them.
        sharding: how the weights are sharded among the ranks that share this one's stages; None if they are not.
        aliases: of a model whose foreign units are ghosts, what is tied in the whole one, if it is known.

    Attributes:
        aliases: every parameter of the unsplit model as the tuple of its names, in the model's order.
        released: the parameters that the last placement made give up storage, by name in the unsplit model (a tied one
            by the first of its names).
        taken: the parameters and buffers that the last placement gave storage, named likewise, to be filled by the
            caller. Buffers that no checkpoint holds have their values already and are not among them.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Sequence[str]],
        local_stages: Collection[int],
        sharding: WeightSharding | None = None,
        aliases: list[tuple[str, ...]] | None = None,
        functions: ShapeFunctions | None = None,
    ) -> None:
        self.model = model
        self.aliases = alias_groups(model) if aliases is None else aliases
        # For saving: from here on no rank can see by itself what is tied on other stages.
        record_of(model).aliases = self.aliases
        self.tensor_parallel = sharding
        # Made of whole units, before they are sharded: what crosses between units is whole, however a unit computes it.
        units = {name: model.get_submodule(name) for stage in stages for name in stage}
        refuse_common_memory(model, units)
        self._forwards = Forwards(model, units, functions)
        self._stage_plans: dict[tuple[str, int], StagePlan] = {}
        self._place(stages, local_stages)
        if self.tensor_parallel is not None:
            self.tensor_parallel.apply(model, self._stage_of)
        if self.device.type != "meta":
            make_absent_real(model, self.device)
        self._forwards.install()
        self._held_sources: list[RandomSource] = []
        # From what a forward was seen to draw random numbers although its trace was not.
        self._drawn: set[str] = set()
        interceptor = self._forwards.interceptor
        self._refused = RefusedCollectives(lambda: interceptor.handler.inside)

    def change_stages(self, stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> None:
        """Take up another placement of the same units, in place.

        Units of stages that are no longer held become ghosts. Units that were ghosts get back the same `Parameter`
        objects and buffers, with storage of undefined values: fill everything in `taken` before the next forward. What
        an optimizer knows of either is the caller's business. Plans are made anew from what was traced before."""
        if name := next(
            (name for name, module in self.model.named_modules() if known_of(module).packed is not None), None
        ):
            raise NotImplementedError(f"{name} has packed weights, which cannot be given to another stage")
        self._place(stages, local_stages)

    def renew(self) -> None:
        """Take up modules that were put in the place of others, and the names that parameters have by now. Units keep
        their names and their stages. What was traced and planned is forgotten."""
        self._forwards.renew()
        self.aliases = record_of(self.model).aliases = alias_groups_by_identity(self.model)
        self._plans.clear()
        self._stage_plans.clear()
        self._guard_ghosts()

    def _guard_ghosts(self) -> None:
        interceptor = self._forwards.interceptor
        guard_ghosts(self.model, lambda: interceptor.handler is not None, lambda: self.device)
        mark_states(self.model)

    def _place(self, stages: Sequence[Sequence[str]], local_stages: Collection[int]) -> None:
        """Make ghosts of the units of stages that are not held here, and whole modules of those that are."""
        self.stages = tuple(tuple(stage) for stage in stages)
        self.local_stages = tuple(sorted(set(local_stages)))
        self.num_stages = len(self.stages)
        self._stage_of = {unit: stage for stage, names in enumerate(stages) for unit in names}
        self._plans: weakref.WeakKeyDictionary[TracedForward, DataflowPlan] = weakref.WeakKeyDictionary()
        self.released: dict[str, nn.Parameter] = {}
        self.taken: dict[str, torch.Tensor] = {}
        device = self.device
        names = {name: group[0] for group in self.aliases for name in group}
        foreign: dict[str, nn.Parameter] = {}
        found: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        local = (self._forwards.units[unit] for unit, stage in self._stage_of.items() if stage in self.local_stages)
        kept = {part for module in local for part in module.modules()}
        for unit, stage in self._stage_of.items():
            module = self._forwards.units[unit]
            if stage not in self.local_stages:
                strip(module, kept)
                foreign.update((f"{unit}.{name}", parameter) for name, parameter in absent_parameters(module))
            elif is_ghost(module):
                found.update((f"{unit}.{name}", (tensor, like)) for name, tensor, like in restore(module, device))
        held = {id(parameter) for parameter in self.model.parameters()}  # by local units, or outside of units
        for name, parameter in foreign.items():
            if id(parameter) not in held and parameter.numel():
                parameter.grad = None
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                self.released[names.get(name, name)] = parameter
        for name, (tensor, like) in found.items():
            if like is None:
                self.taken[name] = tensor
            elif tensor.shape != like.shape:  # otherwise it was held all the time, under another name
                tensor.data = torch.empty_like(like, device=tensor.device)
                self.taken[names.get(name, name)] = tensor
        self._guard_ghosts()

    @property
    def device(self) -> torch.device:
        # This is asked for at every forward, and on later stages the search passes through all ghosts.
        module, name = self._first_parameter
        first: torch.Tensor | None = None if module is None else module._parameters.get(name)
        if first is not None:
            return first.device
        for each in self.model.modules():
            held = next((name for name, parameter in each._parameters.items() if parameter is not None), None)
            if held is not None:
                self._first_parameter = each, held
                return self.device
        first = next(self.model.buffers(), None)
        if first is None:  # this rank holds no unit that has any
            first = next((parameter for _, parameter in absent_parameters(self.model)), None)
        return torch.device("cpu") if first is None else first.device

    # Sees what forwards leave behind, while somebody wants to know.
    kept_state: KeptState | None = None
    # Entered, with the inputs, around each forward but those of `run_to_end`, and around the following of one.
    computing: Callable[[Mapping[str, Any]], AbstractContextManager[None]] = staticmethod(lambda _: _NOTHING)
    # The number of tokens whose logits a plan's head makes at once.
    loss_chunk_tokens: int | None = None
    # The first module with a parameter, and the parameter's name.
    _first_parameter: tuple[nn.Module | None, str] = (None, "")

    def head_in_chunks(self) -> nn.Module | None:
        """The unit whose logits are made in chunks in training, if any."""
        name = head_unit(self.model, self._forwards.units) if self.loss_chunk_tokens is not None else None
        return None if name is None else self._forwards.units[name]

    @property
    def guessed(self) -> Mapping[str, str]:
        """The units of whose output's shape something was assumed, as they could not be followed, with the reason."""
        return self._forwards.functions.guessed

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def say_batch_dim(self, batch_dim: Mapping[str, int | None]) -> None:
        """Of inputs, the dimension that has the samples, or None, where it is not the first."""
        self._forwards.batch_dim = batch_dim

    def refuse_if_moved(self, device: torch.device) -> None:
        interceptor = self._forwards.interceptor
        if interceptor.moved:
            refuse_moved(self.model, device)
            interceptor.moved = False

    def plan(
        self,
        inputs: Mapping[str, Any],
        call: Callable[..., Any] | None = None,
        criterion: Criterion | None = None,
        in_chunks: bool = False,
    ) -> DataflowPlan:
        """What each stage does with inputs of this kind (see `Forwards`); cached, and found without communication.

        Args:
            call: what to run instead of the model, such as `model.get_encoder().forward`. Caches of keys and values in
                the inputs are planned on copies.
            criterion: gives the loss in place of the output's own; only the plan's loss rule depends on it.
            in_chunks: whether head and loss are to run over chunks of tokens, as in training with `loss_chunk_tokens`.
        """
        if self._forwards.interceptor.converted:
            self._forwards.convert()
            self._plans.clear()
            self._stage_plans.clear()
        if self.tensor_parallel is not None:
            self.tensor_parallel.refuse(inputs, configuration_of(self.model))
        with self.computing(inputs):
            traced = self._forwards.of_kind(inputs, call, criterion, in_chunks)
        known = self._plans.get(traced)
        if known is None:
            try:
                known = make_plan(traced.trace, self._stage_of, self.num_stages, traced.entry, traced.defaults)
            except NotImplementedError as error:
                raise refusal(self.model, str(error)) from error
            self._plans[traced] = known
            self._held_sources = held_sources(self.model)
        return known

    def output_shapes(self, inputs: Mapping[str, Any]) -> Shapes:
        """The shapes of the model's output for `inputs`, found without computing it. Raises what `plan` raises."""
        left_out = self._forwards.not_taken(inputs)
        given = {name: value for name, value in inputs.items() if name not in left_out}
        with self.computing(inputs):
            return self._forwards.follow(given).trace.output_shapes

    def forward(
        self,
        plan: DataflowPlan,
        stage: int,
        inputs: Mapping[str, Any],
        received: Sequence[torch.Tensor],
        *,
        seed: int | None = None,
        shares: Sequence[float] | None = None,
        criterion: Criterion | None = None,
        host: Mapping[str, Any] | None = None,
        watch: bool = False,
    ) -> tuple[Any | None, tuple[torch.Tensor, ...]]:
        """Run one stage on one microbatch; leave the model's forward after the stage's last unit.

        Args:
            plan: from `plan()`, for inputs of the same kind, and this criterion.
            received: what the stage before handed on, in the order of `plan.boundaries[stage - 1]`; in training,
                what required a gradient there is a leaf that requires one.
            seed: for a forward that `draws`, equal on all stages, different for every step and microbatch. Random
                numbers then depend on it and the place in the forward only, not on the layout, and the random
                generators are left as they were.
            shares: from `plan.loss.shares(...)`; the loss in the output then is this microbatch's share of the batch's.
            host: copies on the CPU of tensors in `inputs`, under their names: what the model's code asks of their
                values is answered from them, see `HostValues`.
            watch: whether to see if it draws random numbers from what `plan.draws` does not name.

        Returns:
            The model's output (None but on the last stage) and the values to hand to the next stage, in the order of
            `plan.boundaries[stage]`. One that passes through is the received tensor.
        """
        if host is inputs or not plan.asks_known:
            host = None
        run: StageRun | None = None  # an ordinary forward needs none
        if plan.num_stages > 1 or seed is not None or host is not None or plan.head is not None:
            run = self._stage_run(plan, stage, inputs, received)
            if run.plan.idle:
                return None, run.finished()
        arguments = _arguments(plan, inputs)
        if criterion is not None and (left_out := self._forwards.for_criterion(inputs, criterion)):
            arguments = {name: value for name, value in arguments.items() if name not in left_out}
        weigh = plan.loss is not None and shares is not None and stage == self.num_stages - 1
        run_model: Callable[[], Any] = partial(
            self._run_model, plan, arguments, inputs, shares if weigh else None, criterion
        )
        if self.tensor_parallel is not None:
            # Loss functions of several means are told apart by counting them, so none of them may be replaced.
            own_loss = weigh and criterion is None and plan.loss is not None and len(plan.loss.counted) == 1
            run_model = partial(self.tensor_parallel.run, plan.digest, bool(plan.draws), own_loss, run_model)
        if self.kept_state is not None:
            run_model = partial(self.kept_state.watching, stage, run_model)
        if run is None:
            return run_model(), ()
        if host is not None:
            run.host_values = HostValues()
            run.host_values.know_all(arguments, host)
        if plan.head is not None:
            run.head, run.chunk_tokens = plan.head, self.loss_chunk_tokens or 0
        handled = partial(self._handled, plan, run, run_model, seed)
        with self._refused:
            output = self._watched(plan, stage, handled) if watch else handled()
        refuse_unreceived("the model's output", output)
        return (None if stage < self.num_stages - 1 else output), run.finished()

    def run_to_end(
        self,
        plan: DataflowPlan,
        stage: int,
        inputs: Mapping[str, Any],
        received: Sequence[torch.Tensor],
        *,
        seed: int | None = None,
        call: Callable[..., Any] | None = None,
        hand_over: Callable[[tuple[torch.Tensor, ...]], None] | None = None,
        early_exit: bool = False,
    ) -> Any:
        """Run one stage as generation does: the forward, or `call`, goes on to its end, unless `early_exit`.

        `hand_over` is called once, unless on the last stage, with the values for the next stage as soon as they are
        there.

        Returns the model's output, in which only the last stage's values are right, None after an early exit; caches of
        keys and values then hold the stage's own layers, and entries of the right length for all others."""
        run = self._stage_run(plan, stage, inputs, received, early_exit=early_exit, hand_over=hand_over)
        run_model: Callable[[], Any] = partial(call or self._forwards.call, **_arguments(plan, inputs))
        if self.tensor_parallel is not None:
            run_model = partial(self.tensor_parallel.run, plan.digest, bool(plan.draws), False, run_model)
        if plan.num_stages == 1 and seed is None:
            return run_model()
        output = None if run.plan.idle and early_exit else self._handled(plan, run, run_model, seed)
        if stage == plan.num_stages - 1:
            refuse_unreceived("the model's output", output)
        run.finished()
        return output

    def _stage_run(
        self,
        plan: DataflowPlan,
        stage: int,
        inputs: Mapping[str, Any],
        received: Sequence[torch.Tensor],
        **options: Any,
    ) -> StageRun:
        stage_plan = self._stage_plans.get((plan.digest, stage))
        if stage_plan is None:
            stage_plan = self._stage_plans[plan.digest, stage] = make_stage_plan(plan, stage)
        if len(received) != stage_plan.num_received:
            raise RuntimeError(
                f"stage {stage} was given {len(received)} values, but {stage_plan.num_received} cross the boundary "
                "before it"
            )
        return StageRun(stage_plan, self._forwards.functions, received, partial(self._device_of, inputs), **options)

    def _device_of(self, inputs: Mapping[str, Any]) -> torch.device:
        given = next((value.device for value in inputs.values() if isinstance(value, torch.Tensor)), None)
        return given or self.device

    def draws(self, plan: DataflowPlan) -> bool:
        """Whether a forward draws random numbers, so that a seed has an effect."""
        return bool(plan.draws or self._drawn or self._held_sources)

    def _watched(self, plan: DataflowPlan, stage: int, forward: Callable[[], Any]) -> Any:
        """Run a stage's forward; warn if it draws from what its trace has not, and seed that from then on."""
        draws = draws_from_now({TORCH, *OUTSIDE_TORCH}.difference(plan.draws, self._drawn), self.device)
        output = forward()
        if drawn := draws():
            self._drawn |= drawn
            units = self.stages[stage]
            warnings.warn(
                f"a forward of {units[0]} to {units[-1]} drew from {' and '.join(sorted(drawn))}, which following the "
                "forward had not shown, so up to now the stages may have drawn different ones: draw them in every "
                "forward, or pass them in as inputs",
                stacklevel=2,
            )
        return output

    def _handled(self, plan: DataflowPlan, run: StageRun, run_model: Callable[[], Any], seed: int | None) -> Any:
        if seed is not None:
            sources = [*sources_of({*plan.draws, *self._drawn}, self.device), *self._held_sources]
            with seedable(sources) as seed_all:
                run.seed_with(seed_all, seed)
                return self._handled(plan, run, run_model, None)
        interceptor = self._forwards.interceptor
        interceptor.handler = run
        try:
            with run.host_values or _NOTHING:
                return run_model()
        except StageDone:
            return None
        finally:
            interceptor.handler = None

    def _run_model(
        self,
        plan: DataflowPlan,
        arguments: Any,
        inputs: Any,
        shares: Sequence[float] | None,
        criterion: Criterion | None,
    ) -> Any:
        if shares is None:
            with self.computing(inputs):
                return self._forwards.call(**arguments)
        assert plan.loss is not None
        with self.computing(inputs), plan.loss.weighing(shares):
            output = self._forwards.call(**arguments)
            loss = loss_by(criterion, output, inputs)
        if loss is None:
            return output
        named = output_with_loss(output, plan.loss.scale(loss, shares, output))
        for name in plan.loss.fields:
            named[name] = plan.loss.scale(named[name], shares, output)
        return named


def _arguments(plan: DataflowPlan, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the model is given: the caller's arguments, those that Penstock adds, and copies of those it will change."""
    arguments = {**inputs, **dict(plan.defaults)} if plan.defaults else inputs
    if written := plan.written_inputs:
        arguments = {
            name: map_tensors(lambda inner, tensor: tensor.clone() if inner in written else tensor, name, value)
            for name, value in arguments.items()
        }
    return arguments


def refuse_moved(model: nn.Module, device: torch.device) -> None:
    """Raise RuntimeError if a tensor of this rank's part of a model is not on `device`, where its stages compute."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
            remedy = "initialize() another model, as" if tensor.is_meta else f"call model.to({str(device)!r}), or"
            lost = "this one has lost its values" if tensor.is_meta else "leave it where initialize() has put it"
            raise RuntimeError(
                f"{name} is on {tensor.device}, but this rank's stages compute on {device}: the model was moved after "
                f"it was parallelised; {remedy} {lost}"
            )
