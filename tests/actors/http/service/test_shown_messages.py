"""What callers see of the server: no folders, no long echoes of what they sent, no scripts of other sites."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import stat
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.detached.submission_journal import Journal
from modelpool.actors.http.application import application
from modelpool.actors.http.service.caller_images import check_url
from modelpool.actors.http.service.shown_messages import MOST_CHARACTERS, shown_message
from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.outputs.atomic_write import make_private_folder
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import CorruptFile, UserError
from tests.actors.http.asgi import Answer, RefusingPool, call
from tests.actors.http.comfy.test_comfy_api import GRAPH

#: folders of a server, with the characters that folders have
HTTP = "http://"
FOLDERS = ("/srv/models", "/data/ann/my models/x", "/mnt/d-1/v1.5", "/opt/\u732b/a", "/data/it's")
FORMS = (
    "{}/a.safetensors: truncated", "model: '{}/a.safetensors' is damaged", "found {}/a.safetensors, expected {}/b.gguf",
    "cannot read ({}/a.safetensors)", 'open "{}/a.safetensors"', "file://{}/a.safetensors", "[Errno 2] No file: '{}/a'",
)  # fmt: skip


def test_messages_have_the_names_of_files_and_not_their_folders() -> None:
    for folder in FOLDERS:
        for form in FORMS:
            message = form.replace("{}", folder)
            shown = shown_message(message)
            if " " not in folder and "'" not in folder:  # otherwise the end of an unquoted path is not known
                assert "/a.safetensors" not in shown, (message, shown)
            assert "a.safetensors" in shown or form.endswith("/a'"), (message, shown)
            assert folder[: folder.rfind("/")] not in shown, (message, shown)


@pytest.mark.parametrize(
    "message",
    [
        "url: https://example.org/a/b.png answered 404", "POST {'prompt': ...} to /prompt", "a ratio of 3/4 or 1/2/3",
        "model: found 'sub/name', expected a/b", "read /api/jobs/1/why", "data:image/png;base64,", "",
    ],
)  # fmt: skip
def test_other_messages_stay(message: str) -> None:
    assert shown_message(message) == message


class TellingPool(RefusingPool):
    """A pool that fails with `problem` in every call."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        raise self.problem

    def upscale(self, image: Any, upscale: Any, **_: Any) -> Any:
        raise self.problem

    def status(self) -> Any:
        raise self.problem

    def history(self, job: str) -> Any:
        raise self.problem


def png_text() -> str:
    content = BytesIO()
    Image.new("RGB", (16, 16)).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def calls_of(text: str) -> Iterator[tuple[str, str, Any]]:
    """A call of each kind, with `text` where it has texts."""
    image = png_text()
    yield "POST", "/api/jobs", {"model": text, "prompt": "x"}
    yield "POST", "/api/jobs", {"model": "shapes", "prompt": "x", "sampler": text, "image": text}
    yield "POST", "/api/jobs", {"model": "shapes", "prompt": "x", text: text}
    yield "POST", "/api/jobs", {"requests": [{"model": "shapes", "prompt": "x"}], "webhook": text, "detached": False}
    yield "POST", "/api/jobs", {"requests": [], text: 1}
    yield "POST", "/v1/images/generations", {"model": text, "prompt": "x"}
    yield "POST", "/v1/images/generations", {"prompt": "x", "size": text, text: 1}
    yield "POST", "/sdapi/v1/txt2img", {"prompt": "x", "width": 64, "height": 64, "sampler_name": text}
    yield "POST", "/sdapi/v1/txt2img", {"prompt": "x", "override_settings": {text: text}}
    yield "POST", "/sdapi/v1/img2img", {"prompt": "x", "init_images": [text]}
    yield "POST", "/sdapi/v1/extra-single-image", {"image": image, "upscaler_1": "4x", "resize_mode": 0}
    yield "POST", "/sdapi/v1/extra-single-image", {"image": image, "upscaler_1": text}
    yield "POST", "/sdapi/v1/options", {text: text}
    yield "POST", "/prompt", {"prompt": GRAPH}
    yield "POST", "/prompt", {"prompt": {text[:3]: {"class_type": text, "inputs": {text: text}}}}
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": text}}
    yield "POST", "/prompt", {"prompt": {**GRAPH, "4": loader}}
    yield "POST", "/prompt", {"prompt": GRAPH, "prompt_id": text}
    yield "POST", "/queue", {"clear": text}
    yield "GET", "/api/status", None
    yield "GET", "/api/jobs/x-0/why", None
    yield "GET", "/sdapi/v1/memory", None
    yield "GET", f"/{text}", None
    yield "GET", f"/models/{text}", None
    yield "GET", f"/object_info/{text}", None
    yield "GET", f"/history/{text}", None
    yield "GET", f"/api/job-history/{text}", None


