"""Nodes without tensors are computed before a workflow is compiled: what they give is as if it were written; what
cannot be computed is named, and nothing grows without bound."""

from __future__ import annotations

import math
import re
import tracemalloc
from typing import Any

import pytest

from modelpool.actors.http.comfy.comfy_api import is_read_quickly
from modelpool.actors.http.comfy.comfy_evaluation import evaluated
from modelpool.actors.http.comfy.comfy_expressions import number_of
from modelpool.actors.http.comfy.comfy_graph import KnownGraph, PoolNames, nodes_in_order
from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.each_case import each_case

NAMES = PoolNames({"shapes": "Stable Diffusion 1", "xl": "Stable Diffusion XL"}, ["light"])


def made(graph: Graph) -> GenerateRequest:
    """The request of a workflow with one output."""
    (output,) = outputs_of(graph, NAMES)
    (request,) = requests_of(output, NAMES, lambda name: pytest.fail(f"reads {name}"))
    return request


def errors(graph: Graph) -> dict[str, list[str]]:
    """The details of the errors, by node."""
    with pytest.raises(WorkflowRejected) as found:
        outputs_of(graph, NAMES)
    nodes = found.value.as_json()["node_errors"]
    return {node_id: [each["details"] for each in one["errors"]] for node_id, one in nodes.items()}


def given(kind: str, slot: int = 0, **inputs: Any) -> Any:
    """What a node without tensors gives to an input that takes everything."""
    graph = {"value": node(kind, **inputs), "end": node("Any Switch (rgthree)", any_01=["value", slot])}
    order = nodes_in_order(KnownGraph(graph, NAMES), ["end"])
    return evaluated(graph, order)["end"]["inputs"]["any_01"]


def test_values_of_nodes() -> None:
    cases: list[tuple[Any, Any]] = [
        (given("StringConcatenate", string_a="a", string_b="b", delimiter="-"), "a-b"),
        (given("StringSubstring", string="abcdef", start=1, end=-1), "bcde"),
        (given("StringLength", string="abc"), 3),
        (given("CaseConverter", string="a red Cat", mode="Title Case"), "A Red Cat"),
        (given("StringTrim", string="  a ", mode="Left"), "a "),
        (given("StringReplace", string="a cat", find="cat", replace="dog"), "a dog"),
        (given("StringContains", string="A Cat", substring="cat", case_sensitive=False), True),
        (given("StringCompare", string_a="cat", string_b="c", mode="Starts With", case_sensitive=True), True),
        (given("Text String", 3, text="a", text_d="d"), "d"),
        (
            given("Text Concatenate", delimiter="\\n", clean_whitespace="true", text_a=" a ", text_b=" ", text_d="d"),
            "a\nd",
        ),
        (given("Text Random Line", text="one\ntwo\nthree", seed=3), "one"),
        (given("StringConstantMultiline", string="a\nb", strip_newlines=True), "ab"),
        (given("MathExpression|pysssss", 1, expression="a / 2 ** b", a=10, b=2), 2.5),
        (given("MathExpression|pysssss", expression="iif(a > 3, max(a, 7), 1)", a=4), 7),
        (given("SimpleMath+", value="round(a * 1.5)", a=3), 4),
        (given("PrimitiveBoolean", value="true"), True),
        (given("ResolutionSelector", aspect_ratio="16:9 (Widescreen)", megapixels=1.0, multiple=16), 1360),
        (given("ResolutionSelector", 1, aspect_ratio="16:9 (Widescreen)", megapixels=1.0, multiple=16), 768),
        (given("ResolutionSelector", aspect_ratio="1:1 (Square)", megapixels=2.0), 1448),
        (given("CustomCombo", 1, choice="b", index=0, option1="a", option2="b"), 1),
        (given("CustomCombo", 1, choice="b", index=7), 7),
        (given("JsonExtractString", json_string='see {x: {"a": {"b": 1}, "c": null}', key="a"), "{'b': 1}"),
        (given("JsonExtractString", json_string='{"a": 1, "c": null}', key="c"), ""),
        (given("JsonExtractString", json_string="none", key="c"), ""),
        (given("ComfyNumberConvert", value=" 3.75"), 3.75),
        (given("ComfyNumberConvert", 1, value="3.75"), 3),
        (given("ComfyNumberConvert", 1, value=True), 1),
        (given("ComfyNumberConvert", 1, value=str(2**53 + 1)), 2**53 + 1),
        (given("PreviewAny", source=1024), "1024"),
        (given("StringFormat", **{"f_string": "{a} and {b}", "values.a": "x", "values.b": 2}), "x and 2"),
        (given("TruncateText", text="abcdef", max_length=3), "abc"),
        (given("ReplaceText", text="a cat", find="cat", replace="dog"), "a dog"),
        (given("RegexExtract", string="a1 b2", regex_pattern="([a-z])([0-9])", mode="First Match"), "a1"),
        (given("RegexExtract", string="a1 b2", regex_pattern="([a-z])([0-9])", mode="All Matches"), "a\nb"),
        (given("RegexExtract", string="a1 b2", regex_pattern="[a-z][0-9]", mode="All Matches"), "a1\nb2"),
        (
            given("RegexExtract", string="a1 b2", regex_pattern="([a-z])([0-9])", mode="All Groups", group_index=2),
            "1\n2",
        ),
        (given("RegexExtract", string="a1", regex_pattern="([a-z])", mode="First Group", group_index=2), ""),
        (given("RegexExtract", string="x\n---\na\nb", regex_pattern="(?s)---\n(.*)", mode="First Group"), "a\nb"),
        (given("ComfyMathExpression", 1, expression="max(((a + 15) // 16) * 16, 256)", **{"values.a": 1000}), 1008),
        (
            given(
                "ComfyMathExpression", expression="sum(values) if a > 1 and b else 0", **{"values.a": 2, "values.b": 3}
            ),
            5.0,
        ),
        (given("ComfyMathExpression", 1, expression="a & -8", **{"values.a": 1023}), 1016),
        (given("ComfyMathExpression", 2, expression="a - 2", **{"values.a": 2}), False),
    ]
    for number, (found, wanted) in enumerate(cases):
        assert found == wanted, number
        assert type(found) is type(wanted), number


