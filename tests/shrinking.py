"""Any transformers model type, small: its default config shrunk by what the fields are called, and its model built.

Nothing is downloaded. A config is shrunk field by field, nested configs too; relations between fields (a list with one
entry per layer, widths that must be equal) are kept by giving every field of one kind the same value. Where a type
needs more than that, `EXCEPTIONS` has the fields.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

VOCABULARY = 160
WIDTH, HEADS, LAYERS = 64, 4, 2

# A field's whole name (regular expression, first match wins) -> its value in a small model.
_SIZES = [
    (r"vocab_size|text_vocab_size|decoder_vocab_size|encoder_vocab_size|.*_vocab_size", VOCABULARY),
    (r"type_vocab_size", 2),
    (
        r"(num_)?(encoder_|decoder_|hidden_|text_|vision_|self_|q_)?layers|n_layers?|depth|(en|de)coder_depth|"
        r"num_(encoder|decoder|hidden|self_attention|block)_layers|(en|de)coder_num_(hidden_)?layers|"
        r"(predictor|pred)_num_hidden_layers|num_blocks|num_layers",
        LAYERS,
    ),
    (r"num_key_value_heads|(en|de)coder_num_key_value_heads|n_kv_heads|num_kv_heads|swa_num_key_value_heads|"
     r"num_global_key_value_heads|attention_groups|multi_query_group_num", "kv"),
    (r"(num_|n_)?(attention_|attn_|encoder_|decoder_|encoder_attention_|decoder_attention_|self_attention_)?heads?|"
     r"(en|de)coder_num_(attention_)?heads|(en|de)coder_attention_heads|num_attention_heads|(pred|predictor)_num_attention_heads|"
     r"swa_num_attention_heads", HEADS),
    (r"head_dim|d_kv|v_head_dim|qk_nope_head_dim|attention_head_dim|attn_head_dim|swa_head_dim|head_size|global_head_dim", 16),
    (r"qk_rope_head_dim", 8),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 16),
    (
        r"hidden_size|d_model|n_embd|(en|de)coder_hidden_size|(en|de)coder_hidden_dim|hidden_dim|embed_dim|"
        r"projection_dim|text_hidden_size|vision_hidden_size|(en|de)coder_d_model|model_dim|out_hidden_size|output_dim|"
        r"text_embed_dim|pooler_output_size|(pred|predictor)_hidden_size|output_hidden_size|cross_attention_hidden_size|"
        r"query_pre_attn_scalar|text_d_model|embedding_size|pad_head_dim|dim",
        WIDTH,
    ),
    (
        r"(.*_)?intermediate_(size|dim)|(.*_)?ffn_dim|mlp_dim|d_ff|n_inner|moe_intermediate_size|ffn_hidden_size|ffw_dim|"
        r"intermediate_size_mlp|(.*_)?mlp_hidden_size|shared_expert_intermediate_size|.*_expert_intermediate_size",
        WIDTH,
    ),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_experts_per_layer|n_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|moe_top_k|experts_per_token", 2),
    (r"n_group|topk_group|num_expert_group|n_shared_experts|moe_num_shared_experts|num_expert_groups", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|decoder_sparse_step", 1),
    (r"max_position_embeddings|n_positions|max_sequence_length|max_target_positions|text_max_position_embeddings", 128),
    (r"sliding_window|attention_chunk_size|swa_window|local_attention|attention_window", 4),
    (r"sliding_window_pattern", 2),
    (r"index_n_heads|index_topk", 4),
    (r"index_head_dim", 16),
    (r"max_window_layers", 1),
    (r"linear_(num_)?(key|value)_heads", 4),
    (r"linear_(key|value)_head_dim", 16),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_d_ssm", 16),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"relative_attention_num_buckets", 8),
    (r"relative_attention_max_distance", 16),
    (r"num_mel_bins", 16),
    (r"num_queries|num_query_tokens", 8),
    (r"vocab_size_per_layer_input", VOCABULARY),
    (r"hidden_size_per_layer_input", 8),
]  # fmt: skip
# Sizes that some types leave open and cannot do without.
_NEEDED = {
    "vocab_size": VOCABULARY, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_experts": 4, "topk_group": 1,
    "n_group": 1, "top_k_experts": 2, "moe_intermediate_size": WIDTH, "n_shared_experts": 1, "head_dim": 16,
    "expert_intermediate_size": WIDTH, "sliding_window": 4,
}  # fmt: skip
_SIZES = [(re.compile(pattern), value) for pattern, value in _SIZES]
# The same, leaving all widths as they are: for types whose widths depend on each other in their own ways.
_DEPTHS = [
    (pattern, value) for pattern, value in _SIZES if value in (VOCABULARY, LAYERS) or "expert" in pattern.pattern
]
DEFAULT = object()  # an exception's word for "leave this field as it is"
_TOKEN = re.compile(r".*_token_(id|index)|.*_token_id_.*")
_STAGES = {"depths", "stage_out_channels", "block_configs"}  # fields of models made of stages, whose number stays
_LAYER_INDICES = re.compile(r".*(index|indexes|indices|_layers|layer_ids?|_layer|layers_to_.*)$")


# ---- which types there are ----


@functools.cache
def dispatching_types() -> list[str]:
    """The model types whose modeling files hand attention to the registered implementation."""
    root = Path(transformers.__file__).parent / "models"
    found = []
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        files = (root / model_type_to_module_name(model_type)).glob("modeling_*.py")
        if any("ALL_ATTENTION_FUNCTIONS" in path.read_text(encoding="utf-8") for path in files):
            found.append(model_type)
    return found


_AUTO = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def model_classes(model_type: str, config: PreTrainedConfig) -> list[type]:
    """Classes that run this type, the best first: with a head that gives logits, then the bare model, then others."""
    names = []
    for mapping in _AUTO:
        entry = getattr(modeling_auto, mapping, {}).get(model_type)
        if entry and not (
            "CAUSAL_LM" in mapping and "SEQ" not in mapping and getattr(config, "is_decoder", True) is False
        ):
            names += [entry] if isinstance(entry, str) else list(entry)
    found = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    package = f"transformers.models.{model_type_to_module_name(model_type)}"
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    for path in sorted(folder.glob("modeling_*.py")):
        module = __import__(f"{package}.{path.stem}", fromlist=["*"])
        for cls in vars(module).values():
            if (
                inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
                and _is_for(cls, type(config)) and "forward" in vars(cls)
            ):  # fmt: skip
                found.append(cls)
    return list(dict.fromkeys(found))


def wholes(model_type: str) -> list[str]:
    """The types of the same package whose configs have this type as a part, the smallest first: for a part with no model
    of its own."""
    module, part, found = model_type_to_module_name(model_type), CONFIG_MAPPING[model_type], {}
    for other in CONFIG_MAPPING_NAMES:
        if other != model_type and model_type_to_module_name(other) == module:
            parts = list(_parts(shrunk(other)))
            if any(isinstance(inner, part) for inner in parts):
                found[other] = len(parts)
    return sorted(found, key=found.get)


def _parts(config: PreTrainedConfig):
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield inner
            yield from _parts(inner)


def _is_for(cls: type, config_class: type) -> bool:
    """Whether a model class takes this config: it says so, or its constructor does."""
    if cls.config_class is config_class:
        return True
    parameter = inspect.signature(cls.__init__).parameters.get("config")
    annotation = getattr(parameter, "annotation", None)
    return annotation is config_class or annotation == config_class.__name__


# ---- shrinking a config ----


class _Tokens:
    """Special tokens, each with a number of its own from the end of the vocabulary."""

    def __init__(self):
        self.next = VOCABULARY - 1

    def take(self) -> int:
        self.next -= 1
        return self.next + 1


def shrunk(model_type: str, widths: bool = True, **changes) -> PreTrainedConfig:
    """The small config of a model type; `widths=False` leaves widths and heads as they are."""
    return _shrink(CONFIG_MAPPING[model_type], _Tokens(), widths, changes)


def _default(cls: type, tokens: _Tokens, widths: bool, changes: dict) -> PreTrainedConfig:
    """A type's own config; where it has none, or fetches a part of it, one of the parts that `changes` names."""
    try:
        return cls()
    except Exception:
        parts = {
            name: _shrink(CONFIG_MAPPING[part["model_type"]], tokens, widths, _but(part, "model_type"))
            for name, part in changes.items()
            if isinstance(part, dict) and "model_type" in part
        }
        return cls(**{name: part.to_dict() for name, part in parts.items()})


