"""`modelpool generate`: what is asked of the pool, what is printed, what is kept, how it ends."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.cli.main import run
from modelpool.actors.cli.run.generate import prompts_and_seeds, resume_command
from modelpool.actors.cli.run.run_jobs import SIMULATED
from modelpool.actors.cli.terminal.session import Session
from modelpool.actors.control.status import PoolStatus
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs import open_outputs
from modelpool.actors.outputs.image_file import read_recipe
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.requests import GenerateRequest, LoraChoice
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import RunErrorKind
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool, KnownNames, pixels_for, recipe_for

CONTROL_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def test_every_option_of_a_image_reaches_the_pool(command: Command) -> None:
    pool = FakePool()
    ended = command(
        "generate", "a red circle", "a blue square", "--model", "shapes", "--lora", "light:0.8", "--lora", "outline",
        "--negative", "blurry", "--steps", "12", "--cfg", "4.5", "--sampler", "dpmpp_2m", "--schedule", "karras",
        "--size", "64x96", "--clip-skip", "1", "--seed", "7", "-n", "2", "--out", "pictures", pool=pool,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert pool.submitted == [
        GenerateRequest(
            model="shapes", prompt=prompt, negative="blurry", seed=seed, steps=12, cfg=4.5, sampler="dpmpp_2m",
            schedule="karras", width=64, height=96, clip_skip=1,
            loras=(LoraChoice(name="light", strength=0.8), LoraChoice(name="outline", strength=1.0)),
        )
        for prompt in ("a red circle", "a blue square")
        for seed in (7, 8)
    ]  # fmt: skip
    assert pool.closed


def test_options_of_a_run_and_loras_that_change_reach_the_pool(command: Command) -> None:
    pool = FakePool()
    ended = command(
        "generate", "x", "--model", "shapes", "--seed", "1", "--lora", "light:0.2@0,1@0.5:interpolation=linear",
        "--lora", "outline:0.8:only=negative", "--option", "rope.scale_x=0.5", "--option", "rope.shift_y=-2", pool=pool,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert pool.submitted == [
        GenerateRequest(
            model="shapes", prompt="x", seed=1, options={"rope": {"scale_x": 0.5, "shift_y": -2}},
            loras=[
                {"name": "light", "keyframes": [[0, 0.2], [0.5, 1]], "interpolation": "linear"},
                {"name": "outline", "strength": 0.8, "only": ["negative"]},
            ],
        )
    ]  # fmt: skip


def test_every_option_about_images_reaches_the_pool(command: Command, tmp_path: Path) -> None:
    pool = FakePool()
    file, mask = tmp_path / "a.png", tmp_path / "m.png"
    Image.new("RGB", (16, 8)).save(file)
    Image.new("L", (16, 8), 255).save(mask)
    ended = command(
        "generate", "x", "--model", "shapes", "--seed", "1", "--image", str(file), "--mask", str(mask),
        "--strength", "0.5", "--no-paste", "--control", f"canny={file}:0.8:0:0.5", "--control", f"depth={file}",
        "--region", "0,0,8,8:2=a square", pool=pool,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    twice = command("generate", "x", "--model", "shapes", "--seed", "1", "--hires", "2:0.5:10", pool=pool)
    assert twice.code == 0, twice.err
    common = {"model": "shapes", "prompt": "x", "seed": 1}
    assert pool.submitted == [
        GenerateRequest(
            **common, image=file, mask=mask, strength=0.5, paste=False, regions=["0,0,8,8:2=a square"],
            controls=[{"model": "canny", "image": file, "strength": 0.8, "end": 0.5}, f"depth={file}"],
        ),
        GenerateRequest(**common, hires={"scale": 2, "strength": 0.5, "steps": 10}),
    ]  # fmt: skip


def test_the_newest_preview_is_kept_in_a_file(command: Command, tmp_path: Path) -> None:
    for name in ("now.webp", "now.png", "now.jpg"):
        ended = command("generate", "x", "--model", "shapes", "--preview", str(tmp_path / name), pool=FakePool())
        assert ended.code == 0, ended.err
        assert Image.open(tmp_path / name).size == (8, 8)
    assert sorted(path.name for path in tmp_path.glob("now*")) == ["now.jpg", "now.png", "now.webp"]
    for wrong, problem in (("now.gif", "ends in .webp, .png"), ("missing/now.png", "a folder that exists")):
        ended = command("generate", "x", "--model", "shapes", "--preview", str(tmp_path / wrong), pool=FakePool())
        assert ended.code == 2
        assert problem in ended.err


def test_a_image_that_is_not_there_is_told_before_a_pool_is_started(command: Command) -> None:
    ended = command("generate", "x", "--image", "nowhere.png")
    assert ended.code == 2
    assert "image: found 'nowhere.png', expected an existing file" in ended.err
    assert not ended.opened


def test_what_is_not_said_is_left_to_the_request(command: Command) -> None:
    pool = FakePool()
    command("generate", "a red circle", "--seed", "1", pool=pool)
    assert pool.submitted == [GenerateRequest(model="shapes", prompt="a red circle", seed=1)]


def test_the_options_of_a_pool_reach_its_opening(command: Command, tmp_path: Path) -> None:
    said = ["--gpus", "2", "--device", "sim", "--vram", "64MiB", "--config", "my.toml"]
    Path("my.toml").write_text("")
    ended = command("generate", "x", *said, "--vram-policy", "low", "--reserve-vram", "1GiB", "--allow-pickle")
    [options] = ended.opened
    assert options.allow_pickle
    assert (options.vram_policy, options.reserve_vram) == ("low", "1GiB")
    assert (options.gpus, options.device, options.vram, options.pool) == (2, "sim", "64MiB", None)
    assert options.config == Path("my.toml")
    assert command("generate", "x", "--pool", "mine").opened[0].pool == "mine"


def test_json_is_one_object_a_image_and_nothing_else_on_stdout(command: Command) -> None:
    ended = command("generate", "a red circle", "a blue square", "--seed", "7", "-n", "2", "--out", "p", "--json")
    assert ended.code == 0
    by_index = {o["index"]: o for o in ended.objects}
    assert [by_index[i]["prompt"] for i in range(4)] == ["a red circle"] * 2 + ["a blue square"] * 2
    assert [by_index[i]["seed"] for i in range(4)] == [7, 8, 7, 8]
    for found in ended.objects:
        assert found.keys() == {
            "index", "job", "prompt", "seed", "path", "sha256", "worker", "seconds", "skipped", "recipe", "tasks",
        }  # fmt: skip
        path = Path(found["path"])
        assert path.parent == Path("p")
        pixels = np.asarray(Image.open(path))
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == found["sha256"]
        assert read_recipe(path).as_json() == found["recipe"] | {"loras": (), "warnings": ()}
        assert found["tasks"][0]["stage"] == "encode"
    assert "4 images in 12.5 s" in ended.err


def test_json_stdout_stays_clean_whatever_else_prints_there(command: Command) -> None:
    def noisy(index: int) -> None:
        print("a library says hello")
        os.write(1, b"and so does C code\n")

    ended = command("generate", "x", "-n", "2", "--json", pool=FakePool(before_each=noisy))
    assert len(ended.objects) == 2
    assert ended.err.count("a library says hello") == 2
    assert ended.err.count("and so does C code") == 2


def test_people_read_stderr_in_plain_lines_where_there_is_no_terminal(command: Command) -> None:
    ended = command("generate", "a red circle", "-n", "2", "--seed", "7", "--out", "p")
    assert ended.out == ""
    assert CONTROL_CODES.search(ended.err) is None
    assert re.search(r"^\[1/2\] a-red-circle-8-[0-9a-f]{8}\.png  gpu-1  3\.0 s$", ended.err, re.MULTILINE)
    assert re.search(r"^\[2/2\] a-red-circle-7-[0-9a-f]{8}\.png  gpu-0  3\.0 s$", ended.err, re.MULTILINE)
    assert re.search(r"^gpu-0 +3 +2 \(67%\) +1 +4\.5 s +4\.0 MiB +0 B +1$", ended.err, re.MULTILINE)
    assert re.search(r"^total +4 +3 \(75%\)", ended.err, re.MULTILINE)
    assert ended.err.endswith("images: p\ncontact sheet: p/contact_sheet.png\n")
    assert Path("p/contact_sheet.png").exists()


def test_simulated_gpus_are_named(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a pool that runs already by its workers; of one that is started, before it is."""

    class OnGpus(FakePool):
        def status(self) -> PoolStatus:
            known = super().status()
            return replace(known, workers=tuple(replace(each, device="NVIDIA L4") for each in known.workers))

    joined = [command("generate", "a", "--pool", "mine", pool=pool).err for pool in (FakePool(), OnGpus())]
    assert [SIMULATED in err for err in joined] == [True, False]
    for is_so in (True, False):
        session = Session((), lambda options: OnGpus(), simulates=lambda options, is_so=is_so: is_so)
        assert run(["generate", "a"], session) == 0
        assert (SIMULATED in capfd.readouterr().err) is is_so


