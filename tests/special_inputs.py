"""Inputs of the types that take what no general rule makes: type -> a function of `dummy_inputs.Inputs`, which makes them."""

from __future__ import annotations

import torch


def width(maker, *names: str) -> int:
    for name in (*names, "hidden_size", "d_model", "embed_dim"):
        if isinstance(found := getattr(maker.config, name, None), int):
            return found
    return maker.config.get_text_config().hidden_size


def _frames(text: bool):
    def make(maker):
        vision = maker.vision_config()
        size = getattr(vision, "image_size", 32)
        frames = maker.noise(2, getattr(vision, "num_frames", 2), 3, size, size)
        if not text:
            return {"pixel_values": frames[0]}
        return {"pixel_values": frames, "input_ids": maker.tokens(8)}

    return make


def _video_and_text(maker):
    size = maker.vision_config().image_size
    size = size[0] if isinstance(size, (list, tuple)) else size
    return {"pixel_values_videos": maker.noise(2, 2, 3, size, size), "input_ids": maker.tokens(8)}


def _series():
    def make(maker):
        config = maker.config
        past = config.context_length + max(config.lags_sequence)
        future = config.prediction_length
        return {
            "past_values": maker.noise(2, past),
            "past_time_features": maker.noise(2, past, config.num_time_features),
            "past_observed_mask": torch.ones(2, past),
            "future_values": maker.noise(2, future),
            "future_time_features": maker.noise(2, future, config.num_time_features),
        }

    return make


def _channels(maker):
    return {"past_values": maker.noise(2, maker.config.context_length, maker.config.num_input_channels)}


def _timesfm(maker):
    inputs = {"past_values": maker.noise(2, 64), "past_values_padding": torch.zeros(2, 64, dtype=torch.long)}
    return {**inputs, "freq": torch.zeros(2, 1, dtype=torch.long)} if "freq" in maker.takes else inputs


def _naflex(text: bool):
    def make(maker):
        width = 3 * maker.vision_config().patch_size ** 2
        inputs = {
            "pixel_values": maker.noise(2, 16, width),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        }
        return {**inputs, "input_ids": maker.tokens(8)} if text else inputs

    return make


def _flattened_patches(text: bool):
    def make(maker):
        vision = getattr(maker.config, "vision_config", maker.config)
        places = torch.tensor([[row, column] for row in range(1, 5) for column in range(1, 5)]).float()
        patches = torch.cat([places.expand(2, -1, -1), maker.noise(2, 16, vision.patch_embed_hidden_size)], -1)
        inputs = {"flattened_patches": patches, "attention_mask": torch.ones(2, 16)}
        return {**inputs, "decoder_input_ids": maker.tokens(7)} if text else inputs

    return make


def _boxes(maker):
    boxes = torch.tensor([0.1, 0.1, 0.4, 0.3]).expand(2, 12, 4)
    size = maker.config.image_size
    return {
        "input_ids": maker.tokens(12),
        "bbox": boxes,
        "decoder_input_ids": maker.tokens(7),
        "pixel_values": maker.noise(2, 3, size, size),
    }


def _codebooks(count: str, last: bool = False, extra: int = 0):
    def make(maker):
        config = maker.config
        shape = (2, 10, getattr(config, count) + extra) if last else (2 * getattr(config, count), 10)
        return {"input_ids": torch.randint(3, 100, shape, generator=maker.generator)}

    return make


def _chunked_sound(maker):
    """Two recordings one after the other, [mel bins, frames], and the length of each."""
    return {"input_features": maker.noise(maker.config.num_mel_bins, 40), "feature_lens": torch.tensor([24, 16])}


def _queries(maker):
    return {
        "query_embeds": maker.noise(2, 4, maker.config.hidden_size),
        "encoder_hidden_states": maker.noise(2, 9, maker.config.encoder_hidden_size),
    }


def _positions(side: int):
    return torch.tensor([[column, row] for row in range(side) for column in range(side)]).expand(2, -1, -1)


