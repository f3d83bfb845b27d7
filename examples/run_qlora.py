"""Fine-tune what does not fit: a base that each rank packs into 4 bits for its own stages, and LoRA adapters on it.

torchrun --standalone --nproc-per-node 2 run_qlora.py --stages 2

Without --model it makes a small Llama with random weights, whose folder is beside the adapter's.
Run it again with --resume to go on from its last checkpoint, on any number of stages.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import penstock
from common import SEQUENCE_LENGTH, make_llama
from corpus import read_texts, token_blocks


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder or name; without it a small model with random weights")
    parser.add_argument("--dataset", help="a file or a folder of texts; without it text of this machine")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline; more ranks make more pipelines")
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4, help="of a number of the base")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all pipelines")
    parser.add_argument("--length", type=int, default=SEQUENCE_LENGTH, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for checkpoints and the adapter")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    return parser.parse_args()


def load(model: str, options: argparse.Namespace) -> Any:
    """The model in stages: each rank reads and packs its own layers only."""
    four_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    if torch.cuda.is_available():
        four_bits["bnb_4bit_compute_dtype"] = torch.bfloat16

    def adapt(whole: Any) -> Any:
        torch.manual_seed(0)  # on all ranks: the adapters' first weights are those of one process
        whole = prepare_model_for_kbit_training(whole, gradient_checkpointing_kwargs={"use_reentrant": False})
        return get_peft_model(whole, LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"))

    return penstock.from_pretrained(
        model,
        model_class=AutoModelForCausalLM,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=options.bits == 4, load_in_8bit=options.bits == 8, **(four_bits if options.bits == 4 else {})
        ),
        adapt=adapt,
        pipeline_parallel_size=options.stages,
        microbatch_size=1,
    )


def main() -> None:
    options = parse_options()
    texts = read_texts(options.dataset, 200_000)
    name, checkpoints = options.model or str(options.output / "base"), options.output / "checkpoints"
    dist.init_process_group()
    if not options.model and not options.resume and dist.get_rank() == 0:
        make_llama(Path(name), texts)
    dist.barrier()  # all ranks then find the folder
    model = load(name, options)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=options.learning_rate)
    done = penstock.load_checkpoint(checkpoints, model=model, optimizer=optimizer).step if options.resume else 0
    blocks = token_blocks(AutoTokenizer.from_pretrained(name), texts, options.length)
    share = options.batch // model.data_parallel_size
    model.train()
    for step in range(done, options.steps):
        first = step * options.batch + model.data_parallel_rank * share
        ids = blocks[torch.arange(first, first + share) % len(blocks)].to(model.device)
        for out in model(input_ids=ids, labels=ids):
            out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {model.pipeline.last_step.global_loss:.6f}", flush=True)
        if (step + 1) % options.save_every == 0:
            penstock.save_checkpoint(checkpoints, model=model, optimizer=optimizer, keep_last=2)
    model.save_pretrained(options.output / "adapter")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
