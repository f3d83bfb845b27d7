"""Which modules and parameters of a model a plan's patterns mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from penstock.modeling.ghost import stripped_tensors

from .plans import GATHERED_STYLES, VOCABULARY_STYLES, TensorParallelPlan


def layer_styles(model: nn.Module, plan: TensorParallelPlan) -> dict[str, str]:
    """The style of each module and parameter that the plan names, and of the vocabulary's layers."""
    modules = {name for name, _ in model.named_modules()}
    names = modules | {name for name in whole_shapes(model) if _parent_is_experts(model, name)}
    styles: dict[str, str] = {}
    for pattern, found in matching(model, list(plan.styles), names).items():
        styles.update(dict.fromkeys(found, plan.styles[pattern]))
    by_identity = {id(module): name for name, module in model.named_modules()}
    vocabulary = getattr(model.config, "vocab_size", None)
    for getter, kind, style in (
        ("get_input_embeddings", nn.Embedding, VOCABULARY_STYLES[0]),
        ("get_output_embeddings", nn.Linear, GATHERED_STYLES[0]),
    ):
        module = or_none(getattr(model, getter, None))
        name = by_identity.get(id(module))
        if name is None or not isinstance(module, kind):
            continue
        rows = getattr(module, "num_embeddings", None) or getattr(module, "out_features", None)
        if not plan.vocabulary:
            styles.pop(name, None)
        elif rows == vocabulary:
            styles[name] = style
    return styles


def or_none(getter: Callable[[], Any] | None) -> Any:
    try:
        return None if getter is None else getter()
    except (NotImplementedError, AttributeError):
        return None


def _parent_is_experts(model: nn.Module, name: str) -> bool:
    """Whether a parameter is a stack of weights in a module of its own, not a layer's weight or bias."""
    return name.rpartition(".")[2] not in ("weight", "bias")


def matching(model: nn.Module, patterns: Sequence[str], names: set[str]) -> dict[str, list[str]]:
    """For each pattern, the names it matches, with or without the base model's prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    for pattern in patterns:
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name in sorted(names):
            if expression.fullmatch(name) or expression.fullmatch(name.removeprefix(prefix)):
                found[pattern].append(name)
    return found


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    here = {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=False)}
    return {**{name: tuple(tensor.shape) for name, tensor in stripped_tensors(model)}, **here}
