"""Workflows of LTX-2, whose frames and audio are one latent while they are sampled: rendered with a tiny model, they
make what the pool's own requests make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from modelpool import PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.comfy.comfy_examples import node
from tests.actors.http.comfy.test_public_kinds import CONFIG, requests
from tests.actors.loop_connection import open_real_pool
from tests.pool.families.definitions.test_ltx2 import SOUNDING
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.inference.upscalers.test_latent_upsamplers import tiny_upsampler

NAMES = PoolNames({"ltx2": "LTX-2", "ltx": "LTX-Video"}, [], image_size=lambda name: (64, 64))
LEVELS = "1.0, 0.7, 0.3, 0.0"


def graph(cfg: float = 4.0, model: str = "ltx2", **changes: Any) -> dict[str, Any]:
    """A video with sound in one pass, as the templates of ComfyUI make it."""
    found = {
        "model": node("CheckpointLoaderSimple", ckpt_name=model),
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
            found[name] = more
    return found


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
