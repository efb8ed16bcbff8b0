"""Workflows of LTX-2, whose frames and audio are one latent while they are sampled: rendered with a tiny model, they
make what the pool's own requests make."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.models.loading.describe import REFERENCE_FACTOR_KEY
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import node
from tests.actors.http.comfy.every_setting import photo
from tests.actors.http.comfy.test_public_kinds import CONFIG
from tests.actors.loop_connection import open_real_pool
from tests.pool.families.definitions.test_ltx2 import SOUNDING
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.inference.upscalers.test_latent_upsamplers import tiny_upsampler

NAMES = PoolNames({"ltx2": "LTX-2", "ltx": "LTX-Video"}, [], image_size=lambda name: (64, 64))
WITH_LORAS = PoolNames({"ltx2": "LTX-2"}, ["ic", "ic2"], image_size=lambda name: (64, 64))
LEVELS = "1.0, 0.7, 0.3, 0.0"


def graph(cfg: float = 4.0, model: str = "ltx2", **changes: Any) -> dict[str, Any]:
    """A video with sound in one pass, as the templates of ComfyUI make it."""
    found = {
        "model": node("CheckpointLoaderSimple", ckpt_name=model),
        "loaded": node("LoadImage", image="a.png"),
        "clip": node("LTXAVTextEncoderLoader", text_encoder="gemma.safetensors", ckpt_name=model, device="default"),
        "sound_vae": node("LTXVAudioVAELoader", ckpt_name=model),
        "yes": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "no": node("CLIPTextEncode", clip=["clip", 0], text="blurry"),
        "texts": node("LTXVConditioning", positive=["yes", 0], negative=["no", 0], frame_rate=24.0),
        "frames": node("EmptyLTXVLatentVideo", width=96, height=64, length=9, batch_size=1),
        "sound": node("LTXVEmptyLatentAudio", audio_vae=["sound_vae", 0], frames_number=9, frame_rate=24, batch_size=1),
        "both": node("LTXVConcatAVLatent", video_latent=["frames", 0], audio_latent=["sound", 0]),
        "noise": node("RandomNoise", noise_seed=5),
        "guider": node("CFGGuider", model=["model", 0], positive=["texts", 0], negative=["texts", 1], cfg=cfg),
        "sampler": node("KSamplerSelect", sampler_name="euler"),
        "levels": node("ManualSigmas", sigmas=LEVELS),
        "run": node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["sampler", 0],
            sigmas=["levels", 0], latent_image=["both", 0],
        ),
        "apart": node("LTXVSeparateAVLatent", av_latent=["run", 0]),
        "images": node("VAEDecode", samples=["apart", 0], vae=["model", 2]),
        "audio": node("LTXVAudioVAEDecode", samples=["apart", 1], audio_vae=["sound_vae", 0]),
        "video": node("CreateVideo", images=["images", 0], audio=["audio", 0], fps=24.0),
        "saved": node("SaveVideo", video=["video", 0], filename_prefix="v", format="auto", codec="auto"),
    }  # fmt: skip
    for place, more in changes.items():
        name, _, given = place.partition("__")
        if given:
            found[name]["inputs"][given] = more
        elif more is None:
            del found[name]
        else:
            found[name] = copy.deepcopy(more)
    return found


def requests(prompt: dict[str, Any], names: PoolNames) -> list[GenerateRequest]:
    return [one for output in outputs_of(prompt, names) for one in requests_of(output, names, photo)]


def without(prompt: dict[str, Any], place: str, name: str) -> dict[str, Any]:
    del prompt[place]["inputs"][name]
    return prompt


def own_request(cfg: float = 4.0, **more: Any) -> GenerateRequest:
    """The pool's own request of the same video: ComfyUI guides audio as the frames, and scales nothing."""
    options = {} if cfg == 1 else {"options": {"sound": {"cfg": cfg, "rescale": 0.0}}}
    fields: dict[str, Any] = {
        "model": "ltx2", "prompt": "a fox", "negative": "blurry", "seed": 5, "cfg": cfg, "sampler": "euler",
        "sigmas": (1.0, 0.7, 0.3), "width": 96, "height": 64, "frames": 9, "frame_rate": 24.0, "format": "mp4",
    }  # fmt: skip
    return GenerateRequest(**{**fields, **options, **more})


