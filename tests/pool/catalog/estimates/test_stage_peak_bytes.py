"""What the stages of an image hold on the device: estimated without one, and measured on a simulated one.

Proves, for a random model of real layout with all weights resident: encoding of short, long and weighted texts,
sampling with every sampler, with and without guidance, with texts of unlike lengths and with the texts apart, and
decoding, whole and by tiles, hold no more than was estimated and not much less; ways to divide a task need less and
less; estimates are corrected by what runs took.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.estimates.stage_peak_bytes import TILES, tile_slowdown
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.sampling_stage import sample
from modelpool.pool.engine.stages import TextEncoder, decode, encode
from modelpool.pool.inference.pixels.tiled import count_tiles
from modelpool.pool.inference.pixels.tiled_vae import Tiling
from modelpool.pool.inference.sampling.samplers import FUNCTIONS
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.values.core.run_options import (
    AttentionScale,
    DeepCache,
    FreeU,
    HyperTile,
    PerturbedAttention,
    RescaleCfg,
    RunOptions,
    SelfAttention,
    TiledDiffusion,
)
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    Encoded,
    EncodeParams,
    GuidanceParams,
    Latent,
    LoraRef,
    OutputShape,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    StageParams,
    StepPart,
    stage_of,
)
from modelpool.pool.values.specs.spec import ExecutionMode, Role, RunCost, TaskId, TaskSpec
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from tests.pool.input_names import inputs_of
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

INDEX = 55  # of a simulated device that no other test uses
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
LONG = "one more word " * 60
#: an estimate is at most so much above the truth
MOST_OVER = 0.02
ROLES = {"encode": Role.TEXT_ENCODER, "sample": Role.DIFFUSION_MODEL, "decode": Role.VAE}


class Bench:
    """One model, resident on a simulated device, and a catalog that knows it."""

    def __init__(self, folder: Path) -> None:
        write_tiny_checkpoint(folder / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
        sim.install()
        sim.configure(INDEX, 1 << 28)
        self.catalog = Catalog([folder], [], "sim")
        self.model = self.catalog.find_model("toy")
        self.opened = OpenModel(self.model, "sim")
        self.latent = self.opened.checkpoint.latent
        self.tokenizer = ClipTokenizer.load()
        self.patchers = {role: self._patcher(role) for role in ROLES.values()}

    def _patcher(self, role: Role) -> ModelPatcher:
        component = self.opened.component(role)
        module, form = component.built.module, component.form
        patcher = ModelPatcher.of(component.key, role, module, torch.device("sim", INDEX), form)
        patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), patcher.patches))
        return patcher

    def measured(self, work: StageParams, lengths: tuple[int, ...] = (), division: ExecutionMode | None = None) -> int:
        """Bytes beside weights that running `work` held; texts have `lengths` tokens."""
        patcher = self.patchers[ROLES[stage_of(work).value]]
        before_bytes = sim.memory_stats(INDEX).used_bytes
        sim.reset_peak(INDEX)
        match work:
            case EncodeParams():
                encode(work, [TextEncoder(patcher)], self.tokenizer, QUIET)
            case SampleParams():
                width = patcher.module.config.cross_attention_dim
                texts = tuple(Encoded(np.zeros((length, width), np.float32)) for length in lengths)
                sample(work, inputs_of(work, *texts), patcher, self.latent, QUIET, division)
            case DecodeParams():
                cells = (work.shape.height // self.latent.downscale, work.shape.width // self.latent.downscale)
                decode(
                    Latent(np.zeros((self.latent.channels, *cells), np.float32)), patcher, self.latent, QUIET, division
                )
        return sim.memory_stats(INDEX).peak_bytes - before_bytes


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("weights"))


def check(estimated_bytes: int, measured_bytes: int) -> None:
    assert measured_bytes <= estimated_bytes <= (1 + MOST_OVER) * measured_bytes


def cut_task(catalog: Catalog, work: StageParams) -> TaskSpec:
    """As `actors.graph.build_graph` makes it."""
    whole, *divided = catalog.execution_modes(work.model, work)
    return TaskSpec(
        TaskId("t"),
        stage_of(work),
        (catalog.use(work.model, ROLES[stage_of(work).value], ()),),
        whole.activation_bytes,
        1.0,
        divisions=tuple(divided),
        counted_bytes=whole.counted_bytes,
        options=work.measured_apart if isinstance(work, SampleParams) else (),
    )


def sampling(bench: Bench, cfg: float = 4.0, sampler: str = "euler", width: int = 64) -> SampleParams:
    return SampleParams(
        bench.model, (), OutputShape(width, 64), SamplingSchedule(6, sampler, "normal"), GuidanceParams(cfg), 7
    )


@pytest.mark.parametrize("text", ["", "a circle", "a (red:1.3) circle", LONG, f"{LONG} (far:0.5)"])
def test_encoding_counts_the_chunks_and_the_weights(bench: Bench, text: str) -> None:
    work = EncodeParams(bench.model, (), text)
    check(bench.catalog.figures.activation_bytes(bench.model, work), bench.measured(work))


def test_a_long_text_needs_more_than_a_short_one(bench: Bench) -> None:
    figures = bench.catalog.figures
    short, long = (figures.activation_bytes(bench.model, EncodeParams(bench.model, (), t)) for t in ("a", LONG))
    assert long > 2 * short
    assert bench.catalog.text_tokens(bench.model, LONG) == 3 * 77


@pytest.mark.parametrize("sampler", sorted(FUNCTIONS))
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_sampling_counts_what_the_sampler_keeps(bench: Bench, sampler: str, cfg: float) -> None:
    work = sampling(bench, cfg, sampler)
    lengths = (77,) * (2 if work.reads_negative else 1)
    check(bench.catalog.figures.activation_bytes(bench.model, work, lengths), bench.measured(work, lengths))


def test_a_part_of_the_steps_needs_what_all_of_them_need(bench: Bench) -> None:
    """Also one that ends early, and that is the first to be estimated of its size."""
    parts = (StepPart(1, keeps_noise=True), StepPart(2), StepPart(adds_noise=False))
    for width, part in zip((200, 208, 216), parts, strict=True):
        whole = sampling(bench, width=width)
        needed_bytes = bench.catalog.figures.activation_bytes(bench.model, replace(whole, part=part), (77, 77))
        check(needed_bytes, bench.measured(whole, (77, 77)))


@pytest.mark.parametrize("lengths", [(77, 154), (231, 154), (5 * 77, 6 * 77)], ids=str)
def test_sampling_counts_texts_of_unlike_lengths(bench: Bench, lengths: tuple[int, int]) -> None:
    """Repeated to a common length, or run apart where that would be too long."""
    work = sampling(bench)
    check(bench.catalog.figures.activation_bytes(bench.model, work, lengths), bench.measured(work, lengths))


def test_texts_apart_need_less_and_hold_less(bench: Bench) -> None:
    work, lengths = sampling(bench), (77, 154)
    (way,) = bench.catalog.figures.divisions(bench.model, work, lengths)
    assert way.batch == 1
    assert way.slowdown > 1
    check(way.activation_bytes, bench.measured(work, lengths, way))
    assert way.activation_bytes < bench.catalog.figures.activation_bytes(bench.model, work, lengths)
    assert bench.catalog.figures.divisions(bench.model, sampling(bench, cfg=1.0), (77,)) == ()


#: options of runs, each with what it makes a run hold besides
OPTIONS = {
    "an extra prediction": RunOptions(pag=PerturbedAttention()),
    "the attention of the middle": RunOptions(sag=SelfAttention()),
    "features of the deep layers": RunOptions(deepcache=DeepCache(interval=2)),
    "features for each": RunOptions(deepcache=DeepCache(interval=2), pag=PerturbedAttention(), sag=SelfAttention()),
    "spectra": RunOptions(freeu=FreeU()),
    "tiles of the attention": RunOptions(hypertile=HyperTile(tile=64, depth=1)),
    "tiles of the latent": RunOptions(tiled=TiledDiffusion(tile=64, overlap=16), pag=PerturbedAttention()),
    "another guidance": RunOptions(rescale_cfg=RescaleCfg()),
    "scaled attention": RunOptions(attention_scale=AttentionScale(image=(("IN", 0.5),), text=(("MID", 0.0),))),
}  # fmt: skip


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_options_hold_what_was_estimated(bench: Bench, cfg: float) -> None:
    """Found in a review: runs with options had the estimates of runs without."""
    figures, plain = bench.catalog.figures, sampling(bench, cfg, width=128)
    lengths = (77,) * (2 if plain.reads_negative else 1)
    without_bytes = figures.activation_bytes(bench.model, plain, lengths)
    found = {}
    for what, options in OPTIONS.items():
        work = replace(plain, options=options)
        found[what] = figures.activation_bytes(bench.model, work, lengths), bench.measured(work, lengths)
        later = replace(options.pag, scale=1.5, start=0.5) if options.pag is not None else None
        other = replace(work, options=replace(options, pag=later))
        assert figures.activation_bytes(bench.model, other, lengths) == found[what][0], "scales change no size"
    wrong = {what: sizes for what, sizes in found.items() if not sizes[1] <= sizes[0] <= 1.1 * sizes[1]}
    assert not wrong
    assert found["the attention of the middle"][0] > without_bytes
    assert found["features of the deep layers"][0] > without_bytes
    assert found["tiles of the latent"][0] < without_bytes


def test_runs_with_options_are_corrected_apart_from_those_without(bench: Bench) -> None:
    plain, lora = sampling(bench), LoraRef("one", "one", "1", 1.0, only=("negative",))
    for names, with_one in (
        (("freeu",), replace(plain, options=RunOptions(freeu=FreeU()))),
        (("loras.only",), replace(plain, loras=(lora,))),  # its texts are predicted apart
    ):
        catalog = Catalog([Path(bench.model.path).parent], [], "cuda")
        task = cut_task(catalog, with_one)
        assert task.options == names
        before = [catalog.figures.activation_bytes(bench.model, work) for work in (with_one, plain)]
        for _ in range(20):
            catalog.learn(task, RunCost(working_bytes=task.activation_bytes // 2))
        after = [catalog.figures.activation_bytes(bench.model, work) for work in (with_one, plain)]
        assert after[0] < before[0], "runs with the option took less"
        assert after[1] == before[1]


def test_decoding_whole_and_by_tiles(bench: Bench) -> None:
    work = DecodeParams(bench.model, OutputShape(256, 192))
    check(bench.catalog.figures.activation_bytes(bench.model, work), bench.measured(work))
    found = bench.catalog.figures.divisions(bench.model, work)
    assert len(found) >= 3
    for way in found:
        check(way.activation_bytes, bench.measured(work, division=way))
    figures = [bench.catalog.figures.activation_bytes(bench.model, work), *(way.activation_bytes for way in found)]
    assert figures == sorted(set(figures), reverse=True)
    assert bench.catalog.figures.divisions(bench.model, DecodeParams(bench.model, OutputShape(64, 64))) == ()


@pytest.mark.parametrize("cells", [(24, 32), (100, 100), (9, 200)], ids=str)
def test_the_slowdown_of_tiles_is_the_cells_that_are_computed(cells: tuple[int, int]) -> None:
    for tile in (t for t in TILES if t < max(cells)):
        edges, overlaps = Tiling(tile).edges(cells)
        count = count_tiles(cells, edges, overlaps, (1, 1))
        slowdown = tile_slowdown(cells, tile)
        assert 1.0 <= slowdown <= count * edges[0] * edges[1] / (cells[0] * cells[1])


def test_figures_take_in_what_runs_took_and_only_upwards_where_nothing_is_hidden(bench: Bench, tmp_path: Path) -> None:
    catalog = Catalog([Path(bench.model.path).parent], [], "sim")
    work = DecodeParams(bench.model, OutputShape(72, 64))

    def cut() -> TaskSpec:
        return cut_task(catalog, work)

    first = cut()
    catalog.learn(first, RunCost(working_bytes=first.activation_bytes // 2))
    assert cut() == first
    for _ in range(5):  # what was learnt is not learnt again on top of itself
        catalog.learn(cut(), RunCost(working_bytes=first.activation_bytes * 3 // 2))
        assert cut().activation_bytes == pytest.approx(first.activation_bytes * 1.5, abs=2)
        assert cut().counted_bytes == first.activation_bytes
    assert cut().divisions == first.divisions
    assert catalog.figures.errors()[0].ran_out == 0


@pytest.mark.parametrize("device_kind", ["sim", "cuda"])
def test_no_correction_drops_a_way_or_makes_work_impossible(bench: Bench, device_kind: str) -> None:
    """Found in a review: figures that were learnt dropped divisions, and work was refused for good."""
    catalog = Catalog([Path(bench.model.path).parent], [], device_kind)
    for work in (DecodeParams(bench.model, OutputShape(256, 192)), EncodeParams(bench.model, (), "a")):
        first = cut_task(catalog, work)
        for way in (None, *first.divisions):
            figure_bytes = first.activation_bytes if way is None else way.activation_bytes
            catalog.learn(first, RunCost(working_bytes=3 * figure_bytes, division=way))
            catalog.learn(first, RunCost(working_bytes=5 * figure_bytes, streamed_bytes=1, division=way))
        now = cut_task(catalog, work)
        assert [way.tile for way in now.divisions] == [way.tile for way in first.divisions]
        assert [way.estimated_bytes for way in now.divisions] == [way.activation_bytes for way in first.divisions]
        figures = [now.activation_bytes, *(way.activation_bytes for way in now.divisions)]
        assert figures == sorted(set(figures), reverse=True)
        assert now.least_activation_bytes <= now.least_estimated_bytes == first.least_activation_bytes
        assert (now.activation_bytes > first.activation_bytes) == bool(first.divisions)


@pytest.mark.parametrize("device_kind", ["sim", "cuda"])
def test_runs_that_streamed_do_not_raise_figures_that_were_right(bench: Bench, device_kind: str) -> None:
    """Found in a review: weights on their way, and 256 MiB of copies ahead, were learnt as activations."""
    catalog = Catalog([Path(bench.model.path).parent], [], device_kind)
    work = sampling(bench)
    first = cut_task(catalog, work)
    for _ in range(20):
        held_bytes = first.activation_bytes + first.uses[0].scratch_bytes
        catalog.learn(cut_task(catalog, work), RunCost(streamed_bytes=1 << 20, working_bytes=held_bytes))
        assert cut_task(catalog, work) == first
