"""`modelpool doctor` on this machine: what it prints, its JSON, its exit codes; and that it starts nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from modelpool.actors.cli.cluster.doctor import device_lines, doctor, make_report, views
from modelpool.actors.cli.terminal.options import DeviceOption, PoolOptions
from modelpool.actors.config.config import CONFIG_VARIABLE
from modelpool.pool.devices.capabilities import other_capabilities
from modelpool.pool.devices.detection import Detected, DetectedDevice
from modelpool.pool.devices.kind_names import DeviceKind as Kind
from modelpool.pool.devices.memory_limits import host_memory
from modelpool.pool.engine.diagnosis import DiagnosisSettings, diagnose
from modelpool.pool.values.core.errors import UserError


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


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_of_sim_and_cpu_nothing_is_reserved(device: str) -> None:
    """Found in a review: against the page on configuration, it was."""
    ended = doctored("--device", device, "--vram", "64MiB", "--reserve-vram", "8TiB", "--json")
    assert ended.exit_code == 0
    (used,) = [d for d in json.loads(ended.output)["diagnosis"]["devices"] if d["is_used"]]
    assert (used["capacity_bytes"], used["reserve_bytes"]) == (64 << 20, 0)


def test_too_small_a_budget_is_told_with_its_remedy() -> None:
    ended = doctored("--device", "sim", "--vram", "16KiB")
    assert ended.exit_code == 1
    assert "16.0 KiB are given (vram)" in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind.CUDA, "24.0 GiB; free: unknown, install nvidia-ml-py"),
        (Kind.XPU, "24.0 GiB; free: unknown, as querying it would allocate device memory; use the vendor's"),
        (Kind.DIRECTML, "?"),
    ],
)
def test_what_was_not_asked_is_said(kind: Kind, said: str) -> None:
    """Found in a review: to know the free bytes, each card was asked in a way that takes its memory."""
    total = 0 if kind is Kind.DIRECTML else 24 << 30
    device = DetectedDevice(kind, 0, other_capabilities(kind, "a card", total, True), None)
    (one,) = [d for d in diagnose(Detected((device,), host_memory(), ()), DiagnosisSettings(kind)).devices if d.is_used]
    (memory,) = [text for name, text in device_lines(one) if name == "memory"]
    assert memory.startswith(said)


def test_the_configuration_is_heard(tmp_path: Path) -> None:
    (tmp_path / "modelpool.toml").write_text('[pool]\ndevice = "sim"\nvram = "48MiB"\nvram_policy = "high"\n')
    (one,) = [d for d in make_report(PoolOptions()).diagnosis.devices if d.is_used]
    assert (one.capacity_bytes, one.policy.value) == (48 << 20, "high")


def test_a_wrong_option_is_told_as_everywhere() -> None:
    with pytest.raises(UserError, match="reserve_vram: found 'much', expected a size such as 600MiB, or 0"):
        make_report(PoolOptions(reserve_vram="much"))


def test_views_name_every_device() -> None:
    report = make_report(PoolOptions(device=DeviceOption.CPU))
    assert len(views(report)) >= 1 + 2 * len(report.diagnosis.devices)
