"""Calls that could cost others more than they cost their caller, beside one who works: what does that one notice?

    python -m benchmarks.http_attacks
    python -m benchmarks.http_attacks --only prompt --seconds 5

Runs `modelpool serve` with the model of shapes on the CPU, in processes of its own and on loopback. Each kind of call
is repeated by some connections for some seconds; meanwhile another caller asks for `GET /` and submits jobs of two
steps. The memory is that of the server, the controller and their other processes, without workers. At the end, SIGINT
is sent during the last kind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: an answer that takes longer counts as none
ANSWER_SECONDS = 60.0
_SAMPLER = {
    "model": ["1", 0], "seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "normal",
    "positive": ["3", 0], "negative": ["4", 0], "latent_image": ["5", 0], "denoise": 1.0,
}  # fmt: skip


def graph(**nodes: Any) -> dict[str, Any]:
    """A workflow with further nodes."""
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "shapes"}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red circle", "clip": ["1", 1]}},
        "4": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["1", 1]}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "6": {"class_type": "KSampler", "inputs": _SAMPLER},
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 2]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "x"}},
        **nodes,
    }


def combined(kind: str, first: str, second: str, rounds: int) -> dict[str, Any]:
    """A workflow in which each node takes the one before twice."""
    nodes = {
        f"c{place}": {
            "class_type": kind,
            "inputs": {name: [f"c{place - 1}" if place else "3", 0] for name in (first, second)},
        }
        for place in range(rounds)
    }
    nodes["6"] = {"class_type": "KSampler", "inputs": {**_SAMPLER, "positive": [f"c{rounds - 1}", 0]}}
    return graph(**nodes)


def previews(count: int) -> dict[str, Any]:
    """A workflow with many outputs of one image."""
    node = {"class_type": "PreviewImage", "inputs": {"images": ["7", 0]}}
    return graph(**{f"p{place}": node for place in range(count)})


def request(prompt: str = "x", **fields: Any) -> dict[str, Any]:
    """A request of a job of two steps."""
    return {"model": "shapes", "prompt": prompt, "steps": 2, "cfg": 1.0, **fields}


def text(number: int, length: int) -> str:
    """A prompt of a length that no other number gives, of different words."""
    words = (f"{(number * 7919 + place) * 2654435761 % (1 << 24):x}" for place in range(length // 6))
    return " ".join(words)[:length]


def posted(path: str, value: Callable[[int], Any], headers: str = "") -> Callable[[int], bytes]:
    """Calls of a path with JSON bodies, by their number."""
    return lambda number: head(path, json.dumps(value(number)).encode(), headers)


def head(path: str, body: bytes, headers: str = "") -> bytes:
    """One call."""
    about = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}"
    return f"POST {path} HTTP/1.1\r\n{about}\r\n".encode() + body


def fixed(content: bytes) -> Callable[[int], bytes]:
    """The same call, whatever its number."""
    return lambda number: content


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls of one kind, and how many connections make them."""

    calls: Callable[[int], bytes]
    connections: int = 4


