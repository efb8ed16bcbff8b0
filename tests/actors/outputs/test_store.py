"""An object store holds each output once and complete, whatever fails and whoever else writes there."""

from __future__ import annotations

import dataclasses
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.actors.config.output_address import output_address
from modelpool.actors.outputs import objects as objects_module
from modelpool.actors.outputs import store_manifest
from modelpool.actors.outputs.atomic_write import TEMPORARY_SUFFIX
from modelpool.actors.outputs.file_content import pixels_sha256
from modelpool.actors.outputs.folder import FinishedOutput
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.open_outputs import check_store, existing_outputs, open_outputs
from modelpool.actors.outputs.output_file import encoded
from modelpool.actors.outputs.place import file_name
from modelpool.actors.outputs.store import OutputStore
from modelpool.actors.outputs.store_manifest import DAMAGED_FOLDER, MANIFEST_FOLDER
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels
from modelpool.pool.values.core.errors import OutputFailed, UserError
from modelpool.pool.values.core.stage_params import ImagePixels
from tests.actors.outputs.test_folder import image, pixels_of
from tests.s3_server import s3_server


class WriterKilled(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with s3_server() as client:
        yield client


@pytest.fixture
def url() -> str:
    """A place that no other test uses, in this process."""
    return f"memory://{uuid.uuid4().hex}/outputs"


@pytest.fixture(params=["memory", "unconditional", "s3"])
def any_url(request: pytest.FixtureRequest, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place in a store with conditional puts, in one without, and in S3."""
    if request.param == "s3":
        request.getfixturevalue("server")
        return f"s3://bucket/{uuid.uuid4().hex}/outputs"
    if request.param == "unconditional":
        monkeypatch.setattr(ObjectPrefix, "_has_own_put", lambda self: False)
    return url


def opened(url: str) -> OutputStore:
    store = OutputStore(url)
    store.prepare()
    return store


def other_pixels(finished: FinishedOutput) -> FinishedOutput:
    """The same recipe, computed by a device that rounds differently."""
    return dataclasses.replace(finished, output=ImagePixels(pixels_of(finished) ^ np.uint8(1)))


def dies_in(monkeypatch: pytest.MonkeyPatch, begins: str) -> None:
    """The process is killed when it creates an object of the manifest or an output, before anything is stored."""
    create = ObjectPrefix.create

    def killed(self: ObjectPrefix, name: str, content: bytes) -> bool:
        if name.startswith(begins):
            raise WriterKilled
        return create(self, name, content)

    monkeypatch.setattr(ObjectPrefix, "create", killed)


def test_an_output_is_stored_once_and_found_by_others(any_url: str) -> None:
    store = opened(any_url)
    written = store.write(image())
    name = file_name(image().recipe)
    assert (written.path, written.pixels_sha256) == (f"{any_url}/{name}", pixels_sha256(pixels_of(image())))
    assert opened(any_url).write(image()) == written
    later = opened(any_url)
    (kept,) = later.kept().values()
    assert (kept.path, kept.file_bytes, kept.pixels_sha256) == (
        written.path,
        written.file_bytes,
        written.pixels_sha256,
    )
    assert (kept.entry["worker"], kept.entry["tasks"]) == ("gpu-0", [{"stage": "red", "worker": "gpu-0"}])
    assert list(later.damaged()) == []
    with later.local_file(name) as path:
        assert path.read_bytes() == encoded(image().output, image().recipe)
    assert sorted(ObjectPrefix(any_url).sizes()) == [name, f"{MANIFEST_FOLDER}{image().recipe.digest}.json"]


def test_a_temporary_object_that_another_writer_removes_is_no_failure(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def modified(self: MemoryFileSystem, key: str) -> None:
        raise IsADirectoryError

    MemoryFileSystem().pipe_file(f"{url}/.partial/probe{TEMPORARY_SUFFIX}", b"x")
    monkeypatch.setattr(MemoryFileSystem, "modified", modified)
    opened(url)


def test_a_zombie_replaces_nothing(any_url: str) -> None:
    """A process that was replaced long ago, and does not know what happened since, has other pixels."""
    zombie = opened(any_url)
    written = opened(any_url).write(image())
    before = {name: ObjectPrefix(any_url).read_one(name) for name in ObjectPrefix(any_url).sizes()}
    assert zombie.write(other_pixels(image())) == written
    assert {name: ObjectPrefix(any_url).read_one(name) for name in ObjectPrefix(any_url).sizes()} == before


@pytest.mark.parametrize("where", ["", MANIFEST_FOLDER], ids=["before the object", "before its record"])
def test_a_run_that_is_killed_leaves_what_the_next_one_finds(
    url: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        dies_in(patch, where or file_name(image().recipe))
        with pytest.raises(WriterKilled):
            opened(url).write(image())
    later = opened(url)
    kept = later.kept()
    assert list(kept) == ([image().recipe.digest] if where else [])  # then nothing has to be computed again
    written = later.write(image())
    assert list(later.damaged()) == []
    assert written.pixels_sha256 == pixels_sha256(pixels_of(image()))
    assert len(later.entries()) == 1


@pytest.mark.parametrize(("name", "ending"), [("Cat_17", "png"), ("a.b=c,d@e+f", "jpg"), ("\u732b", "webp")])
def test_a_killed_run_leaves_an_output_with_a_chosen_name_that_the_next_one_finds(
    url: str, name: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = dataclasses.replace(image().recipe, format=ending)
    finished = dataclasses.replace(image(), recipe=recipe, labels=Labels(id="cat", name=name))
    with monkeypatch.context() as patch:
        dies_in(patch, MANIFEST_FOLDER)
        with pytest.raises(WriterKilled):
            opened(url).write(finished)
    (kept,) = opened(url).kept().values()
    assert (kept.path, kept.entry["id"]) == (f"{url}/{name}.{ending}", "cat")


def test_a_stored_output_of_a_killed_run_counts_though_the_second_computation_differs(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(url)
    with monkeypatch.context() as patch:
        dies_in(patch, MANIFEST_FOLDER)
        with pytest.raises(WriterKilled):
            opened(url).write(image())
    written = store.write(other_pixels(image()))
    assert written.pixels_sha256 == pixels_sha256(pixels_of(image()))
    assert list(opened(url).damaged()) == []


def test_writers_of_the_same_outputs_agree(any_url: str) -> None:
    """Threads that write the same outputs, with different pixels, at once: one of them counts for each."""
    stores = [opened(any_url) for _ in range(3)]
    written: list[list[Any]] = [[] for _ in stores]

    def write(number: int) -> None:
        for seed in range(4):
            finished = image(seed=seed)
            written[number].append(stores[number].write(other_pixels(finished) if number else finished))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    later = opened(any_url)
    assert len(later.kept()) == 4
    assert list(later.damaged()) == []
    listed = {kept.path: kept.pixels_sha256 for kept in later.kept().values()}
    if "memory" not in any_url:  # fsspec's memory file system is no store for several threads
        assert all({one.path: one.pixels_sha256 for one in mine} == listed for mine in written)


def test_records_are_merged_to_parts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_manifest, "MERGED_RECORDS", 4)
    store = opened(url)
    for seed in range(10):
        store.write(image(seed=seed, index=seed))
    names = sorted(ObjectPrefix(url).sizes(MANIFEST_FOLDER))
    assert sum(name.endswith(".jsonl") for name in names) == 2
    assert sum(name.endswith(".json") for name in names) == 2
    assert [entry.index for entry in opened(url).entries()] == list(range(10))
    assert len(opened(url).kept()) == 10


def test_a_merge_that_is_killed_lists_nothing_twice(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_manifest, "MERGED_RECORDS", 3)
    store = opened(url)

    def killed(self: ObjectPrefix, names: Any) -> None:
        raise WriterKilled

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPrefix, "remove", killed)
        store.write(image(seed=0))
        store.write(image(seed=1))
        with pytest.raises(WriterKilled):
            store.write(image(seed=2))
    assert len(ObjectPrefix(url).sizes(MANIFEST_FOLDER)) == 4
    assert len(opened(url).entries()) == 3


def test_a_reader_misses_no_entry_that_is_merged_while_it_reads(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it meets several merges, and if the store lists an object for ever that it does not have."""
    monkeypatch.setattr(store_manifest, "MERGED_RECORDS", 2)
    writer, reader = opened(url), opened(url)
    for seed in range(5):
        writer.write(image(seed=seed))
    later = [image(seed=seed) for seed in range(5, 9)]
    sizes = reader._objects.sizes

    def merged_after(below: str = "") -> dict[str, int]:
        listed = sizes(below)
        if below:
            listed[f"{MANIFEST_FOLDER}ghost.json"] = 1
            for _ in later[:2]:  # the first is merged with a record that was listed, the second is a new record
                writer.write(later.pop())
        return listed

    monkeypatch.setattr(reader._objects, "sizes", merged_after)
    assert sorted(entry.recipe.seed for entry in reader.entries()) == list(range(9))


def test_damaged_and_missing_objects_are_found_and_replaced(any_url: str) -> None:
    store, objects = opened(any_url), ObjectPrefix(any_url)
    names = [store.write(image(seed=seed, index=seed)).path.rpartition("/")[2] for seed in range(4)]
    content = objects.read_one(names[1])
    assert content is not None
    objects.remove([names[0]])
    objects.replace(names[1], content[:-1] + b"\0")
    objects.replace(names[2], content[:20])
    later = opened(any_url)
    assert [one.reason.split(":")[0] for one in later.damaged()] == ["missing", "damaged", "damaged"]
    assert [one.path for one in later.damaged(quick=True)] == [f"{any_url}/{names[place]}" for place in (0, 2)]
    assert len(later.kept()) == 2
    for seed in range(4):
        later.write(image(seed=seed))
    assert list(opened(any_url).damaged()) == []
    later.write(image(seed=1))
    objects.replace(names[1], b"x")
    later.write(other_pixels(image(seed=1)))  # on another device: the entry changes with the object
    assert list(opened(any_url).damaged()) == []
    assert len(opened(any_url).entries()) == 4


@pytest.mark.parametrize("merged", [1, 1000], ids=["in a part", "in a record"])
@pytest.mark.parametrize("has_written", [True, False])
def test_a_writer_that_has_read_nothing_lists_a_damaged_output_again(
    url: str, merged: int, has_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the writer of a driver does, on another device; also if the output was stored after it read the manifest."""
    monkeypatch.setattr(store_manifest, "MERGED_RECORDS", merged)
    late, other = opened(url), []
    if has_written:
        other = [late.write(image(seed=1)).pixels_sha256]
    earlier = opened(url)
    earlier._run = 1  # both began at the same time
    first = earlier.write(image())
    ObjectPrefix(url).replace(file_name(image().recipe), b"damaged")
    again = late.write(other_pixels(image()))
    assert again.pixels_sha256 == pixels_sha256(pixels_of(other_pixels(image()))) != first.pixels_sha256
    assert list(opened(url).damaged()) == []
    assert [entry.pixels_sha256 for entry in opened(url).entries()] == [*other, again.pixels_sha256]


def test_a_writer_does_not_replace_what_another_one_has_repaired(url: str) -> None:
    first, second = opened(url), opened(url)
    first.write(image())
    assert second.kept()
    ObjectPrefix(url).replace(file_name(image().recipe), b"damaged")
    repaired = first.write(other_pixels(image()))
    assert second.write(image()) == repaired
    assert list(opened(url).damaged()) == []


def test_each_driver_has_its_own_run_number(url: str) -> None:
    for seed in range(3):
        opened(url).write(image(seed=seed))
    assert [(entry.recipe.seed, entry.run) for entry in opened(url).entries()] == [(0, 1), (1, 2), (2, 3)]


def test_repair_takes_out_damaged_lines_and_lists_what_is_complete(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_manifest, "MERGED_RECORDS", 2)
    store, objects = opened(url), ObjectPrefix(url)
    for seed in range(3):
        store.write(image(seed=seed))
    (part,) = (name for name in objects.sizes(MANIFEST_FOLDER) if name.endswith(".jsonl"))
    good = (objects.read_one(part) or b"").splitlines(keepends=True)
    objects.replace(part, b"{}\n" + good[1])
    objects.replace(f"{MANIFEST_FOLDER}{image(seed=2).recipe.digest}.json", b"[" * 100_000)
    objects.create("someone-else-1-00000000.png", b"not an image")
    later = opened(url)
    assert [entry.recipe.seed for entry in later.entries()] == [1]
    assert (later.damaged_line_count, len(later.damaged_lines)) == (2, 2)
    assert later.repair_manifest() == (2, 2)
    assert later.damaged_line_count == 0
    again = opened(url)
    assert sorted(entry.recipe.seed for entry in again.entries()) == [0, 1, 2]
    assert again.damaged_line_count == 0
    assert sorted(content for _, content in objects.read(objects.sizes(DAMAGED_FOLDER))) == [b"[" * 100_000, b"{}\n"]
    assert list(again.damaged()) == []


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans(), st.integers(0, 6)), max_size=12),
    merged=st.integers(1, 4),
)
def test_writers_that_are_killed_at_any_request(steps: list[tuple[int, int, bool, int]], merged: int) -> None:
    """Several writers, each killed after some requests and then opened again: whatever was returned stays as it was."""
    url = f"memory://{uuid.uuid4().hex}/outputs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_manifest, "MERGED_RECORDS", merged)
        left = [99]

        def counted(method: Any) -> Any:
            def call(self: ObjectPrefix, *args: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise WriterKilled
                return method(self, *args)

            return call

        for name in ("create", "replace", "remove", "read", "sizes"):
            patch.setattr(ObjectPrefix, name, counted(getattr(ObjectPrefix, name)))
        stores = [OutputStore(url) for _ in range(3)]
        known: dict[str, str] = {}
        for number, seed, differs, left[0] in steps:
            finished = other_pixels(image(seed=seed)) if differs else image(seed=seed)
            try:
                written = stores[number].write(finished)
            except WriterKilled:
                left[0] = 99
                stores[number] = OutputStore(url)
            else:
                assert known.setdefault(str(written.path), written.pixels_sha256) == written.pixels_sha256
        left[0] = 99
        later = OutputStore(url)
        kept = {str(one.path): one.pixels_sha256 for one in later.kept().values()}
        assert known.items() <= kept.items()
        assert list(later.damaged()) == []
        assert later.damaged_line_count == 0


@pytest.mark.parametrize("refusal", [NotImplementedError, TypeError])
def test_a_store_whose_library_has_no_conditions_is_checked_by_each_submission(
    url: str, refusal: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = MemoryFileSystem.pipe_file

    def without_mode(self: MemoryFileSystem, path: str, value: bytes, **kwargs: Any) -> None:
        if kwargs:
            raise refusal(f"no {kwargs}")
        put(self, path, value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", without_mode)
    store = opened(url)
    store.prepare()  # as the second submission does
    assert opened(url).write(other_pixels(image())) == store.write(image())
    store.prepare()
    assert list(opened(url).damaged()) == []
    assert len(ObjectPrefix(url).sizes()) == 2


def test_temporary_objects_of_killed_runs_are_removed_a_day_later(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise WriterKilled

    objects = ObjectPrefix(any_url)
    objects.replace(f"{objects_module.TEMPORARY_FOLDER}probe-1{TEMPORARY_SUFFIX}", b"")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectPrefix, "_has_own_put", lambda self: False)
        patch.setattr(type(objects._system), "mv", refused)
        with pytest.raises(WriterKilled):
            opened(any_url).write(image())

    def temporary() -> list[str]:
        return [key for key in objects._system.find(objects._root) if key.endswith(TEMPORARY_SUFFIX)]

    opened(any_url)
    assert len(temporary()) == 2  # perhaps of a process that runs
    monkeypatch.setattr(objects_module, "LEFTOVER_SECONDS", -3600.0)
    opened(any_url).write(image())
    assert temporary() == []
    assert len(objects.sizes()) == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1/x", "cannot be written"),
        ("s3://key:secret@bucket/x", "without user name and password"),
        ("s3://user:pa/secret@bucket/x", r"s3://...@bucket', expected a URL without user name and password"),
        ("s3://user/pa:secret@bucket/x", "without user name and password"),
        ("s3://user:secret", "without user name and password"),
        ("s3://user:pa?secret@bucket/x", "without user name and password"),
        ("s3://user:pa#/secret@bucket?secret", "without user name and password"),
        ("s3://user:[secret@bucket", "without user name and password"),
        ("sftp://user:12/secret@host/x", "without user name and password"),
        ("s3://[x/?secret", "with a host or bucket"),
        ("s3://bucket/x#secret", "without parameters"),
        (Path("s3://user:secret@bucket"), "as text"),
        ("s3://bucket/x?X-Amz-Signature=secret", "without parameters"),
        ("s3:///x", "with a bucket"),
        (Path("s3://bucket/x"), "as text"),
    ],
)
def test_wrong_urls_are_refused_without_their_secrets(given: str | Path, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        output_address(given)
    assert "secret" not in str(caught.value)


def test_addresses_of_folders_are_paths(tmp_path: Path) -> None:
    assert output_address(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert output_address("out/pictures") == Path("out/pictures")
    assert output_address(f"file://{tmp_path}/a:b@c") == tmp_path / "a:b@c"
    assert output_address("s3://bucket/folder/") == "s3://bucket/folder"


@pytest.mark.parametrize("url", ["s3://bucket/a@b", "hf://org/name@main/a:b", "sftp://host:22/x", "sftp://[::1]:22/x"])
def test_an_at_sign_in_a_path_and_a_port_are_no_credentials(url: str) -> None:
    assert output_address(url) == url


def test_unusable_stores_are_refused_with_what_to_do(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FolderFailed, match=r"s3://no-such-bucket/x: no such bucket .*create it, or correct the URL"):
        check_store("s3://no-such-bucket/x")
    with pytest.raises(FolderFailed, match=r"nosuch://bucket/x: no library reads nosuch://"):
        check_store("nosuch://bucket/x")
    with pytest.raises(UserError, match=r"s3://bucket/nothing"):
        existing_outputs("s3://bucket/nothing")
    real = objects_module.open_file_system("memory://x")

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def pipe_file(self, *args: Any, **kwargs: Any) -> None:
            raise PermissionError("at s3://key:se/secret@bucket/ and s3://b, a@b")

    monkeypatch.setattr(objects_module, "open_file_system", lambda *args, **kwargs: Refusing())
    with pytest.raises(FolderFailed, match="access is refused") as caught:
        check_store("memory://x/y")
    assert "s3://...@bucket/ and s3://b, a@b" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("no gcsfs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    with pytest.raises(FolderFailed, match=r"gs://bucket/x: .*install `.*(scripts/setup gs|gcsfs)"):
        open_outputs("gs://bucket/x")


def test_a_missing_object_names_its_url(url: str) -> None:
    store = opened(url)
    with pytest.raises(OutputFailed, match=f"{url}/x.png: missing"), store.local_file("x.png"):
        pytest.fail("there is no file")


def test_credentials_are_in_no_object(server: Any) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    opened(url).write(image())
    contents = [content for _, content in ObjectPrefix(url).read(ObjectPrefix(url).sizes())]
    assert contents
    assert not any(b"hidden-test-key" in content for content in contents)
    (line,) = (json.loads(content) for content in contents if content.startswith(b"{"))
    assert line["file"] == file_name(image().recipe)


def test_equal_recipes_with_other_ids_and_taken_names_are_objects_of_their_own(any_url: str) -> None:
    """Written by two processes that do not know of each other, and once more after a loss of the record."""
    wanted = [dataclasses.replace(image(), labels=Labels(name, {"row": 1}, 3, "same")) for name in ("a", "b", "")]
    paths = [opened(any_url).write(one).path for one in wanted]
    assert len(set(paths)) == 3
    assert str(paths[0]).endswith("/same.png")
    assert [opened(any_url).write(one).path for one in wanted] == paths
    kept = opened(any_url).kept()
    assert {one.entry.get("id"): one.entry["metadata"] for one in kept.values()} == {
        "a": {"row": 1},
        "b": {"row": 1},
        None: {"row": 1},
    }
    assert set(kept) == {one.key for one in wanted}
    store = ObjectPrefix(any_url)
    store.remove([f"manifest/{wanted[1].key}.json"])
    assert opened(any_url).write(wanted[1]).path == paths[1]
    assert len(opened(any_url).entries()) == 3
