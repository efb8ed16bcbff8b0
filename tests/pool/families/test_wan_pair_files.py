"""The files of a model that is two diffusion models: put together, saved, patched, as folders of diffusers; and what is
said of files that make no pair."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.actors.config.separate_models import separate_models
from modelpool.pool.catalog.registry.assembling import SelectedFiles, assemble
from modelpool.pool.catalog.registry.registry import open_registry
from modelpool.pool.families.two_experts import misassigned
from modelpool.pool.files.formats.model_description import read_description
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import describe
from modelpool.pool.models.loading.recognition_input import recognise_file
from modelpool.pool.models.lora_names.lora_key_map import lora_key_map
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import MissingParts, UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import ShiftBySize
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_wan_pairs import FIELDS as SIZES
from tests.pool.families.test_wan_pairs import runs_of
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import LOW_SEED, TINY, TinyPair, flow_scheduler, write_pair, write_pair_folder
from tests.pool.families.tiny_transformers import FAMILIES, seeded
from tests.pool.inference.conditioning.test_image_concat import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WAN, FIELDS = TINY["wan_t2v"], {**SIZES, "steps": 3}
HIGH, LOW = "model.diffusion_model.", "low_noise_model."
#: a weight of both, and what LoRAs call it
WEIGHT, NAMED = "blocks.0.self_attn.q", "diffusion_model.blocks.0.self_attn.q"


def save_lora(path: Path, shape: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    up, down = torch.randn(shape[0], 2, generator=generator), torch.randn(2, shape[1], generator=generator)
    save_file({f"{NAMED}.lora_up.weight": up * 0.1, f"{NAMED}.lora_down.weight": down}, path)


def moved(model: TinyModel, file: str, folder: Path) -> TinyModel:
    """A model whose one file is `file`, with the tokenizers of `model`."""
    folder.mkdir()
    shutil.move(file, folder / "tiny.safetensors")
    for tokenizer in Path(model.model.path).parent.glob("tokenizer_*"):
        shutil.copytree(tokenizer, folder / tokenizer.name)
    return TinyModel.of_folder(folder)


def test_a_pair_is_saved_as_one_file_and_opens_as_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    model = TinyPair(tmp_path / "pair", WAN)
    save_checkpoint(model.engine._opened(model.model), tmp_path / "whole.safetensors")
    high = load_file(tmp_path / "pair" / "wan_high_noise.safetensors")
    low = load_file(tmp_path / "pair" / "wan_low_noise.safetensors")
    saved = load_file(tmp_path / "whole.safetensors")
    expected = {**high, **{LOW + key: tensor for key, tensor in low.items()}}
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in expected.items())
    drawn = model.made(**FIELDS).latents[0]
    again = moved(model, str(tmp_path / "whole.safetensors"), tmp_path / "one")
    assert again.family.title == model.family.title == "Wan 2.2 text-to-video, both experts"
    assert torch.equal(again.made(**FIELDS).latents[0], drawn)
    for each in (model, again):
        each.close()


def test_each_model_is_patched_by_the_loras_that_are_for_it(tmp_path: Path) -> None:
    """One file for each, as such LoRAs are published: the video is the video of the merged models, each with its
    own."""
    loras, pair = tmp_path / "loras", tmp_path / "pair"
    for folder in (loras, pair):
        folder.mkdir()
    write_pair(pair, WAN)
    model = TinyModel.of_folder(pair, loras=(loras,))
    shape = open_checkpoint(model.model.source).shapes[f"{HIGH}{WEIGHT}.weight"]
    for seed, name in enumerate(("some_high_noise", "some_low_noise")):
        save_lora(loras / f"{name}.safetensors", shape, seed)
    plain = model.made(**FIELDS).latents[0]
    chosen = ["some_high_noise:0.8:high", "some_low_noise:0.5:low"]
    drawn = model.made(**FIELDS, loras=chosen)
    assert [[lora.name for lora in work.loras] for work in runs_of(drawn)] == [["some_high_noise"], ["some_low_noise"]]
    exchanged = model.made(**FIELDS, loras=["some_high_noise:0.8:low", "some_low_noise:0.5:high"]).latents[0]
    assert not torch.allclose(plain, drawn.latents[0], atol=1e-3)
    assert not torch.allclose(exchanged, drawn.latents[0], atol=1e-3)
    merged = _merged(model, tmp_path)
    assert_equal(merged.made(**FIELDS).latents[0], drawn.latents[0])
    for each in (model, merged):
        each.close()


def _merged(model: TinyModel, folder: Path) -> TinyModel:
    """`model` with both LoRAs in its files: each changes its own model's weight and no other."""
    found = [
        replace(model.catalog.find_lora(f"some_{half}_noise", strength), noise=half)
        for half, strength in (("high", 0.8), ("low", 0.5))
    ]
    opened = model.engine._opened(model.model)
    save_checkpoint(opened, folder / "merged.safetensors", loras=found)
    before, after = dict(opened.checkpoint.mapped.tensors()), load_file(folder / "merged.safetensors")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {f"{HIGH}{WEIGHT}.weight", f"{LOW}{WEIGHT}.weight"}
    deltas = [after[key] - before[key] for key in sorted(changed)]
    assert not torch.allclose(deltas[0], deltas[1], atol=1e-3)
    return moved(model, str(folder / "merged.safetensors"), folder / "merged")


