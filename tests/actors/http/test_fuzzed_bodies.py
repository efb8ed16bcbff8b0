"""1,000 damaged bodies for each interface: every one is answered with 4xx, and nothing is logged as a failure.

The pool refuses valid requests, so that no body may succeed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from tests.actors.http.asgi import RefusingPool, call
from tests.actors.http.comfy.test_comfy_api import GRAPH

BODIES = 1000
#: values that have the wrong type or are out of range almost everywhere
ODD = (
    None, True, -1, 0, 1e308, 10**40, 3.7, "", "x" * 5000, "\x00", "\ud800", "../../etc/passwd", "data:,", "aGk=",
    "http://127.0.0.1/", [], [[]], [None], {}, {"a": {"b": []}}, [1, 2], ["6", 0], {"name": 3}, "NaN", "1" * 400,
)  # fmt: skip
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": (
        "/api/jobs",
        {
            "requests": [
                {
                    "model": "shapes", "prompt": "x", "loras": ["light:0.5"], "steps": 4, "cfg": 2.0, "seed": 1,
                    "sampler": "euler", "width": 64, "height": 64, "image": "aGk=", "controls": [{"model": "canny"}],
                    "regions": ["0,0,8,8=x"], "hires": "2:0.5", "deadline": "10m", "options": {"motion": 3},
                }
            ],
            "webhook": "http://127.0.0.1/", "detached": False,
        },
    ),
    "openai": (
        "/v1/images/generations",
        {
            "model": "shapes", "prompt": "x", "n": 2, "size": "64x64", "response_format": "b64_json", "stream": False,
            "output_format": "png", "seed": 1, "loras": ["light"], "reference": ["aGk="],
        },
    ),
    "a1111": (
        "/sdapi/v1/img2img",
        {
            "prompt": "x <lora:light:1>", "negative_prompt": "", "seed": 1, "steps": 4, "width": 64, "height": 64,
            "sampler_name": "Euler", "init_images": ["aGk="], "mask": "aGk=", "override_settings": {},
            "alwayson_scripts": {"ControlNet": {"args": [{"model": "canny", "image": "aGk="}]}}, "batch_size": 1,
        },
    ),
    "comfyui": ("/prompt", {"prompt": GRAPH, "client_id": "me", "extra_data": {}}),
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in places(item, (*path, key)))]


def damaged(value: Any, chance: random.Random) -> Any:
    """A copy of `value` in which one to three places have odd values, are gone, or are new."""
    copy = json.loads(json.dumps(value))
    for _ in range(chance.randint(1, 3)):
        path = chance.choice([place for place in places(copy) if place] or [()])
        if not path:
            return chance.choice(ODD)
        container = copy
        for key in path[:-1]:
            container = container[key]
        match chance.randrange(6):
            case 0:
                del container[path[-1]]
            case 1 if isinstance(container, dict):
                container[chance.choice(("x", "", "__class__", "images", "steps"))] = chance.choice(ODD)
            case _:
                container[path[-1]] = chance.choice(ODD)
    return copy


def body_of(valid: Any, chance: random.Random) -> bytes:
    """A damaged body: odd values, other values, cut text, flipped bytes, noise, or nesting."""
    match chance.randrange(10):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            text = json.dumps(valid).encode()
            return text[: chance.randrange(len(text))]
        case 2:
            text = bytearray(json.dumps(valid).encode())
            text[chance.randrange(len(text))] = chance.randrange(256)
            return bytes(text)
        case 3:
            return b"[" * chance.choice((40, 5000)) + b"]" * 40
        case 4:
            return json.dumps(chance.choice(ODD)).encode()
        case _:
            return json.dumps(damaged(valid, chance)).encode()


@pytest.mark.parametrize("interface", TARGETS)
def test_damaged_bodies_are_refused(interface: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, valid = TARGETS[interface]
    app = application(RefusingPool(), ServeSection(), tmp_path)
    chance = random.Random(interface)

    async def fuzz() -> Counter[int]:
        found: Counter[int] = Counter()
        for _ in range(BODIES):
            body = body_of(valid, chance)
            answer = await call(app, "POST", path, body)
            found[answer.status] += 1
            assert 400 <= answer.status < 500, (body[:2000], answer.body[:2000])
            assert b"Traceback" not in answer.body
        return found

    with caplog.at_level(logging.ERROR):
        found = asyncio.run(fuzz())
    assert sum(found.values()) == BODIES
    assert caplog.records == []


def test_damaged_forms_are_refused(tmp_path: Path) -> None:
    app = application(RefusingPool(), ServeSection(), tmp_path)
    chance = random.Random(1)
    valid = (
        b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--b\r\n'
        b'Content-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n\x89PNG...\r\n--b--\r\n'
    )

    async def fuzz() -> None:
        for path in ("/v1/images/edits", "/upload/image"):
            for _ in range(200):
                body = bytearray(valid)
                for _ in range(chance.randrange(4)):
                    body[chance.randrange(len(body))] = chance.randrange(256)
                headers = {
                    "content-type": chance.choice(("multipart/form-data; boundary=b", "multipart/form-data", "x"))
                }
                answer = await call(app, "POST", path, bytes(body), headers)
                assert 400 <= answer.status < 500, (bytes(body), answer.body)

    asyncio.run(fuzz())


def test_half_characters_in_refused_names_are_answered(tmp_path: Path) -> None:
    """A name with a lone surrogate and a number that is not finite: the message had the name, and no answer could
    have the message."""
    app = application(RefusingPool(), ServeSection(), tmp_path)
    bodies = (b'{"\\ud800": Infinity}', b'{"\\ud800": 1, "\\ud800": 2}', b'[{"a\\udfff": {"\\ud800": -Infinity}}]')
    for path, _ in TARGETS.values():
        for body in bodies:
            answer = asyncio.run(call(app, "POST", path, body))
            assert answer.status == 400, (path, body, answer.body)
