"""MaskSpec against transformers' own eager masks: what it means, what it lowers to, and how it acts as a tensor."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import AttentionMaskInterface, LlamaConfig, masking_utils
from transformers.cache_utils import DynamicCache, StaticCache

from flashpatch import interface, masks
from flashpatch.masks import MaskSpec

interface.register()


def config(**settings):
    return LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=1, head_dim=8,
        sliding_window=4, attention_chunk_size=3, **settings,
    )  # fmt: skip


def both(builder, *, length=9, batch=2, **arguments) -> tuple[MaskSpec, torch.Tensor]:
    """The same mask as ours and as eager's tensor."""
    made = []
    for name in (interface.NAME, "eager"):
        settings = config()
        settings._attn_implementation = name
        made.append(builder(config=settings, inputs_embeds=torch.zeros(batch, length, 16), **arguments))
    spec, eager = made
    assert isinstance(spec, MaskSpec), f"a mask function of ours returned {type(spec).__name__}"
    if eager is None:  # eager skips bidirectional masks that hide nothing
        eager = torch.zeros(spec.shape)
    return spec, eager


def visible_as_lowered(spec: MaskSpec, k_length: int) -> torch.Tensor:
    """Who sees whom by the words of Call alone, [batch, 1, q, k]."""
    lowered = spec.lower(k_length)
    key = torch.arange(lowered.key_length)
    diagonal = torch.arange(spec.q_length)[:, None] + lowered.key_length - spec.q_length
    seen = torch.ones(spec.batch_size, 1, spec.q_length, lowered.key_length, dtype=torch.bool)
    if lowered.window_left >= 0:
        seen &= key >= diagonal - lowered.window_left
    if lowered.window_right >= 0:
        seen &= key <= diagonal + lowered.window_right
    if lowered.key_ranges is not None:
        assert lowered.key_ranges.dtype == torch.int32
        seen &= (key >= lowered.key_ranges[:, None, :, :1]) & (key < lowered.key_ranges[:, None, :, 1:])
    if lowered.mask is not None:
        assert lowered.mask.dtype == torch.bool
        seen &= lowered.mask
    return torch.nn.functional.pad(seen, (0, k_length - lowered.key_length))


def dynamic_cache(tokens: int) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, tokens, 8), torch.zeros(2, 1, tokens, 8), 0)
    return cache


def static_cache(tokens: int) -> StaticCache:
    cache = StaticCache(config=LlamaConfig(num_hidden_layers=1, head_dim=8), max_cache_len=16)
    if tokens:
        cache.update(torch.zeros(2, 1, tokens, 8), torch.zeros(2, 1, tokens, 8), 0)
    return cache


LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 9])
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0], [1] * 9])
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
IMAGES = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1], [0, 0, -1, -1, -1, -1, 1, 1, 1]])
DOCUMENTS = torch.tensor([[-1, -1, 5, 5, 5, 2, 2, 2, 2], [0] * 9])
SPLIT = torch.tensor([[0, 0, -1, -1, 0, 0, -1, 0, -1], [-1] * 9])

causal = masking_utils.create_causal_mask
window = masking_utils.create_sliding_window_causal_mask
chunked = masking_utils.create_chunked_causal_mask
everything = masking_utils.create_bidirectional_mask
near = masking_utils.create_bidirectional_sliding_window_mask
none = {"attention_mask": None, "past_key_values": None}

