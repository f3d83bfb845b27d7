"""Weights that a library keeps packed, in a few bits a number: linear layers, and stacks of experts.

They are recognised by the package of the class of a parameter, or of what unpacks it, optimum's by their attribute
`weight_qtype`, and marked: the core imports nothing of a library, and looks at `Record.packed` instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from penstock.modeling.instrumentation import absent_of, known_of, record_of

Model = TypeVar("Model")

# Packages of the classes of packed parameters that are known, and what transformers calls the methods that make them. A
# method that keeps packed numbers in plain buffers needs another way to find its layers.
LIBRARIES = frozenset({"bitsandbytes", "optimum", "torchao"})
METHODS = frozenset({"bitsandbytes", "bitsandbytes_experts", "quanto", "torchao"})


def mark_packed(model: Model) -> Model:
    """Mark the layers of a model that have packed weights. Returns the model. Raises NotImplementedError if what has
    packed weights is not known here, or is to be trained; for a model that is here as a whole also what
    `require_packed` raises."""
    if (method := quantization_method(model)) not in (None, *METHODS):
        raise NotImplementedError(
            f"this {type(model).__name__} is quantised by {method}, whose layers are not known here: use "
            f"{', '.join(sorted(METHODS))}, or load it unpacked where its library can (Mxfp4Config(dequantize=True))"
        )
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    for name, module in modules.items():
        if isinstance(module, ParametrizationList) and any(_library_of(child) in LIBRARIES for child in module):
            record_of(module).packed = PackedStack.of(module)
            continue
        tensors = [*module._parameters.values(), *(absent.tensor for absent in absent_of(module).values())]
        packed = [parameter for parameter in tensors if parameter is not None and _library_of(parameter) in LIBRARIES]
        if not packed and not hasattr(module, "weight_qtype"):  # optimum's layers pack their weights last
            continue
        inside, outside = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if not isinstance(inside, int) or not isinstance(outside, int):
            raise NotImplementedError(
                f"{name}, a {type(module).__name__}, has packed weights, but is no linear layer: leave it as it was "
                "(llm_int8_skip_modules, modules_to_not_convert)"
            )
        if any(parameter.requires_grad for parameter in packed):
            raise NotImplementedError(
                f"{name} has packed weights that require gradients, which cannot be trained: freeze the model "
                "(model.requires_grad_(False)) and add adapters"
            )
        record_of(module).packed = PackedLayer(inside, outside)
    if isinstance(model, nn.Module) and _are_loaded(modules.values()):
        require_packed(model, has_packed(model))
    return model


def has_packed(model: nn.Module) -> bool:
    """Whether a layer was marked of those that this rank has of a model."""
    return any(known_of(module).packed is not None for module in model.modules())


def require_packed(model: nn.Module, packed: bool) -> None:
    """Raise NotImplementedError if a model was quantised, but no layer was marked: `packed` says whether one was on
    any rank."""
    method = quantization_method(model)
    if method is not None and not packed:
        raise NotImplementedError(
            f"this {type(model).__name__} is quantised by {method}, but none of its layers has packed weights of a "
            f"kind that is known here ({', '.join(sorted(LIBRARIES))}): load it unpacked, or with another configuration"
        )


def _are_loaded(modules: Iterable[nn.Module]) -> bool:
    """Whether all weights are here: layers may be packed as they are loaded, and other stages hold some."""
    return not any(
        absent_of(module)
        or any(parameter is not None and parameter.is_meta for parameter in module._parameters.values())
        for module in modules
    )


def stacks_of(module: nn.Module) -> list[str]:
    """Names of the module's own parameters that are stacks of matrices, as those of experts are. The layers of torch
    that have weights of three dimensions are convolutions and the like."""
    if type(module).__module__.startswith("torch."):
        return []
    numbers = (
        (name, parameter)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point()
    )
    return [name for name, parameter in numbers if parameter.dim() == 3 and parameter.shape[0] > 1]


def quantization_method(model: Any) -> str | None:
    """What transformers quantised a model with, by its name there; None for any other model."""
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def _library_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def tensors_inside(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a parameter consists of: itself, or of a library's own kind its bytes and its scales."""
    if type(parameter) in (nn.Parameter, torch.Tensor):
        return [parameter]
    if hasattr(parameter, "__tensor_flatten__"):
        names, _ = parameter.__tensor_flatten__()
        return [inner for name in names for inner in tensors_inside(getattr(parameter, name))]
    attached = [tensor for _, _, tensor in _attached_to(parameter)]
    tensors = {tensor.data_ptr(): tensor for tensor in (parameter.detach().as_subclass(torch.Tensor), *attached)}
    return list(tensors.values())


