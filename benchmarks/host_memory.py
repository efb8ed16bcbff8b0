"""Measures the host memory of the workers of one node for the same weights, as reported by the kernel.

Writes a random checkpoint in the SD1 layout to a temporary folder, loads its diffusion model in every worker, and
compares PSS (shared pages divided by the number of processes that map them) with RSS. Run from the repository:
`python -m benchmarks.host_memory`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.control.controller import Controller
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

MIB = 1 << 20
#: about 230 million parameters
UNET = layouts.LdmUnet(model_channels=160, context_width=32)


def main(worker_count: int = 4) -> None:
    """Measure and print a row for RESULTS.md."""
    with tempfile.TemporaryDirectory() as folder:
        layout = {
            **layouts.ldm_unet(UNET),
            **layouts.ldm_vae(layouts.TINY_VAE),
            **layouts.hf_clip(layouts.TINY_CLIP),
        }
        path = write_tiny_checkpoint(Path(folder) / "large.safetensors", layout=layout)
        settings = {"device": "sim", "workers": worker_count, "vram": "2GiB", "models": [folder], "loras": []}
        with ModelPool.start(**settings) as pool:
            pool.wait_ready(300)
            empty = pool._connection.call(Controller.memory_reports).values()
            requests = [
                GenerateRequest(model="large", prompt="x", seed=s, steps=1, cfg=1, width=64, height=64)
                for s in range(4 * worker_count)
            ]
            pool.submit(requests, output=False).wait(600)
            loads = [any("diffusion_model" in name for name in worker.resident) for worker in pool.status().workers]
            assert all(loads), f"a worker did not load the diffusion model: {loads}"
            loaded = pool._connection.call(Controller.memory_reports).values()
        file_mib = path.stat().st_size / MIB
    pss_mib, rss_mib = (sum(getattr(r, f"weights_{kind}_bytes") for r in loaded) / MIB for kind in ("pss", "rss"))
    own_mib = (sum(r.anonymous_bytes for r in loaded) - sum(r.anonymous_bytes for r in empty)) / MIB
    print("| workers | weights file, MiB | PSS of its mappings, MiB | RSS, MiB | copies | simulated VRAM, MiB |")
    print("|---|---|---|---|---|---|")
    copies = pss_mib / file_mib
    print(f"| {worker_count} | {file_mib:.0f} | {pss_mib:.0f} | {rss_mib:.0f} | {copies:.2f} | {own_mib:.0f} |")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
