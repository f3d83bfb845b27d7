"""Fine-tune with TRL's SFTTrainer and LoRA over pipeline stages; save one ordinary adapter folder.

torchrun --standalone --nproc-per-node 2 run_sft_lora.py --stages 2

Without --model it makes a small Llama with random weights, whose folder is beside the adapter's.
Run it again with --resume to continue from its last checkpoint.
"""

import argparse
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from common import make_llama
from corpus import read_texts
from penstock.integrations.transformers import PipelineTrainerMixin


class PipelineSFTTrainer(PipelineTrainerMixin, SFTTrainer):
    pass


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder or name; without it a small model with random weights")
    parser.add_argument("--dataset", help="a file or a folder of texts; without it text of this machine")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline; more ranks make more pipelines")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--packing", action="store_true", help="several texts in a row, without padding")
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for checkpoints and the adapter")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    texts = read_texts(options.dataset, 200_000)
    model = options.model or str(options.output / "base")
    ranks = PartialState(cpu=not torch.cuda.is_available())  # without a GPU it knows other ranks only if told so
    with ranks.main_process_first():  # the other ranks then find the folder
        if not options.model and not options.resume and ranks.is_main_process:
            make_llama(Path(model), texts)
    lines = [line for text in texts for line in text.splitlines() if len(line.split()) > 4]
    dataset = Dataset.from_list([{"text": line} for line in lines])
    trainer = PipelineSFTTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        SFTConfig(
            output_dir=str(options.output),
            per_device_train_batch_size=8,
            max_steps=options.steps,
            learning_rate=1e-2,
            max_length=64,
            packing=options.packing,
            logging_steps=5,
            save_steps=options.save_every,
            save_total_limit=2,
            report_to="none",
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=dataset.select(range(64, len(dataset))),
        eval_dataset=dataset.select(range(64)),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        parallelism={"pipeline_parallel_size": options.stages},
    )
    trainer.model.print_trainable_parameters()
    trainer.train(resume_from_checkpoint=options.resume)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(metrics)
    trainer.save_model(str(options.output / "adapter"))


if __name__ == "__main__":
    main()
