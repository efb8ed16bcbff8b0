"""Wrong input of a user is answered before a pool starts, with the field or file, the value found and the value
expected: the exit code is 2, and nothing is left behind.

Each of these was found by somebody who knew the documentation and not the code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from modelpool.actors.cli.main import run
from tests.each_case import each_case

ROOT = Path(__file__).resolve().parents[4]
SHAPES = ROOT / "examples/shapes"


class Folder:
    """A working folder with a configuration, in which commands run."""

    def __init__(self, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capfd = capfd
        self.write("pool.toml", f'[models]\nfolders = ["{SHAPES}/models"]\nloras = ["{SHAPES}/loras"]\n')

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def refused(self, *arguments: str) -> str:
        """Run a command that is refused; return what it prints."""
        before = sorted(self.path.rglob("*"))
        assert run([each.replace("HERE", str(self.path)) for each in arguments]) == 2
        assert sorted(self.path.rglob("*")) == before, "something was left behind"
        printed = self._capfd.readouterr()
        text = " ".join((printed.out + printed.err).split())
        assert "Traceback" not in text
        assert "starting the pool" not in text
        return text


@pytest.fixture
def folder(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELPOOL_STATE_DIR", str(tmp_path.parent / "state"))
    monkeypatch.setenv("COLUMNS", "300")
    return Folder(tmp_path, capfd)


GENERATE = ("generate", "a red circle", "--config", "HERE/pool.toml", "--out", "HERE/out")


@each_case(
    ("arguments", "told"),
    (
        (("--steps", "many"), "--steps: found 'many', expected a whole number"),
        (("--steps", "2.5"), "--steps: found '2.5', expected a whole number"),
        (("--cfg", "high"), "--cfg: found 'high', expected a number"),
        (("--device", "gpu"), "--device: found 'gpu', expected one of auto, cuda, rocm"),
        (("--lora", "light:strong"), "loras.0.strength: found 'strong', expected a number"),
        (("--out", ""), "--out: found '', expected a folder, or a URL"),
        (("--control", "canny=HERE/pool.toml"), "controls.image: HERE/pool.toml cannot be read as an image"),
        (("--upscale", "4x"), "unknown upscaler '4x'. There is none. `modelpool models` shows which files were found"),
    ),
)
def test_a_wrong_option_is_named_with_its_value(folder: Folder, arguments: tuple[str, ...], told: str) -> None:
    assert told.replace("HERE", str(folder.path)) in folder.refused(*GENERATE, *arguments)


def test_a_prompt_that_is_missing_is_named(folder: Folder) -> None:
    assert "PROMPT: missing, expected a text, or --like FILE" in folder.refused("generate", "--steps", "4")


@each_case(
    ("text", "told"),
    (
        ("[pool]\nvram = 5.5\n", "[pool] vram: found 5.5, expected a text"),
        ('[pool.models.sdxl]\ncompile = "blocks"\n', "[pool.models.sdxl]: unknown model 'sdxl'. Known: shapes."),
        ('[models]\npin = ["sdxl:2"]\n', "[models] pin: unknown model 'sdxl'"),
    ),
)
def test_a_wrong_configuration_names_section_and_key(folder: Folder, text: str, told: str) -> None:
    """Names of models in it were unknown to the controller, which did not say where they are written."""
    models = f'folders = ["{SHAPES}/models"]\n'
    folder.write("wrong.toml", text + models if "[models]" in text else f"{text}[models]\n{models}")
    assert told in folder.refused("generate", "a", "--config", "HERE/wrong.toml", "--out", "HERE/out")


def test_a_folder_without_a_model_is_told_with_what_is_in_it(folder: Folder) -> None:
    """A name was asked for, with which the command would have failed too."""
    folder.write("lora.toml", f'[models]\nfolders = ["{SHAPES}/loras"]\n')
    told = folder.refused("generate", "a", "--config", "HERE/lora.toml", "--out", "HERE/out")
    assert f"no model was found in {SHAPES}/loras; found light (LoRA), outline (LoRA): put a checkpoint there" in told


@each_case(
    ("image", "told"),
    (
        ("damaged.png", "the image cannot be read"),
        ("float.tif", "found 'an image of mode F'"),
        ("huge.png", "expected up to 16384 pixels"),
    ),
)
def test_an_image_that_cannot_be_read_is_named_by_its_file(folder: Folder, image: str, told: str) -> None:
    """Only the field was named, and Pillow warned of a denial of service."""
    Image.radial_gradient("L").save(folder.path / "whole.png")
    content = (folder.path / "whole.png").read_bytes()
    (folder.path / "damaged.png").write_bytes(content[: len(content) // 2])
    Image.new("F", (64, 64)).save(folder.path / "float.tif")
    Image.new("1", (12000, 12000)).save(folder.path / "huge.png")
    printed = folder.refused(*GENERATE, "--image", f"HERE/{image}")
    assert f"image: {folder.path}/{image}: " in printed
    assert told in printed
    assert "bomb" not in printed


@each_case(
    ("arguments", "told"),
    (
        (("--shards", "0"), "--shards: found 0, expected a whole number from 1"),
        (("--shard-format", "parquet"), "--shard-format: found 'parquet', expected --shards N, too"),
        (("--column", "prompt=title"), "has no column 'title' for prompt; found caption"),
    ),
)
def test_options_of_job_files_that_would_be_ignored_are_refused(
    folder: Folder, arguments: tuple[str, ...], told: str
) -> None:
    """The outputs were files, or the error was about another column."""
    folder.write("jobs.csv", "caption\na red circle\n")
    asked = ("batch", "HERE/jobs.csv", "--model", "shapes", "--config", "HERE/pool.toml", "--out", "HERE/out")
    assert told in folder.refused(*asked, *arguments)


def test_a_model_under_the_name_of_a_lora_folder_is_no_lora(folder: Folder) -> None:
    shutil.copy(SHAPES / "models/shapes.safetensors", folder.path / "big.safetensors")
    folder.write("pool.toml", f'[models]\nfolders = ["{SHAPES}/models"]\nloras = ["{folder.path}"]\n')
    assert "'big' is a checkpoint, expected a LoRA" in folder.refused(*GENERATE, "--model", "shapes", "--lora", "big")


@each_case(
    ("arguments", "told"),
    (
        (("--vram", "1MiB"), "to encode with shapes/text_encoder"),
        (("--vram", "64MiB", "--size", "16384x16384"), "to sample with shapes/diffusion_model"),
        (
            ("--image", "HERE/start.png", "--strength", "0.01", "--steps", "4"),
            "strength: found 0.01, expected at least",
        ),
        (("--hires", "2:0.1", "--steps", "4"), "hires.strength: found 0.1, expected at least"),
        (("--negative", "embedding:worm"), "unknown embedding 'worm'. There is none. Put its file in a folder"),
    ),
)
def test_what_only_a_catalog_finds_is_told_before_a_pool_starts(
    folder: Folder, arguments: tuple[str, ...], told: str
) -> None:
    """A pool was started for each of them."""
    Image.new("RGB", (64, 64)).save(folder.path / "start.png")
    assert told in folder.refused(*GENERATE, "--model", "shapes", "--device", "sim", *arguments)


def test_every_prompt_is_checked_before_a_pool_starts(folder: Folder) -> None:
    told = folder.refused("generate", "a", "embedding:worm", "--config", "HERE/pool.toml", "--out", "HERE/out")
    assert "unknown embedding 'worm'" in told


def test_a_file_that_is_no_model_is_told_before_a_pool_starts(folder: Folder) -> None:
    folder.write("models/x.safetensors", "")
    save_file({"a.weight": np.zeros(2, np.float32)}, folder.path / "models/x.safetensors")
    folder.write("pool.toml", f'[models]\nfolders = ["{folder.path}/models"]\n')
    assert "models/x.safetensors: its 1 tensor matches no known architecture" in folder.refused(*GENERATE)


def test_wrong_images_of_lines_are_told_before_a_pool_starts(folder: Folder) -> None:
    """Files that were missing or no images were told at once, and damaged ones after the start of a pool."""
    whole, mask = folder.path / "whole.png", folder.path / "mask.png"
    Image.radial_gradient("L").save(whole)
    (folder.path / "damaged.png").write_bytes(whole.read_bytes()[:500])
    Image.new("L", (32, 32), 255).save(mask)
    lines = (
        {"image": "nowhere.png"},
        {"image": str(folder.path / "damaged.png")},
        {"image": str(whole), "mask": str(mask)},
        {"prompt": "embedding:worm"},
    )
    folder.write("jobs.jsonl", "".join(json.dumps({"prompt": "a", **line}) + "\n" for line in lines))
    asked = ("batch", "HERE/jobs.jsonl", "--model", "shapes", "--config", "HERE/pool.toml", "--out", "HERE/out")
    printed = folder.refused(*asked)
    for number, told in enumerate(("an existing file", "damaged.png: the image cannot", "found '32x32'", "'worm'"), 1):
        assert f"jobs.jsonl:{number}: " in printed
        assert told in printed
    assert "4 invalid lines, 0 valid" in printed


def test_a_file_that_is_no_workflow_is_named(folder: Folder) -> None:
    folder.write("list.json", "[]")
    told = folder.refused("run", "HERE/list.json", "--config", "HERE/pool.toml", "--out", "HERE/out")
    assert f"{folder.path}/list.json: expected a workflow: a table of nodes" in told


def test_an_image_without_metadata_is_told_so(folder: Folder) -> None:
    """The message was "found 'the texts none'"."""
    Image.new("RGB", (8, 8)).save(folder.path / "plain.png")
    told = folder.refused("generate", "--like", "HERE/plain.png", "--config", "HERE/pool.toml", "--out", "HERE/out")
    assert "plain.png: found no metadata, expected an image with metadata of modelpool, A1111 or ComfyUI" in told


@each_case(
    ("text", "told"),
    (
        ('[models]\nfolders = ["nowhere"]\n', "[models] folders: found"),
        (f'[models]\nfolders = ["{SHAPES}/models"]\npin = ["sdxl"]\n', "[models] pin: unknown model 'sdxl'"),
    ),
)
def test_a_persistent_pool_checks_its_configuration_too(folder: Folder, text: str, told: str) -> None:
    folder.write("up.toml", text)
    assert told in folder.refused("up", "--config", "HERE/up.toml")
