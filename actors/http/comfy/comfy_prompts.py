"""`ComfyPrompts`: the workflows that came over ComfyUI's interface, and the messages about them to web sockets.

A socket has a bounded queue: one that does not read is closed, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_graph import OutputNode
from modelpool.actors.http.comfy.comfy_node_types import NodeType
from modelpool.actors.http.comfy.comfy_nodes import NODE_TYPES
from modelpool.actors.http.comfy.comfy_progress import (
    PromptNodes,
    PromptProgress,
    node_names,
    shown_inputs,
)
from modelpool.actors.http.service.answers import json_text
from modelpool.actors.http.service.encoded_images import image_bytes
from modelpool.actors.http.service.held_shares import of_the_largest
from modelpool.actors.http.service.node_states import BEGUN, FAILED
from modelpool.actors.http.service.problems import HttpProblem, too_many
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, warnings_of
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.request.video_output_fields import AUDIO_FORMATS

#: workflows that have ended and are remembered: their number, and the characters of all together. The first of the
#: owner who has most is forgotten
MOST_KEPT, MOST_KEPT_CHARACTERS = 2000, 64 << 20
#: characters of the workflows of an owner that wait or run
MOST_ACTIVE_CHARACTERS = 32 << 20
#: how long a client with too many is asked to wait
_RETRY_SECONDS = 5.0
#: messages that wait for one socket
MOST_WAITING = 1000


#: values of `extra_data.preview_method` with which ComfyUI's client asks for previews
PREVIEW_METHODS = ("auto", "latent2rgb", "taesd")
#: of a binary message: an image, and its format
_PREVIEW_IMAGE, _JPEG, _PNG, _PREVIEW_WITH_METADATA = 1, 1, 2, 4
#: the message with the states of all nodes, of which a socket needs only the latest one
STATES = "progress_state"
#: classes of messages that a client sends: what it reads
_FLAGS, _READS_METADATA = "feature_flags", "supports_preview_metadata"


@dataclass(slots=True)
class PreviewFrame:
    """A preview that waits for a socket."""

    jpeg: bytes
    #: of its node, for clients that have announced to read them; None for others
    metadata: Mapping[str, Any] | None = None
    is_taken: bool = False

    def take(self) -> bytes:
        """Return it as a binary message of ComfyUI's: two numbers of 32 bits, big-endian, and the image; with metadata
        the second number is their length, and they come before the image, as JSON."""
        self.is_taken = True
        if self.metadata is None:
            return struct.pack(">II", _PREVIEW_IMAGE, _JPEG) + self.jpeg
        text = json.dumps({**self.metadata, "image_type": "image/jpeg"}).encode()
        return struct.pack(">II", _PREVIEW_WITH_METADATA, len(text)) + text + self.jpeg


@dataclass(slots=True)
class StatesMessage:
    """The states of nodes that wait for a socket."""

    data: Mapping[str, Any]
    is_taken: bool = False

    def take(self) -> dict[str, Any]:
        """Return it as a message."""
        self.is_taken = True
        return {"type": STATES, "data": dict(self.data)}


@dataclass(frozen=True, slots=True)
class ImageFrame:
    """An output of SaveImageWebsocket that waits for a socket. It is read when it is sent."""

    path: Path

    def take(self) -> bytes:
        """Return it as a binary message of ComfyUI's, as a PNG; b"" if it was removed, or is no image. Blocks."""
        try:
            return struct.pack(">II", _PREVIEW_IMAGE, _PNG) + image_bytes(self.path)
        except HttpProblem:
            return b""


