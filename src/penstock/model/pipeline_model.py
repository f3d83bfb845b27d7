"""The methods that `initialize` and the plugin add to a model when they parallelise it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from penstock.checkpoint import model_methods
from penstock.checkpoint.model_state import warn_of_unsaved
from penstock.config.configuration import Configuration
from penstock.data.loader import ReplicaDataLoader
from penstock.generation.generate import evaluate_with_cache, generate
from penstock.modeling.graph.dummy_inputs import arguments_by_name
from penstock.modeling.graph.loss import Criterion
from penstock.modeling.instrumentation import known_of, mix_in, original_class, record_of
from penstock.modeling.libraries import base_of, of_diffusers
from penstock.modeling.placeholders.ghosts import absent_parameters, shown_whole
from penstock.modeling.stage.outputs import NamedOutput
from penstock.modeling.weights.whole import packed_weights, whole_shape
from penstock.runtime.comm.rollcall import Call
from penstock.runtime.engine import Engine
from penstock.runtime.evaluation import evaluate
from penstock.runtime.inputs import warn_of_batch_statistics
from penstock.runtime.reforming import copy_of, engine_of
from penstock.simulation.recorder import Timeline

if TYPE_CHECKING:

    class _Module(torch.nn.Module, Any):  # type: ignore[misc]  # of any class
        """Checkers have no intersection of types: to them a PipelineModel passes for a model of any class and has any
        attribute of it."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _Module = torch.nn.Module


