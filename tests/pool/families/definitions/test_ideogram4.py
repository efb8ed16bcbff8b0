"""Ideogram 4, compared with its pipeline in diffusers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelpool.pool.families.definitions import ideogram4
from modelpool.pool.families.parts.latent_formats import _IDEOGRAM_4_MEAN, _IDEOGRAM_4_STD
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.files.formats.model_description import read_description
from modelpool.pool.inference.conditioning.conditions import Condition
from modelpool.pool.inference.guidance.guiders import Predictions
from modelpool.pool.inference.guidance.model_guiders import guider_of
from modelpool.pool.inference.sampling.partial_run import GuidanceMemory
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.components.diffusion.adapted_modules import Ideogram4Transformer2DModel
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import describe
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import MissingParts, UnknownArchitecture
from modelpool.pool.values.core.run_options import CfgOverride, RunOptions
from modelpool.pool.values.core.stage_params import Encoded, GuidanceParams, ModelRef, OutputShape, SampleParams
from modelpool.pool.values.core.stage_params import SamplingSchedule as Schedule
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_transformers import FAMILIES, WIDTH, TinyFamily, flux2_vae, seeded, words
from tests.pool.families.whole_transformer import NEGATIVE, PROMPT, STEPS, Whole
from tests.pool.models.components.diffusion.image_published import File, State
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.models.text.tiny_tokenizers import for_transformers

(FAMILY,) = ideogram4.FAMILIES
(READING,) = FAMILY.text.readings
LAYERS, MOST_TOKENS = len(READING.layers), 64
#: the template of the tokenizer, which formats a chat
CHAT = READING.template.format("{{ messages[-1]['content'][0]['text'] }}").replace("\n", "{{ '\\n' }}")
#: statistics of the latents, as the VAE of a folder has them
STATISTICS = {
    "bn.running_mean": torch.tensor(_IDEOGRAM_4_MEAN),
    "bn.running_var": torch.tensor(_IDEOGRAM_4_STD) ** 2 - 1e-4,
}


def _model(num_layers: int = 2, **more: Any) -> Any:
    return Ideogram4Transformer2DModel(
        num_layers=num_layers, attention_head_dim=64, num_attention_heads=2, intermediate_size=96, adaln_dim=24,
        llm_features_dim=LAYERS * WIDTH, mrope_section=(6, 5, 5), **more,
    )  # fmt: skip


def _pair() -> Any:
    return _model(has_unconditional=True)


def _publish(state: State) -> File:
    file: File = {}
    for key, tensor in state.items():
        if ".to_q." in key:
            parts = [state[key.replace(".to_q.", f".to_{name}.")] for name in "qkv"]
            file[key.replace(".to_q.", ".qkv.")] = torch.cat(parts)
        elif ".to_k." not in key and ".to_v." not in key:
            file[key.replace(".to_out.0.", ".o.")] = tensor
    return file


def _encoder() -> Any:
    return texts.qwen3_vl(words=words("qwen"), layers=READING.layers[-1])


def _vae() -> Any:
    return flux2_vae(latent_channels=32)


def _vae_file(state: State) -> File:
    return published.ldm({**state, **STATISTICS})


class _Seeing(nn.Module):
    """What the pipeline reads of a text encoder that sees."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model
        self.device = torch.device("cpu")


def _pipeline(encoder: Any, vae: Any, model: Any, second: Any) -> Any:
    """With a language model alone, where the published folder has one that sees."""
    tokenizer = for_transformers("qwen")
    tokenizer.chat_template = CHAT
    scheduler = FlowMatchEulerDiscreteScheduler()
    return diffusers.Ideogram4Pipeline(scheduler, vae, _Seeing(encoder), tokenizer, model, second)


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    """The real tokens, without the padding before them and the patches behind; layer by layer."""
    pipeline, device = _pipeline(modules[0], None, None, None), torch.device("cpu")
    with torch.no_grad():
        states, _, _, indicator = pipeline.encode_prompt(prompt, 1, 1, MOST_TOKENS, device)
    read = states[:, indicator[0] == 3]
    return {"context": read.unflatten(-1, (-1, LAYERS)).transpose(-1, -2).flatten(-2)}