def _but(entries: dict, name: str) -> dict:
    return {key: value for key, value in entries.items() if key != name}


def _shrink(cls: type, tokens: _Tokens, widths: bool, changes: dict) -> PreTrainedConfig:
    changes = {**EXCEPTIONS.get(cls.model_type, {}), **changes}
    default = _default(cls, tokens, widths, changes)
    takes = set(inspect.signature(cls.__init__).parameters)
    kept = _kept_layers(default)
    settings: dict = {}
    for name, value in default.__dict__.items():
        if name in takes and not name.startswith("_"):
            new = _field(cls, name, value, kept, tokens, widths, default)
            if new is not None:
                settings[name] = new
    for name in default.sub_configs:
        inner, nested = getattr(default, name, None), changes.get(name)
        nested = nested if isinstance(nested, dict) else {}
        if "model_type" in nested:
            settings[name] = _shrink(CONFIG_MAPPING[nested["model_type"]], tokens, widths, _but(nested, "model_type"))
        elif isinstance(inner, PreTrainedConfig):
            if _STAGES & inner.__dict__.keys():
                nested = {**_stages(inner), **nested}
            settings[name] = _shrink(type(inner), tokens, widths, nested)
    settings.update(
        {
            name: value
            for name, value in changes.items()
            if not isinstance(value, dict) or name not in default.sub_configs
        }
    )
    if "out_features" in changes:
        settings.pop("out_indices", None)
    settings = {name: value for name, value in settings.items() if value is not DEFAULT}
    try:
        return cls(**settings)
    except TypeError:  # some take their parts as dicts only
        parts = {name: part.to_dict() for name, part in settings.items() if isinstance(part, PreTrainedConfig)}
        return cls(**settings | parts)


