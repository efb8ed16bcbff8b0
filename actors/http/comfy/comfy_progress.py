"""What the clients of ComfyUI hear of a workflow while it runs: `PromptNodes` finds the nodes that a task of the pool
serves, `PromptProgress` makes messages of what happens to them. Pure, but for the time in messages.

A task may serve several nodes, which are then reported as executing one after the other, and a node may have several
tasks. Nodes without tasks (loaders, sizes, numbers) have ended when a node that reads them has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelpool.actors.http.comfy.comfy_graph import OutputNode, WorkflowOutput
from modelpool.actors.http.comfy.comfy_node_types import NodeType, owner_of
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_values import ScaledLatent
from modelpool.actors.http.comfy.node_errors import link_of
from modelpool.actors.worker.wire.messages import NodesEnded
from modelpool.pool.values.specs.spec import Stage

#: types of links on the way from a sampler to the nodes that encode its texts
_TEXT_LINKS = frozenset(("CONDITIONING", "GUIDER"))
#: nodes of requests without a workflow by the stage of their tasks, with the words that their kinds contain
_PIXEL_KINDS = ("VAEDecode", "ImageUpscaleWithModel")
_LATENT_KINDS = ("VAEEncode", "InpaintModelConditioning")
#: the end of the name of a step that encodes an image, of nodes with more steps
_ENCODED = "/encode"
_STAGES = (Stage.ENCODE.value, Stage.SAMPLE.value, Stage.DECODE.value)
#: characters of a value of a node in a message
_MOST_SHOWN = 1000

Send = Callable[[str, Mapping[str, Any]], None]


def now_milliseconds() -> int:
    """Return the time as ComfyUI's messages have it."""
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class PromptNodes:
    """The nodes of a workflow: the class of each, and the nodes that it reads, with the name of the input and the type
    of the link."""

    classes: Mapping[str, str]
    sources: Mapping[str, tuple[tuple[str, str, str], ...]]

    @classmethod
    def of(cls, graph: Mapping[str, Any], kinds: Mapping[str, NodeType] = NODE_TYPES) -> PromptNodes:
        """Return the nodes of a workflow of these kinds that was accepted."""
        classes = {node_id: str(node["class_type"]) for node_id, node in graph.items()}
        sources: dict[str, tuple[tuple[str, str, str], ...]] = {}
        for node_id, node in graph.items():
            found: list[tuple[str, str, str]] = []
            for name in node.get("inputs") or {}:
                link = link_of(node, name)
                if link is not None and link[0] in classes:
                    outputs = kinds[classes[link[0]]].outputs
                    found.append((name, link[0], outputs[link[1]] if 0 <= link[1] < len(outputs) else ""))
            sources[node_id] = tuple(found)
        return cls(classes, sources)

    def needed(self, node_id: str) -> list[str]:
        """Return the nodes that a node depends on, from itself on."""
        waiting, seen = [node_id], {node_id}
        for each in waiting:
            for _, source, _ in self.sources.get(each, ()):
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return waiting

    def of_part(self, output: OutputNode, part: str, stage: str) -> tuple[str, ...]:
        """Return the nodes that a part of a job of an output stands for, see `JobGraph.nodes_of`; () for none."""
        if isinstance(output, WorkflowOutput):
            stage, _, place = part.partition(".")
            return self._of_stage(output, stage, int(place) if place.isdecimal() else 0)
        node_id, word = self._known(part)
        if not node_id:
            return ()
        is_latent = word.endswith(_ENCODED) or any(kind in self.classes[node_id] for kind in _LATENT_KINDS)
        if stage == Stage.ENCODE.value and not is_latent:
            return self._texts(node_id, word.partition("/")[0]) or (node_id,)
        return (node_id,)

    def classes_of(self, outputs: Sequence[OutputNode]) -> PromptNodes:
        """Return the classes of these outputs alone, for a workflow that has ended."""
        return PromptNodes({each.node_id: self.classes[each.node_id] for each in outputs}, {})

    def _known(self, part: str) -> tuple[str, str]:
        """Return the node that a node of the pool was made of, and the word behind it; "" for none."""
        node_id = part.rstrip("'")
        words: list[str] = []
        while node_id and node_id not in self.classes:
            node_id, _, word = node_id.rpartition("/")
            words.insert(0, word)
        return node_id, "/".join(words)

    def _texts(self, sampler: str, name: str = "") -> tuple[str, ...]:
        """Return the nodes that encode the texts that a sampler reads, in order; under one input, if it has it."""
        found: dict[str, None] = {}
        first = [
            source
            for input_name, source, kind in self.sources.get(sampler, ())
            if kind in _TEXT_LINKS and (name not in ("positive", "negative") or input_name in (name, "guider"))
        ]
        waiting = list(first)
        seen = set(waiting)
        for each in waiting:
            known = NODE_TYPES.get(self.classes[each])  # nodes of users make no texts
            if known is not None and "CONDITIONING" in known.outputs:
                found[each] = None
            for _, source, kind in self.sources.get(each, ()):
                if kind in _TEXT_LINKS and source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return tuple(reversed(found))

    def with_tasks(self, output: OutputNode) -> tuple[str, ...]:
        """Return the nodes of an output without a workflow that have tasks, in order: their ends are not told one by
        one; () for others."""
        if not isinstance(output, WorkflowOutput):
            return ()
        return tuple(dict.fromkeys(node for stage in _STAGES for node in self._of_stage(output, stage)))

    def _of_stage(self, output: WorkflowOutput, stage: str, place: int | None = None) -> tuple[str, ...]:
        """Return the nodes of the task at a place among the tasks of its stage; None: of all."""
        samplers, latent = [owner_of(output.latent.node_id)], output.latent
        while isinstance(latent.start, ScaledLatent):
            latent = latent.start.latent
            samplers.insert(0, owner_of(latent.node_id))
        if stage == Stage.SAMPLE.value:
            return tuple(samplers) if place is None else (samplers[min(place, len(samplers) - 1)],)
        needed = self.needed(output.node_id)
        if stage == Stage.ENCODE.value:
            texts = dict.fromkeys(text for sampler in samplers for text in self._texts(sampler))
            images = [each for each in needed if any(kind in self.classes[each] for kind in _LATENT_KINDS)]
            return (*texts, *images)
        pixels = [each for each in reversed(needed) if any(kind in self.classes[each] for kind in _PIXEL_KINDS)]
        return tuple(pixels) if place is None or not pixels else (pixels[min(place, len(pixels) - 1)],)


