"""Workflows of the kinds that people publish (`public_kinds/*.txt`, written for these tests, in both formats of
ComfyUI): at least 95% of the workflows of nodes that the pool means to have are accepted, and render with tiny models;
each other one is refused with its nodes and a reason."""

from __future__ import annotations

import wave
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.audio_fields import AudioFile, audio_facts
from modelpool.actors.request.control_video_fields import VideoFile, video_facts
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.written_workflows import Written, written_workflows
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import own_folder, write_models, write_tokenizers
from tests.pool.families.definitions.test_qwen_image_layered import TINY as LAYERED
from tests.pool.families.test_seen_wan import BOTH, FOLLOWING, ONE
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.tiny_unclip import tiny_unclip_l
from tests.pool.inference.upscalers.tiny_upscalers import tiny_state
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
#: families of the models that the workflows name
TITLES = {
    "sd15": "Stable Diffusion 1", "other": "Stable Diffusion 1", "sdxl": "Stable Diffusion XL",
    "sdxl_refiner": "the Stable Diffusion XL refiner", "ip2p": "Stable Diffusion 1 InstructPix2Pix",
    "unclip": "Stable Diffusion 2.1 unCLIP L", "sd3": "Stable Diffusion 3", "flux_dev": "Flux dev",
    "flux_schnell": "Flux schnell", "flux_fill": "Flux fill", "flux_canny": "Flux control (edges or depth)",
    "flux_kontext": "Flux dev", "flux2": "Flux 2", "qwen_image": "Qwen-Image", "qwen_edit": "Qwen-Image",
    "hidream": "HiDream I1", "z_image": "Z-Image", "lumina2": "Lumina 2", "chroma": "Chroma", "auraflow": "AuraFlow",
    "pixart": "PixArt sigma", "hunyuan_dit": "HunyuanDiT 1.2", "wan_t2v": "Wan text-to-video",
    "wan_high": "Wan text-to-video", "wan_low": "Wan text-to-video", "wan_i2v": "Wan 2.1 image-to-video",
    "wan_high_i2v": "Wan 2.1 image-to-video", "wan_low_i2v": "Wan 2.1 image-to-video",
    "wan_flf": "Wan 2.1 first-and-last-frame", "wan_5b": "Wan 2.2 text-and-image-to-video", "wan_vace": "Wan VACE",
    "hunyuan": "Hunyuan Video", "hunyuan_i2v": "Hunyuan Video image-to-video", "ltx": "LTX-Video", "mochi": "Mochi",
    "cosmos": "Cosmos text-to-video", "cosmos_i2v": "Cosmos image-to-video",
    "cosmos_t2i": "Cosmos Predict 2 images", "svd": "Stable Video Diffusion", "stable_audio": "Stable Audio 1",
    "ace_step": "ACE-Step 1.5", "lotus_d": "Lotus D (depth and normals)", "joyimage": "JoyImage",
    "qwen_image_21": "Qwen-Image 2.1", "qwen_image_layered": "Qwen-Image layered",
    "cascade_c": "Stable Cascade C", "cascade_b": "Stable Cascade B",
    "wan_fun": "Wan 2.1 Fun control", "wan_animate": "Wan 2.2 animate",
}  # fmt: skip
#: workflows with what the pool does not have, besides those that are marked: the nodes that are named
NOT_THERE = {
    "flux_true_cfg_api": {"7"},
}
#: tiny models for the models of the workflows; others have no tiny one here
TINY = {
    "sd15": "sd1", "other": "sd1", "sdxl": "sdxl", "sdxl_refiner": "sdxl_refiner", "sd3": "sd3", "ip2p": "sd1_ip2p",
    "unclip": "unclip", "flux_dev": "flux_dev", "flux_schnell": "flux_schnell", "flux_kontext": "flux_dev",
    "flux2": "flux2_klein", "chroma": "chroma", "hidream": "hidream_i1", "qwen_image": "qwen_image",
    "lumina2": "lumina2", "z_image": "z_image", "auraflow": "auraflow", "pixart": "pixart_sigma",
    "hunyuan_dit": "hunyuan_dit", "wan_t2v": "wan_t2v", "wan_high": "wan_t2v", "wan_low": "wan_t2v",
    "wan_i2v": "wan21_i2v", "wan_high_i2v": "wan21_i2v", "wan_low_i2v": "wan21_i2v", "wan_flf": "wan21_flf2v",
    "wan_vace": "wan_vace", "hunyuan": "hunyuan_video", "ltx": "ltxv", "mochi": "mochi", "svd": "svd",
    "stable_audio": "stable_audio_1", "lotus_d": "lotus_d",
    "qwen_image_layered": "qwen_image_layered",
    "wan_fun": "wan21_fun_control",
}  # fmt: skip
#: what tiny models cannot show: ControlNets, LoRAs, adapters and vision encoders of one family alone
NOT_RENDERED = {
    "gligen_editor",
    "canny_node_editor", "flux_depth_lora_editor", "flux_kontext_two_references_api", "flux_redux_editor",
    "qwen_inpainting_controlnet_api", "sd35_controlnet_and_slg_editor", "wan22_text_to_video_two_experts_editor",
    "ip_adapter_custom_api", "ltxv_guides_api", "wan_fun_control_api", "z_image_fun_control_api",
}  # fmt: skip
#: of these, one workflow each renders in the usual tests
SAMPLE = {
    "area_composition_editor", "batch_tricks_api", "computed_settings_editor", "easy_pipes_api", "efficiency_nodes_api",
    "inpaint_differential_editor", "node_packs_api",
    "noisy_latent_composition_editor", "prompt_switch_over_steps_editor",
    "resize_and_save_api", "resized_images_and_masks_editor", "vhs_combine_editor",
}  # fmt: skip
#: settings of the workflows that are made small, and their values
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("width", "height", "target_width", "target_height", "tile_size"), 64),
    **dict.fromkeys(("empty_latent_width", "empty_latent_height"), 64),
    "video_frames": 3,
    "seconds": 0.5,
    "megapixels": 0.01,
    "step": 2,
    "layers": "0",
    "lora_name": "tiny_lora",
    "control_net_name": "sd1_canny",
    "model_name": "up2",
    "dimensions": "64 x 64",
}


