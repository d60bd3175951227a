"""The program that compares BAGEL's attentions, with small shapes on a CPU."""

import json

import pytest
import torch
from attention_speed import AttentionCase, Measured, compare_attention, compared, mixed_pack


def test_both_attentions_agree(tmp_path):
    rows = compare_attention(AttentionCase(tiny=True), tmp_path)
    assert [row["what"].split(",")[0] for row in rows][:3] == ["pack", "block mask", "attention"]
    assert all(row["difference"] < 1e-4 for row in rows[2:])
    assert json.loads((tmp_path / "attention.json").read_text())["device"] == "cpu"


def test_a_pack_holds_several_samples():
    pack = mixed_pack(AttentionCase(tiny=True))
    assert sum(pack["sample_lens"]) >= 400 and len(pack["sample_lens"]) > 3


def test_a_difference_is_refused():
    one, other = (Measured([torch.full((4,), value)], 1.0, 0.0) for value in (1.0, 1.001))
    assert compared("x", one, other, 1e-2)["difference"] == pytest.approx(1e-3, rel=1e-2)
    with pytest.raises(AssertionError, match="x: 1.0e-03 apart"):
        compared("x", one, other, 1e-4)
