"""Fields with limits that depend on the model are refused when a request is submitted, not by its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.models.loading.layouts import tiny_sd1
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint


def submit(catalog: Catalog, **fields: Any) -> None:
    build_graph(GenerateRequest(model="tiny", prompt="a", seed=1, **fields), JobId("job"), catalog)


def test_noise_levels_outside_of_the_model_s_are_refused(tmp_path: Path) -> None:
    """Found by extreme values: such jobs were accepted, and failed in their sampling run."""
    write_tiny_checkpoint(tmp_path / "tiny.safetensors", layout=tiny_sd1())
    catalog = Catalog((tmp_path,), (), "cpu")
    with pytest.raises(UserError, match=r"^sigmas: found '1000', expected noise levels of the model, up to 14\.6146"):
        submit(catalog, sigmas=(1000.0, 0.5))
    submit(catalog, sigmas=(14.6, 0.5))


def test_a_schedule_that_was_published_for_other_levels_is_refused(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_schnell"])
    with pytest.raises(UserError, match=r"^schedule: found 'gits, which starts at noise level 14\.6.*'"):
        submit(tiny.catalog, schedule="gits")
    with pytest.raises(UserError, match=r"^sigmas: found '2', expected noise levels of the model, up to 1$"):
        submit(tiny.catalog, sigmas=(2.0, 0.5))
    tiny.close()
