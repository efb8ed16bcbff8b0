"""Adapters that PEFT made, saved as PEFT saves them, give the weights that PEFT merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.patches.lora_file import match_lora
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.weights.patches.test_adapter_entries import write


class Small(nn.Module):
    """A matrix, a convolution and a convolution with a kernel of one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 24)
        self.conv = nn.Conv2d(8, 16, 3)
        self.point = nn.Conv2d(8, 16, 1)


TARGETS = ["line", "conv", "point"]
CONFIGS: dict[str, tuple[Any, float]] = {
    # what PEFT's own files do not say: alpha over rank; PEFT and diffusers keep it in a configuration beside the file
    "lora": (peft.LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False), 1.0),
    "scaled": (peft.LoraConfig(r=4, lora_alpha=2, target_modules=TARGETS, init_lora_weights=False), 0.5),
    "dora": (peft.LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS, use_dora=True, init_lora_weights=False), 1.0),
    "loha": (peft.LoHaConfig(r=4, alpha=4, target_modules=TARGETS, init_weights=False), 1.0),
    "loha with cores": (
        peft.LoHaConfig(r=4, alpha=4, target_modules=TARGETS, init_weights=False, use_effective_conv2d=True),
        1.0,
    ),
    "lokr": (peft.LoKrConfig(r=2, alpha=2, target_modules=TARGETS, init_weights=False), 1.0),
    "lokr, both decomposed": (
        peft.LoKrConfig(r=2, alpha=2, target_modules=TARGETS, init_weights=False, decompose_both=True),
        1.0,
    ),
    "lokr with cores": (
        peft.LoKrConfig(r=2, alpha=2, target_modules=TARGETS, init_weights=False, use_effective_conv2d=True),
        1.0,
    ),
}


def trained(config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """A model's weights, an adapter's tensors, and the weights that PEFT merges of both."""
    torch.manual_seed(0)
    model = Small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "magnitude" in name:  # starts as the weight's own lengths, which would hide what it does
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
        elif "lokr" in name or "hada" in name:
            parameter.data.normal_().mul_(0.5)
    saved = {key: tensor.detach().clone() for key, tensor in peft.get_peft_model_state_dict(wrapped).items()}
    after = {name: p.detach().clone() for name, p in wrapped.merge_and_unload().named_parameters()}
    return before, saved, after


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_as_peft_merges(tmp_path: Path, name: str) -> None:
    config, strength = CONFIGS[name]
    before, saved, after = trained(config)
    names = {
        f"base_model.model.{target}": (
            RowRange(
                f"{target}.weight", tuple(before[f"{target}.weight"].shape), 0, before[f"{target}.weight"].shape[0], 0
            ),
        )
        for target in TARGETS
    }
    role = Role.DIFFUSION_MODEL
    shapes = {key: tuple(w.shape) for key, w in before.items()}
    found = match_lora(write(tmp_path / "adapter.safetensors", saved), "hash", {role: names}, {role: shapes})
    assert (found.matched, found.unmatched) == (len(TARGETS), ())
    for patch in PatchSet(found.patches[role]).patches:
        weight = before[patch.parameter].clone()
        rescaled = torch.lerp(weight, patch(weight.clone()), strength)
        assert (rescaled - weight).abs().max() > 1e-3
        assert torch.allclose(rescaled, after[patch.parameter], atol=2e-6), patch.parameter
