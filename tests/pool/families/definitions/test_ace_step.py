"""ACE-Step 1.5, compared with its pipeline in diffusers: texts, lyrics, latents and audio."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.estimates.typical_run import typical_call
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.families.definitions.ace_step import config, forward, prepare
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.parts.inner_models import COMPANION, SILENCE, SILENCE_CELLS
from modelpool.pool.families.parts.music_text import caption_text, lyrics_text
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.silence import silence_latent
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import Guidance
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    DecodeParams,
    Encoded,
    EncodeParams,
    GuidanceParams,
    Latent,
    LoraRef,
    OutputShape,
    Result,
    SampleParams,
    SamplingSchedule,
    StageParams,
    stage_of,
    task_id,
)
from modelpool.pool.values.core.task_inputs import LATENT, LYRICS, POSITIVE, TaskInputs
from modelpool.pool.values.specs.spec import ExecutionMode, Role, Stage, TaskSpec
from modelpool.pool.weights.tracing.module_flops import module_work
from tests.pool.families.test_transformers_as_folders import assert_loaded, assert_same_model
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import WIDTH, File, TinyFamily, seeded, words
from tests.pool.families.whole_transformer import SEED, Whole
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers
from tests.pool.pipeline import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
#: of the tiny latents; samples of a cell, as published
CHANNELS, CELL = 6, 1920
#: so long that tokens of music and of lyrics are outside of the window of others
SECONDS, LINES = 10.7, 24
#: with levels that are equal in float32 and in float64, of which the model is told a thousand times each
STEPS = 4
PROMPT = "a slow (piano:1) song"
SUNG = "[verse]\nlow (ooh, ooh) over the moon, painted in oil\n" * LINES
MUSIC: dict[str, Any] = {"bpm": 96, "key_scale": "C major", "time_signature": "4"}
#: names of one weight in LoRA files: of trainers of the authors, of diffusers, and of the file
LORAS = {
    "ace_step_15": (
        *("base_model.model.layers.0.self_attn.q_proj", "transformer.layers.0.self_attn.to_q"),
        "diffusion_model.decoder.layers.0.self_attn.q_proj",
    )
}
_PUBLISHED = ((".to_out.0.", ".o_proj."), (".norm_q.", ".q_norm."), (".norm_k.", ".k_norm."))


def _model(**more: Any) -> Any:
    """A diffusion model that is wider than its condition encoder, as the XL models, and the encoder as a part of it."""
    model = diffusers.AceStepTransformer1DModel(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, in_channels=3 * CHANNELS, audio_acoustic_hidden_dim=CHANNELS, encoder_hidden_size=48, **more,
    )  # fmt: skip
    model.condition_encoder = diffusers.AceStepConditionEncoder(
        hidden_size=48, intermediate_size=40, text_hidden_dim=WIDTH, timbre_hidden_dim=CHANNELS,
        num_lyric_encoder_hidden_layers=2, num_timbre_encoder_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=24,
    )  # fmt: skip
    return model


def _vae() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
        return diffusers.AutoencoderOobleck(
            encoder_hidden_size=2 * CHANNELS, downsampling_ratios=[2, 4, 4, 6, 10], channel_multiples=[1, 1, 2, 2, 2],
            decoder_channels=4, decoder_input_channels=CHANNELS, sampling_rate=48000,
        )  # fmt: skip


def _published(state: Mapping[str, Tensor]) -> File:
    """The names of the authors, with what this project has no use for."""
    file = {"tokenizer.quantizer.project_in.weight": torch.zeros(6, 48), "detokenizer.proj_out.bias": torch.zeros(6)}
    for key, tensor in state.items():
        bare = key.removeprefix(f"{COMPANION}.")
        if bare in ("null_condition_emb", SILENCE):
            file[bare] = tensor
            continue
        for ours, theirs in _PUBLISHED:
            bare = bare.replace(ours, theirs)
        for letter in "qkv":
            bare = bare.replace(f".to_{letter}.", f".{letter}_proj.")
        bare = bare.replace("proj_in_conv.", "proj_in.1.").replace("proj_out_conv.", "proj_out.1.")
        file[f"encoder.{bare}" if key.startswith(COMPANION) else f"decoder.{bare}"] = tensor
    return file


ACE_STEP = TinyFamily(
    "ace_step_15",
    _model,
    _published,
    {"qwen3_06b": (lambda: texts.qwen3(words=words("qwen_embedding")), texts.under("model."))},
    _vae,
    published.oobleck,
)


def _pipeline(encoder: Any = None, model: Any = None, vae: Any = None) -> Any:
    model = model or seeded(_model, 1)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0)
    encoder = encoder or texts.qwen3(words=words("qwen_embedding"))
    tokenizer = for_transformers("qwen_embedding")
    return diffusers.AceStepPipeline(
        vae or seeded(_vae, 2), encoder, tokenizer, model, model.condition_encoder, scheduler
    )


def _arguments(seconds: float = SECONDS) -> dict[str, Any]:
    return {
        "audio_duration": seconds, "bpm": MUSIC["bpm"], "keyscale": MUSIC["key_scale"],
        "timesignature": MUSIC["time_signature"],
    }  # fmt: skip


def _cells(seconds: float) -> int:
    return int(np.ceil(seconds * 25))


class _Music:
    """The tiny file, run stage by stage."""

    def __init__(self, folder: Path, write: bool = True, settings: EngineSettings | None = None) -> None:
        self.whole = Whole(folder, ACE_STEP, write=write, settings=settings)
        self.model = self.whole.model

    def run(self, work: StageParams, inputs: Mapping[str, Result], role: Role) -> Result:
        uses = (self.whole.catalog.use(self.model, role, work.loras if isinstance(work, SampleParams) else ()),)
        needed = self.whole.catalog.figures.activation_bytes(self.model, work)
        task = TaskSpec(task_id(work, {}), stage_of(work), uses, needed, 0.1)
        return self.whole.engine.run(task, work, TaskInputs(inputs), QUIET)[0]

    def texts(self, seconds: float = SECONDS, lyrics: str = SUNG) -> dict[str, Result]:
        caption = caption_text(PROMPT, seconds, **MUSIC)
        works = {
            POSITIVE: EncodeParams(self.model, (), caption),
            LYRICS: EncodeParams(self.model, (), lyrics_text(lyrics, "en"), lyrics=True),
        }
        return {name: self.run(work, {}, Role.TEXT_ENCODER) for name, work in works.items()}

    def latent(
        self, texts: Mapping[str, Result], cfg: float = 7.0, loras: tuple[LoraRef, ...] = (), seconds: float = SECONDS
    ) -> Any:
        schedule = SamplingSchedule(STEPS, "euler", "simple")
        shape = OutputShape(0, 0, seconds=seconds)
        work = SampleParams(self.model, loras, shape, schedule, GuidanceParams(cfg), SEED)
        found = self.run(work, texts, Role.DIFFUSION_MODEL)
        assert isinstance(found, Latent)
        return found


def _noise(seconds: float) -> Tensor:
    return ImageNoise(SEED).draw((1, CHANNELS, _cells(seconds))).transpose(1, 2)


def _expected(pipeline: Any, cfg: float, lyrics: str = SUNG, seconds: float = SECONDS, **more: Any) -> Any:
    with torch.no_grad():
        return pipeline(
            prompt=PROMPT.replace(":1", "").replace("(", "").replace(")", ""), lyrics=lyrics, latents=_noise(seconds),
            num_inference_steps=STEPS, guidance_scale=cfg, **_arguments(seconds), **more,
        ).audios  # fmt: skip


def _assert_close(found: Any, expected: Tensor) -> None:
    scale = max(1.0, float(expected.std()))
    np.testing.assert_allclose(found.samples_CHW, expected[0].T, rtol=0, atol=1e-5 * scale)


def test_texts_and_latents_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """Guided against the learned state and not; brackets of lyrics are no weights."""
    music = _Music(tmp_path)
    texts, pipeline = music.texts(), _pipeline()
    with torch.no_grad():
        caption, _, lyrics, _ = pipeline.encode_prompt("a slow piano song", SUNG, torch.device("cpu"), **_arguments())
    assert lyrics.shape[1] > 2 * 128
    for name, theirs in ((POSITIVE, caption), (LYRICS, lyrics)):
        own = texts[name]
        assert isinstance(own, Encoded)
        np.testing.assert_allclose(own.context_LD, theirs[0].numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
    guided = music.latent(texts)
    _assert_close(guided, _expected(pipeline, 7.0, output_type="latent"))
    plain = music.latent(texts, cfg=1.0)
    _assert_close(plain, _expected(pipeline, 1.0, output_type="latent"))
    assert not np.allclose(guided.samples_CHW, plain.samples_CHW, atol=1e-2)
    music.whole.engine.close()


def test_a_request_gives_the_audio_of_the_pipeline(tmp_path: Path) -> None:
    """Scaled to one amplitude, and as long as requested: the last cell is cut."""
    save_file(ACE_STEP.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, ACE_STEP)
    tiny, seconds, sung = TinyModel.of_folder(tmp_path), 0.39, "[verse]\nla (la)"
    made = tiny.made(prompt=PROMPT, lyrics=sung, seconds=seconds, steps=STEPS, seed=SEED, **MUSIC)
    assert [task.input_names for task in made.tasks if task.stage is Stage.SAMPLE] == [(POSITIVE, LYRICS)]
    (latent,) = made.latents
    assert latent.shape == (1, CHANNELS, 10)
    (audio,) = made.of(DecodeParams)
    assert isinstance(audio, AudioSamples)
    assert audio.samples_per_second == 48000
    heard = _expected(_pipeline(), 7.0, sung, seconds)[0]
    assert audio.samples_SC.shape == (int(seconds * 48000), 2)
    assert heard.shape == (2, 10 * CELL)
    # scaled by the loudest sample, which may be in the part that is cut
    np.testing.assert_allclose(audio.samples_SC.T, heard[:, : len(audio.samples_SC)], rtol=0, atol=1e-5)
    assert heard.abs().max() == pytest.approx(10 ** (-1 / 20), abs=1e-4)
    tiny.close()


@pytest.mark.filterwarnings("ignore:In sim autocast:UserWarning")
def test_streamed_weights_make_what_resident_ones_make(tmp_path: Path) -> None:
    """The condition encoder, which runs once, among them; and a typical run of each component can be looked at."""
    found = []
    for write, policy in ((True, VramPolicy.NORMAL), (False, VramPolicy.NONE)):
        settings = EngineSettings("sim", budget_bytes=512 << 20, vram_policy=policy)
        music = _Music(tmp_path, write, settings)
        found.append(music.latent(music.texts(0.4, "la"), seconds=0.4).samples_CHW)
        opened = music.whole.opened
        for role in opened.checkpoint.roles if write else ():
            component = opened.component(role)
            work = module_work(component.built.module, component.form.compute_dtype, typical_call(opened, role))
            assert sum(work.values()) > 0, role
            assert role is not Role.DIFFUSION_MODEL or any(COMPANION in name for name in work if work[name])
        music.whole.engine.close()
        del music, opened
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5 * max(1.0, float(np.abs(found[0]).max())))
    gc.collect()
    assert sim.memory_stats(0).used_bytes == 0


@pytest.mark.filterwarnings("ignore:In sim autocast:UserWarning")
def test_long_audio_is_decoded_in_parts_where_memory_is_short(tmp_path: Path) -> None:
    """They overlap, and are joined without a step; a minute has smaller parts than the whole."""
    whole = Whole(tmp_path, ACE_STEP, settings=EngineSettings("sim", budget_bytes=256 << 20))
    minute = DecodeParams(whole.model, OutputShape(0, 0, seconds=60.0))
    sizes = [mode.tile for mode in whole.catalog.execution_modes(whole.model, minute)]
    assert sizes == [0, 1024, 512, 256, 128]
    work, cells = DecodeParams(whole.model, OutputShape(0, 0, seconds=8.0)), _cells(8.0)
    latent = Latent(torch.randn(CHANNELS, cells, generator=torch.Generator().manual_seed(0)).numpy())
    uses, heard = (whole.catalog.use(whole.model, Role.VAE, ()),), []
    for needed in (1 << 20, 8 << 30):
        parts = (ExecutionMode(1 << 20, tile=128),)
        task = TaskSpec(task_id(work, {}), stage_of(work), uses, needed, 0.1, divisions=parts)
        audio, cost = whole.engine.run(task, work, TaskInputs({LATENT: latent}), QUIET)
        assert isinstance(audio, AudioSamples)
        assert (cost.division is not None) == (needed > 1 << 28)
        heard.append(audio.samples_SC)
    whole.engine.close()
    assert heard[0].shape == heard[1].shape == (8 * 48000, 2)
    assert np.sqrt(np.mean((heard[0] - heard[1]) ** 2)) < 0.01 * heard[0].std()


def test_members_of_a_batch_are_as_they_are_alone() -> None:
    state = _published(seeded(_model, 1).state_dict())
    module = plan_diffusion_model({key: tuple(value.shape) for key, value in state.items()}).build(state)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(2, length, WIDTH, generator=generator) for name, length in (("context", 5), ("lyrics", 7))
    }
    x, level = torch.randn(2, CHANNELS, 9, generator=generator), torch.tensor([0.4, 0.4])
    with torch.no_grad():
        ready, learned = prepare(module, (CHANNELS, 9), inputs)
        both = forward(module, x, level, ready)
        alone = [forward(module, x[[n]], level[[n]], {key: one[[n]] for key, one in inputs.items()}) for n in (0, 1)]
    assert learned.shape == ready["context"].shape == (2, 5 + 1 + 7, 48)
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_lyrics_and_facts_of_the_music_change_it(tmp_path: Path) -> None:
    music, seconds = _Music(tmp_path), 0.4
    texts = music.texts(seconds, "[verse]\nla la")
    usual = music.latent(texts, seconds=seconds).samples_CHW
    others = music.latent(music.texts(seconds, ""), seconds=seconds).samples_CHW
    assert not np.allclose(usual, others, atol=1e-3)
    unsaid = {**texts, POSITIVE: music.run(EncodeParams(music.model, (), "a slow piano song"), {}, Role.TEXT_ENCODER)}
    assert not np.allclose(usual, music.latent(unsaid, seconds=seconds).samples_CHW, atol=1e-3)
    music.whole.engine.close()


def test_both_namings_are_one_model() -> None:
    """Of the published file only what makes codes of an audio, and an audio of codes, is left over."""
    state = seeded(_model, 1).state_dict()
    for naming, file in (("published", _published(state)), ("diffusers", dict(state))):
        shapes = {key: tuple(value.shape) for key, value in file.items()}
        plan = plan_diffusion_model(shapes)
        assert plan.recognised.name == "ace_step_15", naming
        assert {key.split(".")[0] for key in plan.key_map.unused} <= {"tokenizer", "detokenizer"}, naming
        built = plan.build(file)
        theirs: Any = seeded(_model, 1)
        arguments = {key: value for key, value in theirs.config.items() if not key.startswith("_")}
        assert {key: built.config[key] for key in arguments} == arguments, naming
        own = built.state_dict()
        assert own.keys() == state.keys(), naming
        assert all(torch.equal(own[key], state[key]) for key in state), naming
    found = recognise_diffusion(
        {f"model.diffusion_model.{key}": tuple(v.shape) for key, v in _published(state).items()}
    )
    assert found is not None
    assert (found.name, found.prefix) == ("ace_step_15", "model.diffusion_model.")
    with pytest.raises(UnknownArchitecture, match=COMPANION):
        plan_diffusion_model({key: tuple(v.shape) for key, v in state.items() if not key.startswith(COMPANION)})


def test_published_sizes_are_those_of_the_classes_defaults() -> None:
    """The arguments that follow from shapes are those that diffusers' classes have by default, as published."""
    with torch.device("meta"):
        model: Any = diffusers.AceStepTransformer1DModel()
        model.condition_encoder = diffusers.AceStepConditionEncoder()
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = recognise_diffusion({key: shape for key, shape in shapes.items() if not key.startswith(COMPANION)})
    assert found is not None
    own = config(found.config, shapes)
    part = {key.removeprefix(f"{COMPANION}_"): value for key, value in own.items() if key.startswith(f"{COMPANION}_")}
    assert part.pop("silence_cells") == SILENCE_CELLS
    assert {**model.condition_encoder.config, **part} == dict(model.condition_encoder.config)
    mine = {key: value for key, value in own.items() if not key.startswith(COMPANION)}
    assert {**model.config, **mine} == {**model.config, "encoder_hidden_size": 2048}


