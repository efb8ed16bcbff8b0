"""A workload goes through lines of text unchanged, and lines that say something else are refused by line and field."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import MIB, UserError
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    ExecutionMode,
    JobId,
    JobSpec,
    Role,
    Stage,
    TaskId,
    TaskSpec,
    UserId,
)
from modelpool.scheduler.model.jobs import problem_with
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.generators import poisson
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.trace_lines import from_lines, to_lines
from modelpool.scheduler.simulator.workloads.workload import Workload
from tests.each_case import each_case

NAMES = st.text(min_size=1, max_size=6)
COUNTS = st.integers(0, 2**40)
SECONDS = st.floats(0.0, 1e9, allow_nan=False)
DIVISIONS = st.builds(
    ExecutionMode, COUNTS, st.integers(0, 9), st.integers(0, 9), st.floats(1.0, 9.0, allow_nan=False), COUNTS
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Any well-formed workload: all fields, any names, tasks of one kind in several jobs."""
    keys = [ComponentKey(name) for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))]
    sizes = st.integers(1, 2**40)
    components = tuple(ComponentSpec(key, draw(st.sampled_from(Role)), draw(sizes), draw(sizes)) for key in keys)
    use = st.builds(
        ComponentUse,
        st.sampled_from(keys),
        COUNTS,
        st.text(max_size=4),
        COUNTS,
        st.integers(1, 50),
        st.lists(st.sampled_from(keys), max_size=2).map(tuple),
    )
    uses = st.lists(use, max_size=3, unique_by=lambda one: one.component).map(tuple)
    divisions = st.lists(DIVISIONS, max_size=2).map(tuple)
    kind = st.builds(
        TaskSpec,
        st.just(TaskId("")),
        st.sampled_from(Stage),
        uses,
        COUNTS,
        SECONDS,
        divisions=divisions,
        counted_bytes=COUNTS,
        together=st.text(max_size=3),
        pass_key=st.text(max_size=3),
        degrees=st.sampled_from([(1,), (1, 2), (2,), (1, 2, 4, 8)]),
    )
    kinds = draw(st.lists(kind, min_size=1, max_size=3))
    times = sorted(draw(st.lists(SECONDS, max_size=4)))
    jobs = []
    for number, at in enumerate(times):
        given_ids = [TaskId(name) for name in draw(st.lists(NAMES, max_size=2, unique=True))]
        made, tasks = list(given_ids), []
        for drawn in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
            name = f"{drawn} of {number}"
            if name in made:
                continue
            needs = draw(st.lists(st.sampled_from(made), max_size=2)) if made else []
            tasks.append(replace(draw(st.sampled_from(kinds)), task_id=TaskId(name), needs=tuple(needs)))
            made.append(TaskId(name))
        job = JobSpec(
            JobId(f"job {number}"),
            tuple(tasks),
            draw(st.sampled_from(made)),
            tuple(given_ids),
            draw(st.integers(-5, 5)),
            UserId(draw(st.text(max_size=3))),
            draw(st.none() | st.just(max(at, draw(SECONDS)))),
            draw(st.text(max_size=3)),
        )
        jobs.append(Submitted(at, job, others_follow=number + 1 < len(times) and draw(st.booleans())))
    return Workload(draw(st.text(max_size=5)), components, tuple(jobs))


@given(workloads())
@settings(max_examples=40)
def test_there_and_back_is_the_same(workload: Workload) -> None:
    lines = list(to_lines(workload))
    assert not any("\n" in line for line in lines)
    assert from_lines(lines) == workload
    assert list(to_lines(from_lines(lines))) == lines


