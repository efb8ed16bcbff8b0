"""Measures what First Block Cache and TeaCache do to the images of a small transformer, and what they save.

    python -m scripts.train_shapes_flow --out FOLDER/flow.safetensors
    python -m benchmarks.cache_images --model FOLDER/flow.safetensors [--images 24] [--steps 20]

Samples the same images without a cache and with each setting, in this process, on the CPU, through the sampling stage
of the pool. An image is correct if the checker reads the colour and the shape of its prompt. PSNR is that to the images
without a cache, over all of them. Skipped are the calls of the model that ran the first block at most. TeaCache has the
coefficients of Flux, of whose kind the transformer is, but which were fitted to the published model. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.option_images import PROMPTS, SHAPES, psnr_decibels
from examples.shapes.checker import matches, read_image
from modelpool.actors.request.run_option_fields import parse_run_options
from modelpool.pool.engine.sampling_stage import sample_batch
from modelpool.pool.families.supported import running_families
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import (
    NO_OPTIONS,
    Encoded,
    GuidanceParams,
    Latent,
    ModelRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
)
from modelpool.pool.values.core.task_inputs import NEGATIVE, POSITIVE, TaskInputs
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from scripts.shapes_training import evaluate, flow

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    *({"fbcache": threshold} for threshold in (0.05, 0.1, 0.2, 0.3)),
    *({"teacache": threshold} for threshold in (0.25, 0.4, 0.6, 0.8)),
    {"fbcache": {"threshold": 0.2, "start": 0.3}},
)
FACTS = running_families()["flux_schnell"].sampling
LATENT = LatentFacts(4, 8, evaluate.LATENT_SCALE)
QUIET = RunHooks(lambda done, steps: None, lambda: False)
CFG = 3.0


def main() -> None:
    """Sample, check and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformer, shapes = flow.load(arguments.model), evaluate.load_model(SHAPES)
    contexts, pooled = flow.text_inputs(shapes, ["", *PROMPTS], ClipTokenizer.load().encode)
    texts = [Encoded(c.numpy(), p.numpy()) for c, p in zip(contexts, pooled, strict=True)]
    patcher = resident(transformer)
    print("| options | correct | PSNR dB | skipped calls | CPU seconds | ratio |")
    print("|---|---|---|---|---|---|")
    plain: Any = None
    for options in SETTINGS:
        latents, share, seconds = sampled(patcher, transformer, texts, options, arguments.images, arguments.steps)
        with torch.no_grad():
            decoded = shapes.vae.decode(torch.from_numpy(latents) / evaluate.LATENT_SCALE).sample.clamp(-1, 1)
        pixels = np.asarray(((decoded.permute(0, 2, 3, 1) + 1) * 127.5).round().to(torch.uint8))
        plain = (pixels, seconds) if plain is None else plain
        correct = sum(matches(read_image(image), PROMPTS[n % len(PROMPTS)]) for n, image in enumerate(pixels))
        cells = f"{correct} of {len(pixels)} | {psnr_decibels(pixels, plain[0]):.1f} | {share:.0%} | {seconds:.2f}"
        print(f"| {json.dumps(options) if options else 'none'} | {cells} | {seconds / plain[1]:.2f} |", flush=True)


def resident(module: nn.Module) -> ModelPatcher:
    """Return a patcher of `module` with all weights on the CPU."""
    form = WeightForm(torch.float32)
    patcher = ModelPatcher.of(ComponentKey("flow"), Role.DIFFUSION_MODEL, module, torch.device("cpu"), form)
    patcher.realize(WeightsTarget(frozenset(each.name for each in patcher.modules()), patcher.patches))
    return patcher


def sampled(
    patcher: ModelPatcher, module: nn.Module, texts: list[Encoded], options: dict[str, Any], images: int, steps: int
) -> tuple[Any, float, float]:
    """Return the latents of all images, the share of calls that skipped the last block, and the CPU seconds of one
    image."""
    calls = {"model": 0, "last": 0}

    def counter(name: str) -> Any:
        def count(*_: object) -> None:
            calls[name] += 1

        return count

    plain: Any = module
    hooks = [
        plain.x_embedder.register_forward_hook(counter("model")),
        plain.single_transformer_blocks[-1].proj_out.register_forward_hook(counter("last")),
    ]
    found, seconds = [], 0.0
    for seed in range(images):
        work = SampleParams(
            ModelRef("flow", "flow", ""),
            (),
            OutputShape(64, 64),
            SamplingSchedule(steps, "euler", "simple"),
            GuidanceParams(CFG),
            seed,
            options=parse_run_options(options) or NO_OPTIONS,
        )
        inputs = TaskInputs({POSITIVE: texts[1 + seed % len(PROMPTS)], NEGATIVE: texts[0]})
        before = time.process_time()
        (latent,) = sample_batch((work,), (inputs,), patcher, LATENT, QUIET, facts=FACTS)
        seconds += time.process_time() - before
        assert isinstance(latent, Latent), "a complete run"
        found.append(latent.samples_CHW)
    for hook in hooks:
        hook.remove()
    return np.stack(found), 1 - calls["last"] / calls["model"], seconds / images


if __name__ == "__main__":
    main()
