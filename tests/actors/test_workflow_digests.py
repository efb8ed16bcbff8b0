"""The id of a task is the digest of everything that its result depends on: of every node of every golden workflow, each
field and each input is changed alone, and exactly the tasks of the nodes behind it get other ids. A dependency that is
missing would be a wrong image, without an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from modelpool import GenerateRequest, PoolConfig, UserError
from modelpool.actors.control.cached_catalog import CachedCatalog
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.graph.workflow_graph import _WorkflowTasks
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.inference.operations.operate import OPERATIONS
from modelpool.pool.values.specs.spec import ExecutionMode, TaskId
from tests.actors.golden_steps import SHOWN, write_models
from tests.actors.golden_workflows import GOLDENS, GROUPS, HALF, PHOTO, SEED, Nodes

CONFIG = Path(__file__).parents[2] / "configs" / "laptop.toml"
#: other values of fields of a request, besides numbers, which grow
OTHER = {
    "prompt": "a bird",
    "negative": "a fish",
    "sampler": "heun",
    "schedule": "simple",
    "options": {"freeu": {"b1": 1.1, "b2": 1.3, "s1": 0.9, "s2": 0.2}},
}
MODELS = {"one": "two", "two": "one"}


def is_unread(node: Mapping[str, Any], field: str) -> bool:
    """Whether a node does not read a field: the negative prompt without guidance or where a node provides it, what is
    said of texts if nodes provide all of them or the model reads none; this family encodes all texts alike."""
    request, inputs = node.get("request", {}), node.get("inputs", {})
    reads_no_text = request.get("model") == SHOWN or {"positive", "negative"} <= inputs.keys()
    return (
        (field == "request.negative" and (request.get("cfg") == 1.0 or "negative" in inputs or reads_no_text))
        or (field == "request.clip_skip" and reads_no_text)
        or field == "is_negative"
    )


class Unpriced:
    """A catalog that estimates nothing, which takes most of the time of a graph."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def execution_modes(self, *args: Any) -> tuple[ExecutionMode, ...]:
        return (ExecutionMode(0),)

    def run_seconds(self, *args: Any) -> float:
        return 1.0


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("golden") / "models"
    write_models(folder)
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[folder], loras=[folder / "loras"], workers=1)
    return CachedCatalog(Unpriced(plan_pool(config, gpu_count=0, can_grow=False).open_catalog()))  # type: ignore[arg-type]


def ids_of(nodes: Nodes, catalog: Any, output: str = "d") -> dict[str, TaskId]:
    """The task that computes each node that the output depends on. Raises UserError."""
    request = GenerateRequest(workflow={"nodes": nodes, "output": output}, seed=SEED)
    brought, _ = InputImages(lambda result: result).bring(request)
    assert brought.workflow is not None
    tasks = _WorkflowTasks(catalog, brought, brought.workflow)
    tasks.build()
    return {node_id: value.task for node_id, value in tasks._values.items()}


def behind(nodes: Nodes, changed: str) -> set[str]:
    """The nodes that depend on one, and itself."""
    found, size = {changed}, 0
    while len(found) > size:
        size = len(found)
        found |= {name for name, node in nodes.items() if found & set(node.get("inputs", {}).values())}
    return found


def other(name: str, value: Any) -> Any:
    """Another value of a field."""
    match value:
        case bool():
            return not value
        case int():
            return value + (16 if name in ("width", "height", "x", "y", "left", "vae_tile") else 1)
        case float():
            return value * 0.5 if value else 0.1
        case str() if name in OTHER:
            return OTHER[name]
        case tuple():
            return value[::-1] if value != value[::-1] else (*value, *value[:1])
    return None


