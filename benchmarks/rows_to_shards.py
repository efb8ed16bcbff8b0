"""Rows of Parquet in, WebDataset shards on S3 out, with the driver killed midway: is each row output exactly once?

    python -m benchmarks.rows_to_shards [--rows 10000] [--shards 1000] [--steps 1] [--kills 1]

Runs `modelpool batch rows.parquet --out s3://... --shards N` against moto's S3 server over HTTP, kills the command with
SIGKILL when it has stored its part of the outputs, and runs it again until it ends by itself. Then reads all shards,
and counts how often each row is in them. Prints the counts and the times, and exits with 1 unless each is there once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import psutil

from modelpool.actors.outputs.objects import ObjectPrefix

SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "green", "blue", "yellow")
#: between two looks at the store
_LOOK_SECONDS = 0.2
#: until what a killed command has started must have ended by itself
_END_SECONDS = 10.0


@dataclass(slots=True)
class Trial:
    """What a trial has found.

    killed_at   numbers of listed outputs when the command was killed
    copies      how often each row is in the shards
    """

    killed_at: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    exit_code: int = -1
    copies: Counter[int] = field(default_factory=Counter)
    shard_rows: list[int] = field(default_factory=list)

    def is_exactly_once(self, rows: int) -> bool:
        """Whether each of `rows` is in the shards, once."""
        return self.copies == Counter(range(rows))


def write_rows(path: Path, rows: int, steps: int) -> None:
    """Write a Parquet file with `rows` different requests; the seed is the number of the row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [f"a {COLOURS[row % 4]} {SHAPES[row % 3]}" for row in range(rows)]
    table = pa.table({"prompt": prompts, "seed": list(range(rows)), "steps": [steps] * rows})
    pq.write_table(table, path, row_group_size=1000)


def run_trial(command: Sequence[str], url: str, rows: int, kills: int, environment: Mapping[str, str]) -> Trial:
    """Run `command`, which writes `rows` outputs in shards below `url`; kill it `kills` times, and let it end once."""
    trial = Trial()
    for kill in range(kills + 1):
        started = time.monotonic()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **environment}
            )
            if kill < kills:
                trial.killed_at.append(_kill_at(process, ObjectPrefix(url), rows * (kill + 1) // (kills + 1)))
            trial.exit_code = process.wait()
            if kill == kills and trial.exit_code:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-4000:])
        trial.seconds.append(round(time.monotonic() - started, 1))
    trial.shard_rows, trial.copies = _rows_in_shards(url)
    return trial


def _kill_at(process: subprocess.Popen[bytes], objects: ObjectPrefix, outputs: int) -> int:
    """Kill a process when it has stored so many outputs; return how many there are then. What it has started, and does
    not end by itself soon, is ended too.
    """
    while (found := _output_count(objects)) < outputs and process.poll() is None:
        time.sleep(_LOOK_SECONDS)
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, left = psutil.wait_procs(children, _END_SECONDS)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    return found


def _output_count(objects: ObjectPrefix) -> int:
    """Return about how many outputs are stored, in files and in the plans of shards."""
    sizes = objects.sizes()
    plans = {name: size for name, size in sizes.items() if name.startswith("shards/")}
    packed = sum(content.count(b"\n") for _, content in objects.read(plans))
    return packed + sum(name.endswith(".png") for name in sizes)


def _rows_in_shards(url: str) -> tuple[list[int], Counter[int]]:
    """Return the number of rows of each shard, and how often each row is in any, read as a user would."""
    sizes, copies = [], Counter[int]()
    system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    for path in sorted(system.glob(f"{root}/shard-*.tar")):
        with tarfile.open(fileobj=io.BytesIO(system.cat_file(path))) as tar:
            names = tar.getnames()
            entries = [json.loads(tar.extractfile(name).read()) for name in names if name.endswith(".json")]  # type: ignore[union-attr]
        images = {name.partition(".")[0] for name in names if name.endswith(".png")}
        assert images == {name.partition(".")[0] for name in names if name.endswith(".json")}, path
        sizes.append(len(entries))
        copies.update(entry["recipe"]["seed"] for entry in entries)
    return sizes, copies


@contextlib.contextmanager
def s3_bucket() -> Iterator[dict[str, str]]:
    """Run moto's S3 server with the bucket "bucket" in a process; yield the environment that leads there."""
    import socket

    import boto3

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with open(os.devnull, "wb") as nowhere:
        server = subprocess.Popen([sys.executable, "-c", code], stdout=nowhere, stderr=nowhere)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    os.environ.update(environment)
    try:
        for _ in range(300):
            with contextlib.suppress(Exception):
                boto3.client("s3").create_bucket(Bucket="bucket")
                break
            time.sleep(0.2)
        yield environment
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Run one trial, and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1)
    wanted = parser.parse_args()
    url = "s3://bucket/rows"
    with tempfile.TemporaryDirectory() as folder, s3_bucket() as environment:
        rows = Path(folder) / "rows.parquet"
        write_rows(rows, wanted.rows, wanted.steps)
        command = [sys.executable, "-m", "modelpool", "batch", str(rows), "--out", url, "--model", "shapes"]
        command += ["--shards", str(wanted.shards), "--device", "sim", "--gpus", "2"]
        trial = run_trial(command, url, wanted.rows, wanted.kills, environment)
    missing = sum(row not in trial.copies for row in range(wanted.rows))
    twice = sum(count > 1 for count in trial.copies.values())
    print(f"rows {wanted.rows}, killed at {trial.killed_at}, seconds of each run {trial.seconds}")
    print(f"shards {trial.shard_rows}; rows missing {missing}, more than once {twice}")
    sys.exit(0 if trial.is_exactly_once(wanted.rows) and trial.exit_code == 0 else 1)


if __name__ == "__main__":
    main()
