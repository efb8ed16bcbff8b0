"""`save_checkpoint`: loaded and saved weights come back, and patched weights are what runs compute.

Proves: without patches files are equal byte for byte, leftovers and metadata included; merged weights are the patched
weights of a run bit for bit, nothing else changes, and the merged file draws the image of model and LoRA; one weight
at a time is in memory; files say what was merged; averages of training, types and ranges are as the docstrings say.
"""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.component_weights import ComponentWeights
from modelpool.pool.values.core.errors import OutputFailed, PatchFailed, UnusableField
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.patches.stochastic_rounding import round_to, seed_of
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.models.saving.models import LAYOUTS, bits, changed, lora_ref, opened
from tests.pool.pipeline import PLENTY_BYTES, Pipeline, open_engine
from tests.pool.toy import make_patch

UNET = "model.diffusion_model."
TO_Q = UNET + "input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
OWN_TO_Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"
TO_Q_SET = PatchSet((make_patch(OWN_TO_Q, (48, 48), "p"),))
#: what training leaves in files; none of it belongs to a component
LEFTOVERS = {
    "betas": torch.linspace(0.1, 0.2, 7, dtype=torch.float64),
    "model_ema.decay": torch.tensor(0.999),
    "model_ema.diffusion_modelinput_blocks00weight": torch.ones(3, 3),
    "first_stage_model.loss.logvar": torch.zeros(()),
    "v_pred": torch.empty(0),
    "zz_flags": torch.tensor([True, False, True]),
}


