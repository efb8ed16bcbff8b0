"""`modelpool doctor` on this machine: what it prints, its JSON, its exit codes; and that it starts nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from actors.cli.doctor import doctor, make_report, views
from actors.cli.options import DeviceKind, PoolOptions
from actors.config import CONFIG_VARIABLE
from pool.devices.memory_limits import host_memory
from pool.errors import UserError


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def doctored(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, list(arguments))


def test_a_simulated_gpu_is_always_usable() -> None:
    ended = doctored("--device", "sim", "--vram", "64MiB")
    assert ended.exit_code == 0
    for text in ("torch", "host memory", "sim:0", "64.0 MiB free of 64.0 MiB", "computes in float32", "because"):
        assert text in ended.output


def test_json_has_the_numbers() -> None:
    ended = doctored("--json", "--device", "sim", "--vram", "64MiB", "--vram-policy", "low")
    (line,) = ended.output.splitlines()
    told = json.loads(line)
    assert told["usable"] is True
    assert told["diagnosis"]["host"]["total_bytes"] == host_memory().total_bytes
    (used,) = [device for device in told["diagnosis"]["devices"] if device["is_used"]]
    assert (used["capacity_bytes"], used["reserve_bytes"], used["policy"]) == (64 << 20, 0, "low")
    assert {"about": "reserve", "chosen": "0 B", "because": "no other program uses it"} in used["findings"]


def test_a_device_that_is_not_there_ends_with_1_and_what_to_do() -> None:
    ended = doctored("--device", "mlu")
    assert ended.exit_code == 1
    assert "no Cambricon MLU" in ended.output
    assert 'for "sim" or "cpu"' in ended.output


def test_a_reserve_of_all_that_is_free_is_broken() -> None:
    ended = doctored("--device", "cpu", "--reserve-vram", "8TiB")
    assert ended.exit_code == 1
    assert "8192.0 GiB are reserved" in ended.output


def test_the_configuration_is_heard(tmp_path: Path) -> None:
    (tmp_path / "modelpool.toml").write_text('[pool]\ndevice = "sim"\nvram = "48MiB"\nvram_policy = "high"\n')
    (one,) = [d for d in make_report(PoolOptions()).diagnosis.devices if d.is_used]
    assert (one.capacity_bytes, one.policy.value) == (48 << 20, "high")


def test_a_wrong_option_is_told_as_everywhere() -> None:
    with pytest.raises(UserError, match="reserve_vram: found 'much', expected a size such as 600MiB, or 0"):
        make_report(PoolOptions(reserve_vram="much"))


def test_views_name_every_device() -> None:
    report = make_report(PoolOptions(device=DeviceKind.CPU))
    assert len(views(report)) >= 1 + 2 * len(report.diagnosis.devices)
