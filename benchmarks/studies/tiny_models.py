"""A tiny model of any class of transformers, and a batch for any task: what `coverage.py` tries the splitter on.

Everything here is a guess from a configuration's and a forward's names. What it cannot build does not run unsplit
either, and is reported as that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny_images import forms_of_images
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

VOCABULARY = 96
NUM_SAMPLES = 9
NUM_TOKENS = 12
NUM_LABELS = 3
NUM_CHOICES = 2
IMAGE = 32
# Texts use the tokens below it.
IMAGE_TOKEN = 90
MOST_PARAMETERS = 24_000_000
# Parts of the names of configuration entries that say how wide something is.
WIDTHS = ("size", "dim", "channels", "width", "filters", "hidden", "features", "rank", "embed")
# Parts of the names of configuration entries that make a model draw random numbers in training.
RANDOM = ("drop", "jitter")
# Whose causal form wants to be told.
DECODERS_BY_OPTION = ("ReformerConfig",)

# What a tiny model is made with, wherever its configuration has an entry of the name.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "d_embed", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("projection_dim", "decoder_hidden_size", "conv_dim_hidden", "hidden_dim", "n_inner"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_topk", "linear_num_key_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    "linear_head_dim": 8,
    "sliding_window": 5,
    "attention_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "image_size": IMAGE,
    "input_size": IMAGE,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "layerdrop": 0.0,
    "attn_layer_period": 2,
    # Of images: how their vectors reach the text, and the tokens that stand for them.
    **dict.fromkeys(("out_hidden_size", "output_hidden_size", "text_hidden_size", "audio_hidden_size"), 32),
    **dict.fromkeys(("adapter_in_dim", "adapter_out_dim", "adapter_input_size"), 32),
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE_TOKEN),
    **dict.fromkeys(("video_token_id", "video_token_index"), IMAGE_TOKEN + 1),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id"), IMAGE_TOKEN + 2),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id"), IMAGE_TOKEN + 3),
    "depth": 3,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "image_grid_pinpoints": [[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE]],
    "image_seq_length": (IMAGE // 8) ** 2,
    "mm_tokens_per_image": 4,
    "latent_query_num": 4,
}
# Entries that stay None where a configuration has None: setting them would change what the model is.
OPTIONAL = ("sliding_window", "num_key_value_heads", "q_lora_rank", "head_dim")
SWIN = {
    "encoder_stride": 4,
    "num_layers": 2,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "embed_dim": 16,
    "window_size": 2,
    "patch_size": 2,
}
# Of single configurations, what the names above do not make consistent.
SPECIAL: dict[str, dict[str, Any]] = {
    "ReformerConfig": {
        "max_position_embeddings": 12,
        "axial_pos_shape": (3, 4),
        "axial_pos_embds_dim": (16, 16),
        "attention_head_size": 8,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "num_buckets": 4,
        "attn_layers": ["local", "local", "local", "local"],
    },
    # Four layers take the keys and values of the first two.
    "Gemma3nTextConfig": {"num_hidden_layers": 6, "num_kv_shared_layers": 4},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]], "window_size": 5},
    "GPTJConfig": {"rotary_dim": 4},
    "CodeGenConfig": {"rotary_dim": 4},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 2},
    "RoCBertConfig": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "LukeConfig": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "MLukeConfig": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "XGLMConfig": {"activation_function": "gelu"},
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4, "visual_embed": False},
    "LiltConfig": {
        "channel_shrink_ratio": 1,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "max_2d_position_embeddings": 1024,
    },
    "BrosConfig": {"hidden_size": 64},
    "BitConfig": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 16, "num_groups": 4},
    "PvtConfig": {
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 2],
        "image_size": 64,
    },
    "PoolFormerConfig": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "HieraConfig": {
        "depths": [1, 1, 1],
        "embed_dim": 16,
        "num_heads": [1, 2, 4],
        "query_stride": [2, 2],
        "num_query_pool": 2,
    },
    "DeiTConfig": {"image_size": 32, "patch_size": 8, "encoder_stride": 8},
    "ViTConfig": {"image_size": 32, "patch_size": 8, "encoder_stride": 8},
    "FSMTConfig": {"src_vocab_size": 96, "tgt_vocab_size": 96, "langs": ["en", "de"]},
    "JambaConfig": {"attn_layer_offset": 1, "expert_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 4},
    "BambaConfig": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 8},
    "GraniteMoeHybridConfig": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
    },
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "CpmAntConfig": {"prompt_length": 4, "prompt_types": 4, "dim_head": 8, "segment_types": 4},
    "xLSTMConfig": {"qk_dim_factor": 0.5, "chunkwise_kernel": "chunkwise--native_autograd", "chunk_size": 4},
    "CanineConfig": {"num_hash_buckets": 64, "downsampling_rate": 2, "local_transformer_stride": 4},
    "XLNetConfig": {"d_head": 8, "untie_r": True},
    "MambaConfig": {"time_step_rank": 4, "intermediate_size": 64},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "SwinConfig": SWIN,
    "Swinv2Config": SWIN,
    "ConvNextConfig": {"depths": (1, 2), "hidden_sizes": (16, 32), "num_stages": 2, "patch_size": 4},
    "ConvNextV2Config": {"depths": (1, 2), "hidden_sizes": (16, 32), "num_stages": 2, "patch_size": 4},
    "ResNetConfig": {"embedding_size": 16, "hidden_sizes": (16, 32), "depths": (2, 2)},
    "RegNetConfig": {"embedding_size": 16, "hidden_sizes": (16, 32), "depths": (2, 2), "groups_width": 8},
    "LevitConfig": {
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "image_size": 64,
        "drop_path_rate": 0,
    },
    "PerceiverConfig": {
        "num_latents": 8,
        "d_latents": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 3,
        "num_cross_attention_heads": 1,
        "num_self_attention_heads": 4,
        "max_position_embeddings": NUM_TOKENS,
    },
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "EfficientNetConfig": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "CohereCompassTextConfig": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    },
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "Molmo2AdapterConfig": {"vision_feature_layer": [3, 1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": IMAGE_TOKEN, "IMGIMGA": 80, "IMGIMGB": 81}},
    "Emu3Config": {"vocabulary_map": {"<image>": IMAGE_TOKEN, "<|extra_200|>": 80, "<|visual token 000000|>": 81}},
    "DiaDecoderConfig": {"cross_hidden_size": 32, "cross_head_dim": 8, "cross_num_attention_heads": 4},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "PaliGemmaConfig": {"projection_dim": 32},
    "Wav2Vec2Config": {"num_feat_extract_layers": 2},
}
AUDIO = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "tdnn_dim": (16, 16),
    "tdnn_kernel": (3, 3),
    "tdnn_dilation": (1, 1),
}


@dataclass(frozen=True)
class Task:
    """One of transformers' tasks: the mapping that lists its classes, and how its labels look."""

    mapping: str
    labels: str


