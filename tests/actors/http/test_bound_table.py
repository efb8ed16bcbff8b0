"""Every bound is in the table, and every field of every interface has one."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.http_attacks import graph
from benchmarks.http_grammar import body_models
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.bound_table import RANGES, all_bounds
from modelpool.actors.http.native.native_api import request_schemas
from modelpool.actors.http.service.limit_log import LimitLog
from modelpool.actors.request.field_table import REQUEST_FIELDS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.asgi import RefusingPool, call

ROOT = Path(__file__).parents[3]
FOLDERS = ("http", "request", "control", "config", "graph")
#: in the message of `RefusingPool`: all checks have passed
NOT_REFUSED = "'any'"
#: settings that are no bounds
NO_BOUNDS = {"port"}
#: fields that an interface documents as ignored: no work depends on them
IGNORED = {("/sdapi/v1/txt2img", name) for name in ("mask", "distilled_cfg_scale", "hr_distilled_cfg", "hr_cfg")}
#: numbers that may be of any size, and `metadata`, which has a bound of its bytes
FREE_NUMBERS = {"loras.strength", "loras.text_strength", "metadata"}
_A1111 = {"prompt": "x", "enable_hr": True}


def constants() -> Iterator[str]:
    """The constants of the product that are named like bounds."""
    for path in (found for folder in FOLDERS for found in (ROOT / "actors" / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for name in (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)):
                if re.match("(MAX|MOST)_", name.id):
                    yield f"{'.'.join(path.relative_to(ROOT / 'actors').with_suffix('').parts)}:{name.id}"


def test_every_constant_that_bounds_something_is_in_the_table() -> None:
    listed = {bound.place for bound in all_bounds()} | RANGES
    assert set(constants()) - listed == set()
    assert all(bound.value >= 0 for bound in all_bounds()), "each place exists"


def test_every_number_of_the_settings_is_in_the_table() -> None:
    numbers = {name for name, about in ServeSection.model_fields.items() if about.annotation in (int, float)}
    assert numbers - NO_BOUNDS - {bound.setting for bound in all_bounds()} == set()


def test_every_limit_that_is_counted_is_in_the_table() -> None:
    """Labels are texts in the code: after `limit=`, or at the end of a refusal."""
    listed = {bound.limit for bound in all_bounds()} - {""}
    used: set[str] = set()
    for path in (ROOT / "actors" / "http").rglob("*.py"):
        if path.name == "bound_table.py":
            continue
        text = path.read_text()
        used |= {label for label in listed if f'"{label}"' in text}
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            label = {"HttpProblem": 3, "too_many": 2, "HeldShares": 1, "acted": 0}.get(name)
            given = [each.value for each in node.keywords if each.arg == "limit"]
            given += node.args[label : label + 1] if label is not None else []
            found = {each.value for each in given if isinstance(each, ast.Constant) and each.value}
            assert found <= listed, f"{path.name}:{node.lineno}"
    assert used == listed, "each limit of the table exists"


def test_the_page_is_written_from_the_table() -> None:
    script = ROOT / "scripts" / "write_limits.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def excesses(schema: Mapping[str, Any], resolve: Any) -> Iterator[Any]:
    """Values that take far more memory or time than their field may cost, of the types that a schema permits."""
    for each in schema.get("anyOf") or schema.get("oneOf") or (schema,):
        each = resolve(each)
        if "enum" in each or "const" in each:
            continue
        match each.get("type"):
            case "string":
                yield "x" * 300_000
            case "array":
                yield ["x"] * 60_000
            case "object":
                yield {str(place): "x" for place in range(60_000)}
            case "integer" | "number":
                yield 10**30
            case None:
                yield from ("x" * 300_000, ["x"] * 60_000, {str(place): 1 for place in range(60_000)}, 10**30)


def unbounded(path: str, base: Mapping[str, Any], schema: Mapping[str, Any], tmp_path: Path) -> list[str]:
    """The fields of a body with excesses that pass all checks, or are refused without their name."""
    described = {**schema, "components": {"schemas": request_schemas()}}

    def resolve(each: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in each:
            found: Any = described
            for part in each["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            each = found
        return each

    found = []
    app = application(RefusingPool(), ServeSection(), tmp_path)

    async def try_all() -> None:
        for name, about in resolve(schema)["properties"].items():
            for value in excesses(resolve(about), resolve):
                if (path, name) in IGNORED or (name in FREE_NUMBERS and isinstance(value, int)):
                    continue
                answer = await call(app, "POST", path, json.dumps({**base, name: value}).encode())
                text = answer.body.decode()
                if not 400 <= answer.status < 500 or NOT_REFUSED in text:
                    found.append(f"{path} {name}: {type(value).__name__} {answer.status} {text[:200]}")
                elif len(text) > 3000:
                    found.append(f"{path} {name}: an answer of {len(text)} characters")

    asyncio.run(try_all())
    return found


def test_every_field_of_a_request_has_a_bound(tmp_path: Path) -> None:
    schema = {"$ref": "#/components/schemas/GenerateRequest"}
    assert unbounded("/api/jobs", {"model": "shapes", "prompt": "x"}, schema, tmp_path) == []


@pytest.mark.parametrize("path", ["/v1/images/generations", "/sdapi/v1/txt2img", "/sdapi/v1/extra-single-image"])
def test_every_field_of_other_interfaces_has_a_bound(path: str, tmp_path: Path) -> None:
    base = _A1111 if "txt2img" in path else {"prompt": "x"}
    assert unbounded(path, base, body_models()[path], tmp_path) == []


def test_every_part_of_a_request_has_a_bound() -> None:
    """Job files, Python and detached submissions use the same model as the interfaces."""
    schemas = request_schemas()
    plain = {
        "controls": ("Control", {"model": "canny", "image": "x.png"}), "regions": ("Region", {"prompt": "x"}),
        "hires": ("Hires", {"scale": 2}), "upscale": ("Upscale", {"model": "4x"}),
        "image_prompts": ("ImagePrompt", {"model": "a", "image": "x.png"}), "loras": ("LoraChoice", {"name": "light"}),
    }  # fmt: skip
    found = []
    for field, (part, base) in plain.items():
        for name, about in schemas[part]["properties"].items():
            for value in excesses(
                about, lambda each: schemas[each["$ref"].rpartition("/")[2]] if "$ref" in each else each
            ):
                if f"{field}.{name}" in FREE_NUMBERS and isinstance(value, int):
                    continue
                whole: Any = {**base, name: value}
                listed = whole if field in ("hires", "upscale") else [whole]
                try:
                    GenerateRequest(model="shapes", prompt="x", **{field: listed})
                except UserError as problem:
                    if len(str(problem)) > 3000:
                        found.append(f"{field}.{name}: a message of {len(str(problem))} characters")
                else:
                    found.append(f"{field}.{name}: {type(value).__name__}")
    assert found == []


def test_fields_of_job_files_have_the_bounds_of_the_table() -> None:
    found = []
    for name, field in REQUEST_FIELDS.items():
        for value in ("x" * (field.most_characters + 1), ["x"] * (field.most_entries + 1)):
            try:
                GenerateRequest(**{"model": "shapes", "prompt": "x", name: value})
            except UserError:
                continue
            found.append(f"{name}: {type(value).__name__}")
    assert found == []


def test_numbers_of_nodes_have_ranges(tmp_path: Path) -> None:
    app = application(RefusingPool(), ServeSection(), tmp_path)
    nodes = asyncio.run(call(app, "GET", "/object_info")).json
    assert len(nodes) > 50
    found = []
    for name, node in nodes.items():
        kinds = node["input"]
        for field, about in {**kinds.get("required", {}), **kinds.get("optional", {})}.items():
            if about[0] in ("INT", "FLOAT") and not {"min", "max"} <= set(about[1]):
                found.append(f"{name}.{field}")
    assert found == []


def test_what_a_field_has_too_much_of_is_counted(tmp_path: Path) -> None:
    log = LimitLog()
    app = application(RefusingPool(), ServeSection(), tmp_path, limits=log)
    bodies = {
        "request_fields": ("/api/jobs", {"model": "shapes", "prompt": "x" * 100_000}),
        "body_values": ("/api/jobs", [[]] * 600_000),
        "settings_bytes": ("/settings", {"a": "x" * 150_000}),
        "body_bytes": ("/prompt", {"prompt": graph(), "extra_data": {"a": "x" * 1_100_000}}),
        "queued_jobs": ("/api/jobs", [{"model": "shapes", "prompt": "x"}] * 10_001),
    }
    asyncio.run(call(app, "POST", "/settings", json.dumps({"b": "x" * 150_000}).encode()))
    for limit, (path, body) in bodies.items():
        before = log.count(limit)
        answer = asyncio.run(call(app, "POST", path, json.dumps(body).encode()))
        assert 400 <= answer.status < 500, (limit, answer.body[:300])
        assert log.count(limit) == before + 1, (limit, answer.body[:300])


def test_a_bound_is_counted_in_every_interface(tmp_path: Path) -> None:
    """Interfaces say the errors of requests in words of their own; the limit was not counted then."""
    long = "x" * 100_000
    text = {"class_type": "CLIPTextEncode", "inputs": {"text": long, "clip": ["1", 1]}}
    many = {f"n{place}": text for place in range(1001)}
    cases = {
        "one of several requests": ("/api/jobs", [{"model": "shapes", "prompt": "x"}, {"prompt": long * 2}]),
        "text of a node": ("/prompt", {"prompt": graph(**{"3": text})}),
        "nodes": ("/prompt", {"prompt": {key: {"class_type": "VAEDecode", "inputs": {}} for key in many}}),
        "text of A1111": ("/sdapi/v1/txt2img", {"prompt": long}),
        "another text of A1111": ("/sdapi/v1/txt2img", {"prompt": "x", "negative_prompt": long * 2}),
        "LoRAs of A1111": ("/sdapi/v1/txt2img", {"prompt": "<lora:light:1>" * 101}),
        "text of a LoRA": ("/sdapi/v1/txt2img", {"prompt": f"<lora:{'x' * 9000}:1>"}),
        "text of OpenAI": ("/v1/images/generations", {"prompt": long}),
    }
    found = []
    for name, (path, body) in cases.items():
        log = LimitLog()
        app = application(RefusingPool(), ServeSection(), tmp_path, limits=log)
        answer = asyncio.run(call(app, "POST", path, json.dumps(body).encode()))
        if answer.status != 400 or NOT_REFUSED in answer.body.decode() or log.count("request_fields") != 1:
            found.append(f"{name}: {answer.status} {log.count('request_fields')} {answer.body[:200]!r}")
    assert found == []
