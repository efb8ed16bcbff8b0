"""A model with two text encoders from a request to pixels: cut into tasks, run on engines of any budget, with a LoRA
that changes all but the VAE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.memory_fit import largest_task
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine
from modelpool.pool.engine.explicit_control import load_checkpoint
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import EncodeParams, ImagePixels, Result, lora_key
from modelpool.pool.values.specs.spec import Role, Stage, TaskId
from tests.pool.input_names import results_read
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import PLENTY_BYTES, QUIET, open_engine

RANK = 4
#: LoRA name -> the checkpoint's weight, and the rows of it that the LoRA changes: one may be query, key and value
TARGETS = {
    "lora_te1_text_model_encoder_layers_0_self_attn_q_proj": (
        "conditioner.embedders.0.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight",
        0,
        32,
    ),
    "lora_te2_text_model_encoder_layers_1_self_attn_k_proj": (
        "conditioner.embedders.1.model.transformer.resblocks.1.attn.in_proj_weight",
        32,
        32,
    ),
    "lora_unet_middle_block_1_transformer_blocks_1_attn2_to_v": (
        "model.diffusion_model.middle_block.1.transformer_blocks.1.attn2.to_v.weight",
        0,
        128,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a model and the same model with a LoRA merged in, and one with that LoRA."""
    models, loras = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("loras")
    path = write_tiny_checkpoint(models / "xl.safetensors", seed=4, dtype=torch.float32, layout=layouts.tiny_sdxl())
    tensors, lora = load_file(path), {}
    generator = torch.Generator().manual_seed(9)
    for name, (key, start, rows) in TARGETS.items():
        up, down = (torch.randn(s, generator=generator) for s in ((rows, RANK), (RANK, tensors[key].shape[1])))
        lora |= {f"{name}.lora_up.weight": up * 0.3, f"{name}.lora_down.weight": down * 0.3}
        lora[f"{name}.alpha"] = torch.tensor(float(RANK))
        tensors[key][start : start + rows] += (up * 0.3) @ (down * 0.3)
    save_file(tensors, models / "merged.safetensors")
    save_file(lora, loras / "all.safetensors")
    return models, loras


def catalog_of(folders: tuple[Path, Path]) -> Catalog:
    return Catalog((folders[0],), (folders[1],), "sim")


def cut(catalog: Catalog, model: str, loras: tuple[LoraChoice, ...] = ()) -> JobGraph:
    request = GenerateRequest(
        model=model,
        prompt="a (red:1.4) cube",
        negative="blue",
        width=64,
        height=48,
        steps=2,
        cfg=4.0,
        seed=5,
        loras=loras,
    )
    return build_graph(request, "job", catalog)[1]


def run(made: JobGraph, engine: Engine) -> np.ndarray:
    results: dict[TaskId, Result] = {}
    for task in made.job.tasks:
        inputs = results_read(task, results)
        results[task.task_id], cost = engine.run(task, made.works[task.task_id], inputs, QUIET)
        assert cost.peak_bytes <= engine.introduce().capacity_bytes
    image = results[made.job.wanted]
    assert isinstance(image, ImagePixels)
    return image.pixels_HWC


def test_a_text_is_one_task_of_both_text_encoders(folders: tuple[Path, Path]) -> None:
    catalog = catalog_of(folders)
    made = cut(catalog, "xl")
    sizes = catalog.components(catalog.find_model("xl"))
    texts = [task for task in made.job.tasks if task.stage is Stage.ENCODE]
    assert len(texts) == 2
    for task in texts:
        assert [use.component for use in task.uses] == [
            sizes[Role.TEXT_ENCODER].key,
            sizes[Role.TEXT_ENCODER_2].key,
        ]
    assert {component.key for component in made.components} == {spec.key for spec in sizes.values()}


def test_a_lora_is_read_where_it_changes_something(folders: tuple[Path, Path]) -> None:
    catalog = catalog_of(folders)
    made = cut(catalog, "xl", (LoraChoice(name="all", strength=1.0),))
    key = lora_key(catalog.find_lora("all", 1.0))
    for task in made.job.tasks:
        adapters = [use.adapters for use in task.uses]
        assert adapters == ([()] if task.stage is Stage.DECODE else [(key,)] * len(task.uses))
        if isinstance(made.works[task.task_id], EncodeParams):
            assert len({use.patch_digest for use in task.uses}) == 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_image_is_the_same_on_every_budget_and_with_a_lora_merged_or_not(
    folders: tuple[Path, Path], share: float
) -> None:
    """`share` of the weights of the largest task fit beside what a run needs at least."""
    catalog = catalog_of(folders)
    patched, merged = cut(catalog, "xl", (LoraChoice(name="all", strength=1.0),)), cut(catalog, "merged")
    weight_bytes = max(spec.weight_bytes for spec in patched.components)
    budget_bytes = int(largest_task(patched.job)[1] + share * weight_bytes)
    engine = open_engine("sim", budget_bytes)
    images = [run(made, engine) for made in (patched, cut(catalog, "xl"), patched)]
    engine.close()
    plenty = open_engine("sim", PLENTY_BYTES)
    expected = run(merged, plenty)
    assert np.array_equal(images[0], images[2])
    assert np.abs(images[0].astype(int) - expected).max() <= 1
    assert np.abs(images[1].astype(int) - expected).max() > 1
    plenty.close()


def test_a_text_of_another_kind_of_model_is_refused_by_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Found in review: it ended in an assertion, or in an error of torch about shapes."""
    plain = write_tiny_checkpoint(tmp_path / "plain.safetensors")
    with load_checkpoint(folders[0] / "xl.safetensors", "cpu") as xl, load_checkpoint(plain, "cpu") as sd1:
        own, other = xl.encode("a cube"), sd1.encode("a cube")
        with pytest.raises(
            UnusableField, match="prompt: found 'a text 32 wide with 0 of a pooled text', expected a text 64"
        ):
            xl.sample(other, own, width=64, height=64, steps=1)
        with pytest.raises(UnusableField, match="negative: found 'a text 64 wide with 32"):
            sd1.sample(other, own, width=64, height=64, steps=1)
