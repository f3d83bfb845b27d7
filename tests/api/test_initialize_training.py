"""Training loops as users write them, each step against the unsplit model trained the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from penstock.runtime.comm import rollcall
from tests.runtime.test_optimizer_trial import ByAllNorms, ByOwnNorm
from tests.support.families import batch, gpt2
from tests.support.pool import Pool
from tests.support.training import (
    EXACT,
    Batch,
    Step,
    assert_same_gradients,
    assert_steps_equal,
    gradients_of,
    kept_in_double,
    parallelize,
    rows,
    run_step,
    train_family,
    unsplit_step,
)

# Sizes and lengths of five batches: every step another, and one that was seen before.
SHAPES = [(4, 9), (3, 17), (7, 5), (1, 12), (4, 9)]


def batches(shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Batch]:
    return [batch("causal", size, tokens, seed) for seed, (size, tokens) in enumerate(shapes)]


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


# ---------------------------------------------------------------- shapes and microbatches


@pytest.mark.parametrize("stages", [3])
def test_every_step_may_have_another_batch_size_and_length(pool: Pool, stages: int) -> None:
    found = pool.run(stages, train_family, "gpt2", stages, batches())
    for number, inputs in enumerate(batches()):
        assert_steps_equal([steps[number] for steps in found], unsplit_step(gpt2(), (inputs, 1.0)))


@pytest.mark.parametrize(
    ("option", "samples", "count"),
    [
        ({"microbatch_size": 2}, 5, 3),
        ({"num_microbatches": 3}, 7, 3),
        ({}, 3, 3),
        ({}, 11, 8),
    ],
)
def test_a_batch_is_cut_as_configured_and_uneven_microbatches_are_exact(
    pool: Pool, option: dict[str, int], samples: int, count: int
) -> None:
    """The default is four microbatches for each stage, at most one per sample."""
    inputs = batch("causal", samples)
    found = pool.run(2, train_family, "gpt2", 2, [inputs], **option)
    assert [len(steps[0].losses) for steps in found] == [count, count]
    assert_steps_equal([steps[0] for steps in found], unsplit_step(gpt2(), (inputs, 1.0)))


def halve_in_place() -> tuple[float, float]:
    """The sum of the losses as they were yielded, and the loss that the step reports."""
    model = parallelize(gpt2(), 2, num_microbatches=3)
    total = 0.0
    for output in model(**batch("causal", 3)):
        total += output.loss.item()
        output.loss *= 0.5
        output.loss.backward()
    return total, model.pipeline.last_step.loss


def test_the_reported_loss_is_the_models_whatever_the_loop_does_to_it(pool: Pool) -> None:
    for total, reported in pool.run(2, halve_in_place):
        assert reported == pytest.approx(total, rel=1e-12)


# ---------------------------------------------------------------- accumulation and scaling


def accumulate(divisor: int, waits: bool) -> dict[str, torch.Tensor | None]:
    """Gradients of several batches added up, each loss divided."""
    with kept_in_double():
        model = parallelize(gpt2(), 2)
        for inputs in batches()[: divisor - waits]:
            if waits:
                with model.no_sync():
                    run_step(model, inputs, 1 / divisor)
            else:
                run_step(model, inputs, 1 / divisor)
        if waits:
            run_step(model, batches()[divisor - 1], 1 / divisor)
        return gradients_of(model)


@pytest.mark.parametrize("waits", [True, False])
def test_divided_losses_accumulate_to_the_mean_gradient_of_several_batches(pool: Pool, waits: bool) -> None:
    """With and without no_sync(); the tied weight is on both stages and counts once."""
    model = gpt2()
    expected: dict[str, Any] = {}
    for inputs in batches()[:4]:
        for name, gradient in unsplit_step(model, (inputs, 0.25)).gradients.items():
            expected[name] = expected.get(name, 0) + gradient
    for gradients in pool.run(2, accumulate, 4, waits):
        assert_same_gradients(gradients, expected)


# ---------------------------------------------------------------- frozen parameters


# The last is tied to the first, and its only name on the last stage.
EMBEDDINGS = ("wte.weight", "wpe.weight", "lm_head.weight")


def freeze(model: nn.Module, what: str) -> None:
    trained: dict[str, Callable[[str], bool]] = {
        "all": lambda name: True,
        "not the embeddings": lambda name: not name.endswith(EMBEDDINGS),
        "not the first half": lambda name: name.startswith(("transformer.h.2", "transformer.h.3", "transformer.ln_f")),
        "the last normalisation only": lambda name: name.startswith("transformer.ln_f"),
        "the first layer only": lambda name: name.startswith("transformer.h.0"),
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[what](name))


def train_frozen(stages: int, plan: Sequence[str], schedule: str) -> list[Step]:
    with kept_in_double():
        model = parallelize(gpt2(), stages, schedule=schedule)
        steps = []
        for number, what in enumerate(plan):
            freeze(model, what)
            model.zero_grad()
            inputs = rows(batch("causal", 4, seed=number), model.data_parallel_rank, model.data_parallel_size)
            steps.append(Step(run_step(model, inputs), gradients_of(model)))
        return steps


@pytest.mark.parametrize(("ranks", "stages", "schedule"), [(3, 3, "1f1b"), (2, 2, "zb-v"), (4, 2, "zb-h1")])
def test_frozen_parameters_may_change_at_every_step(pool: Pool, ranks: int, stages: int, schedule: str) -> None:
    """Parts of a stage, whole stages before or after the trained ones, with equal shapes at every boundary."""
    plan = ["not the embeddings", "not the first half", "all", "the last normalisation only", "the first layer only"]
    found = pool.run(ranks, train_frozen, stages, plan, schedule)
    model = gpt2()
    for number, what in enumerate(plan):
        freeze(model, what)
        expected = unsplit_step(model, (batch("causal", 4, seed=number), 1.0))
        assert_steps_equal([steps[number] for steps in found], expected, replicas=ranks // stages)


# ---------------------------------------------------------------- optimizers, clipping, learning rates


def train_fully(ranks: int, stages: int, early: bool, norm_type: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Several steps of AdamW with clipping and a schedule of the learning rate; the optimizer made early or late."""
    with kept_in_double():
        model = gpt2()
        if early:
            optimizer = adamw(model)
        if ranks > 0:
            model = parallelize(model, stages)
        if not early:
            optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=len(SHAPES))
        norms = []
        for inputs in batches([(4, tokens) for _, tokens in SHAPES]):
            optimizer.zero_grad()
            if ranks > 0:
                run_step(model, rows(inputs, model.data_parallel_rank, model.data_parallel_size))
                norm = model.clip_grad_norm_(0.1, norm_type)
            else:
                model(**inputs).loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            norms.append(float(norm))
            optimizer.step()
            scheduler.step()
        return parameters_of(model), norms