def _mel_second(bins: int, length: int, name: str = "input_features", mask: str | None = None, padding: bool = False):
    def make(maker):
        inputs = {name: maker.noise(2, length, bins)}
        return inputs | (
            {mask: torch.zeros(2, length, dtype=torch.bool) if padding else torch.ones(2, length)} if mask else {}
        )

    return make


def _merged(maker):
    return {**maker.patches(), "merge_sizes": torch.tensor([1, 1])}


def _tiles(maker):
    config = maker.config
    size, tiles = config.image_size, config.max_num_tiles
    return {
        "pixel_values": maker.noise(2, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, tiles, dtype=torch.long),
    }


def _mel_first(length: int, mask: str | None = None):
    def make(maker):
        features = maker.noise(2, maker.config.num_mel_bins, length)
        return {"input_features": features} | ({mask: torch.ones(2, length, dtype=torch.long)} if mask else {})

    return make


def _encoded(maker):
    inputs = {"input_ids": maker.tokens(12)}
    return {**inputs, "encoder_hidden_states": maker.noise(2, 9, width(maker, "cross_attention_hidden_size"))}


def _images_then_text(token: str, frames: int = 0):
    def make(maker):
        config = maker.config
        size, ids = config.vision_config.image_size, maker.tokens(maker.seqlen)
        ids[:, 1 : 1 + config.num_query_tokens * max(1, frames)] = getattr(config, token)
        shape = (2, frames, 3, size, size) if frames else (2, 3, size, size)
        return {"input_ids": ids, "qformer_input_ids": maker.tokens(8), "pixel_values": maker.noise(*shape)}

    return make


def _picture(side: int, size: float = 1.0):
    """Images. Random residual networks enlarge what they get a thousandfold, which would saturate the attention behind
    them: there torch's own sdpa is as far from eager in the gradients of q and k as flashpatch; `size` is for these."""
    return lambda maker: {"pixel_values": size * maker.noise(2, 3, side, side)}


def _pyramid(maker):
    """Feature maps of three levels, the largest first."""
    return [maker.noise(2, maker.config.hidden_size, side, side) for side in (16, 8, 4)]


def _described_maps(maker):
    width = maker.config.hidden_size
    maps = [maker.noise(2, width, 4, 4)]
    return {"vision_features": maps, "vision_pos_embeds": maps, "text_features": maker.noise(2, 8, width)}


def _decoded_maps(maker):
    width = maker.config.hidden_size
    return {
        "decoder_queries": maker.noise(2, 8, width),
        "backbone_features": _pyramid(maker),
        "encoder_hidden_states": maker.noise(2, 16, width),
        "prompt_features": maker.noise(2, 5, width),
    }


def _semantic(maker):
    return {"input_values": maker.noise(2, 1, 320 * 12), "input_features": maker.noise(2, 12, 160)}


