"""The units of systemd in configs/systemd: systemd accepts them, and the commands exist with these options."""

from __future__ import annotations

import configparser
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import typer

from modelpool.actors.cli.main import build_app
from modelpool.actors.cli.terminal.interrupts import exit_code
from tests.each_case import each_case

FOLDER = Path(__file__).resolve().parents[4] / "configs" / "systemd"
UNITS = {path.name: path for path in sorted(FOLDER.glob("*.service"))}


def service_of(path: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(path.read_text(encoding="utf-8"))
    return unit["Service"]


def command_of(path: Path) -> list[str]:
    return service_of(path)["ExecStart"].split()


def test_there_are_units_for_the_pool_and_its_interfaces() -> None:
    assert list(UNITS) == ["modelpool-serve.service", "modelpool.service"]


@each_case("name", UNITS)
def test_the_commands_of_the_units_are_commands_of_modelpool(name: str) -> None:
    program, command, *arguments = command_of(UNITS[name])
    assert Path(program).name == "modelpool"
    found = typer.main.get_command(build_app()).get_command(None, command)  # type: ignore[attr-defined]
    assert found is not None
    found.make_context(command, arguments)  # refuses an unknown option


@each_case("name", UNITS)
def test_a_stopped_unit_has_not_failed(name: str) -> None:
    """Found by trying: `systemctl stop modelpool-serve` left a failed unit, since its exit code is 143."""
    service = service_of(UNITS[name])
    assert service["KillSignal"] == "SIGTERM"
    assert service["SuccessExitStatus"].split() == [str(exit_code(signal.SIGTERM))]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name, path in UNITS.items():
        program = command_of(path)[0]
        (tmp_path / name).write_text(path.read_text(encoding="utf-8").replace(program, "/bin/true"), encoding="utf-8")
    for name in UNITS:
        command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        problems = [line for line in checked.stderr.splitlines() if "modelpool" in line]
        assert problems == [], checked.stderr
