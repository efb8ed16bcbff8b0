"""Nodes of tracks of points become tracks of a node that samples."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.workflow_fields import MotionTracks, SampleNode
from modelpool.pool.catalog.registry.listings import FileNames
from tests.actors.http.comfy.comfy_examples import Graph, node
from tests.actors.http.comfy.test_public_kinds import requests
from tests.each_case import each_case

NAMES = PoolNames({"wan": "Wan 2.1 image-to-video"}, [], None, FileNames(), image_size=lambda name: (64, 64))
SIZE = {"width": 64, "height": 48, "length": 9, "batch_size": 1}
PATH: dict[str, Any] = {
    "width": 64, "height": 48, "start_x": 0.0, "start_y": 0.5, "end_x": 1.0, "end_y": 0.5, "num_frames": 9,
    "num_tracks": 1, "track_spread": 0.1, "bezier": False, "mid_x": 0.5, "mid_y": 0.5, "interpolation": "linear",
}  # fmt: skip


def video(kind: str, has_image: bool = True, **inputs: Any) -> Graph:
    texts = {name: node("CLIPTextEncode", clip=["loader", 1], text=name) for name in ("positive", "negative")}
    shown = {"start_image": ["photo", 0]} if has_image else {}
    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name="wan.safetensors"),
        "photo": node("LoadImage", image="clear.png"),
        **texts,
        "tracked": node(
            kind, positive=["positive", 0], negative=["negative", 0], vae=["loader", 2], **SIZE, **shown, **inputs
        ),
        "sampled": node(
            "KSampler", model=["loader", 0], seed=5, steps=4, cfg=5.0, sampler_name="euler", scheduler="simple",
            positive=["tracked", 0], negative=["tracked", 1], latent_image=["tracked", 2], denoise=1.0,
        ),
        "decoded": node("VAEDecode", samples=["sampled", 0], vae=["loader", 2]),
        "saved": node("SaveAnimatedWEBP", images=["decoded", 0], filename_prefix="x", fps=16.0, lossless=False,
                      quality=90, method="default"),
    }  # fmt: skip


def ati(tracks: Any, **more: Any) -> Graph:
    written = tracks if isinstance(tracks, str) else json.dumps(tracks)
    return video("WanTrackToVideo", **{"tracks": written, "temperature": 220.0, "topk": 2, **more})


def moved(**nodes: Any) -> Graph:
    return {**video("WanMoveTrackToVideo", strength=1.0, tracks=["tracks", 0]), **nodes}


def tracks_of(graph: Graph) -> MotionTracks | None:
    (request,) = requests(graph, NAMES)
    assert request.workflow is not None
    (found,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
    assert "image" in found.inputs
    return found.tracks


def xy(found: MotionTracks | None) -> list[Any]:
    assert found is not None
    assert all(point[2] == 1 for track in found.points for point in track)
    return [[point[:2] for point in track] for track in found.points]


def warnings(graph: Graph) -> str:
    return "; ".join(text for output in outputs_of(graph, NAMES) for text in output.warnings)


def points(count: int) -> list[dict[str, int]]:
    return [{"x": place, "y": 2 * place} for place in range(count)]


def test_points_of_ati_are_of_24_frames_per_second_and_the_video_has_16() -> None:
    """The point of each frame, as `process_tracks` of ATI finds it: each is there twice, and every third is read."""
    found = tracks_of(ati([points(121), points(5)]))
    twice = [place for place in range(1, 121) for _ in range(2)]
    expected = [0, *twice[1::3]][:9]
    assert expected == [0, 1, 3, 4, 6, 7, 9, 10, 12]
    assert xy(found) == [[(place, 2 * place) for place in expected], [(place, 2 * place) for place in expected[:4]]]
    assert found is not None
    assert (found.method, found.temperature, found.nearest) == ("ati", 220.0, 2)
    one = ati(points(13), temperature=30.0, topk=5)
    assert xy(tracks_of(one)) == [[(place, 2 * place) for place in expected]]


def test_without_tracks_the_video_follows_nothing() -> None:
    assert tracks_of(ati([])) is None
    assert "follows nothing" in warnings(ati("[]"))
    assert tracks_of(video("WanMoveTrackToVideo", strength=1.0)) is None
    off = moved(tracks=node("GenerateTracks", **PATH))
    off["tracked"]["inputs"]["strength"] = 0.0
    assert tracks_of(off) is None


def test_generated_tracks_are_beside_one_another_along_their_path() -> None:
    (track,) = xy(tracks_of(moved(tracks=node("GenerateTracks", **PATH))))
    np.testing.assert_allclose(track, [(8 * frame, 24) for frame in range(9)], atol=1e-9)
    three = xy(tracks_of(moved(tracks=node("GenerateTracks", **{**PATH, "num_tracks": 3}))))
    assert [round(track[4][1], 6) for track in three] == [19.2, 24.0, 28.8]
    assert {round(track[4][0], 6) for track in three} == {32.0}
    still = {**PATH, "interpolation": "constant"}
    assert set(xy(tracks_of(moved(tracks=node("GenerateTracks", **still))))[0]) == {(0.0, 24.0)}
    curve = {**PATH, "bezier": True, "mid_x": 0.5, "mid_y": 0.0}
    (bent,) = xy(tracks_of(moved(tracks=node("GenerateTracks", **curve))))
    np.testing.assert_allclose(bent[4], (32.0, 12.0), atol=1e-9)
    slow = {**PATH, "interpolation": "ease_in"}
    assert xy(tracks_of(moved(tracks=node("GenerateTracks", **slow))))[0][4] == (16.0, 24.0)


def test_tracks_are_joined_and_written_out() -> None:
    graph = moved(
        tracks=node("WanMoveConcatTrack", tracks_1=["made", 0], tracks_2=["written", 0]),
        made=node("GenerateTracks", **PATH),
        written=node("WanMoveTracksFromCoords", track_coords=json.dumps([points(9), points(9)])),
    )
    found = xy(tracks_of(graph))
    assert len(found) == 3
    assert found[1] == found[2] == [(place, 2 * place) for place in range(9)]
    alone = moved(tracks=node("WanMoveConcatTrack", tracks_1=["made", 0]), made=node("GenerateTracks", **PATH))
    assert len(xy(tracks_of(alone))) == 1


@each_case(
    "graph",
    (
        ati("[[1, 2]]"),
        ati("no JSON"),
        ati('[[{"x": NaN, "y": 1}]]'),
        ati([points(3)] * 257),
        video("WanTrackToVideo", has_image=False, tracks="[]", temperature=220.0, topk=2),
        {**moved(tracks=node("GenerateTracks", **PATH, track_mask=["photo", 1]))},
        {**moved(tracks=node("WanMoveTracksFromCoords", track_coords="[]"))},
        moved(
            tracks=node("WanMoveConcatTrack", tracks_1=["made", 0], tracks_2=["written", 0]),
            made=node("GenerateTracks", **PATH),
            written=node("WanMoveTracksFromCoords", track_coords=json.dumps([points(5)])),
        ),
    ),
)
def test_what_is_no_track_is_refused(graph: Graph) -> None:
    with pytest.raises(WorkflowRejected):
        requests(graph, NAMES)


def test_a_strength_of_tracks_is_one_or_none() -> None:
    graph = moved(tracks=node("GenerateTracks", **PATH))
    graph["tracked"]["inputs"]["strength"] = 0.5
    with pytest.raises(WorkflowRejected):
        requests(graph, NAMES)