def photo(name: str) -> Image.Image:
    """An image of a user: half transparent on one side, another one for each name."""
    image = Image.effect_noise((64, 64), 40 + sum(map(ord, name)) % 60).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize((64, 64)))
    return image


def clip_in(folder: Path) -> Callable[[str], VideoFile]:
    """Facts about a video of a user: the same one under each name, of 9 frames."""
    path = folder / "clip.gif"
    frames = [Image.effect_noise((64, 64), 10 * place).convert("RGB") for place in range(1, 10)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    return lambda name: video_facts("video", str(path))


def sound_in(folder: Path) -> Callable[[str], AudioFile]:
    """Facts about audio of a user: the same under each name, of half a second."""
    path = folder / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8000))
    return lambda name: audio_facts("audio", str(path))


def requests(prompt: Any, names: PoolNames) -> list[GenerateRequest]:
    return [one for output in outputs_of(prompt, names) for one in requests_of(output, names, photo)]


def test_workflows_of_the_kinds_that_people_publish_are_accepted(tmp_path: Path) -> None:
    """Before: 46 of 101, and one ended with an internal error."""
    files = FileNames(controlnets=("canny", "depth"), upscalers=("4x",), image_prompts=("redux",), embeddings=())
    names = PoolNames(
        TITLES,
        ["style", "light"],
        None,
        files,
        image_size=lambda name: (64, 64),
        video_facts=clip_in(tmp_path),
        audio_facts=sound_in(tmp_path),
    )
    accepted, refused, wrong, meant = 0, dict[str, set[str]](), [], 0
    for each in written_workflows():
        meant += not each.is_refused
        try:
            found = requests(api_format(each.prompt), names)
        except WorkflowRejected as rejected:
            if not each.is_refused:
                refused[each.name] = {error.node_id for error in rejected.errors}
            wrong += [(each.name, error.node_id) for error in rejected.errors if not error.details]
            wrong += [] if rejected.errors else [(each.name, str(rejected))]
            continue
        accepted += 1
        assert found, each.name
        assert not each.is_refused, each.name
    assert not wrong, "a refusal names a node and a reason"
    assert refused == NOT_THERE
    assert accepted >= 0.95 * meant, f"{accepted} of {meant}"


def write_all(folder: Path) -> None:
    write_models(folder)
    for name, seed, layout in (("sdxl_refiner", 9, layouts.tiny_sdxl_refiner), ("unclip", 19, tiny_unclip_l)):
        path = own_folder(folder, name) / f"{name}.safetensors"
        write_tiny_checkpoint(path, seed=seed, dtype=torch.float32, layout=layout())
    lotus = own_folder(folder, "lotus_d") / "lotus_d.safetensors"
    write_tiny_checkpoint(lotus, seed=20, dtype=torch.float32, layout=SHOWN_LAYOUTS["lotus_d"]())
    for family in (FAMILIES["hidream_i1"], FAMILIES["flux_schnell"], ONE, BOTH, FOLLOWING, LAYERED):
        own = own_folder(folder, family.name)
        save_file(family.file(), own / f"{family.name}.safetensors")
        write_tokenizers(own, family)
    save_file(tiny_state("realesrgan_2x"), own_folder(folder, "upscalers") / "up2.safetensors")


