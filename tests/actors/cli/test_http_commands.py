"""`modelpool serve` and `modelpool run`: what they refuse before a pool starts, and what `run` generates."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from modelpool.actors.client.start_checks import NameCheck
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool, KnownNames
from tests.actors.http.comfy.comfy_examples import basic, node
from tests.actors.http.comfy.test_comfy_api import changed
from tests.actors.http.comfy.test_comfy_graph import with_start


def test_serve_refuses_other_machines_without_a_key_before_a_pool_starts(command: Command) -> None:
    ended = command("serve", "--host", "0.0.0.0")
    assert (ended.code, ended.opened) == (2, ())
    assert "[serve.keys]" in ended.err


def test_a_server_that_does_not_start_leaves_no_folder(command: Command, tmp_path: Path) -> None:
    """It made ./outputs before it looked at addresses and pools."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for given in (("--host", "0.0.0.0"), ("--port", str(taken.getsockname()[1]))):
            assert command("serve", *given).code == 2
            assert not (tmp_path / "outputs").exists()


def test_serve_opens_the_pool_and_serves_it(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[tuple[object, ...]] = []
    monkeypatch.setattr("modelpool.actors.http.server.serve", lambda *given: served.append(given))
    ended = command("serve", "--port", "0", "--pool", "mine", "--out", "here")
    assert ended.code == 0
    assert [options.pool for options in ended.opened] == ["mine"]
    ((pool, settings, folder, listening, *_),) = served
    assert isinstance(pool, FakePool)
    assert pool.closed
    assert (settings.port, folder, listening.fileno()) == (0, tmp_path / "here", -1)


def test_serve_refuses_outputs_in_a_store_before_a_pool_starts(command: Command, tmp_path: Path) -> None:
    """It wrote to a folder `s3:` of the working folder, or to ./outputs, without a word."""
    ended = command("serve", "--port", "0", "--out", "s3://bucket/x")
    assert (ended.code, ended.opened) == (2, ())
    assert "--out: found 's3://bucket/x', expected a folder" in ended.err.replace("\n", " ")
    for section in ("output", "serve"):
        (tmp_path / "pool.toml").write_text(f'[{section}]\nfolder = "s3://bucket/x"\n')
        ended = command("serve", "--port", "0", "--config", "pool.toml")
        assert (ended.code, ended.opened, "s3://bucket/x" in ended.err) == (2, (), True), section
        assert section in ended.err


def test_run_generates_a_workflow_with_the_image_next_to_it(command: Command, tmp_path: Path) -> None:
    (tmp_path / "flow" / "input").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(tmp_path / "flow" / "input" / "clear.png")
    (tmp_path / "flow" / "flow.json").write_text(json.dumps(with_start(denoise=0.5)))
    pool = FakePool()
    ended = command("run", "flow/flow.json", "--json", pool=pool)
    assert ended.code == 0, ended.err
    (request,) = pool.submitted
    assert (request.prompt, request.steps) == ("a red circle", 16)
    assert Path(ended.objects[0]["path"]).is_file()


@pytest.mark.filterwarnings("default:.*is not read:UserWarning")
def test_run_says_what_nodes_do_not_get_and_reads_the_sizes_of_images(command: Command, tmp_path: Path) -> None:
    """The server said it, and the command did not; and it did not know the size of an image."""
    Image.new("RGB", (64, 48)).save(tmp_path / "clear.png")
    graph = basic()
    graph["photo"] = node("LoadImage", image="clear.png")
    graph["size"] = node("GetImageSize", image=["photo", 0])
    graph["blank"]["inputs"] |= {"width": ["size", 0], "height": ["size", 1]}
    graph["guided"] = node("FluxGuidance", conditioning=graph["sampler"]["inputs"]["positive"], guidance=3.5)
    graph["sampler"]["inputs"]["positive"] = ["guided", 0]
    (tmp_path / "work.json").write_text(json.dumps(graph))
    pool = FakePool()
    ended = command("run", "work.json", pool=pool)
    assert ended.code == 0, ended.err
    assert [(request.width, request.height) for request in pool.submitted] == [(64, 48)]
    assert "work.json: node sampler: the guidance 3.5 is not read" in ended.err.replace("\n", " ")


def test_run_reads_the_workflow_in_an_image_of_comfyui(command: Command, tmp_path: Path) -> None:
    texts = PngInfo()
    texts.add_text("prompt", json.dumps(basic(steps=7)))
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png", pnginfo=texts)
    pool = FakePool()
    ended = command("run", "image.png", pool=pool)
    assert ended.code == 0, ended.err
    assert [(request.steps, request.prompt) for request in pool.submitted] == [(7, "a red circle")]
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    ended = command("run", "plain.png")
    assert (ended.code, ended.opened, "no workflow" in ended.err) == (2, (), True)
    (tmp_path / "cut.png").write_bytes((tmp_path / "image.png").read_bytes()[:60])
    assert command("run", "cut.png").code == 2


def test_run_names_what_is_wrong_with_a_workflow(command: Command, tmp_path: Path) -> None:
    (tmp_path / "flow.json").write_text(json.dumps({"3": {"class_type": "FancySampler", "inputs": {}}}))
    ended = command("run", "flow.json")
    assert (ended.code, ended.opened, "FancySampler" in ended.err) == (2, (), True)
    ended = command("run", "none.json")
    assert (ended.code, "none.json" in ended.err) == (2, True)
    (tmp_path / "flow.json").write_text("{")
    assert command("run", "flow.json").opened == ()


def test_run_checks_models_names_and_images_before_a_pool_starts(command: Command, tmp_path: Path) -> None:
    """As `generate` does. For a running pool, whose names are not known here, the nodes and the images."""

    def written(graph: dict[str, Any]) -> None:
        (tmp_path / "flow" / "flow.json").write_text(json.dumps(graph))

    (tmp_path / "flow").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "secret.png")
    names = KnownNames("shapes", loras=("light",))
    graph = with_start(denoise=0.5)
    for image in ("../secret.png", str(tmp_path / "secret.png"), "clear.png"):
        graph["9"]["inputs"]["image"] = image
        written(graph)
        for known in (None, names):
            ended = command("run", "flow/flow.json", names=known)
            assert (ended.code, ended.opened) == (2, ()), image
            assert f"image: found '{image}', expected a file next to" in ended.err, ended.err
    written(changed(steps=9))
    ended = command("run", "flow/flow.json", names=KnownNames("portraits"))
    assert (ended.code, ended.opened, "ckpt_name" in ended.err) == (2, (), True)
    for option, word in ((("--name", "{id}"), "id"), (("--preview", "x.txt"), ".webp")):
        ended = command("run", "flow/flow.json", *option, names=KnownNames("shapes", loras=("light",)))
        assert (ended.code, ended.opened, word in ended.err) == (2, (), True)
    pool = FakePool()
    names = KnownNames("shapes", loras=("light",))
    ended = command("run", "flow/flow.json", "--name", "w-{seed}", "--preview", "p.webp", pool=pool, names=names)
    assert ended.code == 0, ended.err
    assert [request.steps for request in pool.submitted] == [9, 9]
    assert (pool.templates, (tmp_path / "p.webp").is_file()) == (["w-{seed}"], True)


