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
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.streamers import BaseStreamer

import penstock
from families import FAMILIES, batch
from penstock.generation.decoding import decoding_of
from penstock.runtime.boundary.p2p import P2PChannel
from training import kept_in_double

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


def run_cases(model: Any, inputs: dict[str, Any], cases: list[dict[str, Any]], seed: int) -> list[Any]:
    """The results of generate(), one for each set of options, each from the same random state."""
    results = []
    for options in cases:
        torch.manual_seed(seed)
        results.append(model.generate(**inputs, **options))
    return results


def generate(family: str, cases: list[dict[str, Any]], num_stages: int = 2, schedule: str = "1f1b") -> list[Any]:
    """A rank's results. The ranks' random states differ; the first rank's is the unsplit model's."""
    model = parallel(build(family), num_stages, schedule)
    return run_cases(model, prompt(family), cases, seed=5 if rank() == 0 else 100 + rank())


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
    family: str, cases: list[dict[str, Any]], size: int, num_stages: int
) -> tuple[list[tuple[Any, torch.Tensor]], list[str]]:
    """A rank's results in as many groups as stages, and why any of them was not."""
    model = parallel(build(family), num_stages)
    found = with_states(model, family, cases, size, generation_groups=num_stages)
    return found, sorted(decoding_of(model.pipeline).told)


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
    for _ in range(2):
        found.clear()
        for size, wanted, name, _ in cases:
            tokens = watched(model, size, WATCHED[name] if name else {}, generation_groups=wanted)
            found.append((tokens, len(decoding_of(model.pipeline).groups)))
    logger.removeHandler(handler)
    logger.setLevel(level)
    return found, said


def messages_of_tokens(few: int, many: int) -> dict[str, int]:
    """How many messages of each kind this rank sends for so many tokens more."""
    model = parallel(build("gpt2"), 3)
    found = [messages(model, 6, number, generation_groups=3) for number in (few, many)]
    assert len(decoding_of(model.pipeline).groups) == 3
    return {name: number - found[0][name] for name, number in found[1].items() if number != found[0][name]}


def messages_of_prompts(size: int) -> dict[str, int]:
    """How many messages of each kind this rank sends for the first token, once it knows their shapes."""
    model = parallel(build("gpt2"))
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


def impossible_groups(numbers: list[Any]) -> list[str]:
    model, errors = parallel(build("gpt2")), []
    for number in numbers:
        try:
            model.generate(**prompt("gpt2"), **GREEDY, generation_groups=number)
        except Exception as error:
            errors.append(type(error).__name__)
    return errors


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
    """Keys and values of every layer of this rank's cache after a greedy generation."""
    model = parallel(build(family))
    output = model.generate(**prompt(family), **GREEDY, return_dict_in_generate=True)
    return layers_of(output.past_key_values)


