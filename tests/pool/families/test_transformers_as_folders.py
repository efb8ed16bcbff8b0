"""Families that run on transformers, saved as folders of diffusers: its classes load every component bit for bit, this
project reads the folder as what the file was, and pipelines draw from it what the file draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.family import Family
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.families.unet_families import CASCADES
from modelpool.pool.files.formats.folder_header import WRITER_FOLDER
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import Checkpoint, open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.saving.pipelines import pipeline_facts, scheduler_facts
from modelpool.pool.models.saving.replaced_folder import lost_files
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, ShiftBySize
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.in_tables import families_in_tables
from tests.pool.families.test_seen_wan import BOTH, ONE
from tests.pool.families.test_transformers_saved import FAMILIES
from tests.pool.families.tiny_llava import LEADING_CELL
from tests.pool.families.tiny_pairs import TINY, write_pair, write_tokenizers
from tests.pool.families.tiny_qwen_edit import SEEING
from tests.pool.families.tiny_transformers import TinyFamily
from tests.pool.families.told_pipelines import of_folder
from tests.pool.families.whole_transformer import HEIGHT, PROMPT, SEED, STEPS, WIDTH, Whole
from tests.pool.zoo.case import quiet_libraries

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]
ALL: dict[str, TinyFamily] = {
    **FAMILIES, ONE.name: ONE, BOTH.name: BOTH, LEADING_CELL.name: LEADING_CELL, "qwen_image that sees": SEEING,
}  # fmt: skip
#: of another size than one of these, and equal to it but in name
ALIKE = {"flux2_dev"}
#: tried in test_hunyuan_from_images
SKYREELS = "skyreels_i2v"
#: families that diffusers has no pipeline for
WITHOUT_PIPELINE = {family.name for family in defined_families() if not family.folder.pipeline}
#: of a BERT, which its class has and no file and no pipeline
_UNREAD = {"pooler.dense.weight", "pooler.dense.bias"}
_WITHOUT_WEIGHTS = ("tokenizer", "scheduler", "guider", "processor")


def write(folder: Path, family: TinyFamily) -> Path:
    """The file of a tiny model, with its tokenizers beside it."""
    save_file(family.file(), folder / "tiny.safetensors")
    write_tokenizers(folder, family)
    return folder / "tiny.safetensors"


def loaded(folder: Path) -> dict[str, nn.Module]:
    """The components with weights as the classes of the index load them: nothing is missing, and nothing left."""
    index = json.loads((folder / "model_index.json").read_text())
    found = {}
    for place, said in index.items():
        if not isinstance(said, list) or said[0] is None or any(word in place for word in _WITHOUT_WEIGHTS):
            continue
        apart = {
            "StableAudioProjectionModel": StableAudioProjectionModel,
            "StableAudio3DurationEmbedder": StableAudio3DurationEmbedder,
            "LTX2Vocoder": LTX2Vocoder,
            "LTX2TextConnectors": LTX2TextConnectors,
        }
        kind: Any = apart.get(said[1])
        kind = kind or getattr({"diffusers": diffusers, "transformers": transformers}[said[0]], said[1])
        with quiet_libraries():
            module, told = kind.from_pretrained(folder / place, local_files_only=True, output_loading_info=True)
        told = {key: set(value) for key, value in told.items() if value}
        assert not told or (told.keys() == {"missing_keys"} and told["missing_keys"] == _UNREAD), (place, told)
        found[place] = module
    return found


def bare(folder: str, name: str) -> str:
    """A name in a folder as our module has it."""
    return name.removeprefix("text_model.") if folder.startswith("text_encoder") else name


#: parts of text encoders that see images, as their classes call them
_SEEING_PARTS = ("visual.", "vqmodel.", "vision_tower.", "multi_modal_projector.")


def _seeing_name(name: str) -> str:
    """The name of a parameter of such a part as our module has it."""
    bare = name.removeprefix("visual.").removeprefix("model.").removeprefix("multi_modal_projector.")
    return bare.replace("vision_tower.", "tower.", 1)


def assert_loaded(checkpoint: Checkpoint, folder: Path) -> None:
    """What is loaded of `folder` is what `checkpoint` has, component for component."""
    theirs, facts = loaded(folder), pipeline_facts(checkpoint.family)
    for role in checkpoint.roles:
        if role in checkpoint.family.inside:
            continue
        ours = checkpoint.build(role).module.state_dict()
        if role not in facts.folders:  # the part of a text encoder that sees images
            place = WRITER_FOLDER if WRITER_FOLDER in theirs else "text_encoder"
            found = {_seeing_name(name): x for name, x in theirs[place].state_dict().items()}
            if WRITER_FOLDER in theirs:  # of two parts
                found = {name.removeprefix("model."): x for name, x in theirs[place].state_dict().items()}
        else:
            place = facts.folders[role]
            found = {bare(place, name): x for name, x in theirs[place].state_dict().items()}
            found = {name.removeprefix("model.").removeprefix("language_model."): x for name, x in found.items()}
            for part, other in (("vae", "audio_vae"), ("vocoder", "vocoder")) if role is Role.VAE else ():
                if other in theirs:
                    found |= {f"sound.{part}.{name}": x for name, x in theirs[other].state_dict().items()}
            if "projection_model" in theirs and role is Role.DIFFUSION_MODEL:
                found |= {f"seconds.{name}": x for name, x in theirs["projection_model"].state_dict().items()}
            if (part := checkpoint.family.companion) and role is Role.DIFFUSION_MODEL:
                found |= {f"{part}.{name}": x for name, x in theirs[part].state_dict().items()}
            if "duration_embedder" in theirs and role is Role.DIFFUSION_MODEL:
                duration = theirs["duration_embedder"].named_parameters()  # the table of its class is computed here
                found |= {f"duration.{name}": x for name, x in duration}
            if "unconditional_transformer" in theirs and role is Role.DIFFUSION_MODEL:
                second = theirs["unconditional_transformer"].state_dict()
                found |= {f"unconditional.{name}": x for name, x in second.items()}
        own = {bare("text_encoder" if role.is_text_encoder else "", name): x for name, x in ours.items()}
        left = {name for name in own.keys() ^ found.keys() if not name.startswith(_SEEING_PARTS)} - _UNREAD
        if role in facts.folders:  # a pooled text that is read without it, a head of words that nothing reads
            assert left <= {"text_projection.weight", "lm_head.weight"}, (role, left)
        elif role is Role.VISION_ENCODER:
            assert own.keys() <= found.keys(), own.keys() - found.keys()
        for name in own.keys() & found.keys():
            assert own[name].dtype == found[name].dtype, (role, name)
            assert torch.equal(own[name], found[name]), (role, name)


def assert_same_model(first: Checkpoint, second: Checkpoint) -> None:
    """Both are of one family, sampled alike, with the same weights."""
    for name in ("name", "sampling", "texts", "text_set", "native_sides", "dtypes", "latent_format"):
        assert getattr(first.family, name) == getattr(second.family, name), name
    assert first.latent == second.latent
    assert set(first.roles) == set(second.roles)
    for role in first.roles:
        before, after = (one.build(role).module.state_dict() for one in (first, second))
        before, after = ({bare("text_encoder", name): x for name, x in one.items()} for one in (before, after))
        assert before.keys() - after.keys() <= {"text_projection.weight"}
        assert all(torch.equal(before[name], value) for name, value in after.items()), role


@pytest.mark.parametrize("name", ALL)
def test_a_file_becomes_a_folder_that_libraries_load(name: str, tmp_path: Path) -> None:
    """Every component, bit for bit; and the folder is the same model again."""
    checkpoint, folder = open_checkpoint(write(tmp_path, ALL[name])), tmp_path / "folder"
    saved = save_diffusers(checkpoint, folder)
    assert (saved.missing, saved.left_out, list(lost_files(folder))) == ((), (), [])
    assert_loaded(checkpoint, folder)
    assert_same_model(checkpoint, open_checkpoint(folder))
    index = json.loads((folder / "model_index.json").read_text())
    cls = getattr(diffusers, index["_class_name"])
    components, settings = (set(names) for names in cls._get_signature_keys(cls))
    named = index.keys() - {"_class_name", "_diffusers_version"}
    assert components <= named <= components | settings


@pytest.mark.parametrize("name", TINY)
def test_two_models_for_much_and_little_noise_are_one_folder(name: str, tmp_path: Path) -> None:
    from modelpool.pool.files.formats.model_description import read_description

    checkpoint = open_checkpoint(read_description(write_pair(tmp_path, TINY[name])))
    saved = save_diffusers(checkpoint, tmp_path / "folder")
    assert (saved.missing, saved.left_out, list(lost_files(saved.path))) == ((), (), [])
    assert_loaded(checkpoint, tmp_path / "folder")
    assert_same_model(checkpoint, open_checkpoint(tmp_path / "folder"))
    assert (tmp_path / "folder" / "transformer_2" / "config.json").is_file()


def test_every_family_of_transformers_has_a_pipeline() -> None:
    """Of one of those that are tried here."""
    own = TRANSFORMERS.keys() - CASCADES.keys() - WITHOUT_PIPELINE
    in_tables = {family.name for family in families_in_tables()}
    # the others have modules with tests of their own
    assert own & in_tables <= {*(family.name for family in ALL.values()), *ALIKE, SKYREELS}
    for name in own:
        facts, scheduler = pipeline_facts(TRANSFORMERS[name]), scheduler_facts(TRANSFORMERS[name])
        assert hasattr(diffusers, facts.name)
        assert hasattr(diffusers, scheduler.name)


def family_of(name: str) -> Family:
    """The definition of a family."""
    return next(family for family in defined_families() if family.name == name)


def _shifts(name: str, noise: NoiseFacts) -> dict[str, Any]:
    """What a flow's scheduler is to say of `noise`."""
    if isinstance(noise.shift_by_size, ShiftBySize):
        (low, high), (start, stop) = noise.shift_by_size.tokens, noise.shift_by_size.exponents
        said = {"base_image_seq_len": low, "max_image_seq_len": high, "base_shift": start, "max_shift": stop}
        return {**said, "use_dynamic_shifting": True, "shift_terminal": noise.last_share or None}
    if noise.shift_by_size is not None:
        return {"use_dynamic_shifting": family_of(name).folder.shifts_by_size}
    if family_of(name).folder.is_multistep:  # a multistep solver, which calls the shift otherwise
        said = {"use_flow_sigmas": True, "flow_shift": noise.shift, "prediction_type": "flow_prediction"}
        return {**said, "use_dynamic_shifting": False}
    shifts_itself = name == "mochi" or family_of(name).folder.own_levels  # the pipeline, not its scheduler
    return {"shift": 1.0 if shifts_itself else noise.shift, "use_dynamic_shifting": False}