class ChangedPool(FakePool):
    """One with recipes that are `changed`, in turn."""

    def __init__(self, *changed: dict[str, Any]) -> None:
        super().__init__()
        self._changed = changed

    def recipes(self, requests: Iterable[GenerateRequest]) -> tuple[Recipe | UserError, ...]:
        return tuple(
            one if isinstance(one, UserError) else replace(one, **self._changed[place % len(self._changed)])
            for place, one in enumerate(super().recipes(requests))
        )


@pytest.mark.parametrize(
    ("changed", "first", "noun"),
    [
        (({},), "2 images in", "images: p\n"),
        (({"frames": 5, "frame_rate": 8.0, "format": "gif"},), "2 videos in", "videos: p\n"),
        (({"frames": 5, "frame_rate": 1.0},), "2 images in", "images: p\n"),
        (({"seconds": 2.0},), "2 audio clips in", "audio clips: p\n"),
        (({}, {"seconds": 2.0}), "2 files in", "files: p\n"),
    ],
)
def test_what_is_made_is_called_what_it_is(
    command: Command, changed: tuple[dict[str, Any], ...], first: str, noun: str
) -> None:
    ended = command("generate", "a red circle", "-n", "2", "--seed", "7", "--out", "p", pool=ChangedPool(*changed))
    assert ended.code == 0, ended.err
    assert first in ended.err
    assert noun in ended.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "shape"], "unknown model 'shape'; did you mean 'shapes'?"),
        (["--lora", "ligth:1"], "unknown LoRA 'ligth'; did you mean 'light'?"),
        (["--lora", "light:much"], "strength"),
        (["--sampler", "eular"], "did you mean 'euler'?"),
        (["--schedule", "karas"], "did you mean 'karras'?"),
        (["--size", "64x65"], "height: found 65, expected a multiple of 8"),
        (["--size", "64"], "--size: found '64', expected WIDTHxHEIGHT"),
        (["--steps", "-4"], "steps: found -4, expected"),
        (["--cfg", "0"], "cfg: found 0.0, expected"),
        (["--clip-skip", "-1"], "clip_skip: found -1, expected a whole number from 0"),
        (["--seed", "-1"], "seed: found -1, expected"),
        (["\udcff"], "PROMPT: found \"'\\\\udcff'\", expected text in the encoding of the terminal"),
        (["-n", "0"], "-n: found 0, expected a whole number from 1"),
        (["--gpus", "0"], "--gpus: found 0, expected a whole number from 1"),
        (["--pool", "mine", "--gpus", "2"], "--gpus cannot be combined with --pool mine"),
    ],
)
def test_what_a_person_got_wrong_is_one_line_and_exit_code_2(
    command: Command, arguments: list[str], complaint: str
) -> None:
    pool = FakePool()
    ended = command("generate", "a red circle", *arguments, pool=pool)
    assert ended.code == 2
    [line] = [line for line in ended.err.splitlines() if not line.startswith("starting the pool")]
    assert line.startswith("modelpool: ")
    assert complaint in line
    assert pool.submitted == []


