"""`ShardedOutputs`: outputs below one address, packed in shards: WebDataset tars or Parquet files.

Rules
1. An output is first stored and listed like any other (`OutputStore`), so that a writer that ends loses none.
2. A plan (`shards/plan-NUMBER.jsonl`) says which outputs are in a shard. It is created once, after the plans before it
   were read: an output is in one plan, and so in one shard.
3. A shard is created once from its plan; only then are the files of its outputs removed. Who finds a plan without a
   shard creates it, and who finds a file with an existing shard removes it.
4. The manifest lists all outputs, with the names of their files. Whether an output is in a file or a shard is known
   from the plans.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.graph.features.recorded_batches import BatchKind
from modelpool.actors.outputs.entries import ManifestEntry, parse_entry
from modelpool.actors.outputs.failures import FailedOutput
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout, objects_at
from modelpool.actors.outputs.output_file import FinishedOutput, OutputFacts, array_of_output
from modelpool.actors.outputs.place import DamagedOutput, KeptImage, WriteOrder, WriteReport, WrittenOutput
from modelpool.actors.outputs.shard_files import Packed, entry_starts, read_from_shard, write_shard
from modelpool.actors.outputs.shard_plan import (
    PLAN_FOLDER,
    PlannedOutput,
    ShardPlan,
    next_plan,
    number_of_plan,
    parse_plan,
)
from modelpool.actors.outputs.store import OutputStore
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.job_files.table_rows import import_arrow
from modelpool.pool.values.core.errors import OutputFailed


@contextlib.contextmanager
def _shard_failures() -> Iterator[None]:
    """Raise FolderFailed for what creating a shard raises: it concerns all outputs, and not the one that is written."""
    try:
        yield
    except FolderFailed:
        raise
    except (OutputFailed, OSError) as problem:  # OSError: of the temporary folder, which may be full
        raise FolderFailed(f"no shard can be created: {problem}") from problem


class ShardedOutputs:
    """Writes and finds outputs in shards; an `OutputPlace`. Thread-safe. Its creation contacts no store."""

    def __init__(self, address: OutputAddress, layout: OutputLayout) -> None:
        """Raises FolderFailed if the library of the scheme is missing."""
        self.path = address
        self._layout = layout
        self._objects = objects_at(address)
        self._staged = OutputStore(self._objects.url, is_sharded=True)
        #: one thread reads existing outputs before the first output is written; the others wait for it
        self._first_read = threading.Lock()
        self._is_read = False
        #: one thread at a time plans and creates shards
        self._packing = threading.Lock()
        self._packer: ThreadPoolExecutor | None = None
        self._packed: Future[None] | None = None
        #: guards everything below, and the two above
        self._lock = threading.Lock()
        self._plans: dict[int, ShardPlan] = {}
        #: plans with an existing shard
        self._complete: set[int] = set()
        #: the plan of each output that is in one, and its place there, by key
        self._planned: dict[str, tuple[int, int]] = {}
        #: outputs that are in no plan, by key
        self._waiting: dict[str, ManifestEntry] = {}
        #: where the entries of outputs begin in the tar that was read last
        self._starts: tuple[int, Sequence[int]] = (-1, ())

    @property
    def damaged_line_count(self) -> int:
        """See `OutputPlace`."""
        return self._staged.damaged_line_count

    @property
    def damaged_lines(self) -> list[str]:
        """See `OutputPlace`."""
        return self._staged.damaged_lines

    @property
    def manifest_path(self) -> OutputAddress:
        """See `OutputPlace`."""
        return self._own(self._staged.manifest_path)

    def path_of(self, file: str) -> OutputAddress:
        """See `OutputPlace`: the address that the file has until it is in a shard."""
        return self._own(self._staged.path_of(file))

    def prepare(self) -> None:
        """See `OutputPlace`. Raises UserError if the library of the shards is missing: not after everything ran."""
        if self._layout.kind is LayoutKind.PARQUET:
            import_arrow("pyarrow.parquet", str(self.path))
        self._staged.prepare()

    def write(self, image: FinishedOutput, content: bytes | None = None) -> WrittenOutput:
        """See `OutputPlace`. Also begins a shard, in the background, if there are enough outputs for one. While there
        are enough for two, it waits. Raises FolderFailed if a shard could not be created since the last call.
        """
        self._begin_output()
        packed = self._in_shard(image.key)
        if packed is not None:
            nbytes = array_of_output(image.output).nbytes
            known = packed.entry
            return WrittenOutput(self.path_of(known.file), known.pixels_sha256, nbytes, known.file_bytes or 0)
        return self._noted(self._staged.write(image, content), image.key)

    def order(self, facts: OutputFacts) -> WriteOrder | None:
        """See `OutputPlace`. Waits and raises as `write`."""
        self._begin_output()
        return self._staged.order(facts) if self._in_shard(facts.key) is None else None

    def note(self, report: WriteReport) -> WrittenOutput:
        """See `OutputPlace`. May begin a shard, as `write`."""
        return self._noted(self._staged.note(report), parse_entry(report.entry).key)

    def _begin_output(self) -> None:
        """Prepare for another output: wait while there are enough for two shards."""
        self._begin()
        self._raise_problem(wait=self._waiting_count() >= 2 * self._layout.shard_rows)

    def _noted(self, written: WrittenOutput, key: str) -> WrittenOutput:
        """Note an output that is stored and listed, and begin a shard if there are enough of them."""
        entry = self._staged.manifest.listed(key)
        assert entry is not None, f"{key} was written and is listed"
        with self._lock:
            if key not in self._planned:
                self._waiting[key] = entry
            if len(self._waiting) >= self._layout.shard_rows:
                self._start_packing()
        return replace(written, path=self._own(str(written.path)))

    def finish(self) -> None:
        """See `OutputPlace`: put outputs in no shard into a last one, which may be smaller, and wait for it."""
        self._begin()
        self._raise_problem(wait=True)
        with self._lock:
            packer, self._packer = self._packer, None
        if packer is not None:
            packer.shutdown()
        with _shard_failures():
            self._pack(takes_rest=True)

    def kept(self) -> dict[str, KeptImage]:
        """See `OutputPlace`."""
        staged = self._staged.kept()
        self._read_plans()
        kept = {key: replace(each, path=self._own(str(each.path))) for key, each in staged.items()}
        with self._lock:
            outputs = [output for number in self._complete for output in self._plans[number].outputs]
        for output in outputs:
            entry = output.entry
            path = self.path_of(entry.file)
            kept[entry.key] = KeptImage(path, entry.recipe, entry.pixels_sha256, entry.fields, entry.file_bytes or 0)
        return kept

    def batch_sizes(self) -> Mapping[BatchKind, tuple[int, ...]]:
        """See `OutputPlace`."""
        return self._staged.batch_sizes()

    def has_outputs(self) -> bool:
        """See `OutputPlace`."""
        return self._staged.has_outputs()

    def note_failures(self, failures: Sequence[FailedOutput]) -> None:
        """See `OutputPlace`."""
        self._staged.note_failures(failures)

    def failures(self) -> tuple[FailedOutput, ...]:
        """See `OutputPlace`."""
        return self._staged.failures()

    def entries(self) -> Sequence[ManifestEntry]:
        """See `OutputPlace`."""
        return self._staged.entries()

    def damaged(self, quick: bool = False) -> Iterator[DamagedOutput]:
        """See `OutputPlace`."""
        self._read_plans()
        for entry in self.entries():
            reason = self.problem(entry, quick)
            if reason:
                yield DamagedOutput(self.path_of(entry.file), entry, reason)

    def problem(self, entry: ManifestEntry, quick: bool = False) -> str:
        """See `OutputPlace`. An output in a shard that exists is compared unless `quick`."""
        if self._in_shard(entry.key) is None:
            return self._staged.problem(entry, quick)
        if quick:
            return ""
        number = self._planned[entry.key][0]
        plan = self._plans[number]
        try:
            content = self._read_packed(entry.key)
        except (OutputFailed, OSError, ValueError) as error:
            content, found = b"", f" ({error})"
        else:
            found = ""
        if hashlib.sha256(content).hexdigest() == entry.file_sha256:
            return ""
        shard = plan.shard_name(self._layout.kind)
        return f"damaged in {shard}{found}: remove {shard} and {plan.name}, and run the batch again"

    def repair_manifest(self) -> tuple[int, int]:
        """See `OutputPlace`."""
        return self._staged.repair_manifest()

    def contact_sheet(self) -> None:
        """Draw nothing: that would read every shard."""

    @contextlib.contextmanager
    def local_file(self, file: str) -> Iterator[Path]:
        """See `OutputPlace`: a copy that is removed at the end of the block."""
        key = self._key_in_shard(file)
        if key is None:
            try:
                with self._staged.local_file(file) as path:
                    yield path
                    return
            except OutputFailed:
                self._read_plans()  # it may be in a shard by now
                key = self._key_in_shard(file)
                if key is None:
                    raise
        with tempfile.TemporaryDirectory(prefix="modelpool-output-") as folder:
            path = Path(folder) / file
            path.write_bytes(self._read_packed(key))
            yield path

    # ---- shards -----------------------------------------------------------------------------------------------------

    def _own(self, address: str) -> OutputAddress:
        return Path(address.removeprefix("file://")) if isinstance(self.path, Path) else address

    def _waiting_count(self) -> int:
        with self._lock:
            return len(self._waiting)

    def _in_shard(self, key: str) -> PlannedOutput | None:
        """Return an output if it is in a shard that exists."""
        with self._lock:
            number, place = self._planned.get(key, (-1, -1))
            return self._plans[number].outputs[place] if number in self._complete else None

    def _key_in_shard(self, file: str) -> str | None:
        with self._lock:
            plans = [self._plans[number] for number in self._complete]
        return next((each.entry.key for plan in plans for each in plan.outputs if each.entry.file == file), None)

    def _begin(self) -> None:
        """Find, once, outputs in no plan, plans without a shard, and files with an existing shard."""
        with self._first_read:
            if self._is_read:
                return
            kept = self._staged.kept()
            self._read_plans()
            self._complete_plans()
            with self._lock:
                packed = [key for key in kept if self._planned.get(key, (-1, 0))[0] in self._complete]
            self._remove_packed([kept[key].entry["file"] for key in packed])
            for key in kept:
                entry = self._staged.manifest.listed(key)
                with self._lock:
                    if entry is not None and key not in self._planned:
                        self._waiting[key] = entry
            self._is_read = True

    def _start_packing(self) -> None:
        """Begin a shard unless one is begun. Holds `_lock`."""
        if self._packed is not None:
            return
        if self._packer is None:
            self._packer = ThreadPoolExecutor(1, thread_name_prefix="modelpool shards")
        self._packed = self._packer.submit(self._pack, False)

    def _raise_problem(self, wait: bool) -> None:
        """Raise FolderFailed if creating a shard failed, once. With `wait`, wait for one that is being created."""
        with self._lock:  # of several writers, one gets the problem
            packed = self._packed
            if packed is None or not (wait or packed.done()):
                return
            self._packed = None
        with _shard_failures():
            packed.result()

    def _pack(self, takes_rest: bool) -> None:
        """Create shards from the outputs that are in none."""
        with self._packing:
            self._complete_plans()
            while True:
                with self._lock:
                    number = 1 + max(self._plans, default=-1)
                    plan = next_plan(number, self._waiting.values(), self._layout, takes_rest)
                if plan is None:
                    return
                is_new = self._objects.create(plan.name, plan.as_bytes())
                if is_new:
                    self._note_plan(plan)
                    self._create_shard(plan)
                else:  # of another writer, which may have planned some of these outputs
                    self._read_plans()
                    self._complete_plans()

    def _complete_plans(self) -> None:
        """Create the shards that a killed writer has planned. A plan with removed outputs waits for them."""
        with self._lock:
            incomplete = [plan for number, plan in sorted(self._plans.items()) if number not in self._complete]
        for plan in incomplete:
            sizes = self._objects.sizes()
            if plan.shard_name(self._layout.kind) in sizes:
                self._note_shard(plan)
            elif all(sizes.get(output.entry.file) == output.entry.file_bytes for output in plan.outputs):
                self._create_shard(plan)

    def _create_shard(self, plan: ShardPlan) -> None:
        name = plan.shard_name(self._layout.kind)
        with tempfile.TemporaryDirectory(prefix="modelpool-shard-") as folder:
            path = Path(folder) / name
            try:
                write_shard(self._layout.kind, path, self._contents(plan))
            except OutputFailed:
                if self._objects.size(name) is None:  # otherwise another writer has created it meanwhile
                    raise
            else:
                self._objects.create_from(name, path)
        self._note_shard(plan)

    def _note_shard(self, plan: ShardPlan) -> None:
        """Note that a shard exists, and remove the files of its outputs."""
        with self._lock:
            self._complete.add(plan.number)
        self._remove_packed([output.entry.file for output in plan.outputs])

    def _remove_packed(self, files: Sequence[str]) -> None:
        """Remove files of outputs with an existing shard, unless an output that is in none has the same file: places of
        earlier versions have names that were used again.
        """
        named = self._staged.manifest.listed_in(set(files))
        used = {entry.file for entry in named if self._in_shard(entry.key) is None}
        self._objects.remove([file for file in files if file not in used])

    def _contents(self, plan: ShardPlan) -> Iterator[Packed]:
        """Yield the outputs of a plan with their files. Raises OutputFailed for one that is not what the plan lists."""
        outputs = iter(plan.outputs)
        sizes = {output.entry.file: output.entry.file_bytes or 0 for output in plan.outputs}
        for name, content in self._objects.read(sizes):
            output = next(outputs)
            if name != output.entry.file or len(content) != output.entry.file_bytes:
                break
            yield output, content
        else:
            if next(outputs, None) is None:
                return
        raise OutputFailed(f"{self.path}: an output in {plan.name} is missing or changed; remove the plan")

    def _read_plans(self) -> None:
        """Read new plans, and which shards exist."""
        sizes = self._objects.sizes()
        with self._lock:
            known = set(self._plans)
        new = {name: size for name, size in sizes.items() if name.startswith(PLAN_FOLDER)}
        new = {name: size for name, size in new.items() if number_of_plan(name) not in {*known, None}}
        for name, content in self._objects.read(new):
            self._note_plan(parse_plan(name, content))
        with self._lock:
            kind = self._layout.kind
            self._complete = {number for number, plan in self._plans.items() if plan.shard_name(kind) in sizes}

    def _note_plan(self, plan: ShardPlan) -> None:
        with self._lock:
            self._plans[plan.number] = plan
            for place, output in enumerate(plan.outputs):
                self._planned[output.entry.key] = (plan.number, place)
                self._waiting.pop(output.entry.key, None)

    def _read_packed(self, key: str) -> bytes:
        """Return the file of an output in a shard. Raises OutputFailed."""
        with self._lock:
            number, place = self._planned[key]
            plan = self._plans[number]
            if self._starts[0] != number:
                self._starts = (number, entry_starts(plan))
            start = self._starts[1][place]
        name = plan.shard_name(self._layout.kind)
        return read_from_shard(self._layout.kind, plan.outputs[place], place, start, self._objects.reader(name))
