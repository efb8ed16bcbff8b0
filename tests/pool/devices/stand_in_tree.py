"""Copies the source tree so that the product's code for CUDA runs on the simulated device: `torch.cuda` becomes
`stand_in_cuda`, and comparisons with the device type "cuda" hold for "sim", too.

Each replacement must be found: code that changes so that one is not makes the copy fail by name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.source_tree import ROOT

#: what the tests for GPUs and the benchmark need
COPIED = ("actors", "benchmarks", "modelpool", "pool", "scheduler", "tests", "pyproject.toml")
#: files that know both devices, or neither
LEFT = (
    "pool/devices/sim/",
    "pool/devices/kind_names.py",
    "pool/devices/capabilities.py",
    "pool/devices/detection.py",
    "pool/values/",
    "tests/pool/devices/",
)
CHANGED = ("pool", "tests/gpu", "tests/pool/pipeline.py", "benchmarks/gpu")
STAND_IN = "stand_in_cuda"
#: sides of matrices in the tests that keep a GPU busy, and what they become
LARGE, SMALL = (4096, 4608, 8192), 64
#: in every file of these: pattern and replacement
USUAL = (
    (r'device\.type == "cuda"', 'device.type in ("cuda", "sim")'),
    (r'device\.type != "cuda"', 'device.type not in ("cuda", "sim")'),
    (r'device_type != "cuda"', 'device_type not in ("cuda", "sim")'),
    (r'device == "cuda" and', 'device in ("cuda", "sim") and'),
    (r'torch\.device\("cuda", \w+\)', 'torch.device("sim", 0)'),
    (r'device="cuda:0"', 'device="sim:0"'),
    (r'torch\.device\(name, 0\) if name == "cuda"', 'torch.device("sim", 0) if name == "cuda"'),
    (r"torch\.device\(kind, 0\)", 'torch.device("sim" if kind == "cuda" else kind, 0)'),
    (r'torch\.device\("cuda"\)', 'torch.device("sim", 0)'),
    (r"torch\.cuda\b", STAND_IN),
)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A change of one file."""

    path: str
    old: str
    new: str


ONCE = (
    Replacement(
        "pool/devices/kind_names.py",
        'KindFacts("Nvidia GPU (CUDA)", "cuda")',
        'KindFacts("Nvidia GPU (CUDA)", "sim")',
    ),
    # the driver of the stand-in pins nothing, and torch's for CPUs cannot
    Replacement("pool/devices/pinned_memory.py", "dtype=torch.uint8, pin_memory=True)", "dtype=torch.uint8)"),
    Replacement("pool/devices/pinned_memory.py", ', pin_memory=device.type in ("cuda", "sim"))', ")"),
    Replacement(
        "pool/devices/pinned_memory.py",
        "(host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)",
        "host.to(device, non_blocking=True)",
    ),
    Replacement("pool/devices/copy_streams.py", "lend=_lend,", f"lend={STAND_IN}.checker.lend,"),
    Replacement(
        "pool/devices/torch_api/torch_private.py",
        'clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)',
        "from tests.pool.devices.stand_in_cuda import free_workspaces as clear",
    ),
    Replacement("benchmarks/gpu/transfers.py", ', pin_memory=device.type in ("cuda", "sim"))', ")"),
    # another process has a stand-in of its own
    Replacement(
        "benchmarks/gpu/device_facts.py", 'held = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device="cuda")\n', ""
    ),
    Replacement("benchmarks/gpu/device_facts.py", f'{STAND_IN}.synchronize()\nprint("held"', 'print("held"'),
    # private calls of torch for CUDA, which a build for CPUs lacks
    Replacement("pool/devices/device_kinds.py", f"if module is {STAND_IN}:", "if True:"),
    Replacement("pool/devices/torch_modules.py", "None if torch.version.hip else", ""),
)


def make_tree(target: Path) -> Path:
    """Copy the tree to `target` and change the copy. Raises ValueError that names a replacement which is not found."""
    target.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
            )
        else:
            shutil.copy(source, target / name)
    for path in (target / "tests" / "gpu").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(rf"\b({'|'.join(map(str, LARGE))})\b", str(SMALL), text), encoding="utf-8")
    found = {pattern: 0 for pattern, _ in USUAL}
    for path in _changed(target):
        text = path.read_text(encoding="utf-8")
        for pattern, new in USUAL:
            text, count = re.subn(pattern, new, text)
            found[pattern] += count
        if STAND_IN in text:
            line = f"from tests.pool.devices import {STAND_IN}"
            text = re.sub(r"(?m)^import torch$", rf"\g<0>\n{line}", text, count=1)
        path.write_text(text, encoding="utf-8")
    for each in ONCE:
        path = target / each.path
        text = path.read_text(encoding="utf-8")
        if each.old not in text:
            raise ValueError(f"{each.path}: found no {each.old!r}, expected it for the stand-in")
        path.write_text(text.replace(each.old, each.new), encoding="utf-8")
    missing = [pattern for pattern, count in found.items() if not count]
    if missing:
        raise ValueError(f"found nothing to replace of {missing}, expected each for the stand-in")
    return target


def _changed(target: Path) -> Iterator[Path]:
    for name in CHANGED:
        place = target / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if not path.relative_to(target).as_posix().startswith(LEFT):
                yield path
