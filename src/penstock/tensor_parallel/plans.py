"""Tensor-parallel plans: for each layer how its weights are sharded. Data, one entry per family.

Of other families transformers' own plans are used; the names of the styles are its.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from penstock.modeling.libraries import configuration_of
from penstock.modeling.placeholders.ghosts import stripped_tensors
from penstock.tensor_parallel.layers import COLUMN, EXPERTS, GATHERED, ROW, ROW_OF_WHOLE, VOCABULARY


class Style(NamedTuple):
    """A way in which a plan may shard a layer."""

    # How its weight is sharded: by `"out"` or `"in"` features, by `"rows"` or `"columns"` of a table, or not (`""`);
    # `"part"`: it is whole, but used on shards, so that each rank has a part of its gradient.
    along: str = ""
    layer: type | None = None
    blocks: int = 1


STYLES = {
    "colwise": Style("out", COLUMN),
    "packed_colwise": Style("out", COLUMN, 2),
    "rowwise": Style("in", ROW),
    "packed_rowwise": Style("in", ROW, 2),
    "rowwise_split_input": Style("in", ROW_OF_WHOLE),
    "embedding_colwise": Style("columns"),
    "colwise_gather_output": Style("out", GATHERED),
    "colwise_rep": Style("out", GATHERED),
    "embedding_rowwise": Style("rows", VOCABULARY),
    "replicated_with_grad_allreduce": Style("part"),
    "moe_tp_experts": Style(layer=EXPERTS),
    "replicate": Style(),
}


@dataclass(frozen=True)
class TensorParallelPlan:
    """How a family's weights are sharded.

    Names are those of modules or parameters, with `*` for a number between dots, with or without the prefix of the base
    model (`transformer.`).

    Attributes:
        styles: the style of each layer: `colwise` (output features; the input is whole), `rowwise` (input features; the
            outputs are summed), `packed_colwise` (two fused weights), `moe_tp_experts` (the module of all experts,
            beside its parameters), `replicated_with_grad_allreduce` (whole, but used on shards, such as a norm of each
            head), `rowwise_split_input` (row-wise, of a whole input), `embedding_colwise` (a table with a column for
            each head), `embedding_rowwise` and `colwise_gather_output` (by vocabulary), `replicate`.
        fused: of a `colwise` layer that fuses several weights along its output features, how many.
        divided: of a module, the attributes that count features or heads of this rank.
        by_heads: of a module that has `num_heads`, the arguments that are made for all heads, which it is given by
            name, with the dimension in which the heads stand, alone or within the samples.
        vocabulary: whether input embeddings and the language-model head are sharded by vocabulary.
    """

    styles: Mapping[str, str]
    fused: Mapping[str, int] = field(default_factory=dict)
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_heads: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    vocabulary: bool = True

    def __post_init__(self) -> None:
        for name, style in self.styles.items():
            if style not in STYLES:
                raise ValueError(f"the style of {name!r} is {style!r}, but must be one of {', '.join(STYLES)}")


def _by_layer(prefix: str, colwise: str, rowwise: str) -> dict[str, str]:
    """The styles of the layers below a name that are sharded by output features, and by input features."""
    styles = {"colwise": colwise, "rowwise": rowwise}
    return {f"{prefix}.{name}": style for style, names in styles.items() for name in names.split()}


_BERT = TensorParallelPlan(
    styles={
        **_by_layer("encoder.layer.*.attention", "self.query self.key self.value", "output.dense"),
        **_by_layer("encoder.layer.*", "intermediate.dense", "output.dense"),
    },
    divided={"encoder.layer.*.attention.self": ("num_attention_heads", "all_head_size")},
)

_T5_ATTENTIONS = (
    "encoder.block.*.layer.0.SelfAttention",
    "decoder.block.*.layer.0.SelfAttention",
    "decoder.block.*.layer.1.EncDecAttention",
)
_T5 = TensorParallelPlan(
    styles={
        "encoder.embed_tokens": "embedding_rowwise",
        "decoder.embed_tokens": "embedding_rowwise",
        **{name: style for attention in _T5_ATTENTIONS for name, style in _by_layer(attention, "q k v", "o").items()},
        # Each rank has the bias of its own heads, also where the first block hands it on.
        "encoder.block.*.layer.0.SelfAttention.relative_attention_bias": "embedding_colwise",
        "decoder.block.*.layer.0.SelfAttention.relative_attention_bias": "embedding_colwise",
        **_by_layer("encoder.block.*.layer.1.DenseReluDense", "wi wi_0 wi_1", "wo"),
        **_by_layer("decoder.block.*.layer.2.DenseReluDense", "wi wi_0 wi_1", "wo"),
    },
    divided=dict.fromkeys(_T5_ATTENTIONS, ("n_heads", "inner_dim")),
)

PLANS: dict[str, TensorParallelPlan] = {
    "gpt2": TensorParallelPlan(
        styles=_by_layer("h.*", "attn.c_attn mlp.c_fc", "attn.c_proj mlp.c_proj"),
        fused={"h.*.attn.c_attn": 3},
        divided={"h.*.attn": ("split_size", "num_heads")},
    ),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "data2vec-text", "roberta-prelayernorm"),
        _BERT,
    ),
    "bloom": TensorParallelPlan(
        # `query_key_value` is head after head, each with its query, key and value.
        styles=_by_layer(
            "h.*", "self_attention.query_key_value mlp.dense_h_to_4h", "self_attention.dense mlp.dense_4h_to_h"
        ),
        divided={"h.*.self_attention": ("num_heads",)},
        by_heads={"h.*.self_attention": {"alibi": 0}},
    ),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "opt": TensorParallelPlan(
        styles={
            **_by_layer("decoder.layers.*.self_attn", "q_proj k_proj v_proj", "out_proj"),
            **_by_layer("decoder.layers.*", "fc1", "fc2"),
        },
        divided={"decoder.layers.*.self_attn": ("num_heads", "embed_dim")},
    ),
    "vit": TensorParallelPlan(
        styles={
            **_by_layer("layers.*.attention", "q_proj k_proj v_proj", "o_proj"),
            **_by_layer("layers.*.mlp", "fc1", "fc2"),
        },
        divided={"layers.*.attention": ("num_attention_heads",)},
    ),
}

_registered: dict[type | str, TensorParallelPlan] = {}


def register_tensor_parallel_plan(model: type[nn.Module] | str, plan: TensorParallelPlan | Mapping[str, str]) -> None:
    """Say how the weights of a family are sharded, where Penstock and transformers have no plan, or instead of theirs.

    Args:
        model: a model class (its subclasses follow it), or a `config.model_type` such as `"gpt2"`.
        plan: the plan, or only its `styles`. Every rank registers the same one, before `initialize()`.

    Raises:
        TypeError: `model` is neither.
        ValueError: the plan has a style that does not exist.
    """
    if not isinstance(model, (type, str)):
        raise TypeError(f"a plan is registered for a model class or a model type, not {type(model).__name__}")
    _registered[model] = plan if isinstance(plan, TensorParallelPlan) else TensorParallelPlan(dict(plan))


def plan_of(model: nn.Module) -> TensorParallelPlan:
    """The plan of a model: one registered for its class or its type, Penstock's, or transformers' own."""
    for kind in type(model).__mro__:
        if kind in _registered:
            return _registered[kind]
    family = str(getattr(configuration_of(model), "model_type", ""))
    if family in _registered:
        return _registered[family]
    if family in PLANS:
        return PLANS[family]
    own: dict[str, Any] = dict(getattr(model, "_tp_plan", None) or {})
    name = type(model).__name__
    how = (
        f'pass one with penstock.register_tensor_parallel_plan("{family}", {{"layers.*.q_proj": "colwise", ...}}), '
        "or use tensor_parallel_size 1 (see docs/tensor_parallel.md)"
    )
    if not any("*" in pattern for pattern in own):
        raise NotImplementedError(f"there is no tensor-parallel plan for {name} (model type {family!r}): {how}")
    unknown = sorted({style for style in own.values() if style not in STYLES})
    if unknown:
        raise NotImplementedError(
            f"transformers' tensor-parallel plan for {name} uses {', '.join(unknown)}, which is not supported: {how}"
        )
    return TensorParallelPlan(own)


def layer_styles(model: nn.Module, plan: TensorParallelPlan) -> dict[str, Style]:
    """The style of each module and parameter that the plan names, and of the vocabulary's layers."""
    modules = {module: name for name, module in model.named_modules()}
    # A parameter by itself is a stack of weights in a module of its own, not a layer's weight or bias.
    alone = {name for name in whole_shapes(model) if name.rpartition(".")[2] not in ("weight", "bias")}
    names = alone.union(modules.values())
    styles = {name: STYLES[style] for pattern, style in plan.styles.items() for name in matching(model, pattern, names)}
    vocabulary = getattr(configuration_of(model), "vocab_size", None)
    for getter, kind, style in (
        ("get_input_embeddings", nn.Embedding, "embedding_rowwise"),
        ("get_output_embeddings", nn.Linear, "colwise_gather_output"),
    ):
        module = or_none(getattr(model, getter, None))
        if module not in modules or not isinstance(module, kind):
            continue
        rows = getattr(module, "num_embeddings", None) or getattr(module, "out_features", None)
        if not plan.vocabulary:
            styles.pop(modules[module], None)
        elif rows == vocabulary:
            styles[modules[module]] = STYLES[style]
    return styles


def or_none(getter: Callable[[], Any] | None) -> Any:
    try:
        return None if getter is None else getter()
    except (NotImplementedError, AttributeError):
        return None


def matching(model: nn.Module, pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, with or without the base model's prefix, sorted."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return sorted(
        name for name in names if expression.fullmatch(name) or expression.fullmatch(name.removeprefix(prefix))
    )


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    here = {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=False)}
    return {**{name: tuple(tensor.shape) for name, tensor in stripped_tensors(model)}, **here}