def layers_of(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    part = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return [(layer.keys, layer.values) for layer in part.layers]


def continued(model: Any) -> torch.Tensor:
    """A generation that goes on from the cache of another one."""
    first = model.generate(**prompt("llama"), **GREEDY, return_dict_in_generate=True)
    mask = torch.cat([prompt("llama")["attention_mask"], torch.ones(3, GREEDY["max_new_tokens"], dtype=torch.int64)], 1)
    cache = first.past_key_values
    return model.generate(first.sequences, attention_mask=mask, past_key_values=cache, **GREEDY)


def continued_on_stages() -> torch.Tensor:
    return continued(parallel(build("llama")))


def decode_by_hand(model: Any, family: str, cache: Any = None) -> list[Any]:
    """Greedy tokens, with the logits of every position and the loss of each forward, from a loop without generate()."""
    inputs, seen = {**prompt(family, 2), "past_key_values": cache}, []
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


def decode_by_hand_on_stages(family: str, schedule: str) -> tuple[list[Any], str, str]:
    """Also with a cache of one's own, and what is said of different inputs, and of no cache."""
    model = parallel(build(family), schedule=schedule)
    cache = DynamicCache() if schedule != "1f1b" else None
    seen, refused = decode_by_hand(model, family, cache), []
    for ids in (prompt(family)["input_ids"][:, rank() :], prompt(family)["input_ids"]):
        try:
            with torch.no_grad():
                model(ids, use_cache=True)
            refused.append("")
        except (ValueError, NotImplementedError) as error:
            refused.append(str(error))
    return seen, *refused


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


def stream(ranks: list[int], everywhere: bool) -> tuple[Any, list[Any] | None]:
    """Greedy tokens, and what the streamer got on the ranks that were given one."""
    streamer = Collect() if rank() in ranks else None
    model = parallel(build("gpt2"))
    tokens = model.generate(**prompt("gpt2", 1), **GREEDY, streamer=streamer, stream_on_all_ranks=everywhere)
    return tokens, streamer and streamer.tokens


class AfterTokens(StoppingCriteria):
    """Stops a sequence of a given length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Favour(LogitsProcessor):
    """A user's own processor; fails on one rank if told to."""

    def __init__(self, failing_rank: int | None = None, killed_rank: int | None = None, at: int = 12) -> None:
        self.failing_rank, self.killed_rank, self.at = failing_rank, killed_rank, at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.at and self.failing_rank == rank():
            raise ZeroDivisionError("a processor that fails")
        if input_ids.shape[1] == self.at and self.killed_rank == rank():
            os.kill(os.getpid(), signal.SIGKILL)
        return scores + torch.linspace(0, 3, scores.shape[-1])


def stop_on_one_rank(stopping_rank: int) -> torch.Tensor:
    criteria = StoppingCriteriaList([AfterTokens(12)]) if rank() == stopping_rank else None
    return parallel(build("gpt2")).generate(**prompt("gpt2"), **GREEDY, stopping_criteria=criteria)


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
    model, errors = parallel(build("gpt2")), []
    for mistake in mistakes:
        try:
            model.generate(**{**prompt("gpt2"), **GREEDY, **mistake})
            errors.append("none")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    tokens = model.generate(**prompt("gpt2"), **GREEDY)
    left = [name for name in ("_get_stopping_criteria", "_valid_auto_compile_criteria") if name in vars(model)]
    return errors, tokens, left


def different_arguments(others: list[dict[str, Any]]) -> tuple[list[str], torch.Tensor]:
    """The errors of calls in which rank 1 passes something else, or something wrong; then right tokens."""
    model, errors = parallel(build("gpt2")), []
    inputs = prompt("gpt2")
    for other in [{"input_ids": inputs["input_ids"] + rank()}, *others]:
        try:
            model.generate(**{**inputs, **GREEDY, **(other if rank() else {})})
            errors.append("none")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, model.generate(**inputs, **GREEDY)


def failing(num_stages: int = 2, **where: Any) -> float:
    """How long a generation took to end in an error."""
    model = parallel(build("gpt2"), num_stages)
    model.generate(**prompt("gpt2"), **GREEDY)
    start = time.monotonic()
    try:
        model.generate(**prompt("gpt2"), **GREEDY, logits_processor=LogitsProcessorList([Favour(**where)]))
    except Exception as error:
        error.add_note(f"seconds: {time.monotonic() - start:.1f}")
        raise
    raise AssertionError("no error")


def fail_in_a_group(model: Any, group: int, act: Callable[[], None]) -> None:
    """Let `act` happen before a group's fourth token."""
    original = model.prepare_inputs_for_generation

    def prepare(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if decoding_of(model.pipeline).number == group and input_ids.shape[1] == 12:
            act()
        return original(input_ids, **kwargs)

    model.__dict__["prepare_inputs_for_generation"] = prepare


def divide_by_zero() -> None:
    raise ZeroDivisionError("in one group")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing_in_a_group(where: int, killed: bool, num_stages: int = 3) -> float:
    """How long a generation in groups took to end, when one rank fails in its second group."""
    model = parallel(build("gpt2"), num_stages)
    model.generate(**prompt("gpt2", 6), **THREE_GROUPS)
    if rank() == where:
        fail_in_a_group(model, 1, kill if killed else divide_by_zero)
    start = time.monotonic()
    try:
        model.generate(**prompt("gpt2", 6), **THREE_GROUPS)
    except Exception as error:
        error.add_note(f"seconds: {time.monotonic() - start:.1f}")
        error.add_note(f"threads: {group_threads()}")
        raise
    raise AssertionError("no error")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(ranks: list[int], group: int, num_stages: int = 3) -> tuple[list[str], list[str], float]:
    """Ctrl-C in a group's turn on some ranks: this call's error and the next one's, threads left, and seconds."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    model = parallel(build("gpt2"), num_stages)
    model.generate(**prompt("gpt2", 6), **THREE_GROUPS)
    if rank() in ranks:
        fail_in_a_group(model, group, interrupt)
    errors, start = [], time.monotonic()
    for _ in range(2):
        try:
            model.generate(**prompt("gpt2", 6), **THREE_GROUPS)
            errors.append("none")
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")
    signal.signal(signal.SIGINT, handler)
    return errors, group_threads(), time.monotonic() - start


def group_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("group")]


def usable_after_errors(num_stages: int = 3) -> tuple[list[str], torch.Tensor, list[str]]:
    """Errors in a group that all ranks meet, or that one of them has while it chooses tokens; then right tokens."""
    model, errors = parallel(build("gpt2"), num_stages), []

    def attempt(**options: Any) -> None:
        try:
            model.generate(**prompt("gpt2", 6), **{**THREE_GROUPS, **options})
            errors.append("none")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    fail_in_a_group(model, 1, divide_by_zero)
    attempt()
    del model.__dict__["prepare_inputs_for_generation"]
    with torch.no_grad():
        bias = model.transformer.ln_f.register_forward_hook(lambda module, args, output: output * float("nan"))
        attempt(do_sample=True)
        bias.remove()
    return errors, model.generate(**prompt("gpt2", 6), **THREE_GROUPS), group_threads()


def replicas() -> tuple[int, torch.Tensor]:
    """Two pipelines, each with a batch of its own and as many steps as it likes."""
    model = parallel(build("gpt2"))
    mine = model.data_parallel_rank
    options = {"max_new_tokens": 3 + 5 * mine, "do_sample": False}
    return mine, model.generate(**prompt("gpt2", size=2 + mine), **options)


def between_steps() -> tuple[float, torch.Tensor, float]:
    """Training, generating, training on the same pipeline; the losses and the tokens."""
    model = parallel(build("gpt2"))
    losses = []
    tokens = torch.empty(0)
    for step in range(2):
        if step:
            tokens = model.generate(**prompt("gpt2"), **GREEDY)
        total = 0.0
        for output in model(**batch("causal", size=8)):
            total += output.loss.item()
            output.loss.backward()
        losses.append(total)
    return losses[0], tokens, losses[1]


def custom(kind: str) -> Any:
    """Options that hold objects, made here as each rank would."""
    return options_of(kind, parallel(model_for(kind)))


def model_for(kind: str) -> nn.Module:
    return build("llama", dtype=torch.float32 if kind == "autocast" else None)


def options_of(kind: str, model: Any) -> Any:
    """`model`'s result for one of the options that a test cannot write down as plain data."""
    inputs = prompt("llama")
    if kind == "processor":
        return model.generate(**inputs, **GREEDY, logits_processor=LogitsProcessorList([Favour()]))
    if kind == "embeddings":
        embeddings = build("llama").get_input_embeddings()(inputs["input_ids"]).detach()
        return model.generate(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"], **GREEDY)
    if kind == "assistant":
        one = {name: value[:1] for name, value in prompt("llama").items()}
        return model.generate(**one, **GREEDY, assistant_model=build("llama", num_hidden_layers=1))
    if kind == "lookup":
        one = {name: value[:1].repeat(1, 2) for name, value in prompt("llama").items()}
        return model.generate(**one, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    with torch.autocast("cpu", torch.bfloat16):
        return model.generate(**inputs, **GREEDY)