def small(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A workflow with tiny models, sizes and numbers of steps."""
    return {node_id: _small_node(node) for node_id, node in prompt.items()}


def _small_node(node: Mapping[str, Any]) -> dict[str, Any]:
    kind, inputs = node["class_type"], dict(node["inputs"])
    for name, value in inputs.items():
        if isinstance(value, list):
            continue
        if name in ("ckpt_name", "unet_name"):
            inputs[name] = TINY.get(value.rsplit(".", 1)[0], value)
        elif name in ("width", "height") and kind.startswith("ConditioningSetArea"):
            inputs[name] = 32 if isinstance(value, int) else value
        elif name in ("x", "y", "left", "top", "right", "bottom") and isinstance(value, int):
            inputs[name] = min(value, 16)
        elif name in ("steps", "layers") and isinstance(value, int):
            inputs[name] = min(value, 4)
        elif kind == "ResolutionSelector":
            inputs[name] = 0.1 if name == "megapixels" else value
        elif name == "length" and "Batch" not in kind:
            inputs[name] = 9 if value > 1 else 1
        elif name == "end_at_step":
            inputs[name] = 2 if node["inputs"]["return_with_leftover_noise"] == "enable" else 10000
        elif name == "start_at_step":
            inputs[name] = 2 if value else 0
        elif name == "batch_index":
            inputs[name] = min(value, 2)
        elif name in SMALL and value != "None":
            inputs[name] = 96 if kind == "LatentUpscale" and name in ("width", "height") else SMALL[name]
    return {"class_type": kind, "inputs": inputs}


def _models_of(prompt: Mapping[str, Any]) -> Iterator[str]:
    for node in prompt.values():
        for name in ("ckpt_name", "unet_name"):
            if isinstance(value := node["inputs"].get(name), str):
                yield value.rsplit(".", 1)[0]


def rendered(folder: Path, wanted: list[Written], output: Path) -> dict[str, str]:
    """Render workflows in a pool of the models in a folder; return what did not succeed, by the workflow."""
    problems: dict[str, str] = {}
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder], workers=1, loras=[folder / "loras"])
    with open_real_pool(config.override(vram="512 MiB")) as pool:
        families = {listing.name: listing.family for listing in pool.models()}
        names = PoolNames(
            families,
            ["tiny_lora"],
            None,
            pool.file_names(),
            image_size=lambda name: (64, 64),
            video_facts=clip_in(folder),
        )
        for each in wanted:
            try:
                made = requests(small(api_format(each.prompt)), names)
                results = list(pool.submit(made, output=output / each.name).results())
                failed = [result for result in results if not getattr(result, "path", None)]
                if failed or len(results) != len(made):
                    problems[each.name] = str(failed[:1])[:600]
            except UserError as problem:
                problems[each.name] = str(problem)[:300]
    return problems


def test_a_sample_of_them_renders(tmp_path: Path) -> None:
    for name, seed, layout in (("sd1", 1, layouts.tiny_sd1), ("sdxl", 2, layouts.tiny_sdxl)):
        path = own_folder(tmp_path / "models", name) / f"{name}.safetensors"
        write_tiny_checkpoint(path, seed=seed, dtype=torch.float32, layout=layout())
    wanted = [each for each in written_workflows() if each.name in SAMPLE]
    assert len(wanted) == len(SAMPLE)
    (tmp_path / "models" / "loras").mkdir()
    assert not rendered(tmp_path / "models", wanted, tmp_path / "out")


@pytest.mark.nightly(usually="tests/actors/http/comfy/test_public_kinds.py")
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi, in diffusers
def test_they_render_with_tiny_models(tmp_path: Path) -> None:
    """All of which there are tiny models."""
    folder = tmp_path / "models"
    folder.mkdir()
    write_all(folder)
    out = {*NOT_THERE, *NOT_RENDERED}
    wanted = [each for each in written_workflows() if not each.is_refused and each.name not in out]
    wanted = [each for each in wanted if set(_models_of(api_format(each.prompt))) <= set(TINY)]
    assert len(wanted) >= 70
    assert not rendered(folder, wanted, tmp_path / "out")
