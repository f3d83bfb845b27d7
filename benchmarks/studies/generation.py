"""Generation and evaluation over stages beside the cores' ceiling: processes apart, each with its share of the batch.

    python benchmarks/studies/generation.py decoding --batch-size 32 --new-tokens 48
    python benchmarks/studies/generation.py emulated        # three stages of devices that sleep
    python benchmarks/studies/generation.py evaluation      # forwards alone, beside accelerate's prepare_pippy

The file is also the script of its contestants' processes.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated import SleepConfig, SleepingModel
from measure import RESULTS, Comparison, median_of, ratio_of
from processes import side_by_side
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from turns import Figures, Step, barrier, serve

import penstock
from penstock.generation.decoding import LEAST_TOKENS

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))
from kinds.result_files import environment, write_json

PROMPT = 32
ONE, APART, BY_HAND = "one process", "two apart, half the batch each", "two processes, by hand"


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


# Generates a number of tokens.
Way = Callable[[int], Any]


def way_of(model: Any, prompt: torch.Tensor, **options: Any) -> Way:
    def generate(count: int) -> None:
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, use_cache=True, **options)

    # Whoever works alone makes the other rank wait at the barrier after it, not in the middle.
    generate(3)
    return generate


def by_hand(model: GPT2LMHeadModel, prompt: torch.Tensor) -> Way:
    """Greedy decoding over two processes in the fewest calls, for GPT-2 alone: half of the blocks each, one message to
    the second process and one back for each token. What this loses, no library over these processes can win back."""
    transformer, rank = model.transformer, dist.get_rank()
    half = len(transformer.h) // 2
    mine = transformer.h[half:] if rank else transformer.h[:half]

    @torch.no_grad()
    def generate(count: int) -> torch.Tensor:
        cache, tokens, begin, chosen = DynamicCache(config=model.config), prompt, 0, []
        for _ in range(count):
            size = tokens.shape[1] if begin == 0 else 1
            if rank == 0:
                hidden = transformer.wte(tokens) + transformer.wpe(torch.arange(begin, begin + size))
            else:
                hidden = torch.empty(len(prompt), size, model.config.n_embd)
                dist.recv(hidden, 0)
            for block in mine:
                hidden = block(hidden, past_key_values=cache, use_cache=True)
            if rank == 0:
                dist.send(hidden, 1)
                tokens = torch.empty(len(prompt), 1, dtype=torch.int64)
                dist.recv(tokens, 1)
            else:
                tokens = model.lm_head(transformer.ln_f(hidden[:, -1:])).argmax(-1)
                dist.send(tokens, 0)
            begin += size
            chosen.append(tokens)
        return torch.cat([prompt, *chosen], 1)

    expected = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    if not torch.equal(generate(4), expected):
        raise AssertionError("decoding by hand gives other tokens than generate()")
    return generate


def timed(way: Way | None, new: int) -> Figures:
    """A prefill alone, then a whole generation; the difference is the decoding of all tokens but the first.

    The time of the slower rank counts; one that has no part in it waits. `others` is the share of the processors that
    other programs used meanwhile.
    """
    seconds = []
    used, busy = time.process_time(), busy_seconds()
    for count in (1, new):
        barrier()
        start = time.perf_counter()
        if way is not None:
            way(count)
        barrier()
        seconds.append(time.perf_counter() - start)
    total = torch.tensor(time.process_time() - used, dtype=torch.float64)
    dist.all_reduce(total)
    others = max(0.0, busy_seconds() - busy - total.item()) / sum(seconds) / (os.cpu_count() or 1)
    prefill, whole = seconds
    return {"prefill": prefill, "decode": (whole - prefill) / (new - 1), "whole": whole, "others": others}


def busy_seconds() -> float:
    """The processor time that all programs of this machine have used."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def cache_mib(model: Any, prompt: torch.Tensor, new: int) -> float:
    """The memory of this rank's keys and values at the end of a generation of the whole batch."""
    cache = model.generate(prompt[:1], max_new_tokens=2, do_sample=False, return_dict_in_generate=True).past_key_values
    each = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / cache.get_seq_length()
    return round(each * len(prompt) * (prompt.shape[1] + new - 1) / 2**20, 2)


