"""Plans: what is refused, what is copied, what happens when the model strays from the plan."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from penstock.modeling.graph.dataflow import Value
from penstock.modeling.graph.forwards import MOST_KINDS
from penstock.modeling.stage.split import SplitModel
from tests.support.families import FAMILIES, batch
from tests.support.stage_driver import gradients, largest_difference, split, split_gradients, step, walk

Tensor = torch.Tensor


class Chain(nn.Module):
    """Three linear units, and between them what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def between(self, x: Tensor, first: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        first = self.a(x)
        logits = self.c(self.between(self.b(first), first))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def chain(model_class: type[Chain]) -> Chain:
    torch.manual_seed(0)
    return model_class().double()


INPUTS = {"x": torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
          "labels": torch.arange(6) % 4}  # fmt: skip
EACH = [["a"], ["b"], ["c"]]


def stages_of(model: Chain, stages: list[list[str]] = EACH) -> list[SplitModel]:
    return [SplitModel(copy.deepcopy(model), stages, [stage]) for stage in range(len(stages))]


def check_chain(model_class: type[Chain]) -> list[SplitModel]:
    model = chain(model_class)
    worker = copy.deepcopy(model)
    expected = worker(**INPUTS)["loss"]
    expected.backward()
    splits = stages_of(model)
    output = step(splits, INPUTS, loss_of=lambda found: found["loss"])
    assert output["loss"].item() == pytest.approx(expected.item(), abs=1e-12)
    assert largest_difference(split_gradients(splits), gradients([worker])) < 1e-12
    return splits


def test_a_value_used_twice_is_relayed() -> None:
    class Skip(Chain):
        def between(self, x: Tensor, first: Tensor) -> Tensor:
            return x * first

    splits = check_chain(Skip)
    plan = splits[0].plan(INPUTS)
    assert plan.boundaries == ((Value("a", 0, 0),), (Value("a", 0, 0), Value("b", 0, 0)))


def test_values_changed_in_place_after_they_were_made() -> None:
    class InPlace(Chain):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            first = self.a(x)
            second = self.b(first * 1.0)
            first.mul_(2.0)
            second += first
            logits = self.c(second)
            return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}

    splits = check_chain(InPlace)
    assert Value("a", 0, 0) in splits[0].plan(INPUTS).written


def test_views_changed_in_place_count_as_the_value_itself() -> None:
    class View(Chain):
        def between(self, x: Tensor, first: Tensor) -> Tensor:
            x[:, 1:].zero_()
            return x + first

    splits = check_chain(View)
    assert splits[0].plan(INPUTS).written == {Value("b", 0, 0)}


@pytest.mark.parametrize("way", ["a list", "out"])
def test_what_an_operation_writes_to_depends_on_what_it_is_given(way: str) -> None:
    class Writes(Chain):
        def between(self, x: Tensor, first: Tensor) -> Tensor:
            held = torch.zeros(first.shape, dtype=first.dtype)
            with torch.no_grad():
                torch._foreach_add_([held], [first]) if way == "a list" else torch.mul(first, 2.0, out=held)
            return x + held

    splits = check_chain(Writes)
    assert Value("a", 0, 0) in splits[0].plan(INPUTS).boundaries[1]


def test_inputs_changed_in_place_are_copied_for_every_stage() -> None:
    class Input(Chain):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            x += 1.0
            return super().forward(x, labels)

    model = chain(Input)
    inputs = {name: value.clone() for name, value in INPUTS.items()}
    (only,) = [SplitModel(copy.deepcopy(model), EACH, [0, 1, 2])]
    output = step([only], inputs, loss_of=lambda found: found["loss"])
    assert torch.equal(inputs["x"], INPUTS["x"])
    assert output["loss"].item() == pytest.approx(model(**inputs)["loss"].item(), abs=1e-12)


def test_a_unit_that_changes_its_argument_in_place() -> None:
    class Adds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1.0)
            return super().forward(x)

    class Changed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.b = Adds(4, 4)

        def between(self, x: Tensor, first: Tensor) -> Tensor:
            return x.tanh() * 2

    check_chain(Changed)

    class UsedLater(Changed):
        def between(self, x: Tensor, first: Tensor) -> Tensor:
            return x + first

    with pytest.raises(NotImplementedError, match="b changes one of its arguments in place"):
        stages_of(chain(UsedLater))[0].plan(INPUTS)
    together = stages_of(chain(UsedLater), [["a"], ["b", "c"]])
    assert step(together, INPUTS, loss_of=lambda found: found["loss"])["loss"].isfinite()


