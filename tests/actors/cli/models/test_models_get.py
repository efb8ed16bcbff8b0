"""`modelpool models get`: the example without a network, and models of a hub, into a folder that pools read.

Proves: real processes that are killed with -9 and stopped with Ctrl-C continue, and the model is then usable by its
name on the hub; the size is said before, nothing is fetched by --dry-run; each refusal is one line with exit code 2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from modelpool.actors.cli.models.get import copy_example
from modelpool.actors.cli.terminal.options import only_model
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.example_model import example_folder
from modelpool.pool.values.core.errors import UserError
from tests.actors.cli.conftest import Command
from tests.architecture.source_tree import ROOT
from tests.pool.files.fetch.hub_server import HubServer, Repository, serving_hub

SHAPES = ROOT / "examples" / "shapes"
MODEL = (SHAPES / "models" / "shapes.safetensors").read_bytes()
LORA = (SHAPES / "loras" / "light.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state_home"))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))


def at(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands of this process ask `hub`."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def started(hub: HubServer, *arguments: str) -> subprocess.Popen[str]:
    """Start the command as a process of its own that asks `hub`."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "modelpool", "models", "get", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_the_example_needs_no_network_and_is_usable(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    got = command("models", "get", "shapes")
    assert got.code == 0, got.err
    assert 'shapes: Stable Diffusion 1; use it: modelpool generate "..." --model shapes\n' in got.err
    assert "light: LoRA; use it: --lora light\n" in got.err
    assert Path("models/shapes.safetensors").read_bytes() == MODEL
    assert Path("loras/light.safetensors").read_bytes() == LORA
    assert command("models", "get", "shapes").code == 0, "what is there stays"
    Path("models/shapes.safetensors").write_bytes(b"my own")
    refused = command("models", "get", "shapes")
    assert refused.code == 2
    assert "exists with other content" in refused.err
    assert command("models", "get", "shapes", "--force").code == 0
    assert Path("models/shapes.safetensors").read_bytes() == MODEL


def test_two_processes_that_copy_the_example_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins and ends while the first one copies its first file."""
    copyfile, began = shutil.copyfile, []

    def copy(source: Path, target: Path) -> None:
        copyfile(source, target)
        if not began:
            began.append(target)
            copy_example(tmp_path / "models")

    monkeypatch.setattr(shutil, "copyfile", copy)
    copy_example(tmp_path / "models")
    assert (tmp_path / "models/shapes.safetensors").read_bytes() == MODEL
    assert not list(tmp_path.rglob(".*")), "nothing else is left"


def test_the_example_is_in_an_installation_too(tmp_path: Path) -> None:
    assert example_folder() == SHAPES
    code = f"""
import importlib.metadata, pathlib
place = pathlib.Path({str(tmp_path)!r})
(place / 'data/share/modelpool/shapes/models').mkdir(parents=True)
file = place / 'data/share/modelpool/shapes/models/shapes.safetensors'
file.touch()
(place / 'modelpool-0.dist-info').mkdir()
(place / 'modelpool-0.dist-info/METADATA').write_text('Name: modelpool\\nVersion: 0\\n')
(place / 'modelpool-0.dist-info/RECORD').write_text('data/share/modelpool/shapes/models/shapes.safetensors,,\\n')
import sys; sys.path.insert(0, str(place))
from modelpool.actors.config.example_model import example_folder
print(example_folder(place / 'no_clone'))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == str(tmp_path / "data/share/modelpool/shapes")