def adamw(model: nn.Module) -> torch.optim.AdamW:
    # AdamW divides by the gradient's size; a large epsilon keeps rounding from deciding the sign of a step.
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4, weight_decay=0.1)


@pytest.mark.parametrize(
    ("ranks", "stages", "early", "norm_type"),
    [(2, 2, False, 2.0), (3, 3, True, float("inf")), (4, 2, True, 1.0)],
)
def test_training_with_clipping_and_a_schedule_ends_at_the_unsplit_weights(
    pool: Pool, ranks: int, stages: int, early: bool, norm_type: float
) -> None:
    expected, expected_norms = train_fully(0, 1, early, norm_type)
    assert min(expected_norms) > 0.1, "nothing was clipped"
    start = parameters_of(gpt2())
    moved = max(float((expected[name] - start[name]).abs().max()) for name in expected)
    assert moved > 0.02, "the weights hardly moved"
    for parameters, norms in pool.run(ranks, train_fully, ranks, stages, early, norm_type):
        assert norms == pytest.approx(expected_norms, rel=EXACT)
        for name, parameter in parameters.items():
            torch.testing.assert_close(
                parameter, expected[name], rtol=0, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}"
            )


def some(model: nn.Module, part: str) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if part in name)


def by_total(model: nn.Module) -> torch.Tensor:
    norm = get_total_norm([p.grad.detach() for p in model.parameters() if p.grad is not None], foreach=False)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm, foreach=True)
    return norm


