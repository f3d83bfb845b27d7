"""Training goes on from a checkpoint as if it had not stopped, also over another number of stages."""

import copy
import random

import numpy as np
import pytest
import torch

from checkpoint_ranks import on_ranks, raised, save, scramble, split_copies, stages_of
from families import FAMILIES
from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.plan import SavingRank
from penstock.checkpoint.save import save_parallelized
from penstock.checkpoint.training_state import TrainingState, load_training_state
from penstock.checkpoint.untrusted import CheckpointError
from penstock.modeling.stage.split import SplitModel

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "plain": lambda groups: torch.optim.SGD(groups, lr=1e-2),
}


def build(seed: int = 0) -> torch.nn.Module:
    return scramble(FAMILIES["gpt2"].build(dtype=torch.float32), seed)


def optimizer_of(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    """Two groups, as for weight decay."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    return OPTIMIZERS[kind]([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])


def gradients(reference: torch.nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Made-up gradients, the same for any layout."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in reference.named_parameters()}


def advance(models, optimizers, schedulers, reference: torch.nn.Module, steps: range) -> None:
    for step in steps:
        made = gradients(reference, step)
        made["lm_head.weight"] = made["transformer.wte.weight"]  # tied
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            for name, parameter in model.named_parameters():
                parameter.grad = made[name].clone()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def save_all(models, optimizers, schedulers, directory, **state) -> list:
    def work(rank: int, comm) -> None:
        training = TrainingState(optimizers[rank], {"scheduler": schedulers[rank]}, **state)
        place = SavingRank(rank, len(models))
        save_parallelized(models[rank], directory, world_comm=comm, training_state=training, place=place)

    return on_ranks(len(models), work)


def load_all(models, optimizers, schedulers, directory) -> list:
    def work(rank: int, comm) -> TrainingState:
        from_parallelized(models[rank], directory, world_comm=comm)
        training = TrainingState(optimizers[rank], {"scheduler": schedulers[rank]})
        return load_training_state(models[rank], directory, training, world_comm=comm)

    return on_ranks(len(models), work)


def test_the_leader_alone_gathers_random_states_and_the_common_file_does_not_grow_with_the_ranks(tmp_path) -> None:
    sizes = []
    for num_ranks in (2, 4):
        models = split_copies(build(1), num_ranks)

        def work(rank: int, comm, models=models, num_ranks=num_ranks) -> int:
            place = SavingRank(rank, num_ranks)
            kwargs = {"world_comm": comm, "training_state": TrainingState(step=1)}
            save_parallelized(models[rank], tmp_path, place=place, **kwargs)
            return comm.received

        leader, *others = raised(on_ranks(num_ranks, work))
        assert leader > 5000 * (num_ranks - 1) and not any(others)
        sizes.append((tmp_path / "training_state.bin").stat().st_size)
    assert sizes[1] - sizes[0] < 500


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_run_that_moves_from_3_to_2_to_1_stages_is_the_unsplit_run(kind: str, tmp_path) -> None:
    reference = build(1)
    expected = copy.deepcopy(reference)
    expected_optimizer = optimizer_of(expected, kind)
    advance([expected], [expected_optimizer], [scheduler_of(expected_optimizer)], reference, range(9))

    start, step = reference, 0
    for num_stages in (3, 2, 1):
        models = split_copies(start, num_stages)
        optimizers = [optimizer_of(model, kind) for model in models]
        schedulers = [scheduler_of(optimizer) for optimizer in optimizers]
        if step:
            states = raised(load_all(models, optimizers, schedulers, tmp_path))
            assert [state.step for state in states] == [step] * num_stages
            assert [state.extra for state in states] == [{"epoch": (1, "a")}] * num_stages
        advance(models, optimizers, schedulers, reference, range(step, step + 3))
        step += 3
        raised(save_all(models, optimizers, schedulers, tmp_path, step=step, extra={"epoch": (1, "a")}))
        start = build(7)
    (model,) = models
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert optimizers[0].param_groups[0]["lr"] == expected_optimizer.param_groups[0]["lr"]


def test_an_optimizer_made_before_the_model_was_split_is_saved_and_loaded(tmp_path) -> None:
    """It holds the parameters of all stages; those of others were emptied and carry no state."""
    reference = build(1)
    stages = stages_of(reference, 2)

    def split_with_optimizer(model: torch.nn.Module, stage: int):
        optimizer = optimizer_of(model, "adamw")
        return SplitModel(model, stages, [stage]).model, optimizer

    pairs = [split_with_optimizer(build(1), stage) for stage in range(2)]
    models, optimizers = [model for model, _ in pairs], [optimizer for _, optimizer in pairs]
    schedulers = [scheduler_of(optimizer) for optimizer in optimizers]
    advance(models, optimizers, schedulers, reference, range(3))
    raised(save_all(models, optimizers, schedulers, tmp_path, step=3))

    expected = build(1)
    expected_optimizer = optimizer_of(expected, "adamw")
    expected_schedulers = [scheduler_of(expected_optimizer)]
    advance([expected], [expected_optimizer], expected_schedulers, reference, range(3))

    again = [split_with_optimizer(build(8), stage) for stage in (0, 1)]
    models, optimizers = [model for model, _ in again], [optimizer for _, optimizer in again]
    schedulers = [scheduler_of(optimizer) for optimizer in optimizers]
    raised(load_all(models, optimizers, schedulers, tmp_path))
    advance(models, optimizers, schedulers, reference, range(3, 6))
    advance([expected], [expected_optimizer], expected_schedulers, reference, range(3, 6))
    for model in models:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected.get_parameter(name)), name


def one_rank(model, directory, **state) -> None:
    def work(rank: int, comm) -> None:
        place = {"place": SavingRank(0, 1), "training_state": TrainingState(**state)}
        save_parallelized(model, directory, world_comm=comm, **place)

    raised(on_ranks(1, work))


def test_the_random_generators_go_on(tmp_path) -> None:
    (model,) = split_copies(build(), 1)
    draw = lambda: (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: E731  three streams at once
    one_rank(model, tmp_path)
    expected = draw()
    draw()

    raised(on_ranks(1, lambda rank, comm: load_training_state(model, tmp_path, TrainingState(), world_comm=comm)))
    assert draw() == expected


def test_the_model_alone_loads_from_a_checkpoint_with_training_state(tmp_path) -> None:
    (model,) = split_copies(build(1), 1)
    one_rank(model, tmp_path, optimizer=optimizer_of(model, "adamw"))
    (fresh,) = split_copies(build(2), 1)
    raised(on_ranks(1, lambda rank, comm: from_parallelized(fresh, tmp_path, world_comm=comm)))
    assert torch.equal(fresh.lm_head.weight, model.lm_head.weight)


def test_saving_without_training_state_removes_the_one_of_an_earlier_step(tmp_path) -> None:
    (model,) = split_copies(build(1), 1)
    optimizer = optimizer_of(model, "adamw")
    advance([model], [optimizer], [scheduler_of(optimizer)], build(1), range(1))
    one_rank(model, tmp_path, optimizer=optimizer)
    assert (tmp_path / "optimizer_tp_0_pp_0.bin").exists() and (tmp_path / "training_state.bin").exists()
    raised(save([model], tmp_path))
    assert not (tmp_path / "optimizer_tp_0_pp_0.bin").exists()
    load = lambda rank, comm: load_training_state(model, tmp_path, TrainingState(), world_comm=comm)  # noqa: E731
    with pytest.raises(CheckpointError, match="has no training state"):
        raised(on_ranks(1, load))


def load_alone(model, directory, **state) -> None:
    work = lambda rank, comm: load_training_state(model, directory, TrainingState(**state), world_comm=comm)  # noqa: E731
    raised(on_ranks(1, work))


def test_a_damaged_training_state_is_named(tmp_path) -> None:
    (model,) = split_copies(build(1), 1)
    one_rank(model, tmp_path)
    path = tmp_path / "training_state.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"training_state\.bin is not the file that was saved"):
        load_alone(model, tmp_path)


def test_what_does_not_fit_is_refused_by_name(tmp_path) -> None:
    (model,) = split_copies(build(1), 1)
    one_rank(model, tmp_path / "none")
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        load_alone(model, tmp_path / "none", optimizer=optimizer_of(model, "adamw"))
    one_rank(model, tmp_path / "two", optimizer=optimizer_of(model, "adamw"))
    with pytest.raises(CheckpointError, match="has 1 parameter groups, the saved one had 2"):
        load_alone(model, tmp_path / "two", optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    one_rank(model, tmp_path / "sgd", optimizer=optimizer_of(model, "momentum"))
    with pytest.raises(CheckpointError, match=r"the saved state is that of SGD, but the optimizer here is AdamW"):
        load_alone(model, tmp_path / "sgd", optimizer=optimizer_of(model, "adamw"))
    with pytest.raises(CheckpointError, match=r"has no state for \['scaler'\]"):
        load_alone(model, tmp_path / "two", objects={"scaler": object()})
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1][:3]}, {"params": [model.lm_head.weight]}]
    del groups[1]["params"][0]
    with pytest.raises(CheckpointError, match="lacks parameters that it had when it was saved"):
        load_alone(model, tmp_path / "two", optimizer=torch.optim.SGD(groups, lr=1.0))
    swapped = [{"params": [p for p in model.parameters() if wide == (p.dim() > 1)]} for wide in (False, True)]
    with pytest.raises(CheckpointError, match=r"is in group 0 of the optimizer, but was in group 1 when saved"):
        load_alone(model, tmp_path / "two", optimizer=torch.optim.SGD(swapped, lr=1.0))
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    with pytest.raises(CheckpointError, match=r"a parameter of shape \[3\] that is not the model's"):
        one_rank(model, tmp_path / "three", optimizer=stranger)
    with pytest.raises(CheckpointError, match="no plain data"):
        one_rank(model, tmp_path / "three", extra={"function": load_alone})
