"""`modelpool repair` and `modelpool verify`, on a whole pool in this process."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from modelpool.actors.cli.main import run
from modelpool.actors.cli.run.verify import parse_share, sampled
from modelpool.actors.cli.terminal.options import PoolOptions
from modelpool.actors.cli.terminal.session import Session
from modelpool.actors.client.client import ModelPool
from modelpool.actors.outputs.folder import OutputFolder
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.pool.values.core.stage_params import ImagePixels
from tests.actors.cli.conftest import Ended
from tests.actors.fakes import DECODES, HANDS_ON, PAIR, VIDEOS, FakeEngine
from tests.actors.loop_connection import open_pool

MakeEngine = Callable[[], FakeEngine]
OUT = Path("out")


class OtherDevice(FakeEngine):
    """Computes slightly other pixels, as another kind of GPU does."""

    step = 1

    def introduce(self):
        return dataclasses.replace(super().introduce(), device_name="other")

    def run(self, *args, **kwargs):
        result, cost = super().run(*args, **kwargs)
        if isinstance(result, ImagePixels):
            pixels = result.pixels_HWC.astype(int) + self.step
            result = ImagePixels(np.clip(pixels, 0, 255).astype(np.uint8))
        return result, cost


class BrokenDevice(OtherDevice):
    """Claims to be the same, and computes something else."""

    step = 90

    def introduce(self):
        return FakeEngine.introduce(self)


Again = Callable[..., Ended]


@pytest.fixture
def again(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Again:
    """`again("repair", "out")` in a folder of its own; `opened` says whether it needed a pool."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str, engine: MakeEngine = FakeEngine) -> Ended:
        opened: list[PoolOptions] = []

        def open_one(options: PoolOptions) -> ModelPool:
            opened.append(options)
            return open_pool(make_engine=engine)

        capfd.readouterr()
        code = run(list(arguments), Session(arguments, open_one))
        captured = capfd.readouterr()
        return Ended(code, captured.out, captured.err, tuple(opened))

    return run_command


def fill(requests: list[GenerateRequest]) -> dict[str, bytes]:
    """Generate into the folder; return its files with their content."""
    with open_pool() as pool:
        summary = pool.submit(requests, output=OUT).wait(60)
    assert summary.succeeded == len(requests)
    return {path.name: path.read_bytes() for path in files()}


def files() -> list[Path]:
    return sorted(path for path in OUT.iterdir() if path.suffix in (".png", ".gif", ".wav"))


def request(seed: int = 1, **fields) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": f"a {seed}", "seed": seed, "steps": 4, **fields})


def image_file(name: str, value: int = 200) -> str:
    Image.fromarray(np.full((64, 64, 3), value, np.uint8)).save(name)
    return name


def every_kind() -> list[GenerateRequest]:
    """Requests of every kind that a recipe can lead back to."""
    source = image_file("source.png")
    return [
        request(1, negative="n", loras=["light:0.5", "thick"], cfg=3, sampler="ddim", schedule="karras", clip_skip=1),
        request(2, width=64, height=72),
        request(3, image=source, strength=0.6),
        request(4, image=source, steps=7, strength=0.3),
        request(5, image=source, mask=image_file("mask.png", 255), strength=1.0),
        request(6, hires="2:0.5:10", regions=["0,0,32,32:0.5=x"]),
        request(7, image=source, strength=0.5, controls=["canny:0.5:0:0.8", f"depth={image_file('depth.png', 9)}"]),
        request(8, model=VIDEOS, frames=5, frame_rate=4, format="gif"),
        request(9, model=PAIR, low_noise="2:0.5", loras=["light:1:low"]),
        request(10, model=HANDS_ON, width=128, height=128, decoder=f"{DECODES}:3:1.5"),
    ]


def test_repair_generates_exactly_what_is_missing_or_damaged(again: Again) -> None:
    """Of every kind of request: the same bytes as before, and the undamaged files are not touched."""
    content = fill([*every_kind(), *(request(seed) for seed in range(20, 23))])
    kept = files()[-1]
    stamp = kept.stat().st_mtime_ns
    for place, path in enumerate(files()[:-1]):
        damaged = (None, b"", path.read_bytes()[:-9], path.read_bytes()[:-40] + bytes(40))[place % 4]
        path.unlink() if damaged is None else path.write_bytes(damaged)
    ended = again("repair", "out")
    assert ended.code == 0, ended.err
    assert {path.name: path.read_bytes() for path in files() if path.name != "contact_sheet.png"} == content
    assert kept.stat().st_mtime_ns == stamp
    assert list(OutputFolder(OUT).damaged()) == []
    second = again("repair", "out")
    assert (second.code, second.opened) == (0, ()), "nothing to do needs no pool"


