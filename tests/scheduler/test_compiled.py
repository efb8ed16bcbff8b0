"""The compiled core (setup.py) decides, tells and remembers what the Python one does; messages cross both ways.

It is built here once, from the sources as they are, into a folder of its own.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
import os
import pickle
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from benchmarks.compiled_core import ROOT, build, why_not
from modelpool.actors.control.status_values import PoolStatus
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.report_figures import ReportTask
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import (
    NO_WORKER,
    FileVerdict,
    JobSpec,
    JudgedFile,
    NodeId,
    RunErrorKind,
    Stage,
    TaskSpec,
    UserId,
    WorkerId,
)
from modelpool.pool.values.specs.wire_value import WireValue
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.core.history import JobHistory
from modelpool.scheduler.core.snapshot import Snapshot
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import (
    CancelRequested,
    Command,
    Cordoned,
    DisruptionsAllowed,
    Event,
    FilesJudged,
    NodeDraining,
    PinComponents,
    PoolEnding,
    PruneComponents,
    Remembered,
    RestartRequested,
    Uncordoned,
)
from modelpool.scheduler.model.pool_memory import (
    PoolMemory,
    RememberedCordon,
    RememberedGangs,
    RememberedPatches,
    RememberedRuns,
    RememberedSize,
    RememberedUser,
)
from modelpool.scheduler.model.story_lines import StoryLine
from modelpool.scheduler.model.user_share import EVERYBODY, UserShare
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.faults import Disturbances
from modelpool.scheduler.simulator.hosts import SimulatedNode
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.record.replay import Replayed
from modelpool.scheduler.simulator.workloads.generators import poisson
from tests.architecture.source_tree import PACKAGES, product_modules, statements, syntax
from tests.scheduler.decided import Stream, answer
from tests.simulation.worlds import mix

PROGRAM = Path(__file__).with_name("decided.py")
JOBS = 90

CONFIGURATIONS = {
    "soonest": SchedulerConfig(story_length=None),
    "arrival_order": SchedulerConfig(story_length=None, placement="arrival_order"),
    "least_loaded": SchedulerConfig(story_length=200, placement="least_loaded"),
    "batches": SchedulerConfig(story_length=None, batch_limit=4),
    "passes": SchedulerConfig(story_length=None, preemption_wait_seconds=1.0),
    "not ahead, ageing": SchedulerConfig(story_length=None, upload_ahead=False, ageing_seconds=20.0),
    "shared runs": SchedulerConfig(story_length=None),
    "shares and limits": SchedulerConfig(
        story_length=None,
        shares=(UserShare(user=UserId("ann"), weight=3.0), UserShare(user=EVERYBODY, running_limit=2)),
        share_window_seconds=2.0,
        run_timeout_seconds=8.0,
        stop_grace_seconds=2.0,
        deadline_margin_seconds=5.0,
        overtaking_limit=4,
        kept_results=10,
    ),
}


class ModelKwargs:
    """A core that keeps what it is told."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.state = SchedulerState(config)
        self.events: list[Event] = []

    def handle(self, event: Event) -> list[Command]:
        """As the core does."""
        self.events.append(event)
        return self.state.handle(event)


def in_pass(task: TaskSpec) -> TaskSpec:
    """The task in passes of four that others with these weights may join."""
    if task.stage is not Stage.SAMPLE:
        return task
    key = " ".join(f"{use.component} {use.patch_digest}" for use in task.uses)
    return replace(task, together=task.together or "images", batch_size=4, pass_key=key, divisions=())


def varied(job: JobSpec, at: float, rng: Random) -> JobSpec:
    """The job as somebody's, in some haste, by itself or with others."""
    tasks = tuple(replace(task, together=rng.choice(("", "images"))) for task in job.tasks)
    return replace(
        job,
        tasks=tasks,
        user=UserId(rng.choice(("", "ann", "ann", "bob"))),
        priority=rng.choice((0, 0, 0, 1)),
        deadline=rng.choice((None, None, at + rng.uniform(1.0, 60.0))),
        batch=rng.choice(("", "night")),
    )


def shareable(job: JobSpec, rng: Random) -> JobSpec:
    """The job with a sampling run that takes long, and that several GPUs may share, or must."""
    degrees = rng.choice(((1, 2, 4), (1, 2), (2,), (1,)))
    tasks = tuple(
        replace(task, degrees=degrees, run_seconds=10.0 * task.run_seconds) if task.stage is Stage.SAMPLE else task
        for task in job.tasks
    )
    return replace(job, tasks=tasks)


