"""Experts in 4 bits. transformers keeps the experts of a layer as one stacked parameter, which its quantisation leaves
as it is; bitsandbytes can pack such a parameter, and unpacks it whenever it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from penstock.modeling.packed_layers import stacks_of

METHOD = "bitsandbytes_experts"
BLOCK = 64  # numbers with one scale


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
        return super().param_needs_quantization(model, param_name, **kwargs) or self._is_packed(model, param_name)

    def get_quantize_ops(self) -> Any:
        return _Pack(self)

    def is_serializable(self) -> bool:
        return False  # transformers could not read it

    def _is_packed(self, model: PreTrainedModel, param_name: str) -> bool:
        module, name = get_module_from_name(model, param_name)
        return name in stacks_of(module) and should_convert_module(param_name, self.modules_to_not_convert)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit, replace_parameter_4bit_prequantized

        config = self.quantization_config
        for path, module in list(model.named_modules()):
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, LoadedStack):
                    setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
                    state = parameter.quant_state.as_dict(packed=True)
                    replace_parameter_4bit_prequantized(module, name, state, parameter.device)
                elif self._is_packed(model, f"{path}.{name}"):  # not loaded: initialised, or on another stage
                    replace_parameter_4bit(module, name, config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_type)
        return super()._process_model_after_weight_loading(model, **kwargs)


class _Pack(Bnb4bitQuantize):  # type: ignore[misc]  # a library without types
    """Packs what was loaded for one entry of the model: the weight of a linear layer, or a stack of experts."""

    def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, Any]:
        stacks = {name for name in input_dict if self.hf_quantizer._is_packed(model, name)}
        plain = {name: value for name, value in input_dict.items() if name not in stacks}
        found: dict[str, Any] = super().convert(plain, model=model, **kwargs)
        for name in stacks:
            value = input_dict.pop(name)
            found[name] = _packed(value[0] if isinstance(value, list) else value, self.hf_quantizer.quantization_config)
        return found


def _packed(stack: torch.Tensor, config: BitsAndBytesConfig) -> LoadedStack:
    """A stack as bitsandbytes packs it, one matrix after another: on a CPU it needs several times the memory of what it
    is given. The scales are quantised for all matrices together, as they would be."""
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise

    matrices = stack if stack[0].numel() % BLOCK == 0 else stack[None]
    packed, states = zip(
        *(quantize_4bit(one, quant_type=config.bnb_4bit_quant_type, blocksize=BLOCK) for one in matrices), strict=True
    )
    state = states[0]
    state.shape, state.absmax = stack.shape, torch.cat([one.absmax for one in states])
    if config.bnb_4bit_use_double_quant:
        state.nested, state.offset = True, state.absmax.mean()
        state.absmax, state.state2 = quantize_blockwise(state.absmax - state.offset, blocksize=256)
    found = LoadedStack(torch.cat(packed), requires_grad=False)
    found.quant_state = state
    return found


class LoadedStack(nn.Parameter):
    """A packed stack, until the model is loaded; and how it is unpacked."""

    quant_state: Any