CASES = {
    "causal": (causal, none, {"causal"}),
    "causal-left-padding": (causal, {**none, "attention_mask": LEFT}, {"causal", "padding"}),
    "causal-right-padding": (causal, {**none, "attention_mask": RIGHT}, {"causal", "padding"}),
    "causal-holes": (causal, {**none, "attention_mask": HOLES}, {"causal", "padding"}),
    "causal-all-ones": (causal, {**none, "attention_mask": torch.ones(2, 9)}, {"causal"}),
    "window": (window, none, {"causal", "window"}),
    "window-left-padding": (window, {**none, "attention_mask": LEFT}, {"causal", "window", "padding"}),
    "chunk": (chunked, none, {"causal", "chunk"}),
    "chunk-left-padding": (chunked, {**none, "attention_mask": LEFT}, {"causal", "chunk", "padding"}),
    "packed": (causal, {**none, "position_ids": PACKED}, {"causal", "packed"}),
    "packed-window": (window, {**none, "position_ids": PACKED}, {"causal", "window", "packed"}),
    "packed-chunk": (chunked, {**none, "position_ids": PACKED}, {"causal", "chunk", "packed"}),
    "images": (causal, {**none, "block_sequence_ids": IMAGES}, {"union"}),
    "images-left-padding": (
        causal, {**none, "block_sequence_ids": IMAGES, "attention_mask": LEFT}, {"union", "padding"}),
    "images-window": (window, {**none, "block_sequence_ids": IMAGES}, {"union"}),
    "images-in-window": (
        causal,
        {**none, "or_mask_function": masking_utils.blockwise_overlay(IMAGES),
         "and_mask_function": masking_utils.sliding_window_overlay(4)},
        {"union", "window"},
    ),
    "split-image-stays-dense": (causal, {**none, "block_sequence_ids": SPLIT}, {"unrecognised"}),
    "unknown-function-stays-dense": (
        causal, {**none, "and_mask_function": lambda b, h, q, k: (k % 2 == 0) | (k == q)}, {"causal", "unrecognised"}),
    "bidirectional": (everything, {"attention_mask": None}, set()),
    "bidirectional-padding": (everything, {"attention_mask": RIGHT}, {"padding"}),
    "bidirectional-window": (near, {"attention_mask": None}, {"window"}),
    "cross": (everything, {"attention_mask": None, "encoder_hidden_states": torch.zeros(2, 5, 16)}, set()),
    "user-documents-not-neighbours": (
        everything,
        {"attention_mask": None, "and_mask_function": masking_utils.packed_sequence_mask_function(SPLIT)},
        {"unrecognised"},
    ),
    "user-documents": (
        everything,
        {"attention_mask": None, "and_mask_function": masking_utils.packed_sequence_mask_function(DOCUMENTS)},
        {"packed"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_meaning_equals_eager(case):
    builder, arguments, words = CASES[case]
    spec, eager = both(builder, **arguments)
    assert spec.shape == eager.shape
    assert torch.equal(spec.visible(), eager == 0)
    assert torch.equal(visible_as_lowered(spec, eager.shape[-1]), eager == 0)
    assert torch.equal(spec + torch.zeros(()), eager)
    assert set(spec.words) == words


@pytest.mark.parametrize("builder", [causal, window, chunked], ids=["causal", "window", "chunk"])
@pytest.mark.parametrize("q_length", [1, 2, 5])
@pytest.mark.parametrize("past", [0, 1, 7])
@pytest.mark.parametrize("make", [dynamic_cache, static_cache], ids=["dynamic", "static"])
def test_meaning_equals_eager_with_a_cache(make, past, q_length, builder):
    if make is dynamic_cache and past == 0:
        pytest.skip("an empty dynamic cache is the plain case")
    padding = torch.ones(2, past + q_length)
    padding[0, 0] = 0
    for mask in (None, padding):
        cache = make(past)
        spec, eager = both(builder, length=q_length, attention_mask=mask, past_key_values=cache)
        assert torch.equal(visible_as_lowered(spec, eager.shape[-1]), eager == 0)
        if make is static_cache:
            # The forward advances the cache's length in place; a mask made before it must not move along.
            cache.update(torch.zeros(2, 1, q_length, 8), torch.zeros(2, 1, q_length, 8), 0)
            assert torch.equal(spec.visible(), eager == 0)


def test_plain_masks_need_no_tensor():
    """Causal, window and an empty static cache's top-left prefill are window arithmetic on fewer keys."""
    spec, _ = both(causal, **none)
    assert spec.lower(9) == (9, -1, 0, None, None)
    spec, _ = both(window, **none)
    assert spec.lower(9) == (9, 3, 0, None, None)
    spec, _ = both(causal, length=5, attention_mask=None, past_key_values=static_cache(0))
    assert spec.lower(16) == (5, -1, 0, None, None)


def test_padding_stays_one_row_per_batch():
    spec, _ = both(causal, **{**none, "attention_mask": LEFT})
    assert spec.lower(9).mask.shape == (2, 1, 1, 9)


def test_rows_far_beyond_the_keys_see_nothing():
    spec = MaskSpec(1, 3, 4, torch.float32, torch.device("cpu"), 1, 0, 20, None, None)
    assert not visible_as_lowered(spec, 4).any()
    spec = MaskSpec(1, 3, 4, torch.float32, torch.device("cpu"), masks.UNLIMITED, 0, -9, None, None)
    assert not visible_as_lowered(spec, 4).any()


def test_a_mask_is_recovered_once_and_passed_through():
    spec, _ = both(causal, **none)
    settings = config()
    settings._attn_implementation = interface.NAME
    again = causal(config=settings, inputs_embeds=torch.zeros(2, 9, 16), attention_mask=spec, past_key_values=None)
    assert again is spec


def test_it_acts_as_eagers_tensor():
    spec, eager = both(window, **{**none, "attention_mask": LEFT})
    other = torch.randn(2, 3, 9, 9)
    assert torch.equal(other + spec, other + eager)
    assert torch.equal(spec + other, eager + other)
    assert torch.equal(other.masked_fill(spec != 0, -1.0), other.masked_fill(eager != 0, -1.0))
    assert torch.equal(torch.cat([spec, eager], -1), torch.cat([eager, eager], -1))
    assert torch.equal(spec[:, 0], eager[:, 0])
    assert torch.equal(spec.expand(2, 3, 9, 9), eager.expand(2, 3, 9, 9))
    assert torch.equal(spec.to(torch.bool), eager.to(torch.bool))
    assert (spec.dtype, spec.device, spec.ndim, spec.dim(), spec.size(-1), len(spec)) == (
        torch.float32, torch.device("cpu"), 4, 4, 9, 2,
    )  # fmt: skip
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = spec.no_such_thing


def test_slicing_columns_keeps_the_meaning():
    spec, eager = both(window, **{**none, "attention_mask": LEFT})
    sliced = spec[:, :, :, :6]
    assert isinstance(sliced, MaskSpec)
    assert torch.equal(visible_as_lowered(sliced, 6), eager[..., :6] == 0)
    assert spec[:, :, :, :20] is spec


def test_other_dtypes_and_devices():
    spec, _ = both(causal, **{**none, "attention_mask": LEFT})
    half = spec.to(torch.bfloat16)
    assert isinstance(half, MaskSpec) and half.materialise().min() == torch.finfo(torch.bfloat16).min
    moved = spec.to("meta")
    assert moved is spec.to(torch.device("meta")) and moved.lower(9).mask.device.type == "meta"
    assert spec.to("cpu") is spec


def test_copies_mean_the_same():
    spec, eager = both(window, **{**none, "attention_mask": LEFT})
    for twin in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert torch.equal(twin.materialise(), eager)


def test_document_ranges():
    offsets = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    ranges = masks.document_ranges(offsets, offsets, 11)
    assert ranges[0].tolist() == [[0, 4]] * 4 + [[4, 6]] * 2 + [[6, 9]] * 3 + [[9, 9]] * 2


def test_position_ranges():
    assert masks.position_ranges(torch.arange(5)[None]) is None
    assert masks.position_ranges(torch.arange(3, 8)[None]) is None
    assert masks.position_ranges(PACKED)[0].tolist() == [[0, 4]] * 4 + [[4, 6]] * 2 + [[6, 9]] * 3


def test_mask_and_attention_are_registered_under_one_name_without_flash():
    from transformers import AttentionInterface

    assert "flash" not in interface.NAME and "sdpa" not in interface.NAME and "/" not in interface.NAME
    assert AttentionInterface()[interface.NAME] is interface.attention_function
    assert AttentionMaskInterface()[interface.NAME] is interface.mask_function
