"""Bad input to the plugin: the documented errors, on every rank alike, before any process group is made."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from penstock import Booster, Elastic, HeterogeneousParallelPlugin, PipelineFailure, PipelineTemplate
from penstock.layout.pipelines import parse_pipelines
from tests.runtime.test_optimizer_trial import ByAllNorms, ByAllNormsIfAny
from tests.support.families import FAMILIES
from tests.support.hetero import batch_size, make_plugin, pad, samples
from tests.support.pool import Pool, WorkerDied
from tests.support.training import in_turn

MODULES = ["embedding", "h.0", "h.1", "head"]
ONE = PipelineTemplate("gpt2", [MODULES])
TWO = PipelineTemplate("gpt2", [MODULES[:2], MODULES[2:]])
ELASTIC = {"elastic": Elastic("tcp://head:29400"), "global_batch_size": 2}
THREE = PipelineTemplate("gpt2", [MODULES[:1], MODULES[1:2], MODULES[2:]])


@pytest.fixture
def world_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("world_of_three")
def test_pipelines_are_placed_one_after_another_without_a_process_group() -> None:
    plugin = HeterogeneousParallelPlugin(microbatch_size=4)
    plugin.set_pipelines(pipelines=[ONE, TWO], num_microbatches={ONE: 3, TWO: 5})
    assert [pipeline.ranks() for pipeline in plugin.layout.pipelines] == [(0,), (1, 2)]
    assert (plugin.num_microbatches, plugin.global_batch_size, plugin.pipeline_index) == ((3, 5), 32, 1)
    plugin.set_pipelines(pipelines=[ONE, ONE, ONE], num_microbatches=[3, 1, 2])
    assert plugin.num_microbatches == (3, 1, 2)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("world_of_three")
@pytest.mark.parametrize("pipelines", [[TWO], [TWO, TWO]])
def test_a_world_of_another_size_is_an_assertion_error_with_both_numbers(pipelines: list[PipelineTemplate]) -> None:
    needed = 2 * len(pipelines)
    message = f"^Number of ranks in pipeline templates does not match world size: .* {needed} ranks, .* has 3$"
    with pytest.raises(AssertionError, match=message):
        HeterogeneousParallelPlugin().set_pipelines(pipelines, num_microbatches={TWO: 1})


@pytest.mark.usefixtures("world_of_three")
def test_ranks_with_several_stages_are_told_apart_from_stages() -> None:
    plugin = HeterogeneousParallelPlugin(schedule={ONE: "1f1b", TWO: "zb-v"})
    with pytest.raises(
        AssertionError, match=r"need \(1 \+ 1\) for 1 \+ 2 stages, of which the schedule puts several on a"
    ):
        plugin.set_pipelines([ONE, TWO], num_microbatches=[1, 1])
    assert "1 stage of 6 modules" in repr(ONE).replace(str(len(MODULES)), "6")


@pytest.mark.usefixtures("world_of_three")
@pytest.mark.parametrize("counts", [{ONE: 1}, {}, [1], [1, 2, 3]])
def test_missing_microbatches_are_an_assertion_error(counts: Any) -> None:
    with pytest.raises(AssertionError, match=r"^All pipelines must have a corresponding number of microbatches: "):
        HeterogeneousParallelPlugin().set_pipelines([ONE, TWO], counts)


@pytest.mark.usefixtures("world_of_three")
@pytest.mark.parametrize(
    ("pipelines", "counts", "error", "message"),
    [
        ([ONE, TWO], {ONE: 1, TWO: 0}, ValueError, "pipeline 1 .* at least 1 microbatch, but has 0"),
        ([ONE, TWO], [1, -2], ValueError, "at least 1 microbatch, but has -2"),
        ([ONE, TWO], [1, 1.5], TypeError, "pipeline 1 .* is no integer: 1.5"),
        ([ONE, TWO], [1, True], TypeError, "is no integer: True"),
        ([ONE, TWO], 3, TypeError, "must be a dict .* or a list"),
        ([], {}, ValueError, "pipelines is empty"),
        (ONE, {ONE: 1}, TypeError, "must be a list of PipelineTemplate"),
        ([ONE, [MODULES]], {ONE: 1}, TypeError, "must be a list of PipelineTemplate"),
        ([ONE, PipelineTemplate("bert", [["a"], ["b"]])], [1, 1], ValueError, "for different models"),
    ],
)
def test_other_wrong_pipelines_are_named(pipelines: Any, counts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HeterogeneousParallelPlugin().set_pipelines(pipelines, counts)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tp_size": 0}, ValueError, "tp_size must be at least 1, got 0"),
        ({"tp_size": 2.0}, TypeError, "tp_size must be an integer, got 2.0"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be at least 1, got 0"),
        ({"context_parallel_size": 0}, ValueError, "context_parallel_size must be at least 1, got 0"),
        ({"context_parallel_size": 2, **ELASTIC}, ValueError, "with elastic=: .* share no sequences"),
        ({"precision": "fp8"}, ValueError, "precision must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"max_norm": None}, TypeError, r"max_norm must be a number, got None \(NoneType\)"),
        ({"max_norm": -1}, ValueError, "max_norm must not be negative, got -1"),
        ({"patience": float("inf")}, ValueError, "patience must be a positive number of seconds, got inf"),
        ({"sharded_optimizer": 0}, ValueError, "sharded_optimizer must be .* number of ranks .*, got 0"),
        ({"loss_chunk_tokens": 8, "tp_size": 2}, ValueError, "for whole heads, and tp_size 2 shards them"),
        ({"elastic": "tcp://head:29400"}, TypeError, "elastic must be a penstock.Elastic, got 'tcp://head:29400'"),
        ({"schedule": "2f2b"}, ValueError, "unknown schedule '2f2b': known are .*1f1b"),
        ({"schedule": {"gpt2": "1f1b"}}, TypeError, "keys of schedule must be pipeline templates, got 'gpt2'"),
        ({"schedule": {ONE: 3}}, TypeError, "schedule must be a name, .* got 3"),
        ({"schedule": ["0F0,0B1"]}, ValueError, "0B0"),
        ({"schedule": "mine.csv"}, FileNotFoundError, "mine.csv"),
    ],
)
def test_wrong_options_of_the_plugin_are_named(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HeterogeneousParallelPlugin(**options)


@pytest.mark.usefixtures("world_of_three")
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("zb-v", "'zb-v' puts 2 stages on each rank, but .* has 3"),
        ({TWO: "1f1b"}, "schedule has no key"),
        ({THREE: ["0F0,0B0", "1F0,1B0"]}, "written for 2 stages, but .* has 3"),
        ({THREE: ["0F0,0B0", "1F0,1B0", "2F0,2B0"]}, "not written for 4 microbatches"),
    ],
)
def test_a_schedule_that_does_not_fit_a_template_is_refused(schedule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeterogeneousParallelPlugin(schedule=schedule).set_pipelines([THREE], [4])


def with_a_file_of_ones_own(folder: str) -> None:
    """Each rank has another schedule under the same path, as two machines may."""
    order = "0F0,0F1,0B0,0B1" if dist.get_rank() else "0F0,0B0,0F1,0B1"
    path = Path(folder) / "mine.csv"
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            path.write_text(order)
            model: Any = FAMILIES["gpt2"].build()
            one = PipelineTemplate.balanced(model, 1)
            plugin = HeterogeneousParallelPlugin(schedule=path)
            plugin.set_pipelines([one, one], [2, 2])
        dist.barrier()
    plugin.configure(model)


def test_schedules_in_files_that_differ_are_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(2, with_a_file_of_ones_own, str(tmp_path), outcomes=True):
        assert isinstance(error, ValueError) and "the pipelines' schedules is ['mine [" in str(error), error


@pytest.mark.parametrize("text", ["", "3", "1x", "0x3", "2x0", "1x2;3x4", "ax2"])
def test_pipelines_that_are_written_wrongly_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 1x3,2x5"):
        parse_pipelines(text)
    assert parse_pipelines("1x3, 2X5") == [(1, 3), (2, 5)]


def test_what_comes_too_early_or_is_of_another_kind_is_said() -> None:
    plugin = HeterogeneousParallelPlugin()
    for call in (lambda: plugin.configure(FAMILIES["gpt2"].build()), lambda: plugin.prepare_dataloader([1, 2])):
        with pytest.raises(RuntimeError, match="call set_pipelines first"):
            call()
    with pytest.raises(ValueError, match="tp_size needs a model of transformers, and Linear is none"):
        HeterogeneousParallelPlugin(tp_size=2).configure(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="plugin must be a HeterogeneousParallelPlugin, got NoneType"):
        Booster(plugin=None)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("kind", [ByAllNorms, ByAllNormsIfAny])
def test_an_optimizer_that_clips_in_its_step_is_refused_before_an_elastic_run_begins(kind: Any) -> None:
    """There is no store to ask: nothing is exchanged."""
    model: Any = FAMILIES["gpt2"].build()
    with pytest.raises(NotImplementedError, match=f"with elastic= {kind.__name__} cannot clip gradients in its step"):
        HeterogeneousParallelPlugin(**ELASTIC).configure(model, kind(model.parameters(), lr=0.1))
    assert not dist.is_initialized()


class Lamb(torch.optim.SGD):
    """timm's, by its name."""


