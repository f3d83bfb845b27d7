"""The trainer's options: defaults that fit together, and refusals that say what would do."""

import re

import pytest
import torch
from kinds.configs import GPTConfig
from kinds.memory import check_memory, estimate
from kinds.models import GPT, apply_policy, layer_costs, resnet
from kinds.modes import blocks_of
from kinds.options import OptionError, Options, World, build_parser, read_options

from penstock.layout.partition import partition
from penstock.planning.memory import memory_of_ranks, readable
from penstock.planning.profile import held_by_stages
from penstock.planning.profiling import profile_model
from penstock.planning.unit_cost import LiveBytes
from penstock.schedule import build


def world(size: int = 1, device_type: str = "cpu", num_devices: int = 8) -> World:
    return World(size, size, 0, 0, device_type, num_devices)


def options(text: str, size: int = 1, **place: object) -> Options:
    return read_options(text.split(), world(size, **place))  # type: ignore[arg-type]  # the world's own fields


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("--model gtp", 1, "unknown model 'gtp': known are GPTTiny"),
        ("--mode dpp", 1, "unknown mode 'dpp': known are ddp, pdp, fsdp, pp"),
        ("--dtype fp8", 1, "unknown dtype 'fp8': known are fp32, bf16, fp16"),
        ("--activation none", 1, "unknown activation 'none': known are noop, checkpoint, offload"),
        ("--optimizer lion", 1, "unknown optimizer 'lion': known are adamw, sgd"),
        ("--mode pp --schedule 1f2b", 2, "unknown schedule '1f2b': known are gpipe, 1f1b"),
        ("--mode pdp --ndevice_per_proc 9", 1, "--ndevice-per-proc 9 is more than the 8 CPU core(s) of this machine"),
        ("--mode pdp --ndevice_per_proc 0", 1, "--ndevice-per-proc must be at least 1, but is 0"),
        ("--iterations 0", 1, "--iterations must be at least 1, but is 0"),
        ("--warmup -1", 1, "--warmup must not be negative, but is -1"),
        ("--ndevice_per_proc 2", 1, "--ndevice-per-proc has no meaning with --mode ddp: it is for pdp"),
        ("--schedule 1f1b", 1, "--schedule has no meaning with --mode ddp: it is for pp"),
        ("--mode pp --cpu-offload", 2, "--cpu-offload has no meaning with --mode pp: it is for fsdp"),
        ("--mode ddp --prefetch", 2, "--prefetch has no meaning with --mode ddp: it is for fsdp"),
        ("--batch_size 10 --chunks 4", 2, "such as 8 or 16"),
        ("--batch_size 3", 2, "a batch of 3 samples cannot be divided equally over 2 processes"),
        ("--batch_size 2 --chunks 4", 1, "--batch-size must be a multiple of 4, such as 4"),
        ("--mode pp --pipelines 1x4,1x3 --batch_size 8", 2, "the 7 microbatches of --pipelines 1x4,1x3"),
        ("--mode pp --pipelines 1x4,2x8", 2, "--pipelines 1x4,2x8 needs 3 processes, but 2 were started"),
        ("--mode pp --pipelines 1x4 --chunks 2", 1, "leave out --chunks"),
        ("--mode pdp --ndevice_per_proc 5", 1, "5 stages need at least 5 layers, but GPTTiny has 4"),
        ("--mode pp --schedule zb-v", 3, "6 stages need at least 6 layers, but GPTTiny has 4"),
        ("--model resnet50 --mode pp", 2, "ResNet50 has no meaning with --mode pp"),
        ("--model resnet50 --mode pdp", 1, "Use --mode ddp or fsdp, or one of GPTTiny, GPTSmall"),
        ("--model resnet50 --n_layer 3", 1, "--n-layer is a size of a GPT, not of ResNet50: that has --image-size"),
        ("--model resnet50 --mode fsdp --cpu-offload", 1, "--cpu-offload and --prefetch are for GPT models"),
        ("--image_size 64", 1, "--image-size is a size of a ResNet, not of GPTTiny: that has --block-size"),
        ("--n_head 3", 1, "n_head (3) must divide n_embd (128)"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(text: str, size: int, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        options(text, size)
    assert message in str(raised.value)


def test_more_gpus_than_there_are_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"with 4 process\(es\) on this machine needs 12 GPUs, but it has 8: at most 2"
    ):
        options("--mode pdp --ndevice_per_proc 3", 4, device_type="cuda")
    with pytest.raises(OptionError, match="needs 4 GPUs, but it has 2"):
        options("", 4, device_type="cuda", num_devices=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--pipelines 1y4", "argument --pipelines: pipelines are written as"),
        ("--pipelines 0x4", "such as 1x3,2x5"),
        ("--batch_size many", "argument --batch_size: invalid int value: 'many'"),
        ("--modes ddp", "unrecognized arguments: --modes ddp; did you mean --mode?"),
        ("--batchsize 4", "did you mean --batch-size?"),
    ],
)
def test_what_cannot_be_parsed_is_named(text: str, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        options(text)
    assert message in str(raised.value)


def test_defaults_are_small_on_a_cpu_and_real_on_a_gpu() -> None:
    assert options("").model == "GPTTiny" and options("", device_type="cuda").model == "GPTSmall"
    config = options("--model small").config
    assert isinstance(config, GPTConfig) and (config.vocab_size, config.block_size) == (50257, 2048)


@pytest.mark.parametrize("size", [1, 3, 6])
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "pdp", "pp"])
def test_default_shares_are_equal_work_in_every_mode(mode: str, size: int) -> None:
    """As many devices, be they one process's or several processes': the same global batch, cut without a rest."""
    text = f"--mode {mode} --n_layer 12" + (f" --ndevice_per_proc {size}" if mode == "pdp" else "")
    found = options(text, 1 if mode == "pdp" else size)
    assert found.batch_size == 4 * size
    replicas = {"pp": 1, "pdp": 1}.get(mode, size)
    assert found.batch_size % (replicas * found.chunks) == 0
    if mode == "pp":
        assert found.pipelines == ((size, found.chunks),)


