"""A batch in groups: how many, their arguments, and one result from theirs.

While one group's forward is on another stage, this one works on the next group's; so all stages have work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache

from penstock.data.microbatch import batch_size_of, microbatch_sizes, split_batch
from penstock.generation.decoding import decoding_of, in_turns
from penstock.generation.turns import refusal_of_threads

# With fewer samples for each rank, the groups would read all weights for too few tokens.
LEAST_SAMPLES = 2
# Arguments with which decoding looks at more than the last position's logits.
MANY_POSITIONS = ("assistant_model", "custom_generate", "prompt_lookup_num_tokens")
# Arguments and settings with which something looks at the whole batch, or at more than its tokens, and what that is:
# every rank then gets the logits of the whole batch.
LOGITS_EVERYWHERE = {
    "streamer": "a streamer is given the whole batch's tokens",
    "logits_processor": "a logits processor of your own may look at the whole batch",
    "stopping_criteria": "a stopping criterion of your own may look at the whole batch",
    "prefix_allowed_tokens_fn": "prefix_allowed_tokens_fn is given the number of a sample in the batch",
    "max_time": "max_time is of the whole batch",
    "return_dict_in_generate": "return_dict_in_generate returns the whole batch's cache and scores",
    "guidance_scale": "guidance_scale makes forwards of its own",
    "watermarking_config": "a watermark is made for the whole batch",
    **dict.fromkeys(MANY_POSITIONS, "another model, a lookup or a function of yours proposes the tokens"),
}
# Those that only keep the batch in one group.
TOGETHER = {
    "stop_strings": "stop strings are looked for in the whole batch",
    "past_key_values": "a cache is given, of the whole batch",
    "token_healing": "token_healing makes generations of its own",
    "prefill_chunk_size": "the prompt goes in chunks",
    **dict.fromkeys(("pixel_values", "pixel_values_videos"), "images are encoded for the whole batch at once"),
}
# Settings that mean nothing at these values.
NEUTRAL = {"guidance_scale": 1}

logger = logging.getLogger("penstock")

# Settings, such as several end tokens in a tensor, are of all samples; only the token that begins may be each sample's.
OF_ALL_SAMPLES = frozenset(vars(GenerationConfig())) - {"decoder_start_token_id"}


def setting(name: str, arguments: Mapping[str, Any], model: Any) -> Any:
    """An option of this generate(): given by itself, in a configuration, or in the model's configuration."""
    if arguments.get(name) is not None:
        return arguments[name]
    configurations = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (getattr(configuration, name, None) for configuration in configurations)
    return next((value for value in values if value is not None), None)


def why_logits_everywhere(arguments: Mapping[str, Any], model: Any, original: Callable[..., Any]) -> str | None:
    """Why every rank needs the logits of `original`, a bound generate(); None if the tokens are enough."""
    if getattr(original, "__func__", None) is not GenerationMixin.generate:
        return f"{type(model).__name__} has a generate() of its own"
    return _first(LOGITS_EVERYWHERE, arguments, model)


def obstacle(arguments: Mapping[str, Any], model: Any, training: bool) -> str | None:
    """Why a batch must stay in one group although only its tokens count, None if it need not."""
    if training:
        return "the model is in training mode, where random numbers are drawn for the whole batch"
    if isinstance(setting("decoder_start_token_id", arguments, model), Sequence):
        return "decoder_start_token_id is given for each sample"
    if not in_turns(model.pipeline.context.pipeline):
        return "some rank has its first stage behind a later stage of another rank"
    return _first(TOGETHER, arguments, model) or refusal_of_threads() or _without_rows(arguments, model)


