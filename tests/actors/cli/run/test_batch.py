"""`modelpool batch`: broken lines do not stop the others, and the same command goes on where it stopped."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import NO_BATCHES, SubmittedBatches
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.specs.spec import RunErrorKind
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool, KnownNames, task

FOUR = '{"prompt": "a"}\n{"prompt": "a"}\n{"prompt": "b", "loras": ["light"]}\n{"prompt": "c", "seed": 7}\n'
JOBS = ("jobs.jsonl", "--model", "shapes")
ARGUMENTS = ("batch", "jobs.jsonl", "--out", "p", "--model", "shapes")


@pytest.fixture(autouse=True)
def jobs(command: Command) -> Path:
    """A file of four lines in the folder where the command runs."""
    path = Path("jobs.jsonl")
    path.write_text(FOUR)
    return path


def test_a_batch_makes_every_line_and_a_second_run_none(command: Command) -> None:
    pool = FakePool()
    first = command(*ARGUMENTS, "--json", pool=pool)
    assert first.code == 0
    assert [r.prompt for r in pool.submitted] == ["a", "a", "b", "c"]
    assert len(list(Path("p").glob("*.png"))) == 5, "four images and the contact sheet"

    again = FakePool()
    second = command(*ARGUMENTS, "--json", pool=again)
    assert second.code == 0
    assert again.submitted == []
    assert "4 images are already in p and skipped" in second.err
    key = "index"
    for one, other in zip(sorted(first.objects, key=lambda o: o[key]), second.objects, strict=True):
        assert other == one | {"skipped": True}


def test_a_batch_says_at_the_end_where_each_job_ran_if_it_is_asked(command: Command) -> None:
    """A line a job, in the order of the file; the same in sentences in the manifest and for programs. Forty such lines
    at the end of every batch hid its summary."""
    assert "job 0" not in command(*ARGUMENTS, pool=FakePool()).err
    ended = command(*ARGUMENTS, "--json", "--why", "--again", pool=FakePool())
    told = [line for line in ended.err.splitlines() if line.startswith("job ")]
    assert told[:2] == [
        "job 0: encode gpu-0 (all resident), sample gpu-0 "
        "(upload 4.0 MiB, 1 patch switch, would have waited 2.1 s for gpu-9)",
        "job 1: encode gpu-0 (all resident), sample gpu-1 (all resident)",
    ]
    assert [line.split(":")[0] for line in told] == ["job 0", "job 1", "job 2", "job 3"]
    for made in (ended.objects, OutputFolder(Path("p")).kept().values()):
        for image in made:
            tasks = image["tasks"] if isinstance(image, dict) else image.entry["tasks"]
            assert all("of 1 idle and 1 busy" in task["why"] for task in tasks)


def test_of_very_many_jobs_the_first_are_told(command: Command, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelpool.actors.cli.run.run_jobs.MOST_WHYS", 3)
    ended = command(*ARGUMENTS, "--why")
    assert sum(line.startswith("job ") for line in ended.err.splitlines()) == 3
    assert "... and 1 more job; the manifest lists all" in ended.err


def test_a_batch_goes_on_with_lines_that_are_new_or_whose_image_is_gone(command: Command, jobs: Path) -> None:
    command(*ARGUMENTS)
    next(Path("p").glob("c-7-*.png")).unlink()
    jobs.write_text('{"prompt": "new"}\n' + FOUR)
    pool = FakePool()
    assert command(*ARGUMENTS, pool=pool).code == 0
    assert [r.prompt for r in pool.submitted] == ["new", "c"]


def test_a_image_of_another_recipe_is_not_taken_for_the_wanted_one(command: Command, jobs: Path) -> None:
    """Same prompt and seed, other steps: not the same image."""
    command(*ARGUMENTS)
    jobs.write_text('{"prompt": "c", "seed": 7, "steps": 21}\n')
    pool = FakePool()
    command(*ARGUMENTS, pool=pool)
    assert [r.steps for r in pool.submitted] == [21]


class Batches(FakePool):
    """Chooses a batch size, as a pool does."""

    size, seen = 8, SubmittedBatches()

    def submit_stream(self, *args, batches: SubmittedBatches = NO_BATCHES, **others):
        self.seen = batches
        return super().submit_stream(*args, **others)

    def _recipe(self, request: GenerateRequest) -> Recipe | UserError:
        found = super()._recipe(request)
        if isinstance(found, UserError) or request.batch != "auto":
            return found
        return replace(found, batch=self.size if self.size > 1 else 0, batch_reason="as measured")


def test_lines_have_the_measured_batch_size_and_images_of_others_are_not_made_again(
    command: Command, jobs: Path
) -> None:
    """An image that was made before there were batch sizes, or by another table, is the same image."""
    assert command(*ARGUMENTS, "--batch", "1", pool=FakePool()).code == 0
    pool = Batches()
    jobs.write_text(FOUR + '{"prompt": "d", "batch": 1}\n{"prompt": "e"}\n')
    found = command(*ARGUMENTS, pool=pool)
    assert found.code == 0
    assert [(one.prompt, one.batch) for one in pool.submitted] == [("d", 1), ("e", "auto")]
    assert (pool.seen.sizes, pool.seen.expected) == ((1,), 6)
    assert "4 images are already in p" in found.err
    assert "1 image of shapes at 64x64: 8 images per forward pass, as measured" in found.err
    pool = Batches()
    pool.size = 4
    assert command(*ARGUMENTS, pool=pool).code == 0
    assert pool.submitted == []


def test_of_many_lines_their_number_is_not_told(command: Command, jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It matters for the padding of a few; the first lines of a long file do not wait for the last."""
    monkeypatch.setattr("modelpool.actors.cli.run.batch.FEW_OUTPUTS", 4)
    jobs.write_text('{"prompt": "a", "n": 5}\n')
    pool = Batches()
    assert command(*ARGUMENTS, pool=pool).code == 0
    assert (len(pool.submitted), pool.seen.expected) == (5, 0)