@pytest.mark.parametrize("kind", ["bool", "sign", "item", "tolist", "nonzero", "mask"])
def test_control_by_a_value_that_not_every_stage_has_is_refused(kind: str) -> None:
    class Controlled(Chain):
        def between(self, x: Tensor, first: Tensor) -> Tensor:
            if kind == "bool" and x.sum() > 0:
                return -x
            if kind == "sign" and (x < 0).any():
                return x.tanh()
            if kind == "item":
                return x * (1 if x.max().item() > 0 else 2)
            if kind == "tolist":
                return x * (1 if first[0].tolist()[0] > 0 else 2)
            if kind == "nonzero":
                return x * len(x.nonzero())
            if kind == "mask":
                return x * x[x > 0].shape[0]
            return x

    with pytest.raises(
        NotImplementedError, match=r"Auto policy for Controlled is not implemented\.\.\. what the model"
    ):
        stages_of(chain(Controlled))[1].plan(INPUTS)
    assert SplitModel(chain(Controlled), [["a", "b", "c"]], [0]).plan(INPUTS).num_stages == 1


def test_control_by_inputs_is_no_obstacle() -> None:
    class ByInput(Chain):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            return super().forward(-x if x.sum() > 0 else x, labels)

    check_chain(ByInput)


def test_a_unit_of_another_stage_that_would_return_another_structure_is_an_error_that_names_it() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            hidden = super().forward(x)
            return (hidden, hidden.mean()) if len(x) > 4 else hidden

    class OfPairs(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.a = Pair(4, 4)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            return {"loss": None, "logits": self.c(self.b(self.a(x)[0]))}

    last = stages_of(chain(OfPairs))[1]
    plan = last.plan(INPUTS)
    few = {name: value[:3] for name, value in INPUTS.items()}
    with pytest.raises(RuntimeError, match=r"a would return a tensor, but a tuple of 2 was found"):
        last.forward(plan, 1, few, [torch.zeros(3, 4, dtype=torch.float64)])


def test_backward_flow_is_refused() -> None:
    class Loop(Chain):
        def between(self, x: Tensor, first: Tensor) -> Tensor:
            return self.a(x)

    with pytest.raises(NotImplementedError, match="values cannot flow backwards"):
        stages_of(chain(Loop))[0].plan(INPUTS)
    # With the loop inside one stage there is nothing to refuse.
    model = chain(Loop)
    splits = stages_of(model, [["a", "b"], ["c"]])
    output = step(splits, INPUTS, loss_of=lambda found: found["loss"])
    assert output["loss"].item() == pytest.approx(model(**INPUTS)["loss"].item(), abs=1e-12)


def test_another_path_than_planned_is_an_error_not_a_wrong_result() -> None:
    class Skips(Chain):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            first = self.a(x)
            logits = self.c(first if x[0, 0] > 100 else self.b(first))
            return {"loss": None, "logits": logits}

    first, second, _ = stages_of(chain(Skips))
    inputs = {"x": INPUTS["x"]}
    plan = first.plan(inputs)
    strayed = {"x": INPUTS["x"] + 1000.0}
    assert first.forward(plan, 0, strayed, ())[1][0].shape == (6, 4)
    with pytest.raises(RuntimeError, match="another path than it was planned"):
        second.forward(plan, 1, strayed, (torch.zeros(6, 4, dtype=torch.float64),))


def test_a_wrong_number_of_received_values_is_named() -> None:
    splits = stages_of(chain(Chain))
    with pytest.raises(RuntimeError, match="given 0 values, but 1 cross"):
        splits[1].forward(splits[1].plan(INPUTS), 1, INPUTS, ())


def test_an_error_in_the_model_reaches_the_caller_and_leaves_the_stage_usable() -> None:
    splits = stages_of(chain(Chain))
    plan = splits[0].plan(INPUTS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        splits[0].forward(plan, 0, {**INPUTS, "x": INPUTS["x"][:, :3]}, ())
    step(splits, INPUTS, loss_of=lambda found: found["loss"])


def test_plans_follow_the_kind_of_inputs_and_the_mode() -> None:
    (first, _) = split(FAMILIES["gpt2"].build(), 2)
    inputs = batch("causal")
    plan = first.plan(inputs)
    assert first.plan(batch("causal", size=5, tokens=3, seed=9)) is plan
    assert first.plan({**inputs, "output_hidden_states": True}).boundaries != plan.boundaries
    assert first.plan({name: value for name, value in inputs.items() if name != "labels"}).loss is None
    first.model.eval()
    assert first.plan(inputs) is not plan and first.plan(inputs).digest == plan.digest


def test_a_number_that_is_new_in_every_step_is_named_and_its_plans_are_forgotten() -> None:
    class Scaled(Chain):
        def forward(self, x: Tensor, labels: Tensor | None = None, scale: Any = 1.0) -> dict[str, Any]:
            return super().forward(x * scale["now"], labels)

    (first, *_) = stages_of(chain(Scaled))
    plans = weakref.WeakSet(first.plan({**INPUTS, "scale": {"now": number / 10}}) for number in range(MOST_KINDS))
    with pytest.warns(UserWarning, match="as scale is new again and again"):
        first.plan({**INPUTS, "scale": {"now": -1.0}})
    gc.collect()
    assert not plans


def test_no_cache_is_made_unless_asked_for() -> None:
    splits = split(FAMILIES["gpt2"].build().eval(), 2)
    with torch.no_grad():
        assert step(splits, batch("causal"), backward=False).past_key_values is None
        asked = step(splits, {**batch("causal"), "use_cache": True}, backward=False)
    assert asked.past_key_values is not None


def test_other_entries_are_planned_by_name() -> None:
    model = FAMILIES["t5"].build().eval()
    splits = split(model, 3)
    inputs = {name: value for name, value in batch("sequences").items() if name != "labels"}
    with torch.no_grad():
        expected = model.get_encoder()(**inputs).last_hidden_state
        calls = [part.model.get_encoder().forward for part in splits]
        assert {part.plan(inputs, call).entry for part, call in zip(splits, calls, strict=True)} == {"encoder.forward"}
        output = walk(splits, [inputs] * 3, calls)
    torch.testing.assert_close(output.last_hidden_state, expected)


def test_a_model_that_returns_a_plain_object_is_refused() -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Boxes(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Box(super().forward(x))

    class Boxed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.b = Boxes(4, 4)

        def between(self, x: Any, first: Tensor) -> Tensor:
            return x.tensor

    with pytest.raises(NotImplementedError, match="returns a Box"):
        stages_of(chain(Boxed))[0].plan(INPUTS)


def test_expert_layers_wrongly_assumed_are_caught_by_their_owner() -> None:
    class Odd(nn.Linear):
        """Cannot run on meta tensors, and does not keep its input's shape."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, : int(x.abs().sum().item() > 0) + 2]

    class Wrong(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.b = Odd(4, 4)
            self.c = nn.Linear(3, 4)

    splits = stages_of(chain(Wrong))
    with pytest.raises(RuntimeError, match=r"unit b returned .*keeps its input's shape, were assumed"):
        step(splits, INPUTS, loss_of=lambda found: found["loss"])


def test_gradients_flow_through_values_of_any_number_of_cuts() -> None:
    """Every unit its own stage: eight cuts, each value relayed as far as it is needed."""
    model = FAMILIES["t5"].build()
    worker = copy.deepcopy(model)
    worker(**batch("sequences")).loss.backward()
    splits = split(model, 12)
    step(splits, batch("sequences"))
    assert largest_difference(split_gradients(splits), gradients([worker])) < 1e-10


@pytest.mark.parametrize(("probability", "refused"), [(0.0, False), (0.3, True)])
def test_a_path_chosen_at_random_is_refused_unless_its_probability_is_zero(probability: float, refused: bool) -> None:
    class Random(Chain):
        def between(self, x: Tensor, first: Tensor) -> Tensor:
            return x if torch.rand([]) < probability else x.tanh()

    (first, *_) = stages_of(chain(Random))
    if refused:
        with pytest.raises(NotImplementedError, match="random path"):
            first.plan(INPUTS)
    else:
        check_chain(Random)
