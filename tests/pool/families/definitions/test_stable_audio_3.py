"""Stable Audio 3, compared with its pipeline in diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder
from diffusers.pipelines.stable_audio_3.pipeline_stable_audio_3 import logsnr_sigma_schedule
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.families.definitions import stable_audio_3
from modelpool.pool.families.definitions.stable_audio_3 import PADDING
from modelpool.pool.families.parts.inner_models import PADDING_KEY
from modelpool.pool.inference.pixels.tiled_vae import Tiling, decode_latent, downscales_of, tiled_decode
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    Encoded,
    GuidanceParams,
    Latent,
    OutputShape,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_transformers_as_folders import assert_loaded, assert_same_model
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import WIDTH, File, TinyFamily, seeded
from tests.pool.families.whole_transformer import PROMPT, SEED, STEPS, Whole
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.components.vae.published import State
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
(FAMILY,) = stable_audio_3.FAMILIES
#: of the tiny latents, and samples that one cell stands for
CHANNELS, CELL, RATE = 6, 64, 44100
SECONDS_KEY = "conditioner.conditioners.seconds_total.embedder.embedding.1."


def _model(*, differential: bool = True) -> Any:
    return diffusers.StableAudio3DiTModel(
        io_channels=CHANNELS, embed_dim=64, depth=2, num_heads=2, cond_token_dim=WIDTH, global_cond_dim=WIDTH,
        local_add_cond_dim=CHANNELS + 1, timestep_features_dim=16, ff_mult=2.0, num_memory_tokens=3,
        use_differential_attention=differential,
    )  # fmt: skip


def _vae() -> Any:
    return diffusers.AutoencoderSAME(
        patch_size=4, encoder_channels=4, encoder_transformer_depths=(2,), latent_dim=CHANNELS, dim_heads=8, ff_mult=2
    )


def _duration() -> Any:
    found = seeded(lambda: StableAudio3DurationEmbedder(WIDTH, 16), 3)
    found.freqs.copy_(StableAudio3DurationEmbedder(WIDTH, 16).freqs)
    return found


def _publish(state: State) -> File:
    """The second query and key of a differential attention are last."""
    file = {}
    for key, tensor in state.items():
        name = key
        for ours, theirs in (
            ("proj_in.", "project_in."),
            ("proj_out.", "project_out."),
            ("transformer_blocks.", "layers."),
        ):
            if key.startswith(ours):
                name = f"transformer.{theirs}{key.removeprefix(ours)}"
        if key.startswith(("memory_tokens", "rotary_pos_emb.", "global_cond_embedder.")):
            name = f"transformer.{key}"
        name = name.replace(".ff.proj_in.", ".ff.ff.0.proj.").replace(".ff.proj_out.", ".ff.ff.2.")
        if name.endswith(".self_attn.to_qkv.weight") and len(tensor) == 5 * tensor.shape[1]:
            query, other_query, keys, other_keys, value = tensor.chunk(5)
            tensor = torch.cat((query, keys, value, other_query, other_keys))
        file[PADDING_KEY if key == PADDING else name] = tensor
    return file


class TinyAudio(TinyFamily):
    """As the published file begins its keys."""

    def file(self, left_out: tuple[str, ...] = ()) -> File:
        file = {}
        for key, tensor in super().file(left_out).items():
            name = key.replace("vae.", "pretransform.model.").replace("model.diffusion_model.", "model.model.")
            file[PADDING_KEY if name.endswith(PADDING_KEY) else name] = tensor
        linear = _duration().linear.state_dict()
        return file | {f"{SECONDS_KEY}{name}": tensor.clone() for name, tensor in linear.items()}


def _encoder() -> Any:
    return texts.t5gemma(words=tiny("t5gemma").get_vocab_size(), width=WIDTH)


STABLE_AUDIO_3 = TinyAudio(
    "stable_audio_3", _model, _publish, {"t5gemma_b": (_encoder, texts.under(""))}, _vae, published.same
)


def _pipeline(whole: Whole, *, stochastic: bool = True) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, stochastic_sampling=stochastic)
    encoder, vae, model = (whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL))
    return diffusers.StableAudio3Pipeline(vae, encoder, for_transformers("t5gemma"), _duration(), model, scheduler)


def _given(text: Encoded) -> dict[str, Tensor]:
    mask = torch.from_numpy(text.others["context_mask"])[None].long()
    return {"prompt_embeds": torch.from_numpy(text.context_LD)[None], "encoder_attention_mask": mask}


@pytest.mark.parametrize("seconds", [0.125, 0.0203])
@pytest.mark.parametrize("sampler", ["", "euler"])
def test_texts_latents_and_samples_are_those_of_the_pipeline(tmp_path: Path, sampler: str, seconds: float) -> None:
    """With the noise of the steps that the run draws; the base model has steps of Euler."""
    whole = Whole(tmp_path, STABLE_AUDIO_3, sampler=sampler)
    whole.seconds = seconds
    text, _ = whole.texts()
    latent = whole.latent((text,))
    pipeline, noise = _pipeline(whole, stochastic=not sampler), ImageNoise(SEED)
    cells = -int(-seconds * RATE // CELL)
    first = noise.draw((1, CHANNELS, cells))
    path = "diffusers.schedulers.scheduling_flow_match_euler_discrete.randn_tensor"
    with torch.no_grad(), mock.patch(path, lambda shape, **_: noise.draw(tuple(shape))):
        states, mask = pipeline.encode_prompt(PROMPT, torch.device("cpu"), 1)
        call = {"duration": seconds, "num_inference_steps": STEPS, "latents": first, **_given(text)}
        expected = pipeline(**call, output_type="latent").audios
    heard = pipeline.vae.decode(expected).sample[0, :, : int(seconds * RATE)].clamp(-1, 1)
    np.testing.assert_array_equal(text.others["context_mask"], mask[0].bool())
    kept = mask[0].bool().numpy()
    np.testing.assert_allclose(text.context_LD[kept], states[0][kept].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-5 * float(expected.abs().max()))
    samples = whole.pixels(latent)
    assert samples.shape == (int(seconds * RATE), 2)
    np.testing.assert_allclose(samples.T.clip(-1, 1), heard, atol=2e-5)
    assert samples.std() > 1e-3
    whole.engine.close()


@pytest.mark.counted
def test_long_audio_is_decoded_in_parts_where_memory_is_short(tmp_path: Path) -> None:
    """They overlap, and are joined without a step."""
    whole, seconds = Whole(tmp_path, STABLE_AUDIO_3), 256 * CELL / RATE
    modes = whole.catalog.execution_modes(whole.model, DecodeParams(whole.model, OutputShape(0, 0, seconds=seconds)))
    assert [mode.tile for mode in modes] == [0, 128]
    module = whole.module(Role.VAE)
    latent_BCL = torch.randn(1, CHANNELS, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = decode_latent(module, latent_BCL)
        parts = tiled_decode(lambda x: decode_latent(module, x), latent_BCL, Tiling(128), downscales_of(module, 1))
    assert parts.shape == expected.shape == (1, 2, 256 * CELL)
    assert float((parts - expected).square().mean().sqrt()) < 0.01 * float(expected.std())
    whole.engine.close()


def test_guidance_is_that_of_the_pipeline(tmp_path: Path) -> None:
    """For the base model: both sides read the seconds."""
    whole = Whole(tmp_path, STABLE_AUDIO_3)
    given = whole.texts()
    work = SampleParams(
        whole.model, (), OutputShape(0, 0, seconds=whole.seconds), SamplingSchedule(STEPS, "euler", "log_snr"),
        GuidanceParams(3.0, 0.0), SEED,
    )  # fmt: skip
    latent = whole.run(work, *given)
    assert isinstance(latent, Latent)
    first = ImageNoise(SEED).draw((1, *latent.samples_CHW.shape))
    negative = {f"negative_{name}": value for name, value in _given(given[1]).items()}
    call = {"duration": whole.seconds, "num_inference_steps": STEPS, "latents": first, "guidance_scale": 3.0}
    with torch.no_grad():
        pipeline = _pipeline(whole, stochastic=False)
        expected = pipeline(**call, **_given(given[0]), **negative, output_type="latent").audios
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-5 * float(expected.abs().max()))
    whole.engine.close()


def test_the_levels_are_those_of_the_pipeline() -> None:
    table = sigma_table(FAMILY.sampling.noise)
    for steps in (1, 2, 8, 100):
        expected = [*logsnr_sigma_schedule(steps, -6.2, 2.0), 0.0]
        assert list(make_sigmas("log_snr", steps, table)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("differential", [True, False])
def test_both_namings_give_the_same_model(differential: bool) -> None:
    module = seeded(lambda: _model(differential=differential), 1)
    state = module.state_dict()
    for file in (_publish(state), dict(state)):
        plan = plan_diffusion_model({key: tuple(value.shape) for key, value in file.items()})
        assert plan.recognised.name == "stable_audio_3"
        assert not plan.key_map.unused
        assert not {name for name, value in plan.config.items() if value != module.config[name]}
        built = plan.build(file).state_dict()
        assert built.keys() == state.keys()
        assert all(torch.equal(built[key], state[key]) for key in state)


def test_files_and_folders_hold_the_same_model(tmp_path: Path) -> None:
    """The file saved again is that file; classes of diffusers load the folder, and so do we."""
    path, again, folder = tmp_path / "tiny.safetensors", tmp_path / "again.safetensors", tmp_path / "folder"
    save_file(STABLE_AUDIO_3.file(), path)
    write_tokenizers(tmp_path, STABLE_AUDIO_3)
    checkpoint = open_checkpoint(path)
    save_checkpoint(checkpoint, again)
    before, after = load_file(path), load_file(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    save_diffusers(checkpoint, folder)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "StableAudio3Pipeline"
    assert index["duration_embedder"] == ["stable_audio_3", "StableAudio3DurationEmbedder"]
    assert_loaded(checkpoint, folder)
    assert_same_model(checkpoint, open_checkpoint(folder))
    embedder = StableAudio3DurationEmbedder.from_pretrained(folder / "duration_embedder")
    assert all(torch.equal(value, _duration().state_dict()[name]) for name, value in embedder.state_dict().items())


def test_without_what_embeds_seconds_it_is_refused_by_name(tmp_path: Path) -> None:
    save_file(
        {key: value for key, value in STABLE_AUDIO_3.file().items() if SECONDS_KEY not in key},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(UnknownArchitecture, match=r"Stable Audio 3.*embed seconds"):
        open_checkpoint(tmp_path / "x.safetensors").build(Role.DIFFUSION_MODEL)
