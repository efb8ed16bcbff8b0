"""ComfyUI nodes of tracks of points, along which models of Wan 2.1 move an image: ATI and Wan-Move. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    Builder,
    NodeUnsupported,
    combo,
    flag,
    is_one,
    link,
    node_row,
    number,
    only_in_workflows,
    text,
    warn,
    warn_unread,
    whole,
)
from modelpool.actors.http.comfy.comfy_text_nodes import with_video
from modelpool.actors.http.comfy.comfy_values import TrackPoint, TracksValue, VideoUse
from modelpool.actors.http.comfy.comfy_video_nodes import from_image, sizes
from modelpool.actors.request.workflow_fields import MAX_TRACK_FRAMES, MAX_TRACKS
from modelpool.pool.values.core.errors import counted

#: how far along its path a point is, by the share of the frames
_EASING: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda share: share,
        "ease_in": lambda share: share**2,
        "ease_out": lambda share: 1 - (1 - share) ** 2,
        "ease_in_out": lambda share: 2 * share**2 if share < 0.5 else 1 - 2 * (1 - share) ** 2,
        "constant": lambda share: 0.0,
    }
)
_NO_DIRECTION = (1.0, 0.0)


def _generated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tracks beside one another along a path."""
    if given.get("track_mask") is not None:
        raise NodeUnsupported("track_mask: found a mask, expected none: all points are seen")
    count, frames = given["num_tracks"], given["num_frames"]
    if not given["bezier"]:
        for name in ("mid_x", "mid_y"):
            warn_unread(given, name, "the path is a line", own=0.5)
    if count > 1 or given["interpolation"].startswith("ease"):
        warn(given, "GenerateTracks: tracks are beside their path by shares of the sides of the video, and easing is "
                    "quadratic; another program may place them a little otherwise")  # fmt: skip
    start, middle, end = ((given[f"{name}_x"], given[f"{name}_y"]) for name in ("start", "mid", "end"))
    ease = _EASING[given["interpolation"]]
    found = []
    for place in range(count):
        beside = (place - (count - 1) / 2) * given["track_spread"]
        track = []
        for frame in range(frames):
            along = ease(frame / max(1, frames - 1))
            (x, y), (right, down) = _on_path(start, middle if given["bezier"] else None, end, along)
            x, y = x - down * beside, y + right * beside
            track.append((x * given["width"], y * given["height"], 1.0))
        found.append(tuple(track))
    return TracksValue(tuple(found)), frames


