"""Hostile workflows, in every format, are refused by name, and cost no more than a large honest one: small bodies must
not become large, neither in time nor in memory. Costs are calls of functions, which are the same on every machine;
300,000 of them take about a tenth of a second."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.http.comfy.comfy_computing import MAX_COMPUTED_STEPS, ComputingWork
from modelpool.actors.http.comfy.comfy_export import api_format
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_value_nodes import SEARCH_STEPS
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_inputs import with_inputs
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import FakeCatalog
from tests.actors.graph.test_workflow_graph import BASE, operation, sampling
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

NAMES = PoolNames({"shapes": "Stable Diffusion 1"}, ["light"])
CATALOG = FakeCatalog()
#: calls that an answer may take, and characters of its message
MOST_CALLS, MOST_CHARACTERS = 1_500_000, 20_000
SAMPLER_INPUTS = ("model", "positive", "negative", "latent_image", "seed", "steps", "cfg", "denoise")
#: numbers that are none, or too large for every machine
NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e300, "9" * 5000, [], {}, True)
DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]


class TooMuch(BaseException):
    """An answer takes more calls than it may."""


def answer(work: Callable[[], object], most: int = MOST_CALLS) -> str:
    """The refusal of `work`; "" if it is accepted. Raises TooMuch as soon as it has made too many calls."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > most:
            raise TooMuch

    before, found = sys.getprofile(), ""
    sys.setprofile(count)
    try:
        work()
    except (UserError, WorkflowRejected) as problem:
        found = str(problem)
    finally:
        sys.setprofile(before)
    assert len(found) < MOST_CHARACTERS
    return found


def read_nothing(name: str) -> Any:
    raise UserError(f"no image {name[:100]!r}")


def of_comfy(graph: Any) -> None:
    """As `/prompt`, `modelpool run` and `pool.run` do."""
    for output in outputs_of(api_format(graph), NAMES):
        for request in requests_of(output, NAMES, read_nothing)[:2]:
            build_graph(request, JobId("x"), CATALOG)


def of_the_pool(graph: Any) -> None:
    """As the native interface, job files, `modelpool run` and `pool.run` do."""
    build_graph(GenerateRequest(workflow=graph, seed=1), JobId("x"), CATALOG)


def chain(kind: str, inputs: Sequence[str], start: str, count: int, **settings: Any) -> tuple[Graph, str]:
    """Nodes behind one another, each of which reads the one before under all these inputs: the paths double."""
    found, last = {}, start
    for place in range(count):
        found[f"c{place}"] = node(kind, **{name: [last, 0] for name in inputs}, **settings)
        last = f"c{place}"
    return found, last


def with_chain(place: tuple[str, str], *arguments: Any, **settings: Any) -> Graph:
    nodes, last = chain(*arguments, **settings)
    graph = basic()
    graph[place[0]]["inputs"][place[1]] = [last, 0]
    return {**graph, **nodes}


def searches(count: int) -> Graph:
    """Nodes that search one long text, for a fraction of a second each, and fail: the replacement has no such group."""
    graph: Graph = {**basic(), "t": node("PrimitiveString", value="a" * 3000)}
    search = {"string": ["t", 0], "regex_pattern": "a*b", "replace": "\\9"}
    found = {f"r{place}": node("RegexReplace", **search) for place in range(count)}
    joined = {f"j{place}": node("StringConcatenate", string_a=[f"j{place - 1}", 0], string_b=[f"r{place}", 0])
              for place in range(1, count)}  # fmt: skip
    graph |= {**found, "j0": node("StringTrim", string=["r0", 0], mode="Both"), **joined}
    graph["positive"]["inputs"]["text"] = [f"j{count - 1}", 0]
    return graph