def _stages(backbone: PreTrainedConfig) -> dict:
    """How a whole sets its backbone of stages, beyond that type's own defaults: lists with an entry for each stage."""
    plain, found = type(backbone)(), {}
    for name, value in backbone.__dict__.items():
        if isinstance(value, (list, tuple)) and not name.startswith("_") and value != getattr(plain, name, value):
            found[name] = value
    if isinstance(getattr(backbone, "_out_indices", None), list):
        found["out_indices"] = backbone._out_indices
    return {name: value for name, value in found.items() if name not in ("stage_names", "out_features")}


def _field(cls, name, value, kept, tokens, widths, default):
    """The small value of one field, None to leave it as it is."""
    if value is None and widths:
        return _NEEDED.get(name)
    if isinstance(value, bool) or value is None:
        return None
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value, cls, getattr(default, "partial_rotary_factor", None)) if widths else None
    if isinstance(value, int) and _TOKEN.fullmatch(name):
        return tokens.take() if value >= 8 else None
    if isinstance(value, (list, tuple)):
        if kept and len(value) == kept[0] and len(value) > LAYERS:
            return [value[index] for index in kept[1]]
        if (
            _LAYER_INDICES.fullmatch(name)
            and not name.startswith("stage")
            and all(isinstance(part, int) and not isinstance(part, bool) for part in value)
        ):
            limit = len(kept[1]) if kept else LAYERS
            return sorted({min(part, limit - 1) for part in value})
        if name == "image_size" and all(isinstance(part, int) for part in value):
            return [32] * len(value)
        return None
    if not isinstance(value, int):
        return None
    if kept and value == kept[0] and re.fullmatch(r"(num_)?(hidden_)?layers|n_layers?", name.removeprefix("num_")):
        return len(kept[1])
    if kept and name == "num_hidden_layers":
        return len(kept[1])
    for pattern, small in _SIZES if widths else _DEPTHS:
        if pattern.fullmatch(name):
            if small == "kv":
                heads = getattr(default, "num_attention_heads", None) or getattr(default, "n_head", None) or value
                return 2 if isinstance(heads, int) and value < heads else HEADS
            return min(value, small) if value > 0 else None
    return None


