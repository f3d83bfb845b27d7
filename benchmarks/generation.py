"""Generation and evaluation over stages beside the cores' ceiling: processes apart, each with its share of the batch.

    python benchmarks/generation.py decoding --batch-size 32      # results/generation_32.md
    python benchmarks/generation.py emulated                      # three stages of devices that sleep
    python benchmarks/generation.py evaluation                    # forwards alone, beside accelerate's prepare_pippy

The file is also the script of its contestants' processes.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from emulated import SleepConfig, SleepingBlock, sleep_once_per_action
from measure import Comparison, median_of, ratio_of
from processes import side_by_side
from torch import nn
from transformers import GenerationMixin, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from turns import Figures, Step, barrier, serve

import penstock

PROMPT = 32


def gpt2(arguments: dict[str, Any]) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=arguments["vocabulary"],
        n_embd=arguments["width"],
        n_layer=arguments["layers"],
        n_head=arguments["width"] // 64,
        n_positions=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def on_stages(model: PreTrainedModel, **settings: Any) -> Any:
    size = int(os.environ["WORLD_SIZE"])
    return penstock.initialize(model, {"model_parallelism": {"pipeline_parallel_size": size, **settings}})


def batch_of(arguments: dict[str, Any], size: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(1, arguments["vocabulary"], (size, arguments.get("length", PROMPT)))


# -- decoding ----------------------------------------------------------------------------------------------------------


def decoding_step(model: Any, prompt: torch.Tensor, arguments: dict[str, Any], **options: Any) -> Step:
    """A prefill alone, then a whole generation; the difference is the decoding of all tokens but the first."""
    new, cache = arguments["new_tokens"], cache_mib(model, prompt, arguments["new_tokens"])
    options = {"do_sample": False, "use_cache": True, **options}

    def seconds(count: int) -> float:
        barrier()
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **options)
        barrier()
        return time.perf_counter() - start

    def step() -> Figures:
        prefill, whole = seconds(1), seconds(new)
        return {"prefill": prefill, "decode": (whole - prefill) / (new - 1), "whole": whole, "cache_mib": cache}

    return step


def cache_mib(model: Any, prompt: torch.Tensor, new: int) -> Any:
    """The memory of the keys and values at the end of a generation, on each rank."""
    if isinstance(model, SleepingLanguageModel):
        return []
    row = model.generate(prompt[:1], max_new_tokens=2, do_sample=False, return_dict_in_generate=True).past_key_values
    length = row.get_seq_length()
    mine = sum(layer.keys.nbytes + layer.values.nbytes for layer in row.layers) / length
    found = [torch.tensor(mine * len(prompt) * (prompt.shape[1] + new - 1) / 2**20, dtype=torch.float64)]
    if dist.is_initialized():
        found = [torch.empty_like(found[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.tensor(mine * len(prompt) * (prompt.shape[1] + new - 1) / 2**20).double())
    return [round(float(value), 2) for value in found]


def one_process(arguments: dict[str, Any]) -> Step:
    return decoding_step(gpt2(arguments), batch_of(arguments, arguments["batch_size"]), arguments)


def apart(arguments: dict[str, Any]) -> Step:
    """Processes that have nothing to do with each other, each with its share of the batch."""
    dist.init_process_group("gloo")
    size = max(1, arguments["batch_size"] // dist.get_world_size())
    return decoding_step(gpt2(arguments), batch_of(arguments, size), arguments)


def stages(arguments: dict[str, Any]) -> Step:
    model, prompt = on_stages(gpt2(arguments)), batch_of(arguments, arguments["batch_size"])
    return decoding_step(model, prompt, arguments, generation_groups=arguments["groups"])


def device_map(arguments: dict[str, Any]) -> Step:
    """As transformers runs a model that `device_map` spreads over devices: one after another, in one process."""
    from accelerate import dispatch_model

    model = gpt2(arguments)
    half = arguments["layers"] // 2
    names = ["transformer.wte", "transformer.wpe", *(f"transformer.h.{i}" for i in range(arguments["layers"]))]
    places = dict.fromkeys([*names, "transformer.ln_f", "lm_head"], "cpu")
    assert half
    dispatch_model(model, places, main_device="cpu", force_hooks=True)
    return decoding_step(model, batch_of(arguments, arguments["batch_size"]), arguments)


# -- devices that sleep ------------------------------------------------------------------------------------------------


class SleepingLanguageModel(PreTrainedModel, GenerationMixin):
    """Blocks that take their time whatever they are given, and no compute."""

    config_class = SleepConfig

    def __init__(self, config: SleepConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(SleepingBlock(config) for _ in range(config.num_blocks))
        self.head = nn.Linear(16, 64)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return CausalLMOutputWithPast(logits=self.head(hidden), past_key_values=past_key_values)


def sleeping_stages(arguments: dict[str, Any]) -> Step:
    """Stages that take `seconds` for a forward of any group."""
    size = int(os.environ["WORLD_SIZE"])
    config = SleepConfig(size, arguments["seconds"], vocab_size=64, hidden_size=16, num_hidden_layers=size)
    model = on_stages(SleepingLanguageModel(config).eval())
    sleep_once_per_action(model)
    prompt = torch.ones(arguments["batch_size"], 4, dtype=torch.int64)
    return decoding_step(model, prompt, arguments, generation_groups=arguments["groups"])


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluation_step(model: Any, batch: torch.Tensor, parts: int = 1) -> Step:
    def step() -> Figures:
        with torch.no_grad():
            for part in batch.chunk(parts):
                model(input_ids=part)
        return {}

    return step


def evaluated_apart(arguments: dict[str, Any]) -> Step:
    dist.init_process_group("gloo")
    count = dist.get_world_size()
    batch = batch_of(arguments, arguments["batch_size"] // count)
    return evaluation_step(gpt2(arguments), batch, arguments["num_microbatches"] // count)


def evaluated_in_one(arguments: dict[str, Any]) -> Step:
    return evaluation_step(gpt2(arguments), batch_of(arguments, arguments["batch_size"]), arguments["num_microbatches"])


def evaluated_on_stages(arguments: dict[str, Any]) -> Step:
    model = on_stages(gpt2(arguments), num_microbatches=arguments["num_microbatches"])
    return evaluation_step(model, batch_of(arguments, arguments["batch_size"]))


def pippy(arguments: dict[str, Any]) -> Step:
    """accelerate's pipelined forward; the last stage alone has the output."""
    from accelerate import PartialState, prepare_pippy

    PartialState(cpu=True)
    batch = batch_of(arguments, arguments["batch_size"])
    count, half = arguments["num_microbatches"], arguments["layers"] // 2
    example = {"input_ids": copy.deepcopy(batch), "use_cache": False}
    model = prepare_pippy(
        gpt2(arguments), split_points=[f"transformer.h.{half}"], example_kwargs=example, num_chunks=count
    )
    return evaluation_step(model, batch)


