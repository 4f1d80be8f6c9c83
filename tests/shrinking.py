"""Any transformers model type, small: its default config shrunk by what the fields are called, and its model built.

Nothing is downloaded. A config is shrunk field by field, nested configs too; relations between fields (a list with one
entry per layer, widths that must be equal) are kept by giving every field of one kind the same value. Where a type
needs more than that, `small_fields.EXCEPTIONS` has the fields.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from pathlib import Path

import torch
import transformers
from small_fields import DEFAULT, EXCEPTIONS, HEADS, LAYERS, VOCABULARY, WIDTH
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

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
