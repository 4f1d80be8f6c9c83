"""Random inputs to try any transformers model with: text, images, sound, as its forward takes them."""

from __future__ import annotations

import inspect

import torch

from .models import ModelError


def make(
    model: torch.nn.Module, *, batch: int = 2, seqlen: int = 128, seed: int = 0, padding: str | None = None
) -> dict[str, torch.Tensor]:
    """Random keyword arguments for one forward: text, images, sound, and decoder tokens, as the model takes them.

    `padding="left"` or `"right"` pads every row but the first, by up to half of it, and adds the attention mask.

    Raises:
        ModelError: where no such inputs are known.
    """
    if padding not in (None, "left", "right"):
        raise ModelError(f'padding is {padding!r}; it must be None, "left" or "right"')
    maker = Inputs(model, batch, seqlen, seed)
    inputs = maker.make(padding)
    if not inputs:
        raise ModelError(
            f"flashpatch knows no inputs for {type(model).__name__}, whose main input is {model.main_input_name!r}; "
            "pass your own"
        )
    return inputs


class Inputs:
    """Makes the inputs of one model, from its config and the names its forward takes."""

    def __init__(self, model, batch: int, seqlen: int, seed: int):
        self.model, self.batch, self.seqlen = model, batch, seqlen
        self.config = model.config
        self.generator = torch.Generator().manual_seed(seed)
        parameter = next(iter(model.parameters()))
        self.device, self.dtype = parameter.device, parameter.dtype
        self.takes = set(inspect.signature(model.forward).parameters)

    def make(self, padding: str | None) -> dict[str, torch.Tensor]:
        inputs = {}
        main = getattr(self.model, "main_input_name", "input_ids")
        if "input_ids" in self.takes:
            inputs["input_ids"] = self.tokens(self.seqlen)
            inputs.update(self.images_in_text(inputs["input_ids"]))
            if padding is not None:
                inputs["attention_mask"] = self.mask(padding)
        beside_text = "pixel_values" in self.takes and self.image_token() is None
        if (beside_text or main in ("pixel_values", "pixel_values_videos")) and "pixel_values" not in inputs:
            inputs.update(self.images())
        elif "grid_thw" in self.takes and not inputs:
            inputs.update(self.patches())
        if main == "input_features":
            inputs["input_features"] = self.spectrogram()
        elif main == "input_values":
            inputs["input_values"] = self.noise(self.batch, 400 + 320 * self.seqlen)
        if getattr(self.config, "is_encoder_decoder", False) and "decoder_input_ids" in self.takes:
            limit = getattr(self.config, "max_target_positions", None) or self.seqlen
            inputs["decoder_input_ids"] = self.tokens(min(self.seqlen, limit))
        return inputs

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def text_config(self):
        try:
            return self.config.get_text_config()
        except ValueError:  # it has two: input_ids are the encoder's
            return self.config.get_text_config(encoder=True)

    def tokens(self, length: int) -> torch.Tensor:
        """Ordinary tokens: none that the config gives a special meaning."""
        text = self.text_config()
        vocabulary = getattr(text, "vocab_size", None) or getattr(self.config, "vocab_size", 0)
        limit = getattr(text, "max_position_embeddings", None)
        if isinstance(limit, int) and 4 < limit < length + 4:
            length = limit - 4
        ids = torch.randint(0, vocabulary, (self.batch, length), generator=self.generator)
        special = sorted(self.special_tokens(vocabulary))
        ordinary = next((token for token in range(vocabulary) if token not in special), 0)
        if special:
            ids[torch.isin(ids, torch.tensor(special))] = ordinary
        return ids.to(self.device)

    def special_tokens(self, vocabulary: int) -> set[int]:
        found = set()
        for config in (self.config, self.text_config()):
            for name, value in config.to_dict().items():
                if name.endswith(("_token_id", "_token_index")):
                    found.update(value if isinstance(value, list) else [value])
        return {token for token in found if isinstance(token, int) and 0 <= token < vocabulary}

    def mask(self, padding: str) -> torch.Tensor:
        length = self.tokens(self.seqlen).shape[1]
        rows = torch.arange(self.batch)[:, None]
        pads = (rows * length // (2 * max(1, self.batch - 1))).clamp(max=length - 1)
        column = torch.arange(length)[None]
        kept = column >= pads if padding == "left" else column < length - pads
        return kept.long().to(self.device)

    def image_token(self) -> int | None:
        for name in ("image_token_id", "image_token_index"):
            token = getattr(self.config, name, None)
            if isinstance(token, int):
                return token
        return None

    def vision_config(self):
        return getattr(self.config, "vision_config", None) or self.config

    def images_in_text(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """One image per row and its placeholders in the text, for models that say how many features it has."""
        token, features = self.image_token(), getattr(self.model, "get_image_features", None)
        if token is None or features is None:
            return {}
        try:
            images = self.images()
            wanted = set(inspect.signature(features).parameters)
            with torch.no_grad():
                result = features(**{name: value for name, value in images.items() if name in wanted})
            length = _feature_count(result) // self.batch
        except Exception:
            # Images take a form this does not know; the text alone is a valid input.
            return {}
        if not 0 < length < ids.shape[1]:
            return {}
        ids[:, 1 : 1 + length] = token
        if "token_type_ids" in self.takes:
            images["token_type_ids"] = (ids == token).long()
        if "mm_token_type_ids" in self.takes:
            images["mm_token_type_ids"] = (ids == token).long()
        return images

    def patches(self) -> dict[str, torch.Tensor]:
        """Images of any size as a list of patches, with the rows and columns of each."""
        vision = self.vision_config()
        channels, patch = self.channels(vision), getattr(vision, "patch_size", None) or 16
        side = 2 * (_first(vision, "spatial_merge_size", "merge_size") or 1)
        width = channels * (_first(vision, "temporal_patch_size", "patch_temporal") or 1) * patch * patch
        grid = torch.tensor([[1, side, side]] * self.batch, device=self.device)
        names = ("pixel_values", "hidden_states")
        name = next((name for name in names if name in self.takes), names[0])
        grid_name = "grid_thw" if "grid_thw" in self.takes else "image_grid_thw"
        return {name: self.noise(self.batch * side * side, width), grid_name: grid}

    def channels(self, vision) -> int:
        found = (getattr(vision, name, None) for name in ("num_channels", "in_channels", "in_chans"))
        return next((count for count in found if isinstance(count, int) and count), 3)

    def images(self) -> dict[str, torch.Tensor]:
        if "image_grid_thw" in self.takes or "grid_thw" in self.takes:
            return self.patches()
        vision = self.vision_config()
        channels = self.channels(vision)
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None)
        if getattr(self.model, "main_input_name", "") == "pixel_values_videos":
            return {"pixel_values_videos": self.noise(self.batch, frames or 2, channels, height, width)}
        if frames and "input_ids" not in self.takes:
            return {"pixel_values": self.noise(self.batch, frames, channels, height, width)}
        return {"pixel_values": self.noise(self.batch, channels, height, width)}

    def spectrogram(self) -> torch.Tensor:
        config = getattr(self.config, "audio_config", None) or self.config
        names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
        bins = _first(config, *names) or _first(getattr(self.config, "encoder_config", None), *names) or 80
        positions = getattr(config, "max_source_positions", None)
        if getattr(config, "num_mel_bins", None) and positions and not hasattr(config, "input_channels"):
            return self.noise(self.batch, bins, 2 * positions)
        return self.noise(self.batch, self.seqlen, bins)


def _first(config, *names: str) -> int | None:
    """The first of these fields that the config has as a number."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _feature_count(result) -> int:
    """How many rows of features `get_image_features` returned, in whichever of its forms."""
    if hasattr(result, "pooler_output") and result.pooler_output is not None:
        result = result.pooler_output
    if isinstance(result, (list, tuple)):
        return sum(_feature_count(part) for part in result)
    return result.numel() // result.shape[-1]
