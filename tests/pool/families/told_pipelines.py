"""What pipelines of diffusers are told of a tiny model's run, and made of: its texts and its parts, or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_model import Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.zoo.case import quiet_libraries


def texts_of(made: Made, mask: str = "") -> dict[str, Tensor]:
    """The prompt and the negative prompt as pipelines are given them, with their masks where they are told `mask`."""
    given = made.texts
    read = [one for one in made.results.values() if isinstance(one, Encoded)]
    for side, text in zip(("", "negative_"), read, strict=False) if mask else ():
        real = text.others.get("context_mask", np.ones(len(text.context_LD), bool))
        given[f"{side}{mask}"] = torch.from_numpy(real)[None].long()
    return given


def parts_of(tiny: TinyFamilyModel) -> tuple[Any, Any]:
    """Its VAE, which says of its latents what the family says, and its diffusion model."""
    vae = tiny.module(Role.VAE)
    facts = tiny.engine._opened(tiny.model).latent
    if facts.means:
        vae.register_to_config(latents_mean=facts.means, latents_std=facts.deviations)
    else:
        vae.register_to_config(scaling_factor=facts.scaling_factor, shift_factor=facts.shift)
    return vae, tiny.module(Role.DIFFUSION_MODEL)


def of_folder(folder: Path, **given: Any) -> Any:
    """The pipeline that the index of a folder names, with its parts and those that are `given`; nothing is fetched."""
    with quiet_libraries():
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **given)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
