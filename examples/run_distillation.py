"""Distil a large model into a small one, each over its own pipeline stages on the same ranks.

torchrun --standalone --nproc-per-node 2 run_distillation.py --stages 2

The teacher is only evaluated; its logits are an input of the student's criterion. With --logits all of them are made
first, and the teacher's memory is then the student's; another run, on any number of stages, reads them from the folder.
Without --teacher and --student small models with random weights are made.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import penstock
from common import SEQUENCE_LENGTH, make_llama
from corpus import read_texts, token_blocks


class Distillation:
    """The criterion: how far the student's predictions are from the teacher's, and from the labels."""

    def __init__(self, temperature: float, weight: float) -> None:
        self.temperature, self.weight = temperature, weight

    def __call__(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        student = functional.log_softmax(outputs.logits / self.temperature, -1)
        teacher = functional.log_softmax(inputs["teacher_logits"] / self.temperature, -1)
        # A mean over samples, so that microbatches add up to the batch.
        apart = functional.kl_div(student, teacher, reduction="batchmean", log_target=True) / outputs.logits.shape[1]
        found: torch.Tensor = self.weight * self.temperature**2 * apart + (1 - self.weight) * outputs.loss
        return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="a checkpoint's folder or name; without it a small model with random weights")
    parser.add_argument("--student", help="the same; without it a model of the teacher's kind with half of its layers")
    parser.add_argument("--dataset", help="a file or a folder of texts; without it text of this machine")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline of either; more make more pipelines")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all pipelines")
    parser.add_argument("--length", type=int, default=SEQUENCE_LENGTH, help="tokens of a sequence")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument(
        "--weight", type=float, default=0.5, help="of the teacher's predictions; the rest is the labels'"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument(
        "--logits", type=Path, help="folder with the teacher's logits, which is made if it is not there"
    )
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for the models")
    return parser.parse_args()


def load(name: str, options: argparse.Namespace, **more: Any) -> Any:
    """A model in stages: each rank reads its own layers only."""
    return penstock.from_pretrained(
        name, model_class=AutoModelForCausalLM, pipeline_parallel_size=options.stages, microbatch_size=1, **more
    )


def logits_of(teacher: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the teacher says of its pipeline's rows, on every rank of the pipeline."""
    with torch.no_grad():
        found: torch.Tensor = teacher(input_ids=ids.to(teacher.device)).logits
    return found


def write_logits(
    teacher: Any, folder: Path, batches: Callable[[Any], Iterator[tuple[list[int], torch.Tensor]]]
) -> None:
    """A file for each row of all batches, which any number of pipelines can read. Every rank calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    for rows, ids in batches(teacher):
        logits = logits_of(teacher, ids).cpu()
        if teacher.pipeline.place.pipeline_rank == 0:
            for row, own in zip(rows, logits, strict=True):
                torch.save(own.clone(), folder / f"{row}.pt")


def main() -> None:
    options = parse_options()
    dist.init_process_group()
    texts, leads = read_texts(options.dataset, 200_000), dist.get_rank() == 0
    teacher_name = options.teacher or str(options.output / "teacher")
    student_name = options.student or str(options.output / "untrained")
    if leads and not options.teacher:
        make_llama(Path(teacher_name), texts)
    if leads and not options.student:
        config = AutoConfig.from_pretrained(teacher_name)
        config.num_hidden_layers //= 2
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(student_name)
    dist.barrier()  # all ranks then find the folders
    blocks = token_blocks(AutoTokenizer.from_pretrained(teacher_name), texts, options.length)

    def batches(model: Any) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Of each step the numbers of this pipeline's rows, and their tokens."""
        share = options.batch // model.data_parallel_size
        for step in range(options.steps):
            first = step * options.batch + model.data_parallel_rank * share
            rows = [row % len(blocks) for row in range(first, first + share)]
            yield rows, blocks[rows]

    has_logits = options.logits is not None and options.logits.exists()
    dist.barrier()  # all ranks then saw the same
    teacher = None if has_logits else load(teacher_name, options)
    if options.logits is not None and teacher is not None:
        write_logits(teacher, options.logits, batches)
        teacher = None  # its memory is the student's
    dist.barrier()
    student = load(student_name, options, criterion=Distillation(options.temperature, options.weight))
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.learning_rate)
    student.train()
    losses = []
    for rows, ids in batches(student):
        if teacher is None:
            logits = torch.stack([torch.load(options.logits / f"{row}.pt") for row in rows])
        else:
            logits = logits_of(teacher, ids)
        inputs = {name: one.to(student.device) for name, one in {"input_ids": ids, "labels": ids}.items()}
        for out in student(**inputs, teacher_logits=logits.to(student.device)):
            out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(student.pipeline.last_step.global_loss)
        if leads:
            print(f"step {len(losses)}  loss {losses[-1]:.6f}", flush=True)
    student.save_pretrained(options.output / "student")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