TASKS = {
    "causal-lm": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    "masked-lm": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "tokens"),
    "seq2seq-lm": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    "sequence-classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "classes"),
    "token-classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "token classes"),
    "question-answering": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", "spans"),
    "multiple-choice": Task("MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES", "choices"),
    "next-sentence": Task("MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES", "pairs"),
    "image-text": Task("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "tokens"),
    "image-text with images": Task("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "tokens"),
    "image-classification": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "classes"),
    "masked-image": Task("MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES", "patches"),
    "video-classification": Task("MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES", "classes"),
    "audio-classification": Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "classes"),
    "ctc": Task("MODEL_FOR_CTC_MAPPING_NAMES", "transcripts"),
    "speech-seq2seq": Task("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "tokens"),
}


def classes_of(task: str) -> list[str]:
    """The classes of a task, in transformers' order."""
    found: dict[str, None] = {}
    for names in getattr(modeling_auto, TASKS[task].mapping).values():
        for name in (names,) if isinstance(names, str) else names:
            if name is not None and hasattr(transformers, name):
                found.setdefault(name)
    return list(found)


@dataclass(frozen=True)
class Variant:
    """A way to make a tiny configuration, as not every configuration allows all of SIZES together.

    Attributes:
        left_out: names whose entries keep their defaults.
        changes: what is set besides, in every part that knows the name.
        shrunk: whether whatever else looks like a size is made small, too.
        completed: whether parts that a configuration lacks by default (a vision tower) are added.
    """

    left_out: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    shrunk: bool = False
    completed: bool = False


