"""`modelpool models`, `inspect` and `status`: what they show, to people and to programs."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from modelpool.actors.graph.features.recipe import RecipeImages
from modelpool.actors.outputs.folder import write_atomically
from modelpool.actors.outputs.image_file import RECIPE_KEY, encode_png
from modelpool.actors.outputs.output_file import encoded
from modelpool.pool.values.core.stage_params import AudioSamples, VideoFrames
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import MODELS, FakePool, pixels_for
from tests.actors.outputs.test_image_file import RECIPE
from tests.architecture.source_tree import ROOT

SHAPES = ROOT / "examples" / "shapes"
MODEL = SHAPES / "models" / "shapes.safetensors"
LIGHT = SHAPES / "loras" / "light.safetensors"


@pytest.fixture
def shapes_config(tmp_path: Path) -> str:
    """A configuration that names the folders of the example."""
    path = tmp_path / "shapes.toml"
    path.write_text(f'[models]\nfolders = ["{SHAPES / "models"}"]\nloras = ["{SHAPES / "loras"}"]\n')
    return str(path)


def weights_file(path: Path, **shapes: tuple[int, ...]) -> Path:
    """A whole safetensors file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def test_models_and_loras_are_listed_with_what_is_wrong_with_them(command: Command) -> None:
    ended = command("models", "--pool", "mine", pool=FakePool(model_names=MODELS))
    assert ended.code == 0
    assert re.search(r"^shapes +SD 1 +64x64 +5\.0 MiB +/models/shapes\.safetensors$", ended.out, re.MULTILINE)
    assert re.search(r"^light +24 modules, rank 4; trigger words: light lines +40\.0 KiB", ended.out, re.MULTILINE)
    assert re.search(r"^torn +torn\.safetensors: too short", ended.out, re.MULTILINE)


def test_models_for_programs_are_one_object_each(command: Command) -> None:
    ended = command("models", "--pool", "mine", "--json")
    assert [(o["kind"], o["name"]) for o in ended.objects] == [("model", "shapes"), ("lora", "light"), ("lora", "torn")]


def test_the_models_of_a_configuration_are_listed_without_a_pool(command: Command, shapes_config: str) -> None:
    ended = command("models", "--config", shapes_config, "--json")
    assert ended.opened == ()
    assert [(o["kind"], o["name"], o["problem"]) for o in ended.objects] == [
        ("model", "shapes", ""),
        ("lora", "light", ""),
        ("lora", "outline", ""),
    ]


def test_the_folders_models_and_loras_are_looked_through_where_nothing_is_configured(command: Command) -> None:
    Path("models").mkdir()
    Path("loras").mkdir()
    weights_file(Path("models/mine.safetensors"), strange=(2, 2))
    [listed] = command("models", "--json").objects
    assert listed["name"] == "mine"
    assert listed["problem"] != ""
    Path("models/mine.safetensors").unlink()
    ended = command("models")
    assert re.fullmatch(r"No models found in .*/models: put \.safetensors files there, .*\n", ended.out)


def test_a_checkpoint_is_told_by_component(command: Command) -> None:
    [found] = command("inspect", str(MODEL), "--json").objects
    assert (found["kind"], found["width"], found["height"]) == ("checkpoint", 64, 64)
    assert {c["role"] for c in found["components"]} == {"text_encoder", "diffusion_model", "vae"}
    assert all(c["parameters"] > 0 and c["storage_bytes"] > 0 for c in found["components"])
    assert found["running"]["components"].keys() == {c["role"] for c in found["components"]}
    assert " because the weights are stored" in found["running"]["components"]["diffusion_model"]
    assert found["running"]["calls"] == "as usual"
    ended = command("inspect", str(MODEL))
    assert f"on this machine  {found['running']['device']}" in ended.out
    assert f"sha256       {found['sha256']}" in ended.out
    assert re.search(r"^diffusion model +\d+ +[\d,]+ +[\d.]+ MiB +F16 [\d.]+ MiB$", ended.out, re.MULTILINE)


def test_a_lora_is_told_with_the_models_that_it_belongs_to(command: Command, shapes_config: str) -> None:
    [found] = command("inspect", str(LIGHT), "--config", shapes_config, "--json").objects
    assert found["kind"] == "lora"
    [match] = found["models"]
    assert (match["model"], match["belongs"]) == ("shapes", True)
    assert re.fullmatch(r"yes: (\d+) of its \1 keys matched", match["verdict"])


def test_a_lora_of_another_architecture_says_how_many_of_its_keys_matched(
    command: Command, shapes_config: str, tmp_path: Path
) -> None:
    name = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    stranger = weights_file(
        tmp_path / "stranger.safetensors", **{f"{name}.lora_up.weight": (8, 4), f"{name}.lora_down.weight": (4, 8)}
    )
    [found] = command("inspect", str(stranger), "--config", shapes_config, "--json").objects
    [match] = found["models"]
    assert match["belongs"] is False
    assert "0 of its 1 key matched" in match["verdict"]


