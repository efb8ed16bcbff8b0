"""Reads mutated job files, manifests, requests and recipes: each must be used or refused with one typed error.

    python -m benchmarks.mutations [--count 10000] [--seed 0]

Starts from valid input, changes bytes (flips, cuts, repeats, spliced tokens) or JSON values (other types, extreme
numbers, deep lists, missing and unknown keys), and reads it as the command line does. Prints for each kind how many
were refused, and the growth of memory, threads and open files. Exits with 1 if anything but a UserError was raised.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from modelpool.actors.cli.run.job_file import MAX_MESSAGE, read_job_file
from modelpool.actors.graph.features.recipe import Recipe, RecipeControl, RecipeImages, RecipeLora, RecipeRegion
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.folder import MANIFEST_NAME, FinishedOutput, OutputFolder
from modelpool.actors.outputs.image_file import PARAMETERS_KEY, RECIPE_KEY, encode_png, read_parameters, read_recipe
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import ImagePixels

#: bytes that are spliced in: what parsers, numbers and file systems stumble over
TOKENS = (
    *(b"[" * 100_000, b'{"a":' * 5_000, b"9" * 5_000, b"1e999", b"-1e999", b"NaN", b"Infinity", b"-0", b"\xff\xfe"),
    *(
        b"\\ud800",
        b"\0",
        b"\r",
        b"\n",
        b"\n\n",
        b'"',
        b"\\",
        b",",
        b"}",
        b"]",
        b"null",
        b"true",
        b"../../x",
        b"\xef\xbb\xbf",
    ),
)
#: values that replace a value in JSON
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        1e308,
        2**63,
        2**64,
        -(2**70),
        10**400,
        "",
        "x" * 10_000,
        "../../etc/passwd",
        "\0",
    ),
    *("\u202e", [], {}, [[]], [None] * 40, {"a": {"b": [1]}}, ["light:0.5"], "light:nan", "1:2:3:4:5", "0,0,1,1=x"),
)
#: as the A1111 web UI writes them
PARAMETERS = b'a, b\nSteps: 2, C: "x, y", Size: 1x1'
RECIPE = Recipe(
    model="shapes",
    model_sha256="0" * 64,
    prompt="a red circle",
    negative="blurry",
    loras=(RecipeLora("light", "1" * 64, 0.5), RecipeLora("thick", "2" * 64, 1.0, "low")),
    steps=20,
    cfg=5.0,
    sampler="euler",
    schedule="normal",
    width=64,
    height=64,
    seed=7,
    versions={"modelpool": "0.1.0"},
    pictures=RecipeImages(
        hires={"scale": 2.0, "strength": 0.5, "steps": None, "via": "latent"},
        controls=(RecipeControl("canny", "3" * 64, "4" * 64, "edges.png", 1.0, 0.0, 1.0),),
        regions=(RecipeRegion("a star", 1.0, (0, 0, 8, 8), ""),),
    ),
)
REQUEST: Mapping[str, Any] = {
    "model": "shapes",
    "prompt": "a red circle",
    "loras": ["light:0.5", {"name": "thick", "strength": 1}],
    "steps": 20,
    "cfg": 5.0,
    "sampler": "euler",
    "width": 64,
    "height": 64,
    "seed": 7,
    "hires": {"scale": 2, "strength": 0.5},
    "regions": [{"prompt": "a star", "box": [0, 0, 8, 8]}],
    "decoder": "b:10:1.1",
    "low_noise": "3:0.9",
    "priority": 1,
    "deadline": "10m",
}


@dataclass(frozen=True, slots=True)
class Count:
    """The result of one kind of input: how many were read, how many of them were refused, and the tracebacks of what
    must not happen.
    """

    name: str
    read: int
    refused: int
    mistakes: tuple[str, ...]


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return `content` with one to three random changes."""
    for _ in range(rng.randint(1, 3)):
        begin = rng.randrange(len(content) + 1)
        end = min(len(content), begin + rng.choice((1, 1, 2, 8, 100)))
        match rng.randrange(5):
            case 0:
                changed = bytes(byte ^ (1 << rng.randrange(8)) for byte in content[begin:end])
                content = content[:begin] + changed + content[end:]
            case 1:
                content = content[:begin] + content[end:]
            case 2:
                content = content[:begin] + content[begin:end] * rng.choice((2, 3, 50)) + content[end:]
            case 3:
                content = content[:begin] + rng.choice(TOKENS) + content[end:]
            case 4:
                content = content[:begin]
    return content


