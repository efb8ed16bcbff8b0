"""`modelpool simulate` and `modelpool plan-cluster`: a workload in virtual time, told to people and to programs.

Proves: it tells what the simulation did, the same every time; a trace that was written is the same work; the number of
GPUs that is named does and one less does not; errors are told before anything is simulated; nothing heavy is loaded,
and matplotlib only for an image.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from matplotlib.figure import Figure

from modelpool.actors.cli.simulate import plan_cluster, simulate_lab
from modelpool.actors.cli.simulate import simulate_options as simulating_options
from modelpool.actors.cli.simulate import simulate_plots as simulating_images
from modelpool.actors.cli.simulate.simulate_plots import Compared
from modelpool.benchmarks.lab.policies import Policy
from modelpool.pool.values.specs.spec import RunError, RunErrorKind
from modelpool.scheduler.model.messages import Command as CoreCommand
from modelpool.scheduler.model.messages import Event, Outcome, ResolveJob, Submitted
from modelpool.scheduler.simulator.eviction_policies import PlannedMemory
from tests.actors.cli.conftest import Command, Ended
from tests.actors.cli.test_help import loaded_by
from tests.architecture.source_tree import ROOT

HEAD = [
    {"modelpool_trace": 1, "name": "a small day"},
    {"model": "sd", "diffusion_bytes": 2 << 30, "step_seconds": 0.05},
    {"model": "xl", "step_seconds": 0.1},
    {"model": "dit", "diffusion_bytes": 9 << 30, "step_seconds": 0.2, "loras_reach_text": False},
]
#: what depends on this machine and not on the simulation
MEASURED = ("core_seconds", "events_per_second")


def write_trace(path: Path, jobs: int = 40, apart: float = 0.3) -> str:
    """Jobs over three models, two LoRAs and two users; ann asks for three times as much as ben."""
    lines: list[dict[str, Any]] = list(HEAD)
    for number in range(jobs):
        model, lora = ("sd", "xl", "sd", "dit")[number % 4], (["ink"], [], ["wax"])[number % 3]
        user = "ben" if number % 4 == 3 else "ann"
        lines.append({"at": number * apart, "model": model, "loras": lora, "steps": 20, "user": user})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "day.jsonl")


def values(ended: Ended) -> dict[str, Any]:
    """What was told to programs, without what this machine had to do with it."""
    assert ended.code == 0, ended.err
    (found,) = ended.objects
    for of_seeds in found["policies"].values():
        for one in of_seeds:
            for name in MEASURED:
                assert one.pop(name) > 0
    return found


def test_programs_and_people_are_told_the_same(command: Command, trace: str) -> None:
    arguments = ("simulate", trace, "--gpus", "2xL4", "--price", "L4=0.8")
    found = values(command(*arguments, "--json"))
    ((one,),) = found["policies"].values()
    assert (found["workload"], found["jobs"], one["succeeded"], one["failed"]) == ("a small day", 40, 40, 0)
    together = one["running_seconds"] + one["loading_seconds"] + one["idle_seconds"]
    assert together == pytest.approx(2 * one["makespan_seconds"])
    assert one["cost"] == pytest.approx(2 * 0.8 * one["makespan_seconds"] / 3600)
    said = command(*arguments).out
    assert re.search(rf"^throughput +{one['jobs_per_minute']:.1f} jobs per minute", said, re.MULTILINE)
    assert re.search(rf"^weights +{one['resident_share']:.1%} of {one['runs']} runs had all", said, re.MULTILINE)
    assert re.search(rf"^LoRAs +{one['lora_loads_per_job']:.3f} disk reads per job", said, re.MULTILINE)
    assert re.search(rf"^cost +{one['cost']:.2f} including idle time", said, re.MULTILINE)
    assert re.search(r"^core +[\d,]+ events/s on this machine", said, re.MULTILINE)
    assert re.search(r"^ann +30 .*\n^ben +10 ", said, re.MULTILINE)


def test_the_same_is_the_same_every_time(command: Command, trace: str) -> None:
    first, second = (values(command("simulate", trace, "--gpus", "3x24GiB", "--json")) for _ in range(2))
    assert first == second


def test_more_and_faster_gpus_take_less_time(command: Command, trace: str) -> None:
    def makespan(gpus: str) -> float:
        ((one,),) = values(command("simulate", trace, "--gpus", gpus, "--json"))["policies"].values()
        return float(one["makespan_seconds"])

    assert makespan("1xL4") > makespan("1xH100") > makespan("4xH100")
    assert makespan("4xH100") >= 39 * 0.3, "the last job comes then"


def test_a_trace_that_was_written_is_the_same_work(command: Command, trace: str) -> None:
    written = command("simulate", trace, "--save-trace", "again.jsonl")
    assert (written.code, written.out, written.err) == (0, "", "written: again.jsonl\n")
    given, again = (values(command("simulate", name, "--gpus", "2xL4", "--json")) for name in (trace, "again.jsonl"))
    assert given == again


def test_policies_are_compared_with_ours(command: Command, trace: str) -> None:
    arguments = ("simulate", trace, "--gpus", "2xL4", "--policy", "modelpool,random")
    found = values(command(*arguments, "--json"))["policies"]
    assert list(found) == ["modelpool", "random"]
    said = command(*arguments).out
    ours, random = (found[name][0] for name in found)
    times = random["makespan_seconds"] / ours["makespan_seconds"]
    assert times != 1.0
    assert re.search(rf"^random .*\({times:.2f}x\)", said, re.MULTILINE)
    better = "modelpool" if times > 1 else "random"
    assert re.search(rf"^{better} +[\d.: s]+\*", said, re.MULTILINE)
    assert re.search(r"^random +\S.*", said.rpartition("best of the column")[2], re.MULTILINE), "whose rule it is"


def test_seeds_of_a_built_in_workload_are_told_with_their_spread(command: Command) -> None:
    arguments = ("simulate", "zipf:jobs=30,models=4", "--gpus", "2x24GiB", "--seeds", "3")
    found = values(command(*arguments, "--json"))
    (of_seeds,) = found["policies"].values()
    spans = sorted(one["makespan_seconds"] for one in of_seeds)
    assert [one["seed"] for one in of_seeds] == found["seeds"] == [0, 1, 2]
    assert len(set(spans)) == 3
    said = command(*arguments).out
    assert f"{spans[1]:.1f} s" in said
    assert f"{spans[0]:.1f} s-{spans[2]:.1f} s" in said


def test_a_configuration_of_the_scheduler_counts(command: Command, trace: str) -> None:
    """It decides with it, and users are due what their weights say."""
    Path("plain.toml").write_text("")
    Path("other.toml").write_text('[scheduler]\nplacement = "least_loaded"\n')
    Path("weights.toml").write_text("[users.ben]\nweight = 9.0\n")
    usual, plain, other = (
        values(command("simulate", trace, "--gpus", "2xL4", "--json", *config))["policies"]["modelpool"][0]
        for config in ((), ("--config", "plain.toml"), ("--config", "other.toml"))
    )
    assert plain == usual
    assert other["resident_share"] < usual["resident_share"]
    even, weighted = (
        values(command("simulate", trace, "--gpus", "2xL4", "--json", "--policy", "lru", "--config", name))
        for name in ("plain.toml", "weights.toml")
    )
    ratios = [
        {user["user"]: user["service_ratio"] for user in found["policies"]["lru"][0]["users"]}
        for found in (even, weighted)
    ]
    assert ratios[1]["ben"] < ratios[0]["ben"], "he is due more, and lru, which knows no weights, gives him no more"
    Path("wrong.toml").write_text("[scheduler]\nplacemnt = 1\n")
    ended = command("simulate", trace, "--gpus", "2xL4", "--config", "wrong.toml")
    assert ended.code == 2
    assert re.search(r"wrong\.toml.*placemnt", ended.err)


def test_images_are_drawn(command: Command, trace: str, tmp_path: Path) -> None:
    arguments = ("simulate", trace, "--gpus", "2xL4", "--plot")
    one = command(*arguments, "one.png")
    assert (one.code, one.err) == (0, "drawn: one.png\n")
    both = command(*arguments, "both.png", "--policy", "modelpool,random")
    assert both.err == "drawn: both.png\ndrawn: both-modelpool.png\ndrawn: both-random.png\n"
    for name in ("one", "both", "both-modelpool", "both-random"):
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "both-modelpool.png").read_bytes()


def test_the_page_tells_every_built_in_workload_with_its_parameters() -> None:
    page = (ROOT / "docs" / "explanation" / "simulation.md").read_text()
    for name, entry in simulate_lab.workloads().items():
        told = ", ".join(f"`{key}={default:g}`" for key, default in entry.parameters.items())
        lines = [line for line in page.splitlines() if line.startswith((f"| `{name}` | ", f"- `{name}`: "))]
        assert any(told in line for line in lines), name


class Refusing:
    """A core that refuses every job, but for those of ben, which it forgets."""

    def handle(self, event: Event) -> list[CoreCommand]:
        if not isinstance(event, Submitted) or event.job.user == "ben":
            return []
        error = RunError(RunErrorKind.BAD_INPUT, "not to its taste")
        return [ResolveJob(event.job.job_id, Outcome.FAILED, error=error)]


def test_jobs_that_fail_are_told_with_the_reason(command: Command, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy("modelpool", "refuses", lambda gpus, rng: (Refusing(), PlannedMemory()))
    monkeypatch.setattr(simulate_lab, "policies", lambda: {"modelpool": policy})
    ended = command("simulate", trace, "--gpus", "2xL4")
    assert ended.code == 1
    assert re.search(r"^jobs +0 succeeded, 30 failed, 10 never ended$", ended.out, re.MULTILINE)
    assert re.search(r"^modelpool +job-5 +not to its taste$", ended.out, re.MULTILINE)
    planned = command("plan-cluster", trace, "--gpus", "L4", "--deadline", "1h", "--most", "2")
    assert planned.code == 1
    assert re.search(r"^L4 +not with up to 2; 30 jobs fail", planned.out, re.MULTILINE)


def test_nothing_heavy_is_loaded(trace: str) -> None:
    loaded = loaded_by("simulate", trace, "--gpus", "2xL4")
    assert not loaded & {"ray", "torch", "numpy", "matplotlib", "diffusers"}


def test_the_help_names_every_built_in_workload() -> None:
    _, told = get_args(simulating_options.Trace)
    names = told.help.partition(":")[2].partition(";")[0]
    assert [name.strip() for name in names.split(",")] == sorted(simulate_lab.workloads())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "2xH1000"), r"unknown kind of GPU in --gpus 'H1000'; did you mean 'H100'\?"),
        ((), "--gpus is required, such as 64xH100,32x4090"),
        (
            ("--gpus", "L4", "--policy", "modelpol"),
            r"unknown policy in --policy 'modelpol'; did you mean 'modelpool'\?",
        ),
        (("--gpus", "L4", "--policy", "random,random"), "--policy: found 'random,random', expected each policy once"),
        (("--gpus", "L4", "--price", "cheap"), "--price: found 'cheap', expected KIND=NUMBER"),
        (("--gpus", "L4", "--price", "H100=2"), "--price: no price for L4; add --price L4=NUMBER"),
        (("--gpus", "L4", "--node", "8"), "--node: found '8', expected GPUs:MEMORY:DISK"),
        (("--gpus", "L4", "--seeds", "2"), "--seeds: found 2, expected 1 for a trace file"),
        (("--gpus", "L4", "--seeds", "0"), "--seeds: found 0, expected a whole number from 1"),
        (("--gpus", "L4", "--seed", "5"), "--seed: found 5, expected 0 for a trace file"),
        (("--gpus", "L4", "--price", "L4=1,B4=2"), r"unknown GPU kind in --price 'B4'; did you mean 'L4'\?"),
        (("--gpus", "L4", "--plot", "."), "--plot: found '.', expected a file"),
        (("--gpus", "L4", "--plot", "x.bmp"), "--plot: found 'x.bmp', expected a file that ends in .png"),
        (("--gpus", "L4", "--plot", "no/x.png"), "--plot: found 'no/x.png', expected a file in an existing folder"),
        (("--gpus", "2GiB"), r"job-5 \(sample\) needs at least 2\.2 GiB of device memory, the budget is 2\.0 GiB"),
    ],
)
def test_what_is_wrong_is_told(command: Command, trace: str, arguments: tuple[str, ...], said: str) -> None:
    ended = command("simulate", trace, *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert re.search(said, ended.err)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", r"\. is a folder; expected a trace file"),
        ("nowhere.jsonl", "nowhere.jsonl: no such file; expected a trace file, or a built-in workload such as zipf"),
        ("zipg", r"unknown workload 'zipg'; did you mean 'zipf'\?"),
        ("zipf:jobs=many", "zipf: jobs: found 'many', expected a whole number"),
        ("zipf:cats=3", "unknown parameter of zipf 'cats'"),
        ("zipf:jobs", "zipf: found 'jobs', expected NAME=VALUE"),
    ],
)
def test_work_that_there_is_not_is_told(command: Command, name: str, said: str) -> None:
    ended = command("simulate", name, "--gpus", "L4")
    assert (ended.code, ended.out) == (2, "")
    assert re.search(said, ended.err)


def test_a_broken_trace_is_told_with_file_line_and_field(command: Command, trace: str) -> None:
    lines = Path(trace).read_text().splitlines()
    lines[6] = lines[6].replace('"steps": 20', '"steps": "many"')
    Path("broken.jsonl").write_text("\n".join(lines))
    ended = command("simulate", "broken.jsonl", "--gpus", "L4")
    assert ended.code == 2
    assert re.search(r"broken\.jsonl: line 7: steps: found 'many', expected a whole number", ended.err)
    Path("empty.jsonl").write_text(lines[0])
    assert "empty.jsonl: no jobs; expected at least one" in command("simulate", "empty.jsonl", "--gpus", "L4").err
    Path("bytes.jsonl").write_bytes(b"\xff\xfe")
    assert "bytes.jsonl: found invalid start byte" in command("simulate", "bytes.jsonl", "--gpus", "L4").err


def test_the_number_that_is_named_does_and_one_less_does_not(command: Command, trace: str) -> None:
    ended = command(
        "plan-cluster", trace, "--gpus", "L4,H100", "--deadline", "44s", "--price", "L4=0.8,H100=2.5", "--json"
    )
    assert ended.code == 0
    (found,) = ended.objects
    for kind, plan in found["kinds"].items():
        count = plan["count"]
        assert plan["tried"][str(count)]["meets"]
        assert count == 1 or not plan["tried"][str(count - 1)]["meets"]
        again = values(command("simulate", trace, "--gpus", f"{count}x{kind}", "--json"))
        ((one,),) = again["policies"].values()
        assert one["makespan_seconds"] == plan["tried"][str(count)]["makespan_seconds"] <= 44.0
    assert found["kinds"]["L4"]["count"] > found["kinds"]["H100"]["count"]
    said = command("plan-cluster", trace, "--gpus", "L4", "--deadline", "44s").out
    count = found["kinds"]["L4"]["count"]
    assert re.search(rf"^{count}x < +yes ", said, re.MULTILINE)
    assert re.search(rf"^{count - 1}x +no ", said, re.MULTILINE)
    above = re.search(rf"^{count + 1}x +(yes|no) ", said, re.MULTILINE)
    assert above is not None, said
    assert (above[1] == "no") == ("exceptions among those tried" in said), "that more GPUs are worse by chance is told"
    assert re.search(rf"^L4 +bottleneck with {count}: \w+", said, re.MULTILINE)


def test_kinds_that_are_simulated_at_the_same_time_have_the_same_plan(
    command: Command, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, as a large workload, and one after the other: equal except for measured times."""
    arguments = ("plan-cluster", trace, "--gpus", "L4,H100", "--deadline", "44s", "--price", "L4=0.8,H100=2.5")
    alone = command(*arguments).out
    monkeypatch.setattr(plan_cluster, "LEAST_JOBS_IN_PROCESSES", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert command(*arguments).out == alone


def test_a_goal_that_no_number_reaches_is_told(command: Command, trace: str) -> None:
    ended = command("plan-cluster", trace, "--gpus", "L4", "--latency", "1s", "--most", "6")
    assert ended.code == 1
    assert re.search(r"^L4 +not with up to 6$", ended.out, re.MULTILINE)
    small = command("plan-cluster", trace, "--gpus", "2GiB", "--latency", "1s")
    assert small.code == 1
    assert re.search(r"^2GiB +impossible: job-5 \(sample\) needs at least", small.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--deadline or --latency is required"),
        (("--deadline", "soon"), "--deadline: found 'soon', expected a time such as 90 .seconds., 45s, 10m, 2h"),
        (("--deadline", "500d"), "--deadline: found '500d', expected a time .*, above 0 and up to 366d"),
        (("--deadline", "3s"), "--deadline: found '3s', expected more than 12s, when the last job arrives"),
        (("--latency", "3s", "--most", "0"), "--most: found 0, expected a whole number from 1"),
        (("--latency", "3s", "--policy", "all"), "--policy: found 'all', expected one policy"),
    ],
)
def test_what_is_wrong_in_a_plan_is_told(command: Command, trace: str, arguments: tuple[str, ...], said: str) -> None:
    ended = command("plan-cluster", trace, "--gpus", "L4", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert re.search(said, ended.err)
    counted = command("plan-cluster", trace, "--gpus", "4xL4", "--latency", "3s")
    assert "--gpus: found '4xL4', expected kinds without numbers" in counted.err


def test_deadlines_are_told_as_met_and_missed(command: Command) -> None:
    """Found in a review: they were read and told nowhere. They count from `at`, as everywhere."""
    lines: list[dict[str, Any]] = [HEAD[0], HEAD[1]]
    lines += [{"at": 100.0 * n, "model": "sd", "steps": 20, "deadline": 0.1 if n == 2 else 60.0} for n in range(4)]
    Path("due.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = values(command("simulate", "due.jsonl", "--gpus", "L4", "--json"))["policies"]["modelpool"][0]
    assert (one["deadlines_met"], one["deadlines_missed"]) == (3, 1)
    assert re.search(
        r"^deadlines +3 met, 1 missed$", command("simulate", "due.jsonl", "--gpus", "L4").out, re.MULTILINE
    )
    compared = command("simulate", "due.jsonl", "--gpus", "L4", "--policy", "modelpool,lru").out
    assert re.search(r"^policy .* in time$", compared, re.MULTILINE)
    assert re.search(r"^lru .* 75%$", compared, re.MULTILINE)
    command("simulate", "due.jsonl", "--save-trace", "long.jsonl")
    again = values(command("simulate", "long.jsonl", "--gpus", "L4", "--json"))["policies"]["modelpool"][0]
    assert again == one


def test_without_machines_there_are_no_disks(command: Command, trace: str) -> None:
    """Found in a review: `--node none` told of LoRAs read from disks."""
    for policies in ("modelpool", "modelpool,lru"):
        said = command("simulate", trace, "--gpus", "2xL4", "--node", "none", "--policy", policies).out
        assert "machines  none: all files are in memory" in said
        assert "disk" not in said


def test_a_image_of_one_job_shows_its_latency() -> None:
    """Found in a review: a line of one point cannot be seen, and hours were too long a unit for short loads."""
    figure = Figure()
    axes = figure.subplots()
    simulating_images._draw_latencies(axes, {"modelpool": Compared([], [2.5])})
    (line,) = axes.lines
    assert [list(line.get_xdata()), list(line.get_ydata())] == [[2.5, 2.5], [0.0, 1.0]]
