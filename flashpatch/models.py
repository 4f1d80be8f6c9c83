"""Loading transformers models by hub id or folder, and saving patched ones.

Weights come from safetensors or GGUF; pickles and a model's own Python code only when asked for.
"""

from __future__ import annotations

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
            f"{source}: reading GGUF files needs the packages gguf and accelerate: pip install 'gguf>=0.10' 'accelerate>=1.0'"
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
