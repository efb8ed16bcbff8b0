"""What holds for every test: no network, one thread a process, Ray on loopback only, GPU tests where there is a GPU."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import forked
from tests.tiers import (
    NIGHTLY_EXAMPLES,
    USUAL_EXAMPLES,
    Case,
    InRotation,
    is_named,
    left_out,
    part_of,
    rotation_of_commit,
)

# Before anything imports torch, ray or a Hugging Face library: they read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's name for "every port on loopback"; without it each listens on all interfaces
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Many functions of Ray start one if there is none. A test that did so by accident ended its whole process 60 s later,
# when Ray found its control service gone.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# A shell ignores Ctrl-C in what it starts in the background, and nohup a closed terminal; tests send both to themselves
# and to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No absolute times in tests: a slow machine is not a failure. Examples are random; a failure prints how to repeat them.
settings.register_profile("usual", deadline=None, max_examples=USUAL_EXAMPLES, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=NIGHTLY_EXAMPLES, print_blob=True)


#: how long tests took when they were last recorded, on a machine with two cores
DURATIONS = Path(__file__).with_name("durations.json")
RECORDED_SECONDS, SLOW_SECONDS = 0.5, 0.7
#: in every file that has tests with Ray
RAY_MARK = "mark.ray"


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a person added to the registry of models is no matter of the tests, nor theirs of the person's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state_home")))
        patch.setenv("MODELPOOL_CACHE_DIR", str(tmp_path_factory.mktemp("caches")))  # Hugging Face reads the XDG one
        yield


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """CLIP's tokenizer and its files are made once for all tests, what operations make on the meta device is found
    once, activations of one structure are counted once, the command line is built once, and what engines measure of
    their link is small: each takes as long as many a test. Only what the tests of this run have imported is touched."""
    with pytest.MonkeyPatch.context() as patch:
        if text := sys.modules.get("modelpool.pool.models.text.clip_tokenizer"):
            patch.setattr(text.ClipTokenizer, "load", functools.cache(text.ClipTokenizer.load))
            patch.setattr(text, "read_merges", functools.cache(text.read_merges))
        if saving := sys.modules.get("modelpool.pool.models.saving.clip_tokenizer_files"):
            patch.setattr(saving, "vocabulary_texts", functools.cache(saving.vocabulary_texts))
        if figures := sys.modules.get("modelpool.pool.catalog.estimates.activation_estimator"):
            for name in ("MetaCache", "ActivationCounts"):
                patch.setattr(figures, name, functools.cache(getattr(figures, name)))
        if command := sys.modules.get("modelpool.actors.cli.main"):
            patch.setattr(command, "build_program", functools.cache(command.build_program))
        if opening := sys.modules.get("modelpool.pool.devices.opening"):
            patch.setattr(opening, "LINK_PROBE_BYTES", 1 << 20)
        yield


@pytest.fixture
def in_rotation(request: pytest.FixtureRequest) -> InRotation:
    """Chooses the cases of a test that loops over them."""
    takes_all = request.config.option.nightly or is_named(request.node, request.config.args)

    def chosen(cases: Iterable[Case], name: Callable[[Case], str] = str) -> list[Case]:
        return list(cases) if takes_all else part_of(cases, request.config.option.rotation, name)

    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """A test that leaves memory of a simulated device to the garbage collector, or that failed while it held some,
    takes no later one along. Each file takes what it leaves alive, such as modules and caches, out of the garbage
    collector's sight: else engines, which collect when they close, search all of it each time, a quarter of the time of
    all tests."""
    before_bytes = _simulated_bytes()
    outcome = yield
    if _simulated_bytes() > before_bytes:
        sys.last_value = sys.last_traceback = None
        gc.collect()
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return outcome


def _simulated_bytes() -> int:
    """In use on the simulated devices that tests share, where there are any yet."""
    sim = sys.modules.get("modelpool.pool.devices.sim.device")
    if sim is None:
        return 0
    used_bytes = 0
    with contextlib.suppress(RuntimeError):
        for index in range(2):
            used_bytes += sim.memory_stats(index).used_bytes
    return used_bytes


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test with Ray where only those run: importing all tests takes half a minute."""
    if config.getoption("markexpr") != "ray" or collection_path.suffix != ".py":
        return None
    return None if _has_ray_mark(collection_path) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and take everything that they import, with the little garbage of
    the imports, out of the garbage collector's sight: pools collect garbage where memory is short, and a collection
    over all test modules takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --nightly, --rotation, --record-durations and --forks."""
    forked.add_option(parser)
    parser.addoption("--nightly", action="store_true", help="run all tests (tests/tiers.py)")
    parser.addoption("--rotation", type=int, metavar="N", help="which seventh of the tests that rotate runs")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json at the end")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the depth of properties, the rotation, and the processes, and record durations where that is requested."""
    forked.configure(config)
    settings.load_profile("nightly" if config.option.nightly else "usual")
    if config.option.rotation is None:
        config.option.rotation = rotation_of_commit()
    if config.getoption("--record-durations"):
        config.pluginmanager.register(Durations(), "durations")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell which tests ran, and how they run again."""
    tier = "all tests (--nightly)" if config.option.nightly else f"usual tests, --rotation {config.option.rotation}"
    terminalreporter.write_line(f"Tier: {tier}")


class Durations:
    """Records how long tests take: those above half a second, by id, rounded. Tests that did not run keep theirs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = {**recorded_durations(), **self.seconds}
        kept = {test: round(seconds, 1) for test, seconds in sorted(known.items()) if seconds > RECORDED_SECONDS}
        DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


def recorded_durations() -> dict[str, float]:
    """Seconds by test id, of the last recording."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other tiers and rotations run. Mark tests `slow` that were recorded above `SLOW_SECONDS`, skip
    `gpu` tests on machines without CUDA, and keep the `ray` tests of one process together at the end. Files are in the
    order of the recorded seconds of their tests that run, longest first: files are the units that processes share, and
    with a long one at the end, one process would work alone."""
    if not config.option.nightly:
        others = left_out(items, config.option.rotation, recorded_durations())
        out = {item for item in others if not is_named(item, config.args)}
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    durations = recorded_durations()
    for item in items:
        if durations.get(item.nodeid, 0.0) > SLOW_SECONDS:
            item.add_marker(pytest.mark.slow)
    without_mark = {item.path for item in items if item.get_closest_marker("ray") and not _has_ray_mark(item.path)}
    if without_mark:
        raise pytest.UsageError(f"tests with Ray, expected {RAY_MARK!r} in their files: {sorted(without_mark)}")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))
    of_files: collections.Counter[str] = collections.Counter()
    for item in items:
        of_files[item.nodeid.partition("::")[0]] += durations.get(item.nodeid, 0.0)

    def place(item: pytest.Item) -> tuple[bool, float, str]:
        file = item.nodeid.partition("::")[0]
        return item.get_closest_marker("ray") is not None, -of_files[file], file

    items.sort(key=place)


@functools.cache
def _has_ray_mark(path: Path) -> bool:
    return RAY_MARK in path.read_text(encoding="utf-8")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