def test_again_makes_everything_again(command: Command) -> None:
    command(*ARGUMENTS)
    pool = FakePool()
    assert command(*ARGUMENTS, "--again", pool=pool).code == 0
    assert len(pool.submitted) == 4


def test_broken_and_refused_lines_are_told_by_number_and_the_others_are_made(command: Command, jobs: Path) -> None:
    """Connection 2 is no request; line 3 names a LoRA that the pool does not have, which only the pool can tell."""
    jobs.write_text('{"prompt": "a"}\n{"promt": "b"}\n{"prompt": "c", "loras": ["ligth"]}\n{"prompt": "d"}\n')
    pool = FakePool()
    ended = command(*ARGUMENTS, "--json", pool=pool)
    assert ended.code == 1
    assert [r.prompt for r in pool.submitted] == ["a", "d"]
    assert sorted(o["prompt"] for o in ended.objects) == ["a", "d"]
    assert "jobs.jsonl:2: unknown field of GenerateRequest 'promt'; did you mean 'prompt'?" in ended.err
    assert "jobs.jsonl:3: unknown LoRA 'ligth'; did you mean 'light'?" in ended.err
    assert "jobs.jsonl: 2 invalid lines, 2 valid" in ended.err, "when the pool has checked all"
    assert re.search(r"^2 images in .*, 2 invalid lines$", ended.err, re.MULTILINE)
    again = command(*ARGUMENTS, pool=FakePool())
    assert again.code == 1
    assert "nothing to generate, 2 invalid lines" in again.err


def test_a_line_without_a_model_needs_the_option(command: Command) -> None:
    ended = command("batch", "jobs.jsonl", "--out", "p")
    assert ended.code == 2
    assert ended.opened == ()
    assert "jobs.jsonl:1: model: missing; this field is required; --model NAME is for all lines" in ended.err


def test_failures_name_their_line(command: Command) -> None:
    def fails(request: GenerateRequest) -> RunErrorKind | None:
        return RunErrorKind.WORKER_LOST if request.prompt == "b" else None

    ended = command(*ARGUMENTS, pool=FakePool(fails=fails))
    assert ended.code == 1
    assert "failed: jobs.jsonl:3: 'b' (seed " in ended.err
    pool = FakePool()
    assert command(*ARGUMENTS, pool=pool).code == 0
    assert [r.prompt for r in pool.submitted] == ["b"], "what failed is made by the same command"


def test_ctrl_c_and_the_same_command_make_every_image_once(command: Command) -> None:
    pool = FakePool()

    def interrupt(index: int) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert pool.jobs[0].wait_cancelled(timeout=30)

    pool.before_each = interrupt
    ended = command(*ARGUMENTS, pool=pool)
    assert ended.code == 130
    assert "Stopped. To resume: modelpool batch jobs.jsonl --out p --model shapes\n" in ended.err
    assert len(OutputFolder("p").finished()) == 2
    rest = FakePool()
    assert command(*ARGUMENTS, pool=rest).code == 0
    assert rest.submitted == pool.submitted[:2]
    assert len(OutputFolder("p").finished()) == 4


