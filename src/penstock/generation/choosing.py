"""Which rank chooses the next tokens, and how the other ranks get them.

Where only the tokens count (greedy decoding, sampling), the rank of the last stage alone works on the logits: it
processes them, chooses, and sends the tokens. The other ranks run the same loop on logits of one made-up entry, and put
the tokens in place of what that chose. Where more than the tokens is looked at (beams, scores, a user's processors),
every rank gets the logits and does the same with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from penstock.generation.decoding import Decoding
from penstock.random_state import generators_of

# Criteria that depend only on the tokens, and so are equal on every rank.
CRITERIA_OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


class TokenChoice:
    """How tokens are chosen in one generate(). `logits_everywhere`: whether something may look at more than tokens.
    `config`: of the generation, once transformers has prepared it."""

    def __init__(self, model: Any, decoding: Decoding, logits_everywhere: bool) -> None:
        self.config: GenerationConfig | None = None
        self._model, self._decoding, self._logits_everywhere = model, decoding, logits_everywhere

    def _tokens_only(self, config: GenerationConfig) -> bool:
        return (
            not self._logits_everywhere
            and len(self._decoding.ranks) > 1
            and type(self._model)._sample is GenerationMixin._sample
            and (config.num_beams or 1) == 1
            and not config.return_dict_in_generate
            and config.guidance_scale in (None, 1)
            and config.prefill_chunk_size is None
            and not config.token_healing
        )

    def processors(self, original: Callable[..., LogitsProcessorList]) -> Callable[..., LogitsProcessorList]:
        """`_get_logits_processor`, without processors on ranks that have no logits."""
        decoding = self._decoding

        def get_logits_processor(generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> LogitsProcessorList:
            # The configuration is prepared, and the first forward is near.
            self.config = generation_config
            decoding.group.tokens_only = self._tokens_only(generation_config)
            processors = original(generation_config, *args, **kwargs)
            return LogitsProcessorList() if decoding.group.tokens_only and not decoding.chooses_tokens else processors

        return get_logits_processor

    def criteria(self, original: Callable[..., StoppingCriteriaList]) -> Callable[..., StoppingCriteriaList]:
        """`_get_stopping_criteria`, with criteria that stop all ranks together."""
        decoding = self._decoding

        def get_stopping_criteria(*args: Any, **kwargs: Any) -> StoppingCriteriaList:
            criteria = original(*args, **kwargs)
            may_differ = any(type(criterion) not in CRITERIA_OF_TOKENS for criterion in criteria)
            if self._logits_everywhere and len(decoding.ranks) > 1:  # otherwise all ranks have the same
                may_differ = any(rank[0] for rank in decoding.gather([may_differ]))
            if may_differ:
                criteria = SharedCriteria(criteria, decoding)
            return ExchangeTokens(criteria, decoding) if decoding.group.tokens_only else criteria

        return get_stopping_criteria


class SharedCriteria(StoppingCriteriaList):  # type: ignore[misc]  # a library without types
    """Stopping criteria that may differ between ranks (by the clock, or a user's own): met on one is met on all."""

    def __init__(self, criteria: StoppingCriteriaList, decoding: Decoding) -> None:
        super().__init__(criteria)
        self._decoding = decoding

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self._decoding.any(super().__call__(input_ids, scores, **kwargs))


class ExchangeTokens(StoppingCriteriaList):  # type: ignore[misc]  # a library without types
    """Stopping criteria that first exchange the chosen tokens: the rank of the last stage sends them, the others
    receive them and put them in place of what they chose. transformers' loop has no other call of ours after it has
    chosen: it calls its criteria once it has appended the tokens."""

    def __init__(self, criteria: StoppingCriteriaList, decoding: Decoding) -> None:
        super().__init__(criteria)
        self._criteria, self._decoding = criteria, decoding

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        tokens = self._decoding.tokens(input_ids[:, -1])
        if not self._decoding.chooses_tokens:
            input_ids[:, -1] = tokens
        stop: torch.Tensor = self._criteria(input_ids, scores, **kwargs)
        return stop


class RowsOfBatch(TorchFunctionMode):
    """While active, torch.multinomial over some rows of a batch draws what it would give these rows in the batch.

    It draws for the whole batch from generators of its own, which begin where the process's are. `start`, `stop`,
    `total`: of the samples. There may be several rows for each."""

    def __init__(self, start: int, stop: int, total: int, device: torch.device) -> None:
        super().__init__()
        self.num_draws = 0
        self._start, self._samples, self._total = start, stop - start, total
        # By the device type of the tensors that are drawn from; an accelerator's generator may be of the CPU's type.
        self._originals = dict(zip(("cpu", device.type), generators_of(device), strict=False))
        self._generators = {kind: each.clone_state() for kind, each in self._originals.items()}
        self._batch: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.multinomial and kwargs.get("generator") is None:
            return self._draw(*args, **kwargs)
        return func(*args, **kwargs)

    def within(self, loop: Callable[[], Any]) -> Any:
        """What `loop` returns, while this is active."""
        with self:
            return loop()

    def adopt(self) -> None:
        """Let the process's generators go on from where these are."""
        for kind, generator in self._generators.items():
            self._originals[kind].set_state(generator.get_state())

    def _draw(self, input: torch.Tensor, num_samples: int, replacement: bool = False, **kwargs: Any) -> torch.Tensor:
        per_sample = input.shape[0] // self._samples
        batch, start = self._batch, self._start * per_sample
        shape = (self._total * per_sample, *input.shape[1:])
        if batch is None or batch.shape != shape or batch.dtype != input.dtype:
            batch = self._batch = torch.ones(shape, dtype=input.dtype, device=input.device)
        rows = slice(start, start + input.shape[0])
        batch[rows] = input
        self.num_draws += 1
        generator = self._generators[input.device.type]
        return torch.multinomial(batch, num_samples, replacement, generator=generator)[rows]
