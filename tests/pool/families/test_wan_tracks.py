"""Wan 2.1 along tracks of points: what models of ATI and Wan-Move read of an image, by the formulas of their authors,
which this test computes cell by cell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.motion_tracks import tracked_image
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import TracksCondition
from modelpool.pool.values.specs.spec import Role
from tests.each_case import each_case
from tests.pool.families.test_seen_wan import BOTH, FIELDS, ONE, SEED, image
from tests.pool.families.test_videos_from_images import CONCATENATED
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel

FRAMES, CELLS, HEIGHT, WIDTH, CHANNELS = 9, 3, 6, 9, 16
Points = tuple[tuple[float, float, float], ...]


def line(x: float, y: float, right: float, down: float, seen: int = FRAMES) -> Points:
    """A track that moves by so many pixels in each frame."""
    return tuple((x + right * frame, y + down * frame, float(frame < seen)) for frame in range(FRAMES))


def shown(seed: int = 1, batch: int = 1) -> Tensor:
    """The input of a model: the mask of the first frame, and latents."""
    latent = torch.randn(batch, CHANNELS, CELLS, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(batch, 4, CELLS, HEIGHT, WIDTH)
    mask[:, :, 0] = 1
    return torch.cat([mask, latent], dim=1)


def bilinear(latent_CHW: Tensor, x: float, y: float) -> Tensor:
    """The latent at a place in cells; outside of it, zero."""
    found = torch.zeros(latent_CHW.shape[0])
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            if 0 <= row < HEIGHT and 0 <= column < WIDTH:
                found += latent_CHW[:, row, column] * (1 - abs(y - row)) * (1 - abs(x - column))
    return found


def ati(tracks: tuple[Points, ...], image_CTHW: Tensor, temperature: float, nearest: int) -> Tensor:
    """`patch_motion` of ATI without its training, one cell after the other."""
    found, short = image_CTHW.clone(), min(WIDTH, HEIGHT)
    latent = image_CTHW[4:]
    placed = [
        [((x - WIDTH * 4) / (short * 4), (y - HEIGHT * 4) / (short * 4), seen) for x, y, seen in track]
        for track in tracks
    ]
    features = []
    for track in placed:
        x, y = (
            min(1.0, max(-1.0, at / (side / short))) for at, side in zip(track[0][:2], (WIDTH, HEIGHT), strict=True)
        )
        features.append(bilinear(latent[:, 0], (x + 1) * WIDTH / 2 - 0.5, (y + 1) * HEIGHT / 2 - 0.5))
    for cell in range(1, CELLS):
        for row in range(HEIGHT):
            for column in range(WIDTH):
                at = (-1 + 2 * column / (WIDTH - 1)) * WIDTH / short, (-1 + 2 * row / (HEIGHT - 1)) * HEIGHT / short
                weights = []
                for track in placed:
                    of_cell = track[1 + 4 * (cell - 1) : 1 + 4 * cell]
                    seen = sum(point[2] for point in of_cell)
                    mean = [sum(point[axis] * point[2] for point in of_cell) / (seen + 1e-5) for axis in (0, 1)]
                    square = sum((a - b) ** 2 for a, b in zip(mean, at, strict=True))
                    weights.append(math.exp(-square * temperature) * min(seen, 1))
                best = sorted(range(len(weights)), key=lambda number: -weights[number])[:nearest]
                total = sum(weights[number] for number in best)
                mixed = sum((features[number] * weights[number] for number in best), torch.zeros(CHANNELS))
                found[4:, cell, row, column] = mixed + latent[:, cell, row, column] * (1 - min(total, 1))
                found[:4, cell, row, column] = total
    return found


TRACKS: dict[str, tuple[Points, ...]] = {
    "one": (line(20, 10, 3, 2),),
    "several": (line(20, 10, 3, 2), line(60, 40, -4, 0), line(5, 5, 0, 5, seen=4), line(33, 22, 0, 0)),
    "outside": (line(70, 44, 8, 3), line(-10, -5, 2, 2)),
}


@each_case("name", TRACKS)
def test_features_are_blended_along_tracks_as_ati_does(name: str) -> None:
    for temperature, nearest in ((220.0, 2), (30.0, 1), (8.0, 10)):
        tracks = TracksCondition("ati", TRACKS[name], temperature, nearest)
        one, other = shown(1), shown(2)
        found, negative = tracked_image(tracks, torch.cat([one, other]))
        assert torch.equal(found, negative)
        for row, source in zip(found, (one[0], other[0]), strict=True):
            torch.testing.assert_close(row, ati(TRACKS[name], source, temperature, nearest), atol=1e-4, rtol=0)


@each_case("name", TRACKS)
def test_features_are_copied_along_tracks_as_wan_move_does(name: str) -> None:
    source = shown(1, batch=2)
    found, negative = tracked_image(TracksCondition("move", TRACKS[name]), source)
    assert torch.equal(negative, source), "the negative prompt is for the image alone"
    expected = source.clone()
    for track in TRACKS[name]:
        cells = [(int(x // 8), int(y // 8), bool(seen)) for x, y, seen in track[::4]]
        inside = [seen and 0 <= x < WIDTH and 0 <= y < HEIGHT for x, y, seen in cells]
        for cell in range(1, CELLS):
            if inside[0] and inside[cell]:
                (first_x, first_y, _), (x, y, _) = cells[0], cells[cell]
                expected[:, 4:, cell, y, x] = source[:, 4:, 0, first_y, first_x]
    assert torch.equal(found, expected)


def test_behind_its_end_a_track_is_not_seen() -> None:
    whole = line(20, 10, 3, 2, seen=5)
    for method in ("ati", "move"):
        cut = tracked_image(TracksCondition(method, (whole[:5],)), shown())[0]
        torch.testing.assert_close(cut, tracked_image(TracksCondition(method, (whole,)), shown())[0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModel]:
    made = TinyFamilyModel(tmp_path_factory.mktemp("wan"), ONE)
    yield made
    made.close()


def made(tiny: TinyModel, cfg: float = 4.0, inputs: dict[str, str] | None = None, **more: Any) -> Any:
    small = {"width": 48, "height": 32, "steps": 1, "frames": FRAMES}
    fields = {**FIELDS, **small, "cfg": cfg, "model": "tiny", "prompt": "a red cube", "seed": SEED}
    read = {"image": "first"} if inputs is None else inputs
    nodes = {
        "first": {"kind": "image", "image": image(4)},
        "last": {"kind": "image", "image": image(5)},
        "s": {"kind": "sample", "request": fields, "inputs": read, **more},
        "d": {"kind": "decode", "model": "tiny", "inputs": {"latent": "s"}},
    }
    used = {"s", "d", *read.values()}
    return tiny.made(workflow={"nodes": {name: node for name, node in nodes.items() if name in used}, "output": "d"})


@pytest.mark.parametrize("method", ["ati", "move"])
def test_a_run_reads_them(method: str, tiny: TinyModel) -> None:
    """What the model reads next to the latent, of both texts, is that of a run without tracks, with them."""
    read: list[Tensor] = []
    module = tiny.module(Role.DIFFUSION_MODEL)

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not kwargs["hidden_states"].is_meta:
            read.extend(kwargs["hidden_states"][:, CHANNELS:].clone())

    tracks = {"method": method, "points": [[[x, y] for x, y, _ in line(20, 10, 3, 2)], line(60, 40, -4, 0, seen=6)]}
    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        plain = made(tiny)
        usual = read[:2]
        read.clear()
        found = made(tiny, tracks=tracks)
    finally:
        handle.remove()
    condition = TracksCondition(method, (line(20, 10, 3, 2), line(60, 40, -4, 0, seen=6)))
    expected, negative = tracked_image(condition, usual[0][None])
    seen = sorted(read[:2], key=lambda each: float((each - expected[0]).abs().sum()))
    torch.testing.assert_close(seen[0], expected[0])
    torch.testing.assert_close(seen[1], negative[0])
    assert not torch.equal(expected[0], usual[0])
    assert (found.latents[0] - plain.latents[0]).abs().max() > 1e-4


@each_case(
    "case",
    (
        ("follows no tracks", {}, CONCATENATED),
        ("follows no tracks", {"inputs": {"image": "first", "last_image": "last"}}, BOTH),
        ("expected image", {"inputs": {}}, ONE),
        ("a track of 10 frames", {"frames": 10}, ONE),
    ),
)
def test_what_cannot_follow_them_is_refused(case: tuple[str, dict[str, Any], Any], tmp_path: Path) -> None:
    message, more, family = case
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    tiny = TinyFamilyModel(folder, family)
    tracks = {"method": "move", "points": [[[1, 1]] * more.get("frames", 3)]}
    try:
        with pytest.raises(UserError, match=message):
            made(tiny, tracks=tracks, inputs=more.get("inputs"))
    finally:
        tiny.close()