@pytest.mark.parametrize("kind", [Lamb, torch.optim.LBFGS])
def test_an_optimizer_that_depends_on_other_weights_is_refused_before_an_elastic_run_begins(kind: Any) -> None:
    """Its members may all have the whole model at first."""
    model: Any = FAMILIES["gpt2"].build()
    with pytest.raises(NotImplementedError, match=f"with elastic= {kind.__name__} cannot be used: its updates depend"):
        HeterogeneousParallelPlugin(**ELASTIC).configure(model, kind(model.parameters(), lr=0.1))
    assert not dist.is_initialized()


def test_a_template_of_another_model_is_refused_before_a_process_group_is_made() -> None:
    model: Any = FAMILIES["gpt2"].build()
    modules = PipelineTemplate.get_modules(model)
    for template, message in (
        (PipelineTemplate("bert", [modules]), "for the model 'bert', but the model is GPT2LMHeadModel"),
        (PipelineTemplate("gpt2", [modules[:-1]]), "do not match the modules in the model .*missing.*lm_head"),
        (PipelineTemplate("gpt2", [modules[::-1]]), "reordered"),
    ):
        plugin = HeterogeneousParallelPlugin()
        plugin.set_pipelines([template], [1])
        with pytest.raises(ValueError, match=message):
            plugin.configure(model)
    assert not dist.is_initialized()