def test_a_lora_for_both_changes_both(tmp_path: Path) -> None:
    loras, pair = tmp_path / "loras", tmp_path / "pair"
    for folder in (loras, pair):
        folder.mkdir()
    write_pair(pair, WAN)
    model = TinyModel.of_folder(pair, loras=(loras,))
    save_lora(loras / "some.safetensors", open_checkpoint(model.model.source).shapes[f"{HIGH}{WEIGHT}.weight"], 3)
    both = model.made(**FIELDS, loras=["some"])
    assert [len(work.loras) for work in runs_of(both)] == [1, 1]
    twice = model.made(**FIELDS, loras=["some:1:high", "some:1:low"])
    assert torch.equal(both.latents[0], twice.latents[0])
    assert [task.uses[0].patch_digest for task in both.tasks] == [task.uses[0].patch_digest for task in twice.tasks]
    model.close()


def test_a_lora_for_one_model_changes_no_text_encoder(tmp_path: Path) -> None:
    """Found in a review: one that is for each of the models changed the text encoder, which both read, twice."""
    loras, pair = tmp_path / "loras", tmp_path / "pair"
    for folder in (loras, pair):
        folder.mkdir()
    write_pair(pair, WAN)
    model = TinyModel.of_folder(pair, loras=(loras,))
    opened = model.engine._opened(model.model)
    built = opened.component(Role.TEXT_ENCODER).built
    name, target = next(
        (name, ranges[0]) for name, ranges in lora_key_map(built).items() if len(ranges[0].source_shape) == 2
    )
    save_lora(loras / "some.safetensors", opened.checkpoint.shapes[f"{HIGH}{WEIGHT}.weight"], 3)
    rows, columns = target.source_shape
    words = {f"{name}.lora_up.weight": torch.ones(rows, 1), f"{name}.lora_down.weight": torch.ones(1, columns)}
    save_file(load_file(loras / "some.safetensors") | words, loras / "some.safetensors")
    found = model.catalog.find_lora("some", 1.0)
    high, low = (replace(found, noise=noise) for noise in ("high", "low"))
    assert model.catalog.touches(model.model, Role.TEXT_ENCODER, found)
    assert model.catalog.lora_warning(model.model, found) is None
    for lora in (high, low):
        assert not model.catalog.touches(model.model, Role.TEXT_ENCODER, lora)
        told = model.catalog.lora_warning(model.model, lora)
        assert told == f"1 of its patches are for text encoders: not used, as it is for {lora.noise} noise only"
    before = opened.checkpoint.mapped.tensors()
    changed = []
    for place, chosen in enumerate(((found,), (high, low))):
        save_checkpoint(opened, tmp_path / f"{place}.safetensors", loras=chosen)
        after = load_file(tmp_path / f"{place}.safetensors")
        changed.append({key for key in after if not torch.equal(before[key], after[key])})
    assert changed[1] == {f"{HIGH}{WEIGHT}.weight", f"{LOW}{WEIGHT}.weight"}
    assert len(changed[0] - changed[1]) == 1
    model.close()


