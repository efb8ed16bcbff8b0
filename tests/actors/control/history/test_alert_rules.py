"""The alert rules, with promtool: each fires on its fault, is quiet on a healthy pool, and reads what pools export."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from modelpool.actors.control.history.pool_history import PoolHistory
from modelpool.actors.control.metrics.exposition import metrics_text
from tests.actors.control.history.alert_rules import RULES, TESTS, missing_of, rules
from tests.actors.control.history.test_pool_history import finish_all, request, until
from tests.actors.fake_fleet import Desk

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool; apt-get install prometheus"
)


@needs_promtool
def test_the_rules_are_valid_and_say_what_to_do() -> None:
    checked = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    for rule in rules():
        assert rule["alert"].startswith("Modelpool"), rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} == rule["annotations"].keys()
        assert "$labels.instance" in rule["annotations"]["summary"], "several pools have one Prometheus"


@needs_promtool
def test_each_alert_fires_on_its_fault_and_is_quiet_on_a_healthy_pool() -> None:
    tested = subprocess.run(["promtool", "test", "rules", TESTS], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_what_the_rules_read_is_exported(tmp_path: Path) -> None:
    """A test of a real pool checks the same (`test_history_of_a_pool`)."""

    async def talk() -> str:
        desk = await Desk(workers=1, history=PoolHistory(tmp_path / "h.sqlite", tmp_path)).open()
        await desk.controller.remember("", 0.0, 0)
        await desk.submit(request(1))
        await finish_all(desk)
        history = desk.controller._history
        await until(lambda: history.disk)
        text = metrics_text(await desk.controller.metrics()).decode()
        await desk.controller.close()
        return text

    text = asyncio.run(talk())
    assert missing_of(text) == []
    assert "modelpool_jobs_troubles{of=journal}" in missing_of(text.replace('of="journal"', 'of="other"'))
    assert "modelpool_oldest_waiting_seconds" in missing_of(text.replace("modelpool_oldest", "modelpool_old"))


def test_troubles_are_counted_by_what_they_are_of() -> None:
    async def talk() -> dict[tuple[str, ...], float]:
        desk = await Desk(workers=1).open()
        troubles = ("/disk/journal: full", "submission a: full", "submission b: full", "2 more submissions wait")
        await desk.controller.jobs_troubled(troubles)
        families = {family.name: family.samples for family in await desk.controller.metrics()}
        await desk.controller.close()
        assert "modelpool_controller_restarts_total" not in families, "nobody has said yet"
        return {sample.labels: sample.value for sample in families["modelpool_jobs_troubles"]}

    assert asyncio.run(talk()) == {("outputs",): 3.0, ("journal",): 1.0}
