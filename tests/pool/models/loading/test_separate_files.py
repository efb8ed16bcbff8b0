"""A model out of separate files makes the image of the whole file, bit for bit, and equal components are one: on the
device once, uploaded once, whoever was opened first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import MissingParts
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.models.loading.tiny_checkpoint import write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, open_engine
from tests.pool.separate import ENCODERS, Painter, split_up, write_atomically


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = open_engine("sim", PLENTY_BYTES)
    yield opened
    opened.close()


def write_description(path: Path, parts: dict[str, Path], layout: str, **more: str) -> Path:
    """The model of all `parts`, the text encoders in the wrong order."""
    said = {
        "format": 1,
        "diffusion_model": parts["unet"].relative_to(path.parent).as_posix(),
        "vae": parts["vae"].relative_to(path.parent).as_posix(),
        "text_encoders": [parts[name].relative_to(path.parent).as_posix() for name in reversed(ENCODERS[layout])],
    }
    path.write_text(json.dumps(said | more))
    return path


@pytest.mark.parametrize("layout", ["tiny_sd1", "tiny_sdxl"])
def test_separate_files_make_the_image_of_the_whole_file(tmp_path: Path, engine: Engine, layout: str) -> None:
    whole = write_atomically(tmp_path / "checkpoints" / "whole.safetensors", layout)
    parts = split_up(whole, layout, tmp_path)
    write_description(tmp_path / "apart.model.json", parts, layout)
    named = Assembly(
        "/[models]/named",
        diffusion_model=str(parts["unet"]),
        vae=str(parts["vae"]),
        text_encoders=tuple(str(parts[name]) for name in ENCODERS[layout]),
    )
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state", assemblies=[named])
    listed = {model.name: model for model in catalog.models()}
    assert listed["apart"].family == listed["named"].family == listed["whole"].family
    assert listed["apart"].problem == listed["named"].problem == ""
    painter = Painter(engine, catalog)
    images = [painter.image(name) for name in ("apart", "named", "whole")]
    assert np.array_equal(images[0], images[2])
    assert np.array_equal(images[1], images[2])
    apart, other, one = (catalog.find_model(name) for name in ("apart", "named", "whole"))
    assert apart.sha256 == other.sha256 != one.sha256, "equal files for equal parts are one model"


def test_a_checkpoint_with_another_vae_decodes_with_that_one(tmp_path: Path, engine: Engine) -> None:
    first = write_atomically(tmp_path / "first.safetensors", "tiny_sd1", seed=1)
    second = write_atomically(tmp_path / "second.safetensors", "tiny_sd1", seed=2)
    parts = split_up(second, "tiny_sd1", tmp_path)
    said = {"format": 1, "checkpoint": "first.safetensors", "vae": f"vae/{parts['vae'].name}"}
    (tmp_path / "mixed.model.json").write_text(json.dumps(said))
    tensors = load_file(first)
    donor = load_file(second)
    tensors |= {key: donor[key] for key in donor if key.startswith("first_stage_model.")}
    save_file(tensors, tmp_path / "expected.safetensors")
    painter = Painter(engine, Catalog([tmp_path], [], "sim", tmp_path / "state"))
    mixed = painter.image("mixed")
    assert np.array_equal(mixed, painter.image("expected"))
    assert not np.array_equal(mixed, painter.image("first"))


def test_a_part_that_is_changed_makes_another_model(tmp_path: Path) -> None:
    whole = write_atomically(tmp_path / "checkpoints" / "whole.safetensors", "tiny_sd1")
    parts = split_up(whole, "tiny_sd1", tmp_path)
    write_description(tmp_path / "apart.model.json", parts, "tiny_sd1")
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    before = catalog.find_model("apart")
    data = bytearray(parts["vae"].read_bytes())
    data[-1] ^= 1
    parts["vae"].write_bytes(data)
    after = catalog.find_model("apart")
    assert after.sha256 != before.sha256
    keys, old = dict(after.components), dict(before.components)
    assert keys[Role.TEXT_ENCODER] == old[Role.TEXT_ENCODER]
    assert keys[Role.VAE] != old[Role.VAE]


def test_equal_components_of_two_checkpoints_are_one(tmp_path: Path, engine: Engine) -> None:
    """Two of SDXL's kind with the same text encoders and VAE; of the second only the UNet moves."""
    write_atomically(tmp_path / "one.safetensors", "tiny_sdxl", seed=1)
    tensors = load_file(tmp_path / "one.safetensors")
    other = write_atomically(tmp_path / "two.safetensors", "tiny_sdxl", seed=2)
    others = load_file(other)
    unet = {key: tensor for key, tensor in others.items() if key.startswith("model.diffusion_model.")}
    save_file(tensors | unet, other)
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    painter = Painter(engine, catalog)
    alone = []
    for name in ("one", "two"):
        other_engine = open_engine("sim", PLENTY_BYTES)
        alone.append(Painter(other_engine, catalog).image(name))
        other_engine.close()
    first = painter.image("one")
    bytes_of_one = painter.uploaded_bytes
    second = painter.image("two")
    assert np.array_equal(first, alone[0])
    assert np.array_equal(second, alone[1])
    one, two = (dict(catalog.find_model(name).components) for name in ("one", "two"))
    shared = [role for role in one if one[role] == two[role]]
    assert shared == [Role.TEXT_ENCODER, Role.TEXT_ENCODER_2, Role.VAE]
    sizes = {role: spec.upload_bytes for role, spec in catalog.components(catalog.find_model("two")).items()}
    assert painter.uploaded_bytes - bytes_of_one == sizes[Role.DIFFUSION_MODEL]
    keys = [entry.component for entry in engine.residency().entries]
    assert len(keys) == len(set(keys)) == 5, keys