def _modules(whole: Whole) -> list[Any]:
    encoder, vae, model = (whole.module(role) for role in (Role.TEXT_ENCODER, Role.VAE, Role.DIFFUSION_MODEL))
    return [encoder, vae, model, model.get_submodule(ideogram4.UNCONDITIONAL)]


def _rows(latent: Tensor) -> Tensor:
    """The patches of a latent as the pipeline has them: cell after cell."""
    return latent.unflatten(1, (-1, 4)).permute(0, 3, 4, 2, 1).flatten(1, 2).flatten(2)


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    """Of our texts, which are compared by themselves; the last of few steps has the smaller scale."""
    noise, (width, height) = noise_of(whole), whole.sides
    pipeline, words = _pipeline(*_modules(whole)), ideogram4.as_words(torch.from_numpy(texts[0].context_LD)[None])
    told = pipeline._prepare_ids([words.shape[1]], *noise.shape[2:], words.shape[1], noise.device)
    states = nn.functional.pad(words, (0, 0, 0, noise.shape[2] * noise.shape[3]))
    pipeline.encode_prompt = lambda **_: (states, *told)
    found = pipeline(
        PROMPT, height=height, width=width, num_inference_steps=STEPS, max_sequence_length=words.shape[1],
        guidance_schedule=[7.0] * (STEPS - 1) + [3.0], latents=_rows(noise), output_type="latent",
    ).images  # fmt: skip
    cells: Tensor = found.unflatten(1, noise.shape[2:]).unflatten(3, (4, -1))
    return cells.permute(0, 4, 3, 1, 2).flatten(1, 2)


def _decoded(whole: Whole, latent: Tensor) -> Tensor:
    """As the pipeline decodes rows, with the statistics of its VAE."""
    vae, (height, width) = whole.module(Role.VAE), latent.shape[2:]
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    rows = _rows(latent) * std + vae.bn.running_mean
    patches = rows.view(1, height, width, 2, 2, -1).permute(0, 5, 1, 3, 2, 4)
    decoded: Tensor = vae.decode(patches.reshape(1, -1, height * 2, width * 2)).sample
    return decoded


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"ideogram4": ("layers.0.attention.qkv", "diffusion_model.{}")}
ENCODERS = {"qwen3vl_8b": (_encoder, texts.under("model."))}
CASES = {
    "ideogram4": Compared(
        TinyFamily("ideogram4", _pair, _publish, ENCODERS, _vae, _vae_file),
        diffusers.Ideogram4Pipeline,
        _latent,
        _texts,
        LORAS["ideogram4"],
        decode=_decoded,
    )
}
CASE = CASES["ideogram4"]
#: a file of the model that reads the text, alone
ALONE = TinyFamily("ideogram4", _model, _publish, ENCODERS, _vae, _vae_file)


class TestIdeogram4(FamilyTests):
    case = CASE


