"""Families with a module of their own: complete, found, and compared with their pipelines."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest

from modelpool.pool.families import definitions as modules
from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.detect_diffusion_model import find_layout
from modelpool.pool.families.detection.layouts.shape_sizes import ShapeReader
from modelpool.pool.families.detection.layouts.signature import Layout, anything, published
from modelpool.pool.families.detection.signatures import LAYOUTS, SIGNATURES, narrower_first
from modelpool.pool.families.supported import running_families
from modelpool.pool.models.components.diffusion.adapted_modules import ADAPTED
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction
from scripts.write_families import read_tests
from tests.pool.families.definitions.in_tables import families_in_tables, modules_with_tests
from tests.pool.families.detection.published import (
    FOUND,
    Shapes,
    models_in_diffusers_naming,
    shapes_in_diffusers_naming,
    shapes_of,
)
from tests.pool.models.components.diffusion import image_cases, video_cases

MODULES = Path(modules.__file__ or "").parent
#: families that need an image or a video that requests cannot provide: they are built and do not run
WITHOUT_INPUT = {"hunyuan_video_15_sr"}


def test_every_module_has_a_test_of_its_name_or_families_that_tables_compare() -> None:
    """Families of modules without a test of their own count as in the list of families: compared with a pipeline of
    diffusers, or with a stated reason why not."""
    names = {path.stem for path in MODULES.glob("*.py")} - {"__init__"}
    assert modules_with_tests() <= names
    proof = read_tests()
    compared = {name for name, pipelines in proof.pipelines.items() if pipelines} | set(proof.reasons)
    assert {family.name for family in families_in_tables()} - WITHOUT_INPUT <= compared


def test_families_with_one_name_of_readings_read_alike() -> None:
    readings: dict[str, object] = {}
    for family in defined_families():
        assert readings.setdefault(family.readings_name, family.text.readings) == family.text.readings, family.name


def test_a_family_must_state_how_it_samples() -> None:
    """`SamplingFacts` have defaults for UNets: a family that forgets one of them is refused, with the field."""
    family = next(
        family for family in defined_families() if family.sampling.noise.kind is NoiseKind.FLOW and any(family.size)
    )
    for changes, field in (
        ({"defaults": None}, "defaults"),
        ({"side_multiple": 0}, "side_multiple"),
        ({"side_multiple": 7}, "side_multiple"),
        ({"prediction": Prediction.NOISE}, "prediction"),
        ({"noise": NoiseFacts()}, "prediction"),
    ):
        wrong = dataclasses.replace(family.sampling, **changes)
        for name in ("sampling", "distilled"):
            with pytest.raises(ValueError, match=rf"family {family.name}: sampling\.{field}: found"):
                dataclasses.replace(family, **{name: wrong})


def test_families_of_one_class_support_the_same_options_of_its_blocks_and_positions() -> None:
    """What the class of diffusers determines must not depend on the family that a variant was derived from."""
    supported: dict[str, set[tuple[bool, ...]]] = {}
    for family in defined_families():
        options = family.options
        found = (options.skips_blocks, options.moves_positions, options.isolates_sound)
        supported.setdefault(family.module, set()).add(found)
    assert [module for module, found in supported.items() if len(found) > 1] == []
    assert any(any(each) for found in supported.values() for each in found)


def test_a_family_without_a_field_cannot_be_built() -> None:
    definition = defined_families()[0]
    for value, expected in (
        (definition, {"detect", "text", "latent", "lora", "sampling", "build", "folder"}),
        (definition.detect, {"layout", "when", "comfyui"}),
        (definition.build, {"module", "config", "convert", "forward", "dtypes"}),
        (definition.text, {"readings"}),
        (definition.folder, {"pipeline"}),
    ):
        kind: Any = type(value)
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
        assert kind(**fields) == value
        required = fields.keys() - _optional(kind)
        assert expected <= required
        for name in required:
            with pytest.raises(TypeError, match=name):
                kind(**{key: each for key, each in fields.items() if key != name})


def _optional(kind: type) -> set[str]:
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }


def test_every_family_runs_and_names_what_diffusers_has() -> None:
    running = running_families()
    for family in defined_families():
        assert (family.name in running) == (family.name not in WITHOUT_INPUT), family.name
        assert hasattr(diffusers, family.module) or family.module in ADAPTED, family.name
        if family.folder.pipeline:  # a required field: empty for a family that diffusers has no pipeline for
            assert hasattr(diffusers, family.folder.pipeline), family.name
        assert [row.name for row in SIGNATURES].count(family.name) == 1


def test_families_of_one_layout_have_conditions_that_exclude_each_other() -> None:
    """No published or tiny model matches two rows of its layout, except rows of one module: there the first counts."""
    rest = [family.detect.layout.title for family in defined_families() if family.detect.when is anything]
    assert len(set(rest)) == len(rest), "a family without a condition is the rest of its layout: at most one is"
    module_of = {
        family.name: name
        for name in (path.stem for path in MODULES.glob("[!_]*.py"))
        for family in importlib.import_module(f"{modules.__name__}.{name}").FAMILIES
    }
    for source, shapes in recorded_shapes():
        found = find_layout(shapes)
        assert found is not None, source
        prefix, layout, naming = found
        bare = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
        config = naming.measure(ShapeReader(bare))
        rows = [row for row in SIGNATURES if row.layout is layout]
        # a row with extra keys precedes the others, a row for everything follows them
        rows = [row for row in rows if set(row.extra_keys) <= set(shapes) and row.when is not anything]
        narrowed = any(row.extra_keys for row in rows)
        matching = [row.name for row in rows if row.when(config) and bool(row.extra_keys) == narrowed]
        assert len({module_of.get(name, "not running") for name in matching}) <= 1, (source, matching)


def test_a_layout_is_tried_before_all_that_have_a_part_of_its_keys() -> None:
    """Whatever the names of their modules: Sana Video has all keys of Sana, whose module comes first."""
    wide, narrow = Layout("wide", (published("a"),)), Layout("narrow", (published("a", "b"),))
    other, narrowest = Layout("other", (published("c"),)), Layout("narrowest", (published("a", "b", "d"),))
    given = (wide, other, narrowest, narrow, wide)
    assert narrower_first(given) == (narrowest, narrow, wide, other)
    assert narrower_first(reversed(given)) == (narrowest, narrow, wide, other)
    assert len(LAYOUTS) == len({id(row.layout) for row in SIGNATURES})
    titles = [layout.title for layout in LAYOUTS]
    assert titles.index("Sana Video") < titles.index("Sana")


def recorded_shapes() -> Iterator[tuple[str, Shapes]]:
    """The published models with keys that are recorded, in both namings, and the tiny ones of which no keys are."""
    for model in FOUND:
        yield model, shapes_of(model)
    for model in models_in_diffusers_naming():
        yield f"{model} in diffusers", shapes_in_diffusers_naming(model)
    for name, case in (*image_cases.CASES.items(), *video_cases.CASES.items()):
        if not case.golden:
            yield name, {key: tuple(value.shape) for key, value in case.file(case.empty()).items()}