@pytest.mark.parametrize("order", [("sdxl", "refiner"), ("refiner", "sdxl")])
def test_a_text_encoder_that_two_families_read_in_different_places_is_one(
    tmp_path: Path, engine: Engine, order: tuple[str, str]
) -> None:
    """CLIP-G is the second text encoder of SDXL and the only one of its refiner; their facts stay their own."""
    sdxl, refiner = write_atomically(tmp_path / "sdxl.safetensors", "tiny_sdxl"), tmp_path / "refiner.safetensors"
    own = load_file(write_atomically(refiner, "tiny_sdxl_refiner", seed=5))
    theirs = load_file(sdxl)
    begins = ENCODERS["tiny_sdxl"]["clip_g"], ENCODERS["tiny_sdxl_refiner"]["clip_g"]
    clip_g = {begins[1] + k.removeprefix(begins[0]): t for k, t in theirs.items() if k.startswith(begins[0])}
    assert clip_g.keys() == {key for key in own if key.startswith(begins[1])}
    save_file(own | clip_g, refiner)
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    apart = {}
    for name in order:
        one = open_engine("sim", PLENTY_BYTES)
        apart[name] = Painter(one, Catalog([tmp_path], [], "sim", tmp_path / "state")).image(name)
        one.close()
    painter = Painter(engine, catalog)
    for name in order:
        assert np.array_equal(painter.image(name), apart[name]), name
    keys = {name: dict(catalog.find_model(name).components) for name in order}
    assert keys["sdxl"][Role.TEXT_ENCODER_2] == keys["refiner"][Role.TEXT_ENCODER]


@pytest.mark.parametrize("order", [("plain", "other"), ("other", "plain")])
def test_loras_on_a_shared_text_encoder_are_each_model_s_own(
    tmp_path: Path, engine: Engine, order: tuple[str, str]
) -> None:
    write_atomically(tmp_path / "plain.safetensors", "tiny_sd1", seed=1)
    tensors = load_file(tmp_path / "plain.safetensors")
    changed = {k: t * 1.01 if k.startswith("model.diffusion_model.") else t for k, t in tensors.items()}
    save_file({k: t.to(tensors[k].dtype) for k, t in changed.items()}, tmp_path / "other.safetensors")
    (tmp_path / "loras").mkdir()
    write_tiny_lora(tmp_path / "loras" / "light.safetensors")
    catalog = Catalog([tmp_path], [tmp_path / "loras"], "sim", tmp_path / "state")
    expected = {}
    for name, loras in zip(order, ({"light": 0.8}, {}), strict=True):
        one = open_engine("sim", PLENTY_BYTES)
        expected[name] = Painter(one, catalog).image(name, loras)
        one.close()
    painter = Painter(engine, catalog)
    for _ in range(2):  # patched, plain, patched again: nothing of one is left in the other
        assert np.array_equal(painter.image(order[0], {"light": 0.8}), expected[order[0]])
        assert np.array_equal(painter.image(order[1]), expected[order[1]])


