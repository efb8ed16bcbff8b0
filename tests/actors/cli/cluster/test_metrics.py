"""`modelpool metrics`: prints the metrics of a pool, or serves them on loopback."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from modelpool.actors.control.metrics.exposition import CONTENT_TYPE, metrics_text
from modelpool.actors.control.metrics.families import MetricFamily, counter, gauge
from modelpool.actors.control.metrics.metrics_server import MetricsServer
from modelpool.pool.values.core.errors import UserError
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool

FAMILIES = (
    counter("modelpool_jobs_total", "Jobs that ended.", {("failed",): 3}, "outcome"),
    gauge("modelpool_results", "Results.", {(): 0.5}),
)
TEXT = """# HELP modelpool_jobs_total Jobs that ended.
# TYPE modelpool_jobs_total counter
modelpool_jobs_total{outcome="failed"} 3.0
# HELP modelpool_results Results.
# TYPE modelpool_results gauge
modelpool_results 0.5
"""


class MeasuredPool(FakePool):
    """A pool with these metrics."""

    def metrics(self) -> tuple[MetricFamily, ...]:
        return FAMILIES


def test_once_prints_the_metrics_of_the_named_pool(command: Command) -> None:
    ended = command("metrics", "--pool", "mine", "--once", pool=MeasuredPool())
    assert (ended.code, ended.out) == (0, TEXT)
    assert [opened.pool for opened in ended.opened] == ["mine"]


def test_a_wrong_port_is_named_before_a_pool_is_joined(command: Command) -> None:
    ended = command("metrics", "--pool", "mine", "--port", "70000")
    assert (ended.code, ended.opened) == (2, ())
    assert "--port: found 70000, expected a number from 0 to 65535" in ended.err


def test_the_server_serves_metrics_on_loopback_and_nothing_else() -> None:
    with MetricsServer(lambda: metrics_text(FAMILIES), 0) as server:
        assert server.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.url, timeout=10) as answer:
            assert answer.read().decode() == TEXT
            assert answer.headers["Content-Type"] == CONTENT_TYPE
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.replace("metrics", "other"), timeout=10)
        with pytest.raises(UserError, match="cannot be listened on"):
            MetricsServer(lambda: b"", int(server.url.split(":")[2].split("/")[0]))


def test_a_pool_that_does_not_answer_is_503_with_the_reason() -> None:
    def read() -> bytes:
        raise RuntimeError("the pool is gone")

    with (
        MetricsServer(read, 0) as server,
        pytest.raises(urllib.error.HTTPError, match="503") as refused,
    ):
        urllib.request.urlopen(server.url, timeout=10)
    assert refused.value.read() == b"RuntimeError: the pool is gone\n"