def after_unscaling(model: nn.Module) -> torch.Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 1024
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    return clip_grad_norm_(model.parameters(), 0.05)


# What stands in users' loops; two of the functions were imported before any pipeline was formed.
CLIPPING: dict[str, Callable[[Any], torch.Tensor]] = {
    "imported before": lambda model: clip_grad_norm_(model.parameters(), 0.05),
    "imported after": lambda model: nn.utils.clip_grad_norm_(list(model.parameters()), 0.05),
    "with foreach": lambda model: clip_grad_norm_(model.parameters(), 0.05, foreach=True),
    "without foreach": lambda model: clip_grad_norm_(model.parameters(), 0.05, 1.0, foreach=False),
    "largest": lambda model: clip_grad_norm_(model.parameters(), 1e-3, float("inf"), error_if_nonfinite=True),
    "by the total": by_total,
    "unscaled before": after_unscaling,
    "not reached": lambda model: clip_grad_norm_(model.parameters(), 1e3),
    "biases": lambda model: clip_grad_norm_(some(model, "bias"), 0.01),
    "of the first stage": lambda model: clip_grad_norm_(some(model, "wpe"), 0.01),
}


def clip_in_each_way(stages: int, **options: Any) -> dict[str, tuple[float, dict[str, torch.Tensor | None]]]:
    """The norm and the gradients after each way of clipping the same gradients; `stages` is 0 for the unsplit model."""
    with kept_in_double():
        model: Any = gpt2(vocab_size=98)
        inputs = batch("causal", 4)
        if stages:
            model = parallelize(model, stages, **options)
            run_step(model, rows(inputs, model.data_parallel_rank, model.data_parallel_size))
        else:
            model(**inputs).loss.backward()
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    found = {}
    for name, clip in CLIPPING.items():
        for parameter, gradient in gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        found[name] = (float(clip(model)), gradients_of(model))
    stranger = nn.Linear(2, 2)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:  # alone, and has no gradient
        assert float(clip_grad_norm_(stranger.parameters(), 1.0)) == 0.0
    stranger(torch.ones(1, 2)).sum().backward()
    assert float(clip_grad_norm_(stranger.parameters(), 1.0)) == pytest.approx(6**0.5), "what is no pipeline's"
    return found


@pytest.mark.parametrize(
    ("ranks", "stages", "options"), [(2, 2, {}), (4, 2, {}), (2, 1, {"tensor_parallel_size": 2})], ids=str
)
def test_torchs_own_clipping_is_by_the_whole_models_norm(
    pool: Pool, ranks: int, stages: int, options: dict[str, Any]
) -> None:
    expected = clip_in_each_way(0)
    for found in pool.run(ranks, clip_in_each_way, stages, **options):
        for name, (norm, gradients) in found.items():
            assert norm == pytest.approx(expected[name][0], rel=EXACT), name
            for parameter, gradient in gradients.items() if not options else ():  # shards of them
                torch.testing.assert_close(gradient, expected[name][1][parameter], rtol=0, atol=EXACT)


def clip_what_no_rank_can() -> list[str]:
    model = parallelize(gpt2(), 2)
    run_step(model, batch("causal", 4))
    stranger = nn.Linear(2, 2)
    stranger(torch.ones(1, 2)).sum().backward()

    def alone() -> None:
        if torch.distributed.get_rank() == 0:
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            run_step(model, batch("causal", 4))

    def save_alone() -> None:
        if torch.distributed.get_rank() == 0:
            model.save_pretrained("never_written")
        else:
            run_step(model, batch("causal", 4))

    messages = []
    for attempt in (
        lambda: clip_grad_norm_(some(model, "wte"), 1e-3),
        lambda: clip_grad_norm_([*model.parameters(), *stranger.parameters()], 1e-3),
        alone,
        save_alone,
    ):
        before = gradients_of(model)
        with pytest.raises((ValueError, RuntimeError)) as caught, mock.patch.object(rollcall, "SIGNAL_GRACE", 0.3):
            attempt()
        assert_same_gradients(gradients_of(model), before, 0.0)
        messages.append(str(caught.value))
    return messages