def test_unknown_options_and_devices_are_refused_with_the_choices(command: Command) -> None:
    ended = command("generate", "x", "--device", "gpu")
    assert ended.code == 2
    kinds = "auto, cuda, rocm, xpu, mps, npu, mlu, directml, sim, cpu"
    assert kinds in re.sub(r"[\s\u2502]+", " ", ended.err)
    assert command("generate", "x", "--stepz", "3").code == 2
    assert command("generat", "x").code == 2


def test_requests_are_checked_before_a_pool_is_started(command: Command) -> None:
    assert command("generate", "x", "--steps", "0").opened == ()


def test_without_a_model_the_only_one_is_used_and_a_choice_is_asked_for(command: Command) -> None:
    ended = command("generate", "x", pool=FakePool(model_names=("shapes", "portraits")))
    assert ended.code == 2
    assert "--model is required; models of this pool: portraits, shapes" in ended.err


def test_failed_jobs_are_listed_and_the_exit_code_is_1(command: Command) -> None:
    def fails(request: GenerateRequest) -> RunErrorKind | None:
        return RunErrorKind.OUT_OF_VRAM if request.seed == 8 else None

    ended = command("generate", "a red circle", "--seed", "7", "-n", "3", "--json", pool=FakePool(fails=fails))
    assert ended.code == 1
    assert "[2/3] failed: image 1: 'a red circle' (seed 8): out_of_vram: planted trouble" in ended.err
    assert "2 images in 12.5 s" in ended.err
    assert "1 failed" in ended.err
    assert sorted(o["index"] for o in ended.objects) == [0, 2]
    assert "Traceback" not in ended.err


