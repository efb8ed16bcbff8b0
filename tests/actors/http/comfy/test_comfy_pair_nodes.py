"""Nodes that give pairs of texts a mask and a part of the steps are the nodes that do one of these for one text."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_refused_nodes import reason_for
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, [], image_size=lambda name: (64, 64))


def read(name: str) -> Image.Image:
    return Image.linear_gradient("L").resize((64, 64)).convert("RGBA")


def asked(graph: Graph) -> list[dict[str, Any]]:
    """The requests, with the digests of the pixels of their masks."""
    found = [one for output in outputs_of(graph, NAMES) for one in requests_of(output, NAMES, read)]
    masks = [[each.mask.sha256 for each in one.regions if each.mask is not None] for one in found]
    return [
        {**one.model_dump(exclude={"regions": {"__all__": {"mask"}}}), "masks": each}
        for one, each in zip(found, masks, strict=True)
    ]


def with_texts(sampler: dict[str, Any], **nodes: Any) -> Graph:
    graph = basic(**sampler)
    graph["loaded"] = node("LoadImage", image="a.png")
    graph["red"] = node("CLIPTextEncode", text="a red fox", clip=["model", 1])
    graph["dull"] = node("CLIPTextEncode", text="dull", clip=["model", 1])
    return {**graph, **nodes}


def in_mask(strength: float = 0.5) -> dict[str, Any]:
    return {"strength": strength, "set_cond_area": "default", "mask": ["loaded", 1]}


def test_a_mask_is_that_of_conditioning_set_mask() -> None:
    one = with_texts(
        {"positive": ["both", 0]},
        masked=node("ConditioningSetMask", conditioning=["red", 0], **in_mask()),
        both=node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["masked", 0]),
    )
    same = with_texts(
        {"positive": ["both", 0]},
        both=node("ConditioningSetPropertiesAndCombine", cond=["positive", 0], cond_NEW=["red", 0], **in_mask()),
    )
    apart = with_texts(
        {"positive": ["both", 0]},
        masked=node("ConditioningSetProperties", cond_NEW=["red", 0], **in_mask()),
        both=node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["masked", 0]),
    )
    (expected,) = asked(one)
    assert expected["regions"]
    assert expected["masks"]
    assert asked(same) == asked(apart) == [expected]


def test_parts_of_the_steps_are_those_of_conditioning_set_timestep_range() -> None:
    """Positive and negative, before a step and after it."""
    plain = {"strength": 1.0, "set_cond_area": "default"}
    sampler = {"positive": ["pair", 0], "negative": ["pair", 1]}
    texts = {"positive": ("positive", "red"), "negative": ("negative", "dull")}
    spans = {
        f"{name} {place}": node("ConditioningSetTimestepRange", conditioning=[text, 0], start=start, end=end)
        for name, each in texts.items()
        for place, (text, start, end) in enumerate(zip(each, (0.0, 0.5), (0.5, 1.0), strict=True))
    }
    joined = {
        f"joined {name}": node("ConditioningCombine", conditioning_1=[f"{name} 0", 0], conditioning_2=[f"{name} 1", 0])
        for name in texts
    }
    one = with_texts({name: [f"joined {name}", 0] for name in texts}, **spans, **joined)
    ranges = node("ConditioningTimestepsRange", start_percent=0.0, end_percent=0.5)
    first = node(
        "PairConditioningSetProperties", positive_NEW=["positive", 0], negative_NEW=["negative", 0],
        timesteps=["ranges", 0], **plain,
    )  # fmt: skip
    second = node(
        "PairConditioningSetPropertiesAndCombine", positive=["first", 0], negative=["first", 1],
        positive_NEW=["red", 0], negative_NEW=["dull", 0], timesteps=["ranges", 2], **plain,
    )  # fmt: skip
    same = with_texts(sampler, ranges=ranges, first=first, pair=second)
    expected = asked(one)
    assert asked(same) == expected
    third = node(
        "PairConditioningSetProperties", positive_NEW=["red", 0], negative_NEW=["dull", 0], timesteps=["ranges", 2],
        **plain,
    )  # fmt: skip
    pair = node(
        "PairConditioningCombine", positive_A=["first", 0], negative_A=["first", 1], positive_B=["third", 0],
        negative_B=["third", 1],
    )  # fmt: skip
    assert asked(with_texts(sampler, ranges=ranges, first=first, third=third, pair=pair)) == expected


def test_a_strength_without_a_mask_and_hooks_are_refused() -> None:
    graph = with_texts(
        {"positive": ["weak", 0]},
        weak=node("ConditioningSetProperties", cond_NEW=["red", 0], strength=0.5, set_cond_area="default"),
    )
    with pytest.raises(WorkflowRejected) as found:
        asked(graph)
    assert "strength: found 0.5, expected 1 without a mask" in found.value.errors[0].details
    graph["hook"] = node("CreateHookLora", lora_name="light", strength_model=1.0, strength_clip=1.0)
    graph["weak"] = node(
        "ConditioningSetProperties", cond_NEW=["red", 0], strength=1.0, set_cond_area="default", hooks=["hook", 0]
    )
    with pytest.raises(WorkflowRejected) as found:
        asked(graph)
    assert "LoRAs over the steps are written as name:0.8@0-0.5" in found.value.errors[0].details
    for kind in ("ConditioningSetDefaultCombine", "ConditioningSetAreaPercentageVideo"):
        assert "the pool" in reason_for(kind)
