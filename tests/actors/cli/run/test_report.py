"""`modelpool report DIR`: one page that needs no other file, with the figures of the manifest and of the event log."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import psutil

from modelpool.actors.control.detached.job_service import JobsProgress
from modelpool.actors.control.detached.records import RequestOutcome, SubmissionRecord, SubmissionState
from modelpool.actors.control.recorder import Recorder
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.ray.run_file import RunningPool, remove_run_file, write_run_file
from modelpool.actors.request.labels import Labels
from modelpool.pool.values.core.errors import UnknownName
from modelpool.pool.values.specs.spec import RunErrorKind
from modelpool.scheduler.model.messages import Outcome
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
    assert "1 entry has tasks that cannot be read" in words
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
    (output, *_) = OutputFolder(Path("p")).entries()
    known = FailedOutput.of(output.recipe, output.labels, 0, "s-0", "bad_input", "known", 1.0)
    OutputFolder(Path("p")).note_failures([replace(known, key="x")])
    assert command("report", "p", "--record", "pool.jsonl", "--out", "r.html").code == 0
    words = " ".join(Page(Path("r.html").read_text()).words.split())
    assert re.search(r"Jobs that failed 1 job s-0 \(line \d\) bad_input: known", words), "each is named once"
    assert re.search(r"Workers that were lost 1 a crash: ", words)
    assert "1 job failed, 0 were cancelled, 1 worker was lost" in words


def test_the_report_of_a_submission_names_its_failed_jobs_without_an_event_log(command: Command) -> None:
    """The manifest lists what succeeded only, and the journal knows the rest."""
    folder = batch(command)
    record = SubmissionRecord("night", SubmissionState.ENDED, str(folder.absolute()), "", 6, 0.0, 4, 1, 1)
    outcomes = (
        RequestOutcome("night", 1, Outcome.FAILED, error_kind="bad_input", message="no <b> file", labels=Labels("x")),
        RequestOutcome("night", 2, Outcome.CANCELLED),
    )
    jobs = SimpleNamespace(progress=lambda: JobsProgress(record, (), 0, ""), outcomes=lambda: iter(outcomes))

    class JobsPool(FakePool):
        def attach(self, jobs_id: str) -> SimpleNamespace:
            if jobs_id != "night":
                raise UnknownName(f"unknown submission {jobs_id!r}")
            return jobs

    running = RunningPool("mine", "modelpool", "127.0.0.1:1", os.getpid(), psutil.Process().create_time(), "")
    write_run_file(running)
    try:
        ended = command("report", "night", "--out", "r.html", pool=JobsPool())
        assert (ended.code, ended.opened[0].pool) == (0, "mine"), ended.err
        words = " ".join(Page(Path("r.html").read_text()).words.split())
        assert "Jobs that failed 1 job 1 (x) bad_input: no <b> file" in words
        assert "unknown submission 'day'" in command("report", "day", pool=JobsPool()).err
    finally:
        remove_run_file(running)


def test_a_folder_names_the_jobs_that_failed_and_a_resumed_batch_tries_them_again(command: Command) -> None:
    folder = batch(command)
    out = OutputFolder(folder)
    first, *_ = out.entries()
    lost = FailedOutput.of(first.recipe, first.labels, 0, "s-0", "internal", "no <b> memory", 1.0)
    out.note_failures([replace(lost, key="other", job_id="s-9"), lost])
    assert command("report", "p").code == 0
    words = " ".join(Page((folder / "report.html").read_text()).words.split())
    assert f"Jobs that failed 1 job s-9 (line {first.labels.line}) internal: no <b> memory (shapes, " in words
    (folder / "manifest.jsonl").unlink()
    for path in folder.glob("*.png"):
        path.unlink()
    OutputFolder(folder).note_failures([lost])
    again = command("batch", "jobs.jsonl", "--out", "p", "--model", "shapes", pool=FakePool())
    assert (again.code, "1 image failed in an earlier run and is tried again" in again.err) == (0, True), again.err
    assert [each.job_id for each in OutputFolder(folder).failures()] == ["s-9"]


def test_wrong_arguments_are_named(command: Command) -> None:
    assert "expected an output folder" in command("report", ".").err
    batch(command)
    assert "--price: found -1.0" in command("report", "p", "--price", "-1").err
    assert command("report", "p", "--out", "missing/r.html").code == 2
