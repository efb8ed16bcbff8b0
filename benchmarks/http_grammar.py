"""Random calls of every interface that stretch every field: none is answered with a failure of the server.

    python -m benchmarks.http_grammar
    python -m benchmarks.http_grammar --requests 1000 --seed 7
    python -m benchmarks.http_grammar --seed 7 --only 1234

The grammar comes from the schemas of the server: its paths with their parameters, the models of the bodies, and the
nodes of ComfyUI. A new field is covered without a change here. Most bodies are valid but for one to four fields, which
get values at and beyond every bound. Runs `modelpool serve` with the model of shapes on the CPU, and prints how many
calls had which status. A call is repeated by its number and its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import copy
import io
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from benchmarks.http_attacks import graph, memory_bytes, start

#: after which an answer counts as none: streams of events go on
ANSWER_SECONDS, STREAM_SECONDS = 60.0, 0.2
#: of an answer; what comes after it is not read
MOST_ANSWER_BYTES = 64 << 20
#: statuses above 499 that say what to do: the pool is being started or has ended, or an operator has to configure it
ALLOWED = ("503",)
_TEXTS = (
    "", " ", "x", "a red circle", "\x00", "\ud800", "\u202eabc", "a\r\nb: c", "../../etc/passwd", "/etc/passwd", "NaN",
    "1e400", "-1", "64x64", "data:,", "data:image/png;base64,aGk=", "http://127.0.0.1/", "<lora:light:1>", "light:0.5",
    "(((a:1.5)", "a:b:c:d", "0,0,8,8=x", "2:0.5", "10m", "%s%n", "${jndi:x}", "{{7*7}}", "\u00e9" * 300,
    "\U0001f600" * 40, "shapes", "euler", "A" * 70_000, "(" * 3000,
    "<lora:x:1>" * 200, "1" * 5000, "None", "null", "auto", "*", ".", "~",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 63, 64, 65, 100, 255, 1000, 4096, 65_536, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30,
    0.5, -0.5, 1e-9, 1.0, 1.5, 99.9, 1e6, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its method, its path with the query, further headers, and its body."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @property
    def content(self) -> bytes:
        """The call as it is sent, on a connection of its own."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body or self.method == "POST":
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join((*lines, "", "")).encode("utf-8", "surrogateescape") + self.body

    def __str__(self) -> str:
        return f"{self.method} {self.path[:300]} {dict(self.headers)} {self.body[:400]!r} ({len(self.body)} bytes)"