def test_nothing_that_a_job_is_made_of_is_left_out() -> None:
    """A field that is new in one of these must find its way into traces, and into the workloads drawn here. Fetches of
    files are not simulated; names of inputs and options, and what users are told, do not matter to a scheduler."""
    told = {kind: {field.name for field in fields(kind)} for kind in (JobSpec, TaskSpec, ComponentUse, ComponentSpec)}
    assert told == {
        JobSpec: {"job_id", "tasks", "wanted", "given", "priority", "user", "deadline", "batch", "batch_reason"},
        TaskSpec: {
            *("task_id", "stage", "uses", "activation_bytes", "run_seconds", "needs", "divisions"),
            *("counted_bytes", "together", "input_names", "options", "batch_size", "is_kept"),
            *("degrees", "pass_key", "file_names"),
        },
        ComponentUse: {"component", "scratch_bytes", "patch_digest", "patched_bytes", "passes", "adapters"},
        ComponentSpec: {"key", "role", "weight_bytes", "upload_bytes", "fetch_bytes", "fetch_key"},
    }
    assert {field.name for field in fields(ExecutionMode)} == {
        *("activation_bytes", "batch", "tile", "slowdown", "counted_bytes")
    }


def test_an_invented_workload_goes_through_and_kinds_are_told_once() -> None:
    rng = Random(4)
    mix = Mix([InventedModel("a"), InventedModel("b")], ["", "x"], seeds_per_prompt=3, controlnets=["", "pose"])
    workload = Workload("both", mix.components, tuple(mix.submissions(poisson(60, 1.0, rng), rng)))
    lines = list(to_lines(workload))
    assert from_lines(lines) == workload
    assert len(lines) < 60 + 1 + len(workload.components) + 30, "a line for each job, and few beside"


SHORT = """
{"modelpool_trace": 1, "name": "by hand"}
{"model": "sdxl", "diffusion_bytes": 5140000000, "step_seconds": 0.07, "lora_bytes": 1048576}
{"at": 0, "model": "sdxl"}
{"at": 1.5, "model": "sdxl", "loras": ["x", "y"], "controlnets": ["pose"], "steps": 30, "user": "ann", "deadline": 9}
{"at": 1.5, "model": "sdxl", "loras": ["x"], "prompt": "a cat", "seed": 7, "job": "cat", "batch": "b", "priority": 2}
"""


def test_people_may_write_the_short_form() -> None:
    workload = from_lines(SHORT.splitlines())
    model = InventedModel("sdxl", diffusion_bytes=5140000000, step_seconds=0.07, lora_bytes=MIB)
    assert workload.components == (*model.components, *model.adapters(["x", "y"], ["pose"]))
    first, second, third = (submitted.job for submitted in workload.jobs)
    assert first == model.job("job-4", "prompt 4", 4)
    assert second == model.job(
        "job-5", "prompt 5", 5, loras=["x", "y"], controlnets=["pose"], steps=30, user="ann", deadline=10.5
    )
    assert third == model.job("cat", "a cat", 7, loras=["x"], batch="b", priority=2)
    assert from_lines(to_lines(workload)) == workload
    known = {spec.key for spec in workload.components}
    assert all(problem_with(submitted.job, known) is None for submitted in workload.jobs)


HEADER = '{"modelpool_trace": 1}'
VAE = '{"component": "v", "role": "vae", "weight_bytes": 1, "upload_bytes": 1}'
DECODE = '{"kind": 0, "stage": "decode", "uses": [{"component": "v"}], "activation_bytes": 1, "run_seconds": 1.0}'
JOB = '{"at": 1.0, "job": "a", "tasks": [["t", 0]], "wanted": "t"}'
MODEL = '{"model": "m"}'
GOOD = [HEADER, VAE, DECODE, JOB, MODEL]


def changed(line: str, **fields: object) -> str:
    """The line with these fields; None takes one away."""
    values = json.loads(line) | fields
    return json.dumps({name: value for name, value in values.items() if value is not None})