def test_a_data_set_smaller_than_a_global_batch_says_what_to_do() -> None:
    plugin = make_plugin(FAMILIES["gpt2"].build(), "1x4")
    with pytest.raises(ValueError, match=r"7 samples, fewer than one global batch of 8 .*set drop_last=False"):
        plugin.prepare_dataloader(samples("gpt2", 7), drop_last=True)
    assert len(plugin.prepare_dataloader(samples("gpt2", 7))) == 1


def test_balanced_templates_satisfy_their_own_rules() -> None:
    model: Any = FAMILIES["gpt2"].build()
    for stages in range(1, 7):
        template = PipelineTemplate.balanced(model, stages)
        template.validate(model)
        assert template.num_stages == stages
    with pytest.raises(ValueError, match="6 units cannot give 7 stages"):
        PipelineTemplate.balanced(model, 7)


def wrong_uses() -> list[str]:
    """On a worker: uses that are refused, and a step after them."""
    model: Any = FAMILIES["gpt2"].build()
    plugin = make_plugin(model, "1x1,1x2")
    booster = Booster(plugin=plugin)
    plain: Any = DataLoader(samples("gpt2", 6), batch_size=2, collate_fn=pad)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = plugin.prepare_dataloader(samples("gpt2", 6), collate_fn=pad)
    other = make_plugin(model, "1x2,1x2").prepare_dataloader(samples("gpt2", 8))
    refused = []

    def refuse(call: Any) -> None:
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            refused.append(f"{type(error).__name__}: {error}")

    refuse(lambda: booster.boost(model, sgd, None, plain))
    refuse(lambda: booster.boost(model, sgd, None, other))
    refuse(lambda: booster.execute_pipeline(iter(loader), model))
    model, optimizer, _, loader, _ = booster.boost(model, sgd, None, loader)
    refuse(lambda: booster.boost(model))
    refuse(lambda: plugin.set_pipelines(list(plugin.pipelines), [1, 1]))
    refuse(lambda: booster.execute_pipeline(iter(plain), model))
    refuse(lambda: booster.clip_grad_norm(sgd, 1.0))  # type: ignore[arg-type]  # that is the point
    refuse(lambda: optimizer.step(lambda: 0.0))
    unlabelled = plugin.prepare_dataloader([{"input_ids": sample["input_ids"][:4]} for sample in samples("gpt2", 6)])
    refuse(lambda: booster.execute_pipeline(iter(unlabelled), model))
    booster.execute_pipeline(iter(loader), model)
    return refused


