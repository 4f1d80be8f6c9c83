"""Loading transformers models by hub id or folder, saving patched ones, and inputs to try any of them with.

Weights come from safetensors or GGUF; pickles and a model's own Python code only when asked for.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from pathlib import Path

import torch

from . import interface, patcher

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# What belongs to a model besides config and weights: tokenizer, processor and generation settings.
_COMPANIONS = (".json", ".txt", ".model", ".jinja")


class ModelError(ValueError):
    """A model cannot be loaded or fed; the message says what to type instead."""


# ---- loading ----


def load(
    source: str | os.PathLike,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    random_weights: bool = False,
    patched: bool | None = None,
) -> torch.nn.Module:
    """A transformers model in eval mode, from a hub id or a folder.

    Args:
        source: a folder with config.json and safetensors (or GGUF) weights, or a hub id such as "org/name".
        dtype: of the weights; None keeps what the checkpoint has.
        gguf_file: load the weights from this GGUF file of `source`.
        trust_remote_code: run Python code that the model brings along.
        allow_pickle: accept weights in PyTorch pickles, which can run any code when loaded.
        random_weights: build the model from its config alone.
        patched: apply flashpatch. None: if the folder was written by `save` (`flashpatch apply --save`).

    Raises:
        ModelError: naming what is missing and what to type.
    """
    reason = interface.unavailable()
    if reason is not None:
        raise ModelError(reason)
    source = os.fspath(source)
    dtype = _dtype(dtype)
    _check_source(source, gguf_file, allow_pickle, random_weights)
    config = _config(source, gguf_file, revision, trust_remote_code)
    cls = _model_class(config, source, trust_remote_code)
    if random_weights:
        model = build_random(config, dtype=dtype, device=device, cls=cls)
    else:
        model = _weights(cls, source, config, dtype, gguf_file, revision, trust_remote_code, allow_pickle).to(device)
    model.eval()
    if patched or (patched is None and getattr(config, "flashpatch", None)):
        patcher.apply(model)
    return model


def build_random(config, *, dtype=None, device="cpu", cls=None, seed: int = 0) -> torch.nn.Module:
    """A model of this config with random weights, the same ones for the same seed."""
    cls = cls or _model_class(config, str(config.name_or_path or config.model_type), False)
    dtype = _dtype(dtype) or getattr(config, "dtype", None) or torch.float32
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        build = getattr(cls, "_from_config", None) or cls.from_config
        return build(config, dtype=dtype).eval()


def uninitialised():
    """Inside this context models are built without filling or tying their weights."""
    from transformers.initialization import no_init_weights

    return no_init_weights()


def _dtype(dtype) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; one of {', '.join(_DTYPES)} is needed")
    return getattr(torch, name)


def _check_source(source: str, gguf_file: str | None, allow_pickle: bool, random_weights: bool) -> None:
    """What can be said about a folder before transformers looks at it."""
    folder = Path(source).expanduser()
    if folder.is_file():
        hint = (
            f"--gguf-file {folder.name} with the folder {folder.parent}" if folder.suffix == ".gguf" else "its folder"
        )
        raise ModelError(f"{source} is a file; give {hint}")
    if not folder.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") > 1 or (os.sep != "/" and os.sep in source):
            raise ModelError(f"the folder {source} does not exist")
        return
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            found = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
            raise ModelError(f"{source} has no file {gguf_file}; GGUF files there: {found}")
        return
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; for its GGUF weights add --gguf-file {ggufs[0]}" if ggufs else ""
        raise ModelError(f"{source} has no config.json, so it is not a saved transformers model{hint}")
    if random_weights or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        raise ModelError(
            f"{source} has no *.safetensors weights; --random-weights builds the model from its config alone"
        )
    if not allow_pickle:
        raise ModelError(
            f"{source} has its weights only as a pickle ({pickles[0]}), which can run any code when loaded. "
            "Convert it (model.save_pretrained(folder) writes safetensors), or, if you trust it, pass allow_pickle=True (--allow-pickle)"
        )


def _config(source: str, gguf_file, revision, trust_remote_code: bool):
    from transformers import AutoConfig

    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code, **options)
    except Exception as error:
        raise _explained(source, error, trust_remote_code) from error


def _model_class(config, source: str, trust_remote_code: bool):
    """The class named in the config, else the first auto class that knows the model type."""
    import transformers

    if trust_remote_code and getattr(config, "auto_map", None):
        for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
            if name in config.auto_map:
                return getattr(transformers, name)
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if cls is not None:
            return cls
    for name in (
        "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq",
        "AutoModel",
    ):  # fmt: skip
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    own = getattr(config, "auto_map", None)
    code = "; it brings its own code, which --trust-remote-code runs" if own else ""
    raise ModelError(
        f"{source}: transformers {transformers.__version__} has no model class for type {config.model_type!r}{code}"
    )


def _weights(cls, source, config, dtype, gguf_file, revision, trust_remote_code: bool, allow_pickle: bool):
    options = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": None if allow_pickle else True}
    if cls.__name__.startswith("Auto"):
        options["trust_remote_code"] = trust_remote_code
    try:
        return cls.from_pretrained(source, config=config, dtype=dtype or "auto", revision=revision, **options)
    except Exception as error:
        raise _explained(source, error, trust_remote_code) from error


def _explained(source: str, error: Exception, trusted: bool) -> ModelError:
    """transformers' error as one sentence and what to type."""
    text = " ".join(str(error).split())
    causes = {type(cause).__name__ for cause in _chain(error)}
    if "trust_remote_code" in text and not trusted:
        return ModelError(f"{source} needs Python code of its own; if you trust it, add --trust-remote-code")
    if isinstance(error, ImportError) and "gguf" in text.lower():
        return ModelError(
            f"{source}: reading GGUF files needs the packages gguf and accelerate: pip install 'flashpatch[gguf]'"
        )
    if "GatedRepoError" in causes:
        return ModelError(f"{source} is gated on the hub: accept its terms there, then log in with: hf auth login")
    if "RepositoryNotFoundError" in causes or "is not a local folder and is not a valid model" in text:
        return ModelError(
            f"the hub has no model {source!r} (or it is private: hf auth login), and there is no folder of that name"
        )
    if Path(source).is_dir():
        if "should have a `model_type` key" in text or "Unrecognized model" in text:
            return ModelError(f"{source}/config.json names no model type, so it is not a transformers model")
        return ModelError(f"{source} cannot be loaded: {text[:500]}")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return ModelError(
            f"{source} is not in the local cache and HF_HUB_OFFLINE forbids fetching it; unset it, or give a folder"
        )
    if causes & {"ConnectError", "ConnectionError", "LocalEntryNotFoundError", "ConnectTimeout", "ProxyError"}:
        return ModelError(f"{source} is not in the local cache and the hub cannot be reached; give a folder instead")
    if "safetensors" in text:
        return ModelError(
            f"{source} has no safetensors weights; pickles can run any code when loaded. "
            "If you trust it, pass allow_pickle=True (--allow-pickle); --random-weights takes its config alone"
        )
    return ModelError(f"{source} cannot be loaded: {text[:500]}")