def number_of_groups(
    wanted: Any, arguments: Mapping[str, Any], model: Any, why_everywhere: str | None
) -> tuple[int, int]:
    """In how many groups a batch is decoded, and its size; says once in the log why it is only one. `wanted`: "auto"
    for as many as there are ranks in the pipeline, if the batch is large enough. `why_everywhere`: see
    `why_logits_everywhere`."""
    if wanted != "auto" and (not isinstance(wanted, int) or wanted is True or wanted < 1):
        raise ValueError(f'generation_groups must be "auto" or a positive number of groups, got {wanted!r}')
    pipeline = model.pipeline
    num_ranks, size = pipeline.context.pipeline.num_ranks, batch_size_in(arguments, model) or 1
    if num_ranks == 1 or wanted == 1:
        return 1, size
    number = min(wanted, size) if wanted != "auto" else num_ranks if size >= LEAST_SAMPLES * num_ranks else 1
    reason = why_everywhere or obstacle(arguments, model, model.training)
    if reason is None and number == 1:
        reason = f"it has fewer than {LEAST_SAMPLES} samples for each of {num_ranks} ranks"
    if reason is None:
        return number, size
    logged = decoding_of(pipeline).logged_reasons
    if pipeline.rank == 0 and reason not in logged:  # the log is one rank's, also with several pipelines
        logged.add(reason)
        logger.info("generate() decodes the batch in one group, so that one stage works at a time: %s", reason)
    return 1, size


def split(arguments: Mapping[str, Any], batch_size: int, number: int) -> tuple[list[dict[str, Any]], list[range]]:
    """Each group's arguments, and the samples it has."""
    sizes = microbatch_sizes(batch_size, number)
    ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    of_all = {name: value for name, value in arguments.items() if name in OF_ALL_SAMPLES}
    parts = split_batch({name: value for name, value in arguments.items() if name not in of_all}, batch_size, sizes)
    return [{**part, **of_all} for part in parts], [range(a, b) for a, b in pairwise(ends)]


def join(results: Sequence[torch.Tensor], config: GenerationConfig) -> torch.Tensor:
    """The batch's tokens: shorter groups' filled up as the unsplit generate() fills up its shorter rows."""
    fill = config._pad_token_tensor
    if (config.num_beams or 1) > 1:
        # As _beam_search fills: a padding token of number 0 counts as none.
        ends = config._eos_token_tensor
        fill = (fill or ends[0]) if ends is not None else -1
    width = max(result.shape[1] for result in results)
    return torch.cat([
        torch.nn.functional.pad(result, (0, width - result.shape[1]), value=0 if fill is None else int(fill))
        for result in results
    ])  # fmt: skip


def batch_size_in(arguments: Mapping[str, Any], model: Any) -> int | None:
    """The number of samples, None if no argument tells."""
    inputs = arguments.get("inputs")
    if isinstance(inputs, torch.Tensor) and inputs.dim():
        return inputs.shape[0]
    tensors = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.dim() and name not in OF_ALL_SAMPLES
    }
    try:
        return batch_size_of(tensors, getattr(model, "main_input_name", None))
    except ValueError:  # transformers says what is wrong
        return None


def _first(reasons: Mapping[str, str], arguments: Mapping[str, Any], model: Any) -> str | None:
    for name, reason in reasons.items():
        value = setting(name, arguments, model)
        if value is None or value is False:
            continue
        if not isinstance(value, torch.Tensor) and value == NEUTRAL.get(name, False):
            continue
        if name in ("logits_processor", "stopping_criteria") and not len(value):
            continue
        return reason
    return None


def _without_rows(arguments: Mapping[str, Any], model: Any) -> str | None:
    """Why the arguments cannot be split by samples."""
    batch_size = batch_size_in(arguments, model)
    if batch_size is None:
        return "no argument tells the number of samples"
    for name, value in arguments.items():
        if isinstance(value, (Cache, GenerationConfig)) or name in OF_ALL_SAMPLES:
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] != batch_size:
                return f"{name} has not one row for each of the {batch_size} samples"
    return None


@contextmanager
def said_once() -> Iterator[None]:
    """Inside, transformers logs a message once instead of once for each group."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in seen
        seen.add(text)
        return new

    loggers = [logging.getLogger(f"transformers.generation.{name}") for name in ("utils", "configuration_utils")]
    for each in loggers:
        each.addFilter(is_new)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_new)