def test_a_mistake_of_ours_is_shown_in_full_once(command: Command) -> None:
    ended = command("generate", "x", "-n", "3", pool=FakePool(fails=lambda request: RunErrorKind.INTERNAL))
    assert ended.code == 1
    assert ended.err.count("Traceback: planted") == 1


def test_an_output_folder_that_cannot_be_written_is_told_before_anything_is_made(command: Command) -> None:
    Path("taken").write_text("")
    pool = FakePool()
    ended = command("generate", "x", "--out", "taken", pool=pool)
    assert ended.code == 2
    assert "taken: cannot be written" in ended.err
    assert pool.submitted == []


def test_a_pool_that_ends_meanwhile_leaves_what_is_finished_and_how_to_go_on(command: Command) -> None:
    """1. Of four images two are finished. 2. The pool is ended by somebody. 3. What is there is on the contact sheet,
    and the command for the others has the seed that was drawn."""

    def end(index: int) -> None:
        if index == 1:
            raise PoolLost("the controller of the pool is gone")

    pool = FakePool(before_each=end)
    ended = command("generate", "a red circle", "-n", "4", "--out", "p", pool=pool)
    assert ended.code == 1
    assert len(list(Path("p").glob("a-red-circle-*.png"))) == 2
    assert "contact sheet: p/contact_sheet.png" in ended.err
    [line] = [line for line in ended.err.splitlines() if line.startswith("The pool has ended; ")]
    assert re.search(rf"To resume: modelpool generate .* --seed {pool.submitted[0].seed} --resume$", line)
    assert ended.err.endswith("modelpool: the controller of the pool is gone\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stop_signal_keeps_what_is_finished_and_says_how_to_resume(command: Command, number) -> None:
    """1. Of four images one is finished. 2. Ctrl-C, or its equal. 3. The jobs are cancelled; the finished image stays.
    4. The command that is printed makes the other three, and no more."""
    pool = FakePool()

    def interrupt(index: int) -> None:
        if index == 2:
            os.kill(os.getpid(), number)
            assert pool.jobs[0].wait_cancelled(timeout=30)

    pool.before_each = interrupt
    before = signal.getsignal(number)
    ended = command("generate", "a red circle", "-n", "4", "--out", "p", pool=pool)
    assert ended.code == 128 + number
    assert signal.getsignal(number) is before
    assert pool.closed
    assert "stopping at the next step" in ended.err
    assert "1 image in 12.5 s" in ended.err
    assert "3 cancelled" in ended.err
    [finished] = Path("p").glob("a-red-circle-*.png")

    [line] = [line for line in ended.err.splitlines() if line.startswith("Stopped. To resume: ")]
    again = re.fullmatch(r"Stopped\. To resume: modelpool (generate 'a red circle' .* --seed \d+ --resume)", line)
    assert again, line
    arguments = again[1].replace("'a red circle'", "CIRCLE").split()
    later = FakePool()
    done = command(*("a red circle" if a == "CIRCLE" else a for a in arguments), "--json", pool=later)
    assert done.code == 0
    assert len(later.submitted) == 3
    assert len(done.objects) == 4
    assert [o["path"] for o in done.objects if o["skipped"]] == [str(finished)]
    assert {r.seed for r in pool.submitted} == {o["seed"] for o in done.objects}


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path: Path) -> None:
    """In a process of its own: the handler of the second Ctrl-C does not come back."""
    import subprocess

    code = (
        "import os, signal\n"
        "from modelpool.actors.cli.terminal.interrupts import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert stop.requested\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr == "modelpool: terminated\n"


def test_resume_leaves_out_what_is_there_and_tells(command: Command) -> None:
    command("generate", "a red circle", "--seed", "7", "-n", "2", "--out", "p")
    pool = FakePool()
    ended = command("generate", "a red circle", "--seed", "7", "-n", "4", "--out", "p", "--resume", "--json", pool=pool)
    assert ended.code == 0
    assert [r.seed for r in pool.submitted] == [9, 10]
    assert "2 images are already in p" in ended.err
    kept = {o["index"]: o for o in ended.objects if o["skipped"]}
    assert sorted(kept) == [0, 1]
    assert (
        kept[0]["sha256"]
        == hashlib.sha256(pixels_for(recipe_for(pool.submitted[0].model_copy(update={"seed": 7})))).hexdigest()
    )
    everything = command("generate", "a red circle", "--seed", "7", "-n", "4", "--out", "p", "--resume", pool=pool)
    assert everything.code == 0
    assert len(pool.submitted) == 2


def test_without_resume_everything_is_made_again(command: Command) -> None:
    pool = FakePool()
    for _ in range(2):
        assert command("generate", "a red circle", "--seed", "7", "--out", "p", pool=pool).code == 0
    assert len(pool.submitted) == 2


def test_every_prompt_gets_the_same_seeds_and_they_never_leave_their_range() -> None:
    assert prompts_and_seeds(["a", "b"], 5, 2) == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]
    assert [seed for _, seed in prompts_and_seeds(["a"], 2**64 - 1, 2)] == [2**64 - 1, 0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generate", "a b"], "modelpool generate 'a b' --seed 5 --resume"),
        (["generate", "a", "--seed", "5"], "modelpool generate a --seed 5 --resume"),
        (["generate", "a", "--seed=5", "--resume"], "modelpool generate a --seed=5 --resume"),
    ],
)
def test_the_way_on_is_the_same_command_with_the_same_seed(arguments: list[str], line: str) -> None:
    assert resume_command(arguments, 5) == line


