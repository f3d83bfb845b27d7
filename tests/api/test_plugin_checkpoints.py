"""The Booster's checkpoints: a run goes on as if it had not been interrupted, also on other pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock import Booster
from penstock.checkpoint.untrusted import CheckpointError
from tests.support.families import FAMILIES
from tests.support.hetero import make_plugin, num_ranks, pad, samples
from tests.support.pool import Pool

NUMBER = 20  # two global batches of five microbatches of two


def run(
    pipelines: str, folder: str, steps: range, shard: bool = False, seed: int = 0, schedule: str = "1f1b"
) -> list[float]:
    """Steps of an epoch, with Adam, a scheduler, dropout and fp16, between a load and a save of everything; the process
    begins with `seed`."""
    torch.manual_seed(seed)
    model: Any = FAMILIES["gpt2"].build(dropout=0.2, dtype=torch.float32)
    if seed:
        model.apply(lambda module: [p.data.normal_() for p in module.parameters(recurse=False)])
    plugin = make_plugin(model, pipelines, schedule, precision="fp16", initial_scale=2.0**8, growth_interval=1)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(samples("gpt2", NUMBER), shuffle=True, collate_fn=pad)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.5)
    model, optimizer, _, loader, scheduler = booster.boost(model, adam, None, loader, scheduler)
    here = Path(folder)
    if steps.start:
        booster.load_model(model, here / "model")
        booster.load_optimizer(optimizer, here / "model")
        booster.load_lr_scheduler(scheduler, here / "scheduler.bin")
        loader.load_state_dict(torch.load(here / "loader.bin"))
    batches, losses = iter(loader), []
    for _ in steps:
        losses.append(booster.execute_pipeline(batches, model, None, optimizer)["loss"].item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    losses += [model.pipeline.loss_scale, optimizer.param_groups[0]["lr"]]
    booster.save_model(model, here / "model", shard=shard, size_per_shard=1, use_safetensors=shard)
    booster.save_optimizer(optimizer, here / "model")
    booster.save_lr_scheduler(scheduler, here / "scheduler.bin")
    if torch.distributed.get_rank() == 0:
        torch.save(loader.state_dict(), here / "loader.bin")
    torch.distributed.barrier()
    return losses


BEFORE = "1x2,2x3"


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """What a run without an interruption tells, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return pool.run(num_ranks(BEFORE), run, BEFORE, str(folder), range(2))[0], folder


@pytest.mark.parametrize(("after", "shard", "schedule"), [("1x2,1x3", True, "1f1b"), (BEFORE, False, "zb-v")])
def test_a_run_goes_on_also_on_other_pipelines(
    pool: Pool, whole: tuple[list[float], Path], tmp_path: Path, after: str, shard: bool, schedule: str
) -> None:
    """`schedule`: of the second half; the first has one stage on each rank."""
    expected, folder = whole
    (first, *_) = pool.run(num_ranks(BEFORE), run, BEFORE, str(tmp_path), range(1), shard=shard)
    (second, *_) = pool.run(num_ranks(after), run, after, str(tmp_path), range(1, 2), seed=1, schedule=schedule)
    assert first[0] == expected[0]
    assert second[0] == pytest.approx(expected[1], rel=1e-3)  # float16 rounds otherwise in another order of sums
    assert second[1:] == expected[2:]
    reloaded, plain = (transformers.AutoModelForCausalLM.from_pretrained(one / "model") for one in (tmp_path, folder))
    for name, parameter in reloaded.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), atol=2e-2, rtol=0)


def random_numbers_of_the_user(folder: str, pipelines: str) -> tuple[list[float], list[float]]:
    """What this rank's own generator gives after a save, and after the load of it."""
    model: Any = FAMILIES["gpt2"].build(dtype=torch.float32)
    booster = Booster(plugin=make_plugin(model, pipelines))
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    torch.manual_seed(100 + torch.distributed.get_rank())
    booster.save_optimizer(optimizer, folder)
    expected = torch.rand(2).tolist()
    torch.manual_seed(7)
    booster.load_optimizer(optimizer, folder)
    return expected, torch.rand(2).tolist()


def test_each_rank_goes_on_with_its_own_random_numbers(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, random_numbers_of_the_user, str(tmp_path), "1x2,1x1")
    assert all(expected == again for expected, again in found)
    assert len({tuple(expected) for expected, _ in found}) == len(found)


def loads(folder: str) -> list[str]:
    """Loading what is no checkpoint of this model is refused by name on all ranks; a parallel one is taken."""
    model: Any = FAMILIES["gpt2"].build(dtype=torch.float32)
    plugin = make_plugin(model, "1x1,1x1")
    booster = Booster(plugin=plugin)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, sgd)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    messages = []
    for name in ("missing", "llama", "wider"):
        with pytest.raises(CheckpointError) as error:
            booster.load_model(model, Path(folder) / name)
        messages.append(str(error.value))
    with pytest.raises(CheckpointError) as error:
        booster.load_optimizer(optimizer, Path(folder) / "llama")
    messages.append(str(error.value))
    with pytest.raises(ValueError, match="leave prefix and gather_dtensor out"):
        booster.save_model(model, folder, prefix="mine")
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    # What the folder lacks stays as it is, and no random number is drawn.
    with pytest.raises(CheckpointError, match=r"lacks transformer\.h\.1\.mlp\.c_fc\.weight"):
        booster.load_model(model, Path(folder) / "lacking")
    kept = dict(model.named_parameters())["transformer.h.1.mlp.c_fc.weight"]
    with torch.no_grad():
        kept.fill_(3.0)
    state = torch.get_rng_state()
    booster.load_model(model, Path(folder) / "lacking", strict=False)
    assert bool((kept == 3.0).all()) and torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        kept.copy_(before["transformer.h.1.mlp.c_fc.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    model.save_parallelized(Path(folder) / "parallel")
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    booster.load_model(model, Path(folder) / "parallel")
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    return messages


def test_foreign_checkpoints_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    FAMILIES["llama"].build(dtype=torch.float32).save_pretrained(tmp_path / "llama")
    FAMILIES["gpt2"].build(dtype=torch.float32, n_inner=64).save_pretrained(tmp_path / "wider")
    lacking = FAMILIES["gpt2"].build(dtype=torch.float32)
    state = {name: value for name, value in lacking.state_dict().items() if name != "transformer.h.1.mlp.c_fc.weight"}
    lacking.save_pretrained(tmp_path / "lacking", state_dict=state)
    first, second = pool.run(2, loads, str(tmp_path))
    assert first == second
    missing, llama, wider, optimizer = first
    assert f"{tmp_path}/missing is no directory" in missing
    assert f"to load {tmp_path}/llama failed" in llama
    assert f"to load {tmp_path}/wider failed" in wider and "c_fc" in wider
    assert "holds no parallel checkpoint" in optimizer
