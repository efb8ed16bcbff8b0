"""Measures what options of a run do to the images of the shapes model, and what they cost or save.

    python -m benchmarks.option_images [--images 12] [--steps 20] [--device cpu]

Renders the same requests without options and with each setting, as one job file of the command `modelpool batch`. An
image is correct if the checker reads the colour and the shape of its prompt. The difference is the mean over all pixels
and channels, of 255, to the image without options, and PSNR the same in decibels, of the mean square. The operations of
the model and its CPU time are those of sampling one image in this process. Prints a Markdown table. The shapes model is
a UNet; `benchmarks.cache_images` measures the caches of transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from examples.shapes.checker import matches, read_image
from modelpool.actors.request.run_option_fields import parse_run_options
from modelpool.pool.engine.sampling_stage import sample_batch
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import (
    NO_OPTIONS,
    Encoded,
    GuidanceParams,
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

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ROOT / "examples" / "shapes" / "models" / "shapes.safetensors"
PROMPTS = ("a red circle", "a green square", "a blue triangle", "a yellow circle", "a red square", "a green triangle")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"deepcache": 2},
    {"deepcache": 3},
    {"deepcache": 5},
    {"deepcache": {"interval": 3, "layers": 0}},
    {"deepcache": {"interval": 3, "start": 0.3}},
    {"freeu": True},
    {"pag": 1},
    {"pag": 3},
    {"sag": True},
    {"rescale_cfg": 0.7},
    {"hypertile": {"tile": 32}},
)


def main() -> None:
    """Render, check and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        jobs = folder / "jobs.jsonl"
        lines = [
            {"prompt": PROMPTS[seed % len(PROMPTS)], "steps": arguments.steps, "seed": seed, "options": options}
            for options in SETTINGS
            for seed in range(arguments.images)
        ]
        jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["batch", str(jobs), "--model", "shapes", "--out", str(folder / "images"), "--json"]
        made = subprocess.run(
            [sys.executable, "-m", "modelpool", *command, "--device", arguments.device],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        ends = sorted((json.loads(line) for line in made.stdout.splitlines()), key=lambda end: int(end["index"]))
        print_table(ends, arguments.images, [cost(options, arguments.steps) for options in SETTINGS])


def cost(options: dict[str, Any], steps: int) -> tuple[float, float]:
    """Return the floating point operations of sampling one image, in billions, and its CPU seconds."""
    module = open_checkpoint(SHAPES).build(Role.DIFFUSION_MODEL).module
    key = ComponentKey("shapes")
    patcher = ModelPatcher.of(key, Role.DIFFUSION_MODEL, module, torch.device("cpu"), WeightForm(torch.float32))
    patcher.realize(WeightsTarget(frozenset(each.name for each in patcher.modules()), patcher.patches))
    work = SampleParams(
        ModelRef("shapes", str(SHAPES), ""),
        (),
        OutputShape(64, 64),
        SamplingSchedule(steps, "euler", "normal"),
        GuidanceParams(5.0),
        seed=0,
        options=parse_run_options(options) or NO_OPTIONS,
    )
    texts = np.random.default_rng(0).standard_normal((2, 77, 32), np.float32)
    inputs = TaskInputs({POSITIVE: Encoded(texts[0]), NEGATIVE: Encoded(texts[1])})
    hooks = RunHooks(lambda done, steps: None, lambda: False)

    def run() -> None:
        sample_batch((work,), (inputs,), patcher, LatentFacts(4, 8, 0.18215), hooks)

    run()
    with FlopCounterMode(display=False) as counter:
        run()
    times = []
    for _ in range(3):
        before = time.process_time()
        run()
        times.append(time.process_time() - before)
    return counter.get_total_flops() / 1e9, min(times)


def print_table(ends: list[dict[str, Any]], images: int, costs: list[tuple[float, float]]) -> None:
    """Print a line for each setting; `ends` are in the order of the requests, the first ones without options."""
    pixels = [_pixels(end) for end in ends]
    by_setting: dict[int, list[int]] = defaultdict(list)
    for place in range(len(ends)):
        by_setting[place // images].append(place)
    print("| options | correct | difference | PSNR dB | operations | CPU seconds |")
    print("|---|---|---|---|---|---|")
    for setting, places in by_setting.items():
        correct = sum(matches(read_image(pixels[place]), ends[place]["prompt"]) for place in places)
        distances = [np.abs(pixels[p].astype(float) - pixels[p % images].astype(float)).mean() for p in places]
        name = json.dumps(SETTINGS[setting]) if SETTINGS[setting] else "none"
        (billions, seconds), (plain, _) = costs[setting], costs[0]
        psnr = psnr_decibels(np.stack([pixels[p] for p in places]), np.stack([pixels[p % images] for p in places]))
        cells = f"{np.mean(distances):.2f} | {psnr:.1f} | {billions / plain:.2f} | {seconds:.2f}"
        print(f"| {name} | {correct} of {images} | {cells} |")


def psnr_decibels(pixels: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """Return the peak signal-to-noise ratio of 8-bit images to `reference`; infinite for equal ones."""
    mean_square = np.mean((pixels.astype(float) - reference.astype(float)) ** 2)
    return float(10 * np.log10(255.0**2 / mean_square)) if mean_square else float("inf")


def _pixels(end: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with Image.open(ROOT / str(end["path"])) as opened:
        return np.asarray(opened.convert("RGB"))


if __name__ == "__main__":
    main()