@pytest.mark.parametrize("name", sorted(TRANSFORMERS.keys() - CASCADES.keys() - WITHOUT_PIPELINE))
def test_a_scheduler_says_what_the_family_was_trained_with(name: str) -> None:
    family = TRANSFORMERS[name]
    facts, noise = scheduler_facts(family), family.sampling.noise
    if name == "stable_audio_1":  # its class needs a library that is not there
        assert (facts.settings["sigma_min"], facts.settings["sigma_max"]) == (noise.sigma_min, noise.sigma_max)
        return
    config = getattr(diffusers, facts.name)(**facts.settings).config
    if family_of(name).folder.scheduler is not None:  # its own tests compare the levels
        assert facts == family_of(name).folder.scheduler
        return
    said = {
        NoiseKind.FLOW: _shifts(name, noise),
        NoiseKind.EDM: {"sigma_min": noise.sigma_min, "sigma_max": noise.sigma_max, "sigma_data": noise.sigma_data},
        NoiseKind.LINEAR: {"beta_schedule": "linear", "beta_end": noise.beta_end, "prediction_type": "epsilon"},
        NoiseKind.SCALED_LINEAR: {"beta_schedule": "scaled_linear", "prediction_type": "v_prediction"},
    }[noise.kind]
    assert {key: config[key] for key in said} == said