def test_dashes_and_underscores_are_alike() -> None:
    assert options("--batch-size 6 --n-layer 7").record() == options("--batch_size=6 --n_layer=7").record()
    assert options("--local-rank 0").record() == options("").record()
    assert options("--no_memory_check").record() == options("--no-memory-check").record() != options("").record()


def test_help_shows_one_spelling_of_each_option() -> None:
    shown = re.findall(r"--[\w-]+", build_parser().format_help().partition("options:")[2].partition("Launch it")[0])
    assert "--batch-size" in shown and not any("_" in option for option in shown)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("sizes", "policy", "dtype"),
    [
        ("--n_embd 64 --vocab_size 100 --block_size 64", "noop", "bf16"),
        ("--n_embd 64 --vocab_size 100 --block_size 64", "checkpoint", "fp32"),
        ("--vocab_size 2000", "noop", "fp32"),
        ("--n_layer 8 --vocab_size 1000", "checkpoint", "bf16"),
    ],
)
def test_estimated_activations_are_what_a_step_takes(sizes: str, policy: str, dtype: str) -> None:
    chosen = options(f"{sizes} --batch_size 2 --dtype {dtype} --activation {policy}")
    assert isinstance(chosen.config, GPTConfig)
    model = GPT(chosen.config, "cpu", chosen.torch_dtype)
    apply_policy(blocks_of(model), policy)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(chosen.config.vocab_size, (2, chosen.config.block_size))
    live = LiveBytes()
    with live:
        output = model(input_ids=ids, labels=ids)  # a caller may hold it
        output.loss.backward()
    found = estimate(chosen, world())
    assert found.activations == pytest.approx(live.peak, rel=0.1)
    assert found.weights == sum(p.numel() for p in model.parameters()) * chosen.torch_dtype.itemsize
    assert (found.gradients, found.optimizer) == (found.weights, 2 * found.weights)


def test_estimated_activations_of_images_are_what_a_step_takes() -> None:
    chosen = options("--model ResNet18 --batch_size 4 --image_size 64")
    model = resnet(chosen.config, "cpu", chosen.torch_dtype, 0)  # type: ignore[arg-type]  # of images
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = LiveBytes()
    with live:
        model.train()(pixel_values=torch.zeros(4, 3, 64, 64), labels=torch.zeros(4, dtype=torch.long)).loss.backward()
    assert estimate(chosen, world()).activations == pytest.approx(live.peak, rel=0.1)


def test_sharding_and_pipelines_divide_the_estimate() -> None:
    base = "--model GPTXL --block_size 128 --batch_size 8"
    whole = estimate(options(f"--mode ddp {base}", 8), world(8))
    shard = estimate(options(f"--mode fsdp {base}", 8), world(8))
    assert shard.optimizer == whole.optimizer / 8
    # The fullest stage has the embedding, or the head, beside its blocks.
    stage = estimate(options(f"--mode pp {base}", 8), world(8))
    assert whole.optimizer / 8 < stage.optimizer < whole.optimizer / 4
    alone = estimate(options(f"--mode pdp --ndevice_per_proc 8 {base}"), world())
    assert whole.optimizer / 8 < alone.optimizer < whole.optimizer / 4
    assert estimate(options(f"--mode ddp --optimizer sgd {base}", 8), world(8)).optimizer == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipelines_estimate_is_that_of_the_planner(schedule: str) -> None:
    """With the messages and what is put off, though only one block was looked at."""
    chosen = options(f"--mode pp --pipelines 2x8 --untied --batch_size 16 --schedule {schedule}", 2)
    assert isinstance(chosen.config, GPTConfig)
    profile = profile_model(GPT(chosen.config, "meta", chosen.torch_dtype), 2, chosen.config.block_size)
    sizes = partition(layer_costs(chosen.config), [1.0, 1.0]).sizes
    units = profile.units  # the embedding and the head are two units each
    stages = held_by_stages([units[: sizes[0] + 1], units[sizes[0] + 1 :]])
    expected = memory_of_ranks(build(schedule, 2, 8), stages)
    assert estimate(chosen, world(2)) == max(expected, key=lambda one: one.total)
    assert any(stage.deferred for stage in stages) and stages[0].sent == stages[1].received > 0


def test_the_longer_pipeline_is_not_the_fuller_one() -> None:
    unlike = estimate(options("--mode pp --pipelines 1x4,2x8 --untied", 3), world(3))
    alone = estimate(options("--mode pp --pipelines 1x4 --batch_size 4 --untied"), world())
    assert unlike == alone


def test_a_model_that_cannot_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(OptionError) as raised:
        check_memory(options("--model GPT175B --batch_size 8", 8), world(8))
    text = str(raised.value)
    # 174.6 G parameters of 4 bytes, and as much for gradients, twice for AdamW.
    assert "GPT175B with --mode ddp and --batch-size 8 needs about 2." in text and "TB on a device" in text
    assert "(weights 698 GB, gradients 698 GB, optimizer 1.4 TB, activations" in text and "are free" in text
    assert "--mode fsdp or pp" in text and "--activation checkpoint" in text
    check_memory(options(""), world())


def test_sizes_are_readable() -> None:
    assert [readable(x) for x in (12, 3.2e4, 5e6, 1.25e9, 2.8e12, 3e15)] == [
        "12 bytes", "32 kB", "5 MB", "1.25 GB", "2.8 TB", "3e+03 TB",
    ]  # fmt: skip