def refusals(prompt: dict[str, Any]) -> str:
    with pytest.raises(WorkflowRejected) as rejected:
        outputs_of(prompt, NAMES)
    return " ".join(each.details for each in rejected.value.errors)


def test_frames_and_audio_in_one_pass_are_one_request() -> None:
    (made,) = requests(graph(), NAMES)
    assert made.workflow is None
    assert made.options == own_request().options
    for name in ("seed", "cfg", "sampler", "sigmas", "width", "height", "frames", "frame_rate", "format", "prompt"):
        assert getattr(made, name) == getattr(own_request(), name), name


def test_audio_has_the_scale_that_a_node_sets() -> None:
    scales = {"video_cfg": 3.0, "audio_cfg": 7.0}
    texts = {"model": ["model", 0], "positive": ["texts", 0], "negative": ["texts", 1]}
    (made,) = requests(graph(guider=node("LTXVDualCFGGuider", **texts, **scales)), NAMES)
    assert made.cfg == 3
    assert made.options is not None
    assert made.options.settings() == {"sound": {"cfg": 7.0, "rescale": 0.0}}
    (unguided,) = requests(graph(guider=node("LTXVDualCFGGuider", **texts, video_cfg=1.0, audio_cfg=1.0)), NAMES)
    assert unguided.options is None
    assert "video_cfg" in refusals(graph(guider=node("LTXVDualCFGGuider", **texts, video_cfg=1.0, audio_cfg=7.0)))


def test_audio_of_another_length_or_for_another_model_is_refused_with_a_reason() -> None:
    assert "expected that of the video" in refusals(graph(sound__frames_number=41))
    assert "expected one rate" in refusals(graph(sound__frame_rate=25))
    assert "a batch of 2" in refusals(graph(sound__batch_size=2))
    assert "does not sample together" in refusals(graph(model="ltx"))
    assert "LTXVConcatAVLatent" in refusals(graph(run__latent_image=["frames", 0]))
    assert "latents of audio" in refusals(graph(images__samples=["sound", 0]))


def test_a_latent_of_frames_alone_is_sampled_with_audio_and_told_of() -> None:
    prompt = without(graph(run__latent_image=["frames", 0], images__samples=["run", 0]), "video", "audio")
    for name in ("apart", "audio", "both", "sound", "sound_vae"):
        del prompt[name]
    (output,) = outputs_of(prompt, NAMES)
    assert any("LTXVConcatAVLatent adds it" in each for each in output.warnings)


def in_place(strength: float, frames: str = "frames", name: str = "led", **more: Any) -> dict[str, Any]:
    """Nodes that put an image into the first frame of latents."""
    inputs = {"vae": ["model", 2], "image": ["loaded", 0], "latent": [frames, 0], "strength": strength, "bypass": False}
    return {name: node("LTXVImgToVideoInplace", **{**inputs, **more})}


def guided_by(*guides: tuple[int, float]) -> dict[str, Any]:
    """Nodes that have images guide a video, and crop them afterwards."""
    found: dict[str, Any] = {}
    texts, latent = ["texts", 0], ["frames", 0]
    for number, (frame, strength) in enumerate(guides):
        found[f"guide{number}"] = node(
            "LTXVAddGuide", positive=texts, negative=[texts[0], 1], vae=["model", 2], latent=latent,
            image=["loaded", 0], frame_idx=frame, strength=strength,
        )  # fmt: skip
        texts, latent = [f"guide{number}", 0], [f"guide{number}", 2]
    guider = {"positive": texts, "negative": [texts[0], 1]}
    found["guider"] = node("CFGGuider", model=["model", 0], **guider, cfg=1.0)
    found["cropped"] = node("LTXVCropGuides", **guider, latent=["apart", 0])
    return {**found, "both__video_latent": latent, "images__samples": ["cropped", 2]}


