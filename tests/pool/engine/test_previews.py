"""Previews of an engine's sampling runs: each image has its own, they change no result, and cost nothing when off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.preview_maker import encoded_preview
from modelpool.pool.values.core.previews import MAX_PREVIEW_BYTES, MAX_SIDE, PreviewKind, PreviewWish
from modelpool.pool.values.core.stage_params import BatchMember, DecodeParams, FloatArray, Latent, RunHooks
from tests.pool.engine.test_batching import SHAPES, Bench, array
from tests.pool.models.components.vae.cases import CASES
from tests.pool.pipeline import PLENTY_BYTES, QUIET, open_engine

COLOURS = PreviewWish(PreviewKind.LATENT_RGB)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog([SHAPES], [], "sim")


@pytest.fixture
def bench(catalog: Catalog) -> Iterator[Bench]:
    engine = open_engine("sim", PLENTY_BYTES)
    yield Bench(engine, catalog)
    engine.close()
    assert sim.memory_stats(0).used_bytes == 0


class Taken:
    """The clean latents of one run, copied at each prediction."""

    def __init__(self) -> None:
        self.latents: list[FloatArray] = []

    def __call__(self, latents: Callable[[], Sequence[FloatArray]]) -> None:
        (latent_CHW,) = latents()
        self.latents.append(latent_CHW)

    @property
    def hooks(self) -> RunHooks:
        return replace(QUIET, preview=self)


def with_hooks(member: BatchMember, hooks: RunHooks) -> BatchMember:
    return replace(member, hooks=hooks)


def test_each_image_of_a_batch_has_its_own_predictions_and_they_change_no_result(bench: Bench) -> None:
    members, taken = bench.samples(3, "euler"), [Taken() for _ in range(3)]
    expected = [array(outcome) for outcome in bench.engine.run_batch(members)]
    watched = [with_hooks(member, one.hooks) for member, one in zip(members, taken, strict=True)]
    found = [array(outcome) for outcome in bench.engine.run_batch(watched)]
    for one, other, previews in zip(found, expected, taken, strict=True):
        assert np.array_equal(one, other)
        assert len(previews.latents) == members[0].work.schedule.steps  # type: ignore[union-attr]
        # the last step of Euler's method ends at the clean latent
        assert np.allclose(previews.latents[-1], other, atol=1e-5)


def test_without_a_hook_nothing_is_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call and no copy: the sampler gets the function of the model itself."""
    calls = []
    monkeypatch.setattr("modelpool.pool.inference.guidance.sampling_run._copied_frames", lambda clean: calls.append(1))
    (member,) = bench.samples(1)
    bench.alone(member)
    bench.alone(with_hooks(member, replace(QUIET, preview=lambda latents: None)))  # nobody wants one
    assert calls == []


def test_the_colours_of_a_model_are_fitted_once_and_its_previews_resemble_the_image(bench: Bench) -> None:
    (member,), taken = bench.samples(1, "euler"), Taken()
    model = member.work.model
    assert bench.engine.preview(model, np.zeros((4, 8, 8), np.float32), COLOURS) is None  # nothing is known of it
    bench.engine.prepare_previews(model, COLOURS)
    before = bench.engine._previews._models.kept(model.sha256)
    assert before is not None
    fitted = before.colours
    bench.engine.prepare_previews(model, COLOURS)
    assert before.colours is fitted is not None
    latent = bench.alone(with_hooks(member, taken.hooks))
    assert isinstance(latent, Latent)
    content = bench.engine.preview(model, taken.latents[-1], COLOURS)
    assert content is not None
    with Image.open(BytesIO(content)) as image:
        preview = np.asarray(image.convert("L"), np.float64)
    final = np.asarray(
        Image.fromarray(array(bench.alone(bench.member(DecodeParams(model, member.work.shape), latent)))).convert("L"),
        np.float64,
    )
    assert preview.shape == final.shape
    assert np.corrcoef(preview.ravel(), final.ravel())[0, 1] > 0.5


def test_a_tiny_decoder_is_used_where_there_is_one(bench: Bench, tmp_path: Path) -> None:
    case = CASES["taesd"]
    save_file(case.file(case.module()), tmp_path / "taesd.safetensors")
    (member,) = bench.samples(1)
    model, latent = member.work.model, np.ones((4, 8, 8), np.float32)
    decoders = (("taesd", str(tmp_path / "taesd.safetensors")),)
    auto = PreviewWish(tiny_decoders=decoders)
    bench.engine.prepare_previews(model, auto)
    known = bench.engine._previews._models.kept(model.sha256)
    assert known is not None
    assert not known.is_fitted  # the VAE need not be loaded
    tiny = bench.engine.preview(model, latent, auto)
    assert tiny is not None
    assert bench.engine.preview(model, latent, replace(auto, kind=PreviewKind.NONE)) is None
    bench.engine.prepare_previews(model, replace(auto, kind=PreviewKind.LATENT_RGB))
    assert known.is_fitted
    assert bench.engine.preview(model, latent, replace(auto, kind=PreviewKind.LATENT_RGB)) not in (None, tiny)
    gone = replace(auto, tiny_decoders=(("taesd", str(tmp_path / "gone.safetensors")),))
    assert bench.engine.preview(model, latent, gone) is not None  # the colours
    assert bench.engine.preview(model, latent, replace(gone, kind=PreviewKind.TAESD)) is None


def test_a_preview_is_small_whatever_it_shows() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (1000, 600, 3), dtype=np.uint8)
    content = encoded_preview(noise)
    assert content is not None
    assert len(content) <= MAX_PREVIEW_BYTES
    with Image.open(BytesIO(content)) as image:
        assert (image.format, max(image.size)) == ("WEBP", MAX_SIDE)
