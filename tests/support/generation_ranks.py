"""What one rank does in the tests of generation, and the unsplit models that are their oracle."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import EncoderDecoderCache, QuantizedCache
from transformers.generation.streamers import BaseStreamer

import penstock
from penstock.generation.decoding import decoding_of
from penstock.runtime.boundary.p2p import P2PChannel
from tests.support import families
from tests.support.families import Family, batch
from tests.support.training import kept_in_double, run_step

# Layers of which some have a convolution's state in the cache, others keys and values.
HYBRID = {
    **families.LLAMA,
    "num_hidden_layers": 6,
    "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv", "conv"],
}
FAMILIES = {**families.FAMILIES, "lfm2": Family("Lfm2ForCausalLM", "Lfm2Config", HYBRID, "causal")}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
THREE_GROUPS: dict[str, Any] = {**GREEDY, "generation_groups": 3}


def build(family: str, dropout: float = 0.0, dtype: torch.dtype | None = None, **settings: Any) -> nn.Module:
    """An unsplit model whose tokens vary: fresh weights are enlarged, or it would repeat one token."""
    if family == "mixtral":
        settings["output_router_logits"] = False  # transformers' own balance loss fails on a padded batch with a cache
    # A softmax in float32, where float64's mask value is infinite: in float64 padding makes NaN.
    dtype = dtype or (torch.float32 if family in ("bloom", "gemma2") else torch.float64)
    model = FAMILIES[family].build(dropout=dropout, dtype=dtype, **settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def prompt(family: str, size: int = 3) -> dict[str, Any]:
    """Inputs of rows of unequal length; padded on the left for a decoder alone."""
    kind = FAMILIES[family].kind
    inputs = batch(kind, size=size)
    del inputs["labels"]
    return {name: value.flip(1) for name, value in inputs.items()} if kind == "causal" else inputs


def parallel(model: nn.Module, num_stages: int = 2, schedule: str = "1f1b") -> Any:
    configuration = {"model_parallelism": {"pipeline_parallel_size": num_stages, "schedule": schedule}}
    return penstock.initialize(copy.deepcopy(model), configuration)


def rank() -> int:
    return int(os.environ.get("RANK", "-1"))  # no rank for the unsplit model


def outcome(call: Callable[[], Any]) -> str:
    """The error of a call, or none."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run_cases(model: Any, inputs: dict[str, Any], cases: list[dict[str, Any]], seed: int) -> list[Any]:
    """The results of generate(), one for each set of options, each from the same random state."""
    results = []
    for options in cases:
        torch.manual_seed(seed)
        results.append(model.generate(**inputs, **options))
    return results


def generate(setups: list[tuple[str, str]], cases: list[dict[str, Any]], num_stages: int) -> list[list[Any]]:
    """A rank's results for each family and schedule. The ranks' random states differ; the first rank's is the unsplit
    model's."""
    found = []
    for family, schedule in setups:
        model = parallel(build(family), num_stages, schedule)
        found.append(run_cases(model, prompt(family), cases, seed=5 if rank() == 0 else 100 + rank()))
        model.pipeline.close()
    return found


def with_states(
    model: Any, family: str, cases: list[dict[str, Any]], size: int, **options: Any
) -> list[tuple[Any, torch.Tensor]]:
    """The results of generate() with the random states afterwards, each from the same one."""
    results = []
    for case in cases:
        torch.manual_seed(5 + max(0, rank()))
        results.append((model.generate(**prompt(family, size), **case, **options), torch.get_rng_state()))
    return results


def in_groups(
    family: str, cases: list[dict[str, Any]], size: int, num_ranks: int, schedule: str, groups: int
) -> tuple[list[tuple[Any, torch.Tensor]], list[str]]:
    """A rank's results in so many groups, and why any of them was not."""
    model = parallel(build(family), num_ranks, schedule)
    found = with_states(model, family, cases, size, generation_groups=groups)
    return found, sorted(decoding_of(model.pipeline).logged_reasons)


