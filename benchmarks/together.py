"""Measures the gain of batching tasks of one kind: seconds per task by batch size.

    python -m benchmarks.together [--device cpu] [--threads 1] [--repeats 5] [--sides 64,128,256] [--steps 8]

Prints a Markdown table for the shapes model. Batch sizes take turns, so that other load on the machine affects all of
them; each figure is the median of the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

import numpy as np

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    DecodeParams,
    Encoded,
    EncodeParams,
    GuidanceParams,
    Latent,
    OutputShape,
    Result,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    StageParams,
    stage_of,
    task_id,
)
from modelpool.pool.values.core.task_inputs import LATENT, NEGATIVE, POSITIVE
from modelpool.pool.values.specs.spec import Role, Stage, TaskSpec

MODELS = Path(__file__).parents[1] / "examples" / "shapes" / "models"
ROLES = {Stage.ENCODE: Role.TEXT_ENCODER, Stage.SAMPLE: Role.DIFFUSION_MODEL, Stage.DECODE: Role.VAE}
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
COUNTS = (1, 2, 4, 8)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sides", default="64,128,256")
    parser.add_argument("--steps", type=int, default=8)
    wanted = parser.parse_args()
    catalog = Catalog([MODELS], [], wanted.device)
    engine = Engine.open(EngineSettings(wanted.device, threads=wanted.threads))
    name = engine.introduce().device_name
    print(f"{name}, {wanted.threads} threads, load {os.getloadavg()[0]:.1f}, {wanted.steps} steps\n")
    print("| milliseconds per task | " + " | ".join(f"batch of {count}" for count in COUNTS) + " | gain at 8 |")
    print("|---|" + "---|" * (len(COUNTS) + 1))
    sides = [int(side) for side in wanted.sides.split(",")]
    kinds = [(Stage.ENCODE, 0), *itertools.product((Stage.SAMPLE, Stage.DECODE), sides)]
    for stage, side in kinds:
        members = members_of(catalog, stage, side, wanted.steps)
        print(row(f"{stage.value} {f'{side}x{side}' if side else ''}", engine, members, wanted.repeats), flush=True)
    engine.close()


def members_of(catalog: Catalog, stage: Stage, side: int, steps: int) -> list[BatchMember]:
    """Return as many tasks of one kind as the largest batch has, each with separate inputs."""
    model, random = catalog.find_model("shapes"), np.random.default_rng(1)
    members = []
    for number in range(max(COUNTS)):
        work: StageParams
        inputs: dict[str, Result] = {}
        match stage:
            case Stage.ENCODE:
                work = EncodeParams(model, (), f"a red circle and {number} blue squares")
            case Stage.SAMPLE:
                work = SampleParams(
                    model,
                    (),
                    OutputShape(side, side),
                    SamplingSchedule(steps, "euler", "normal"),
                    GuidanceParams(4.0),
                    number,
                )
                texts = random.normal(size=(2, 77, 32)).astype(np.float32)
                inputs = {POSITIVE: Encoded(texts[0]), NEGATIVE: Encoded(texts[1])}
            case Stage.DECODE:
                work = DecodeParams(model, OutputShape(side, side))
                inputs = {LATENT: Latent(random.normal(size=(4, side // 8, side // 8)).astype(np.float32))}
        use = catalog.use(model, ROLES[stage], (), steps if stage is Stage.SAMPLE else 1)
        (whole, *_) = catalog.execution_modes(model, work, (77, 77))
        task = TaskSpec(task_id(work, {}), stage_of(work), (use,), whole.activation_bytes, 1.0)
        members.append(BatchMember(task, work, inputs, QUIET))
    return members


def row(name: str, engine: Engine, members: list[BatchMember], repeats: int) -> str:
    """Return a row of the table. The first round is a warm-up."""
    seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
    for repeat, count in itertools.product(range(repeats + 1), COUNTS):
        started = time.perf_counter()
        outcomes = engine.run_batch(members[:count])
        ended = time.perf_counter()
        for outcome in outcomes:
            assert not isinstance(outcome, Exception), outcome
            assert outcome[1].batched == count, f"a batch of {outcome[1].batched} instead of {count}"
        if repeat:
            seconds[count].append((ended - started) / count)
    medians = [statistics.median(seconds[count]) for count in COUNTS]
    cells = [f"{1000 * median:.1f}" for median in medians]
    return f"| {name} | {' | '.join(cells)} | {medians[0] / medians[-1]:.2f} |"


if __name__ == "__main__":
    main()
