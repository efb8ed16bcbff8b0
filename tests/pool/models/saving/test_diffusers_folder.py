"""`save_diffusers`: the folder is what pipelines of diffusers load, with our weights in their modules.

Proves, offline: every family that is run comes up as its pipeline with equal state dictionaries, types kept; tokenizers
give our ids; the scheduler has our noise levels and prediction; patches are in the weights; the folder is whole or not
there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelpool.pool.families.definitions.stable_diffusion_1 import SD1
from modelpool.pool.families.definitions.stable_diffusion_xl import SDXL
from modelpool.pool.inference.sampling.schedules import sigma_table
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.saving.pipelines import pipeline_facts, scheduler_facts
from modelpool.pool.models.saving.replaced_folder import lost_files
from modelpool.pool.models.text.clip_tokenizer import BEGIN_ID, END_ID, ClipTokenizer
from modelpool.pool.values.core.errors import OutputFailed, UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction, SamplingFacts
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.models.loading import layouts, unet_layouts
from tests.pool.models.loading.layouts import Layout
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.models.saving.models import bits, lora_ref, opened
from tests.pool.toy import make_patch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def filling(name: str) -> Layout:
    """A file of a model that fills holes."""
    unet = {"sd1": layouts.TINY_UNET, "sdxl": layouts.TINY_SDXL_UNET}[name]
    whole = {"sd1": layouts.tiny_sd1, "sdxl": layouts.tiny_sdxl}[name]()
    return {**whole, **layouts.ldm_unet(replace(unet, in_channels=9))}


CASES: dict[str, tuple[Callable[[], Layout], dict[str, Tensor], str]] = {
    "sd1": (layouts.tiny_sd1, {}, "StableDiffusionPipeline"),
    "sd2": (layouts.tiny_sd2, {"v_pred": torch.empty(0)}, "StableDiffusionPipeline"),
    "sdxl": (layouts.tiny_sdxl, {}, "StableDiffusionXLPipeline"),
    "sd1_inpaint": (lambda: filling("sd1"), {}, "StableDiffusionInpaintPipeline"),
    "sdxl_inpaint": (lambda: filling("sdxl"), {}, "StableDiffusionXLInpaintPipeline"),
    "sdxl_refiner": (layouts.tiny_sdxl_refiner, {}, "StableDiffusionXLImg2ImgPipeline"),
    "playground_25": (
        layouts.tiny_sdxl,
        {"edm_mean": torch.tensor([-1.5, 1.8, -1.25, 2.5]), "edm_std": torch.tensor([8.5, 5.75, 6.5, 5.25])},
        "StableDiffusionXLPipeline",
    ),
    "ssd_1b": (unet_layouts.tiny_ssd_1b, {}, "StableDiffusionXLPipeline"),
    "koala_700m": (unet_layouts.tiny_koala_700m, {}, "StableDiffusionXLPipeline"),
}


def checkpoint_of(path: Path, case: str, dtype: torch.dtype = torch.float32) -> Path:
    layout, tensors, _ = CASES[case]
    write_tiny_checkpoint(path, seed=3, dtype=dtype, layout=layout())
    if tensors:
        save_file({**load_file(path), **tensors}, path)
    return path


def load(folder: Path, **options: Any) -> Any:
    diffusers.utils.logging.disable_progress_bar()
    return diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **options)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("text_model."): value for name, value in module.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_pipelines_load_it_with_our_weights(tmp_path: Path, case: str) -> None:
    model = opened(checkpoint_of(tmp_path / "a.safetensors", case))
    checkpoint = model.checkpoint
    saved = save_diffusers(model, tmp_path / "folder")
    pipeline = load(tmp_path / "folder")
    assert type(pipeline).__name__ == CASES[case][2]
    assert checkpoint.family.name == case
    loaded = 0
    for role, folder in pipeline_facts(checkpoint.family).folders.items():
        ours, theirs = state(model.component(role).built.module), state(getattr(pipeline, folder))
        loaded += len(theirs)
        # SD2's text model ends below the last layer, as pipelines read it
        assert theirs.keys() == ours.keys() or (case == "sd2" and role is Role.TEXT_ENCODER)
        for name, value in theirs.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, ours[name]), f"{folder}: {name}"
    assert loaded == saved.tensors
    assert saved.left_out == ()
    assert list(lost_files(tmp_path / "folder")) == []
    assert pipeline.vae.config.scaling_factor == checkpoint.latent.scaling_factor
    assert tuple(pipeline.vae.config.latents_mean or ()) == checkpoint.latent.means
    assert pipeline.vae_scale_factor == checkpoint.latent.downscale
    assert pipeline.unet.config.sample_size * checkpoint.latent.downscale == checkpoint.family.native_pixels


@pytest.mark.parametrize(
    ("case", "folders"), [("sd2", {"tokenizer": 0}), ("sdxl", {"tokenizer": 49407, "tokenizer_2": 0})]
)
def test_tokenizers_give_our_ids(tmp_path: Path, case: str, folders: dict[str, int]) -> None:
    save_diffusers(opened(checkpoint_of(tmp_path / "a.safetensors", case)), tmp_path / "folder")
    pipeline, text = load(tmp_path / "folder"), "A photo of 2 cats, isn't it? (\u00fcber)"
    ids = [BEGIN_ID, *ClipTokenizer.load().encode(text), END_ID]
    for folder, pad_id in folders.items():
        tokenizer = getattr(pipeline, folder)
        found = tokenizer(text, padding="max_length", max_length=tokenizer.model_max_length).input_ids
        assert found == [*ids, *[pad_id] * (77 - len(ids))]


def test_the_text_model_of_sd2_gives_what_the_full_one_gives_below_its_last_layer(tmp_path: Path) -> None:
    model = opened(checkpoint_of(tmp_path / "a.safetensors", "sd2"))
    save_diffusers(model, tmp_path / "folder")
    ids, full = torch.tensor([[BEGIN_ID, 320, 1125, END_ID, 0]]), model.component(Role.TEXT_ENCODER).built.module
    with torch.no_grad():
        below = full(ids, output_hidden_states=True).hidden_states[-2]
        wanted = full.text_model.final_layer_norm(below)
        found = load(tmp_path / "folder").text_encoder(ids)[0]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("noise", "prediction"),
    [
        (NoiseFacts(), Prediction.NOISE),
        (NoiseFacts(), Prediction.VELOCITY),
        (NoiseFacts(NoiseKind.ZERO_TERMINAL), Prediction.VELOCITY),
        (NoiseFacts(NoiseKind.EDM, 0.01, 60.0, 0.5), Prediction.EDM),
        (NoiseFacts(NoiseKind.EDM, 0.002, 120.0), Prediction.VELOCITY),
    ],
)
def test_the_scheduler_has_our_noise_and_prediction(noise: NoiseFacts, prediction: Prediction) -> None:
    facts = scheduler_facts(replace(SDXL, sampling=SamplingFacts(prediction, noise=noise)))
    scheduler, table = getattr(diffusers, facts.name)(**facts.settings), sigma_table(noise)
    assert set(facts.settings) <= set(scheduler.config)
    assert scheduler.config.prediction_type == ("v_prediction" if prediction is Prediction.VELOCITY else "epsilon")
    if noise.kind is NoiseKind.EDM:
        scheduler.set_timesteps(10)
        assert float(scheduler.sigmas[0]) == pytest.approx(table.sigma_max, rel=1e-5)
        assert float(scheduler.sigmas[-2]) == pytest.approx(table.sigma_min, rel=1e-5)
        return
    theirs = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).sqrt()
    assert theirs[:-1].tolist() == pytest.approx(table.sigmas[:-1], rel=2e-3)
    assert theirs[500:900].tolist() == pytest.approx(table.sigmas[500:900], rel=1e-4)


def test_what_no_pipeline_knows_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="expected one of noise, velocity"):
        scheduler_facts(replace(SD1, sampling=SamplingFacts(Prediction.EDM)))
    with pytest.raises(UnknownArchitecture, match="cannot be saved as a folder of diffusers yet"):
        pipeline_facts(replace(SD1, name="other", relative=""))


def test_patches_types_and_metadata_are_in_the_files(tmp_path: Path) -> None:
    model = opened(checkpoint_of(tmp_path / "a.safetensors", "sd1", torch.float16))
    lora, vae = lora_ref(write_tiny_lora(tmp_path / "light.safetensors"), 0.5), "decoder.conv_in.weight"
    shape = tuple(model.component(Role.VAE).built.module.get_parameter(vae).shape)
    sets = {Role.VAE: PatchSet((make_patch(vae, shape, "v"),))}
    saved = save_diffusers(model, tmp_path / "folder", loras=[lora], patches=sets, metadata={"note": "mine"})
    assert saved.patched == 7
    files = {Role.TEXT_ENCODER: "text_encoder/model", Role.DIFFUSION_MODEL: "unet/diffusion_pytorch_model"}
    files[Role.VAE] = "vae/diffusion_pytorch_model"
    for role, file in files.items():
        header = open_header(tmp_path / "folder" / f"{file}.safetensors")
        assert (header["format"], header["note"], header["modelspec.merged_from"]) == ("pt", "mine", "a, light, vae")
        found = load_file(tmp_path / "folder" / f"{file}.safetensors")
        patches = sets.get(role) or model.patch_set(role, [lora])
        for name, host in model.component(role).built.module.named_parameters():
            weight = host.data
            for function in patches.functions(name):
                weight = function(weight.float().clone()).half()
            assert torch.equal(found[name if role is not Role.TEXT_ENCODER else f"text_model.{name}"], weight)
    pipeline = load(tmp_path / "folder", torch_dtype=torch.float16)
    assert pipeline.text_encoder.dtype == pipeline.unet.dtype == torch.float16
    config = json.loads((tmp_path / "folder" / "text_encoder" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["CLIPTextModel"], "float16")
    save_diffusers(model, tmp_path / "wide", dtype=torch.float32)
    assert {v.dtype for v in load_file(tmp_path / "wide" / "vae" / "diffusion_pytorch_model.safetensors").values()} == {
        torch.float32
    }


def test_eight_bit_floats_without_patches_stay_the_same_bits(tmp_path: Path) -> None:
    """A patch on one third of a fused weight does not round the others again."""
    source = checkpoint_of(tmp_path / "a.safetensors", "sd2", torch.float16)
    eight = {k: v.to(torch.float8_e4m3fn) if k.startswith("cond_") else v for k, v in load_file(source).items()}
    save_file(eight, source)
    model, patched = opened(source), "text_model.encoder.layers.0.self_attn.q_proj.weight"
    sets = {Role.TEXT_ENCODER: PatchSet((make_patch(patched, (32, 32), "q"),))}
    save_diffusers(model, tmp_path / "folder", patches=sets)
    found = load_file(tmp_path / "folder" / "text_encoder" / "model.safetensors")
    ours = dict(model.component(Role.TEXT_ENCODER).built.module.named_parameters())
    assert {name for name in found if bits(found[name]) != bits(ours[name].data)} == {patched}


def open_header(path: Path) -> dict[str, str]:
    from modelpool.pool.files.formats.safetensors_file import read_header

    return dict(read_header(path).metadata)


def test_the_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    source = checkpoint_of(tmp_path / "a.safetensors", "sd1")
    model, folder = open_checkpoint(source), tmp_path / "folder"

    def fails(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_diffusers(model, folder, progress=fails)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    save_diffusers(model, folder)
    before = {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(OutputFailed, match="already exists"):
        save_diffusers(model, folder)
    with pytest.raises(KeyboardInterrupt):
        save_diffusers(model, folder, progress=fails, overwrite=True)
    assert before == {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    save_diffusers(model, folder, overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "folder"]
