"""Converts workflows that ComfyUI's editor saves to the API format: a table of nodes, each with its inputs by name.

The editor's format lists nodes and links, and the values of widgets by position, which follow the table of nodes. A
node may stand for a subgraph of `definitions`; the nodes in it get ids like "12:3", as in ComfyUI itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_everywhere import with_everywhere
from modelpool.actors.http.comfy.comfy_graph import EXPORT_HINT, LOST_LINKS, MAX_NODES
from modelpool.actors.http.comfy.comfy_group_nodes import SUBGRAPH_INPUT, SUBGRAPH_OUTPUT, with_subgraphs
from modelpool.actors.http.comfy.comfy_node_types import AUDIOS, IMAGES, VIDEOS, WIDGET_TYPES, NodeInput, NodeType
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_pack_pipes import PACK_PIPES
from modelpool.actors.http.comfy.comfy_refused_nodes import unknown_node
from modelpool.actors.http.comfy.comfy_utf8 import with_utf8
from modelpool.actors.http.comfy.node_errors import NodeError, WorkflowRejected
from modelpool.pool.values.core.errors import counted

#: nodes of the editor that do nothing on a server
_NOTES = (
    *("Note", "MarkdownNote", "Note Plus (mtb)", "Label (rgthree)", "Bookmark (rgthree)"),
    *("Fast Groups Muter (rgthree)", "Fast Groups Bypasser (rgthree)", "Fast Muter (rgthree)"),
    *("Fast Bypasser (rgthree)", "Fast Actions Button (rgthree)", "Node Collector (rgthree)"),
    *("Mute / Bypass Repeater (rgthree)", "Mute / Bypass Relay (rgthree)", "Random Unmuter (rgthree)"),
)
_REROUTES, _PRIMITIVE = ("Reroute", "Reroute (rgthree)"), "PrimitiveNode"
#: nodes that pass an input on under a name, and the name is their widget
_SET, _GET = "SetNode", "GetNode"
_VIRTUAL = (*_NOTES, *_REROUTES, _PRIMITIVE, _SET, _GET)
#: what the editor stores behind the widgets of nodes that load images and videos: the name of the upload button
_UPLOAD = "image"
#: a node with a row of values for each LoRA
_POWER_LORAS = "Power Lora Loader (rgthree)"
#: nodes with a widget that is a table
_TABLES: Mapping[str, str] = MappingProxyType({"ImageCropV2": "crop_region"})
#: nodes with rows of LoRAs or words that the user adds, behind these widgets
_MANAGED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("Lora Loader (LoraManager)", "Lora Stacker (LoraManager)"), ("loras", ("text",))),
        "TriggerWord Toggle (LoraManager)": ("toggle_trigger_words", ("group_mode", "default_active")),
    }
)
#: of early 2023; "" are of the editor alone, and what it does with the seed is behind that
_EARLY_EFFICIENT = (
    *("sampler_state", "", "seed", "steps", "cfg", "sampler_name", "scheduler", "denoise"),
    "",
)
_WIDGETS_OF_TTN = tuple(
    given.name for kind in PACK_PIPES if kind.name == "ttN pipeLoader" for given in kind.inputs
    if given.type in WIDGET_TYPES
)  # fmt: skip
#: with a whole number, the id of the last seed, behind the seed
_SEEDED_EFFICIENT = ("seed", "", "steps", "cfg", "sampler_name", "scheduler", "denoise", "preview_method", "vae_decode")
#: with two inputs that had widgets without a use: 0
_RESIZED_KJ = ("width", "height", "upscale_method", "keep_proportion", "divisible_by", "", "", "crop")
#: nodes that show texts behind their widgets: a result, an example, or the texts that are linked to them
_SHOWING = (
    *("StringFunction|pysssss", "CheckpointLoader|pysssss", "LoraLoader|pysssss"),
    *(kind.name for kind in PACK_PIPES if kind.name.endswith("Loader")),
)
#: widgets that a node had before, by its type and how many there are
_EARLIER_WIDGETS: Mapping[tuple[str, int], tuple[str, ...]] = MappingProxyType(
    {
        ("Text Concatenate", 1): ("linebreak_addition",),
        ("ttN pipeLoader", 23): tuple(name for name in _WIDGETS_OF_TTN if name != "config_name"),
        ("KSampler (Efficient)", 9): _EARLY_EFFICIENT,
        ("KSampler (Efficient)", 10): _EARLY_EFFICIENT,
        ("Image Save", 5): ("output_path", "filename_prefix", "extension", "quality", "overwrite_mode"),
    }
)
#: values that a widget had before, by the type of its node and its name, and their later ones
_EARLIER_VALUES: Mapping[tuple[str, str], Mapping[bool, str]] = MappingProxyType(
    {("ImageResize+", "method"): MappingProxyType({True: "keep proportion", False: "stretch"})}
)
#: how a widget begins that shows the size of a result in the editor, behind the others
_TABLE_ROW = "<tr><td>"
#: a template in a text: a name or a title of a node, and a widget of it
_TEMPLATE = re.compile(r"%([^%.]+)\.([^%]+)%")
#: what the editor does with a seed after a run; its value follows the seed's. In files of early 2023 it is
#: whether the seed is drawn
_SEED_CONTROLS = ("fixed", "increment", "decrement", "randomize", True, False)
_SEEDS = ("seed", "noise_seed")
#: modes of nodes that are switched off
_NEVER, _BYPASS = 2, 4
#: the id by which a subgraph names a widget of its own, and not one of a node in it
_OWN_WIDGET = "-1"
#: subgraphs within each other; links that lead from one to the next
_MOST_LEVELS, _MOST_LINKS = 16, 10_000
#: of a whole workflow: links that are followed, values that hosts of subgraphs set, and characters that templates add
_MOST_FOLLOWED, _MOST_VALUES, _MOST_CHARACTERS = 50_000, 100_000, 1 << 22

#: an id and an index of an output, or a value in `_Value`
_Source: TypeAlias = "tuple[str, int] | _Value | _Lost | None"


@dataclass(frozen=True, slots=True)
class _Value:
    """What an input is linked to, if it is a value and no node."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Lost:
    """A node that a link begins at and the file does not have: the editor, too, leaves such a link out."""

    node_id: str


