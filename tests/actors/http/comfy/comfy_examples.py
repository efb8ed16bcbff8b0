"""Workflows in the layouts of ComfyUI's published examples, written for these tests; nodes by short names."""

from __future__ import annotations

from typing import Any

Graph = dict[str, Any]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    """A node in the API format."""
    return {"class_type": kind, "inputs": inputs}


def basic(checkpoint: str = "shapes", **sampler: Any) -> Graph:
    """Text to image with a checkpoint: ids are the roles of the nodes."""
    settings = {"seed": 5, "steps": 8, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    return {
        "model": node("CheckpointLoaderSimple", ckpt_name=f"{checkpoint}.safetensors"),
        "positive": node("CLIPTextEncode", text="a red circle", clip=["model", 1]),
        "negative": node("CLIPTextEncode", text="blurry", clip=["model", 1]),
        "blank": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "sampler": node(
            "KSampler",
            **{
                **settings,
                "model": ["model", 0],
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": ["blank", 0],
                **sampler,
            },
        ),
        "decoded": node("VAEDecode", samples=["sampler", 0], vae=["model", 2]),
        "saved": node("SaveImage", images=["decoded", 0], filename_prefix="example"),
    }


def flux() -> Graph:
    """Flux dev from separate files, with a guider and a sampler of parts."""
    return {
        "unet": node("UNETLoader", unet_name="flux.safetensors", weight_dtype="default"),
        "clip": node("DualCLIPLoader", clip_name1="t5xxl.safetensors", clip_name2="clip_l.safetensors", type="flux"),
        "vae": node("VAELoader", vae_name="ae.safetensors"),
        "text": node("CLIPTextEncode", text="a red circle", clip=["clip", 0]),
        "guided": node("FluxGuidance", conditioning=["text", 0], guidance=3.0),
        "shifted": node(
            "ModelSamplingFlux", model=["unet", 0], max_shift=1.15, base_shift=0.5, width=64, height=96
        ),
        "guider": node("BasicGuider", model=["shifted", 0], conditioning=["guided", 0]),
        "noise": node("RandomNoise", noise_seed=11),
        "chosen": node("KSamplerSelect", sampler_name="euler"),
        "levels": node("BasicScheduler", model=["shifted", 0], scheduler="simple", steps=20, denoise=1.0),
        "blank": node("EmptySD3LatentImage", width=64, height=96, batch_size=1),
        "sampler": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0], guider=["guider", 0], sampler=["chosen", 0], sigmas=["levels", 0],
            latent_image=["blank", 0],
        ),
        "decoded": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "saved": node("SaveImage", images=["decoded", 0], filename_prefix="flux"),
    }  # fmt: skip


