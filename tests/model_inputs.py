"""Inputs for the small model of any transformers type, and the comparisons that need more than one forward."""

from __future__ import annotations

import inspect

import torch
from special_inputs import SPECIAL, width

from flashpatch import models, patcher
from flashpatch.dummy_inputs import Inputs
from flashpatch.model_runs import main_output

CLOSE = 2e-4  # of the largest logit: two fp32 results of the same function


def output_of(result) -> torch.Tensor:
    return main_output(result)[1]


# ---- one forward ----


def inputs_of(model, model_type: str, length: int) -> dict:
    """Keyword arguments for one forward: what `flashpatch verify MODEL` uses, and what else the type must have."""
    maker = Inputs(model, 2, length, 0)
    if model_type in SPECIAL:
        return SPECIAL[model_type](maker)
    inputs = maker.make(None)
    for name, parameter in inspect.signature(model.forward).parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if needed and name not in inputs:
            inputs[name] = NEEDED[name](maker)
    if not inputs:
        raise models.ModelError(f"no inputs known for {type(model).__name__}")
    return inputs


def candidates(model, model_type: str, length: int):
    """Inputs to try, the likeliest first: those of `inputs_of`, its images in the other shapes that models take, its text
    without images, embeddings in place of tokens."""
    inputs = inputs_of(model, model_type, length)
    yield inputs
    images, takes = inputs.get("pixel_values"), inspect.signature(model.forward).parameters
    if model_type in SPECIAL:
        return
    if images is None:
        images = torch.empty(0)
    if images.dim() == 4:
        yield {**inputs, "pixel_values": images[:, None]}  # one image of several
        yield {**inputs, "pixel_values": images[:, None].expand(-1, 2, -1, -1, -1)}  # a pair of images, or a video
    if images.dim() == 2:
        vision = Inputs(model, 2, length, 0).vision_config()
        patch = getattr(vision, "patch_size", None)
        if isinstance(patch, int) and images.shape[1] % (patch * patch) == 0:
            squares = images.reshape(images.shape[0], -1, patch, patch)
            yield {**inputs, "pixel_values": squares}
            yield {**inputs, "pixel_values": squares[None]}
    if "input_ids" in inputs and images.numel():
        yield {"input_ids": Inputs(model, 2, length, 0).tokens(length)}
    if "inputs_embeds" in takes:
        maker = Inputs(model, 2, length, 0)
        yield {"inputs_embeds": maker.noise(2, length, width(maker))}


def _states(*names: str, length: int = 16):
    return lambda maker: maker.noise(maker.batch, length, width(maker, *names))


def _ones(length: int = 16, dtype=torch.long):
    return lambda maker: torch.ones(maker.batch, length, dtype=dtype)


def _image(maker):
    return maker.images()["pixel_values"]


def _spectrogram_mask(maker):
    features = maker.spectrogram()
    return torch.ones(features.shape[0], max(features.shape[1:]), dtype=torch.long)


# a parameter that a forward insists on -> what it gets
NEEDED = {
    "reference_points": lambda maker: torch.rand(maker.batch, 8, 4, generator=maker.generator),
    "hidden_states": _states(),
    "inputs_embeds": _states(),
    "context": _states(),
    "query_embeds": _states(length=8),
    "noise_embeds": _states(),
    "context_hidden_states": _states(),
    "vision_features": _states(),
    "text_features": _states(length=8),
    "vision_pos_encoding": _states(),
    "encoder_hidden_states": _states("encoder_hidden_size", "cross_attention_hidden_size"),
    "attention_mask": _ones(),
    "input_features_mask": _spectrogram_mask,
    "image": _image,
    "pixel_values": _image,
    "input_ids": lambda maker: maker.tokens(maker.seqlen),
    "qformer_input_ids": lambda maker: maker.tokens(8),
    "input_values": lambda maker: maker.noise(maker.batch, 1, 1920),
    "input_features": lambda maker: maker.spectrogram(),
}


# ---- variants of it ----


def variants(model, inputs: dict):
    """(name, inputs): as they are, and padded on each side where they are text with room for a mask."""
    yield "plain", inputs
    tokens = inputs.get("input_ids")
    takes = inspect.signature(model.forward).parameters
    if tokens is None or "attention_mask" not in takes or "attention_mask" in inputs or tokens.dim() != 2:
        return
    if hasattr(model.config, "num_codebooks"):
        return  # several rows of tokens per sequence
    special = Inputs(model, 1, 1, 0).special_tokens(1 << 30)
    for side in ("left", "right"):
        mask = torch.ones_like(tokens)
        pads = slice(0, 3) if side == "left" else slice(tokens.shape[1] - 3, None)
        if set(tokens[1, pads].tolist()) & special:
            continue  # an image's place cannot be padding
        mask[1, pads] = 0
        tokens = inputs["input_ids"].clone()
        tokens[1, pads] = getattr(Inputs(model, 1, 1, 0).text_config(), "pad_token_id", None) or 0
        padded = {**inputs, "input_ids": tokens, "attention_mask": mask}
        written = inputs.get("decoder_input_ids", tokens[:0])
        if "decoder_attention_mask" in takes and side == "right" and len(written) == len(tokens):
            padded["decoder_attention_mask"] = torch.ones_like(written)
            padded["decoder_attention_mask"][1, -2:] = 0
        if hasattr(model, "get_text_features"):
            # pooled at the first end-of-text token (or the largest one): let it be the last real token
            text = model.config.get_text_config()
            end = getattr(text, "eos_token_id", None)
            end = end if isinstance(end, int) and end != 2 else text.vocab_size - 1
            last = mask.cumsum(1).argmax(1)
            padded["input_ids"] = tokens.masked_fill(tokens == end, 3).scatter(1, last[:, None], end)
        yield side, padded