def test_json_in_a_text_is_searched_with_bounded_work() -> None:
    """Before: each brace of 128,000 characters was read to the end, on the event loop: 2 seconds for each node."""
    for text, expected in (
        ('{"":' * 32_000, "too deep"),
        ('{"k":[1,' * 16_000, "too deep"),
        ('{"k":[' * 100 + "1," * 60_000, "the first 82 braces of 120600 characters"),
        ("{x} " * 101 + '{"k": 1}', "the first 100 braces of 412 characters"),
    ):
        graph = basic()
        graph["found"] = node("JsonExtractString", json_string=text, key="k")
        graph["positive"]["inputs"]["text"] = ["found", 0]
        (message,) = errors(graph)["found"]
        assert message.startswith("json_string: found ")
        assert expected in message
        assert not is_read_quickly(graph), "texts are not searched on the event loop"
    assert is_read_quickly(basic())
    assert not is_read_quickly({**basic(), "photo": node("LoadImage", image="a.png")}), "nor files opened there"
    assert given("JsonExtractString", json_string="{x} " * 99 + '{"k": 1}', key="k") == "1"


@each_case(
    "pattern, template, count",
    [
        ("(a)(b?)(?P<n>c)", r"<\g<0>\1\2\g<n>\g<3>>", 0),
        ("(a)|(b)", r"<\1\2>", 0),
        ("x*", "-", 0),
        ("()b", r"\1\n\\1\\\1", 0),
        ("(.)(.)", r"\20\0\08\101\12", 0),
        ("(.)(.)", r"\2\0\08\101\\", 2),
        ("(?=(a))", r"\1!", 1),
        ("nothing", r"\1", 0),
        ("nothing", "\\", 0),
        ("a", r"\g<n>", 0),
        ("A|B", "", 3),
    ],
)
def test_matches_are_replaced_as_by_python(pattern: str, template: str, count: int) -> None:
    text = "abc acx\naabbcc ABC"
    flags = {"case_insensitive": True, "multiline": False, "dotall": True}
    inputs = {"string": text, "regex_pattern": pattern, "replace": template, "count": count, **flags}
    try:
        expected: Any = re.compile(pattern, re.IGNORECASE | re.DOTALL).sub(template, text, count=count)
    except (re.error, IndexError):
        expected = ["value", 0]  # not computed: the node is named later
    assert given("RegexReplace", **inputs) == expected


