"""What tensor parallelism costs: `python benchmarks/tensor_parallel.py`.

Parameter memory per rank over an equal share of the model's, and the collectives and bytes of one microbatch per layer,
beside the minimum of two sums forward and two backward.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from measure import Comparison, run_ranks

SHAPE = {"vocabulary": 512, "layers": 4, "width": 128, "heads": 4, "length": 64, "samples": 2}
LAYOUTS = [("gpt2", 1, 2), ("llama", 1, 2), ("llama", 2, 2)]


def model_of(family: str, vocabulary: int, layers: int, width: int, heads: int, length: int) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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


def measure(family: str, stages: int, size: int, output: str) -> None:
    """One rank: two steps of one microbatch; the second is counted."""
    import torch
    import torch.distributed as dist

    import penstock

    torch.set_num_threads(1)
    samples = SHAPE["samples"]
    model = model_of(family, **{name: value for name, value in SHAPE.items() if name != "samples"})
    whole = sum(p.numel() for p in model.parameters())
    sections = {"pipeline_parallel_size": stages, "tensor_parallel_size": size, "num_microbatches": 1}
    model = penstock.initialize(model, {"model_parallelism": sections})
    tokens = torch.randint(SHAPE["vocabulary"], (samples, SHAPE["length"]))
    counters = model.pipeline.split.tensor_parallel.region.collectives
    before = [0, 0, 0]
    for _ in range(2):
        before = [counters.num_sums, counters.num_gathers, counters.num_bytes]
        for result in model(input_ids=tokens, labels=tokens):
            result.loss.backward()
    # The smaller groups' own: one rank of each counts for its stage.
    counts = torch.tensor([counters.num_sums, counters.num_gathers, counters.num_bytes]) - torch.tensor(before)
    counts *= int(model.pipeline.place.tensor_parallel_rank == 0)
    dist.all_reduce(counts)
    held = torch.tensor(sum(p.numel() for p in model.parameters()))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        figures = {
            "share": int(held) * stages * size / whole,
            "sums": int(counts[0]),
            "gathers": int(counts[1]),
            "bytes": int(counts[2]),
        }
        Path(output).write_text(json.dumps(figures))


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
        arguments = {"family": family, "stages": stages, "size": size}
        figures = runs[name] = run_ranks(Path(__file__).name, stages * size, arguments)
        # Beside the layers: the embedding, the head's backward, and two small sums in the loss.
        beside = 2 * minimum + 3 * SHAPE["samples"] * (SHAPE["length"]) * 4
        per_layer = (figures["sums"] - 4) / SHAPE["layers"]
        bytes_per_layer = (figures["bytes"] - beside) / SHAPE["layers"] / (4 * minimum)
        cells = [f"{figures['share']:.3f}", f"{per_layer:g}", f"{bytes_per_layer:.3f}", str(figures["gathers"])]
        table.add(name, cells, share=figures["share"], sums_per_layer=per_layer, bytes_per_layer=bytes_per_layer)
    table.write()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(**json.loads(sys.argv[1]), output=sys.argv[2])
    else:
        main()
