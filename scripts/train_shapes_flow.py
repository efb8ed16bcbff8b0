"""Trains a small transformer on the example's images: python -m scripts.train_shapes_flow --out FOLDER/flow.safetensors

For `python -m benchmarks.cache_images`. The training itself is in `scripts.shapes_training.flow`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from scripts.shapes_training import evaluate, flow

SHAPES = Path("examples/shapes/models/shapes.safetensors")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=20261128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.process_time()

    def log(stage: str, step: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"{stage} step {step}: loss {loss:.4f}, {time.process_time() - began:.0f} CPU s", flush=True)

    model, encode = evaluate.load_model(SHAPES), ClipTokenizer.load().encode
    flow.save(flow.train(model, encode, options.images, options.steps, options.seed, log), options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, {time.process_time() - began:.0f} CPU s")


if __name__ == "__main__":
    main()