def test_files_and_folders_are_the_same_model(tmp_path: Path) -> None:
    """A folder that says it is distilled is not guided, and has the steps of such models."""
    path = tmp_path / "tiny.safetensors"
    save_file(ACE_STEP.file(), path)
    write_tokenizers(tmp_path, ACE_STEP)
    checkpoint = open_checkpoint(path)
    save_checkpoint(checkpoint, tmp_path / "again.safetensors")
    before, after = load_file(path), load_file(tmp_path / "again.safetensors")
    assert {key for key in before.keys() ^ after.keys() if "tokenizer." not in key} == set()
    assert all(torch.equal(before[key], after[key]) for key in after)
    folder = tmp_path / "folder"
    save_diffusers(checkpoint, folder)
    index = json.loads((folder / "model_index.json").read_text())
    assert (index["_class_name"], index[COMPANION]) == ("AceStepPipeline", ["diffusers", "AceStepConditionEncoder"])
    assert "is_distilled" not in index
    assert_loaded(checkpoint, folder)
    assert_same_model(checkpoint, open_checkpoint(folder))
    pipeline = diffusers.AceStepPipeline.from_pretrained(folder, local_files_only=True)
    made = _expected(pipeline, 7.0, seconds=0.4, output_type="latent")
    expected = _expected(_pipeline(), 7.0, seconds=0.4, output_type="latent")
    # weights that are mapped from a file have another alignment, by which products round
    torch.testing.assert_close(made, expected, rtol=0.0, atol=1e-4)
    place = folder / "transformer/config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "is_turbo": True}))
    family = open_checkpoint(folder).family
    assert family.sampling.defaults is not None
    assert (family.sampling.defaults.guidance, family.sampling.defaults.steps) == (Guidance.NONE, 8)
    assert family.sampling.noise.shift == 3.0
    save_diffusers(open_checkpoint(folder), tmp_path / "turbo")
    again = open_checkpoint(tmp_path / "turbo").family
    assert again.sampling == family.sampling


