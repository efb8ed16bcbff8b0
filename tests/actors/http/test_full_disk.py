"""A server with a full disk: each interface says that it is the server's fault, for now, and not the caller's."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.application import application
from modelpool.actors.http.service import uploads
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import OutputFailed
from tests.actors.http.asgi import RefusingPool, call

REASON = "No space left on device"
CALLS = {
    "/api/jobs": {"model": "shapes", "prompt": "x"},
    "/v1/images/generations": {"model": "shapes", "prompt": "x"},
    "/sdapi/v1/txt2img": {"prompt": "x", "override_settings": {"sd_model_checkpoint": "shapes"}},
}


class FullPool(RefusingPool):
    """A pool with a folder of outputs that cannot be written."""

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        raise OutputFailed(f"/srv/outputs: cannot be written ({REASON})")


@pytest.mark.parametrize("path", CALLS)
def test_a_submission_is_refused_with_503(tmp_path: Path, path: str) -> None:
    """It was 400, "invalid_request_error", which clients do not try again."""
    app = application(FullPool(), ServeSection(), tmp_path)
    answer = asyncio.run(call(app, "POST", path, json.dumps(CALLS[path]).encode()))
    assert answer.status == 503, answer.body
    assert REASON.encode() in answer.body
    assert b"/srv" not in answer.body
    assert answer.headers["retry-after"] == "10"
    if path.startswith("/v1"):
        assert answer.json["error"]["type"] == "server_error"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_upload_is_refused_with_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It was 500, with a traceback in the log for each."""

    def full(path: Path, content: bytes) -> None:
        raise OSError(number, REASON, str(path))

    monkeypatch.setattr(uploads, "write_atomically", full)
    content = BytesIO()
    Image.new("RGB", (2, 2)).save(content, "PNG")
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    app = application(RefusingPool(), ServeSection(), tmp_path)
    form = head + content.getvalue() + b"\r\n--b--\r\n"
    answer = asyncio.run(call(app, "POST", "/upload/image", form, headers))
    assert answer.status == 503, answer.body
    assert REASON in answer.json["error"]["message"]
    assert str(tmp_path) not in answer.json["error"]["message"]
