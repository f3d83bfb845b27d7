"""The holders of a parameter divide its optimizer's state: training is that of the unsplit model."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import penstock
from penstock import Booster
from penstock.checkpoint.optimizer_state import logical_names
from penstock.runtime.comm.settings import SettingsMismatch
from penstock.runtime.gradients.updates import Update
from penstock.sharded_optimizer.owners import OwnershipGroup, choose_owners
from tests.support.families import FAMILIES, batch
from tests.support.hetero import batch_size, make_plugin, num_ranks, pad, samples
from tests.support.pool import Pool
from tests.support.training import kept_in_double, live_bytes, parallelize, rows

pytestmark = pytest.mark.slow

STEPS = 3
EXACT = 1e-12


def gpt2(**settings: Any) -> Any:
    """Of two layers: every rank owns some of its weights."""
    return FAMILIES["gpt2"].build(**{"n_layer": 2, **settings})


class Seen(NamedTuple):
    """What a rank has after training: its weights, and the bytes of its optimizers' states."""

    weights: dict[str, torch.Tensor]
    num_bytes: int


def backward(model: Any, number: int, scaler: Any = None) -> None:
    """Of the whole batch of a number, or of this pipeline's rows of it."""
    inputs, split = batch("causal", 8, 6, number), isinstance(model, penstock.PipelineModel)
    place = (model.data_parallel_rank, model.data_parallel_size) if split else (0, 1)
    outputs = model(**rows(inputs, *place))
    for output in outputs if split else [outputs]:
        (output.loss if scaler is None else scaler.scale(output.loss)).backward()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters(remove_duplicate=False)}


def adamw(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=1e-2)]