def decoding(arguments: dict[str, Any]) -> Step:
    """All ways of decoding in two processes, one after another in each step, in an order that changes."""
    whole = gpt2(arguments)
    split, size = on_stages(copy.deepcopy(whole), schedule="zb-h1"), arguments["batch_size"]
    in_a_v = on_stages(copy.deepcopy(whole))
    prompt = batch_of(arguments, size)
    ways: dict[str, Way | None] = {
        ONE: way_of(whole, prompt) if dist.get_rank() == 0 else None,
        BY_HAND: by_hand(whole, prompt),
        "two stages, one group": way_of(split, prompt, generation_groups=1),
        "four in a V, one group": way_of(in_a_v, prompt, generation_groups=1),
    }
    if size > 1:
        ways["four in a V, two groups"] = way_of(in_a_v, prompt, generation_groups=2)
        ways[IN_GROUPS] = way_of(split, prompt, generation_groups=2)
        ways[APART] = way_of(whole, prompt[: size // 2])
    if arguments["peers"]:
        ways["one process, device_map"] = way_of(device_map(arguments), prompt) if dist.get_rank() == 0 else None
    caches: list[Any] = [None, None]
    mine = cache_mib(split, prompt, arguments["new_tokens"]), cache_mib(whole, prompt, arguments["new_tokens"])
    dist.all_gather_object(caches, mine)
    shuffle = random.Random(0)

    def step() -> Figures:
        figures: dict[str, Any] = {"cache_mib": {"unsplit": caches[0][1], "stages": [each for each, _ in caches]}}
        for name in shuffle.sample(list(ways), len(ways)):
            found = timed(ways[name], arguments["new_tokens"])
            figures |= {f"{name}: {key}": value for key, value in found.items()}
        every: list[Any] = [None, None]
        dist.all_gather_object(every, figures)
        return dict(every[0])

    return step


def device_map(arguments: dict[str, Any]) -> Any:
    """As transformers runs a model that `device_map` spreads over devices: one after another, in one process."""
    from accelerate import dispatch_model

    names = ["transformer.wte", "transformer.wpe", *(f"transformer.h.{i}" for i in range(arguments["layers"]))]
    places = dict.fromkeys([*names, "transformer.ln_f", "lm_head"], "cpu")
    return dispatch_model(gpt2(arguments), places, main_device="cpu", force_hooks=True)


# -- devices that sleep ------------------------------------------------------------------------------------------------


def sleeping_stages(arguments: dict[str, Any]) -> Step:
    """Stages that take `seconds` for a forward of any group."""
    size = int(os.environ["WORLD_SIZE"])
    model = on_stages(SleepingModel(SleepConfig(size, arguments["seconds"])).eval())
    prompt = torch.ones(arguments["batch_size"], 4, dtype=torch.int64)
    way = way_of(model, prompt, generation_groups=arguments["groups"])
    if arguments["real_time"]:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(10))
    return lambda: timed(way, arguments["new_tokens"])


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
    model = on_stages(gpt2(arguments), schedule="zb-h1", num_microbatches=arguments["num_microbatches"])
    return evaluation_step(model, batch_of(arguments, arguments["batch_size"]))


def pippy(arguments: dict[str, Any]) -> Step:
    """accelerate's pipelined forward; the last stage alone has the output.

    It traces a microbatch of as many samples as there are microbatches, and receives into tensors of that size.
    """
    from accelerate import PartialState, prepare_pippy

    PartialState(cpu=True)
    batch = batch_of(arguments, arguments["batch_size"])
    count, half = arguments["num_microbatches"], arguments["layers"] // 2
    example = {"input_ids": batch[: len(batch) // count].clone(), "use_cache": False}
    model = prepare_pippy(
        gpt2(arguments), split_points=[f"transformer.h.{half}"], example_kwargs=example, num_chunks=count
    )
    return evaluation_step(model, batch)


KINDS = {
    "decoding": decoding,
    "sleeping": sleeping_stages,
    "evaluated in one": evaluated_in_one,
    "evaluated apart": evaluated_apart,
    "evaluated on stages": evaluated_on_stages,
    "pippy": pippy,
}


# -- tables ------------------------------------------------------------------------------------------------------------


COLUMNS = ["batch", "", "tokens/s", "of one process", "of two apart", "of its bound", "prefill s", "decode ms/token"]
IN_GROUPS = "two stages, two groups"


def bound(result: dict[str, Any], rows: int) -> float:
    """The seconds that `IN_GROUPS` takes at least: those of the two apart, and until the second stage has its first
    part of a prompt of half of the `rows` (see the page about generation), as it has nothing to do before."""
    parts = max(1, min(rows // 4, rows // 2 * PROMPT // LEAST_TOKENS))
    return median_of([result], f"{APART}: whole") + median_of([result], f"{APART}: prefill") / 2 / parts


def measure_decoding(options: argparse.Namespace) -> None:
    """The rows of one batch size; those of others, measured before with the same model, stay in the table."""
    size, new = options.batch_size, options.new_tokens
    model = {"vocabulary": options.vocabulary, "layers": options.layers, "width": options.width}
    config = {**model, "new_tokens": new, "prompt": PROMPT, "warmup": 0}
    path = RESULTS / f"generation_{PROMPT}x{new}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before["parts"] if before.get("config") == config else {}
    (runs,) = run({"decoding": ("decoding", 2, {"batch_size": size, "peers": options.peers})}, config, options).values()
    runs = [{**result, "date": environment()["date"]} for result in runs if "seconds" in result]
    if options.more and str(size) in kept:
        runs = [*kept[str(size)]["runs"], *runs]
    found = {key.removesuffix(": whole") for result in runs for key in result if key.endswith(": whole")}
    names = sorted(found, key=lambda name: (name.endswith(("group", "groups")), name))

    def rate(name: str, result: dict[str, Any]) -> float:
        return size * new / median_of([result], f"{name}: whole")

    rows: dict[str, list[str]] = {}
    for name in names:
        its = [result for result in runs if f"{name}: whole" in result]
        ratios = {
            other: f"{statistics.median(rate(name, result) / rate(other, result) for result in its):.3f}"
            for other in (ONE, APART)
            if other in names
        }
        tokens = statistics.median(rate(name, result) for result in its)
        of_bound = ""
        if name == IN_GROUPS:
            shares = [bound(result, size) / median_of([result], f"{name}: whole") for result in its]
            of_bound = f"{statistics.median(shares):.3f}"
        prefill, decode = (median_of(its, f"{name}: {key}") for key in ("prefill", "decode"))
        rows[name] = [
            *(f"{tokens:.1f}", ratios[ONE], ratios.get(APART, ""), of_bound),
            *(f"{prefill:.3f}", f"{1000 * decode:.1f}"),
        ]
    cache = runs[0]["cache_mib"][0]
    others = [median_of([result], key) for result in runs for key in result if key.endswith(": others")]
    stages = " and ".join(map(str, cache["stages"]))
    part = {
        "rows": rows,
        "runs": runs,
        "note": f"{len(runs)} rounds from {runs[0]['date']} to {runs[-1]['date']}, in which other programs used "
        f"{100 * statistics.median(others):.0f} % (at most {100 * max(others):.0f} %) of the processors; keys and "
        f"values {cache['unsplit']} MiB unsplit, {stages} MiB on the two stages at the end",
    }
    parts = dict(sorted({**kept, str(size): part}.items(), key=lambda entry: int(entry[0])))
    table = Comparison(path.stem, f"GPT-2: {PROMPT} + {new} tokens", COLUMNS, config, {})
    for batch, each in parts.items():
        for name, cells in each["rows"].items():
            table.add(batch, [name, *cells])
    notes = [f"- Batch {batch}: {each['note']}." for batch, each in parts.items()]
    table.write(
        "All ways in the same two processes, one after another in an order that changes, each time a prefill alone and "
        "a whole generation; ratios are medians over rounds. The bound of two stages in two groups is the time of the "
        "two apart, and that until the second stage has its first part of a prompt.\n\n" + "\n".join(notes)
    )
    write_json({**json.loads(path.read_text()), "parts": parts}, path)


def measure_emulated(options: argparse.Namespace) -> None:
    ranks, seconds, new = 3, options.seconds, options.new_tokens
    config = {
        "seconds": seconds, "new_tokens": new, "batch_size": 6, "ranks": ranks, "warmup": 0,
        "real_time": options.real_time,
    }  # fmt: skip
    # Devices that are busy with each row: the whole batch takes as long as all groups one after another.
    names = {1: "one group", ranks: f"{ranks} groups"}
    kinds = {
        name: ("sleeping", ranks, {"groups": count, "seconds": seconds * ranks / count})
        for count, name in names.items()
    }
    results = run(kinds, config, options)
    columns = ["", "s for each token of all groups", "of the ideal"]
    table = Comparison("generation_three_stages", f"Decoding over {ranks} devices that sleep", columns, config, results)
    for count, name in names.items():
        decode = median_of(results[name], "decode")
        # Every stage is at work all the time, for each group once.
        ideal = seconds * ranks * (ranks if count == 1 else 1)
        table.add(name, [f"{decode:.4f}", f"{ideal / decode:.3f}"], decode=decode, of_ideal=ideal / decode)
    priority = " Other programs ran; these processes had real-time priority." if options.real_time else ""
    table.write(
        f"A stage sleeps {seconds:.3g} s for each group's forward, three times as long for the whole batch's. Ideal: "
        f"no stage waits; with one group, the {ranks} stages work one after another.{priority}"
    )


def measure_evaluation(options: argparse.Namespace) -> None:
    config = {
        "vocabulary": options.vocabulary, "layers": options.layers, "width": 384, "length": 32, "batch_size": 64,
        "num_microbatches": 8, "warmup": 2,
    }  # fmt: skip
    kinds: dict[str, tuple[str, int, dict[str, Any]]] = {
        "one process": ("evaluated in one", 1, {}),
        "two processes apart, half the batch each": ("evaluated apart", 2, {}),
        **{
            f"two stages, {count} microbatches": ("evaluated on stages", 2, {"num_microbatches": count})
            for count in (8, 16)
        },
    }
    if options.peers:
        kinds["accelerate's prepare_pippy"] = ("pippy", 2, {})
    results = run(kinds, config, options, steps=5)
    table = Comparison(
        "generation_evaluation",
        "Evaluation of 64 samples of 32 tokens",
        ["", "s", "of two apart", "fastest s", "of two apart"],
        config,
        results,
    )
    apart = results[list(kinds)[1]]
    for name, runs in results.items():
        seconds = median_of(runs, "seconds")
        if seconds != seconds:
            table.add_missing(name)
            continue
        ratio, fastest = ratio_of(apart, runs, "seconds"), fastest_of(runs)
        cells = [f"{seconds:.3f}", f"{ratio:.3f}", f"{fastest:.3f}", f"{fastest_of(apart) / fastest:.3f}"]
        table.add(name, cells, seconds=seconds, of_apart=ratio, fastest=fastest)
    table.write(
        "The two apart work on microbatches of 8 samples. A pipeline of two equal stages takes as long as one stage "
        "for all microbatches and one more: 8 of them come to at most 8/9 = 0.89 of two processes apart, 16 to 0.94, "
        "if a stage computes half of the model in half the time; with half of the weights for its cache it may take "
        "less."
    )


def fastest_of(runs: list[dict[str, Any]]) -> float:
    return min(seconds for result in runs for seconds in result.get("seconds", []))


def run(
    kinds: dict[str, tuple[str, int, dict[str, Any]]],
    config: dict[str, Any],
    options: argparse.Namespace,
    steps: int = 1,
) -> Any:
    script = "generation.py"
    contestants = {
        name: (script, ranks, {**config, "kind": kind, **extra}, 1) for name, (kind, ranks, extra) in kinds.items()
    }
    return side_by_side(contestants, options.rounds, steps, options.seconds_in_all)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["decoding", "emulated", "evaluation"])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=0.03, help="that an emulated stage takes for a forward")
    parser.add_argument("--real-time", action="store_true", help="emulated stages go before all other programs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds-in-all", type=float, default=math.inf, help="after which no round begins")
    parser.add_argument("--more", action="store_true", help="add the rounds of decoding to those of the result file")
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