def guides_of(prompt: dict[str, Any]) -> list[tuple[int, float]]:
    (made,) = requests(prompt, NAMES)
    assert made.workflow is not None
    (run,) = made.workflow.samplings
    assert "image" not in run.inputs
    return [(guide.frame, guide.strength) for guide in run.guides]


def test_images_guide_videos_at_frames_with_their_strengths() -> None:
    assert guides_of(graph(**in_place(0.7), both__video_latent=["led", 0])) == [(0, 0.7)]
    assert guides_of(graph(**guided_by((0, 0.7), (-1, 0.5), (4, 1.0)))) == [(0, 0.7), (8, 0.5), (4, 1.0)]
    mixed = graph(**in_place(1.0), **guided_by((-1, 0.7)))
    mixed["guide0"]["inputs"]["latent"] = ["led", 0]
    assert guides_of(mixed) == [(0, 1.0), (8, 0.7)]
    (plain,) = requests(graph(**in_place(1.0), both__video_latent=["led", 0]), NAMES)
    assert plain.workflow is None
    assert plain.image is not None
    (bypassed,) = requests(graph(**in_place(1.0, bypass=True), both__video_latent=["led", 0]), NAMES)
    assert bypassed.image is None


def frames_that_guide(count: int) -> dict[str, Any]:
    """Nodes that make frames of an image: "moving"."""
    return {
        "moving": node("RepeatImageBatch", image=["loaded", 0], amount=count),
        "lora": node("LoraLoaderModelOnly", model=["model", 0], lora_name="ic.safetensors", strength_model=1.0),
        "small": node("GetICLoRAParameters", iclora_model=["lora", 0]),
    }


def places_of(prompt: dict[str, Any]) -> list[dict[str, Any]]:
    (made,) = requests(prompt, WITH_LORAS)
    assert made.workflow is not None
    (run,) = made.workflow.samplings
    return [guide.model_dump(exclude_defaults=True) for guide in run.guides]


def test_frames_and_further_images_guide_videos_next_to_the_first_frame() -> None:
    assert places_of(graph(**guided_by((0, 1.0), (0, 0.5)))) == [{}, {"strength": 0.5, "appended": True}]
    moving = graph(**in_place(0.7), **guided_by((0, 1.0)), **frames_that_guide(12))
    moving["guide0"]["inputs"] |= {"latent": ["led", 0], "image": ["moving", 0], "iclora_parameters": ["small", 0]}
    assert places_of(moving) == [{"strength": 0.7}, {"lora": "ic"}]
    # the first frame comes later, and the image that was at its place stays next to it
    later = graph(**{**guided_by((0, 0.9)), **in_place(1.0, "guide0"), "both__video_latent": ["led", 0]})
    later["led"]["inputs"]["latent"] = ["guide0", 2]
    assert places_of(later) == [{"strength": 0.9, "appended": True}, {}]
    longer = {"frames__length": 33, "sound__frames_number": 33}
    moved = graph(**guided_by((12, 1.0)), **frames_that_guide(17), **longer)
    moved["guide0"]["inputs"]["image"] = ["moving", 0]
    assert places_of(moved) == [{"frame": 9}]
    (output,) = outputs_of(moved, NAMES)
    assert any("frame_idx: found 12: the 17 frames guide from frame 9 on" in each for each in output.warnings)