def groups_and_two(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices; Adam, in two groups, for half of the others, and Adagrad, which makes its state at once, for
    the rest. The biases of keys have gradients that are nothing but rounding: `eps` keeps those small."""
    matrices, others = ([one for one in parameters if (one.dim() == 2) == is_matrix] for is_matrix in (True, False))
    half = len(others) // 2
    groups = [{"params": others[:3], "lr": 1e-2}, {"params": others[3:half], "weight_decay": 0.1}]
    return [
        torch.optim.Muon(matrices, lr=1e-2),
        torch.optim.Adam(groups, eps=1e-4),
        torch.optim.Adagrad(others[half:], eps=1e-4),
    ]


MAKERS: Mapping[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "AdamW": adamw,
    "SGD": lambda parameters: [torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)],
    "fused": lambda parameters: [torch.optim.AdamW(parameters, lr=1e-2, fused=True)],
    "Adafactor": lambda parameters: [torch.optim.Adafactor(parameters, lr=1e-2)],
    "several": groups_and_two,
}


def bytes_of(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Adagrad has made some for parameters of other stages, too, before it could know; those are not counted."""
    states = [state for one in optimizers for parameter, state in one.state.items() if parameter.numel()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def of_two_models(split: bool) -> list[dict[str, torch.Tensor]]:
    """The weights of two models that one optimizer has trained."""
    with kept_in_double():
        models = [gpt2().double() for _ in range(2)]
        if split:
            models = [parallelize(one, 1, sharded_optimizer=True) for one in models]
        optimizer = torch.optim.AdamW([weight for one in models for weight in one.parameters()], lr=1e-2, eps=1e-4)
        for number in range(STEPS):
            optimizer.zero_grad()
            for one in models:
                backward(one, number)
            optimizer.step()
    return [weights_of(one) for one in models]


def test_one_optimizer_may_train_two_models(pool: Pool) -> None:
    expected = of_two_models(split=False)
    for found in pool.run(2, of_two_models, split=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert all((ours[name] - theirs[name]).abs().max() < EXACT for name in theirs)


@functools.cache
def unsplit(kind: str, size: int, max_norm: float = 0.0) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after training, and the bytes of the state, of the unsplit model."""
    model: Any = gpt2()
    optimizers, every = MAKERS[kind](list(model.parameters())), samples("gpt2", STEPS * size)
    with kept_in_double():
        for start in range(0, len(every), size):
            model.zero_grad()
            model(**pad(every[start : start + size])).loss.backward()
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for one in optimizers:
                one.step()
    return dict(model.state_dict(keep_vars=False)), bytes_of(optimizers)


def train(kind: str, pipelines: str, max_norm: float = 0.0, **options: Any) -> Seen:
    """On a worker, in double precision."""
    model: Any = gpt2()
    options = {"sharded_optimizer": True, **options}
    plugin = make_plugin(model, pipelines, **options)
    optimizers = MAKERS[kind](list(model.parameters()))
    loader = plugin.prepare_dataloader(samples("gpt2", STEPS * batch_size(pipelines)), collate_fn=pad)
    model, *_ = Booster(plugin=plugin).boost(model, optimizers[0], None, loader)
    with kept_in_double():
        for inputs in loader:
            model.zero_grad()
            for output in model(**inputs):
                output.loss.backward()
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for one in optimizers:
                one.step()
    return Seen(weights_of(model), bytes_of(optimizers))


def assert_equal(found: Sequence[Any], oracle: Mapping[str, torch.Tensor], tolerance: float = EXACT) -> None:
    assert {name for one in found for name in one.weights} == set(oracle)
    for one in found:
        for name, weight in one.weights.items():
            assert (weight - oracle[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize(
    ("kind", "pipelines"),
    [
        ("AdamW", "2x2,1x3"),
        ("AdamW", ",".join(["1x1"] * 6)),  # more holders than gloo's ranks are connected for
        ("SGD", "1x2,1x2"),
        ("fused", "2x2,2x2"),
        ("Adafactor", "2x2,1x3"),
        ("several", "2x2,1x3"),
        ("several", "2x2,2x2"),
    ],
)
def test_weights_are_those_of_the_unsplit_model_and_each_state_is_kept_once(
    pool: Pool, kind: str, pipelines: str
) -> None:
    weights, num_bytes = unsplit(kind, batch_size(pipelines), max_norm=1.0)
    found = pool.run(num_ranks(pipelines), train, kind, pipelines, max_norm=1.0)
    assert_equal(found, weights, 1e-9 if kind == "Adafactor" else EXACT)
    assert sum(one.num_bytes for one in found) == num_bytes


def bytes_after_a_step(sharded: bool) -> tuple[int, int]:
    """On a worker: those of the weights, and how many a step's gradients and sums leave in use."""
    model = parallelize(gpt2(n_layer=4), 1, num_microbatches=2, sharded_optimizer=sharded)
    found = []
    for _ in range(3):
        time.sleep(0.2)  # gloo's thread has a buffer in hand for a moment after its sum
        found.append(live_bytes())
        backward(model, 0)
    return sum(one.nbytes for one in model.parameters()), found[2] - found[0]


@pytest.mark.parametrize("sharded", [False, True])
def test_summed_gradients_are_kept_by_the_owners_only(pool: Pool, sharded: bool) -> None:
    (weights, _), *_ = found = pool.run(2, bytes_after_a_step, sharded)
    assert sum(gradients for _, gradients in found) / weights == pytest.approx(1 if sharded else 2, rel=0.03)


# ---------------------------------------------------------------- how the steps are made


class Noted(NamedTuple):
    """The weights at the end; after each step the loss of an evaluation, the norm, and the scale."""

    weights: dict[str, torch.Tensor]
    numbers: list[tuple[float, ...]]


SETTINGS = {"compiled": {"n_layer": 1}, "slices": {"vocab_size": 98}}  # an odd vocabulary cannot be halved
FEW = ("left out", "compiled")  # which train no layer norms, and nothing else


def steps(how: str, options: Mapping[str, Any] | None = None) -> Noted:
    """Training by hand. On a worker over equal pipelines of `options`; without any of the unsplit model, as the oracle.

    Whoever reads a weight after a step sees the new one: a hook of the optimizer, an average, an evaluation.
    """
    model: Any = gpt2(**SETTINGS.get(how, {}))
    if how == "scaler":  # which takes no doubles
        model.float()
    if how == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
    if options is not None:
        model = parallelize(model, num_microbatches=2, **options)
    last = options is None or model.data_parallel_rank == model.data_parallel_size - 1
    # Each parameter more takes the compiler half a second.
    given = [one for name, one in model.named_parameters() if (".ln_" in name) != (how == "left out") or how not in FEW]
    optimizer = torch.optim.AdamW(given, lr=1e-2, eps=1e-4)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)
    if how == "changed":  # also a scheduler that changes Adam's first beta
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
    if how == "compiled":
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaler")
    spoiled = next(one for name, one in model.named_parameters() if "ln_1" in name or "ln_f" in name)
    numbers, looked = list[tuple[float, ...]](), [0.0]
    optimizer.register_step_post_hook(lambda *_: looked.append(checksum(model)))
    for number in range(STEPS):
        overflows = how == "scaler" and number == 1 and last
        handle = spoiled.register_hook(lambda gradient: gradient * torch.inf) if overflows else None
        deferred = how == "no_sync" and number != STEPS - 1
        with model.no_sync() if deferred and options is not None else contextlib.nullcontext():
            backward(model, number, scaler)
        if handle is not None:
            handle.remove()
        if deferred or (how == "accumulated" and number == 0):
            continue
        scaler.unscale_(optimizer)
        for parameter in model.parameters() if how == "changed" else ():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=0.1)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        assert overflows or looked[-1] == checksum(model)
        model.zero_grad(set_to_none=how != "to zero")
        with torch.no_grad():
            numbers.append(
                (norm if math.isfinite(norm) else -1.0, scaler.get_scale(), float(model(**batch("causal", 2, 5)).loss))
            )
    return Noted(weights_of(model), numbers)


def checksum(model: nn.Module) -> float:
    return float(sum(one.detach().sum() for one in model.parameters()))


def in_double(*cases: tuple[str, Mapping[str, Any] | None]) -> list[Noted]:
    """`steps` for one case after the other."""
    noted = []
    for how, options in cases:
        with contextlib.nullcontext() if how == "scaler" else kept_in_double():
            noted.append(steps(how, options))
    return noted


@functools.cache
def unsplit_steps(how: str) -> Noted:
    return in_double((how, None))[0]


HOW = ["plain", "accumulated", "no_sync", "to zero", "frozen", "scaler", "changed", "left out", "compiled"]


@pytest.mark.parametrize(("hows", "copies"), [(HOW, 1), (["accumulated"], 2)])
def test_however_the_steps_are_made_nobody_sees_a_stale_weight(pool: Pool, hows: list[str], copies: int) -> None:
    cases = [(how, {"stages": 1, "sharded_optimizer": copies}) for how in hows]
    ranks = pool.run(2 * copies, in_double, *cases, timeout=240)
    for how, found in zip(hows, zip(*ranks, strict=True), strict=True):
        print(how)  # for pytest to show with a failure
        expected, tolerance = unsplit_steps(how), 1e-4 if how == "scaler" else EXACT
        assert_equal(found, expected.weights, tolerance)
        for one in found:
            torch.testing.assert_close(
                torch.tensor(one.numbers), torch.tensor(expected.numbers), rtol=tolerance, atol=tolerance
            )


def test_schedules_sum_gradients_at_their_owners(pool: Pool) -> None:
    schedules = ["gpipe", "zb-h1", "zb-v", "interleaved-1f1b"]
    cases = [("plain", {"stages": 2, "schedule": schedule, "sharded_optimizer": True}) for schedule in schedules]
    ranks = pool.run(4, in_double, *cases, timeout=120)
    for schedule, found in zip(schedules, zip(*ranks, strict=True), strict=True):
        print(schedule)
        assert_equal(found, unsplit_steps("plain").weights)


def test_slices_of_tensor_parallel_ranks_have_owners_too(pool: Pool) -> None:
    expected, options = unsplit_steps("slices"), {"stages": 1, "tensor_parallel_size": 2, "sharded_optimizer": True}
    for (one,) in pool.run(4, in_double, ("slices", options), timeout=60):
        torch.testing.assert_close(torch.tensor(one.numbers), torch.tensor(expected.numbers), rtol=EXACT, atol=EXACT)
        whole = {name: value for name, value in one.weights.items() if value.shape == expected.weights[name].shape}
        assert whole and len(whole) < len(one.weights)
        assert_close(whole, expected.weights)


def two_optimizers(options: Mapping[str, Any] | None = None) -> tuple[list[tuple[bool, ...]], dict[str, torch.Tensor]]:
    """Two optimizers under one GradScaler, the second of a single weight, which most ranks do not own or hold. In the
    second step a gradient of the first one overflows on one rank: it is skipped, the second is not. What moved and the
    scale, for each step; at last the weights."""
    model: Any = gpt2(dtype=torch.float32)
    if options is not None:
        model = parallelize(model, num_microbatches=2, **options)
    matrices, alone, held = [], [], {}
    for name, parameter in model.named_parameters():
        held[name] = parameter
        (alone if name == "transformer.h.0.ln_1.bias" else matrices).append(parameter)
    known = model.pipeline.known if options is not None else held
    alone = [known["transformer.h.0.ln_1.bias"]]  # a rank of a later stage has it without its storage
    optimizers = [torch.optim.AdamW(matrices, lr=1e-2, eps=1e-4), torch.optim.SGD(alone, lr=0.1)]
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**10), list[tuple[bool, ...]]()
    spoiled = next(one for name, one in held.items() if "mlp" in name)
    for number in range(STEPS):
        overflows = number == 1 and (options is None or model.pipeline.rank == model.pipeline.layout.world_size - 1)
        handle = spoiled.register_hook(lambda gradient: gradient * torch.inf) if overflows else None
        before = [[one.detach().clone() for one in some] for some in (matrices, alone)]
        backward(model, number, scaler)
        if handle is not None:
            handle.remove()
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        model.zero_grad()
        some = zip(before, (matrices, alone), strict=True)
        moved = [all(torch.equal(a, b) for a, b in zip(*both, strict=True) if a.numel()) for both in some]
        seen.append((moved[0], moved[1] or not alone[0].numel(), scaler.get_scale() == 2.0 ** (10 - (number > 0))))
    return seen, weights_of(model)