class PipelineModel(_Module):
    """Mixed into the class of a model that `initialize()` or the plugin has parallelised.

    Calling the model with gradients enabled starts a training step and returns an iterator over microbatches; calling
    it with gradients disabled returns one ordinary output for the whole batch.

    `parameters()`, `state_dict()` and transformers' `num_parameters()` are of this rank's stages; `save_pretrained` and
    `num_parameters(whole=True)` are of the whole model.

    Optimizers take no empty list of parameters. On a rank that has nothing to train while others have, `parameters()`
    therefore ends with a dummy parameter: one number that nothing reads or saves. It has no name.
    """

    @property
    def pipeline(self) -> Engine:
        """The engine that runs the model. A copy's engine is formed by all ranks together when it is first used."""
        engine = engine_of(self)
        assert engine is not None, "a PipelineModel has an engine, or is a copy of one that has"
        return engine

    @property
    def _known_engine(self) -> Engine:
        """The engine of the model, or of the model it is a copy of: the same layout."""
        record = record_of(base_of(self))
        engine: Engine = record.engine or record.copied_from
        return engine

    @property
    def configuration(self) -> Configuration | None:
        """What `initialize()` was asked for; None if the plugin parallelised the model."""
        configuration: Configuration | None = record_of(base_of(self)).configuration
        return configuration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train or evaluate on this pipeline's batch, given as the model's own arguments.

        `criterion=` takes a `criterion(outputs, inputs)` for this call, instead of that of `initialize()`; None is the
        model's own loss. See `initialize`.

        With gradients enabled: an iterator that yields one output per microbatch. Call `backward()` on each one's
        `loss` before taking the next. Each loss is the microbatch's share of the global batch's loss, so that the
        losses sum to the unsplit model's; it is known on every rank. The other fields (logits, ...) are on the last
        stage only. Where the forward returns a tensor or a tuple, that is the field `output`.

        With gradients disabled: the model's own output for the whole batch, on every rank; of a module that returns no
        `ModelOutput`, and with a criterion, one with the fields above. Inside generate(): one step of it. With
        `use_cache=True` or a cache, the whole batch in one forward, and a cache of each rank's own layers.

        Raises:
            NotImplementedError: with such inputs the model cannot be split, or not in these stages; no step has begun.
            ValueError: an empty batch, no tensors, too few samples, no labels in training, or a criterion that fails.
            PipelineFailure: a rank of the job was lost or failed; names the rank and its cause.
        """
        if torch.compiler.is_dynamo_compiling():
            refuse_compilation(type(self).__name__)
        if targets := record_of(self).call_targets:
            return targets[-1](self._bind(args, kwargs))
        criterion = record_of(self).criterion
        if "criterion" in kwargs and (kwargs["criterion"] is None or callable(kwargs["criterion"])):
            criterion = kwargs.pop("criterion")
        inputs = self._bind(args, kwargs)
        if torch.is_grad_enabled():
            return self.pipeline.train(inputs, criterion)
        if inputs.get("use_cache") is True or any(isinstance(value, Cache) for value in inputs.values()):
            return evaluate_with_cache(self, inputs, criterion)
        output = evaluate(self.pipeline, inputs, criterion)
        # With a criterion, the fields of what has no place for a loss; otherwise what the model returns.
        return output.original() if criterion is None and isinstance(output, NamedOutput) else output

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """The parameters of this rank's stages (`recurse`: of modules inside, too); the class says what may follow."""
        trainable = False
        for parameter in super().parameters(recurse):
            trainable = trainable or parameter.requires_grad
            yield parameter
        if not trainable and recurse and (stand_in := stand_in_of(base_of(self))) is not None:
            yield stand_in

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Iterator[str]:
        """DistributedDataParallel reads this before it communicates, and is refused there."""
        raise_if_read: Iterator[str] = map(_refuse_replication, [type(self).__name__])
        return raise_if_read

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's batch among those that the pipelines take: each its own, or, under
        `context_parallel_size`, so many together."""
        return self._known_engine.context.replica

    @property
    def data_parallel_size(self) -> int:
        """The number of batches that the pipelines take."""
        return self._known_engine.layout.num_replicas

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, steps only accumulate gradients on this rank; the first step outside reduces them."""
        return self.pipeline.no_sync()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm (`norm_type`) of the whole model's gradients, over stages and pipelines; every rank calls it.

        Returns the norm before clipping, shape (). Raises ValueError for a negative `max_norm`, RuntimeError if the
        norm is not finite and `error_if_nonfinite`.
        """
        return self.pipeline.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def prepare_dataloader(
        self, dataset: Dataset[Any] | Sequence[Any], batch_size: int, **options: Any
    ) -> DataLoader[Any]:
        """A loader of this pipeline's own batches of `batch_size`: every sample of `dataset` once per epoch over all
        pipelines. `options` are those of torch's `DataLoader`."""
        return ReplicaDataLoader(
            dataset, batch_size, num_replicas=self.data_parallel_size, rank=self.data_parallel_rank, **options
        )

    def save_parallelized(
        self, save_directory: str | os.PathLike[str], merge_checkpoints: bool = False, **kwargs: Any
    ) -> None:
        """Save the model: a file per rank, or with `merge_checkpoints` one ordinary checkpoint for transformers.

        The folder is `save_directory`, `kwargs` are `save_pretrained`'s. Every rank calls it.
        """
        own: Any = getattr(super(), "save_pretrained", None)
        model_methods.save_model(self, save_directory, merge_checkpoints, own, kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """One ordinary checkpoint of the whole model in the folder `save_directory`. Every rank calls it.

        It is what transformers' `save_pretrained` writes, whose `kwargs` it takes; `safe_serialization=False` writes
        `.bin` files. `is_main_process` has no effect, as the layout decides who writes. Of a module that is no model
        of transformers it is the file of weights, whose content `load_state_dict` takes. See `save_parallelized`. A
        class that has a `save_pretrained` of its own keeps it; it is called on one rank, with the whole model.

        Raises:
            ValueError: `push_to_hub` or `distributed_checkpoint` is asked for.
        """
        self.save_parallelized(save_directory, merge_checkpoints=True, **{"safe_serialization": True, **kwargs})

    def save_adapter(
        self,
        save_directory: str | os.PathLike[str],
        name: str,
        select: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
        write: Callable[[str, Mapping[str, torch.Tensor]], None],
    ) -> None:
        """Save the adapter `name`, whose tensors `select` takes of a state dict, into the folder `save_directory`, as
        `write` does. Every rank calls it."""
        model_methods.save_one_adapter(self, save_directory, name, select, write)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        """Refused: the weights are on several ranks.

        Raises:
            NotImplementedError: says what to do.
        """
        raise NotImplementedError(
            "push_to_hub() of a parallelised model: each rank has a part of it. Call model.save_pretrained(folder) on "
            "every rank, and then huggingface_hub.upload_folder(repo_id=..., folder_path=folder) on one"
        )

    def extra_repr(self) -> str:
        """Which part of the model this rank holds."""
        pipeline, text = self._known_engine, super().extra_repr()
        stages = pipeline.context.stages
        held = [unit for stage in stages for unit in pipeline.split.stages[stage]]
        numbers = ", ".join(map(str, stages))
        part = (
            f"stage {numbers} of {pipeline.context.pipeline.num_stages} (counted from 0), on rank {pipeline.rank}: "
            f"holds {', '.join(held)}; the other units are shown without their weights"
        )
        return f"{text}\n{part}" if text else part

    def load_ordinary(self, directory: str | os.PathLike[str], strict: bool = True) -> None:
        """Load the ordinary checkpoint `directory`, as of `save_pretrained`. Every rank calls it and reads its own part
        only. Of a model with adapters these are the adapters', as PEFT writes them.

        Args:
            strict: refuse a folder that lacks weights of the model, or has others; one that lacks weights of an
                adapter, which stay otherwise.

        Raises:
            CheckpointError: the folder holds no checkpoint of this model. No weight has changed then.
        """
        model_methods.load_model(self, directory, strict)

    def adapter_folders(self, directory: str) -> dict[str, str]:
        """Where in `directory` each adapter is that an ordinary checkpoint of this model consists of."""
        model: Any = self
        injected = getattr(model, "_hf_peft_config_loaded", False)
        return dict.fromkeys(model.active_adapters(), directory) if injected else {}

    def from_parallelized(self, directory: str | os.PathLike[str], variant: str | None = None) -> Self:
        """Load what `save_parallelized` wrote to `directory`, from any number of stages and tensor-parallel ranks;
        returns this model. `variant` is the one it was saved with."""
        model_methods.load_parallelized(self, directory, variant)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the blocks of this rank's stages, each by itself, with `torch.compile`, whose arguments these are.

        The model as a whole is not one graph: between its blocks it communicates. Blocks are the units of a class that
        occurs several times in the model; if none does, all units.
        """
        split = self.pipeline.split
        units = {unit: self.get_submodule(unit) for stage in split.stages for unit in stage}
        occurs = Counter(type(module) for module in units.values())
        mine = [units[unit] for stage in split.local_stages for unit in split.stages[stage]]
        any_repeats = any(number > 1 for number in occurs.values())
        for module in mine:
            if occurs[type(module)] > 1 or not any_repeats:
                module.compile(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineModel:
        """A copy of this rank's stages that can be called and saved like the model, for example for a moving average.

        No communication: it forms its own process groups when it is first used, on all ranks together.
        """
        copied: PipelineModel = copy_of(self, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: the engine that runs the model cannot be written to a file."""
        raise TypeError(
            f"a parallelised {type(self).__name__} cannot be pickled, as process groups belong to it: save it with "
            "save_pretrained() or save_parallelized()"
        )

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by the names of the model's own forward."""
        if not args:
            return dict(kwargs)
        # A module of the user's own may take a mapping, but not with the names of its arguments in it.
        named = isinstance(args[0], Mapping) and not {*args[0]}.isdisjoint(inspect.signature(self.forward).parameters)
        if named or (isinstance(args[0], Mapping) and isinstance(self, PreTrainedModel)):
            raise TypeError(
                f"{type(self).__name__} was given a {type(args[0]).__name__} in place of its first argument: write "
                "model(**batch)"
            )
        return arguments_by_name(self, args, kwargs)


# What a module of the user's own may not have as an attribute.
USED_NAMES = frozenset(name for name in vars(PipelineModel) if not name.startswith("_")) - {"extra_repr"}


class PipelinePreTrainedModel(PipelineModel):
    """A `PipelineModel` that is a model of transformers."""

    @property
    def device(self) -> torch.device:
        """Where this rank's stages are. transformers asks for it several times for each token."""
        engine = record_of(self).engine
        device: torch.device = super().device if engine is None else engine.split.device
        return device

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Refused, unless nothing changes: embedding and head are on different stages.

        Raises:
            NotImplementedError: says what to do; nothing has changed.
        """
        model: Any = self
        number = model.config.get_text_config().vocab_size
        if new_num_tokens not in (None, number) or kwargs.get("pad_to_multiple_of") or args:
            raise NotImplementedError(
                f"resize_token_embeddings({new_num_tokens}) of a parallelised model with {number} tokens: its "
                "embedding and its head are on different stages. Resize the whole model before initialize()"
            )
        return model.get_input_embeddings()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, over stages: on every rank the result of the unsplit model."""
        return generate(self, super().generate, *args, **kwargs)

    def num_parameters(
        self, only_trainable: bool = False, exclude_embeddings: bool = False, *, whole: bool = False
    ) -> int:
        """transformers' `num_parameters`, of this rank's stages, or with `whole` of the unsplit model.

        Only with `whole` and `only_trainable` every rank must call it, as no rank knows what others have frozen.
        """
        if not whole:
            number: int = super().num_parameters(only_trainable, exclude_embeddings)
            return number
        return num_parameters_of_whole(self, only_trainable, exclude_embeddings)


# torch's has no types
@torch.compiler.disable(reason="a parallelised model communicates: call model.compile(), which compiles its blocks")  # type: ignore[untyped-decorator]
def refuse_compilation(name: str) -> None:
    """Raise for `torch.compile(model)`: its graph would contain the communication."""
    raise RuntimeError(
        f"torch.compile() of a parallelised {name}: it communicates between its blocks, so it is not one graph. Call "
        "model.compile(), which takes the same arguments and compiles the blocks of this rank's stages"
    )


def _refuse_replication(name: str) -> str:
    raise TypeError(
        f"DistributedDataParallel of a parallelised {name}, as accelerator.prepare() and a plain Trainer make it: "
        "each rank has other stages, which reduce their own gradients. Leave the model out of accelerator.prepare(). "
        "Instead of Trainer(...) write PipelineTrainer(...), for TRL's SFTTrainer `class PipelineSFTTrainer("
        "PipelineTrainerMixin, SFTTrainer)`, both from penstock.integrations.transformers"
    )


def stand_in_of(model: Any) -> torch.nn.Parameter | None:
    """The dummy parameter of a rank that has none to train; None if no rank has any."""
    record = known_of(model)
    if record.engine is None or not any(parameter.requires_grad for _, parameter in absent_parameters(model)):
        return None
    if record.stand_in is None:
        record.stand_in = torch.nn.Parameter(torch.zeros(1, device=record.engine.device))
    record.stand_in.requires_grad_(True)
    return record.stand_in


def loss_tensor(pipeline: Engine, loss: float) -> torch.Tensor:
    """A loss as the model would give it, without a graph: shape ()."""
    dtype = torch.float64 if pipeline.split.dtype == torch.float64 else torch.float32
    return torch.tensor(loss, dtype=dtype, device=pipeline.device)


def attach(
    model: torch.nn.Module,
    pipeline: Engine,
    configuration: Configuration | None = None,
    criterion: Criterion | None = None,
) -> PipelineModel:
    """Make `model` a PipelineModel driven by `pipeline`: the same object, its class a subclass with the same name."""
    if pipeline.rank == 0:
        warn_of_batch_statistics(model)
    warn_of_unsaved(model)
    mix_in(model, _mixin_of(model))
    _hand_over_saving(type(model))
    record = record_of(model)
    record.engine, record.configuration, record.criterion = pipeline, configuration, criterion
    pipeline.observers.append(Timeline())
    assert isinstance(model, PipelineModel)
    return model


def _mixin_of(model: Any) -> type[PipelineModel]:
    if isinstance(model, PreTrainedModel):
        return PipelinePreTrainedModel
    if of_diffusers(type(model)):
        from penstock.integrations.diffusers import PipelineDiffusionModel

        return PipelineDiffusionModel
    return PipelineModel


# Whose methods that save are not a class's own: of a stage they save what they should, or are replaced above.
_KNOWN_PACKAGES = frozenset({"builtins", "diffusers", "penstock", "peft", "torch", "transformers"})


def _hand_over_saving(kind: type) -> None:
    """Let the own methods of a model's class that save it (`save`, `save_...`) have the whole model."""
    own_class = original_class(kind)
    for name in dir(own_class):
        holder = next(cls for cls in own_class.__mro__ if name in vars(cls)) if name.startswith("save") else object
        method = vars(holder).get(name)
        if isinstance(method, FunctionType) and holder.__module__.partition(".")[0] not in _KNOWN_PACKAGES:
            setattr(kind, name, _of_the_whole_model(name, method))


def _of_the_whole_model(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(
            isinstance(argument, (str, os.PathLike)) or hasattr(argument, "write")
            for argument in (*args, *kwargs.values())
        ):
            return model_methods.save_by_own_method(self, name, args, kwargs)
        return method(self, *args, **kwargs)

    return save


def num_parameters_of_whole(model: Any, only_trainable: bool, exclude_embeddings: bool) -> int:
    """See `PipelineModel.num_parameters`. With `only_trainable` every rank calls it."""
    pipeline, left_out = model.pipeline, set[str]()
    if exclude_embeddings:
        left_out = {f"{name}.weight" for name, child in model.named_modules() if isinstance(child, nn.Embedding)}
    if only_trainable:
        index = pipeline.place.tensor_parallel_rank
        counted_here = sum(
            weight.parameter.numel()
            for weight in pipeline.held
            if weight.parameter.requires_grad
            and weight.name not in left_out
            and weight.counted_by(pipeline.rank, index)
        )
        with pipeline.together(Call.COUNT, [counted_here]) as facts_by_rank:
            return sum(facts[0] for facts in facts_by_rank.values())
    with shown_whole(model):
        whole, packed = dict(model.named_parameters(remove_duplicate=False)), packed_weights(model)
    counted = [names[0] for names in pipeline.split.aliases if names[0] not in left_out]
    return sum(packed.get(name) or math.prod(whole_shape(model, name, whole[name])) for name in counted)
