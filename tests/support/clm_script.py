"""A script for causal language models as their users have it: options from the command line, data, Trainer, metrics.

tests/trainer/test_runs.py runs it as it is, and with the two changes that make it pipelined.
"""

import math
import os
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DataArguments:
    model_name_or_path: str = field(metadata={"help": "a folder or a name"})
    train_file: str = field(metadata={"help": "lines of JSON with a text under 'context'"})
    block_size: int = field(default=32, metadata={"help": "tokens in a sample"})
    cache_dir: str | None = field(default=None, metadata={"help": "where prepared data are kept"})


def main() -> None:
    data_args, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    raw = load_dataset("json", data_files=data_args.train_file, split="train", cache_dir=data_args.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(data_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(data_args.model_name_or_path)

    def group(rows):
        ids = [token for row in tokenizer(rows["context"])["input_ids"] for token in row]
        size = data_args.block_size
        blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        return {"input_ids": blocks, "attention_mask": [[1] * size for _ in blocks], "labels": blocks}

    with args.main_process_first(desc="grouping texts"):
        data = raw.map(group, batched=True, remove_columns=raw.column_names)
    data = data.train_test_split(test_size=32, shuffle=False)

    def compute_metrics(prediction):
        labels, found = prediction.label_ids[:, 1:].reshape(-1), prediction.predictions[:, :-1].reshape(-1)
        return {"accuracy": float((labels == found).mean())}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    result = trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    metrics = {**result.metrics, "train_samples": len(data["train"])}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