SPECIAL = {
    **dict.fromkeys(("d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v3", "rt_detr", "rt_detr_v2", "rt_detr_resnet"), _picture(96, 1e-3)),
    "florence_vision": lambda maker: {"hidden_states": maker.noise(2, 3, 64, 64)},
    "fun_asr_nano_encoder": _mel_second(112, 16, mask="input_features_mask"),
    "inkling_vision": lambda maker: {"pixel_values": maker.noise(4, 2, 8, 8, 3)},
    "janus_vqgan": _picture(64),
    "kosmos-2": lambda maker: {
        "input_ids": maker.tokens(12), "pixel_values": maker.noise(2, 3, 32, 32),
        "image_embeds_position_mask": torch.tensor([[0, *[1] * maker.config.latent_query_num, *[0] * 7]] * 2),
    },
    "kosmos_2_5_vision_model": _flattened_patches(False),
    "neucodec": _semantic,
    "xcodec2": _semantic,
    "qwen2_5_omni_bigvgan": lambda maker: {"mel_spectrogram": maker.noise(2, maker.config.mel_dim, 16)},
    "qwen2_5_omni_dit": lambda maker: {
        "hidden_states": maker.noise(2, 24, maker.config.mel_dim), "condition_vector": maker.noise(2, 24, maker.config.mel_dim),
        "speaker_embedding": maker.noise(2, 24, maker.config.enc_emb_dim),
        "quantized_code": torch.randint(0, 100, (2, 12), generator=maker.generator),
        "time_step": torch.tensor(0.5), "apply_cfg": False,
    },
    **dict.fromkeys(
        ("pp_ocrv5_server_rec", "pp_ocrv6_small_rec"), lambda maker: {"pixel_values": maker.noise(2, 3, 48, 64)}
    ),
    "pp_ocrv5_mobile_rec": lambda maker: {"pixel_values": maker.noise(2, 3, 96, 64)},
    "edgetam": _picture(64),
    "sam2": _picture(64),
    "edgetam_vision_model": _picture(64),
    "pe_video": lambda maker: {"input_ids": maker.tokens(12), "pixel_values_videos": maker.noise(2, 2, 3, 64, 64)},
    "pe_video_encoder": lambda maker: {"pixel_values_videos": maker.noise(2, 2, 3, 64, 64)},
    "pe_audio_video": lambda maker: {
        "input_ids": maker.tokens(12), "input_values": maker.noise(2, 1, 1920 * 2), "pixel_values_videos": maker.noise(2, 2, 3, 64, 64)
    },
    "pe_audio_video_encoder": lambda maker: {
        "input_values": maker.noise(2, 1, 1920 * 2), "pixel_values_videos": maker.noise(2, 2, 3, 64, 64)
    },
    **dict.fromkeys(("sam3_detr_encoder", "sam3_lite_text_detr_encoder"), _described_maps),
    **dict.fromkeys(("sam3_mask_decoder", "sam3_lite_text_mask_decoder"), _decoded_maps),
    "voxtral_realtime": lambda maker: {"input_ids": maker.tokens(12), "input_features": maker.noise(2, 16, 96)},
    "voxtral_realtime_text": lambda maker: {
        "input_ids": maker.tokens(12), "t_cond": maker.noise(1, 1, maker.config.hidden_size)
    },
    "blip_2_qformer": _queries,
    "blt_local_encoder": lambda maker: {
        "input_ids": maker.tokens(12), "patch_embeds": maker.noise(2, 4, maker.config.hidden_size), "num_patches": 4,
        "patch_ids": (torch.arange(12) // 3).expand(2, -1),
    },
    "blt_local_decoder": lambda maker: {
        "inputs_embeds": maker.noise(2, 12, maker.config.hidden_size),
        "patch_embeds": maker.noise(2, 4, maker.config.hidden_size_global),
    },
    "clap": lambda maker: {
        "input_ids": maker.tokens(12), "input_features": maker.noise(2, 1, 256, 16), "is_longer": torch.zeros(2, 1)
    },
    "clap_audio_model": lambda maker: {"input_features": maker.noise(2, 1, 256, 16), "is_longer": torch.zeros(2, 1)},
    "dia": lambda maker: {
        "input_ids": maker.tokens(12),
        "decoder_input_ids": torch.randint(3, 100, (2, 10, maker.config.decoder_config.num_channels), generator=maker.generator),
    },
    "gemma3n_audio": lambda maker: {
        "audio_mel": maker.noise(2, 32, maker.config.input_feat_size), "audio_mel_mask": torch.zeros(2, 32, dtype=torch.bool)
    },
    "gemma4_audio": _mel_second(128, 32, mask="attention_mask"),
    "gemma4_vision": lambda maker: {
        "pixel_values": maker.noise(2, 36, 3 * maker.config.patch_size**2), "pixel_position_ids": _positions(6)
    },
    "glmasr_encoder": _mel_first(32),
    "granite_speech5_encoder": _mel_second(320, 16),
    "granite_speech5_ctc": _mel_second(320, 16),
    "inkling_audio": lambda maker: {"audio_input_ids": torch.randint(0, 16, (12, 80), generator=maker.generator)},
    "lasr_ctc": _mel_second(80, 48),
    "lasr_encoder": _mel_second(16, 48),
    "minicpmv4_6_vision": lambda maker: {
        "pixel_values": maker.noise(1, 3, 8, 16 * 8 * 2), "target_sizes": torch.tensor([[4, 4], [4, 4]])
    },
    "mimi": lambda maker: {"input_values": maker.noise(2, 1, 1920 * 4)},
    "pe_audio_encoder": lambda maker: {"input_values": maker.noise(2, 1, 1920 * 4)},
    "nemotron_asr_streaming": lambda maker: {
        "input_features": maker.noise(2, 64, 80), "attention_mask": torch.ones(2, 64, dtype=torch.long), "decoder_input_ids": maker.tokens(4)
    },
    "nemotron_asr_streaming_encoder": _mel_second(16, 64, mask="attention_mask"),
    "qwen2_5_omni_audio_encoder": _chunked_sound,
    "qwen3_omni_moe_audio_encoder": _chunked_sound,
    "qwen3_asr_encoder": lambda maker: {
        "input_features": maker.noise(2, maker.config.num_mel_bins, 200), "input_features_mask": torch.ones(2, 200, dtype=torch.long)
    },
    "audio-spectrogram-transformer": lambda maker: {
        "input_values": maker.noise(2, maker.config.max_length, maker.config.num_mel_bins)
    },
    "audioflamingo3_encoder": lambda maker: _mel_first(2 * maker.config.max_source_positions, "input_features_mask")(maker),
    "dia_decoder": lambda maker: {
        **_codebooks("num_channels", last=True)(maker),
        "encoder_hidden_states": maker.noise(2, 9, maker.config.cross_hidden_size),
    },
    "idefics": lambda maker: {
        "input_ids": maker.tokens(12), "pixel_values": maker.noise(2, 2, 3, 32, 32),
        "image_attention_mask": torch.ones(2, 12, 2, dtype=torch.long),
    },
    "idefics2_vision": lambda maker: maker.images(),
    "informer": _series(),
    "instructblip": _images_then_text("image_token_index"),
    "instructblipvideo": _images_then_text("video_token_index", frames=2),
    "instructblip_qformer": lambda maker: {
        "input_ids": maker.tokens(8), "query_embeds": maker.noise(2, 4, maker.config.hidden_size),
        "encoder_hidden_states": maker.noise(2, 9, maker.config.encoder_hidden_size),
    },
    "kyutai_speech_to_text": _codebooks("num_codebooks", last=True, extra=1),
    "mllama_vision_model": _tiles,
    "moshi_depth": lambda maker: {
        "input_ids": maker.tokens(4), "last_hidden_state": maker.noise(2, 4, maker.config.input_size), "position_ids": torch.arange(4)
    },
    "muse_glimmer_assistant": lambda maker: {
        "noise_embeds": maker.noise(2, 8, maker.config.hidden_size), "context_hidden_states": maker.noise(2, 16, maker.config.hidden_size),
        "attention_mask": torch.ones(2, 24, dtype=torch.long),
    },
    **dict.fromkeys(("musicgen", "musicgen_melody"), lambda maker: {
        "input_ids": maker.tokens(12),
        "decoder_input_ids": torch.randint(3, 100, (2 * maker.config.decoder.num_codebooks, 10), generator=maker.generator),
    }),
    "musicgen_decoder": _codebooks("num_codebooks"),
    "musicgen_melody_decoder": _codebooks("num_codebooks"),
    "patchtsmixer": _channels,
    "patchtst": _channels,
    "phi4_multimodal_audio": lambda maker: {
        "hidden_states": maker.noise(2, 32, maker.config.input_size), "mask": torch.ones(2, 32, dtype=torch.bool)
    },
    "pix2struct": _flattened_patches(True),
    "pix2struct_vision_model": _flattened_patches(False),
    "siglip2": _naflex(True),
    "siglip2_vision_model": _naflex(False),
    "t5gemma2_decoder": _encoded,
    "time_series_transformer": _series(),
    "timesfm": _timesfm,
    "timesfm2_5": _timesfm,
    "udop": _boxes,
    "video_llama_3_vision": _merged,
    "videoprism": _video_and_text,
    "voxtral_realtime_encoder": _mel_first(32),
    "xclip": _frames(True),
    "xclip_vision_model": _frames(False),
}  # fmt: skip
SPECIAL["instructblipvideo_qformer"] = SPECIAL["instructblip_qformer"]
