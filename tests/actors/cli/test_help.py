"""`modelpool --help` comes up at once: nothing heavy is loaded. And what it says of defaults is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any, get_args

import pytest
import typer

import modelpool
from modelpool.actors.cli.main import build_app
from modelpool.actors.cli.run.batch import BATCH_HELP
from modelpool.actors.cli.terminal import options
from modelpool.actors.config.config import PoolSection
from modelpool.actors.request.field_table import REQUEST_FIELDS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.vram_policy import VramPolicy, default_reserve_bytes
from modelpool.pool.inference.sampling.sampler_names import SAMPLERS, SCHEDULES
from modelpool.pool.values.core.errors import MIB
from tests.actors.cli.conftest import Command

COMMANDS = (
    "generate",
    "batch",
    "up",
    "status",
    "down",
    "models",
    "inspect",
    "merge",
    "convert",
    "plan",
    "simulate",
    "top",
    "why",
    "story",
    "replay",
    "trace",
    "plan-cluster",
    "doctor",
    "metrics",
    "report",
)


def loaded_after(*commands: list[str]) -> dict[str, set[str]]:
    """Top-level packages in a fresh interpreter after these commands ran one after the other, by command."""
    code = (
        "import functools, json, sys\n"
        "from modelpool.actors.cli import main\n"
        "main.build_program = functools.cache(main.build_program)\n"
        "loaded = {}\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    if code := main.run(arguments):\n"
        "        sys.exit(code)\n"
        "    loaded[' '.join(arguments)] = sorted({name.split('.')[0] for name in sys.modules})\n"
        "print('LOADED', json.dumps(loaded))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, timeout=60, check=True
    )
    loaded: dict[str, list[str]] = json.loads(done.stdout.rpartition("LOADED ")[2])
    return {command: set(packages) for command, packages in loaded.items()}


def loaded_by(*arguments: str) -> set[str]:
    """Top-level packages in a fresh interpreter after the command ran."""
    (loaded,) = loaded_after(list(arguments)).values()
    return loaded


def test_help_loads_neither_ray_nor_torch() -> None:
    """One process for all: what a later command finds loaded, an earlier one has loaded, and fails for it."""
    commands = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    for command, loaded in loaded_after(*commands).items():
        assert "typer" in loaded, command
        assert not loaded & {"ray", "torch", "numpy", "PIL", "diffusers", "transformers"}, command


def test_help_names_every_command(command: Command) -> None:
    ended = command("--help")
    assert ended.code == 0
    for name in COMMANDS:
        assert re.search(rf"\b{name}\b", ended.out)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(command: Command, name: str) -> None:
    ended = command(name, "-h")
    assert ended.code == 0
    assert "Usage: modelpool " + name in ended.out


def test_help_is_shown_literally_in_every_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich took the names of sections for styles: `down --help` said "longer than  drain_seconds"."""
    monkeypatch.setenv("COLUMNS", "200")
    bracketed: dict[str, set[str]] = {}

    def check(found: Any, path: tuple[str, ...]) -> None:
        texts = [found.help or "", *(getattr(parameter, "help", None) or "" for parameter in found.params)]
        if in_brackets := set(re.findall(r"\[[^\]]*\]", " ".join(texts))):
            shown = command(*path, "--help").out
            bracketed[" ".join(path)] = {text for text in in_brackets if text not in shown}
        for name, each in getattr(found, "commands", {}).items():
            check(each, (*path, name))

    check(typer.main.get_command(build_app()), ())
    assert "down" in bracketed
    assert not any(bracketed.values()), bracketed


@pytest.mark.parametrize("arguments", [[], ["generate"], ["batch"], ["inspect"]])
def test_without_arguments_the_help_is_shown(command: Command, arguments: list[str]) -> None:
    ended = command(*arguments)
    assert ended.code == 2
    assert "Usage: modelpool" in ended.out + ended.err


def help_of(field: str) -> str:
    """The help text of the option of a request field."""
    option = REQUEST_FIELDS[field].option
    assert option is not None
    return option.help


def test_told_defaults_are_the_true_ones() -> None:
    for name in ("steps", "cfg", "sampler", "clip_skip"):
        default = GenerateRequest.model_fields[name].default
        assert f"(default: {default:g})" if isinstance(default, float) else f"(default: {default})" in help_of(name)


def test_the_help_of_batch_names_every_field_of_a_request() -> None:
    assert set(GenerateRequest.model_fields) <= set(re.findall(r"\w+", BATCH_HELP))


def test_told_names_are_all_there_are() -> None:
    assert set(re.findall(r"\w+", help_of("sampler").split("(")[0])) == set(SAMPLERS)
    assert set(re.findall(r"\w+", help_of("schedule").split("(")[0])) <= set(SCHEDULES)
    assert [kind.value for kind in options.DeviceOption] == ["auto", *(kind.value for kind in DeviceKind)]
    assert "(default: 400MiB)" in options.Reserve.__metadata__[0].help
    assert default_reserve_bytes(DeviceKind.CUDA, 8 << 30) == 400 * MIB


@pytest.mark.parametrize("key", ["device", "vram_policy"])
def test_a_configuration_takes_the_names_that_there_are(key: str) -> None:
    known = {"device": DeviceKind, "vram_policy": VramPolicy}[key]
    assert get_args(PoolSection.model_fields[key].annotation) == ("auto", *(member.value for member in known))


def test_the_version_is_printed(command: Command) -> None:
    ended = command("--version")
    assert ended.code == 0
    assert re.fullmatch(rf"modelpool {re.escape(modelpool.__version__)}(, scheduler compiled)?\n", ended.out)
