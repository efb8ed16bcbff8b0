"""Files with prompts or images of users cannot be read by other users of the machine, whatever the umask is."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control import log_file
from modelpool.actors.control.log_file import ROOT_LOGGER, open_log_file
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.http.application import application
from tests.actors.control.detached.test_job_service import WAIT_SECONDS, opened
from tests.actors.fakes import FAIL
from tests.actors.http.asgi import call
from tests.actors.http.service.test_submission_inputs import png

KEY = "a" * 20


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def readable_by_others(root: Path) -> list[str]:
    """The files below `root`, which others can enter, that other users can read."""
    found: list[str] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if mode_of(Path(folder, name)) & 0o011]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files]
    return sorted(each for each in found if mode_of(root / each) & 0o044)


def test_logs_and_event_logs_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MOST_BYTES", 1000)
    chosen = tmp_path / "chosen.log"
    chosen.touch(0o644)
    for path, expected in ((tmp_path / "new.log", 0o600), (chosen, 0o644)):
        log = open_log_file(path, is_json=False)
        try:
            for number in range(20):
                logging.getLogger(ROOT_LOGGER).warning("prompt: found %s %d", "x" * 100, number)
        finally:
            log.close()
        full = path.with_name(f"{path.name}.1")
        assert full.is_file(), "the file was full"
        assert (mode_of(path), mode_of(full)) == (expected, expected), path.name
    recorder = Recorder(tmp_path / "events.jsonl")
    recorder.open()
    recorder.close()
    assert readable_by_others(tmp_path) == ["chosen.log", "chosen.log.1"]


def test_a_server_and_the_job_service_let_no_other_user_read_what_users_send_and_get(tmp_path: Path) -> None:
    """The folder of outputs is open, as its owner made it; users with keys have folders of their own in it. Images of
    a submission with a failed job are kept."""
    tmp_path.chmod(0o755)
    with opened(tmp_path) as service:
        service.out.mkdir(mode=0o755)
        headers = {"authorization": f"Bearer {KEY}"}

        async def run() -> str:
            app = application(service.pool, ServeSection(keys={"ann": KEY}), service.out)
            request = {"model": "shapes", "prompt": "a thing", "steps": 2, "image": png(), "strength": 0.5}
            body = json.dumps({"requests": [request, {**request, "prompt": FAIL}], "detached": True}).encode()
            answer = await call(app, "POST", "/api/jobs", body, headers)
            assert answer.status == 201, answer.body
            head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
            form = head + base64.b64decode(png()) + b"\r\n--b--\r\n"
            named = {**headers, "content-type": "multipart/form-data; boundary=b"}
            assert (await call(app, "POST", "/upload/image", form, named)).status == 200
            return str(answer.json["id"])

        submission = asyncio.run(run())
        assert service.pool.attach(submission).wait(WAIT_SECONDS).succeeded == 1
        for name in ("users", "inputs", "uploads"):
            assert any(path.is_file() for path in (service.out / name).rglob("*")), name
        assert readable_by_others(tmp_path) == []
