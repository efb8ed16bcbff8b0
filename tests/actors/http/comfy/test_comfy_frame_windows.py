"""Nodes of context windows select the option `windows`; what the pool does not have of them is refused or told of."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.workflow_fields import SampleNode
from modelpool.pool.catalog.registry.listings import FileNames
from modelpool.pool.values.core.run_options import FrameWindows, RunOptions
from tests.actors.http.comfy.comfy_examples import Graph, node
from tests.actors.http.comfy.test_public_kinds import requests
from tests.each_case import each_case

NAMES = PoolNames({"wan": "Wan text-to-video"}, [], None, FileNames())
COMMON: dict[str, Any] = {
    "context_length": 21, "context_overlap": 8, "context_schedule": "standard_static", "context_stride": 1,
    "closed_loop": False, "fuse_method": "pyramid",
}  # fmt: skip
MANUAL: dict[str, Any] = {
    **COMMON, "dim": 2, "freenoise": True, "cond_retain_index_list": "0", "split_conds_to_windows": False,
    "latent_retain_index_list": "", "causal_window_fix": True,
}  # fmt: skip


def video(kind: str, **settings: Any) -> Graph:
    texts = {name: node("CLIPTextEncode", clip=["loader", 1], text=name) for name in ("positive", "negative")}
    return {
        "loader": node("CheckpointLoaderSimple", ckpt_name="wan.safetensors"),
        "windows": node(kind, model=["loader", 0], **settings),
        **texts,
        "empty": node("EmptyHunyuanLatentVideo", width=64, height=64, length=161, batch_size=1),
        "sampled": node(
            "KSampler", model=["windows", 0], seed=5, steps=4, cfg=5.0, sampler_name="euler", scheduler="simple",
            positive=["positive", 0], negative=["negative", 0], latent_image=["empty", 0], denoise=1.0,
        ),
        "decoded": node("VAEDecode", samples=["sampled", 0], vae=["loader", 2]),
        "saved": node("SaveAnimatedWEBP", images=["decoded", 0], filename_prefix="x", fps=16.0, lossless=False,
                      quality=90, method="default"),
    }  # fmt: skip


def option(graph: Graph) -> FrameWindows | None:
    (request,) = requests(graph, NAMES)
    options: RunOptions | None = request.options
    if request.workflow is not None:
        (found,) = [each for each in request.workflow.nodes.values() if isinstance(each, SampleNode)]
        options = found.options
    assert options is not None
    return options.windows


def warnings(graph: Graph) -> str:
    return "; ".join(text for output in outputs_of(graph, NAMES) for text in output.warnings)


def test_settings_of_the_nodes_are_settings_of_the_option() -> None:
    assert option(video("ContextWindowsManual", **MANUAL)) == FrameWindows(21, 8, retain=1)
    changed = {"context_schedule": "looped_uniform", "context_stride": 2, "closed_loop": True, "fuse_method": "flat"}
    others = {"freenoise": False, "cond_retain_index_list": "", "causal_window_fix": False}
    expected = FrameWindows(21, 8, "looped_uniform", "flat", 2, 1, 0, 0, 0)
    assert option(video("ContextWindowsManual", **{**MANUAL, **changed, **others})) == expected
    assert "windows" not in warnings(video("ContextWindowsManual", **MANUAL))


def test_the_node_of_wan_counts_frames() -> None:
    """81 are 21 latent frames, 30 are 7."""
    frames = {**COMMON, "context_length": 81, "context_overlap": 30, "freenoise": True, "split_conds_to_windows": False}
    assert option(video("WanContextWindowsManual", **frames)) == FrameWindows(21, 7)
    assert option(video("WanContextWindowsManual", **frames, retain_first_frame=True)) == FrameWindows(21, 7, retain=1)


@each_case(
    "setting",
    (
        {"dim": 0},
        {"split_conds_to_windows": True},
        {"latent_retain_index_list": "0"},
        {"cond_retain_index_list": "0,1"},
        {"context_overlap": 21},
    ),
)
def test_what_the_pool_does_not_have_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(WorkflowRejected):
        requests(video("ContextWindowsManual", **{**MANUAL, **setting}), NAMES)


@each_case(
    "setting",
    (
        {"context_stride": 2},
        {"closed_loop": True},
        {"context_schedule": "batched"},
        {"context_schedule": "standard_uniform"},
    ),
)
def test_what_has_no_effect_is_told(setting: dict[str, Any]) -> None:
    graph = video("ContextWindowsManual", **{**MANUAL, **setting})
    assert option(graph) is not None
    assert "windows" in warnings(graph)
