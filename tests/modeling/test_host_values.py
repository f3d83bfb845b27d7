"""Values that a model's code asks of its inputs come from the host's copies, or from the device if they might differ.

Tensors on "meta" have no values at all: whoever asks one for a value gets an error, unless it is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.masking_utils import _ignore_bidirectional_mask_sdpa, _ignore_causal_mask_sdpa

from penstock.modeling.stage.host_values import HostValues

PADDED = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda mask: bool(mask.all()),
    "compared": lambda mask: bool((mask == 0).any()),
    "number of tokens": lambda mask: mask.sum().item(),
    "longest row": lambda mask: int(mask.sum(-1).max()),
    "as a list": lambda mask: mask[:, 1:].long().cumsum(-1).tolist(),
    "logic": lambda mask: bool((~mask.bool() | (mask > 1))[0].all()),
    "with new columns": lambda mask: torch.cat([mask, mask.new_ones((2, 1))], dim=-1).sum().item(),
    "padded": lambda mask: functional.pad(mask, (0, 3), value=2).sum().item(),
    "counted": lambda mask: bool((mask == torch.arange(4, device=mask.device)).any()),
    "by transformers": lambda mask: (
        _ignore_causal_mask_sdpa(mask.to(device=mask.device, dtype=torch.bool), 4, 4, 0, 0),
        _ignore_bidirectional_mask_sdpa(mask.bool()[:1, :2], 2),
    ),
}


def known(host: torch.Tensor) -> tuple[HostValues, torch.Tensor]:
    device, values = host.to("meta"), HostValues()
    values.know_all({"mask": device, "other": 3}, {"mask": host, "other": 3})
    return values, device


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("host", [PADDED, torch.ones_like(PADDED), PADDED.bool()], ids=["padded", "full", "bool"])
def test_the_answers_are_the_hosts(name: str, host: torch.Tensor) -> None:
    values, device = known(host)
    with values:
        assert QUESTIONS[name](device) == QUESTIONS[name](host)


def unanswered(question: Callable[[torch.Tensor], Any], host: torch.Tensor = PADDED) -> None:
    values, device = known(host)
    with values, pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        question(device)


def test_a_tensor_that_was_changed_is_asked_itself() -> None:
    def changed(mask: torch.Tensor) -> bool:
        mask[0, 0] = 5
        return bool(mask.all())

    def changed_through_a_view(mask: torch.Tensor) -> bool:
        positions = mask.cumsum(-1)
        positions[0].fill_(1)
        return bool(positions.all())

    unanswered(changed)
    unanswered(changed_through_a_view)


def test_what_is_not_computed_from_inputs_alone_is_asked_itself() -> None:
    unanswered(lambda mask: bool((mask == torch.empty(4, dtype=torch.int64, device="meta")).all()))
    unanswered(lambda mask: bool(torch.bernoulli(torch.rand(3, device="meta")).bool().all()))
    unanswered(lambda mask: mask.float().mean().item())  # a fraction, which devices may round differently
    unanswered(lambda mask: mask.sum(dtype=torch.float32).item())


def test_inside_a_unit_nothing_is_followed() -> None:
    values, device = known(PADDED)
    with values:
        with values.aside(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            bool(device.all())
        assert not bool(device.all())


def test_nothing_is_kept_of_tensors_that_are_gone() -> None:
    values, device = known(PADDED)
    with values:
        for _ in range(5):
            assert not bool(device.all())
    assert len(values._known) == 1