class Socket:
    """The messages for one web socket."""

    def __init__(self, client_id: str, owner: str) -> None:
        self.client_id = client_id
        self.owner = owner
        self.messages: asyncio.Queue[dict[str, Any] | PreviewFrame | StatesMessage | ImageFrame | None]
        self.messages = asyncio.Queue(MOST_WAITING)
        self._frame: PreviewFrame | None = None
        self._states: StatesMessage | None = None
        #: whether previews have the names of their node, as the client has announced
        self.reads_metadata = False

    def put(self, kind: str, data: Mapping[str, Any]) -> None:
        """Queue a message; a socket with a full queue gets no more, and is closed. States of nodes replace some that
        wait."""
        if kind != STATES:
            self._put({"type": kind, "data": dict(data)})
        elif self._states is not None and not self._states.is_taken:
            self._states.data = data
        else:
            self._states = StatesMessage(data)
            self._put(self._states)

    def heard(self, message: Any, features: Mapping[str, Any]) -> None:
        """Take what a client has sent: what it reads, which is answered with the features of the server."""
        match message:
            case {"type": "feature_flags", "data": dict() as flags}:
                self.reads_metadata = flags.get(_READS_METADATA) is True
                self.put(_FLAGS, features)

    def put_image(self, path: Path) -> None:
        """Queue an image, as `put` does."""
        self._put(ImageFrame(path))

    def _put(self, message: dict[str, Any] | StatesMessage | ImageFrame) -> None:
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    def put_preview(self, jpeg: bytes, names: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Queue a preview of the node with these names, in place of one that waits."""
        metadata = names if self.reads_metadata else None
        if self._frame is not None and not self._frame.is_taken:
            self._frame.jpeg, self._frame.metadata = jpeg, metadata
        elif not self.messages.full():
            self._frame = PreviewFrame(jpeg, metadata)
            self.messages.put_nowait(self._frame)

    def close(self) -> None:
        """Have the socket closed, without what it has not read."""
        while not self.messages.empty():
            self.messages.get_nowait()
        self.messages.put_nowait(None)


@dataclass(slots=True, eq=False)
class Prompt:
    """One workflow in the pool. `outputs` are in the order of its jobs, each with as many as it has images."""

    number: int
    prompt_id: str
    client_id: str | None
    #: the workflow and its `extra_data` as JSON: parsed they take twenty times as much
    text: str
    nodes: PromptNodes
    preview_method: str | None
    outputs: tuple[OutputNode, ...]
    submission: HttpSubmission
    #: set while it is followed
    progress: PromptProgress | None = None
    #: messages of the history, once it has ended
    _messages: list[list[Any]] | None = field(default=None, repr=False)
    #: of each output, the index of its first job; and the number of all jobs
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._starts = tuple(accumulate((output.count for output in self.outputs), initial=0))

    @classmethod
    def of(
        cls,
        number: int,
        prompt_id: str,
        client_id: str | None,
        graph: Mapping[str, Any],
        extra_data: Mapping[str, Any],
        outputs: Sequence[OutputNode],
        submission: HttpSubmission,
        kinds: Mapping[str, NodeType] = NODE_TYPES,
    ) -> Prompt:
        """Return a workflow as it is remembered."""
        text = json.dumps([graph, extra_data], separators=(",", ":"))
        method = extra_data.get("preview_method")
        method = method if method in PREVIEW_METHODS else None
        return cls(number, prompt_id, client_id, text, PromptNodes.of(graph, kinds), method, tuple(outputs), submission)

    @property
    def key(self) -> tuple[str, str]:
        """The owner, and the id that is unique among the owner's workflows."""
        return self.submission.owner, self.prompt_id

    @property
    def wants_previews(self) -> bool:
        """Whether its client asks for previews. As with ComfyUI's own default, others get no binary messages: some take
        them for images."""
        return self.preview_method is not None

    @property
    def entry_text(self) -> str:
        """How the queue and the history list it, as JSON: the workflow is not parsed for each call that lists it."""
        nodes = [output.node_id for output in self.outputs]
        graph_and_extra_data = self.text[1:-1]
        return f"[{self.number},{json_text(self.prompt_id)},{graph_and_extra_data},{json_text(nodes)}]"

    def place_of(self, index: int) -> int:
        """Return the place of the output that a job belongs to."""
        assert 0 <= index < self._starts[-1], "a workflow has as many jobs as its outputs have images"
        return bisect_right(self._starts, index) - 1

    def output_of(self, index: int) -> OutputNode:
        """Return the output that a job belongs to."""
        return self.outputs[self.place_of(index)]

    def jobs_of(self, place: int) -> range:
        """Return the indexes of the jobs of the output at `place`."""
        return range(self._starts[place], self._starts[place + 1])

    def paths_of(self, place: int) -> list[Path]:
        """Return the files of the output at `place` so far, in order."""
        ends = map(self.submission.end_of, self.jobs_of(place))
        return [end.path for end in ends if end is not None and end.path is not None]

    def images_of(self, place: int) -> list[dict[str, str]]:
        """Return the images of the output at `place` so far, in order."""
        kind = "temp" if self.outputs[place].is_preview else "output"
        return [{"filename": path.name, "subfolder": "", "type": kind} for path in self.paths_of(place)]

    @property
    def warning_messages(self) -> list[list[Any]]:
        """What the pool warns of: one message of the history, and of the web socket, if there is something."""
        of_nodes = (warning for output in self.outputs for warning in output.warnings)
        # workflows have a negative text for models of all kinds
        found = list(dict.fromkeys((*of_nodes, *warnings_of(self.submission.ends, tells_unguided=False))))
        return [["execution_warning", {"prompt_id": self.prompt_id, "warnings": found}]] if found else []

    @property
    def history_text(self) -> str:
        """The entry of the history, as JSON."""
        found = json_text({"outputs": self.image_names, "status": self.status, "meta": self.meta})
        return f'{{"prompt":{self.entry_text},{found[1:]}'

    @property
    def image_names(self) -> dict[str, Any]:
        """The images of the outputs so far, by node."""
        listed = ((place, output) for place, output in enumerate(self.outputs) if not output.is_sent)
        return {output.node_id: self.output_of_place(place) for place, output in listed}

    @property
    def meta(self) -> dict[str, Any]:
        """The names of the nodes with outputs, by node."""
        return {
            output.node_id: {
                "node_id": output.node_id,
                "display_node": output.node_id,
                "parent_node": None,
                "real_node_id": output.node_id,
            }
            for output in self.outputs
            if not output.is_sent
        }

    def output_of_place(self, place: int) -> dict[str, Any]:
        """Return the files of the output at `place` so far, as ComfyUI's clients read them: images, of which some are
        animated, or audio."""
        files = self.images_of(place)
        endings = {Path(file["filename"]).suffix.lower().removeprefix(".") for file in files}
        if endings & set(AUDIO_FORMATS):
            return {"audio": files}
        is_animated = self.outputs[place].is_animated
        return {"images": files, "animated": [True] * len(files)} if is_animated and files else {"images": files}

    @property
    def status(self) -> dict[str, Any]:
        """How it has ended, with the messages about it."""
        messages = self._messages
        if messages is None:
            known = [] if self.progress is None else self.progress.messages
            begun = known or [["execution_start", {"prompt_id": self.prompt_id}]]
            messages = [*begun, *self.warning_messages, list(self.end_message)]
        complete = self.submission.over and messages[-1][0] == "execution_success"
        return {"status_str": "success" if complete else "error", "completed": complete, "messages": messages}

    def close(self) -> None:
        """Keep only what the history has: it has ended, and all messages about it were sent."""
        assert self.progress is not None, "it was followed"
        self._messages = self.progress.messages
        self.nodes, self.progress = self.nodes.classes_of(self.outputs), None

    @property
    def end_message(self) -> tuple[str, dict[str, Any]]:
        """The kind and the data of the message about the end, or about a failure, if anything failed."""
        data: dict[str, Any] = {"prompt_id": self.prompt_id}
        unsuccessful = [end for end in self.submission.ends if end.state != "succeeded"]
        end = next((end for end in unsuccessful if end.state == "failed"), next(iter(unsuccessful), None))
        if end is None:
            if not self.submission.lost:
                return "execution_success", data
            lost = {"exception_message": self.submission.lost, "exception_type": "pool_lost"}
            return "execution_error", {**data, **lost}
        if end.state == "cancelled":
            return "execution_interrupted", {**data, **self._place_of(end)}
        return "execution_error", {**data, **self._failure_data(end)}

    def _place_of(self, end: JobEnd) -> dict[str, Any]:
        node_id = self.node_of_end(end)
        executed = [] if self.progress is None else self.progress.executed
        return {"node_id": node_id, "node_type": self.nodes.classes[node_id], "executed": executed}

    def node_of_end(self, end: JobEnd) -> str:
        """Return the node at which a job ended: with a task that failed, else at a node that had begun and not ended,
        else at its sampler."""
        output, states = self.output_of(end.index), self.submission.nodes_of(end.index)
        for wanted in (FAILED, BEGUN):
            for part, state in reversed(tuple(states.items())):
                if state.state == wanted and (found := self.nodes.of_part(output, part, state.stage)):
                    return found[-1]
        return output.sampler_id

    def _failure_data(self, end: JobEnd) -> dict[str, Any]:
        place = self._place_of(end)
        where = f"node {place['node_id']} ({place['node_type']})"
        return {
            **place,
            "exception_message": end.message,
            "exception_type": end.kind,
            # paths and code of the machines of the pool are for its operator
            "traceback": [f"{where}: {end.kind}: {end.message}"],
            "current_inputs": shown_inputs(json.loads(self.text)[0][place["node_id"]]),
            "current_outputs": place["executed"],
        }


class ComfyPrompts:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        #: by owner and id: clients choose the ids
        self._prompts: OrderedDict[tuple[str, str], Prompt] = OrderedDict()
        #: owners and ids of workflows that are being submitted
        self._arriving: set[tuple[str, str]] = set()
        #: characters of those that wait or run, by owner; and those that have ended, oldest first, with their sums
        self._active_characters: Counter[str] = Counter()
        self._ended: dict[str, OrderedDict[str, Prompt]] = {}
        self._ended_number: Counter[str] = Counter()
        self._ended_characters: Counter[str] = Counter()
        self._sockets: set[Socket] = set()
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def next_number(self) -> int:
        """Return the number of the next workflow."""
        self._number += 1
        return self._number

    @contextlib.contextmanager
    def reserved(self, owner: str, prompt_id: str) -> Iterator[None]:
        """Reserve an id while its workflow is submitted. Raises HttpProblem (400) if `owner` has used it."""
        key = (owner, prompt_id)
        if key in self._prompts or key in self._arriving:
            raise HttpProblem(400, f"prompt_id: {prompt_id!r} exists")
        self._arriving.add(key)
        try:
            yield
        finally:
            self._arriving.discard(key)

    def add(self, prompt: Prompt) -> None:
        """Follow a workflow with an unused id, and send the sockets of its client messages about it."""
        assert prompt.key not in self._prompts, "the id was reserved"
        owner, size = prompt.submission.owner, len(prompt.text)
        self._prompts[prompt.key] = prompt
        self._active_characters[owner] += size
        task = asyncio.create_task(self._follow(prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._send_status(prompt.submission.owner)

    def check_room(self, owner: str) -> None:
        """Raise HttpProblem (429) if the workflows of `owner` that wait or run are too large together."""
        if self._active_characters[owner] >= MOST_ACTIVE_CHARACTERS:
            message = f"workflows of {self._active_characters[owner]} characters wait or run"
            raise too_many(f"{message}, expected up to {MOST_ACTIVE_CHARACTERS}", _RETRY_SECONDS, "workflows")

    def _note_ended(self, prompt: Prompt) -> None:
        """Count a workflow that has ended, and forget the first of the owners who have most."""
        owner, size = prompt.submission.owner, len(prompt.text)
        self._active_characters[owner] -= size
        if not self._active_characters[owner]:
            del self._active_characters[owner]
        self._ended.setdefault(owner, OrderedDict())[prompt.prompt_id] = prompt
        self._ended_number[owner] += 1
        self._ended_characters[owner] += size
        while self._ended_number.total() > MOST_KEPT:
            self._forget_ended(next(iter(self._ended[of_the_largest(self._ended_number)].values())))
        while self._ended_characters.total() > MOST_KEPT_CHARACTERS:
            self._forget_ended(next(iter(self._ended[of_the_largest(self._ended_characters)].values())))

    def _forget_ended(self, prompt: Prompt) -> None:
        owner = prompt.submission.owner
        del self._prompts[prompt.key], self._ended[owner][prompt.prompt_id]
        self._ended_number[owner] -= 1
        self._ended_characters[owner] -= len(prompt.text)
        if not self._ended[owner]:
            del self._ended[owner], self._ended_number[owner], self._ended_characters[owner]

    def of(self, owner: str) -> list[Prompt]:
        """Return the workflows of an owner, oldest first."""
        return [each for each in self._prompts.values() if each.submission.owner == owner]

    def find(self, owner: str, prompt_id: str) -> Prompt | None:
        """Return a workflow of an owner; None if there is none with this id."""
        return self._prompts.get((owner, prompt_id))

    def output(self, owner: str, filename: str) -> Path:
        """Return an output of a workflow of an owner, by its name. Raises HttpProblem (404)."""
        for prompt in reversed(self.of(owner)):
            end = prompt.submission.end_of_file(filename)
            if end is not None and end.path is not None and end.path.is_file():
                return end.path
        raise HttpProblem(404, f"filename: {filename} is no output of a workflow that is remembered")

    def active(self, owner: str) -> tuple[list[Prompt], list[Prompt]]:
        """Return the workflows that run, and those that wait."""
        active = [each for each in self.of(owner) if not each.submission.over]
        running = [each for each in active if each.submission.running or each.submission.ends]
        return running, [each for each in active if not (each.submission.running or each.submission.ends)]

    def forget(self, owner: str, prompt_ids: Sequence[str] | None) -> None:
        """Forget workflows that have ended: these, or all."""
        wanted = None if prompt_ids is None else frozenset(prompt_ids)
        for each in self.of(owner):
            is_noted = each.prompt_id in self._ended.get(owner, ())
            if is_noted and (wanted is None or each.prompt_id in wanted):
                self._forget_ended(each)

    def connect(self, socket: Socket) -> None:
        """Send a socket the number of waiting workflows, and what follows."""
        self._sockets.add(socket)
        socket.put("status", {**self._status(socket.owner), "sid": socket.client_id})

    def disconnect(self, socket: Socket) -> None:
        """Send a socket nothing more."""
        self._sockets.discard(socket)

    async def close(self) -> None:
        """Stop following, and close the sockets."""
        for socket in tuple(self._sockets):
            socket.close()
        for task in tuple(self._tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _status(self, owner: str) -> dict[str, Any]:
        return {"status": {"exec_info": {"queue_remaining": sum(map(len, self.active(owner)))}}}

    def _send_status(self, owner: str) -> None:
        sockets = [socket for socket in self._sockets if socket.owner == owner]
        status = self._status(owner) if sockets else {}
        for socket in sockets:
            socket.put("status", status)

    def _sockets_of(self, prompt: Prompt) -> list[Socket]:
        """Return the sockets that receive the messages about a workflow."""
        return [
            socket
            for socket in self._sockets
            if prompt.client_id in (None, socket.client_id) and socket.owner == prompt.submission.owner
        ]

    def _send(self, prompt: Prompt, kind: str, data: Mapping[str, Any]) -> None:
        for socket in self._sockets_of(prompt):
            socket.put(kind, {**data, "prompt_id": prompt.prompt_id})

    async def _follow(self, prompt: Prompt) -> None:
        try:
            await self._follow_watched(prompt)
        finally:
            self._note_ended(prompt)

    async def _follow_watched(self, prompt: Prompt) -> None:
        is_watched = prompt.wants_previews and self._sockets_of(prompt)
        with prompt.submission.previews_wanted() if is_watched else contextlib.nullcontext():
            await self._follow_to_end(prompt)

    async def _follow_to_end(self, prompt: Prompt) -> None:
        shown: dict[int, ImagePreview] = {}
        progress = PromptProgress(prompt.prompt_id, prompt.nodes, partial(self._send, prompt))
        prompt.progress = progress
        images: Counter[int] = Counter()
        async for change in prompt.submission.changes():
            for ended in change.nodes:
                progress.tasks_ended(prompt.output_of(ended.index), ended)
            if change.running or change.ends:
                progress.start()
            for task in change.running:
                output = prompt.output_of(task.index)
                for part in task.nodes or (f"{task.stage}.0",):
                    progress.runs(output, part, task.stage, task.step, task.steps)
            before, shown = shown, dict(prompt.submission.previews)
            for index, preview in shown.items():
                is_new = prompt.wants_previews and progress.executing and before.get(index) is not preview
                if is_new and (sockets := self._sockets_of(prompt)):
                    jpeg = await asyncio.to_thread(preview.as_format, "JPEG")
                    names = {**node_names(prompt.output_of(index).sampler_id), "prompt_id": prompt.prompt_id}
                    for socket in sockets:
                        socket.put_preview(jpeg, names)
            self._report_outputs(prompt, progress, change.ends, images)
            progress.send_states()
        self._report_end(prompt, progress)
        self._send_status(prompt.submission.owner)

    def _report_outputs(
        self, prompt: Prompt, progress: PromptProgress, ends: Sequence[JobEnd], images: Counter[int]
    ) -> None:
        """Report the outputs that have all their images since `ends`; `images` counts images of each output. Clients
        take binary images for images of the node that is executing, so no previews may follow before another node
        is."""
        for end in ends:
            if end.path is None:
                continue
            place = prompt.place_of(end.index)
            images[place] += 1
            if images[place] < len(prompt.jobs_of(place)):
                continue
            output = prompt.outputs[place]
            if output.is_sent:
                progress.output_ended(output)
                self._send_images(prompt, place)
                progress.rest()
                continue
            progress.output_ended(output)
            progress.execute(output.node_id)
            shown = {"node": output.node_id, "display_node": output.node_id, "output": prompt.output_of_place(place)}
            self._send(prompt, "executed", shown)

    def _send_images(self, prompt: Prompt, place: int) -> None:
        output = prompt.outputs[place]
        self._send(prompt, "executing", {"node": output.node_id, "display_node": output.node_id})
        for number, path in enumerate(prompt.paths_of(place), start=1):
            self._send(prompt, "progress", {"value": number, "max": output.count, "node": output.node_id})
            for socket in self._sockets_of(prompt):
                socket.put_image(path)

    def _report_end(self, prompt: Prompt, progress: PromptProgress) -> None:
        kind, data = prompt.end_message
        if kind == "execution_error" and "node_id" in data:
            progress.failed(data["node_id"])
        for name, warning in prompt.warning_messages:
            progress.report(name, warning)
        progress.report(kind, data)
        self._send(prompt, "executing", {"node": None})
        prompt.close()
