"""Wan 2.1 makes of an image that it sees, and of a first and a last one, what diffusers makes: on the same weights,
texts and noise."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file

from modelpool.pool.files.formats.model_description import read_description
from modelpool.pool.inference.conditioning.first_frame import first_frame_inputs
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.encoded_videos import VideoBeginning
from modelpool.pool.values.core.errors import MissingParts, UnknownArchitecture, UnusableField
from modelpool.pool.values.core.stage_params import SampleParams, VideoFrames, VisionEncodeParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_videos_from_images import CONCATENATED, louder
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.tiny_transformers import File, TinyFamily, prefixed, seeded
from tests.pool.families.tiny_videos import SEEN, SIDE, clip_vision
from tests.pool.inference.conditioning.test_image_concat import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, FRAMES, STEPS, SEED = 96, 64, 5, 3, 11
FIELDS: dict[str, Any] = {"frames": FRAMES, "steps": STEPS, "negative": "a dog", "width": WIDTH, "height": HEIGHT}
#: pixels a side and states of what the model for two images is shown of each: recognition knows it by their number
SIDE_OF_TWO, STATES_OF_TWO = 224, 257


@dataclass(frozen=True, eq=False)
class TinySeeing(TinyFamily):
    """A family with a file that has a vision encoder, spelled as transformers does, as files of their own have it."""

    side: int = SIDE

    def file(self, left_out: tuple[str, ...] = ()) -> File:
        """The whole file."""
        seen = prefixed("vision_encoder.", seeded(lambda: clip_vision(self.side), 3).state_dict())
        return TinyFamily.file(self, left_out) | {key: value.contiguous().clone() for key, value in seen.items()}


def _wan(in_channels: int = 36, **more: Any) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=in_channels, out_channels=16, text_dim=TEXT_WIDTH,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=1024, image_dim=SEEN, added_kv_proj_dim=128, **more,
    )  # fmt: skip


_PARTS = (CONCATENATED.publish, CONCATENATED.encoders, CONCATENATED.vae, CONCATENATED.vae_file)
ONE = TinySeeing("wan21_i2v", _wan, *_PARTS)
BOTH = TinySeeing("wan21_flf2v", lambda: _wan(pos_embed_seq_len=2 * STATES_OF_TWO), *_PARTS, side=SIDE_OF_TWO)
FOLLOWING = TinySeeing("wan21_fun_control", lambda: _wan(48), *_PARTS)
PIPELINES = {
    "wan21_i2v": diffusers.WanImageToVideoPipeline,
    "wan21_flf2v": diffusers.WanImageToVideoPipeline,
    "wan22_i2v": diffusers.WanImageToVideoPipeline,
}
TINY = {"wan21_i2v": ONE, "wan21_flf2v": BOTH, "wan22_i2v": CONCATENATED}
NOT_COMPARED = {
    "wan21_fun_control": "diffusers has no pipeline for it: compared with that of image-to-video, given its channels"
}


def image(seed: int, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Nothing in it is like anything beside it."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def _expected(model: TinyFamilyModel, texts: dict[str, Any], channels: Any = None, **call: Any) -> Any:
    """`channels` are those that are concatenated with the latent, if they are others than the pipeline's."""
    vae, defaults = model.module(Role.VAE), model.family.sampling.defaults
    assert defaults is not None
    latent = model.engine._opened(model.model).latent
    vae.register_to_config(latents_mean=latent.means, latents_std=latent.deviations)
    side = getattr(TINY.get(model.family.name), "side", SIDE)
    sides = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    sees = Role.VISION_ENCODER in model.family.prefixes
    pipeline = PIPELINES["wan21_i2v" if channels is not None else model.family.name](
        None, None, vae, FlowMatchEulerDiscreteScheduler(shift=model.family.sampling.noise.shift),
        transformers.CLIPImageProcessorPil(**sides), model.module(Role.VISION_ENCODER) if sees else None,
        model.module(Role.DIFFUSION_MODEL),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    noise = ImageNoise(SEED).draw((1, 16, 2, HEIGHT // 8, WIDTH // 8))
    if channels is not None:
        pipeline.prepare_latents = lambda *_, **__: (noise, channels)
    return pipeline(
        **texts, **call, height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=STEPS, latents=noise,
        guidance_scale=defaults.cfg,
    ).frames  # fmt: skip


@pytest.mark.parametrize(
    ("name", "has_last"), [("wan21_i2v", False), ("wan21_flf2v", True), ("wan22_i2v", True)], ids=str
)
def test_a_video_of_seen_images_is_that_of_diffusers(name: str, has_last: bool, tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, TINY[name])
    assert model.family.name == name
    last = {"last_image": image(5)} if has_last else {}
    made = model.made(image=image(4), **last, **FIELDS)
    assert_equal(made.latents[0], _expected(model, made.texts, image=image(4), **last, output_type="latent"))
    video = made.results[made.tasks[-1].task_id]
    assert isinstance(video, VideoFrames)
    shown = _expected(model, made.texts, image=image(4), **last, output_type="np")[0]
    np.testing.assert_allclose(video.frames_THWC / 255, shown, atol=1 / 255)
    model.close()


def _latent_of(model: TinyFamilyModel, frames: np.ndarray[Any, Any]) -> Any:
    """The mean of the latent of frames [T,H,W,C], as the model reads it."""
    latent = model.engine._opened(model.model).latent
    pixels = torch.from_numpy(frames.copy()).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        found = model.module(Role.VAE).encode(pixels).latent_dist.mode()
    means, deviations = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (latent.means, latent.deviations))
    return (found - means) / deviations


def test_a_video_that_begins_with_an_image_follows_another(tmp_path: Path) -> None:
    """As its authors' pipeline does: the channels of the video, and those of the image, followed by zeros."""
    model = TinyFamilyModel(tmp_path, FOLLOWING)
    assert model.family.name == "wan21_fun_control"
    video, first = np.stack([np.asarray(image(seed)) for seed in range(20, 20 + FRAMES)]), image(4)
    made = model.made(image=first, video=video, **FIELDS)
    followed, begun = _latent_of(model, video), _latent_of(model, np.asarray(first)[None])
    begun = torch.cat([begun, torch.zeros_like(followed[:, :, 1:])], dim=2)
    channels = torch.cat([followed, begun], dim=1)
    assert_equal(made.latents[0], _expected(model, made.texts, channels, image=first, output_type="latent"))
    for fields, missing in (({"image": first}, "video: missing"), ({"video": video}, "image: missing")):
        with pytest.raises(UnusableField, match=missing):
            model.made(**fields, **FIELDS)
    model.close()


def test_nothing_follows_the_last_frame_of_a_shorter_video(tmp_path: Path) -> None:
    """In a workflow, zeros follow the complete cells of a video, as in ComfyUI; in a request it goes back and forth."""
    model, frames = TinyFamilyModel(tmp_path, FOLLOWING), FRAMES + 4
    video, first = np.stack([np.asarray(image(seed)) for seed in range(20, 20 + FRAMES + 1)]), image(4)
    fields = {**FIELDS, "frames": frames, "model": "tiny", "prompt": "a photo of a red cube", "seed": SEED}

    def made(**more: Any) -> Any:
        nodes = {
            "first": {"kind": "image", "image": first},
            "video": {"kind": "video", "video": video},
            "s": {"kind": "sample", "request": fields, "inputs": {"image": "first", "video": "video"}, **more},
            "d": {"kind": "decode", "model": "tiny", "inputs": {"latent": "s"}},
        }
        return model.made(workflow={"nodes": nodes, "output": "d"})

    stopped, turned = made(video_stops=True), made()
    (work,) = (each for each in stopped.works.values() if getattr(getattr(each, "video", None), "stops", False))
    (control,) = (stopped.results[task] for task, each in stopped.works.items() if each is work)
    expected = torch.nn.functional.pad(_latent_of(model, video[:FRAMES]), (0, 0, 0, 0, 0, 1))
    np.testing.assert_allclose(control.samples_CHW, expected[0], atol=1e-5)
    assert not np.allclose(stopped.latents[0], turned.latents[0], atol=1e-3)
    plain = model.made(image=first, video=video, **{**FIELDS, "frames": frames}, seed=SEED)
    np.testing.assert_array_equal(turned.latents[0], plain.latents[0])
    model.close()


@pytest.mark.parametrize("count", [5, 6])
def test_a_video_that_begins_with_several_frames_has_them_before_the_grey(count: int, tmp_path: Path) -> None:
    """The latent of the frames and of grey, as of one image, and a mask of the cells that begin within the frames."""
    model, frames = TinyFamilyModel(tmp_path, CONCATENATED), FRAMES + 8
    video = np.stack([np.asarray(image(seed)) for seed in range(20, 20 + count)])
    fields = {**FIELDS, "frames": frames, "model": "tiny", "prompt": "a photo of a red cube", "seed": SEED}
    nodes = {
        "first": {"kind": "image", "image": image(20)},
        "frames": {"kind": "video", "video": video},
        "s": {"kind": "sample", "request": fields, "inputs": {"image": "first", "first_frames": "frames"}},
        "d": {"kind": "decode", "model": "tiny", "inputs": {"latent": "s"}},
    }
    made = model.made(workflow={"nodes": nodes, "output": "d"})
    (work,) = (each for each in made.works.values() if isinstance(getattr(each, "video", None), VideoBeginning))
    (found,) = (made.results[task] for task, each in made.works.items() if each is work)
    grey = np.full((frames - count, HEIGHT, WIDTH, 3), 127.5, np.float32)
    expected = _latent_of(model, np.concatenate([video.astype(np.float32), grey]))
    np.testing.assert_allclose(found.samples_CHW, expected[0], atol=1e-5)
    one = model.made(workflow={"nodes": {**nodes, "s": {**nodes["s"], "inputs": {"image": "first"}}}, "output": "d"})
    assert not np.allclose(made.latents[0], one.latents[0], atol=1e-3)
    inputs = first_frame_inputs(_video_facts(model), torch.from_numpy(found.samples_CHW)[None], 4, False, 2)
    mask = inputs["image"][0, :4, :, 0, 0]
    assert mask.tolist() == [[1.0, 1.0, 0.0, 0.0]] * 4
    model.close()


def _video_facts(model: TinyFamilyModel) -> Any:
    assert model.family.sampling.video is not None
    return model.family.sampling.video


def test_a_video_may_end_as_it_begins(tmp_path: Path) -> None:
    """Found: one image in two places is one input, which is read in both."""
    model = TinyFamilyModel(tmp_path, BOTH)
    made = model.made(image=image(4), last_image=image(4), **FIELDS)
    expected = _expected(model, made.texts, image=image(4), last_image=image(4), output_type="latent")
    assert_equal(made.latents[0], expected)
    (seen,) = made.of(VisionEncodeParams)
    assert seen.states_LD.shape == (2 * STATES_OF_TWO, SEEN)  # type: ignore[union-attr]
    model.close()


@pytest.mark.counted
def test_what_runs_hold_is_estimated(tmp_path: Path) -> None:
    """Of two images there are twice as many states to read. Found: what the first was shown as stayed on the device
    while the second was."""
    from modelpool.pool.devices.sim import device as sim

    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    model = TinyFamilyModel(tmp_path, BOTH, "sim")
    made = model.made(image=image(4), last_image=image(5), **FIELDS)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if isinstance(made.works[task.task_id], SampleParams | VisionEncodeParams):
            assert cost.working_bytes <= task.activation_bytes <= 1.15 * cost.working_bytes
    model.close()


@pytest.mark.parametrize("tiny_family", [ONE, BOTH], ids=lambda family: family.name)
def test_a_file_is_saved_as_it_was(tiny_family: TinySeeing, tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, tiny_family)
    save_checkpoint(model.engine._opened(model.model), tmp_path / "again.safetensors")
    before, after = load_file(tmp_path / "tiny.safetensors"), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    model.close()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("wan21_i2v", {}, "image: missing; model 'tiny' requires the first frame"),
        ("wan21_i2v", {"image": image(4), "last_image": image(5)}, "last_image: not supported by model"),
        ("wan21_flf2v", {"image": image(4)}, "last_image: missing; model 'tiny' requires the last frame"),
        ("wan21_i2v", {"image": image(4), "motion": 3}, "motion: found 3, not supported by model"),
    ],
)
def test_images_that_are_missing_or_not_read_are_told_by_name(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = TinyFamilyModel(tmp_path, TINY[name])
    with pytest.raises(UnusableField, match=message):
        model.made(**FIELDS, **fields)
    model.close()


def test_a_file_without_its_vision_encoder_says_so(tmp_path: Path) -> None:
    without = {key: tensor for key, tensor in ONE.file().items() if not key.startswith("vision_encoder.")}
    save_file(without, tmp_path / "wan.safetensors")
    with pytest.raises(UnknownArchitecture, match="but without its vision encoder"):
        open_checkpoint(tmp_path / "wan.safetensors")


def described(folder: Path, family: TinyFamily, **parts: str) -> Path:
    """The description of a model in `folder`: all of a whole file but its vision encoder, which has a file of its own,
    and `parts`."""
    whole, start = family.file(), "vision_encoder."
    rest = {key: tensor for key, tensor in whole.items() if not key.startswith(start)}
    save_file(rest, folder / "rest.safetensors")
    seen = prefixed("", seeded(clip_vision, 3).state_dict())
    save_file({key: tensor.contiguous() for key, tensor in seen.items()}, folder / "clip_vision_h.safetensors")
    path = folder / "tiny.model.json"
    path.write_text(json.dumps({"format": 1, "checkpoint": "rest.safetensors", **parts}))
    return path


def test_separate_files_make_what_the_whole_file_makes(tmp_path: Path) -> None:
    """The vision encoder is shared by all models that see with it: people have it in a file of its own."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    described(tmp_path / "parts", ONE, vision_encoder="clip_vision_h.safetensors")
    made = []
    whole = TinyFamilyModel(tmp_path / "whole", ONE)
    shutil.copytree(tmp_path / "whole" / "tokenizer_umt5_xxl", tmp_path / "parts" / "tokenizer_umt5_xxl")
    for model in (whole, TinyModel.of_folder(tmp_path / "parts")):
        assert model.family.name == "wan21_i2v"
        made.append(model.made(image=image(4), **FIELDS).latents[0])
        model.close()
    np.testing.assert_allclose(made[0], made[1], atol=1e-5)


@pytest.mark.parametrize(
    ("family", "parts", "message"),
    [
        (ONE, {}, r"the vision encoder clip_vision_h is missing: .* reads umt5_xxl, clip_vision_h"),
        (ONE, {"vision_encoder": "rest.safetensors"}, r"rest\.safetensors: found no vision encoder in it"),
        (
            CONCATENATED,
            {"vision_encoder": "clip_vision_h.safetensors"},
            r"clip_vision_h\.safetensors is a vision encoder, which is not used: .* reads no images",
        ),
    ],
    ids=["missing", "none", "out of place"],
)
def test_a_vision_encoder_that_is_missing_or_out_of_place_is_told(
    family: TinyFamily, parts: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MissingParts, match=message):
        open_checkpoint(read_description(described(tmp_path, family, **parts)))


@pytest.mark.parametrize("kind", [transformers.CLIPVisionModel, transformers.CLIPVisionModelWithProjection])
def test_a_folder_makes_what_the_file_makes(kind: type, tmp_path: Path) -> None:
    """Its vision encoder has a projection or none, which is not read."""
    folder = tmp_path / "folders" / "tiny"
    folder.mkdir(parents=True)
    (tmp_path / "file").mkdir()
    index: dict[str, Any] = {"_class_name": "WanImageToVideoPipeline"}
    seeing = kind(clip_vision().config)
    seeing.load_state_dict(
        {
            key if kind is transformers.CLIPVisionModelWithProjection else key.removeprefix("vision_model."): tensor
            for key, tensor in seeded(clip_vision, 3).state_dict().items()
            if kind is transformers.CLIPVisionModelWithProjection or key != "visual_projection.weight"
        }
    )
    (text,) = (make() for make, _ in ONE.encoders.values())
    vae = seeded(ONE.vae, 2)
    vae.load_state_dict(louder(vae.state_dict()))
    for place, part, library in (
        ("transformer", seeded(ONE.model, 1), "diffusers"), ("vae", vae, "diffusers"),
        ("scheduler", FlowMatchEulerDiscreteScheduler(shift=8.0), "diffusers"),
        ("text_encoder", text, "transformers"), ("image_encoder", seeing, "transformers"),
    ):  # fmt: skip
        part.save_pretrained(folder / place)
        index[place] = [library, type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    whole = TinyFamilyModel(tmp_path / "file", ONE)
    shutil.copytree(tmp_path / "file" / "tokenizer_umt5_xxl", folder / "tokenizer")
    made = []
    for model in (whole, TinyModel.of_folder(tmp_path / "folders")):
        assert model.family.name == "wan21_i2v"
        made.append(model.made(image=image(4), **FIELDS).latents[0])
        model.close()
    np.testing.assert_allclose(made[0], made[1], atol=1e-4)
