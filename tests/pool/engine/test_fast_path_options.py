"""Options of the fast path change speed and last bits, not images: each through an engine, on the simulated device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.engine import ComputeSettings, Engine, EngineSettings
from modelpool.pool.values.core.fast_path import FastPath, FastPaths
from modelpool.pool.values.core.stage_params import Latent
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.compiled_blocks import BlockCompiler
from modelpool.pool.weights.patcher.graphed_calls import GraphStore
from modelpool.pool.weights.patcher.weight_form import MemoryFormat
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, Pipeline
from tests.pool.weights.patcher.recorded_graphs import RecordedGraphs

SIM = EngineSettings("sim", 0, PLENTY_BYTES)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = Path(tmp_path_factory.mktemp("weights"))
    write_tiny_checkpoint(folder / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    (folder / "loras").mkdir()
    write_tiny_lora(folder / "loras" / "twist.safetensors", 2)
    return Catalog([folder], [folder / "loras"], "sim")


def latents_of(catalog: Catalog, settings: EngineSettings, strengths: tuple[float, ...]) -> list[np.ndarray]:
    """The sampled latent with the LoRA at each strength, by one engine."""
    sim.install()
    sim.configure(0, PLENTY_BYTES)
    engine, found = Engine.open(settings), []
    for strength in strengths:
        pipeline = Pipeline(engine, catalog, {"twist": strength} if strength else {})
        prompt, negative, sample, _ = pipeline.works()
        latent = pipeline.run(sample, pipeline.run(prompt), pipeline.run(negative))
        assert isinstance(latent, Latent)
        found.append(latent.samples_CHW)
        assert all(cost.peak_bytes <= cost.planned_bytes for cost in pipeline.costs), "the plan's figure does not hold"
    engine.close()
    assert sim.memory_stats(0).used_bytes == 0
    return found


def test_options_of_weights_give_the_usual_latents_within_rounding(catalog: Catalog) -> None:
    strengths = (0.0, 0.8, 0.4)
    usual = latents_of(catalog, SIM, strengths)
    assert np.abs(usual[1] - usual[0]).max() > 1e-2, "the LoRA acts"
    at_run_time = latents_of(catalog, replace(SIM, loras_at_run_time=True), strengths)
    assert np.array_equal(at_run_time[0], usual[0])
    last = latents_of(catalog, replace(SIM, memory_format=MemoryFormat.CHANNELS_LAST), strengths)
    for found in (at_run_time, last):
        assert all(np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(found, usual, strict=True))


def test_options_reach_the_components_that_they_are_for(catalog: Catalog) -> None:
    """`auto` leaves the simulated device alone."""
    sim.configure(0, PLENTY_BYTES)
    for chosen, expected in ((MemoryFormat.CHANNELS_LAST, True), (MemoryFormat.AUTO, False)):
        engine = Engine.open(replace(SIM, loras_at_run_time=True, memory_format=chosen))
        model = catalog.find_model("toy")
        for role in (Role.DIFFUSION_MODEL, Role.VAE, Role.TEXT_ENCODER):
            form = engine.patcher(model, role)._weights.form
            assert form.channels_last == (expected and role is not Role.TEXT_ENCODER)
            assert form.patches_at_run_time
        engine.close()


def test_a_fast_path_is_for_the_models_that_have_it(catalog: Catalog) -> None:
    store, compiler = GraphStore(RecordedGraphs()), BlockCompiler()
    for paths, expected in (
        (FastPaths(FastPath(True, True)), (True, True)),
        (FastPaths(models=(("toy", FastPath(captures=True)),)), (False, True)),
        (FastPaths(FastPath(True, True), (("toy", FastPath()),)), (False, False)),
        (FastPaths(models=(("another", FastPath(True, True)),)), (False, False)),
    ):
        opened = Engine.open(EngineSettings("cpu", 0, PLENTY_BYTES))
        parts = opened.device, opened.introduce(), opened._pipeline, opened._capabilities
        engine = Engine(*parts, compute=ComputeSettings(compiler, store, paths))
        weights = engine.patcher(catalog.find_model("toy"), Role.DIFFUSION_MODEL)._weights
        assert (weights.compiled is not None, weights.graphed is not None) == expected
        engine.close()


def test_sampling_runs_by_graphs_from_the_second_call_on(catalog: Catalog) -> None:
    """On the CPU, with graphs that repeat operations on the same memory: equal latents, also after switches of LoRAs;
    nothing is learnt about activations from calls that have their own."""
    settings, strengths = EngineSettings("cpu", 0, PLENTY_BYTES), (0.0, 0.8, 0.0)
    found, calls = {}, []
    for uses_graphs in (False, True):
        store = GraphStore(RecordedGraphs()) if uses_graphs else None
        opened = Engine.open(settings)
        parts = opened.device, opened.introduce(), opened._pipeline, opened._capabilities
        engine = Engine(*parts, compute=ComputeSettings(graphs=store))
        latents = []
        for strength in strengths:
            pipeline = Pipeline(engine, catalog, {"twist": strength} if strength else {})
            prompt, negative, sample, _ = pipeline.works()
            latent = pipeline.run(sample, pipeline.run(prompt), pipeline.run(negative))
            assert isinstance(latent, Latent)
            latents.append(latent.samples_CHW)
            if store is not None:
                calls.append(store.calls)
                assert pipeline.costs[-1].working_bytes == 0
                assert pipeline.costs[-1].planned_bytes >= engine.residency().used_bytes + store.held_bytes
        found[uses_graphs] = latents
        engine.close()
        assert store is None or store.held_bytes == 0
    assert 0 < calls[0] < calls[1] < calls[2]
    assert all(np.array_equal(a, b) for a, b in zip(found[True], found[False], strict=True))