def mutated_value(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value with one value in it replaced, removed or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        match rng.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {(f"{name}x" if name == key else name): item for name, item in value.items()}
            case _:
                return {**value, key: mutated_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], mutated_value(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)


class Mutations:
    """Reads mutated input in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._out = folder / "out"
        pixels = np.zeros((8, 8, 3), np.uint8)
        out = OutputFolder(self._out)
        for seed in range(3):
            out.write(FinishedOutput(replace(RECIPE, seed=seed), ImagePixels(pixels), seed, "job", "gpu-0", 1.0))
        self._manifest = (self._out / MANIFEST_NAME).read_bytes()
        self._png = encode_png(pixels, RECIPE)
        self._edges = str(folder / "edges.png")
        Image.fromarray(pixels).save(self._edges)
        lines = [json.dumps({**REQUEST, "seed": seed}) for seed in range(3)]
        self._jobs = {".jsonl": "\n".join(lines).encode(), ".csv": b"prompt,steps,loras\na,3,light:0.5\nb,4,\n"}
        self._recipe = json.loads(json.dumps(RECIPE.as_json()))

    def job_file(self, rng: random.Random) -> bool:
        """Read a job file; return whether it, or a line of it, was refused."""
        ending = rng.choice(sorted(self._jobs))
        path = self._folder / f"jobs{ending}"
        path.write_bytes(mutated_bytes(self._jobs[ending], rng))
        jobs = read_job_file(path, {"model": "shapes"})
        assert all(len(line.message) <= MAX_MESSAGE for line in jobs.broken), "a message quotes all that it refuses"
        return bool(jobs.broken)

    def manifest(self, rng: random.Random) -> bool:
        """Read an output folder with a mutated manifest; return whether a line was refused."""
        lines = self._manifest.splitlines(keepends=True)
        place = rng.randrange(len(lines))
        if rng.random() < 0.5:
            lines[place] = json.dumps(mutated_value(json.loads(lines[place]), rng)).encode() + b"\n"
        else:
            lines[place] = mutated_bytes(lines[place], rng)
        (self._out / MANIFEST_NAME).write_bytes(b"".join(lines))
        out = OutputFolder(self._out)
        out.finished()
        list(out.damaged())
        if rng.random() < 0.05:  # slower than the rest together
            out.contact_sheet()
            out.repair_manifest()
        return out.damaged_line_count > 0

    def request(self, rng: random.Random) -> bool:
        """Build a request from mutated fields."""
        fields = mutated_value(dict(REQUEST), rng)
        if isinstance(fields, dict):  # otherwise the reader of the line refuses it
            GenerateRequest(**fields)
        return not isinstance(fields, dict)

    def recipe(self, rng: random.Random) -> bool:
        """Read a mutated recipe, and the request that it leads to."""
        requests_of(recipe_from_json(mutated_value(self._recipe, rng)), lambda name: self._edges)
        return False

    def image(self, rng: random.Random) -> bool:
        """Read the texts of a mutated PNG."""
        path = self._folder / "image.png"
        if rng.random() < 0.5:
            path.write_bytes(mutated_bytes(self._png, rng))
        else:  # with correct checksums
            texts = PngImagePlugin.PngInfo()
            recipe = json.dumps(mutated_value(self._recipe, rng))
            texts.add_text(RECIPE_KEY, mutated_bytes(recipe.encode(), rng).decode("latin-1")[:10_000].replace("\0", ""))
            texts.add_text(
                PARAMETERS_KEY, mutated_bytes(b'a, b\nSteps: 2, C: "x, y", Size: 1x1', rng).decode("latin-1")
            )
            Image.new("RGB", (8, 8)).save(path, pnginfo=texts)
        read_recipe(path)
        read_parameters(path)
        return False

    def kinds(self) -> tuple[Callable[[random.Random], bool], ...]:
        """Return the readers of all kinds."""
        return (self.job_file, self.manifest, self.request, self.recipe, self.image)


def run(read: Callable[[random.Random], bool], count: int, seed: int) -> Count:
    """Read `count` mutations; every one has its own seed."""
    refused, mistakes = 0, []
    for number in range(count):
        rng = random.Random(f"{seed} {read.__name__} {number}")
        try:
            refused += read(rng)
        except UserError:
            refused += 1
        except Exception:
            mistakes.append(f"{read.__name__} {number} of seed {seed}:\n{traceback.format_exc()}")
    return Count(read.__name__, count, refused, tuple(mistakes))


def resources() -> tuple[int, int, int]:
    """Return the memory of this process in KiB, its threads and its open files. Memory and files are those of Linux."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024, threading.active_count(), files


def main() -> int:
    """Run the benchmark from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="mutations of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        mutations = Mutations(Path(folder))
        for read in mutations.kinds():
            run(read, min(200, arguments.count), arguments.seed)  # until caches and libraries are loaded
            before = resources()
            count = run(read, arguments.count, arguments.seed)
            grown = [after - earlier for after, earlier in zip(resources(), before, strict=True)]
            print(
                f"{count.name}: {count.read} read, {count.refused} refused, {len(count.mistakes)} other errors; "
                f"memory +{grown[0]} KiB, threads +{grown[1]}, files +{grown[2]}"
            )
            for text in count.mistakes[:3]:
                print(text, file=sys.stderr)
            failed = failed or bool(count.mistakes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
