"""Twenty recipes in the forms that people publish them in, and what each of them asks of the pool.

The texts are written for this test, in the form of A1111, Forge and ComfyUI; none is copied.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

import modelpool
from modelpool.actors.graph.features.recipe import Recipe, RecipeImages, RecipeLora, RecipeNoise, RecipeRegion
from modelpool.actors.http.a1111.a1111_requests import parse_call, requests_of
from modelpool.actors.http.a1111.a1111_upscalers import scaling_fields
from modelpool.actors.http.read_requests import fields_of_texts, read_fields, request_like
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.read_fields import ReadFields
from modelpool.actors.outputs.image_file import parameters_text
from modelpool.actors.outputs.image_metadata import PARAMETERS_KEY
from modelpool.actors.request.image_fields import skipped_steps
from modelpool.actors.request.requests import GenerateRequest, resolve_sampling
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.test_comfy_api import changed
from tests.actors.http.comfy.test_comfy_graph import with_start

#: (name, family of the model, text, expected values of fields, beginnings of the notes)
A1111: tuple[tuple[str, str, str, dict[str, Any], tuple[str, ...]], ...] = (
    (
        "a sampler with its schedule in one name, as before version 1.9",
        "SD 1.5",
        "a lighthouse on a cliff, (stormy sea:1.3)\nNegative prompt: fog, people\n"
        "Steps: 30, Sampler: DPM++ 2M Karras, CFG scale: 7.5, Seed: 3928471120, Size: 512x768, "
        "Model hash: 1a2b3c4d5e, Model: coastline_v2, Clip skip: 2, ENSD: 31337, Version: v1.6.0",
        {
            "model": "coastline_v2", "prompt": "a lighthouse on a cliff, (stormy sea:1.3)", "negative": "fog, people",
            "steps": 30, "sampling": ("dpmpp_2m", "karras"), "cfg": 7.5, "seed": 3928471120, "width": 512,
            "height": 768, "clip_skip": 1, "loras": (),
        },
        ("ENSD: not used",),
    ),
    (
        "a name without a schedule, from the time when that meant the model's own",
        "SD 1.5",
        "a bowl of plums\nSteps: 20, Sampler: DPM++ 2M, CFG scale: 6, Seed: 5, Size: 640x448, Model: still, "
        "Version: v1.5.2",
        {"sampling": ("dpmpp_2m", "normal"), "cfg": 6.0, "width": 640},
        (),
    ),
    (
        "sampler and schedule apart, as since 1.9, and hires with an upscaler of the web UI",
        "SD 1.5",
        "an old tram in the rain\nNegative prompt: cartoon\nSteps: 24, Sampler: DPM++ 2M SDE Heun, "
        "Schedule type: Exponential, CFG scale: 5, Seed: 77, Size: 512x512, Model: city, Denoising strength: 0.35, "
        "Hires upscale: 2, Hires steps: 12, Hires upscaler: R-ESRGAN 4x+, Version: v1.10.1",
        {
            "sampling": ("dpmpp_2m_sde_heun", "exponential"),
            "hires": {
                "scale": 2.0, "strength": 0.35, "steps": 12, "via": "image", "upscaler": "RealESRGAN_x4plus",
            },
        },
        (),
    ),
    (
        "the same pair in one name",
        "SD 1.5",
        "a kite\nSteps: 24, Sampler: DPM++ 2M SDE Heun Exponential, CFG scale: 5, Seed: 77, Size: 512x512, Model: m",
        {"sampling": ("dpmpp_2m_sde_heun", "exponential")},
        (),
    ),
    (
        "latent hires without steps of its own, to a size",
        "SD 1.5",
        "a fox in the snow\nSteps: 28, Sampler: Euler a, CFG scale: 8, Seed: 9, Size: 512x640, Model: animals, "
        "Denoising strength: 0.6, Hires resize: 768x960, Hires upscaler: Latent (nearest-exact)",
        {
            "sampling": ("euler_ancestral", "normal"),
            "hires": {"scale": 1.5, "strength": 0.6, "steps": None, "via": "latent", "upscaler": None},
        },
        ("Hires upscaler: found Latent (nearest-exact)",),
    ),
    (
        "LoRAs with strengths and hashes, and the keys of an extension",
        "SD 1.5",
        "a knight <lora:ironwork:0.7>, castle <lora:grain:0.3:0.5>\nNegative prompt: blurry\nSteps: 25, "
        "Sampler: UniPC, Schedule type: Automatic, CFG scale: 7, Seed: 1234, Size: 768x512, Model hash: 99aa88bb77, "
        'Model: fable, ADetailer model: face_yolov8n.pt, ADetailer prompt: "a calm face, helmet: off", '
        "ADetailer confidence: 0.3, ADetailer version: 24.1.0, "
        'Lora hashes: "ironwork: 0123456789ab, grain: ba9876543210", Version: v1.9.4',
        {
            "sampling": ("uni_pc", "karras"), "prompt": "a knight , castle",
            "loras": (("ironwork", 0.7, None), ("grain", 0.5, 0.3)),
        },
        ("ADetailer (4 keys): not used",),
    ),
    (
        "tables of a site in the line of keys",
        "SD 1.5",
        "a harbour at dusk\nSteps: 40, Sampler: Heun, CFG scale: 4.5, Seed: 31, Size: 512x512, "
        'Hashes: {"model": "6d5c4b3a29", "lora:sails": "aa11bb22cc33"}, Civitai resources: '
        '[{"type":"checkpoint","modelVersionId":1,"modelName":"Docks, II"}], Civitai metadata: {}, Model: docks',
        {"sampling": ("heun", "normal"), "model": "docks", "steps": 40},
        (),
    ),
    (
        "SDXL, whose text encoders skip a layer anyway",
        "SDXL",
        "a glass chess set\nNegative prompt: plastic\nSteps: 35, Sampler: DPM++ 3M SDE, Schedule type: Karras, "
        "CFG scale: 6.5, Seed: 42, Size: 832x1216, Model hash: 31e35c80fc, Model: crystal_xl, Clip skip: 2, "
        "RNG: CPU, Version: v1.10.1",
        {"sampling": ("dpmpp_3m_sde", "karras"), "clip_skip": 0, "width": 832, "height": 1216},
        (),
    ),
    (
        "SDXL with a refiner and a variation, which are not used",
        "SDXL",
        "a desert road\nSteps: 30, Sampler: DPM2 a, Schedule type: Uniform, CFG scale: 7, Seed: 8, Size: 1024x1024, "
        "Model: dunes_xl, Variation seed: 3, Variation seed strength: 0.2, Refiner: dunes_refiner [ab12], "
        "Refiner switch at: 0.8",
        {"sampling": ("dpm_2_ancestral", "normal")},
        ("Variation (2 keys): not used", "Refiner (2 keys): not used"),
    ),
    (
        "a turbo model of SDXL with few steps",
        "SDXL",
        "a paper boat\nSteps: 6, Sampler: LCM, Schedule type: SGM Uniform, CFG scale: 1.5, Seed: 2, Size: 1024x1024, "
        "Model: boats_lightning",
        {"sampling": ("lcm", "sgm_uniform"), "steps": 6, "cfg": 1.5},
        (),
    ),
    (
        "Flux in Forge: the distilled guidance is the guidance",
        "Flux",
        "a red bicycle against a brick wall\nSteps: 20, Sampler: Euler, Schedule type: Simple, CFG scale: 1, "
        "Distilled CFG Scale: 3.5, Seed: 1111, Size: 896x1152, Model hash: bea01d51bd, Model: flux1-dev, "
        "Module 1: ae, Module 2: clip_l, Version: f2.0.1v1.10.1",
        {"sampling": ("euler", "simple"), "cfg": 3.5, "width": 896, "model": "flux1-dev"},
        ("Module (2 keys): not used",),
    ),
    (
        "Stable Diffusion 3.5",
        "Stable Diffusion 3",
        "a watch on a velvet cushion\nNegative prompt: hands\nSteps: 28, Sampler: DPM++ 2M, "
        "Schedule type: SGM Uniform, CFG scale: 4.5, Seed: 60, Size: 1024x1024, Model: sd35_large, Shift: 3",
        {"sampling": ("dpmpp_2m", "sgm_uniform"), "cfg": 4.5, "shift": 3.0},
        (),
    ),
    (
        "Wan: a video",
        "Wan 2.1",
        "waves against a pier, slow pan\nNegative prompt: static\nSteps: 30, Sampler: UniPC, Schedule type: Simple, "
        "CFG scale: 6, Seed: 12, Size: 832x480, Frames: 81, FPS: 16, Model: wan21_t2v_14b",
        {"sampling": ("uni_pc", "simple"), "frames": 81, "frame_rate": 16.0, "width": 832, "height": 480},
        (),
    ),
    (
        "an upscaled image with eta and noise of its own, two lines of prompt",
        "SD 1.5",
        "a moth,\nmacro photo\nNegative prompt: text,\nframe\nSteps: 18, Sampler: DPM++ SDE Karras, CFG scale: 7, "
        "Seed: 4, Size: 512x512, Model: moths, Eta: 0.67, Sigma churn: 0.5, Sigma noise: 1.02, "
        "Postprocess upscale by: 2, Postprocess upscaler: 4x-Sharp, Face restoration: CodeFormer",
        {
            "sampling": ("dpmpp_sde", "karras"), "prompt": "a moth,\nmacro photo", "negative": "text,\nframe",
            "eta": 0.67, "s_churn": 0.5, "s_noise": 1.02,
            "upscale": {"model": "4x-Sharp", "scale": 2.0, "tile": None, "overlap": None},
        },
        ("Face restoration: not used",),
    ),
)  # fmt: skip


def comfy(loader: dict[str, Any], sampler: dict[str, Any], **nodes: Any) -> dict[str, Any]:
    """A workflow in the API format: text to image."""
    graph = {
        "1": loader,
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": "a stone bridge", "clip": ["1", 1]}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "cars", "clip": ["1", 1]}},
        "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 704, "batch_size": 1}},
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0],
                "seed": 515, "steps": 22, "cfg": 7.0, "denoise": 1.0, **sampler,
            },
        },
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "bridge"}},
    }  # fmt: skip
    return graph | nodes


def checkpoint(name: str) -> dict[str, Any]:
    return {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": name}}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


COMFYUI: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (
        "Stable Diffusion 1 with the name of a GPU sampler",
        comfy(checkpoint("sd15/bridges.safetensors"), {"sampler_name": "dpmpp_2m_sde_gpu", "scheduler": "karras"}),
        {
            "model": "bridges", "prompt": "a stone bridge", "negative": "cars", "sampling": ("dpmpp_2m_sde", "karras"),
            "seed": 515, "steps": 22, "cfg": 7.0, "width": 512, "height": 704,
        },
    ),
    (
        "a LoRA and a layer of CLIP",
        comfy(
            checkpoint("bridges.ckpt"),
            {"sampler_name": "uni_pc_bh2", "scheduler": "simple", "model": ["8", 0]},
            **{
                "8": node("LoraLoader", model=["1", 0], clip=["1", 1], lora_name="moss.safetensors",
                          strength_model=0.8, strength_clip=0.4),
                "9": node("CLIPSetLastLayer", clip=["8", 1], stop_at_clip_layer=-2),
                "2": node("CLIPTextEncode", text="a stone bridge", clip=["9", 0]),
                "3": node("CLIPTextEncode", text="cars", clip=["9", 0]),
            },
        ),
        {"sampling": ("uni_pc_bh2", "simple"), "clip_skip": 1, "loras": (("moss", 0.8, 0.4),)},
    ),
    (
        "two passes over the latent",
        comfy(
            checkpoint("bridges.safetensors"),
            {"sampler_name": "euler_ancestral", "scheduler": "normal"},
            **{
                "8": node("LatentUpscaleBy", samples=["5", 0], upscale_method="bilinear", scale_by=1.5),
                "9": node("KSampler", model=["1", 0], positive=["2", 0], negative=["3", 0], latent_image=["8", 0],
                          seed=515, steps=11, cfg=7.0, denoise=0.5, sampler_name="euler_ancestral",
                          scheduler="normal"),
                "6": node("VAEDecode", samples=["9", 0], vae=["1", 2]),
            },
        ),
        {
            "sampling": ("euler_ancestral", "normal"),
            "hires": {"scale": 1.5, "strength": (11 + 0.5) / 22, "steps": 22, "via": "latent", "upscaler": None},
        },
    ),
    (
        "SDXL with the schedule of a distilled model",
        comfy(
            checkpoint("arches_xl.safetensors"),
            {"sampler_name": "res_multistep", "scheduler": "sgm_uniform", "steps": 8, "cfg": 1.8},
            **{"4": node("EmptyLatentImage", width=1152, height=896, batch_size=1)},
        ),
        {"sampling": ("res_multistep", "sgm_uniform"), "steps": 8, "cfg": 1.8, "width": 1152, "model": "arches_xl"},
    ),
    (
        "Flux from separate files",
        comfy(
            node("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
            {"sampler_name": "euler", "scheduler": "beta", "cfg": 1.0, "positive": ["9", 0], "negative": ["10", 0]},
            **{
                "8": node("DualCLIPLoader", clip_name1="clip_l.safetensors", clip_name2="t5xxl.safetensors",
                          type="flux"),
                "2": node("CLIPTextEncode", text="a stone bridge", clip=["8", 0]),
                "9": node("FluxGuidance", conditioning=["2", 0], guidance=2.8),
                "10": node("ConditioningZeroOut", conditioning=["2", 0]),
                "11": node("VAELoader", vae_name="ae.safetensors"),
                "4": node("EmptySD3LatentImage", width=1024, height=768, batch_size=1),
                "6": node("VAEDecode", samples=["5", 0], vae=["11", 0]),
            },
        ),
        {"model": "flux1-dev", "sampling": ("euler", "beta"), "cfg": 2.8, "negative": "", "width": 1024},
    ),
    (
        "Stable Diffusion 3 from separate text encoders",
        comfy(
            checkpoint("sd3.5_medium.safetensors"),
            {"sampler_name": "dpmpp_2m", "scheduler": "sgm_uniform", "cfg": 4.0, "steps": 26},
            **{
                "8": node("TripleCLIPLoader", clip_name1="clip_l.safetensors", clip_name2="clip_g.safetensors",
                          clip_name3="t5xxl_fp16.safetensors"),
                "2": node("CLIPTextEncode", text="a stone bridge", clip=["8", 0]),
                "3": node("CLIPTextEncode", text="cars", clip=["8", 0]),
                "4": node("EmptySD3LatentImage", width=1024, height=1024, batch_size=1),
            },
        ),
        {"model": "sd3.5_medium", "sampling": ("dpmpp_2m", "sgm_uniform"), "cfg": 4.0, "steps": 26},
    ),
)  # fmt: skip


def differing(request: GenerateRequest, expected: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not as expected, with what was found."""
    found: dict[str, Any] = {name: getattr(request, name) for name in expected if name != "sampling"}
    found["sampling"] = resolve_sampling(request.sampler, request.schedule)
    for name in ("hires", "upscale"):
        if name in expected:
            found[name] = found[name].model_dump()
    if "loras" in expected:
        found["loras"] = tuple((each.name, each.strength, each.text_strength) for each in request.loras)
    return {name: found[name] for name, value in expected.items() if found[name] != value}


