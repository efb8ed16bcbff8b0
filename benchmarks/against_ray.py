"""Compares the pool with Ray's methods for many models on few workers: Serve's multiplexing and Data's actor pool.

    python -m benchmarks.against_ray [--workers 2,4] [--requests N] [--rounds N] [--systems NAME,...]
        [--load-ms X] [--step-ms X] [--clients N] [--set KEY=VALUE ...]
    pip install -c constraints.txt -e .[benchmarks]        # Serve and Data need more than the pool does

All systems run the same trace: requests for 12 models, distributed by Zipf's law. A worker has room for three of them.
A load waits for 0.2 s and a run for 0.02 to 0.08 s, or for `--load-ms` and one to four times `--step-ms`, with the same
functions in every system. 64 clients, or `--clients`, each send their next request after a response. The complete trace
runs twice: a cold pass and a warm one. Data gets the trace as one batch, cold, including the start of its actors, and
is compared with the pool when it gets the complete trace at once. `--set` sets keys of the pool's scheduler, such as
`upload_ahead=false`. Each race has separate processes and a separate Ray on loopback. Systems take turns; each figure
is the median of the rounds, with minimum and maximum.

A load is counted when a model's bytes are copied to a worker, completely or in part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from benchmarks.ray_trace import LOAD_SECONDS, OUTSTANDING, ROOM_MODELS, STEP_SECONDS, Waits, trace
from benchmarks.spread import spread

OURS, BATCH = "modelpool", "modelpool-batch"
RACED = (OURS, "serve", "serve-64", "serve-64-overlap", "serve-64-overlap-2", BATCH, "data", "data-by-model")
#: longer than any wait for the replica that has the model: Serve then uses another replica only if none has it
PATIENT = {"RAY_SERVE_MULTIPLEXED_MODEL_ID_MATCHING_TIMEOUT_S": "60"}
#: what a system needs besides the pool's packages
PACKAGES: Mapping[str, tuple[str, ...]] = {"modelpool": (), "serve": ("fastapi",), "data": ("pyarrow", "pandas")}
MARK = "race: "
RACE_SECONDS = 600


def systems(
    requests: int, clients: int = OUTSTANDING, settings: Mapping[str, object] = MappingProxyType({})
) -> dict[str, dict[str, object]]:
    """Return the compared systems by name: the arguments of `ray_systems.System`. `settings` are keys of the pool's
    scheduler."""
    serve = {"kind": "serve", "environment": {}, "options": {}, "outstanding": clients}
    data = {"kind": "data", "environment": {}, "options": {"batch": 4}}
    ours = {"kind": "modelpool", "environment": {}, "options": dict(settings), "outstanding": clients}
    return {
        OURS: {**ours, "words": "modelpool"},
        "serve": {
            **serve,
            "words": f"Serve, {ROOM_MODELS} models per replica, default settings (5 concurrent requests)",
        },
        "serve-overlap": {
            **serve,
            "words": "Serve, default settings, loads overlap runs",
            "options": {"overlap": 1},
        },
        "serve-16": {**serve, "words": "Serve, 16 concurrent requests", "options": {"ongoing": 16}},
        "serve-64": {**serve, "words": "Serve, 64 concurrent requests", "options": {"ongoing": 64}},
        "serve-patient": {
            **serve,
            "words": "Serve, 5 concurrent requests, waits for the model's replica",
            "environment": PATIENT,
        },
        "serve-patient-16": {
            **serve,
            "words": "Serve, 16 concurrent requests, waits for the model's replica",
            "environment": PATIENT,
            "options": {"ongoing": 16},
        },
        "serve-64-overlap": {
            **serve,
            "words": "Serve, 64 concurrent requests, loads overlap runs",
            "options": {"ongoing": 64, "overlap": 1},
        },
        "serve-64-overlap-2": {
            **serve,
            "words": "Serve, 64 concurrent requests, loads overlap runs, 2 models per replica",
            "options": {"ongoing": 64, "overlap": 1, "models": 2},
        },
        BATCH: {**ours, "words": "modelpool, all requests submitted at once", "outstanding": requests},
        "data": {**data, "words": "Data, actor pool, in the order of the trace"},
        "data-by-model": {**data, "words": "Data, actor pool, sorted by model first", "by_model": True},
    }


def main() -> None:
    """Run all races and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=",".join(RACED))
    parser.add_argument("--load-ms", type=float, default=LOAD_SECONDS * 1e3)
    parser.add_argument("--step-ms", type=float, default=STEP_SECONDS * 1e3)
    parser.add_argument("--clients", type=int, default=OUTSTANDING)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the pool's scheduler")
    parser.add_argument("--race", nargs=2, metavar=("SYSTEM", "WORKERS"), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.race:
        race_here(wanted, wanted.race[0], int(wanted.race[1]))
        return
    names = wanted.systems.split(",")
    known = systems(wanted.requests)
    needed = dict.fromkeys(package for name in names for package in PACKAGES[str(known[name]["kind"])])
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        parser.error(f"{', '.join(missing)} missing: pip install -c constraints.txt -e .[benchmarks]")
    for workers in map(int, wanted.workers.split(",")):
        found: dict[str, list[list[dict[str, float | None]]]] = {name: [] for name in names}
        for _ in range(wanted.rounds):
            for name in names:
                found[name].append(race(name, workers, wanted, known[name]["environment"]))
                print(f"{name} {workers}: {found[name][-1]}", file=sys.stderr, flush=True)
        print(table(workers, wanted, {str(known[name]["words"]): found[name] for name in names}), flush=True)


def race(name: str, workers: int, wanted: argparse.Namespace, environment: object) -> list[dict[str, float | None]]:
    """Run one race in a new process; return its passes. Raises RuntimeError if it fails."""
    assert isinstance(environment, dict)
    arguments = ["--race", name, str(workers), "--requests", str(wanted.requests), "--clients", str(wanted.clients)]
    arguments += ["--load-ms", str(wanted.load_ms), "--step-ms", str(wanted.step_ms), "--set", *wanted.set]
    command = [sys.executable, "-m", "benchmarks.against_ray", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=RACE_SECONDS, check=False
    )
    told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not told:
        raise RuntimeError(f"{name} with {workers} workers did not finish:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [json.loads(line) for line in told]


def race_here(wanted: argparse.Namespace, name: str, workers: int) -> None:
    """Run one race in this process; print a line for each pass."""
    from benchmarks.ray_systems import System, one_race

    waits = Waits(wanted.load_ms / 1e3, wanted.step_ms / 1e3)
    arguments = systems(wanted.requests, wanted.clients, settings_of(wanted.set))[name]
    requests = trace(wanted.requests, step_seconds=waits.step_seconds)
    for one in one_race(System(**arguments), workers, requests, waits):
        print(MARK + json.dumps(one.as_json()), flush=True)


def settings_of(texts: Sequence[str]) -> dict[str, object]:
    """Return the keys and values of a configuration file's lines."""
    return tomllib.loads("\n".join(texts))


def table(workers: int, wanted: argparse.Namespace, found: dict[str, list[list[dict[str, float | None]]]]) -> str:
    """Return the passes of all systems as a Markdown table."""
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    lines = [
        f"{workers} workers, {wanted.requests} requests, {wanted.clients} clients, load {wanted.load_ms:g} ms, step "
        f"{wanted.step_ms:g} ms, {' '.join(wanted.set) or 'default settings'}; {os.cpu_count()} cores, load average "
        f"{load}:",
        "",
        "| system | pass | loads | requests per second | p50 s | p99 s |",
        "|---|---|---|---|---|---|",
    ]
    for words, rounds in found.items():
        for number, name in enumerate(("cold", "warm")):
            passes = [passes[number] for passes in rounds if number < len(passes)]
            if not passes:
                continue
            cells = [
                spread([p[key] for p in passes], digits)
                for key, digits in (("loads", 0), ("requests_per_second", 1), ("p50_seconds", 2), ("p99_seconds", 2))
            ]
            lines.append(f"| {words} | {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
