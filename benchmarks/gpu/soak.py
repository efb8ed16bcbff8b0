"""Part "soak": many jobs over six models with changing memory, sizes, samplers and LoRAs; nothing may leak.

A day of a worker, compressed: tiny models, so that thousands of runs fit in a minute. The engine is opened again with
another random budget after some jobs, as after a change of what other programs use. A job may be refused because it
does not fit; any other failure fails the part. Memory is read at the same point of each round: with no weights on the
device and the allocator's cache emptied.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.full_size import FULL_SIZE, write_lora, write_model
from benchmarks.gpu.engine_jobs import EngineJobs, Extent, lora_ref, open_engine
from benchmarks.gpu.measurements import Record
from benchmarks.gpu.setting import Setting
from benchmarks.weights_loading import anonymous_bytes
from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.core.stage_params import Encoded, LoraRef

JOBS, JOBS_PER_ROUND = 2000, 100
MIB = 1 << 20
#: smallest and largest budget of a round, for what is planned
BUDGETS = (48 * MIB, 512 * MIB)
SIDES = (64, 96, 128)
SAMPLERS = ("euler", "dpmpp_2m", "euler_ancestral", "heun")
#: growth of memory from the second third of the rounds to the last one
MOST_GROWTH_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class Round:
    """Memory after a round of jobs.

    device_bytes  reserved by torch on the device, with no weights on it
    host_bytes    private memory of the process
    """

    device_bytes: int
    host_bytes: int


def run(record: Record, setting: Setting) -> None:
    """Run the jobs until they or the time of the part end."""
    chance = random.Random(5)
    names = list(FULL_SIZE)
    # a sixth model: the same file under another name is another model
    paths = [write_model(name, setting.work / name, small=True) for name in names]
    paths.append(write_model("sd15", setting.work / "again", small=True))
    loras = {
        path: [lora_ref(write_lora(path.parent / f"lora{n}.safetensors", path, seed=n), 0.5) for n in range(3)]
        for path in paths
    }
    rounds: list[Round] = []
    outcomes: Counter[str] = Counter()
    texts: dict[int, tuple[Encoded, ...]] = {}
    longest_seconds = 1.0
    probe = open_engine(setting.device)
    overhead_bytes = probe.introduce().overhead_bytes  # workspaces of libraries are in no plan
    probe.close()
    while sum(outcomes.values()) < JOBS and record.seconds_left > 3 + 2 * longest_seconds:
        engine = open_engine(setting.device, overhead_bytes + chance.randint(*BUDGETS))
        try:
            each = [EngineJobs(path, engine) for path in paths]
            for _ in range(JOBS_PER_ROUND):
                if record.seconds_left <= 3 + 2 * longest_seconds:
                    break
                number, started = chance.randrange(len(each)), time.perf_counter()
                outcomes[one_job(each[number], number, chance, loras[paths[number]], texts)] += 1
                longest_seconds = max(longest_seconds, time.perf_counter() - started)
            engine.vram.unload_all()
        finally:
            engine.close()
        del each
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        rounds.append(Round(torch.cuda.memory_reserved() if setting.device == "cuda" else 0, anonymous_bytes()))
    failed = {name: count for name, count in outcomes.items() if name not in ("done", "does not fit")}
    how = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    is_met = not failed and outcomes["done"] > 0
    record.add("jobs", sum(outcomes.values()), "", None, "none fails but for a lack of memory", is_met, how)
    if len(rounds) < 3:
        record.skip("growth of memory", f"only {len(rounds)} rounds")
        return
    for name, values in (
        ("reserved memory of the device", [each.device_bytes for each in rounds]),
        ("private host memory", [each.host_bytes for each in rounds]),
    ):
        growth, note = growth_bytes(values), f"{len(rounds)} rounds, at last {values[-1] / MIB:.0f} MiB"
        record.add(f"growth of {name}", growth / MIB, "MiB", None, f"at most {MOST_GROWTH_BYTES // MIB} MiB",
                   setting.met(growth <= MOST_GROWTH_BYTES), note)  # fmt: skip


def growth_bytes(values: Sequence[int]) -> float:
    """Return the growth from the second third of the rounds to the last one. The first third fills caches."""
    third = len(values) // 3
    return statistics.median(values[-third:]) - statistics.median(values[third : 2 * third])


def one_job(
    jobs: EngineJobs,
    number: int,
    chance: random.Random,
    loras: list[LoraRef],
    texts: dict[int, tuple[Encoded, ...]],
) -> str:
    """Run one image; returns how it ended, in words. `texts` keeps those of each model."""
    family_is_video = FULL_SIZE[jobs.model.name].frames > 0
    side = chance.choice(SIDES)
    extent = Extent(side, side, chance.randint(1, 3), 5 if family_is_video else 0)
    chosen = tuple(chance.sample(loras, chance.choice((0, 0, 1, 2))))
    try:
        if number not in texts or chance.random() < 0.1:
            texts[number] = jobs.texts()
        work = jobs.sample_work(extent, chosen, chance.randrange(1000), chance.choice(SAMPLERS))
        latent = jobs.sample(work, texts[number])
        jobs.decode(extent, latent)
    except DoesNotFit:
        return "does not fit"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:120]
    finally:
        jobs.costs.clear()
    return "done"