@pytest.mark.parametrize("damage", ["empty", "truncated"])
@pytest.mark.parametrize("again", [(), ("--again",)])
def test_a_damaged_file_is_generated_again(command: Command, damage: str, again: tuple[str, ...]) -> None:
    command(*ARGUMENTS)
    path = next(Path("p").glob("c-7-*.png"))
    content = path.read_bytes()
    path.write_bytes(b"" if damage == "empty" else content[:-7])
    pool = FakePool()
    assert command(*ARGUMENTS, *again, pool=pool).code == 0
    assert [request.prompt for request in pool.submitted] == (["a", "a", "b", "c"] if again else ["c"])
    assert path.read_bytes() == content


def test_again_repairs_a_file_that_only_its_content_betrays(command: Command) -> None:
    command(*ARGUMENTS)
    path = next(Path("p").glob("c-7-*.png"))
    content = path.read_bytes()
    path.write_bytes(content[:-60] + bytes(48) + content[-12:])
    assert command(*ARGUMENTS, "--again").code == 0
    assert path.read_bytes() == content


def test_a_line_of_brackets_is_one_invalid_line(command: Command, jobs: Path) -> None:
    jobs.write_text(f"{'[' * 100_000}\n" + FOUR)
    ended = command(*ARGUMENTS)
    assert ended.code == 1
    assert "jobs.jsonl:1: found more than 32 lists or objects in each other" in ended.err
    assert len(OutputFolder("p").finished()) == 4


def test_damaged_lines_of_the_manifest_are_counted_and_cost_only_themselves(command: Command) -> None:
    command(*ARGUMENTS)
    manifest = Path("p/manifest.jsonl")
    lines = manifest.read_text().splitlines()
    manifest.write_text(
        "\n".join(["[" * 100_000, *lines[1:3], lines[3].replace('"steps": 20', '"steps": "20"')]) + "\n"
    )
    pool = FakePool()
    ended = command(*ARGUMENTS, pool=pool)
    assert ended.code == 0
    assert "p/manifest.jsonl: 2 damaged lines skipped, the first at byte 0: found more than 32" in ended.err
    assert len(pool.submitted) == 2
    assert len(OutputFolder("p").finished()) == 4


def test_lost_runs_are_counted_by_worker_and_reason(command: Command) -> None:
    """The images are all there: without this, nobody would notice."""
    lost = task("gpu-1", False, lost=("gpu-0: killed by signal 9",))
    ended = command(*ARGUMENTS, pool=FakePool(sampled=lambda index: lost if index < 2 else task("gpu-1", True)))
    assert ended.code == 0
    assert "lost and repeated: 2 runs, gpu-0: killed by signal 9" in ended.err


def test_the_summary_is_printed_when_the_contact_sheet_cannot_be(command: Command, monkeypatch) -> None:
    def fail(self: OutputFolder) -> Path:
        raise OutputFailed("p: cannot be written (No space left on device)")

    monkeypatch.setattr(OutputFolder, "contact_sheet", fail)
    ended = command(*ARGUMENTS)
    assert "4 images in 12.5 s" in ended.err
    assert "no contact sheet: p: cannot be written (No space left on device)" in ended.err


def ends_before_drawing(command: Command, monkeypatch: pytest.MonkeyPatch, pool: FakePool) -> str:
    """Return what a batch has printed when it begins to draw its contact sheet."""
    drawing, draw = "(drawing)", OutputFolder.contact_sheet

    def noted(self: OutputFolder) -> Path:
        os.write(2, f"{drawing}\n".encode())
        return draw(self)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "contact_sheet", noted)
        before, after = command(*ARGUMENTS, pool=pool).err.split(drawing)
    assert set(after.splitlines()) <= {"", "contact sheet: p/contact_sheet.png", "modelpool: the controller is gone"}
    return before


def test_everything_is_printed_before_the_contact_sheet_is_drawn(command: Command, monkeypatch) -> None:
    """It takes seconds, and was drawn before the command that resumes: a second Ctrl-C then lost that command."""
    summary, place = ends_before_drawing(command, monkeypatch, FakePool()).splitlines()[-2:]
    assert summary.startswith("4 images in 12.5 s")
    assert place == "images: p"