def test_a_folder_of_diffusers_has_both_and_says_where_the_second_begins(tmp_path: Path) -> None:
    """Its scheduler, whichever it is, says the shift; its index the boundary."""
    (tmp_path / "files").mkdir()
    folder = tmp_path / "folders" / "tiny"
    folder.mkdir(parents=True)
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=12.0
    )
    write_pair_folder(folder, WAN, 0.9, scheduler)
    files, model = TinyPair(tmp_path / "files", WAN), TinyModel.of_folder(tmp_path / "folders")
    sampling = model.family.sampling
    assert sampling.low_noise is not None
    assert (sampling.low_noise.boundary, sampling.noise.shift) == (0.9, 12.0)
    found, wanted = model.made(**FIELDS), files.made(**FIELDS, low_noise=":0.9")
    assert_equal(found.latents[0], wanted.latents[0])
    for each in (files, model):
        each.close()


def test_a_folder_whose_shift_depends_on_the_size_is_run(tmp_path: Path) -> None:
    """Found in a review: it opened, and every request died of an assertion."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    settings = {"base_image_seq_len": 16, "max_image_seq_len": 96, "base_shift": 0.5, "max_shift": 4.0}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **settings)
    write_pair_folder(folder, WAN, 0.9, scheduler)
    model = TinyModel.of_folder(tmp_path)
    assert model.family.sampling.noise.shift_by_size == ShiftBySize((16, 96), (0.5, 4.0))
    switches = []
    for width in (32, 192):
        made = model.made(**{**FIELDS, "steps": 6, "width": width})
        assert torch.isfinite(made.latents[0]).all()
        high, low = runs_of(made)
        assert high.steps_run + low.steps_run == 6
        switches.append(high.schedule.switch)
    assert switches[0] < switches[1]
    model.close()


@pytest.mark.parametrize("boundary", [None, 875, 0.0, 1.0, "much"])
def test_a_folder_that_does_not_say_where_the_second_begins_is_refused(boundary: Any, tmp_path: Path) -> None:
    write_pair_folder(tmp_path, WAN, boundary, flow_scheduler(12.0))
    with pytest.raises(
        UnknownArchitecture, match=r"configuration of model_index\.json: boundary_ratio: found .*0\.875"
    ):
        open_checkpoint(tmp_path)


def test_a_folder_of_one_model_is_what_it_was(tmp_path: Path) -> None:
    write_pair_folder(tmp_path, WAN, None, flow_scheduler(8.0))
    shutil.rmtree(tmp_path / "transformer_2")
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "transformer_2": [None, None]}))
    family = open_checkpoint(tmp_path).family
    assert (family.sampling.low_noise, Role.DIFFUSION_MODEL_2 in family.prefixes) == (None, False)


def test_a_pair_is_named_in_a_configuration_and_by_the_command(tmp_path: Path) -> None:
    write_pair(tmp_path, WAN).unlink()
    said = {"checkpoint": "wan_high_noise.safetensors", "low_noise": "wan_low_noise.safetensors"}
    (configured,) = separate_models({"wan22": said}, tmp_path, ())
    assert configured.assembly.low_noise == str(tmp_path / "wan_low_noise.safetensors")
    assert f"low_noise = {json.dumps(configured.assembly.low_noise)}" in configured.describe()
    registry = open_registry((tmp_path,), (), tmp_path / "state", False, False)
    made = assemble(registry, "pair", SelectedFiles(checkpoint="wan_high_noise", low_noise="wan_low_noise"), tmp_path)
    assert json.loads(made.path.read_text())["low_noise"] == "wan_low_noise.safetensors"
    for source in (configured.assembly, read_description(made.path)):
        assert open_checkpoint(source).family.title == made.info.title == "Wan 2.2 text-to-video, both experts"


def put_together(folder: Path, high: dict[str, Tensor], low: dict[str, Tensor], *names: str) -> Assembly:
    for name, file in zip(names, (high, low), strict=True):
        save_file({key: tensor.contiguous() for key, tensor in file.items()}, folder / name)
    path = folder / "tiny.model.json"
    path.write_text(json.dumps({"format": 1, "checkpoint": names[0], "low_noise": names[1]}))
    return read_description(path)


def test_files_whose_names_are_exchanged_are_told(tmp_path: Path) -> None:
    """The same keys and shapes are in both: a name is all that tells."""
    low = WAN.publish(seeded(WAN.model, LOW_SEED).state_dict())
    names = "wan2.2_t2v_low_noise_14B.safetensors", "wan2.2_t2v_high_noise_14B.safetensors"
    with pytest.raises(MissingParts, match=r"low_noise_14B\S+ is used as high-noise expert and .* swapped"):
        open_checkpoint(put_together(tmp_path, WAN.file(), low, *names))
    family = open_checkpoint(put_together(tmp_path, WAN.file(), low, "a.safetensors", "b.safetensors")).family
    assert family.title == "Wan 2.2 text-to-video, both experts"
    with pytest.raises(
        MissingParts, match=r"a\.safetensors is used for both high noise and low noise, expected two files"
    ):
        open_checkpoint(
            Assembly(str(tmp_path / "x"), str(tmp_path / "a.safetensors"), low_noise=f"{tmp_path}/a.safetensors")
        )


@pytest.mark.parametrize(
    ("high", "low", "told"),
    [
        ("wan_high_noise_a", "wan_high_noise_b", r"_b\.safetensors is used as low-noise expert, .* high noise"),
        ("Wan-LowNoise", "b", r"Wan-LowNoise\.safetensors is used as high-noise expert, .* low noise"),
        ("high_noise_and_low_noise", "wan_low_noise", ""),
        ("wan_high_noise", "b", ""),
    ],
)
def test_a_file_whose_name_speaks_of_the_other_model_is_refused(high: str, low: str, told: str, tmp_path: Path) -> None:
    """Found in a review: two files for high noise were taken for a pair."""
    assert re.search(told, misassigned(*(str(tmp_path / f"{name}.safetensors") for name in (high, low))))
    assert bool(told) == bool(misassigned(f"{high}.safetensors", f"{low}.safetensors"))


def test_a_second_model_beside_another_is_kept_where_the_first_is_exchanged(tmp_path: Path) -> None:
    """Found in a review: it was lost, and the rest ran as a model that is one."""
    low, other = (published(seeded(WAN.model, seed)) for seed in (LOW_SEED, 9))
    save_file(WAN.file() | {LOW + key: tensor for key, tensor in low.items()}, tmp_path / "both.safetensors")
    save_file(other, tmp_path / "other.safetensors")
    save_file(WAN.file(), tmp_path / "plain.safetensors")
    whole, one, plain = (str(tmp_path / f"{name}.safetensors") for name in ("both", "other", "plain"))
    for given, expected in (
        (Assembly("a", whole, one), (other, low)),
        (Assembly("b", whole, whole), (published(seeded(WAN.model, 1)), low)),
        (Assembly("c", whole, low_noise=one), (published(seeded(WAN.model, 1)), other)),
        (Assembly("d", plain, one, low_noise=whole), (other, low)),
    ):
        checkpoint = open_checkpoint(given)
        assert checkpoint.family.title == "Wan 2.2 text-to-video, both experts"
        found = checkpoint.mapped.tensors()
        first = checkpoint.family.prefixes[Role.DIFFUSION_MODEL]
        for prefix, wanted in zip((first, LOW), expected, strict=True):
            assert all(torch.equal(found[prefix + key], tensor) for key, tensor in wanted.items())


def test_a_second_model_that_makes_no_pair_with_another_first_one_is_told(tmp_path: Path) -> None:
    low = published(seeded(WAN.model, LOW_SEED))
    save_file(WAN.file() | {LOW + key: tensor for key, tensor in low.items()}, tmp_path / "both.safetensors")
    wider = diffusers.WanTransformer3DModel(**{**WAN.model().config, "num_layers": 3})
    save_file(published(seeded(lambda: wider, 2)), tmp_path / "wider.safetensors")
    with pytest.raises(
        MissingParts, match=r"low-noise expert in \S+both\.safetensors is .* with different sizes: .*expected 3"
    ):
        open_checkpoint(Assembly("x", f"{tmp_path}/both.safetensors", f"{tmp_path}/wider.safetensors"))


def test_a_file_without_prefixes_may_have_both(tmp_path: Path) -> None:
    """Found in a review: keys of the second model were taken for the first one's."""
    high, low = (published(seeded(WAN.model, seed)) for seed in (9, LOW_SEED))
    save_file(high | {LOW + key: tensor for key, tensor in low.items()}, tmp_path / "bare.safetensors")
    save_file(WAN.file(), tmp_path / "whole.safetensors")
    facts = recognise_file(tmp_path / "bare.safetensors")
    assert [part.tensors for part in facts.components] == [len(high), len(low)]
    assert facts.other_tensors == 0
    found = open_checkpoint(Assembly("x", f"{tmp_path}/whole.safetensors", f"{tmp_path}/bare.safetensors")).mapped
    told = {key for key in found.header.tensors if key.startswith((HIGH, LOW))}
    assert told == {prefix + key for prefix, file in ((HIGH, high), (LOW, low)) for key in file}
    assert torch.equal(found.tensors()[f"{LOW}{WEIGHT}.weight"], low[f"{WEIGHT}.weight"])


