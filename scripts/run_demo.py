"""Runs the demo: a batch with the real command, then a check of each image with the example's own checker.

Replaces outputs/demo. Exits with 0 only if every image was generated and listed, enough of them match their prompt and
LoRAs, and weights were loaded for few of the tasks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

JOBS = Path("examples/demo.jsonl")
OUTPUT = Path("outputs/demo")
#: memory of a simulated GPU: just enough for the complete example model
SIMULATED_VRAM = "64MiB"
FEWEST_RIGHT = 8
RIGHT_SHARE = 0.75


def main() -> int:
    """Run the demo; return its exit code."""
    shutil.rmtree(ROOT / OUTPUT, ignore_errors=True)
    command = ["batch", str(JOBS), "--model", "shapes", "--out", str(OUTPUT), *device_options(), "--json"]
    print(f"$ modelpool {' '.join(command)}", file=sys.stderr, flush=True)
    made = subprocess.run(
        [sys.executable, "-m", "modelpool", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    images = [json.loads(line) for line in made.stdout.splitlines()]
    complaints = [f"the command ended with exit code {made.returncode}"] if made.returncode else []
    complaints += what_is_wrong(images)
    for complaint in complaints:
        print(f"demo: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def device_options() -> list[str]:
    """Return the options for up to two CUDA GPUs, or two simulated ones with little memory."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        return ["--device", "cuda", "--gpus", str(min(2, gpus))]
    return ["--device", "sim", "--gpus", "2", "--vram", SIMULATED_VRAM]


def what_is_wrong(images: list[dict[str, Any]]) -> list[str]:
    """Check the results against the job file, the files on disk and the checker; return complaints."""
    complaints = []
    wanted = len((ROOT / JOBS).read_text().splitlines())
    if len(images) != wanted:
        complaints.append(f"{len(images)} images were generated, expected {wanted}")
    listed = (ROOT / OUTPUT / "manifest.jsonl").read_text().splitlines() if images else []
    if len(listed) != wanted:
        complaints.append(f"the manifest lists {len(listed)} images, expected {wanted}")
    if not (ROOT / OUTPUT / "contact_sheet.png").is_file():
        complaints.append("the contact sheet is missing")
    right = count_right(images)
    print(f"{right} of {len(images)} images match their prompt and LoRAs", file=sys.stderr)
    if right < max(FEWEST_RIGHT, RIGHT_SHARE * wanted):
        complaints.append(f"{right} correct images are too few")
    tasks = [task for image in images for task in image["tasks"] if not task["shared"]]
    # a pass of several images loads once for all of them
    loads = sum((not task["resident"]) / task["batched"] for task in tasks)
    print(f"weights were loaded {loads:.0f} times for {len(tasks)} tasks", file=sys.stderr)
    if 3 * loads > len(tasks):
        complaints.append("weights were loaded for too many tasks")
    return complaints


def count_right(images: Iterable[Mapping[str, Any]]) -> int:
    """Count the images that match their request; print the others."""
    import numpy as np
    from PIL import Image

    from examples.shapes.checker import matches, read_image

    right = 0
    for image in images:
        loras = {lora["name"] for lora in image["recipe"]["loras"]}
        with Image.open(ROOT / image["path"]) as opened:
            reading = read_image(np.asarray(opened))
        background = "light" if "light" in loras else "dark"
        correct = matches(reading, image["prompt"]) and reading.background == background
        if correct and reading.filled == ("outline" not in loras):
            right += 1
        else:
            print(f"wrong: {image['path']}: {reading}", file=sys.stderr)
    return right


if __name__ == "__main__":
    sys.exit(main())
