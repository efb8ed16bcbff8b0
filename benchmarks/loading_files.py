"""Writes the files that `benchmarks.loading` loads: random weights in the layouts and sizes of published models.

Each model is written twice: as a single file in its published layout, and as a diffusers folder with the diffusion
model's weights under the parameter names of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout
from tests.pool.models.loading.tiny_checkpoint import random_tensor

PREFIX = "model.diffusion_model."
#: file name that diffusers expects in a component's folder
FOLDER_WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True, slots=True)
class Model:
    """One row of the table.

    title    title in the table
    stored   dtype of the weights in both files
    compute  dtype that the forward computes in
    cls      diffusers' class of the diffusion model
    tensors  all tensors of the single file
    inputs   inputs of the smallest call that reads every weight
    """

    title: str
    stored: torch.dtype
    compute: torch.dtype
    cls: type[Any]
    tensors: Callable[[], Mapping[str, Tensor]]
    inputs: Callable[[torch.dtype], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Files:
    """The paths of a model: the single file, and the folder of its diffusion model."""

    single: Path
    folder: Path

    @property
    def weights(self) -> Path:
        """The file of weights in the folder."""
        return self.folder / FOLDER_WEIGHTS

    def all(self) -> tuple[Path, Path]:
        """Both files of weights."""
        return self.single, self.weights


def written(name: str, folder: Path) -> Files:
    """Write both forms of the model `name` to `folder`; return their paths."""
    model = MODELS[name]
    files = Files(folder / "model.safetensors", folder / "transformer")
    save_file(dict(model.tensors()), files.single)
    module: Any = open_checkpoint(files.single).build(Role.DIFFUSION_MODEL).module
    assert type(module) is model.cls, f"{model.title}: built as {type(module).__name__}"
    module.save_pretrained(files.folder, max_shard_size="100GB")
    return files


def _random(layout: Layout, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: random_tensor(key, shape, generator, dtype) for key, shape in layout.items()}


def _sdxl_in_part() -> Layout:
    """The layout of SDXL with fewer transformer blocks and text encoder layers; levels and widths are those of SDXL."""
    unet = replace(layouts.SDXL_UNET, depths=(0, 1, 3), middle_depth=3)
    text = layouts.hf_clip(replace(layouts.CLIP_L, layers=2), "conditioner.embedders.0.transformer.text_model.")
    return {
        **layouts.ldm_unet(unet),
        **layouts.ldm_vae(layouts.SD15_VAE),
        **text,
        **layouts.open_clip(1280, 2, 5120),
    }


def _flux_in_part(dtype: torch.dtype, double: int, single: int) -> dict[str, Tensor]:
    """Flux with this number of double and single blocks, at full width, with tiny text encoders and a tiny VAE."""
    others = {key: value for key, value in FAMILIES["flux_dev"].file().items() if not key.startswith(PREFIX)}
    return {**others, **_random(layouts.flux(double, single, prefix=PREFIX), dtype)}


def _unet_inputs(dtype: torch.dtype, width: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "sample": torch.randn(1, 4, 8, 8, generator=generator).to(dtype),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 77, width, generator=generator).to(dtype),
    }


def _sdxl_inputs(dtype: torch.dtype) -> dict[str, Any]:
    told = {"text_embeds": torch.zeros(1, 1280, dtype=dtype), "time_ids": torch.zeros(1, 6, dtype=dtype)}
    return {**_unet_inputs(dtype, 2048), "added_cond_kwargs": told}


def _flux_inputs(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, 64, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, 32, 4096, generator=generator).to(dtype),
        "pooled_projections": torch.randn(1, 768, generator=generator).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(32, 3),
        "guidance": torch.tensor([3.5], dtype=dtype),
    }


_F16, _BF16, _F8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
MODELS: Mapping[str, Model] = {
    "sd15": Model(
        "SD1.5, complete file, float16",
        _F16,
        _F16,
        diffusers.UNet2DConditionModel,
        lambda: _random(layouts.sd15(), _F16),
        lambda dtype: _unet_inputs(dtype, 768),
    ),
    "sdxl": Model(
        "SDXL, reduced depth, float16",
        _F16,
        _F16,
        diffusers.UNet2DConditionModel,
        lambda: _random(_sdxl_in_part(), _F16),
        _sdxl_inputs,
    ),
    "flux": Model(
        "Flux with 2 + 4 blocks, bfloat16",
        _BF16,
        _BF16,
        diffusers.FluxTransformer2DModel,
        lambda: _flux_in_part(_BF16, 2, 4),
        _flux_inputs,
    ),
    "flux_fp8": Model(
        "Flux with 4 + 8 blocks, float8, computed in bfloat16",
        _F8,
        _BF16,
        diffusers.FluxTransformer2DModel,
        lambda: _flux_in_part(_F8, 4, 8),
        _flux_inputs,
    ),
}