def _kept_layers(default) -> tuple[int, list[int]] | None:
    """(layers by default, the layers to keep): the first of every kind, at least LAYERS."""
    count = getattr(default, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        return None
    kinds = [
        value
        for name, value in default.__dict__.items()
        if isinstance(value, (list, tuple)) and len(value) == count and name.endswith(("types", "type", "layers"))
        and all(isinstance(part, str) for part in value)
    ]  # fmt: skip
    chosen: list[int] = []
    for kind in kinds:
        for word in dict.fromkeys(kind):
            chosen.append(list(kind).index(word))
    chosen = sorted(set(chosen))
    for index in range(count):
        if len(chosen) >= LAYERS:
            break
        if index not in chosen:
            chosen.append(index)
    return count, sorted(chosen)


def _shares(sections: list, total: int) -> list[int]:
    """Sections in the same proportions that add up to `total`."""
    exact = [section * total / sum(sections) for section in sections]
    shares = [int(share) for share in exact]
    for index in sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _rope(parameters: dict, cls: type, factor: float | None) -> dict:
    """Rotary sections add up to half a head; types that have them by default in their code get them here."""
    parameters = dict(parameters)
    half = int(16 * (parameters.get("partial_rotary_factor") or factor or 1.0)) // 2
    if "mrope_section" in (getattr(cls, "ignore_keys_at_rope_validation", None) or ()):
        parameters.setdefault("mrope_section", [16, 24, 24])

    def small(value):
        if not isinstance(value, dict):
            return value
        value = {key: small(part) for key, part in value.items()}
        if "mrope_section" in value:
            value["mrope_section"] = _shares(value["mrope_section"], half)
        return value

    return small(parameters)


# ---- fields that a type needs beside its shrunk ones ----

_SAM_VISION = {
    "image_size": 64,
    "patch_size": 16,
    "global_attn_indexes": [1],
    "window_size": 3,
    "num_pos_feats": 16,
    "output_channels": 32,
}
_SAM_PROMPT = {"image_size": 64, "patch_size": 16, "hidden_size": 32, "mask_input_channels": 8}
_SAM_MASK = {"hidden_size": 32, "num_attention_heads": 2, "mlp_dim": 32, "iou_head_hidden_dim": 32}
_SAM = {"vision_config": _SAM_VISION, "prompt_encoder_config": _SAM_PROMPT, "mask_decoder_config": _SAM_MASK}

_TIMM = {"architecture": "test_resnet"}  # the smallest of timm's
_SAM2_PROMPT = {"image_size": 64, "patch_size": 16, "hidden_size": WIDTH, "mask_input_channels": 8}
_SAM2_MASK = {"hidden_size": WIDTH, "num_attention_heads": 2, "mlp_dim": 32, "iou_head_hidden_dim": 32}
_THIRDS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
_SMALL_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
}
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_RESNET_LAST = {**_RESNET, "out_features": ["stage4"]}

