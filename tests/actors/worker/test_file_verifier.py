"""A worker compares its files with the SHA-256 that recipes name, while runs go on: what they made until then has the
numbers of the files' states, and what a changed file made fails."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.worker.file_check import FilesUnavailable
from modelpool.actors.worker.file_verifier import FAILURES_BEFORE_VERDICT, FileVerifier
from modelpool.actors.worker.wire.messages import ExpectedFile, LoadRequest, RunRequest
from modelpool.pool.catalog.registry.node_hashes import HashingStopped, NodeHashes
from modelpool.pool.catalog.registry.registry_store import RegistryStore
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.specs.spec import ComponentKey, FileVerdict, JudgedFile, Role, RunErrorKind, file_name
from tests.actors.worker.one_run import run_one
from tests.actors.worker.test_gpu_worker import Bench

LORA = ComponentKey("lora")
PATIENCE_SECONDS = 20.0


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Watch:
    """A verifier whose hashing waits until `go` is set, and what it has found out."""

    folder: Path
    go: threading.Event = field(default_factory=threading.Event)
    judged: list[JudgedFile] = field(default_factory=list)
    hashed: int = 0
    read: list[tuple[ComponentKey, FilePart]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier = FileVerifier(self.judged.extend, self.hashes, poll_seconds=0.02)

    def hashes(self) -> NodeHashes:
        watch = self

        class Waiting(NodeHashes):
            def sha256(self, part: FilePart, should_stop: Callable[[], bool] = lambda: False) -> str:
                while not watch.go.wait(0.01):
                    if should_stop():
                        raise HashingStopped(part.path)
                watch.hashed += 1
                return super().sha256(part, should_stop)

        return Waiting(self.folder, RegistryStore(self.folder / "registry"))

    def expect(self, path: Path, content: bytes, component: ComponentKey = LORA) -> None:
        """The controller has a file with this content."""
        part = FilePart(str(path), sha256=sha256(content))
        self.read.append((component, part))
        self.verifier.expect([ExpectedFile(component, part, "")])

    def run(self, during: Callable[[], object] = lambda: None, component: ComponentKey = LORA) -> tuple[int, ...]:
        """A run that reads the file."""
        in_use = self.verifier.begin([(key, part) for key, part in self.read if key == component])
        during()
        return self.verifier.end(in_use)

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end, "it does not happen"
            time.sleep(0.005)

    @property
    def verdicts(self) -> list[FileVerdict]:
        return [file.verdict for file in self.judged]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    folder = tmp_path / "machine"
    folder.mkdir()
    found = Watch(folder)
    yield found
    found.verifier.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "lora.safetensors"
    file.write_bytes(b"weights")
    return file


def test_runs_go_on_until_the_hash_is_known(watch: Watch, path: Path) -> None:
    watch.expect(path, b"weights")
    (first,) = watch.run()
    assert watch.run() == (first,)
    assert not watch.verifier.is_settled
    watch.go.set()
    watch.until(lambda: watch.judged)
    assert (watch.verdicts, watch.judged[0].state) == ([FileVerdict.RIGHT], first)
    assert watch.run() == ()
    assert (watch.hashed, watch.verifier.is_settled) == (1, True)


def test_another_file_is_named_and_not_used_any_more(watch: Watch, path: Path) -> None:
    watch.expect(path, b"expected")
    (state,) = watch.run()
    watch.go.set()
    watch.until(lambda: watch.judged)
    (file,) = watch.judged
    assert (file.state, file.verdict, file.components) == (state, FileVerdict.DIFFERS, (LORA,))
    for part in (str(path), sha256(b"weights"), sha256(b"expected")):
        assert part in file.reason
    with pytest.raises(FilesUnavailable, match="is another file than expected") as raised:
        watch.run()
    assert raised.value.components == (LORA,)


def test_a_file_that_differs_blocks_no_other_file_with_an_equal_component(watch: Watch, path: Path) -> None:
    """Two checkpoints have equal text encoders, and one is overwritten: runs of the other one failed, too, until the
    worker ended."""
    watch.go.set()
    other = path.with_name("other.safetensors")
    other.write_bytes(b"other")
    watch.expect(path, b"weights")
    watch.expect(other, b"other")
    (_, part), (_, other_part) = watch.read
    watch.verifier.end(watch.verifier.begin([(LORA, part)]))
    watch.until(lambda: watch.judged)
    begun = watch.verifier.begin([(LORA, other_part)])
    path.write_bytes(b"overwritten with another size")
    with pytest.raises(FilesUnavailable, match="changed during the run") as raised:
        watch.verifier.end(begun)  # its weights may be those of the file that has changed
    assert raised.value.file_names == (file_name(part.sha256),), "the other file is as it was"
    watch.until(lambda: FileVerdict.DIFFERS in watch.verdicts)
    changes = watch.verifier.changes
    assert changes, "models are opened again"
    with pytest.raises(FilesUnavailable):
        watch.verifier.begin([(LORA, part)])
    assert watch.verifier.end(watch.verifier.begin([(LORA, other_part)])) == ()
    path.unlink()
    assert watch.verifier.end(watch.verifier.begin([(LORA, other_part)])) == ()


@pytest.mark.parametrize("is_known", [False, True])
def test_models_are_opened_again_once_when_a_file_with_an_equal_component_is_gone(
    watch: Watch, path: Path, is_known: bool
) -> None:
    """A checkpoint is removed, or differs before: each run of another one with an equal component opened all models
    again."""
    other = path.with_name("other.safetensors")
    other.write_bytes(b"other")
    watch.expect(path, b"expected")
    watch.expect(other, b"other")
    (_, part), (_, other_part) = watch.read
    watch.verifier.end(watch.verifier.begin([(LORA, part)]))
    if is_known:
        watch.go.set()
        watch.until(lambda: FileVerdict.DIFFERS in watch.verdicts)
        assert watch.verifier.changes == 1
    path.unlink()
    for _ in range(3):
        watch.verifier.end(watch.verifier.begin([(LORA, other_part)]))
        assert watch.verifier.changes == 1


def test_a_file_that_is_being_written_fails_no_run_of_another_file_with_an_equal_component(
    watch: Watch, path: Path
) -> None:
    """A download overwrites a checkpoint for minutes: all runs of another one failed until it had ended. Those that
    join a run with models of the first one still do."""
    watch.go.set()
    other = path.with_name("other.safetensors")
    other.write_bytes(b"other")
    watch.expect(path, b"weights")
    watch.expect(other, b"other")
    (_, part), (_, other_part) = watch.read
    watch.verifier.end(watch.verifier.begin([(LORA, part)]))
    watch.until(lambda: watch.verifier.is_settled)
    for number in range(1, 4):
        path.write_bytes(b"written " * number)
        begun = watch.verifier.begin([(LORA, other_part)])
        path.write_bytes(b"written by now " * number)
        watch.verifier.end(begun)
    joined = watch.verifier.begin([(LORA, other_part)], joins=True)
    path.write_bytes(b"complete")
    with pytest.raises(FilesUnavailable, match="changed during the run"):
        watch.verifier.end(joined)


def test_other_components_of_such_a_file_are_told_of_when_a_run_wants_them(watch: Watch, path: Path) -> None:
    """Else the scheduler learns of each by a failed run, and tries it again every minute."""
    watch.expect(path, b"expected")
    watch.run()
    watch.go.set()
    watch.until(lambda: watch.judged)
    vae = ComponentKey("vae")
    watch.expect(path, b"expected", vae)
    for _ in range(2):
        with pytest.raises(FilesUnavailable):
            watch.run(component=vae)
    assert [file.components for file in watch.judged] == [(LORA,), (LORA, vae)]


def test_a_run_that_ends_after_the_verdict_fails(watch: Watch, path: Path) -> None:
    watch.expect(path, b"expected")

    def hash_it() -> None:
        watch.go.set()
        watch.until(lambda: watch.judged)

    with pytest.raises(FilesUnavailable):
        watch.run(hash_it)


def test_the_right_file_is_found_when_it_comes(watch: Watch, path: Path) -> None:
    """Without a run: none is sent there any more."""
    watch.expect(path, b"weights!")
    watch.run()
    watch.go.set()
    watch.until(lambda: watch.judged)
    changes = watch.verifier.changes
    path.write_bytes(b"weights!")
    watch.until(lambda: FileVerdict.RIGHT in watch.verdicts)
    assert watch.verifier.changes > changes, "models were opened with the other one"
    assert watch.run() == ()


def in_place(path: Path) -> None:
    """Change the bytes, neither the size nor the time."""
    found = path.stat()
    path.write_bytes(b"strange")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def touches(path: Path) -> list[Callable[[], object]]:
    """Ways of changing the times of a file, not its bytes."""
    return [
        lambda: os.utime(path, ns=(1, 10**18)),
        lambda: path.chmod(0o600),
        lambda: os.link(path, path.with_name("link")),
        lambda: path.write_bytes(path.read_bytes()),
    ]


def test_touching_a_file_during_a_run_fails_nothing(watch: Watch, path: Path) -> None:
    """`touch`, `chmod`, `ln`: it is hashed again, and models stay open."""
    watch.go.set()
    watch.expect(path, b"weights")
    watch.run()
    for touch in touches(path):
        watch.until(lambda: watch.verifier.is_settled)
        changes, hashed = watch.verifier.changes, watch.hashed
        watch.judged.clear()
        states = watch.run(touch)
        watch.until(lambda hashed=hashed: watch.verifier.is_settled and watch.hashed > hashed)
        watch.until(lambda: watch.judged)
        assert {file.verdict for file in watch.judged} == {FileVerdict.RIGHT}
        assert set(states) <= {file.state for file in watch.judged}
        assert watch.verifier.changes == changes


def test_touching_a_file_of_unknown_hash_makes_results_again_and_fails_nothing(watch: Watch, path: Path) -> None:
    """Nobody can know what the run has read."""
    watch.expect(path, b"weights")
    for touch in touches(path):
        watch.judged.clear()
        (state,) = watch.run(touch)
        assert (state, FileVerdict.CHANGED) in [(file.state, file.verdict) for file in watch.judged]


def test_other_bytes_of_equal_size_and_time_are_found(watch: Watch, path: Path) -> None:
    watch.go.set()
    watch.expect(path, b"weights")
    watch.run()
    watch.until(lambda: watch.verifier.is_settled and watch.judged)
    watch.judged.clear()
    try:
        states = watch.run(lambda: in_place(path))
    except FilesUnavailable as problem:  # hashed before the end of the run
        assert "is another file" in str(problem)  # noqa: PT017
        states = ()
    watch.until(lambda: watch.judged)
    assert watch.judged[-1].verdict is FileVerdict.DIFFERS
    assert set(states) <= {file.state for file in watch.judged}
    assert _is_refused(watch)


def test_each_way_of_replacing_a_file_during_a_run_fails_it(watch: Watch, path: Path) -> None:
    """By another file, by a longer one; also back to the right one."""
    watch.go.set()
    watch.expect(path, b"weights")

    def replaced() -> None:
        other = path.with_name("other")
        other.write_bytes(b"strange")
        other.rename(path)

    for change in (replaced, lambda: path.write_bytes(b"longer weights")):
        watch.until(lambda: watch.verifier.is_settled)
        with pytest.raises(FilesUnavailable, match="was changed during the run"):
            watch.run(change)
        path.write_bytes(b"weights")
        watch.until(lambda: not _is_refused(watch))


def _is_refused(watch: Watch) -> bool:
    try:
        watch.run()
    except FilesUnavailable:
        return True
    return False


def test_what_was_changed_before_its_hash_was_known_is_told(watch: Watch, path: Path) -> None:
    watch.expect(path, b"weights")
    (first,) = watch.run()
    path.write_bytes(b"strange")
    path.write_bytes(b"weights")
    (second,) = watch.run()
    assert first != second
    assert [(file.state, file.verdict) for file in watch.judged] == [(first, FileVerdict.CHANGED)]
    watch.go.set()
    watch.until(lambda: len(watch.judged) == 2)
    assert (watch.judged[1].state, watch.judged[1].verdict) == (second, FileVerdict.RIGHT)


def test_a_component_is_as_right_as_each_file_that_it_was_read_from(watch: Watch, tmp_path: Path) -> None:
    """Two models share it, and one of their files is wrong: which one the weights on the GPU are from is not known."""
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for each in paths:
        each.write_bytes(each.name.encode())
    watch.expect(paths[0], b"a.safetensors")
    watch.expect(paths[1], b"other")
    assert len(watch.run()) == 2
    watch.go.set()
    watch.until(lambda: len(watch.judged) == 2)
    with pytest.raises(FilesUnavailable, match=str(paths[1])):
        watch.run()


def test_a_file_that_cannot_be_read_is_not_called_another_one(watch: Watch, path: Path) -> None:
    watch.expect(path, b"weights")
    watch.run()
    path.unlink()
    watch.go.set()
    watch.until(lambda: watch.judged)
    assert watch.verdicts == [FileVerdict.UNREADABLE]
    assert "cannot be read" in watch.judged[0].found


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(
    watch: Watch, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state does not change meanwhile. The controller learns of each other outcome, once."""
    plain = NodeHashes.sha256
    for content, verdict, count in (
        (b"weights", FileVerdict.RIGHT, FAILURES_BEFORE_VERDICT + 1),
        (b"weird", FileVerdict.DIFFERS, FAILURES_BEFORE_VERDICT),
        (b"wrong", FileVerdict.DIFFERS, FAILURES_BEFORE_VERDICT - 1),
    ):
        failures = [OSError(5, "Input/output error")] * count

        def sha256_later(*about: Any, failures: list[OSError] = failures) -> str:
            if failures:
                raise failures.pop()
            return plain(*about)

        monkeypatch.setattr(NodeHashes, "sha256", sha256_later)
        watch.judged.clear()
        watch.expect(path, content, ComponentKey(content.decode()))
        watch.run(component=ComponentKey(content.decode()))
        watch.go.set()
        watch.until(lambda verdict=verdict: verdict in watch.verdicts)
        is_told = count >= FAILURES_BEFORE_VERDICT
        assert watch.verdicts == [FileVerdict.UNREADABLE, verdict][not is_told :]
        if not is_told:
            continue
        assert not failures
        assert "could not be read" in watch.judged[0].reason
        assert "Input/output error" in watch.judged[0].reason
        assert "another file" not in watch.judged[0].reason