@dataclass(frozen=True, slots=True)
class _Link:
    """Where a link begins, and where it ends."""

    source: str
    source_slot: int
    target: str
    target_slot: int

    @classmethod
    def of(cls, link: Any) -> _Link:
        """Parse a link of a workflow, a list, or of a subgraph, a table."""
        if isinstance(link, dict):
            return cls(str(link["origin_id"]), link["origin_slot"], str(link["target_id"]), link["target_slot"])
        return cls(str(link[1]), link[2], str(link[3]), link[4])


class _Work:
    """What converting a workflow has cost so far: links that were followed, values of subgraphs, characters of
    templates. Small files may describe much of each."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def take(self, what: str, count: int, most: int) -> None:
        """Count `what` that is done. Raises WorkflowRejected for more than `most` in a workflow."""
        done = self._done[what] = self._done.get(what, 0) + count
        if done > most:
            message = f"found more than {most} {what} in the workflow"
            raise WorkflowRejected("invalid_prompt", message, is_over_bound=True)


class _Definition:
    """The nodes and the links of a workflow, or of a subgraph, however often it is used.

    running  nodes that are not virtual, muted or bypassed
    inputs   names of the inputs of a subgraph
    shown    by the place of an input, the first widget in the subgraph that it stands for: a node, and the widget
    widgets  names of the inputs that stand for widgets
    outputs  links to the outputs of a subgraph, by place
    setters  nodes that pass an input on under a name, by name
    """

    def __init__(self, nodes: Sequence[Mapping[str, Any]], links: Sequence[Any], inputs: Sequence[Any] = ()) -> None:
        self.nodes = {str(node["id"]): node for node in nodes}
        self.links = _links_by_id(links)
        switched_off = (_NEVER, _BYPASS)
        self.running = [
            node
            for node in self.nodes.values()
            if node["type"] not in _VIRTUAL and node.get("mode") not in switched_off
        ]
        self.inputs = tuple(each["name"] for each in inputs)
        self.shown = self._shown() if self.inputs else {}
        self.widgets = [name for place, name in enumerate(self.inputs) if place in self.shown]
        target = str(SUBGRAPH_OUTPUT)
        self.outputs = {link.target_slot: link for link in reversed(self.links.values()) if link.target == target}

    def _shown(self) -> dict[int, tuple[Mapping[str, Any], str]]:
        source = str(SUBGRAPH_INPUT)
        found: dict[int, tuple[Mapping[str, Any], str]] = {}
        for node in self.nodes.values():
            for given in node.get("inputs") or ():
                link = self.links.get(given.get("link"))
                if link is not None and link.source == source and given.get("widget"):
                    found.setdefault(link.source_slot, (node, str(given["name"])))
        return found

    @cached_property
    def setters(self) -> Mapping[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for node in self.nodes.values():
            if node["type"] == _SET:
                found.setdefault(node["widgets_values"][0], node)
        return found


def _none_may_be(kind: str) -> bool:
    return False


class _Definitions:
    """The subgraphs of a workflow, each parsed once; the kinds of nodes that work here; the work of converting it."""

    def __init__(
        self,
        listed: Sequence[Mapping[str, Any]],
        kinds: Mapping[str, NodeType],
        may_be_own: Callable[[str], bool] = _none_may_be,
    ) -> None:
        self.kinds = kinds
        self._may_be_own = may_be_own
        self._listed = {each["id"]: each for each in listed}
        self._parsed: dict[str, _Definition] = {}
        self.work = _Work()

    def __contains__(self, name: object) -> bool:
        return name in self._listed

    def inputs_of(self, kind: Any) -> tuple[NodeInput, ...] | None:
        """Return the inputs of a kind of node; () for one of users, of which the file lists them, and None for an
        unknown one."""
        if kind in self.kinds:
            return self.kinds[kind].inputs
        return () if isinstance(kind, str) and self._may_be_own(kind) else None

    def __getitem__(self, name: str) -> _Definition:
        if name not in self._parsed:
            each = self._listed[name]
            self._parsed[name] = _Definition(each["nodes"], each["links"], each.get("inputs") or ())
        return self._parsed[name]


@dataclass(frozen=True, slots=True)
class _Scope:
    """A workflow, or a subgraph where one is used.

    prefix  of the ids of its nodes
    host    the node that stands for it in `outer`
    values  of widgets that `host` sets: by the id of the node in it and the name of the widget
    """

    own: _Definition
    definitions: _Definitions
    prefix: str = ""
    outer: _Scope | None = None
    host: Mapping[str, Any] | None = None
    values: Mapping[tuple[str, str], Any] | None = None
    _inner: dict[str, _Scope] = field(default_factory=dict, compare=False)
    #: values of its inputs that nothing is linked to, by their places
    known: dict[int, _Value | None] = field(default_factory=dict, compare=False)

    def inner(self, node: Mapping[str, Any]) -> _Scope:
        """Return the subgraph that `node` stands for. Raises WorkflowRejected if subgraphs contain themselves."""
        node_id = str(node["id"])
        if node_id in self._inner:
            return self._inner[node_id]
        if self.prefix.count(":") >= _MOST_LEVELS:
            raise WorkflowRejected(
                "invalid_prompt", f"found more than {_MOST_LEVELS} subgraphs in each other", is_over_bound=True
            )
        own = self.definitions[node["type"]]
        values = _values_of_subgraph(node, own, f"{self.prefix}{node_id}")
        self.definitions.work.take("values of subgraphs", len(values), _MOST_VALUES)
        found = _Scope(own, self.definitions, f"{self.prefix}{node_id}:", self, node, values)
        self._inner[node_id] = found
        return found


def is_exported(workflow: Any) -> bool:
    """Whether a workflow has the form in which the editor saves it."""
    return isinstance(workflow, dict) and all(isinstance(workflow.get(name), list) for name in ("nodes", "links"))


def is_workflow(body: Mapping[str, Any]) -> bool:
    """Whether a body is a workflow itself, in either format."""
    nodes = body.get("nodes") if isinstance(body.get("nodes"), list) else list(body.values())
    return any(isinstance(each, dict) and ("class_type" in each or "widgets_values" in each) for each in nodes or ())


def api_format(
    workflow: Any,
    kinds: Mapping[str, NodeType] = NODE_TYPES,
    may_be_own: Callable[[str], bool] = _none_may_be,
) -> dict[str, Any]:
    """Return a workflow of these kinds of nodes in the API format; one that is in it already as it is. Nodes of other
    kinds that `may_be_own`, of users, are converted by the widgets that the file itself lists. Raises
    WorkflowRejected."""
    if not isinstance(workflow, dict):
        raise WorkflowRejected("invalid_prompt", "expected a workflow: a table of nodes")
    if not is_exported(workflow):
        repaired: dict[str, Any] = with_utf8(workflow)
        return repaired
    try:
        workflow = with_everywhere(with_subgraphs(with_utf8(workflow)))
        nodes, links = workflow["nodes"], workflow["links"]
        definitions = (workflow.get("definitions") or {}).get("subgraphs") or ()
        found = _converted(_Scope(_Definition(nodes, links), _Definitions(definitions, kinds, may_be_own)))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as problem:
        if isinstance(problem, WorkflowRejected):
            raise
        raise WorkflowRejected(
            "invalid_prompt", f"the exported workflow is damaged ({problem!r}); {EXPORT_HINT}"
        ) from None
    if not found:
        raise WorkflowRejected(
            "no_prompt", "found no node that runs: each is muted, bypassed or a note; switch on the ones to run"
        )
    return found


def _links_by_id(links: Sequence[Any]) -> dict[Any, _Link]:
    return {link["id"] if isinstance(link, dict) else link[0]: _Link.of(link) for link in links if link is not None}


def _converted(scope: _Scope) -> dict[str, Any]:
    found: dict[str, Any] = {}
    errors: list[NodeError] = []
    titles: dict[str, str] = {}
    for place, (node_scope, node) in enumerate(_nodes_of(scope)):
        kind, node_id = node["type"], f"{node_scope.prefix}{node['id']}"
        if place >= MAX_NODES:
            raise WorkflowRejected("invalid_prompt", f"found more than {MAX_NODES} nodes", is_over_bound=True)
        known = scope.definitions.inputs_of(kind)
        if known is None and not _has_links(node):
            found[node_id] = {"class_type": str(kind), "inputs": {}}
        elif known is None:
            errors.append(unknown_node(node_id, str(kind)))
        else:
            widgets, left = _widgets(node_scope, node)
            if left:
                message, details = (
                    "the order of its widgets is not known",
                    _widget_problem(known, left),
                )
                errors.append(NodeError(node_id, kind, "invalid_prompt", message, details))
            linked, lost = _linked(node_scope, node)
            found[node_id] = {"class_type": kind, "inputs": {**widgets, **linked}}
            if lost:
                found[node_id]["_meta"] = {LOST_LINKS: lost}
            titles |= {name: node_id for name in _titles_of(node) if name not in titles}
    if unknown := sorted({error.class_type for error in errors if error.kind == "missing_node_type"}):
        listed = ", ".join(unknown)[:1000]
        raise WorkflowRejected("missing_node_type", f"the pool does not have these nodes: {listed}", errors)
    if errors:
        raise WorkflowRejected("invalid_prompt", f"the workflow cannot be converted; {EXPORT_HINT}", errors)
    return _with_templates(found, titles, scope.definitions.work)


def _has_links(node: Mapping[str, Any]) -> bool:
    """Whether a node is linked to another one."""
    outputs = any(each.get("links") for each in node.get("outputs") or ())
    return outputs or any(each.get("link") is not None for each in node.get("inputs") or ())


def _widget_problem(inputs: Sequence[NodeInput], left: Sequence[Any]) -> str:
    names = ", ".join(given.name for given in inputs if given.type in WIDGET_TYPES) or "none"
    shown = ", ".join(repr(value)[:40] for value in left[:3])
    found = counted(len(left), "value")
    return f"found {found} more ({shown}), expected values of {names}"


def _titles_of(node: Mapping[str, Any]) -> list[str]:
    """Return the names that templates may have for a node: its name for them, its title, and its class."""
    names = ((node.get("properties") or {}).get("Node name for S&R"), node.get("title"), node["type"])
    return [name for name in names if isinstance(name, str) and name]


def _with_templates(prompt: dict[str, Any], titles: Mapping[str, str], work: _Work) -> dict[str, Any]:
    """Return a workflow in which templates `%node.widget%` in texts are the values of these widgets. Of several nodes
    with one name it is the first; templates that name none stay as they are. A value is not searched for templates
    again. Raises WorkflowRejected for too many characters."""

    def value_of(match: re.Match[str]) -> str:
        inputs = prompt.get(titles.get(match[1], ""), {"inputs": {}})["inputs"]
        value = inputs.get(match[2])
        if not isinstance(value, str | int | float):
            return match[0]
        work.take("characters of templates", len(shown := str(value)), _MOST_CHARACTERS)
        return shown

    def changed(value: Any) -> Any:
        return _TEMPLATE.sub(value_of, value) if isinstance(value, str) and "%" in value else value

    return {
        node_id: {**node, "inputs": {name: changed(value) for name, value in node["inputs"].items()}}
        for node_id, node in prompt.items()
    }


def _nodes_of(scope: _Scope) -> Iterator[tuple[_Scope, Mapping[str, Any]]]:
    """Yield the nodes that run, those in subgraphs last. Raises WorkflowRejected for too many subgraphs."""
    waiting, count = [scope], 0
    while waiting:
        each = waiting.pop(0)
        for node in each.own.running:
            if node["type"] in each.definitions:
                count += 1
                if count > MAX_NODES:
                    raise WorkflowRejected(
                        "invalid_prompt", f"found more than {MAX_NODES} subgraphs", is_over_bound=True
                    )
                waiting.append(each.inner(node))
            else:
                yield each, node


def _widgets(scope: _Scope, node: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the values of the widgets of a node, by name, and those without a name; values that its subgraph's host
    sets have priority."""
    left: list[Any] = []
    values = node.get("widgets_values") or []
    if isinstance(values, list):  # what an editor needs to know of its text fields
        values = [value for value in values if not (isinstance(value, dict) and "textWidgetName" in value)]
    if node["type"] in _TABLES:  # next to the table, its numbers are listed one by one
        table = next((value for value in values if isinstance(value, dict)), None)
        return ({} if table is None else {_TABLES[node["type"]]: table}), []
    if node["type"] in _MANAGED and isinstance(values, list):
        return _managed_widgets(node["type"], values), []
    if node["type"] == _POWER_LORAS:  # its widgets are rows that the user adds, and two that only the editor needs
        rows = [value for value in values if isinstance(value, dict) and "lora" in value]
        return {f"lora_{place}": row for place, row in enumerate(rows, start=1)}, []
    inputs = scope.definitions.inputs_of(node["type"]) or ()
    own_id, set_by_host = str(node["id"]), scope.values or {}
    # newer files list all widgets in their order, earlier ones only those that became inputs
    listed = [each["widget"]["name"] for each in node.get("inputs") or () if each.get("widget")]
    numbers = {given.name for given in inputs if given.type == "INT"} if inputs else set(_SEEDS)
    found: dict[str, Any] = {}
    names = [given.name for given in inputs if given.type in WIDGET_TYPES]
    if isinstance(values, dict):
        found = dict(values)
    else:
        earlier = _earlier_names(node["type"], values)
        names = _active_names(inputs, values, numbers) if earlier is None else list(earlier)
        names = listed if set(names) <= set(listed) else names
        found, left = _by_name(names, values, numbers)
        found.pop("", None)
    for (kind, name), later in _EARLIER_VALUES.items():
        if kind == node["type"] and isinstance(value := found.get(name), bool):
            found[name] = later[value]
    left = [value for value in left if not (isinstance(value, str) and value.startswith(_TABLE_ROW))]
    is_loader = any(given.choices in (AUDIOS, IMAGES, VIDEOS) for given in inputs)
    left = [value for value in left if value not in (None, "") and not (is_loader and _is_upload(value))]
    if node["type"] in _SHOWING:
        left = [value for value in left if not isinstance(value, str)]
    if inputs and all(given.type != "BOOLEAN" for given in inputs):
        left = [value for value in left if not _is_of_editor(value)]
    linked = {each["name"] for each in node.get("inputs") or () if each.get("link") is not None}
    is_described = node["type"] in scope.definitions.kinds or bool(names)
    left = [] if is_described and linked.issuperset(names) else left
    return found | {name: set_by_host[own_id, name] for name in names if (own_id, name) in set_by_host}, left