@pytest.fixture
def sd1(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "toy.safetensors", metadata={"modelspec.title": "Toy", "note": "\u00e9"})


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_tiny_lora(tmp_path / "light.safetensors", seed=5)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_loaded_and_saved_is_the_file(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    source = write_tiny_checkpoint(tmp_path / "a.safetensors", dtype=dtype, layout=getattr(layouts, layout)())
    saved = save_checkpoint(open_checkpoint(source), tmp_path / "b.safetensors")
    assert changed(source, tmp_path / "b.safetensors") == set()
    assert metadata_of(tmp_path / "b.safetensors") == metadata_of(source)
    assert (tmp_path / "b.safetensors").read_bytes() == source.read_bytes()
    assert (saved.file_bytes, saved.patched) == (source.stat().st_size, 0)


def test_what_belongs_to_no_component_is_carried_over(tmp_path: Path, sd1: Path) -> None:
    source = tmp_path / "left.safetensors"
    save_file({**load_file(sd1), **LEFTOVERS}, source, {"format": "pt"})
    save_checkpoint(opened(source), tmp_path / "b.safetensors")
    assert changed(source, tmp_path / "b.safetensors") == set()
    save_checkpoint(opened(source), tmp_path / "c.safetensors", patches={Role.DIFFUSION_MODEL: TO_Q_SET})
    patched = load_file(tmp_path / "c.safetensors")
    assert load_file(source).keys() - patched.keys() == {key for key in LEFTOVERS if key.startswith("model_ema.")}
    assert all(bits(patched[key]) == bits(value) for key, value in LEFTOVERS.items() if key in patched)
    assert open_checkpoint(tmp_path / "c.safetensors").family == open_checkpoint(source).family


def test_averages_are_kept_or_left_out_as_asked(tmp_path: Path, sd1: Path) -> None:
    source, out = tmp_path / "left.safetensors", tmp_path / "b.safetensors"
    save_file({**load_file(sd1), **LEFTOVERS}, source)
    averages = {key for key in LEFTOVERS if key.startswith("model_ema.")}
    save_checkpoint(opened(source), out, keep_ema=False)
    assert load_file(source).keys() - load_file(out).keys() == averages
    save_checkpoint(opened(source), out, patches={Role.DIFFUSION_MODEL: TO_Q_SET}, keep_ema=True, overwrite=True)
    assert changed(source, out) == {TO_Q}


def test_merged_weights_are_those_of_a_run_and_nothing_else_changes(tmp_path: Path, lora: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "toy.safetensors", dtype=torch.float32)
    model, ref, out = opened(source), lora_ref(lora, 0.7), tmp_path / "merged.safetensors"
    saved = save_checkpoint(model, out, loras=[ref])
    expected = {}
    for role in (Role.DIFFUSION_MODEL, Role.TEXT_ENCODER):
        built, patches = model.component(role).built, model.patch_set(role, [ref])
        parameters = {name: p.data for name, p in built.module.named_parameters()}
        for name in patches.parameters:
            weight = parameters[name].clone()
            for function in patches.functions(name):
                weight = function(weight)
            parameters[name] = weight
        expected |= built.key_map.save(parameters)
    merged = load_file(out)
    assert {key: bits(merged[key]) for key in expected} == {key: bits(value) for key, value in expected.items()}
    assert len(changed(source, out)) == saved.patched == 6


def test_a_lora_of_a_part_of_the_schedule_cannot_be_merged(tmp_path: Path, lora: Path) -> None:
    model = opened(write_tiny_checkpoint(tmp_path / "toy.safetensors"))
    with pytest.raises(UnusableField, match=r"'light' from 0 to 0\.5 of the schedule, expected all steps"):
        save_checkpoint(model, tmp_path / "merged.safetensors", loras=[replace(lora_ref(lora, 0.7), end=0.5)])
    for changes, found in (
        ({"keyframes": ((0.0, 0.2), (0.5, 0.7))}, "with keyframes"),
        ({"only": ("negative", "region0")}, "with only for negative, region0"),
    ):
        changing: Any = {**changes}
        with pytest.raises(UnusableField, match=rf"'light' {found}, expected one strength"):
            save_checkpoint(model, tmp_path / "merged.safetensors", loras=[replace(lora_ref(lora, 0.7), **changing)])
    assert not (tmp_path / "merged.safetensors").exists()


def test_the_merged_file_draws_the_image_of_model_and_lora(tmp_path: Path, lora: Path) -> None:
    images = []
    for folder in ("plain", "merged", "loras"):
        (tmp_path / folder).mkdir()
    lora = lora.rename(tmp_path / "loras" / lora.name)
    source = write_tiny_checkpoint(tmp_path / "plain" / "toy.safetensors", dtype=torch.float32)
    save_checkpoint(opened(source), tmp_path / "merged" / "toy.safetensors", loras=[lora_ref(lora, 0.7)])
    for folder, loras in (("plain", {"light": 0.7}), ("merged", {}), ("plain", {})):
        engine = open_engine("cpu", PLENTY_BYTES)
        images.append(Pipeline(engine, Catalog([tmp_path / folder], [lora.parent], "cpu"), loras).image())
        engine.close()
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])


def test_a_patch_of_one_part_of_a_fused_weight_leaves_the_others(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "a.safetensors", layout=layouts.tiny_sdxl())
    patch = make_patch("text_model.encoder.layers.1.self_attn.k_proj.weight", (32, 32), "k")
    turned = make_patch("text_projection.weight", (32, 32), "t")
    sets = {Role.TEXT_ENCODER_2: PatchSet((patch, turned))}
    save_checkpoint(opened(source), tmp_path / "b.safetensors", patches=sets)
    text = "conditioner.embedders.1.model."
    fused = f"{text}transformer.resblocks.1.attn.in_proj_weight"
    assert changed(source, tmp_path / "b.safetensors") == {fused, f"{text}text_projection"}
    before, after = load_file(source), load_file(tmp_path / "b.safetensors")
    assert torch.equal(before[fused][:32], after[fused][:32])
    assert torch.equal(before[fused][64:], after[fused][64:])
    assert torch.equal(after[fused][32:64], patch(before[fused][32:64].float()).half())
    assert torch.equal(after[f"{text}text_projection"].T, turned(before[f"{text}text_projection"].T.float()).half())


