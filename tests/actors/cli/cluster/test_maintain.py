"""`modelpool cordon`, `uncordon`, `drain` and `restart`: what they ask of a pool, and a real pool that does it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from modelpool.actors.cli.cluster.daemon import start_in_background, stop_running_pool
from modelpool.actors.cli.cluster.maintain import seconds_of
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.operator_orders import OperatorOrder, Order, OrderTaken
from modelpool.actors.ray.fork_server import SERVER_VARIABLE
from modelpool.pool.values.core.errors import UserError
from modelpool.scheduler.autoscaling.preview import GroupPreview, ScalingPreview, WaitingLevel
from modelpool.scheduler.model.node_groups import AutoscalingConfig, NodeGroup
from tests.actors.cli.conftest import Command
from tests.actors.cli.fakes import FakePool
from tests.each_case import each_case

ROOT = Path(__file__).parents[4]

#: an operator's hour: every order while a batch runs, and the loss of the controller
DRIVER = """
import sys, time
import psutil
from pathlib import Path
from modelpool import GenerateRequest, ModelPool
from modelpool.actors.cli.main import run
from modelpool.actors.control.operator_orders import Order, OperatorOrder
from modelpool.pool.values.core.errors import UserError
daemon, folder = psutil.Process(int(sys.argv[1])), Path(sys.argv[2])

def requests(first, count):
    return [GenerateRequest(model="shapes", prompt="a red circle", seed=first + n, steps=20) for n in range(count)]

def until(what, about):
    end = time.monotonic() + 90
    while time.monotonic() < end:
        try:
            if what():
                return
        except Exception as problem:  # the controller is being replaced
            about = f"{about}: {problem}"
        time.sleep(0.05)
    raise AssertionError(about)

def connected():
    for _ in range(300):
        try:
            return ModelPool.connect()
        except Exception:  # the next controller is not there yet
            time.sleep(0.1)
    raise AssertionError("there is no other controller")

def workers(pool):
    return {worker.id: worker for worker in pool.status().workers}

with ModelPool.connect() as pool:
    pool.wait_ready(120)
    (node,) = pool.status().nodes.values()
    jobs = pool.submit_detached(requests(0, 60), output=folder / "disturbed")
    until(lambda: jobs.progress().record.succeeded > 1, "it begins")

    assert run(["cordon", "gpu-0", "--pool", "mine"]) == 0
    until(lambda: workers(pool)["gpu-0"].state == "idle", "its run ends")
    runs, weights = workers(pool)["gpu-0"].runs, workers(pool)["gpu-0"].used_bytes
    before = jobs.progress().record.succeeded
    until(lambda: jobs.progress().record.succeeded > before + 1, "the other works")
    now = workers(pool)["gpu-0"]
    assert (now.runs, now.state, now.order) == (runs, "idle", "cordoned"), now
    assert now.used_bytes == weights > 0, "weights stay"
    print("cordoned")

    (controller,) = [p for p in daemon.children(recursive=True) if p.name().startswith("ray::Controller")]
    controller.kill()
    controller.wait(30)