@pytest.mark.parametrize("sharded", [True, False])
def test_an_overflow_skips_the_step_of_its_optimizer_on_all_ranks_and_of_no_other(pool: Pool, sharded: bool) -> None:
    expected, weights = two_optimizers()
    assert [row[0] for row in expected] == [False, True, False]
    for seen, found in pool.run(4, two_optimizers, {"stages": 2, "sharded_optimizer": sharded}):
        assert [row[0] for row in seen] == [False, True, False] and all(row[2] for row in seen)
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-4)


def looks(lora: bool, folder: str | None = None, options: Mapping[str, Any] | None = None) -> Noted:
    """What reads weights right after `step()`: averages, an evaluation, generation, a save, `state_dict()`."""
    model: Any = gpt2()
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn", "wte"], init_lora_weights=False))
        model = model.to(torch.float64)
    if options is not None:
        model = parallelize(model, num_microbatches=2, **options)
    average, held = torch.optim.swa_utils.AveragedModel(model), dict(model.named_parameters(remove_duplicate=False))
    own = {f"own {name}": one for name, one in weights_of(model).items()}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, eps=1e-4)
    numbers = list[tuple[float, ...]]()
    for number in range(STEPS):
        backward(model, number)
        optimizer.step()
        average.update_parameters(model)
        torch._foreach_lerp_(list(own.values()), [one.detach() for one in held.values()], 0.1)
        model.eval()
        with torch.no_grad():
            loss = float(model(**batch("causal", 2, 5)).loss)
        ids = batch("causal", 2, 5)["input_ids"]
        tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        model.train()
        numbers.append((loss, *map(float, tokens.flatten())))
        model.zero_grad()
    if folder is not None and options is not None:
        model.save_parallelized(folder, merge_checkpoints=True, safe_serialization=True)
    elif folder is not None:
        model.save_pretrained(folder)
    averages = {f"averaged {name}": one for name, one in weights_of(average.module).items()}
    state = model.state_dict()
    assert all(torch.equal(state[name], one) for name, one in model.named_parameters() if name in state)
    return Noted(own | weights_of(model) | averages, numbers)