BAD = {
    "nothing at all": ([], "line 1"),
    "not JSON": ([HEADER, "at: 3"], "line 2"),
    "not an object": ([HEADER, "[1]"], "line 2"),
    "a field twice": ([HEADER, '{"model": "a", "model": "b"}'], "line 2.*twice"),
    "no header": ([VAE], "line 1: modelpool_trace"),
    "another version": (['{"modelpool_trace": 2}'], "line 1: modelpool_trace: found 2, expected 1"),
    "an unknown field": ([HEADER, changed(VAE, weight=3)], "field of line 2 'weight'.*weight_bytes"),
    "an unknown line": ([HEADER, '{"size": 3}'], "line 2"),
    "an unknown role": ([HEADER, changed(VAE, role="vea")], "line 2: role: found 'vea', expected one of .*vae"),
    "no bytes": ([HEADER, changed(VAE, weight_bytes=0)], "line 2: weight_bytes: found 0"),
    "half a byte": ([HEADER, changed(VAE, upload_bytes=0.5)], "line 2: upload_bytes: found 0.5"),
    "a truth for bytes": ([HEADER, changed(VAE, upload_bytes=True)], "line 2: upload_bytes: found True"),
    "a component twice": ([HEADER, VAE, VAE], "line 3: component: found 'v', expected each component once"),
    "an unknown component": ([HEADER, DECODE], r"line 2: uses\[0\]: component: found 'v'"),
    "an unknown adapter": (
        [HEADER, VAE, changed(DECODE, uses=[{"component": "v", "adapters": ["x"]}])],
        r"line 3: uses\[0\]: adapters: found 'x'",
    ),
    "an unknown field inside": ([HEADER, VAE, changed(DECODE, uses=[{"component": "v", "pass": 2}])], r"uses\[0\]"),
    "no passes": ([HEADER, VAE, changed(DECODE, uses=[{"component": "v", "passes": 0}])], r"uses\[0\]: passes"),
    "NaN seconds": ([HEADER, VAE, changed(DECODE, run_seconds=float("nan"))], "line 3: run_seconds: found nan"),
    "negative seconds": ([HEADER, VAE, changed(DECODE, run_seconds=-1)], "line 3: run_seconds: found -1"),
    "a kind twice": ([HEADER, VAE, DECODE, DECODE], "line 4: kind"),
    "an unknown kind": ([HEADER, VAE, JOB], r"line 3: tasks\[0\]\[1\]: found 0"),
    "a task without a kind": ([HEADER, VAE, DECODE, changed(JOB, tasks=[["t"]])], r"line 4: tasks\[0\]"),
    "a need of nobody": ([HEADER, VAE, DECODE, changed(JOB, tasks=[["t", 0, "s"]])], "line 4: tasks.*needs s"),
    "a task twice": ([HEADER, VAE, DECODE, changed(JOB, tasks=[["t", 0], ["t", 0]])], "line 4: tasks.*twice"),
    "a wish of nobody": ([HEADER, VAE, DECODE, changed(JOB, wanted="s")], "line 4: tasks.*wanted: found s"),
    "a job twice": ([HEADER, VAE, DECODE, JOB, JOB], "line 5: job: found 'a'"),
    "a job out of order": ([HEADER, VAE, DECODE, JOB, changed(JOB, at=0.5, job="b")], "line 5: at: found 0.5"),
    "endless time": ([HEADER, VAE, DECODE, changed(JOB, at=float("inf"))], "line 4: at: found inf"),
    "time before the start": ([HEADER, VAE, DECODE, changed(JOB, at=-1)], "line 4: at: found -1"),
    "a huge number": ([HEADER, VAE, DECODE, changed(JOB, at=10**400)], "line 4: at"),
    "a deadline before the job": (
        [HEADER, VAE, DECODE, changed(JOB, at=3, deadline=2.5)],
        "line 4: deadline: found 2.5",
    ),
    "nanoseconds since 1970": ([HEADER, VAE, DECODE, changed(JOB, at=1.7e18)], r"line 4: at: .* to 1000000000000\.0"),
    "seconds for ages": ([HEADER, VAE, changed(DECODE, run_seconds=1e308)], "line 3: run_seconds: found 1e.308"),
    "steps for ages": ([HEADER, changed(MODEL, step_seconds=1e308)], "line 2: step_seconds: found 1e.308"),
    "many steps for ages": (
        [HEADER, changed(MODEL, step_seconds=1e8), '{"at": 0, "model": "m", "steps": 99}'],
        "line 3: steps: found .*, expected steps that take at most 1e.09 seconds",
    ),
    "a part faster than the whole": (
        [HEADER, VAE, changed(DECODE, divisions=[{"activation_bytes": 0, "slowdown": 0.5}])],
        r"line 3: divisions\[0\]: slowdown: found 0.5",
    ),
    "one task of two kinds": (
        [HEADER, VAE, DECODE, changed(DECODE, kind=1, stage="encode"), JOB, changed(JOB, job="b", tasks=[["t", 1]])],
        "line 6: tasks: found 't', expected the same .* as in job a",
    ),
    "one task with two needs": (
        [HEADER, VAE, DECODE, JOB, changed(JOB, job="b", tasks=[["s", 0], ["t", 0, "s"]])],
        "line 5: tasks: found 't', expected the same .* as in job a",
    ),
    "a deadline in words": ([HEADER, VAE, DECODE, changed(JOB, deadline="soon")], "line 4: deadline: found 'soon'"),
    "a model twice": ([HEADER, MODEL, MODEL], "line 3: model"),
    "an unknown model": ([HEADER, '{"model": "sdxl"}', '{"at": 0, "model": "sdlx"}'], "line 3.*did you mean 'sdxl'"),
    "a LoRA twice": ([HEADER, MODEL, '{"at": 0, "model": "m", "loras": ["x", "x"]}'], "line 3: loras"),
    "a LoRA of two": ([HEADER, MODEL, '{"at": 0, "model": "m", "loras": ["x+y"]}'], "line 3: loras: found 'x\\+y'"),
    "no steps": ([HEADER, MODEL, '{"at": 0, "model": "m", "steps": 0}'], "line 3: steps: found 0"),
    "nobody behind the last job": ([HEADER, VAE, DECODE, changed(JOB, others_follow=1)], "others_follow of a: found"),
    "others that follow, in words": ([HEADER, VAE, DECODE, changed(JOB, others_follow="yes")], "line 4: others_follow"),
    "both forms": ([HEADER, MODEL, changed(JOB, model="m")], "field of line 3 'tasks'"),
}