def _drawn(whole: Whole, folder: Path, **call: Any) -> tuple[Tensor, Tensor]:
    """The latent that ours makes of a prompt, and that of the folder's pipeline."""
    ours = whole.latent(whole.texts()).samples_CHW
    pipeline = of_folder(folder)
    noise = ImageNoise(SEED).draw((1, *latent_shape(WIDTH, HEIGHT, whole.frames, whole.opened.latent)))
    is_packed = hasattr(pipeline, "_pack_latents")
    given = pipeline._pack_latents(noise, 1, noise.shape[1], *noise.shape[2:]) if is_packed else noise
    with torch.no_grad():
        found = pipeline(
            prompt=PROMPT, latents=given, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS, output_type="latent",
            return_dict=False, **call,
        )[0]  # fmt: skip
    theirs = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor) if is_packed else found
    return torch.from_numpy(ours), theirs[0]


#: CLIP with and without its projection, T5, one text encoder that is told a chat; shifts of three kinds
CALLS: dict[str, dict[str, Any]] = {
    "flux_dev": {"guidance_scale": 3.5},
    "z_image": {"guidance_scale": 0.0},
    "sd35_large": {"guidance_scale": 3.5, "negative_prompt": "a dog"},
    "wan_t2v": {"guidance_scale": 5.0, "negative_prompt": "a dog", "num_frames": 5},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_pipeline_draws_from_the_folder_what_the_file_draws(name: str, tmp_path: Path) -> None:
    """From the words of a prompt on: with the tokenizers, the text encoders and the scheduler of the folder."""
    whole = Whole(tmp_path, FAMILIES[name])
    assert save_diffusers(whole.opened, tmp_path / "folder").missing == ()
    ours, theirs = _drawn(whole, tmp_path / "folder", **CALLS[name])
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1.0, float(theirs.std())))
    whole.engine.close()


