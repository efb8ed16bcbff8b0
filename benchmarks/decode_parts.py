"""Measures a large tiled decode on pools of one and of several CPU workers, in turns.

    python -m benchmarks.decode_parts [--workers 1,2] [--size 2048x1024] [--tile 512] [--turns 3] [--threads 1]

Prints a Markdown table: medians of the seconds from the call to the image, and whether all bytes are equal. The model
is that of the shapes example; each worker computes with `--threads` threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

CONFIG = Path(__file__).parents[1] / "configs" / "laptop.toml"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--size", default="2048x1024")
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", default="1")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = given.threads  # of the workers, which start later

    from modelpool import ModelPool
    from modelpool.pool.values.core.stage_params import ImagePixels, Latent

    width, height = map(int, given.size.split("x"))
    drawn = np.random.default_rng(0)
    seconds: dict[int, list[float]] = {count: [] for count in map(int, given.workers.split(","))}
    with ExitStack() as opened:
        pools = {
            count: opened.enter_context(
                ModelPool.start(CONFIG, device="cpu", workers=count, vram="1GiB", name=f"parts-{count}")
            )
            for count in seconds
        }
        for pool in pools.values():
            pool.wait_ready(300)
        found: list[set[bytes]] = []
        for turn in range(given.turns + 1):
            latent = Latent(drawn.standard_normal((4, height // 8, width // 8)).astype(np.float32))
            found.append(set())
            for count, pool in pools.items():
                began = time.perf_counter()
                image = pool.decode(latent, model="shapes", vae_tile=given.tile).result()
                if turn:  # the first one loads the weights
                    seconds[count].append(time.perf_counter() - began)
                assert isinstance(image, ImagePixels)
                found[-1].add(image.pixels_HWC.tobytes())
    first = statistics.median(next(iter(seconds.values())))
    print(
        f"{given.size}, tiles of {given.tile}, {given.turns} turns; bytes equal: {all(len(one) == 1 for one in found)}"
    )
    print("\n| workers | s | times |\n| --- | --- | --- |")
    for count, taken in seconds.items():
        print(f"| {count} | {statistics.median(taken):.2f} | {first / statistics.median(taken):.2f} |")


if __name__ == "__main__":
    main()
