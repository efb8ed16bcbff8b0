"""Controls the GPU residency of one model explicitly, without Ray and without a pool.

Run from the repository; without arguments it uses the shipped model, and without a real GPU a simulated one:

.venv/bin/python examples/explicit_control.py [MODEL.safetensors "a prompt"]
"""

import sys
import threading
from pathlib import Path

import numpy as np

from modelpool.pool import LoadedModel, Stopped, load_checkpoint

SHAPES = Path(__file__).parent / "shapes" / "models" / "shapes.safetensors"
STEPS = 6


def main(path: str = str(SHAPES), prompt: str = "a red circle") -> None:
    """Move a model to the GPU and back, generate the same image at three residencies, and stop a run."""
    with load_checkpoint(path, device="auto") as model:
        print(f"{Path(path).name} on {model.device_name}")
        there_and_back(model)
        three_residencies(model, prompt)
        stopped_from_a_thread(model, prompt)


def there_and_back(model: LoadedModel) -> None:
    """Print the free GPU memory before, during and after residency: the last figure equals the first."""
    print(f"on host       {model.free_bytes():>15,} bytes free")
    model.to_gpu()
    print(f"on GPU        {model.free_bytes():>15,} bytes free")
    model.to_cpu()
    print(f"back on host  {model.free_bytes():>15,} bytes free")


def three_residencies(model: LoadedModel, prompt: str) -> None:
    """Generate with all, about half and none of the diffusion model resident; the rest streams during use."""
    unet = model.diffusion_model
    images = []
    for name, bytes_wanted in (("all", unet.size_bytes), ("half", unet.size_bytes // 2), ("none", 0)):
        if bytes_wanted < unet.resident_bytes:
            unet.partially_unload(unet.resident_bytes - bytes_wanted)
        else:
            unet.partially_load(bytes_wanted - unet.resident_bytes)
        images.append(model.generate(prompt, steps=STEPS, seed=7))
        print(f"{name:<5} {unet.resident_bytes:>12,} of {unet.size_bytes:,} bytes resident: {images[-1].shape} pixels")
    print("all images are equal:", all(np.array_equal(images[0], other) for other in images[1:]))


def stopped_from_a_thread(model: LoadedModel, prompt: str) -> None:
    """Stop the current run with `cancel`; the next run is not affected."""

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
    print(f"the next run completes: {pixels.shape} pixels")


if __name__ == "__main__":
    main(*sys.argv[1:3])