def eventful(config: SchedulerConfig, seed: int, is_shared: bool = False) -> Stream:
    """What a pool of four GPUs was told, in which everything goes wrong that can: workers are lost and do not start,
    runs fail and hang, drivers cancel. Two of the GPUs share a machine with a disk, and gain by batches; with
    `is_shared` all of them do, and share runs."""
    rng, node = Random(seed), NodeId("box")
    sizes = (24, 12, 24, 9)
    gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), gib * GIB, 10.0 * GIB) for n, gib in enumerate(sizes)]
    near = len(gpus) if is_shared else 2
    gpus[:near] = [replace(gpu, node=node, marginal=0.4) for gpu in gpus[:near]]
    kinds = [RunErrorKind.OUT_OF_VRAM, RunErrorKind.INPUT_LOST, RunErrorKind.INTERNAL]
    disturbances = Disturbances(
        start_fails=lambda command: rng.random() < 0.1,
        run_factor=lambda command: rng.uniform(0.7, 1.5),
        run_error=lambda command: rng.choice(kinds) if rng.random() < 0.03 else None,
        run_hangs=lambda command: config.run_timeout_seconds is not None and rng.random() < 0.01,
    )
    core = ModelKwargs(config)
    cluster = VirtualCluster(
        core, gpus, [SimulatedNode(node, 20 * GIB, 2.0 * GIB)], disturbances=disturbances, checkpoint_seconds=0.5
    )
    what, last = mix(), 0.0
    cluster.start(what.components)
    for submission in what.submissions(poisson(JOBS, 1.5, rng), rng):
        last = submission.at
        job = varied(submission.job, last, rng)
        if config is CONFIGURATIONS["passes"]:
            job = replace(job, tasks=tuple(map(in_pass, job.tasks)))
        cluster.post(replace(submission, job=shareable(job, rng) if is_shared else job))
        if rng.random() < 0.05:
            cluster.post(CancelRequested(last + rng.uniform(0.0, 20.0), submission.job.job_id))
    cluster.post(PruneComponents(last))
    # of the least popular model: weights that are needed often stay without being pinned
    cluster.post(PinComponents(last / 3, (what.models[-1].components[0].key,), 2))
    cluster.post(NodeDraining(last / 2, node, last / 2 + 2.0))
    cluster.post(NodeDraining(last / 2 + 4.0, node, math.inf))
    cluster.post(Cordoned(last / 5, worker_id=gpus[3].worker_id))
    cluster.post(Uncordoned(last / 4, worker_id=gpus[3].worker_id))
    cluster.post(Cordoned(last / 1.5, node, deadline=last / 1.5 + 3.0))
    cluster.post(Uncordoned(last / 1.5 + 8.0, node))
    cluster.post(DisruptionsAllowed(last / 6, "it is Monday"))
    cluster.post(RestartRequested(last / 3, gpus[2].worker_id, last / 3 + 5.0))
    runs = RememberedRuns(Stage.SAMPLE, (), "H100", (2.0, 3.0), (RememberedSize(20, 4, (1.5,)),))
    users = (RememberedUser(UserId("ann"), 1.0, 2.0, 3.0),)
    cordons = (
        RememberedCordon(NodeId(""), gpus[1].worker_id, 5.0),
        RememberedCordon(NodeId("gone"), NO_WORKER, 1.0, 2.0),
    )
    patches = (RememberedPatches("H100", (1.2,)),)
    gangs = (RememberedGangs(Stage.SAMPLE, (), "H100", 20, 2, (0.6,)),)
    memory = PoolMemory(deadlines_met=1, users=users, runs=(runs,), patches=patches, cordons=cordons, gangs=gangs)
    cluster.post(Remembered(last / 4, memory, 5.0))
    for number, gpu in enumerate(gpus):
        key = rng.choice(what.models).components[0].key
        for at, verdict in ((last * rng.random(), FileVerdict.DIFFERS), (last, FileVerdict.RIGHT)):
            file = JudgedFile(number, verdict, (key,), "/models/a", "01", "02")
            cluster.post(FilesJudged(at, gpu.worker_id, rng.choice((1, 1, 2)), (file,)))
    for gpu in gpus:
        cluster.lose(gpu.worker_id, rng.uniform(0.0, last))
    cluster.run()
    at = core.state.at
    core.handle(PoolEnding(at, at + 1.0))
    return config, core.events