def test_images_that_cannot_guide_are_refused_with_a_reason() -> None:
    assert "up to 8" in refusals(graph(**guided_by((9, 1.0))))
    behind = graph(**guided_by((1, 1.0)))
    behind["guide0"]["inputs"]["image"] = ["moving", 0]
    behind |= frames_that_guide(9)
    assert "9 frames from frame 1 on, expected frames within the 9" in refusals(behind)
    assert "strength: found 0" in refusals(graph(**guided_by((4, 0.0))))
    masked = graph(**guided_by((4, 1.0)), mask=node("LoadImageMask", image="a.png", channel="red"))
    masked["guide0"]["inputs"]["attention_mask"] = ["mask", 0]
    assert "attention_mask" in refusals(masked)
    again = graph(
        **in_place(0.7), both__video_latent=["led", 0], images__samples=["apart2", 0], **second_pass("run", 0)
    )
    assert "LTXVImgToVideoInplace sets it again" in refusals(again)
    with_audio = graph(**in_place(0.7, "both"), run__latent_image=["led", 0])
    assert "without audio" in refusals(with_audio)


def test_every_setting_of_these_nodes_acts_or_is_told_of_or_refused() -> None:
    """A change of an input leads to another request, to a warning, or to a refusal."""
    other = {"other": node("CheckpointLoaderSimple", ckpt_name="ltx2b")}
    names = PoolNames({"ltx2": "LTX-2", "ltx2b": "LTX-2"}, ["ic", "ic2"], image_size=lambda name: (64, 64))
    texts = {"model": ["model", 0], "positive": ["texts", 0], "negative": ["texts", 1]}
    dual = node("LTXVDualCFGGuider", **texts, video_cfg=3.0, audio_cfg=7.0)
    upscaled = {
        "upscaler": node("LatentUpscaleModelLoader", model_name="up"),
        "larger": node("LTXVLatentUpsampler", samples=["apart", 0], upscale_model=["upscaler", 0], vae=["model", 2]),
        "images__samples": ["larger", 0],
    }
    led = {**in_place(0.7), "both__video_latent": ["led", 0]}
    small = guided_by((0, 0.7))
    small["guide0"]["inputs"]["iclora_parameters"] = ["small", 0]
    tried: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"sound__frames_number": 16, "sound__frame_rate": 12, "sound__batch_size": 2}),
        ({}, {"sound_vae__ckpt_name": "ltx2b", "clip__ckpt_name": "ltx2b"}),
        ({}, {"apart__av_latent": ["run", 1], "texts__frame_rate": 12.0}),
        ({"guider": dual}, {"guider__video_cfg": 4.0, "guider__audio_cfg": 4.0, "guider__model": ["other", 0]}),
        ({"guider": dual}, {"guider__positive": ["no", 0], "guider__negative": ["yes", 0]}),
        (upscaled, {"upscaler__model_name": "up2", "larger__vae": ["other", 2], "larger__samples": ["run", 0]}),
        (led, {"led__strength": 0.5, "led__bypass": True, "led__vae": ["other", 2], "led__latent": ["sound", 0]}),
        (led, {"led__image": ["loaded2", 0]}),
        (guided_by((4, 0.7)), {"guide0__frame_idx": 3, "guide0__strength": 0.5, "guide0__vae": ["other", 2]}),
        (guided_by((4, 0.7)), {"guide0__image": ["loaded2", 0], "guide0__positive": ["no", 0]}),
        (guided_by((0, 0.7)), {"guide0__iclora_parameters": ["small", 0], "guide0__image": ["moving", 0]}),
        (small, {"small__iclora_model": ["lora2", 0]}),
    ]
    more = {**other, **frames_that_guide(9), "loaded2": node("LoadImage", image="b.png")}
    more["lora2"] = node("LoraLoaderModelOnly", model=["model", 0], lora_name="ic2.safetensors", strength_model=1.0)
    same = ("apart__av_latent",)  # both outputs of a sampler are the latents after its last step
    for base, changes in tried:
        before = _meaning(graph(**more, **base), names)
        for place, value in changes.items():
            assert (_meaning(graph(**more, **base, **{place: value}), names) == before) == (place in same), place


