"""Counts that models share: models of one structure do, in one catalog and in several; no others do."""

from __future__ import annotations

from pathlib import Path

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.estimates.activation_counts import ActivationCounts
from modelpool.pool.catalog.estimates.activation_estimator import ActivationEstimator
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeParams,
    GuidanceParams,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplingSchedule,
    StageParams,
)
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

#: its attention holds the scores; their size depends on the number of heads
KIND = "mps"


def works(model: ModelRef) -> list[StageParams]:
    return [
        EncodeParams(model, (), "a cat"),
        SampleParams(model, (), OutputShape(64, 64), SamplingSchedule(4, "euler", "normal"), GuidanceParams(5.0), 7),
        DecodeParams(model, OutputShape(64, 64)),
    ]


def estimator(catalog: Catalog, counts: ActivationCounts) -> ActivationEstimator:
    return ActivationEstimator(catalog._open, KIND, catalog.controls.opened, counts)


def counted(catalog: Catalog, name: str, counts: ActivationCounts) -> list[int]:
    figures = estimator(catalog, counts)
    return [figures.counted_bytes(work.model, work) for work in works(catalog.find_model(name))]


def test_fine_tunes_share_counts_and_others_do_not(tmp_path: Path) -> None:
    for name, seed in (("base", 1), ("tuned", 2)):
        write_tiny_checkpoint(tmp_path / f"{name}.safetensors", seed)
    catalog, counts = Catalog([tmp_path], [], "cpu"), ActivationCounts()
    base = counted(catalog, "base", counts)
    assert len(counts) == len(base)
    assert counted(catalog, "tuned", counts) == base
    assert len(counts) == len(base), "the fine-tune was counted again"

    other = Catalog([tmp_path], [], "cpu")  # equal shapes, but other numbers of heads
    model = other.find_model("base")
    for module in other._open(model).component(Role.DIFFUSION_MODEL).built.module.modules():
        if hasattr(module, "heads"):
            module.heads *= 2
    found = counted(other, "base", counts)
    assert len(counts) == len(base) + 1
    assert found[1] > base[1]
    assert found == counted(other, "base", ActivationCounts())
    assert [found[0], found[2]] == [base[0], base[2]]
