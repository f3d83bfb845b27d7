"""Steps of a tiny copy of an optimizer show what its updates depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import Adafactor

from penstock.runtime.optimizer_trial import Dependence, dependence


class ByNorms(torch.optim.SGD):
    """Scales each update by the weight's norm and the gradient's, as LARS does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad, alpha=-group["lr"] * float(one.norm() / one.grad.norm()))


class ByAllNorms(torch.optim.SGD):
    """Clips by the norm of all gradients, as torch computes it."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1.0)
        return super().step(closure)


class ByAllNormsIfAny(torch.optim.SGD):
    """Clips as `ByAllNorms`, but where there are no gradients it does not ask for their norm."""

    def step(self, closure: Any = None) -> Any:
        weights = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        if weights:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        return super().step(closure)


class ByOwnNorm(torch.optim.SGD):
    """Divides by the norm of all gradients, which it computes itself."""

    def step(self, closure: Any = None) -> Any:
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = sum(float(one.norm()) ** 2 for one in gradients) ** 0.5
        for one in gradients:
            one.div_(norm)
        return super().step(closure)


class ClippedAlone(torch.optim.SGD):
    """Clips each gradient by its own norm, which torch's function would take for a part of a larger one."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                torch.nn.utils.clip_grad_norm_(one, 1.0)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise of its own, which depends on nothing."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                one.data.add_(torch.randn_like(one), alpha=group["lr"])


class Strict(torch.optim.Optimizer):
    """Takes groups alone, with exactly these options, and updates one kind by Adam's signs, the other by products."""

    def __init__(self, groups: list[dict[str, Any]]):
        assert all(set(group) == {"params", "lr", "product"} for group in groups)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                update = one.grad @ one.grad.T @ one.grad if group["product"] else one.grad.sign()
                one.add_(update, alpha=-group["lr"])


def strict(weights: list[torch.nn.Parameter], product: bool) -> Strict:
    rest: dict[str, Any] = {"params": weights[1:], "lr": 0.1, "product": False}
    return Strict([{"params": weights[:1], "lr": 0.1, "product": product}, rest])


OWN = torch.optim
ALONE: list[Any] = [
    OWN.Adadelta, OWN.Adagrad, OWN.Adam, OWN.Adamax, OWN.AdamW, OWN.ASGD, OWN.NAdam, OWN.RAdam, OWN.RMSprop, OWN.Rprop,
    OWN.SGD, partial(OWN.AdamW, fused=True, amsgrad=True), partial(OWN.SGD, momentum=0.9, nesterov=True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((make, Dependence.NOTHING) for make in (*ALONE, Noisy)),
        (OWN.Adafactor, Dependence.MATRIX),
        (OWN.Muon, Dependence.MATRIX),
        (partial(Adafactor, relative_step=False), Dependence.MATRIX),
        (ByNorms, Dependence.MATRIX),
        (ByAllNorms, Dependence.NOTHING),
        (ByAllNormsIfAny, Dependence.PARAMETERS),
        (ByOwnNorm, Dependence.PARAMETERS),
        (ClippedAlone, Dependence.PARAMETERS),
    ],
)
def test_what_an_update_depends_on_is_seen(make: Callable[..., OWN.Optimizer], expected: Dependence) -> None:
    """Also while a scheduler warms up from nothing, and without a trace in the random numbers or the weights."""
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    optimizer, state = make(weights, lr=0.1), torch.get_rng_state()
    OWN.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert dependence(optimizer, torch.device("cpu")) is expected
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one, torch.ones(2, 3)) for one in weights)


@pytest.mark.parametrize("product", [False, True])
def test_each_group_is_tried_with_its_own_options(product: bool) -> None:
    optimizer = strict([torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)], product)
    OWN.lr_scheduler.ConstantLR(optimizer)
    assert dependence(optimizer, torch.device("cpu")) is (Dependence.MATRIX if product else Dependence.NOTHING)


class Counting(torch.optim.SGD):
    """Keeps a counter in its group, and clips each weight only if it was made to."""

    def __init__(self, params: Any, lr: float, max_norm: float | None = 1.0) -> None:
        super().__init__(params, lr)
        self.max_norm = max_norm
        for group in self.param_groups:
            group.setdefault("count", torch.zeros(()))

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for one in group["params"] if self.max_norm is not None else ():
                torch.nn.utils.clip_grad_norm_(one, self.max_norm)
        return super().step(closure)


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, Dependence.PARAMETERS), (None, Dependence.NOTHING)])
def test_a_fresh_optimizer_is_made_as_the_users_was_and_shares_nothing_with_it(
    max_norm: float | None, expected: Dependence
) -> None:
    optimizer = Counting([torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)], lr=0.1, max_norm=max_norm)
    assert dependence(optimizer, torch.device("cpu")) is expected
    assert optimizer.param_groups[0]["count"] == 0


def test_hooks_for_all_optimizers_hear_nothing_of_a_trial() -> None:
    optimizer, heard = OWN.SGD([torch.nn.Parameter(torch.ones(2, 3))], lr=0.1), list[Any]()
    register: list[Any] = [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
    handles = [each(lambda heard_of, *_: heard.append(heard_of)) for each in register]
    try:
        dependence(optimizer, torch.device("cpu"))
        assert heard == []
        optimizer.step()
        assert heard == [optimizer, optimizer]
    finally:
        for handle in handles:
            handle.remove()