def test_eight_bit_floats_are_rounded_as_resident_weights_are(tmp_path: Path, sd1: Path) -> None:
    tensors = load_file(sd1)
    source = tmp_path / "fp8.safetensors"
    save_file({k: v.to(torch.float8_e4m3fn) if k.startswith(UNET) else v for k, v in tensors.items()}, source)
    save_checkpoint(opened(source), tmp_path / "b.safetensors", patches={Role.DIFFUSION_MODEL: TO_Q_SET})
    assert changed(source, tmp_path / "b.safetensors") == {TO_Q}
    weight = TO_Q_SET.functions(OWN_TO_Q)[0](load_file(source)[TO_Q].float())
    expected = round_to(weight, torch.float8_e4m3fn, seed_of(OWN_TO_Q))
    assert bits(load_file(tmp_path / "b.safetensors")[TO_Q]) == bits(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_dtype_is_for_the_weights_of_components_alone(tmp_path: Path, sd1: Path, dtype: torch.dtype) -> None:
    source, out = tmp_path / "left.safetensors", tmp_path / "b.safetensors"
    tensors = {**load_file(sd1), **LEFTOVERS}
    save_file(tensors, source)
    save_checkpoint(opened(source), out, dtype=dtype, patches={Role.DIFFUSION_MODEL: TO_Q_SET}, keep_ema=True)
    saved = load_file(out)
    position_ids = "cond_stage_model.transformer.text_model.embeddings.position_ids"
    for key, value in tensors.items():
        if key == TO_Q:
            value = TO_Q_SET.functions(OWN_TO_Q)[0](value.float())
        keeps = key == position_ids or (key in LEFTOVERS and not key.startswith("model_ema."))
        assert bits(saved[key]) == bits(value if keeps else value.to(dtype)), key
    assert open_checkpoint(out).build(Role.DIFFUSION_MODEL).module.get_parameter(OWN_TO_Q).dtype == dtype


def test_numbers_beyond_the_range_of_a_dtype_are_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "a.safetensors", dtype=torch.float32)
    tensors = load_file(source)
    tensors[TO_Q][3, 4] = 70000.0
    save_file(tensors, source)
    with pytest.raises(UnusableField, match=r"attn1\.to_q\.weight.*1 of 2304 numbers are beyond the range of F16"):
        save_checkpoint(opened(source), tmp_path / "b.safetensors", dtype=torch.float16)
    half = write_tiny_checkpoint(tmp_path / "half.safetensors")
    strong = PatchSet((make_patch(OWN_TO_Q, (48, 48), "p", 1e6),))
    with pytest.raises(UnusableField, match="beyond the range of F16"):
        save_checkpoint(opened(half), tmp_path / "b.safetensors", patches={Role.DIFFUSION_MODEL: strong})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "half.safetensors"]
    save_checkpoint(opened(source), tmp_path / "b.safetensors", dtype=torch.bfloat16)


def test_one_weight_at_a_time_is_in_memory(
    tmp_path: Path, sd1: Path, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Tensor]] = []
    source_of = ComponentWeights.source

    def watched(self: ComponentWeights, key: str, dtype: torch.dtype) -> Tensor:
        assert not [each for each in alive if each() is not None], f"{key}: weights before it are still there"
        tensor = source_of(self, key, dtype)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(ComponentWeights, "source", watched)
    save_checkpoint(opened(sd1), tmp_path / "b.safetensors", loras=[lora_ref(lora, 1.0)])
    assert len(alive) == 6


