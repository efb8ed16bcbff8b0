"""Counts which samplers and schedules render correct images: every pair, on two models, and each sampler's order.

    python -m benchmarks.sampler_images [--images 4] [--samplers euler,heun] [--out table.md]

Renders every sampler with every schedule, in this process, on the CPU. An image is correct if the checker of the
example reads the colour and the shape of its prompt.

The first model is the shapes model: a noise-predicting UNet of the kind of Stable Diffusion 1. The second one is the
same network as a flow: a change of variables that is exact for every share of noise that the network was trained with.
So both models know the same images, and a difference between the columns is one of the sampler, not of a training.

The order is measured on the probability flow of a mixture of two Gaussians, whose solution is known: the logarithm to
base 2 of the ratio of the errors after 100 and 200 steps, without noise.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from examples.shapes.checker import matches, read_image
from modelpool.pool.engine.explicit_control import load_checkpoint
from modelpool.pool.engine.sampling_stage import sample_batch
from modelpool.pool.engine.stages import decode_batch
from modelpool.pool.inference.sampling.sampler_names import SAMPLERS, SCHEDULES
from modelpool.pool.inference.sampling.sampler_step import SamplerSettings
from modelpool.pool.inference.sampling.samplers import FUNCTIONS
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.values.core.errors import CorruptFile, UnusableField
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction, SamplingFacts
from modelpool.pool.values.core.stage_params import (
    ADAPTIVE_SAMPLER,
    Encoded,
    GuidanceParams,
    ImagePixels,
    Latent,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.core.task_inputs import NEGATIVE, POSITIVE, TaskInputs
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from tests.pool.inference.sampling import toy

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "shapes" / "models" / "shapes.safetensors"
PROMPTS = ("a red circle", "a green square", "a blue triangle", "a yellow circle", "a red square", "a green triangle")
#: steps at which people use a sampler
STEPS = {"lcm": 8, "tcd": 8, "restart": 24, "dpm_adaptive": 20}
USUAL_STEPS = 20
#: CFG++ takes the noise without guidance, and so needs a scale near 1
USUAL_CFG, CFG_PLUS_PLUS = 5.0, 1.5
#: steps of the measured orders
COARSE, FINE = 100, 200
QUIET = RunHooks(lambda done, steps: None, lambda: False)


class NoiseModelAsFlow(nn.Module):
    """A UNet that predicts noise, called as a flow: x is (1 - s) * image + s * noise at the share s of noise, and the
    result is noise - image. The same x, divided by 1 - s, has noise of the standard deviation s / (1 - s)."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self._unet = unet
        self._table = sd1_sigma_table()

    def forward(self, x_BCHW: Tensor, share_B: Tensor, context_BLD: Tensor, **others: Any) -> tuple[Tensor]:
        """Return noise - image. Beyond the trained levels, those at their ends are used."""
        share = float(share_B[0])
        sigma = min(max(share / max(1 - share, 1e-6), self._table.sigma_min), self._table.sigma_max)
        noisy_BCHW = x_BCHW * (sigma / share) if share > 0.5 else x_BCHW / (1 - share)
        timestep_B = torch.full_like(share_B, self._table.timestep(sigma))
        noise_BCHW = self._unet(noisy_BCHW / math.sqrt(sigma**2 + 1), timestep_B, context_BLD, **others)[0]
        return ((x_BCHW - (noisy_BCHW - sigma * noise_BCHW)) / share,)


class _FlowPatcher:
    """The patcher of the UNet, whose module is called as a flow."""

    def __init__(self, patcher: ModelPatcher) -> None:
        self.device, self.compute_dtype = patcher.device, patcher.compute_dtype
        self.model_options = patcher.model_options
        self._patcher = patcher

    @contextmanager
    def running(self, check: Callable[[], None] | None = None) -> Iterator[nn.Module]:
        with self._patcher.running(check) as module:
            yield NoiseModelAsFlow(module)


@dataclass(frozen=True, slots=True)
class _Model:
    """One column of the table."""

    title: str
    patcher: ModelPatcher
    facts: SamplingFacts