JOBS, COMFY, A1111 = "/api/jobs", "/prompt", "/sdapi/v1/txt2img"
FORM = b"POST /v1/images/edits HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %s\r\nContent-Length: 30000000\r\n\r\n"
KINDS: dict[str, Kind] = {
    "nothing": Kind(fixed(b"GET /prompt HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"), 1),
    "outputs of one image": Kind(posted(COMFY, lambda n: {"prompt": previews(980)})),
    "255 outputs of one image": Kind(posted(COMFY, lambda n: {"prompt": previews(255)})),
    "combined with itself": Kind(
        posted(COMFY, lambda n: {"prompt": combined("ConditioningCombine", "conditioning_1", "conditioning_2", 25)})
    ),
    "concatenated with itself": Kind(
        posted(COMFY, lambda n: {"prompt": combined("ConditioningConcat", "conditioning_to", "conditioning_from", 25)})
    ),
    "prompt of 2 MB": Kind(posted(JOBS, lambda n: request("a " * 1_000_000))),
    "prompt within the bound": Kind(posted(JOBS, lambda n: request(text(n, 65_000))), 16),
    "brackets": Kind(posted(JOBS, lambda n: request("((a)b" * 13_000 + str(n))), 16),
    "many long prompts": Kind(posted(JOBS, lambda n: [request(text(n * 100 + i, 60_000)) for i in range(100)]), 8),
    "LoRAs": Kind(posted(JOBS, lambda n: request(loras=["x:1"] * 20_000)), 32),
    "LoRA tags": Kind(posted(A1111, lambda n: {"prompt": "<lora:x:1>" * 20_000}), 32),
    "100 LoRAs in 4,000 requests": Kind(posted(JOBS, lambda n: [request(loras=["x:1"] * 100)] * 4000), 4),
    "objects": Kind(fixed(head(JOBS, b"[" + b"{}," * 20_000_000 + b"{}]"))),
    "400,000 objects": Kind(fixed(head(JOBS, b"[" + b"{}," * 400_000 + b"{}]")), 16),
    "a long text": Kind(fixed(head(JOBS, json.dumps(request(image="A" * 50_000_000)).encode()))),
    "a long text with a key": Kind(
        fixed(head(JOBS, json.dumps(request(image="A" * 50_000_000)).encode(), "Idempotency-Key: k\r\n"))
    ),
    "sizes": Kind(
        posted(JOBS, lambda n: [request(width=64 + 8 * (n * 50 + i) % 512, height=64 + 8 * i) for i in range(50)]), 8
    ),
    "spaces in a model": Kind(posted("/sdapi/v1/options", lambda n: {"sd_model_checkpoint": f"a{' ' * 900_000}b"})),
    "words of a LoRA": Kind(posted(JOBS, lambda n: request(loras=[f"light:te=x{' ' * 60_000}x"] * 90)), 8),
    "digits of a LoRA": Kind(posted(JOBS, lambda n: request(loras=[f"light:{'1' * 60_000}x"] * 90)), 8),
    "ids to remove": Kind(posted("/queue", lambda n: {"delete": [str(place) for place in range(100_000)]}), 8),
    "boundaries": Kind(fixed(FORM % b"multipart/form-data; boundary=b" + b"\r\n--" * 7_500_000)),
    "fields of a form": Kind(fixed(FORM % b"application/x-www-form-urlencoded" + b"a&" * 15_000_000)),
    "the queue": Kind(fixed(b"GET /queue HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"), 8),
    "the history": Kind(fixed(b"GET /history?max_items=-1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"), 8),
    "nodes": Kind(fixed(b"GET /object_info HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"), 8),
}  # fmt: skip


@dataclass
class Noticed:
    """What the caller who works has noticed, and what the others were answered."""

    page_seconds: list[float] = field(default_factory=list)
    accept_seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)


async def answered(port: int, content: bytes) -> tuple[str, bytes]:
    """Make one call on a connection of its own; return its status and the beginning of its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        sending = asyncio.create_task(writer.drain())
        first = await asyncio.wait_for(reader.read(2000), ANSWER_SECONDS)
        sending.cancel()
        if not first:
            return "none", b""
        return first.split(b" ", 2)[1].decode(), first.partition(b"\r\n\r\n")[2]
    finally:
        writer.transport.abort()


async def repeat(port: int, kind: Kind, place: int, until: float, noticed: Noticed) -> None:
    """Make calls of one kind until a time of the monotonic clock."""
    number = place
    while time.monotonic() < until:
        try:
            status, body = await answered(port, kind.calls(number))
            noticed.statuses[status] += 1
            if status.startswith("5"):
                noticed.failures.append(f"{status} {body[:100]!r}")
        except OSError as problem:
            noticed.statuses[type(problem).__name__] += 1
        number += kind.connections


async def work(port: int, until: float, noticed: Noticed) -> None:
    """Ask for the page and submit jobs of two steps."""
    number = int(time.time() * 1000)
    while time.monotonic() < until:
        number += 1
        job = head(JOBS, json.dumps(request(f"a red circle {number}", seed=number)).encode())
        page = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for content, expected, seconds in (
            (page, "200", noticed.page_seconds),
            (page, "200", noticed.page_seconds),
            (job, "201", noticed.accept_seconds),
        ):  # fmt: skip
            began = time.monotonic()
            try:
                status, body = await answered(port, content)
                if status != expected:
                    noticed.failures.append(f"{status} {body[:100]!r}")
            except OSError as problem:
                noticed.failures.append(repr(problem))
            seconds.append(time.monotonic() - began)
        await asyncio.sleep(0.05)


def family(pid: int) -> list[int]:
    """A process and its children, at any distance."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError, IndexError):
                stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(stat[1]), []).append(int(entry))
    found = [pid]
    for each in found:
        found += parents.get(each, ())
    return found


#: beginnings of the titles of processes that run what was accepted: their memory has its own limits
RUNNERS = ("ray::GpuWorkerActor", "ray::OutputWriterActor")


