"""Sharding a model's weights: which parameter how, checked for the whole model, done for the part held here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from penstock.layout.layout import Layout
from penstock.modeling.instrumentation import record_of
from penstock.modeling.libraries import configuration_of, has_adapters
from penstock.modeling.placeholders.ghosts import replace_parameters, stripped_tensors
from penstock.modeling.sharding import GroupGuard, MakeSharding, Sharding
from penstock.modeling.weights.whole import packed_weights, take_shards, unit_of
from penstock.tensor_parallel.dropout import ShardedDropout
from penstock.tensor_parallel.layers import COLUMN, GATHERED, HEAD, VOCABULARY, extend, extend_by_heads
from penstock.tensor_parallel.loading import ShardKeeper, ShardLoading
from penstock.tensor_parallel.loss import ShardedLoss
from penstock.tensor_parallel.plans import Style, layer_styles, matching, or_none, plan_of, whole_shapes
from penstock.tensor_parallel.region import Collectives, Region


def sharding_of(layout: Layout) -> MakeSharding | None:
    """What makes the sharding of a model for a layout; None for one without tensor parallelism."""
    return TensorParallel if layout.tensor_parallel_size > 1 else None


class TensorParallel:
    """The sharding of one model over a tensor-parallel group. Made from the whole model, alike on every rank.

    Attributes:
        shards: of every parameter of the unsplit model that is sharded, by each of its names, how.
        partial: names of whole parameters that are used on shards, so that each rank has a part of their gradient.
    """

    def __init__(self, model: nn.Module, index: int, size: int, aliases: Sequence[tuple[str, ...]]) -> None:
        if has_adapters(model):
            raise NotImplementedError(
                "tensor_parallel_size works on the model's own layers, and PEFT has put adapters around some: leave it "
                "out, or merge the adapters first"
            )
        if packed_weights(model):
            raise NotImplementedError(
                "tensor_parallel_size cannot shard the packed weights of a quantised model: leave one of the two out"
            )
        self.region = Region(index, size)
        self._plan = plan_of(model)
        self._styles = layer_styles(model, self._plan)
        self._shapes = whole_shapes(model)
        self.shards: dict[str, Sharding] = {}
        self.partial: set[str] = set()
        self._find_shards(model, aliases)
        self._check(model)
        self._loss = ShardedLoss(self.region, int(getattr(configuration_of(model), "vocab_size", 0) or 0))
        self._sharded_losses: set[str] = set()

    @property
    def index(self) -> int:
        return self.region.index

    @property
    def size(self) -> int:
        return self.region.size

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self

    def apply(self, model: nn.Module, stage_of: Mapping[str, int]) -> None:
        """Replace the weights of `model` by this rank's shards, in place, and adapt its layers to them.

        The layers of ghosts are made ready, too, for when this rank holds them.

        `Parameter` objects keep their identity, so an optimizer that holds them goes on working; but for those whose
        shards `leave_shards` left, which were meta tensors.
        """
        shards = take_shards(model)
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        done: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in shards:
                if parameter not in replaced:  # under the first of its names
                    replaced[parameter] = nn.Parameter(shards[name], parameter.requires_grad)
            elif name in self.shards and id(parameter) not in done:
                done.add(id(parameter))
                parameter.grad = None
                parameter.data = self.shards[name].take(parameter.data, self.region.index, self.size)
        replace_parameters(model, lambda parameter: replaced.get(parameter, parameter))
        for name, placeholder in list(stripped_tensors(model)):
            if name in self.shards and id(placeholder) not in done:
                done.add(id(placeholder))
                owner, _, attribute = name.rpartition(".")
                part = self.shards[name].take(placeholder, self.region.index, self.size)
                vars(model.get_submodule(owner))[attribute] = part
        record_of(model).tensor_parallel = self
        for name, style in self._styles.items():
            if style.layer is None or name in self._shapes:
                continue
            module = model.get_submodule(name)
            if unit_of(name, stage_of) is None:
                raise NotImplementedError(
                    f"the layer {name} of {type(model).__name__} is sharded by its tensor-parallel plan, but it stands "
                    "outside of all units, on every stage; leave it out of the plan"
                )
            if isinstance(module, Conv1D) and style.layer is COLUMN:
                module.nf //= self.size
            is_head = module is or_none(getattr(model, "get_output_embeddings", None))
            extend(module, HEAD if is_head and style.layer is GATHERED else style.layer, self.region)
        names = [name for name, _ in model.named_modules()]
        for pattern, attributes in self._plan.divided.items():
            for module in map(model.get_submodule, matching(model, pattern, names)):
                for attribute in attributes:
                    setattr(module, attribute, getattr(module, attribute) // self.size)
        for pattern, arguments in self._plan.by_heads.items():
            for module in map(model.get_submodule, matching(model, pattern, names)):
                extend_by_heads(module, arguments, self.region)
        self._loss.install(model)

    def connect(self, group: dist.ProcessGroup, device: torch.device, board: GroupGuard) -> None:
        """From here on the layers exchange through a process group."""
        self.region.collectives = Collectives(group, device, board)

    def disconnect(self) -> None:
        """Give up the group."""
        self.region.collectives = None

    def shard_writer(self) -> ShardKeeper:
        """Keeps this rank's shards of weights that are initialised."""
        return ShardKeeper(self.index, self.size)

    def shard_reader(self, model: PreTrainedModel, names: Collection[str]) -> ShardLoading:
        """Reads this rank's shards of the weights `names` from a checkpoint."""
        return ShardLoading(model, names, self)

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The unsplit model's shape of the tensor `name`."""
        return self._shapes.get(name, tuple(shape))

    # -- a forward -------------------------------------------------------------------------------------------------

    def refuse(self, inputs: Mapping[str, Any], config: PretrainedConfig | None) -> None:
        """Raise NotImplementedError for a forward whose outputs would not be the unsplit model's."""
        asked = inputs.get("output_attentions")
        if asked or (asked is None and getattr(config, "output_attentions", False)):
            raise NotImplementedError(
                f"with tensor_parallel_size {self.size} each rank has the attentions of its own heads only; leave out "
                "output_attentions"
            )

    def run(self, digest: str, draws: bool, own_loss: bool, forward: Callable[[], Any]) -> Any:
        """Run a forward of a plan.

        Args:
            digest: tells the plan from others.
            draws: whether it draws random numbers.
            own_loss: whether the model's own loss, a single mean, is trained on. If it is given the head's very output,
                nobody needs whole logits: they then come as a distributed tensor, of which this rank has a shard. The
                first forward of a plan has them gathered, and shows whether that is so.
        """
        region, loss = self.region, self._loss
        region.around = partial(ShardedDropout, region) if draws else None
        own_loss = own_loss and torch.is_grad_enabled()
        region.keep_logits_sharded = own_loss and digest in self._sharded_losses
        loss.calls = loss.direct_calls = 0
        loss.is_trained = own_loss
        try:
            output = forward()
            if region.keep_logits_sharded:
                if loss.direct_calls != 1:
                    raise RuntimeError(
                        "the model computed its loss differently than in an earlier forward with the same kind of input"
                        ": let it compute the same loss for inputs of one kind, or leave tensor_parallel_size out"
                    )
                output["logits"] = region.ready.sharded_by_last_dimension(output["logits"])
            elif own_loss and loss.calls == loss.direct_calls == 1 and isinstance(output, Mapping):
                self._sharded_losses.add(digest)
            return output
        finally:
            region.keep_logits_sharded = loss.is_trained = False
            region.logits = None

    # -- what is sharded how -------------------------------------------------------------------------------------------

    def _find_shards(self, model: nn.Module, aliases: Sequence[tuple[str, ...]]) -> None:
        shardings: dict[str, Sharding] = {}
        for name, style in self._styles.items():
            if name in self._shapes:  # a parameter by itself (experts)
                shardings[name] = _sharding_of_experts(model, name, style, self._shapes[name])
                continue
            module = model.get_submodule(name)
            for parameter in ("weight", "bias"):
                full = f"{name}.{parameter}"
                if full not in self._shapes:
                    continue
                if style.along == "part":
                    self.partial.add(full)
                elif (shard := _sharding_of(module, style, parameter, self._fused(model, name))) is not None:
                    shardings[full] = shard
        for names in aliases:
            kinds = {shardings[name] for name in names if name in shardings}
            if len(kinds) > 1:
                raise NotImplementedError(
                    f"{', '.join(names)} are tied, but the plan shards them differently"
                    ": give them one style in the plan"
                )
            for name in names if kinds else ():
                if name not in shardings and name.endswith(".weight") and model.get_submodule(name.rpartition(".")[0]):
                    raise NotImplementedError(
                        f"{name} is tied to {', '.join(set(names) & shardings.keys())}, which the tensor-parallel plan "
                        f"shards, but it has no rule for {name}; give it one, or a plan with vocabulary=False"
                    )
                self.shards[name] = next(iter(kinds))
        self.shards.update(shardings)

    def _fused(self, model: nn.Module, name: str) -> int:
        """How many weights a layer fuses."""
        return next((count for pattern, count in self._plan.fused.items() if matching(model, pattern, [name])), 1)

    def _check(self, model: nn.Module) -> None:
        """Refuse a size that does not divide what is sharded."""
        whole, size = configuration_of(model), self.size
        config = None if whole is None else whole.get_text_config()
        quantities: dict[str, int] = {}
        entries = {"attention heads": "num_attention_heads", "key-value heads": "num_key_value_heads"}
        for what, entry in entries.items():
            if isinstance(count := getattr(config, entry, None), int):
                quantities[what] = count
        for name, shard in self.shards.items():
            shape = self._shapes[name]
            width = shape[shard.dim % len(shape)] // shard.blocks
            is_vocabulary = self._styles.get(name.rpartition(".")[0], Style()).layer in (GATHERED, VOCABULARY)
            quantities["entries in its vocabulary" if is_vocabulary else f"features to shard in {name}"] = width
        wrong = {what: count for what, count in quantities.items() if count % size}
        if not wrong:
            return
        what, count = next(iter(wrong.items()))
        common = math.gcd(*quantities.values())
        fitting = [number for number in range(1, common + 1) if common % number == 0]
        hint = ""
        if "vocabulary" in what:
            more = -(-count // size) * size
            hint = (
                f"; or resize the model's vocabulary first (model.resize_token_embeddings({more})), or register a plan "
                "with vocabulary=False"
            )
        raise ValueError(
            f"tensor_parallel_size is {size}, but {type(model).__name__} has {count} {what}, which {size} does not "
            f"divide: sizes that would do are {fitting}{hint}"
        )


def _sharding_of(module: nn.Module, style: Style, parameter: str, fused: int) -> Sharding | None:
    """How a layer's weight or bias is sharded; None for one that stays whole."""
    transposed, blocks = isinstance(module, Conv1D), max(style.blocks, fused)
    if style.along == "out":
        return Sharding(1 if transposed and parameter == "weight" else 0, blocks)
    if style.along == "in" and parameter != "bias":
        return Sharding(0 if transposed else 1, blocks)
    if style.along == "columns":
        return Sharding(1)
    return Sharding(0) if style.along == "rows" else None


def _sharding_of_experts(model: nn.Module, name: str, style: Style, shape: tuple[int, ...]) -> Sharding:
    """How a stack of experts' weights [experts, out, in] is sharded."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if len(shape) != 3 or getattr(owner, "is_transposed", False):
        raise NotImplementedError(
            f"the tensor-parallel plan of {type(model).__name__} shards {name} of shape {list(shape)}; only stacks of "
            "experts' weights of shape [experts, out, in] can be sharded"
        )
    return Sharding(1 if style.along == "out" else 2, style.blocks)