def test_the_same_weights_in_another_type_are_another_component(tmp_path: Path) -> None:
    write_atomically(tmp_path / "half.safetensors", "tiny_sd1")
    tensors = load_file(tmp_path / "half.safetensors")
    wide = {k: t.float() if k.startswith("first_stage_model.") else t for k, t in tensors.items()}
    save_file(wide, tmp_path / "wide.safetensors")
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    half, other = (dict(catalog.find_model(name).components) for name in ("half", "wide"))
    assert half[Role.DIFFUSION_MODEL] == other[Role.DIFFUSION_MODEL]
    assert half[Role.VAE] != other[Role.VAE]


def test_what_is_missing_is_told_with_the_files_that_would_fit(tmp_path: Path) -> None:
    whole = write_atomically(tmp_path / "checkpoints" / "whole.safetensors", "tiny_sd1")
    parts = split_up(whole, "tiny_sd1", tmp_path)
    said = {"format": 1, "diffusion_model": "unet/paint_unet.safetensors"}
    (tmp_path / "short.model.json").write_text(json.dumps(said))
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    [problem] = [model.problem for model in catalog.models() if model.name == "short"]
    assert "a VAE with latents of sd1" in problem
    with pytest.raises(MissingParts) as raised:
        catalog.find_model("short")
    text = str(raised.value)
    assert "the text encoder clip_l and a VAE with latents of sd1 are missing: Stable Diffusion 1 reads clip_l" in text
    assert f"a text encoder clip_l that would fit: {parts['clip_l']}, {whole}" in text
    assert f"a VAE that would fit: {parts['vae']}, {whole}" in text


def test_hashes_of_parts_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelpool.pool.catalog.registry import contents, registry

    for module in (registry, contents):
        monkeypatch.setattr(module, "SETTLED_NS", -(10**12), raising=False)
    whole = write_atomically(tmp_path / "m" / "checkpoints" / "whole.safetensors", "tiny_sd1")
    parts = split_up(whole, "tiny_sd1", tmp_path / "m")
    shutil.rmtree(whole.parent)
    write_description(tmp_path / "m" / "apart.model.json", parts, "tiny_sd1")
    first = Catalog([tmp_path / "m"], [], "sim", tmp_path / "state").find_model("apart")
    for module in (registry, contents):
        monkeypatch.setattr(module, "hash_file", lambda *_: pytest.fail("reads it again"))
    again = Catalog([tmp_path / "m"], [], "sim", tmp_path / "state")
    assert again.find_model("apart") == first
    assert again.find_model("apart").components == first.components
    [entry] = [e for e in again.registry.listing().entries if e.name == "apart"]
    assert entry.hashes is not None
    assert entry.hashes.sha256 == first.sha256


@pytest.mark.parametrize("name", ["flux_dev", "sd3", "ltxv"])
def test_models_of_transformers_are_put_together_too(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tensors = family.file()
    save_file(tensors, tmp_path / "whole.safetensors")
    files = {"unet": "model.diffusion_model.", "vae": "vae."}
    files |= {member: f"text_encoders.{member}.transformer." for member in family.encoders}
    for part, prefix in files.items():
        own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        save_file(own, tmp_path / f"{part}.safetensors")
    said = {
        "format": 1,
        "diffusion_model": "unet.safetensors",
        "vae": "vae.safetensors",
        "text_encoders": [f"{member}.safetensors" for member in family.encoders],
    }
    (tmp_path / "apart.model.json").write_text(json.dumps(said))
    apart, whole = (open_checkpoint(tmp_path / file) for file in ("apart.model.json", "whole.safetensors"))
    assert (apart.family.name, apart.roles, apart.latent) == (whole.family.name, whole.roles, whole.latent)
    for role in whole.roles:
        built, expected = (found.build(role).module.state_dict() for found in (apart, whole))
        assert built.keys() == expected.keys()
        assert all(torch.equal(built[key], expected[key]) for key in built), role