def memory_bytes(pid: int) -> int:
    """The memory of a server and its children that no other process has: of the controller and the catalog, too, but
    not of workers."""
    total = 0
    for each in family(pid):
        with suppress(OSError):
            if Path("/proc", str(each), "cmdline").read_text().startswith(RUNNERS):
                continue
            for line in Path("/proc", str(each), "smaps_rollup").read_text().splitlines():
                if line.startswith(("Private_Clean", "Private_Dirty")):
                    total += int(line.split()[1]) * 1024
    return total


async def peak_memory(pid: int, until: float) -> int:
    """The largest memory until a time of the monotonic clock."""
    most = 0
    while time.monotonic() < until:
        most = max(most, await asyncio.to_thread(memory_bytes, pid))
        await asyncio.sleep(0.3)
    return most


async def measured(port: int, pid: int, name: str, seconds: float) -> tuple[Noticed, int]:
    """Have one kind of call made; return what was noticed, and the largest memory."""
    noticed = Noticed()
    # in a process of their own: what they send must not hold up the caller who works
    with ProcessPoolExecutor(1, get_context("spawn")) as others:
        await asyncio.get_running_loop().run_in_executor(others, os.getpid)
        calls = asyncio.get_running_loop().run_in_executor(others, repeat_all, port, name, seconds)
        until = time.monotonic() + seconds
        peak, _ = await asyncio.gather(peak_memory(pid, until + 1), work(port, until, noticed))
        statuses, failures = await calls
    noticed.statuses.update(statuses)
    noticed.failures += failures
    return noticed, peak


def repeat_all(port: int, name: str, seconds: float) -> tuple[Counter[str], list[str]]:
    """Make calls of one kind over all of its connections; return the statuses of the answers, and failures."""
    noticed, kind, until = Noticed(), KINDS[name], time.monotonic() + seconds

    async def all_of_them() -> None:
        await asyncio.gather(*(repeat(port, kind, place, until, noticed) for place in range(kind.connections)))

    asyncio.run(all_of_them())
    return noticed.statuses, noticed.failures


def start(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server; return it and its port, when it answers."""
    command = [sys.executable, "-m", "modelpool", "serve", "--port", "0", "--out", folder, "--device", "cpu"]
    command += ["--config", str(ROOT / "configs" / "laptop.toml"), "--gpus", "1"]
    with open(f"{folder}/log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    until = time.monotonic() + 180
    while server.poll() is None and time.monotonic() < until:
        if found := re.search(r"listening on \S+:(\d+);", Path(folder, "log").read_text()):
            return server, int(found[1])
        time.sleep(0.2)
    server.kill()
    raise SystemExit(Path(folder, "log").read_text()[-2000:])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--only", default="", help="kinds with this in their name")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server, port = start(folder)
        try:
            compare(server.pid, port, [name for name in KINDS if wanted.only in name], wanted.seconds)
            kind = KINDS["many long prompts"]

            async def interrupt() -> float:
                calls = [asyncio.create_task(answered(port, kind.calls(place))) for place in range(8)]
                await asyncio.sleep(1)
                began = time.monotonic()
                server.send_signal(signal.SIGINT)
                await asyncio.to_thread(server.wait, 120)
                await asyncio.gather(*calls, return_exceptions=True)
                return time.monotonic() - began

            print(f"SIGINT: ended after {asyncio.run(interrupt()):.1f} s")
        finally:
            if server.poll() is None:
                server.kill()
        log = Path(folder, "log").read_text()
        print(f"log: {len(log.splitlines())} lines, {log.count('Traceback')} tracebacks")
        sys.stderr.write(log[-3000:])


def compare(pid: int, port: int, kinds: list[str], seconds: float) -> None:
    """Print one row for each kind."""
    asyncio.run(measured(port, pid, "nothing", 5))
    print("| kind | answers | GET / p50, p99 ms | job accepted p50, max s | memory grows by MB, then MB | failures |")
    print("|---|---|---|---|---|---|")
    for name in kinds:
        before = memory_bytes(pid)
        noticed, peak = asyncio.run(measured(port, pid, name, seconds))
        time.sleep(2)
        page, accepted = noticed.page_seconds, noticed.accept_seconds
        quantiles = statistics.quantiles(page, n=100) if len(page) > 1 else page * 99
        after = memory_bytes(pid)
        print(
            f"| {name} | {dict(noticed.statuses)} | {statistics.median(page) * 1e3:.0f}, {quantiles[98] * 1e3:.0f} "
            f"| {statistics.median(accepted):.2f}, {max(accepted):.2f} "
            f"| {(peak - before) / 1e6:.0f}, {(after - before) / 1e6:.0f} "
            f"| {len(noticed.failures)} {noticed.failures[:1]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
