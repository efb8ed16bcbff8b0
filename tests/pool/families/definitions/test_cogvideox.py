"""CogVideoX, compared with its pipelines in diffusers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler
from diffusers.pipelines.cogvideo import pipeline_cogvideox_image2video
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.placeholders import with_placeholders
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.definitions import cogvideox
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.files.formats.torch_file import read_torch_header
from modelpool.pool.inference.pixels.latent_pixels import sampled_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.transformer_folder import _noise
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.stage_params import (
    Encoded,
    EncodeImageParams,
    ImagePixels,
    Latent,
    SampleParams,
    VideoFrames,
)
from modelpool.pool.values.specs.spec import JobId, Role, Stage
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of, states
from tests.pool.families.test_wan_vace import frames as frames_of
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import T5, WIDTH, TinyFamily, prefixed, seeded
from tests.pool.families.whole_transformer import Whole
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers

#: by which the steps of the scheduler are whole numbers
EVEN_STEPS = 4
_RENAMED = (
    ("transformer_blocks.", "blocks."),
    (".attn1.to_out.0.", ".attn_out."),
    (".attn1.to_q.", ".q."),
    (".attn1.to_k.", ".k."),
    (".attn1.to_v.", ".v."),
    (".attn1.norm_", ".norm_"),
    (".ff.net.0.proj.", ".ff_proj."),
    (".ff.net.2.", ".ff_out."),
    ("time_embedding.linear_", "time_embedding_linear_"),
    ("ofs_embedding.linear_", "ofs_embedding_linear_"),
)


def _model(heads: int = 2, **more: Any) -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=16 if heads == 2 else 8, text_embed_dim=WIDTH, time_embed_dim=24,
        num_layers=2, **({"use_rotary_positional_embeddings": heads == 2} | more),
    )  # fmt: skip


def _reading(**more: Any) -> Any:
    sizes = {"sample_width": 12, "sample_height": 8, "sample_frames": 9} | more
    return _model(in_channels=32, use_learned_positional_embeddings=True, **sizes)


def _model_15(**more: Any) -> Any:
    return _model(patch_size_t=2, sample_width=170, sample_height=96, sample_frames=81, **more)


def _reading_15() -> Any:
    return _model_15(in_channels=32, ofs_embed_dim=24)


def _publish(state: State) -> File:
    file: File = {}
    for key, tensor in state.items():
        for old, new in _RENAMED:
            key = key.replace(old, new)
        file[key] = tensor
    return file


#: names of the original code, for the tensors outside of blocks and for those of a block
_ORIGINAL = (
    ("patch_embed.pos_embedding", "mixins.pos_embed.pos_embedding"),
    ("patch_embed.", "mixins.patch_embed."),
    ("time_embedding.linear_1.", "time_embed.0."),
    ("time_embedding.linear_2.", "time_embed.2."),
    ("ofs_embedding.linear_1.", "ofs_embed.0."),
    ("ofs_embedding.linear_2.", "ofs_embed.2."),
    ("norm_final.", "transformer.final_layernorm."),
    ("norm_out.norm.", "mixins.final_layer.norm_final."),
    ("norm_out.linear.", "mixins.final_layer.adaLN_modulation.1."),
    ("proj_out.", "mixins.final_layer.linear."),
)
_ORIGINAL_BLOCK = {
    "attn1.to_out.0": "attention.dense",
    "ff.net.0.proj": "mlp.dense_h_to_4h",
    "ff.net.2": "mlp.dense_4h_to_h",
    "norm1.norm": "input_layernorm",
    "norm2.norm": "post_attention_layernorm",
}


def _publish_original(state: Mapping[str, Tensor]) -> File:
    """The names of the SAT code: queries, keys and values together, as are the vectors of both norms of a block, of
    which those of the video come first; norms of queries and keys and these vectors in lists of all blocks."""
    file: File = {}
    for key, tensor in state.items():
        if not key.startswith("transformer_blocks."):
            old, new = next(each for each in _ORIGINAL if key.startswith(each[0]))
            file[new + key.removeprefix(old)] = tensor
            continue
        _, number, rest = key.split(".", 2)
        module, _, end = rest.rpartition(".")
        block, lists = f"transformer.layers.{number}.", "mixins.adaln_layer."
        if module in _ORIGINAL_BLOCK:
            file[f"{block}{_ORIGINAL_BLOCK[module]}.{end}"] = tensor
        elif module == "attn1.to_q":
            own = [state[key.replace("to_q", name)] for name in ("to_q", "to_k", "to_v")]
            file[f"{block}attention.query_key_value.{end}"] = torch.cat(own)
        elif module in ("attn1.norm_q", "attn1.norm_k"):
            kind = "query" if module.endswith("q") else "key"
            file[f"{lists}{kind}_layernorm_list.{number}.{end}"] = tensor
        elif module == "norm1.linear":
            (video, text), (video_2, text_2) = (state[key.replace("norm1", n)].chunk(2) for n in ("norm1", "norm2"))
            file[f"{lists}adaLN_modulations.{number}.1.{end}"] = torch.cat([video, video_2, text, text_2])
    return file


def vae() -> Any:
    return diffusers.AutoencoderKLCogVideoX(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=2)


def _louder(state: Mapping[str, Tensor]) -> File:
    """Latents tell images apart."""
    return {key: x * (5.0 if x.dim() > 2 else 1.0) for key, x in state.items()}


def _scheduler(family: str) -> CogVideoXDDIMScheduler:
    return CogVideoXDDIMScheduler(**scheduler_facts(TRANSFORMERS[family]).settings)


def _texts(pipeline: type, modules: list[Any], prompt: str) -> dict[str, Tensor]:
    built: Any = pipeline(for_transformers("t5"), modules[0], None, None, None)
    return {"context": built.encode_prompt(prompt, do_classifier_free_guidance=False)[0]}


def _told(whole: Whole, texts: tuple[Encoded, ...]) -> dict[str, Any]:
    width, height = whole.sides
    return {
        "prompt_embeds": states(texts[0]), "negative_prompt_embeds": states(texts[1]), "height": height,
        "width": width, "num_frames": whole.frames, "num_inference_steps": EVEN_STEPS, "guidance_scale": 6.0,
        "latents": noise_of(whole).transpose(1, 2), "output_type": "latent",
    }  # fmt: skip


def _pipeline(kind: type, whole: Whole | TinyModel) -> Any:
    vae, model = whole.module(Role.VAE), whole.module(Role.DIFFUSION_MODEL)
    return kind(None, whole.module(Role.TEXT_ENCODER), vae, model, _scheduler(whole.family.name))


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    found: Tensor = _pipeline(diffusers.CogVideoXPipeline, whole)(**_told(whole, texts)).frames
    return found.transpose(1, 2)


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    """Without the first frame of the latent, which the pipeline of version 1.5 does not decode."""
    decoded: Tensor = whole.module(Role.VAE).decode(latent[:, :, 1:] / whole.opened.latent.scaling_factor).sample
    return decoded


def _tiny(name: str, model: Any) -> TinyFamily:
    return TinyFamily(name, model, _publish, {"t5xxl": T5}, vae, _louder)


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {
    "cogvideox": ("blocks.0.q", "diffusion_model.{}"),
    "cogvideox_15": ("blocks.0.ff_out", "diffusion_model.{}"),
    "cogvideox_2b": ("blocks.0.attn_out", "diffusion_model.{}"),
}
PIPELINES = {
    "cogvideox": diffusers.CogVideoXPipeline,
    "cogvideox_15": diffusers.CogVideoXPipeline,
    "cogvideox_2b": diffusers.CogVideoXPipeline,
    "cogvideox_i2v": diffusers.CogVideoXImageToVideoPipeline,
    "cogvideox_15_i2v": diffusers.CogVideoXImageToVideoPipeline,
    "cogvideox_fun_control": diffusers.CogVideoXFunControlPipeline,
    "cogvideox_2b_fun_control": diffusers.CogVideoXFunControlPipeline,
}
CASES = {
    name: Compared(
        _tiny(name, partial(_model, heads)),
        PIPELINES[name],
        _latent,
        partial(_texts, PIPELINES[name]),
        LORAS[name],
        EVEN_STEPS,
    )
    for name, heads in (("cogvideox", 2), ("cogvideox_2b", 30))
}
CASES |= {
    "cogvideox_15": replace(CASES["cogvideox"], tiny=_tiny("cogvideox_15", _model_15), lora=LORAS["cogvideox_15"],
                            decode=_decoded),
}  # fmt: skip
READING = {
    name: Compared(
        _tiny(name, model),
        PIPELINES[name],
        _latent,
        partial(_texts, PIPELINES[name]),
        LORAS["cogvideox"],
    )
    for name, model in (("cogvideox_i2v", _reading), ("cogvideox_15_i2v", _reading_15))
}
FOLLOWING = {
    name: replace(READING["cogvideox_i2v"], tiny=_tiny(name, partial(_model, heads, in_channels=32)),
                  pipeline=PIPELINES[name])
    for name, heads in (("cogvideox_fun_control", 2), ("cogvideox_2b_fun_control", 30))
}  # fmt: skip


class TestCogVideoX(FamilyTests):
    case = CASES["cogvideox"]


class TestCogVideoX2b(FamilyTests):
    case = CASES["cogvideox_2b"]


class TestCogVideoX15(FamilyTests):
    case = CASES["cogvideox_15"]


@pytest.mark.parametrize("name", READING)
def test_a_video_of_an_image_is_that_of_the_pipeline(name: str, tmp_path: Path) -> None:
    """Its encoder draws from what it says of an image; here, as in ours, it is the mean. Other sizes than that of a
    table of positions are refused."""
    whole = Whole(tmp_path, READING[name].tiny)
    texts = whole.texts()
    width, height = whole.sides
    pixels = np.random.default_rng(4).integers(0, 256, (height, width, 3), np.uint8)
    beginning = whole.run(EncodeImageParams(whole.model, width, height), ImagePixels(pixels))
    assert isinstance(beginning, Latent)
    ours = whole.latent(texts, beginning=beginning, steps=EVEN_STEPS).samples_CHW
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255
    means = partial(pipeline_cogvideox_image2video.retrieve_latents, sample_mode="argmax")
    whole.module(Role.VAE).register_to_config(
        scaling_factor=whole.opened.latent.scaling_factor, invert_scale_latents=name == "cogvideox_15_i2v"
    )
    pipeline = _pipeline(diffusers.CogVideoXImageToVideoPipeline, whole)
    with mock.patch.object(pipeline_cogvideox_image2video, "retrieve_latents", means), torch.no_grad():
        theirs = pipeline(image=image, **_told(whole, texts)).frames.transpose(1, 2)[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1.0, float(theirs.std())))
    without = whole.latent(texts, beginning=Latent(beginning.samples_CHW * 0), steps=EVEN_STEPS).samples_CHW
    assert not np.allclose(ours, without, atol=1e-3)
    if name == "cogvideox_i2v":
        _check_other_size(whole, texts, beginning)
    patcher = whole.engine.patcher(whole.model, Role.DIFFUSION_MODEL)
    # of a call at a typical size, by which parts of a model that does not fit are ordered
    assert any(part.flops for part in patcher._weights.sizes_with_flops)
    whole.engine.close()


def test_requests_for_a_table_of_positions_have_its_size(tmp_path: Path) -> None:
    """Others are refused before anything runs, by the name of the field; without a size they get it."""
    case = READING["cogvideox_i2v"]
    save_file(case.tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, case.tiny)
    model, pixels = TinyModel.of_folder(tmp_path), np.zeros((80, 80, 3), np.uint8)
    for field, value, expected in (("width", 112, 96), ("height", 80, 64), ("frames", 17, 9)):
        message = f"^{field}: found {value}, expected {expected}: model 'tiny' has positions for 96 x 64 pixels and 9 "
        with pytest.raises(UnusableField, match=message), mock.patch.object(model.engine, "run") as run:
            model.made(image=pixels, **{field: value})
        assert not run.called
    shapes = [work.shape for work in model.made(image=pixels, steps=1).works.values() if hasattr(work, "shape")]
    assert {(each.width, each.height, each.frames) for each in shapes} == {(96, 64, 9)}
    model.close()


def _check_other_size(whole: Whole, texts: tuple[Encoded, ...], beginning: Latent) -> None:
    whole.sides = (64, 96)
    with pytest.raises(UnusableField, match="found '64 x 96 pixels, 9 frames', expected 96 x 64 pixels, 9 frames"):
        whole.latent(texts, beginning=Latent(beginning.samples_CHW.transpose(0, 2, 1)), steps=1)


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_video_is_followed_as_the_pipeline_does(name: str, tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, FOLLOWING[name].tiny)
    assert tiny.family.name == name
    video, asked = frames_of(1), {"frames": 9, "steps": EVEN_STEPS, "negative": "a dog", "width": 96, "height": 64}
    made = tiny.made(video=video, **asked)
    latent = tiny.engine._opened(tiny.model).latent
    tiny.module(Role.VAE).register_to_config(scaling_factor=latent.scaling_factor)
    (work,) = (one for one in made.works.values() if isinstance(one, SampleParams))
    noise = ImageNoise(work.seed).draw((1, *sampled_shape(work, latent)))
    expected = _pipeline(PIPELINES[name], tiny)(
        **made.texts, control_video=[Image.fromarray(frame) for frame in video], height=64, width=96,
        num_inference_steps=EVEN_STEPS, latents=noise.transpose(1, 2), output_type="latent",
    ).frames.transpose(1, 2)  # fmt: skip
    assert_equal(made.latents[0], expected)
    if name == "cogvideox_fun_control":  # a shorter video goes back and forth
        back = video[[0, 1, 2, 3, 4, 3, 2, 1, 0]]
        shorter, longer, whole = (
            tiny.made(video=given, **{**asked, "steps": 1}).latents[0] for given in (video[:5], back, video)
        )
        assert torch.equal(shorter, longer)
        assert not np.allclose(shorter, whole, atol=1e-3)
    tiny.close()


def test_a_video_to_follow_is_required_and_followed_as_a_whole(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, FOLLOWING["cogvideox_fun_control"].tiny)
    video = frames_of(1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "video: missing"),
        ({"video": video, "video_mask": video[..., 0]}, "video_mask: not supported"),
        ({"video": video, "reference": video[0]}, "reference: not supported"),
        ({"video": video, "image": video[0]}, "image: not supported"),
        ({"video": video, "face_video": video}, "face_video: not supported"),
    ]
    for fields, why in refused:
        with pytest.raises(UnusableField, match=why):
            tiny.made(steps=1, **fields)
    asked = GenerateRequest(model="tiny", prompt="", seed=0, width=96, height=64, frames=9)
    planned = with_placeholders(asked, tiny.catalog.model_defaults(tiny.model))
    assert (planned.video.width, planned.video.height, planned.video.frames) == (96, 64, 9)
    build_graph(planned, JobId("job"), tiny.catalog)
    tiny.close()


@pytest.mark.counted
def test_a_video_is_followed_within_what_was_counted(tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured."""
    sim.install()
    sim.configure(0, 1 << 29)
    sim.recover(0)
    tiny = TinyFamilyModel(tmp_path, FOLLOWING["cogvideox_fun_control"].tiny, device="sim")
    made = tiny.made(video=frames_of(1), frames=9, steps=1, width=96, height=64)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if isinstance(made.works[task.task_id], SampleParams | EncodeImageParams):
            assert cost.working_bytes <= task.activation_bytes <= 1.15 * cost.working_bytes
    tiny.close()


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_model_that_follows_a_video_has_both_namings_and_folders(name: str, tmp_path: Path) -> None:
    FOLLOWING[name].check_namings()
    FOLLOWING[name].check_files(tmp_path)


