"""Linear layers that defer their weight gradients, beside torch's own, in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from penstock.runtime.gradients.weight_gradients import WeightGradientQueues, install


def layers(kind: type[nn.Module]) -> tuple[nn.Sequential, nn.Sequential, WeightGradientQueues]:
    """The same two layers twice, the second time deferring to the queues."""
    torch.manual_seed(0)
    plain = nn.Sequential(kind(4, 4), nn.Tanh(), kind(4, 4)).double()
    deferring, queues = copy.deepcopy(plain), WeightGradientQueues()
    assert install(deferring, queues) == 2
    return plain, deferring, queues


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_come_with_w(kind: type[nn.Module], at_once: bool) -> None:
    plain, deferring, queues = layers(kind)
    for microbatch in range(2):
        x = torch.randn(2, 3, 4, dtype=torch.float64)
        plain(x).mul_(2).square().sum().backward()  # some models change in place what a layer returns
        loss = deferring(x).mul_(2).square().sum()
        before = [None if p.grad is None else p.grad.clone() for p in deferring.parameters()]
        if at_once:
            queues.open_at_once()
        else:
            queues.open(0, microbatch)
        loss.backward()
        queues.close()
        if not at_once:
            for parameter, gradient in zip(deferring.parameters(), before, strict=True):
                assert queues.awaits(parameter)
                assert parameter.grad is None if gradient is None else torch.equal(parameter.grad, gradient)
            queues.run(0, microbatch, None)
        assert not any(map(queues.awaits, deferring.parameters()))
        for mine, theirs in zip(deferring.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_head_that_makes_logits_computes_its_weight_gradient_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4), nn.Linear(4, 33), Conv1D(33, 4), Conv1D(4, 33))
    assert install(model, WeightGradientQueues()) == 3


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_second_derivatives_are_exact(kind: type[nn.Module]) -> None:
    """A gradient penalty inside the backward under way: its derivative goes through the first backward."""
    plain, deferring, queues = layers(kind)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    found: list[torch.Tensor | None] = []
    expected: list[torch.Tensor | None] = []
    for model, gradients in ((plain, expected), (deferring, found)):
        queues.open(0, 0)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        queues.close()
        queues.run(0, 0, None)
        gradients.extend(parameter.grad for parameter in model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_layer_called_twice_with_vectors_and_a_frozen_bias(kind: type[nn.Module]) -> None:
    plain, deferring, queues = layers(kind)
    plain[2].bias.requires_grad_(False)
    deferring[2].bias.requires_grad_(False)
    finished: list[torch.Tensor] = []
    x = torch.randn(4, dtype=torch.float64)
    plain(plain(x)).sum().backward()
    queues.open(0, 0)
    deferring(deferring(x)).sum().backward()
    queues.close()
    queues.run(0, 0, finished.append)
    assert sorted(map(id, finished)) == sorted(map(id, (p for p in deferring.parameters() if p.requires_grad)))
    for mine, theirs in zip(deferring.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
