"""The GPU benchmark on machines without one: it keeps results when parts crash or hang, and its parts run on the CPU.

Proves: a part that crashes or hangs ends alone, what it measured stays, and the rest runs in its time; the random
models have the published numbers of parameters, and engine and diffusers both run them; the engine and the tests for
GPUs need none of the packages that a GPU machine may lack, and not the plugins of the other tests.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.full_size import FULL_SIZE, MODEL, TEXT, write_model
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import calibration, model_switch, overlap, sampling, shared_runs, soak, tiny_models, worker_memory
from benchmarks.gpu.__main__ import COMMANDS, PARTS, Part, run_parts, seconds_for, write_results
from benchmarks.gpu.calibration import Calibration
from benchmarks.gpu.device_facts import cores_of, node_of
from benchmarks.gpu.engine_jobs import EngineJobs, Extent, open_engine
from benchmarks.gpu.figures import FIGURES, OTHER_FIGURES, missing_figures
from benchmarks.gpu.gang_exchange import exchange_between
from benchmarks.gpu.measurements import Measurement, OutOfTime, Record, read_measurements
from benchmarks.gpu.part import part_named
from benchmarks.gpu.setting import Setting
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.compiled_blocks import BlockCompiler
from tests.architecture.source_tree import ROOT

#: parameters of the published models; source: their model cards and files
PARAMETERS = {
    ("sd15", MODEL): 859_520_964,
    ("sdxl", MODEL): 2_567_463_684,
    ("flux", MODEL): 11_901_408_320,
    ("flux", f"{TEXT}t5xxl."): 4_762_310_656,
    ("wan", MODEL): 1_418_996_800,
}
#: packages that the engine does not need
ABSENT = ("ray", "av", "pydantic", "typer", "rich", "comfy_kitchen", "gguf", "pynvml", "matplotlib")
#: runs a module with these packages missing
WITHOUT = f"""
import importlib.util, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {ABSENT!r} else find_spec(name, package)
"""


def test_a_part_that_crashes_or_hangs_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = '{"part": "%s", "name": "first", "value": 1.5, "unit": "s", "is_met": true}'
    models = tmp_path / "models"
    leaves = f"import os; os.makedirs({str(models / 'flux')!r}); "
    codes = {
        "crashes": "import os; os.abort()",
        "hangs": leaves + "import time; time.sleep(600)",
        "works": "",
    }

    def command_of(part: Part, part_ends_at: float, rows_path: Path) -> Sequence[str]:
        first = f"open({str(rows_path)!r}, 'a').write({row % part.name!r} + chr(10))\n"
        return [sys.executable, "-S", "-c", first + codes[part.name]]

    monkeypatch.setattr(command, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.0)
    parts = [Part("crashes", 1), Part("hangs", 1), Part("works", 8)]
    models.mkdir()
    run_parts(parts, 20 / 60, tmp_path, models, command_of)
    assert not list(models.iterdir()), "the models of a part that was ended take memory from the others"
    results = json.loads((tmp_path / "results.json").read_text())
    assert [part["outcome"].split()[0] for part in results["parts"]] == ["exit", "ended", "done"]
    table = (tmp_path / "table.md").read_text()
    assert table.count("| first | 1.5 s |") == 3, "what they measured before is in the table"
    assert "Not met or failed: crashes: the whole part; hangs: the whole part." in table
    run_parts([Part("works", 1)], 0.1 / 60, tmp_path, models, command_of)
    assert "skipped: out of time" in (tmp_path / "table.md").read_text()


def test_an_interrupted_run_keeps_its_results_and_ends_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by an interrupted run: the part that was under way went on, with the device and its models."""
    children = []
    wait = subprocess.Popen.wait

    def interrupted(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None and len(children) == 1:
            children.append(child)
            raise KeyboardInterrupt
        children.append(child)
        return wait(child, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)

    def command_of(part: Part, part_ends_at: float, rows_path: Path) -> Sequence[str]:
        return [sys.executable, "-S", "-c", "" if part.name == "first" else "import time; time.sleep(600)"]

    (tmp_path / "models").mkdir()
    with pytest.raises(KeyboardInterrupt):
        run_parts([Part("first", 1), Part("second", 1)], 1, tmp_path, tmp_path / "models", command_of)
    assert children[1].returncode == -signal.SIGKILL
    assert [part["part"] for part in json.loads((tmp_path / "results.json").read_text())["parts"]] == ["first"]


def test_a_part_needs_the_packages_of_its_own_module_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in an audit: all parts failed on a machine that lacked what one of them imports."""
    for module in ("tiny_models", "worker_memory", "pool_jobs"):
        monkeypatch.setitem(sys.modules, f"benchmarks.gpu.{module}", None)
    for part in PARTS:
        if part.name in ("zoo", "families", "precision", "memory", "pool"):
            with pytest.raises(ImportError):
                part_named(part.name)
        else:
            assert callable(part_named(part.name)), part.name


def test_every_part_has_its_share_and_what_is_left_over() -> None:
    for parts in COMMANDS.values():
        first = seconds_for(parts[0], parts[1:], 570)
        assert 0 < first < 570 / 2
        assert seconds_for(parts[-1], (), 33) == 33
    small, rest = Part("small", 0.1), (Part("large", 9.9),)
    assert [seconds_for(small, rest, left, 60.0) for left in (1000.0, 100.0)] == [60.0, 25.0]
    assert seconds_for(rest[0], (small,), 1000.0, 60.0) == 990.0
    assert {part.name.partition(" ")[2] for part in PARTS} - {""} == FULL_SIZE.keys()


def test_a_part_that_takes_longer_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: parent and child counted time differently, the child from when it had imported everything, so
    that parts were ended with no figure."""
    monkeypatch.setattr(command, "LEAST_SECONDS", 0.1)
    ends: list[float] = []

    def command_of(part: Part, part_ends_at: float, rows_path: Path) -> Sequence[str]:
        ends.append(part_ends_at - time.monotonic())
        late = f"import time; time.sleep(max(0, {part_ends_at} - time.monotonic()) + 0.1); "
        row = json.dumps(asdict(Measurement(part.name, "late", 1.0)))
        return [sys.executable, "-S", "-c", late + f"open({str(rows_path)!r}, 'a').write({row!r} + chr(10))"]

    (tmp_path / "models").mkdir()
    monkeypatch.setattr(command, "END_SECONDS", 0.0)
    run_parts([Part("late", 1), Part("last", 3)], 10 / 60, tmp_path, tmp_path / "models", command_of)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [part["outcome"] for part in results["parts"]] == ["done", "done"]
    assert len(results["measurements"]) == 2
    assert 1 < ends[0] < 2.5, "a quarter of the time but for the end of the run"
    assert ends[1] < 7, "the time of the first part is not given again"


def test_each_figure_of_a_visit_has_measurements_of_that_name() -> None:
    """By the text of the parts: a figure of which nothing has the name would be missing after the visit."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks" / "gpu").glob("*.py")
                   if path.name != "figures.py")  # fmt: skip
    assert len(FIGURES) == 15
    begins = [begin for figure in (*FIGURES, *OTHER_FIGURES) for begin in figure.begins]
    for begin in begins:
        pattern = re.escape(begin).replace("flux_dev", "{name}").replace("wan_t2v", "{name}")
        assert re.search(pattern.replace(r"\{", "{").replace(r"\}", "}"), text), begin
    kinds = {part.name.partition(" ")[0] for part in PARTS} | {part.name for part in PARTS}
    assert {part for figure in (*FIGURES, *OTHER_FIGURES) for part in figure.parts} <= kinds


def test_each_figure_has_a_row_with_its_target_and_why_it_was_not_measured(tmp_path: Path) -> None:
    """In the table that a command writes. Found in a review: a figure of a part that had crashed, or of another
    command, was not there, and none had its target."""
    rows_path = tmp_path / "rows.jsonl"
    for row in (
        Measurement("device", "asking for free memory", 12.0, "us"),
        Measurement("device", "context of a process", note="skipped: only on CUDA"),
        Measurement("device", "workspaces of one stream", 64.0, "MiB", 32.0, "never above", False),
        Measurement("device", "link with 1 fill thread", None, is_met=False, note="RuntimeError: it broke"),
        Measurement("transfers", "the whole part", is_met=False, note="exit status -6; see log.txt"),
        Measurement("memory", "the whole part", note="skipped: out of time"),
    ):
        command._append(rows_path, row)
    ran = [{"part": part, "seconds": 1.0, "of_seconds": 2.0, "outcome": "done", "load": 4.0}
           for part in ("device", "transfers")]  # fmt: skip
    write_results(rows_path, tmp_path, ran)
    page = (tmp_path / "table.md").read_text()
    lines = [line for line in page.partition("## Figures")[2].splitlines() if line.startswith("| ")]
    by_title = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert [figure.title for figure in FIGURES if figure.title not in by_title] == []
    for figure in FIGURES:
        assert figure.target in by_title[figure.title], figure.title
        is_measured = figure.title == "Cost of asking for free memory"
        assert ("not measured: " in by_title[figure.title]) is not is_measured, figure.title
    for title, said in (
        ("Cost of asking for free memory", "device, asking for free memory: 12 us"),
        ("Context and workspaces", "| NO | device, workspaces of one stream: 64 (32) MiB; "
         "not measured: context of a process: only on CUDA"),
        ("Link by number of fill threads and NUMA node", "link with 1 fill thread: RuntimeError: it broke"),
        ("Pinned pages of a file", "not measured: transfers: exit status -6"),
        ("Host memory of 1, 2 and 4 workers", "not measured: memory: out of time"),
        ("Attention by kernel and shape", "not measured: part of command sampling"),
    ):  # fmt: skip
        assert said in by_title[title], by_title[title]
    assert "| device | 1.0 | 2.0 | done | 4.0 |" in page


def test_a_slow_machine_gets_more_time_for_what_cannot_be_interrupted(tmp_path: Path) -> None:
    """Found in runs under load: compiling was begun with the time that an idle machine needs, and killed."""
    assert Calibration(0.1, 0.1).slowness == Calibration().slowness == 1.0, "never less than planned"
    assert Calibration(3 * calibration.COMPUTE_SECONDS).slowness == pytest.approx(3.0)
    slow = calibration.measure({}, tmp_path)
    assert slow.slowness == calibration.MOST_SLOWNESS, "one that does not answer is as slow as any"
    assert command._least_seconds(slow) > command._least_seconds(Calibration()) >= command.LEAST_SECONDS
    setting = Setting("cuda", False, Path(), Path(), slowness=2.0)
    assert (setting.least(10.0), replace(setting, device="cpu").least(10.0)) == (20.0, 0.0)


def test_members_of_a_gang_measure_their_exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes over gloo; and on a machine with one GPU, each measurement says why it is missing."""
    found = exchange_between(2, "cpu", 1 << 16)
    assert [each.error for each in found] == ["", ""]
    assert all(each.forming_seconds > 0 and each.bytes_per_second > 0 for each in found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rows_path = tmp_path / "rows.jsonl"
    shared_runs.run(Record.of_seconds(rows_path, "gangs", 60), Setting("cuda", False, tmp_path, tmp_path))
    rows = read_measurements(rows_path)
    begins = [begin for figure in OTHER_FIGURES if figure.parts == ("gangs",) for begin in figure.begins]
    assert not set(begins) & set(missing_figures(rows))
    assert {row.note for row in rows} == {"skipped: needs several GPUs, found 1"}


def test_processors_and_the_node_of_a_device_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x81, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert node_of(torch.device("cuda", 0), tmp_path) == "", "the system does not tell"
    (tmp_path / "0000:81:00.0").mkdir()
    (tmp_path / "0000:81:00.0" / "numa_node").write_text("1\n")
    assert node_of(torch.device("cuda", 0), tmp_path) == "1"
    assert node_of(torch.device("cpu"), tmp_path) == ""
    assert cores_of("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cores_of("\n") == set()


def test_errors_are_rows_and_a_part_stops_in_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record = Record.of_seconds(path, "one", 60)
    with record.attempting("it fails"):
        raise ValueError("because")
    with pytest.raises(RuntimeError, match="illegal"), record.attempting("the context is lost"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(OutOfTime), Record.of_seconds(path, "two", 5).attempting("too late", least_seconds=10):
        raise AssertionError("this does not run")
    with path.open("a") as file:
        file.write('{"part": "cut o')
    failed, lost, late = read_measurements(path)
    assert failed == Measurement("one", "it fails", is_met=False, note="ValueError: because")
    assert (lost.is_met, late.note) == (False, "skipped: out of time")


def test_random_models_have_the_published_sizes() -> None:
    counts = {
        (name, prefix): sum(
            math.prod(shape)
            for key, (dtype, shape) in FULL_SIZE[name].entries(False).items()
            if key.startswith(prefix) and dtype is not torch.int64
        )
        for name, prefix in PARAMETERS
    }
    assert counts == PARAMETERS


@pytest.mark.parametrize("name", ["flux_fp8", "wan"])
def test_random_models_open_as_published_ones(name: str, tmp_path: Path) -> None:
    engine = open_engine("cpu")
    jobs = EngineJobs(write_model(name, tmp_path, small=True), engine)
    assert jobs.family.name == {"flux_fp8": "flux_dev", "wan": "wan_t2v"}[name]
    weights = engine.patcher(jobs.model, Role.DIFFUSION_MODEL).module.state_dict().values()
    stored = torch.float8_e4m3fn if name == "flux_fp8" else torch.bfloat16
    assert {weight.dtype for weight in weights if weight.dim() == 2} == {stored}
    assert [len(text.context_LD) > 0 for text in jobs.texts()] == [True] * (1 if name == "flux_fp8" else 2)
    engine.close()


@pytest.mark.nightly(usually="tests/benchmarks/test_gpu.py")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_same_code_runs_on_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling against diffusers' pipeline on the CPU, and an architecture on the simulated device."""
    monkeypatch.setattr(sampling, "TURNS", 1)
    monkeypatch.setattr(sampling, "BATCHES", (2,))
    monkeypatch.setattr(tiny_models, "FEW", 1)
    monkeypatch.setattr(model_switch, "TURNS", 1)
    few = {name: chosen for name, chosen in sampling.SETTINGS.items() if "compiles" not in chosen}
    monkeypatch.setattr(sampling, "SETTINGS", few)
    rows_path = tmp_path / "rows.jsonl"
    record, setting = Record.of_seconds(rows_path, "sampling", 600), Setting("cpu", True, tmp_path, tmp_path)
    sampling.run(record, setting, "sdxl")
    sampling.run_more(record, setting, "sdxl")
    extent, compiler = Extent(64, 64, 2), BlockCompiler()
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    monkeypatch.setattr(BlockCompiler, "open", lambda *settings: compiler)
    path, engine = setting.model_file("sdxl"), open_engine("cpu")
    texts = EngineJobs(path, engine).texts()
    engine.close()
    sampling.measure_compiled(record, setting, path, extent, texts, 1)
    on_sim = Setting("sim", True, tmp_path, tmp_path)
    tiny_models.compare_zoo(Record.of_seconds(rows_path, "zoo", 600), on_sim)
    model_switch.run(Record.of_seconds(rows_path, "switch", 600), on_sim)
    overlap.run(Record.of_seconds(rows_path, "overlap", 600), on_sim, "sdxl")
    rows = {row.name: row for row in read_measurements(rows_path)}
    errors = [row for row in rows.values() if "Error" in row.note]
    assert errors == []
    for name in (
        "engine relative to diffusers eager",
        "sampling with half of the weights resident",
        "sampling in a batch of 2, per image",
        "engine compiled relative to diffusers compiled",
        "diffusers hotswap of a LoRA",
        "SDXL, float16 during that load",
        "images per second, decodes overlapping sampling",
        *(f"sampling, {name}" for name in few),
    ):
        assert (rows[name].value or 0) > 0, name
    assert [kind.__name__ for kind in compiler._compiled] == ["BasicTransformerBlock"]
    assert rows["peak reserved memory"].note == "skipped: only on CUDA"
    assert rows["largest difference of pixels"].is_met
    assert rows["auraflow, float32 with streamed float16 weights"].is_met
    judged = [row.name for row in rows.values() if row.part == "sampling" and row.is_met is not None]
    assert judged == [], "times of a CPU say nothing about a GPU"


def test_a_model_is_written_once_and_only_if_it_is_complete(tmp_path: Path) -> None:
    setting = Setting("cpu", True, tmp_path, tmp_path)
    path = setting.model_file("sd15")
    written = path.stat().st_mtime_ns
    assert setting.model_file("sd15").stat().st_mtime_ns == written
    (path.parent / "written").unlink()  # a part was ended while it wrote
    path.write_bytes(b"half of it")
    assert setting.model_file("sd15").stat().st_size > 1000


def test_models_of_later_parts_are_kept(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()

    def command_of(part: Part, part_ends_at: float, rows_path: Path) -> Sequence[str]:
        make = f"import pathlib, sys; m = pathlib.Path({str(models)!r}); "
        check = {"a": "", "b": "sys.exit(not (m / 'sdxl').exists())", "c": "sys.exit((m / 'sdxl').exists())"}
        return [sys.executable, "-S", "-c", make + "(m / 'sdxl').mkdir(exist_ok=True)" * (part.name == "a")
                + check[part.name]]  # fmt: skip

    run_parts([Part("a", 1, ("sdxl",)), Part("b", 1, ("sdxl",)), Part("c", 1)], 1, tmp_path, models, command_of)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [part["outcome"] for part in results["parts"]] == ["done"] * 3


def test_host_memory_of_several_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes load the same file, and measure themselves while both hold it."""
    monkeypatch.setattr(worker_memory, "COUNTS", (2,))
    setting = Setting("cpu", True, tmp_path, tmp_path)
    worker_memory.run(Record.of_seconds(tmp_path / "rows.jsonl", "memory", 300), setting)
    _, row = read_measurements(tmp_path / "rows.jsonl")
    assert row.name == "host memory of the weights with 2 workers"
    assert 1.0 <= (row.value or 0) < 1.5, row
    private = {"pss_bytes": 60, "anonymous_bytes": 5, "device_bytes": 0}
    assert worker_memory.copies_of([private, private], 100)[0] == 1.3
    assert worker_memory.copies_of([{**private, "device_bytes": 5}], 100)[0] == 1.0


def test_many_jobs_with_changing_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that looks for leaks runs on the simulated device, names what fails, and sees growth."""
    monkeypatch.setattr(soak, "JOBS", 9)
    monkeypatch.setattr(soak, "JOBS_PER_ROUND", 3)
    monkeypatch.setattr(soak, "SIDES", (64,))
    rows_path = tmp_path / "rows.jsonl"
    setting = Setting("sim", True, tmp_path, tmp_path)
    soak.run(Record.of_seconds(rows_path, "soak", 600), setting)
    rows = {row.name: row for row in read_measurements(rows_path)}
    assert rows["jobs"].value == 9
    assert rows["jobs"].is_met, rows["jobs"].note
    assert "growth of private host memory" in rows
    monkeypatch.setattr(soak, "one_job", lambda *rest: "RuntimeError: it broke")
    soak.run(Record.of_seconds(rows_path, "broken", 600), setting)
    broken = [row for row in read_measurements(rows_path) if row.part == "broken" and row.name == "jobs"]
    assert [row.is_met for row in broken] == [False]
    level, growing = [900, 100, 100, 101, 99, 100, 100, 101, 100], [100 * n for n in range(9)]
    assert soak.growth_bytes(level) <= 1 < 200 <= soak.growth_bytes(growing)


def test_the_engine_needs_no_package_of_the_pool_above_it() -> None:
    """From a plain source tree on a GPU machine without ray, av, pydantic, comfy-kitchen and gguf: the engine, the
    catalog and the tests for GPUs are imported, without the configuration and the plugins of the other tests."""
    code = WITHOUT + (
        "import modelpool.pool.engine.engine, modelpool.pool.engine.explicit_control\n"
        "from benchmarks.gpu.__main__ import PARTS\n"
        "from benchmarks.gpu.part import part_named\n"
        "assert all(callable(part_named(part.name)) for part in PARTS)\n"
        "import pytest\n"
        "ended = pytest.main(['-c', '/dev/null', '--rootdir', '.', '--noconftest', '--import-mode=importlib', '-q',\n"
        "    '-p', 'no:cacheprovider', '--collect-only', 'tests/gpu'])\n"
        f"print('loaded:', sorted({set(ABSENT)!r} & sys.modules.keys()))\n"
        "sys.exit(ended)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded: []" in done.stdout
    assert "tests collected" in done.stdout