# ---- packed documents and generation ----


def is_decoder(model, inputs: dict) -> bool:
    return (
        set(inputs) == {"input_ids"}
        and type(model).__name__.endswith(("CausalLM", "LMHeadModel", "ForConditionalGeneration"))
        and not model.config.is_encoder_decoder
    )


def packed(model, inputs: dict) -> str | None:
    """Two documents in one row, told apart by their positions, against the two on their own."""
    takes = inspect.signature(model.forward).parameters
    if not is_decoder(model, inputs) or "position_ids" not in takes:
        return None
    row = inputs["input_ids"][:1]
    cut = row.shape[1] // 2 - 1
    positions = torch.cat([torch.arange(cut), torch.arange(row.shape[1] - cut)])[None]
    packed_inputs = {"input_ids": row, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        apart = torch.cat(
            [output_of(model(input_ids=part, use_cache=False)) for part in (row[:, :cut], row[:, cut:])], 1
        )
        together = output_of(model(**packed_inputs))
    found = _patched(model, lambda: output_of(model(**packed_inputs)))
    scale = float(apart.abs().max())
    ours, eagers = (float((x - apart).abs().max()) / scale for x in (found, together))
    if ours <= CLOSE:
        return "equal" if eagers <= CLOSE else "equal to separate runs; eager mixes the documents"
    same = float((found - together).abs().max()) / scale
    if same <= CLOSE:
        return "equal to eager; both mix the documents"
    return f"differs: from separate runs by {ours:.1e} (eager: {eagers:.1e}), from eager by {same:.1e}"


def generated(model, inputs: dict) -> str | None:
    """Greedy tokens, patched and eager. A token may differ only where eager's two best are closer than rounding."""
    if not getattr(model, "can_generate", lambda: False)() or type(model).__name__.endswith("Model"):
        return None
    prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    if "input_ids" in prompt and set(prompt) == {"input_ids"}:
        mask = torch.ones_like(prompt["input_ids"])
        mask[0, :3] = 0
        prompt["attention_mask"] = mask
    if model.config.model_type == "pop2piano":
        prompt = _of_a_composer(model)
    options = {
        "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1, "output_logits": True,
        "return_dict_in_generate": True, **_start(model),
    }  # fmt: skip
    with torch.no_grad():
        expected = model.generate(**prompt, **options)
    found = _patched(model, lambda: model.generate(**prompt, **options))
    if "logits" not in expected:  # a transducer keeps none
        return (
            f"equal: {expected.sequences[0].numel()} tokens"
            if torch.equal(found.sequences, expected.sequences)
            else "differs: tokens"
        )
    scale = max(float(step[step.isfinite()].abs().max()) for step in expected.logits)
    for index, (ours, eagers) in enumerate(zip(found.logits, expected.logits, strict=True)):
        both = ours.isfinite() & eagers.isfinite()
        distance = float((ours - eagers)[both].abs().max()) / scale
        if distance > CLOSE:
            return f"differs: step {index} by {distance:.1e}"
        if not torch.equal(ours.argmax(-1), eagers.argmax(-1)):
            return f"equal up to a tie at step {index}"
    return f"equal: {len(expected.logits)} steps"


def _of_a_composer(model) -> dict:
    """What Pop2Piano generates from: sound that is features already, and a composer whom its generation config knows."""
    composers = {f"composer{number + 1}": number for number in range(model.config.composer_vocab_size)}
    model.generation_config.composer_to_feature_token = composers
    return {"input_features": Inputs(model, 2, 12, 0).noise(2, 12, model.config.d_model)}


def _start(model) -> dict:
    """The token that a decoder starts from where the model does not say: the padding's, as T5 does it."""
    config, known = model.config, model.generation_config
    if not config.is_encoder_decoder or any(
        getattr(known, name) is not None for name in ("decoder_start_token_id", "bos_token_id")
    ):
        return {}
    start = getattr(config, "decoder_start_token_id", None)
    return {"decoder_start_token_id": config.pad_token_id if start is None else start}


def _patched(model, run):
    with patcher.apply(model), torch.no_grad():
        try:
            return run()
        except Exception as failure:
            failure.patched = True
            raise
