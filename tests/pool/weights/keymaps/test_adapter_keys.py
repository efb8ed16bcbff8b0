"""Every end of a LoRA file's keys is told from every other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelpool.pool.weights.keymaps.adapter_keys import PARTS, looks_like_lora, normalized_keys, split_key

SPLITS = {
    "lora_unet_conv_in.lora_up.weight": ("lora_unet_conv_in", "up"),
    "lora_unet_conv_in.lora_down.weight": ("lora_unet_conv_in", "down"),
    "lora_unet_conv_in.alpha": ("lora_unet_conv_in", "alpha"),
    "unet.conv_in.lora_A.weight": ("unet.conv_in", "down"),
    "unet.conv_in.lora_B.default.weight": ("unet.conv_in", "up"),
    "unet.mid_block.attn1.processor.to_q_lora.up.weight": ("unet.mid_block.attn1.processor.to_q", "up"),
    "text_encoder.layers.0.fc1.lora_linear_layer.down.weight": ("text_encoder.layers.0.fc1", "down"),
    "lora_unet_conv_in.lokr_w1_a": ("lora_unet_conv_in", "lokr_w1_a"),
    "lora_unet_conv_in.diff_b": ("lora_unet_conv_in", "diff_b"),
    "model.diffusion_model.input_blocks.0.0.weight": None,
    ".alpha": None,
}


@pytest.mark.parametrize("key", SPLITS)
def test_keys_split_into_base_and_part(key: str) -> None:
    assert split_key(key) == SPLITS[key]


def test_every_part_is_found_by_its_whole_ending() -> None:
    for ending, part in PARTS:
        assert split_key(f"some.weight{ending}") == ("some.weight", part)


def test_an_alpha_alone_makes_no_lora() -> None:
    """Other files have tensors called alpha, such as audio autoencoders."""
    assert not looks_like_lora(["decoder.layers.1.alpha", "decoder.layers.1.beta"])
    assert looks_like_lora(["decoder.layers.1.alpha", "lora_unet_conv_in.lora_up.weight"])


def test_four_parts_of_glora_tell_only_together() -> None:
    assert not looks_like_lora(["encoder.a1.weight", "decoder.b1.weight", "decoder.b2.weight"])
    assert looks_like_lora([f"lora_unet_conv_in.{part}.weight" for part in ("a1", "a2", "b1", "b2")])


FORMATS = json.loads((Path(__file__).resolve().parents[3] / "golden" / "lora_formats.json").read_text())


@pytest.mark.parametrize("name", FORMATS["convert_lora"])
def test_published_spellings_of_whole_files(name: str) -> None:
    """Golden: what ComfyUI renames before it reads. The widened weight's shape is a value here, and no tensor."""
    case = FORMATS["convert_lora"][name]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(case["input"], (2, 4))
    shapes |= {"img_in.lora_A.weight": (4, 8), "img_in.lora_B.weight": (6, 4)} if name == "bfl_control" else {}
    found = normalized_keys(shapes)
    widened = {f"{base}.reshape_weight" for base in found.reshaped}
    # the norms' own key ends are split off alike: "x.scale.set_weight" and "x.diff_b" are in the golden names
    assert set(found.original) | widened == set(case["output"])
    assert sorted(found.original.values()) == sorted(case["input"])
    for base, shape in found.reshaped.items():
        assert list(shape) == case["output"][f"{base}.reshape_weight"]