def _chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# ---- saving ----


def save(model: torch.nn.Module, folder: str | os.PathLike, *, source: str | os.PathLike | None = None) -> Path:
    """Write `model` with a `flashpatch` entry in its config.json: `flashpatch.load(folder)` comes up patched.

    Everybody else's `from_pretrained(folder)` works as before and ignores the entry. Tokenizer and processor files are
    copied from `source`, by default the folder the model was loaded from.
    """
    from . import __version__

    folder = Path(folder)
    if folder.is_file():
        raise ModelError(f"{folder} is a file; a folder is needed")
    source = Path(os.fspath(source or getattr(model, "name_or_path", "") or ""))
    if source.is_dir() and source.resolve() == folder.resolve():
        raise ModelError(f"{folder} is the folder the model came from, and saving would overwrite it; name another one")
    model.save_pretrained(folder)
    if source.is_dir():
        for path in source.iterdir():
            if path.suffix in _COMPANIONS and not path.name.endswith(".index.json"):
                target = folder / path.name
                if path.is_file() and not target.exists():
                    shutil.copyfile(path, target)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["flashpatch"] = {"version": __version__, "attn_implementation": interface.NAME}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


# ---- inputs to try a model with ----


def dummy_inputs(
    model: torch.nn.Module, *, batch: int = 2, seqlen: int = 128, seed: int = 0, padding: str | None = None
) -> dict[str, torch.Tensor]:
    """Random keyword arguments for one forward: text, images, sound, and decoder tokens, as the model takes them.

    `padding="left"` or `"right"` pads every row but the first, by up to half of it, and adds the attention mask.

    Raises:
        ModelError: where no such inputs are known.
    """
    if padding not in (None, "left", "right"):
        raise ModelError(f'padding is {padding!r}; it must be None, "left" or "right"')
    maker = _Inputs(model, batch, seqlen, seed)
    inputs = maker.make(padding)
    if not inputs:
        raise ModelError(
            f"flashpatch knows no inputs for {type(model).__name__}, whose main input is {model.main_input_name!r}; "
            "pass your own"
        )
    return inputs


class _Inputs:
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
