"""Training goes on from a checkpoint as if it had not stopped, also over another number of stages."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.checkpoint.load import from_parallelized
from penstock.checkpoint.ranks import CheckpointRanks
from penstock.checkpoint.save import save_parallelized
from penstock.checkpoint.training_state import TrainingState, load_training_state
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.checkpoint_ranks import gpt2, on_ranks, raised, save, save_alone, split_copies

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "plain": lambda groups: torch.optim.SGD(groups, lr=1e-2),
}


class Run:
    """What the ranks of a pipeline train: models, optimizers of two groups, as for weight decay, and schedulers."""

    def __init__(self, models: list[Any], kind: str = "adamw") -> None:
        self.models = models
        self.optimizers = [optimizer_of(model, kind) for model in models]
        self.schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10) for optimizer in self.optimizers
        ]

    def advance(self, steps: range) -> None:
        """With made-up gradients, the same for any layout."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            made = {name: torch.randn(p.shape, generator=generator) for name, p in gpt2().named_parameters()}
            made["lm_head.weight"] = made["transformer.wte.weight"]  # tied
            for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers, strict=True):
                for name, parameter in model.named_parameters():
                    parameter.grad = made[name].clone()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    def save(self, directory: Any, **state: Any) -> None:
        def work(rank: int, comm: Any) -> None:
            training = TrainingState(self.optimizers[rank], {"scheduler": self.schedulers[rank]}, **state)
            save_parallelized(self.models[rank], directory, world_comm=comm, training_state=training)

        raised(on_ranks(len(self.models), work))

    def load(self, directory: Any) -> list[Any]:
        def work(rank: int, comm: Any) -> Any:
            from_parallelized(self.models[rank], directory, world_comm=comm)
            training = TrainingState(self.optimizers[rank], {"scheduler": self.schedulers[rank]})
            return load_training_state(self.models[rank], directory, training, world_comm=comm)

        return raised(on_ranks(len(self.models), work))

    def assert_equals(self, expected: "Run") -> None:
        (whole,) = expected.models
        for model in self.models:
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, whole.get_parameter(name)), name
        rates = {optimizer.param_groups[0]["lr"] for optimizer in (*self.optimizers, *expected.optimizers)}
        assert len(rates) == 1


