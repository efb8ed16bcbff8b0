"""Small files of weights in real layouts, made on the fly: random numbers, real key names.

`write_tiny_checkpoint` makes a 10 MB file in the SD1 single-file layout that builds and runs; `write_tiny_lora` makes a
kohya-named LoRA that fits it. A seed names the content: equal arguments give byte-equal files.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout

#: weights of the tiny UNet that `write_tiny_lora` patches, in the diffusers spelling
UNET_TARGETS: Mapping[str, tuple[int, int]] = {
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (48, 48),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (48, 32),
    "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj": (768, 96),
    "up_blocks.1.attentions.1.transformer_blocks.0.attn1.to_out.0": (48, 48),
}
#: weights of the tiny text encoder that `write_tiny_lora` patches
TEXT_TARGETS: Mapping[str, tuple[int, int]] = {
    "text_model.encoder.layers.0.self_attn.q_proj": (32, 32),
    "text_model.encoder.layers.1.mlp.fc1": (128, 32),
}


def write_tiny_checkpoint(
    path: Path,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float16,
    layout: Layout | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a random checkpoint of `layout` (the tiny SD1 file when None) to `path` and return `path`."""
    tensors = _random_tensors(tuple((layout or layouts.tiny_sd1()).items()), seed, dtype)
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    return path


@functools.lru_cache(maxsize=4)
def _random_tensors(layout: tuple[tuple[str, layouts.Shape], ...], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Those of one file; many tests in a row write the same."""
    generator = torch.Generator().manual_seed(seed)
    return {key: random_tensor(key, shape, generator, dtype) for key, shape in layout}


def write_hollow_checkpoint(path: Path, layout: Layout) -> Path:
    """Write a whole float16 file of `layout` to `path` at once, however large: all zeros, and a hole on the disk."""
    header, end = {}, 0
    for key, shape in layout.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[key] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def random_tensor(key: str, shape: layouts.Shape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A tensor for `key`, scaled so that activations stay near one through the whole model."""
    if key.endswith("position_ids"):
        return torch.arange(shape[-1]).reshape(shape)
    noise = torch.randn(shape, generator=generator)
    if key.endswith("embedding.weight"):
        return (0.5 * noise).to(dtype)
    if len(shape) < 2:
        centre = 1.0 if key.endswith("weight") else 0.0
        return (centre + 0.1 * noise).to(dtype)
    fan_in = noise[0].numel()
    return (noise * fan_in**-0.5).to(dtype)


def write_tiny_lora(
    path: Path,
    seed: int = 0,
    *,
    rank: int = 4,
    alpha: float = 2.0,
    unet: bool = True,
    text: bool = True,
    dtype: torch.dtype = torch.float16,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a kohya-named LoRA that fits the tiny checkpoint to `path` and return `path`."""
    generator = torch.Generator().manual_seed(seed)
    targets = {f"lora_unet_{k.replace('.', '_')}": s for k, s in UNET_TARGETS.items() if unet}
    targets |= {f"lora_te_{k.replace('.', '_')}": s for k, s in TEXT_TARGETS.items() if text}
    tensors: dict[str, Tensor] = {}
    for name, (rows, columns) in targets.items():
        tensors[f"{name}.lora_up.weight"] = (torch.randn(rows, rank, generator=generator) * 0.2).to(dtype)
        tensors[f"{name}.lora_down.weight"] = (torch.randn(rank, columns, generator=generator) * 0.2).to(dtype)
        tensors[f"{name}.alpha"] = torch.tensor(alpha, dtype=dtype)
    save_file(tensors, path, metadata=dict(metadata) if metadata else None)
    return path
