"""Decodes over workers, through the whole pool. Real Ray, a tiny LTX-Video on the CPU.

Proves: a tiled decode in parts on three workers, with a worker killed in the middle, has the bytes of one run on one
engine, and parts are tasks that all workers take.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from modelpool import ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.controller import Controller
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import DecodeParams, Latent, OutputShape, VideoFrames
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.whole_transformer import Whole

pytestmark = [pytest.mark.ray, pytest.mark.nightly(usually="tests/pool/engine/test_decode_parts.py")]

LATENTS, CELLS = 4, (8, 33, 4, 4)


def videos(pool: ModelPool, latents: list[Latent], frames: int | None, kills: bool = False) -> list[bytes]:
    """The frames of all `latents`, decoded at once; with `kills`, a worker ends with the first video."""
    begun = [pool.decode(latent, model="tiny", vae_frames=frames) for latent in latents]
    found: list[bytes] = []
    for one in begun:
        video = one.result()
        assert isinstance(video, VideoFrames)
        assert video.frames_THWC.shape == (257, 128, 128, 3)
        found.append(video.frames_THWC.tobytes())
        if kills and len(found) == 1:
            victim = next(iter(pool._connection.call(Controller.memory_reports).values()))
            os.kill(victim.pid, signal.SIGKILL)
    return found


def test_parts_on_three_workers_have_the_bytes_of_one_run_although_one_is_killed(tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES["ltxv"])
    drawn = np.random.default_rng(3)
    latents = [Latent(drawn.standard_normal(CELLS).astype(np.float32)) for _ in range(LATENTS)]
    work = DecodeParams(whole.model, OutputShape(128, 128, 257, 24.0), tile_frames=65)
    alone = [whole.run(work, latent) for latent in latents]
    expected = [video.frames_THWC.tobytes() for video in alone if isinstance(video, VideoFrames)]
    whole.engine.close()
    config = PoolConfig().override(device="cpu", vram="256MiB", models=[tmp_path])
    with ModelPool.start(config, workers=3, name="parts") as pool:
        pool.wait_ready(200)
        assert videos(pool, latents, 65) == expected
        runs = [worker.runs for worker in pool.status().workers]
        assert sum(runs) == 5 * LATENTS, f"four parts and a join of each: {runs}"
        assert min(runs) > 0, f"all workers take parts: {runs}"
        assert videos(pool, latents[:1], None) != expected[:1], "without tiles"
        drawn_again = [Latent(latent.samples_CHW[:, ::-1].copy()) for latent in latents]
        before = videos(pool, drawn_again[:1], 65)
        assert videos(pool, [drawn_again[0], *latents], 65, kills=True) == [*before, *expected]
        end = time.monotonic() + 120
        while pool.status().restarts == 0 and time.monotonic() < end:  # others may have made the rest by now
            time.sleep(0.1)
        assert pool.status().restarts == 1
        with pytest.raises(UserError, match=r"^vae_tile: found 60, expected"):
            pool.decode(latents[0], model="tiny", vae_tile=60)
