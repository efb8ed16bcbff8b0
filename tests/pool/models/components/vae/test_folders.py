"""VAEs in folders that diffusers wrote: every class that is built, from its own configuration and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelpool.pool.models.components.vae.build_vae import VaePlan
from modelpool.pool.models.components.vae.vae_folder_plan import plan_folder_vae
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.nearly import assert_nearly
from tests.pool.models.components.vae.cases import CASES, Case, decode, encode

CASE = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


def written(case: Case, folder: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """diffusers' module, and the configuration and tensors that it writes."""
    theirs = case.module()
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return theirs, config, load_file(folder / "diffusion_pytorch_model.safetensors")


def plan(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> VaePlan:
    return plan_folder_vae(config["_class_name"], config, {key: tuple(x.shape) for key, x in tensors.items()})


@CASE
def test_a_folder_is_diffusers_module(case: Case, tmp_path: Path) -> None:
    theirs, config, tensors = written(case, tmp_path)
    planned = plan(config, tensors)
    assert (planned.facts.name, planned.facts.layout) == (case.name, "diffusers")
    assert (planned.facts.has_encoder, planned.facts.has_decoder) == (True, True)
    ours = planned.build(tensors)
    latents = torch.randn(case.latent, generator=torch.Generator().manual_seed(5))
    pixels = torch.randn(case.pixels, generator=torch.Generator().manual_seed(6)).clamp(-1, 1)
    assert_nearly(decode(case, ours, latents), decode(case, theirs, latents))
    assert_nearly(encode(ours, pixels), encode(theirs, pixels))
    saved = planned.save(ours, tensors)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in tensors.items())


def test_the_scale_in_the_configuration_tells_whose_latents_they_are(tmp_path: Path) -> None:
    _, config, tensors = written(CASES["kl"], tmp_path)
    for scale, formats in ((0.18215, ("sd1",)), (0.13025, ("sdxl",)), (0.08333, ("sd_x4",)), (0.7, ())):
        assert plan({**config, "scaling_factor": scale}, tensors).facts.latent_formats == formats


def test_configurations_that_are_none_of_the_class_are_refused(tmp_path: Path) -> None:
    _, config, tensors = written(CASES["kl"], tmp_path)
    expected = r"found class 'AutoencoderX', expected one of AutoencoderDC, AutoencoderKL, "
    with pytest.raises(UnknownArchitecture, match=expected):
        plan_folder_vae("AutoencoderX", config, {})
    with pytest.raises(UnknownArchitecture, match=r"found layers_per_block 1000000000, expected no more than its"):
        plan({**config, "layers_per_block": 10**9}, tensors)
    for wrong in ({"block_out_channels": [8, 24]}, {"block_out_channels": "wide"}, {"down_block_types": []},
                  {"norm_num_groups": 0}, {"norm_num_groups": 3}, {"latent_channels": None}, {"act_fn": "none such"},
                  {"block_out_channels": None}):  # fmt: skip
        with pytest.raises(UnknownArchitecture):
            plan({**config, **wrong}, tensors).empty()
