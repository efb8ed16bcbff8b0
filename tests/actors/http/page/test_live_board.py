"""What viewers of the page receive: everything at first, then the changed fields; what an owner may see of a pool."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from modelpool.actors.control.detached.records import SubmissionRecord, SubmissionState
from modelpool.actors.control.status_values import (
    PoolStatus,
    ResidentPart,
    RunStatus,
    SubmissionStatus,
    WorkerStatus,
)
from modelpool.actors.http.page.live_board import MOST_REMOVED, LiveBoard
from modelpool.actors.http.page.live_entries import (
    MOST_CHARACTERS,
    MOST_ENDS,
    MOST_TASKS,
    latest_ends,
    resident_entry,
    submission_sections,
)
from modelpool.actors.http.page.live_view import ActiveSubmission, EndRates
from modelpool.actors.http.page.page_api import EndFilter
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, RunningTask, Submissions
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.stage_params import component_key
from modelpool.pool.values.specs.spec import Role, WorkerId
from modelpool.scheduler.core.snapshot import model_of


def changes(board: LiveBoard, since: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(board.changes(since))
    return found


def submission(name: str, total: int, numbers: Any = None) -> HttpSubmission:
    requests = [GenerateRequest(model="shapes", prompt=name)] * total
    return HttpSubmission(name, "", "native", total, lambda: None, False, requests=requests, numbers=numbers)


def ends(*indices: int) -> list[JobEnd]:
    return [JobEnd(index, f"job-{index}", "succeeded") for index in indices]


def test_a_new_viewer_receives_everything_and_then_changed_fields_only() -> None:
    board = LiveBoard()
    assert board.update({"workers": {"gpu-0": {"state": "idle", "step": 0}, "gpu-1": {"state": "idle", "step": 0}}})
    assert changes(board, 0)["all"] is True
    assert set(changes(board, 0)["set"]["workers"]) == {"gpu-0", "gpu-1"}
    board.update({"workers": {"gpu-0": {"state": "idle", "step": 3}, "gpu-1": {"state": "idle", "step": 0}}})
    assert changes(board, 1) == {"version": 2, "all": False, "set": {"workers": {"gpu-0": {"step": 3}}}, "removed": {}}


def test_nothing_is_sent_where_nothing_has_changed() -> None:
    board = LiveBoard()
    entries = {"workers": {"gpu-0": {"state": "idle"}}}
    board.update(entries)
    assert not board.update({"workers": {"gpu-0": {"state": "idle"}}})
    assert board.version == 1


def test_a_slow_viewer_receives_the_sum_of_what_it_missed() -> None:
    board = LiveBoard()
    for step in range(5):
        workers = {"gpu-0": {"state": "busy", "step": step}}
        board.update({"workers": workers if step else {**workers, "gpu-1": {"state": "idle", "step": 0}}})
    found = changes(board, 1)
    assert (found["set"], found["removed"]) == ({"workers": {"gpu-0": {"step": 4}}}, {"workers": ["gpu-1"]})


def test_an_entry_that_returns_is_not_removed() -> None:
    board = LiveBoard()
    for entries in ({"a": {"x": 1}}, {}, {"a": {"x": 1}}):
        board.update({"workers": entries})
    found = changes(board, 1)
    assert (found["set"], found["removed"]) == ({"workers": {"a": {"x": 1}}}, {})


def test_a_viewer_from_before_forgotten_removals_receives_everything() -> None:
    board = LiveBoard()
    board.update({"ends": {str(key): {"x": 1} for key in range(MOST_REMOVED + 10)}})
    board.update({"ends": {}})
    board.update({"ends": {"new": {"x": 1}}})
    assert changes(board, 1)["all"] is True
    assert changes(board, 2) == {"version": 3, "all": False, "set": {"ends": {"new": {"x": 1}}}, "removed": {}}


def test_the_latest_ends_of_all_submissions_are_those_that_ended_last() -> None:
    numbers = iter(range(10_000))
    many = [submission(f"s{place}", 100, numbers) for place in range(60)]
    for index in range(100):
        for each in many:
            each.note(ends(index), ())
    found = latest_ends(many, MOST_ENDS)
    assert [(each.id, place) for each, place, _ in found] == [
        (f"s{place}", 99) for place in range(59, 59 - MOST_ENDS, -1)
    ]


def test_entries_are_bounded_for_any_number_of_jobs() -> None:
    large = submission("large", 50_000)
    large.note(ends(*range(40_000)), tuple(RunningTask(40_000 + n, f"j{n}", "sample", "gpu", 0, 9) for n in range(999)))
    long = HttpSubmission(
        "long", "", "native", 1, lambda: None, False, requests=[GenerateRequest(model="shapes", prompt="x" * 100_000)]
    )
    sections = submission_sections([large, long], {})
    assert (len(sections["ends"]), len(sections["tasks"])) == (MOST_ENDS, MOST_TASKS)
    assert len(sections["submissions"]["long"]["prompt"]) < MOST_CHARACTERS + 10
    assert sections["submissions"]["large"]["succeeded"] == 40_000


def test_the_expected_time_follows_the_rate_of_ends() -> None:
    rates = EndRates()
    assert rates.left_seconds("", [ActiveSubmission("s", 0, 100)], 0.0) == {}
    assert rates.left_seconds("", [ActiveSubmission("s", 10, 90)], 5.0) == {"s": 45.0}
    assert rates.left_seconds("", [], 6.0) == {}
    assert rates.left_seconds("", [ActiveSubmission("s", 20, 80)], 7.0) == {}
    # a batch that waited 1,000 s for another one was said to take 1,000 s for each of its jobs
    for now in (10.0, 1000.0):
        assert rates.left_seconds("", [ActiveSubmission("late", 0, 100)], now) == {}
    assert rates.left_seconds("", [ActiveSubmission("late", 1, 99)], 1001.0) == {}
    assert rates.left_seconds("", [ActiveSubmission("late", 4, 96)], 1002.0) == {"late": 48.0}


def test_a_submission_and_its_ends_are_of_one_owner(tmp_path: Any) -> None:
    """`Submissions.has_job` decides whose history a caller may read."""
    known = Submissions(pool=None, folder=tmp_path, kept=10)  # type: ignore[arg-type]
    known._add(HttpSubmission("abc", "ann", "native", 1, lambda: None, False))
    assert known.has_job("ann", "abc-0")
    assert not known.has_job("bob", "abc-0")


def test_the_commit_in_the_name_of_a_hub_model_hides_no_part_of_the_keys_of_its_components() -> None:
    """Views take a key apart: model, role and hash."""
    model = "someone/toy/toy.safetensors@" + "1f" * 20
    key = component_key(model, Role.VAE, "ab" * 32)
    assert model_of(key) == model
    found = resident_entry(ResidentPart(key, 1, 2, patched=False))
    assert (found["model"], found["role"]) == (model, "vae")


def test_each_submission_is_listed_once_wherever_it_is_known(tmp_path: Any) -> None:
    """A detached one is known to the server or the journal by its name, and to the pool by the id of its latest
    controller."""

    def pooled(submission_id: str, user: str = "ann") -> SubmissionStatus:
        return SubmissionStatus(submission_id, user, "shapes", f"prompt of {submission_id}", 4, 1, 0, 0, 50.0)

    mine = submission("mine", 4)
    taken = HttpSubmission("taken-over", "", "native", 4, lambda: None, True)
    records = [SubmissionRecord("night", SubmissionState.ACTIVE, "out", "bob", 4, 5.0, succeeded=1)]
    runs = [
        RunStatus(job, "ann", "sample", 1, 3, 20, 1.0, False, model="shapes", prompt=f"prompt of {job}")
        for job in ("night.1.2-3", "script-0", "mine-1", "")
    ]
    workers = tuple(
        WorkerStatus(WorkerId(f"gpu-{n}"), "busy", "", 1, 1, 0, (), "sample", run=run) for n, run in enumerate(runs)
    )
    status = PoolStatus(
        workers, {}, {}, 0, 0, 0, 0, 0, 0,
        submissions=tuple(map(pooled, ("mine", "night.1.2", "script", "taken-over.3.4"))),
    )  # fmt: skip
    sections = submission_sections([mine, taken], {}, records, status, 1000.0)
    listed = {name: entry["source"] for name, entry in sections["submissions"].items()}
    assert listed == {"mine": "here", "taken-over": "here", "night": "journal", "script": "elsewhere"}
    assert sections["submissions"]["night"]["prompt"] == "prompt of night.1.2", "the journal has no requests at hand"
    assert sections["submissions"]["taken-over"]["prompt"] == "prompt of taken-over.3.4"
    script = sections["submissions"]["script"]
    assert (script["jobs"], script["running"], script["created_at"], script["user"]) == (4, 1, 950, "ann")
    tasks = {name: (task["source"], task["prompt"]) for name, task in sections["tasks"].items()}
    assert tasks == {
        "night/3": ("journal", "prompt of night.1.2-3"),
        "script/0": ("elsewhere", "prompt of script-0"),
    }


def test_a_job_with_an_image_keeps_its_prompt_when_its_pixels_are_released() -> None:
    """The tile of an image that was generated from another one had an id for a name."""
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    request = GenerateRequest(model="shapes", prompt="from an image", image=image)
    mine = HttpSubmission("i", "", "native", 1, lambda: None, False, requests=[request])
    mine.note(ends(0), ())
    assert mine.requests == ()
    sections = submission_sections([mine], {})
    assert sections["ends"]["i/0"]["prompt"] == sections["submissions"]["i"]["prompt"] == "from an image"
    assert EndFilter("from an", "", "").matches(mine, 0)
    assert mine.texts_of(7) == ("", "")