@pytest.mark.parametrize("name", READING)
def test_a_model_that_reads_an_image_has_both_namings_and_folders(name: str, tmp_path: Path) -> None:
    """Only the folder of version 1.5 says that images were divided by the scale of latents."""
    READING[name].check_namings()
    READING[name].check_files(tmp_path)
    config = json.loads((tmp_path / "folder/vae/config.json").read_text())
    assert config["invert_scale_latents"] is (name == "cogvideox_15_i2v")


def test_files_of_the_original_code_are_read(tmp_path: Path) -> None:
    """mp_rank_00_model_states.pt, in whose module are the weights in the names of SAT, and the numbers of its training;
    nothing in the pickle is run."""
    for name, case in {**CASES, **READING}.items():
        original = replace(case, tiny=replace(case.tiny, publish=_publish_original))
        original.check_namings()
        state = seeded(case.tiny.model, 1).state_dict()
        weights = prefixed("model.diffusion_model.", _publish_original(state))
        more = {"model.diffusion_model.mixins.pos_embed.freqs_cos": torch.ones(4, 8)}
        path = tmp_path / name / "mp_rank_00_model_states.pt"
        path.parent.mkdir()
        torch.save({"module": weights | more, "dp_world_size": 1, "mp_world_size": 1, "iteration": 3}, path)
        header = read_torch_header(str(path))
        found = recognise_diffusion({key: entry.shape for key, entry in header.tensors.items()})
        assert found is not None
        assert (found.name, found.prefix) == (name, "model.diffusion_model.")
    tiny = replace(CASES["cogvideox"].tiny, publish=_publish_original, vae_file=partial(published.ldm, dimensions=3))
    path = tmp_path / "tiny.pt"
    torch.save({"module": tiny.file()}, path)
    write_tokenizers(tmp_path, tiny)
    opened = open_checkpoint(path, allow_pickle=True)
    for role, make, seed in ((Role.DIFFUSION_MODEL, tiny.model, 1), (Role.VAE, tiny.vae, 2)):
        expected, built = seeded(make, seed).state_dict(), opened.build(role).module.state_dict()
        assert built.keys() == expected.keys()
        assert all(torch.equal(built[key], expected[key]) for key in expected)