def test_a_norm_that_cannot_be_the_whole_models_is_refused(pool: Pool) -> None:
    """The embedding has another name on the last stage. A rank that does not clip ends the others' wait by name."""
    for tied, mixed, alone, saving in pool.run(2, clip_what_no_rank_can, timeout=60):
        assert "rank 0 entered save_pretrained" in saving
        assert "a weight on some of the ranks that hold it, but not on all" in tied and "transformer.wte.weight" in tied
        assert "are of one parallelised model" in mixed and "clip each model by itself" in mixed
        assert "rank 1 entered training step, rank 0 entered clip_grad_norm_: every rank must make" in alone


class Sharp(torch.optim.SGD):
    """Looks at the loss a second time, somewhere else."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Lamb(torch.optim.SGD):
    """Has the name of an optimizer that divides by the norm of all gradients."""


class Gathered(torch.optim.SGD):
    """Each rank updates some of what it takes for the weights of all, and sends them to the others."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for number, one in enumerate(group["params"]):
                torch.distributed.broadcast(one.detach(), number % torch.distributed.get_world_size())


def lbfgs(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=2, **options)


OVER_ALL: list[Callable[[Any], torch.optim.Optimizer]] = [
    lbfgs,
    partial(lbfgs, line_search_fn="strong_wolfe"),
    partial(Sharp, lr=0.1),
    partial(Lamb, lr=0.1),
    partial(ByOwnNorm, lr=0.1),
    partial(Gathered, lr=0.1),
]


def step_over_all(make: Callable[[Any], torch.optim.Optimizer], early: bool) -> str:
    model = gpt2()
    optimizer = make(model.parameters())
    model = parallelize(model, 2)
    if not early:
        optimizer = make(model.parameters())
    before = parameters_of(model)
    run_step(model, batch("causal", 4))
    with pytest.raises(NotImplementedError) as caught:
        optimizer.step(lambda: sum(run_step(model, batch("causal", 4))))  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(model).items())
    stranger = nn.Linear(2, 2)
    make(stranger.parameters()).step(lambda: stranger(torch.ones(1, 2)).sum())  # is no pipeline's
    adam = torch.optim.Adam(model.parameters())
    adam.zero_grad()
    assert adam.step(lambda: sum(run_step(model, batch("causal", 4)))) > 0  # type: ignore[arg-type, operator]
    return str(caught.value)


@pytest.mark.parametrize(("number", "early"), [(0, True), (1, False), (2, False), (3, True), (4, False)])
def test_an_optimizer_whose_updates_depend_on_all_parameters_is_refused(pool: Pool, number: int, early: bool) -> None:
    kind = ("LBFGS", "LBFGS", "Sharp", "Lamb", "ByOwnNorm")[number]
    for text in pool.run(2, step_over_all, OVER_ALL[number], early):
        assert text.startswith(f"{kind} lets updates depend on other parameters") and "AdamW" in text


def step_over_one_rank() -> None:
    with kept_in_double():
        model, plain = parallelize(gpt2().double(), 1, num_microbatches=2), gpt2().double()
        whole = batch("causal", 4)
        mine, expected = (lbfgs(each.parameters(), line_search_fn="strong_wolfe") for each in (model, plain))

        def closure() -> torch.Tensor:
            mine.zero_grad()
            run_step(model, whole)
            return torch.tensor(model.pipeline.last_step.global_loss, dtype=torch.float64)

        def plain_closure() -> torch.Tensor:
            expected.zero_grad()
            loss = plain(**whole).loss
            loss.backward()
            return loss

        for _ in range(2):
            assert float(mine.step(closure)) == pytest.approx(float(expected.step(plain_closure)), rel=1e-12)  # type: ignore[arg-type]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_in_one_process_an_optimizer_may_depend_on_all_parameters(pool: Pool) -> None:
    pool.run(1, step_over_one_rank)


