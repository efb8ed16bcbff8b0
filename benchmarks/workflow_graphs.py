"""Measures what the graph of a workflow costs: CPU time to parse its fields and to build its tasks, after the first.

    python -m benchmarks.workflow_graphs [--turns 30] [--profile]

The catalog is a real one with the tiny models of the golden workflows. The workflow has 60 nodes: 2 texts, 15 sampling
runs of two models, 15 decodings, 14 encodings, and 14 operations. Each turn has a seed of its own, and a text of its
own in every second one. Process time of one thread; nothing else should run, though other work changes it little.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from modelpool import GenerateRequest, PoolConfig
from modelpool.actors.control.cached_catalog import CachedCatalog
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.graph.build_graph import build_graph
from modelpool.pool.values.specs.spec import JobId
from tests.actors.golden_steps import write_models

SIDE, RUNS = 64, 15


def nodes(prompt: str) -> dict[str, Any]:
    """Return the nodes: each run starts from the result of the one before it, decoded, changed and encoded."""
    found: dict[str, Any] = {
        "positive": {"kind": "text", "model": "one", "prompt": prompt},
        "negative": {"kind": "text", "model": "one", "prompt": "blurred"},
    }
    for run in range(RUNS):
        model = ("one", "two")[run % 2]
        request = {"model": model, "steps": 8, "cfg": 4.0, "sampler": "euler", "schedule": "normal"}
        inputs = {"positive": "positive", "negative": "negative"} if model == "one" else {}
        request |= {} if inputs else {"prompt": prompt}
        sample: dict[str, Any] = {"kind": "sample", "request": request, "inputs": inputs}
        if run:
            operation = {"name": "image_scale", "settings": {"width": SIDE, "height": SIDE, "method": "bicubic"}}
            found[f"o{run}"] = {"kind": "operation", "inputs": {"image": f"d{run - 1}"}, **operation}
            found[f"e{run}"] = {"kind": "encode", "model": model, "inputs": {"image": f"o{run}"}}
            inputs["latent"] = f"e{run}"
            sample["strength"] = 0.6
        else:
            request |= {"width": SIDE, "height": SIDE}
        found[f"s{run}"] = sample
        found[f"d{run}"] = {"kind": "decode", "model": model, "inputs": {"latent": f"s{run}"}}
    return found


def main() -> None:
    """Measure and print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="write workflow_graphs.prof of the turns")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="workflow-graphs-") as folder:
        models = Path(folder) / "models"
        write_models(models)
        config = PoolConfig.load(Path("configs/laptop.toml")).override(device="cpu", models=[models], workers=1)
        opened: Any = plan_pool(config, gpu_count=0, can_grow=False).open_catalog()
        catalog: Any = CachedCatalog(opened)
        parsing, building, first = [], [], 0.0
        profile = cProfile.Profile()
        for turn in range(wanted.turns + 1):
            graph = {"nodes": nodes(f"a cat {turn // 2}"), "output": f"d{RUNS - 1}"}
            if wanted.profile and turn:
                profile.enable()
            began = time.process_time()
            request = GenerateRequest(workflow=graph, seed=turn)
            parsed = time.process_time()
            build_graph(request, JobId(f"job-{turn}"), catalog)
            built = time.process_time()
            profile.disable()
            if turn:
                parsing.append(1e3 * (parsed - began))
                building.append(1e3 * (built - parsed))
            else:
                first = built - began
        count = len(graph["nodes"])
    if wanted.profile:
        profile.dump_stats("workflow_graphs.prof")
    print(f"first workflow: {first:.2f} s; {wanted.turns} turns after it, minimum and median")
    for name, times in (("parse", parsing), ("build", building)):
        print(f"{name}, {count} nodes: {min(times):.2f} ms, {statistics.median(times):.2f} ms")


if __name__ == "__main__":
    main()