def changes_of(value: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A mapping with each of its values changed, and its name."""
    for name, each in value.items():
        if name in ("kind", "inputs", "model", "request", "settings", "upscale"):
            continue
        if isinstance(each, Mapping):
            yield from ((f"{name}.{part}", {**value, name: found}) for part, found in changes_of(each))
        elif isinstance(each, list):
            for place, item in enumerate(each):
                if isinstance(item, Mapping):
                    for part, found in changes_of(item):
                        yield f"{name}.{part}", {**value, name: [*each[:place], found, *each[place + 1 :]]}
                else:  # a LoRA
                    yield name, {**value, name: [*each[:place], f"{item.partition(':')[0]}:0.3", *each[place + 1 :]]}
        elif (found := other(name, each)) is not None:
            yield name, {**value, name: found}


#: fields that a node may have, with a value that is not the default
MORE: dict[str, dict[str, Any]] = {
    "text": {"clip_skip": 2, "loras": ["light:0.4"]},
    "decode": {"vae_tile": 32},
    "upscale": {"upscale": {"model": "sharp", "scale": 1.5}},
    "sample": {"first_step": 1, "last_step": 3, "keeps_noise": True},
    "encode": {},
}
MORE_OF_REQUEST = {"negative": "a bird", "seed": 3, "eta": 0.5, "clip_skip": 1, "loras": ["warm:0.3"]}


def changes(node: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The node with each field changed alone."""
    yield from changes_of(node)
    kind = node["kind"]
    yield from ((name, {**node, name: value}) for name, value in MORE.get(kind, {}).items() if name not in node)
    if kind == "sample":
        request = node["request"]
        for name, found in changes_of(request):
            yield f"request.{name}", {**node, "request": found}
        for name, value in MORE_OF_REQUEST.items():
            if name not in request:
                yield f"request.{name}", {**node, "request": {**request, name: value}}
        if request["model"] in MODELS:
            yield "request.model", {**node, "request": {**request, "model": MODELS[request["model"]]}}
    elif node.get("model") in MODELS:
        yield "model", {**node, "model": MODELS[node["model"]]}
    if kind == "operation":
        for name, found in changes_of(node["settings"]):
            yield f"settings.{name}", {**node, "settings": found}
        inputs = node["inputs"]
        kinds = list(OPERATIONS[node["name"]].inputs.values())
        if len(set(inputs.values())) == 2 and kinds[0] == kinds[1]:
            yield "inputs", {**node, "inputs": dict(zip(inputs, reversed(inputs.values()), strict=True))}
    if kind == "image":
        yield "image", {**node, "image": PHOTO[::-1].copy()}
    if kind == "mask":
        yield "mask", {**node, "mask": HALF[::-1, ::-1].copy()}


@pytest.mark.parametrize("group", GROUPS)
def test_a_change_of_a_node_changes_exactly_what_depends_on_it(group: str, catalog: Any) -> None:
    tried, wrong = 0, []
    for name, golden in GROUPS[group].items():
        nodes = golden.nodes
        before = ids_of(nodes, catalog)
        for node_id in before:
            expected = behind(nodes, node_id) & before.keys()
            for field, changed in changes(nodes[node_id]):
                try:
                    after = ids_of({**nodes, node_id: changed}, catalog)
                except UserError:
                    continue  # what does not fit together is refused
                tried += 1
                found = {each for each in before if before[each] != after[each]}
                if found != (set() if is_unread(nodes[node_id], field) else expected):
                    wrong.append(f"{name}: {node_id}.{field}: changed {sorted(found)}, expected {sorted(expected)}")
    assert not wrong, "\n".join(wrong)
    assert tried >= 10 * len(GROUPS[group]), "most changes are possible"


def test_names_and_order_change_nothing(catalog: Any) -> None:
    """Ids of nodes, the order of nodes, inputs and settings, whole numbers for numbers, and nodes that nobody reads."""
    for name, golden in GOLDENS.items():
        before = ids_of(golden.nodes, catalog)
        renamed = {f"node of {key}": renamed_node(node) for key, node in reversed(golden.nodes.items())}
        renamed["unread"] = {"kind": "text", "model": "one", "prompt": "nobody reads this"}
        after = ids_of(renamed, catalog, "node of d")
        assert after == {f"node of {key}": task for key, task in before.items()}, name


def renamed_node(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node that reads renamed nodes, with its fields in another order and whole numbers where they are equal."""
    found = {key: node[key] for key in reversed(node)}
    if "inputs" in node:
        found["inputs"] = {key: f"node of {source}" for key, source in reversed(node["inputs"].items())}
    for key in {"settings", "request"} & node.keys():
        values = reversed(node[key].items())
        found[key] = {name: int(v) if isinstance(v, float) and v == int(v) else v for name, v in values}
    return found