def test_a_file_without_silence_makes_it_with_its_autoencoder(tmp_path: Path) -> None:
    """As single files with all components are published: what comes out is what a file with that silence gives."""
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    file = {key: value for key, value in ACE_STEP.file().items() if SILENCE not in key}
    save_file(file, tmp_path / "without/tiny.safetensors")
    silence = silence_latent(open_checkpoint(tmp_path / "without/tiny.safetensors"))
    with torch.no_grad():
        longer = seeded(_vae, 2).encode(torch.zeros(1, 2, 60 * CELL)).latent_dist.mode().transpose(1, 2)
    whole = torch.cat((silence, silence[:, -1:].expand(1, SILENCE_CELLS - silence.shape[1], -1)), dim=1)
    torch.testing.assert_close(whole[:, :50], longer[:, :50], rtol=1e-5, atol=1e-5)
    save_file({**file, f"model.diffusion_model.{SILENCE}": whole.contiguous()}, tmp_path / "with/tiny.safetensors")
    latents = []
    for name in ("without", "with"):
        write_tokenizers(tmp_path / name, ACE_STEP)
        music = _Music(tmp_path / name, write=False)
        latents.append(music.latent(music.texts(1.2, "la"), seconds=1.2).samples_CHW)
        music.whole.engine.close()
    np.testing.assert_allclose(*latents, rtol=0, atol=1e-5)