def test_every_command_reads_and_writes_an_object_store(again: Again) -> None:
    """A batch, the same batch again, repair, verify and inspect, with a URL in place of the folder."""
    url = f"memory://{uuid.uuid4().hex}/outputs"
    Path("jobs.jsonl").write_text("".join(f'{{"prompt": "a {n}", "model": "shapes", "steps": 4}}\n' for n in range(4)))
    batch = ("batch", "jobs.jsonl", "--out", url, "--json")
    first = again(*batch)
    assert first.code == 0, first.err
    assert f"images: {url}" in first.err
    paths = [one["path"] for one in sorted(first.objects, key=lambda one: one["index"])]
    assert all(path.startswith(f"{url}/a-") for path in paths)
    objects = ObjectPrefix(url)
    content = {name: objects.read_one(name) for name in objects.sizes()}
    second = again(*batch)
    assert "4 images are already in" in second.err
    assert [one["path"] for one in second.objects] == paths
    assert {name: objects.read_one(name) for name in objects.sizes()} == content
    assert again("verify", url).code == 0

    names = [path.rpartition("/")[2] for path in paths]
    objects.remove([names[0]])
    objects.replace(names[1], b"not an image")
    damaged = again("verify", url, "--sample", "0")
    assert damaged.code == 1
    assert f"{paths[0]}: missing" in damaged.err
    repaired = again("repair", url)
    assert repaired.code == 0, repaired.err
    assert {name: objects.read_one(name) for name in objects.sizes()} == content
    inspected = again("inspect", paths[2], "--json")
    assert inspected.objects[0]["kind"] == "image"
    assert again("inspect", f"{url}/nothing.png").code == 2


def test_repair_moves_damaged_lines_away_and_lists_complete_files_again(again: Again) -> None:
    """The files say what they are: nothing is generated."""
    content = fill([request(seed) for seed in (1, 2, 3)])
    manifest = OUT / "manifest.jsonl"
    lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join([lines[0], "[" * 100_000, lines[2][:50]]) + "\n")
    dry = again("repair", "out", "--dry-run")
    assert dry.code == 1
    assert "2 damaged lines skipped" in dry.err
    ended = again("repair", "out")
    assert (ended.code, ended.opened) == (0, ()), ended.err
    assert "2 lines moved to manifest.damaged, 2 complete files listed again" in ended.err
    assert len((OUT / "manifest.damaged").read_text().splitlines()) == 2
    out = OutputFolder(OUT)
    assert out.damaged_line_count == 0
    assert {path.name for path in out.finished().values()} == set(content)
    assert again("verify", "out").code == 0


def test_repair_says_what_it_cannot_generate_again(again: Again) -> None:
    """An input that is gone or changed, and one that never was a file."""
    requests = [request(1, image=image_file("a.png")), request(2, image=image_file("b.png")), request(4)]
    fill([*requests, request(3, image=np.full((64, 64, 3), 3, np.uint8))])
    for path in files():
        path.unlink()
    Path("a.png").unlink()
    image_file("b.png", 17)
    ended = again("repair", "out")
    assert ended.code == 1
    assert "the input a.png is in none of these folders" in ended.err
    assert "another output: pictures.image_sha256 would differ" in ended.err
    assert "it came from the memory of a program" in ended.err
    (repaired,) = (path for path in files() if path.name != "contact_sheet.png")
    assert repaired.name.startswith("a-4-4-")


def test_repair_and_verify_need_an_output_folder(again: Again) -> None:
    Path("other").mkdir()
    for command in ("repair", "verify"):
        ended = again(command, "other")
        assert ended.code == 2
        assert "expected an output folder, with a manifest.jsonl" in ended.err
        assert list(Path("other").iterdir()) == [], "nothing is created in a folder that is not ours"


def test_options_that_contradict_each_other_are_refused_before_files_are_looked_at(again: Again) -> None:
    """`repair` moved lines of the manifest away first."""
    for command in (["repair"], ["repair", "--dry-run"], ["verify", "--sample", "0"]):
        ended = again(*command, "missing", "--pool", "mine", "--gpus", "2")
        assert (ended.code, ended.opened) == (2, ())
        assert "--gpus cannot be combined with --pool mine" in ended.err