def published(module: torch.nn.Module) -> dict[str, Tensor]:
    return {key: tensor.contiguous().clone() for key, tensor in WAN.publish(module.state_dict()).items()}


def test_a_model_that_makes_no_pair_is_told(tmp_path: Path) -> None:
    names = "high.safetensors", "low.safetensors"
    wider = diffusers.WanTransformer3DModel(**{**WAN.model().config, "num_layers": 3})
    low = WAN.publish(seeded(lambda: wider, 2).state_dict())
    with pytest.raises(MissingParts, match=r"low-noise expert in \S+low\.safetensors is .* with different sizes: .*3"):
        open_checkpoint(put_together(tmp_path, WAN.file(), low, *names))
    other = FAMILIES["flux_dev"]
    low = WAN.publish(seeded(WAN.model, LOW_SEED).state_dict())
    with pytest.raises(MissingParts, match=r"low\.safetensors is a low-noise expert, but Flux.* has none"):
        open_checkpoint(put_together(tmp_path, other.file(), low, *names))
    vae = {key: tensor for key, tensor in WAN.file().items() if key.startswith("vae.")}
    with pytest.raises(MissingParts, match=r"low\.safetensors: found no known diffusion model in it"):
        open_checkpoint(put_together(tmp_path, WAN.file(), vae, *names))