def test_twenty_published_recipes_resolve_to_what_they_mean() -> None:
    for name, family, text, expected, notes in A1111:
        model = expected.get("model", text.partition("Model: ")[2].partition(",")[0].strip())
        read = fields_of_texts({PARAMETERS_KEY: text}, family_of={model: family}.__getitem__)
        assert not differing(read.request(), expected), name
        assert len(read.notes) == len(notes), (name, read.notes)
        assert all(found.startswith(note) for found, note in zip(read.notes, notes, strict=True)), (name, read.notes)
    for name, graph, expected in COMFYUI:
        read = fields_of_texts({"prompt": json.dumps(graph)})
        assert not differing(read.request(), expected), name
        assert read.notes == (), name
    assert len(A1111) + len(COMFYUI) == 20


def test_images_and_files_are_read(tmp_path: Path) -> None:
    _, _, text, expected, _ = A1111[0]
    texts = PngImagePlugin.PngInfo()
    texts.add_text(PARAMETERS_KEY, text)
    texts.add_text("prompt", json.dumps(COMFYUI[0][1]))
    Image.new("RGB", (8, 8)).save(tmp_path / "web.png", pnginfo=texts)
    (tmp_path / "notes.txt").write_text(text)
    (tmp_path / "graph.json").write_text(json.dumps(COMFYUI[0][1]))
    with pytest.warns(UserWarning, match=r"web\.png: ENSD: not used"):
        request = modelpool.request_like(tmp_path / "web.png", steps=4)
    assert not differing(request, {**expected, "steps": 4})
    assert not differing(read_fields(tmp_path / "notes.txt").request(), expected)
    assert not differing(request_like(tmp_path / "graph.json"), COMFYUI[0][2])


