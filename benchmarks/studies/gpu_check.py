"""What only real GPUs can show, in ten minutes; prints one table to send us.

    python benchmarks/studies/gpu_check.py                    # two GPUs; --ranks 3 or 4 if there are more
    python benchmarks/studies/gpu_check.py --ranks 2          # on one GPU: the ranks share it, over gloo
    python benchmarks/studies/gpu_check.py --device cpu       # the same checks over gloo, with a smaller model
    python benchmarks/studies/gpu_check.py --device emulated  # the path of one GPU, on the emulated device of the tests

Losses and gradients of every schedule against the unsplit model on the same device; the same while each block waits
for the whole device in its forward and its backward, with one connection per device, and with communicators that were
made eagerly; evaluation and generation; a rank that is killed; and throughput over that of one device, beside
DistributedDataParallel and torch's own pipelining, with the part of a step for which the host is busy, and what the
schedule "auto" is. Every check is processes of its own, so one that hangs is stopped, and the table says so.

On one GPU, NCCL refuses two ranks of one host: each says it is on a host of its own (`one_card.py`), and NCCL carries
messages over sockets, or with `--transport host` they go over gloo (`shared_card.py`). What is exact and whether the
host is ahead are then what they are on two; throughput says nothing.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contestants import TorchStage, loss_of
from shared_card import use_shared_card
from torch import nn
from torch.distributed import pipelining
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import penstock
from penstock.runtime.comm.devices import backend
from penstock.schedule import schedule_names

LIMIT = 120.0  # seconds for one check
VOCABULARY = 512
LEARNING_RATE = 0.05
LARGEST_DIFFERENCE = 1e-4  # of gradients in float32, relative to the largest entry
PROMISED_SECONDS = 10.0  # until a killed rank is an error on all others
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


# In a rank's environment: it shares the only GPU with others, and how messages travel then.
SHARED = "PENSTOCK_SHARED_CARD"
TRANSPORTS = {
    "nccl": "NCCL takes each for a host of its own: messages go over its sockets.",
    "host": "Messages go over gloo, through the host's memory.",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu", "emulated"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2, help="processes; each has a GPU, or all share the only one")
    parser.add_argument("--only", default="", help="run the checks whose name has this in it")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput of each contestant")
    parser.add_argument("--transport", choices=("nccl", "host"), default="nccl", help="of ranks that share one GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options.worker, options.device, CHECKS)
    cards = torch.cuda.device_count() if options.device == "cuda" else 1
    if cards != 1 and cards < options.ranks:
        print(f"this machine has {cards} GPUs: use one, or {options.ranks} for {options.ranks} ranks; try --device cpu")
        return 2
    shared = options.device != "cpu" and cards == 1
    transport = "host" if options.device == "emulated" else options.transport
    return check_all(options.device, options.ranks, options.only, transport if shared else "", options.rounds)


def work(worker: str, device: str, checks: Mapping[str, Callable[..., dict[str, Any]]]) -> int:
    """What a rank does: the check that `worker` names, with its arguments, whose answer it prints."""
    if device == "emulated":
        use_emulated_device()
    if shared := os.environ.get(SHARED):
        use_shared_card(shared)
    check, arguments, limit = json.loads(worker)
    faulthandler.dump_traceback_later(limit - 10)
    # The end of a process that has lost another may take longer than what is measured.
    print(json.dumps(checks[check](**arguments)), flush=True)
    return 0


def use_emulated_device() -> None:
    """Load the emulated GPU of the tests, which has host memory and computes at once, and a transport for it."""
    from tests.support.emulated_gpu import emulated_device, emulated_nccl

    os.environ[emulated_device.LIBRARY] = str(emulated_device.build())
    emulated_device.load()
    emulated_nccl.register()
    torch.__future__.set_swap_module_params_on_conversion(True)


def check_all(device: str, ranks: int, only: str, shared: str, rounds: int) -> int:
    """Run every check, and print the table as it grows. Returns the number of checks that failed.

    Args:
        shared: how messages travel if the ranks share one GPU: "nccl" or "host".
    """
    names = {"cuda": torch.cuda.get_device_name, "emulated": lambda: "emulated GPU"}
    name = names.get(device, lambda: platform.processor() or platform.machine())()
    print(f"penstock {penstock.__version__}, torch {torch.__version__}, {ranks} ranks, {name}")
    if shared:
        print(f"The ranks share one GPU. {TRANSPORTS[shared]}")
    print("\n| check | result | seconds | |\n|---|---|---|---|")
    failed = 0
    schedules = schedule_names()
    nccl = [
        ("1f1b: one connection", "exact", {"schedule": "1f1b", "waits": True}, ONE_CONNECTION),
        ("1f1b: eager communicators", "exact", {"schedule": "1f1b", "waits": True, "eager": True}, {}),
    ]
    four_bits = [("a base in 4 bits, with adapters", "packed", {}, {})]
    plan: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
        *((f"{each}: exact", "exact", {"schedule": each}, {}) for each in schedules),
        *((f"{each}: waits everywhere", "exact", {"schedule": each, "waits": True}, {}) for each in schedules),
        *(nccl if shared != "host" else []),
        ("bfloat16 autocast", "half", {"name": "bfloat16"}, {}),
        ("float16 autocast with a GradScaler", "half", {"name": "float16"}, {}),
        *(four_bits if find_spec("bitsandbytes") and device != "emulated" else []),
        ("evaluation and generation", "without_gradients", {}, {}),
        *([("no host waits", "no_waits", {}, {})] if device == "cuda" and shared != "host" else []),
        ("a rank is killed", "killed", {"waits": False}, {}),
        ("a rank is killed, others wait for the device", "killed", {"waits": True}, {}),
    ]
    sharing = {SHARED: shared} if shared else {}
    for what, check, arguments, environment in plan:
        if only in what:
            failed += not show(what, *run(check, ranks, device, arguments, environment | sharing))
    if only in "throughput":
        failed += compare_throughput(device, ranks, sharing, rounds)
    print(f"\n{failed} failed" if failed else "\nall passed")
    return failed


def show(what: str, answers: Sequence[Any], seconds: float) -> bool:
    """Print a row; whether every rank answered that all is well."""
    answered = [answer for answer in answers if answer is not None]
    passed = bool(answered) and all(isinstance(answer, dict) and answer["passed"] for answer in answered)
    words = dict.fromkeys(a["said"] if isinstance(a, dict) else f"FAILED: {a}" for a in answered)
    said = "; ".join(filter(None, words))
    print(f"| {what} | {'passed' if passed else 'FAILED'} | {seconds:.1f} | {said} |", flush=True)
    return passed


def compare_throughput(device: str, ranks: int, sharing: dict[str, str], rounds: int) -> int:
    """Steps of one process, of pipelines and of peers, in turn; a row for each. Returns the number that failed."""
    results: dict[str, list[dict[str, Any]]] = {}
    contestants = {name: (ranks, "throughput", name) for name in ("auto", "1f1b", "zb-h1", "zb-v")}
    contestants |= {"one device": (1, "throughput", "1f1b"), "DistributedDataParallel": (ranks, "peer", "ddp")}
    contestants["torch's Schedule1F1B"] = (ranks, "peer", "Schedule1F1B")
    failed = 0
    for _ in range(rounds):
        for name, (count, check, schedule) in contestants.items():
            answers, _ = run(check, count, device, {"schedule": schedule, "small": device != "cuda"}, sharing)
            if all(isinstance(answer, dict) for answer in answers):
                results.setdefault(name, []).append(answers[0] | {"peak": [answer["peak"] for answer in answers]})
            else:
                failed += 1
                print(f"| throughput, {name} | FAILED | | {answers} |")
    one = results.pop("one device", None)
    for name, found in results.items():
        tokens = statistics.median(each["tokens"] for each in found)
        host = statistics.median(each["host"] for each in found)
        beside = statistics.median(each["tokens"] for each in one) if one else float("nan")
        said = f"{tokens / beside / ranks:.2f} of {ranks} devices; the host is busy for {host:.2f} of a step"
        chosen = f"; it is {found[0]['schedule']}" if name == "auto" else ""
        peaks = ", ".join(f"{peak / 2**30:.1f}" for peak in found[0]["peak"])
        print(f"| throughput, {name} | {tokens:.0f} tokens/s | | {said}{chosen}; at most {peaks} GiB |")
    return failed


def run(
    check: str,
    ranks: int,
    device: str,
    arguments: dict[str, Any],
    environment: dict[str, str],
    script: str = __file__,
    limit: float = LIMIT,
    before: Sequence[str] = (),
) -> tuple[list[Any], float]:
    """Every rank's answer, the end of what it printed in place of one, None for one that was killed; and seconds.
    `before` are words before each rank's command."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    start = time.monotonic()
    processes = []
    for rank in range(ranks):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": store.port}
        variables = {**os.environ, **environment, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        variables |= {name: str(value) for name, value in places.items()} | {"TRANSFORMERS_VERBOSITY": "error"}
        if device == "cpu" and torch.cuda.is_available():
            variables["CUDA_VISIBLE_DEVICES"] = ""
        worker = json.dumps([check, arguments, limit])
        command = [*before, sys.executable, str(Path(script).resolve()), "--device", device, "--worker", worker]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True))
    answers: list[Any] = []
    for process in processes:
        try:
            output, errors = process.communicate(timeout=max(1.0, start + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            print(errors[-4000:], file=sys.stderr)  # with where its threads were
            errors = f"it hangs: stopped after {limit:.0f} s"
        if process.returncode == -signal.SIGKILL and not errors.startswith("it hangs"):
            answers.append(None)
            continue
        lines = [line for line in output.splitlines() if line.startswith("{")]
        answers.append(json.loads(lines[-1]) if lines else " ".join(errors.split())[-300:])
    return answers, time.monotonic() - start


# ---------------------------------------------------------------- what each rank does


def make_model(layers: int = 6, width: int = 64, heads: int = 4) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=heads, n_positions=512, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_batch(size: int = 8, length: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[::2, length - length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def on(device: torch.device, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def distributed(model: Any, schedule: str, num_microbatches: int) -> Any:
    stages = int(os.environ["WORLD_SIZE"])
    section = {"pipeline_parallel_size": stages, "schedule": schedule, "num_microbatches": num_microbatches}
    return penstock.initialize(model, {"model_parallelism": section})


def unsplit_on(device: torch.device, model: GPT2LMHeadModel, steps: int) -> tuple[float, dict[str, torch.Tensor]]:
    whole = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.step()  # not the first time, as there are no gradients yet
        optimizer.zero_grad()
        loss = whole(**on(device, make_batch())).loss
        loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}


def wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.get_device_module().synchronize()


def wait_in_every_block(model: Any) -> None:
    """Each block waits for the whole device before its forward and in its backward."""
    for block in model.transformer.h:
        if next(block.parameters(), None) is not None:
            block.register_forward_pre_hook(lambda *_: wait_for_device())
            block.register_full_backward_hook(lambda *_: wait_for_device())


def exact(schedule: str, waits: bool = False, eager: bool = False, steps: int = 2) -> dict[str, Any]:
    """Some steps with updates; losses and gradients of the last against the unsplit model's."""
    if eager:
        local = None
        if torch.cuda.is_available():
            local = torch.device("cuda", min(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() - 1))
        dist.init_process_group("cpu:gloo,cuda:nccl" if local is not None else "gloo", device_id=local)
    model = make_model()
    plain = copy.deepcopy(model)
    model = distributed(model, schedule, num_microbatches=4)
    expected_loss, expected = unsplit_on(model.device, plain, steps)
    if waits:
        wait_in_every_block(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = list[torch.Tensor]()
    for _ in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        losses = []
        for output in model(**make_batch()):
            if waits:
                wait_for_device()
            output.loss.backward()
            losses.append(output.loss.detach())
    return compared(model, expected, abs(float(sum(losses)) - expected_loss) / expected_loss)


def half(name: str) -> dict[str, Any]:
    """Gradients of a step under autocast against the unsplit model's, which accumulates over the same microbatches."""
    model, dtype = make_model(), getattr(torch, name)
    whole = copy.deepcopy(model)
    model = distributed(model, "1f1b", num_microbatches=4)
    whole = whole.to(model.device)
    scale = 1024.0 if dtype == torch.float16 else 1.0
    scaler = torch.amp.GradScaler(model.device.type, scale)
    batch = make_batch()
    tokens = (batch["labels"][:, 1:] != -100).sum()
    for part in zip(*(value.chunk(4) for value in batch.values()), strict=True):
        with torch.autocast(model.device.type, dtype):
            inputs = on(model.device, dict(zip(batch, part, strict=True)))
            loss = whole(**inputs, num_items_in_batch=tokens).loss
        (loss * scale).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast(model.device.type, dtype):
        outputs = model(**batch)
    for output in outputs:
        scaler.scale(output.loss).backward()
    scaler.unscale_(optimizer)
    named = whole.named_parameters(remove_duplicate=False)
    return compared(model, {name: parameter.grad / scale for name, parameter in named})


def packed() -> dict[str, Any]:
    """Gradients of LoRA adapters on a base that bitsandbytes packs, against the unsplit model's."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    models = []
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        for _ in range(2):
            base = LlamaForCausalLM.from_pretrained(folder, quantization_config=bits, dtype=torch.float32)
            torch.manual_seed(1)
            models.append(get_peft_model(base, adapters))
    whole, model = models[0], distributed(models[1], "1f1b", num_microbatches=4)
    whole.to(model.device)(**on(model.device, make_batch())).loss.backward()
    for output in model(**make_batch()):
        output.loss.backward()
    return compared(model, {name: each.grad for name, each in whole.named_parameters() if each.requires_grad})


def compared(model: Any, expected: dict[str, torch.Tensor], worst: float = 0.0) -> dict[str, Any]:
    """The answer for gradients that should be these; `worst` is another difference that counts."""
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    differences = [
        float((parameter.grad - expected[name]).abs().max()) / scale
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    passed = all(each < LARGEST_DIFFERENCE for each in (worst, *differences))  # NaN is not
    told = dist.get_rank() == 0 or not passed
    return {"passed": passed, "said": f"gradients within {max(differences):.0e}" if told else ""}


def no_waits() -> dict[str, Any]:
    """CUDA raises where a host waits for it in the fourth step."""
    model = distributed(make_model(), "1f1b", num_microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        for output in model(**make_batch()):
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return {"passed": True, "said": ""}


def without_gradients() -> dict[str, Any]:
    """The logits and greedy tokens against the unsplit model's."""
    plain = make_model().eval()
    model = distributed(copy.deepcopy(plain), "1f1b", num_microbatches=4)
    plain = plain.to(model.device)
    batch = on(model.device, make_batch())
    prompt, options = batch["input_ids"][:2, :8], {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        worst = float((model(**batch).logits - plain(**batch).logits).abs().max())
    same = torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
    return {"passed": same and worst < 1e-3, "said": "same tokens" if same else "other tokens"}


def killed(waits: bool) -> dict[str, Any]:
    """The last rank kills itself in the third step; the others say whom they blame, and after how many seconds."""
    model, victim = distributed(make_model(), "1f1b", num_microbatches=4), dist.get_world_size() - 1
    store = dist.distributed_c10d._get_default_store()
    try:
        for step in range(1000):
            for number, output in enumerate(model(**make_batch())):
                if (step, number, dist.get_rank()) == (2, 1, victim):
                    store.set("gpu_check", str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                if waits:
                    wait_for_device()
                output.loss.backward()
                output.loss.item()
    except penstock.PipelineFailure as error:
        seconds = time.time() - float(store.get("gpu_check"))
        right = error.rank == victim
        said = f"rank {victim} named after {seconds:.1f} s" if right else f"blamed {error.rank}: {error}"
        return {"passed": right and seconds < PROMISED_SECONDS, "said": said, "seconds": seconds}
    return {"passed": False, "said": "nobody noticed"}


def throughput(schedule: str, small: bool) -> dict[str, Any]:
    """Figures of training; on GPUs under bfloat16 autocast."""
    size, length, _ = sizes(small)
    model = distributed(training_model(small), schedule, num_microbatches=8)
    batch = make_batch(size, length)

    def losses() -> None:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=not small):
            outputs = model(**batch)
        for output in outputs:
            output.loss.backward()

    return timed(losses, model.parameters(), small) | {"schedule": model.pipeline.make_schedule(8).name}


def peer(schedule: str, small: bool) -> dict[str, Any]:
    """Figures of DistributedDataParallel, or of a schedule of torch's own pipelining, on the same batch."""
    size, length, _ = sizes(small)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend())
    whole, ids = training_model(small).to(device), make_batch(size, length)["input_ids"].to(device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=not small)
    if schedule == "ddp":
        replica = nn.parallel.DistributedDataParallel(whole)
        mine = ids.chunk(ranks)[rank]

        def losses() -> None:
            with autocast:
                loss = replica(input_ids=mine, labels=mine, use_cache=False).loss
            loss.backward()

        return timed(losses, whole.parameters(), small)
    bounds = [round(index * len(whole.transformer.h) / ranks) for index in range(ranks + 1)]
    module = TorchStage(whole, bounds[rank], bounds[rank + 1])
    stage = pipelining.PipelineStage(module, rank, ranks, device)
    steps = getattr(pipelining, schedule)(stage, 8, loss_fn=loss_of)

    def pipelined() -> None:
        with autocast:
            steps.step(*[ids] if rank == 0 else [], **{"target": ids} if rank == ranks - 1 else {})

    return timed(pipelined, module.parameters(), small)


def sizes(small: bool) -> tuple[int, int, int]:
    """Samples in a batch, tokens in a sample, steps."""
    return (8, 64, 6) if small else (32, 512, 12)


def training_model(small: bool) -> GPT2LMHeadModel:
    shape = {"layers": 6, "width": 128} if small else {"layers": 24, "width": 1024, "heads": 16}
    return make_model(**shape)


def timed(losses: Callable[[], None], parameters: Iterable[nn.Parameter], small: bool) -> dict[str, Any]:
    """Tokens a second of the last two thirds of the steps, and for which part of their time the host was busy."""
    size, length, steps = sizes(small)
    optimizer, begun = torch.optim.SGD(parameters, lr=1e-3), steps // 3
    start = 0.0
    for step in range(steps):
        if step == begun:
            wait_for_device()
            start = time.perf_counter()
        losses()
        optimizer.step()
        optimizer.zero_grad()
    host = time.perf_counter() - start
    wait_for_device()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    tokens = (steps - begun) * size * length / seconds
    return {"passed": True, "said": "", "tokens": tokens, "host": host / seconds, "peak": peak}


CHECKS: dict[str, Callable[..., dict[str, Any]]] = {
    "exact": exact,
    "half": half,
    "packed": packed,
    "no_waits": no_waits,
    "without_gradients": without_gradients,
    "killed": killed,
    "throughput": throughput,
    "peer": peer,
}

if __name__ == "__main__":
    sys.exit(main())