def test_the_outputs_of_a_submission_are_found_by_its_id(
    again: Again, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fill([request(1), request(2)])

    class Running:
        """A pool that knows one submission."""

        def __enter__(self) -> Running:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def attach(self, jobs_id: str) -> SimpleNamespace:
            if jobs_id != "batch-1":
                raise UserError(f"no submission {jobs_id!r}")
            record = SimpleNamespace(output=str(tmp_path / OUT))
            return SimpleNamespace(progress=lambda: SimpleNamespace(record=record))

    for command in (["verify", "--sample", "0"], ["repair"]):
        for name, code, text in (
            ("batch-1", 0, "2 "),
            ("batch-2", 2, "DIR_OR_ID: found 'batch-2', expected an output"),
        ):
            arguments = [*command, name, "--pool", "mine"]
            assert run(arguments, Session(arguments, lambda options: Running())) == code  # type: ignore[arg-type]
            assert text in capfd.readouterr().err


def test_verify_finds_equal_pixels_of_every_kind(again: Again) -> None:
    fill(every_kind())
    ended = again("verify", "out", "--json")
    assert ended.code == 0, ended.err
    assert {line["agreement"] for line in ended.objects} == {"equal"}
    assert len(ended.objects) == len(every_kind())


def test_verify_allows_a_tolerance_on_another_device_and_none_on_the_same(again: Again) -> None:
    fill([request(seed) for seed in (1, 2)])
    other = again("verify", "out", engine=OtherDevice)
    assert other.code == 0, other.err
    # one line for files that differ equally
    near = re.findall(r"(\d) files?: within tolerance \(mean (?:1\.0|0\.99)", other.err)
    assert sum(map(int, near)) == 2, other.err
    assert "other device (fake; now other)" in other.err
    broken = again("verify", "out", engine=BrokenDevice)
    assert broken.code == 1
    assert "different" in broken.err
    assert "on the same devices with the same versions, weights and settings" in broken.err


def test_verify_knows_how_many_gpus_the_scheduler_chose(again: Again) -> None:
    """The listed number is repeated; where this pool has another one, that is told."""
    fill([request(1, cfg=3, gpus="auto")])
    equal = again("verify", "out")
    assert equal.code == 0, equal.err
    assert "1 file: equal\n" in equal.err
    assert "numbers of GPUs" not in equal.err
    manifest = OUT / "manifest.jsonl"
    line = json.loads(manifest.read_text())
    (sample,) = [task for task in line["tasks"] if task["gpus"]]
    assert sample["gpus"] == [1]
    sample["gpus"] = [8]  # more than this pool has: again as many as it finds worth it
    manifest.write_text(json.dumps(line) + "\n")
    other = again("verify", "out")
    assert other.code == 0, other.err
    assert "other numbers of GPUs (8; now 1)" in other.err


def test_verify_names_versions_and_weights_that_differ(again: Again) -> None:
    fill([request(1)])
    manifest = OUT / "manifest.jsonl"
    line = json.loads(manifest.read_text())
    line["recipe"]["versions"] = {"torch": "1.0"}
    line["recipe"]["computed_by"] = {"products": "auto"}
    line["recipe"]["model_sha256"] = "0" * 64
    manifest.write_text(json.dumps(line) + "\n")
    ended = again("verify", "out", engine=OtherDevice)
    assert ended.code == 0
    for part in (
        "device (fake; now other)",
        "torch 1.0; now ",
        "weights (model 0000000000; now ",
        "settings (products auto; now default)",
    ):
        assert part in ended.err


def test_verify_names_an_input_that_has_changed(again: Again) -> None:
    """Found by trying: another image under the name of an input was a difference "on the same devices with the same
    versions, weights and settings"."""
    fill([request(1, image=image_file("a.png"), strength=0.5)])
    image_file("a.png", 17)
    ended = again("verify", "out", engine=BrokenDevice)
    assert ended.code == 1
    assert "other pictures.image_sha256 of the request" in ended.err
    assert "on the same devices" not in ended.err


def test_verify_fails_for_damaged_files_without_generating_them(again: Again) -> None:
    fill([request(seed) for seed in (1, 2)])
    files()[0].write_bytes(b"")
    ended = again("verify", "out", "--sample", "0")
    assert (ended.code, ended.opened) == (1, ())
    assert "damaged: found 0 bytes" in ended.err
    assert "1 complete file, 1 damaged file" in ended.err


def test_a_sample_is_a_share_rounded_up_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    entries = list(range(41))
    assert parse_share("5%") == parse_share("0.05") == 0.05
    assert len(sampled(entries, 0.05, 0)) == 3  # type: ignore[arg-type]
    assert sampled(entries, 0.2, 1) == sampled(entries, 0.2, 1) != sampled(entries, 0.2, 2)  # type: ignore[arg-type]
    assert sampled(entries, 1.0, 0) == entries  # type: ignore[arg-type]
    assert sampled([], 0.5, 0) == []
    for text in ("6", "-1%", "nan", "many", "101%"):
        with pytest.raises(UnusableField, match="--sample"):
            parse_share(text)