def test_loras_of_both_namings_give_what_the_merged_file_gives(tmp_path: Path) -> None:
    """Trainers of the authors name the weights of the diffusion model alone."""
    for name in ("plain", "loras", "merged"):
        (tmp_path / name).mkdir()
    music, seconds = _Music(tmp_path / "plain"), 0.4
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(64, 2, generator=generator) * 0.05, torch.randn(2, 64, generator=generator)
    latents = []
    texts = music.texts(seconds, "la")
    for number, base in enumerate(LORAS["ace_step_15"]):
        place = tmp_path / f"loras/some{number}.safetensors"
        save_file({f"{base}.lora_B.weight": up, f"{base}.lora_A.weight": down}, place)
        lora = Catalog((tmp_path / "plain",), (tmp_path / "loras",), "cpu").find_lora(f"some{number}", 0.8)
        latents.append(music.latent(texts, loras=(lora,), seconds=seconds).samples_CHW)
    without = music.latent(texts, seconds=seconds).samples_CHW
    save_checkpoint(music.whole.opened, tmp_path / "merged/tiny.safetensors", loras=(lora,))
    music.whole.engine.close()
    write_tokenizers(tmp_path / "merged", ACE_STEP)
    merged = _Music(tmp_path / "merged", write=False)
    expected = merged.latent(texts, seconds=seconds).samples_CHW
    merged.whole.engine.close()
    assert not np.allclose(without, expected, atol=1e-3)
    for latent in latents:
        np.testing.assert_allclose(latent, expected, rtol=0, atol=2e-5 * max(1.0, float(np.abs(expected).max())))