@each_case("what", BAD)
def test_what_is_wrong_is_refused_by_line_and_field(what: str) -> None:
    lines, words = BAD[what]
    with pytest.raises(UserError, match=words):
        from_lines(lines)


def test_what_these_are_changed_from_is_taken() -> None:
    workload = from_lines(["", *GOOD, "  "])
    assert [submitted.job.job_id for submitted in workload.jobs] == ["a"]


def test_what_a_task_takes_may_be_known_better_later() -> None:
    """As in what was recorded of a pool that learns."""
    later = changed(DECODE, kind=1, run_seconds=2.0, activation_bytes=5)
    workload = from_lines([HEADER, VAE, DECODE, later, JOB, changed(JOB, job="b", tasks=[["t", 1]])])
    assert [submitted.job.tasks[0].run_seconds for submitted in workload.jobs] == [1.0, 2.0]


def test_what_no_trace_can_keep_is_refused_when_it_is_written() -> None:
    """JSON has no NaN: found with a task with an estimate that was never made."""
    workload = from_lines(GOOD)
    job = workload.jobs[0].job
    broken = replace(job, tasks=(replace(job.tasks[0], run_seconds=float("nan")),))
    with pytest.raises(UserError, match="finite"):
        list(to_lines(replace(workload, jobs=(Submitted(1.0, broken),))))
