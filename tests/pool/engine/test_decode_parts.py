"""Tiles that a request asks for: the same bytes on one engine and as parts on several, and nothing changes without
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelpool.actors.graph.common.task_collector import JobGraph, TaskCollector
from modelpool.actors.graph.features import decode_tiles_graph
from modelpool.actors.graph.features.decode_tiles_graph import add_decode
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.pixels.latent_pixels import sampled_shape
from modelpool.pool.values.core.errors import CorruptFile, UnusableField
from modelpool.pool.values.core.stage_params import (
    DecodedTiles,
    DecodeParams,
    ImagePixels,
    Latent,
    Mask,
    OutputShape,
    Result,
    RunHooks,
    Stopped,
    VideoFrames,
    batch_key,
    task_id,
)
from modelpool.pool.values.specs.spec import JobId, TaskId
from tests.each_case import each_case
from tests.pool.families.tiny_audio import STABLE_AUDIO
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.whole_transformer import Whole
from tests.pool.input_names import results_read
from tests.pool.pipeline import QUIET

#: stand for what the driver or a sampling run provides
LATENT, IMAGE, MASK = TaskId("latent"), TaskId("image"), TaskId("mask")
VIDEO = OutputShape(96, 64, 33, 12.0)


def _latent_of(whole: Whole, work: DecodeParams) -> Latent:
    shape = sampled_shape(work, whole.opened.latent)
    return Latent(np.random.default_rng(5).standard_normal(shape).astype(np.float32))


def _graph(whole: Whole, work: DecodeParams, parts: int) -> JobGraph:
    """The tasks of a decode in so many parts."""
    needs = {"latent": LATENT, **({"image": IMAGE, "mask": MASK} if work.pastes else {})}
    tasks = TaskCollector(whole.catalog)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode_tiles_graph, "MAX_PARTS", parts)
        patched.setattr(decode_tiles_graph, "LEAST_PART_PIXELS", 1)
        wanted = add_decode(tasks, work, needs, whole.catalog.model_defaults(whole.model))
    return tasks.job(JobId("job"), wanted, frozenset(), ())


def _run(graph: JobGraph, engines: Sequence[Engine], given: dict[TaskId, Result]) -> Result:
    """The result of the tasks on `engines` in turns, the last part first."""
    results = dict(given)
    *parts, last = graph.job.tasks
    for place, task in enumerate([*reversed(parts), last]):
        engine, work = engines[place % len(engines)], graph.works[task.task_id]
        results[task.task_id], cost = engine.run(task, work, results_read(task, results), QUIET)
        assert cost.run_seconds > 0, "it is priced"
    return results[graph.job.wanted]


def _bytes_of(result: Result) -> np.ndarray:
    assert isinstance(result, ImagePixels | VideoFrames)
    return result.pixels_HWC if isinstance(result, ImagePixels) else result.frames_THWC


@each_case(
    "family, shape, tile, frames",
    [
        ("flux_schnell", OutputShape(192, 160), 64, 0),
        ("wan_t2v", VIDEO, 64, 17),
        ("ltxv", VIDEO, 64, 17),
    ],
)
def test_parts_on_any_number_of_workers_give_the_bytes_of_one_tiled_run(
    tmp_path: Path, family: str, shape: OutputShape, tile: int, frames: int
) -> None:
    whole = Whole(tmp_path, FAMILIES[family])
    engines = [whole.engine, *(Engine.open(EngineSettings("cpu")) for _ in range(2))]
    work = DecodeParams(whole.model, shape, tile=tile, tile_frames=frames)
    given: dict[TaskId, Result] = {LATENT: _latent_of(whole, work)}
    tiled = _bytes_of(_run(_graph(whole, work, 1), engines[:1], given))
    plain = _run(_graph(whole, replace(work, tile=0, tile_frames=0), 8), engines[:1], given)
    assert not np.array_equal(tiled, _bytes_of(plain)), "tiles are seen in the pixels, or the test proves nothing"
    assert tiled.shape == _bytes_of(plain).shape
    for parts, workers in ((2, 1), (3, 2), (8, 3)):
        graph = _graph(whole, work, parts)
        assert 2 < len(graph.job.tasks) <= parts + 1
        found = _bytes_of(_run(graph, engines[:workers], given))
        np.testing.assert_array_equal(found, tiled, err_msg=f"{parts} parts on {workers} workers")
    for engine in engines:
        engine.close()


@each_case(
    "family, shape, tile, parts",
    [
        ("flux_schnell", OutputShape(64, 64), 0, 1),
        ("flux_schnell", OutputShape(192, 160), 64, 1),
        ("flux_schnell", OutputShape(192, 160), 64, 2),
        ("wan_t2v", VIDEO, 0, 1),
        ("stable_audio", OutputShape(0, 0, seconds=1.0), 0, 1),
    ],
)
def test_pixels_and_samples_that_are_no_numbers_are_an_error(
    tmp_path: Path, family: str, shape: OutputShape, tile: int, parts: int
) -> None:
    """A VAE with one NaN weight, or one that overflows, made a black image that counted as a success."""
    whole = Whole(tmp_path, {**FAMILIES, "stable_audio": STABLE_AUDIO}[family])
    work = DecodeParams(whole.model, shape, tile=tile)
    latent = _latent_of(whole, work)
    latent.samples_CHW.flat[-1] = np.nan
    with pytest.raises(CorruptFile, match=r"VAE .*: decoded NaN or infinity, expected numbers"):
        _run(_graph(whole, work, parts), [whole.engine], {LATENT: latent})
    whole.engine.close()


def test_memory_may_divide_a_tile_and_the_bytes_of_parts_are_still_those_of_one_run(tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES["flux_schnell"])
    work = DecodeParams(whole.model, OutputShape(256, 192), tile=128)
    given: dict[TaskId, Result] = {LATENT: _latent_of(whole, work)}
    roomy = _bytes_of(_run(_graph(whole, work, 1), [whole.engine], given))
    one, three = _graph(whole, work, 1), _graph(whole, work, 3)
    assert one.job.tasks[0].divisions, "a tile may be divided"
    part, least_bytes = three.job.tasks[0], one.job.tasks[0].divisions[-1].activation_bytes
    assert part.activation_bytes == one.job.tasks[0].activation_bytes, "memory of one tile"
    small = Engine.open(EngineSettings("cpu", 0, least_bytes + part.uses[0].scratch_bytes + (1 << 16)))
    divided = _bytes_of(_run(one, [small], given))
    assert not np.array_equal(divided, roomy)
    np.testing.assert_array_equal(_bytes_of(_run(three, [small], given)), divided)
    small.close()
    whole.engine.close()


def test_the_join_keeps_the_image_outside_of_the_mask_and_needs_no_weights(tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES["flux_schnell"])
    shape = OutputShape(192, 160)
    work = DecodeParams(whole.model, shape, pastes=True, tile=64)
    mask = np.zeros((160, 192), np.uint8)
    mask[40:90] = 255
    kept = np.random.default_rng(1).integers(0, 256, (160, 192, 3), np.uint8)
    given: dict[TaskId, Result] = {LATENT: _latent_of(whole, work), IMAGE: ImagePixels(kept), MASK: Mask(mask)}
    tiled = _bytes_of(_run(_graph(whole, work, 1), [whole.engine], given))
    graph = _graph(whole, work, 4)
    join = graph.job.tasks[-1]
    assert (join.uses, join.activation_bytes) == ((), 0)
    assert join.run_seconds > 0
    assert all(part.run_seconds < _graph(whole, work, 1).job.tasks[0].run_seconds for part in graph.job.tasks[:-1])
    np.testing.assert_array_equal(_bytes_of(_run(graph, [whole.engine], given)), tiled)
    np.testing.assert_array_equal(tiled[100:], kept[100:])
    whole.engine.close()


def test_decodes_without_tiles_keep_their_ids_and_batches_and_small_ones_stay_one_task(tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES["flux_schnell"])
    plain = DecodeParams(whole.model, OutputShape(4096, 4096))
    defaults = whole.catalog.model_defaults(whole.model)
    for work, parts in (
        (plain, 1),
        (replace(plain, tile=8192), 1),
        (replace(plain, tile=1024), 8),
        (replace(plain, tile=2048), 8),
        (replace(plain, shape=OutputShape(1024, 1024), tile=256), 1),
        (replace(plain, shape=OutputShape(2048, 1024), tile=256), 2),
        (replace(plain, shape=OutputShape(16384, 16384), tile=1024), 1),  # too large to be sent
    ):
        assert decode_tiles_graph.count_parts(work, defaults) == parts, work
    named = {task_id(replace(plain, tile=tile, parts=n), {"latent": LATENT}) for tile in (0, 512) for n in (0, 2)}
    assert len(named) == 4
    assert task_id(replace(plain, tile=0), {"latent": LATENT}) == task_id(plain, {"latent": LATENT})
    assert batch_key(plain)
    assert not batch_key(replace(plain, tile=512)), "a tile has a pass of its own"
    whole.engine.close()


def test_a_part_stops_between_tiles_and_joins_refuse_what_is_not_all_tiles_of_one_grid(tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES["wan_t2v"])
    work = DecodeParams(whole.model, VIDEO, tile=64, tile_frames=9)
    given: dict[TaskId, Result] = {LATENT: _latent_of(whole, work)}
    graph = _graph(whole, work, 2)
    first, second, join = graph.job.tasks
    steps: list[tuple[int, int]] = []
    hooks = RunHooks(lambda done, total: steps.append((done, total)), lambda: len(steps) == 2)
    with pytest.raises(Stopped):
        whole.engine.run(first, graph.works[first.task_id], results_read(first, given), hooks)
    assert [done for done, _ in steps] == [1, 2]
    assert steps[0][1] > 2
    results = [
        whole.engine.run(task, graph.works[task.task_id], results_read(task, given), QUIET)[0]
        for task in (first, second)
    ]
    made = [one for one in results if isinstance(one, DecodedTiles)]
    other = replace(made[1], grid=replace(made[1].grid, dropped=1))
    for wrong in ((made[0], made[0]), (made[0], other)):
        with pytest.raises(UnusableField, match="tiles: found"):
            whole.engine.run(join, graph.works[join.task_id], dict(zip(join.input_names, wrong, strict=True)), QUIET)
    whole.engine.close()
    mochi = Whole(tmp_path, FAMILIES["mochi"])
    with pytest.raises(UnusableField, match="vae_frames: found 9"):
        _graph(mochi, DecodeParams(mochi.model, VIDEO, tile_frames=9), 2)
