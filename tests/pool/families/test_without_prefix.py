"""Whole files whose diffusion model has no prefix, beside text encoders and a VAE that have theirs, are the same models
as with it; and are saved as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_relatives import ALL_FAMILIES

PREFIX = "model.diffusion_model."
#: one for each way in which text encoders and VAEs lie beside it; Wan's, Flux's and Gemma's have a tokenizer inside
FAMILY = pytest.mark.parametrize("name", ["wan_t2v", "flux_dev", "sd35_large", "hunyuan_video", "hidream_i1", "flux2"])


@FAMILY
def test_it_is_the_model_that_it_is_with_a_prefix(name: str, tmp_path: Path) -> None:
    """Found: a Wan file of this kind was refused for the type of its tokenizer, others for tensors without a place."""
    tensors = ALL_FAMILIES[name].file()
    bare = {key.removeprefix(PREFIX): value for key, value in tensors.items()}
    assert bare.keys() != tensors.keys()
    save_file(tensors, tmp_path / "with.safetensors")
    save_file(bare, tmp_path / "without.safetensors")
    with_it, without = (open_checkpoint(tmp_path / f"{which}.safetensors") for which in ("with", "without"))
    assert without.family.name == with_it.family.name == name
    assert without.family.prefixes[Role.DIFFUSION_MODEL] == ""
    assert without.family.prefixes.keys() == with_it.family.prefixes.keys()
    for role in with_it.family.prefixes:
        ours, theirs = (checkpoint.build(role).module.state_dict() for checkpoint in (without, with_it))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), role
    save_checkpoint(without, tmp_path / "saved.safetensors")
    saved = load_file(tmp_path / "saved.safetensors")
    assert saved.keys() == bare.keys()
    assert all(torch.equal(saved[key], value) for key, value in bare.items())


def test_every_family_has_components_apart(tmp_path: Path) -> None:
    """Every tensor is of one component at most, whatever the prefixes."""
    for name, family in ALL_FAMILIES.items():
        bare = {key.removeprefix(PREFIX): value for key, value in family.file().items()}
        save_file(bare, tmp_path / f"{name}.safetensors")
        found = open_checkpoint(tmp_path / f"{name}.safetensors")
        taken: list[str] = []
        for role in found.family.prefixes:
            taken += found.family.shapes_of(role, found.shapes)
        assert len(taken) == len(set(taken)), name
        (tmp_path / f"{name}.safetensors").unlink()
