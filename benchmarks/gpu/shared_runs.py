"""Part "gangs": tiny models of several families on all GPUs of the machine together, beside one GPU.

On a machine with one GPU, it says so. On other devices than CUDA, processes share runs over gloo.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from tests.pool.engine.gang.members import Wish, members
from tests.pool.families.tiny_relatives import ALL_FAMILIES

#: a family whose members divide tokens in attention to text and image, and one of videos
FAMILIES = ("flux_dev", "wan_t2v")
#: of the largest value; bfloat16 has 8 bits
TOLERANCE = 2e-2


def run(record: Record, setting: Setting) -> None:
    """Compare the latents of shared runs, and record how long they take."""
    count = torch.cuda.device_count() if setting.device == "cuda" else 2
    degrees = [degree for degree in (2, 4, 8) if degree <= count]
    if not degrees:
        record.skip("runs that several GPUs share", f"needs several GPUs, found {count}")
        return
    for name in FAMILIES:
        with record.attempting(name, least_seconds=60.0):
            folder = setting.work / name
            folder.mkdir()
            with members(degrees[-1], folder, ALL_FAMILIES[name], device=setting.device) as pool:
                alone = pool.alone(Wish(None))
                for degree in degrees:
                    pool.sample(Wish(None), range(degree))  # kernels and communicators
                    shared = pool.sample(Wish(None), range(degree))
                    errors = [each.error for each in (alone, *shared) if each.error]
                    if errors or alone.latent is None:
                        record.add(f"{name} on {degree} GPUs", goal="no error", is_met=False, note=errors[0])
                        continue
                    largest = float(np.abs(alone.latent).max())
                    off = max(float(np.abs(each.latent - alone.latent).max()) for each in shared) / largest
                    record.add(f"{name} on {degree} GPUs, difference", off, "of the largest value", 0.0,
                               f"up to {TOLERANCE:g}", off <= TOLERANCE)  # fmt: skip
                    seconds = max(each.seconds for each in shared)
                    record.add(f"{name} on {degree} GPUs, with meeting", seconds, "s", alone.seconds)
