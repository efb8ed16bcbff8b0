"""Models to save, opened, and what saving changed in a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.stage_params import LoraRef, ModelRef

LAYOUTS = ("tiny_sd1", "tiny_sd2", "tiny_sdxl", "tiny_sdxl_refiner")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def opened(path: Path) -> OpenModel:
    return OpenModel(ModelRef(path.stem, str(path), sha256(path)), "cpu")


def lora_ref(path: Path, strength: float) -> LoraRef:
    return LoraRef(path.stem, str(path), sha256(path), strength)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """All that a file has of a tensor."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


def changed(before: Path, after: Path) -> set[str]:
    """Keys with tensors that differ in type, shape or any bit. Both files have the same keys."""
    old, new = load_file(before), load_file(after)
    assert old.keys() == new.keys()
    return {key for key in old if bits(old[key]) != bits(new[key])}