def _meaning(prompt: dict[str, Any], names: PoolNames) -> list[Any]:
    try:
        (output,) = outputs_of(prompt, names)
    except WorkflowRejected as rejected:
        return [each.details for each in rejected.errors]
    return [*requests(prompt, names), output.warnings]


def second_pass(run: str, output: int) -> dict[str, Any]:
    """Nodes that sample the frames and the audio of a run once more."""
    return {
        "levels2": node("ManualSigmas", sigmas="0.5, 0.0"),
        "run2": node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["sampler", 0],
            sigmas=["levels2", 0], latent_image=[run, output],
        ),
        "apart2": node("LTXVSeparateAVLatent", av_latent=["run2", 1]),
    }  # fmt: skip


def test_videos_that_images_guide_render(tmp_path: Path) -> None:
    """With the image as first frame, the video of the pool's own request; in part, and at the end, other ones; and in
    a second pass again, next to the frames of the first."""
    save_file(SOUNDING.file(), tmp_path / "ltx2.safetensors")
    write_tokenizers(tmp_path, SOUNDING)
    begun = graph(cfg=1.0, **in_place(1.0), both__video_latent=["led", 0])
    again = graph(
        cfg=1.0, **in_place(0.8), both__video_latent=["led", 0], **in_place(1.0, "apart", "led2"),
        **second_pass("both2", 0),
        both2=node("LTXVConcatAVLatent", video_latent=["led2", 0], audio_latent=["apart", 1]),
        images__samples=["apart2", 0], audio__samples=["apart2", 1],
    )  # fmt: skip
    moving = graph(**in_place(1.0), **guided_by((0, 0.9)), **frames_that_guide(9))
    del moving["lora"], moving["small"]
    moving["guide0"]["inputs"] |= {"latent": ["led", 0], "image": ["moving", 0]}
    graphs = (
        graph(cfg=1.0), begun, graph(cfg=1.0, **in_place(0.6), both__video_latent=["led", 0]),
        graph(**guided_by((0, 1.0))), graph(**guided_by((0, 0.8), (-1, 0.7))), again, moving,
    )  # fmt: skip
    (shown,) = requests(begun, NAMES)
    wanted = [own_request(1.0, image=shown.image), *(requests(each, NAMES)[0] for each in graphs)]
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1, vram="512 MiB")
    with open_real_pool(config) as pool:
        found: dict[int, Any] = {one.index: one for one in pool.submit(wanted).results()}
    own, plain, kept, in_part, guided, several, second, followed = (found[place].frames for place in range(len(wanted)))
    np.testing.assert_array_equal(kept, own)
    np.testing.assert_array_equal(guided, own)
    different = [own, plain, in_part, several, second, followed]
    assert len({each.tobytes() for each in different}) == len(different)
    assert all(each.shape == own.shape for each in different)


def test_the_file_of_an_ic_lora_says_how_large_its_guides_are(tmp_path: Path) -> None:
    """Two files with the same weights: one of them was trained with guides of half the size."""
    save_file(SOUNDING.file(), tmp_path / "ltx2.safetensors")
    write_tokenizers(tmp_path, SOUNDING)
    (tmp_path / "loras").mkdir()
    layer = "diffusion_model.transformer_blocks.0.attn1.to_q"
    weights = {f"{layer}.lora_A.weight": torch.ones(1, 128) / 100, f"{layer}.lora_B.weight": torch.ones(128, 1)}
    for name, metadata in (("ic", {REFERENCE_FACTOR_KEY: "2"}), ("ic2", {})):
        save_file(weights, tmp_path / "loras" / f"{name}.safetensors", metadata)

    def made(lora: str, width: int = 128) -> GenerateRequest:
        sides = {"frames__width": width, "frames__height": 64}
        prompt = graph(**guided_by((0, 1.0)), **frames_that_guide(9), **sides)
        prompt["lora"]["inputs"]["lora_name"] = lora
        prompt["guide0"]["inputs"] |= {"image": ["moving", 0], "iclora_parameters": ["small", 0]}
        prompt["guider"]["inputs"]["model"] = ["lora", 0]
        (one,) = requests(prompt, WITH_LORAS)
        return one

    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1, loras=[tmp_path / "loras"])
    with open_real_pool(config.override(vram="512 MiB")) as pool:
        found: dict[int, Any] = {one.index: one for one in pool.submit([made("ic"), made("ic2")]).results()}
        with pytest.raises(UserError, match="expected multiples of 64: the LoRA of a guide"):
            pool.submit([made("ic", 96)])
    small, large = found[0].frames, found[1].frames
    assert small.shape == large.shape == (9, 64, 128, 3)
    assert not np.array_equal(small, large)