def test_a_failure_of_hashing_is_a_verdict(watch: Watch, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results wait for one: without it, their jobs would never end."""

    def fail(*about: object) -> str:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(NodeHashes, "sha256", fail)
    watch.expect(path, b"weights")
    watch.run()
    watch.go.set()
    watch.until(lambda: watch.judged)
    assert (watch.verdicts, watch.judged[0].found) == ([FileVerdict.UNREADABLE], "no more threads")


def test_a_worker_reports_what_it_does_not_know_and_closes_what_differs(tmp_path: Path, path: Path) -> None:
    watch = Watch(tmp_path)
    bench = Bench()
    closed: list[bool] = []
    bench.engine.close_unused_models = lambda: closed.append(True)
    bench.worker._files._verifier, bench.worker._files._on_judged = watch.verifier, lambda files: None
    bench.worker.start()
    file = bench.reads(path, sha256(b"expected"))
    report, _ = run_one(bench.worker, RunRequest(bench.task, bench.work, 1, 1, files=(file,)), *bench.inputs)
    assert (report.error, len(report.unverified), closed) == (None, 1, [])
    watch.go.set()
    watch.until(lambda: watch.judged)
    report, result = bench.run(2, 2)
    assert result is None
    assert report.error is not None
    assert (report.error.kind, report.unverified) == (RunErrorKind.FILE_UNAVAILABLE, ())
    load = LoadRequest(3, bench.work.model, (Role.DIFFUSION_MODEL,), (file.component,))
    problem = bench.worker.load(load).error
    assert problem is not None
    assert problem.kind is RunErrorKind.FILE_UNAVAILABLE
    path.write_bytes(b"expected")
    watch.until(lambda: FileVerdict.RIGHT in watch.verdicts)
    report, _ = run_one(bench.worker, RunRequest(bench.task, bench.work, 4, 4), *bench.inputs)
    assert (report.error, report.unverified, closed) == (None, (), [True])
    bench.worker.drop_weights()
    assert closed == [True, True]
    bench.worker.close()
