"""What the ranks of context-parallel tests run: models whose sequences are shared out, and batches that are hard to
share."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any
from unittest import mock

import torch

import penstock
from penstock.checking.double import kept_in_double
from penstock.context_parallel.sequence import Cut
from penstock.runtime.comm import rollcall
from tests.support.families import BASE, ENDS, FAMILIES, LLAMA, VOCABULARY, Family, batch
from tests.support.training import Batch, Step, gradients_of, run_step, unsplit_step

SAMPLES, TOKENS = 4, 21
NO_TARGET = 2  # no token of a batch
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
# Stretches its rotary embeddings with the longest position, which one part has and the other has not.
DYNAMIC = {
    "max_position_embeddings": 14,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}


def _shallow(family: Family) -> Family:
    """Of two layers: where windows and whole attention alternate, one of each."""
    layers = "n_layer" if "n_layer" in family.settings else "num_hidden_layers"
    return dataclasses.replace(family, settings={**family.settings, layers: 2})


_FAMILIES = {
    **{name: FAMILIES[name] for name in ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")},
    **{name: FAMILIES[name] for name in ("gemma2", "gemma3", "phi", "opt")},
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}, "causal"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**LLAMA, **EXPERTS, "head_dim": 8}, "causal"),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
        "causal",
    ),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {**LLAMA, "sliding_window": 7}, "causal"),
    "llama_dynamic": Family("LlamaForCausalLM", "LlamaConfig", {**LLAMA, **DYNAMIC}, "causal"),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", LLAMA, "causal"),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", LLAMA, "causal"),
    "cohere": Family("CohereForCausalLM", "CohereConfig", LLAMA, "causal"),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2Config", {**LLAMA, "sliding_window": 5}, "causal"),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", LLAMA, "causal"),
    "glm": Family("GlmForCausalLM", "GlmConfig", {**LLAMA, "head_dim": 8}, "causal"),
}
DECODERS = {name: _shallow(family) for name, family in _FAMILIES.items()}

# What the layers of these compute over the whole sequence, they do by other means than attention by the registry.
MIXING = {
    "bloom": FAMILIES["bloom"],
    "t5": FAMILIES["t5"],
    "mamba": Family("MambaForCausalLM", "MambaConfig", {**BASE, **ENDS, "state_size": 4}, "causal"),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**LLAMA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8},
        "causal",
    ),
}


def inputs_of(rows: str) -> dict[str, Any]:
    """A batch whose rows are `padded` on either side, or `counted`, padded on the left with position ids of their own,
    or `packed`: each has three sequences, told by their positions."""
    if rows != "packed":
        inputs = batch("causal", SAMPLES, TOKENS)
        if rows == "counted":
            inputs = {name: value.flip(1) for name, value in inputs.items()}
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        inputs["attention_mask"][0, :3] = 0
        return {**inputs, "labels": inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)}
    ids = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([*range(6), *range(11), *range(4)]).repeat(SAMPLES, 1)
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


@cache
def oracle(family: str, rows: str, **settings: Any) -> Step:
    # With a cache of keys and values, models take packed rows for single sequences.
    return unsplit_step(DECODERS[family].build(use_cache=False, **settings), (inputs_of(rows), 1.0))


def train_in_parts(
    family: str,
    rows: str,
    stages: int = 1,
    parts: int = 2,
    *,
    recomputes: bool = False,
    copied: bool = False,
    **options: Any,
) -> Step:
    """On a worker: a step on the whole batch, as every rank is given it, of the model or of a copy."""
    model = _initialize(family, stages, parts, **options)
    if recomputes:
        model.gradient_checkpointing_enable()
    if copied:
        model = copy.deepcopy(model)
    with kept_in_double():
        batch: Batch = inputs_of(rows)
        return Step(run_step(model, batch), gradients_of(model))


def evaluate_unsplit(family: str) -> tuple[float, torch.Tensor]:
    with kept_in_double(), torch.no_grad():
        found = DECODERS[family].build().eval()(**inputs_of("padded"))
    return float(found.loss), found.logits


def evaluate_in_parts(family: str, **options: int) -> tuple[float, torch.Tensor]:
    """On a worker: the ordinary output of an evaluation."""
    model = _initialize(family, **options).eval()
    with kept_in_double(), torch.no_grad():
        found = model(**inputs_of("padded"))
    return float(found.loss), found.logits


# What is refused in training, and words of the error.
REFUSED = {
    "a router's balance loss": "output_router_logits",
    "a mask of four dimensions": "attention_mask of shape",
    "a criterion that sums": "over sum of the batch",
    "a criterion that shifts": "takes shift_labels",
    "labels that two means ignore": "ignores -100 in one mean and 2 in another",
    "inputs as labels": "which the loss counts as labels",
    "an input without tokens": "cannot cut the input",
    "two tokens": "cannot share out sequences of 2 tokens",
    "attentions that are asked for": "leave out output_attentions",
    "attentions by the configuration": "leave out output_attentions",
}


def train_refused(case: str) -> None:
    """On a worker: a step that parts cannot compute."""
    model = _initialize("mixtral" if "router" in case else "llama")
    inputs, options = inputs_of("packed"), {}
    match case:
        case "a router's balance loss":
            inputs["output_router_logits"] = True
        case "a mask of four dimensions":
            inputs["attention_mask"] = torch.ones(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.bool)
        case "a criterion that sums":
            options["criterion"] = _summed
        case "a criterion that shifts":
            options["criterion"] = _shifted
        case "labels that two means ignore":
            inputs["targets"] = inputs.pop("labels")
            options["criterion"] = lambda output, given: (
                _over_targets(output, given, -100) + _over_targets(output, given)
            )
        case "inputs as labels":
            inputs = {"input_ids": inputs["input_ids"]}
            options["criterion"] = lambda output, given: torch.nn.functional.cross_entropy(
                output.logits.flatten(0, 1), given["input_ids"].flatten()
            )
        case "attentions that are asked for":
            inputs["output_attentions"] = True
        case "attentions by the configuration":
            model.set_attn_implementation("eager")
            model.config.output_attentions = True
        case "two tokens":
            inputs = {name: value[:, :2] for name, value in inputs.items()}
        case "an input without tokens":
            inputs["pixel_values"] = torch.ones(SAMPLES, 3, 4, 4)
    run_step(lambda **given: model(**given, **options), inputs)


def train_of_criterion() -> Step:
    """On a worker: a step by the model's own loss as a criterion, whose labels have another name, and another number
    that counts for nothing."""
    model, inputs = _initialize("llama"), inputs_of("padded")
    labels = torch.nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
    inputs["targets"] = labels.masked_fill(labels == -100, NO_TARGET)
    with kept_in_double():
        losses = run_step(lambda **given: model(**given, criterion=_over_targets), inputs)
        return Step(losses, gradients_of(model))


def _over_targets(output: Any, inputs: Batch, ignored: int = NO_TARGET) -> torch.Tensor:
    targets = inputs["targets"].flatten()
    logits = output.logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=ignored)


def _shifted(output: Any, inputs: Batch, reduction: str = "mean") -> torch.Tensor:
    logits, labels = output.logits[:, :-1], inputs["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def _summed(output: Any, inputs: Batch) -> torch.Tensor:
    return _shifted(output, inputs, "sum")


def use_unlike_batches(evaluates: bool = False) -> None:
    """On a worker: a step or an evaluation, for which the last rank is given another batch."""
    model = _initialize("llama")
    rank, inputs = torch.distributed.get_rank(), inputs_of("padded")
    other = 1 if rank == torch.distributed.get_world_size() - 1 else 0
    inputs["input_ids"] = (inputs["input_ids"] + model.data_parallel_rank + other) % VOCABULARY
    if evaluates:
        with torch.no_grad():
            model.eval()(**inputs)
    else:
        run_step(model, inputs)


def logits_in_training() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """On a worker: of each microbatch, the logits of the loop's output, and those of the unsplit model's part."""
    model, inputs = _initialize("llama"), inputs_of("padded")
    with kept_in_double():
        whole = DECODERS["llama"].build()(**inputs).logits.detach()
        found = []
        for output in model(**inputs):
            found.append(output.logits.detach())
            output.loss.backward()
    part = Cut(TOKENS, model.pipeline.place.pipeline, 2)
    here = part.positions(whole.device) < TOKENS
    pairs = zip(found, whole.chunk(2), strict=True)
    return [(logits[:, here], part.take(rows, 1)[:, here]) for logits, rows in pairs]


def bytes_received(key_value_heads: int) -> tuple[int, int]:
    """On a worker: what the layers of two parts receive in a step, and what the formula says: by heads if keys and
    values have some for each part, otherwise by tokens."""
    model = _initialize("llama", num_key_value_heads=key_value_heads)
    exchange = model.pipeline.parts.sequences.exchange
    before = exchange.num_bytes
    run_step(model, inputs_of("packed"))
    config, padded, parts = model.config, 24, 2
    head = SAMPLES * padded * config.hidden_size // config.num_attention_heads * 8
    queries, keys = head * config.num_attention_heads, head * key_value_heads
    by_heads, by_tokens = 2 * queries + 2 * keys, parts * 2 * keys
    received = (by_heads if key_value_heads > 1 else by_tokens) * (parts - 1) // parts**2
    return exchange.num_bytes - before, 2 * config.num_hidden_layers * received


def train_in_bfloat16(in_parts: bool) -> list[float]:
    """How far a step's loss is from that in double precision, and its gradients, as a part of their norm."""
    model, inputs = DECODERS["llama"].build(use_cache=False, dtype=torch.bfloat16), inputs_of("padded")
    if in_parts:
        model = penstock.initialize(model, pipeline_parallel_size=1, context_parallel_size=2, num_microbatches=1)
        run_step(model, inputs)
        loss = float(model.pipeline.last_step.global_loss)
    else:
        loss = float((found := model(**inputs).loss).detach())
        found.backward()
    expected, gradients = oracle("llama", "padded"), gradients_of(model)
    wanted = {name: value for name, value in expected.gradients.items() if value is not None}
    error = sum(float((gradients[name].double() - value).square().sum()) for name, value in wanted.items())
    whole = sum(float(value.square().sum()) for value in wanted.values())
    return [abs(loss - sum(expected.losses)), (error / whole) ** 0.5]


