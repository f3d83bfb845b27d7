"""The first error is the one that is shown: what fails after it, in what is still to be done, does not hide it.

A mistake is made in each phase of a run, by one rank or by all. Who makes it gets it as it was raised, with its own
cause, and the others are told what it was and whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor

from penstock import Booster, HeterogeneousParallelPlugin, PipelineTemplate, save_checkpoint
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import parallelize

pytestmark = pytest.mark.slow

INPUTS = batch("causal", 4)
REFUSAL = "grad_norm: a training step is under way"
# An error, and what it came of, as type and text.
Chain = list[tuple[str, str]]
OWN: Chain = [("Mistake", "the user's own mistake"), ("LookupError", "why it was made")]
# Gives a part of a run, in which a mistake may be made.
Phase = Callable[..., Callable[[], Any]]


class Mistake(Exception):
    """What no library raises."""


class Maker:
    """Makes the mistake wherever it is called, once it is to; before that a phase runs well."""

    def __init__(self, makes: bool) -> None:
        self._makes, self._ready = makes, False

    def get_ready(self) -> None:
        self._ready = True

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self._makes and self._ready:
            raise Mistake("the user's own mistake") from LookupError("why it was made")


def build(stages: int = 2, **options: Any) -> Any:
    model = parallelize(FAMILIES["gpt2"].build(), stages, num_microbatches=2, **options)
    model.pipeline.board.detail_wait = 0.2  # no interpreter ends here, of which more could be learned
    return model


def own_block(model: Any) -> nn.Module:
    """A unit that this rank computes."""
    block: nn.Module = model.transformer.h[3 * torch.distributed.get_rank()]
    return block


def criterion_with(maker: Callable[[], Any]) -> Callable[[Any, Any], torch.Tensor]:
    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        maker()
        loss: torch.Tensor = outputs.logits.float().mean()
        return loss

    return criterion


def train(model: Any, **options: Any) -> None:
    for out in model(**INPUTS, **options):
        out.loss.backward()


def evaluate(model: Any, **options: Any) -> None:
    with torch.no_grad():
        model(**INPUTS, **options)


# The phases. Each is run once before the mistake is made.


def criterion(maker: Maker, folder: str) -> Callable[[], Any]:
    """On every rank: two replicas of a single stage."""
    return partial(train, build(1), criterion=criterion_with(maker))


def criterion_in_evaluation(maker: Maker, folder: str) -> Callable[[], Any]:
    return partial(evaluate, build(), criterion=criterion_with(maker))


def call_in_a_criterion(maker: Maker, folder: str) -> Callable[[], Any]:
    """One in which all ranks take part, and so refused by an error of the library's."""
    model: Any = build(1)

    def call() -> None:
        try:
            maker()
        except Mistake:
            model.pipeline.grad_norm()

    return partial(train, model, criterion=criterion_with(call))


def forward(maker: Maker, folder: str) -> Callable[[], Any]:
    model = build()
    own_block(model).register_forward_hook(maker)
    return partial(train, model)


def forward_in_evaluation(maker: Maker, folder: str) -> Callable[[], Any]:
    model = build()
    own_block(model).register_forward_hook(maker)
    return partial(evaluate, model)


def backward(maker: Maker, folder: str, schedule: str = "1f1b") -> Callable[[], Any]:
    """In every one of its backwards: also in those that a step would run by itself after the first."""
    model = build(schedule=schedule)
    next(own_block(model).parameters()).register_hook(maker)
    return partial(train, model)


def loop_body(maker: Maker, folder: str) -> Callable[[], Any]:
    model = build()

    def loop() -> None:
        for out in model(**INPUTS):
            out.loss.backward()
            maker()

    return loop


def booster_step(hook: Callable[[Any, Any], Any], **options: Any) -> Callable[[], Any]:
    """A step of the Booster's. `hook`: of a model and an optimizer."""
    model: Any = FAMILIES["gpt2"].build()
    plugin = HeterogeneousParallelPlugin(microbatch_size=2, max_norm=1.0, **options)
    plugin.set_pipelines([PipelineTemplate.balanced(model, 2)], [2])
    rows = [{name: value[row] for name, value in INPUTS.items()} for row in range(4)]
    loader, booster = plugin.prepare_dataloader(rows), Booster(plugin=plugin)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, *_ = booster.boost(model, inner, None, loader)
    model.pipeline.board.detail_wait = 0.2
    hook(model, inner)

    def step() -> None:
        booster.execute_pipeline(iter(loader), model, None, optimizer)
        optimizer.step()

    return step


