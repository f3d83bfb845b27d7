"""A running pipeline takes up another layout, on other ranks, with the same objects, and trains on as the unsplit model
would."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.elastic.generations import form_world
from penstock.elastic.moving import _Transfers, from_live_ranks
from penstock.layout.layout import Layout
from penstock.model.pipeline_model import attach
from penstock.modeling.graph.units import list_units
from penstock.modeling.tensor_spec import TensorSpec
from penstock.runtime.failures import ring
from penstock.runtime.formation import new_job, parallelize
from penstock.runtime.options import EngineOptions
from penstock.runtime.reforming import change_layout
from penstock.schedule import build
from tests.support.families import FAMILIES, batch
from tests.support.pool import Pool
from tests.support.training import EXACT, gradients_of, kept_in_double, rows, run_step

NUM_STEPS = 2
MICROBATCHES = 2
OPTIONS = EngineOptions(num_microbatches=MICROBATCHES)
# Stages of each pipeline, formation after formation: the third takes in a new rank, the last lets it go.
FORMATIONS = ((2,), (1, 1), (3,), (1, 2), (2,))


def place(units: Sequence[str], depths: Sequence[int]) -> Layout:
    """Pipelines of so many stages each, of equally many units."""
    return Layout.place([[units[len(units) * s // d : len(units) * (s + 1) // d] for s in range(d)] for d in depths])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(family: str, step: int) -> dict[str, torch.Tensor]:
    return batch(FAMILIES[family].kind, 8, seed=step)


@cache
def unsplit_steps(family: str) -> list[tuple[float, dict[str, torch.Tensor | None]]]:
    """The unsplit model's loss and gradients, step after step."""
    with kept_in_double():
        model = FAMILIES[family].build()
        optimizer, steps = optimizer_of(model), []
        for step in range(NUM_STEPS * len(FORMATIONS)):
            optimizer.zero_grad()
            loss = model(**batch_of(family, step)).loss
            loss.backward()
            steps.append((loss.item(), gradients_of(model)))
            optimizer.step()
        return steps


class World:
    """The job's store, through which ranks meet again and again."""

    def __init__(self) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        self.rank = int(os.environ["RANK"])

    def meet(self, generation: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(f"generation {generation}", self.store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)


def train_through_formations(family: str, schedule: str) -> list[tuple[float, dict[str, torch.Tensor | None]]]:
    """On a worker: steps in every formation this rank is part of; its losses and gradients."""
    world, seen = World(), []
    with kept_in_double():
        # A rank that comes later has other weights of its own, which must not matter.
        torch.manual_seed(world.rank)
        model: Any = FAMILIES[family].build()
        units = list_units(model)
        if world.rank == 2:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 7.0)
        parameters, optimizer, engine = list(model.parameters()), optimizer_of(model), None
        for generation, depths in enumerate(FORMATIONS):
            if engine is not None:
                engine.dissolve()
            if world.rank >= sum(depths):
                seen += [(0.0, {})] * NUM_STEPS
                continue
            world.meet(generation, sum(depths))
            layout = place(units, depths)
            depth = depths[layout.place_of(world.rank).pipeline]
            make_schedule = partial(build, schedule if depth > 1 else "1f1b", depth)
            moving = from_live_ranks(optimizer)
            if engine is None:
                with new_job() as board:
                    engine = parallelize(
                        model, layout, make_schedule, board, OPTIONS,
                        fill_values=moving if generation else None,
                    )  # fmt: skip
                attach(model, engine)
            else:
                change_layout(engine, layout, make_schedule, fill_values=moving)
            for step in range(generation * NUM_STEPS, (generation + 1) * NUM_STEPS):
                optimizer.zero_grad()
                run_step(model, rows(batch_of(family, step), model.data_parallel_rank, model.data_parallel_size))
                seen.append((engine.last_step.global_loss, gradients_of(model)))
                optimizer.step()
        ids = {id(parameter) for parameter in parameters}
        assert all(id(parameter) in ids for parameter in model.parameters())
        if dist.is_initialized():
            engine.close()
            dist.destroy_process_group()
    return seen