def test_wrong_uses_are_refused_and_the_next_step_works(pool: Pool) -> None:
    first, second = pool.run(2, wrong_uses)
    assert first == [message.replace("pipeline_index=1", "pipeline_index=0") for message in second]
    expected = [
        "TypeError: the dataloader is a DataLoader, which would give every pipeline the same samples: make it with "
        "plugin.prepare_dataloader",
        "ValueError: the dataloader was made for num_microbatches=(2, 2)",
        "TypeError: the GPT2LMHeadModel is not parallelised",
        "ValueError: this model is parallelised already",
        "RuntimeError: set_pipelines must come before configure",
        "TypeError: the data iterator gave a dict",
        "TypeError: the SGD is not wrapped",
        "ValueError: an optimizer's step over pipelines takes no closure",
        "ValueError: GPT2LMHeadModel computes no loss from the inputs ['input_ids']: pass labels",
    ]
    assert len(first) == len(expected)
    for message, begin in zip(first, expected, strict=True):
        assert message.startswith(begin)


def killed_in_its_second_step(victim: int) -> tuple[float, str]:
    """What the others raise, and how many seconds after their step began."""
    model: Any = FAMILIES["gpt2"].build()
    plugin = make_plugin(model, "1x2,1x2,2x3")
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(samples("gpt2", 4 * batch_size("1x2,1x2,2x3")), collate_fn=pad)
    model, _, _, loader, _ = booster.boost(model, None, None, loader)
    batches = iter(loader)
    booster.execute_pipeline(batches, model)
    begin = time.monotonic()
    with pytest.raises(PipelineFailure) as failure:
        for number, output in enumerate(model(**next(batches))):
            if number == 1 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            output.loss.backward()
    return time.monotonic() - begin, str(failure.value)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_ends_all_others_within_ten_seconds(pool: Pool, victim: int) -> None:
    """Also those of other pipelines, which meet it in the gradients' sum only; and it is named."""
    outcomes = pool.run(4, killed_in_its_second_step, victim, outcomes=True, timeout=150)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert isinstance(outcome, WorkerDied)
        else:
            assert not isinstance(outcome, BaseException), f"rank {rank}: {outcome!r}"
            seconds, message = outcome
            assert seconds < 10 and message.startswith(f"rank {victim} was lost: "), outcome


def configure_differently(what: str) -> str:
    """Rank 1 is given something else than rank 0."""
    odd = dist.get_rank() == 1
    model = FAMILIES["gpt2"].build(**({"n_positions": 80} if odd and what == "model" else {}))
    entries = {"sliding_attention": {1e4}, "full_attention": [1e6]}
    model.config.rope_parameters = dict(reversed(entries.items())) if odd else entries
    plugin = HeterogeneousParallelPlugin(
        microbatch_size=2,
        max_norm=1.0 if odd and what == "max_norm" else 0.0,
        precision="fp16",
        growth_interval=5 if odd and what == "growth_interval" else 1000,
    )
    template = PipelineTemplate.balanced(model, 2)
    plugin.set_pipelines([template], [3 if odd and what == "microbatches" else 2])
    try:
        plugin.configure(model)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_were_given_different_things_all_say_so(pool: Pool) -> None:
    """Another order of entries is no difference."""
    words = {
        "model": "n_positions is 64 on rank 0 and 80 on rank 1",
        "max_norm": "max_norm is 0.0 on rank 0 and 1.0 on rank 1",
        "growth_interval": "the loss scale's growth_interval is 1000 on rank 0 and 5 on rank 1",
        "microbatches": "num_microbatches is (2,) on rank 0 and (3,) on rank 1",
    }
    for *messages, alike in pool.run(
        2, in_turn, [partial(configure_differently, what) for what in (*words, "nothing")]
    ):
        assert alike == ""
        for message, expected in zip(messages, words.values(), strict=True):
            assert "the ranks were given different models" in message and expected in message