def looks_in_double(*args: Any) -> Noted:
    with kept_in_double():
        return looks(*args)


@pytest.mark.parametrize(("lora", "stages"), [(False, 1), (True, 2)])
def test_what_reads_weights_right_after_a_step_has_the_new_ones(
    pool: Pool, tmp_path: Path, lora: bool, stages: int
) -> None:
    expected = looks_in_double(lora, str(tmp_path / "unsplit"))
    options = {"stages": stages, "sharded_optimizer": True}
    for one in pool.run(2 * stages, looks_in_double, lora, str(tmp_path / "split"), options, timeout=90):
        assert any("averaged" in name for name in one.weights) and (
            not lora or any("lora" in name for name in one.weights)
        )
        assert_close(one.weights, expected.weights)
        torch.testing.assert_close(torch.tensor(one.numbers), torch.tensor(expected.numbers), rtol=EXACT, atol=EXACT)
    files = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("unsplit", "split")]
    saved = [load_file(file) for (file,) in files]
    assert saved[0].keys() == saved[1].keys()
    assert all((saved[0][name] - saved[1][name]).abs().max() <= EXACT for name in saved[0])


# ---------------------------------------------------------------- checkpoints


def run_on(
    folder: str,
    stages: int,
    sharded: bool,
    save: bool = False,
    asynchronous: bool = False,
    family: str = "gpt2",
    slices: int = 1,
) -> dict[str, torch.Tensor]:
    """On a worker: two steps and a save, or a load; then one step more."""
    options = {"sharded_optimizer": sharded, "tensor_parallel_size": slices}
    model = parallelize(built(family), stages, num_microbatches=2, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    with kept_in_double():
        if save:
            for number in range(2):
                step_on(model, optimizer, number)
            penstock.save_checkpoint(folder, model=model, optimizer=optimizer, asynchronous=asynchronous)
            penstock.finish_saving(model)
            if sharded and slices == 1:  # what each rank keeps is in its own file
                (file,) = Path(folder).glob(f"*/optimizer_tp_0_pp_{torch.distributed.get_rank()}.safetensors")
                known = logical_names(model)
                names = {known[id(one.parameter)] for one in model.pipeline.held if one.parameter in optimizer.state}
                assert {name.partition("//")[0] for name in load_file(file)} - {""} == names and names
        else:
            penstock.load_checkpoint(folder, model=model, optimizer=optimizer)
        step_on(model, optimizer, 2)
    return weights_of(model)


def step_on(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    model.zero_grad()
    backward(model, number)
    optimizer.step()


def assert_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, value in found.items():
        assert (value - expected[name]).abs().max() <= EXACT, name


def test_a_checkpoint_is_the_same_whether_the_state_was_divided(pool: Pool, tmp_path: Path) -> None:
    weights = unsplit_steps_alone()
    divided = pool.run(2, run_on, str(tmp_path / "divided"), 1, True, save=True, asynchronous=True)
    whole = pool.run(2, run_on, str(tmp_path / "whole"), 1, False, save=True)
    for one in (*divided, *whole):
        assert_close(one, weights)
    files = [load_states(tmp_path / name) for name in ("divided", "whole")]
    assert files[0].keys() == files[1].keys() and len(files[0]) > 10
    resumed = pool.run(2, run_on, str(tmp_path / "divided"), 1, True)
    assert all(torch.equal(one[name], divided[0][name]) for one in resumed for name in one)
    for folder, stages, sharded, ranks in (("divided", 2, False, 2), ("whole", 2, True, 4)):
        for one in pool.run(ranks, run_on, str(tmp_path / folder), stages, sharded):
            assert_close(one, weights)


def built(family: str) -> Any:
    return gpt2() if family == "gpt2" else FAMILIES[family].build(vocab_size=98, num_hidden_layers=2)


def test_states_of_slices_and_of_parts_are_written_by_their_owners(pool: Pool, tmp_path: Path) -> None:
    """Norms of single heads are whole, and any rank of a tensor-parallel group may keep their state."""
    saved = pool.run(4, run_on, str(tmp_path), 1, True, save=True, family="qwen3", slices=2)
    resumed = pool.run(4, run_on, str(tmp_path), 1, True, family="qwen3", slices=2)
    for one, other in zip(resumed, saved, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    (alone,) = pool.run(1, run_on, str(tmp_path), 1, False, family="qwen3")
    assert_close(alone, unsplit_steps_alone("qwen3"))


def load_states(folder: Path) -> dict[str, torch.Tensor]:
    """What the files of the optimizer's state hold, each name once."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("**/optimizer_*.safetensors")):
        content = load_file(file)
        assert found.keys().isdisjoint(content)
        found |= {name: value for name, value in content.items() if "random" not in name}
    return found


@functools.cache
def unsplit_steps_alone(family: str = "gpt2") -> dict[str, torch.Tensor]:
    model: Any = built(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    with kept_in_double():
        for number in range(3):
            step_on(model, optimizer, number)
    return dict(model.state_dict())


# ---------------------------------------------------------------- what is refused


class Decaying(torch.optim.SGD):
    """Changes weights that have no gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.detach().mul_(0.9)
        return super().step()


class Averaging(torch.optim.SGD):
    def eval(self) -> None: ...


def step_with(kind: type[torch.optim.Optimizer], stages: int) -> None:
    model = parallelize(gpt2(), stages, num_microbatches=2, sharded_optimizer=True)
    further = {"optimizer_class": torch.optim.SGD} if kind is ZeroRedundancyOptimizer else {}
    optimizer: Any = kind(model.parameters(), lr=0.1, **further)  # type: ignore[call-arg]
    step_on(model, optimizer, 0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Decaying, "Decaying changes weights, or makes state for them, where they have no gradient"),
        (Averaging, "Averaging has other weights in evaluation"),
        (torch.optim.LBFGS, "LBFGS lets updates depend on other parameters"),
        (ZeroRedundancyOptimizer, "ZeroRedundancyOptimizer divides its state among all ranks"),
    ],
)
def test_optimizers_that_cannot_be_divided_are_refused_by_name(
    pool: Pool, kind: type[torch.optim.Optimizer], words: str
) -> None:
    for outcome in pool.run(2, step_with, kind, 1, outcomes=True):
        assert isinstance(outcome, Exception) and words in str(outcome), outcome


def decayed_and_completed_at_the_end() -> None:
    """A step within a step, of which the outer one's end alone is looked at, as an elastic run does."""
    model = parallelize(gpt2(), 1, num_microbatches=2, sharded_optimizer=True)
    backward(model, 0)
    torch.optim.SGD(model.parameters(), lr=0.1)  # has torch call hooks around the step that is inherited, too
    completing: list[Any] = []
    with mock.patch.object(model.pipeline.recovery, "complete_update", completing.append):
        Decaying(model.parameters(), lr=0.1).step()
    assert len(completing) == 2
    completing[-1]()


def test_what_an_inner_step_was_refused_for_is_refused_at_the_end_of_the_outer_one(pool: Pool) -> None:
    for outcome in pool.run(2, decayed_and_completed_at_the_end, outcomes=True):
        assert isinstance(outcome, NotImplementedError) and "Decaying changes weights" in str(outcome)


def refused_after_another_model() -> bool:
    """Whether a step that was refused counts as one that was begun, where a model without owners came first."""
    backward(parallelize(gpt2(), 1, num_microbatches=2), 0)
    model = parallelize(gpt2(), 1, num_microbatches=2, sharded_optimizer=True)
    backward(model, 0)
    with pytest.raises(NotImplementedError, match="other weights in evaluation"):
        Averaging(model.parameters(), lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.pipeline.parts.updates.state() is Update.PART


def test_a_step_that_is_refused_has_not_begun(pool: Pool) -> None:
    assert pool.run(2, refused_after_another_model) == [False, False]


def updated_by_hand() -> None:
    model = parallelize(gpt2(), 1, num_microbatches=2, sharded_optimizer=True)
    for number in range(2):
        backward(model, number)
        with torch.no_grad():
            for one in model.parameters():
                if one.grad is not None:
                    one -= 0.1 * one.grad


def test_weights_that_no_optimizer_has_updated_are_noticed(pool: Pool) -> None:
    for outcome in pool.run(2, updated_by_hand, outcomes=True):
        assert isinstance(outcome, SettingsMismatch)
        assert "update it with step() of a torch.optim.Optimizer" in str(outcome)


@pytest.mark.parametrize(("stages", "copies"), [(2, 1), (1, 2)])
def test_where_no_weight_has_more_holders_it_has_no_effect_and_says_so(pool: Pool, stages: int, copies: int) -> None:
    assert pool.run(2, step_undivided, stages, copies) == [1, 0]


def step_undivided(stages: int, copies: int) -> int:
    """How often it was said on this rank. Over two stages the weights of an untied model have one holder each, in two
    replicas two. An optimizer that cannot be divided makes its step."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    model = parallelize(gpt2(tie_word_embeddings=False), stages, num_microbatches=2, sharded_optimizer=copies)
    step_on(model, Averaging(model.parameters(), lr=0.1), 0)
    return sum("sharded_optimizer has no effect" in words for words in said)


def test_owners_fill_what_memory_is_left() -> None:
    """Rank 2 alone holds what ranks 0 and 1 share: it owns less. All have the same left in the end."""
    parts = [OwnershipGroup(((0, 2),), 1.0)] * 12 + [OwnershipGroup(((1, 2),), 1.0)] * 12
    places = choose_owners(parts, [12.0, 12.0, 24.0])
    load = [12.0, 12.0, 24.0]
    for part, (place,) in zip(parts, places, strict=True):
        load[part.holders[0][place]] += 1.0
    assert load == [24.0, 24.0, 24.0]


def bytes_after_merging() -> tuple[int, int]:
    """On a worker: those of the optimizer's state here, and of the largest one."""
    config = LoraConfig(r=2, target_modules=["c_attn", "c_fc", "c_proj"])
    model = parallelize(get_peft_model(FAMILIES["gpt2"].build(), config), 1, num_microbatches=2, sharded_optimizer=True)
    model = model.merge_and_unload().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_on(model, optimizer, 0)
    return bytes_of([optimizer]), 2 * max(one.nbytes for one in model.parameters())


def test_what_is_new_after_merging_adapters_fills_up_what_owners_keep_already(pool: Pool) -> None:
    """As evenly as may be: Graham's bound is the largest of what is distributed."""
    (first, largest), (second, _) = pool.run(2, bytes_after_merging)
    assert abs(first - second) <= largest