def test_a_rejected_command_leaves_no_folder_behind(command: Command) -> None:
    """Whether a name is wrong, which is known before a pool starts, or something that only the pool knows."""
    ended = command("generate", "a", "--model", "shapse", "--out", "p/q", names=KnownNames("shapes"))
    assert (ended.code, ended.opened) == (2, ())
    assert "did you mean 'shapes'" in ended.err
    assert not Path("p").exists()
    ended = command("generate", "a", "--lora", "lihgt", "--out", "p/q")
    assert (ended.code, len(ended.opened)) == (2, 1)
    assert not Path("p").exists()


def test_the_only_model_is_found_before_a_pool_starts(command: Command) -> None:
    pool = FakePool(model_names=("shapes", "portraits"))
    ended = command("generate", "a", "--out", "p", pool=pool, names=KnownNames("shapes", "portraits"))
    assert (ended.code, ended.opened) == (2, ())
    assert "--model is required; models of this pool: portraits, shapes" in ended.err
    assert command("generate", "a", "--out", "p", pool=pool, names=KnownNames("portraits")).code == 0
    assert [request.model for request in pool.submitted] == ["portraits"]


def test_an_image_of_another_program_gives_the_settings_and_options_change_them(
    command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "web.txt"
    file.write_text(
        "a barn\nNegative prompt: cows\nSteps: 12, Sampler: DPM++ 2M Karras, CFG scale: 4, Seed: 77, Size: 64x96, "
        "Model: shapes, ADetailer model: faces"
    )
    settings = {"model": "shapes", "negative": "cows", "sampler": "DPM++ 2M Karras", "cfg": 4.0, "width": 64}
    for arguments, changed in (
        ((), {"prompt": "a barn", "steps": 12, "seed": 77}),
        (("a mill", "--steps", "5", "--seed", "1"), {"prompt": "a mill", "steps": 5, "seed": 1}),
    ):
        pool = FakePool()
        ended = command("generate", *arguments, "--like", str(file), pool=pool)
        assert ended.code == 0, ended.err
        assert "ADetailer model: not used" in ended.err
        (request,) = pool.submitted
        assert {name: getattr(request, name) for name in settings} == settings
        assert {name: getattr(request, name) for name in changed} == changed


def test_without_a_prompt_there_is_nothing_to_generate(command: Command) -> None:
    ended = command("generate", "--model", "shapes", pool=FakePool())
    assert (ended.code, "PROMPT: missing, expected a text, or --like FILE" in ended.err) == (2, True)


def test_a_disk_that_is_full_after_the_run_is_no_failure_of_its_images(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code was 2, for "nothing was started", although every image was written."""
    opened = open_outputs.opened_if_exists

    def full_once_it_has_images(address: Path) -> Any:
        if any(Path(address).glob("*.png")):
            raise FolderFailed(f"{address}: cannot be written (No space left on device)")
        return opened(address)

    monkeypatch.setattr(open_outputs, "opened_if_exists", full_once_it_has_images)
    ended = command("generate", "x", "--model", "shapes", "--seed", "1", "--out", "pictures", pool=FakePool())
    assert ended.code == 0, ended.err
    assert "images: pictures" in ended.err
    assert "no contact sheet: pictures: cannot be written (No space left on device)" in ended.err
