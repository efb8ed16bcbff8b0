"""The HTTP interfaces as a Ray Serve application, in a program of its own with a real Ray, Ray Serve and pool.

Proves: the application starts its pool; each of two replicas answers about submissions that the other accepted and
serves its signed addresses; and the pool ends with the application.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from modelpool.pool.core.errors import UserError

ROOT = Path(__file__).parents[3]
KEY = "alice-alice-alice"
CONFIG = """
[pool]
device = "sim"
workers = 1
vram = "64MiB"
journal = "{folder}/journal"
[models]
folders = ["{shapes}/models"]
[output]
folder = "{folder}/outputs"
[cluster]
name = "served"
"""
DRIVER = r"""
import json, sys, urllib.request
from pathlib import Path
from urllib.parse import urlsplit
import psutil
from modelpool.actors.ray.ray_session import open_session
from modelpool.actors.ray_serve.ingress import IngressArguments, app

folder, key, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
session = open_session("local", "modelpool", 8)
from ray import serve

def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        return answer.read()

serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(app(IngressArguments(config=folder / "modelpool.toml", start=True, replicas=2)), name="images")
made = json.loads(call("/api/jobs", {"model": "shapes", "prompt": "a red circle", "seed": 1, "steps": 2}))
states = set()
while states != {"ended"}:
    states = {json.loads(call(f"/api/jobs/{made['id']}"))["state"] for _ in range(10)}
listed = [json.loads(call("/api/jobs"))["submissions"] for _ in range(10)]
print(all([each["id"] for each in found] == [made["id"]] for found in listed), flush=True)
fields = {"model": "shapes", "prompt": "a red circle", "size": "64x64", "response_format": "url"}
(image,) = json.loads(call("/v1/images/generations", fields))["data"]
address = urlsplit(image["url"])
images = [call(f"{address.path}?{address.query}") for _ in range(10)]
print(len(set(images)), images[0][1:4].decode(), flush=True)
family = psutil.Process().children(recursive=True)
pool = [p for p in family if "modelpool" in p.cmdline() and "up" in p.cmdline()]
print(len(pool), flush=True)
serve.delete("images")
print([p for p in pool if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], flush=True)
serve.shutdown()
session.close()
"""


@pytest.mark.ray
def test_two_replicas_answer_as_one_server_over_a_pool_that_ends_with_them(tmp_path: Path) -> None:
    config = CONFIG.format(shapes=ROOT / "examples" / "shapes", folder=tmp_path) + f'[serve.keys]\nalice = "{KEY}"\n'
    (tmp_path / "modelpool.toml").write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment = {**kept, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), KEY, str(port)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == ["True", "1 PNG", "1", "[]"], ran.stdout + ran.stderr


def test_without_keys_it_is_refused_unless_wanted(tmp_path: Path) -> None:
    from modelpool.actors.ray_serve.ingress import IngressArguments, app

    config = tmp_path / "modelpool.toml"
    config.write_text(CONFIG.format(shapes=ROOT / "examples" / "shapes", folder=tmp_path))
    with pytest.raises(UserError, match=r"\[serve.keys\]: found none, .* open_access=true"):
        app(IngressArguments(config=config))
    assert app(IngressArguments(config=config, open_access=True))