def test_texts_of_replaced_matches_are_bounded_before_they_are_made() -> None:
    """Before: 131,072 matches of a template of as many characters were 16 GiB before the text was refused."""
    for text, pattern, template, expected in (
        ("a" * 2000, "a", "b" * 131_072, "its text has 262144"),
        ("a" * 3000, "a+", r"\g<0>" * 20_000, "its text has 132000"),
        ("a" * 20_000, "a()", r"\1" * 60, "expected up to 1000000 parts"),
        ("a" * 131_073, "b", "", "its text has 131073"),
        ("a", "b", "c" * 131_073, "its text has 131073"),
    ):
        inputs = {"string": text, "regex_pattern": pattern, "replace": template, "count": 0}
        flags = {"case_insensitive": False, "multiline": False, "dotall": False}
        tracemalloc.start()
        try:
            with pytest.raises(NodeUnsupported, match=expected):
                NODE_TYPES["RegexReplace"].build({**inputs, **flags})
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()


def test_what_utility_nodes_do_not_compute_stays_a_link() -> None:
    """Formats that reach into values, texts that are no numbers, and flags in the middle of an expression."""
    cases = [
        ("StringFormat", {"f_string": "{a.__class__}", "values.a": "x"}),
        ("StringFormat", {"f_string": "{a:>99999999}", "values.a": "x"}),
        ("StringFormat", {"f_string": "{b}", "values.a": "x"}),
        ("ComfyNumberConvert", {"value": ""}),
        ("ComfyNumberConvert", {"value": "nan"}),
        ("RegexExtract", {"string": "a", "regex_pattern": "a(?x) ", "mode": "First Match"}),
        ("ComfyMathExpression", {"expression": "pow(9, 99999)"}),
        ("ComfyMathExpression", {"expression": "values + 1", "values.a": 1}),
        ("TextGenerate", {"clip": ["clip", 1], "prompt": "a"}),
    ]
    for kind, inputs in cases:
        graph = {"value": node(kind, **inputs), "end": node("Any Switch (rgthree)", any_01=["value", 0])}
        graph["clip"] = node("CheckpointLoaderSimple", ckpt_name="shapes")
        order = nodes_in_order(KnownGraph(graph, NAMES), ["end"])
        assert evaluated(graph, order)["end"]["inputs"]["any_01"] == ["value", 0], (kind, inputs)


def test_a_language_model_is_refused_where_its_text_is_needed_and_nowhere_else() -> None:
    graph = basic()
    graph["written"] = node("TextGenerate", clip=["model", 1], prompt="a red circle", sampling_mode="off")
    graph["shown"] = node("PreviewAny", source=["chosen", 0])
    graph["chosen"] = node("ComfySwitchNode", switch=False, on_false="a red circle", on_true=["written", 0])
    graph["positive"]["inputs"]["text"] = ["shown", 0]
    assert made(graph).prompt == "a red circle"
    graph["chosen"]["inputs"]["switch"] = True
    found = errors(graph)
    assert list(found) == ["written"]
    assert "no language models" in found["written"][0]


def test_a_value_through_texts_numbers_switches_and_reroutes_is_as_if_it_were_written() -> None:
    graph = basic(steps=["many", 0], model=["which", 0])
    graph["positive"]["inputs"]["text"] = ["text", 0]
    graph["subject"] = node("Text Multiline", text="circle")
    graph["text"] = node("StringConcatenate", string_a="a red", string_b=["routed", 0], delimiter=" ")
    graph["routed"] = node("Any Switch (rgthree)", any_02=["subject", 0])
    graph["half"] = node("PrimitiveInt", value=4)
    graph["many"] = node("MathExpression|pysssss", expression="a * 2", a=["half", 0])
    graph["flag"] = node("StringContains", string=["text", 0], substring="red", case_sensitive=True)
    graph["xl"] = node("CheckpointLoaderSimple", ckpt_name="xl")
    graph["which"] = node("ComfySwitchNode", switch=["flag", 0], on_true=["model", 0], on_false=["xl", 0])
    request = made(graph)
    assert request == made(basic())
    assert (request.prompt, request.steps, request.model) == ("a red circle", 8, "shapes")
    graph["flag"]["inputs"]["substring"] = "blue"
    for name in ("positive", "negative"):
        graph[name]["inputs"]["clip"] = ["xl", 1]
    graph["decoded"]["inputs"]["vae"] = ["xl", 2]
    assert made(graph).model == "xl"


