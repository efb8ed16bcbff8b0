"""Values that a node cannot read are refused by the node that would read them."""

from __future__ import annotations

import pytest

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, [], image_size=lambda name: (64, 64))


def refusal(graph: Graph) -> str:
    with pytest.raises(WorkflowRejected) as refused:
        outputs_of(graph, NAMES)
    return "; ".join(f"{error.class_type}: {error.details}" for error in refused.value.errors)


def test_only_texts_and_numbers_are_parts_of_a_text() -> None:
    """A sentence about a size that is not known was a part of the prompt, and numbers of masks an internal error."""
    image = node("LoadImage", image="a.png")
    formatted = {**basic(), "image": image, "text": node("StringFormat", f_string="{a}", **{"values.a": ["image", 1]})}
    formatted["positive"]["inputs"]["text"] = ["text", 0]
    assert "values.a: expected a text" in refusal(formatted)
    number = {**basic(), "image": image, "number": node("ComfyNumberConvert", value=["image", 1])}
    number["sampler"]["inputs"]["cfg"] = ["number", 0]
    assert "expected a number" in refusal(number)
