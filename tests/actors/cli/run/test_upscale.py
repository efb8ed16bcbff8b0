"""`modelpool upscale` on a real pool in this process, with a tiny upscaler."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file

from modelpool.actors.cli.main import run
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import Session
from modelpool.actors.client.client import ModelPool
from modelpool.actors.client.start_checks import NameCheck
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.outputs.enlarged_file import encode_enlarged, source_facts
from modelpool.pool.inference.upscalers.build_upscaler import plan_upscaler
from tests.actors.cli.conftest import Ended
from tests.actors.http.conftest import CONFIG
from tests.actors.loop_connection import open_real_pool
from tests.pool.inference.upscalers.tiny_upscalers import tiny_state

Upscale = Callable[..., Ended]


@pytest.fixture
def upscale(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upscale:
    """`upscale("a.png", "--with", "tiny")` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "upscale_models"
    folder.mkdir(parents=True)
    save_file(tiny_state("compact_2x"), folder / "tiny.safetensors")
    config = PoolConfig.load(CONFIG).override(device="cpu", workers=1, models=[tmp_path / "models"])

    def run_command(*arguments: str) -> Ended:
        opened: list[PoolOptions] = []

        def open_one(options: PoolOptions) -> ModelPool:
            opened.append(options)
            return open_real_pool(config)

        words = ("upscale", *arguments)
        capfd.readouterr()
        code = run(list(words), Session(words, open_one, lambda options: NameCheck.of(config)))
        captured = capfd.readouterr()
        return Ended(code, captured.out, captured.err, tuple(opened))

    return run_command


def photo(width: int = 10, height: int = 8) -> Image.Image:
    values = np.arange(width * height * 3).reshape(height, width, 3) * 37 % 256
    return Image.fromarray(values.astype(np.uint8))


def enlarged(image: Image.Image) -> np.ndarray:
    """What the network makes of an image, computed without a pool."""
    state = tiny_state("compact_2x")
    network = plan_upscaler({key: tuple(value.shape) for key, value in state.items()}).build(state)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        made = network(pixels)[0].clamp(0, 1)
    return (made.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def test_results_have_the_pixels_of_the_network_and_the_format_and_metadata_of_their_image(upscale: Upscale) -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("parameters", "a cat\nSteps: 20, Sampler: Euler, Seed: 1")
    texts.add_itxt("note", "\u732b")
    photo().save("cat.png", pnginfo=texts)
    exif = Image.Exif()
    exif[0x0110], exif[0x0112] = "a camera", 6  # Model; Orientation: turned by 90 degrees
    photo().save("dog.jpg", quality=100, exif=exif)
    Path("other").mkdir()
    photo(6, 6).save("other/cat.bmp")
    ended = upscale("cat.png", "dog.jpg", "other/cat.bmp", "--with", "tiny:2", "--out", "big", "--json")
    assert ended.code == 0, ended.err
    assert [line["path"] for line in ended.objects] == [
        "big/cat-tiny-2x.png",
        "big/dog-tiny-2x.jpg",
        "big/cat-tiny-2x-2.png",
    ]
    with Image.open("big/cat-tiny-2x.png") as cat:
        assert np.abs(np.array(cat).astype(int) - enlarged(photo())).max() <= 1
        assert cat.info["parameters"].startswith("a cat")
        assert cat.info["note"] == "\u732b"
    with Image.open("big/dog-tiny-2x.jpg") as dog:
        assert dog.size == (16, 20), "upright"
        assert dog.getexif().get(0x0110) == "a camera"
        assert 0x0112 not in dog.getexif()


@pytest.mark.parametrize("kind", ["jpg", "webp", "png", "old.png"])
def test_a_result_has_no_orientation_in_any_of_its_metadata(kind: str, tmp_path: Path) -> None:
    """XMP has one, too, and so have the texts of a PNG, also as older programs wrote EXIF."""
    exif, xmp = Image.Exif(), '<rdf:Description tiff:Orientation="6" xmp:Rating="5"/>'
    exif[0x0110], exif[0x0112] = "a camera", 6
    path, texts = tmp_path / f"a.{kind}", PngImagePlugin.PngInfo()
    options: dict[str, Any] = {"xmp": xmp.encode(), "exif": exif}
    if kind.endswith("png"):
        texts.add_itxt("XML:com.adobe.xmp", xmp)
        if kind == "old.png":
            data = exif.tobytes()
            texts.add_text("Raw profile type exif", f"\nexif\n{len(data):8}\n{data.hex()}\n")
        options = {"pnginfo": texts} if kind == "old.png" else {"pnginfo": texts, "exif": exif}
    photo().save(path, **options)
    facts = source_facts("IMAGE", path)
    made = Image.open(BytesIO(encode_enlarged(np.array(photo(8, 10)), facts, facts.ending)))
    made.load()
    assert made.getexif().get(0x0112) in (None, 1)
    assert made.getexif().get(0x0110) == "a camera"
    found = str(made.info.get("xmp", made.info.get("XML:com.adobe.xmp")))
    assert ('tiff:Orientation="1"' in found, "Rating" in found) == (True, True)


def test_the_same_command_skips_what_exists_and_needs_no_pool(upscale: Upscale) -> None:
    photo().save("a.png")
    assert upscale("a.png", "--with", "tiny", "--out", "big").code == 0
    before = Path("big/a-tiny.png").read_bytes()
    again = upscale("a.png", "--with", "tiny", "--out", "big")
    assert (again.code, again.opened) == (0, ())
    assert "1 image already in big and skipped" in again.err
    photo(4, 4).save("b.png")
    both = upscale("a.png", "b.png", "--with", "tiny", "--out", "big", "--format", "webp", "--quality", "100")
    assert (both.code, len(both.opened)) == (0, 1)
    with Image.open("big/b-tiny.webp") as lossless:
        assert np.abs(np.array(lossless).astype(int) - enlarged(photo(4, 4))).max() <= 1
    assert Path("big/a-tiny.png").read_bytes() == before


def test_mistakes_are_reported_before_a_pool_starts(upscale: Upscale) -> None:
    photo().save("a.png")
    Path("text.png").write_text("no image")
    for arguments, expected in (
        (("a.png", "--with", "tinny"), "unknown upscaler 'tinny'; did you mean 'tiny'?"),
        (("b.png", "--with", "tiny"), "IMAGE: found 'b.png', expected an existing file"),
        (("text.png", "--with", "tiny"), "text.png cannot be read as an image"),
        (("a.png", "--with", "tiny:99"), "upscale.scale: found 99"),
        (("a.png", "--with", "tiny", "--tile", "5"), "tile: found 5, expected"),
        (("a.png", "--with", "tiny", "--format", "mp4"), "png, webp, jpg or avif"),
    ):
        ended = upscale(*arguments, "--out", "big")
        assert (ended.code, ended.opened) == (2, ()), ended.err
        assert expected in ended.err.replace("\n", " ")
    assert not Path("big").exists() or not list(Path("big").iterdir())


def test_an_image_that_is_gone_fails_alone(upscale: Upscale, monkeypatch: pytest.MonkeyPatch) -> None:
    photo().save("a.png")
    photo().save("b.png")
    submit = ModelPool.upscale

    def remove_first(pool: ModelPool, image: Path, *rest: object, **more: object) -> object:
        Path("a.png").unlink(missing_ok=True)
        return submit(pool, image, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelPool, "upscale", remove_first)
    ended = upscale("a.png", "b.png", "--with", "tiny", "--out", "big")
    assert ended.code == 1
    assert "a.png: " in ended.err
    assert [path.name for path in Path("big").glob("*.png")] == ["b-tiny.png"]