def _attached_to(value: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """The tensors that a library has attached to an object, or to objects of its own there, by owner and name."""
    for name, inner in list(vars(value).items()):
        if isinstance(inner, torch.Tensor):
            yield value, name, inner
        elif _library_of(inner) in LIBRARIES and not isinstance(inner, nn.Module) and hasattr(inner, "__dict__"):
            yield from _attached_to(inner)


def _let_go(value: Any) -> None:
    for owner, name, tensor in _attached_to(value):
        if not tensor.is_meta:
            vars(owner)[name] = torch.empty(0, dtype=tensor.dtype)


@dataclass(frozen=True)
class PackedLayer:
    """Marks a linear layer with packed weights."""

    in_features: int
    out_features: int
    parameter = "weight"
    is_saved = True

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def stand_in(self, layer: nn.Module) -> nn.Module:
        """What takes the layer's place in a copy on the meta device."""
        tensors = (getattr(layer, name, None) for name in ("weight", "bias"))
        outlines = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
        return Unpacking(self.in_features, self.out_features, *outlines)

    def inside(self, layer: nn.Module) -> dict[nn.Parameter, list[torch.Tensor]]:
        return {parameter: tensors_inside(parameter) for parameter in layer.parameters(False)}

    def release(self, value: Any) -> None:
        """Let go of the tensors of a layer or a weight, which an optimizer, say, may hold."""
        _let_go(value)
        if isinstance(value, torch.Tensor) and not hasattr(value, "__tensor_flatten__"):
            value.data = torch.empty(0, dtype=value.dtype, device=value.device)


@dataclass(frozen=True)
class PackedStack:
    """Marks what torch keeps in the place of a parameter that bitsandbytes has packed: the packed parameter, and the
    module that unpacks it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter = "original"
    is_saved = False

    @classmethod
    def of(cls, stack: ParametrizationList) -> PackedStack:
        state: Any = next(child.quant_state for child in stack if _library_of(child) in LIBRARIES)
        return cls(tuple(state.shape), state.dtype)

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    def stand_in(self, stack: nn.Module) -> nn.Module:
        """What takes its place in a copy on the meta device."""
        packed: Any = vars(stack).get("original", stack._parameters.get("original"))
        outline = nn.Parameter(torch.empty(packed.shape, dtype=packed.dtype, device="meta"), requires_grad=False)
        return ParametrizationList([UnpackingStack(self.shape, self.dtype)], outline, unsafe=True)

    def inside(self, stack: nn.Module) -> dict[nn.Parameter, list[torch.Tensor]]:
        attached = [tensor for child in stack.children() for _, _, tensor in _attached_to(child)]
        return {parameter: [parameter.detach(), *attached] for parameter in stack.parameters(False)}

    def release(self, value: Any) -> None:
        for child in value.children():
            _let_go(child)


class UnpackingStack(nn.Module):
    """Stands for what unpacks a stack: gives a weight of its shape, in memory that is there while it is used."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.new_empty(self.shape, dtype=self.dtype)


class Unpacking(nn.Linear):
    """Stands for a layer with packed weights: unpacks the weight for each product, in memory that it has only then."""

    def __init__(self, in_features: int, out_features: int, weight: Any, bias: Any = None) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(input, self.out_features)  # type: ignore[no-untyped-call]  # torch's has no types
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """A linear layer's product, of weights that are there while they are used."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.in_features = input.shape[-1]
        return nn.functional.linear(input, input.new_empty(out_features, input.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ gradient.new_empty(gradient.shape[-1], ctx.in_features), None