EXCEPTIONS: dict[str, dict] = {
    "align": {
        "vision_config": {"hidden_dim": DEFAULT, "image_size": 64, "depth_coefficient": 0.3},
        "projection_dim": 640,
    },
    "audio-spectrogram-transformer": {"max_length": 64, "patch_size": 8, "frequency_stride": 8, "time_stride": 8},
    "blt": {
        "use_cache": False,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": WIDTH},
        "decoder_config": {"hidden_size_global": WIDTH},
    },
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "clap_audio_model": {
        "spec_size": 64,
        "patch_stride": [4, 4],
        "window_size": 4,
        "depths": [1, 1],
        "num_attention_heads": [2, 4],
        "patch_embeds_hidden_size": 32,
        "hidden_size": 64,
        "num_mel_bins": 16,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {kind: _THIRDS for kind in ("sliding_attention", "full_attention")},
    },
    "csm": {"use_cache": False},
    "dia_decoder": {"cross_hidden_size": WIDTH},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2_sam_vision_model": {"output_channels": WIDTH, "downsample_channels": [WIDTH, WIDTH]},
    "deepseek_ocr2_encoder": {"hidden_size": WIDTH},
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}, "canvas_length": 8},
    "efficientloftr": {"hidden_size": DEFAULT, "num_attention_heads": DEFAULT, "num_attention_layers": 2},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "esm": {"pad_token_id": 1, "mask_token_id": 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "granite4_vision": {
        "text_config": {"model_type": "granite4_vision_text"},
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "granite_speech5_encoder": {"num_mel_bins": DEFAULT},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _THIRDS}},
    "ernie4_5_vl_moe_text": {"rope_parameters": _THIRDS},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "idefics": {
        "use_resampler": True,
        "perceiver_config": {
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
        },
    },
    "informer": {"prediction_length": 8, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2},
    "gemma4_unified": {
        "vision_config": {"model_type": "gemma4_unified_vision"},
        "audio_config": {"model_type": "gemma4_unified_audio"},
    },
    "inkling_audio": {"text_hidden_size": WIDTH, "mel_vocab_size": 16},
    "inkling_vision": {"text_hidden_size": WIDTH, "num_hidden_layers": 3},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 16,
        "linear_num_heads": HEADS,
    },
    "llama4_vision_model": {
        "intermediate_size": 256,
        "vision_output_dim": WIDTH,
        "projector_input_dim": WIDTH,
        "projector_output_dim": WIDTH,
    },
    "maskformer": {
        "backbone_config": {
            "model_type": "swin",
            "embed_dim": 16,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 2, 2, 4],
            "window_size": 2,
            "image_size": 64,
        },
        "fpn_feature_size": 32,
        "mask_feature_size": 32,
    },
    "maskformer-swin": {"embed_dim": 48, "depths": [1, 1, 1, 1], "image_size": 64, "patch_size": 4, "window_size": 2},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        },
        "head_dim": 8,
    },
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "muse_glimmer_assistant": {"target_layer_ids": [0]},
    "musicgen": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_decoder"},
    },
    "musicgen_melody": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_melody_decoder"},
    },
    "nemotron_asr_streaming_encoder": {"sliding_window": 8, "default_num_lookahead_tokens": 1},
    "neucodec": {"semantic_model_config": {"feature_projection_input_dim": 160}, "quantization_dim": 2 * WIDTH},
    "xcodec2": {"semantic_model_config": {"feature_projection_input_dim": 160}, "quantization_dim": 2 * WIDTH},
    "paddleocr_vl_text": {"rope_parameters": _THIRDS},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": WIDTH},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "pix2struct_text_model": {"initializer_range": 0.02},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"dropout_rate": 0.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lasr_ctc": {"encoder_config": {"num_mel_bins": 80}},
    "lasr_encoder": {"num_mel_bins": 16},
    **dict.fromkeys(
        ("d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v3", "rt_detr", "rt_detr_v2"), {"decoder_in_channels": [WIDTH] * 3}
    ),
    "instructblip": {"image_token_index": 5, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 5, "num_query_tokens": 4},
    "moshi_depth": {"num_codebooks": 4, "audio_vocab_size": VOCABULARY, "input_size": WIDTH},
    "muse_glimmer_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": WIDTH,
        "depthwise_separable_out_channel": WIDTH,
        "nemo_conv_channels": WIDTH,
    },
    "nemotron_asr_streaming": {"decoder_hidden_size": WIDTH, "encoder_config": {"num_mel_bins": 80}},
    "kosmos-2": {"latent_query_num": 4},
    "janus_vqgan": {"num_patches": 4, "base_channels": 32},
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "blocks_per_stage": [1, 1, 2, 1],
        "global_attention_blocks": [3],
        "window_size_per_stage": [4, 4, 4, 4],
        "image_size": [64, 64],
        "window_positional_embedding_background_size": [4, 4],
    },
    **dict.fromkeys(
        ("sam2_vision_model",),
        {
            "backbone_channel_list": [128, 64, 32, 16],
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "fpn_hidden_size": WIDTH,
        },
    ),
    "sam2": {"prompt_encoder_config": _SAM2_PROMPT, "mask_decoder_config": _SAM2_MASK},
    "sam3_vision_model": {"fpn_hidden_size": WIDTH},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "sam3_tracker": {
        "vision_config": {
            "backbone_feature_sizes": [[56, 56], [28, 28], [14, 14]],
            "backbone_config": {"image_size": 112},
        },
        "prompt_encoder_config": {**_SAM2_PROMPT, "image_size": 112, "patch_size": 8},
        "mask_decoder_config": _SAM2_MASK,
    },
    "videoprism": {"vision_config": {"num_frames": 2}},
    "xclip": {
        "vision_config": {"mit_hidden_size": WIDTH, "mit_num_attention_heads": HEADS},
        "prompt_num_attention_heads": HEADS,
    },
    "edgetam_vision_model": {
        "backbone_config": {
            "model_type": "timm_wrapper",
            **_TIMM,
            "model_args": {"in_chans": 3, "features_only": True, "out_indices": [1, 2, 3, 4]},
        },
        "backbone_channel_list": [96, 192, 48, 32],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": WIDTH,
    },
    "edgetam": {
        "vision_config": {"model_type": "edgetam_vision_model"},
        "prompt_encoder_config": _SAM2_PROMPT,
        "mask_decoder_config": _SAM2_MASK,
    },
    "gemma3n_vision": _TIMM,
    **dict.fromkeys(("pe_video_encoder",), {"vision_config": _TIMM}),
    "lw_detr": {"backbone_config": {"out_indices": [1, 2]}, "projector_scale_factors": [1.0], "group_detr": 1},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "window_block_indices": [0]},
    "mimi": {
        "hidden_size": DEFAULT,
        "num_attention_heads": DEFAULT,
        "head_dim": DEFAULT,
        "num_key_value_heads": DEFAULT,
    },
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "chunk_size": 4},
    "patchtst": {"context_length": 32, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2},
    "patchtsmixer": {
        "context_length": 32,
        "patch_length": 4,
        "patch_stride": 4,
        "num_input_channels": 2,
        "self_attn": True,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 4, "lru_width": 64},
    "sam3": {"image_size": 112},
    "time_series_transformer": {
        "prediction_length": 8,
        "context_length": 8,
        "lags_sequence": [1, 2],
        "num_time_features": 2,
    },
    "timesfm": {"context_length": 64, "patch_length": 16, "horizon_length": 16},
    "timesfm2_5": {"context_length": 64, "patch_length": 16},
    "vjepa2": {"crop_size": 32, "image_size": 32, "frames_per_clip": 4, "patch_size": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
    },
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 4},
    "conditional_detr": {"backbone_config": _RESNET_LAST},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "deformable_detr": {"backbone_config": _RESNET},
    "detr": {"backbone_config": _RESNET_LAST},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_d_head": 8, "mamba_chunk_size": 4},
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "glm5_next_text": {"index_kpool": 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_chunk_size": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2, "expert_ffn_hidden_size": WIDTH},
    "mpnet": {"relative_attention_num_buckets": 32},
    "sam": _SAM,
    "sam_hq": {**_SAM, "mask_decoder_config": {**_SAM_MASK, "vit_dim": 64}},
    "sam_vision_model": _SAM_VISION,
    "sam_hq_vision_model": _SAM_VISION,
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4},
    "gptj": {"rotary_dim": 8},
}


# ---- the model ----


def build(cls: type, config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """The model in fp32 and eval mode, with eager attention and weights large enough for attention to matter."""
    if config.model_type == "qwen2_5_omni_dit":
        transformers.AttentionInterface.register("eager", _eager_attention)  # it has none of its own
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager").float().eval()
        energise(model)
    return model


def _eager_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def parameters(cls: type, config: PreTrainedConfig) -> int:
    """How many parameters the model would have; nothing is allocated."""
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def energise(model: torch.nn.Module) -> None:
    """Weights as large as in a trained model: fresh ones make attention nearly uniform, which would hide a wrong mask."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.dim() >= 2:
                fan_in = max(1, parameter[0].numel())
                wanted = 1.5 * min(1.0, fan_in**-0.5)
                if not parameter.isfinite().all() or parameter.std() < wanted:
                    parameter.normal_(0.0, wanted)
            elif not parameter.isfinite().all() or not parameter.any():
                parameter.normal_(0.0, 0.1)