def _earlier_names(kind: str, values: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the names of the widgets of an earlier version of a node, "" for widgets of the editor alone; None for
    the usual ones."""
    if kind == "KSampler (Efficient)" and len(values) == 9 and all(type(value) is int for value in values[:3]):
        return _SEEDED_EFFICIENT
    if kind == "ImageResizeKJ" and len(values) == len(_RESIZED_KJ) and values[5:7] == [0, 0]:
        return _RESIZED_KJ
    return _EARLIER_WIDGETS.get((kind, len(values)))


def _managed_widgets(kind: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return the widgets of a node with rows that the user adds: these are a list."""
    rows, names = _MANAGED[kind]
    found = dict(zip(names, values, strict=False))
    return {**found, rows: next((each for each in values if isinstance(each, list)), [])}


def _active_names(inputs: Sequence[NodeInput], values: Sequence[Any], numbers: Collection[str]) -> list[str]:
    """Return the names of the widgets that a node has, in the order of its kind: some are there with some values of
    another one alone."""
    names: list[str] = []
    for given in inputs:
        if given.type not in WIDGET_TYPES:
            continue
        if given.only_with is None or given.is_shown(_by_name(names, values, numbers)[0]):
            names.append(given.name)
    return names


def _by_name(names: Sequence[str], values: Sequence[Any], numbers: Collection[str]) -> tuple[dict[str, Any], list[Any]]:
    """Return values of widgets by the names, and the rest; what the editor does with a number is behind its value."""
    found: dict[str, Any] = {}
    left = list(values)
    for name in names:
        if not left:
            break
        found[name] = left.pop(0)
        if left and name in numbers and _is_seed_control(left[0], name in _SEEDS):
            left.pop(0)
    return found, left


def _is_upload(value: Any) -> bool:
    """Whether a value is the button with which the editor uploads an image: its name, or its description."""
    return value == _UPLOAD or (isinstance(value, dict) and value.get("name") == "upload")


def _is_of_editor(value: Any) -> bool:
    """Whether a value behind the widgets of a node without truth values is one that an extension of the editor keeps of
    its text fields: a truth value, or several."""
    return isinstance(value, bool) or (isinstance(value, list) and all(isinstance(each, bool) for each in value))


def _is_seed_control(value: Any, is_seed: bool) -> bool:
    """Whether a value is what the editor does with the number before it: of a seed it may be a truth value, or the null
    of a button that some packs of nodes have there."""
    if is_seed and value is None:
        return True
    return isinstance(value, str | bool if is_seed else str) and value in _SEED_CONTROLS


def _values_of_subgraph(host: Mapping[str, Any], own: _Definition, node_id: str) -> dict[tuple[str, str], Any]:
    """Return the values of widgets that the node of a subgraph shows, by the id of the node in it and the name.

    They are of the widgets that it lists as proxies, else of all inputs of the subgraph that are widgets; in files of
    2025, of the inputs that the node itself lists. Raises WorkflowRejected for values without a name."""
    values = host.get("widgets_values") or []
    shown = (host.get("properties") or {}).get("proxyWidgets")
    if shown:
        names = [(str(node_id), str(name)) for node_id, name, *_ in shown]
        return dict(zip(names, values, strict=False)) if isinstance(values, list) else {}
    if not isinstance(values, list) or not values:
        return {}
    of_node = [str(each["name"]) for each in host.get("inputs") or () if each.get("widget")]
    listed = next((each for each in (own.widgets, of_node) if len(each) == len(values)), None)
    if listed is None:
        found = f"found {counted(len(values), 'value')}, expected values of {', '.join(own.widgets) or 'none'}"
        message = "the order of its widgets is not known"
        error = NodeError(node_id, "subgraph", "invalid_prompt", message, found)
        raise WorkflowRejected("invalid_prompt", f"the workflow cannot be converted; {EXPORT_HINT}", [error])
    return dict(zip([(_OWN_WIDGET, name) for name in listed], values, strict=True))


def _linked(scope: _Scope, node: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the inputs of a node that are linked, by name: to an output of a node, or to a value; and the inputs with
    links to nodes that the file does not have, with the ids of these."""
    found: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for given in node.get("inputs") or []:
        if given.get("link") is None:
            continue
        source = _source(scope, scope.own.links[given["link"]])
        if isinstance(source, _Value):
            found[given["name"]] = source.value
        elif isinstance(source, _Lost):
            lost[given["name"]] = source.node_id
        elif source is not None:
            found[given["name"]] = list(source)
    return found, lost


def _source(scope: _Scope, link: _Link) -> _Source:
    """Return where a link begins, behind reroutes, bypassed nodes and the borders of subgraphs: a node and an output,
    or a value; None if it begins nowhere, `_Lost` if the file has not the node. Raises KeyError for a loop."""
    for _ in range(_MOST_LINKS):
        scope.definitions.work.take("links from node to node", 1, _MOST_FOLLOWED)
        if link.source == str(SUBGRAPH_INPUT):
            host, outer = scope.host, scope.outer
            if host is None or outer is None:
                raise KeyError("a link of a subgraph outside of it")
            name = scope.own.inputs[link.source_slot]
            given: Mapping[str, Any] = next((each for each in host.get("inputs") or () if each["name"] == name), {})
            if given.get("link") is None:
                return _shown_value(scope, link.source_slot)
            scope, link = outer, outer.own.links[given["link"]]
            continue
        node = scope.own.nodes.get(link.source)
        if node is None:
            return _Lost(f"{scope.prefix}{link.source}")
        if node.get("mode") == _NEVER:
            return None
        if node["type"] == _PRIMITIVE:
            return _Value(node["widgets_values"][0])
        if node["type"] == _GET:
            node = scope.own.setters[node["widgets_values"][0]]
        if node["type"] in (*_REROUTES, _SET) or node.get("mode") == _BYPASS:
            passed = _passed_through(node, link.source_slot)
            if passed is None:
                return None
            link = scope.own.links[passed]
        elif node["type"] in scope.definitions:
            slot, scope = link.source_slot, scope.inner(node)
            if slot not in scope.own.outputs:
                return None
            link = scope.own.outputs[slot]
        else:
            return f"{scope.prefix}{node['id']}", link.source_slot
    raise KeyError("links in a loop")


def _shown_value(scope: _Scope, slot: int) -> _Value | None:
    """Return the value of an input of a subgraph that nothing is linked to: its own, else the value of the first widget
    in it that it stands for. All inputs that it is linked to have this value."""
    for _ in range(_MOST_LEVELS + 1):
        if slot in scope.known:
            return scope.known[slot]
        values, name = scope.values or {}, scope.own.inputs[slot]
        if (_OWN_WIDGET, name) in values:
            return _Value(values[_OWN_WIDGET, name])
        if slot not in scope.own.shown:
            return None
        node, name = scope.own.shown[slot]
        if (str(node["id"]), name) in values:
            return _Value(values[str(node["id"]), name])
        if node["type"] in scope.definitions:
            scope = scope.inner(node)
            slot = scope.own.inputs.index(name)
            continue
        if node["type"] not in scope.definitions.kinds:
            return None
        widgets = _widgets(scope, node)[0]
        found = scope.known[slot] = _Value(widgets[name]) if name in widgets else None
        return found
    raise KeyError("subgraphs in each other")


def _passed_through(node: Mapping[str, Any], slot: int) -> Any:
    """Return the link of the input that a bypassed node or a reroute passes on: the one at the place of the output if
    it has the same type, else the first of that type; None if there is none."""
    inputs = node.get("inputs") or []
    if node["type"] in (*_REROUTES, _SET):
        return inputs[0]["link"]
    kind = node["outputs"][slot]["type"]
    candidates = [*inputs[slot : slot + 1], *inputs]
    return next(
        (each["link"] for each in candidates if each.get("type") == kind and each.get("link") is not None), None
    )
