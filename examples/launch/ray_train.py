"""Train GPT-2 over pipeline stages on a Ray cluster: python examples/launch/ray_train.py --workers 2 --stages 2

Ray Train starts the workers and torch.distributed; penstock.initialize takes the ranks as they are. The loop is the
tutorial's. Needs `pip install "ray[train]"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import penstock


def train_on_a_worker(options: dict[str, Any]) -> None:
    torch.manual_seed(0)  # the same weights on all ranks
    if options["model"]:
        model = AutoModelForCausalLM.from_pretrained(options["model"])
    else:
        sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(0, model.config.vocab_size, (64, 32))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = penstock.initialize(model, config={"model_parallelism": {"pipeline_parallel_size": options["stages"]}})

    loader = model.prepare_dataloader(samples, batch_size=8, shuffle=True)  # ranks of one pipeline get the same batches
    step = 0
    while step < options["steps"]:
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for out in model(**batch):
                out.loss.backward()
                loss += out.loss.detach().cpu()
            optimizer.step()
            step += 1
            if step == options["steps"]:
                break
            train.report({"step": step, "loss": loss.item()})  # the loss is on every rank
    model.save_pretrained(options["folder"])  # every rank calls it, with a folder that all of them see
    saved = Checkpoint(options["folder"]) if train.get_context().get_world_rank() == 0 else None
    train.report({"step": step, "loss": loss.item()}, checkpoint=saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder or name; without it a small model with random weights")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with a device")
    parser.add_argument("--stages", type=int, default=2, help="workers of a pipeline; more workers make more pipelines")
    parser.add_argument("--steps", type=int, default=16, help="training steps")
    parser.add_argument("--output", type=Path, default=Path("runs/ray"), help="a folder that all nodes share")
    options = parser.parse_args()
    folder = options.output.absolute()
    trainer = TorchTrainer(
        train_on_a_worker,
        train_loop_config={**vars(options), "folder": str(folder / "model")},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(folder), name="reports"),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"step {result.metrics['step']}  loss {result.metrics['loss']:.6f}  saved in {folder / 'model'}", flush=True)


if __name__ == "__main__":
    main()