@pytest.fixture(scope="module")
def streams() -> dict[str, Stream]:
    return {
        name: eventful(config, seed, name == "shared runs")
        for seed, (name, config) in enumerate(CONFIGURATIONS.items())
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the compiled packages can be imported from."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("compiled"), opt_level=0)


def answers_of(compiled: Path, streams: dict[str, Stream]) -> dict[str, Any]:
    """What the compiled core says to each stream. Streams and answers were sent from one kind of core to the other."""
    told, said = compiled.parent / "streams", compiled.parent / "answers"
    told.write_bytes(pickle.dumps(list(streams.values())))
    environment = {**os.environ, "PYTHONPATH": str(compiled)}
    command = [sys.executable, "-P", str(PROGRAM), str(told), str(said)]
    done = subprocess.run(command, cwd=compiled, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file, found = pickle.loads(said.read_bytes())
    assert Path(file).is_relative_to(compiled)
    assert not file.endswith(".py"), "the core that answered is the Python one"
    return dict(zip(streams, found, strict=True))


def require_files(compiled: Path) -> None:
    """Every module is there as Python too, for machines that the compiled ones are not for; the library is in a
    package, as all that is sent to them is; and nothing was built into the sources."""
    libraries = sorted(compiled.rglob("*.so"))
    assert len(libraries) == len(modules()) + 1
    for library in libraries:
        assert library.parent != compiled
        source = library.with_name(library.name.partition(".")[0] + ".py")
        assert source.is_file() or "__mypyc" in library.name
    assert not [place for folder in setup_file().COMPILED_FOLDERS for place in (ROOT / folder).rglob("*.so")]


def require_told(compiled: Path) -> None:
    """`modelpool --version` says which core an installation has."""
    code = "import sys\nfrom modelpool.actors.cli.main import run\nsys.exit(run(['--version']))"
    for place, is_compiled in ((compiled, True), (ROOT, False)):
        environment = {**os.environ, "PYTHONPATH": str(place)}
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(command, cwd=compiled, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("modelpool")
        assert ("scheduler compiled" in done.stdout) == is_compiled


#: prints the bytes of an image of a pool
IMAGE = """
import sys
from modelpool import ModelPool
from modelpool.actors.config.config import PoolConfig
config = PoolConfig.find(None)
assert PoolConfig.model_validate_json(config.model_dump_json()) == config, "as `modelpool up` reads it"
with ModelPool.start(device="cpu", workers=1, models=sys.argv[1], address="local") as pool:
    image = pool.generate("a red circle", model="shapes", seed=3, steps=2, width=64, height=64, output=False)
    print("bytes", image.pixels.tobytes().hex())
"""


def require_images(compiled: Path) -> None:
    """A pool starts and makes the image of the Python core: messages that stay Python derive from compiled classes."""
    said = []
    for place in (compiled, ROOT):
        environment = {**os.environ, "PYTHONPATH": str(place), "XDG_STATE_HOME": str(compiled.parent)}
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        command = [sys.executable, "-P", "-c", IMAGE, str(ROOT / "examples" / "shapes" / "models")]
        done = subprocess.run(command, cwd=compiled, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        said += [line for line in done.stdout.splitlines() if line.startswith("bytes")]
    assert len(said) == 2
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.nightly(usually="tests/scheduler/test_compiled.py")  # the modules of the table, messages, and their bases
def test_the_compiled_core_answers_as_the_python_one(compiled: Path, streams: dict[str, Stream]) -> None:
    """To the last bit of every number: the log is text. One test, so that it is built once wherever tests are shared
    out."""
    require_files(compiled)
    require_told(compiled)
    require_images(compiled)
    answers = answers_of(compiled, streams)
    for name, stream in streams.items():
        expected, found = answer(stream), answers[name]
        for said, mine in expected.items():
            if isinstance(mine, list | tuple):
                assert len(found[said]) == len(mine) > 0, f"{name}: {said}"
                for one, other in zip(mine, found[said], strict=True):
                    assert other == one, f"{name}: {said}"
            assert found[said] == mine, f"{name}: {said}"


def test_the_streams_have_everything_in_them(streams: dict[str, Stream]) -> None:
    """What the comparison is worth: each kind of event and of command, runs of several tasks, runs that ended badly."""
    told = {type(event) for _, events in streams.values() for event in events}
    said = {command for stream in streams.values() for given in answer(stream)["commands"] for command in given}
    assert {kind.__name__ for kind in typing.get_args(Event)} - {kind.__name__ for kind in told} <= {"ResultLost"}
    assert {kind.__name__ for kind in typing.get_args(Command)} == {type(command).__name__ for command in said}
    assert any(command.batch_mates for command in said if hasattr(command, "batch_mates"))
    assert any(command.oom_steps for command in said if hasattr(command, "oom_steps"))


# ---- without a compiler --------------------------------------------------------------------------------------------


def setup_file() -> ModuleType:
    """What setup.py says; nothing is built."""
    spec = importlib.util.spec_from_file_location("setup_file", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules() -> set[str]:
    """The modules that are compiled."""
    setup = setup_file()
    paths = [path for folder in setup.COMPILED_FOLDERS for path in (ROOT / folder).glob("*.py")]
    names = [path.relative_to(ROOT).as_posix() for path in paths if path.name != "__init__.py"]
    return {"modelpool." + name[:-3].replace("/", ".") for name in names if name not in setup.NOT_COMPILED}


def test_the_table_names_modules_that_there_are() -> None:
    setup = setup_file()
    for folder in setup.COMPILED_FOLDERS:
        assert any((ROOT / folder).glob("*.py")), folder
    for name in setup.NOT_COMPILED:
        assert (ROOT / name).is_file(), name


def test_python_classes_derive_from_the_compiled_bases_that_allow_it() -> None:
    """mypyc refuses others when the module is imported. Found by trying: no pool started with the compiled core."""
    setup, compiled = setup_file(), modules()
    allowed = {
        ("modelpool." + place.removesuffix(".py").replace("/", "."), name)
        for place, name in setup.BASES_OF_PYTHON.items()
    }
    derived = set()
    for module in product_modules(*PACKAGES):
        if module.name in compiled or compiled.isdisjoint(module.imports):
            continue
        inside = list(statements(syntax(module.path)))
        imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in inside
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        bases = [base for node in inside if isinstance(node, ast.ClassDef) for base in node.bases]
        found = (imported.get(base.id, ("", "")) for base in bases if isinstance(base, ast.Name))
        derived |= {base for base in found if base[0] in compiled}
    assert derived == allowed


def test_a_base_of_python_classes_keeps_its_lines() -> None:
    """What the build writes above it takes the place of blank lines and a comment."""
    setup = setup_file()
    for place, name in setup.BASES_OF_PYTHON.items():
        source = (ROOT / place).read_text(encoding="utf-8")
        built = setup.with_python_subclasses(source, name)
        changed = [(a, b) for a, b in zip(source.splitlines(), built.splitlines(), strict=True) if a != b]
        assert len(changed) == 3
        assert changed[-1][1].startswith("@mypyc_attr")
    with pytest.raises(ValueError, match="class A: found"):
        setup.with_python_subclasses("import x\nclass A:\n    pass\n", "A")
    built = setup.with_python_subclasses("class AB:\n    pass\n\n\n# why\nclass A(AB):\n    pass\n", "A")
    assert built.index("@mypyc_attr") > built.index("class AB")


@pytest.mark.parametrize(("command", "is_compiled"), [("bdist_wheel", True), ("editable_wheel", False)])
def test_an_editable_install_is_python_alone(command: str, is_compiled: bool) -> None:
    """Found by trying: its libraries landed among the sources."""
    built = setup_file().WithCompiledCore()
    built.commands = [command]
    assert built.has_ext_modules() == is_compiled


def values_in(kind: Any, seen: set[type]) -> Iterator[type]:
    """The dataclasses and tuples with names that a value of this type may be made of."""
    for part in typing.get_args(kind):
        yield from values_in(part, seen)
    if isinstance(kind, type) and kind not in seen and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        seen.add(kind)
        yield kind
        for hint in typing.get_type_hints(kind, localns={"Residency": Residency}).values():
            yield from values_in(hint, seen)


@pytest.mark.parametrize("kind", [Event, Command, Snapshot, StoryLine, JobHistory, SchedulerConfig, Replayed])
def test_what_is_sent_between_processes_can_be_read_there(kind: Any) -> None:
    """An instance of a compiled frozen dataclass pickles, and cannot be unpickled but by what `WireValue` says."""
    found = list(values_in(kind, set()))
    assert found
    assert {value for value in found if value.__module__ in modules() and not issubclass(value, WireValue)} == set()


#: what pydantic reads besides models of its own
VALIDATED = (SchedulerConfig, PoolStatus, Recipe, ReportTask)


def test_what_pydantic_reads_stays_python() -> None:
    """It reads types of fields, and a compiled class knows `int | None` as `type`. Found by trying: no pool of
    `modelpool up` started with the compiled core, whose configuration `max_gpus: null` was refused."""
    adapters = re.compile(r"TypeAdapter\((?:tuple\[)?(\w+)")
    named = [adapters.findall(module.path.read_text(encoding="utf-8")) for module in product_modules(*PACKAGES)]
    assert sorted(name for names in named for name in names) == sorted(kind.__name__ for kind in VALIDATED)
    read = {value for kind in VALIDATED for value in values_in(kind, set())}
    assert {value for value in read if value.__module__ in modules()} == set()