def test_the_command_that_resumes_is_printed_before_the_contact_sheet_is_drawn(command: Command, monkeypatch) -> None:
    pool = FakePool()

    def interrupt(index: int) -> None:
        if index == 2:
            os.kill(os.getpid(), signal.SIGINT)
            assert pool.jobs[0].wait_cancelled(timeout=30)

    def lose(index: int) -> None:
        if index == 1:
            raise PoolLost("the controller is gone")

    pool.before_each = interrupt
    stopped = ends_before_drawing(command, monkeypatch, pool)
    assert stopped.splitlines()[-2:] == ["images: p", f"Stopped. To resume: modelpool {' '.join(ARGUMENTS)}"]
    lost = ends_before_drawing(command, monkeypatch, FakePool(before_each=lose))
    assert lost.splitlines()[-1].endswith(f"To resume: modelpool {' '.join(ARGUMENTS)}")


def test_files_that_could_not_be_written_end_a_batch_with_its_resume_command(command: Command) -> None:
    ended = command(*ARGUMENTS, pool=FakePool(fails=lambda request: RunErrorKind.OUTPUT if request.seed == 7 else None))
    assert ended.code == 1
    assert "output: planted trouble" in ended.err
    assert "Some files could not be written. To resume: modelpool batch jobs.jsonl --out p --model shapes" in ended.err


@pytest.mark.parametrize("command_line", [("batch", *JOBS), ("submit", *JOBS), ("generate", "a")])
def test_a_wrong_url_is_refused_before_a_pool_is_opened(
    command: Command, jobs: Path, command_line: tuple[str, ...]
) -> None:
    for url, reason in (("http://127.0.0.1/x", "cannot be written"), ("s3://key:secret@bucket/x", "without user name")):
        ended = command(*command_line, "--out", url)
        assert (ended.code, ended.opened) == (2, ())
        assert reason in ended.err
        assert "secret" not in ended.err
    if command_line[0] != "submit":  # whose outputs another machine writes
        ended = command(*command_line, "--out", "nosuch://bucket/x")
        assert (ended.code, ended.opened) == (2, ())
        assert "no library reads nosuch://" in ended.err


def test_csv_works_the_same(command: Command) -> None:
    Path("jobs.csv").write_text("prompt,seed\na,1\nb,2\n")
    pool = FakePool()
    assert command("batch", "jobs.csv", "--out", "p", "--model", "shapes", pool=pool).code == 0
    assert [(r.prompt, r.seed) for r in pool.submitted] == [("a", 1), ("b", 2)]


def test_a_file_that_is_not_there_is_one_line_and_no_pool(command: Command) -> None:
    ended = command("batch", "none.jsonl", "--out", "p")
    assert (ended.code, ended.opened) == (2, ())
    assert ended.err == "modelpool: none.jsonl: cannot be read (No such file or directory)\n"


def test_ids_lines_and_names_match_outputs_to_lines_also_when_a_batch_is_resumed(command: Command, jobs: Path) -> None:
    rows = [{"prompt": "a", "id": "first", "metadata": {"row": 1}}, {"prompt": "a"}, {"prompt": "a", "id": "third"}]
    jobs.write_text("\n".join(json.dumps({**row, "seed": 5}) for row in rows))
    ended = command(*ARGUMENTS, "--json", "--name", "{id}", pool=FakePool())
    assert ended.code == 1
    assert "jobs.jsonl:2: id: missing; --name {id} needs it" in ended.err
    found = {one["index"]: one for one in ended.objects}
    assert [(found[i]["id"], found[i].get("metadata"), found[i]["line"]) for i in (0, 1)] == [
        ("first", {"row": 1}, 1),
        ("third", None, 3),
    ]
    jobs.write_text("\n".join(json.dumps({**row, "seed": 5, "id": row.get("id", "second")}) for row in rows))
    pool = FakePool()
    resumed = command(*ARGUMENTS, "--json", pool=pool)
    assert [one.id for one in pool.submitted] == ["second"]
    assert {one["index"]: (one["id"], one["skipped"]) for one in resumed.objects} == {
        0: ("first", True),
        1: ("second", False),
        2: ("third", True),
    }


def test_a_wrong_name_is_refused_before_the_file_is_read(command: Command, jobs: Path) -> None:
    jobs.unlink()
    ended = command(*ARGUMENTS, "--name", "{ids}")
    assert ended.code == 2
    assert "unknown field of --name 'ids'; did you mean 'id'? Known: digest, " in ended.err


def test_a_file_without_a_known_name_starts_no_pool(command: Command, jobs: Path) -> None:
    names = KnownNames("shapes")
    ended = command("batch", "jobs.jsonl", "--out", "p", "--model", "shapse", names=names)
    assert (ended.code, ended.opened) == (2, ())
    assert ended.err.count("unknown model 'shapse'; did you mean 'shapes'") == 1, "a wrong option is reported once"
    jobs.write_text('{"prompt": "a", "model": "shapse"}\n' * 4)
    ended = command("batch", "jobs.jsonl", "--out", "p", names=names)
    assert (ended.code, ended.opened) == (2, ())
    assert ended.err.count("unknown model 'shapse'; did you mean 'shapes'") == 4
    assert "jobs.jsonl: 4 invalid lines, 0 valid" in ended.err
    assert not Path("p").exists()