# Options with which a batch stays in one group.
WATCHED: dict[str, dict[str, Any]] = {
    "processor": {"logits_processor": True},
    "criterion": {"stopping_criteria": True},
    "time": {"max_time": 1000.0},
    "prefixes": {"prefix_allowed_tokens_fn": lambda sample, tokens: [3 + sample, 9, 40]},
    "chunks": {"prefill_chunk_size": 4},
    "details": {"return_dict_in_generate": True, "output_scores": True},
    "streamer": {"streamer": True},
    "guidance": {"guidance_scale": 1.5},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


def watched(model: Any, size: int, options: dict[str, Any], **more: Any) -> torch.Tensor:
    """Greedy tokens with options of which some are objects."""
    made = {"logits_processor": [Favour()], "stopping_criteria": [AfterTokens(12)], "streamer": Collect()}
    options = {name: made[name] if value is True and name in made else value for name, value in options.items()}
    result = model.generate(**prompt("gpt2", size), **GREEDY, **options, **more)
    return result if isinstance(result, torch.Tensor) else result.sequences


def numbers_of_groups(cases: list[tuple[int, Any, str, int]]) -> tuple[list[tuple[torch.Tensor, int]], list[str]]:
    """Tokens and numbers of groups, and what was said in the log."""
    model, found = parallel(build("gpt2")), []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    for size, wanted, name, _ in (*cases, *cases[-3:]):  # what was said once is not said again
        tokens = watched(model, size, WATCHED[name] if name else {}, generation_groups=wanted)
        found.append((tokens, len(decoding_of(model.pipeline).groups)))
    logger.removeHandler(handler)
    logger.setLevel(level)
    return found[: len(cases)], said


def messages_of_tokens(few: int, many: int) -> dict[str, int]:
    """How many messages of each kind this rank sends for so many tokens more."""
    model = parallel(build("gpt2"), 3)
    found = [messages(model, 6, number, generation_groups=3) for number in (few, many)]
    assert len(decoding_of(model.pipeline).groups) == 3
    return {name: number - found[0][name] for name, number in found[1].items() if number != found[0][name]}


def messages_of_prompts(size: int, schedule: str) -> dict[str, int]:
    """How many messages of each kind this rank sends for the first token, once it knows their shapes."""
    model = parallel(build("gpt2"), schedule=schedule)
    messages(model, size, 1)
    return dict(messages(model, size, 1))


def messages(model: Any, size: int, new_tokens: int, **options: Any) -> Counter[str]:
    counts = Counter[str]()
    original = P2PChannel.send

    def send(channel: P2PChannel, tensors: Sequence[torch.Tensor]) -> None:
        counts[channel.name] += 1
        original(channel, tensors)

    with mock.patch.object(P2PChannel, "send", send):
        model.generate(**prompt("gpt2", size), max_new_tokens=new_tokens, do_sample=False, **options)
    return counts


def with_dropout(num_stages: int) -> tuple[list[Any], bool]:
    """Sampling in training mode, and whether the model was left in it."""
    model = parallel(build("gpt2", dropout=0.3), num_stages).train()
    return run_cases(model, prompt("gpt2"), [{"max_new_tokens": 6, "do_sample": True}], 5), model.training


def random_states() -> tuple[bool, torch.Tensor]:
    """Whether a rank's own random state came back, and the state afterwards."""
    model = parallel(build("gpt2"))
    torch.manual_seed(5 + rank())
    before = torch.get_rng_state()
    model.generate(**prompt("gpt2"), max_new_tokens=6, do_sample=True)
    return torch.equal(before, torch.get_rng_state()), torch.get_rng_state()


def cache_layers(family: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer of this rank's cache after a greedy generation; of the unsplit model's."""
    model = parallel(build(family)) if rank() >= 0 else build(family)
    output: Any = model.generate(**prompt(family), **GREEDY, return_dict_in_generate=True)
    return layers_of(output.past_key_values)


def layers_of(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    part = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return [(layer.keys, layer.values) for layer in part.layers]


def continued() -> torch.Tensor:
    """A generation that goes on from the cache of another one, on stages if there are ranks."""
    model: Any = parallel(build("llama")) if rank() >= 0 else build("llama")
    first = model.generate(**prompt("llama"), **GREEDY, return_dict_in_generate=True)
    mask = torch.cat([prompt("llama")["attention_mask"], torch.ones(3, GREEDY["max_new_tokens"], dtype=torch.int64)], 1)
    cache = first.past_key_values
    return model.generate(first.sequences, attention_mask=mask, past_key_values=cache, **GREEDY)


def decode_by_hand(model: Any, family: str) -> list[Any]:
    """Greedy tokens, with the logits of every position and the loss of each forward, from a loop without generate()."""
    inputs, seen = prompt(family, 2), []
    encoded = family == "bart"
    ids = inputs["decoder_input_ids"] = torch.tensor([[2, 5], [2, 7]]) if encoded else inputs["input_ids"]
    if not encoded:
        del inputs["decoder_input_ids"]
    with torch.no_grad(), kept_in_double():
        for _ in range(4):
            out = model(**inputs, use_cache=True, labels=ids)
            ids = out.logits[:, -1:].argmax(-1)
            seen += [out.logits, out.loss, ids]
            inputs["past_key_values"] = out.past_key_values
            inputs["decoder_input_ids" if encoded else "input_ids"] = ids
            if encoded:
                inputs.pop("input_ids", None)
                inputs["encoder_outputs"] = (out.encoder_last_hidden_state,)
            else:
                more = torch.ones_like(ids)
                inputs["attention_mask"] = torch.cat([inputs["attention_mask"], more], 1)
    return seen


def decode_by_hand_on_stages(family: str, schedule: str) -> tuple[list[Any], str]:
    """Also what is said of different inputs."""
    model = parallel(build(family), schedule=schedule)
    seen, ids = decode_by_hand(model, family), prompt(family)["input_ids"]
    with torch.no_grad():
        return seen, outcome(lambda: model(ids[:, rank() :], use_cache=True))


class Collect(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tokens)


def stream(cases: list[tuple[list[int], bool]]) -> list[tuple[Any, list[Any] | None]]:
    """For each case greedy tokens, and what the streamer got on the ranks that were given one."""
    model, found = parallel(build("gpt2")), []
    for ranks, everywhere in cases:
        streamer = Collect() if rank() in ranks else None
        options = {"streamer": streamer, "stream_on_all_ranks": everywhere}
        tokens = model.generate(**prompt("gpt2", 1), **GREEDY, **options)
        found.append((tokens, streamer and streamer.tokens))
    return found


class AfterTokens(StoppingCriteria):
    """Stops a sequence of a given length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Favour(LogitsProcessor):
    """A user's own processor, which does something to one rank if told to."""

    def __init__(self, where: int | None = None, act: Callable[[], None] | None = None) -> None:
        self.where, self.act = where, act

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.act and input_ids.shape[1] == 12 and self.where == rank():
            self.act()
        return scores + torch.linspace(0, 3, scores.shape[-1])


def stop_on_one_rank() -> list[torch.Tensor]:
    """Tokens where rank 0 alone, and where rank 1 alone, meets a criterion."""
    model, met = parallel(build("gpt2")), StoppingCriteriaList([AfterTokens(12)])
    criteria = [met if rank() == stopping else None for stopping in range(2)]
    return [model.generate(**prompt("gpt2"), **GREEDY, stopping_criteria=one) for one in criteria]


def stop_by_the_clock() -> torch.Tensor:
    """The clock of one rank runs ahead by far."""
    real = time.time
    try:
        if rank() == 1:
            calls = iter(range(1000))
            time.time = lambda: real() + 100.0 * next(calls)  # type: ignore[assignment]
        return parallel(build("gpt2")).generate(**prompt("gpt2"), max_new_tokens=40, do_sample=False, max_time=250.0)
    finally:
        time.time = real


def after_errors(mistakes: list[dict[str, Any]]) -> tuple[list[str], torch.Tensor, list[str]]:
    """The errors of wrong calls; then a right one on the same pipeline, and what generate() has left on the model."""
    model = parallel(build("gpt2"))
    given = [{**prompt("gpt2"), **GREEDY, **mistake} for mistake in mistakes]
    errors = [outcome(lambda one=one: model.generate(**one)) for one in given]
    tokens = model.generate(**prompt("gpt2"), **GREEDY)
    left = [name for name in ("_get_stopping_criteria", "_valid_auto_compile_criteria") if name in vars(model)]
    return errors, tokens, left


def with_quantised_caches() -> list[str]:
    """What is said of one that generate() is to make, of one that it is given, and in an evaluation."""
    model: Any = parallel(build("gpt2"))
    inputs, cache = prompt("gpt2"), QuantizedCache("quanto", model.config)
    with torch.no_grad():
        return [
            outcome(lambda: model.generate(**inputs, **GREEDY, cache_implementation="quantized")),
            outcome(lambda: model.generate(**inputs, **GREEDY, past_key_values=cache)),
            outcome(lambda: model(**inputs, past_key_values=cache)),
        ]


def different_arguments(others: list[dict[str, Any]]) -> tuple[list[str], torch.Tensor, list[str]]:
    """The same for calls in which rank 1 passes something else, or something wrong."""
    other = {"input_ids": prompt("gpt2")["input_ids"] + 1}
    return after_errors([one if rank() else {} for one in (other, *others)])


def fail_in_a_group(model: Any, group: int, act: Callable[[], None]) -> None:
    """Let `act` happen before a group's fourth token."""
    original = model.prepare_inputs_for_generation

    def prepare(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if decoding_of(model.pipeline).number == group and input_ids.shape[1] == 12:
            act()
        return original(input_ids, **kwargs)

    model.__dict__["prepare_inputs_for_generation"] = prepare


def divide_by_zero() -> None:
    raise ZeroDivisionError("on one rank")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def failing(where: int, killed: bool, groups: bool, schedule: str) -> tuple[str, list[str], float]:
    """The error of a generation, because one rank fails in a processor, or in its second group; threads left, and
    seconds."""
    model, act = parallel(build("gpt2"), 3, schedule), kill if killed else divide_by_zero
    generate = {**prompt("gpt2", 6), **(THREE_GROUPS if groups else GREEDY)}
    model.generate(**generate)
    if not groups:
        generate["logits_processor"] = [Favour(where, act)]
    elif rank() == where:
        fail_in_a_group(model, 1, act)
    start = time.monotonic()
    return outcome(lambda: model.generate(**generate)), group_threads(), time.monotonic() - start


class TwoPaths(GPT2LMHeadModel):
    """Runs its last block once more where `again` says so."""

    again = False

    def forward(self, input_ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        output = super().forward(input_ids, **arguments)
        if self.again:
            once_more = self.lm_head(self.transformer.h[-1](self.transformer.wte(input_ids)))
            output.logits = output.logits + once_more[:, -1:]
        return output


def another_path(where: int) -> str:
    """The error of a generation whose forwards take another path on one rank, after one in which all were alike."""
    model = build("gpt2")
    model.__class__ = TwoPaths
    model = parallel(model, 3, "1f1b")
    model.generate(**prompt("gpt2"), **GREEDY)
    model.again, model.pipeline.board.patience = rank() == where, 0.5
    return outcome(lambda: model.generate(**prompt("gpt2"), **GREEDY))


def interrupted(ranks: list[int], group: int, schedule: str) -> tuple[list[str], list[str], float]:
    """Ctrl-C in a group's turn on some ranks: this call's error and the next one's, threads left, and seconds."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    model, generate = parallel(build("gpt2"), 3, schedule), {**prompt("gpt2", 6), **THREE_GROUPS}
    model.generate(**generate)
    if rank() in ranks:
        fail_in_a_group(model, group, interrupt)
    start = time.monotonic()
    errors = [outcome(lambda: model.generate(**generate)) for _ in range(2)]
    signal.signal(signal.SIGINT, handler)
    return errors, group_threads(), time.monotonic() - start


def group_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("group")]


def usable_after_errors(schedule: str) -> tuple[list[str], torch.Tensor, list[str]]:
    """Errors in a group that all ranks meet, or that one of them has while it chooses tokens; then right tokens."""
    model, generate = parallel(build("gpt2"), 3, schedule), {**prompt("gpt2", 6), **THREE_GROUPS}
    fail_in_a_group(model, 1, divide_by_zero)
    errors = [outcome(lambda: model.generate(**generate))]
    del model.__dict__["prepare_inputs_for_generation"]
    with torch.no_grad():
        bias = model.transformer.ln_f.register_forward_hook(lambda module, args, output: output * float("nan"))
        errors.append(outcome(lambda: model.generate(**{**generate, "do_sample": True})))
        bias.remove()
    return errors, model.generate(**generate), group_threads()


def replicas() -> tuple[int, torch.Tensor]:
    """Two pipelines, each with a batch of its own and as many steps as it likes."""
    model = parallel(build("gpt2"))
    mine = model.data_parallel_rank
    options = {"max_new_tokens": 3 + 5 * mine, "do_sample": False}
    return mine, model.generate(**prompt("gpt2", size=2 + mine), **options)


def between_steps() -> tuple[float, torch.Tensor, float]:
    """Training, generating, training on the same pipeline; the losses and the tokens."""
    model, inputs = parallel(build("gpt2")), batch("causal", size=8)
    before = sum(run_step(model, inputs))
    tokens = model.generate(**prompt("gpt2"), **GREEDY)
    return before, tokens, sum(run_step(model, inputs))


KINDS = ("processor", "embeddings", "assistant", "lookup", "autocast", "precision", "precision with an encoder")


def custom() -> list[Any]:
    """Results with options that a test cannot write down as plain data, made here as each rank would; those of the
    unsplit model where there are no ranks."""
    found = []
    for kind in KINDS:
        by_engine = kind.startswith("precision")
        halves, family = kind == "autocast" or by_engine, "t5" if "encoder" in kind else "llama"
        model: Any = build(family, dtype=torch.float32 if halves else None)
        model = parallel(model) if rank() >= 0 else model
        inputs, options = prompt(family), dict(GREEDY)
        if kind == "processor":
            options["logits_processor"] = LogitsProcessorList([Favour()])
        elif kind == "embeddings":
            inputs["inputs_embeds"] = build("llama").get_input_embeddings()(inputs.pop("input_ids")).detach()
        elif kind == "assistant":
            inputs = {name: value[:1] for name, value in inputs.items()}
            options["assistant_model"] = build("llama", num_hidden_layers=1)
        elif kind == "lookup":
            inputs = {name: value[:1].repeat(1, 2) for name, value in inputs.items()}
            options |= {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3}
        if by_engine and rank() >= 0:
            model.pipeline.autocast = torch.bfloat16
        elif by_engine:  # as accelerate has it
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        with torch.autocast("cpu", torch.bfloat16, enabled=halves and not by_engine):
            result = model.generate(**inputs, **options, output_logits=halves, return_dict_in_generate=halves)
        found.append(torch.stack(result.logits) if halves else result)
        if rank() >= 0:
            model.pipeline.close()
    return found
