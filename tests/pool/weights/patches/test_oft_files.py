"""OFT files of every trainer give the weights that the trainer computes.

The formulas are written out here: kohya's scripts and LyCORIS rotate rows and limit the norm to alpha times the rows;
early LyCORIS stores rotations; PEFT and OneTrainer rotate columns by a series, and differ for convolutions.
"""

from __future__ import annotations

from pathlib import Path

import peft
import torch
from torch import Tensor, nn

from modelpool.pool.weights.keymaps.key_map import RowRange
from tests.pool.weights.patches.test_lora_file import Names, lora, match, patched, random

SHAPE = (24, 16)
WHOLE: Names = {"m": (RowRange("m.weight", SHAPE, 0, 24, 0),)}


def merged(path: Path, weight: Tensor, name: str = "m") -> Tensor:
    shape = tuple(weight.shape)
    names: Names = {name: (RowRange("m.weight", shape, 0, shape[0], 0),)}
    found = match(path, names, {"m.weight": shape})
    assert found.unmatched == ()
    return patched(found, {"m.weight": weight})["m.weight"]


def rotated_rows(rotation: Tensor, weight: Tensor) -> Tensor:
    """`einsum("k n m, k n ... -> k m ...", R, W)`, block by block."""
    blocks = weight.reshape(len(rotation), -1, weight[0].numel())
    return torch.cat([r.T @ block for r, block in zip(rotation, blocks, strict=True)]).reshape(weight.shape)


def test_kohya_and_lycoris_limit_the_norm_to_alpha_times_the_rows(tmp_path: Path) -> None:
    weight, blocks = random(*SHAPE, seed=9, scale=1.0), random(6, 4, 4)
    skew = blocks - blocks.mT
    norm, identity = skew.norm(), torch.eye(4)
    for alpha in (None, 0.0, 1e-3, 0.05, 10.0, torch.inf):
        limit = norm if not alpha else min(norm, torch.tensor(alpha * 24))
        limited = skew * (limit / norm)
        expected = rotated_rows((identity + limited) @ torch.linalg.inv(identity - limited), weight)
        tensors = {"oft_blocks": blocks} | ({} if alpha is None else {"alpha": torch.tensor(alpha)})
        assert torch.allclose(merged(lora(tmp_path, tensors), weight), expected, atol=1e-5), alpha


def test_early_lycoris_stores_rotations(tmp_path: Path) -> None:
    weight = random(24, 4, 3, 3, seed=9, scale=1.0)
    rotation = torch.linalg.qr(random(6, 4, 4)).Q.contiguous()
    expected = rotated_rows(rotation, weight)
    assert torch.allclose(merged(lora(tmp_path, {"oft_diag": rotation}), weight), expected, atol=1e-5)


def by_series(numbers: Tensor, size: int) -> Tensor:
    skew = torch.zeros(len(numbers), size, size)
    place = 0
    for row in range(size):
        for column in range(row + 1, size):
            skew[:, row, column], skew[:, column, row] = numbers[:, place], -numbers[:, place]
            place += 1
    square = skew @ skew
    return torch.eye(size) + 2 * skew + 2 * square + 2 * square @ skew + square @ square


def test_onetrainer_rotates_inputs_of_matrices_and_columns_of_convolutions(tmp_path: Path) -> None:
    line, conv = random(*SHAPE, seed=9, scale=1.0), random(24, 4, 2, 2, seed=9, scale=1.0)
    for count, is_scaled in ((4, False), (1, False), (4, True)):
        numbers = random(count, 6, scale=0.2)
        tensors = {"oft_R.weight": numbers} | ({"oft_R.scaled_oft": torch.tensor(True)} if is_scaled else {})
        rotation = by_series(numbers / (2 * 3**0.5 if is_scaled else 1), 4).expand(4, 4, 4)
        whole = torch.block_diag(*rotation)
        path = lora(tmp_path, tensors)
        x = random(5, 16, seed=3)
        assert torch.allclose(x @ merged(path, line).T, (x @ whole) @ line.T, atol=1e-5), (count, is_scaled)
        expected = (conv.flatten(1) @ whole).reshape(conv.shape)
        assert torch.allclose(merged(path, conv), expected, atol=1e-5), (count, is_scaled)


class Small(nn.Module):
    """A matrix and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 24)
        self.conv = nn.Conv2d(4, 24, 2)


def test_a_folder_of_peft_gives_the_weights_that_peft_merges(tmp_path: Path) -> None:
    for options in ({}, {"num_cayley_neumann_terms": 3}, {"use_cayley_neumann": False}, {"block_share": True}):
        torch.manual_seed(0)
        config = peft.OFTConfig(oft_block_size=4, target_modules=["line", "conv"], **options)
        model = peft.get_peft_model(Small(), config)
        for name, parameter in model.named_parameters():
            if "oft_R" in name:
                parameter.data.normal_().mul_(0.1)
        before = {name: getattr(model.base_model.model, name).weight.detach().clone() for name in ("line", "conv")}
        model.save_pretrained(tmp_path)
        after = {n: p.detach() for n, p in model.merge_and_unload().named_parameters()}
        names: Names = {
            f"base_model.model.{name}": (RowRange(f"{name}.weight", tuple(w.shape), 0, 24, 0),)
            for name, w in before.items()
        }
        shapes = {f"{name}.weight": tuple(w.shape) for name, w in before.items()}
        found = match(tmp_path / "adapter_model.safetensors", names, shapes)
        assert found.unmatched == ()
        for key, weight in patched(found, {f"{name}.weight": w for name, w in before.items()}).items():
            assert torch.allclose(weight, after[key], atol=1e-5), (options, key)


def test_blocks_that_do_not_divide_the_columns_are_named(tmp_path: Path) -> None:
    found = match(lora(tmp_path, {"oft_R.weight": random(3, 6)}), WHOLE, {"m.weight": SHAPE})
    assert found.matched == 0
    assert "3 OFT blocks of 4 columns" in found.unmatched[0].reason