def _on_path(
    start: tuple[float, float], middle: tuple[float, float] | None, end: tuple[float, float], along: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the point of a line, or of a quadratic Bezier curve with the control point `middle`, and the direction of
    the path there, of length 1."""
    if middle is None:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    first, second, third = (1 - along) ** 2, 2 * along * (1 - along), along**2
    point = [first * a + second * b + third * c for a, b, c in zip(start, middle, end, strict=True)]
    slope = [2 * (1 - along) * (b - a) + 2 * along * (c - b) for a, b, c in zip(start, middle, end, strict=True)]
    length = math.hypot(*slope)
    direction = (slope[0] / length, slope[1] / length) if length else _NO_DIRECTION
    return (point[0], point[1]), direction


def _joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tracks of both."""
    first: TracksValue = given["tracks_1"]
    second: TracksValue | None = given.get("tracks_2")
    if second is None:
        return (first,)
    frames = {len(track) for track in (*first.points, *second.points)}
    if len(frames) > 1:
        raise NodeUnsupported(f"tracks_2: found tracks of {' and '.join(map(str, sorted(frames)))} frames")
    return (TracksValue(_checked("tracks_2", (*first.points, *second.points))),)


def _of_coordinates(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tracks that are written out, frame by frame."""
    if given.get("track_mask") is not None:
        raise NodeUnsupported("track_mask: found a mask, expected none: all points are seen")
    points = _written("track_coords", given["track_coords"])
    if not points or len({len(track) for track in points}) > 1:
        raise NodeUnsupported("track_coords: expected at least one track, and as many points in each")
    return TracksValue(points), len(points[0])


def _written(name: str, value: str) -> tuple[tuple[TrackPoint, ...], ...]:
    """Return the tracks in a text of an input: a JSON list of lists of points, {"x": 1, "y": 2}, or one such list.
    Raises NodeUnsupported."""
    try:
        found = json.loads(value) if value.strip() else []
    except (ValueError, RecursionError):
        raise NodeUnsupported(f"{name}: found {value[:100]!r}, expected lists of points in JSON") from None
    tracks = [found] if isinstance(found, list) and found and isinstance(found[0], Mapping) else found
    if not isinstance(tracks, list) or not all(isinstance(track, list) for track in tracks):
        raise NodeUnsupported(f"{name}: found {value[:100]!r}, expected lists of points in JSON")
    made = tuple(tuple(_point(name, point) for point in track[:MAX_TRACK_FRAMES]) for track in tracks if track)
    return _checked(name, made)


def _point(name: str, value: Any) -> TrackPoint:
    try:
        x, y = float(value["x"]), float(value["y"])
    except (TypeError, KeyError, ValueError):
        x = y = math.nan
    if not (math.isfinite(x) and math.isfinite(y)):
        raise NodeUnsupported(f'{name}: found {str(value)[:100]}, expected a point such as {{"x": 1, "y": 2}}')
    return x, y, 1.0


def _checked(name: str, points: tuple[tuple[TrackPoint, ...], ...]) -> tuple[tuple[TrackPoint, ...], ...]:
    if len(points) > MAX_TRACKS:
        raise NodeUnsupported(f"{name}: found {counted(len(points), 'track')}, expected up to {MAX_TRACKS}")
    return points


def _with_tracks(
    given: Mapping[str, Any], method: str, points: tuple[tuple[TrackPoint, ...], ...], **more: Any
) -> tuple[Any, ...]:
    """Return both texts and empty latents of a video of an image that follows tracks."""
    if given.get("start_image") is None:
        raise NodeUnsupported("start_image: expected the image in which the tracks begin")
    positive, negative, latent = from_image(given)
    if not points:
        return positive, negative, latent
    shown = tuple(track[: latent.frames] for track in points)
    use = VideoUse(tracks={"method": method, "points": shown, **more})
    return with_video(positive, use), with_video(negative, use), latent


def _ati(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video of an image along tracks of ATI: their points are of 24 frames per second, and the video has 16. Source:
    `process_tracks` of ATI, which takes every other or the next of them."""
    points = _written("tracks", given["tracks"])
    if not points:
        warn(given, "tracks: found none; the video begins with the image, and follows nothing")
    places = [0, *(1 + (3 * frame - 2) // 2 for frame in range(1, given["length"]))]
    tracks = tuple(tuple(track[place] for place in places if place < len(track)) for track in points)
    return _with_tracks(given, "ati", tracks, temperature=given["temperature"], nearest=given["topk"])


def _move(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A video of an image along tracks of Wan-Move."""
    tracks: TracksValue | None = given.get("tracks")
    strength = given["strength"]
    if tracks is not None and strength and not is_one(strength):
        raise NodeUnsupported(f"strength: found {strength:g}, expected 1, or 0 for none")
    return _with_tracks(given, "move", tracks.points if tracks is not None and strength else ())


_row = partial(node_row, category="video")
_TEXTS_AND_VAE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING"), link("vae", "VAE")
_SEEN = link("clip_vision_output", "CLIP_VISION_OUTPUT", is_required=False)
_SHARES = (("start_x", 0.0), ("start_y", 0.0), ("end_x", 1.0), ("end_y", 1.0))
_MADE = ("CONDITIONING", "CONDITIONING", "LATENT")
_MASK = link("track_mask", "MASK", is_required=False)
TRACK_NODES = (
    _row(
        "WanTrackToVideo",
        (
            *_TEXTS_AND_VAE,
            text("tracks", "[]"),
            *sizes(832, 480, 81),
            number("temperature", 220.0, 1.0, 1000.0),
            whole("topk", 2, 1, 10),
            link("start_image", "IMAGE", is_required=False),
            _SEEN,
        ),
        only_in_workflows,
        *_MADE,
    ),
    _row(
        "WanMoveTrackToVideo",
        (
            *_TEXTS_AND_VAE,
            number("strength", 1.0, 0.0, 100.0),
            *sizes(832, 480, 81),
            link("start_image", "IMAGE", is_required=False),
            link("tracks", "TRACKS", is_required=False),
            _SEEN,
        ),
        only_in_workflows,
        *_MADE,
    ),
    _row(
        "GenerateTracks",
        (
            *sizes(832, 480, 81)[:2],
            *(number(name, value, 0.0, 1.0) for name, value in _SHARES),
            whole("num_frames", 81, 1, MAX_TRACK_FRAMES),
            whole("num_tracks", 5, 1, 100),
            number("track_spread", 0.025, 0.0, 1.0),
            flag("bezier"),
            number("mid_x", 0.5, 0.0, 1.0),
            number("mid_y", 0.5, 0.0, 1.0),
            combo("interpolation", tuple(_EASING)),
            _MASK,
        ),
        _generated,
        "TRACKS",
        "INT",
    ),
    _row("WanMoveConcatTrack", (link("tracks_1", "TRACKS"), link("tracks_2", "TRACKS", False)), _joined, "TRACKS"),
    _row("WanMoveTracksFromCoords", (text("track_coords", "[]"), _MASK), _of_coordinates, "TRACKS", "INT"),
)
#: what nodes become in workflows, by their kind
TRACK_BUILDERS: Mapping[str, Builder] = MappingProxyType({"WanTrackToVideo": _ati, "WanMoveTrackToVideo": _move})