def test_the_file_says_what_was_merged_and_keeps_its_history(tmp_path: Path, lora: Path) -> None:
    hashes = {"modelspec.hash_sha256": "0x12", "sshs_model_hash": "34"}
    source = write_tiny_checkpoint(tmp_path / "toy.safetensors", metadata={"modelspec.title": "Toy", **hashes})
    first, second = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    ref = lora_ref(lora, 0.5)
    save_checkpoint(opened(source), first, loras=[ref, lora_ref(lora, 0.0)], metadata={"note": "mine", "format": "pt2"})
    said = metadata_of(first)
    assert json.loads(said["modelpool.merged"]) == [{"name": "light", "sha256": ref.sha256, "strength": 0.5}]
    assert json.loads(said["modelpool.source"]) == {"name": "toy", "sha256": opened(source).ref.sha256}
    assert said["modelspec.merged_from"] == "toy, light"
    assert (said["modelspec.title"], said["note"], said["format"]) == ("Toy", "mine", "pt2")
    assert not said.keys() & hashes.keys()
    save_checkpoint(opened(first), second, patches={Role.DIFFUSION_MODEL: TO_Q_SET})
    again = metadata_of(second)
    assert [each["name"] for each in json.loads(again["modelpool.merged"])] == ["light", "diffusion_model"]
    assert json.loads(again["modelpool.merged"])[1]["sha256"] == TO_Q_SET.digest
    assert again["modelpool.source"] == said["modelpool.source"]
    assert again["modelspec.merged_from"] == "toy, light, diffusion_model"
    save_checkpoint(opened(source), second, loras=[lora_ref(lora, 0.0)], overwrite=True)
    assert metadata_of(second) == metadata_of(source)
    assert changed(source, second) == set()


def test_a_model_may_be_written_over_itself(sd1: Path, lora: Path, tmp_path: Path) -> None:
    before = shutil.copy(sd1, tmp_path / "before.safetensors")
    with pytest.raises(OutputFailed, match="already exists"):
        save_checkpoint(opened(sd1), sd1)
    save_checkpoint(opened(sd1), sd1, loras=[lora_ref(lora, 1.0)], overwrite=True)
    assert len(changed(before, sd1)) == 6


def test_a_file_of_several_and_a_pickle_become_one_file(tmp_path: Path, sd1: Path) -> None:
    tensors = load_file(sd1)
    keys, names = list(tensors), ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")
    (tmp_path / "parts").mkdir()
    for name, part in zip(names, (keys[::2], keys[1::2]), strict=True):
        save_file({key: tensors[key] for key in part}, tmp_path / "parts" / name)
    where = {key: names[i % 2] for i, key in enumerate(keys)}
    index = tmp_path / "parts" / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    strided = {**tensors, TO_Q: tensors[TO_Q].t().contiguous().t()}
    torch.save({"state_dict": strided}, tmp_path / "toy.ckpt")
    for source in (index, tmp_path / "toy.ckpt"):
        for dtype, wanted in ((None, torch.float16), (torch.float32, torch.float32)):
            checkpoint = open_checkpoint(source, allow_pickle=True)
            save_checkpoint(checkpoint, tmp_path / "b.safetensors", dtype=dtype, overwrite=True)
            saved = load_file(tmp_path / "b.safetensors")
            assert saved.keys() == tensors.keys()
            for key, value in tensors.items():
                assert torch.equal(saved[key], value.to(wanted) if value.is_floating_point() else value), key


def test_what_cannot_be_saved_is_refused_with_a_reason(tmp_path: Path, sd1: Path, lora: Path) -> None:
    out = tmp_path / "b.safetensors"
    with pytest.raises(UnusableField, match=r"ends in \.safetensors"):
        save_checkpoint(opened(sd1), tmp_path / "b.ckpt")
    with pytest.raises(UnusableField, match="found text_encoder_2, expected components of the model: text_encoder,"):
        save_checkpoint(opened(sd1), out, patches={Role.TEXT_ENCODER_2: TO_Q_SET})
    with pytest.raises(UnusableField, match="bare checkpoint"):
        save_checkpoint(open_checkpoint(sd1), out, loras=[lora_ref(lora, 1.0)])
    with pytest.raises(PatchFailed):
        save_checkpoint(opened(sd1), out, patches={Role.VAE: TO_Q_SET})
    assert not out.exists()
