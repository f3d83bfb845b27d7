"""A model of which only some stages have weights, from a configuration, as the whole model would be initialised."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel, initialization
from transformers.models.auto.auto_factory import _get_model_class

from penstock.modeling.sharding import Sharding, ShardWriter, WeightSharding
from penstock.modeling.weights.whole import held_names, leave_shards, strip_foreign


class Scratch:
    """One block of memory in which every temporary is made in turn: those of every size, between weights that stay,
    would leave the allocator's heap full of holes."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory laid out like `tensor`: how many numbers a kernel draws, and in what order, depends on the layout."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        if num_bytes > self._block.numel():
            self._block = torch.empty(num_bytes, dtype=torch.uint8)
        return self._block[:num_bytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


# Random operations in place. The shape says how many numbers they draw. (A Poisson number takes as many as it takes.)
DRAWN_IN_PLACE = frozenset(
    ["uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_"]
)


def resolve_model_class(config: PretrainedConfig, model_class: type | None = None) -> type[PreTrainedModel]:
    """The class to build for `config`: of a model class itself, of an auto class (`AutoModelForCausalLM`) its choice,
    for None the first of `config.architectures`, which is the class that wrote the checkpoint."""
    if model_class is None:
        names = config.architectures or []
        cls = getattr(transformers, names[0], None) if names else None
        if not isinstance(cls, type):
            raise ValueError(
                f"cannot tell the model class: the configuration ({type(config).__name__}) has architectures={names}, "
                "and transformers has no such class; pass model_class=, for example AutoModelForCausalLM"
            )
        return cls
    if (mapping := getattr(model_class, "_model_mapping", None)) is not None:
        if type(config) not in mapping:
            raise ValueError(
                f"{model_class.__name__} has no model for a {type(config).__name__}; pass another model_class="
            )
        resolved: type[PreTrainedModel] = _get_model_class(config, mapping)
        return resolved
    if not issubclass(model_class, PreTrainedModel):
        raise ValueError(f"model_class must be a PreTrainedModel or an auto class, not {model_class.__name__}")
    return model_class


def meta_model(model_class: type[PreTrainedModel], config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """The whole model without memory: every tensor is a meta tensor, tied weights are tied. To choose stages with."""
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        return model_class._from_config(copy.deepcopy(config), **kwargs)


def init_stage(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    stages: Sequence[Sequence[str]],
    local_stages: Collection[int],
    seed: int | None = None,
    tensor_parallel: WeightSharding | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A randomly initialised model that holds the weights of `local_stages` only; other units are ghosts.

    Its parameters and buffers equal, bit for bit, those of `model_class._from_config(config)` (what an auto class's
    `from_config` calls) after `torch.manual_seed(seed)`, built on the CPU; so does the state of torch's generator
    afterwards. Without a seed the generator goes on. Parameters outside every unit are held by all stages.

    Args:
        tensor_parallel: how the whole model is sharded. Of each weight that is, only this rank's shard is kept, for
            `WeightSharding.apply` to put in its place; the model shows a meta tensor there until then.
        kwargs: as for `model_class._from_config`, for example `dtype` or `attn_implementation`.
    """
    with numbering_parameters() as numbering:
        skeleton = meta_model(model_class, config, **kwargs)
    numbers = numbering.of(skeleton)
    # Tied names have one number, so the source of a tie is made wherever one of its names is held.
    made = {**numbering.replaced(skeleton, numbers), **numbers}
    held = held_names(made, stages, local_stages)
    sharded: dict[int, Sharding] = {}
    writer: ShardWriter | None = None
    if tensor_parallel is not None:
        shards, writer = tensor_parallel.shards, tensor_parallel.shard_writer()
        sharded = {made[name]: shards[name] for name in held if name in shards}
    keep = {made[name] for name in held} - sharded.keys()
    del skeleton, numbering
    if seed is not None:
        torch.manual_seed(seed)
    try:
        with torch.device("cpu"), drawing_for_meta(writer), numbering_parameters(keep, sharded, writer) as numbering:
            model = model_class._from_config(copy.deepcopy(config), **kwargs)
    except NotImplementedError as error:  # also torch's error for copying out of a meta tensor
        raise NotImplementedError(
            f"cannot initialise only a part of {model_class.__name__}: that needs values that are not here ({error}); "
            "create it whole and pass it to penstock.initialize"
        ) from error
    if numbering.of(model) != numbers:
        raise NotImplementedError(
            f"cannot initialise only a part of {model_class.__name__}: it creates its parameters in another order on "
            "the meta device; create it whole and pass it to penstock.initialize"
        )
    strip_foreign(model, stages, local_stages)
    if writer is not None:
        leave_shards(model, writer.shard_of)
    return model


_DETERMINISTIC = frozenset({"constant_", "ones_", "zeros_", "eye_", "dirac_"})
# Random operations of which the shape says how many numbers they draw.
_DRAWN_BY_SHAPE = DRAWN_IN_PLACE.union(
    ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli"),
    ("dropout", "native_dropout"),
)


class _DrawForMeta(TorchDispatchMode):
    """Random operations on meta tensors draw what they would draw on real ones."""

    def __init__(self, scratch: Scratch, writer: ShardWriter | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._scratch = scratch
        self._writer = writer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._writer is not None and self._writer.write(func, args, kwargs):
            return args[0]
        if torch.Tag.nondeterministic_seeded in func.tags and _touches_meta(args, kwargs):
            name = func.overloadpacket.__name__
            if name not in _DRAWN_BY_SHAPE:
                raise NotImplementedError(
                    f"{name} draws a number of random numbers that depends on values of another stage"
                )
            real_args, real_kwargs = pytree.tree_map(self._real, (args, kwargs))
            func(*real_args, **real_kwargs)
        return func(*args, **kwargs)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            return self._scratch.like(value).fill_(1)  # a probability, where one is asked for
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        return value


def _touches_meta(args: Any, kwargs: Any) -> bool:
    return any(
        (isinstance(leaf, torch.Tensor) and leaf.is_meta) or (isinstance(leaf, torch.device) and leaf.type == "meta")
        for leaf in pytree.tree_leaves((args, kwargs))
    )


def _draw_into(
    scratch: Scratch, writer: ShardWriter | None, function: Callable[..., Any], random: bool
) -> Callable[..., Any]:
    """On meta tensors `torch.nn.init` returns early, and some of it draws by value (trunc_normal_): run it for real."""

    def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        whole = None if writer is None else writer.whole(tensor, overwritten=True)
        if whole is not None or random:
            function(scratch.like(tensor) if whole is None else whole, *args, **kwargs)
        return tensor

    return initialize


@contextlib.contextmanager
def drawing_for_meta(writer: ShardWriter | None = None) -> Iterator[None]:
    """Inside, initialising a meta tensor draws from the CPU's generator what initialising a real one would. Of those
    that `writer` watches, shards are kept."""
    functions: dict[str, Any] = initialization.TORCH_INIT_FUNCTIONS
    modules = [sys.modules[name] for name in initialization.TORCH_MODULES_TO_PATCH if name in sys.modules]
    scratch = Scratch()
    with contextlib.ExitStack() as undo:
        for name, original in list(functions.items()):
            wrapped = _draw_into(scratch, writer, original, random=name not in _DETERMINISTIC)
            undo.enter_context(mock.patch.dict(functions, {name: wrapped}))
            for module in modules:
                # A layer file may hold its own reference, from `from torch.nn.init import ...`.
                if getattr(module, name, None) is original:
                    undo.enter_context(mock.patch.object(module, name, wrapped))
        with _DrawForMeta(scratch, writer):
            yield


class Numbering:
    """Parameters by the order in which they were registered; `places`, the module and the name of each."""

    def __init__(self) -> None:
        self.places: list[tuple[nn.Module, str]] = []

    def of(self, model: nn.Module) -> dict[str, int]:
        """Number of each parameter of `model` by name, tied names with one number. Can be taken once."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        numbers = {name: parameter.penstock_number for name, parameter in parameters.items()}  # type: ignore[attr-defined]
        for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
            del parameter.penstock_number  # type: ignore[attr-defined]
        return numbers

    def replaced(self, model: nn.Module, numbers: dict[str, int]) -> dict[str, int]:
        """Number by name of parameters that are gone because others were computed from them (`weight_norm`)."""
        prefixes = {id(module): prefix for prefix, module in model.named_modules()}
        names = {}
        for number, (module, name) in enumerate(self.places):
            if id(module) in prefixes:
                full_name = f"{prefixes[id(module)]}.{name}".lstrip(".")
                if full_name not in numbers:
                    names[full_name] = number
        return names


@contextlib.contextmanager
def numbering_parameters(
    keep: Collection[int] | None = None,
    sharded: Mapping[int, Sharding] | None = None,
    writer: ShardWriter | None = None,
) -> Iterator[Numbering]:
    """Inside, parameters are numbered as they are registered. Those with numbers not in `keep` move to the meta device
    then (None: all stay); of those that are `sharded`, `writer` keeps a shard."""
    original = nn.Module.register_parameter
    numbering = Numbering()

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, "penstock_number"):
            # The model may register one object under two names, through a variable of its own.
            known = getattr(parameter, "penstock_moved", None)
            if known is None:
                number, known = len(numbering.places), parameter
                numbering.places.append((module, name))
                if keep is not None and number not in keep:
                    known = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
                    parameter.penstock_moved = known  # type: ignore[attr-defined]  # lives as long as the model's variable
                    if sharded and number in sharded:
                        assert writer is not None
                        writer.watch(known, sharded[number], parameter.data)
                known.penstock_number = number  # type: ignore[attr-defined]  # until Numbering.of
            parameter = known
        original(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_parameter):
        yield numbering
