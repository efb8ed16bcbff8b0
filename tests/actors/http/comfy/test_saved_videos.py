"""Files of nodes that save animations open in other programs: a browser shows them, and FFmpeg reads their frames."""

from __future__ import annotations

import json
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from modelpool import PoolConfig, VideoResult
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from tests.actors.chromium import CHROMIUM, NO_CHROMIUM, open_chromium
from tests.actors.golden_steps import VIDEO
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import write_transformer

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
NAMES = PoolNames({VIDEO: "Wan text-to-video"}, [])
WIDTH, HEIGHT, FRAMES, RATE = 64, 48, 5, 8
FFPROBE = shutil.which("ffprobe")
#: nodes that save, by name of the file: class, settings, and what FFmpeg calls codec and pixels
SAVED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lossless.webp": ("SaveAnimatedWEBP", {"fps": RATE, "lossless": True, "quality": 80, "method": "default"}, ""),
    "small.webp": ("SaveAnimatedWEBP", {"fps": RATE, "lossless": False, "quality": 60, "method": "default"}, ""),
    "vp9.webm": ("SaveWEBM", {"codec": "vp9", "fps": RATE, "crf": 32.0}, "vp9"),
    "video.mp4": ("SaveVideo", {"format": "auto", "codec": "auto"}, "h264"),
    "combined.gif": ("VHS_VideoCombine", {"frame_rate": RATE, "format": "image/gif", "loop_count": 0}, "gif"),
}
#: shows a file as a page would, and says what the browser knows of it
SHOW = """(name) => new Promise((done, failed) => {
    const is_image = /webp$|gif$/.test(name);
    const shown = document.createElement(is_image ? "img" : "video");
    shown.onerror = () => failed(new Error(`${name} does not open: ${shown.error ? shown.error.message : ""}`));
    const size = () => is_image ? [shown.naturalWidth, shown.naturalHeight, 0]
        : [shown.videoWidth, shown.videoHeight, shown.duration];
    shown[is_image ? "onload" : "onloadeddata"] = () => done(size());
    shown.src = name;
    document.body.append(shown);
})"""


def saving(name: str) -> Graph:
    kind, settings, _ = SAVED[name]
    graph = basic(VIDEO, steps=2)
    graph["blank"] = node("EmptyHunyuanLatentVideo", width=WIDTH, height=HEIGHT, length=FRAMES, batch_size=1)
    source = {"images": ["decoded", 0]}
    if kind == "SaveVideo":
        graph["made"], source = node("CreateVideo", images=["decoded", 0], fps=float(RATE)), {"video": ["made", 0]}
    graph["saved"] = node(kind, **source, filename_prefix="video", **settings)
    return graph


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VideoResult]:
    """The video of each node, with its file."""
    folder = tmp_path_factory.mktemp("videos")
    write_transformer(folder / "models", VIDEO)
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder / "models"], workers=1)
    requests = [
        request
        for name in SAVED
        for output in outputs_of(saving(name), NAMES)
        for request in requests_of(output, NAMES, lambda name: pytest.fail(f"reads {name}"))
    ]
    with open_real_pool(config) as pool:
        found = {each.index: each for each in pool.submit(requests, output=folder).videos()}
    return dict(zip(SAVED, (found[place] for place in range(len(SAVED))), strict=True))


def test_other_programs_read_the_frames(saved: dict[str, VideoResult]) -> None:
    frames = saved["lossless.webp"].frames
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert np.ptp(frames) > 0
    for name, result in saved.items():
        codec = SAVED[name][2]
        np.testing.assert_array_equal(result.frames, frames, err_msg=name)
        assert result.path is not None
        assert result.path.suffix == Path(name).suffix
        if not codec:  # FFmpeg reads no animated WebP
            with Image.open(result.path) as opened:
                assert (opened.format, opened.size, getattr(opened, "n_frames", 1)) == ("WEBP", (WIDTH, HEIGHT), FRAMES)
                read = np.stack([np.asarray(_frame(opened, place)) for place in range(FRAMES)])
            assert np.array_equal(read, frames) == (name == "lossless.webp")
            continue
        with av.open(str(result.path)) as container:
            stream = container.streams.video[0]
            assert (stream.codec_context.name, stream.width, stream.height) == (codec, WIDTH, HEIGHT), name
            assert float(stream.average_rate or 0) == pytest.approx(RATE, rel=0.05), name
            assert len(list(container.decode(video=0))) == FRAMES, name


def _frame(opened: Image.Image, place: int) -> Image.Image:
    opened.seek(place)
    return opened.convert("RGB")


def probed(path: Path) -> dict[str, Any]:
    """What ffprobe says of the first stream of a file, of which it reads all frames."""
    assert FFPROBE is not None
    asked = "stream=codec_name,width,height,avg_frame_rate,nb_read_frames,pix_fmt"
    command = [FFPROBE, "-v", "error", "-count_frames", "-show_entries", asked, "-of", "json", str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, f"{path.name}: {answer.stderr}"
    (stream, *_) = json.loads(answer.stdout)["streams"]
    return dict(stream, errors=answer.stderr)


@pytest.mark.skipif(FFPROBE is None, reason="needs ffprobe; apt-get install ffmpeg")
def test_ffprobe_finds_what_is_declared(saved: dict[str, VideoResult]) -> None:
    """Codec, size, number of frames, and frame rate. ffprobe decodes no animated WebP: it knows that it is one."""
    wrong = []
    for name, result in saved.items():
        assert result.path is not None
        found = probed(result.path)
        codec = SAVED[name][2]
        if not codec:
            wrong += [] if found["codec_name"] == "webp" else [(name, found)]
            continue
        shown = found["codec_name"], found["width"], found["height"], int(found["nb_read_frames"])
        rate = float(Fraction(found["avg_frame_rate"]))
        if shown != (codec, WIDTH, HEIGHT, FRAMES) or abs(rate - RATE) > 0.05 * RATE or found["errors"]:
            wrong.append((name, found))
    assert not wrong, wrong


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_browser_shows_them(saved: dict[str, VideoResult], tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs playwright: ./scripts/setup dev")
    (tmp_path / "page.html").write_text("<!doctype html><body></body>")
    wrong = []
    with open_chromium() as browser:
        page = browser.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        for name, result in saved.items():
            assert result.path is not None
            try:
                width, height, seconds = page.evaluate(SHOW, result.path.as_uri())
            except Exception as problem:
                wrong.append(f"{name}: {str(problem).splitlines()[0]}")
                continue
            if (width, height) != (WIDTH, HEIGHT) or (seconds and abs(seconds - FRAMES / RATE) > 0.2):
                wrong.append(f"{name}: {width}x{height}, {seconds} seconds")
    assert not wrong, "\n".join(wrong)
