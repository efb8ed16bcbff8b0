"""Outputs that another process writes for the owner of a place: each is there once, whoever ends when."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.outputs import store_manifest
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout, declare_layout, objects_at
from modelpool.actors.outputs.manifest import Manifest
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.open_outputs import existing_outputs, open_outputs
from modelpool.actors.outputs.output_file import FinishedOutput, OutputFacts
from modelpool.actors.outputs.place import OutputPlace, WriteReport
from modelpool.actors.outputs.place_writer import OtherPlace, PlaceMark, PlaceWriter, is_seen_by_others, place_mark
from modelpool.actors.outputs.store_access import StoreAccess
from modelpool.actors.request.labels import Labels
from tests.actors.outputs.test_folder import image
from tests.s3_server import s3_server

SHARD_ROWS = 9


class WriterKilled(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with s3_server() as client:
        yield client


@pytest.fixture(params=["folder", "s3", "memory", "shards"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> OutputAddress:
    """A place that has outputs as files, or in shards, with thumbnails if they are files."""
    kind = LayoutKind.WEBDATASET if request.param == "shards" else LayoutKind.FILES
    if request.param == "s3":
        request.getfixturevalue("server")
    where = {"folder": tmp_path / "out", "s3": f"s3://bucket/{uuid.uuid4().hex}/outputs"}
    found = where.get(request.param, f"memory://{uuid.uuid4().hex}/outputs")
    rows, thumbnail = (0, 64) if kind is LayoutKind.FILES else (SHARD_ROWS, 0)
    declare_layout(found, OutputLayout(kind, rows, thumbnail))
    return found


def facts_of(finished: FinishedOutput) -> OutputFacts:
    fields = {field.name: getattr(finished, field.name) for field in dataclasses.fields(OutputFacts)}
    return OutputFacts(**fields)


def named(seed: int, request_id: str = "", name: str = "cat") -> FinishedOutput:
    return dataclasses.replace(image(seed=seed), labels=Labels(id=request_id or f"cat-{seed}", name=name))


def write_by(writer: PlaceWriter, owner: OutputPlace, finished: FinishedOutput) -> WriteReport:
    """What travels between the two processes is pickled."""
    order = owner.order(facts_of(finished))
    assert order is not None
    report = writer.write(pickle.loads(pickle.dumps(order)), finished.output)
    sent: WriteReport = pickle.loads(pickle.dumps(report))
    assert len(pickle.dumps(sent)) < 10_000
    return sent


def listed(address: OutputAddress) -> list[dict[str, Any]]:
    """The manifest as a process that opens the place reads it, without what differs from run to run."""
    entries = [dict(entry.fields) for entry in existing_outputs(address).entries()]
    return sorted(entries, key=lambda entry: (entry["recipe"]["seed"], entry.get("id", "")))


def images_at(address: OutputAddress) -> list[str]:
    """The outputs that are files."""
    return sorted(name for name in objects_at(address).sizes() if name.endswith(".png") and "/" not in name)


def test_what_a_writer_writes_is_what_the_owner_would_have_written(address: OutputAddress, tmp_path: Path) -> None:
    """The same file, entry, thumbnail and run; and the owner knows it at once, and puts it in a shard."""
    owner, writer = open_outputs(address), PlaceWriter(address)
    twin_address = tmp_path / "twin"
    declare_layout(twin_address, OutputLayout(thumbnail_pixels=64))
    twin = open_outputs(twin_address)
    outputs = [named(seed) for seed in range(3)]
    outputs.append(named(1, "dog-1", "cat"))  # an equal request with another id
    for finished in outputs:
        written = owner.note(write_by(writer, owner, finished))
        alone = twin.write(finished)
        assert (written.pixels_sha256, written.file_bytes) == (alone.pixels_sha256, alone.file_bytes)
        assert written.array_bytes == alone.array_bytes
    again = owner.note(write_by(writer, owner, outputs[0]))
    assert again.path == owner.path_of(listed(address)[0]["file"])
    assert len(owner.kept()) == len(owner.entries()) == 4
    sharded = owner.__class__.__name__ == "ShardedOutputs"
    expected = listed(twin_address)
    for entry, other in zip(listed(address), expected, strict=True):
        if sharded:  # names there always have digits
            entry, other = ({k: v for k, v in one.items() if k != "file"} for one in (entry, other))
        assert entry == other
    if not sharded:
        assert images_at(address) == images_at(twin_address)
        for name in [*images_at(address), *(f"thumbnails/{name}.webp" for name in images_at(address))]:
            assert objects_at(address).read_one(name) == objects_at(twin_address).read_one(name)
    owner.finish()
    assert not list(existing_outputs(address).damaged())
    if sharded:
        assert [name for name in objects_at(address).sizes() if name.endswith(".tar")] == ["shard-000000.tar"]
        assert images_at(address) == []
        assert owner.order(facts_of(outputs[0])) is None, "what is in a shard is not written again"


def test_the_owner_merges_the_records_of_its_writers(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pool of many nodes would leave as many records as outputs, and reading them takes a request each."""
    monkeypatch.setattr(store_manifest, "MERGED_RECORDS", 3)
    url = f"s3://bucket/{uuid.uuid4().hex}/outputs"
    owner = open_outputs(url)
    writers = [PlaceWriter(url), PlaceWriter(url)]
    for seed in range(7):
        owner.note(write_by(writers[seed % 2], owner, image(seed=seed)))
    names = [name.rpartition("/")[2] for name in objects_at(url).sizes("manifest/")]
    assert len([name for name in names if name.startswith("part-")]) == 2
    assert len(names) == 3
    assert [entry["recipe"]["seed"] for entry in listed(url)] == list(range(7))
    assert {entry["run"] for entry in listed(url)} == {1}
    order = open_outputs(url).order(facts_of(image(seed=9)))
    assert order is not None
    assert order.run == 2, "of the next run"