def test_nodes_of_users_are_left_to_a_running_pool(command: Command, tmp_path: Path) -> None:
    """Which has its own: they were refused as unknown."""
    graph = {"nodes": {"a": {"kind": "upscale", "upscale": {"model": "x"}, "inputs": {"image": "b"}},
                       "b": {"kind": "operation", "name": "add_frame", "settings": {"pixels": 1}}},
             "output": "a"}  # fmt: skip
    (tmp_path / "own.json").write_text(json.dumps(graph))
    (tmp_path / "comfy.json").write_text(json.dumps({"3": {"class_type": "add_frame", "inputs": {}}}))
    for path in ("own.json", "comfy.json"):
        refused = command("run", path, names=NameCheck(None))
        assert (refused.code, refused.opened, "add_frame" in refused.err) == (2, (), True), refused.err
        assert command("run", path, names=NameCheck.of_running_pool()).opened != (), path


def test_a_seed_is_drawn_for_runs_without_one_and_is_in_the_command_that_resumes(
    command: Command, tmp_path: Path
) -> None:
    """A command with --resume would have generated another image."""
    run = {"kind": "sample", "request": {"model": "shapes", "prompt": "a cat"}}
    decode = {"kind": "decode", "model": "shapes", "inputs": {"latent": "run"}}
    graph = {"nodes": {"run": run, "image": decode}, "output": "image"}
    (tmp_path / "own.json").write_text(json.dumps(graph))
    pool = FakePool()

    def interrupt(index: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert pool.jobs[0].wait_cancelled(timeout=30)

    pool.before_each = interrupt
    ended = command("run", "own.json", pool=pool, names=KnownNames("shapes"))
    (request,) = pool.submitted
    assert request.seed is not None
    assert f"--set seed={request.seed} --resume" in ended.err
    again = FakePool()
    command("run", "own.json", "--set", f"seed={request.seed}", pool=again, names=KnownNames("shapes"))
    assert [each.seed for each in again.submitted] == [request.seed]