def test_workflows_render_what_the_pools_own_requests_render(tmp_path: Path) -> None:
    """One pass with audio, without audio, the audio alone, and a second pass from the latents of the first."""
    save_file(SOUNDING.file(), tmp_path / "ltx2.safetensors")
    write_tokenizers(tmp_path, SOUNDING)
    silent = without(graph(), "video", "audio")
    alone = graph(video=None, saved=node("SaveAudio", audio=["audio", 0], filename_prefix="a"))
    again = graph(
        cfg=1.0,
        texts2=node("LTXVCropGuides", positive=["texts", 0], negative=["texts", 1], latent=["apart", 0]),
        both2=node("LTXVConcatAVLatent", video_latent=["texts2", 2], audio_latent=["apart", 1]),
        levels2=node("ManualSigmas", sigmas="0.5, 0.0"),
        run2=node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["sampler", 0],
            sigmas=["levels2", 0], latent_image=["both2", 0],
        ),
        apart2=node("LTXVSeparateAVLatent", av_latent=["run2", 1]),
        images__samples=["apart2", 0],
        audio__samples=["apart2", 1],
    )  # fmt: skip
    fresh = {name: {**each, "inputs": dict(each["inputs"])} for name, each in again.items()}
    fresh["both2"]["inputs"]["audio_latent"] = ["sound", 0]
    larger = {name: {**each, "inputs": dict(each["inputs"])} for name, each in again.items()}
    larger["upscaler"] = node("LatentUpscaleModelLoader", model_name="up.safetensors")
    larger["larger"] = node(
        "LTXVLatentUpsampler", samples=["texts2", 2], upscale_model=["upscaler", 0], vae=["model", 2]
    )
    larger["both2"]["inputs"]["video_latent"] = ["larger", 0]
    tiny_upscaler = {key: x.contiguous() for key, x in tiny_upsampler(8).state_dict().items()}
    save_file(tiny_upscaler, tmp_path / "up.safetensors")
    graphs = (graph(), silent, alone, again, fresh, larger)
    wanted = [own_request(), *(requests(each, NAMES)[0] for each in graphs)]
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1, vram="512 MiB")
    with open_real_pool(config) as pool:
        found: dict[int, Any] = {one.index: one for one in pool.submit(wanted).results()}
    whole, one_pass, frames, audio, second, other, twice = (found[place] for place in range(len(wanted)))
    np.testing.assert_array_equal(one_pass.frames, whole.frames)
    np.testing.assert_array_equal(frames.frames, whole.frames)
    np.testing.assert_array_equal(one_pass.sound.samples_SC, whole.sound.samples_SC)
    np.testing.assert_array_equal(audio.samples, whole.sound.samples_SC)
    assert frames.sound is None
    assert second.sound is not None
    assert second.frames.shape == whole.frames.shape
    assert twice.frames.shape == (9, 128, 192, 3)
    assert twice.sound.samples_SC.shape == whole.sound.samples_SC.shape
    assert not np.array_equal(other.sound.samples_SC, second.sound.samples_SC)
