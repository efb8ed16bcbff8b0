"""The HTTP interfaces as a Ray Serve application, in a program of its own with a real Ray, Ray Serve and pool.

Proves: the application starts its pool; each of two replicas answers about submissions that the other accepted and
serves its signed addresses; the page that they serve shows the image of a job in Chromium; the agent of the Ray node
exports the metrics of the pool, under the names of the documentation; and the pool ends with the application.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from modelpool.pool.values.core.errors import UserError

ROOT = Path(__file__).parents[4]
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
[observability]
ray_metrics_seconds = 0.2
"""
#: of those that have samples after a job, at least these
EXPORTED = {
    "modelpool_jobs_submitted_total",
    "modelpool_jobs_total",
    "modelpool_job_seconds_bucket",
    "modelpool_tasks_total",
    "modelpool_task_queue_seconds_bucket",
    "modelpool_task_run_seconds_bucket",
    "modelpool_gpu_capacity_bytes",
    "modelpool_gpu_resident_bytes",
    "modelpool_gpu_busy_seconds_total",
    "modelpool_workers",
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
DRIVER = r"""
import json, sys, time, urllib.request
from pathlib import Path
from urllib.parse import urlsplit
import psutil
from modelpool.actors.ray.ray_session import open_session
from modelpool.actors.http.ray_serve.ingress import IngressArguments, app

folder, key, port, chromium, *wanted = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
session = open_session("local", "modelpool", 8)
import ray
from ray import serve
from prometheus_client.parser import text_string_to_metric_families

def exported():
    # the names of modelpool's metrics that the agent of the node serves
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    names, until = set(), time.monotonic() + 120
    while not names >= set(wanted) and time.monotonic() < until:
        time.sleep(0.2)
        with urllib.request.urlopen(url, timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            names = {sample.name for family in families for sample in family.samples}
    return sorted(name for name in names if name.startswith("ray_modelpool_"))

def shown():
    # whether the page shows an image with pixels of a job that has succeeded
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#key-input").fill(key)
        page.keyboard.press("Enter")
        image = page.locator(".tile[data-state=succeeded] img").first
        image.wait_for()
        page.wait_for_function("[...document.querySelectorAll('.tile img')].some(image => image.naturalWidth)")
        browser.close()
    return True

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
(folder / "metrics.json").write_text(json.dumps(exported()))
print(shown() if chromium else True, flush=True)
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
    environment["RAY_metrics_report_interval_ms"] = "500"
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            DRIVER,
            str(tmp_path),
            KEY,
            str(port),
            CHROMIUM,
            *(f"ray_{name}" for name in sorted(EXPORTED)),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == ["True", "1 PNG", "True", "1", "[]"], ran.stdout + ran.stderr
    documented = set(re.findall(r"`(modelpool_\w+)`", (ROOT / "docs" / "guides" / "monitoring.md").read_text()))
    names = [name.removeprefix("ray_") for name in json.loads((tmp_path / "metrics.json").read_text())]
    assert set(names) >= EXPORTED
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in names} <= documented


def test_without_keys_it_is_refused_unless_wanted(tmp_path: Path) -> None:
    from modelpool.actors.http.ray_serve.ingress import IngressArguments, app

    config = tmp_path / "modelpool.toml"
    config.write_text(CONFIG.format(shapes=ROOT / "examples" / "shapes", folder=tmp_path))
    with pytest.raises(UserError, match=r"\[serve.keys\]: found none, .* open_access=true"):
        app(IngressArguments(config=config))
    assert app(IngressArguments(config=config, open_access=True))
