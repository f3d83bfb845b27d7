"""Train GPT-2 with transformers' Trainer over pipeline stages; save it as an ordinary folder.

torchrun --standalone --nproc-per-node 2 run_trainer.py --stages 2

Run it again with --resume to continue from its last checkpoint.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from common import VOCABULARY_SIZE, text_rows
from penstock.integrations.transformers import PipelineTrainer


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder or name; without it a small model with random weights")
    parser.add_argument("--dataset", help="a file, a folder, or a dataset's name; without it text of this machine")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline; more ranks make more pipelines")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    rows, tokenizer = text_rows(options)
    set_seed(0)  # the same weights on all ranks
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        sizes = GPT2Config(n_positions=128, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
        sizes.vocab_size = VOCABULARY_SIZE
        model = GPT2LMHeadModel(sizes)
    trainer = PipelineTrainer(
        model,
        TrainingArguments(
            output_dir=str(options.output),
            per_device_train_batch_size=8,
            max_steps=options.steps,
            learning_rate=1e-3,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            save_total_limit=2,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=rows[64:],
        eval_dataset=rows[:64],
        processing_class=tokenizer,
        parallelism={"pipeline_parallel_size": options.stages},
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.output / "final"))


if __name__ == "__main__":
    main()