def backward_of_the_booster(maker: Maker, folder: str) -> Callable[[], Any]:
    return booster_step(lambda model, _: next(own_block(model).parameters()).register_hook(maker))


def optimizer(maker: Maker, folder: str, **options: Any) -> Callable[[], Any]:
    return booster_step(lambda _, inner: inner.register_step_pre_hook(maker), **options)


class Own:
    """An object of the user's beside the model."""

    def __init__(self, maker: Maker) -> None:
        self.state_dict: Any = lambda: maker() or {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def save_of_an_object(maker: Maker, folder: str) -> Callable[[], Any]:
    return partial(save_checkpoint, folder, model=build(), own=Own(maker))


def save_of_weights(maker: Maker, folder: str) -> Callable[[], Any]:
    model = build()
    own_block(model).register_state_dict_post_hook(maker)
    return partial(model.save_parallelized, folder)


def generation(maker: Maker, folder: str) -> Callable[[], Any]:
    model: Any = build()
    own_block(model).register_forward_hook(maker)
    return partial(model.generate, INPUTS["input_ids"], max_new_tokens=3)


def choice_in_generation(maker: Maker, folder: str) -> Callable[[], Any]:
    model: Any = build()

    class Processor(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            maker()
            return scores

    return partial(model.generate, INPUTS["input_ids"], max_new_tokens=3, logits_processor=[Processor()])


# Each with the rank that makes the mistake where one does.
PHASES: Sequence[tuple[Phase, int]] = [
    (criterion, 1),
    (criterion_in_evaluation, 1),
    (call_in_a_criterion, 0),
    (forward, 0),
    (forward_in_evaluation, 1),
    (backward, 1),
    (partial(backward, schedule="zb-h1"), 0),
    (backward_of_the_booster, 1),
    (save_of_an_object, 0),
    (save_of_weights, 1),
    (generation, 0),
    (choice_in_generation, 1),
]
# Where a rank that makes a mistake is by itself: the others hear of it as its process ends.
ALONE = [loop_body, optimizer, partial(optimizer, sharded_optimizer=True)]
# What a save raises for any error names the rank and the error, and is raised from that.
TYPES = {call_in_a_criterion: "LoopError", save_of_an_object: "CheckpointError", save_of_weights: "CheckpointError"}


def raised(run: Callable[[], Any]) -> Chain:
    chain: Chain = []
    try:
        run()
    except Exception as caught:
        error: BaseException | None = caught
        while error is not None:
            chain.append((type(error).__name__, str(error)))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def shown(cases: Sequence[tuple[Phase, Sequence[int]]], folder: str) -> list[Chain]:
    """What this rank raises in each phase, in which some ranks make a mistake."""
    chains = []
    for number, (phase, ranks) in enumerate(cases):
        maker = Maker(torch.distributed.get_rank() in ranks)
        run = phase(maker, f"{folder}/{number}")
        run()
        torch.distributed.barrier()  # a rank that fails at once may do so before the other has ended its first run
        maker.get_ready()
        chains.append(raised(run))
    return chains


def assert_first(pool: Pool, cases: Sequence[tuple[Phase, Sequence[int]]], path: Path) -> None:
    by_rank = pool.run(2, shown, cases, str(path), timeout=200)
    for (phase, ranks), *chains in zip(cases, *by_rank, strict=True):
        where, kind = f"{phase}, by {ranks}: {chains}", TYPES.get(phase, "Mistake")
        own = [rank for rank, chain in enumerate(chains) if chain[0][0] == kind and chain[-2:] == OWN]
        assert own and set(own) <= set(ranks), where
        for (type_name, text), *_ in (chain for rank, chain in enumerate(chains) if rank not in own):
            assert type_name in ("PipelineFailure", "CheckpointError"), where
            assert any(f"rank {rank}" in text for rank in ranks), where
            assert (f"LoopError: {REFUSAL}" if kind == "LoopError" else ": ".join(OWN[0])) in text, where


def test_a_mistake_of_one_rank_is_what_it_shows_and_what_the_other_names(pool: Pool, tmp_path: Path) -> None:
    assert_first(pool, [(phase, [rank]) for phase, rank in PHASES], tmp_path)


def test_a_mistake_of_all_ranks_is_what_each_shows_or_names(pool: Pool, tmp_path: Path) -> None:
    phases = [*(phase for phase, _ in PHASES), *ALONE]
    assert_first(pool, [(phase, [0, 1]) for phase in phases], tmp_path)
