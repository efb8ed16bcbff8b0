"""[groups.NAME] and [autoscaling]: the scheduler gets the values of the file; errors name the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.actors.config.config import PoolConfig
from modelpool.pool.values.core.errors import GIB, UnknownName, UnusableField, UserError
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup

GROUPS = """
[groups.a100]
gpu_type = "A100"
gpu_memory = "40GiB"
gpus_per_node = 8
min = 1
max = 4
price_per_hour = 12.5
labels = { "ray.io/accelerator-type" = "A100" }
resources = { "a100-slot" = 1.0 }
start_seconds = 240

[groups.spot]
spot = true
max = 16

[autoscaling]
max_gpus = 40
max_cost_per_hour = 60
max_cost = 500.0
wait_seconds = 0
interval_seconds = 5
"""


def load(tmp_path: Path, text: str) -> PoolConfig:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    return PoolConfig.load(path)


def test_groups_and_limits_reach_the_scheduler(tmp_path: Path) -> None:
    a100 = NodeGroup(
        "a100",
        gpu_type="A100",
        gpu_bytes=40 * GIB,
        gpus_per_node=8,
        min_nodes=1,
        max_nodes=4,
        price_per_hour=12.5,
        labels=(("ray.io/accelerator-type", "A100"),),
        resources=(("a100-slot", 1.0),),
        start_seconds=240.0,
    )
    limits = AutoscalingConfig(
        max_gpus=40, max_cost_per_hour=60.0, max_cost=500.0, wait_seconds=0.0, interval_seconds=5.0
    )
    scheduler = load(tmp_path, GROUPS).scheduler
    assert scheduler.groups == (a100, NodeGroup("spot", max_nodes=16, spot=True))
    assert scheduler.autoscaling == limits
    assert load(tmp_path, "").scheduler.groups == ()


def test_the_description_of_groups_is_a_configuration_again(tmp_path: Path) -> None:
    config = load(tmp_path, GROUPS + "[users.ann]\nweight = 2.0\n[scheduler]\nwindow = 16\n")
    text = config.describe()
    groups = text[text.index("[groups.") :]
    again = load(tmp_path, groups).scheduler
    assert (again.groups, again.autoscaling) == (config.scheduler.groups, config.scheduler.autoscaling)
    assert config.scheduler.window == 16
    assert "[groups" not in PoolConfig().describe()


def test_bad_groups_name_the_table_and_the_key(tmp_path: Path) -> None:
    cases: tuple[tuple[str, type[UserError], str], ...] = (
        ("[groups.a]\nprice_per_hour = -1", UnusableField, "[groups.a] price_per_hour: found -1.0"),
        ("[groups.a]\nmin = 3\nmax = 2", UnusableField, "[groups.a] max: found 2, expected at least min, 3"),
        ("[groups.a]\nmin = -1", UnusableField, "[groups.a] min: found -1"),
        ("[groups.a]\nmax = true", UnusableField, "[groups.a] max: found True"),
        ("[groups.a]\nmaxx = 2", UnknownName, "[groups.a] unknown"),
        ("[groups.a]\nlabels = { zone = 3 }", UnusableField, "[groups.a] labels.zone: found 3, expected a text"),
        ('[groups.a]\nlabels = "zone"', UnusableField, "[groups.a] labels: found 'zone'"),
        ("[groups.a]\nresources = { slot = -1 }", UnusableField, "[groups.a] resources.slot: found -1"),
        ('[groups.a]\nspot = "yes"', UnusableField, "[groups.a] spot: found 'yes'"),
        ('[groups.a]\ngpu_memory = "much"', UnusableField, "[groups.a] gpu_memory: found 'much'"),
        ("[groups.a]\ngpus_per_node = 0", UnusableField, "[groups.a] gpus_per_node: found 0"),
        ("[groups.a]\nstart_seconds = inf", UnusableField, "[groups.a] start_seconds: found inf"),
        ('[groups."a b"]', UnusableField, "[groups.a b] name: found 'a b'"),
        ("groups = 3", UnusableField, "groups: found 3, expected tables"),
        ("[groups]\na = 3", UnusableField, "[groups] a: found 3, expected a table"),
        ("[groups.a]\nmin = 2\nmax = 2\n[autoscaling]\nmax_gpus = 1", UnusableField, "[autoscaling] max_gpus: found 1"),
        ("[groups.a]\n[autoscaling]\nmax_cost = -5", UnusableField, "[autoscaling] max_cost: found -5"),
        ("[groups.a]\n[autoscaling]\nmax_gpu = 5", UnknownName, "[autoscaling] unknown"),
        ("[autoscaling]\nmax_gpus = 5", UnusableField, "[autoscaling] found without groups"),
        ("[scheduler]\ngroups = []", UnusableField, "[scheduler] groups: found []"),
    )
    for text, error, message in cases:
        with pytest.raises(error) as caught:
            load(tmp_path, text)
        assert f"pool.toml: {message}" in str(caught.value), text


TYPES = """
[groups.a100]
gpu_memory = "40GiB"
min = 1
max = 6
price_per_hour = 4.0
labels = { team = "art" }
[groups.a100.instance_types.p4d]
gpus_per_node = 8
price_per_hour = 32.0
labels = { instance = "p4d" }
[groups.a100.instance_types.g5]
labels = { instance = "g5" }
[groups.a100.zones.us-east-1a]
[groups.a100.zones.us-east-1b]
price_factor = 1.5
"""


def test_instance_types_and_zones_are_groups_with_one_minimum_and_maximum(tmp_path: Path) -> None:
    groups = load(tmp_path, TYPES).scheduler.groups
    assert [(group.name, group.price_per_hour, group.gpus_per_node) for group in groups] == [
        ("a100-p4d-us-east-1a", 32.0, 8),
        ("a100-p4d-us-east-1b", 48.0, 8),
        ("a100-g5-us-east-1a", 4.0, 1),
        ("a100-g5-us-east-1b", 6.0, 1),
    ]
    assert {(group.part_of, group.min_nodes, group.max_nodes) for group in groups} == {("a100", 1, 6)}
    assert dict(groups[3].labels) == {"team": "art", "instance": "g5", "ray.io/availability-zone": "us-east-1b"}
    assert groups[0].gpu_bytes == 40 * GIB
    zones = load(tmp_path, '[groups.a]\n[groups.a.zones.one]\n[groups.a.zones.two]\nlabels = { place = "2" }').scheduler
    assert [(group.name, group.labels) for group in zones.groups] == [
        ("a-one", (("ray.io/availability-zone", "one"),)),
        ("a-two", (("place", "2"),)),
    ]


def test_the_description_of_instance_types_is_a_configuration_again(tmp_path: Path) -> None:
    config = load(tmp_path, TYPES)
    text = config.describe()
    assert load(tmp_path, text[text.index("[groups.") :]).scheduler.groups == config.scheduler.groups


def test_bad_instance_types_name_the_table_and_the_key(tmp_path: Path) -> None:
    for text, message in (
        ("[groups.a.instance_types.x]\n[groups.a.instance_types.y]", "labels: found 'equal ones for a-x and a-y'"),
        ("[groups.a.instance_types.x]\nprize = 1", "prize"),
        ("[groups.a.zones.x]\nprice_factor = -1", "[groups.a] price_per_hour"),
        ('[groups.a]\npart_of = "s"\n[groups.a.zones.x]', "[groups.a] part_of: found 's', expected no such key"),
        ('[groups.a]\npart_of = "s"\nmax = 2\n[groups.b]\npart_of = "s"\nmax = 3', "max_nodes: found '3 in group b'"),
    ):
        with pytest.raises(UserError) as caught:
            load(tmp_path, text if text.startswith("[groups.a]\n") else f"[groups.a]\nprice_per_hour = 1\n{text}")
        assert message in str(caught.value), text