def comfy_workflows() -> Iterator[tuple[str, Any]]:
    """Workflows of ComfyUI that are refused."""
    yield "100,000 nodes", {**basic(), **{f"n{place}": node("VAELoader", vae_name="x") for place in range(100_000)}}
    yield "a link to itself", basic(latent_image=["sampler", 0])
    switches = {name: node("Any Switch (rgthree)", any_01=[other, 0]) for name, other in ("bc", "cb")}
    yield "switches in a circle", {**basic(latent_image=["b", 0]), **switches}
    yield from ((f"steps: {str(each)[:9]}", basic(steps=each)) for each in (*NUMBERS[:-1], 10**9, -5, DEEP))
    yield from ((f"cfg: {str(each)[:9]}", basic(cfg=each)) for each in NUMBERS[:-1])
    for slot in (99, -1, 0.5, 10**30, math.nan, "0"):
        yield f"output {slot}", basic(model=["model", slot])
    yield "an id in a list", basic(model=[["model"], 0])
    for name, (width, height, count) in {
        "huge": (10**9, 10**9, 1), "negative": (-64, 64, 1), "many": (64, 64, 10**9), "no number": (math.nan, 64, 1),
    }.items():  # fmt: skip
        graph = basic()
        graph["blank"]["inputs"] |= {"width": width, "height": height, "batch_size": count}
        yield f"a latent: {name}", graph
    yield "a file in a name", basic("../../../../etc/passwd")
    graph = {**basic(latent_image=["e", 0]), "l": node("LoadImage", image="../../../etc/passwd")}
    yield "a file as image", {**graph, "e": node("VAEEncode", pixels=["l", 0], vae=["model", 2])}
    graph = basic()
    graph["positive"]["inputs"]["text"] = "x" * 5_000_000
    yield "millions of characters", graph
    texts, last = chain("StringConcatenate", ("string_a", "string_b"), "t", 400, delimiter="")
    graph = {**basic(), "t": node("PrimitiveString", value="x" * 100_000), **texts}
    graph["positive"]["inputs"]["text"] = [last, 0]
    yield "texts that double", graph
    for expression in (
        "9**9**9",
        "(((9**99)**99)**99)**99",
        "1e308*1e308",
        "factorial(99999)",
        "9" * 399,
        "round(2,-9**9)",
    ):
        yield expression[:20], {**basic(steps=["m", 0]), "m": node("MathExpression|pysssss", expression=expression)}
    yield "searches of nodes that fail", searches(400)
    yield "images that double", with_chain(("saved", "images"), "ImageBatch", ("image1", "image2"), "decoded", 900)
    yield "images repeated", with_chain(("saved", "images"), "RepeatImageBatch", ("image",), "decoded", 60, amount=64)
    yield (
        "texts combined",
        with_chain(
            ("sampler", "positive"), "ConditioningCombine", ("conditioning_1", "conditioning_2"), "positive", 900
        ),
    )
    yield (
        "encoded texts that double",
        with_chain(
            ("sampler", "positive"), "ConditioningConcat", ("conditioning_to", "conditioning_from"), "positive", 200
        ),
    )
    yield (
        "latents that double",
        with_chain(("decoded", "samples"), "LatentBatch", ("samples1", "samples2"), "sampler", 900),
    )
    yield "LoRAs", with_chain(
        ("sampler", "model"), "LoraLoaderModelOnly", ("model",), "model", 900,
        lora_name="light.safetensors", strength_model=1.0,
    )  # fmt: skip
    yield "a list of nodes", [1] * 100_000


def editor(nodes: Sequence[Any], links: Sequence[Any] = (), *subgraphs: Mapping[str, Any]) -> dict[str, Any]:
    return {"nodes": list(nodes), "links": list(links), "definitions": {"subgraphs": list(subgraphs)}}


