"""Running a model under one attention or another, in its own dtype or a wider one, and hearing what it computes."""

from __future__ import annotations

import contextlib
import math
from collections import Counter

import torch
from torch.overrides import TorchFunctionMode

from . import attention_modules

Observation = dict  # (kind, name) -> tensor on non-padding tokens


def observe(model, inputs: dict, modules, backward: bool, seed: int, largest: dict[str, float]) -> Observation:
    """One forward (and backward): the output, each attention module's outputs, each parameter's gradient; and in `largest`
    the largest absolute number each attention module was given."""
    dtype = next(iter(model.parameters())).dtype
    inputs = {key: _cast(value, dtype) for key, value in inputs.items()}
    seen: Observation = {}
    calls: Counter = Counter()

    def listen(path: str):
        def hook(module, arguments, output):
            output = output[0] if isinstance(output, (tuple, list)) else output
            calls[path] += 1
            label = path if calls[path] == 1 else f"{path} (call {calls[path]})"  # layers may share one module
            seen["attention", label] = _without_padding(output.detach(), inputs, "attention_mask")

        return hook

    def measure(path: str):
        def hook(module, arguments, keywords):
            given = [
                t for t in (*arguments, *keywords.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()
            ]
            if given and given[0].numel():
                found = float(given[0].detach().abs().max())
                largest[path] = max(largest.get(path, 0.0), math.inf if math.isnan(found) else found)

        return hook

    handles = [module.register_forward_hook(listen(path)) for path, module in modules]
    handles += [module.register_forward_pre_hook(measure(path), with_kwargs=True) for path, module in modules]
    try:
        with torch.set_grad_enabled(backward):
            label, output = main_output(model(**inputs))
    finally:
        for handle in handles:
            handle.remove()
    mask = "decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask"
    output = _without_padding(output, inputs, mask)
    seen["logits", label] = output.detach()
    if backward:
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
        parameters = {key: value for key, value in model.named_parameters() if value.requires_grad}
        loss = (output * direction).sum() / max(output.shape[0], 1)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        seen.update({("gradient", key): g for key, g in zip(parameters, gradients, strict=True) if g is not None})
    return seen


def _cast(value, dtype: torch.dtype):
    """An input in another dtype where it is made of floating-point numbers, be it a list of tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def main_output(output) -> tuple[str, torch.Tensor]:
    """What a model computes: its logits if it has any, else its first floating-point tensor, be it in a tuple of them."""
    items = [(str(key), value) for key, value in (output.items() if hasattr(output, "items") else enumerate(output))]
    items += [
        (f"{key}[{index}]", part)
        for key, value in items
        if isinstance(value, (tuple, list))
        for index, part in enumerate(value)
    ]
    tensors = {key: value for key, value in items if isinstance(value, torch.Tensor) and value.is_floating_point()}
    if not tensors:
        raise ValueError("the model returns no floating-point tensor to compare")
    label = next((key for key in ("logits", "last_hidden_state") if key in tensors), next(iter(tensors)))
    return label, tensors[label]


def _without_padding(tensor: torch.Tensor, inputs: dict, name: str) -> torch.Tensor:
    """The rows of real tokens, [tokens, ...], where the tensor has one row per token; otherwise the tensor."""
    mask = inputs.get(name)
    if mask is not None and mask.dim() == 2 and tensor.shape[:2] == mask.shape:
        return tensor[mask.bool()]
    return tensor


@contextlib.contextmanager
def implementation(model, name: str):
    """The model with another of transformers' attention implementations, then with its own again.

    Experts are computed one by one: torch's grouped products, the default, take no fp64.
    """
    names = ("_attn_implementation_internal", "_experts_implementation_internal")
    before = [
        (config, field, getattr(config, field))
        for config in attention_modules.configs_of(model)
        for field in names
        if hasattr(config, field)
    ]
    try:
        model.set_attn_implementation(name)
        for config, field, _ in before:
            if field == names[1]:
                setattr(config, field, "eager")
        yield
    finally:
        for config, field, implementation in before:
            setattr(config, field, implementation)


@contextlib.contextmanager
def upcast(model, dtype: torch.dtype):
    """The model's floating-point parameters and buffers in a wider dtype, then the very same tensors again."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    narrow = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, data in zip(tensors, narrow, strict=True):
            tensor.data = data


@contextlib.contextmanager
def jittered(model):
    """The model's floating-point parameters with other last bits, then the very same tensors again."""
    generator = torch.Generator().manual_seed(0)
    tensors = [tensor for tensor in model.parameters() if tensor.is_floating_point()]
    exact = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            noise = torch.rand(tensor.shape, generator=generator).to(tensor.device) * 2 - 1
            tensor.data = tensor.data * (1 + 4 * torch.finfo(tensor.dtype).eps * noise).to(tensor.dtype)
        yield
    finally:
        for tensor, data in zip(tensors, exact, strict=True):
            tensor.data = data


@contextlib.contextmanager
def rounded_anew(modules, seed: int):
    """Every attention module's output, and the gradient that comes back to it, off by up to one rounding of its dtype: what
    another right attention might have put there."""
    generator = torch.Generator().manual_seed(seed)

    def hook(module, arguments, output):
        first = output[0] if isinstance(output, (tuple, list)) else output
        noise = torch.rand(first.shape, generator=generator).to(first.device) * 2 - 1
        moved = first * (1 + torch.finfo(first.dtype).eps * noise).to(first.dtype)
        return type(output)((moved, *output[1:])) if isinstance(output, (tuple, list)) else moved

    handles = [module.register_forward_hook(hook) for _, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class WideSoftmax(TorchFunctionMode):
    """Models ask for their softmax in fp32 by name; a yardstick in fp64 has it in fp64, where the mask's lowest number
    is a number and not -inf."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _SOFTMAXES and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


_SOFTMAXES = {torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax}


@contextlib.contextmanager
def highest_precision():
    """fp32 means fp32, not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