def step_over_ranks() -> None:
    model = parallelize(gpt2(), 2)
    run_step(model, batch("causal", 4))
    OVER_ALL[-1](model.parameters()).step()


def test_an_optimizer_that_takes_the_ranks_for_replicas_is_refused(pool: Pool) -> None:
    for outcome in pool.run(2, step_over_ranks, outcomes=True):
        assert isinstance(outcome, NotImplementedError) and str(outcome).startswith("Gathered divides its state among")


Make = Callable[..., torch.optim.Optimizer]


def step_over(num_stages: int, make: Make, sharded: bool) -> dict[str, torch.Tensor]:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # from now on hooks hear also of the step that a subclass calls
    with kept_in_double():
        model = parallelize(gpt2().double(), num_stages, sharded_optimizer=sharded)
        optimizer = make(model.parameters(), lr=0.1)
        run_step(model, rows(batch("causal", 4), model.data_parallel_rank, model.data_parallel_size))
        optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "make", "sharded"),
    [(2, 1, ByOwnNorm, False), (2, 1, ByAllNorms, True), (2, 2, ByAllNorms, False), (4, 2, ByAllNorms, True)],
)
def test_an_optimizer_with_a_norm_of_all_gradients_is_exact_where_every_rank_has_them_or_torch_computes_it(
    pool: Pool, num_ranks: int, num_stages: int, make: Make, sharded: bool
) -> None:
    model = gpt2().double()
    unsplit_step(model, (batch("causal", 4), 1.0))
    make(model.parameters(), lr=0.1).step()
    for found in pool.run(num_ranks, step_over, num_stages, make, sharded):
        for name, value in found.items():
            assert (value - parameters_of(model)[name]).abs().max() < EXACT, name


class Late(ByOwnNorm):
    """Divides by the norm of all gradients only where a group asks for it."""

    def step(self, closure: Any = None) -> Any:
        together = any(group.get("together") for group in self.param_groups)
        return super().step(closure) if together else torch.optim.SGD.step(self, closure)


def step_with_a_late_group() -> str:
    model = parallelize(gpt2(), 2)
    *first, last = model.parameters()
    optimizer = Late(first, lr=0.1)
    run_step(model, batch("causal", 4))
    optimizer.step()
    optimizer.add_param_group({"params": [last], "together": True})
    with pytest.raises(NotImplementedError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_group_that_comes_after_the_first_step_is_tried_too(pool: Pool) -> None:
    for text in pool.run(2, step_with_a_late_group):
        assert text.startswith("Late lets updates depend on other parameters")


def clip_wrongly() -> list[str]:
    model = parallelize(gpt2(), 2)
    run_step(model, batch("causal", 4))
    messages = []

    def clip(max_norm: float, norm_type: float = 2.0) -> None:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            model.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=True)
        messages.append(f"{caught.type.__name__}: {caught.value}")

    clip(-1.0)
    clip(1.0, 0.0)
    for rank in (0, 1):  # a NaN of one rank alone
        for parameter in model.parameters():
            parameter.grad.fill_(torch.nan if rank == torch.distributed.get_rank() else 1.0)
        clip(1.0)
        clip(1.0, torch.inf)
    return messages


def test_impossible_clipping_is_refused_on_every_rank(pool: Pool) -> None:
    for negative, order, *of_nan in pool.run(2, clip_wrongly):
        assert negative.startswith("ValueError: max_norm must not be negative") and "-1.0" in negative
        assert order.startswith("ValueError") and "0.0" in order
        assert len(of_nan) == 4
        for text in of_nan:
            assert text.startswith("RuntimeError") and "is nan" in text