def test_what_is_in_the_files_is_told(tmp_path: Path) -> None:
    described = describe(read_description(write_pair(tmp_path, WAN)))
    sizes = {part.role: part.parameters for part in described.components}
    assert sizes[Role.DIFFUSION_MODEL] == sizes[Role.DIFFUSION_MODEL_2] > 0
    alone = describe(tmp_path / "wan_high_noise.safetensors")
    assert (described.other_bytes, len(alone.components)) == (alone.other_bytes, len(described.components) - 1)
    low = WAN.publish(seeded(WAN.model, LOW_SEED).state_dict())
    save_file(
        WAN.file() | {LOW + key: tensor.contiguous() for key, tensor in low.items()}, tmp_path / "both.safetensors"
    )
    facts = recognise_file(tmp_path / "both.safetensors")
    assert [part.name for part in facts.components].count("wan_t2v") == 2
    assert facts.other_tensors == recognise_file(tmp_path / "wan_high_noise.safetensors").other_tensors


def test_scaled_weights_of_both_are_read(tmp_path: Path) -> None:
    """As the pair is most often had: 8-bit floats with a factor each, and a marker for the whole file."""

    def scaled(file: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        key = f"{prefix}{WEIGHT}.weight"
        factor = file[key].abs().max() / 448
        weight = (file[key] / factor).to(torch.float8_e4m3fn)
        beside = {
            f"{prefix}{WEIGHT}.scale_weight": factor,
            f"{prefix}scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
        }
        return {**file, key: weight, **beside}

    low = scaled(WAN.publish(seeded(WAN.model, LOW_SEED).state_dict()), "")
    checkpoint = open_checkpoint(
        put_together(tmp_path, scaled(WAN.file(), HIGH), low, "a.safetensors", "b.safetensors")
    )
    assert [checkpoint.quantization(role) for role in (Role.DIFFUSION_MODEL, Role.DIFFUSION_MODEL_2)] == [
        {"float8_e4m3fn": 1}, {"float8_e4m3fn": 1},
    ]  # fmt: skip
    plain = seeded(WAN.model, LOW_SEED).blocks[0].attn1.to_q.weight
    built: Any = checkpoint.build(Role.DIFFUSION_MODEL_2).module
    stored = built.blocks[0].attn1.to_q.weight
    torch.testing.assert_close(stored.dequantize(), plain, atol=0.1 * float(plain.abs().max()), rtol=0)