class PromptProgress:
    """The messages about one workflow. Belongs to the loop that follows it."""

    def __init__(self, prompt_id: str, nodes: PromptNodes, send: Send) -> None:
        """`send` sends a message of a kind to the sockets of the client."""
        self._prompt_id = prompt_id
        self._nodes = nodes
        self._send = send
        self._executing = ""
        #: steps done, all steps, and the state of nodes that have begun, by node
        self._states: dict[str, tuple[int, int, str]] = {}
        self._changed = False
        #: what was found before it began
        self._found: dict[str, None] = {}
        self._started = False
        #: messages of the history
        self.messages: list[list[Any]] = []

    @property
    def executing(self) -> str:
        """The node that executes; "" for none."""
        return self._executing

    @property
    def executed(self) -> list[str]:
        """The nodes that have ended, in order."""
        return [node for node, (_, _, state) in self._states.items() if state == "finished"]

    def start(self) -> None:
        """Report that it has started, once, with the nodes that were found."""
        if self._started:
            return
        self._started = True
        self.report("execution_start", {})
        found = self._with_read(self._found)
        self.report("execution_cached", {"nodes": found})
        self._finish(dict.fromkeys(found))

    def report(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send a message that the history has, too."""
        known = {"prompt_id": self._prompt_id, **data, "timestamp": now_milliseconds()}
        self.messages.append([kind, known])
        self._send(kind, known)

    def tasks_ended(self, output: OutputNode, ended: NodesEnded) -> None:
        """Report the end of a task of an output."""
        names = {node: None for part in ended.ended for node in self._nodes.of_part(output, part, ended.stage.value)}
        if ended.is_found:
            if self._started:
                self._finish(names)
            else:
                self._found |= names
            return
        if ended.message or not ended.nodes:
            return
        self.start()
        for node in dict.fromkeys(
            node for part in ended.nodes for node in self._nodes.of_part(output, part, ended.stage.value)
        ):
            self.execute(node)
            if ended.stage is Stage.ENCODE:
                names[node] = None
        self._finish(names)

    def runs(self, output: OutputNode, part: str, stage: str, step: int, steps: int) -> None:
        """Report a task that runs for a part of an output."""
        self.start()
        for node in self._nodes.of_part(output, part, stage):
            self.execute(node)
            before = self._states.get(node)
            now = (step, steps, "running") if steps else (0, 1, "running")
            if before != now:
                self._states[node] = now
                self._changed = True
            if steps:
                self._send("progress", {"value": step, "max": steps, "node": node})

    def output_ended(self, output: OutputNode) -> None:
        """Note that all images of an output are there: what it depends on has ended."""
        for node in self._nodes.with_tasks(output):
            if node not in self._states:  # it took less time than passes between two reports
                self.execute(node)
        self._finish(dict.fromkeys(reversed(self._nodes.needed(output.node_id))))

    def failed(self, node: str) -> None:
        """Note that a node has failed."""
        value, most, _ = self._states.get(node, (0, 1, ""))
        self._states[node], self._changed = (value, most, "error"), True
        self.send_states()

    def execute(self, node: str) -> None:
        """Report that a node executes, unless it is the one that was reported last."""
        if node != self._executing:
            self._executing = node
            self._send("executing", {"node": node, "display_node": node})

    def rest(self) -> None:
        """Note that no node executes, as clients that got binary images see it."""
        self._executing = ""

    def send_states(self) -> None:
        """Send the states of all nodes that have begun, if they have changed."""
        if not self._changed:
            return
        self._changed = False
        nodes = {
            node: {"value": value, "max": most, "state": state, **node_names(node), "prompt_id": self._prompt_id}
            for node, (value, most, state) in self._states.items()
        }
        self._send("progress_state", {"nodes": nodes})

    def _finish(self, names: Mapping[str, None]) -> None:
        for node in names:
            before = self._states.get(node)
            if before is None or before[2] != "finished":
                most = 1 if before is None else before[1]
                self._states[node], self._changed = (most, most, "finished"), True

    def _with_read(self, found: Mapping[str, None]) -> list[str]:
        """Return nodes that were found, and those that only such ones read."""
        if not found:
            return []
        readers: dict[str, set[str]] = {}
        for node, sources in self._nodes.sources.items():
            for _, source, _ in sources:
                readers.setdefault(source, set()).add(node)
        known = dict(found)
        waiting = list(found)
        for node in waiting:
            for _, source, _ in self._nodes.sources.get(node, ()):
                if source not in known and readers[source] <= known.keys():
                    known[source] = None
                    waiting.append(source)
        return list(known)


def shown_inputs(node: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the written values of a node, as messages about errors have them."""
    written = {name: value for name, value in (node.get("inputs") or {}).items() if link_of(node, name) is None}
    return {name: [value[:_MOST_SHOWN] if isinstance(value, str) else value] for name, value in written.items()}


def node_names(node: str) -> dict[str, Any]:
    """Return the names of a node as ComfyUI's messages have them: subgraphs are expanded before."""
    return {"node_id": node, "display_node_id": node, "parent_node_id": None, "real_node_id": node}
