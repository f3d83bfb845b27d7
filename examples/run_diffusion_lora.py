"""Fine-tune Flux with LoRA over pipeline stages, on latents and text embeddings computed beforehand.

python run_diffusion_lora.py                                                        # one process
torchrun --standalone --nproc-per-node 2 run_diffusion_lora.py --stages 2           # the same curve
torchrun --standalone --nproc-per-node 2 run_diffusion_lora.py --stages 2 --model black-forest-labs/FLUX.1-dev \\
    --data my_images --precision bf16

Without --model and --data it makes a tiny model with random weights and a small set, both in --output.
Run it again with --resume to continue from its last checkpoint, also with another number of stages.
The adapter that it leaves is loaded by FluxPipeline.load_lora_weights.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.nn import functional

import penstock

Sample = dict[str, torch.Tensor]
# Height and width of the small set's latents: the aspects of its images.
ASPECTS = ((8, 8), (6, 10), (10, 6))
NUM_IMAGES, NUM_TOKENS = 36, 8
SIZES: dict[str, Any] = {
    **{"in_channels": 16, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 16, "num_attention_heads": 2},
    **{"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 6, 6]},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a pipeline's folder or name; without it a tiny one with random weights")
    parser.add_argument("--data", type=Path, help="a folder of samples, see read_samples; without it a small set")
    parser.add_argument("--stages", type=int, default=1, help="ranks of a pipeline; more ranks make more pipelines")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--batch-size", type=int, default=4, help="images in a batch, all of one aspect")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="of the frozen base; adapters are fp32")
    parser.add_argument("--average", type=float, default=0.9, help="decay of the adapters' moving average")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for checkpoints and the adapter")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    return parser.parse_args()


# -- data --------------------------------------------------------------------------------------------------------------


def read_samples(folder: Path) -> list[Sample]:
    """One file of safetensors for each image, as written before the training by the pipeline's VAE and text encoders.

    latents: shape (channels, height, width), shifted and scaled as the VAE's configuration says
    prompt_embeds: shape (tokens, width); pooled_prompt_embeds: shape (width,)
    """
    return [load_file(file) for file in sorted(folder.glob("*.safetensors"))]


def make_samples(folder: Path) -> None:
    """Waves whose direction the text embedding tells."""
    folder.mkdir(parents=True)
    directions = torch.linspace(0, math.pi, NUM_IMAGES)
    for number, direction in enumerate(directions):
        height, width = ASPECTS[number % len(ASPECTS)]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        phase = rows * direction.cos() + columns * direction.sin()
        text = torch.linspace(0, 1, 32).mul(direction).sin()
        sample = {
            "latents": torch.stack([(phase + channel).cos() for channel in range(4)]),
            "prompt_embeds": text.repeat(NUM_TOKENS, 1),
            "pooled_prompt_embeds": text,
        }
        save_file(sample, folder / f"{number:03}.safetensors")


def batches(samples: list[Sample], size: int, epoch: int) -> list[list[Sample]]:
    """An epoch of batches, each of images of one aspect, in an order that the epoch's number decides."""
    order = random.Random(epoch)
    buckets: dict[torch.Size, list[Sample]] = {}
    for sample in order.sample(samples, len(samples)):
        buckets.setdefault(sample["latents"].shape, []).append(sample)
    found = [bucket[first : first + size] for bucket in buckets.values() for first in range(0, len(bucket), size)]
    order.shuffle(found)
    return found


