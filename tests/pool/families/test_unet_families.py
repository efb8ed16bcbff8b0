"""SD1, SD2, SDXL, its refiner, what was cut out of it, and what was trained with other noise run whole: equal to
diffusers on the same weights, seed and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EDMEulerScheduler, EulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pool.catalog import Catalog
from pool.checkpoints.describe import describe
from pool.checkpoints.families import (
    KOALA_1B,
    KOALA_700M,
    PLAYGROUND_25,
    SD1,
    SD2,
    SDXL,
    SDXL_REFINER,
    SSD_1B,
    VEGA,
    Family,
)
from pool.checkpoints.small_tensors import SPREAD_KEY
from pool.engine import Engine, EngineSettings
from pool.sampling.noise import PictureNoise
from pool.sampling.run import _initial_scale
from pool.sampling.schedules import make_sigmas, sigma_table
from pool.spec import Role, TaskSpec
from pool.text.tokenizer import BEGIN_ID, END_ID, ClipTokenizer
from pool.work import (
    DecodeWork,
    Encoded,
    EncodeWork,
    Latent,
    ModelRef,
    Picture,
    Result,
    SampleWork,
    Work,
    stage_of,
    task_id,
)
from tests.pool.checkpoints import layouts, unet_layouts
from tests.pool.checkpoints.layouts import Layout
from tests.pool.checkpoints.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PROMPT, NEGATIVE = "a photo of a red cube", "blurry"
WIDTH, HEIGHT, STEPS, CFG, SEED = 64, 48, 4, 5.0, 11


@dataclass(frozen=True)
class Case:
    """A family, a tiny file of it, and what diffusers is told of it.

    numbers     that its UNet is told for the prompt and the negative prompt
    tensors     in the file, beside random ones
    prediction  as diffusers' schedulers call it
    noise       other arguments of the scheduler
    schedule    of the run; one that diffusers' scheduler of this noise has
    """

    family: Family
    layout: Callable[[], Layout]
    numbers: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    prediction: str = "epsilon"
    noise: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "normal"


SIZES = (HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH)
#: what SDXL is told of both prompts
BOTH = (SIZES, SIZES)
VELOCITY = {"v_pred": torch.empty(0)}
ZERO_TERMINAL = {**VELOCITY, "ztsnr": torch.empty(0)}
STRETCHED = {"rescale_betas_zero_snr": True}
WIDE_SPREAD = {f"model.diffusion_model.{SPREAD_KEY}": torch.tensor([0.095, -0.095]).repeat(16)}
#: numbers that are not those which a file without them would have
LATENT_MEASURES = {
    "edm_mean": torch.tensor([-1.5, 1.8, -1.25, 2.5]).reshape(1, 4, 1, 1),
    "edm_std": torch.tensor([8.5, 5.75, 6.5, 5.25]).reshape(1, 4, 1, 1),
}
ENDS_OF_NOISE = {"edm_vpred.sigma_min": torch.tensor(0.01), "edm_vpred.sigma_max": torch.tensor(60.0)}
CASES = {
    "sd1": Case(SD1, layouts.tiny_sd1),
    "sd1 of velocity": Case(SD1, layouts.tiny_sd1, ((), ()), VELOCITY, "v_prediction"),
    "sd1 to noise alone": Case(SD1, layouts.tiny_sd1, ((), ()), ZERO_TERMINAL, "v_prediction", STRETCHED),
    "sd2": Case(SD2, layouts.tiny_sd2),
    "sd2 of velocity": Case(SD2, unet_layouts.small_sd2, ((), ()), WIDE_SPREAD, "v_prediction"),
    "sd2 to noise alone": Case(SD2, layouts.tiny_sd2, ((), ()), ZERO_TERMINAL, "v_prediction", STRETCHED),
    "sdxl": Case(SDXL, layouts.tiny_sdxl, BOTH),
    "sdxl of velocity": Case(SDXL, layouts.tiny_sdxl, BOTH, VELOCITY, "v_prediction"),
    "sdxl to noise alone": Case(SDXL, layouts.tiny_sdxl, BOTH, ZERO_TERMINAL, "v_prediction", STRETCHED),
    "sdxl with ends of noise": Case(
        SDXL,
        layouts.tiny_sdxl,
        BOTH,
        ENDS_OF_NOISE,
        "v_prediction",
        {"sigma_min": 0.01, "sigma_max": 60.0, "sigma_data": 1.0, "sigma_schedule": "exponential"},
        "exponential",
    ),
    "playground_25": Case(
        PLAYGROUND_25,
        layouts.tiny_sdxl,
        BOTH,
        LATENT_MEASURES,
        noise={"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5, "sigma_schedule": "karras"},
        schedule="karras",
    ),
    "ssd_1b": Case(SSD_1B, unet_layouts.tiny_ssd_1b, BOTH),
    "vega": Case(VEGA, unet_layouts.tiny_vega, BOTH),
    "koala_700m": Case(KOALA_700M, unet_layouts.tiny_koala_700m, BOTH),
    "koala_1b": Case(KOALA_1B, unet_layouts.tiny_koala_1b, BOTH),
    "sdxl_refiner": Case(
        SDXL_REFINER, layouts.tiny_sdxl_refiner, ((HEIGHT, WIDTH, 0, 0, 6.0), (HEIGHT, WIDTH, 0, 0, 2.5))
    ),
}


class Whole:
    """A tiny checkpoint on the CPU, run stage by stage."""

    def __init__(self, path: Path, case: Case) -> None:
        self.case, self.path = case, path / "tiny.safetensors"
        write_tiny_checkpoint(self.path, seed=3, dtype=torch.float32, layout=case.layout())
        if case.tensors:
            save_file({**load_file(self.path), **case.tensors}, self.path)
        self.catalog = Catalog((path,), (), "cpu")
        self.model: ModelRef = self.catalog.find_model("tiny")
        self.engine = Engine.open(EngineSettings("cpu"))
        self.family = self.engine._opened(self.model).checkpoint.family

    def module(self, role: Role) -> nn.Module:
        """The component as diffusers or transformers has it."""
        return self.engine._opened(self.model).component(role).built.module

    def run(self, work: Work, *inputs: Result) -> Result:
        roles = {
            EncodeWork: self.family.text_encoders,
            SampleWork: (Role.DIFFUSION_MODEL,),
            DecodeWork: (Role.VAE,),
        }[type(work)]
        uses = tuple(self.catalog.use(self.model, role, ()) for role in roles)
        task = TaskSpec(
            task_id(work, ()), stage_of(work), uses, self.catalog.figures.activation_bytes(self.model, work), 0.1
        )
        return self.engine.run(task, work, inputs, QUIET)[0]

    def picture(self) -> tuple[Encoded, Latent, Picture]:
        texts = [self.run(EncodeWork(self.model, (), text)) for text in (PROMPT, NEGATIVE)]
        work = SampleWork(self.model, (), WIDTH, HEIGHT, STEPS, CFG, "euler", self.case.schedule, SEED)
        latent = self.run(work, *texts)
        picture = self.run(DecodeWork(self.model, WIDTH, HEIGHT), latent)
        assert isinstance(texts[0], Encoded)
        assert isinstance(latent, Latent)
        assert isinstance(picture, Picture)
        return texts[0], latent, picture


def read_as_diffusers_does(whole: Whole, text: str) -> tuple[Tensor, Tensor | None]:
    """What its pipelines make of a prompt: the states before the last layer of SDXL's two encoders side by side, the
    last one's projection; SD2's text model ends a layer early and has its norm."""
    tokens = ClipTokenizer.load().encode(text)
    found, pooled = [], None
    for role, facts in whole.family.texts.items():
        module: Any = whole.module(role)
        ids = torch.tensor([[BEGIN_ID, *tokens, END_ID, *[facts.pad_id] * (75 - len(tokens))]])
        with torch.no_grad():
            out = module(ids, output_hidden_states=True)
            if whole.family.name == "sd1":
                found.append(out.last_hidden_state)
            elif whole.family.name == "sd2":
                found.append(module.text_model.final_layer_norm(out.hidden_states[-2]))
            else:
                found.append(out.hidden_states[-2])
                pooled = out.text_embeds if hasattr(out, "text_embeds") else pooled
    return torch.cat(found, dim=-1), pooled


def denoise_as_diffusers_does(whole: Whole, case: Case) -> Tensor:
    """The loop of its pipelines around its Euler schedulers, on our noise."""
    unet: Any = whole.module(Role.DIFFUSION_MODEL)
    scheduler: Any
    noise = PictureNoise(SEED).draw((1, 4, HEIGHT // 8, WIDTH // 8))
    if "sigma_max" in case.noise:
        scheduler = EDMEulerScheduler(prediction_type=case.prediction, **case.noise)
        scheduler.set_timesteps(STEPS)
        x = noise * scheduler.init_noise_sigma
    else:
        betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
        scheduler = EulerDiscreteScheduler(**betas, prediction_type=case.prediction, **case.noise)
        scheduler.set_timesteps(STEPS)
        table = sigma_table(whole.family.sampling.noise)
        # its own differ in the last bits, and where nothing is left but noise
        np.testing.assert_allclose(scheduler.sigmas[1:], make_sigmas("normal", STEPS, table)[1:], rtol=1e-4)
        scheduler.sigmas = make_sigmas("normal", STEPS, table)
        x = noise * _initial_scale(float(scheduler.sigmas[0]), table)
    texts = [read_as_diffusers_does(whole, text) for text in (PROMPT, NEGATIVE)]
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(x, timestep)
            guesses = []
            for (context, pooled), numbers in zip(texts, case.numbers, strict=True):
                added = {"text_embeds": pooled, "time_ids": torch.tensor([numbers])} if numbers else None
                guesses.append(unet(scaled, timestep, context, added_cond_kwargs=added, return_dict=False)[0])
            guided = guesses[1] + CFG * (guesses[0] - guesses[1])
            x = scheduler.step(guided, timestep, x).prev_sample
    return x


def latent_of_vae(case: Case, latent: Tensor) -> Tensor:
    """What its pipelines give to a VAE that has these scales, means and deviations in its configuration."""
    if case.tensors is LATENT_MEASURES:
        return latent * LATENT_MEASURES["edm_std"] / 0.5 + LATENT_MEASURES["edm_mean"]
    return latent / case.family.scaling_factor


@pytest.mark.parametrize("name", CASES)
def test_a_picture_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    """Text, latent and pixels."""
    case = CASES[name]
    whole = Whole(tmp_path, case)
    assert whole.family.name == case.family.name
    encoded, latent, picture = whole.picture()
    context, pooled = read_as_diffusers_does(whole, PROMPT)
    np.testing.assert_allclose(encoded.context_LD, context[0], atol=1e-5)
    assert (encoded.pooled_V is None) == (pooled is None)
    if encoded.pooled_V is not None and pooled is not None:
        np.testing.assert_allclose(encoded.pooled_V, pooled[0], atol=1e-5)
    expected = denoise_as_diffusers_does(whole, case)
    # random weights make latents many times as wide as trained ones; a step down from noise alone, 4519 times as wide
    # as the latent, rounds to the last bit of that
    last_bit = sigma_table(whole.family.sampling.noise).sigma_max * float(np.finfo(np.float32).eps)
    wide = 1e-4 * max(1.0, float(expected.std()))
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=max(wide, last_bit))
    vae: Any = whole.module(Role.VAE)
    with torch.no_grad():
        decoded = vae.decode(latent_of_vae(case, expected)).sample
    pixels = VaeImageProcessor().postprocess(decoded, "np")[0]
    assert np.abs(picture.pixels_HWC / 255 - pixels).max() <= 1 / 255
    whole.engine.close()


@pytest.mark.parametrize(("name", "pixels"), [("sd2", 512), ("sd2 of velocity", 768), ("sd2 to noise alone", 768)])
def test_sd2_of_velocity_was_trained_for_larger_pictures(name: str, pixels: int, tmp_path: Path) -> None:
    """Whether a key says so or nothing but the spread of a norm's biases."""
    whole = Whole(tmp_path, CASES[name])
    info = describe(whole.path)
    assert (info.width, info.height) == (pixels, pixels)
    whole.engine.close()