with connected() as pool:
    jobs = pool.attach(jobs.id)
    until(lambda: workers(pool)["gpu-0"].order == "cordoned", "the next controller knows it")
    until(lambda: pool.status().controller_restarts == 1, "it is another controller")
    print("remembered")
    assert run(["uncordon", "gpu-0", "--pool", "mine"]) == 0
    until(lambda: workers(pool)["gpu-0"].order == "", "it is back")

    number = workers(pool)["gpu-1"].incarnation
    assert run(["restart", "gpu-1", "--deadline", "20s", "--wait", "--pool", "mine"]) == 0
    assert workers(pool)["gpu-1"].incarnation == number + 1
    print("restarted")

    more = pool.submit_detached(requests(100, 4), output=folder / "later")
    assert run(["drain", node, "--deadline", "20s", "--wait", "--pool", "mine"]) == 0
    assert {worker.state for worker in workers(pool).values()} == {"drained"}, workers(pool)
    until(lambda: not any("GpuWorker" in p.name() for p in daemon.children(recursive=True)), "their processes end")
    later = pool.submit_detached(requests(200, 1), output=folder / "waits")
    until(lambda: "drained by the operator" in str(pool.history(later.id + "-0")), "it says why it waits")
    assert run(["status", "mine"]) == 0
    assert run(["why", "gpu-0", "--pool", "mine"]) == 0
    assert run(["autoscale", "--groups", str(folder / "groups.toml"), "--pool", "mine"]) == 0
    print("drained")
    assert run(["uncordon", node[:9], "--pool", "mine"]) == 0
    for each in (jobs, more, later):
        each.wait(180)
        assert {one.outcome.value for one in each.outcomes()} == {"succeeded"}
    for place in ("nowhere", ""):
        try:
            pool.operator.order(OperatorOrder(Order.CORDON, place))
        except UserError as problem:
            assert node in str(problem) and "gpu-0, gpu-1" in str(problem), problem
        else:
            raise AssertionError("a place that is nowhere")
    pool.submit_detached(requests(0, 60), output=folder / "calm").wait(180)
    print("done")
