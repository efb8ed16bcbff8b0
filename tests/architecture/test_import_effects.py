"""Importing does nothing: no output, no thread, no device, no environment, no signal handler, no random state."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture.source_tree import ROOT, product_modules

# Third-party packages come first: what they do when imported is theirs, and is over when ours are watched.
WATCHED_IMPORT = """
import importlib, json, os, random, signal, sys, threading
import diffusers, numpy, PIL.Image, pydantic, ray, rich.live, torch, transformers, typer

def world():
    return {
        "environment": dict(os.environ),
        "threads": sorted(t.name for t in threading.enumerate()),
        "cuda": torch.cuda.is_initialized(),
        "torch_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "random": hash(random.getstate()),
        "numpy_random": hash(numpy.random.get_state()[1].tobytes()),
        "torch_random": hash(torch.get_rng_state().numpy().tobytes()),
        "signals": {n: str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)},
        "ray": ray.is_initialized(),
        "folder": sorted(os.listdir(".")),
    }

before = world()
changes = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    after = world()
    if after != before:
        changes[name] = [key for key in before if before[key] != after[key]]
        before = after
sys.stdout.flush()
print("CHANGES " + json.dumps(changes))
"""


@pytest.mark.slow
def test_importing_every_module_changes_nothing(tmp_path) -> None:
    names = [m.name for m in product_modules("pool", "scheduler", "actors")] + ["modelpool"]
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", WATCHED_IMPORT, json.dumps(names)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "CHANGES {}\n"
    ours = [line for line in done.stderr.splitlines() if str(ROOT) in line]
    assert not ours, done.stderr
