"""A model with another model merged has the weights of a file with the merged weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.errors import AdapterMismatch, UnusableField
from modelpool.pool.values.core.refs import LoraRef, ModelRef
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

UNET = "model.diffusion_model."
#: groups of the weights of a UNet by the beginning of their names, as ComfyUI's node with blocks has them
SHARES = {"time_embed": 0.9, "input_blocks": 0.25, "middle_block": 0.5, "output_blocks": 0.75, "out.": 0.1}


def written(folder: Path, name: str, seed: int, layout: layouts.Layout | None = None) -> Path:
    return write_tiny_checkpoint(folder / f"{name}.safetensors", seed, dtype=torch.float32, layout=layout)


def opened(path: Path) -> OpenModel:
    return OpenModel(ModelRef(path.stem, str(path), path.stem * 8), "cpu")


def merge(path: Path, how: str, strength: float, **more: object) -> LoraRef:
    return replace(LoraRef(path.stem, str(path), path.stem * 8, strength, merge=how), **more)  # type: ignore[arg-type]


def weights(model: OpenModel, role: Role, *merges: LoraRef) -> dict[str, Tensor]:
    patches = model.patch_set(role, merges)
    found = {}
    for name, weight in model.component(role).built.module.named_parameters():
        found[name] = weight.detach().clone()
        for patch in patches.functions(name):
            found[name] = patch(found[name])
    return found


def of_file(path: Path, tensors: dict[str, Tensor], role: Role) -> dict[str, Tensor]:
    save_file(tensors, path)
    return weights(opened(path), role)


def test_merged_weights_are_those_of_a_merged_file(tmp_path: Path) -> None:
    one, two = (written(tmp_path, name, seed) for name, seed in (("one", 1), ("two", 2)))
    first, second = load_file(one), load_file(two)
    model, wrong = opened(one), []
    formulas = {
        "mix": lambda w, o, s: w * (1 - s) + o * s,
        "add": lambda w, o, s: w + o * s,
        "subtract": lambda w, o, s: (w - o) * s,
    }
    for how, formula in formulas.items():
        for role, begins in ((Role.DIFFUSION_MODEL, UNET), (Role.TEXT_ENCODER, "cond_stage_model.")):
            merged = {
                name: formula(each, second[name], 0.25)
                if name.startswith(begins) and each.is_floating_point()
                else each
                for name, each in first.items()
            }
            expected = of_file(tmp_path / "merged.safetensors", merged, role)
            found = weights(model, role, merge(two, how, 0.25))
            wrong += [
                (how, role, name) for name in expected if not torch.allclose(found[name], expected[name], atol=1e-6)
            ]
    assert not wrong
    # of the diffusion model alone, and a chain: both merges act in their order
    only = merge(two, "mix", 0.25, text_strength=0.0)
    assert not model.touches(Role.TEXT_ENCODER, only)
    assert model.touches(Role.DIFFUSION_MODEL, only)
    three = written(tmp_path, "three", 3)
    chain = weights(model, Role.DIFFUSION_MODEL, merge(two, "subtract", 1.0), merge(three, "add", 1.0))
    third = load_file(three)
    merged = {
        name: each - second[name] + third[name] if name.startswith(UNET) else each for name, each in first.items()
    }
    expected = of_file(tmp_path / "merged.safetensors", merged, Role.DIFFUSION_MODEL)
    assert all(torch.allclose(chain[name], each, atol=1e-6) for name, each in expected.items())


def test_shares_by_block_are_those_of_the_original_names(tmp_path: Path) -> None:
    one, two = (written(tmp_path, name, seed) for name, seed in (("one", 1), ("two", 2)))
    first, second = load_file(one), load_file(two)
    model = opened(one)

    def checked(blocks: dict[str, float], share_of: dict[str, float]) -> list[str]:
        merged = dict(first)
        for name in (each for each in first if each.startswith(UNET)):
            own = name.removeprefix(UNET)
            share = next(share for begin, share in share_of.items() if own.startswith(begin))
            merged[name] = first[name] * (1 - share) + second[name] * share
        expected = of_file(tmp_path / "merged.safetensors", merged, Role.DIFFUSION_MODEL)
        found = weights(model, Role.DIFFUSION_MODEL, merge(two, "mix", 1.0, blocks=tuple(blocks.items())))
        return [name for name in expected if not torch.allclose(found[name], expected[name], atol=1e-6)]

    assert not checked({"TIME": 0.9, "IN": 0.25, "MID": 0.5, "OUT": 0.75, "HEAD": 0.1}, SHARES)
    single = {"input_blocks.1.": 0.2, "middle_block.1.": 0.3, "output_blocks.0.": 0.4, "": 0.0}
    blocks = {"IN01": 0.2, "MID01": 0.3, "OUT00": 0.4, **dict.fromkeys(("TIME", "IN", "MID", "OUT", "HEAD"), 0.0)}
    assert not checked(blocks, single)
    for name in ("IN12", "MID03", "UP", "BASE"):
        with pytest.raises(UnusableField, match=f"loras.blocks: found '{name}'"):
            model.patch_set(Role.DIFFUSION_MODEL, [merge(two, "mix", 1.0, blocks=((name, 0.5),))])


def test_weights_of_another_shape_stay_where_nothing_else_takes_their_share(tmp_path: Path) -> None:
    """As in the recipe of inpainting models: the inpainting model minus its base, plus another model."""
    two = written(tmp_path, "two", 2)
    layout, first = dict(layouts.tiny_sd1()), f"{UNET}input_blocks.0.0.weight"
    rows, _, *kernel = layout[first]
    wide = written(tmp_path, "wide", 3, {**layout, first: (rows, 9, *kernel)})
    model = opened(wide)
    names = [name for name, _ in model.component(Role.DIFFUSION_MODEL).built.module.named_parameters()]
    found = weights(model, Role.DIFFUSION_MODEL, merge(two, "subtract", 1.0), merge(two, "add", 1.0))
    plain = weights(model, Role.DIFFUSION_MODEL)
    assert torch.equal(found["conv_in.weight"], plain["conv_in.weight"])
    assert all(torch.allclose(found[name], plain[name], atol=1e-5) for name in names)
    assert "conv_in.weight" in (model.lora_warning(merge(two, "add", 1.0)) or "")
    with pytest.raises(AdapterMismatch, match=r"cannot be mixed with 'wide'.*conv_in\.weight"):
        model.lora_warning(merge(two, "mix", 0.5))
    other = written(tmp_path, "other", 4, layouts.tiny_sdxl())
    with pytest.raises(AdapterMismatch, match="model 'other' cannot be merged with model 'wide'"):
        model.lora_warning(merge(other, "add", 1.0))