def test_the_table_of_computed_positions_of_the_small_model_is_left_out() -> None:
    """The original code has it as a parameter that is not trained: a file with it was refused."""
    state = seeded(CASES["cogvideox_2b"].tiny.model, 1).state_dict()
    table = torch.zeros(1, 226 + 13 * 30 * 45, len(state["patch_embed.text_proj.weight"]))
    file = _publish_original(state) | {"mixins.pos_embed.pos_embedding": table}
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in file.items()})
    module: Any = plan.build(file)
    assert plan.recognised.name == "cogvideox_2b"
    assert module.state_dict().keys() == state.keys()
    assert cogvideox.fixed_extent(module.config) is None


@pytest.mark.counted
def test_decoding_needs_what_was_estimated(tmp_path: Path) -> None:
    """Of version 1.5, whose first latent frame is not decoded: an odd number of them takes more at once."""
    sim.install()
    sim.configure(0, 1 << 29)
    sim.recover(0)
    save_file(CASES["cogvideox_15"].tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, CASES["cogvideox_15"].tiny)
    tiny = TinyModel.of_folder(tmp_path, device="sim")
    made = tiny.made(width=96, height=64, steps=1, frames=17)
    tiny.close()
    ((task, cost),) = (pair for pair in zip(made.tasks, made.costs, strict=True) if pair[0].stage is Stage.DECODE)
    assert 0.9 * task.activation_bytes <= cost.working_bytes <= task.activation_bytes