def answers(pool: Any, folder: Path, text: str) -> list[tuple[str, Answer]]:
    app = application(pool, ServeSection(), folder)

    async def made() -> list[tuple[str, Answer]]:
        found = []
        for method, path, body in calls_of(text):
            content = b"" if body is None else json.dumps(body).encode()
            found.append((path[:40], await call(app, method, path, content)))
        return found

    return asyncio.run(made())


def test_no_answer_has_a_folder_of_the_server(tmp_path: Path) -> None:
    for folder in (FOLDERS[1], str(tmp_path)):
        for problem in (CorruptFile, PoolLost):
            pool = TellingPool(problem(f"{folder}/deep/a.safetensors: truncated; '{folder}/deep/b' is no folder"))
            for path, answer in answers(pool, tmp_path, "x" * 10):
                body = answer.body.decode()
                assert answer.status < 500 or answer.status == 503, (path, body)
                hidden = (folder, json.dumps(folder)[1:-1], str(tmp_path))
                assert not any(each in body for each in hidden), (path, body)


def test_no_answer_repeats_long_texts(tmp_path: Path) -> None:
    for text in ("x" * 300_000, "a/" * 100_000, "\u732b" * 100_000):
        for path, answer in answers(RefusingPool(), tmp_path, text):
            if answer.status != 200:  # A1111's and ComfyUI's bodies have a message twice, with six bytes a character
                assert len(answer.body) < 2 * 6 * (MOST_CHARACTERS + 500), (path, len(answer.body))


BAD_URLS = (
    "http://example.org/\r\nX: 1", "http://example.org\r\n/", "http://example.org/\t", "http://example.org/\x00",
    "http://example.org /", f"{HTTP}user@example.org/", f"{HTTP}user:word@example.org/", "http://example.org:0/",
    "http://example.org:99999/", "http://example.org:80x/", "http://example.org:/", "http://example.org:8080/",
    "http://example.org@evil.org/", "http://example.org\\@evil.org/", "http://[::1]/", "http://[/", "//example.org/",
    "ftp://example.org/", f"{HTTP}ex\u00e4mple.org/", "http://example.org/\u0661", "http://example.org/" + "a" * 3000,
    "http:///", "http://", "javascript:alert(1)", " http://example.org/", f"{HTTP}example.org.evil.org/", 7, None, [],
)  # fmt: skip


def test_urls_that_are_not_plain_ones_of_a_host_are_refused_at_once(tmp_path: Path) -> None:
    app = application(RefusingPool(), ServeSection(url_hosts=("example.org",), webhook_secret="s" * 32), tmp_path)
    for url in BAD_URLS:
        with pytest.raises(UserError):
            check_url("webhook", url, ("example.org",))
        if url:
            body = {"requests": [{"model": "shapes", "prompt": "x"}], "webhook": url}
            answer = asyncio.run(call(app, "POST", "/api/jobs", json.dumps(body).encode()))
            assert (answer.status, b"webhook: " in answer.body) == (400, True), (url, answer.body)
    assert check_url("webhook", "https://example.org/a?b=c", ("example.org",))
    with pytest.raises(UserError, match="url_hosts"):
        ServeSection(url_hosts=("example.org:70000",))


def test_the_description_is_a_page_without_scripts_and_addresses_of_other_sites(tmp_path: Path) -> None:
    app = application(RefusingPool(), ServeSection(), tmp_path)
    page, schema = (asyncio.run(call(app, "GET", path)) for path in ("/docs", "/openapi.json"))
    text = page.body.decode()
    assert page.status == 200
    assert "<script" not in text
    assert not re.search(r"(src|href)=[\"'](https?:)?//", text)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "script-src" not in page.headers["content-security-policy"]
    assert all(f"<code>{path}</code>" in text for path in schema.json["paths"])
    assert all(f"<code>{name}</code>" in text for name in schema.json["components"]["schemas"])
    assert asyncio.run(call(app, "GET", "/redoc")).status == 404


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_other_users_of_the_machine_read_nothing_that_the_server_stores(tmp_path: Path) -> None:
    from modelpool.actors.http.service.submissions import owner_folder

    folder = tmp_path / "a" / "outputs"
    make_private_folder(owner_folder(folder, "ann"))
    assert {mode_of(each) for each in (folder.parent, folder, folder / "users", owner_folder(folder, "ann"))} == {0o700}
    Uploads(folder / "uploads").add("ann", "a.png", base64.b64decode(png_text()), "sub")
    assert {mode_of(each) for each in (folder / "uploads").rglob("*") if each.is_dir()} == {0o700}
    (folder / "inputs").mkdir(mode=0o755)  # of an earlier version
    application(RefusingPool(), ServeSection(), folder)
    assert mode_of(folder / "inputs") == 0o700
    journal = tmp_path / "journal"
    opened = Journal(journal)
    try:
        assert {mode_of(each) for each in tmp_path.iterdir() if each.is_file()} == {0o600}
    finally:
        opened.close()
