"""Tiny random transformers models, one per thing the seam must get right. Built from configs; nothing is downloaded.

Head dims are multiples of 8, so the same models run through the emulated kernels in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

VOCAB = 99
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """`layers` attention modules dispatch to flashpatch; `needs` are features beyond causal attention, in the matrix's
    words. `decoder`: causal text in, logits out. `hard_coded` modules compute attention themselves, read or not."""

    name: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict]
    layers: int
    needs: frozenset[str] = frozenset()
    decoder: bool = True
    hard_coded: int = 0
    generates: bool = True

    def model(self, implementation: str = "eager", **changes) -> torch.nn.Module:
        """The model with the same weights every time, in fp32 and eval mode."""
        torch.manual_seed(0)
        model = self.build(**changes)
        if self not in (*HARD_CODED, *READ):
            for part in model.modules():
                if isinstance(part, transformers.PreTrainedModel):
                    part.set_attn_implementation(implementation)
        return model.eval()


def ids(batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _text():
    return {"input_ids": ids()}


def _encoder_decoder():
    return {"input_ids": ids(), "decoder_input_ids": ids(length=7, seed=3)}


def _decoder(name: str, config_name: str | None = None, **settings) -> Callable:
    def build(**changes):
        config = getattr(transformers, config_name or f"{name}Config")(**{**_TEXT, **settings, **changes})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def _of(model: str, config: str, **settings) -> Callable:
    def build(**changes):
        return getattr(transformers, model)(getattr(transformers, config)(**{**settings, **changes}))

    return build


def _gpt2(**changes):
    settings = {
        "vocab_size": VOCAB, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**settings, **changes}))


def _llava(**changes):
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=98, vision_feature_select_strategy="default",
        vision_feature_layer=-1, **changes,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def _llava_inputs():
    tokens = ids(length=12).clamp(max=97)
    tokens[:, 1:5] = 98
    return {"input_ids": tokens, "pixel_values": noise(2, 3, 8, 8)}


def _gemma3_vision(**changes):
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.Gemma3TextConfig(
        **{**_TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    )
    config = transformers.Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=4, image_token_index=98, boi_token_index=96,
        eoi_token_index=97, **changes,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma3_vision_inputs():
    tokens = ids(length=14).clamp(max=95)
    tokens[:, 2:6] = 98
    tokens[:, 8:12] = 98
    return {"input_ids": tokens, "pixel_values": noise(4, 3, 8, 8), "token_type_ids": (tokens == 98).long()}


_BERT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "vocab_size": VOCAB, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_source_positions": 12, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "init_std": 0.2, "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip
_T5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "pad_token_id": 0,
    "decoder_start_token_id": 0, "eos_token_id": 1, "dropout_rate": 0.0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention"]

MODELS = [
    Tiny("llama", _decoder("Llama"), _text, 2, frozenset({"gqa"})),
    Tiny("qwen3", _decoder("Qwen3"), _text, 2, frozenset({"gqa"})),
    Tiny(
        "gemma2",
        _decoder("Gemma2", attn_logit_softcapping=2.0, query_pre_attn_scalar=16, sliding_window=4, layer_types=_WINDOWS),
        _text, 2, frozenset({"gqa", "window", "softcap"}),
    ),
    Tiny("gemma3", _decoder("Gemma3", "Gemma3TextConfig", sliding_window=4, layer_types=_WINDOWS), _text, 2, frozenset({"gqa", "window"})),
    Tiny("mistral", _decoder("Mistral", sliding_window=4), _text, 2, frozenset({"gqa", "window"})),
    Tiny("gpt2", _gpt2, _text, 2),
    Tiny("gpt_oss", _decoder("GptOss", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, num_local_experts=2, num_experts_per_tok=1, sliding_window=4, layer_types=_WINDOWS),
         _text, 2, frozenset({"gqa", "window", "sinks"})),
    Tiny(
        "llama4",
        _decoder(
            "Llama4", "Llama4TextConfig", attention_chunk_size=4, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=64,
            layer_types=["chunked_attention", "full_attention"], use_qk_norm=False,
        ),
        _text, 2, frozenset({"gqa", "key_ranges"}),
    ),
    Tiny("doge", _decoder("Doge", keep_window_size=4), _text, 2, frozenset({"gqa", "bias"})),
    Tiny("bert", _of("BertModel", "BertConfig", **_BERT), _text, 2, decoder=False, generates=False),
    Tiny("t5", _of("T5ForConditionalGeneration", "T5Config", **_T5), _encoder_decoder, 6, frozenset({"bias"}), False),
    Tiny(
        "whisper", _of("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER),
        lambda: {"input_features": noise(2, 8, 24), "decoder_input_ids": ids(length=7)}, 3, decoder=False,
        generates=False,
    ),
    Tiny(
        "vit",
        _of("ViTModel", "ViTConfig", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            image_size=8, patch_size=4),
        lambda: {"pixel_values": noise(2, 3, 8, 8)}, 2, decoder=False, generates=False,
    ),
    Tiny("llava", _llava, _llava_inputs, 4, frozenset({"gqa"}), decoder=False),
    Tiny("gemma3_vision", _gemma3_vision, _gemma3_vision_inputs, 3, frozenset({"gqa", "key_ranges"}), False, 1),
]  # fmt: skip

HARD_CODED = [
    Tiny(
        "openai_gpt",
        _of("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64),
        _text, 0, hard_coded=2,
    ),
    Tiny(
        "xlm",
        _of("XLMModel", "XLMConfig", vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=2, max_position_embeddings=64,
            n_langs=1),
        _text, 0, hard_coded=2,
    ),
]  # fmt: skip
# Hard-coded too, but read where it computes attention.
READ = [
    Tiny(
        "bloom",
        _of("BloomForCausalLM", "BloomConfig", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2,
            hidden_dropout=0.0, attention_dropout=0.0),
        _text, 2, hard_coded=2,
    ),
    Tiny(
        "gptj",
        _of("GPTJForCausalLM", "GPTJConfig", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, rotary_dim=8,
            n_positions=64, n_inner=32, bos_token_id=1, eos_token_id=None),
        _text, 2, hard_coded=2,
    ),
]  # fmt: skip

BY_NAME = {tiny.name: tiny for tiny in (*MODELS, *HARD_CODED, *READ)}


def output(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    """What is compared: logits, or the last hidden state of models without a head."""
    result = model(**inputs)
    return result.logits if "logits" in result else result.last_hidden_state
