"""SD1, SD2, SDXL and its refiner run whole: equal to diffusers on the same weights, seed and noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn

from pool.catalog import Catalog
from pool.checkpoints.families import SD1, SD2, SDXL, SDXL_REFINER, Family
from pool.engine import Engine, EngineSettings
from pool.sampling.noise import PictureNoise
from pool.sampling.run import _initial_scale
from pool.sampling.schedules import make_sigmas, sd1_sigma_table
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
from tests.pool.checkpoints import layouts
from tests.pool.checkpoints.layouts import Layout
from tests.pool.checkpoints.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PROMPT, NEGATIVE = "a photo of a red cube", "blurry"
WIDTH, HEIGHT, STEPS, CFG, SEED = 64, 48, 4, 5.0, 11


@dataclass(frozen=True)
class Case:
    """A family, a tiny file of it, and the numbers that its UNet is told for the prompt and the negative prompt."""

    family: Family
    layout: Callable[[], Layout]
    numbers: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    extra: tuple[str, ...] = ()
    prediction: str = "epsilon"


SIZES = (HEIGHT, WIDTH, 0, 0, HEIGHT, WIDTH)
CASES = {
    "sd1": Case(SD1, layouts.tiny_sd1),
    "sd1 of velocity": Case(SD1, layouts.tiny_sd1, extra=("v_pred",), prediction="v_prediction"),
    "sd2": Case(SD2, layouts.tiny_sd2),
    "sdxl": Case(SDXL, layouts.tiny_sdxl, (SIZES, SIZES)),
    "sdxl of velocity": Case(SDXL, layouts.tiny_sdxl, (SIZES, SIZES), ("v_pred",), "v_prediction"),
    "sdxl_refiner": Case(
        SDXL_REFINER, layouts.tiny_sdxl_refiner, ((HEIGHT, WIDTH, 0, 0, 6.0), (HEIGHT, WIDTH, 0, 0, 2.5))
    ),
}


class Whole:
    """A tiny checkpoint on the CPU, run stage by stage."""

    def __init__(self, path: Path, case: Case) -> None:
        layout = {**case.layout(), **dict.fromkeys(case.extra, (0,))}
        write_tiny_checkpoint(path / "tiny.safetensors", seed=3, dtype=torch.float32, layout=layout)
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
        task = TaskSpec(task_id(work, ()), stage_of(work), uses, self.catalog.activation_bytes(self.model, work), 0.1)
        return self.engine.run(task, work, inputs, QUIET)[0]

    def picture(self) -> tuple[Encoded, Latent, Picture]:
        texts = [self.run(EncodeWork(self.model, (), text)) for text in (PROMPT, NEGATIVE)]
        work = SampleWork(self.model, (), WIDTH, HEIGHT, STEPS, CFG, "euler", "normal", SEED)
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
    """The loop of its pipelines around its Euler scheduler, on our noise."""
    unet: Any = whole.module(Role.DIFFUSION_MODEL)
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=case.prediction
    )
    scheduler.set_timesteps(STEPS)
    sigmas = make_sigmas("normal", STEPS, sd1_sigma_table())
    scheduler.sigmas = sigmas
    noise = PictureNoise(SEED).draw((1, 4, HEIGHT // 8, WIDTH // 8))
    x = noise * _initial_scale(float(sigmas[0]), sd1_sigma_table())
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
    # random weights make latents many times as wide as trained ones
    np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=1e-4 * max(1.0, float(expected.std())))
    vae: Any = whole.module(Role.VAE)
    with torch.no_grad():
        pixels = VaeImageProcessor().postprocess(vae.decode(expected / whole.family.scaling_factor).sample, "np")[0]
    assert np.abs(picture.pixels_HWC / 255 - pixels).max() <= 1 / 255
    whole.engine.close()
