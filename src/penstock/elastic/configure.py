"""`configure` of a plugin with `elastic=`: its pipelines, and the loaders it made, follow the generations of a run."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from transformers import PreTrainedModel

from penstock.elastic.formations import Formations
from penstock.elastic.generations import Generations
from penstock.elastic.moving import SharedStates
from penstock.elastic.protocol import Decision
from penstock.elastic.run import ElasticRun
from penstock.elastic.settings import Elastic
from penstock.layout.layout import Layout
from penstock.layout.pipelines import check_templates
from penstock.modeling.weights.whole import packed_weights
from penstock.optimizer import PipelineOptimizer
from penstock.pipeline_model import PipelineModel
from penstock.runtime.comm.forming import digest_of, facts_of, forming, require_agreement
from penstock.schedule.actions import Schedule

if TYPE_CHECKING:
    from penstock.plugin import Configured, HeterogeneousParallelPlugin

logger = logging.getLogger("penstock")

# How long a transfer of an elastic run may take: a rank that writes a checkpoint lets the others wait. One that stands
# still is noticed by its heartbeat.
ELASTIC_TIMEOUT = datetime.timedelta(minutes=10)


def check_elastic(elastic: Any, global_batch_size: Any, microbatch_size: int) -> None:
    """Raise TypeError or ValueError unless a plugin can be made with these arguments."""
    if not isinstance(elastic, Elastic):
        raise TypeError(f"elastic must be a penstock.Elastic, got {elastic!r}")
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int):
        raise TypeError(f"elastic= needs global_batch_size, an integer, got {global_batch_size!r}")
    if global_batch_size < 1 or global_batch_size % microbatch_size:
        raise ValueError(
            f"global_batch_size must be a multiple of microbatch_size ({microbatch_size}), got {global_batch_size}"
        )


def configure_elastic(
    plugin: HeterogeneousParallelPlugin, model: Any, optimizer: Optimizer | None, criterion: Any,
    dataloader: Any, lr_scheduler: Any,
) -> Configured:  # fmt: skip
    """`plugin.configure` for as many processes as come, or for one that joins them."""
    elastic = plugin.elastic
    assert elastic is not None
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"with elastic= configure() takes a transformers PreTrainedModel, got {type(model).__name__}")
    if packed_weights(model):
        raise NotImplementedError("with elastic= a model cannot be quantised: packed weights stay on their stage")
    if isinstance(model, PipelineModel) or plugin._model is not None:
        raise ValueError("with elastic= a plugin configures one whole model, once")
    if optimizer is None:
        raise ValueError("with elastic= configure() needs the optimizer: the run goes on from its steps after a loss")
    if dataloader is not None and dataloader not in plugin._loaders:
        raise TypeError("the dataloader was not made by this plugin: make it with plugin.prepare_dataloader(...)")
    formations = Formations(model, plugin)
    facts = {**facts_of(model), **plugin._facts(), "the global batch size": plugin.global_batch_size}
    states = SharedStates(optimizer.unwrap() if isinstance(optimizer, PipelineOptimizer) else optimizer)
    for name, one in (("dataloader", dataloader), ("lr_scheduler", lr_scheduler)):
        if one is not None:
            states.register(name, one)
    if plugin.precision == "fp16":
        states.register("loss scale", plugin._loss_scale)
    generations = Generations(elastic, formations, plugin.tp_size, digest_of(facts))
    plugin._model = model
    try:
        now, on_layout = generations.enter(), partial(_take_layout, plugin, generations)
        on_layout(now)
        with forming(plugin.time_limit, generations.on_board) as board:
            if now.is_first:
                require_agreement(facts, board)
            values = None if now.is_first else states.values(now)
            # The members have little time to meet, but not to work.
            timeout = plugin.time_limit or ELASTIC_TIMEOUT
            model = plugin._parallelise(model, board, criterion, timeout=timeout, values=values)
            if plugin.sharded_optimizer == 1 and now.members[0] == generations.number:
                logger.warning(
                    "sharded_optimizer with elastic=: one rank keeps each state, so a lost rank sends the run back to "
                    "its checkpoint. With sharded_optimizer=2 two ranks do, and one may be lost"
                )
        wrapped = plugin._wrap(optimizer, model)
        plugin.run = wrapped.run = ElasticRun(generations, states, model.pipeline, on_layout)
    except BaseException:
        generations.close()  # the others must not count on this process
        raise
    return model, wrapped, criterion, dataloader, lr_scheduler


def _take_layout(
    plugin: HeterogeneousParallelPlugin, generations: Generations, decision: Decision
) -> tuple[Layout, Callable[[int], Schedule]]:
    """Make a generation's pipelines those of the plugin, and of its loaders."""
    templates, counts = generations.formations.layout(decision)
    plugin._set(check_templates(templates), counts)
    rank = decision.members.index(generations.number)
    plugin._on_place(rank, len(decision.members))
    pipeline = plugin.layout.place_of(rank).pipeline
    for loader in plugin._loaders:
        loader.reshare(plugin.num_microbatches, pipeline)
    return plugin.layout, plugin._makers[pipeline]