def test_the_levels_are_those_of_the_pipeline() -> None:
    noise = FAMILY.sampling.noise
    for width, height in ((256, 256), (512, 512), (1024, 1536), (2048, 2048)):
        table = sigma_table(noise, width // 16 * height // 16)
        for steps in (1, 2, 12, 48, 200):
            expected = _logit_normal_sigmas(steps, _resolution_aware_mu(height, width, 0.0), std=1.5)
            torch.testing.assert_close(make_sigmas("logit_normal", steps, table)[:-1], expected, rtol=0.0, atol=1e-7)


def test_levels_beyond_the_bounds_of_the_pipeline_still_fall() -> None:
    """Its levels would be equal there: those of a strong shift, or of a small image in many steps."""
    for shift in (0.01, 1000.0):
        levels = make_sigmas("logit_normal", 999, sigma_table(FAMILY.sampling.noise.shifted_by(shift)))
        assert bool((levels[:-1] > levels[1:]).all())


def test_the_last_steps_are_guided_less() -> None:
    """As in the presets of the original code: 3 of 48, 2 of 20 and 1 of 12; and never more than the others."""
    facts, cond = TRANSFORMERS["ideogram4"].sampling, Condition(torch.zeros(1, 1, 1))
    for steps, late, scale in ((48, 3, 7.0), (20, 2, 7.0), (12, 1, 7.0), (12, 0, 2.5)):
        work = SampleParams(
            ModelRef("m", "", ""), (), OutputShape(64, 64), Schedule(steps, "euler", "simple"), GuidanceParams(scale), 0
        )
        scales = []
        for step in range(steps):
            guider = guider_of(
                facts, work, cond, (1, 128, 4, 4), torch.device("cpu"), GuidanceMemory(), lambda step=step: step
            )
            scales.append(guider.scales)
        assert scales == [scale] * (steps - late) + [3.0] * late


def test_another_scale_in_a_part_of_the_run_replaces_the_last_steps() -> None:
    """By steps or by levels, which are not shifted with the size: 0.7 of the noise is a level of 0.3."""
    facts, cond = TRANSFORMERS["ideogram4"].sampling, Condition(torch.zeros(1, 1, 1))
    steps, table = 20, sigma_table(facts.noise, 4096)
    sigmas = make_sigmas("logit_normal", steps, table)[:-1].tolist()
    one, other = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    for option, expected in (
        (CfgOverride(3.0, start=0.5), [7.0] * 10 + [3.0] * 10),
        (CfgOverride(2.0, end=0.1), [2.0] * 2 + [7.0] * 18),
        (CfgOverride(3.0, "noise", start=0.7), [3.0 if sigma <= 0.3 else 7.0 for sigma in sigmas]),
        (CfgOverride(1.0, "noise", end=0.05), [1.0 if sigma >= 0.95 else 7.0 for sigma in sigmas]),
    ):
        work = SampleParams(
            ModelRef("m", "", ""), (), OutputShape(64, 64), Schedule(steps, "euler", "simple"), GuidanceParams(7.0), 0,
            options=RunOptions(cfg_override=option),
        )  # fmt: skip
        found = []
        for step, sigma in enumerate(sigmas):
            place = torch.device("cpu"), GuidanceMemory(), lambda step=step: step, table
            guider = guider_of(facts, work, cond, (1, 128, 4, 4), *place)
            found.append(float(guider.combine_at(one, Predictions(one, other), sigma)))
        assert found == expected, option
        assert len(set(expected)) == 2


def _write_parts(folder: Path) -> dict[str, str]:
    """Each model in a file, as they are published, and the rest, since no tiny text encoder is known by itself."""
    state, inner = seeded(_pair, 1).state_dict(), f"{ideogram4.UNCONDITIONAL}."
    files = {
        "ideogram4": _publish({key: value for key, value in state.items() if not key.startswith(inner)}),
        "ideogram4_unconditional": _publish(
            {key.removeprefix(inner): value for key, value in state.items() if key.startswith(inner)}
        ),
        "short_unconditional": _publish(seeded(partial(_model, 1), 1).state_dict()),
        "klein": FAMILIES["flux2_klein"].file(),
        "rest": {key: value for key, value in CASE.tiny.file().items() if not key.startswith("model.")},
    }
    for name, tensors in files.items():
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    return {name: str(folder / f"{name}.safetensors") for name in files}


def test_two_files_make_a_model(tmp_path: Path) -> None:
    """It is the file that has both; of such a file, the second can be replaced."""
    files = _write_parts(tmp_path)
    description = tmp_path / "tiny.model.json"
    parts = {"checkpoint": "rest", "diffusion_model": "ideogram4", "unconditional": "ideogram4_unconditional"}
    told = {key: f"{name}.safetensors" for key, name in parts.items()}
    description.write_text(json.dumps({"format": 1, **told}))
    assert describe(read_description(description)).title == "Ideogram 4"
    checkpoint = open_checkpoint(read_description(description))
    assert checkpoint.family.sampling.has_unconditional
    ours, expected = checkpoint.build(Role.DIFFUSION_MODEL).module.state_dict(), seeded(_pair, 1).state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in ours)
    save_file(CASE.tiny.file(), tmp_path / "both.safetensors")
    other = {key: value + 1 for key, value in load_file(files["ideogram4_unconditional"]).items()}
    save_file(other, tmp_path / "other.safetensors")
    assembly = Assembly("m", str(tmp_path / "both.safetensors"), unconditional=str(tmp_path / "other.safetensors"))
    replaced = open_checkpoint(assembly).build(Role.DIFFUSION_MODEL).module.state_dict()
    name, inner = "input_proj.weight", f"{ideogram4.UNCONDITIONAL}.input_proj.weight"
    assert torch.equal(replaced[name], expected[name])
    assert torch.equal(replaced[inner], expected[inner] + 1)


