"""Model types of every kind, patched and compared with eager; the whole table is behind the `slow` marker."""

from __future__ import annotations

import json

import model_table
import pytest
import shrinking

from flashpatch import interface

# Decoders with every kind of mask, encoders, encoder-decoders, vision, sound, several towers, experts, hybrids.
FEW = [
    "afmoe", "albert", "apertus", "audioflamingo3", "beit", "bert", "biogpt", "blip-2", "clip", "cohere2",
    "deepseek_v3", "deepseek_v4", "dinov2", "doge", "electra", "exaone4", "gemma2", "gemma3", "glm4_moe", "gpt2",
    "gpt_oss", "hubert", "idefics2_vision", "jamba", "kosmos_2_5_vision_model", "llama", "llama4", "minicpm3",
    "modernbert", "olmo3", "opt", "phi3", "qwen2_vl", "qwen3", "qwen3_next", "roberta", "siglip", "smollm3", "t5",
    "vit", "whisper",
]  # fmt: skip


def check(row: dict) -> None:
    assert row["outcome"] in ("equal", "declined"), row.get("reason") or row["checks"]


@pytest.mark.parametrize("model_type", FEW)
def test_a_type_is_equal_to_eager(model_type):
    row = model_table.in_a_process(model_type)
    check(row)
    assert row["outcome"] == "equal" and row["dispatched"] > 0
    assert row["checks"].get("generate", "equal").startswith("equal")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", shrinking.dispatching_types())
def test_every_type_is_equal_to_eager_or_says_why_not(model_type):
    row = model_table.in_a_process(model_type)
    if row["outcome"] == "unbuilt":
        pytest.skip(row["reason"])
    check(row)


def test_a_wrong_mask_is_seen(monkeypatch):
    """What the table would say of a seam that drops padding, and of one that drops the softcap."""
    original = interface.mask_of_call
    monkeypatch.setattr(
        interface, "mask_of_call", lambda mask, *rest: (original(mask, *rest)[0]._replace(mask=None), None)
    )
    checks = model_table.in_a_process("llama")["checks"]
    assert checks["plain"].startswith("equal") and checks["left"].startswith("differs")
    monkeypatch.setattr(interface, "mask_of_call", original)
    whole = interface.attention_function

    def uncapped(*args, softcap=None, **kwargs):
        return whole(*args, **kwargs)

    from transformers import AttentionInterface

    AttentionInterface.register(interface.NAME, uncapped)
    try:
        row = model_table.in_a_process("gemma2")
    finally:
        AttentionInterface.register(interface.NAME, whole)
    assert row["checks"]["plain"].startswith("differs")


def test_the_committed_table_has_every_type_and_nothing_wrong():
    table = json.loads(model_table.TABLE.read_text(encoding="utf-8"))
    if table["transformers"] == model_table.transformers.__version__:
        assert list(table["rows"]) == shrinking.dispatching_types()
    assert not [name for name, row in table["rows"].items() if row["outcome"] == "differs"]
    assert all(row.get("reason") for row in table["rows"].values() if row["outcome"] != "equal")
    assert model_table.TABLE.with_suffix(".md").read_text(encoding="utf-8") == model_table.page(table)
