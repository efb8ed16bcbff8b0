"""Workflows of a few KB with work that would grow faster than they do: each is fast, or refused by its bound."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_graph import (
    MAX_LISTED_LEVELS,
    MAX_OUTPUT_NODES,
    OutputNode,
    PoolNames,
)
from modelpool.actors.http.comfy.comfy_prompts import ComfyPrompts, Prompt, Socket
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd
from modelpool.actors.request.bounds import MAX_LORAS, MAX_PROMPT_CHARACTERS
from modelpool.actors.request.image_fields import MAX_PARTS
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.test_comfy_api import GRAPH

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, ["light"])
#: nodes in a row: each could double what it gets
ROUNDS = 60

Node = dict[str, Any]


def node(kind: str, **inputs: Any) -> Node:
    return {"class_type": kind, "inputs": inputs}


def chained(build: Callable[[str], Node], first: str, rounds: int = ROUNDS, slot: int = 0) -> dict[str, Any]:
    """The workflow with a chain of nodes, each built on the id of the one before, as the positive text."""
    graph = copy.deepcopy(GRAPH)
    source = first
    for place in range(rounds):
        graph[f"c{place}"] = build(source)
        source = f"c{place}"
    graph["6"]["inputs"]["positive"] = [source, slot]
    return graph


def _with_files(graph: dict[str, Any]) -> dict[str, Any]:
    graph["net"] = node("ControlNetLoader", control_net_name="canny")
    graph["image"] = node("LoadImage", image="a.png")
    graph["vision"] = node("CLIPVisionLoader", clip_name="v")
    graph["seen"] = node("CLIPVisionEncode", clip_vision=["vision", 0], image=["image", 0])
    graph["style"] = node("StyleModelLoader", style_model_name="redux")
    return graph


def _control(source: str) -> Node:
    return node("ControlNetApply", conditioning=[source, 0], control_net=["net", 0], image=["image", 0], strength=1.0)


def _style(source: str) -> Node:
    about = {"style_model": ["style", 0], "clip_vision_output": ["seen", 0]}
    return node("StyleModelApply", conditioning=[source, 0], **about, strength=1.0, strength_type="multiply")


def _loras(count: int) -> dict[str, Any]:
    graph = copy.deepcopy(GRAPH)
    source = "1"
    for place in range(count):
        inputs = {"model": [source, 0], "clip": [source, 1], "lora_name": "light"}
        graph[f"l{place}"] = node("LoraLoader", **inputs, strength_model=1.0, strength_clip=1.0)
        source = f"l{place}"
    for text in "34":
        graph[text]["inputs"]["clip"] = [source, 1]
    graph["6"]["inputs"]["model"] = [source, 0]
    return graph


def _outputs(kind: str, count: int) -> dict[str, Any]:
    graph = copy.deepcopy(GRAPH)
    return {**graph, **{f"o{place}": node(kind, images=["7", 0]) for place in range(count)}}


def _levels() -> dict[str, Any]:
    graph = copy.deepcopy(GRAPH)
    graph["n"], graph["s"] = node("RandomNoise", noise_seed=1), node("KSamplerSelect", sampler_name="euler")
    for place in range(200):
        inputs = {"steps": 999, "sigma_max": 14.0, "sigma_min": 0.03, "rho": 7.0 + place / 1000}
        graph[f"k{place}"] = node("KarrasScheduler", **inputs)
        graph[f"x{place}"] = node(
            "SamplerCustom", model=["2", 0], add_noise=True, noise_seed=1, cfg=1.0, positive=["3", 0],
            negative=["4", 0], sampler=["s", 0], sigmas=[f"k{place}", 0], latent_image=["5", 0],
        )  # fmt: skip
        graph[f"d{place}"] = node("VAEDecode", samples=[f"x{place}", 0], vae=["1", 2])
        graph[f"p{place}"] = node("PreviewImage", images=[f"d{place}", 0])
    return graph


def _long_text() -> dict[str, Any]:
    graph = copy.deepcopy(GRAPH)
    graph["3"]["inputs"]["text"] = "x" * (MAX_PROMPT_CHARACTERS + 1)
    return graph


def _combine(source: str) -> Node:
    return node("ConditioningCombine", conditioning_1=[source, 0], conditioning_2=[source, 0])


def _concat(source: str) -> Node:
    return node("ConditioningConcat", conditioning_to=[source, 0], conditioning_from=[source, 0])


def _combine_in_turns(source: str) -> Node:
    return node("ConditioningCombine", conditioning_1=[source, 0], conditioning_2=["3", 0])


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "combined with itself": (lambda: chained(_combine, "3"), f"up to {MAX_PARTS}"),
    "combined in turns": (lambda: chained(_combine_in_turns, "3", 900), f"up to {MAX_PARTS}"),
    "behind itself": (lambda: chained(_concat, "3"), "texts one behind another, expected up to 100"),
    "controls": (lambda: _with_files(chained(_control, "3", 900)), f"ControlNets, expected up to {MAX_PARTS}"),
    "styles": (lambda: _with_files(chained(_style, "3", 900)), f"image prompts, expected up to {MAX_PARTS}"),
    "LoRAs": (lambda: _loras(900), f"found 900 LoRAs, expected up to {MAX_LORAS}"),
    "outputs": (lambda: _outputs("PreviewImage", 980), f"found 981 nodes .* up to {MAX_OUTPUT_NODES}"),
    "noise levels": (_levels, f"more than {MAX_LISTED_LEVELS} noise levels"),
    "a long text": (_long_text, f"found {MAX_PROMPT_CHARACTERS + 1} characters, expected up to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_workflow_that_would_grow_is_refused_by_its_bound(name: str) -> None:
    """ConditioningCombine of a node with itself, 25 times, took 4 GB."""
    make, expected = REFUSED[name]
    graph = make()
    with pytest.raises(UserError, match=expected):
        [requests_of(output, NAMES, lambda file: pytest.fail("one is read")) for output in outputs_of(graph, NAMES)]


def test_what_is_within_the_bounds_is_built() -> None:
    graph = chained(_concat, "3", 5)
    (output,) = outputs_of(graph, NAMES)
    text = requests_of(output, NAMES, lambda name: pytest.fail("there is none"))[0].prompt
    assert text == " BREAK ".join(["a red circle"] * 32)
    graph = chained(_combine, "3", 4)
    (output,) = outputs_of(graph, NAMES)
    regions = requests_of(output, NAMES, lambda name: pytest.fail("there is none"))[0].regions
    assert len(regions) == 15


def prompt_of(outputs: tuple[OutputNode, ...], graph: dict[str, Any]) -> Prompt:
    total = sum(output.count for output in outputs)
    submission = HttpSubmission("s", "", "comfyui", total, lambda: None, False)
    return Prompt.of(1, "p", None, graph, {}, outputs, submission)


def end_of(index: int) -> JobEnd:
    return JobEnd(index, f"s-{index}", "succeeded", Path(f"{index}.png"))


def test_the_history_has_each_warning_about_the_images_once() -> None:
    graph = _outputs("PreviewImage", 1)

    async def run() -> list[Any]:
        prompt = prompt_of(outputs_of(graph, NAMES), graph)
        before = prompt.warning_messages
        for index in range(2):
            prompt.submission.note([replace(end_of(index), facts={"warnings": ["half of a LoRA"]})], ())
        assert before == []
        messages: list[Any] = prompt.status["messages"]
        return messages

    (_, data) = asyncio.run(run())[1]
    assert data == {"prompt_id": "p", "warnings": ["half of a LoRA"]}


def test_every_output_is_reported_once_with_its_images() -> None:
    """The report of 980 outputs of one image took 12 minutes of the event loop."""
    graph = _outputs("PreviewImage", MAX_OUTPUT_NODES - 1)

    async def run() -> list[dict[str, Any]]:
        prompts = ComfyPrompts()
        prompt = prompt_of(outputs_of(graph, NAMES), graph)
        socket = Socket("me", "")
        prompts.connect(socket)
        prompts.add(prompt)
        count = prompt.submission.total
        assert count == 2 * MAX_OUTPUT_NODES
        for index in reversed(range(count)):
            prompt.submission.note([end_of(index)], ())
        while prompts.active("")[0]:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        found = [found for found in socket_messages(socket) if found["type"] == "executed"]
        await prompts.close()
        assert list(prompt.image_names) == [output.node_id for output in prompt.outputs]
        return found

    found = asyncio.run(run())
    reported = {message["data"]["node"]: message["data"]["output"]["images"] for message in found}
    assert len(found) == len(reported) == MAX_OUTPUT_NODES
    assert [image["filename"] for image in reported["8"]] == ["0.png", "1.png"]
    assert [image["filename"] for image in reported["o0"]] == ["2.png", "3.png"]


def socket_messages(socket: Socket) -> list[dict[str, Any]]:
    found = []
    while not socket.messages.empty():
        if isinstance(message := socket.messages.get_nowait(), dict):
            found.append(message)
    return json.loads(json.dumps(found))