def test_a_folder_is_saved_as_a_folder(tmp_path: Path) -> None:
    """Tensor for tensor, with its shift and its tokenizers."""
    first, second = tmp_path / "first", tmp_path / "second"
    save_diffusers(open_checkpoint(write(tmp_path, FAMILIES["flux_dev"])), first)
    scheduler = first / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps({**json.loads(scheduler.read_text()), "max_shift": 0.9}))
    save_diffusers(open_checkpoint(first), second)
    files = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (first, second)]
    assert files[0] == files[1]
    for name in files[0]:
        if name.endswith(".safetensors"):
            before, after = load_file(first / name), load_file(second / name)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
        elif name.endswith("tokenizer.json"):
            assert (first / name).read_bytes() == (second / name).read_bytes()
    assert json.loads((second / "scheduler" / "scheduler_config.json").read_text())["max_shift"] == 0.9


def test_a_video_whose_frames_stand_otherwise_has_the_pipeline_that_knows(tmp_path: Path) -> None:
    """LTX-Video since 0.9.5: no tensor tells diffusers, and a folder of it keeps what it says."""
    first, second = tmp_path / "first", tmp_path / "second"
    save_diffusers(open_checkpoint(write(tmp_path, FAMILIES["ltxv"])), first)
    config = first / "transformer" / "config.json"
    assert "causal_temporal_positioning" not in json.loads(config.read_text())
    config.write_text(json.dumps({**json.loads(config.read_text()), "causal_temporal_positioning": True}))
    save_diffusers(open_checkpoint(first), second)
    assert json.loads((second / "transformer" / "config.json").read_text())["causal_temporal_positioning"] is True
    names = [json.loads((folder / "model_index.json").read_text())["_class_name"] for folder in (first, second)]
    assert names == ["LTXPipeline", "LTXConditionPipeline"]


