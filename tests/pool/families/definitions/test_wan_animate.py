"""Wan 2.2 animate, compared with its pipeline in diffusers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import pytest
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.definitions import wan_animate
from modelpool.pool.inference.pixels.image_ops import there_and_back
from modelpool.pool.inference.pixels.latent_pixels import sampled_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.pool.values.core.stage_params import DecodeParams, SampleParams, VideoFrames
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, check_lora_of_requests
from tests.pool.families.test_seen_wan import TinySeeing
from tests.pool.families.test_videos_from_images import CONCATENATED
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.tiny_transformers import seeded
from tests.pool.families.tiny_videos import SEEN, SIDE
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.models.components.diffusion import video_published
from tests.pool.models.components.diffusion.image_published import File, State

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WIDTH, HEIGHT, FRAMES, STEPS, SEED = 64, 48, 5, 2, 11
FIELDS: dict[str, Any] = {
    "frames": FRAMES, "steps": STEPS, "width": WIDTH, "height": HEIGHT, "seed": SEED, "negative": "a dog",
}  # fmt: skip


def _model() -> Any:
    return diffusers.WanAnimateTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, text_dim=TEXT_WIDTH, freq_dim=16, ffn_dim=32, num_layers=2,
        image_dim=SEEN, added_kv_proj_dim=128, motion_encoder_channel_sizes={str(2**n): 4 for n in range(9, 1, -1)},
        motion_style_dim=8, motion_dim=4, motion_encoder_dim=8, face_encoder_hidden_dim=8, face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )  # fmt: skip


_RULES = (
    (r"^(face_adapter)\.(\d+)\.to_q\.", r"\1.fuser_blocks.\2.linear1_q."),
    (r"^(face_adapter)\.(\d+)\.to_out\.", r"\1.fuser_blocks.\2.linear2."),
    (r"^(face_adapter)\.(\d+)\.norm_([qk])\.", r"\1.fuser_blocks.\2.\3_norm."),
    (r"^(face_encoder)\.(conv\w+)\.", r"\1.\2.conv."),
    (r"^motion_encoder\.motion_synthesis_weight$", "motion_encoder.dec.direction.weight"),
    (r"^motion_encoder\.motion_network\.", "motion_encoder.enc.fc."),
    (r"^motion_encoder\.conv_in\.weight", "motion_encoder.enc.net_app.convs.0.0.weight"),
    (r"^motion_encoder\.conv_in\.act_fn", "motion_encoder.enc.net_app.convs.0.1"),
    (r"^motion_encoder\.conv_out", "motion_encoder.enc.net_app.convs.8"),
)
_BLOCK = re.compile(r"^motion_encoder\.res_blocks\.(\d+)\.conv(\d|_skip)\.(act_fn\.bias|weight)$")
#: places of the convolution and of its activation
_PLACES = {"1": ("conv1", 0), "2": ("conv2", 1), "_skip": ("skip", 1)}


def _publish(state: Mapping[str, Tensor]) -> File:
    file: File = {}
    own = ("face_adapter.", "face_encoder.", "motion_encoder.")
    file |= video_published.wan({key: x for key, x in state.items() if not key.startswith(own)})
    for key, tensor in state.items():
        if not key.startswith(own):
            continue
        if found := re.match(r"face_adapter\.(\d+)\.to_k\.(\w+)$", key):
            both = torch.cat((tensor, state[key.replace("to_k", "to_v")]))
            file[f"face_adapter.fuser_blocks.{found[1]}.linear1_kv.{found[2]}"] = both
        elif found := _BLOCK.match(key):
            part, place = _PLACES[found[2]]
            rest = f"{place}.weight" if found[3] == "weight" else f"{place + 1}.bias"
            name = f"motion_encoder.enc.net_app.convs.{int(found[1]) + 1}.{part}.{rest}"
            file[name] = tensor if found[3] == "weight" else tensor.reshape(1, -1, 1, 1)
        elif ".to_v." not in key:
            name = next((re.sub(old, new, key) for old, new in _RULES if re.match(old, key)), key)
            file[name] = tensor.reshape(1, -1, 1, 1) if name.endswith("convs.0.1.bias") else tensor
    return file


TINY = TinySeeing(
    "wan22_animate", _model, _publish, CONCATENATED.encoders, CONCATENATED.vae, CONCATENATED.vae_file
)  # fmt: skip


def _frames(seed: int, width: int = WIDTH, height: int = HEIGHT, count: int = FRAMES) -> Any:
    """No frame is like another."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def _image(seed: int = 2) -> Image.Image:
    return Image.fromarray(_frames(seed, count=1)[0])


def _videos() -> dict[str, Any]:
    return {"video": _frames(1), "face_video": _frames(3, 512, 512), "reference": _image()}


def _made(tiny: TinyModel, **fields: Any) -> Made:
    return tiny.made(**{**FIELDS, **_videos(), **fields})


def _video(made: Made) -> Any:
    (video,) = made.of(DecodeParams)
    assert isinstance(video, VideoFrames)
    return video.frames_THWC


