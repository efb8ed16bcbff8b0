"""The command, run in this process against a fake pool, with what it printed and where it wrote."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.cli.main import run
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import Session
from modelpool.actors.client.start_checks import NameCheck
from modelpool.actors.config.config import CONFIG_VARIABLE
from tests.actors.cli.fakes import FakePool


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    opened: tuple[PoolOptions, ...]

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Ended]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command("generate", "a red circle", pool=FakePool())` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run_command(*arguments: str, pool: FakePool | None = None, names: NameCheck | None = None) -> Ended:
        opened: list[PoolOptions] = []

        def open_pool(options: PoolOptions) -> FakePool:
            opened.append(options)
            return pool or FakePool()

        code = run(list(arguments), Session(arguments, open_pool, lambda options: names or NameCheck(None)))
        captured = capfd.readouterr()
        return Ended(code, captured.out, captured.err, tuple(opened))

    return run_command
