"""`modelpool simulate --groups`: the nodes, their cost and the reasons of every change, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelpool.actors.cli.simulate.simulate_groups import simulate_groups
from modelpool.actors.cli.simulate.simulate_options import OURS
from modelpool.actors.cli.simulate.simulate_runs import setting_of, simulate_one
from modelpool.actors.cli.simulate.simulate_workload import load_work
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.scheduler.model.config import SchedulerConfig

GROUPS = """
[groups.spot]
gpu_type = "A100"
spot = true
max = 4
price_per_hour = 1.5

[groups.sure]
gpu_type = "A100"
max = 2
price_per_hour = 3.0
"""


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "groups.toml"
    path.write_text(text)
    return path


def test_a_workload_on_groups_reports_nodes_cost_and_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, GROUPS)
    simulate_groups("zipf:jobs=60,rate=1", path, 0, None, "H100", 0.5, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["succeeded"] == found["jobs"] == 60
    assert found["figures"]["cost"] > 0.0
    assert 1 <= found["figures"]["most_nodes"] <= found["figures"]["nodes"]
    assert found["decisions"][0]["rule"] == "no_worker"
    assert sum(why["nodes"] for why in found["decisions"]) <= 0 or found["figures"]["nodes_lost"]
    simulate_groups("zipf:jobs=60,rate=1", path, 0, None, "H100", 0.5, as_json=False)
    shown = capsys.readouterr().out
    assert "requested 1 node of spot" in shown
    assert "spot 0 to 4, sure 0 to 2" in shown


def test_what_cannot_be_simulated_is_named(tmp_path: Path) -> None:
    cases = (
        ("[groups.a]\nmax = 2", 0.0, r"\[groups.a\] gpu_type: found '', expected a known kind"),
        ('[groups.a]\ngpu_type = "Z9"', 0.0, r"\[groups.a\] gpu_type: found 'Z9', expected a known kind"),
        ("[pool]\nthreads = 1", 0.0, "has no groups, expected tables"),
    )
    for text, lost, message in cases:
        with pytest.raises(UserError, match=message):
            simulate_groups("zipf:jobs=3", file_of(tmp_path, text), 0, None, "H100", lost, as_json=True)
    with pytest.raises(UnusableField, match=r"--spot-losses: found 1\.5"):
        simulate_groups("zipf:jobs=3", file_of(tmp_path, GROUPS), 0, None, "H100", 1.5, as_json=True)


def test_named_gpus_are_all_there_are_with_a_configuration_that_has_groups(tmp_path: Path) -> None:
    """Found by trying: `simulate --gpus 2xL4 --config` with groups ended with a KeyError, the name of a group."""
    setting = setting_of("2xA100", None, "H100", file_of(tmp_path, GROUPS + "[autoscaling]\nmax_gpus = 3"))
    assert setting.scheduler == SchedulerConfig()
    found, _ = simulate_one(load_work("zipf:jobs=20,rate=1").make(0), 0, OURS, setting)
    assert found.figures.succeeded == 20