"""


@pytest.mark.ray
def test_a_pool_is_maintained_while_it_works(tmp_path, monkeypatch) -> None:
    """Cordon, uncordon, drain and restart while a batch runs, and SIGKILL for the controller: each image is there once,
    with the bytes that it has without all that; the cordon outlives the controller."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(SERVER_VARIABLE, raising=False)
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(device="sim", workers=2, name="mine")
    (tmp_path / "groups.toml").write_text('[groups.tried]\ngpu_memory = "1GiB"\nmax = 3\n')
    started = start_in_background(config)
    try:
        used = subprocess.run(
            [sys.executable, "-c", DRIVER, str(started.pid), str(tmp_path)],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        steps = ["cordoned", "remembered", "restarted", "drained", "done"]
        assert [line for line in used.stdout.splitlines() if line in steps] == steps, used.stdout + used.stderr
        assert "request 1 node" in used.stdout, "work that no worker takes is worth a node"
        require_equal_once(tmp_path / "disturbed", tmp_path / "calm", 60)
    finally:
        assert stop_running_pool("mine") == started


def require_equal_once(folder: Path, other: Path, count: int) -> None:
    """Both folders have the same images, each listed once."""
    for each in (folder, other):
        assert len((each / "manifest.jsonl").read_text().splitlines()) == count
    images = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert len(images) == count
    assert images == {path.name: path.read_bytes() for path in other.glob("*.png")}


@dataclasses.dataclass
class OrderedPool(FakePool):
    """A pool that notes its orders."""

    taken: list[OperatorOrder] = dataclasses.field(default_factory=list)
    problem: str = ""

    @property
    def operator(self) -> OrderedPool:
        return self

    def order(self, order: OperatorOrder) -> OrderTaken:
        self.taken.append(order)
        if self.problem:
            raise UserError(self.problem)
        is_node = order.order is Order.DRAIN
        return OrderTaken(order.order, order.place, is_node, ("gpu-0",), ("no other worker takes tasks",))


@each_case(
    ("arguments", "expected"),
    [
        (("cordon", "gpu-0"), OperatorOrder(Order.CORDON, "gpu-0")),
        (("uncordon", "box"), OperatorOrder(Order.UNCORDON, "box")),
        (("drain", "box"), OperatorOrder(Order.DRAIN, "box", 600.0)),
        (("drain", "box", "--deadline", "2h", "--force"), OperatorOrder(Order.DRAIN, "box", 7200.0, True)),
        (("restart", "gpu-0", "--deadline", "90"), OperatorOrder(Order.RESTART, "gpu-0", 90.0)),
    ],
)
def test_commands_become_orders(command: Command, arguments: tuple[str, ...], expected: OperatorOrder) -> None:
    pool = OrderedPool()
    ended = command(*arguments, "--pool", "mine", pool=pool)
    assert ended.code == 0
    assert pool.taken == [expected]
    assert expected.place in ended.out
    assert "no other worker takes tasks" in ended.err


def test_programs_read_orders_as_json(command: Command) -> None:
    ended = command("drain", "box", "--json", "--pool", "mine", pool=OrderedPool())
    assert json.loads(ended.out) == {
        "order": "drain", "place": "box", "is_node": True, "workers": ["gpu-0"],
        "warnings": ["no other worker takes tasks"],
    }  # fmt: skip


def test_an_order_that_is_not_done_in_time_says_what_is_not(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code 1 of --wait came without a word."""
    monkeypatch.setattr("modelpool.actors.cli.cluster.maintain.GRACE_SECONDS", 0.0)
    for order, place, said in (
        ("drain", "box", "drain box is not done after 0 s: gpu-0 is busy"),
        ("restart", "gpu-0", "restart gpu-0 is not done after 0 s: gpu-0 is busy"),
    ):
        ended = command(order, place, "--deadline", "0", "--wait", "--pool", "mine", pool=OrderedPool())
        assert ended.code == 1
        assert said in " ".join(ended.err.split())
        assert "`modelpool status`" in " ".join(ended.err.split())


def test_wrong_orders_are_refused_in_a_sentence(command: Command) -> None:
    ended = command("cordon", "nowhere", "--pool", "mine", pool=OrderedPool(problem="cordon: found 'nowhere'"))
    assert (ended.code, ended.err) == (2, "modelpool: cordon: found 'nowhere'\n")
    assert [seconds_of(text) for text in ("90", "90s", "1.5m", "2h", "1d")] == [90.0, 90.0, 90.0, 7200.0, 86_400.0]


@each_case("text", ["", "soon", "-3", "5 days", "nan", "inf"])
def test_wrong_times_are_refused(command: Command, text: str) -> None:
    ended = command("drain", "box", f"--deadline={text}", "--pool", "mine", pool=OrderedPool())
    assert ended.code == 2
    assert "a time span such as 90s, 15m or 2h" in ended.err


@dataclasses.dataclass
class ScaledPool(FakePool):
    """A pool that is asked what it would request."""

    asked: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

    @property
    def operator(self) -> ScaledPool:
        return self

    def would_request(
        self, groups: Sequence[NodeGroup] = (), limits: AutoscalingConfig | None = None
    ) -> ScalingPreview:
        self.asked.append(tuple(group.name for group in groups))
        some = GroupPreview("spot", 1, 1, 0, 8, 1.5, 100.0, 2, ("requested 2 nodes of spot: it is worth it",))
        none = GroupPreview("large", 2, 0, 1, 2, 12.0, 100.0, -1, ("gave up 1 node of large (n): it is idle",))
        waiting = (WaitingLevel(24 << 30, 1, 20.0), WaitingLevel(None, 3, 60.0))
        return ScalingPreview(waiting, (some, none), 2410.0, "it is Monday")


def test_what_would_be_requested_is_shown(command: Command, tmp_path: Path) -> None:
    pool = ScaledPool()
    ended = command("autoscale", "--pool", "mine", pool=pool)
    assert ended.code == 0
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert "spot 1 1 0 8 1.5 request 2 nodes" in lines
    assert "large 2 0 1 2 12 give up 1 node" in lines
    text = " ".join(" ".join(lines).split())
    assert "1 task of 20 GPU-seconds needs a GPU with 24.0 GiB; 3 tasks of 60 GPU-seconds fit on no GPU" in text
    assert "On the nodes that exist they end in 2410 s" in text
    assert "no node is given up now: it is Monday" in text
    groups = tmp_path / "groups.toml"
    groups.write_text("[groups.tried]\nmax = 3\n")
    assert json.loads(command("autoscale", "--groups", groups, "--json", "--pool", "mine", pool=pool).out)["groups"]
    assert pool.asked == [(), ("tried",)]
    groups.write_text("[pool]\nworkers = 2\n")
    ended = command("autoscale", "--groups", groups, "--pool", "mine", pool=pool)
    assert (ended.code, len(pool.asked)) == (2, 2)
    assert "without groups, expected tables such as [groups.a100]" in ended.err