def test_files_that_make_no_pair_are_refused_with_the_reason(tmp_path: Path) -> None:
    files = _write_parts(tmp_path)
    for main, other, message in (
        ("ideogram4", "ideogram4", "expected two files"),
        ("ideogram4_unconditional", "ideogram4", "its name says that it reads none"),
        ("ideogram4", "short_unconditional", "depth: 1, expected 2"),
        ("ideogram4", "klein", "is Flux 2 klein with different sizes"),
        ("ideogram4", "rest", "no known diffusion model"),
        ("klein", "ideogram4_unconditional", "Flux 2 klein needs no model for these"),
    ):
        assembly = Assembly("m", files["rest"], files[main], unconditional=files[other])
        with pytest.raises(MissingParts, match=message):
            open_checkpoint(assembly)


def test_a_model_alone_is_guided_by_the_negative_prompt(tmp_path: Path) -> None:
    """As if it were both; its folder says what is missing."""
    whole = Whole(tmp_path, ALONE)
    assert not whole.family.sampling.has_unconditional
    texts_read = whole.texts()
    ours = torch.from_numpy(whole.latent(texts_read).samples_CHW)
    other = torch.from_numpy(whole.latent((texts_read[0], texts_read[0])).samples_CHW)
    assert not torch.allclose(ours, other, atol=1e-3), f"{NEGATIVE!r} is not read"
    saved = save_diffusers(whole.opened, tmp_path / "folder")
    assert saved.missing == ("unconditional_transformer: the checkpoint has no model that predicts without a text",)
    assert json.loads((tmp_path / "folder/model_index.json").read_text())["unconditional_transformer"] == [None, None]
    assert not open_checkpoint(tmp_path / "folder").family.sampling.has_unconditional
    whole.engine.close()


def test_a_second_model_reads_no_negative_prompt(tmp_path: Path) -> None:
    whole = Whole(tmp_path, CASE.tiny)
    prompt, negative = whole.texts()
    first, second = (whole.latent((prompt, other)).samples_CHW for other in (negative, prompt))
    assert (first == second).all()
    whole.engine.close()


def test_a_folder_has_the_statistics_of_the_latents_whatever_the_vae_has(tmp_path: Path) -> None:
    """Published models of separate files have the VAE of Flux 2, with its own."""
    file = CASE.tiny.file()
    file["vae.bn.running_mean"] = torch.zeros(128)
    save_file(file, tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, CASE.tiny)
    save_diffusers(open_checkpoint(tmp_path / "tiny.safetensors"), tmp_path / "folder")
    vae = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path / "folder/vae")
    for name, expected in STATISTICS.items():
        torch.testing.assert_close(vae.state_dict()[name], expected)
    config = tmp_path / "folder/scheduler/scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"shift": 3.0}))
    with pytest.raises(UnknownArchitecture, match=r"shift: found 3\.0, expected 1: the pipeline of Ideogram 4 comp"):
        open_checkpoint(tmp_path / "folder")


def test_a_padded_text_predicts_what_it_predicts_alone() -> None:
    module, generator = seeded(_pair, 1), torch.Generator().manual_seed(0)
    x, level = torch.randn(2, 128, 2, 3, generator=generator), torch.tensor([0.4, 0.7])
    text, mask = (
        torch.randn(2, 9, LAYERS * WIDTH, generator=generator),
        torch.arange(9)[None] < torch.tensor([[9], [4]]),
    )
    both = ideogram4.forward(module, x, level, {"context": text, "context_mask": mask})
    alone = ideogram4.forward(module, x[1:], level[1:], {"context": text[1:, :4]})
    torch.testing.assert_close(both[1:], alone)