def weights_after_steps(sharded: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """On a worker: this rank's weights after three steps of AdamW, and the unsplit model's."""
    whole, inputs = DECODERS["llama"].build(use_cache=False), inputs_of("packed")
    model = _initialize("llama", stages=2, sharded_optimizer=sharded)
    found = []
    with kept_in_double():
        for one in (model, whole):
            optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                if one is model:
                    run_step(one, inputs)
                else:
                    one(**inputs).loss.backward()
                optimizer.step()
            found.append({name: value.detach().clone() for name, value in one.named_parameters()})
    return found[0], found[1]


def evaluate_on_all_but_the_last() -> tuple[str, Step]:
    """On a worker: an evaluation, in place of which the last rank trains; what it raised; and a step after it."""
    model, inputs, said = _initialize("llama"), inputs_of("padded"), "nothing"
    with kept_in_double():
        try:
            with mock.patch.object(rollcall, "SIGNAL_GRACE", 0.3), torch.no_grad():
                if torch.distributed.get_rank() < torch.distributed.get_world_size() - 1:
                    model(**inputs)
                else:
                    with torch.enable_grad():
                        run_step(model, inputs)
        except rollcall.CallMismatch as error:
            said = str(error)
        return said, Step(run_step(model, inputs), gradients_of(model))


def orders_of_a_shuffle() -> list[int]:
    """On a worker whose random state is its own: what a loader without a seed gives."""
    torch.manual_seed(torch.distributed.get_rank())
    _initialize("llama", stages=2)
    return [int(one) for one in torch.utils.data.DataLoader(torch.arange(20), batch_size=1, shuffle=True)]


def _initialize(family: str, stages: int = 1, parts: int = 2, **options: Any) -> Any:
    settings = {"vocab_size": 100} if "tensor_parallel_size" in options else {}
    if heads := options.pop("num_key_value_heads", None):
        settings["num_key_value_heads"] = heads
    with kept_in_double():
        return penstock.initialize(
            (DECODERS | MIXING)[family].build(**settings),
            pipeline_parallel_size=stages,
            context_parallel_size=parts,
            **{"num_microbatches": 2, **options},
        )


def losses_with_shards() -> list[float]:
    """On a worker: of a part, the losses of two steps, and what the unsplit model's second one is."""
    whole = DECODERS["llama"].build(vocab_size=100, use_cache=False)
    model = _initialize("llama", tensor_parallel_size=2)
    with kept_in_double():
        unsplit, optimizer = torch.optim.SGD(whole.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
        inputs = inputs_of("padded")
        first = sum(run_step(model, inputs))
        optimizer.step()
        optimizer.zero_grad()
        second = sum(run_step(model, inputs))
        whole(**inputs).loss.backward()
        unsplit.step()
        return [first, second, float(whole(**inputs).loss.detach())]