KINDS = {
    "one process": one_process,
    "apart": apart,
    "stages": stages,
    "device_map": device_map,
    "sleeping": sleeping_stages,
    "evaluated in one": evaluated_in_one,
    "evaluated apart": evaluated_apart,
    "evaluated on stages": evaluated_on_stages,
    "pippy": pippy,
}


# -- tables ------------------------------------------------------------------------------------------------------------


def measure_decoding(options: argparse.Namespace) -> None:
    size, new = options.batch_size, options.new_tokens
    model = {"vocabulary": options.vocabulary, "layers": options.layers, "width": options.width}
    config = {**model, "batch_size": size, "new_tokens": new, "prompt": PROMPT, "warmup": 1}
    kinds: dict[str, tuple[str, int, dict[str, Any]]] = {
        "one process": ("one process", 1, {}),
        "two processes apart, half the batch each": ("apart", 2, {}),
        "two stages, one group": ("stages", 2, {"groups": 1}),
        "two stages, as chosen": ("stages", 2, {"groups": "auto"}),
    }
    if options.peers:
        kinds["one process, device_map"] = ("device_map", 1, {})
    results = run(kinds, config, options)
    columns = [
        "",
        "tokens/s",
        "of one process",
        "of two apart",
        "prefill s",
        "decode ms/token",
        "cache MiB on each rank",
    ]
    table = Comparison(f"generation_{size}", f"GPT-2: {size} x ({PROMPT} + {new}) tokens", columns, config, results)
    one, ceiling = (results[name] for name in list(kinds)[:2])
    share = max(1, size // 2) * 2 / size  # of the batch, that the two apart have together
    for name, runs in results.items():
        if not any("whole" in result for result in runs):
            table.add_missing(name)
            continue
        whole, prefill, decode = (median_of(runs, key) for key in ("whole", "prefill", "decode"))
        of_one, of_ceiling = ratio_of(one, runs, "whole"), ratio_of(ceiling, runs, "whole")
        if name == list(kinds)[1]:
            of_one *= share
        tokens = size * new / whole * (share if name == list(kinds)[1] else 1)
        figures = {"of_one": of_one, "of_apart": of_ceiling / (1 if name == list(kinds)[1] else share)}
        cells = [f"{tokens:.0f}", f"{figures['of_one']:.2f}", f"{figures['of_apart']:.2f}", f"{prefill:.3f}"]
        cache = next(result["cache_mib"][0] for result in runs if "cache_mib" in result)
        cells += [f"{1000 * decode:.1f}", ", ".join(map(str, cache))]
        table.add(name, cells, tokens_per_second=tokens, prefill=prefill, decode=decode, cache_mib=cache, **figures)
    table.write("Ratios are medians over rounds; a round has each contestant once, in an order that changes.")


def measure_emulated(options: argparse.Namespace) -> None:
    ranks, seconds, new = 3, options.seconds, options.new_tokens
    config = {"seconds": seconds, "new_tokens": new, "batch_size": 6, "ranks": ranks, "warmup": 1}
    kinds = {f"{count} groups": ("sleeping", ranks, {"groups": count}) for count in (1, ranks)}
    results = run(kinds, config, options)
    columns = ["", "s for each token of all groups", "of the ideal"]
    table = Comparison("generation_emulated", f"Decoding over {ranks} devices that sleep", columns, config, results)
    for count, (name, runs) in zip((1, ranks), results.items(), strict=True):
        decode = median_of(runs, "decode")
        # Every stage is at work all the time, for each group once.
        ideal = seconds * (ranks if count == 1 else count)
        table.add(name, [f"{decode:.4f}", f"{ideal / decode:.3f}"], decode=decode, of_ideal=ideal / decode)
    table.write(f"Ideal: no stage waits; with one group, the {ranks} stages one after another.")


def measure_evaluation(options: argparse.Namespace) -> None:
    config = {
        "vocabulary": options.vocabulary, "layers": options.layers, "width": 384, "length": 128, "batch_size": 16,
        "num_microbatches": 8, "warmup": 2,
    }  # fmt: skip
    kinds: dict[str, tuple[str, int, dict[str, Any]]] = {
        "one process": ("evaluated in one", 1, {}),
        "two processes apart, half the batch each": ("evaluated apart", 2, {}),
        "two stages": ("evaluated on stages", 2, {}),
    }
    if options.peers:
        kinds["accelerate's prepare_pippy"] = ("pippy", 2, {})
    results = run(kinds, config, options)
    title = "Evaluation of 8 microbatches of two samples"
    table = Comparison("generation_evaluation", title, ["", "s", "of two apart"], config, results)
    for name, runs in results.items():
        seconds = median_of(runs, "seconds")
        if seconds != seconds:
            table.add_missing(name)
            continue
        ratio = ratio_of(results[list(kinds)[1]], runs, "seconds")
        table.add(name, [f"{seconds:.3f}", f"{ratio:.3f}"], seconds=seconds, of_apart=ratio)
    table.write()


def run(kinds: dict[str, tuple[str, int, dict[str, Any]]], config: dict[str, Any], options: argparse.Namespace) -> Any:
    script = "generation.py"
    contestants = {
        name: (script, ranks, {**config, "kind": kind, **extra}, 1) for name, (kind, ranks, extra) in kinds.items()
    }
    return side_by_side(contestants, options.rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["decoding", "emulated", "evaluation"])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=0.03, help="that an emulated stage takes for a forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="also accelerate's ways")
    options = parser.parse_args()
    {"decoding": measure_decoding, "emulated": measure_emulated, "evaluation": measure_evaluation}[options.table](
        options
    )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        serve(KINDS)
    else:
        main()