def steps_from(samples: list[Sample], size: int, step: int) -> Iterator[list[Sample]]:
    """The batches from a step on, epoch after epoch."""
    per_epoch = len(batches(samples, size, 0))
    while True:
        yield batches(samples, size, step // per_epoch)[step % per_epoch]
        step += 1


def flow_matching(batch: list[Sample], seed: int, dtype: torch.dtype, guided: bool) -> dict[str, torch.Tensor]:
    """The transformer's inputs for noisy latents, and the velocity from image to noise that it shall tell.

    Noise and times are of the whole batch, alike on every rank.
    """
    draw = torch.Generator().manual_seed(seed)
    names = ("latents", "prompt_embeds", "pooled_prompt_embeds")
    latents, prompts, pooled = (torch.stack([sample[name] for sample in batch]) for name in names)
    count, channels, height, width = latents.shape
    noise = torch.randn(latents.shape, generator=draw)
    time = torch.randn(count, generator=draw).sigmoid()
    noisy = torch.lerp(latents, noise, time[:, None, None, None])
    pack = partial(
        FluxPipeline._pack_latents, batch_size=count, num_channels_latents=channels, height=height, width=width
    )
    inputs = {
        "hidden_states": pack(noisy),
        "timestep": time,
        "encoder_hidden_states": prompts,
        "pooled_projections": pooled,
        "txt_ids": torch.zeros(prompts.shape[1], 3),
        "img_ids": FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", torch.float32),
    }
    if guided:
        inputs["guidance"] = torch.ones(count)
    return {**{name: value.to(dtype) for name, value in inputs.items()}, "velocity": pack(noise - latents)}


def velocity_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    return functional.mse_loss(outputs[0].float(), inputs["velocity"])


# -- model -------------------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    """The trained parts of a tiny pipeline: a transformer with random weights, and a VAE for its images."""
    torch.manual_seed(0)
    transformer: Any = FluxTransformer2DModel(patch_size=1, **SIZES)
    transformer.save_pretrained(folder / "transformer", max_shard_size="200KB")
    vae: Any = AutoencoderKL(
        latent_channels=4, block_out_channels=(8, 8), norm_num_groups=2, shift_factor=0.0, scaling_factor=1.0,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    vae.save_pretrained(folder / "vae")


def with_adapters(model: Any, rank: int) -> Any:
    model.requires_grad_(False)
    model.enable_gradient_checkpointing()
    torch.manual_seed(0)  # alike on all ranks
    layers = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out"]
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=layers))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def update_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """The moving average is a state of the optimizer, so it is saved and restored with it, for any number of stages."""
    for parameter, state in optimizer.state.items():
        state.setdefault("average", parameter.detach().clone()).lerp_(parameter.detach(), 1 - decay)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the adapters have their averages."""

    def exchange() -> None:
        for parameter, state in optimizer.state.items():
            parameter.data, state["average"] = state["average"], parameter.data

    exchange()
    try:
        yield
    finally:
        exchange()


def main() -> None:
    options = parse_options()
    ranks = PartialState(cpu=not torch.cuda.is_available())
    model_folder, data = options.model or str(options.output / "base"), options.data or options.output / "data"
    with ranks.main_process_first():  # the other ranks then find the folders
        if ranks.is_main_process and not options.model and not Path(model_folder).exists():
            make_model(Path(model_folder))
        if ranks.is_main_process and not options.data and not data.exists():
            make_samples(data)
    samples, dtype = read_samples(data), DTYPES[options.precision]
    guided = bool(FluxTransformer2DModel.load_config(model_folder, subfolder="transformer").get("guidance_embeds"))
    held_out, samples = samples[:: len(samples) // 4], [one for i, one in enumerate(samples) if i % (len(samples) // 4)]

    example = flow_matching(samples[:1] * 2, 0, dtype, guided)
    del example["velocity"]
    model = penstock.from_pretrained(
        model_folder,
        subfolder="transformer",
        model_class=FluxTransformer2DModel,
        torch_dtype=dtype,
        adapt=partial(with_adapters, rank=options.lora_rank),
        criterion=velocity_loss,
        example_inputs=example,
        pipeline_parallel_size=options.stages,
        microbatch_size=1,
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], options.learning_rate)
    manager = penstock.CheckpointManager(
        str(options.output / "states"), model=model, optimizer=optimizer, every=options.save_every, keep_last=2
    )
    step = manager.resume() if options.resume else 0
    losses = list(manager.last.extra["losses"]) if step and manager.last else []
    share = slice(model.data_parallel_rank, None, model.data_parallel_size)

    for batch in steps_from(samples, options.batch_size, step):
        if step == options.steps:
            break
        inputs = flow_matching(batch, step, dtype, guided)
        mine = {name: value if name in ("txt_ids", "img_ids") else value[share] for name, value in inputs.items()}
        optimizer.zero_grad()
        for out in model(**mine):
            out.loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        update_average(optimizer, options.average)
        losses.append(model.pipeline.last_step.global_loss)
        step += 1
        manager.save(step, extra={"losses": losses})
        if ranks.is_main_process:
            print(f"step {step}: {tuple(batch[0]['latents'].shape[1:])} loss {losses[-1]:.5f}", flush=True)

    with averaged(optimizer), torch.no_grad():
        validation = [
            model(**flow_matching([sample], index, dtype, guided)).loss.item() for index, sample in enumerate(held_out)
        ]
        model.save_lora_adapter(options.output / "adapter", prefix="transformer")
    if ranks.is_main_process:
        print(f"validation loss of the averaged adapters: {sum(validation) / len(validation):.5f}")
        curve = {"losses": losses, "validation": validation}
        (options.output / "curve.json").write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