def test_what_cannot_be_computed_is_named_where_it_is() -> None:
    choice = node("ImpactSwitch", select=3, input1=["model", 0], input2=["model", 0])
    assert list(errors({**basic(model=["choice", 0]), "choice": choice})) == ["choice"]
    wrong = node("MathExpression|pysssss", expression="__import__('os')", a=1)
    found = errors({**basic(steps=["many", 0]), "many": wrong})
    assert found == {"many": ["expression: found Call, expected numbers, names, operators, and abs, ceil, floor, int, "
                              "float, max, min, round, sqrt, sum, pow, log, log2, log10, sin, cos, tan, "
                              "iif"]}  # fmt: skip
    by_zero = node("SimpleMath+", value="1 / a", a=0)
    assert list(errors({**basic(steps=["many", 0]), "many": by_zero})) == ["many"]
    text = node("PrimitiveString", value="8")
    assert errors({**basic(steps=["many", 0]), "many": text}) == {"sampler": ["steps: found STRING, expected INT"]}
    many = node("PrimitiveInt", value=0)
    assert errors({**basic(steps=["many", 0]), "many": many}) == {"sampler": ["steps: found 0, expected at least 1"]}
    loop = {**basic(model=["one", 0]), "one": node("Any Switch (rgthree)", any_01=["two", 0])}
    loop["two"] = node("Any Switch (rgthree)", any_01=["one", 0])
    assert list(errors(loop)) == ["two"]


def test_expressions_are_arithmetic_of_bounded_numbers() -> None:
    assert number_of("-a ** 2 // 3 + int(7.9) % 4", {"a": 5}) == -25 // 3 + 3
    for expression in (
        "9**999",
        "2.0**255*9",
        "a.b",
        "[1]",
        "'a'",
        "(" * 300,
        "lambda: 1",
        "a if b else 1",
        "1 +",
        "round(2, -9**9)",
        "x",
    ):
        with pytest.raises((NodeUnsupported, ArithmeticError)):
            number_of(expression, {"a": 1})
    assert math.isclose(number_of("sqrt(2) * float(3)", {}), math.sqrt(2) * 3)


def test_texts_that_double_are_refused_at_once() -> None:
    graph = basic()
    graph["t0"] = node("PrimitiveString", value="x" * 60_000)
    for place in range(1, 900):
        before = [f"t{max(0, place - 1) if place < 3 else 1}", 0]
        graph[f"t{place}"] = node("StringConcatenate", string_a=before, string_b="y", delimiter="")
    graph["last"] = node("Any Switch (rgthree)", **{f"any_{place + 1:02}": [f"t{place}", 0] for place in range(10)})
    graph["joined"] = node("Text Concatenate", delimiter="", clean_whitespace="false", text_a=["t898", 0])
    for place in range(100, 899):
        graph[f"t{place + 1}"]["inputs"]["string_a"] = [f"t{place}", 0]
    graph["positive"]["inputs"]["text"] = ["joined", 0]
    with pytest.raises(WorkflowRejected, match="characters in the texts that nodes compute") as found:
        outputs_of(graph, NAMES)
    assert found.value.is_over_bound
    doubled = basic()
    doubled["t0"] = node("PrimitiveString", value="x" * 100_000)
    doubled["t1"] = node("StringReplace", string=["t0", 0], find="x", replace="yy")
    doubled["positive"]["inputs"]["text"] = ["t1", 0]
    assert errors(doubled) == {"t1": ["its text has 200000 characters, expected up to 131072"]}