def sd3() -> Graph:
    """Stable Diffusion 3 with three text encoders and a shift."""
    graph = basic("sd3", model=["shifted", 0])
    graph["clips"] = node("TripleCLIPLoader", clip_name1="l", clip_name2="g", clip_name3="t5")
    graph["shifted"] = node("ModelSamplingSD3", model=["model", 0], shift=3.0)
    graph["blank"] = node("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    for name in ("positive", "negative"):
        graph[name]["inputs"]["clip"] = ["clips", 0]
    return graph


def from_parts(
    model: str, shift: tuple[str, float], sampler: str = "euler", cfg: float = 2.5, zero: bool = False
) -> Graph:
    """A flow model from separate files, with a shift: as ComfyUI's templates for Qwen-Image, Z-Image, HiDream and
    others are. `zero`: the negative text is conditioning that was set to zero."""
    settings = {"sampler_name": sampler, "scheduler": "simple", "cfg": cfg, "steps": 20}
    graph = basic(**settings)
    graph["model"] = node("UNETLoader", unet_name=f"{model}.safetensors", weight_dtype="default")
    graph["clip"] = node("CLIPLoader", clip_name="text_encoder.safetensors", type="qwen_image", device="default")
    graph["vae"] = node("VAELoader", vae_name="vae.safetensors")
    graph["shifted"] = node(shift[0], model=["model", 0], shift=shift[1])
    graph["blank"] = node("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    graph["sampler"]["inputs"]["model"] = ["shifted", 0]
    for name in ("positive", "negative"):
        graph[name]["inputs"]["clip"] = ["clip", 0]
    if zero:
        graph["negative"] = node("ConditioningZeroOut", conditioning=["positive", 0])
    graph["decoded"]["inputs"]["vae"] = ["vae", 0]
    return graph


def with_parts(sampler: dict[str, Any], levels: dict[str, Any], model: str = "shapes") -> Graph:
    """A checkpoint with a sampler of parts: the nodes of its sampler and of its noise levels are given."""
    graph = basic(model)
    graph["chosen"], graph["levels"] = sampler, levels
    graph["sampler"] = node(
        "SamplerCustom",
        model=["model", 0], add_noise=True, noise_seed=9, cfg=4.0, positive=["positive", 0], negative=["negative", 0],
        sampler=["chosen", 0], sigmas=["levels", 0], latent_image=["blank", 0],
    )  # fmt: skip
    return graph


def turbo() -> Graph:
    """One step of SDXL Turbo, by a sampler of parts."""
    graph = basic("xl")
    graph["chosen"] = node("KSamplerSelect", sampler_name="euler_ancestral")
    graph["levels"] = node("SDTurboScheduler", model=["model", 0], steps=2, denoise=1.0)
    graph["sampler"] = node(
        "SamplerCustom",
        model=["model", 0], add_noise=True, noise_seed=9, cfg=1.0, positive=["positive", 0], negative=["negative", 0],
        sampler=["chosen", 0], sigmas=["levels", 0], latent_image=["blank", 0],
    )  # fmt: skip
    return graph


def areas() -> Graph:
    """A text for the image, one for a box, and one for a share of it."""
    graph = basic(positive=["both", 0])
    graph["sky"] = node("CLIPTextEncode", text="a sky", clip=["model", 1])
    graph["ground"] = node("CLIPTextEncode", text="a lawn", clip=["model", 1])
    graph["above"] = node("ConditioningSetArea", conditioning=["sky", 0], width=64, height=32, x=0, y=0, strength=1.5)
    graph["below"] = node(
        "ConditioningSetAreaPercentage", conditioning=["ground", 0], width=1.0, height=0.5, x=0.0, y=0.5, strength=1.0
    )
    graph["parts"] = node("ConditioningCombine", conditioning_1=["above", 0], conditioning_2=["below", 0])
    graph["both"] = node("ConditioningCombine", conditioning_1=["parts", 0], conditioning_2=["positive", 0])
    return graph


def with_image(**sampler: Any) -> Graph:
    """Image to image, from a scaled image."""
    graph = basic(latent_image=["encoded", 0], **sampler)
    graph["loaded"] = node("LoadImage", image="clear.png")
    graph["scaled"] = node(
        "ImageScale", image=["loaded", 0], upscale_method="bilinear", width=96, height=64, crop="center"
    )
    graph["encoded"] = node("VAEEncode", pixels=["scaled", 0], vae=["model", 2])
    return graph


def outpainting() -> Graph:
    """Space at the right of an image is painted."""
    graph = with_image()
    graph["padded"] = node("ImagePadForOutpaint", image=["loaded", 0], left=0, top=0, right=32, bottom=0, feathering=8)
    graph["encoded"] = node(
        "VAEEncodeForInpaint", pixels=["padded", 0], vae=["model", 2], mask=["padded", 1], grow_mask_by=0
    )
    return graph


def two_samplers(second_model: str) -> Graph:
    """A sampler that stops with the noise that is left, and one that continues, as with a refiner."""
    graph = basic("xl")
    graph["second"] = node("CheckpointLoaderSimple", ckpt_name=f"{second_model}.safetensors")
    source = "model" if second_model == "xl" else "second"
    inputs = {**graph["sampler"]["inputs"], "noise_seed": 5, "start_at_step": 0, "end_at_step": 6}
    del inputs["seed"], inputs["denoise"]
    graph["sampler"] = node(
        "KSamplerAdvanced", **inputs | {"add_noise": "enable", "return_with_leftover_noise": "enable"}
    )
    graph["rest"] = node(
        "KSamplerAdvanced",
        **inputs
        | {"add_noise": "disable", "noise_seed": 0, "start_at_step": 6, "end_at_step": 10000, "model": [source, 0]}
        | {"return_with_leftover_noise": "disable", "latent_image": ["sampler", 0]},
    )
    graph["decoded"]["inputs"]["samples"] = ["rest", 0]
    return graph


def upscaled() -> Graph:
    """A second pass over the decoded and scaled image."""
    graph = basic()
    graph["bigger"] = node("ImageScaleBy", image=["decoded", 0], upscale_method="lanczos", scale_by=1.5)
    graph["again"] = node("VAEEncode", pixels=["bigger", 0], vae=["model", 2])
    graph["sampler_2"] = node(
        "KSampler", **{**graph["sampler"]["inputs"], "latent_image": ["again", 0], "denoise": 0.5}
    )
    graph["decoded_2"] = node("VAEDecodeTiled", samples=["sampler_2", 0], vae=["model", 2], tile_size=512)
    graph["saved"]["inputs"]["images"] = ["decoded_2", 0]
    return graph


def kontext() -> Graph:
    """An edit by Flux Kontext: the image is a reference, and gives the size."""
    graph = flux()
    graph["loaded"] = node("LoadImage", image="clear.png")
    graph["sized"] = node("FluxKontextImageScale", image=["loaded", 0])
    graph["encoded"] = node("VAEEncode", pixels=["sized", 0], vae=["vae", 0])
    graph["referring"] = node("ReferenceLatent", conditioning=["text", 0], latent=["encoded", 0])
    graph["guided"]["inputs"]["conditioning"] = ["referring", 0]
    graph["guider"]["inputs"]["model"] = ["unet", 0]
    graph["levels"]["inputs"]["model"] = ["unet", 0]
    graph["sampler"]["inputs"]["latent_image"] = ["encoded", 0]
    return graph


def editor_format(inner_steps: int, host_steps: int | None) -> Graph:
    """A workflow as the editor saves it: the sampler and its latents are in a subgraph, which shows `steps`; a LoRA is
    bypassed, and a saving node is switched off."""
    sampler_values = [5, "randomize", inner_steps, 7, "euler", "normal", 1]
    sampler_inputs = [
        {"name": name, "type": kind, "link": link}
        for name, kind, link in (
            ("model", "MODEL", 1), ("positive", "CONDITIONING", 2), ("negative", "CONDITIONING", 3),
            ("latent_image", "LATENT", 4),
        )
    ]  # fmt: skip
    subgraph = {
        "id": "11111111-2222-3333-4444-555555555555",
        "name": "Sampling",
        "inputs": [{"name": name} for name in ("model", "positive", "negative")],
        "outputs": [{"name": "LATENT"}],
        "nodes": [
            {"id": 1, "type": "EmptyLatentImage", "widgets_values": [64, 64, 2]},
            {"id": 2, "type": "KSampler", "inputs": sampler_inputs, "widgets_values": sampler_values},
        ],
        "links": [
            {"id": place + 1, "origin_id": source, "origin_slot": slot, "target_id": target, "target_slot": place}
            for place, (source, slot, target) in enumerate(((-10, 0, 2), (-10, 1, 2), (-10, 2, 2), (1, 0, 2)))
        ]
        + [{"id": 5, "origin_id": 2, "origin_slot": 0, "target_id": -20, "target_slot": 0, "type": "LATENT"}],
    }
    host = {
        "id": 6,
        "type": subgraph["id"],
        "inputs": [
            {"name": "model", "type": "MODEL", "link": 2},
            {"name": "positive", "type": "CONDITIONING", "link": 3},
            {"name": "negative", "type": "CONDITIONING", "link": 4},
        ],
        "properties": {"proxyWidgets": [["2", "steps"]]},
        "widgets_values": [] if host_steps is None else [host_steps],
    }
    lora = {
        "id": 2, "type": "LoraLoaderModelOnly", "mode": 4, "widgets_values": ["light", 1.0],
        "inputs": [{"name": "model", "type": "MODEL", "link": 1}], "outputs": [{"name": "MODEL", "type": "MODEL"}],
    }  # fmt: skip
    clip = {"name": "clip", "type": "CLIP"}
    return {
        "nodes": [
            {"id": 1, "type": "CheckpointLoaderSimple", "widgets_values": ["shapes.safetensors"]},
            lora,
            {"id": 3, "type": "CLIPTextEncode", "inputs": [{**clip, "link": 5}], "widgets_values": ["a red circle"]},
            {"id": 4, "type": "CLIPTextEncode", "inputs": [{**clip, "link": 6}], "widgets_values": ["blurry"]},
            host,
            {"id": 7, "type": "VAEDecode", "inputs": [{"name": "samples", "link": 7}, {"name": "vae", "link": 8}]},
            {"id": 8, "type": "SaveImage", "inputs": [{"name": "images", "link": 9}], "widgets_values": ["a"]},
            {"id": 9, "type": "PreviewImage", "mode": 2, "inputs": [{"name": "images", "link": 10}]},
        ],
        "links": [
            [1, 1, 0, 2, 0, "MODEL"], [2, 2, 0, 6, 0, "MODEL"], [3, 3, 0, 6, 1, "CONDITIONING"],
            [4, 4, 0, 6, 2, "CONDITIONING"], [5, 1, 1, 3, 0, "CLIP"], [6, 1, 1, 4, 0, "CLIP"],
            [7, 6, 0, 7, 0, "LATENT"], [8, 1, 2, 7, 1, "VAE"], [9, 7, 0, 8, 0, "IMAGE"], [10, 7, 0, 9, 0, "IMAGE"],
        ],
        "definitions": {"subgraphs": [subgraph]},
        "version": 0.4,
    }  # fmt: skip