def test_of_very_many_invalid_lines_the_first_are_printed(
    command: Command, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelpool.actors.cli.run.batch.MOST_REPORTED", 2)
    jobs.write_text("[]\n" * 5 + FOUR)
    ended = command(*ARGUMENTS)
    assert ended.code == 1
    assert [line for line in ended.err.splitlines() if line.startswith("jobs.jsonl:")] == [
        'jobs.jsonl:1: found list, expected an object such as {"model": "shapes", "prompt": "..."}',
        'jobs.jsonl:2: found list, expected an object such as {"model": "shapes", "prompt": "..."}',
        "jobs.jsonl: further invalid lines are only counted",
        "jobs.jsonl: 5 invalid lines, 4 valid",
    ]


def test_a_line_of_several_images_is_one_line(command: Command, jobs: Path) -> None:
    """It was reported and counted once for each image."""
    jobs.write_text(
        '{"prompt": "a", "n": 3}\n{"prompt": "b", "n": 3, "loras": ["ligth"]}\n{"prompt": "c", "model": "x", "n": 3}\n'
    )
    ended = command(*ARGUMENTS, pool=FakePool(), names=KnownNames("shapes"))
    assert ended.err.count("jobs.jsonl:3: unknown model 'x'") == 1
    assert "jobs.jsonl: 2 invalid lines, 1 valid" in ended.err
    assert re.search(r"^3 images in .*, 2 invalid lines$", ended.err, re.MULTILINE)


def test_the_names_of_all_lines_of_a_file_are_checked_before_a_pool_starts(command: Command, jobs: Path) -> None:
    """Only the first line was: the others waited for a pool to tell them."""
    jobs.write_text('{"prompt": "a", "model": "shapse"}\n{"prompt": "b"}\n{"prompt": "c", "model": "portrait"}\n')
    pool = FakePool()
    ended = command(*ARGUMENTS, pool=pool, names=KnownNames("shapes"))
    assert ended.code == 1
    assert [request.prompt for request in pool.submitted] == ["b"]
    assert "jobs.jsonl:1: unknown model 'shapse'" in ended.err
    assert "jobs.jsonl:3: unknown model 'portrait'" in ended.err
    assert ended.err.index("jobs.jsonl:3: ") < ended.err.index("starting the pool")


def test_a_line_far_down_is_reported_when_it_is_read_and_the_others_are_rendered(command: Command, jobs: Path) -> None:
    """Lines are read while the pool starts and runs; a wrong one costs only itself."""
    lines = [f'{{"prompt": "p{n}", "seed": {n}}}' for n in range(20)]
    lines[13] = '{"prompt": "p13", "sed": 13}'
    jobs.write_text("\n".join(lines))
    pool = FakePool()
    ended = command(*ARGUMENTS, "--json", pool=pool)
    assert ended.code == 1
    assert "jobs.jsonl:14: unknown field of GenerateRequest 'sed'; did you mean 'seed'?" in ended.err
    assert "jobs.jsonl: 1 invalid line, 19 valid" in ended.err
    assert [request.seed for request in pool.submitted] == [n for n in range(20) if n != 13]
    assert sorted(one["index"] for one in ended.objects) == list(range(19))


def test_ctrl_c_while_lines_are_being_checked_says_how_to_resume(command: Command) -> None:
    """Nothing was rendered yet: it is no success."""
    pool = FakePool()
    recipes = pool.recipes

    def interrupted(requests: Iterable[GenerateRequest]) -> tuple[Recipe | UserError, ...]:
        os.kill(os.getpid(), signal.SIGINT)
        assert pool.jobs[0].wait_cancelled(timeout=30)
        return recipes(requests)

    pool.recipes = interrupted  # type: ignore[method-assign]
    ended = command(*ARGUMENTS, pool=pool)
    assert ended.code == 130
    assert "Stopped. To resume: modelpool batch jobs.jsonl --out p --model shapes\n" in ended.err


def test_a_folder_that_cannot_be_created_starts_no_pool(command: Command) -> None:
    ended = command("batch", *JOBS, "--out", "jobs.jsonl/p")
    assert (ended.code, ended.opened) == (2, ())
    assert ended.err == "modelpool: jobs.jsonl/p: cannot be written (Not a directory)\n"
