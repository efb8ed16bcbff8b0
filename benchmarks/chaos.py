"""Kills the processes of a pool at random points, and checks that detached jobs keep their guarantees.

    python -m benchmarks.chaos [--images 1000] [--faults 100] [--seed S] [--minutes M] [--pause 3] [--only FAULT ...]

A batch of small images is submitted to a pool of simulated GPUs, by the command line, once without faults and then
again and again until enough faults were injected: kill -9 of a worker, the controller, the job service, the daemon, a
driver (waiting or submitting), the raylet, Ray's control service and the fork server; SIGSTOP for a while; a full disk
(journal and outputs); an output folder that is moved away, or has a file in its place. Where a fault ends the pool, it
is started again, as a user's supervisor would do. After each fault the journal is checked against a model of the
guarantees (`benchmarks.chaos_model`), and at the end of a batch every file against the fault-free run. The end also
requires an empty temporary folder and no process.

Runs in its own mount and process namespaces (`unshare`, as root or with user namespaces), with its own /tmp: no fault
hits anything else, and nothing can be left behind. Prints every fault, and a table; exits with 1 if a guarantee was
broken. The same seed draws the same faults; when they hit depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaos_model import Guarantees, JournalRows, digest, read_journal

ROOT = Path(__file__).resolve().parents[1]
POOL = "chaos"
#: weights of the faults: those that end the pool are rarer, since its start takes longest
KILLS = {
    "worker": 6, "controller": 4, "job service": 4, "driver": 3, "daemon": 2, "raylet": 1, "GCS": 1, "fork server": 1,
}  # fmt: skip
#: with the longest time of a SIGSTOP, in seconds: a worker or a job service that is stopped for 60 s is given up
STOPS = {"worker": (2, 60.0), "controller": (2, 15.0), "job service": (1, 75.0), "GCS": (1, 10.0), "daemon": (1, 10.0)}
DISK = {"disk full": (2, 12.0), "folder moved away": (2, 0.0), "file in place of the folder": (2, 8.0)}
#: without a commit for so long after the last fault, the pool counts as stuck
STUCK_SECONDS = 300.0
#: limit of the commands that run at the end, which may lose their pool at any point
HUNG_SECONDS = 180.0
DISK_BYTES = 256 << 20
#: interval of a line about the progress while no fault is injected
SAY_SECONDS = 30.0
#: torch has one folder per user in the temporary folder
TORCH_CACHE = "torchinductor_"
#: size of the small submissions that arrive during faults
SMALL = 3


def main() -> None:
    """Enter the namespaces, or, inside, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn and printed by default")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no new faults after that")
    parser.add_argument("--pause", type=float, default=3.0, help="most seconds between work that continues and a fault")
    parser.add_argument(
        "--overlap", type=float, default=0.3, help="share of the faults that hit the recovery from the one before"
    )
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=(), help="faults to draw, such as kill_worker; by default all")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.inside is not None:
        sys.exit(run(wanted, wanted.inside))
    with tempfile.TemporaryDirectory(prefix="modelpool-chaos-", dir="/var/tmp") as work:
        again = [sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:], "--inside", work]
        sys.exit(subprocess.run(namespace_command(Path(work), again), cwd=ROOT, check=False).returncode)


def namespace_command(work: Path, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in namespaces of its own: with a small disk at work/disk, an empty /tmp
    (and in it this checkout, if it is there), and a shell that reaps processes without a parent.
    """
    for name in ("disk", "code"):
        (work / name).mkdir()
    script = (
        'set -e; work=$1; code=$2; shift 2; mount -t tmpfs -o size=$DISK_BYTES chaos "$work/disk"; '
        'mount --bind "$code" "$work/code"; mount -t tmpfs -o mode=1777 chaos /tmp; '
        'case $code in /tmp/*) mkdir -p "$code"; mount --bind "$work/code" "$code"; cd "$code";; esac; '
        'set +e; "$@"; exit $?'
    ).replace("$DISK_BYTES", str(DISK_BYTES))
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*unshare, "bash", "-c", script, "chaos", str(work), str(ROOT), *command]


@dataclass(slots=True)
class Tally:
    """What happened. Written by several threads; each field by one."""

    faults: Counter[str] = field(default_factory=Counter)
    #: starts of the pool, those that failed, and why
    starts: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    images: int = 0
    #: seconds from a fault to the next commit
    continues: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Commands:
    """Runs the command line of modelpool, with a home of its own."""

    def __init__(self, work: Path) -> None:
        self.home, self.disk = work / "home", work / "disk"
        self.log = work / "commands.log"
        self.home.mkdir()
        self.journal = self.disk / "state" / "modelpool" / f"{POOL}.journal.sqlite"
        dropped = ("RAY_", "MODELPOOL_", "XDG_", "TMPDIR")
        self._environment = {name: text for name, text in os.environ.items() if not name.startswith(dropped)}
        self._environment |= {
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.disk / "state"),
            "PYTHONPATH": str(ROOT),
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command; its stderr goes to the log."""
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "modelpool", *arguments],
                env=self._environment, cwd=self.home, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "modelpool", *arguments],
            env=self._environment, cwd=self.home, capture_output=True, text=True, check=False,
        )  # fmt: skip