@pytest.mark.parametrize("killed_at", range(4))
def test_a_writer_that_is_killed_leaves_one_output_after_the_owner_has_written_it(
    address: OutputAddress, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after each thing that it stores, up to its report, which is lost."""
    owner, writer, finished = open_outputs(address), PlaceWriter(address), named(7)
    owner.note(write_by(writer, owner, named(6)))
    create, append = ObjectPrefix.create, Manifest.append
    left = [killed_at]

    def step() -> None:
        left[0] -= 1
        if left[0] == -1:
            raise WriterKilled

    def killed_create(self: ObjectPrefix, name: str, content: bytes) -> bool:
        step()
        return create(self, name, content)

    def killed_append(self: Manifest, entry: Any) -> None:
        step()
        append(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPrefix, "create", killed_create)
        patch.setattr(Manifest, "append", killed_append)
        try:
            write_by(writer, owner, finished)
        except WriterKilled:
            assert left[0] < 0
    written = owner.write(finished)
    assert owner.write(finished) == written
    assert [entry["recipe"]["seed"] for entry in listed(address)] == [6, 7]
    assert len(images_at(address)) == 2
    assert not list(existing_outputs(address).damaged())
    owner.finish()
    assert len(listed(address)) == 2


def test_names_that_others_have_are_not_taken_by_a_writer(address: OutputAddress) -> None:
    """Two writers, each of which knows only its orders, are asked for one name; and so is the owner."""
    owner = open_outputs(address)
    writers = [PlaceWriter(address), PlaceWriter(address)]
    orders = [owner.order(facts_of(named(seed))) for seed in range(2)]  # both know of no output
    for order, writer, seed in zip(orders, writers, range(2), strict=True):
        assert order is not None
        owner.note(writer.write(order, named(seed).output))
    owner.write(named(2))
    owner.note(write_by(writers[0], owner, named(3)))
    files = [entry["file"] for entry in listed(address)]
    assert len(set(files)) == 4
    assert not list(existing_outputs(address).damaged())


def test_a_writer_replaces_a_damaged_output(server: Any, tmp_path: Path) -> None:
    for address in (tmp_path / "out", f"s3://bucket/{uuid.uuid4().hex}"):
        owner, writer = open_outputs(address), PlaceWriter(address)
        written = owner.note(write_by(writer, owner, image()))
        name = images_at(address)[0]
        objects_at(address).replace(name, b"damaged")
        assert owner.note(write_by(writer, owner, image())).file_bytes == written.file_bytes
        assert not list(existing_outputs(address).damaged())


def test_a_process_writes_only_where_it_finds_the_mark_of_the_owner(server: Any, tmp_path: Path) -> None:
    """The same URL may be another store for another process: its endpoint is one of the environment."""
    for address in (tmp_path / "out", f"s3://bucket/{uuid.uuid4().hex}"):
        open_outputs(address)
        before = set(objects_at(address).sizes())
        with place_mark(address) as mark:
            PlaceWriter(address, mark)
            with pytest.raises(OtherPlace, match="another place"):
                PlaceWriter(address, PlaceMark(mark.name, b"of another one"))
        with pytest.raises(OtherPlace, match="another place"):
            PlaceWriter(address, mark)
        assert set(objects_at(address).sizes()) == before, "the mark is gone"
    assert [is_seen_by_others(address) for address in (tmp_path, "s3://b/c", "memory://b/c")] == [True, True, False]


def test_access_to_stores_is_passed_on_and_printed_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.config import conf

    secrets = {"AWS_SECRET_ACCESS_KEY": "hush-1", "FSSPEC_S3_KEY": "hush-2", "HF_TOKEN": "hush-3"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH_OF_THIS_MACHINE", "/here")
    monkeypatch.setitem(conf, "s3", {"secret": "hush-4"})
    monkeypatch.setitem(conf, "gs", {"session": lambda: None})  # cannot travel
    access: StoreAccess = pickle.loads(pickle.dumps(StoreAccess.of_this_process()))
    assert "hush" not in repr(access)
    assert "PATH_OF_THIS_MACHINE" not in access.variables
    for name in secrets:
        monkeypatch.delenv(name)
    monkeypatch.setitem(conf, "s3", {"anon": False})
    access.apply()
    assert {name: os.environ[name] for name in secrets} == secrets
    assert conf["s3"] == {"anon": False, "secret": "hush-4"}
    assert json.dumps(sorted(access.settings)).count("gs") == 0


def test_a_file_system_with_earlier_credentials_is_not_used_again(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that writes for several drivers reached the store with the credentials of the first one."""
    import fsspec

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")

    def key() -> str:
        system = fsspec.filesystem("s3")
        system.exists(f"bucket/{uuid.uuid4().hex}")  # connects
        return str(system.s3._request_signer._credentials.access_key)

    assert key() == "first"
    before = fsspec.filesystem("s3")
    StoreAccess({"AWS_ACCESS_KEY_ID": "first"}, {}).apply()
    assert fsspec.filesystem("s3") is before, "nothing has changed"
    StoreAccess({"AWS_ACCESS_KEY_ID": "second"}, {}).apply()
    assert key() == "second"
    monkeypatch.setitem(fsspec.config.conf, "s3", dict(fsspec.config.conf.get("s3", {})))
    StoreAccess({}, {"s3": {"key": "third", "secret": "x"}}).apply()
    assert key() == "third"


def test_access_that_is_replaced_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of earlier credentials stayed with the next ones, and the store refused both."""
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of the node")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": False})
    first = StoreAccess(
        {"AWS_ACCESS_KEY_ID": "a", "AWS_SESSION_TOKEN": "t"}, {"s3": {"key": "a", "token": "t"}, "gs": {"token": "g"}}
    )
    first.apply()
    second = StoreAccess({"AWS_ACCESS_KEY_ID": "b"}, {"s3": {"key": "b"}})
    second.apply(first)
    assert (os.environ["AWS_ACCESS_KEY_ID"], os.environ.get("AWS_SESSION_TOKEN")) == ("b", None)
    assert (fsspec.config.conf["s3"], fsspec.config.conf.pop("gs")) == ({"anon": False, "key": "b"}, {})


def test_opening_a_folder_keeps_the_mark_of_a_process_that_lives(tmp_path: Path) -> None:
    """Whoever opened it at that moment had the owner write all outputs itself. Age tells nothing."""
    open_outputs(tmp_path)
    with place_mark(tmp_path) as mark:
        (tmp_path / ".half.png.partial").write_bytes(b"of a killed run")
        os.utime(tmp_path / mark.name, (0, 0))
        open_outputs(tmp_path)
        PlaceWriter(tmp_path, mark)
        assert [path.name for path in tmp_path.glob(".*.partial")] == [mark.name]


def test_a_process_of_another_user_writes_no_files(tmp_path: Path) -> None:
    """They would belong to that user, perhaps root, and the owner could not remove them. In a store nobody has any."""
    with place_mark(tmp_path) as mark:
        other = dataclasses.replace(mark, user=mark.user + 1)
        with pytest.raises(OtherPlace, match=f"would belong to user {os.geteuid()}, not {mark.user + 1}"):
            PlaceWriter(tmp_path, other)
    url = "memory://bucket/of-several-users"
    with place_mark(url) as mark:
        PlaceWriter(url, dataclasses.replace(mark, user=mark.user + 1))


def test_a_writer_that_has_opened_a_place_before_its_layout_changed_writes_nothing(tmp_path: Path) -> None:
    """A user has removed the outputs meanwhile, and begun again with another layout: a folder of files and a sharded
    one have different manifests, and the owner would not find the files of the other one.
    """
    address = tmp_path / "out"
    shards, thumbnails = OutputLayout(LayoutKind.WEBDATASET, SHARD_ROWS), OutputLayout(thumbnail_pixels=64)
    for before, after in ((shards, OutputLayout()), (OutputLayout(), shards), (OutputLayout(), thumbnails)):
        declare_layout(address, before)
        writer = PlaceWriter(address)
        shutil.rmtree(address, ignore_errors=True)
        declare_layout(address, after)
        owner = open_outputs(address)
        with pytest.raises(OtherPlace, match="another layout"):
            write_by(writer, owner, named(1))
        owner.note(write_by(PlaceWriter(address), owner, named(1)))
        assert [entry["recipe"]["seed"] for entry in listed(address)] == [1]
        shutil.rmtree(address)
