"""The hook of the last stage's loss: its backward is noticed, and its gradients are scaled."""

import pytest
import torch

from penstock.runtime.loss_proxy import hook_loss


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_backward_of_a_hooked_loss_is_noticed_once_and_scaled(scale: float) -> None:
    weight = torch.ones(3, requires_grad=True)
    noticed: list[torch.Tensor | None] = []
    loss = hook_loss(weight.sum(), lambda gradient: noticed.append(gradient) or (), scale)
    loss /= 2  # as the body of a loop may do
    loss.backward()
    assert noticed == [0.5]
    assert torch.equal(weight.grad, torch.full((3,), 0.5 * scale))


def test_the_backward_of_a_loss_without_a_graph_is_noticed() -> None:
    noticed: list[torch.Tensor | None] = []
    loss = hook_loss(torch.tensor(3.0), lambda gradient: noticed.append(gradient) or ())
    loss /= 2
    loss.backward()
    assert noticed == [0.5]