def test_a_workflow_of_anybody_names_no_image_elsewhere(tmp_path: Path) -> None:
    """An image that was found on the web could have any image of the disk read."""
    for name in ("private.png", "sub/ours.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64)).save(tmp_path / name)
    (tmp_path / "found").mkdir()
    for named in (str(tmp_path / "private.png"), "../private.png"):
        graph = with_start()
        graph["9"]["inputs"]["image"] = named
        (tmp_path / "found" / "graph.json").write_text(json.dumps(graph))
        with pytest.raises(UserError, match=r"private\.png"):
            read_fields(tmp_path / "found" / "graph.json")
    graph["9"]["inputs"]["image"] = "sub/ours.png"
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    assert read_fields(tmp_path / "graph.json").request().image is not None


def test_a_workflow_that_only_decodes_its_start_is_no_request(tmp_path: Path) -> None:
    """A request with its fields would be sampled."""
    place = tmp_path / "workflow.json"
    place.write_text(json.dumps(changed(denoise=0)))
    with pytest.raises(UserError, match=r"denoise: found 0.*modelpool run"):
        read_fields(place)


def test_a_strength_is_used_with_the_image_that_it_was_for() -> None:
    text = "a hat\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 1, Size: 64x64, Model: m, Denoising strength: 0.4"
    read = fields_of_texts({PARAMETERS_KEY: text})
    assert read.request().strength is None
    assert read.request(image=Image.new("RGB", (64, 64))).strength == 0.4


def test_hashes_stand_in_for_names_that_are_not_known() -> None:
    _, _, text, _, _ = A1111[5]
    read = fields_of_texts({PARAMETERS_KEY: text})
    known = {("model", "99aa88bb77"), ("lora", "grain")}
    request = read.named(lambda kind, name: (kind, name) in known).request()
    assert (request.model, [each.name for each in request.loras]) == ("99aa88bb77", ["0123456789ab", "grain"])
    assert read.named(lambda kind, name: False).request().model == "fable"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({PARAMETERS_KEY: "x\nSteps: 20, Sampler: Zigzag, CFG scale: 7, Model: m"}, "unknown sampler 'Zigzag'"),
        ({PARAMETERS_KEY: "x\nSteps: many, Sampler: Euler, CFG scale: 7, Model: m"}, "Steps: found 'many'"),
        ({PARAMETERS_KEY: "x\nSteps: 20, Sampler: Euler, Size: big, Model: m"}, "Size: found 'big'"),
        ({PARAMETERS_KEY: "x\nSteps: 20, Sampler: Euler, Seed: 1e5, Model: m"}, "Seed: found '1e5', expected a whole"),
        ({PARAMETERS_KEY: "x\nSteps: 20, Sampler: Euler, Sigmas: 9 a 0, Model: m"}, "Sigmas: found '9 a 0'"),
        (
            {PARAMETERS_KEY: "x\nSteps: 20, Sampler: Euler, Size: 64x64, Hires resize: 128x64, Model: m"},
            "Hires resize: found '128x64', expected the proportions of 64x64",
        ),
        (
            {PARAMETERS_KEY: "x\nSteps: 20, Sampler: Euler, CFG scale: 7"},
            "model: missing, expected the name",
        ),
        ({"prompt": "{"}, "not JSON|JSON"),
        ({"comment": "x"}, "found only the texts comment"),
    ],
)
def test_what_cannot_be_read_names_its_key(texts: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        fields_of_texts(texts).request()


def test_fields_may_be_replaced_by_the_caller() -> None:
    read = ReadFields({"prompt": "p", "steps": 9, "strength": 0.5}, "m")
    assert read.request(steps=3, model="n").model_dump(exclude_unset=True) == {"model": "n", "prompt": "p", "steps": 3}


def test_the_interface_of_the_web_ui_has_the_same_names_of_upscalers() -> None:
    for name, expected in (
        (None, {"via": "latent"}),
        ("Latent (bicubic)", {"via": "latent"}),
        ("Lanczos", {"via": "image"}),
        ("R-ESRGAN 2x+", {"via": "image", "upscaler": "RealESRGAN_x2plus"}),
        ("4x-Sharp", {"via": "image", "upscaler": "4x-Sharp"}),
    ):
        assert scaling_fields(name) == expected
    call = parse_call({"prompt": "x", "enable_hr": True, "hr_scale": 2, "hr_upscaler": "R-ESRGAN 2x+"}, False)
    (request,) = requests_of(call, "m", 1, CallerImages((), 1 << 20))
    assert request.hires is not None
    assert request.hires.upscaler == "RealESRGAN_x2plus"


@pytest.mark.parametrize("form", ["{folder}/secret.png", "../secret.png"])
def test_a_workflow_names_only_images_next_to_it(form: str, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "secret.png")
    (tmp_path / "own").mkdir()
    text = {"clip": ["1", 1], "text": "a"}
    graph: dict[str, Any] = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "m.safetensors"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": text},
        "3": {"class_type": "LoadImage", "inputs": {"image": form.format(folder=tmp_path)}},
        "4": {"class_type": "VAEEncode", "inputs": {"pixels": ["3", 0], "vae": ["1", 2]}},
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["2", 0],
                "latent_image": ["4", 0],
                "seed": 1,
                "steps": 4,
                "cfg": 5.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 0.5,
            },
        },
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "x"}},
    }
    (tmp_path / "own" / "graph.json").write_text(json.dumps(graph))
    with pytest.raises(UserError, match=r"secret.png', expected a file next to"):
        read_fields(tmp_path / "own" / "graph.json")
    graph["3"]["inputs"]["image"] = "secret.png"
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    assert read_fields(tmp_path / "graph.json").request().image is not None


