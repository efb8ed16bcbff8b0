"""Each entry of a LoRA file reaches the component that its name says, under the prefixes of every trainer, or is named.

Names that no family lists are read without their prefixes; names of one of two experts and of other components never
reach another one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelpool.pool.values.core.errors import AdapterMismatch, CorruptFile
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.patches.lora_file import LoraMatch, match_lora, require_match
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.weights.patches.test_adapter_entries import write
from tests.pool.weights.patches.test_lora_file import random

FIRST, SECOND, TEXT = Role.DIFFUSION_MODEL, Role.DIFFUSION_MODEL_2, Role.TEXT_ENCODER
TO_Q = (RowRange("blocks.0.to_q.weight", (24, 16), 0, 24, 0),)
TEXT_Q = (RowRange("layers.0.q.weight", (24, 16), 0, 24, 0),)
NAMES = {
    FIRST: {
        **dict.fromkeys(("blocks.0.to_q", "diffusion_model.blocks.0.to_q", "transformer.blocks.0.to_q"), TO_Q),
        **dict.fromkeys(("base_model.model.blocks.0.to_q", "lora_unet_blocks_0_to_q"), TO_Q),
    },
    TEXT: dict.fromkeys(("text_encoder.layers.0.q", "lora_te1_layers_0_q", "te1.layers.0.q"), TEXT_Q),
}
SHAPES = {FIRST: {"blocks.0.to_q.weight": (24, 16)}, TEXT: {"layers.0.q.weight": (24, 16)}}


def factors(name: str, seed: int = 0) -> dict[str, Tensor]:
    return {f"{name}.lora_B.weight": random(24, 4, seed=seed), f"{name}.lora_A.weight": random(4, 16, seed=seed + 1)}


def found_in(tmp_path: Path, tensors: dict[str, Tensor], has_experts: bool = False) -> LoraMatch:
    return match_lora(write(tmp_path / "lora.safetensors", tensors), "hash", NAMES, SHAPES, has_experts=has_experts)


def delta_of(match: LoraMatch, role: Role) -> Tensor:
    found = torch.zeros(24, 16)
    for patch in PatchSet(match.patches.get(role, ())).patches:
        found = patch(found)
    return found


def test_prefixes_in_any_order_are_the_same_weight(tmp_path: Path) -> None:
    names = [
        "transformer.base_model.model.blocks.0.to_q",
        "base_model.model.transformer.blocks.0.to_q",
        "base_model.model.diffusion_model.blocks.0.to_q",
        "diffusion_model.base_model.model.blocks.0.to_q",
        "base_model.model.base_model.model.blocks.0.to_q",
        "base_model.model.model.diffusion_model.blocks.0.to_q",
        "pipe.dit.blocks.0.to_q",
        "net.blocks.0.to_q",
        "unet.base_model.model.blocks.0.to_q",
        "model.diffusion_model.transformer.blocks.0.to_q",
        "lora_unet_blocks.0.to_q",
        "lycoris_blocks.0.to_q",
        "oft_unet_blocks_0_to_q",
    ]
    wrong = {}
    for name in names:
        match = found_in(tmp_path, factors(name))
        expected = random(24, 4) @ random(4, 16, seed=1)
        if match.unmatched or not torch.allclose(delta_of(match, FIRST), expected, atol=1e-6):
            wrong[name] = match.warning
    for name in ("text_encoder.base_model.model.layers.0.q", "base_model.model.text_encoder.layers.0.q"):
        match = found_in(tmp_path, factors(name))
        if match.unmatched or list(match.patches) != [TEXT]:
            wrong[name] = match.warning
    assert not wrong


def test_a_component_that_the_model_lacks_gets_nothing(tmp_path: Path) -> None:
    """Its names end like names of another component."""
    wrong = []
    for name in (
        "text_encoder_2.blocks.0.to_q",
        "text_encoder.blocks.0.to_q",
        "vae.blocks.0.to_q",
        "controlnet.blocks.0.to_q",
        "text_encoder_2.layers.0.q",
        "transformer.layers.0.q",
        "lora_te2_layers_0_q",
        "prior.blocks.0.to_q",
        "decoder.blocks.0.to_q",
        "transformer.text_encoder.layers.0.q",
        "text_encoder.transformer.blocks.0.to_q",
        "unconditional_transformer.blocks.0.to_q",
    ):
        match = found_in(tmp_path, factors("transformer.blocks.0.to_q") | factors(name, seed=5))
        if match.matched != 1 or name not in (match.warning or ""):
            wrong.append((name, match.patches))
    assert not wrong


EXPERT_PREFIXES = (
    ("transformer.", "transformer_2."),
    ("diffusion_model.", "diffusion_model_2."),
    ("high_noise_model.", "low_noise_model."),
    ("high_noise.", "low_noise."),
    ("diffusion_model.transformer_1.", "diffusion_model.transformer_2."),
    ("transformer.base_model.model.", "transformer_2.base_model.model."),
    ("base_model.model.transformer.", "base_model.model.transformer_2."),
)


def test_each_expert_gets_its_part_of_one_file(tmp_path: Path) -> None:
    wrong = []
    for first, second in EXPERT_PREFIXES:
        high, low = factors(f"{first}blocks.0.to_q"), factors(f"{second}blocks.0.to_q", seed=5)
        deltas = {FIRST: random(24, 4) @ random(4, 16, seed=1), SECOND: random(24, 4, seed=5) @ random(4, 16, seed=6)}
        match = found_in(tmp_path, high | low, has_experts=True)
        alone = found_in(tmp_path, low, has_experts=True)
        for role, delta in deltas.items():
            if match.unmatched or not torch.allclose(delta_of(match, role), delta, atol=1e-6):
                wrong.append((first, role))
        if list(alone.patches) != [SECOND]:
            wrong.append((second, "alone"))
        single = found_in(tmp_path, high | low)
        if SECOND in single.patches or f"{second}blocks.0.to_q" not in (single.warning or ""):
            wrong.append((second, "single model"))
    assert not wrong


def test_a_file_that_names_no_expert_is_for_both(tmp_path: Path) -> None:
    for name in ("transformer.blocks.0.to_q", "blocks.0.to_q", "lora_unet_blocks_0_to_q"):
        match = found_in(tmp_path, factors(name), has_experts=True)
        assert match.patches[FIRST] == match.patches[SECOND], name
        assert list(found_in(tmp_path, factors(name)).patches) == [FIRST], name


def test_joined_names_of_experts_are_read(tmp_path: Path) -> None:
    for name in ("lora_transformer_2_blocks_0_to_q", "lora_unet_low_noise_model_blocks_0_to_q"):
        assert list(found_in(tmp_path, factors(name), has_experts=True).patches) == [SECOND], name


def test_the_name_of_a_peft_adapter_is_no_part_of_the_weight(tmp_path: Path) -> None:
    expected = random(24, 4) @ random(4, 16, seed=1)
    for adapter in ("default", "default_0", "style", "style-v1 (2)", "weight"):
        tensors = {k.replace(".weight", f".{adapter}.weight"): t for k, t in factors("blocks.0.to_q").items()}
        match = found_in(tmp_path, tensors)
        assert match.unmatched == (), adapter
        assert torch.allclose(delta_of(match, FIRST), expected, atol=1e-6), adapter
    parts = {"hada_w1_a": (24, 4), "hada_w1_b": (4, 16), "hada_w2_a": (24, 4), "hada_w2_b": (4, 16)}
    tensors = {f"blocks.0.to_q.{part}.style": random(*shape) for part, shape in parts.items()}
    assert found_in(tmp_path, tensors).unmatched == ()


def test_several_adapters_are_used_where_each_weight_has_one(tmp_path: Path) -> None:
    def named(tensors: dict[str, Tensor], adapter: str) -> dict[str, Tensor]:
        return {key.replace(".weight", f".{adapter}.weight"): tensor for key, tensor in tensors.items()}

    apart = named(factors("blocks.0.to_q"), "one") | named(factors("text_encoder.layers.0.q", 5), "two")
    assert found_in(tmp_path, apart).matched == 2
    same = named(factors("blocks.0.to_q"), "one") | named(factors("blocks.0.to_q", 5), "two")
    with pytest.raises(CorruptFile, match="found 2 adapters for the same weights: 'one', 'two'"):
        found_in(tmp_path, same)


def test_an_alpha_without_effect_may_be_any_number(tmp_path: Path) -> None:
    harmless = {
        "LoKr": {"lokr_w1": random(4, 4), "lokr_w2": random(6, 4)},
        "difference": {"diff": random(24, 16)},
        "replacement": {"set_weight": random(24, 16)},
        "rotations": {"oft_diag": torch.eye(4).expand(6, 4, 4).contiguous()},
        "rotations of inputs": {"oft_R.weight": random(4, 6)},
    }
    counting = {
        "LoRA": {"lora_B.weight": random(24, 4), "lora_A.weight": random(4, 16)},
        "LoKr": {"lokr_w1": random(4, 4), "lokr_w2_a": random(6, 2), "lokr_w2_b": random(2, 4)},
        "OFT": {"oft_blocks": random(6, 4, 4)},
    }
    for alpha in (torch.inf, torch.nan, -torch.inf, 0.0, 1e10):
        for kind, tensors in harmless.items():
            own = {f"blocks.0.to_q.{part}": tensor for part, tensor in tensors.items()}
            match = found_in(tmp_path, own | {"blocks.0.to_q.alpha": torch.tensor(alpha)})
            plain = found_in(tmp_path, own)
            assert (match.matched, match.unmatched) == (1, ()), (kind, alpha)
            assert torch.equal(delta_of(match, FIRST), delta_of(plain, FIRST)), (kind, alpha)
    for tensors in counting.values():
        own = {f"blocks.0.to_q.{part}": tensor for part, tensor in tensors.items()}
        with pytest.raises(CorruptFile, match=r"the alpha of 'blocks.0.to_q' is nan, expected one finite number"):
            found_in(tmp_path, own | {"blocks.0.to_q.alpha": torch.tensor(torch.nan)})


def test_a_refusal_names_what_it_found_and_what_it_expects(tmp_path: Path) -> None:
    unknown = {f"blocks.{n}.to_q.ia3_l.weight": random(16) for n in range(3)}
    with pytest.raises(
        CorruptFile, match=r"keys of no known kind of adapter among its 3 keys.*'blocks.0.to_q.ia3_l.weight'"
    ):
        found_in(tmp_path, unknown)
    other = found_in(tmp_path, factors("transformer.other.0.to_q"))
    with pytest.raises(
        AdapterMismatch, match=r"transformer.other.0.to_q.*the model's names are such as 'blocks.0.to_q'"
    ):
        require_match(other, "lora", "model", "test")


def test_every_unused_tensor_is_named(tmp_path: Path) -> None:
    """Names that differ by numbers share one mention."""
    tensors = factors("blocks.0.to_q")
    tensors |= {
        f"blocks.{n}.other.lora_{half}.weight": t
        for n in range(40)
        for half, t in (("B", random(24, 4)), ("A", random(4, 16)))
    }
    unused = {
        "blocks.0.to_q.scalar": "blocks.0.to_q.scalar",
        "extra.weight": "extra.weight",
        "vera_A": "vera_A",
        "text_encoder.layers.0.q.lokr_w1_a": None,
    }
    tensors |= {key: random(4, 4) for key, name in unused.items() if name}
    full = {"lokr_w1": random(4, 4), "lokr_w2": random(6, 4), "lokr_w1_a": random(4, 1), "lokr_w1_b": random(1, 4)}
    tensors |= {f"text_encoder.layers.0.q.{part}": tensor for part, tensor in full.items()}
    warning = found_in(tmp_path, tensors).warning or ""
    for name in ("blocks.0.to_q.scalar", "extra.weight", "vera_A", "lokr_w1_a, lokr_w1_b alone"):
        assert name in warning, (name, warning)
    assert "blocks.0.other (the model has no weight of this name), and 39 named like it" in warning