def test_a_image_shows_its_recipe(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    write_atomically(path, encode_png(pixels_for(RECIPE), RECIPE))
    [found] = command("inspect", str(path), "--json").objects
    assert found == {
        "kind": "image",
        "path": str(path),
        "digest": RECIPE.digest,
        "recipe": json.loads(json.dumps(RECIPE.as_json())),
    }
    ended = command("inspect", str(path))
    for fact in ("prompt +a red circle", "LoRA light +strength 0.8", "sampler +euler, karras schedule, 20 steps"):
        assert re.search(rf"^{fact}", ended.out, re.MULTILINE), fact


@pytest.mark.parametrize("wrong", [{"hires": "2:0.5"}, {"image_cfg": "much"}, {"more_references": 5}])
def test_a_recipe_with_values_of_other_types_is_refused(
    command: Command, tmp_path: Path, wrong: dict[str, object]
) -> None:
    text = PngInfo()
    text.add_text(RECIPE_KEY, json.dumps({**RECIPE.as_json(), "pictures": {**asdict(RecipeImages()), **wrong}}))
    path = tmp_path / "strange.png"
    Image.new("RGB", (8, 8)).save(path, pnginfo=text)
    ended = command("inspect", str(path))
    assert ended.code == 2
    assert re.search(r"strange\.png: the recipe in this (file|image) cannot be read", ended.err)


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"frames": 5, "frame_rate": 8.0, "format": "gif", "width": 32, "height": 16}, "frames +5, 8 per second"),
        ({"seconds": 0.5, "format": "wav", "width": 0, "height": 0}, "length +0.5 seconds"),
    ],
)
def test_a_video_and_a_audio_show_their_recipe(
    command: Command, tmp_path: Path, fields: dict[str, object], fact: str
) -> None:
    recipe = replace(RECIPE, **fields)
    made = (
        VideoFrames(np.zeros((5, 16, 32, 3), np.uint8), 8.0)
        if recipe.frames
        else AudioSamples(np.zeros((9, 2), np.float32), 8000)
    )
    path = tmp_path / f"made.{recipe.ending}"
    write_atomically(path, encoded(made, recipe))
    [found] = command("inspect", str(path), "--json").objects
    kind = "video" if recipe.frames else "audio"
    assert (found["kind"], found["digest"]) == (kind, recipe.digest)
    assert re.search(rf"^{fact}", command("inspect", str(path)).out, re.MULTILINE)


def test_a_image_of_another_program_shows_its_parameters(command: Command, tmp_path: Path) -> None:
    from PIL import PngImagePlugin

    text = PngImagePlugin.PngInfo()
    text.add_text("parameters", "a hill\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 8x8")
    path = tmp_path / "other.png"
    Image.new("RGB", (8, 8)).save(path, pnginfo=text)
    ended = command("inspect", str(path))
    assert ended.code == 0
    assert re.search(r"^Sampler +Euler a$", ended.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file"),
        (b"", "x.safetensors: "),
        (b"hello, this is no weights file at all", "x.safetensors: "),
        ("half", "x.safetensors: truncated"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    command: Command, tmp_path: Path, content: bytes | str | None, complaint: str
) -> None:
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(MODEL.read_bytes()[:100_000] if isinstance(content, str) else content)
    ended = command("inspect", str(path))
    assert ended.code == 2
    assert ended.out == ""
    [line] = ended.err.splitlines()
    assert complaint in line


def test_a_folder_is_not_a_file(command: Command, tmp_path: Path) -> None:
    assert "is a folder" in command("inspect", str(tmp_path)).err


def test_status_shows_workers_queues_and_troubles(command: Command) -> None:
    ended = command("status", "mine")
    assert ended.opened[0].pool == "mine"
    assert re.search(r"^gpu-0 +busy +sim:0 +sample +12\.0 MiB +64\.0 MiB +shapes/vae$", ended.out, re.MULTILINE)
    assert re.search(r"^gpu-1 +starting \(restarts: 1\)", ended.out, re.MULTILINE)
    assert re.search(r"^jobs +4 live, 10 succeeded, 1 failed, 0 cancelled$", ended.out, re.MULTILINE)
    assert re.search(r"^waiting +3 sample$", ended.out, re.MULTILINE)
    assert re.search(r"^tasks +27 of 30 had all weights resident$", ended.out, re.MULTILINE)
    assert re.search(r"^gpu-1 +killed by signal 9$", ended.out, re.MULTILINE)


def test_status_shows_workers_that_do_not_answer(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakePool().status().workers
    workers = (replace(workers[0], silent_seconds=12.3), replace(workers[1], not_up="starting", silent_seconds=40.0))
    status = replace(FakePool().status(), workers=workers)
    monkeypatch.setattr(FakePool, "status", lambda self: status)
    for arguments in (["status", "mine"], ["top", "mine", "--once"]):
        out = command(*arguments).out
        assert re.search(r"^gpu-0 +not answering for 12 s$", out, re.MULTILINE)
        assert re.search(r"^gpu-1 +starting; not answering for 40 s$", out, re.MULTILINE)


def test_status_for_programs_is_one_object(command: Command) -> None:
    [found] = command("status", "mine", "--json").objects
    assert [w["id"] for w in found["workers"]] == ["gpu-0", "gpu-1"]
    assert found["jobs"]["succeeded"] == 10


def test_status_and_down_say_when_nothing_runs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for arguments in (["status"], ["down"], ["down", "other"]):
        ended = command(*arguments)
        assert ended.code == 2
        assert "is running on this machine; start one with `modelpool up`" in ended.err
        assert ended.opened == ()
