"""Tiny models of the families that the test matrix covers, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 97
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**BASE, **ENDS, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {**BASE, "pad_token_id": 0}
GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}
SEQ2SEQ = {
    **ENDS,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One row of the matrix.

    Attributes:
        model_class: name of the class in transformers.
        config_class: name of its configuration.
        settings: for the configuration.
        kind: the kind of batch, see `batch`.
    """

    model_class: str
    config_class: str
    settings: dict[str, Any]
    kind: str

    def build(self, dropout: float | None = 0.0, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
        """A randomly initialised model in training mode; `dropout` replaces every dropout probability."""
        config = getattr(transformers, self.config_class)(**{**self.settings, **settings})
        if dropout is not None:
            for name, value in vars(config).items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, dropout if "layerdrop" not in name else 0.0)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model_class)(config).to(dtype).train()
        torch.set_rng_state(state)
        if dtype == torch.float64:  # the grouped matrix product of expert layers has no double precision
            model.config._experts_implementation = "eager"
        return model


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT2, "causal"),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **ENDS,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 5,
        },
        "causal",
    ),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}, "causal"),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**BASE, **ENDS}, "causal"),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**BASE, **ENDS, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "causal",
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {**ENDS, "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4},
        "causal",
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", LLAMA, "causal"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 5}, "causal"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}, "causal"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}, "causal"),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", GEMMA, "causal"),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, "causal"),
    "phi": Family("PhiForCausalLM", "PhiConfig", {**BASE, **ENDS}, "causal"),
    "falcon": Family("FalconForCausalLM", "FalconConfig", {**BASE, **ENDS}, "causal"),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
        "causal",
    ),
    "bert_mlm": Family("BertForMaskedLM", "BertConfig", BERT, "masked"),
    "bert_classification": Family("BertForSequenceClassification", "BertConfig", BERT, "classes"),
    "roberta_mlm": Family("RobertaForMaskedLM", "RobertaConfig", BERT, "masked"),
    "roberta_classification": Family("RobertaForSequenceClassification", "RobertaConfig", BERT, "classes"),
    "distilbert_mlm": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 4,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        "masked",
    ),
    "distilbert_classification": Family(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 4,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        "classes",
    ),
    "gpt2_classification": Family(
        "GPT2ForSequenceClassification", "GPT2Config", {**GPT2, "pad_token_id": 0}, "classes"
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 3,
        },
        "images",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 3,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "sequences",
    ),
    "bart": Family(
        "BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "max_position_embeddings": 64}, "sequences"
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32},
        "speech",
    ),
}


def gpt2(**settings: Any) -> Any:
    """The model of a test that needs any one."""
    return FAMILIES["gpt2"].build(**settings)


def batch(
    kind: str, size: int = 2, tokens: int = 9, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """A batch with labels: right-padded by an unequal number of tokens in every row but the first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, size):
        mask[row, tokens - 1 - row % (tokens - 2) :] = 0
    ids[mask == 0] = 0
    if kind in ("causal", "masked"):
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "classes":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(size) % 2}
    if kind == "images":
        images = torch.randn(size, 3, 16, 16, generator=generator, dtype=dtype)
        return {"pixel_values": images, "labels": torch.arange(size) % 3}
    labels = torch.randint(3, VOCABULARY, (size, 7), generator=generator)
    labels[0, 5:] = -100
    if kind == "sequences":
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if kind == "speech":
        return {"input_features": torch.randn(size, 8, 20, generator=generator, dtype=dtype), "labels": labels}
    raise ValueError(f"no batch of kind {kind!r}")
