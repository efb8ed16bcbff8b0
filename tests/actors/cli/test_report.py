"""`modelpool report DIR`: one page that needs no other file, with the figures of the manifest and of the event log."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from modelpool.actors.control.recorder import Recorder
from modelpool.pool.specs.spec import RunErrorKind
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool, task
from tests.scheduler.world import Shell, image

LINES = (
    '{"prompt": "a <b>bold</b> circle"}\n{"prompt": "a"}\n{"prompt": "b", "loras": ["light"]}\n'
    '{"prompt": "c", "loras": ["light"]}\n'
)
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that every element is closed in order, and collects what refers to something outside of the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [
            value for name, value in attrs if name in ("src", "href") and not (value or "").startswith("data:")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += f" {data}"


def batch(command: Command) -> Path:
    """A folder of four outputs, of which one has a run that was lost before."""
    Path("jobs.jsonl").write_text(LINES)
    lost = ("gpu-3: killed by signal 9",)
    pool = FakePool(sampled=lambda index: task("gpu-0", index > 0, lost=lost if index == 1 else ()))
    assert command("batch", "jobs.jsonl", "--out", "p", "--model", "shapes", pool=pool).code == 0
    return Path("p")


def test_the_page_shows_the_outputs_by_model_and_lora_with_times_loads_cost_and_reasons(command: Command) -> None:
    folder = batch(command)
    ended = command("report", "p", "--price", "3600")
    assert (ended.code, ended.opened) == (0, ()), ended.err
    assert "wrote p/report.html: 4 outputs, 8 runs" in ended.out
    page = Page((folder / "report.html").read_text())
    assert not page.open
    assert not page.outside
    assert page.tags.count("img") == 4
    words = " ".join(page.words.split())
    assert "a <b>bold</b> circle" in words  # and it is no element
    assert "b" not in page.tags
    assert re.search(r"shapes 2 .*shapes with light 1 2", words)
    tasks = [json.loads(line)["tasks"] for line in (folder / "manifest.jsonl").read_text().splitlines()]
    seconds = sum(each["seconds"] for one in tasks for each in one if not each["shared"])
    assert f"GPU time {seconds:.1f} s" in words
    assert f"cost {seconds:.4g} " in words  # one unit a second
    assert "runs with all weights resident 88%" in words  # 7 of 8
    assert "upload 4.0 MiB, 1 patch switch" in words  # why
    assert "Runs that were lost, and repeated 1" in words
    assert "gpu-3: killed by signal 9" in words


def test_damaged_files_and_unreadable_tasks_are_named_and_stop_nothing(command: Command) -> None:
    folder = batch(command)
    lines = (folder / "manifest.jsonl").read_text().splitlines()
    first, second = json.loads(lines[0]), json.loads(lines[1])
    (folder / first["file"]).unlink()
    second["tasks"] = [{"stage": 7}]
    (folder / "manifest.jsonl").write_text("\n".join([lines[0], json.dumps(second), *lines[2:]]) + "\n")
    assert command("report", "p").code == 0
    page = Page((folder / "report.html").read_text())
    words = " ".join(page.words.split())
    assert page.tags.count("img") == 3
    assert f"Files that are missing or damaged 1 {first['file']}" in words
    assert "1 entries have tasks that cannot be read" in words
    assert "cost" not in words


def test_the_event_log_adds_failed_jobs_and_lost_workers(command: Command) -> None:
    batch(command)
    recorder = Recorder(Path("pool.jsonl"))
    recorder.open()
    shell = Shell()
    handle = shell.state.handle

    def noted(event):  # type: ignore[no-untyped-def]
        commands = handle(event)
        recorder.note(event, commands)
        return commands

    shell.state.handle = noted  # type: ignore[method-assign]
    shell.workers(a=64)
    shell.submit(image("s-0", seed=1))
    shell.lose("a")
    shell.come_up("a")
    shell.finish("a", RunErrorKind.BAD_INPUT)
    recorder.close()
    assert command("report", "p", "--record", "pool.jsonl", "--out", "r.html").code == 0
    words = " ".join(Page(Path("r.html").read_text()).words.split())
    assert re.search(r"Jobs that failed 1 s-0 ", words)
    assert re.search(r"Workers that were lost 1 a crash: ", words)
    assert "1 jobs failed, 0 were cancelled, 1 workers were lost" in words


def test_wrong_arguments_are_named(command: Command) -> None:
    assert "expected an output folder" in command("report", ".").err
    batch(command)
    assert "--price: found -1.0" in command("report", "p", "--price", "-1").err
    assert command("report", "p", "--out", "missing/r.html").code == 2
