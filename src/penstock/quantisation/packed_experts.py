"""Experts in 4 bits.

transformers keeps the experts of a layer as one stacked parameter, which its quantisation leaves as it is; bitsandbytes
can pack such a parameter, and unpacks it whenever it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from penstock.modeling.packed_layers import stacks_of

METHOD = "bitsandbytes_experts"
BLOCK = 64  # numbers with one scale
PART = 2**16  # numbers that are packed at once: on a CPU bitsandbytes needs up to 20 bytes for each meanwhile


class PackedExpertsConfig(BitsAndBytesConfig):  # type: ignore[misc]  # a library without types
    """A `BitsAndBytesConfig` in 4 bits that packs stacked experts, too.

    For any `from_pretrained`, also that of transformers on one process. A layer that is named in
    `llm_int8_skip_modules` keeps its experts as they are.

    Args:
        load_in_4bit: must be True, as bitsandbytes packs no experts in 8 bits.
        kwargs: as for `BitsAndBytesConfig`.
    """

    def __init__(self, load_in_4bit: bool = True, **kwargs: Any) -> None:
        super().__init__(load_in_4bit=load_in_4bit, **kwargs)
        if not self.load_in_4bit:
            raise ValueError("experts are packed in 4 bits only: use load_in_4bit=True, or BitsAndBytesConfig")
        self.quant_method = METHOD


@register_quantizer(METHOD)
class PackedExpertsQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]  # a library without types
    """transformers asks it about each tensor that it loads, which is packed before the next one is read."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return super().param_needs_quantization(model, param_name, **kwargs) or self.packs(model, param_name)

    def update_weight_conversions(self, *args: Any) -> list[Any]:  # the rules, and in later versions the model
        conversions: list[Any] = super().update_weight_conversions(*args)
        for conversion in conversions:
            if _treats_each_matrix_alone(conversion):
                conversion.__class__ = _MatrixByMatrix
        return conversions

    def get_quantize_ops(self) -> Any:
        return _Pack(self)

    def is_serializable(self) -> bool:
        return False  # transformers could not read it

    def packs(self, model: PreTrainedModel, param_name: str) -> bool:
        """Whether this parameter is a stack that is packed."""
        module, name = get_module_from_name(model, param_name)
        return name in stacks_of(module) and should_convert_module(param_name, self.modules_to_not_convert)

    def pack(self, model: PreTrainedModel, param_name: str, pieces: Iterable[torch.Tensor]) -> LoadedStack:
        """The stack whose matrices are in `pieces`. Raises ValueError if the model has another shape for it."""
        return _packed(pieces, param_name, model.get_parameter(param_name).shape, self.quantization_config)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit, replace_parameter_4bit_prequantized

        config = self.quantization_config
        for path, module in list(model.named_modules()):
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, LoadedStack):
                    setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
                    state = parameter.quant_state.as_dict(packed=True)
                    replace_parameter_4bit_prequantized(module, name, state, parameter.device)
                elif self.packs(model, f"{path}.{name}"):  # not loaded: initialised, or on another stage
                    replace_parameter_4bit(module, name, config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_type)
        return super()._process_model_after_weight_loading(model, **kwargs)


def _treats_each_matrix_alone(conversion: Any) -> bool:
    """Whether a rule of transformers stacks separate matrices, and does no more along that dimension."""
    if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) > 1:
        return False
    first, *others = conversion.operations
    stacks = isinstance(first, MergeModulelist) and first.dim == 0
    return stacks and all(isinstance(other, Concatenate) and other.dim > 0 for other in others)


class _MatrixByMatrix(WeightConverter):  # type: ignore[misc]  # a library without types
    """Makes a stack of matrices that a checkpoint has apart. transformers would read all of them, and copy them twice;
    here each is packed before the next one is read."""

    __slots__ = ()

    def convert(
        self, layer_name: str, model: Any = None, hf_quantizer: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        lengths = {len(matrices) for matrices in self.collected_tensors.values()}
        if len(lengths) > 1 or hf_quantizer is None or not hf_quantizer.packs(model, layer_name):
            converted: dict[str, torch.Tensor] = super().convert(
                layer_name, model=model, hf_quantizer=hf_quantizer, **kwargs
            )
            return converted
        numbers = math.prod(model.get_parameter(layer_name).shape[1:])
        pieces = self._pieces(lengths.pop(), BLOCK // math.gcd(BLOCK, numbers), layer_name, model=model, **kwargs)
        return {layer_name: hf_quantizer.pack(model, layer_name, pieces)}

    def _pieces(self, num_matrices: int, at_once: int, layer_name: str, **kwargs: Any) -> Iterator[torch.Tensor]:
        """The matrices of the stack in order, as few at once as make whole blocks."""
        tensors = dict(self.collected_tensors)
        for start in range(0, num_matrices, at_once):
            for source, matrices in tensors.items():
                self.collected_tensors[source] = matrices[start : start + at_once]
            yield from super().convert(layer_name, **kwargs).values()


class _Pack(Bnb4bitQuantize):  # type: ignore[misc]  # a library without types
    """Packs what was loaded for one entry of the model: the weight of a linear layer, or a stack of experts."""

    def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, Any]:
        stacks = {name for name in input_dict if self.hf_quantizer.packs(model, name)}
        plain = {name: value for name, value in input_dict.items() if name not in stacks}
        converted: dict[str, Any] = super().convert(plain, model=model, **kwargs)
        for name in stacks:
            value = input_dict.pop(name)
            converted[name] = self.hf_quantizer.pack(model, name, value if isinstance(value, list) else [value])
        return converted


def _packed(pieces: Iterable[torch.Tensor], name: str, shape: torch.Size, config: BitsAndBytesConfig) -> LoadedStack:
    """A stack as bitsandbytes packs it, but part by part. The scales are quantised for all parts together, as they
    would be."""
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise

    packed, num_packed = torch.empty(0), 0
    scales: list[torch.Tensor] = []
    for part in _parts(pieces, name, shape):
        of_part, state = quantize_4bit(part, quant_type=config.bnb_4bit_quant_type, blocksize=BLOCK)
        if not scales:
            packed = of_part.new_empty((shape.numel() + 1) // 2, 1)
        packed[num_packed : num_packed + len(of_part)] = of_part
        num_packed += len(of_part)
        scales.append(state.absmax)
    state.shape, state.absmax = shape, torch.cat(scales)
    if config.bnb_4bit_use_double_quant:
        state.nested, state.offset = True, state.absmax.mean()
        state.absmax, state.state2 = quantize_blockwise(state.absmax - state.offset, blocksize=256)
    stack = LoadedStack(packed, requires_grad=False)
    stack.quant_state = state
    return stack


def _parts(pieces: Iterable[torch.Tensor], name: str, shape: torch.Size) -> Iterator[torch.Tensor]:
    """The numbers of a stack in their order, as many at once as are packed together."""

    def misfit(what: str) -> ValueError:
        return ValueError(
            f"the checkpoint does not fit the model: {name}: {what} in the checkpoint, {list(shape)} in the model"
        )

    num_matrices = 0
    for piece in pieces:
        if piece.shape[1:] != shape[1:]:
            raise misfit(f"matrices of {list(piece.shape[1:])}")
        num_matrices += len(piece)
        if num_matrices <= shape[0]:
            yield from piece.reshape(-1).split(PART)
        del piece  # before the next one is made
    if num_matrices != shape[0]:
        raise misfit(f"{num_matrices} matrices")


class LoadedStack(nn.Parameter):
    """A packed stack, until the model is loaded; and how it is unpacked."""

    quant_state: Any
