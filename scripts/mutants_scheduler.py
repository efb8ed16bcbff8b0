"""Plants known bugs in the scheduler, one at a time, and says which of them the tests catch. A tool for developers.

Works on a copy in a temporary folder; nothing in the working tree changes. Takes some minutes.

    .venv/bin/python scripts/mutants_scheduler.py [WORD ...]     only bugs whose name holds one of the words
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: cheapest first: a run stops at the first test that fails
TESTS = ("tests/scheduler", "tests/pool/test_residency.py", "tests/simulation")


#: a failure is enough; what its smallest form would be does not matter here
NO_SHRINKING = """
from hypothesis import Phase
settings.register_profile("mutants", deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutants")
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `path`, `old` (which occurs once) becomes `new`."""

    name: str
    path: str
    old: str
    new: str


MUTANTS = (
    # ---- news and numbers ----
    Mutant(
        "old incarnations are believed",
        "scheduler/workers.py",
        "worker is not None and worker.incarnation == incarnation else None",
        "worker is not None else None",
    ),
    Mutant("old attempts are believed", "scheduler/state.py", " or task.attempt != report.attempt", ""),
    Mutant(
        "a stray result is kept by the shell",
        "scheduler/results.py",
        "            self._strays.append(task_id)",
        "            pass",
    ),
    Mutant(
        "an incarnation number is used twice",
        "scheduler/workers.py",
        "incarnation = self.incarnations.get(worker_id, 0) + 1",
        "incarnation = 1",
    ),
    Mutant(
        "a worker that appears anew keeps its task",
        "scheduler/workers.py",
        "        lost_task = worker.task_id\n        if worker.live:",
        "        lost_task = None\n        if worker.live:",
    ),
    Mutant(
        "a second introduction is ignored",
        "scheduler/workers.py",
        'return self.lost(worker, "it introduced itself again")',
        "return None",
    ),
    Mutant(
        "an old incarnation that comes up is let live",
        "scheduler/workers.py",
        "or spec.incarnation < worker.incarnation",
        "or False",
    ),
    Mutant(
        "a start that fails late takes down a live worker",
        "scheduler/state.py",
        "if worker is not None and worker.status is WorkerStatus.STARTING:",
        "if worker is not None:",
    ),
    # ---- workers ----
    Mutant(
        "a completed run forgives nothing",
        "scheduler/workers.py",
        "        if report.error is None:\n            worker.failures = 0\n",
        "",
    ),
    Mutant("restarts are never slowed down", "scheduler/workers.py", "if failures <= 1:", "if failures <= 1000:"),
    Mutant(
        "a worker is never given up",
        "scheduler/workers.py",
        "elif worker.failures >= self._config.start_retry_limit:",
        "elif False:",
    ),
    Mutant(
        "an unwanted worker takes new tasks",
        "scheduler/workers.py",
        "if w.status is status and w.wanted]",
        "if w.status is status]",
    ),
    Mutant(
        "an unwanted worker that is lost is replaced",
        "scheduler/workers.py",
        "        worker.failures += 1\n        if not worker.wanted:\n            self._forget(worker)\n        elif",
        "        worker.failures += 1\n        if",
    ),
    Mutant(
        "an unwanted busy worker never ends",
        "scheduler/workers.py",
        "WorkerStatus.IDLE)\n        if not worker.wanted:\n            self._forget(worker)\n\n    def current",
        "WorkerStatus.IDLE)\n\n    def current",
    ),
    Mutant(
        "a report does not correct what was assumed",
        "scheduler/workers.py",
        "        worker.believe(report.residency)\n",
        "",
    ),
    Mutant(
        "a placement assumes nothing",
        "scheduler/workers.py",
        "        worker.believe(assumed)\n",
        "",
    ),
    Mutant(
        "a second attempt is not known to evict first",
        "scheduler/state.py",
        "if task.attempt > 1:",
        "if task.attempt > 1000:",
    ),
    Mutant(
        "new jobs hope where there is no hope",
        "scheduler/demand.py",
        "elif hopeless is not None:",
        "elif False:",
    ),
    Mutant(
        "live jobs hope where there is no hope",
        "scheduler/state.py",
        "        if hopeless is not None:",
        "        if False:",
    ),
    # ---- what fits ----
    Mutant(
        "fits is judged by the live workers only",
        "scheduler/workers.py",
        "if w.wanted and w.status is not WorkerStatus.GIVEN_UP]",
        "if w.wanted and w.live]",
    ),
    Mutant(
        "a worker that never was up fits nothing",
        "scheduler/workers.py",
        "        if any(w.capacity_bytes is None for w in expected):\n            return None\n",
        "",
    ),
    Mutant(
        "the smallest worker decides what fits", "scheduler/workers.py", "return max(expected", "return min(expected"
    ),
    Mutant(
        "what fits no more waits for ever",
        "scheduler/state.py",
        "            self.demand.fail_unfit()\n",
        "            pass\n",
    ),
    Mutant(
        "a smaller capacity in a report changes nothing",
        "scheduler/state.py",
        "pool_changed = worker.capacity_bytes != capacity_bytes or not worker.wanted",
        "pool_changed = not worker.wanted",
    ),
    # ---- cancel ----
    Mutant(
        "cancelling twice stops twice",
        "scheduler/demand.py",
        "elif task.status is TaskStatus.RUNNING:",
        "else:",
    ),
    Mutant(
        "a cancelled job does not wait for its run",
        "scheduler/demand.py",
        "if task is not None and not task.demand:",
        "if False:",
    ),
    Mutant(
        "a cancelled job waits for a run that others need",
        "scheduler/demand.py",
        "if task is not None and not task.demand:",
        "if task is not None and task.on_worker:",
    ),
    Mutant(
        "cancelling stops a run that others need",
        "scheduler/demand.py",
        "        if task.demand:\n            self._reorder(task)\n        elif not",
        "        if task.demand and not task.on_worker:\n            self._reorder(task)\n        elif not",
    ),
    Mutant(
        "who waits for a run is forgotten",
        "scheduler/demand.py",
        "waiting, task.awaited_by = task.awaited_by, {}",
        "waiting, task.awaited_by = {}, {}",
    ),
    Mutant(
        "cancelled without being asked is believed",
        "scheduler/retry.py",
        "if error.kind is not RunErrorKind.CANCELLED or stop_asked:",
        "if True:",
    ),
    # ---- retry ----
    Mutant("retry without limit", "scheduler/retry.py", "RETRIED[kind] and failures < max_attempts", "RETRIED[kind]"),
    Mutant("one retry too few", "scheduler/retry.py", "failures < max_attempts", "failures < max_attempts - 1"),
    Mutant(
        "bad input is tried again",
        "scheduler/retry.py",
        "RunErrorKind.BAD_INPUT: False",
        "RunErrorKind.BAD_INPUT: True",
    ),
    Mutant(
        "a wished stop counts as a failure", "scheduler/demand.py", "if ruling is not Verdict.AGAIN_FREE:", "if True:"
    ),
    Mutant(
        "input lost makes no input again",
        "scheduler/demand.py",
        "        if error.kind is RunErrorKind.INPUT_LOST:",
        "        if False:",
    ),
    Mutant(
        "results may be lost without limit",
        "scheduler/demand.py",
        "if job.losses[task_id] >= self._config.max_attempts:",
        "if False:",
    ),
    Mutant(
        "a task is requeued without its inputs",
        "scheduler/demand.py",
        "        if task.status is TaskStatus.BLOCKED:\n            for job_id in list(task.demand):",
        "        if False:\n            for job_id in list(task.demand):",
    ),
    Mutant(
        "what reads a lost result starts all the same",
        "scheduler/demand.py",
        "            if reader.status is TaskStatus.READY:\n                self.backlog.remove(reader)",
        "            if False:\n                self.backlog.remove(reader)",
    ),
    # ---- sharing and results ----
    Mutant(
        "a failing task fails one job only",
        "scheduler/demand.py",
        "for job_id in list(task.demand):\n            self.fail(",
        "for job_id in list(task.demand)[:1]:\n            self.fail(",
    ),
    Mutant("a second submission runs again", "scheduler/demand.py", " or spec.job_id in self.ended:", ":"),
    Mutant("malformed jobs are taken", "scheduler/demand.py", "        if problem is not None:", "        if False:"),
    Mutant("every result is kept for later", "scheduler/demand.py", "task.spec.stage is Stage.ENCODE", "True"),
    Mutant("no result is kept for later", "scheduler/demand.py", "task.spec.stage is Stage.ENCODE", "False"),
    Mutant(
        "a given result is never released",
        "scheduler/demand.py",
        "            self.results.not_given(task_id, job_id)",
        "            pass",
    ),
    Mutant(
        "a given result is released while its job lives",
        "scheduler/results.py",
        "if task_id in self.readers or result.givers:",
        "if task_id in self.readers:",
    ),
    Mutant(
        "a result is released while somebody reads it",
        "scheduler/results.py",
        "if task_id in self.readers or result.givers:",
        "if result.givers:",
    ),
    Mutant(
        "a given result saves nobody a run",
        "scheduler/demand.py",
        "            for job_id in [] if task is None else list(task.demand):",
        "            for job_id in []:",
    ),
    Mutant(
        "results are released before the job is resolved",
        "scheduler/state.py",
        "        commands = list(self._out)",
        "        commands = sorted(self._out, key=lambda c: not isinstance(c, ReleaseResult))",
    ),
    Mutant(
        "the newest kept result goes first",
        "scheduler/results.py",
        "next(iter(self.kept))",
        "next(reversed(self.kept))",
    ),
    Mutant(
        "kept results are not bounded by bytes",
        "scheduler/results.py",
        " or self.kept_bytes > self._kept_bytes_limit:",
        ":",
    ),
    Mutant(
        "one huge result drives all others out",
        "scheduler/results.py",
        "elif result.shareable and result.result_bytes <= self._kept_bytes_limit:",
        "elif result.shareable:",
    ),
    Mutant(
        "what has its inputs on a worker is made again",
        "scheduler/jobs.py",
        "if task_id in needed and not on_worker(task_id):",
        "if task_id in needed:",
    ),
    Mutant(
        "a lost given result leaves its job waiting",
        "scheduler/demand.py",
        "        if missing is not None:",
        "        if False:",
    ),
    Mutant(
        "ready tasks are forgotten in the backlog",
        "scheduler/demand.py",
        "            self.backlog.remove(task)\n        self._story.move(task, TaskStatus.ENDED, note)",
        "            pass\n        self._story.move(task, TaskStatus.ENDED, note)",
    ),
    Mutant(
        "signatures are never forgotten", "scheduler/demand.py", "        self._costs.release(task.signature)\n", ""
    ),
    # ---- order ----
    Mutant(
        "a shared task keeps the lower priority",
        "scheduler/demand.py",
        "        if priority == task.priority:",
        "        if priority >= task.priority:",
    ),
    Mutant(
        "a shared task keeps the higher priority",
        "scheduler/demand.py",
        "        if task.demand:\n            self._reorder(task)\n        elif",
        "        if task.demand:\n            pass\n        elif",
    ),
    Mutant(
        "nobody is ever overdue",
        "scheduler/backlog.py",
        "                if passed.passed == self._overtaking_limit:",
        "                if False:",
    ),
    Mutant(
        "nobody is passed over",
        "scheduler/backlog.py",
        "                passed.passed += 1",
        "                passed.passed += 0",
    ),
    Mutant(
        "the overdue wait like all others",
        "scheduler/placement.py",
        "for task in tasks if question.backlog.overdue else ():",
        "for task in ():",
    ),
    Mutant(
        "the shortcut forgets the overdue",
        "scheduler/placement.py",
        "    if any(task.priority == first.priority for task in question.backlog.overdue):\n        return None\n",
        "",
    ),
    Mutant(
        "the shortcut forgets priorities",
        "scheduler/placement.py",
        "if task.priority != first.priority or task.order",
        "if task.order",
    ),
    Mutant(
        "the shortcut looks beyond the window",
        "scheduler/placement.py",
        " or task.order > last.order or",
        " or",
    ),
    Mutant(
        "earlier stages go first",
        "scheduler/placement.py",
        "rank = (-task.signature.rank, task.number)",
        "rank = (task.signature.rank, task.number)",
    ),
    Mutant(
        "large tasks hide small ones",
        "scheduler/backlog.py",
        "return bisect_left(self.capacities, capacity_bytes) + 1",
        "return len(self._classes)",
    ),
    # ---- placement and costs ----
    Mutant(
        "nobody waits for a warm worker",
        "scheduler/placement.py",
        "            if better is None:",
        "            if True:",
    ),
    Mutant(
        "everybody waits for the same worker",
        "scheduler/placement.py",
        "            promised[better[0].worker_id] = better[1]\n",
        "            pass\n",
    ),
    Mutant(
        "a run that is late is expected at once",
        "scheduler/workers.py",
        "abs(self.expected_end - at)",
        "max(0.0, self.expected_end - at)",
    ),
    Mutant(
        "runs of unknown length are waited for",
        "scheduler/workers.py",
        "return None if self.expected_end is None else",
        "return 0.0 if self.expected_end is None else",
    ),
    Mutant(
        "evicted bytes do not matter",
        "scheduler/placement.py",
        "key=lambda w: (_evicted_bytes(costs, signature, w), w.worker_id)",
        "key=lambda w: w.worker_id",
    ),
    Mutant(
        "a patch switch costs nothing",
        "scheduler/costs.py",
        " + setup.switches * self._patch_switch_seconds",
        "",
    ),
    Mutant(
        "streaming costs nothing",
        "scheduler/costs.py",
        "link_bytes = setup.upload_bytes + setup.streamed_bytes",
        "link_bytes = setup.upload_bytes",
    ),
    Mutant(
        "predictions are never made again",
        "scheduler/costs.py",
        "if known is not None and known.version == worker.version:",
        "if known is not None:",
    ),
    Mutant(
        "what is remembered ignores a new link",
        "scheduler/costs.py",
        "if known is not None and known.conditions == worker.conditions and known.seen == seen:",
        "if known is not None and known.seen == seen:",
    ),
    Mutant(
        "run seconds are not learnt",
        "scheduler/costs.py",
        "            signature.kind.ratio = known + NEWEST * (measured - known)",
        "            pass",
    ),
    Mutant(
        "eviction is not predicted",
        "scheduler/costs.py",
        "        if worker.used_bytes - setup.own_bytes > setup.room_bytes:",
        "        if False:",
    ),
    # ---- the plan itself ----
    Mutant(
        "the plan ignores activations",
        "pool/residency.py",
        "return activation_bytes + max(",
        "return max(",
    ),
    Mutant(
        "the plan evicts what is leased",
        "pool/residency.py",
        "        if entry.component not in leased:\n            stays_bytes",
        "        if True:\n            stays_bytes",
    ),
    Mutant(
        "the plan evicts the newest first",
        "pool/residency.py",
        "for entry in reversed(others):",
        "for entry in others:",
    ),
    Mutant(
        "other patches move no bytes",
        "pool/residency.py",
        "        arriving_bytes += min(before.resident_bytes, target_bytes, touched_bytes)",
        "        arriving_bytes += 0",
    ),
    Mutant(
        "the bus carries compute bytes",
        "pool/residency.py",
        "-(-resident_bytes * spec.upload_bytes // spec.weight_bytes)",
        "resident_bytes",
    ),
    Mutant(
        "modules are chosen anew every time",
        "pool/residency.py",
        "key=lambda m: (m.name not in now, -m.resident_bytes, m.name)",
        "key=lambda m: (m.name in now, -m.resident_bytes, m.name)",
    ),
)


def main(words: list[str]) -> int:
    """Try every mutant that is asked for; the exit status is 1 when one is missed."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("pool", "scheduler", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        with (copy / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(NO_SHRINKING)
        if (failing := _first_failure(copy)) is not None:
            print(f"the tests fail without any mutant: {failing}")
            return 1
        for mutant in chosen:
            caught_by = _try(copy, mutant)
            print(f"{'caught' if caught_by else 'MISSED'}  {mutant.name}: {caught_by or '-'}", flush=True)
            if caught_by is None:
                missed.append(mutant.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return 1 if missed else 0


def _try(copy: Path, mutant: Mutant) -> str | None:
    """The test that catches it, or None. Raises ValueError when the source is no longer what the mutant expects."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.path} has {source.count(mutant.old)} places like it, expected one")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return _first_failure(copy)
    finally:
        path.write_text(source, encoding="utf-8")


def _first_failure(copy: Path) -> str | None:
    """The first test that fails, None when all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--hypothesis-seed=1",
        *TESTS,
    ]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