@dataclass(frozen=True, slots=True)
class Schemas:
    """What a server says about its calls: its OpenAPI description, and the nodes of ComfyUI."""

    description: Mapping[str, Any]
    nodes: Mapping[str, Any]

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a schema, or the one that it refers to."""
        while "$ref" in schema:
            found: Any = self.description
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema


@dataclass
class Grammar:
    """Random calls by number. `models` are the schemas of bodies that the description lacks, by path."""

    schemas: Schemas
    models: Mapping[str, Mapping[str, Any]]
    seed: int = 0
    #: ids that answers have named, so that later calls find something
    ids: list[str] = field(default_factory=list)

    @cached_property
    def routes(self) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
        """Methods, paths and descriptions."""
        paths = self.schemas.description["paths"]
        return tuple((method.upper(), path, about) for path, of in paths.items() for method, about in of.items())

    def call(self, number: int) -> Call:
        """Return the call with this number; it depends on nothing but the seed, the number and the ids."""
        chance = random.Random(f"{self.seed} {number}")
        if chance.random() < 0.65:
            path, make = chance.choice(self._bodies)
            return self._posted(chance, path, make(chance))
        method, path, about = chance.choice(self.routes)
        query = []
        for parameter in about.get("parameters", ()):
            if parameter["in"] == "path":
                path = path.replace("{" + parameter["name"] + "}", quote(self._id(chance), safe=""))
            elif chance.random() < 0.7:
                query.append((parameter["name"], self._id(chance) if chance.random() < 0.5 else self._word(chance)))
        if chance.random() < 0.1:
            query.append((self._word(chance)[:2000], self._word(chance)[:2000]))
        encoded = urlencode([(_sendable(name), _sendable(value[:6000])) for name, value in query])
        target = f"{path}?{encoded}" if query else path
        if method == "GET":
            return Call(method, target, self._headers(chance))
        return self._posted(chance, target, chance.choice((self.value, self._garbage))(chance), method)

    @cached_property
    def _bodies(self) -> Sequence[tuple[str, Callable[[random.Random], Any]]]:
        native = {"$ref": "#/components/schemas/GenerateRequest"}
        found: list[tuple[str, Callable[[random.Random], Any]]] = [
            ("/api/jobs", lambda chance: self._stretched(chance, _REQUEST, native)),
            ("/api/jobs", lambda chance: self._listed(chance, native)),
            ("/prompt", self._workflow),
            ("/prompt", self._workflow),
            ("/upload/image", self._form),
            ("/v1/images/edits", self._form),
        ]
        for path, schema in self.models.items():
            found.append((path, lambda chance, path=path, schema=schema: self._of_model(chance, path, schema)))  # type: ignore[misc]
        return found

    def _of_model(self, chance: random.Random, path: str, schema: Mapping[str, Any]) -> Any:
        base: dict[str, Any] = {"prompt": "x", "steps": 2, "width": 64, "height": 64}
        if "images" in path:
            base = {"prompt": "a red circle", "model": "shapes", "size": "64x64", "steps": 2}
        if "extra" in path:
            base = {"image": _png(), "imageList": [{"data": _png(), "name": "a"}]}
        return self._stretched(chance, base, schema)

    def _listed(self, chance: random.Random, schema: Mapping[str, Any]) -> Any:
        requests = [self._stretched(chance, _REQUEST, schema) for _ in range(chance.choice((0, 1, 2, 5)))]
        if chance.random() < 0.5:
            return requests
        return self._changed(chance, {"requests": requests, "webhook": "http://127.0.0.1/", "detached": False}, None)

    def _stretched(self, chance: random.Random, base: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
        """`base` with one to four fields of the schema, most of them valid in their type."""
        found = copy.deepcopy(dict(base))
        properties = self.schemas.resolved(schema).get("properties", {})
        for _ in range(chance.choice((0, 1, 1, 2, 3, 4))):
            name = chance.choice(tuple(properties)) if properties and chance.random() < 0.95 else self._word(chance)
            found[name[:300]] = self.of_schema(chance, properties.get(name, {}))
        return found

    def _changed(self, chance: random.Random, value: dict[str, Any], _: None) -> dict[str, Any]:
        for _n in range(chance.choice((0, 1, 2))):
            value[chance.choice((*value, "x"))] = self.value(chance)
        return value

    def of_schema(self, chance: random.Random, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Return a value of a JSON schema, or one that only looks like it."""
        schema = self.schemas.resolved(schema)
        if chance.random() < 0.12 or depth > 6:
            return self.value(chance)
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.of_schema(chance, chance.choice(choices), depth + 1)
        if values := schema.get("enum"):
            return chance.choice(values)
        match schema.get("type"):
            case "integer" | "number" as kind:
                return self._number(chance, schema, kind == "integer")
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
            case "array":
                item = schema.get("items", {})
                count = chance.choice((0, 1, 1, 2, 3, 8, 101, 1001) if depth < 2 else (0, 1, 2))
                if count > 8:  # the same entry many times
                    entry = self.of_schema(chance, item, depth + 1)
                    return [entry] * min(count, 2_000_000 // max(100, len(str(entry))))
                return [self.of_schema(chance, item, depth + 1) for _ in range(count)]
            case "object":
                fields = schema.get("properties", {})
                chosen = [name for name in fields if name in schema.get("required", ()) or chance.random() < 0.4]
                return {name: self.of_schema(chance, fields[name], depth + 1) for name in chosen}
            case _:
                return chance.choice((_png(), *_WORDS)) if chance.random() < 0.4 else self._word(chance)

    def _number(self, chance: random.Random, schema: Mapping[str, Any], is_whole: bool) -> Any:
        bounds = [
            schema[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in schema
        ]
        near = [bound + step for bound in bounds for step in (-1, 0, 1)]
        small = chance.randint(0, 12) if is_whole else round(chance.uniform(-2, 12), 3)
        return chance.choice((*near, *near, small, small, small, chance.choice(_NUMBERS)))

    def value(self, chance: random.Random, depth: int = 0) -> Any:
        """Return any JSON value."""
        match chance.randrange(8 if depth < 4 else 5):
            case 0:
                return chance.choice((None, True, False))
            case 1:
                return chance.choice(_NUMBERS)
            case 2 | 3 | 4:
                return self._word(chance)
            case 5:
                return [self.value(chance, depth + 1) for _ in range(chance.randrange(4))]
            case 6:
                entry = self.value(chance, 4)
                # up to 2 MB: larger bodies are refused before they are read, and their connections closed
                return [entry] * min(chance.choice((10, 1000, 20_000)), 2_000_000 // max(100, len(str(entry))))
            case _:
                return {self._word(chance)[:200]: self.value(chance, depth + 1) for _ in range(chance.randrange(4))}

    def _word(self, chance: random.Random) -> str:
        if chance.random() < 0.1:
            return "".join(
                chr(chance.choice((chance.randrange(32, 127), chance.randrange(0x110000)))) for _ in range(9)
            )
        return chance.choice(_TEXTS)

    def _id(self, chance: random.Random) -> str:
        if self.ids and chance.random() < 0.7:
            return chance.choice(self.ids)
        return chance.choice(
            ("0", "1", "-1", "99", "submission-1", "shapes", "KSampler", _sendable(self._word(chance)[:300]))
        )

    def _workflow(self, chance: random.Random) -> Any:
        nodes = copy.deepcopy(graph())
        names = tuple(self.schemas.nodes)
        for place in range(chance.choice((0, 0, 1, 2, 4, 8))):
            name = chance.choice(names)
            kinds = self.schemas.nodes[name].get("input", {})
            inputs = {
                key: self._node_input(chance, about, nodes)
                for key, about in {**kinds.get("required", {}), **kinds.get("optional", {})}.items()
                if chance.random() < 0.9
            }
            # a new node, or one in the way of the others
            nodes[str(chance.choice((place + 20, place + 20, chance.randrange(1, 9))))] = {
                "class_type": name,
                "inputs": inputs,
            }
        for _ in range(chance.choice((0, 0, 1, 2))):
            node: dict[str, Any] = nodes[chance.choice(tuple(nodes))]
            if node["inputs"] and isinstance(node["inputs"], dict) and chance.random() < 0.9:
                node["inputs"][chance.choice(tuple(node["inputs"]))] = self._node_input(chance, ("*",), nodes)
            else:
                node[chance.choice(("class_type", "inputs", "_meta"))] = self.value(chance)
        body: dict[str, Any] = {"prompt": nodes, "client_id": "me"}
        return body if chance.random() < 0.8 else self._changed(chance, body, None)

    def _node_input(self, chance: random.Random, about: Sequence[Any], nodes: Mapping[str, Any]) -> Any:
        kind, options = about[0], about[1] if len(about) > 1 and isinstance(about[1], dict) else {}
        if chance.random() < 0.12:
            return self.value(chance)
        if isinstance(kind, list):
            return chance.choice(kind) if kind else "none"
        match kind:
            case "INT" | "FLOAT":
                schema = {"minimum": options.get("min", 0), "maximum": options.get("max", 10)}
                return self._number(chance, schema, kind == "INT")
            case "STRING":
                return self._word(chance)
            case "BOOLEAN":
                return chance.random() < 0.5
            case _:
                return [chance.choice(tuple(nodes)), chance.choice((0, 0, 0, 1, 2, -1, 99))]

    def _form(self, chance: random.Random) -> bytes:
        parts = []
        for _ in range(chance.choice((1, 2, 3, 20))):
            name = chance.choice(
                ("image", "image[]", "mask", "prompt", "model", "n", "size", "subfolder", "type", "overwrite")
            )
            if chance.random() < 0.1:
                name = _sendable(self._word(chance)[:200]).replace('"', "")
            is_file = chance.random() < 0.5
            data = base64.b64decode(_png()) if chance.random() < 0.5 else _sendable(self._word(chance)).encode()
            file = f'; filename="{chance.choice(("a.png", "../a.png", "", "x" * 300, "a.svg"))}"' if is_file else ""
            parts.append(f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + data)
        return b"\r\n".join((*parts, b"--b--\r\n"))

    def _garbage(self, chance: random.Random) -> bytes:
        return chance.choice(
            (chance.randbytes(chance.randrange(200)), b"[" * 5000, b'{"a":1,"a":2}', b"", b"\xff\xfe{}")
        )

    def _posted(self, chance: random.Random, path: str, value: Any, method: str = "POST") -> Call:
        if isinstance(value, bytes):
            kind = "multipart/form-data; boundary=b" if value.startswith(b"--b") else "application/json"
            return Call(method, path, (("Content-Type", kind), *self._headers(chance)), value)
        body = json.dumps(value, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
        if chance.random() < 0.03 and body:  # cut, or one byte is another one
            place = chance.randrange(len(body))
            body = body[:place] if chance.random() < 0.5 else body[:place] + chance.randbytes(1) + body[place + 1 :]
        return Call(method, path, (("Content-Type", "application/json"), *self._headers(chance)), body)

    def _headers(self, chance: random.Random) -> tuple[tuple[str, str], ...]:
        if chance.random() < 0.85:
            return ()
        name = chance.choice(
            (
                "Idempotency-Key",
                "Accept",
                "Range",
                "If-None-Match",
                "Authorization",
                "X-Request-ID",
                "Last-Event-ID",
                "Accept-Encoding",
            )
        )
        value = self._word(chance)[:1000].encode("ascii", "ignore").decode()
        return ((name, "".join(letter for letter in value if letter.isprintable())),)


_REQUEST = {"model": "shapes", "prompt": "a red circle", "steps": 2, "cfg": 1.0, "seed": 1}
_WORDS = ("shapes", "euler", "normal", "karras", "light:0.5", "png", "64x64", "a red circle")


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _png(side: int = 8) -> str:
    """An image in base64."""
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


@dataclass
class Answers:
    """The statuses of all calls, and the calls whose answer is a failure of the server."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


async def answer_of(port: int, call: Call) -> tuple[str, bytes]:
    """Make a call; return its status and its body, or the part that came in time of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(call.content)
        received = bytearray()
        until = time.monotonic() + ANSWER_SECONDS
        while len(received) < MOST_ANSWER_BYTES:
            is_stream = b"text/event-stream" in received[:2000]
            wait = STREAM_SECONDS if is_stream else max(0.1, until - time.monotonic())
            try:
                part = await asyncio.wait_for(reader.read(1 << 20), wait)
            except TimeoutError:
                if is_stream:
                    break
                return "none", b""
            if not part:
                break
            received += part
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        return (head.split(b" ", 2)[1].decode() if head.startswith(b"HTTP/") else "closed"), body
    finally:
        writer.transport.abort()


async def make_calls(port: int, grammar: Grammar, numbers: Sequence[int], connections: int = 4) -> Answers:
    """Make these calls; submissions that are accepted are ended again, so that the server is not full of jobs."""
    found, waiting = Answers(), iter(numbers)

    async def one_after_another() -> None:
        for number in waiting:
            call = grammar.call(number)
            try:
                status, body = await answer_of(port, call)
            except OSError as problem:
                status, body = type(problem).__name__, b""
            found.statuses[status] += 1
            is_failure = status in ("none", "ConnectionResetError", "closed") or (
                status.startswith("5") and status not in ALLOWED
            )
            if is_failure or b"Traceback" in body or len(body) >= MOST_ANSWER_BYTES:
                found.failures.append(f"{number}: {status} {body[:500]!r}\n    {call}")
            if status in ("200", "201", "202") and call.method == "POST":
                await end_submission(port, grammar, body)

    await asyncio.gather(*(one_after_another() for _ in range(connections)))
    return found


async def end_submission(port: int, grammar: Grammar, body: bytes) -> None:
    """Keep the id that an answer names, and cancel it."""
    try:
        answer = json.loads(body)
    except ValueError:
        return
    named = answer.get("id") or answer.get("prompt_id") if isinstance(answer, dict) else None
    if not isinstance(named, str):
        return
    grammar.ids.append(named)
    del grammar.ids[:-20]
    await answer_of(port, Call("DELETE", f"/api/jobs/{quote(named, safe='')}"))
    await answer_of(port, Call("POST", "/queue", (("Content-Type", "application/json"),), b'{"clear": true}'))


async def schemas_of(port: int) -> Schemas:
    """Read the schemas of a server."""
    texts = [(await answer_of(port, Call("GET", path)))[1] for path in ("/openapi.json", "/object_info")]
    return Schemas(*(json.loads(text[text.index(b"{") : text.rindex(b"}") + 1]) for text in texts))


def body_models() -> dict[str, Mapping[str, Any]]:
    """Return the schemas of bodies that the description lacks, by path."""
    from modelpool.actors.http.a1111.a1111_extras import ExtrasCall
    from modelpool.actors.http.a1111.a1111_requests import ControlUnit, ImageCall
    from modelpool.actors.http.openai.openai_api import ImagesCall

    unit = ControlUnit.model_json_schema()
    image = ImageCall.model_json_schema()
    image["properties"]["alwayson_scripts"] = {
        "type": "object",
        "properties": {"ControlNet": {"type": "object", "properties": {"args": {"type": "array", "items": unit}}}},
    }
    return {
        "/v1/images/generations": ImagesCall.model_json_schema(),
        "/sdapi/v1/txt2img": image,
        "/sdapi/v1/img2img": image,
        "/sdapi/v1/extra-single-image": ExtrasCall.model_json_schema(),
    }


def main() -> None:
    """Make the calls and print the statuses and the failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the only call")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server, port = start(folder)
        began, before = time.monotonic(), memory_bytes(server.pid)
        try:

            async def all_of_them() -> Answers:
                grammar = Grammar(await schemas_of(port), body_models(), wanted.seed)
                numbers = range(wanted.requests) if wanted.only is None else [wanted.only]
                found = await make_calls(port, grammar, numbers)
                valid = Call(
                    "POST", "/api/jobs", (("Content-Type", "application/json"),), json.dumps(_REQUEST).encode()
                )
                status, body = await answer_of(port, valid)
                if status != "201":
                    found.failures.append(f"a valid job afterwards: {status} {body[:500]!r}")
                return found

            found = asyncio.run(all_of_them())
            seconds = time.monotonic() - began
            print(f"{sum(found.statuses.values())} calls, seed {wanted.seed}, {seconds:.0f} s: {dict(found.statuses)}")
            print(f"memory: {before / 1e6:.0f} MB before, {memory_bytes(server.pid) / 1e6:.0f} MB after")
            print(f"{len(found.failures)} failures", *found.failures[:20], sep="\n")
            is_running = server.poll() is None
            server.send_signal(signal.SIGINT)
            server.wait(60)
        finally:
            if server.poll() is None:
                server.kill()
        log = Path(folder, "log").read_text()
        tracebacks = log.count("Traceback")
        print(f"server ended before: {not is_running}; log: {len(log.splitlines())} lines, {tracebacks} tracebacks")
        if "Traceback" in log:
            place = log.index("Traceback")
            sys.stdout.write(log[max(0, place - 500) : place + 4000])


if __name__ == "__main__":
    main()