def main() -> None:
    """Render, check and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samplers, schedules = arguments.samplers.split(","), arguments.schedules.split(",")
    began = time.process_time()
    lines = list(tables(samplers, schedules, arguments.images))
    lines.append(f"\n{time.process_time() - began:.0f} CPU seconds")
    print("\n".join(lines))
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")


def tables(samplers: Sequence[str], schedules: Sequence[str], images: int) -> Iterator[str]:
    """Yield the lines of a Markdown table for each model."""
    with load_checkpoint(MODEL, device="cpu", threads=1) as loaded, torch.no_grad():
        loaded.to_gpu()
        engine, model = loaded._engine, loaded._model
        texts = {text: loaded.encode(text) for text in ("", *PROMPTS)}
        unet, vae = engine.patcher(model, Role.DIFFUSION_MODEL), engine.patcher(model, Role.VAE)
        facts, latent = engine._opened(model).checkpoint.family.sampling, engine.latent_facts(model)
        flow = replace(facts, prediction=Prediction.FLOW, noise=NoiseFacts(NoiseKind.FLOW))
        models = (
            _Model("noise-predicting UNet", unet, facts),
            _Model("flow", cast(ModelPatcher, _FlowPatcher(unet)), flow),
        )
        width, height = loaded.native_size
        for each in models:
            yield f"\nCorrect images of {images}, {each.title}:\n"
            yield "| sampler | order | " + " | ".join(schedules) + " |"
            yield "|---|---|" + "---|" * len(schedules)
            for sampler in samplers:
                counts: dict[str, str] = defaultdict(str)
                for schedule in schedules:
                    works = [_work(model, sampler, schedule, seed, width, height) for seed in range(images)]
                    counts[schedule] = _correct(works, each, texts, vae, latent)
                own = SAMPLERS[sampler].schedule
                cells = (f"**{counts[name]}**" if name == own else counts[name] for name in schedules)
                yield f"| {sampler} | {order(sampler)} | " + " | ".join(cells) + " |"
                print(sampler, dict(counts), flush=True)


def _work(model: Any, sampler: str, schedule: str, seed: int, width: int, height: int) -> SampleParams:
    return SampleParams(
        model,
        (),
        OutputShape(width, height),
        SamplingSchedule(STEPS.get(sampler, USUAL_STEPS), sampler, schedule),
        GuidanceParams(CFG_PLUS_PLUS if sampler.endswith("_cfg_pp") else USUAL_CFG),
        seed,
    )


def _correct(
    works: Sequence[SampleParams], model: _Model, texts: Mapping[str, Encoded], vae: ModelPatcher, latent: Any
) -> str:
    """Return how many images are correct; "-" for levels that the model does not have, "nan" for a run that ends in
    numbers that are not finite."""
    prompts = [PROMPTS[work.seed % len(PROMPTS)] for work in works]
    inputs = [TaskInputs({POSITIVE: texts[prompt], NEGATIVE: texts[""]}) for prompt in prompts]
    # the steps of one sampler follow from the error of all images of a run
    size = 1 if works[0].schedule.sampler == ADAPTIVE_SAMPLER else len(works)
    correct = 0
    for first in range(0, len(works), size):
        part = slice(first, first + size)
        try:
            sampled = sample_batch(works[part], inputs[part], model.patcher, latent, QUIET, facts=model.facts)
        except UnusableField:  # levels above those of the model
            return "-"
        except CorruptFile:
            return "nan"
        images = decode_batch([each for each in sampled if isinstance(each, Latent)], vae, latent, QUIET)
        found = [read_image(each.pixels_HWC) for each in images if isinstance(each, ImagePixels)]
        correct += sum(matches(each, prompt) for each, prompt in zip(found, prompts[part], strict=True))
    return str(correct)


def order(sampler: str) -> str:
    """Return the measured order of a sampler, without noise; "-" if its error does not fall."""
    coarse, fine = _error(sampler, COARSE), _error(sampler, FINE)
    measured = math.log2(coarse / fine) if fine > 0 and coarse > 0 else 0.0
    return f"{measured:.1f}" if measured > 0.2 else "-"


def _error(sampler: str, steps: int) -> float:
    """Return the largest error of `steps` steps that are even in the logarithm of sigma, in float64."""
    start = torch.linspace(-8, 8, 33, dtype=torch.float64)[None, None, None]
    sigmas = torch.logspace(math.log10(5.0), math.log10(0.1), steps + 1, dtype=torch.float64)
    model = toy.Recorded(toy.denoise)
    settings = SamplerSettings(eta=0.0, table=sd1_sigma_table(), unconditional=model.last)
    found = FUNCTIONS[sampler](
        model, start, sigmas, lambda: torch.zeros_like(start), lambda done, total: None, settings=settings
    )
    return float((found - toy.exact(start, 5.0, 0.1)).abs().max())


if __name__ == "__main__":
    main()
