"""What `apply`, `audit` and `verify` share about models: loading one, and its errors as sentences."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import contextmanager

import click

from .rendering import DECLINED, MISSING, USAGE, Fault


@contextmanager
def translated():
    """The library's named errors, and a GPU that is full, as what a person can act on."""
    import torch

    from flashpatch import model_verification, models
    from flashpatch.problem import DeclinedError

    try:
        yield
    except models.ModelError as error:
        raise Fault(str(error), MISSING if "pip install" in str(error) else USAGE) from None
    except DeclinedError as error:
        raise Fault(str(error), DECLINED) from None
    except model_verification.UnpatchedError as error:
        raise Fault(f"{error}; nothing was verified", DECLINED) from None
    except torch.OutOfMemoryError as error:
        text = " ".join(str(error).split())
        raise Fault(f"{text} Smaller: --batch 1, a shorter --seqlen, or verify --no-backward", MISSING) from None


def quiet() -> None:
    """Keep the log, the bars and the warnings of loading out of the report; what is flashpatch's own is in it."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # read when huggingface_hub is imported
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("transformers", "huggingface_hub", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, message="flashpatch: ")
    warnings.filterwarnings("ignore", category=FutureWarning)


def load(source: str, *, dtype, device, batch, seqlen, padding=None, patched=None, seed=0, **options):
    """The model and the inputs of one forward."""
    import torch

    from flashpatch import dummy_inputs, models

    usable = torch.version.cuda is not None and torch.cuda.is_available()
    device = device or ("cuda" if usable else "cpu")
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        if not usable or index >= torch.cuda.device_count():
            raise Fault(f"torch sees no GPU {device}; leave out --device, or see `flashpatch audit`", MISSING)
    quiet()
    if sys.stderr.isatty():
        click.echo(f"loading {source} ...", err=True)
    model = models.load(source, dtype=dtype, device=device, patched=patched, **options)
    return model, dummy_inputs.make(model, batch=batch, seqlen=seqlen, seed=seed, padding=padding)