def _resaved(tmp_path: Path, name: str, **said: Any) -> dict[str, Any]:
    """The index of the folder of a folder of the family `name` whose index says this."""
    save_diffusers(open_checkpoint(write(tmp_path, FAMILIES[name])), tmp_path / "first")
    index = tmp_path / "first" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **said}))
    save_diffusers(open_checkpoint(tmp_path / "first"), tmp_path / "second")
    found: dict[str, Any] = json.loads((tmp_path / "second" / "model_index.json").read_text())
    return found


@pytest.mark.parametrize(("said", "kept"), [(False, False), (True, True), ("no", True)])
def test_a_folder_keeps_what_no_tensor_tells_of_its_pipeline(said: object, kept: bool, tmp_path: Path) -> None:
    """Found: a Klein that is to be guided became one that is not. What is no such setting is not kept."""
    index = _resaved(tmp_path, "flux2_klein", is_distilled=said, other=said)
    assert index["is_distilled"] is kept
    assert "other" not in index


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("FluxKontextPipeline", "FluxKontextPipeline"),
        ("FluxFillPipeline", "FluxPipeline"),  # takes other parts
        ("FluxTransformer2DModel", "FluxPipeline"),
        ("NoPipeline", "FluxPipeline"),
    ],
)
def test_a_folder_keeps_its_pipeline_where_that_takes_the_same(said: str, kept: str, tmp_path: Path) -> None:
    """Found: the model of a folder that edits images came out as one that makes them of texts alone."""
    assert _resaved(tmp_path, "flux_dev", _class_name=said)["_class_name"] == kept


def test_the_vae_of_qwen_image_is_of_the_class_that_its_pipelines_name(tmp_path: Path) -> None:
    """Found: it was Wan's, which has the same tensors and makes the same of them."""
    checkpoint = open_checkpoint(write(tmp_path, FAMILIES["qwen_image"]))
    save_diffusers(checkpoint, tmp_path / "folder")
    index = json.loads((tmp_path / "folder" / "model_index.json").read_text())
    assert index["vae"] == ["diffusers", "AutoencoderKLQwenImage"]
    vae: Any = loaded(tmp_path / "folder")["vae"]
    own: Any = checkpoint.build(Role.VAE).module
    assert type(own).__name__ == "AutoencoderKLWan"
    latent_BCTHW = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(vae.decode(latent_BCTHW).sample, own.decode(latent_BCTHW).sample)


def test_cosmos_ends_at_its_lowest_level_of_noise() -> None:
    """Found: as diffusers' own conversion of Cosmos 1.0 has it, not at none."""
    assert scheduler_facts(TRANSFORMERS["cosmos_t2v"]).settings["final_sigmas_type"] == "sigma_min"


def test_a_pipeline_of_hunyuan_dit_makes_images_of_its_size(tmp_path: Path) -> None:
    """Found: asked for no size it began at 256, the default of the class of its model; a folder's own is kept."""
    first, second = tmp_path / "first", tmp_path / "second"
    save_diffusers(open_checkpoint(write(tmp_path, FAMILIES["hunyuan_dit"])), first)
    config = first / "transformer" / "config.json"
    said = json.loads(config.read_text())
    assert said["sample_size"] * 8 == max(TRANSFORMERS["hunyuan_dit"].native_sides)
    config.write_text(json.dumps({**said, "sample_size": 64}))
    save_diffusers(open_checkpoint(first), second)
    assert json.loads((second / "transformer" / "config.json").read_text())["sample_size"] == 64
