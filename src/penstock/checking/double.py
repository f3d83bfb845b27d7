"""Double precision for a comparison: there a difference is a difference, and not rounding."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from penstock.checking.copies import copied
from penstock.checking.reasons import inputs_of_forward
from penstock.modeling.libraries import configuration_of
from penstock.nested import map_tensors

# Attributes and configuration entries that hold a probability or an amplitude of noise.
NOISE = re.compile(r"drop|jitter|noise|mask_(time|feature)_prob|apply_spec_augment")


@contextlib.contextmanager
def kept_in_double() -> Iterator[None]:
    """Keep transformers from rounding double precision to single inside a model.

    Its losses and attentions raise half precision by calls that round doubles, differently for one sample than for a
    batch of it, which would hide whether the pipeline itself is exact.
    """
    rounding, converting = torch.Tensor.float, torch.Tensor.to

    def keep(self: torch.Tensor, **options: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else rounding(self, **options)

    def convert(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not options and self.dtype == torch.float64 and args == (torch.float32,):
            return self
        if not options and self.dtype in (torch.float64, torch.complex128) and args == (torch.complex64,):
            return converting(self, torch.complex128)
        return converting(self, *args, **options)

    def normalising(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def normalise(input: torch.Tensor, *args: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
            dtype = None if input.dtype == torch.float64 and dtype == torch.float32 else dtype
            return original(input, *args, dtype=dtype, **options)

        return normalise

    # No mode of torch: it would not be active in a backward, which may run a forward again.
    functions: dict[str, Any] = {name: normalising(getattr(nn.functional, name)) for name in ("softmax", "log_softmax")}
    with mock.patch.multiple(torch.Tensor, float=keep, to=convert), mock.patch.multiple(nn.functional, **functions):
        yield


def in_double(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model and a batch in double precision; in single precision where the model's code does not run in double.
    Raises ValueError if the model's weights cannot be converted, as packed ones cannot."""
    for dtype in (torch.float64, torch.float32):
        to = functools.partial(_to, dtype)
        batch = map_tensors(_ignoring_names(to), "", dict(inputs))
        try:
            # `Module.to` would leave the imaginary parts out.
            made = copied(model)
            made = made._apply(to) if any(each.is_complex() for each in made.parameters()) else made.to(dtype)
            if dtype == torch.float64 and (config := configuration_of(made)) is not None:
                config._experts_implementation = "eager"  # the grouped product of experts has no doubles
            _keep_packed_layers_from_rounding(made)
            if any(each.dtype != to(each).dtype for each in made.parameters()):
                raise ValueError(f"the weights cannot be converted to {dtype}")
            if dtype == torch.float64:
                with torch.no_grad():
                    copied(made)(**inputs_of_forward(made, batch))
            return made, batch
        except Exception as error:  # whatever a model's own code raises
            failure = error
    raise ValueError(
        f"a comparison is in double or single precision, and this model is not: {failure}"
        ". Give the model before it is quantised, in float32, and on the CPU"
    ) from failure


def _keep_packed_layers_from_rounding(model: nn.Module) -> None:
    """bitsandbytes evaluates in bfloat16 where the CPU can, whatever the compute type. There the last bit of a number
    in single precision may become a difference of a hundredth, and another expert."""
    layers: Iterator[Any] = model.modules()  # the library has no types
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def _ignoring_names(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda _, tensor: function(tensor)


def _to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in this precision: real numbers stay real, and complex ones complex."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def without_noise(model: nn.Module) -> bool:
    """Set all dropout, and what else is random in training by its name, to zero. Whether there was any."""
    had_noise = False
    for module in model.modules():
        dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for owner in filter(None, (module, configuration_of(module))):
            for name, value in vars(owner).items():
                if isinstance(value, (int, float)) and value > 0 and (NOISE.search(name) or (dropout and name == "p")):
                    setattr(owner, name, type(value)(0))
                    had_noise = True
    return had_noise
