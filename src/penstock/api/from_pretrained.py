"""`from_pretrained` and `from_config` make a model straight in its stages: each rank makes only what it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from penstock.api.builder import check_model, remember_example_inputs
from penstock.api.initialize import ConfigLike, build_equal_pipelines
from penstock.config.configuration import SECTION, Configuration, ConfigurationError, take_keys
from penstock.layout.layout import Layout
from penstock.model.pipeline_model import PipelineModel
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.instrumentation import record_of
from penstock.modeling.libraries import base_of, is_peft_model, of_diffusers
from penstock.modeling.packed_layers import has_packed, mark_packed, require_packed
from penstock.modeling.sharding import WeightSharding
from penstock.modeling.weights.initialise import init_stage, meta_model, resolve_model_class
from penstock.modeling.weights.load import StageLoadingInfo, forget_ties, load_config, load_stage
from penstock.modeling.weights.whole import alias_groups
from penstock.runtime.comm.exchange import Ranks
from penstock.runtime.formation import new_job
from penstock.schedule.registry import resolve_auto
from penstock.tensor_parallel.apply import TensorParallel

# A model with this rank's weights, and what was found where they were loaded.
Made = tuple[Any, StageLoadingInfo]
NOTHING_LOADED = StageLoadingInfo((), (), (), ())


def from_pretrained(
    path_or_name: str,
    *,
    config: ConfigLike | None = None,
    model_class: type | None = None,
    criterion: Criterion | None = None,
    example_inputs: Any = None,
    adapt: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> PipelineModel:
    """Load a model straight into its stages: each rank reads and holds only its own stage's weights.

    Args:
        path_or_name: as for transformers' `from_pretrained`: a local folder or a name on a hub.
        config: see `initialize`.
        model_class: a model class or an auto class such as `AutoModelForCausalLM`; by default the class that wrote the
            checkpoint. A class of diffusers, also its `AutoModel`, reads diffusers' folders and takes its arguments.
        criterion, example_inputs: see `initialize`.
        adapt: puts adapters into the model, of which other stages' weights are on the meta device, and returns it:
            `lambda model: get_peft_model(model, LoraConfig(...))`. All ranks must draw the same random numbers there.
        kwargs: keys of the configuration, as for `initialize`; all others as for transformers' `from_pretrained`
            (`dtype`, `quantization_config`, `attn_implementation`, ...).

    Returns:
        The model, or the PeftModel that `adapt` has made of it.

    Raises:
        what `initialize` and transformers' `from_pretrained` raise; ValueError for an argument that does not go with
            stages.
    """
    configuration = Configuration.from_any(config, **take_keys(kwargs))
    kind: Any
    load: Any = load_stage
    packing = kwargs.get("quantization_config")
    if model_class is not None and of_diffusers(model_class):
        import penstock.integrations.diffusers as loading

        kind, load = loading.class_of(path_or_name, model_class, **kwargs), loading.load_stage
        make_skeleton = partial(loading.meta_model, kind, path_or_name, **kwargs)
    else:
        model_config = load_config(path_or_name, **kwargs)
        packing = packing or getattr(model_config, "quantization_config", None)
        if not isinstance(packing, (dict, QuantizationConfigMixin, type(None))):
            raise TypeError(
                f"quantization_config must be one of transformers, such as BitsAndBytesConfig, got {packing!r}"
            )
        if packing and configuration.pipeline_parallel_size == "auto":
            raise ConfigurationError(
                f'{SECTION}.pipeline_parallel_size "auto" counts the weights as they are before they are packed: give '
                "a number, such as the one that penstock plan --quantization nf4 --lora-rank 16 finds"
            )
        kind = resolve_model_class(model_config, model_class)
        make_skeleton = partial(meta_model, kind, model_config)
    asked = configuration
    if packing or adapt is not None:  # what is trained then is small, and not in the model of which "auto" judges
        configuration = replace(configuration, schedule=resolve_auto(configuration.schedule, deferring_pays=False))
    if not configuration.enable:
        whole: Any = kind.from_pretrained(path_or_name, **kwargs)
        adapted: PipelineModel = whole if adapt is None else adapt(whole)
        return adapted
    model: PipelineModel = _make_in_stages(
        "from_pretrained()",
        make_skeleton,
        lambda stages, local, sharding: load(kind, path_or_name, stages, local, sharding, adapt=adapt, **kwargs),
        configuration,
        criterion,
        example_inputs,
    )
    record_of(base_of(model)).configuration = asked
    return model


def from_config(
    model_config: PretrainedConfig,
    *,
    config: ConfigLike | None = None,
    model_class: type | None = None,
    seed: int | None = None,
    criterion: Criterion | None = None,
    example_inputs: Any = None,
    **kwargs: Any,
) -> PipelineModel:
    """Initialise a model at random straight into its stages: each rank makes only its own stage's weights.

    Its weights equal, bit for bit, those of the unsplit model built after `torch.manual_seed(seed)`.

    Args:
        model_config: the model's configuration.
        config: see `initialize`.
        model_class: a model class or an auto class; by default the first of `model_config.architectures`.
        seed: all ranks must use the same; None continues torch's generator, whose state must be the same on all ranks.
        criterion, example_inputs: see `initialize`.
        kwargs: keys of the configuration, as for `initialize`; all others as for an auto class's `from_config`
            (`dtype`, `attn_implementation`).

    Raises:
        what `initialize` raises; NotImplementedError for a model whose weights cannot be made in parts.
    """
    configuration = Configuration.from_any(config, **take_keys(kwargs))
    kind = resolve_model_class(model_config, model_class)
    if not configuration.enable:
        if seed is not None:
            torch.manual_seed(seed)
        whole: PipelineModel = kind._from_config(model_config, **kwargs)
        return whole
    model: PipelineModel = _make_in_stages(
        "from_config()",
        lambda: meta_model(kind, model_config, **kwargs),
        lambda stages, local, sharding: (
            init_stage(kind, model_config, stages, local, seed, sharding, **kwargs),
            NOTHING_LOADED,
        ),
        configuration,
        criterion,
        example_inputs,
    )
    return model


def _make_in_stages(
    call: str,
    make_skeleton: Callable[[], PreTrainedModel],
    make: Callable[[Sequence[Sequence[str]], Sequence[int], WeightSharding | None], Made],
    configuration: Configuration,
    criterion: Criterion | None,
    example_inputs: Any,
) -> Any:
    """A model whose weights are made where they are held. `call`: the user's, by its name. `make`: from the units of
    each stage, the stages that this rank holds, and how tensor parallelism shards the whole model's weights, makes what
    `Made` says."""
    with new_job(configuration.time_limit, call=call, patience=configuration.patience) as board:
        skeleton = make_skeleton()
        check_model(skeleton, call)
        remember_example_inputs(skeleton, example_inputs)

        def make_mine(layout: Layout, ranks: Ranks) -> PreTrainedModel:
            place, size, sharding = layout.place_of(ranks.rank), layout.tensor_parallel_size, None
            if size > 1:
                sharding = TensorParallel(skeleton, place.tensor_parallel_rank, size, alias_groups(skeleton))
            pipeline = layout.pipelines[place.pipeline]

            def work() -> tuple[Sequence[str], bool]:
                made.append(make(pipeline.stages, pipeline.stages_of(place.pipeline_rank), sharding))
                if is_peft_model(made[0][0]):
                    from penstock.integrations.peft import initialize_peft

                    initialize_peft(made[0][0], lambda base: base)
                return made[0][1].untied, has_packed(mark_packed(base_of(made[0][0])))

            by_rank = ranks.together("making its part of the model", work)
            base: PreTrainedModel = base_of(made[0][0])
            forget_ties(base, set().union(*(untied for untied, _ in by_rank)))
            require_packed(base, any(packed for _, packed in by_rank))
            return base

        made = list[Made]()
        model = build_equal_pipelines(skeleton, configuration, board, criterion, make_mine)
    return made[0][0] if is_peft_model(made[0][0]) else model