# Tried in turn, until a model can be built and runs.
VARIANTS = (
    Variant(),
    Variant(left_out=("num_key_value_heads",)),
    Variant(left_out=("sliding_window",)),
    Variant(left_out=("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank")),
    Variant(left_out=("num_experts_per_tok", "num_key_value_heads")),
    Variant(left_out=("layer_types", "num_hidden_layers")),
    Variant(left_out=("patch_size", "image_size")),
    Variant(left_out=("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")),
    Variant(changes={"num_key_value_heads": 4}),
    Variant(
        left_out=("head_dim",),
        changes={"num_key_value_heads": 4, "hidden_size_per_layer_input": 0, "is_decoder": False},
    ),
    Variant(changes={"head_dim": 8, "sliding_window": 5, "context_size": 16}),
    Variant(changes={"head_dim": 8, "sliding_window": 5, "num_experts_per_tok": 2, "top_k_experts": 2}),
    Variant(shrunk=True),
    Variant(completed=True),
    Variant(changes={"num_key_value_heads": 4}, shrunk=True),
    Variant(left_out=("patch_size", "image_size"), shrunk=True),
)


def build_running(class_name: str, task: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of a class in double precision (single where its code needs that), and a batch it runs on.

    Raises the first failure of those that say most if there is none: that a package lacks, that a model was built but
    did not run, that none was built.
    """
    missing: Exception | None = None
    unbuilt: Exception | None = None
    failure: Exception | None = None
    for variant in VARIANTS:
        for dtype in (torch.float64, torch.float32):
            try:
                model = build(class_name, variant, dtype)
            except ImportError as error:
                missing = missing or error
                break
            except Exception as error:
                unbuilt = unbuilt or error
                break
            for inputs in batches(model, task):
                try:
                    if isinstance(inputs, Exception):
                        raise inputs
                    inputs = in_dtype(inputs, dtype)
                    _run(model, inputs)
                    return model, inputs
                except Exception as error:
                    failure = failure or error
    said = missing or failure or unbuilt
    assert said is not None
    raise said


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run a forward twice. Raises ValueError if its loss is not finite, or not the same again."""
    with torch.no_grad():
        loss = model(**inputs).loss
        again = model(**inputs).loss
    if loss is None or not torch.isfinite(loss):
        raise ValueError(f"its loss is {loss}")
    if not torch.allclose(loss, again, rtol=1e-9):
        raise ValueError("its loss is random in training, also without dropout")


def in_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`inputs` with floating-point tensors in `dtype`."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def build(class_name: str, variant: Variant = VARIANTS[0], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of a class in training mode, its weights drawn from a fixed seed, without dropout."""
    kind = getattr(transformers, class_name)
    config = tiny_config(kind.config_class, variant)
    if "QuestionAnswering" in class_name:  # where an answer begins, and where it ends
        config.num_labels = 2
    without_dropout(config)
    with torch.device("meta"):  # what is too large is not made
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its smallest configuration found has {size:,} parameters")
    torch.manual_seed(0)
    model: nn.Module = kind(config).to(dtype).train()
    if dtype == torch.float64:  # the grouped matrix product of expert layers has no double precision
        model.config._experts_implementation = "eager"
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(model.config.languages)))
    return model