def _expected(tiny: TinyModel, made: Made, cfg: float, output_type: str) -> Any:
    vae, latent = tiny.module(Role.VAE), tiny.engine._opened(tiny.model).latent
    vae.register_to_config(latents_mean=latent.means, latents_std=latent.deviations)
    sides = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=tiny.family.sampling.noise.shift)
    pipeline = diffusers.WanAnimatePipeline(
        None, None, vae, scheduler, transformers.CLIPImageProcessorPil(**sides), tiny.module(Role.VISION_ENCODER),
        tiny.module(Role.DIFFUSION_MODEL),
    )  # fmt: skip
    (work,) = (one for one in made.works.values() if isinstance(one, SampleParams))
    noise = ImageNoise(SEED).draw((1, *sampled_shape(work, latent)))
    found = pipeline(
        image=_image(), pose_video=[Image.fromarray(one) for one in _frames(1)],
        face_video=[Image.fromarray(one) for one in _frames(3, 512, 512)], **made.texts, height=HEIGHT, width=WIDTH,
        segment_frame_length=FRAMES, num_inference_steps=STEPS, guidance_scale=cfg, latents=noise,
        output_type=output_type,
    ).frames  # fmt: skip
    if output_type != "latent":
        return found[0]
    # as its autoencoder reads it
    means, deviations = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (latent.means, latent.deviations))
    return ((found - means) / deviations)[:, :, 1:]


LORAS = {"wan22_animate": ("blocks.0.self_attn.q", "diffusion_model.{}")}
CASES = {
    "wan22_animate": Compared(
        TINY, diffusers.WanAnimatePipeline, lambda *_: torch.zeros(1), lambda *_: {}, LORAS["wan22_animate"]
    )
}  # fmt: skip


class TestWanAnimate:
    """What every family shows, with a character and two videos."""

    case: ClassVar[Compared] = CASES["wan22_animate"]

    @pytest.mark.parametrize("cfg", [1.0, 3.0])
    def test_latents_and_frames_are_those_of_the_pipeline(self, cfg: float, tmp_path: Path) -> None:
        """With guidance, the other prediction sees no face."""
        tiny = TinyFamilyModel(tmp_path, TINY)
        assert tiny.family.name == "wan22_animate"
        made = _made(tiny, cfg=cfg)
        assert_equal(made.latents[0], _expected(tiny, made, cfg, "latent"))
        np.testing.assert_allclose(_video(made) / 255, _expected(tiny, made, cfg, "np"), atol=1 / 255)
        tiny.close()

    def test_both_namings_are_one_model(self) -> None:
        self.case.check_namings()

    def test_files_and_folders_are_the_same_model(self, tmp_path: Path) -> None:
        self.case.check_files(tmp_path)

    def test_a_lora_gives_what_the_merged_file_gives(self, tmp_path: Path) -> None:
        check_lora_of_requests(tmp_path, TINY, LORAS["wan22_animate"], **FIELDS, **_videos())


def test_published_names_are_those_that_diffusers_converts() -> None:
    state: State = seeded(_model, 1).state_dict()
    theirs = convert_wan_transformer_to_diffusers(dict(_publish(state)))
    assert theirs.keys() == state.keys()
    ours = wan_animate.convert(_publish(state))
    assert ours.keys() == state.keys()
    for key, tensor in state.items():
        assert torch.equal(theirs[key], tensor), key
        assert torch.equal(ours[key], tensor), key


def test_kernels_of_published_files_are_ignored(tmp_path: Path) -> None:
    """Those that blur are the same in all of them."""
    save_file(TINY.file(), tmp_path / "tiny.safetensors")
    tensors = load_file(tmp_path / "tiny.safetensors")
    start = "model.diffusion_model.motion_encoder.enc.net_app.convs"
    kernels = {f"{start}.{n}.{part}.0.kernel": torch.ones(4, 4) for n in (1, 7) for part in ("conv2", "skip")}
    save_file(tensors | kernels, tmp_path / "tiny.safetensors")
    assert open_checkpoint(tmp_path / "tiny.safetensors").family.name == "wan22_animate"


def test_what_is_missing_or_not_read_is_refused_by_name(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, TINY)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"reference": None}, "reference: missing"),
        ({"face_video": None}, "face_video: missing"),
        ({"face_video": _frames(3, 64, 64, 3)}, "face_video: found '3 frames', expected 5"),
        ({"video_mask": _frames(3)[..., 0]}, "video_mask"),
        ({"reference": [_image(), _image(4)]}, "accepts only one"),
        ({"image": _image()}, "image"),
    ]
    for fields, why in refused:
        with pytest.raises(UnusableField, match=why):
            _made(tiny, **fields)
    with pytest.raises(UserError, match="face_video requires video"):
        GenerateRequest(model="tiny", prompt="", face_video=_frames(3))
    tiny.close()


def test_shorter_videos_go_back_and_forth() -> None:
    """As the pipeline repeats them."""
    pad = diffusers.WanAnimatePipeline.pad_video_frames
    for count, wanted in ((5, 10), (5, 5), (2, 7), (3, 11)):
        assert there_and_back(count, wanted) == pad(None, list(range(count)), wanted)
    assert there_and_back(1, 3) == [0, 0, 0]


@pytest.mark.counted
def test_it_runs_within_what_was_counted(tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured."""
    tiny = TinyFamilyModel(tmp_path, TINY, device="sim")
    made = _made(tiny, steps=1)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        assert cost.working_bytes <= task.activation_bytes, made.works[task.task_id]
        assert cost.working_bytes >= 0.5 * task.activation_bytes, made.works[task.task_id]
    tiny.close()
