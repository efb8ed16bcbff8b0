"""Models that work from images can be planned for without one: it then asks for the bytes of an image of that size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from modelpool.actors.cli.models.plan import memory_plan
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.placeholders import with_placeholders
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.values.specs.spec import JobId
from tests.pool.families.test_seen_wan import BOTH, image
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS, TinyFamilyModel
from tests.pool.families.tiny_videos import VIDEOS
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

SIZE: dict[str, Any] = {"width": 64, "height": 64}


def _catalog(folder: Path, name: str) -> Catalog:
    if name in VIDEOS:
        save_file(VIDEOS[name].file(), folder / "tiny.safetensors")
    elif name in SHOWN_LAYOUTS:
        write_tiny_checkpoint(folder / "tiny.safetensors", layout=SHOWN_LAYOUTS[name]())
    else:
        TinyFamilyModel(folder, BOTH).close()
    return Catalog((folder,), (), "sim")


@pytest.mark.parametrize(
    ("name", "fields", "images"),
    [
        ("svd", {"frames": 3, **SIZE}, {"image": (64, 64)}),
        ("sv3d_p", {"frames": 3, **SIZE}, {"image": (64, 64)}),
        ("wan21_flf2v", {"frames": 5, **SIZE}, {"image": (64, 64), "last_image": (64, 64)}),
        ("sd1_ip2p", SIZE, {"image": (64, 64)}),
    ],
)
def test_a_plan_without_a_image_is_that_of_a_image_of_its_size(
    name: str, fields: dict[str, Any], images: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    catalog = _catalog(tmp_path, name)
    said = {"model": "tiny", "prompt": "", "seed": 0, "steps": 2, **fields}
    planned = with_placeholders(GenerateRequest(**said), catalog.model_defaults(catalog.find_model("tiny")))
    assert {key: (getattr(planned, key).width, getattr(planned, key).height) for key in images} == images
    own = {key: image(seed, *size) for seed, (key, size) in enumerate(images.items())}
    given, _ = InputImages(lambda result: result).bring(GenerateRequest(**said, **own))
    (_, found), (_, expected) = (build_graph(each, JobId("j"), catalog) for each in (planned, given))
    assert sorted(map(str, found.works.values())) == sorted(map(str, expected.works.values()))
    figures = [sorted(task.activation_bytes for task in cut.job.tasks) for cut in (found, expected)]
    assert figures[0] == figures[1]


def test_the_command_plans_for_a_model_of_images(tmp_path: Path) -> None:
    """Found: it asked for the image that it does not need."""
    _catalog(tmp_path, "svd")
    config = tmp_path / "pool.toml"
    config.write_text(f'[models]\nfolders = ["{tmp_path}"]\n[pool]\ndevice = "sim"\nvram = "256MiB"\n')
    plan = memory_plan("tiny", "", SIZE, 1, None, PoolOptions(config=config))
    assert (plan.width, plan.height) == (64, 64)
    assert [stage.stage.value for stage in plan.forecast.first] == ["encode", "encode", "sample", "decode"]
