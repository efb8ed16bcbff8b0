"""The Grafana dashboard against a real Prometheus that scrapes a controller which ran work: every panel has data."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.control.metrics.exposition import metrics_text
from modelpool.actors.control.metrics.metrics_server import MetricsServer
from modelpool.actors.request.requests import GenerateRequest
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.node_groups import NodeGroup
from tests.actors.fake_fleet import Desk, settle
from tests.actors.fakes import AUDIOS, FAIL, VIDEOS
from tests.architecture.source_tree import ROOT

DASHBOARD = json.loads((ROOT / "configs" / "grafana" / "modelpool.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
#: also the time in which the pool must answer one, on a busy machine
SCRAPE_SECONDS = 0.5
#: beginnings of the names: of a pool's own metrics, and of those that Ray's agents export
NAME_SETS = ("modelpool", "ray_modelpool")
#: long enough for a busy machine, where scrapes come late
RATE_WINDOW = "20s"
ROUNDS = 8
MOST_SECONDS = 60.0


def request(seed: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": f"circle {seed}", "seed": seed, "steps": 3, **fields})


async def work(desk: Desk, round_number: int) -> None:
    """One round: jobs of two users with and without a LoRA, a failure, and now and then a lost worker or start."""
    first = 10 * round_number
    await desk.submit(
        request(first, user="ann"),
        request(first + 1, user="bob", loras=[("light", 0.8)]),
        *(request(first + 3 + place, model=model) for place, model in enumerate(("forms", VIDEOS, AUDIOS))),
        request(first + 2, prompt=f"{FAIL} {first}"),
        submission=f"s{round_number}",
    )
    await desk.clock.advance(2.0)
    if round_number % 3 == 1:
        desk.fleet.kill(desk.fleet.running[0].worker_id)
        await settle()
    for _ in range(6):
        await desk.clock.advance(0.5)
        for sent in desk.fleet.running:
            desk.fleet.finish(sent, run_seconds=0.5, load_seconds=0.1)
        await settle()
    await desk.hear()


def get(url: str, **query: Any) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.loads(answer.read())["data"]


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """Run Prometheus, which scrapes `target`; yield the address of its API."""
    config = {
        "global": {
            "scrape_interval": f"{SCRAPE_SECONDS * 1000:.0f}ms",
            "scrape_timeout": f"{SCRAPE_SECONDS * 1000:.0f}ms",
        },
        "scrape_configs": [{"job_name": "modelpool", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=log,
    )
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.kill()
        process.wait()
        log.close()


def wait_for_scrapes(api: str, number: int) -> None:
    """Wait until Prometheus has scraped the pool so often, without the scrapes that were not answered in time."""
    until = time.monotonic() + MOST_SECONDS
    while time.monotonic() < until:
        try:
            found = get(f"{api}/query", query=f"sum_over_time(up[{MOST_SECONDS:.0f}s])")["result"]
        except OSError:  # it starts
            found = []
        if found and float(found[0]["value"][1]) >= number:
            return
        time.sleep(0.1)
    raise AssertionError("Prometheus does not scrape")


def under_both_names(text: bytes) -> bytes:
    """The metrics, and again as Ray exports them; a test of Ray Serve compares those names with a real agent's."""
    return text + text.replace(b"modelpool_", b"ray_modelpool_")


def values(api: str, query: str, names: str) -> list[float]:
    """The numbers that a panel shows for the time of the test."""
    expression = (
        query.replace("${metrics}", names)
        .replace("$instance", ".*")
        .replace("$__rate_interval", RATE_WINDOW)
        .replace("$__range", f"{MOST_SECONDS:.0f}s")
    )
    now = time.time()
    found = get(f"{api}/query_range", query=expression, start=now - MOST_SECONDS, end=now, step=SCRAPE_SECONDS)[
        "result"
    ]
    return [float(value) for series in found for _, value in series["values"] if not math.isnan(float(value))]


def test_the_dashboard_can_be_imported_and_answers_the_questions_of_users() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Are GPUs idle?",
        "What do loads cost?",
        "What waits, and for whom?",
        "What fails?",
        "What does autoscaling decide?",
    ]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert DASHBOARD["uid"] == "modelpool"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "metrics", "instance"]
    assert tuple(option["value"] for option in variables["metrics"]["options"]) == NAME_SETS
    assert [choice.rpartition(" : ")[2] for choice in variables["metrics"]["query"].split(", ")] == list(NAME_SETS)
    assert variables["instance"]["definition"] == "label_values(${metrics}_workers, instance)"
    for _, query in QUERIES:
        assert 'instance=~"$instance"' in query
        assert "modelpool_" not in query.replace("${metrics}_", ""), "it would show one set of names only"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus; apt-get install prometheus")
def test_every_panel_has_data_in_a_real_prometheus(tmp_path: Path) -> None:
    latest = b""

    async def pool(api: str) -> None:
        nonlocal latest
        group = NodeGroup("a100", max_nodes=1, price_per_hour=3.6, start_seconds=1.0)
        desk = await Desk(workers=0, config=SchedulerConfig(groups=(group,))).open()
        for number in range(ROUNDS):
            latest = under_both_names(metrics_text(await desk.controller.metrics()))
            await asyncio.to_thread(wait_for_scrapes, api, 2 * number + 2)
            await work(desk, number)
        latest = under_both_names(metrics_text(await desk.controller.metrics()))
        await asyncio.to_thread(wait_for_scrapes, api, 2 * ROUNDS + 2)

    with (
        MetricsServer(lambda: latest, 0) as server,
        prometheus(server.url.removeprefix("http://").removesuffix("/metrics"), tmp_path) as api,
    ):
        asyncio.run(pool(api))
        shown = {(title, query, names): values(api, query, names) for title, query in QUERIES for names in NAME_SETS}
    assert not [(title, names) for (title, _, names), found in shown.items() if not found]
    zero = {title for (title, *_), found in shown.items() if max(found) <= 0.0}
    assert zero == {"Failed starts of workers"}  # none failed; the test can see everything else