def test_a_fetch_that_is_killed_twice_goes_on_and_the_model_has_its_name_on_the_hub(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_hub(some__toy=Repository({"toy.safetensors": MODEL, "README.md": b"no"})) as hub:
        hub.bytes_per_second = 3e6
        for number in (signal.SIGKILL, signal.SIGINT):
            before = hub.sent_bytes
            process = started(hub, "some/toy")
            try:
                until = time.monotonic() + 60
                while hub.sent_bytes - before < 3_000_000 and time.monotonic() < until:
                    time.sleep(0.02)
                process.send_signal(number)
                _, said = process.communicate(timeout=60)
            finally:
                process.kill()
            assert process.returncode in (-signal.SIGKILL, 130), said
            assert not Path("models/some/toy/toy.safetensors").exists()
            assert ("the same command continues" in said) == (number == signal.SIGINT)
        hub.bytes_per_second, before = None, hub.sent_bytes
        process = started(hub, "some/toy")
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert hub.sent_bytes - before < len(MODEL) / 2, "only what was missing was fetched"
    assert re.search(
        r"some/toy at main \(commit cccccccc\): 1 file, 9\.6 MiB, \d\.\d MiB to fetch, to /\S+/models/some/toy ", said
    )
    assert [path.name for path in Path("models/some/toy").iterdir()] == ["toy.safetensors"]
    assert Path("models/some/toy/toy.safetensors").read_bytes() == MODEL
    assert 'toy: Stable Diffusion 1; use it: modelpool generate "..." --model toy\n' in said
    aliased = command("models", "alias", "mine", "some/toy")
    assert aliased.code == 0, aliased.err
    assert "toy.safetensors" in aliased.err


def test_a_dry_run_and_the_json_of_a_fetch(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving_hub(some__lights=Repository({"a.safetensors": LORA, "b.safetensors": MODEL}, token="t")) as hub:
        at(hub, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "t")
        dry = command("models", "get", "some/lights:a.safetensors", "--dry-run", "--folder", "elsewhere")
        assert dry.code == 0, dry.err
        assert "  a.safetensors (594.5 KiB)\nnothing was fetched" in dry.err
        assert hub.sent_bytes == 0
        got = command("models", "get", "some/lights:a.safetensors@main", "--folder", "elsewhere", "--json")
        assert got.code == 0, got.err
        plain: dict[str, Any] = json.loads(got.out)
        assert plain["files"] == [str(tmp_path / "elsewhere/some/lights/a.safetensors")]
        assert plain["commit"] == "c" * 40
        assert plain["names"] == []
        text = command("models", "get", "some/lights:a.safetensors", "--folder", "elsewhere")
        assert "all of it is there" in text.err
        assert f"run: modelpool models add {tmp_path / 'elsewhere'}\n" in text.err


def test_a_fetched_revision_says_by_which_name_it_is_used(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name with the revision led to the same command again."""
    with serving_hub(some__toy=Repository({"toy.safetensors": MODEL}, revisions=("main", "v1"))) as hub:
        at(hub, monkeypatch)
        got = command("models", "get", "some/toy@v1")
    assert got.code == 0, got.err
    *_, line = got.err.splitlines()
    assert line == "its name in jobs is toy, without the revision: some/toy@v1 means the hub's cache"
    assert command("models", "alias", "mine", "some/toy").code == 0
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("some/toy@v1", "some/toy/toy.safetensors@v1"):
        refused = command("models", "alias", "other", name)
        assert refused.code == 2
        said = " ".join(refused.err.split())
        assert "of some/toy, a folder of models has 'toy' without one: use that name" in said, said
    other = command("models", "alias", "other", "some/other@v1")
    assert "fetch it first: modelpool models get some/other@v1" in " ".join(other.err.split())


@pytest.mark.slow
def test_a_diffusers_folder_is_a_model_when_all_of_it_is_there(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    converted = command("convert", str(SHAPES / "models" / "shapes.safetensors"), "-o", str(made), "--to", "diffusers")
    assert converted.code == 0, converted.err
    files = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    beside = {"README.md": b"text", "shapes.ckpt": b"a pickle", "unet/diffusion_pytorch_model.bin": b"a pickle"}
    with serving_hub(some__fold=Repository({**files, **beside})) as hub:
        at(hub, monkeypatch)
        got = command("models", "get", "some/fold")
    assert got.code == 0, got.err
    place = tmp_path / "models" / "some" / "fold"
    assert {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()} == set(files)
    assert "use it: modelpool generate" in got.err
    assert command("models", "alias", "mine", "some/fold").code == 0


#: arguments, and a part of the line that refuses them
REFUSED = {
    "offline": (("some/toy",), "HF_HUB_OFFLINE is set, so nothing is fetched"),
    "no name": (("toy",), "MODEL: found 'toy', expected ORG/NAME"),
    "out of the folder": (("some/toy:../x.gguf",), "MODEL: found 'some/toy:../x.gguf'"),
    "missing": (("some/other",), "some/other: the hub has no such repository for this user (HTTP 401)"),
    "a wrong file": (("some/toy:tox.safetensors",), "did you mean 'toy.safetensors'?"),
    "a wrong revision": (("some/toy@fp16",), "some/toy: the hub has no revision 'fp16' of it"),
    "a variant of a file": (("some/toy", "--variant", "fp16"), "--variant: found 'fp16', expected none"),
}


def test_every_refusal_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_hub(some__toy=Repository({"toy.safetensors": MODEL})) as hub:
        at(hub, monkeypatch)
        for case, (arguments, said) in REFUSED.items():
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", case == "offline")
            refused = command("models", "get", *arguments)
            assert refused.code == 2, case
            *_, line = refused.err.splitlines()
            assert line.startswith("modelpool: "), case
            assert said in line, case
        assert hub.sent_bytes == 0


def test_commands_without_models_lead_to_them(command: Command) -> None:
    Path("models").mkdir()
    for arguments in (("models",), ("doctor",), ("doctor", "--json")):
        ended = command(*arguments)
        assert "`modelpool models get shapes`" in " ".join(ended.out.split()), arguments
    with pytest.raises(UserError, match=r"this pool has no models; `modelpool models get shapes` copies"):
        only_model([])
    command("models", "get", "shapes")
    assert "`modelpool models get shapes`" not in command("doctor").out
    Path("modelpool.toml").write_text('[models]\nsources = ["s3://bucket/models/"]\ncache = "cache"\n')
    found = " ".join(command("doctor").out.split())
    assert "no files of weights in any folder, and 1 source" in found
    assert "`modelpool models get shapes`" not in found


def test_a_pool_without_a_configuration_has_the_example(command: Command) -> None:
    """In a clone by its preset, in an installation by the files that the wheel brings."""
    found = PoolConfig.find()
    assert found.models.folders == (SHAPES / "models",)
    assert "only the example model is there" in command("doctor").out
