"""Sequences shared out over ranks, beside the same ranks as replicas:
`torchrun --nproc-per-node 2 benchmarks/studies/context_parallel.py`, and with 4 processes.

Of one stage of a Llama: the bytes that a forward keeps for the backward besides parameters, for one sequence, by the
number of parts; seconds of a step in parts, and as replicas that each have sequences of their own, in turn, on as many
tokens; and the bytes that a rank receives in a layer, beside the formula's.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

TOKENS, ROUNDS = 4096, 3
WIDTH, LAYERS, HEADS, KEY_VALUE_HEADS = 256, 2, 8, 4


def build(**keys: Any) -> Any:
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS, vocab_size=512, max_position_embeddings=TOKENS,
    )  # fmt: skip
    torch.manual_seed(0)
    return penstock.initialize(LlamaForCausalLM(config), pipeline_parallel_size=1, schedule="1f1b", **keys)


def batch(sequences: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(512, (sequences, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.broadcast(ids, 0)
    return {"input_ids": ids, "labels": ids}


def kept_bytes(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """What the forward of a microbatch keeps for its backward, besides parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for output in model(**inputs):
            output.loss.backward()
    return sum(kept.values())


def step(model: Any, inputs: dict[str, torch.Tensor]) -> float:
    dist.barrier()
    start = time.perf_counter()
    for output in model(**inputs):
        output.loss.backward()
    model.zero_grad()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    parts = dist.get_world_size()
    shared = build(context_parallel_size=parts, num_microbatches=parts)
    single = build(context_parallel_size=parts, num_microbatches=1)
    replicas = build(num_microbatches=1)
    one, several = batch(1), batch(parts)
    whole, part = kept_bytes(replicas, one), kept_bytes(single, one)
    exchange = single.pipeline.parts.sequences.exchange
    before = exchange.num_bytes
    step(single, one)
    head = TOKENS * (WIDTH // HEADS) * 4
    formula = 2 * (2 * HEADS + 2 * KEY_VALUE_HEADS) * head * (parts - 1) // parts**2
    received = (exchange.num_bytes - before) // LAYERS
    seconds: dict[str, list[float]] = {"parts": [], "replicas": []}
    mine = {name: rows[dist.get_rank()][None] for name, rows in several.items()}
    for number in range(ROUNDS + 1 if parts == 2 else 2):
        for name, model, inputs in (("parts", shared, several), ("replicas", replicas, mine)):
            took = step(model, inputs)
            if number:  # the first round warms up
                seconds[name].append(took)
    ratios = [a / b for a, b in zip(seconds["parts"], seconds["replicas"], strict=True)]
    if dist.get_rank() == 0:
        medians = {name: round(statistics.median(took), 3) for name, took in seconds.items()}
        print({"parts": parts, "kept_whole": whole, "kept_part": part, "share": round(part / whole, 3),
               "received_in_a_layer": received, "formula": formula, "seconds": medians,
               "ratio": round(statistics.median(ratios), 3), "ratios": [round(one, 3) for one in ratios]})  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
