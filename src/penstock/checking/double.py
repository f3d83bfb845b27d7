"""Double precision for a comparison: there a difference is a difference, and not rounding."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.checking.reasons import taken
from penstock.modeling.randomness import NOISE
from penstock.nested import map_tensors


class kept_in_double(TorchFunctionMode):
    """Keeps transformers from rounding double precision to single inside a model.

    Its losses call `logits.float()` or `log_softmax(dtype=torch.float32)`, and some attentions
    `query.to(torch.float32)`, to *raise* half precision. Doubles they round, differently for a share of a mean than for
    the mean, and for one sample than for a batch of it, which would hide whether the pipeline itself is exact.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            to_single = function is torch.Tensor.to and args[1:] == (torch.float32,) and not options
            if to_single or function is torch.Tensor.float:
                return args[0]
            if function in (nn.functional.softmax, nn.functional.log_softmax) and options.get("dtype") == torch.float32:
                options["dtype"] = None
        return function(*args, **options)


def in_double(model: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model and a batch in double precision; in single precision where the model's code does not run in double.

    Raises ValueError if the model's weights cannot be converted, as packed ones cannot.
    """
    for dtype in (torch.float64, torch.float32):

        def converted(_: str, tensor: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        batch = {name: map_tensors(converted, name, value) for name, value in inputs.items()}
        try:
            made = copy.deepcopy(model).to(dtype)
            if dtype == torch.float64 and hasattr(made, "config"):
                made.config._experts_implementation = "eager"  # the grouped product of experts has no doubles
            if any(each.dtype != dtype for each in made.parameters() if each.is_floating_point()):
                raise ValueError(f"the weights cannot be converted to {dtype}")
            if dtype == torch.float64:
                with torch.no_grad():
                    copy.deepcopy(made)(**taken(made, batch))
            return made, batch
        except Exception as error:  # whatever a model's own code raises
            failure = error
    raise ValueError(f"a comparison is in double or single precision, and this model is not: {failure}") from failure


def without_noise(model: nn.Module) -> bool:
    """Set all dropout, and what else is random in training by its name, to zero. Whether there was any."""
    found = False
    for module in model.modules():
        dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for owner in filter(None, (module, getattr(module, "config", None))):
            for name, value in vars(owner).items():
                if isinstance(value, (int, float)) and value > 0 and (NOISE.search(name) or (dropout and name == "p")):
                    setattr(owner, name, type(value)(0))
                    found = True
    return found