def optimizer_of(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    return OPTIMIZERS[kind]([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])


def test_the_leader_alone_gathers_random_states_and_the_common_file_does_not_grow_with_the_ranks(tmp_path) -> None:
    sizes = []
    for num_ranks in (2, 4):
        models = split_copies(gpt2(1), num_ranks)

        def work(rank: int, comm, models=models, num_ranks=num_ranks) -> int:
            save_parallelized(models[rank], tmp_path, world_comm=comm, training_state=TrainingState(step=1))
            return comm.received

        leader, *others = raised(on_ranks(num_ranks, work))
        assert leader > 5000 * (num_ranks - 1) and not any(others)
        sizes.append((tmp_path / "training_state.bin").stat().st_size)
    assert sizes[1] - sizes[0] < 500


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_run_that_moves_from_3_to_2_to_1_stages_is_the_unsplit_run(kind: str, tmp_path) -> None:
    expected = Run([copy.deepcopy(gpt2(1))], kind)
    expected.advance(range(6))
    for step, num_stages in ((0, 3), (2, 2), (4, 1)):
        run = Run(split_copies(gpt2(7 if step else 1), num_stages), kind)
        if step:
            found = [(state.step, state.extra) for state in run.load(tmp_path)]
            assert found == [(step, {"epoch": (1, "a")})] * num_stages
        run.advance(range(step, step + 2))
        run.save(tmp_path, step=step + 2, extra={"epoch": (1, "a")})
    run.assert_equals(expected)


def save_state(model, directory, **state) -> None:
    save_alone(model, directory, training_state=TrainingState(**state))


def load_state(model, directory, **state) -> None:
    load_training_state(model, directory, TrainingState(**state), world_comm=CheckpointRanks())


def test_the_model_alone_loads_from_a_checkpoint_with_training_state_and_a_save_without_removes_it(tmp_path) -> None:
    run = Run(split_copies(gpt2(1), 1))
    run.advance(range(1))
    run.save(tmp_path)
    (fresh,) = split_copies(gpt2(2), 1)
    from_parallelized(fresh, tmp_path, world_comm=CheckpointRanks())
    assert torch.equal(fresh.lm_head.weight, run.models[0].lm_head.weight)
    state = [tmp_path / "optimizer_tp_0_pp_0.bin", tmp_path / "training_state.bin"]
    assert all(path.exists() for path in state)
    raised(save(run.models, tmp_path))
    assert not any(path.exists() for path in state)
    with pytest.raises(CheckpointError, match="has no training state"):
        load_state(fresh, tmp_path)


def test_what_does_not_fit_is_refused_by_name(tmp_path) -> None:
    (model,) = split_copies(gpt2(1), 1)
    for name, state in (("none", {}), ("two", {"optimizer": "adamw"}), ("sgd", {"optimizer": "momentum"})):
        save_state(model, tmp_path / name, **{key: optimizer_of(model, kind) for key, kind in state.items()})
    adamw, stranger = optimizer_of(model, "adamw"), torch.nn.Parameter(torch.zeros(3))
    sgd = lambda groups: {"optimizer": torch.optim.SGD(groups, lr=1.0)}  # noqa: E731
    few = [{"params": [p for p in model.parameters() if p.dim() > 1][:3]}, {"params": []}]
    swapped = [{"params": [p for p in model.parameters() if wide == (p.dim() > 1)]} for wide in (False, True)]
    for function, folder, state, message in (
        (load_state, "none", {"optimizer": adamw}, "has no optimizer state"),
        (load_state, "two", sgd(model.parameters()), "has 1 parameter groups, the saved one had 2"),
        (load_state, "sgd", {"optimizer": adamw}, "the saved state is that of SGD, but the optimizer here is AdamW"),
        (load_state, "two", {"objects": {"scaler": object()}}, r"has no state for \['scaler'\]"),
        (load_state, "two", sgd(few), "lacks parameters that it had when it was saved"),
        (load_state, "two", sgd(swapped), r"is in group 0 of the optimizer, but was in group 1 when saved"),
        (save_state, "three", sgd([stranger]), r"a parameter of shape \[3\] that is not the model's"),
        (save_state, "three", {"extra": {"function": save_state}}, "no plain data"),
    ):
        with pytest.raises(CheckpointError, match=message):
            function(model, tmp_path / folder, **state)


RATES = (0.1, 0.2, 0.3)


def by_layer(model: torch.nn.Module, layers: int, on_all: bool) -> torch.optim.Optimizer:
    """A rate for each layer; with `on_all` every rank has a group for each."""
    groups = [
        {"params": [value for name, value in model.named_parameters() if f".h.{layer}." in name], "lr": RATES[layer]}
        for layer in range(layers)
    ]
    return torch.optim.SGD([group for group in groups if on_all or group["params"]])


class Counting(torch.optim.SGD):
    """Counts the steps of each group that has parameters, as DeepSpeed's FusedAdam does."""

    def step(self) -> None:  # type: ignore[override]  # no closure
        super().step()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1


def test_what_an_optimizer_keeps_in_groups_with_parameters_alone_is_saved(tmp_path) -> None:
    """The first rank, whose groups are saved, has no parameters of the second."""
    run, layers = Run(split_copies(gpt2(1), 2)), gpt2(1).config.n_layer
    run.optimizers = [Counting(by_layer(model, layers, on_all=True).param_groups) for model in run.models]
    for optimizer in run.optimizers:
        optimizer.step()
    run.save(tmp_path)
    for optimizer in run.optimizers:
        optimizer.step()
    run.load(tmp_path)
    for optimizer in run.optimizers:
        assert [group["step"] for group in optimizer.param_groups] == [1] * layers


def test_groups_that_are_not_the_same_on_all_ranks_are_refused_by_name(tmp_path) -> None:
    """A rank that has the second layer only would go on with the rate of the first."""
    run, layers = Run(split_copies(gpt2(1), 2)), gpt2(1).config.n_layer
    for on_all in (False, True):
        run.optimizers = [by_layer(model, layers, on_all) for model in run.models]
        kind = torch.optim.lr_scheduler.CosineAnnealingLR
        run.schedulers = [kind(optimizer, T_max=10) for optimizer in run.optimizers]
        if not on_all:
            with pytest.raises(CheckpointError, match=r"parameter groups differ: .* rank 0 .* rank 1 .*an empty list"):
                run.save(tmp_path)
    run.save(tmp_path)
    run.load(tmp_path)
    for optimizer in run.optimizers:
        assert [group["lr"] for group in optimizer.param_groups] == [*RATES[:layers]]