def subgraph(name: str, nodes: Sequence[Any], links: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    return {"id": name, "nodes": list(nodes), "links": list(links), **more}


def samplers(link: int) -> list[dict[str, Any]]:
    """Nodes with many inputs, all linked to one link."""
    inputs = [{"name": name, "link": link} for name in SAMPLER_INPUTS]
    return [{"id": f"k{place}", "type": "KSampler", "inputs": inputs} for place in range(900)]


def editor_workflows() -> Iterator[tuple[str, Any]]:
    """Workflows of the editor that are refused."""
    doubling = [subgraph(f"s{n}", [{"id": place, "type": f"s{n + 1}"} for place in (1, 2)]) for n in range(15)]
    yield "subgraphs that double", editor([{"id": 1, "type": "s0"}], (), *doubling, subgraph("s15", ()))
    yield "a subgraph in itself", editor([{"id": 1, "type": "s"}], (), subgraph("s", [{"id": 1, "type": "s"}]))
    deep = [subgraph(f"s{n}", [{"id": 1, "type": f"s{n + 1}"}]) for n in range(100)]
    yield "subgraphs in each other", editor([{"id": 1, "type": "s0"}], (), *deep)
    used = [{"id": place, "type": "s"} for place in range(900)]
    links = [[place, 1, 0, 1, 0] for place in range(10_000)]
    yield "a large subgraph used often", editor(used, (), subgraph("s", [{"id": 1, "type": "Note"}], links))
    notes = [{"id": place, "type": "Note"} for place in range(10_000)]
    yield "a subgraph of notes used often", editor(used, (), subgraph("s", notes))
    shown = {"proxyWidgets": [["1", "x"]] * 5000}
    hosts = [{"id": n, "type": "s", "properties": shown, "widgets_values": list(range(5000))} for n in range(500)]
    yield "many values of subgraphs", editor(hosts, (), subgraph("s", ()))
    count = 6000
    links = [[place, str(place), 0, "x", 0] for place in range(count)] + [[count, "k0", 0, "x", 0]]
    routed = [{"id": place, "type": "Reroute", "inputs": [{"link": place + 1}]} for place in range(count)]
    yield "long ways over reroutes", editor([*routed, *samplers(0)], links)
    ways = {"mode": 4, "outputs": [{"type": "MODEL"}]}
    bypassed = [
        {"id": place, "type": "LoraLoader", **ways, "inputs": [{"type": "MODEL", "name": "m", "link": place + 1}]}
        for place in range(count)
    ]
    yield "long ways over bypassed nodes", editor([*bypassed, *samplers(0)], links)
    loop = {"id": 1, "type": "Reroute", "inputs": [{"link": 1}]}
    yield "reroutes in a circle", editor([loop, *samplers(1)], [[1, 1, 0, 1, 0]])
    setters = [
        {"id": f"s{place}", "type": "SetNode", "widgets_values": [f"n{place}"], "inputs": [{"link": 0}]}
        for place in range(8000)
    ]
    getter = {"id": "g", "type": "GetNode", "widgets_values": ["n7999"]}
    yield "many names", editor([*setters, getter, *samplers(1)], [[0, "k0", 0, "x", 0], [1, "g", 0, "x", 0]])
    inner = [{"id": n, "origin_id": 1, "origin_slot": 0, "target_id": 2, "target_slot": 0} for n in range(1, 6000)]
    through = {"id": 0, "origin_id": -10, "origin_slot": 0, "target_id": -20, "target_slot": 0}
    host = {"id": "h", "type": "s", "inputs": [{"name": "i", "link": 0}]}
    yield "links through a large subgraph", editor(
        [host, *samplers(1)], [[0, "k0", 0, "x", 0], [1, "h", 0, "x", 0]],
        subgraph("s", (), [through, *inner], inputs=[{"name": "i"}]),
    )  # fmt: skip
    texts = [("a", "y" * 100_000), ("b", "%a.text%" * 20_000)]
    yield (
        "templates",
        editor(
            [{"id": name, "type": "CLIPTextEncode", "title": name, "widgets_values": [each]} for name, each in texts]
        ),
    )
    inner = {"nodes": [{}] * 2000, "links": []}
    groups = {"extra": {"groupNodes": {"g": inner}}}
    hosts = [{"id": place, "type": "workflow>g"} for place in range(400)]
    yield "large group nodes", {**editor(hosts), **groups}
    yield "100,000 nodes", editor([{"id": place, "type": "KSampler"} for place in range(100_000)])
    yield "nothing", editor([None], [None], {})


def pool_workflows() -> Iterator[tuple[str, Any]]:
    """Workflows of the pool that are refused."""

    def made(output: str = "d", **nodes: Any) -> dict[str, Any]:
        return {"nodes": {**BASE, **nodes}, "output": output}

    def doubled(name: str, inputs: Sequence[str], start: str, count: int = 200) -> tuple[dict[str, Any], str]:
        nodes, last = {}, start
        for place in range(count):
            nodes[f"c{place}"] = operation(name, dict.fromkeys(inputs, last))
            last = f"c{place}"
        return nodes, last

    text = {"kind": "text", "model": "shapes", "prompt": "x"}
    yield "100,000 nodes", made(**{f"n{place}": text for place in range(100_000)})
    yield "a link to itself", made(s=sampling("s"))
    yield "a circle", made(s=sampling("t"), t=sampling("s"))
    for number in NUMBERS:
        shown = str(number)[:9]
        for name in ("steps", "cfg", "width", "seed"):
            if not (number is True and name == "seed") and not (name == "cfg" and number == 1e300):
                yield f"{name}: {shown}", made(s=sampling(request={name: number}))
        yield f"strength: {shown}", made(s=sampling(strength=number))
        yield f"first step: {shown}", made(s=sampling(first_step=number))
        latent = operation("latent_multiply", {"samples": "s"}, factor=number)
        yield f"factor: {shown}", made(u=latent, d={**BASE["d"], "inputs": {"latent": "u"}})
        latent = operation("latent_multiply", {"samples": "s"}, factor=1.0, scale=[number, number])
        yield f"scale: {shown}", made(u=latent, d={**BASE["d"], "inputs": {"latent": "u"}})
        crop = operation("image_crop", {"image": "d"}, x=number, y=0, width=8, height=8)
        yield f"x: {shown}", made("u", u=crop)
        yield f"sizes: {shown}", made("u", u=operation("image_scale_to_nearest", {"image": "d"}, sizes=[number, 1]))
    nodes, last = doubled("image_batch", ("first", "second"), "d")
    yield "images that double", made(last, **nodes)
    nodes, last = doubled("encoded_concat", ("first", "second"), "p")
    yield "texts that double", made(p=text, **nodes, s={**sampling(), "inputs": {"positive": last}})
    nodes, last = doubled("audio_concat", ("first", "second"), "a")
    silence = operation("audio_silence", {}, seconds=3600.0)
    video = operation("video_of_images", {"image": "d", "sound": last}, rate=1.0)
    yield "audio that doubles", made("v", a=silence, **nodes, v=video)
    sound = operation("audio_silence", {}, seconds=3600.0, rate=192_000)
    yield "more audio than fits", made("v", a=sound, v={**video, "inputs": {"image": "d", "sound": "a"}})
    yield "millions of characters", made(s=sampling(request={"prompt": "x" * 5_000_000}))
    yield "a file in a name", made(s=sampling(request={"model": "../" * 100_000}))
    yield "an operation that is a file", made("u", u=operation("../../bin/sh", {}))
    yield "a long id", {"nodes": {**BASE, "x" * 1_000_000: BASE["d"]}, "output": "d"}
    yield "a long output", {"nodes": BASE, "output": "x" * 1_000_000}
    yield "many settings", made("u", u=operation("image_invert", {"image": "d"}, **{f"s{n}": n for n in range(50_000)}))
    sizes = operation("image_scale_to_nearest", {"image": "d"}, sizes=[64] * 2_000_000)
    yield "a long list", made("u", u=sizes)
    yield "a deep setting", made("u", u=operation("image_invert", {"image": "d"}, x=DEEP))
    yield "deep options", made(s=sampling(request={"options": DEEP}))
    yield "many LoRAs", made(s=sampling(request={"loras": ["light"] * 100_000}))
    yield "a workflow in a workflow", made(s=sampling(request={"workflow": made()}))
    yield "a list of nodes", {"nodes": [1] * 100_000, "output": "d"}
    yield "a text", "x" * 1_000_000


@pytest.mark.parametrize(
    ("workflows", "build"),
    [(comfy_workflows, of_comfy), (editor_workflows, of_comfy), (pool_workflows, of_the_pool)],
    ids=["ComfyUI", "editor", "pool"],
)
def test_hostile_workflows_are_refused_at_once(
    workflows: Callable[[], Iterator[tuple[str, Any]]], build: Callable[[Any], None]
) -> None:
    wrong = []
    for name, workflow in workflows():
        try:
            if not answer(lambda workflow=workflow: build(workflow)):
                wrong.append(f"{name}: accepted")
        except (Exception, TooMuch) as problem:
            wrong.append(f"{name}: {type(problem).__name__}: {str(problem)[:200]}")
    assert not wrong, "\n".join(wrong)


def test_work_of_nodes_that_fail_counts() -> None:
    """Before: only the texts of nodes that succeed counted, so that hundreds of searches that fail held a thread of
    the server for a minute. Now the work is counted before it is done, over all nodes, and again when it is done
    again."""
    work, (few, many) = ComputingWork(), (searches(1), searches(400))
    settings = {**many["r0"]["inputs"], "string": "a" * 3000}
    most = MAX_COMPUTED_STEPS // 3000**2
    for _ in range(most):
        work.take("r", "RegexReplace", settings)
    with pytest.raises(WorkflowRejected, match=rf"node r \(RegexReplace\): too much .*{MAX_COMPUTED_STEPS} steps"):
        work.take("r", "RegexReplace", settings)
    with pytest.raises(WorkflowRejected, match="replace: found") as found:
        of_comfy(few)
    assert not found.value.is_over_bound
    with pytest.raises(WorkflowRejected) as found:
        of_comfy(many)
    assert found.value.is_over_bound
    assert [error.class_type for error in found.value.errors] == ["RegexReplace"]


def test_every_search_that_is_not_refused_counts() -> None:
    """Flags at the beginning of a pattern, and slashes around it, hid the work of a search."""
    for flags in ("", "(?i)", "(?ms)"):
        settings = {"string": "a" * 3000, "regex_pattern": f"{flags}[ab]*c", "replace": ""}
        assert SEARCH_STEPS["RegexReplace"](settings) >= 3000**2, flags
    pattern = "x" * 198 + "*"
    settings = {"action": "replace", "text_a": "a" * 2000, "text_b": f"/{pattern}/", "text_c": "b"}
    assert SEARCH_STEPS["StringFunction|pysssss"](settings) >= 2000**2


def test_pipes_in_pipes_are_refused_and_tokens_are_bounded() -> None:
    """The text of a pipe doubled with each node that put it twice into the next one."""
    graph: Graph = {**basic(), "c0": node("Context Big (rgthree)", model=["model", 0])}
    for place in range(1, 40):
        inside = {name: [f"c{place - 1}", 0] for name in ("text_pos_g", "text_pos_l")}
        graph[f"c{place}"] = node("Context Big (rgthree)", **inside)
    graph["text"] = node("Number to Text", number=["c39", 0])
    graph["positive"]["inputs"]["text"] = ["text", 0]
    assert answer(lambda: of_comfy(graph))
    graph = {**basic(), **{f"p{place}": node("Text Parse Tokens", text="[a]") for place in range(60)}}
    graph["add"] = node("Text Add Tokens", tokens="a: b", print_current_tokens="false")
    joined = {f"j{place}": node("StringConcatenate", string_a=[f"j{place - 1}", 0], string_b=[f"p{place}", 0])
              for place in range(1, 60)}  # fmt: skip
    graph |= {"j0": node("StringTrim", string=["p0", 0], mode="Both"), **joined}
    graph["positive"]["inputs"]["text"] = ["j59", 0]
    assert "Text Parse Tokens: found 60 nodes in a workflow, expected up to 50" in answer(lambda: of_comfy(graph))


def test_graphs_with_exponentially_many_paths_are_built_node_by_node() -> None:
    """They are honest: each node is computed once."""
    latents = with_chain(("decoded", "samples"), "LatentAdd", ("samples1", "samples2"), "sampler", 200)
    assert answer(lambda: of_comfy(latents)) == ""
    nodes = {
        f"l{layer}_{place}": operation(
            "image_blend", {"first": f"l{layer - 1}_{(place + 1) % 4}", "second": f"l{layer - 1}_{place}"}
        )
        for layer in range(1, 240)
        for place in range(4)
    }
    first = {f"l0_{place}": BASE["d"] for place in range(4)}
    lattice = {"nodes": {**BASE, **first, **nodes}, "output": "l239_0"}
    assert answer(lambda: of_the_pool(lattice)) == ""


def test_inputs_are_set_in_large_and_deep_workflows() -> None:
    """The workflow of the caller is not copied as a whole."""
    large: dict[str, Any] = {"nodes": {**BASE, **{f"n{place}": BASE["d"] for place in range(100_000)}}, "output": "d"}
    assert answer(lambda: with_inputs(large, {"s.steps": 3}), 10_000) == ""
    deep = {"nodes": {**BASE, "u": operation("image_invert", {"image": "d"}, x=DEEP)}, "output": "d"}
    changed = with_inputs(deep, {"u.x": 3, "s.steps": 5})
    assert (changed["nodes"]["u"]["settings"]["x"], changed["nodes"]["s"]["request"]["steps"]) == (3, 5)
    assert deep["nodes"]["u"]["settings"]["x"] is DEEP