@pytest.mark.parametrize(("family", "schedule"), [("gpt2", "zb-h1"), ("t5", "1f1b")])
def test_every_formation_trains_on_as_the_unsplit_model(pool: Pool, family: str, schedule: str) -> None:
    found = pool.run(3, train_through_formations, family, schedule, init=False, timeout=120)
    for step, (loss, gradients) in enumerate(unsplit_steps(family)):
        depths = FORMATIONS[step // NUM_STEPS]
        here = [seen[step] for seen in found[: sum(depths)]]
        assert all(abs(global_loss - loss) < EXACT for global_loss, _ in here), (step, loss, [one[0] for one in here])
        held = set()
        for _, theirs in here:
            for name, gradient in theirs.items():
                torch.testing.assert_close(gradient, gradients[name], rtol=EXACT, atol=EXACT, msg=f"{step} {name}")
            held.update(theirs)
        assert held == gradients.keys()


def draw_through_formations(formations: Sequence[Sequence[int]]) -> list[list[float]]:
    """On a worker: some of torch's random numbers in each formation, of which each rank has had its own before."""
    world = World()
    model: Any = FAMILIES["gpt2"].build()
    units, engine, drawn = list_units(model), None, []
    torch.manual_seed(world.rank)
    for generation, depths in enumerate(formations):
        if engine is not None:
            engine.dissolve()
        if world.rank < sum(depths):
            world.meet(generation, sum(depths))
            layout = place(units, depths)
            make_schedule = partial(build, "1f1b", depths[layout.place_of(world.rank).pipeline])
            if engine is None:
                fill_values = from_live_ranks() if generation else None
                with new_job() as board:
                    engine = parallelize(model, layout, make_schedule, board, OPTIONS, fill_values=fill_values)
            else:
                change_layout(engine, layout, make_schedule, fill_values=from_live_ranks())
        drawn.append(torch.rand(2).tolist() if world.rank < sum(depths) else [])
    assert engine is not None
    engine.close()
    dist.destroy_process_group()
    return drawn


def test_each_pipeline_goes_on_with_random_numbers_of_its_own(pool: Pool) -> None:
    """One that is new has others; a rank that changes over has those of its new pipeline."""
    formations = ((1, 1), (1, 1), (1, 2), (1, 1, 1), (2, 1))
    first, second, third = pool.run(3, draw_through_formations, formations, init=False, timeout=60)

    def plain(seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        return [torch.rand(2).tolist() for _ in formations]

    assert first == plain(0)
    own = plain(1)
    assert second == [*own[:4], first[4]]
    assert third[:3] == [[], [], own[2]] and third[4] == own[4]
    assert third[3] not in [*first, *own]


def reform_often(times: int) -> list[tuple[int, int, int, int]]:
    """On a worker: re-form again and again; how many threads, files, hooks and boards there are after each."""
    world = World()
    model: Any = FAMILIES["gpt2"].build()
    units = list_units(model)
    engine, counts = None, []
    for generation in range(times):
        if engine is not None:
            engine.dissolve()
        world.meet(generation, 2)
        depths = (2,) if generation % 2 else (1, 1)
        layout, make_schedule = place(units, depths), partial(build, "zb-h1" if depths == (2,) else "1f1b", depths[0])
        if engine is None:
            with new_job() as board:
                engine = parallelize(model, layout, make_schedule, board, OPTIONS)
            attach(model, engine)
        else:
            change_layout(engine, layout, make_schedule, fill_values=from_live_ranks())
        run_step(model, batch("causal", 4))
        del layout
        gc.collect()
        hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
        boards = sum(type(one).__name__ == "FailureBoard" for one in gc.get_objects())
        counts.append((threading.active_count(), len(os.listdir("/proc/self/fd")), hooks, boards))
    engine.close()
    dist.destroy_process_group()
    return counts


def test_re_formations_leave_nothing_behind() -> None:
    own = Pool()  # in the processes of other tests, threads of theirs may still come and go
    try:
        found = own.run(2, reform_often, 18, init=False, timeout=120)
    finally:
        own.close()
    for counts in found:
        for layout in (0, 1):  # one may need more than the other
            early, late = counts[2 + layout : 8 : 2], counts[12 + layout : 18 : 2]
            # A connection or thread that is just ending may add to any one count, so the least of the late ones is
            # compared: what each re-formation left behind would be in all of them.
            most, least = map(max, zip(*early, strict=True)), map(min, zip(*late, strict=True))
            assert all(after <= before for before, after in zip(most, least, strict=True)), f"{counts}"


def meet_after_one_met_nobody() -> int:
    store = dist.PrefixStore("later", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        with mock.patch.object(ring, "NEWS_SECONDS", 0.2), pytest.raises(RuntimeError):
            form_world(dist.PrefixStore("alone", store), 0, 2, timedelta(seconds=1), lambda board: None)
    form_world(store, int(os.environ["RANK"]), 2, timedelta(seconds=20), lambda board: None)
    found = torch.ones(())
    dist.all_reduce(found)
    return int(found)


def test_ranks_meet_after_an_attempt_of_one_of_them(pool: Pool) -> None:
    assert pool.run(2, meet_after_one_met_nobody) == [2, 2]


def lost_values() -> str:
    """A unit that no rank has any more, as the only rank that had it has left."""
    world = World()
    model: Any = FAMILIES["gpt2"].build()
    units = list_units(model)
    world.meet(0, 2)
    with new_job() as board:
        engine = parallelize(model, place(units, (2,)), partial(build, "1f1b", 2), board)
    engine.dissolve()
    dist.destroy_process_group()
    if world.rank == 1:
        return "no rank has the values of"
    dist.init_process_group("gloo", store=dist.PrefixStore("alone", world.store), rank=0, world_size=1)
    try:
        change_layout(engine, place(units, (1,)), partial(build, "1f1b", 1), fill_values=from_live_ranks())
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_values_that_no_rank_has_are_named(pool: Pool) -> None:
    for message in pool.run(2, lost_values, init=False):
        assert "no rank has the values of" in message


def from_a_checkpoint(folder: Path) -> float:
    """The values of what is held newly come from a file."""
    world = World()
    model: Any = FAMILIES["gpt2"].build()
    units = list_units(model)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    world.meet(0, 2)
    with new_job() as board:
        engine = parallelize(model, place(units, (2,)), partial(build, "1f1b", 2), board, OPTIONS)
    attach(model, engine)

    def load(engine: Any, taken: Any, had: Any) -> None:
        with torch.no_grad():
            for name, tensor in taken.items():
                tensor.copy_(saved[name])

    change_layout(engine, place(units, (1, 1)), partial(build, "1f1b", 1), fill_values=load)
    largest = max(float((tensor - saved[name]).abs().max()) for name, tensor in model.state_dict().items())
    engine.close()
    return largest


def test_values_may_come_from_elsewhere(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, from_a_checkpoint, tmp_path, init=False) == [0.0, 0.0]


def test_a_layout_that_does_not_fit_is_refused_and_nothing_changes(pool: Pool) -> None:
    for world, units, order, shards in pool.run(2, refused):
        assert "the layout is of 1 ranks, but the world has 2" in world
        assert "must place the same units in the same order: transformer.h.0" in units
        assert "the order differs" in order
        assert "a tensor_parallel_size of 2 cannot be taken up" in shards


def refused() -> list[str]:
    model = FAMILIES["gpt2"].build()
    penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
    units = list(model.pipeline.layout.units)
    without = [unit for unit in units if unit != "transformer.h.0"]
    wrong = [place(units, (1,)), place(without, (2,)), place(units[::-1], (2,)), Layout.place([[units]], None, 2)]
    messages = []
    for layout in wrong:
        with pytest.raises(ValueError) as caught:
            change_layout(model.pipeline, layout, fill_values=from_live_ranks())
        messages.append(str(caught.value))
    run_step(model, batch("causal", 8))  # as before
    return messages


def receive_until_the_sender_dies(num_sent: int, num_wanted: int) -> tuple[list[int], int]:
    """Rank 1 sends some parameters with their states and dies; which of them rank 0 takes for received."""
    parameters = [torch.nn.Parameter(torch.full((300,), float(number))) for number in range(num_wanted)]
    transfers = _Transfers(dist.group.WORLD, check=lambda: None)
    if dist.get_rank() == 1:
        for parameter in parameters[:num_sent]:
            transfers.send(parameter + 1, {"step": torch.tensor(7.0), "average": parameter.detach() + 2}, 0)
        transfers.finish()
        os.kill(os.getpid(), signal.SIGKILL)
    state: dict[torch.nn.Parameter, Any] = {}
    arrived: list[int] = []
    described = {"step": TensorSpec.of(torch.tensor(7.0)), "average": TensorSpec.of(parameters[0])}
    with pytest.raises(RuntimeError):
        for number, parameter in enumerate(parameters):
            done = partial(arrived.append, number)
            transfers.receive(parameter.detach(), parameter, state, described, 1, done)
        transfers.finish()
    for number in arrived:
        assert bool((parameters[number] == number + 1).all())
        held = state[parameters[number]]
        assert held["step"] == 7 and bool((held["average"] == number + 2).all())
    return arrived, len(state)


def test_what_was_under_way_when_a_rank_was_lost_does_not_count_as_received(pool: Pool) -> None:
    (arrived, num_states), _ = pool.run(2, receive_until_the_sender_dies, 4, 20, outcomes=True)
    assert arrived == list(range(len(arrived))) and len(arrived) <= 4 and num_states == len(arrived)