class Supervisor:
    """Keeps the pool up, the driver waiting and small submissions coming, each in a thread, as users would."""

    def __init__(self, commands: Commands, config: Path, tally: Tally) -> None:
        self._commands, self._config, self._tally = commands, config, tally
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, *tasks: Callable[[], None]) -> None:
        """Run each task again and again, until `stop`."""

        def repeat(task: Callable[[], None]) -> None:
            while not self._stop.is_set():
                task()
                self._stop.wait(0.5)

        self._threads = [threading.Thread(target=repeat, args=(task,), daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        self._stop.set()
        until = time.monotonic() + HUNG_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._tally.violations.append(f"a command has not ended within {HUNG_SECONDS:.0f} s")

    def keep_up(self) -> None:
        """Start the pool if its daemon is gone."""
        if next(processes("daemon"), None) is None:
            started = self._commands.run("up", "--detach", "--name", POOL, "--config", str(self._config))
            self._tally.starts += started.returncode == 0
            if started.returncode:
                lines = started.stderr.strip().splitlines() or [f"exit code {started.returncode}"]
                self._tally.refusals[lines[-1][:160]] += 1


def processes(role: str) -> Iterator[psutil.Process]:
    """Yield the processes of a role, of this namespace."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and role_of(process.cmdline()) == role:
                yield process


def role_of(arguments: Sequence[str]) -> str:
    """Return the role of a process in the pool, by its command line; "" for others."""
    first, line = (arguments[0] if arguments else ""), " ".join(arguments)
    titles = {
        "ray::ControllerActor": "controller",
        "ray::GpuWorkerActor": "worker",
        "ray::JobServiceActor": "job service",
    }
    for title, role in titles.items():
        if first.startswith(title):
            return role
    if first.endswith(("/raylet", "/gcs_server")):
        return "raylet" if first.endswith("/raylet") else "GCS"
    modules = {
        "-m modelpool.actors.cli.cluster.daemon": "daemon",
        "-m modelpool.actors.ray.fork_server": "fork server",
        "-m modelpool wait": "driver",
        "-m modelpool submit": "driver",
    }
    return next((role for module, role in modules.items() if module in line), "")


class Faults:
    """Injects faults, and undoes those that last a while."""

    def __init__(self, rng: random.Random, disk: Path, only: Sequence[str] = ()) -> None:
        """`only` are the faults to draw, by their name in the table; by default all."""
        self._rng, self._disk = rng, disk
        choices = {("kill", role, 0.0): weight for role, weight in KILLS.items()}
        choices |= {("stop", role, most): weight for role, (weight, most) in STOPS.items()}
        choices |= {(kind, "", most): weight for kind, (weight, most) in DISK.items()}
        names = {name.replace("_", " ") for name in only}
        self._choices = {fault: weight for fault, weight in choices.items() if not only or name_of(*fault[:2]) in names}
        self._moved = 0
        #: when, the fault, and how it is undone
        self.lasting: list[tuple[float, str, Callable[[], None]]] = []

    def draw(self) -> tuple[str, str, float]:
        """Return the next fault: kind, target, seconds."""
        kind, target, most = self._rng.choices(list(self._choices), list(self._choices.values()))[0]
        return kind, target, self._rng.uniform(0.5, most) if most else 0.0

    def inject(self, kind: str, target: str, seconds: float, folders: list[Path]) -> bool:
        """Inject a fault; False if there is nothing that it can hit. `folders` of the outputs, the current one first,
        grows if that is moved away.
        """
        if kind in ("kill", "stop"):
            found = sorted(processes(target), key=lambda process: process.pid)
            if not found:
                return False
            process = self._rng.choice(found)
            with contextlib.suppress(psutil.Error):
                if kind == "kill":
                    process.kill()
                else:
                    process.suspend()
                    self._later(seconds, kind, lambda: resume(process))
            return True
        if any(lasting == kind for _, lasting, _ in self.lasting) or not folders[0].is_dir():
            return False
        if kind == "disk full":
            self._later(seconds, kind, fill(self._disk))
            return True
        self._moved += 1
        away = folders[0].with_name(f"{folders[0].name}.{self._moved}")
        folders[0].rename(away)
        folders.append(away)
        if kind == "file in place of the folder":
            with contextlib.suppress(FileExistsError):  # the pool was faster
                folders[0].touch(exist_ok=False)
                self._later(seconds, kind, folders[0].unlink)
        return True

    def undo(self, everything: bool = False) -> None:
        """Undo the faults whose time has come."""
        now = time.monotonic()
        due = [each for each in self.lasting if everything or each[0] <= now]
        self.lasting = [each for each in self.lasting if each not in due]
        for _, _, undo in due:
            undo()

    def _later(self, seconds: float, kind: str, undo: Callable[[], None]) -> None:
        self.lasting.append((time.monotonic() + seconds, kind, undo))


def name_of(kind: str, target: str) -> str:
    """Return the name of a fault, such as "kill worker" or "disk full"."""
    return f"{kind} {target}".strip()


def resume(process: psutil.Process) -> None:
    """Let a stopped process continue, if it still exists."""
    with contextlib.suppress(psutil.Error):
        process.resume()


def fill(disk: Path) -> Callable[[], None]:
    """Write until the disk is full; return what frees it again."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 65536)
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(b"\0" * 512)
    return ballast.unlink


class Run:
    """One run: a pool, batches, faults."""

    def __init__(self, wanted: argparse.Namespace, work: Path, seed: int) -> None:
        self.wanted, self.work = wanted, work
        self.tally = Tally()
        self.model = Guarantees()
        self.commands = Commands(work)
        self.rng = random.Random(seed)
        self.faults = Faults(self.rng, self.commands.disk, wanted.only)
        self.config, self.jobs, self.few_jobs = self._files()
        self.supervisor = Supervisor(self.commands, self.config, self.tally)
        self.batch, self.folders = "", [Path()]
        self._small = 0
        self._last_fault_at, self._last_progress_at, self._commit_count = 0.0, 0.0, 0
        self._waits_for_progress = False
        #: submissions that have ended and were checked
        self._checked: set[str] = set()
        #: guards the model against the thread that submits
        self._lock = threading.Lock()

    def _files(self) -> tuple[Path, Path, Path]:
        config, jobs, few = self.work / "pool.toml", self.work / "jobs.jsonl", self.work / "few.jsonl"
        config.write_text(
            f'[pool]\ndevice = "sim"\nworkers = {self.wanted.workers}\nvram = "64MiB"\n'
            f'[models]\nfolders = ["{ROOT}/examples/shapes/models"]\n'
        )
        lines = [
            json.dumps({"model": "shapes", "prompt": f"a red circle {n}", "seed": n, "steps": self.wanted.steps}) + "\n"
            for n in range(self.wanted.images)
        ]
        jobs.write_text("".join(lines))
        few.write_text("".join(lines[:SMALL]))
        return config, jobs, few

    def everything(self) -> None:
        """The fault-free run, then batches with faults until there were enough."""
        self.supervisor.keep_up()
        if not self.tally.starts:
            raise SystemExit(f"the pool does not start: {list(self.tally.refusals)}")
        self._submit("reference", self.jobs, self.commands.disk / "reference", self.wanted.images)
        began = time.monotonic()
        if self.commands.run("wait", "reference", "--pool", POOL).returncode:
            raise SystemExit("the fault-free run failed")
        _, (folder,) = self.model.acknowledged["reference"]
        self.model.reference = {path.name: digest(path.read_bytes()) for path in folder.glob("*.png")}
        self._check("fault-free run")
        self.tally.violations += self.model.wrong_at_end("reference")
        print(f"fault-free: {self.wanted.images} images in {time.monotonic() - began:.0f} s", flush=True)
        self.supervisor.start(self.supervisor.keep_up, self._wait, self._submit_few)
        until = time.monotonic() + 60 * self.wanted.minutes
        number = 0
        while self.tally.faults.total() < self.wanted.faults and time.monotonic() < until:
            number += 1
            self._one_batch(number, until)
            if self.tally.violations:
                break
        self.faults.undo(everything=True)
        self.supervisor.stop()

    def _one_batch(self, number: int, until: float) -> None:
        name, folder = f"batch-{number}", self.commands.disk / f"batch-{number}"
        folders = [folder]
        while not self._submit(name, self.jobs, folder, self.wanted.images, folders):
            self.faults.undo()
            time.sleep(0.5)
        self.batch, self.folders = name, folders
        self._last_progress_at = self._last_fault_at = time.monotonic()
        said_at = time.monotonic()
        next_at = said_at + self.rng.uniform(0.0, self.wanted.pause)
        enough = False
        while not self.tally.violations:
            self.faults.undo(everything=enough)
            rows = self._progress()
            if rows is not None and all(
                name in rows.submissions and rows.submissions[name].state == "ended" for name in self._names()
            ):
                break
            now = time.monotonic()
            enough = self.tally.faults.total() >= self.wanted.faults or now > until
            if self._waits_for_progress:
                next_at = now + self.rng.uniform(0.0, self.wanted.pause)
            elif not enough and now >= next_at:
                next_at = self._one_fault()
            if now - said_at > SAY_SECONDS:
                said_at = now
                print(f"     {self._commit_count} commits", flush=True)
            busy = bool(self.faults.lasting)
            if not busy and now - max(self._last_progress_at, self._last_fault_at) > STUCK_SECONDS:
                self.tally.violations.append(f"stuck: no commit for {STUCK_SECONDS:.0f} s after the last fault")
            time.sleep(0.1)
        self.faults.undo(everything=True)
        self._check(f"end of {name}")
        for each in set(self._names()) - self._checked:
            self.tally.violations += self.model.wrong_at_end(each)
            self.tally.images += self.model.acknowledged[each][0]
            self._checked.add(each)
        if not self.tally.violations:
            self._forget(name)
        print(f"{name}: ended after {self.tally.faults.total()} faults", flush=True)

    def _names(self) -> list[str]:
        """The acknowledged submissions with faults."""
        with self._lock:
            return [name for name in self.model.acknowledged if name != "reference"]

    def _forget(self, name: str) -> None:
        """Remove a submission that was checked. A pool that is down keeps it, and so does the model."""
        self.commands.run("jobs", "rm", name, "--pool", POOL)
        rows = self._read()
        if rows is not None and name not in rows.submissions:
            with self._lock:
                _, folders = self.model.acknowledged[name]
                self.model.forget(name)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _one_fault(self) -> float:
        """Inject a fault, if its target exists; check the journal; return when the next one may follow."""
        kind, target, seconds = self.faults.draw()
        with self._lock:
            hit = self.faults.inject(kind, target, seconds, self.folders)
        if not hit:
            return time.monotonic()
        what = name_of(kind, target)
        self.tally.faults[what] += 1
        self._last_fault_at = time.monotonic()
        lasting = f" for {seconds:.1f} s" if seconds else ""
        print(f"{self.tally.faults.total():4} {what}{lasting}; {self._commit_count} commits", flush=True)
        self._check(what)
        self._waits_for_progress = self.rng.random() >= self.wanted.overlap
        return time.monotonic() + self.rng.uniform(0.0, self.wanted.pause)

    def _progress(self) -> JournalRows | None:
        """Read the journal, and note whether work continues."""
        rows = self._read()
        if rows is not None and rows.commit_count != self._commit_count:
            now = time.monotonic()
            if self._last_progress_at < self._last_fault_at:
                self.tally.continues.append(now - self._last_fault_at)
            self._commit_count, self._last_progress_at = rows.commit_count, now
        if self._last_progress_at > self._last_fault_at:
            self._waits_for_progress = False
        return rows

    def _check(self, after: str) -> None:
        with self._lock:
            rows = self._read()
            if rows is None:
                self.tally.violations.append(f"after {after}: the journal cannot be read")
            else:
                self.tally.violations += [f"after {after}: {each}" for each in self.model.violations(rows)]

    def _read(self) -> JournalRows | None:
        """Read the journal, which a full disk may prevent for a moment."""
        for _ in range(50):
            try:
                return read_journal(self.commands.journal)
            except sqlite3.OperationalError as problem:
                self.tally.refusals[f"reading the journal: {problem}"] += 1
                time.sleep(0.2)
        return None

    def _submit(self, name: str, jobs: Path, output: Path, count: int, folders: list[Path] | None = None) -> bool:
        """Submit, as a user whose terminal may be killed meanwhile. Returns whether the pool has acknowledged it."""
        submitted = self.commands.start("submit", str(jobs), "--out", str(output), "--id", name, "--pool", POOL)
        text, _ = submitted.communicate()
        if submitted.returncode or text.strip() != name:
            return False
        with self._lock:
            self.model.acknowledge(name, count, folders or [output])
        return True

    def _submit_few(self) -> None:
        """Submit a few requests every few seconds: acknowledgements between all kinds of faults."""
        time.sleep(10.0)
        name = f"few-{self._small}"
        if self._submit(name, self.few_jobs, self.commands.disk / name, SMALL):
            self._small += 1

    def _wait(self) -> None:
        """Be the driver that waits for the batch."""
        if self.batch:
            self.commands.start("wait", self.batch, "--pool", POOL).communicate()
        time.sleep(2.0)


def run(wanted: argparse.Namespace, work: Path) -> int:
    """Run inside of the namespaces; print the table; return the exit code."""
    seed = random.SystemRandom().randrange(10_000) if wanted.seed is None else wanted.seed
    print(f"seed {seed}; {wanted.images} images, {wanted.workers} simulated GPUs", flush=True)
    before = set(Path("/tmp").iterdir())
    began = time.monotonic()
    this = Run(wanted, work, seed)
    tally = this.tally
    try:
        this.everything()
        tally.violations += left_behind(this.commands, before)
    finally:
        for problem in tally.violations[:20]:
            print(f"BROKEN {problem}", flush=True)
        if tally.violations:
            show_logs(this.commands)
    print_table(tally, seed, time.monotonic() - began)
    return 1 if tally.violations else 0


def left_behind(commands: Commands, before: set[Path]) -> list[str]:
    """Stop the pool; return what it left in the temporary folder, and its processes."""
    commands.run("down", POOL)
    own = {os.getpid(), os.getppid(), 1}
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline:
        files = sorted(
            str(path) for path in Path("/tmp").iterdir() if path not in before | {Path("/tmp/torchinductor_root")}
        )
        left = [process for process in psutil.process_iter() if process.pid not in own and _lives(process)]
        if not files and not left:
            return []
        time.sleep(0.5)
    lines = [f"{' '.join(process.cmdline())[:120]} ({process.pid})" for process in left if process.is_running()]
    return [f"left behind: {each}" for each in (*files, *lines)]


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def show_logs(commands: Commands) -> None:
    """Print the end of the daemon's log and of the commands'."""
    for log in (*commands.home.rglob("*.log"), commands.log):
        with contextlib.suppress(OSError):
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-40:], sep="\n", flush=True)


def print_table(tally: Tally, seed: int, seconds: float) -> None:
    """Print the results as Markdown, with the machine."""
    print(f"\nMachine: {platform.machine()}, {os.cpu_count()} cores; seed {seed}; {seconds / 60:.0f} minutes\n")
    print("| fault | survived |\n|---|---|")
    for what, count in sorted(tally.faults.items()):
        print(f"| {what} | {count} |")
    print(f"| all | {tally.faults.total()} |\n")
    waits = sorted(tally.continues)
    if waits:
        print(f"Work continues: median {waits[len(waits) // 2]:.1f} s after a fault, at most {waits[-1]:.1f} s.")
    print(f"Images: {tally.images}, each committed once. Starts of the pool: {tally.starts}. Refused or repeated:")
    for reason, count in tally.refusals.most_common():
        print(f"- {count} x {reason}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