def test_positions_of_other_forms_are_those_of_the_pipeline() -> None:
    """Of version 1.0, those of the training size, cropped to the form of the video; the runs above have its form."""
    place = torch.device("cpu")
    for module, frames in ((_model(), 3), (_model_15(), 4)):
        pipeline = SimpleNamespace(vae_scale_factor_spatial=8, transformer=module)
        for height, width in ((96, 64), (64, 64), (320, 720), (208, 112)):
            expected = diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings(
                pipeline, height, width, frames, place
            )
            found = cogvideox._rotary(module.config, frames, height // 16, width // 16, place)
            torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


def test_requests_of_version_15_sample_a_cell_that_is_not_decoded(tmp_path: Path) -> None:
    case = CASES["cogvideox_15"]
    save_file(case.tiny.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, case.tiny)
    model = TinyModel.of_folder(tmp_path)
    made = model.made(width=96, height=64, frames=9, steps=1)
    results = list(made.results.values())
    (latent,) = (each for each in results if isinstance(each, Latent))
    (video,) = (each for each in results if isinstance(each, VideoFrames))
    assert latent.samples_CHW.shape == (16, 4, 8, 12)
    assert video.frames_THWC.shape == (9, 64, 96, 3)
    model.engine.close()


def test_levels_are_those_of_the_published_schedulers() -> None:
    """Of as many steps as divide 1000. The last level of the table is infinite there."""
    for name in ("cogvideox", "cogvideox_2b"):
        noise, scheduler = TRANSFORMERS[name].sampling.noise, _scheduler(name)
        for steps in (4, 50):
            scheduler.set_timesteps(steps)
            signal = scheduler.alphas_cumprod[scheduler.timesteps]
            ours = make_sigmas("trailing", steps, sigma_table(noise))
            expected = ((1 - signal) / signal).sqrt()[1:].to(ours.dtype)
            torch.testing.assert_close(ours[1:-1], expected, rtol=1e-4, atol=0.0)
        assert _noise(noise, {"_class_name": "CogVideoXDDIMScheduler", "snr_shift_scale": 2.0}).shift == 2.0


def test_relatives_are_told_apart() -> None:
    """Those of other inputs do not run. A table of positions tells the size of its videos."""
    with torch.device("meta"):
        consisid = diffusers.ConsisIDTransformer3DModel(
            in_channels=32, num_layers=1, is_train_face=True, use_rotary_positional_embeddings=True,
            use_learned_positional_embeddings=True,
        ).state_dict()  # fmt: skip
    for name, state in (
        ("cogvideox_inpaint", _publish(_model(in_channels=48).state_dict())),
        ("cogvideox_15_fun_control", _publish(_model_15(in_channels=32).state_dict())),
        ("consisid", consisid),
    ):
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        found = recognise_diffusion(shapes)
        assert found is not None
        assert found.name == name
        with pytest.raises(UnknownArchitecture, match=r"CogVideoX|ConsisID"):
            plan_diffusion_model(shapes)
    assert cogvideox._table_sides((1, 226 + 13 * 30 * 45, 3072)) == (720, 480, 49)
    with pytest.raises(UnknownArchitecture, match="found 231 rows"):
        cogvideox._table_sides((1, 231, 3072))