def tiny_config(kind: type[PretrainedConfig], variant: Variant = VARIANTS[0]) -> PretrainedConfig:
    """A small configuration of a class, its parts for text, vision and audio small too."""
    default = kind()
    known = {*default.to_dict(), *getattr(kind, "attribute_map", {})}
    audio = AUDIO if "conv_stride" in known and "conv_kernel" in known else {}
    special = SPECIAL.get(kind.__name__, {})
    changes: dict[str, Any] = _shrunk(default) if variant.shrunk else {}
    for name, value in {**SIZES, **audio}.items():
        present = getattr_or_none(default, name)
        if name in variant.left_out or name not in known or (name in OPTIONAL and present is None):
            continue
        if isinstance(present, (list, tuple)) and not isinstance(value, (list, tuple)):
            if not all(isinstance(entry, int) for entry in present):
                continue
            value = type(present)([value] * len(present))
        changes[name] = value
    changes.update({name: value for name, value in variant.changes.items() if name in known})
    changes.update({"num_labels": NUM_LABELS, **special})
    for name in getattr(kind, "sub_configs", {}):
        part = getattr_or_none(default, name)
        if part is None and variant.completed:
            part = kind.sub_configs[name]()
        if isinstance(part, PretrainedConfig):
            changes[name] = tiny_config(type(part), variant).to_dict()
    layers = next((changes[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if name in changes), None)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = default.to_dict().get(name)
        is_property = isinstance(getattr(kind, name, None), property)
        if isinstance(kinds, list) and kinds and layers and name not in variant.left_out and not is_property:
            # A few layers that still have every kind of layer the default has.
            every = list(dict.fromkeys(kinds))
            changes[name] = [every[index % len(every)] for index in range(layers)]
    depth = next(
        (n for name in ("num_hidden_layers", "num_layers") if isinstance(n := getattr_or_none(default, name), int)), 0
    )
    for name, entries in default.to_dict().items():
        if layers and layers < depth and isinstance(entries, list) and len(entries) == depth:  # one for each layer
            changes[name] = changes.get(name, special.get(name, entries))[:layers]
    if "mrope_section" in (getattr(kind, "ignore_keys_at_rope_validation", None) or ()) and "hidden_size" in changes:
        # Rotary dimensions for time, height and width.
        rope = {"rope_type": "default", **(getattr_or_none(default, "rope_parameters") or {})}
        width = changes.get("head_dim", changes["hidden_size"] // changes.get("num_attention_heads", 4))
        half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        changes["rope_parameters"] = {**rope, "mrope_section": [half // 4, half // 4, half - 2 * (half // 4)]}
    try:
        config = kind(**changes)
    except Exception:
        if "rope_parameters" not in changes:
            raise
        config = kind(**{name: value for name, value in changes.items() if name != "rope_parameters"})
    if hasattr(config, "vision_config"):
        for name in ("vision_start_token_id", "vision_end_token_id"):  # its code reads what it does not define
            if not hasattr(config, name):
                setattr(config, name, SIZES[name])
    for name, value in (("pad_token_id", 0), ("eos_token_id", 2), ("decoder_start_token_id", 2)):
        if getattr_or_none(config, name) is None:
            setattr(config, name, value)
    if hasattr(config, "is_decoder") and kind.__name__ in DECODERS_BY_OPTION and "is_decoder" not in variant.changes:
        config.is_decoder = True
    return config


def _shrunk(default: PretrainedConfig) -> dict[str, Any]:
    """Small values for the entries of a configuration that look like sizes, whatever they are of."""
    found: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if not numbers or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            continue
        if "vocab" in name:
            small = [min(number, VOCABULARY) for number in numbers]
        elif "depth" in name or ("layers" in name and isinstance(value, (list, tuple))):
            small = [min(number, 2) for number in numbers]
        elif any(part in name for part in WIDTHS):
            small = [32 if number >= 64 else number for number in numbers]
        else:
            continue
        found[name] = type(value)(small) if isinstance(value, (list, tuple)) else small[0]
    return found


def getattr_or_none(config: PretrainedConfig, name: str) -> Any:
    """An entry of a configuration; None too where it refuses to name one value for all layers."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def without_dropout(config: PretrainedConfig) -> None:
    """Set every dropout probability of a configuration and its parts to zero."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            without_dropout(value)
        elif any(part in name for part in RANDOM) or name.endswith("_prob"):
            if isinstance(value, float):
                setattr(config, name, 0.0)
            elif isinstance(value, (list, tuple)) and all(isinstance(entry, (int, float)) for entry in value):
                setattr(config, name, type(value)(0.0 * entry for entry in value))


def batches(model: Any, task: str) -> Iterator[dict[str, Any] | Exception]:
    """Batches for a model, the likeliest first; in place of one that could not be made, why.

    What a model takes beside its main input cannot be told from its signature alone.
    """
    try:
        plain = batch(model, task)
        yield plain
    except Exception as error:
        yield error
        if task != "image-text with images":
            return
        plain = batch(model, "image-text")
    for more in _more_inputs(model, task, plain):
        if task == "image-text with images" and not any("pixel" in name or "patches" in name for name in more):
            continue
        yield {**plain, **more}
    if task == "image-classification" and "pixel_values" not in plain:
        images = _images(model.config, NUM_SAMPLES, "pixel_values", torch.Generator().manual_seed(2))
        yield {"pixel_values": images, "labels": plain["labels"]}


def _more_inputs(model: Any, task: str, plain: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What may be missing in a batch, or has to look otherwise."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    samples = next(len(value) for value in plain.values())
    generator = torch.Generator().manual_seed(2)
    vision = next((p for n in ("vision_config", "encoder") if (p := getattr(config, n, None)) is not None), config)
    ids = plain.get("input_ids")
    if "pixel_values" in parameters and "pixel_values" not in plain:
        found = {"pixel_values": _images(vision, samples, "pixel_values", generator)}
        yield found
        if "qformer_input_ids" in parameters and ids is not None:
            yield {**found, "qformer_input_ids": ids, "qformer_attention_mask": plain["attention_mask"]}
    if "pixel_values" in plain:
        yield from forms_of_images(model, parameters, samples, samples, generator)
    if "flattened_patches" in parameters:
        width = getattr(vision, "patch_embed_hidden_size", None) or 3 * vision.patch_size**2
        places = torch.arange(1, NUM_TOKENS + 1, dtype=torch.float64).expand(samples, -1)
        pixels = torch.randn(samples, NUM_TOKENS, width, generator=generator, dtype=torch.float64)
        found = {"flattened_patches": torch.cat([places[..., None], places[..., None], pixels], -1)}
        yield found
        if "attention_mask" in plain and "labels" in plain:
            yield {**found, "decoder_input_ids": ids, "attention_mask": plain["attention_mask"]}
    for name in ("input_features", "input_values"):
        if name in plain and "attention_mask" in parameters:
            mask = torch.ones(samples, plain[name].shape[1], dtype=torch.long)
            mask[1, mask.shape[1] * 3 // 4 :] = 0
            yield {"attention_mask": mask}
        elif name in plain:
            continue
        elif name in parameters or "kwargs" in parameters:
            yield (
                {name: _spectra(config, samples, generator)}
                if name == "input_features"
                else {name: torch.randn(samples, 400, generator=generator, dtype=torch.float64)}
            )
    if "input_values" in plain:
        for length in (1600, 4000):
            yield {"input_values": torch.randn(samples, length, generator=generator, dtype=torch.float64)}
        bins, length = getattr_or_none(config, "num_mel_bins"), getattr_or_none(config, "max_length")
        if isinstance(bins, int) and isinstance(length, int):
            yield {"input_values": torch.randn(samples, length, bins, generator=generator, dtype=torch.float64)}
    if "bbox" in plain:
        yield {"bbox": plain["bbox"].double() / 1000}
    separator = getattr_or_none(config, "sep_token_id")
    if ids is not None and separator is not None:
        marked = ids.masked_fill(ids == separator, 5)
        marked[..., 1:4] = separator
        yield {"input_ids": marked}
    if "visual_feats" in parameters:
        seen = torch.randn(samples, 4, config.visual_feat_dim, generator=generator, dtype=torch.float64)
        places = torch.rand(samples, 4, 4, generator=generator, dtype=torch.float64)
        yield {"visual_feats": seen, "visual_pos": places, "labels": torch.arange(samples) % NUM_LABELS}
    labels = plain.get("labels")
    if ids is not None and labels is not None and labels.dim() == 2 and labels.shape != ids.shape:
        yield {"labels": ids.masked_fill(plain.get("attention_mask", torch.ones_like(ids)) == 0, -100)}
    if "image_embeds_position_mask" in parameters and ids is not None:
        first = torch.arange(ids.shape[1]).expand_as(ids) < getattr_or_none(config, "latent_query_num")
        yield {"pixel_values": _images(vision, samples, "pixel_values", generator), "image_embeds_position_mask": first}
    if "image_attention_mask" in parameters and ids is not None:
        images = _images(vision, samples, "pixel_values", generator)[:, None]
        yield {"pixel_values": images, "image_attention_mask": torch.ones(*ids.shape, 1, dtype=torch.long)}


def batch(model: Any, task: str, samples: int = NUM_SAMPLES) -> dict[str, Any]:
    """Arguments of a forward with labels: uneven padding, from a fixed seed.

    Raises KeyError if nothing is known of the model's main input.
    """
    config, parameters = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    main = model.main_input_name if model.main_input_name in parameters else "input_ids"
    if "input_ids" in parameters and main not in parameters:
        main = "input_ids"
    inputs: dict[str, Any] = {}
    if main in ("pixel_values", "pixel_values_videos") and not task.startswith("image-text"):
        inputs[main] = _images(config, samples, main, generator)
    elif main == "input_values":
        inputs[main] = torch.randn(samples, 400, generator=generator, dtype=torch.float64)
    elif main == "input_features":
        inputs[main] = _spectra(config, samples, generator)
    if task in ("speech-seq2seq",) or not inputs or "ids" in main:
        if "ids" not in main and task.startswith("image-text"):
            main = "input_ids"
        if "ids" in main or not inputs:
            inputs.update(_text(config, parameters, samples, generator))
    if model.config.is_encoder_decoder and TASKS[task].labels == "spans" and "decoder_input_ids" in parameters:
        inputs.pop("decoder_input_ids", None)
    if task == "multiple-choice":
        inputs = {
            name: value[:, None].expand(-1, NUM_CHOICES, *value.shape[1:]).contiguous()
            for name, value in inputs.items()
        }
        inputs["input_ids"][:, 1] = inputs["input_ids"][:, 1].flip(0)
        if "attention_mask" in inputs:
            inputs["attention_mask"][:, 1] = inputs["attention_mask"][:, 1].flip(0)
    if "bbox" in parameters and "input_ids" in inputs:
        corners = torch.randint(0, 400, (*inputs["input_ids"].shape, 4), generator=generator)
        inputs["bbox"] = torch.cat([corners[..., :2], corners[..., :2] + 1 + corners[..., 2:]], -1)
    if task == "image-text with images":
        inputs.update(with_images(model, inputs, generator))
    return {**inputs, **_labels(model, task, inputs, samples, generator)}


def with_images(model: Any, inputs: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Images for the texts: one for each sample, two for the third.

    Of the forms in which models take images, the first that the model's own `get_image_features` runs on; its output
    says how many placeholder tokens each image has.
    """
    owner = getattr(model, "base_model", model)
    if not hasattr(owner, "get_image_features"):
        owner = model
    takes = inspect.signature(owner.get_image_features).parameters
    samples = inputs["input_ids"].shape[0]
    shares = [2 if sample == 2 else 1 for sample in range(samples)]
    dtype = next(model.parameters()).dtype
    failure: Exception | None = None
    for images in forms_of_images(model, takes, sum(shares), samples, generator):
        images = in_dtype(images, dtype)
        try:
            with torch.no_grad():
                features = owner.get_image_features(**images, return_dict=True).pooler_output
        except Exception as error:
            failure = failure or error
            continue
        per_image = [int(part[..., 0].numel()) for part in features]
        if len(per_image) != sum(shares):  # one after another
            per_image = [sum(per_image) // sum(shares)] * sum(shares)
        token = next(getattr(model.config, name) for name in ("image_token_id", "image_token_index"))
        starts = [sum(shares[:sample]) for sample in range(samples)]
        counts = [per_image[start : start + share] for start, share in zip(starts, shares, strict=True)]
        longest = max(sum(own) + len(own) for own in counts)
        rows = []
        for own, ids in zip(counts, inputs["input_ids"], strict=True):
            row = [piece for count in own for piece in ([5], [token] * count)]
            flat = [entry for piece in row for entry in piece]
            rows.append(torch.tensor([*flat, *[7] * (longest - len(flat)), *ids.tolist()]))
        found: dict[str, Any] = {**images, "input_ids": torch.stack(rows)}
        if "attention_mask" in inputs:
            ahead = torch.ones(samples, longest, dtype=inputs["attention_mask"].dtype)
            found["attention_mask"] = torch.cat([ahead, inputs["attention_mask"]], 1)
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            found["mm_token_type_ids"] = (found["input_ids"] == token).long()
        return found
    assert failure is not None
    raise failure


def _text(config: Any, parameters: Mapping[str, Any], samples: int, generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, min(IMAGE_TOKEN, _vocabulary(config)), (samples, NUM_TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate((NUM_TOKENS, 9, NUM_TOKENS, 5, 11, 7, 10, NUM_TOKENS, 6)[:samples]):
        ids[row, length - 1] = 2
        ids[row, length:] = 0
        mask[row, length:] = 0
    inputs = {"input_ids": ids}
    if "attention_mask" in parameters:
        inputs["attention_mask"] = mask
    return inputs


def _vocabulary(config: Any) -> int:
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "encoder", "decoder"))):
        if isinstance(getattr(part, "vocab_size", None), int):
            return int(part.vocab_size)
    return VOCABULARY


def _images(config: Any, samples: int, name: str, generator: torch.Generator) -> torch.Tensor:
    size = getattr(config, "image_size", None) or getattr(config, "input_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    shape = [getattr(config, "num_channels", None) or 3, height, width]
    frames = next((n for name in ("num_frames", "frames_per_clip") if (n := getattr_or_none(config, name))), None)
    if isinstance(frames, int):
        shape = [frames, *shape]
    return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)


def _spectra(config: Any, samples: int, generator: torch.Generator) -> torch.Tensor:
    bins = next(
        (int(v) for n in ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")
         if isinstance(v := getattr(config, n, None), int)), 16,
    )  # fmt: skip
    if config.model_type in ("whisper", "moonshine_streaming"):
        return torch.randn(samples, bins, 2 * config.max_source_positions, generator=generator, dtype=torch.float64)
    return torch.randn(samples, 40, bins, generator=generator, dtype=torch.float64)


def _labels(
    model: Any, task: str, inputs: Mapping[str, Any], samples: int, generator: torch.Generator
) -> dict[str, Any]:
    kind = TASKS[task].labels
    classes = torch.arange(samples) % NUM_LABELS
    if kind == "classes":
        return {"labels": classes}
    if kind == "choices":
        return {"labels": torch.arange(samples) % NUM_CHOICES}
    if kind == "pairs":
        return {"labels": torch.arange(samples) % 2}
    if kind == "spans":
        return {"start_positions": torch.arange(samples) % 4, "end_positions": 1 + torch.arange(samples) % 5}
    if kind == "patches":
        size, patch = (
            getattr_or_none(model.config, name) or default
            for name, default in (("image_size", IMAGE), ("patch_size", 8))
        )
        patches = (size // patch) ** 2
        return {"bool_masked_pos": torch.rand(samples, patches, generator=generator) < 0.5}
    if kind == "transcripts":
        labels = torch.randint(3, 20, (samples, 6), generator=generator)
        labels[1, 4:] = labels[3, 2:] = -100
        return {"labels": labels}
    if kind == "tokens" and "input_ids" in inputs and not model.config.is_encoder_decoder:
        ids = inputs["input_ids"]
        return {"labels": ids.masked_fill(inputs.get("attention_mask", torch.ones_like(ids)) == 0, -100)}
    if kind == "tokens":
        labels = torch.randint(3, VOCABULARY, (samples, 9), generator=generator)
        labels[1, 6:] = labels[4, 3:] = -100
        return {"labels": labels}
    assert kind == "token classes"
    ids = inputs["input_ids"]
    labels = torch.randint(0, NUM_LABELS, ids.shape, generator=generator)
    return {"labels": labels.masked_fill(inputs.get("attention_mask", torch.ones_like(ids)) == 0, -100)}
