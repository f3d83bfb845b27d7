"""`HeterogeneousParallelPlugin`: pipelines of different depth train one model together.

It is one class, whose methods are what a script calls, in that order; that makes the file long.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from penstock.api.builder import (
    LayoutPlan,
    UnitsAndCosts,
    build,
    check_whole_model,
    plan_and_build,
    require_equal_models,
    resolved_schedule,
)
from penstock.config.elastic import Elastic
from penstock.config.plugin_settings import PluginSettings
from penstock.context_parallel.apply import refuse_model
from penstock.data.loader import HeterogeneousDataLoader
from penstock.elastic.generations import Generations
from penstock.elastic.layout_planner import LayoutPlanner
from penstock.elastic.moving import SharedStates
from penstock.elastic.protocol import Generation
from penstock.elastic.run import ElasticRun
from penstock.layout.layout import Layout
from penstock.layout.pipelines import Microbatches, PlacedPipelines, Schedules, check_templates, place_pipelines
from penstock.model.pipeline_model import PipelineModel
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.libraries import base_of, is_peft_model
from penstock.modeling.packed_layers import mark_packed
from penstock.modeling.pipeline_template import PipelineTemplate
from penstock.modeling.weights.whole import packed_weights
from penstock.planning.auto import auto_pipelines
from penstock.runtime.comm.bootstrap import rank_and_world_size
from penstock.runtime.comm.devices import device_memory
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.failures.position import PATIENCE_SECONDS
from penstock.runtime.formation import digest_of, facts_of, new_job
from penstock.runtime.optimizer import LossScale, PipelineOptimizer
from penstock.runtime.parts import ScheduleMaker
from penstock.runtime.torch_calls import clips_in_step, depends_on_others
from penstock.schedule.registry import AUTO
from penstock.schedule.text import summary
from penstock.simulation.describe import LayoutDescription, describe_layout

logger = logging.getLogger("penstock")

# Model, optimizer, criterion, data loader and learning rate scheduler; None for each that was not given.
Configured = tuple[Any, Any, Any, Any, Any]


class HeterogeneousParallelPlugin:
    """Place pipelines of any depth on all ranks of the world, and parallelise a model over them.

    Call `set_pipelines`, then `configure` (or `Booster(plugin=plugin).boost`), with the same arguments on every rank.

    Args:
        tp_size: ranks that share a stage, each with a slice of its weights; see docs/tensor_parallel.md.
        microbatch_size: samples in a microbatch, the same in all pipelines.
        precision: "fp32" leaves the model as it is; "bf16" and "fp16" run its forwards under `torch.autocast`, with
            weights, gradients and optimizer as they are. fp16 scales losses dynamically; a step whose gradients
            overflow on any rank is skipped on all of them.
        max_norm: the optimizer's step clips the norm of the whole model's gradients to this; 0 does not clip.
        schedule: of every pipeline, or a dict with one for each template: "auto", which `configure` replaces as suits
            the model (docs/schedules.md), any of `penstock.schedule.schedule_names()`, or one of your own, as rows or
            in a .csv file. Under one that puts two stages on each rank, such as `zb-v`, a template of four stages takes
            two ranks; one of a single stage takes one under any.
        initial_scale, min_scale, max_scale, growth_factor, backoff_factor, growth_interval, hysteresis: of fp16's loss
            scale, see `penstock.runtime.optimizer.LossScale`.
        patience: seconds that a rank waits for others before it logs what it waits for and where the others are.
        timeout: seconds that a transfer between ranks may take; None for that of torch's default process group.
        elastic: training survives the loss of processes and takes in new ones; see docs/elastic.md. Do not call
            `set_pipelines` then: the pipelines are chosen for the processes that are there.
        global_batch_size: with `elastic`, the samples in a step, over all pipelines: a multiple of `microbatch_size`.
        batch_dim: for inputs whose samples are not along the first dimension; see `penstock.Configuration`.
        loss_chunk_tokens: head and loss of a language model run over so many tokens at a time; see there, too.
        sharded_optimizer: the holders of a parameter divide the optimizer's state, also over unlike pipelines; see
            docs/memory.md and `penstock.Configuration`.
        context_parallel_size: pipelines that share every sequence, each with a part of its tokens: each pipeline of
            `set_pipelines` is placed so many times; see docs/long_context.md.

    Raises:
        TypeError, ValueError: an argument that cannot be used.
    """

    def __init__(
        self,
        tp_size: int = 1,
        microbatch_size: int = 1,
        precision: str = "fp32",
        max_norm: float = 0.0,
        schedule: Schedules = AUTO,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        patience: float = PATIENCE_SECONDS,
        timeout: float | None = None,
        elastic: Elastic | None = None,
        global_batch_size: int | None = None,
        batch_dim: Mapping[str, int | None] | None = None,
        loss_chunk_tokens: int | None = None,
        sharded_optimizer: bool | int = False,
        context_parallel_size: int = 1,
    ) -> None:
        self.settings = PluginSettings(
            tp_size=tp_size,
            microbatch_size=microbatch_size,
            precision=precision,
            max_norm=max_norm,
            schedule=schedule,
            patience=patience,
            timeout=timeout,
            elastic=elastic,
            global_batch_size=global_batch_size,
            batch_dim=batch_dim,
            loss_chunk_tokens=loss_chunk_tokens,
            sharded_optimizer=sharded_optimizer,
            context_parallel_size=context_parallel_size,
        )
        loss_scale = LossScale(  # in any precision, so that wrong numbers are refused in any
            scale=initial_scale,
            min_scale=min_scale,
            max_scale=max_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
        )
        self._loss_scale = loss_scale if precision == "fp16" else None
        self._schedule = schedule
        # With elastic=, this process's part in the run, once the first engine stands, and the loaders that follow the
        # pipelines.
        self.run: ElasticRun | None = None
        self._loaders: weakref.WeakSet[HeterogeneousDataLoader] = weakref.WeakSet()
        # For those who drive an elastic run, such as a Trainer: what else must be equal in all its processes,
        # by name; and what is told this process's rank and the number of ranks, whenever they change.
        self.more_facts: dict[str, Any] = {}
        self.on_place: Callable[[int, int], None] = lambda rank, world_size: None
        self._placed: PlacedPipelines[PipelineTemplate] | None = None
        self._description: LayoutDescription | None = None
        self._model: nn.Module | None = None

    @property
    def tp_size(self) -> int:
        """Ranks that share a stage."""
        return self.settings.tp_size

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        return self.settings.microbatch_size

    # -- the pipelines ---------------------------------------------------------------------------------------------

    def set_pipelines(
        self,
        pipelines: list[PipelineTemplate] | Literal["auto"],
        num_microbatches: Microbatches | int,
        model: nn.Module | None = None,
        memory: float | None = None,
        profile: str | os.PathLike[str] | None = None,
        copies: int = 1,
    ) -> None:
        """Choose the pipelines; the first is placed on the first ranks, and so on.

        No communication, and no process group is made, so every rank finds the same error.

        Args:
            pipelines: any mix of templates, also one template several times; or "auto", which takes those that the
                planner predicts to be fastest for this world; see docs/planning.md.
            num_microbatches: microbatches of each pipeline in a step, as a dict from templates, or as a list with one
                number for each pipeline, in which pipelines of one template may differ. With "auto" one number for all
                pipelines together.
            model: with "auto", the whole model; it may be on the meta device.
            memory: with "auto", bytes that the run may use of each device; by default nine tenths of a GPU's, and no
                limit on CPUs.
            profile: with "auto", the file that `penstock profile` wrote; by default costs are estimated.
            copies: with "auto", the least number of pipelines.

        Raises:
            AssertionError: the number of ranks does not match the world size, or a pipeline has no number of
                microbatches.
            TypeError, ValueError: an argument that cannot be used, such as templates of different models, or the
                schedule is not for a template's stages, or is written for another number of microbatches.
            RuntimeError: a model is configured already, or the plugin has `elastic`.
        """
        if self.settings.elastic is not None:
            raise RuntimeError(
                "with elastic= the pipelines are chosen for the processes that are there: leave set_pipelines out, and "
                "give Elastic(templates=...) to choose from your own"
            )
        if self._model is not None:
            raise RuntimeError("set_pipelines must come before configure: this plugin has parallelised a model already")
        if isinstance(pipelines, str):
            if pipelines != "auto":
                raise TypeError(f'pipelines must be a list of PipelineTemplate or "auto", got {pipelines!r}')
            if model is None:
                raise TypeError('set_pipelines("auto", num_microbatches, model) needs the model')
            if not isinstance(self.settings.schedule, str):
                raise TypeError(
                    f'pipelines "auto" need the name of one schedule, but the plugin has {self.settings.schedule!r}'
                )
            schedule = self.resolve_schedule(base_of(model))
            assert isinstance(schedule, str)  # as the one that it was made from
            pipelines, num_microbatches = auto_pipelines(
                base_of(mark_packed(model)),
                rank_and_world_size()[1] // self.tp_size,
                cast(int, num_microbatches),  # refused otherwise
                self.microbatch_size,
                schedule,
                device_memory() if memory is None else memory,
                profile,
                copies,
                self.settings.loss_chunk_tokens,
                self.settings.context_parallel_size,
                self.tp_size,
            )
        self._place(pipelines, cast(Microbatches, num_microbatches), rank_and_world_size()[1])

    def _place(self, pipelines: Sequence[PipelineTemplate], num_microbatches: Microbatches, world_size: int) -> None:
        templates = check_templates(pipelines)
        given = templates, self._schedule, num_microbatches, self.tp_size, world_size
        self._placed = place_pipelines(*given, self.settings.context_parallel_size)
        self._description = None

    def resolve_schedule(self, model: nn.Module) -> Schedules:
        """The schedule with a name in the place of "auto", by `model`; pipelines that are set from now on have it."""
        self._schedule = resolved_schedule(self.settings.schedule, model)
        return self._schedule

    @property
    def layout(self) -> Layout:
        """Where the pipelines are placed. Raises RuntimeError before `set_pipelines`."""
        return self._known_pipelines.layout

    @property
    def _known_pipelines(self) -> PlacedPipelines[PipelineTemplate]:
        if self._placed is None:
            raise RuntimeError("the plugin has no pipelines yet: call set_pipelines first")
        return self._placed

    @property
    def pipelines(self) -> tuple[PipelineTemplate, ...]:
        """The template of each pipeline."""
        return () if self._placed is None else self._placed.templates

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Microbatches of each pipeline in a step."""
        return () if self._placed is None else self._placed.num_microbatches

    @property
    def global_batch_size(self) -> int:
        """Samples in a step, over all pipelines."""
        if self.settings.global_batch_size is not None:
            return self.settings.global_batch_size
        return sum(self.num_microbatches) * self.microbatch_size

    @property
    def pipeline_index(self) -> int:
        """The index of this rank's pipeline, of those of `set_pipelines`. Raises RuntimeError before that."""
        return self.layout.replica_of(self.layout.place_of(rank_and_world_size()[0]).pipeline)

    def describe(self, model: nn.Module | None = None, plot: str | os.PathLike[str] | None = None) -> LayoutDescription:
        """Print the pipelines as a table, on the first rank, and return what it shows.

        Args:
            model: a whole model to count the parameters of; not needed after `configure`.
            plot: also draw the layout, and the schedule's timeline as the modules' costs predict it, to this .svg file.
        """
        description = self._description or self._describe(base_of(model))
        if rank_and_world_size()[0] == 0:
            print(description)
            if plot is not None:
                description.write_svg(plot)
        return description

    # -- the data --------------------------------------------------------------------------------------------------

    def prepare_dataloader(
        self,
        dataset: Any,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **arguments: Any,
    ) -> HeterogeneousDataLoader:
        """A loader of this pipeline's own share of each global batch of samples of `dataset`.

        Args:
            shuffle, seed: whether each epoch has another order of samples, and from which random numbers.
            drop_last: leave out an incomplete last batch, which is shared out otherwise.
            collate_fn: makes a microbatch of a list of samples.
            num_workers: processes that load, as of torch's `DataLoader`, which also takes `arguments`.

        Raises:
            RuntimeError: before `set_pipelines`.
            TypeError, ValueError: an argument that cannot be used.
        """
        # With elastic= nobody knows the pipelines yet; the loader follows them.
        alone = self.settings.elastic is not None and self.run is None
        loader = HeterogeneousDataLoader(
            dataset,
            [self.global_batch_size // self.microbatch_size] if alone else self.num_microbatches,
            self.microbatch_size,
            0 if alone else self.pipeline_index,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            **arguments,
        )
        if self.settings.elastic is not None:
            self._loaders.add(loader)
        return loader

    def check_dataloader(self, dataloader: Any) -> None:
        """Raise TypeError or ValueError unless `dataloader` gives each pipeline its own share of each global batch."""
        if not isinstance(dataloader, HeterogeneousDataLoader):
            raise TypeError(
                f"the dataloader is a {type(dataloader).__name__}, which would give every pipeline the same samples: "
                "make it with plugin.prepare_dataloader(dataset, ...)"
            )
        wanted = self.num_microbatches, self.microbatch_size, self.pipeline_index
        if dataloader.share != wanted:
            names = ("num_microbatches", "microbatch_size", "pipeline_index")
            seen = ", ".join(f"{name}={value}" for name, value in zip(names, dataloader.share, strict=True))
            expected = ", ".join(f"{name}={value}" for name, value in zip(names, wanted, strict=True))
            raise ValueError(
                f"the dataloader was made for {seen}, but this plugin has {expected}"
                ": call prepare_dataloader of this plugin after set_pipelines"
            )

    # -- the model -------------------------------------------------------------------------------------------------

    def configure(
        self,
        model: Any,
        optimizer: Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: HeterogeneousDataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Configured:
        """Parallelise a model in place, and wrap its optimizer. Every rank calls this with an equal model.

        Args:
            model: a model of transformers, or any other `nn.Module`. Where its inputs cannot be guessed, its attribute
                `dummy_inputs` has some, by name.
            optimizer, dataloader, lr_scheduler: what goes with it, the loader from `prepare_dataloader`.
            criterion: returns the loss instead of the model's own, see `Booster.execute_pipeline`. It is used by
                `model(**batch)` and `execute_pipeline`, unless the call has another one.

        Returns:
            The same model, now also a `penstock.PipelineModel`; the optimizer, wrapped; the others as they were.

        Raises:
            RuntimeError: before `set_pipelines`.
            ValueError: the templates do not cover the model, or it is parallelised already; see
                `PipelineTemplate.validate`. No process group has been made then. Or the ranks were given different
                models, pipelines or settings.
            NotImplementedError: the model cannot be split.
            TypeError: `model` is no module, or `dataloader` was not prepared by this plugin.
        """
        if is_peft_model(model):
            given = optimizer, criterion, dataloader, lr_scheduler
            from penstock.integrations.peft import initialize_peft

            _, *configured = initialize_peft(model, lambda base: self.configure(base, *given))
            return (model, *configured)
        if self.settings.elastic is not None:
            return self._join(model, self.settings.elastic, optimizer, criterion, dataloader, lr_scheduler)
        self._check(model)
        self._fit_pipelines(model)
        if dataloader is not None:
            self.check_dataloader(dataloader)
        with new_job(self.settings.time_limit, call="configure()", patience=self.settings.patience) as board:
            units, plan = self.layout.units, partial(self._plan, model)
            self._model = model = plan_and_build(model, self._facts(), plan, board, criterion=criterion, units=units)
        wrapped = None if optimizer is None else self.wrap_optimizer(optimizer, model)
        return model, wrapped, criterion, dataloader, lr_scheduler

    def _check(self, model: Any) -> None:
        """Refuse what cannot be parallelised. No communication."""
        if isinstance(model, PipelineModel):
            raise ValueError("this model is parallelised already: configure() takes a whole one. Make the model anew")
        check_whole_model(model, "configure()")
        if self.tp_size > 1 and not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"tp_size needs a model of transformers, and {type(model).__name__} is none: leave tp_size out"
            )
        if self.settings.context_parallel_size > 1:
            refuse_model(model)

    def _fit_pipelines(self, model: nn.Module) -> None:
        """Settle by the model what the pipelines left open: its own names of modules, and the schedule "auto"."""
        placed, modules = self._known_pipelines, PipelineTemplate.get_modules(model)
        fitted = tuple(template.fitted(model, modules) for template in placed.templates)
        self.resolve_schedule(model)
        if fitted != placed.templates or self._schedule is not self.settings.schedule:
            self._place(fitted, placed.num_microbatches, placed.layout.world_size)

    def _join(
        self,
        model: Any,
        elastic: Elastic,
        optimizer: Optimizer | None,
        criterion: Criterion | None,
        dataloader: HeterogeneousDataLoader | None,
        lr_scheduler: LRScheduler | None,
    ) -> Configured:
        """`configure` for a process of an elastic run: of the first ones, or one that joins them. What it has to do
        with the others is in `elastic/`."""
        own_optimizer = self._check_elastic(model, optimizer, dataloader)
        planner = LayoutPlanner(model, self.settings, self.resolve_schedule(model))
        facts = {**self._facts(), "the global batch size": self.global_batch_size}
        states = SharedStates(own_optimizer)
        for name, value in (
            ("dataloader", dataloader),
            ("lr_scheduler", lr_scheduler),
            ("loss scale", self._loss_scale),
        ):
            if value is not None:
                states.register(name, value)
        generations = Generations(elastic, planner, self.tp_size, digest_of({**facts_of(model), **facts}))
        self._model = model
        try:
            now, on_layout = generations.enter(), partial(self._take_layout, generations)
            planned = LayoutPlan(*on_layout(now), self.settings.engine_options())
            with new_job(
                self.settings.time_limit, generations.on_board, "configure()", self.settings.patience
            ) as board:
                if now.is_first:
                    require_equal_models(model, facts, board)
                fill_values = None if now.is_first else states.values(now)
                self._model = made = build(model, planned, board, criterion=criterion, fill_values=fill_values)
            if self.settings.sharded_optimizer == 1 and now.members[0] == generations.member:
                logger.warning(
                    "sharded_optimizer with elastic=: one rank keeps each state, so a lost rank sends the run back "
                    "to its checkpoint. With sharded_optimizer=2 two ranks do, and one may be lost"
                )
            wrapped = self.wrap_optimizer(own_optimizer, made)
            self.run = ElasticRun(generations, states, made.pipeline, on_layout)
        except BaseException:
            generations.close()  # the others must not count on this process
            raise
        return made, wrapped, criterion, dataloader, lr_scheduler

    def _check_elastic(
        self, model: Any, optimizer: Optimizer | None, dataloader: HeterogeneousDataLoader | None
    ) -> Optimizer:
        """Refuse what an elastic run cannot have. No communication. Returns the optimizer, not wrapped."""
        if isinstance(model, PipelineModel) or self._model is not None:
            raise ValueError(
                "with elastic= a plugin configures one whole model, once: make a new plugin, and the model anew"
            )
        self._check(model)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"with elastic= configure() takes a transformers PreTrainedModel, got {type(model).__name__}"
                ": leave elastic= out for it"
            )
        if packed_weights(mark_packed(model)):
            raise NotImplementedError(
                "with elastic= a model cannot be quantised: packed weights stay on their stage"
                ". Load it without a quantization_config, or leave elastic= out"
            )
        if optimizer is None:
            raise ValueError(
                "with elastic= configure() needs the optimizer: the run goes on from its steps after a loss"
            )
        inner = optimizer.unwrap() if isinstance(optimizer, PipelineOptimizer) else optimizer
        if clips_in_step(inner, model.device):
            raise NotImplementedError(
                f"with elastic= {type(inner).__name__} cannot clip gradients in its step: that needs all ranks, and "
                "one may be lost in the middle of an update. Give the plugin max_norm, or clip with "
                "booster.clip_grad_norm"
            )
        if depends_on_others(inner, model.device):
            raise NotImplementedError(
                f"with elastic= {type(inner).__name__} cannot be used: its updates depend on other parameters or "
                "ranks, which may be elsewhere after a change. Take one such as torch.optim.AdamW"
            )
        if dataloader is not None and dataloader not in self._loaders:
            raise TypeError("the dataloader was not made by this plugin: make it with plugin.prepare_dataloader(...)")
        return inner

    def _take_layout(self, generations: Generations, generation: Generation) -> tuple[Layout, ScheduleMaker]:
        """Make a generation's pipelines those of the plugin, and of its loaders."""
        self._place(*generations.planner.layout(generation), len(generation.members))
        rank = generation.members.index(generations.member)
        self.on_place(rank, len(generation.members))
        placed = self._known_pipelines
        pipeline = placed.layout.place_of(rank).pipeline
        for loader in self._loaders:
            loader.reshare(self.num_microbatches, pipeline)
        return placed.layout, placed.makers[pipeline]

    def _facts(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        facts = self.settings.facts()
        if self._loss_scale is not None:
            facts |= {f"the loss scale's {name}": value for name, value in asdict(self._loss_scale).items()}
        if self.settings.elastic is not None:
            return facts | self.more_facts
        return facts | {
            "the plugin's pipelines": self.pipelines,
            "the plugin's num_microbatches": self.num_microbatches,
            "the pipelines' schedules": [summary(schedule) for schedule in self._known_pipelines.schedules],
        }

    def _plan(self, model: nn.Module, units_and_costs: UnitsAndCosts, ranks: Ranks) -> LayoutPlan:
        placed, described = self._known_pipelines, self._describe(model, units_and_costs.costs)
        self._description = described
        schedules = [schedule for schedule in placed.schedules for _ in range(self.settings.context_parallel_size)]
        return LayoutPlan(
            placed.layout,
            placed.makers[self.pipeline_index],
            self.settings.engine_options(),
            described.costs or {},
            [schedule.name for schedule in schedules],
            [f"{schedule.num_microbatches} microbatches of {self.microbatch_size}" for schedule in schedules],
        )

    def wrap_optimizer(self, optimizer: Optimizer, model: PipelineModel) -> PipelineOptimizer:
        """An optimizer of the parallelised `model`, whose step clips, and skips overflows, as this plugin says."""
        inner = optimizer.unwrap() if isinstance(optimizer, PipelineOptimizer) else optimizer
        return PipelineOptimizer(inner, model.pipeline, float(self.settings.max_norm), self._loss_scale)

    def _describe(self, model: nn.Module | None, costs: Sequence[float] | None = None) -> LayoutDescription:
        placed = self._known_pipelines
        shown = placed.layout, placed.schedules, self.microbatch_size
        if model is None or isinstance(model, PipelineModel):
            return LayoutDescription(self.pipelines[0].model_name, *shown)
        return describe_layout(model, *shown, costs)
