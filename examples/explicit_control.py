"""One model in your own hands: what is on the GPU is what you put there. No Ray, no pool.

.venv/bin/python examples/explicit_control.py [MODEL.safetensors "a prompt"]

from the repository. Without arguments it is the shipped model; where there is no real GPU, on a simulated one.
"""

import sys
import threading
from pathlib import Path

import numpy as np

from modelpool.pool import LoadedModel, Stopped, load_checkpoint

SHAPES = Path(__file__).parent / "shapes" / "models" / "shapes.safetensors"
STEPS = 6


def main(path: str = str(SHAPES), prompt: str = "a red circle") -> None:
    """Move a model there and back, in whole and in part; make the same image at three residencies; stop one."""
    with load_checkpoint(path, device="auto") as model:
        print(f"{Path(path).name} on {model.device_name}")
        there_and_back(model)
        three_residencies(model, prompt)
        stopped_from_a_thread(model, prompt)


def there_and_back(model: LoadedModel) -> None:
    """The free memory of the GPU before, between and after: the last figure is the first."""
    print(f"on host       {model.free_bytes():>15,} bytes free")
    model.to_gpu()
    print(f"on GPU        {model.free_bytes():>15,} bytes free")
    model.to_cpu()
    print(f"back on host  {model.free_bytes():>15,} bytes free")


def three_residencies(model: LoadedModel, prompt: str) -> None:
    """All weights on the GPU, about half of the diffusion model's, none: what is not there streams while it is used."""
    unet = model.diffusion_model
    images = []
    for name, bytes_wanted in (("all", unet.size_bytes), ("half", unet.size_bytes // 2), ("none", 0)):
        if bytes_wanted < unet.resident_bytes:
            unet.partially_unload(unet.resident_bytes - bytes_wanted)
        else:
            unet.partially_load(bytes_wanted - unet.resident_bytes)
        images.append(model.generate(prompt, steps=STEPS, seed=7))
        print(f"{name:<5} {unet.resident_bytes:>12,} of {unet.size_bytes:,} bytes resident: {images[-1].shape} pixels")
    print("the same image each time:", all(np.array_equal(images[0], other) for other in images[1:]))


def stopped_from_a_thread(model: LoadedModel, prompt: str) -> None:
    """`cancel` ends the run that is under way; the next one runs as if nothing had been."""

    def stop_after_two(done: int, steps: int) -> None:
        if done == 2:
            thread = threading.Thread(target=model.cancel)
            thread.start()
            thread.join()

    try:
        model.generate(prompt, steps=STEPS, seed=7, on_step=stop_after_two)
    except Stopped:
        print("stopped after 2 steps;", end=" ")
    pixels = model.generate(prompt, steps=STEPS, seed=7)
    print(f"the next run goes to its end: {pixels.shape} pixels")


if __name__ == "__main__":
    main(*sys.argv[1:3])
