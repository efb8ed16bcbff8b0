"""The example model in plain diffusers, without modelpool: what the benchmarks compare a pool with.

Run as a program, it is the script that a diffusers user would write: one image, saved as a PNG.

    python benchmarks/bare_shapes.py FOLDER OUTPUT.png [--steps 8]

FOLDER is the model as a diffusers folder (`modelpool convert shapes --to diffusers --dtype fp32 --out FOLDER`).
Imports diffusers only in its functions, so that the measured time of a script includes the imports.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

#: settings of every image of the comparisons: those of the example's readme
GUIDANCE = 4.0
SIDE = 64


def open_pipeline(folder: str) -> Any:
    """Return the pipeline of a diffusers folder, on one CPU thread in float32, as a worker computes."""
    import diffusers
    import torch

    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any, prompts: Sequence[str], seeds: Sequence[int], steps: int, output: str = "np") -> Any:
    """Return the images of one call of the pipeline: an array [image, height, width, color], or with "pil" a list."""
    import torch

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    made: Any = pipeline(
        prompt=list(prompts),
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        width=SIDE,
        height=SIDE,
        generator=generators,
        output_type=output,
    )
    return made.images


def main() -> None:
    """Save one image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=8)
    wanted = parser.parse_args()
    draw(open_pipeline(wanted.folder), ["a red circle"], [1], wanted.steps, "pil")[0].save(wanted.output)


if __name__ == "__main__":
    main()
