"""[maintenance]: windows in local time, over midnight and over changes of the clock; what cannot be read is refused."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.maintenance_section import MaintenanceSection
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.pool.values.core.errors import UserError
from tests.each_case import each_case

BERLIN = "Europe/Berlin"


def is_open(section: MaintenanceSection, text: str) -> bool:
    """Whether the pool may be disrupted at this local time of the section."""
    return not section.obstacle(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(section.timezone)).timestamp())


@each_case(
    ("window", "inside", "outside"),
    [
        ("sat,sun 22:00-04:00", ["2027-01-16 22:00", "2027-01-17 03:59", "2027-01-18 03:59"], ["2027-01-16 03:00",
         "2027-01-16 21:59", "2027-01-17 04:00", "2027-01-18 04:00", "2027-01-18 22:00"]),
        ("mon-fri 08:00-18:00", ["2027-01-15 08:00", "2027-01-18 17:59"], ["2027-01-15 18:00", "2027-01-16 09:00"]),
        ("fri-mon 01:00-02:00", ["2027-01-15 01:30", "2027-01-18 01:30"], ["2027-01-19 01:30", "2027-01-14 01:30"]),
        ("daily 23:30-00:30", ["2027-01-15 23:30", "2027-01-15 00:29"], ["2027-01-15 00:30", "2027-01-15 12:00"]),
        ("Wed  00:00-24:00", ["2027-01-13 00:00", "2027-01-13 23:59"], ["2027-01-14 00:00", "2027-01-12 23:59"]),
    ],
)  # fmt: skip
def test_windows_are_times_of_the_week(window: str, inside: list[str], outside: list[str]) -> None:
    for zone in ("UTC", BERLIN, "America/New_York"):
        section = MaintenanceSection(windows=(window,), timezone=zone)
        assert [text for text in inside if not is_open(section, text)] == []
        assert [text for text in outside if is_open(section, text)] == []
        excluded = MaintenanceSection(exclusions=(window,), timezone=zone)
        assert [text for text in inside if is_open(excluded, text)] == []
        assert [text for text in outside if not is_open(excluded, text)] == []


def test_the_local_clock_counts_when_it_is_changed() -> None:
    """02:00 UTC is 03:00 in Berlin in winter, and 04:00 in summer."""
    section = MaintenanceSection(windows=("daily 03:00-03:30",), timezone=BERLIN)
    for month, hour in ((1, 2), (7, 1)):
        assert not section.obstacle(datetime(2027, month, 15, hour, 15, tzinfo=ZoneInfo("UTC")).timestamp())
        assert section.obstacle(datetime(2027, month, 15, hour + 1, 15, tzinfo=ZoneInfo("UTC")).timestamp())


def test_exclusions_hold_in_windows_and_may_be_dates() -> None:
    section = MaintenanceSection(windows=("daily 00:00-24:00",), exclusions=("2026-12-24..2027-01-02",))
    assert is_open(section, "2026-12-23 23:59")
    assert not is_open(section, "2026-12-24 00:00")
    assert not is_open(section, "2027-01-02 23:59")
    assert is_open(section, "2027-01-03 00:00")
    reason = section.obstacle(datetime(2026, 12, 25, tzinfo=ZoneInfo("UTC")).timestamp())
    assert reason == "the pool is not disrupted now: 2026-12-24..2027-01-02 (UTC) is excluded"
    assert MaintenanceSection().obstacle(0.0) == ""


def load(folder: Path, text: str) -> PoolConfig:
    path = folder / "pool.toml"
    path.write_text(text)
    return PoolConfig.load(path)


def test_the_limits_reach_the_pool(tmp_path: Path) -> None:
    text = '[maintenance]\nmax_unavailable = 2\nwindows = ["sun 02:00-06:00"]\ntimezone = "Europe/Berlin"\n'
    config = load(tmp_path, text + '[pool]\ndevice = "sim"\nworkers = 1\n')
    plan = plan_pool(config, gpu_count=0, can_grow=False)
    assert plan.scheduler.max_unavailable_nodes == 2
    assert plan.maintenance == config.maintenance
    assert load(tmp_path, config.describe(changes_only=True)).maintenance == config.maintenance


@each_case(
    ("text", "message"),
    [
        ("max_unavailable = 0", "[maintenance] max_unavailable"),
        ('windows = ["weekends"]', "[maintenance] windows: found 'weekends', expected \"DAYS HH:MM-HH:MM\""),
        ('windows = ["2026-12-24..2027-01-02"]', "[maintenance] windows: found '2026-12-24..2027-01-02'"),
        ('windows = ["sat 25:00-26:00"]', "expected times from 00:00 to 24:00"),
        ('windows = ["mon-xyz 01:00-02:00"]', "[maintenance] windows: found 'mon-xyz 01:00-02:00'"),
        ('exclusions = ["2027-02-30..2027-03-01"]', "[maintenance] exclusions: found '2027-02-30..2027-03-01'"),
        ('exclusions = ["2027-03-02..2027-03-01"]', "expected dates in their order"),
        ('timezone = "Berlin"', "[maintenance] timezone: found 'Berlin', expected the name of a time zone"),
        ('timezone = "../etc"', "[maintenance] timezone: found '../etc'"),
        ("window = 3", "[maintenance] unknown key 'window'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, f"[maintenance]\n{text}")
    assert message in str(caught.value)


def test_the_limit_has_one_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"max_unavailable_nodes: found 1, .* write max_unavailable in \[maintenance\]"):
        load(tmp_path, "[scheduler]\nmax_unavailable_nodes = 1")