PLAIN = Recipe(
    model="shapes", model_sha256="a" * 64, prompt="x", negative="", loras=(), steps=4, cfg=5.0, sampler="euler",
    schedule="normal", width=64, height=64, seed=2**64 - 1, batch=8,
)  # fmt: skip


def test_the_parameters_of_an_image_mean_the_same_when_they_are_read_back() -> None:
    """Numbers had six digits, strengths four, and layers of CLIP were not in the text: it made another image."""
    lora = RecipeLora("light", "b" * 64, 0.12345678, text_strength=-1e-7, start=0.1, end=1 / 3)
    noise = RecipeNoise(0.12345678, 1.0000001, 5.1234567)
    hires = {"scale": 1.2345678, "strength": 0.3333333, "steps": 7, "via": "latent"}
    for changes, expected in (
        ({"cfg": 7.1234567}, {"cfg": 7.1234567}),
        (
            {"sampler": "euler_ancestral", "noise": noise},
            {"eta": 0.12345678, "s_noise": 1.0000001, "s_churn": 5.1234567},
        ),
        ({"sigmas": (14.6146415, 1.0, 1e-9)}, {"sigmas": (14.6146415, 1.0, 1e-9)}),
        ({"shift": 3.1234567}, {"shift": 3.1234567}),
        ({"clip_skip": 1}, {"clip_skip": 1}),
        ({"pictures": RecipeImages(hires=hires)}, {"hires": {**hires}}),
    ):
        texts = {"parameters": parameters_text(replace(PLAIN, **changes))}
        fields = fields_of_texts(texts, family_of=lambda _: "Stable Diffusion XL").fields
        assert {name: fields.get(name) for name in expected} == expected
        assert fields["seed"] == 2**64 - 1
    (read,) = fields_of_texts({"parameters": parameters_text(replace(PLAIN, loras=(lora,)))}).fields["loras"]
    assert (read.strength, read.text_strength, read.start, read.end) == (0.12345678, -1e-7, 0.1, 1 / 3)


def test_a_strength_in_parameters_runs_the_same_steps() -> None:
    """0.3333 of 30 steps were 9 in place of 10."""
    for steps in (1, 2, 3, 7, 20, 30, 49, 100, 333, 999):
        for first in range(0, steps, max(1, steps // 50)):
            made = replace(PLAIN, steps=steps, pictures=RecipeImages(image_sha256="c" * 64, first_step=first))
            strength = fields_of_texts({"parameters": parameters_text(made)}).fields["strength"]
            assert skipped_steps("strength", strength, steps) == first, (steps, first)


def test_what_parameters_leave_out_is_told_by_the_text_and_by_its_readers() -> None:
    """Options, regions and masks were missing from the text, which made another image without a word."""
    assert "Not listed" not in parameters_text(PLAIN)
    images = RecipeImages(
        image_sha256="c" * 64, mask_sha256="d" * 64, regions=(RecipeRegion("a", 1.0, None, "e" * 64),)
    )
    made = replace(PLAIN, options={"pag": {"scale": 3.0}}, pictures=images)
    text = parameters_text(made)
    assert 'Not listed: "mask, options, regions"' in text
    assert fields_of_texts({"parameters": text}).notes == (
        "the image was made with mask, options, regions, which the parameters do not have",
    )
