"""Counts which samplers and schedules render correct images: the shapes model, its own checker, usual steps.

    python -m benchmarks.sampler_images [--images 4] [--device cpu] [--out FOLDER]

Renders every sampler with its default schedule, and every schedule with Euler and DPM++ 2M, as one batch with the
command `modelpool batch`. An image is correct if the checker reads the colour and the shape of its prompt. Prints a
Markdown table of the shares. The shapes model is a noise-predicting UNet of the kind of Stable Diffusion 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from examples.shapes.checker import matches, read_image
from modelpool.pool.sampling.names import SAMPLERS, SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("a red circle", "a green square", "a blue triangle", "a yellow circle", "a red square", "a green triangle")
#: steps at which people use a sampler
STEPS = {"lcm": 8, "tcd": 8, "restart": 24, "dpm_adaptive": 20}
USUAL_STEPS = 20
#: CFG++ takes the noise without guidance, and so needs a scale near 1
USUAL_CFG, CFG_PLUS_PLUS = 5.0, 1.5
#: published levels of models that are not of the kind of SD1
OTHER_MODELS = {"ays_sdxl", "ays_svd"}


def main() -> None:
    """Render, check and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = folder / "jobs.jsonl"
        jobs.write_text("".join(json.dumps(job) + "\n" for job in requests(arguments.images)))
        command = ["batch", str(jobs), "--model", "shapes", "--out", str(folder / "images"), "--json"]
        command += ["--device", arguments.device]
        made = subprocess.run(
            [sys.executable, "-m", "modelpool", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        )
        print_table([json.loads(line) for line in made.stdout.splitlines()])


def requests(images: int) -> list[dict[str, object]]:
    """Return the requests: `images` of each pair of sampler and schedule."""
    pairs = [(name, SAMPLERS[name].schedule) for name in SAMPLERS]
    schedules = sorted(SCHEDULES.keys() - OTHER_MODELS)
    pairs += [(sampler, schedule) for schedule in schedules for sampler in ("euler", "dpmpp_2m")]
    return [
        {
            "prompt": PROMPTS[seed % len(PROMPTS)],
            "sampler": sampler,
            "schedule": schedule,
            "steps": STEPS.get(sampler, USUAL_STEPS),
            "cfg": CFG_PLUS_PLUS if sampler.endswith("_cfg_pp") else USUAL_CFG,
            "seed": seed,
        }
        for sampler, schedule in dict.fromkeys(pairs)
        for seed in range(images)
    ]


def print_table(images: list[dict[str, object]]) -> None:
    """Print the share of correct images of each pair."""
    correct, count = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for image in images:
        recipe = image["recipe"]
        assert isinstance(recipe, dict)
        pair = recipe["sampler"], recipe["schedule"]
        with Image.open(ROOT / str(image["path"])) as opened:
            correct[pair] += matches(read_image(np.asarray(opened)), recipe["prompt"])
        count[pair] += 1
    print("| sampler | schedule | correct |")
    print("|---|---|---|")
    for sampler, schedule in sorted(count):
        print(f"| {sampler} | {schedule} | {correct[sampler, schedule]} of {count[sampler, schedule]} |")


if __name__ == "__main__":
    main()
