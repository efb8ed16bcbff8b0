"""Generates many images of a few prompts, each with a different seed, on the available GPUs.

.venv/bin/python examples/driver.py            two simulated GPUs if there is no real one
"""

from pathlib import Path

from modelpool import GenerateRequest, ModelPool

CONFIG = Path(__file__).parents[1] / "configs" / "laptop.toml"
PROMPTS = ("a red circle", "a blue square", "a green triangle")


def main() -> None:
    """Start a pool, submit requests, and print each image as it finishes."""
    with ModelPool.start(CONFIG) as pool:
        jobs = pool.submit(
            GenerateRequest(model="shapes", prompt=prompt, seed=seed, loras=[("light", 0.8)])
            for prompt in PROMPTS
            for seed in range(4)
        )
        for image in jobs:
            print(f"{image.path}  {image.pil.size}  seed {image.seed}  {image.worker}  {image.seconds:.1f} s")
        summary = jobs.summary()
    resident = sum(task.resident for task in summary.tasks)
    print(f"{summary.succeeded} images in {summary.seconds:.1f} s; ", end="")
    print(f"{resident} of {len(summary.tasks)} tasks found their weights on the GPU")


if __name__ == "__main__":
    main()
