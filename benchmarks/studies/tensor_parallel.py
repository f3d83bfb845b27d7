"""What tensor parallelism costs: `python benchmarks/studies/tensor_parallel.py`.

Parameter memory per rank over an equal share of the model's, and the collectives and bytes of one microbatch per layer,
beside the minimum of two sums forward and two backward.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Comparison
from processes import run_ranks
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from turns import Figures, Step, serve

SHAPE = {"vocabulary": 512, "layers": 4, "width": 128, "heads": 4, "length": 64, "samples": 2}
LAYOUTS = [("gpt2", 1, 2), ("llama", 1, 2), ("llama", 2, 2)]


def model_of(family: str, vocabulary: int, layers: int, width: int, heads: int, length: int) -> Any:
    torch.manual_seed(0)
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=length)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=length,
            tie_word_embeddings=True,
        )
    )


def counted_step(arguments: dict[str, Any]) -> Step:
    """A step of one microbatch, whose figures are its communication and this rank's share of the parameters."""
    import penstock

    stages, size, samples = arguments["stages"], arguments["size"], SHAPE["samples"]
    model = model_of(arguments["family"], **{name: value for name, value in SHAPE.items() if name != "samples"})
    whole = sum(p.numel() for p in model.parameters())
    sections = {"pipeline_parallel_size": stages, "tensor_parallel_size": size, "num_microbatches": 1}
    model = penstock.initialize(model, {"model_parallelism": sections})
    tokens = torch.randint(SHAPE["vocabulary"], (samples, SHAPE["length"]))
    counters = model.pipeline.split.tensor_parallel.region.collectives

    def step() -> Figures:
        before = torch.tensor([counters.num_sums, counters.num_gathers, counters.num_bytes])
        for result in model(input_ids=tokens, labels=tokens):
            result.loss.backward()
        counts = torch.tensor([counters.num_sums, counters.num_gathers, counters.num_bytes]) - before
        # The smaller groups' own: one rank of each counts for its stage.
        counts *= int(model.pipeline.place.tensor_parallel_rank == 0)
        dist.all_reduce(counts)
        held = torch.tensor(sum(p.numel() for p in model.parameters()))
        dist.all_reduce(held, dist.ReduceOp.MAX)
        sums, gathers, num_bytes = counts.tolist()
        return {"share": held.item() * stages * size / whole, "sums": sums, "gathers": gathers, "bytes": num_bytes}

    return step


def main() -> None:
    minimum = SHAPE["samples"] * SHAPE["length"] * SHAPE["width"] * 4
    columns = (
        "model, stages x ranks a stage",
        "largest rank's parameters / equal share",
        "sums per layer (minimum 4)",
        "bytes per layer / minimum",
        "gathers",
    )
    runs: dict[str, dict] = {}
    table = Comparison("tensor_parallel", "Tensor parallelism: memory and communication", columns, SHAPE, runs)
    for family, stages, size in LAYOUTS:
        name = f"{family} {stages}x{size}"
        arguments = {"kind": "counted", "family": family, "stages": stages, "size": size, "warmup": 1, "steps": 1}
        result = runs[name] = run_ranks(Path(__file__).name, stages * size, arguments)
        figures = {figure: result[figure][0] for figure in ("share", "sums", "gathers", "bytes")}
        # Beside the layers: the embedding, the head's backward, and two small sums in the loss.
        beside = 2 * minimum + 3 * SHAPE["samples"] * (SHAPE["length"]) * 4
        per_layer = (figures["sums"] - 4) / SHAPE["layers"]
        bytes_per_layer = (figures["bytes"] - beside) / SHAPE["layers"] / (4 * minimum)
        cells = [f"{figures['share']:.3f}", f"{per_layer:g}", f"{bytes_per_layer:.3f}", str(figures["gathers"])]
        table.add(name, cells, share=figures["share"], sums_per_layer=per_layer, bytes_per_layer=bytes_per_layer)
    table.write()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve({"counted": counted_step})
    else:
        main()
