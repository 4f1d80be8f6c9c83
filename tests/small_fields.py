"""What the small configs of some types need beside the general rules of `shrinking`: field -> value, parts as dicts.

A part given with `model_type` is of that type, whatever the default says; a type's entry here counts wherever it is a part.
"""

from __future__ import annotations

VOCABULARY = 160
WIDTH, HEADS, LAYERS = 64, 4, 2
DEFAULT = object()  # leave this field as it is

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
    **{
        name: {"decoder_in_channels": [WIDTH] * 3}
        for name in ("d_fine", "deimv2", "pp_doclayout_v2", "pp_doclayout_v3", "rt_detr", "rt_detr_v2")
    },
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
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": WIDTH,
    },
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
    "pe_video_encoder": {"vision_config": _TIMM},
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
