"""Each output is in exactly one shard, wherever a writer is killed and whoever else writes there."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import sys
import tarfile
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from modelpool.actors.config.output_address import OutputAddress
from modelpool.actors.outputs.file_content import labels_in
from modelpool.actors.outputs.image_file import read_recipe
from modelpool.actors.outputs.layout import LayoutKind, OutputLayout, declare_layout
from modelpool.actors.outputs.objects import ObjectPrefix
from modelpool.actors.outputs.open_outputs import existing_outputs, open_outputs
from modelpool.actors.outputs.output_file import FinishedOutput, encoded
from modelpool.actors.outputs.place import OutputPlace, possible_names
from modelpool.actors.outputs.sharded import ShardedOutputs
from modelpool.actors.outputs.store import OutputStore
from modelpool.actors.outputs.write_failures import FolderFailed
from modelpool.actors.request.labels import Labels, output_key
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import ImagePixels
from tests.actors.outputs.test_folder import image
from tests.s3_server import s3_server

ROWS = 3


class WriterKilled(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with s3_server() as client:
        yield client


@pytest.fixture(params=["memory", "folder", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> OutputAddress:
    if request.param == "s3":
        request.getfixturevalue("server")
        return f"s3://bucket/{uuid.uuid4().hex}/outputs"
    return tmp_path / "outputs" if request.param == "folder" else f"memory://{uuid.uuid4().hex}/outputs"


def opened(address: OutputAddress, kind: LayoutKind = LayoutKind.WEBDATASET) -> OutputPlace:
    declare_layout(address, OutputLayout(kind, ROWS))
    return open_outputs(address)


def objects(address: OutputAddress) -> ObjectPrefix:
    return ObjectPrefix(f"file://{address}" if isinstance(address, Path) else address)


def seeds_in_tars(address: OutputAddress) -> list[list[int]]:
    """The seeds in each tar, as a reader of WebDataset groups its files: by the name up to the first dot."""
    found = objects(address)
    shards = []
    for name in sorted(name for name in found.sizes() if name.endswith(".tar")):
        samples: dict[str, dict[str, bytes]] = {}
        with tarfile.open(fileobj=io.BytesIO(found.read_one(name) or b"")) as tar:
            for member in tar:
                key, _, ending = member.name.partition(".")
                opened_member = tar.extractfile(member)
                assert opened_member is not None
                samples.setdefault(key, {})[ending] = opened_member.read()
        entries = [json.loads(sample["json"]) for sample in samples.values()]
        for sample in samples.values():
            assert set(sample) == {"json", "png"}
            Image.open(io.BytesIO(sample["png"])).load()
        shards.append([entry["recipe"]["seed"] for entry in entries])
    return shards


def packed(address: OutputAddress) -> Counter[int]:
    """How often each seed is in a shard."""
    return Counter(seed for seeds in seeds_in_tars(address) for seed in seeds)


def write_all(place: OutputPlace, seeds: Iterable[int]) -> None:
    for seed in seeds:
        place.write(image(seed, index=seed))
    place.finish()


def loose(address: OutputAddress) -> list[str]:
    return [name for name in objects(address).sizes() if name.endswith(".png")]


def test_outputs_become_shards_in_the_order_of_their_rows(address: OutputAddress) -> None:
    place = opened(address)
    for seed in range(8):
        place.write(image(seed, index=seed))
    place.finish()
    assert seeds_in_tars(address) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert loose(address) == []
    later = existing_outputs(address)
    assert {kept.recipe.seed for kept in later.kept().values()} == set(range(8))
    assert list(later.damaged()) == []
    for entry in later.entries():
        with later.local_file(entry.file) as path:
            assert path.read_bytes() == encoded(image(entry.recipe.seed).output, entry.recipe)
    again = opened(address)
    for seed in range(9):  # a resumed batch with one more row
        again.write(image(seed, index=seed))
    again.finish()
    assert seeds_in_tars(address) == [[0, 1, 2], [3, 4, 5], [6, 7], [8]]


_POINTS = [
    (method, name) for method in ("before", "after") for name in ("shards/plan-000001", "shard-000001", "remove", "7")
]


@pytest.mark.parametrize(("when", "point"), _POINTS)
def test_a_writer_that_is_killed_anywhere_loses_nothing_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, point: str
) -> None:
    """It is killed around the creation of a plan, of a shard, of an output, and around the removal of packed files."""
    address = tmp_path / "outputs"
    with monkeypatch.context() as patch:
        _kill(patch, when, point)
        place = opened(address)
        with pytest.raises(WriterKilled):
            write_all(place, range(8))
    again = opened(address)
    kept = {each.recipe.seed for each in again.kept().values()}
    write_all(again, sorted(set(range(8)) - kept))
    assert packed(address) == Counter(range(8))
    assert loose(address) == []
    assert list(opened(address).damaged()) == []


def _kill(patch: pytest.MonkeyPatch, when: str, point: str) -> None:
    def around(method: str) -> None:
        original = getattr(ObjectPrefix, method)

        def killed(self: ObjectPrefix, name: Any, *rest: Any) -> Any:
            is_here = method == point or (isinstance(name, str) and (point in name if point != "7" else "-7-" in name))
            if is_here and when == "before":
                raise WriterKilled
            result = original(self, name, *rest)
            if is_here:
                raise WriterKilled
            return result

        patch.setattr(ObjectPrefix, method, killed)

    for method in ("create", "create_from", "remove"):
        around(method)


def test_two_writers_and_a_late_one_share_a_place(address: OutputAddress) -> None:
    """Two write different rows and some equal ones; one that was away writes packed ones again."""
    one, other, late = (opened(address) for _ in range(3))
    late.write(image(0, index=0))
    for seed in range(5):
        one.write(image(seed, index=seed))
        other.write(image(seed + 3, index=seed + 3))
    one.finish()
    other.finish()
    late.write(image(1, index=1))
    late.write(image(7, index=7))
    late.finish()
    assert packed(address) == Counter(range(8))
    final = opened(address)
    final.write(image(0, index=0))
    final.finish()
    assert packed(address) == Counter(range(8))
    assert loose(address) == []


def test_parquet_has_the_columns_of_the_manifest_and_images_that_datasets_read(address: OutputAddress) -> None:
    place = opened(address, LayoutKind.PARQUET)
    for seed in range(4):
        place.write(image(seed, index=seed))
    place.finish()
    files = sorted(name for name in objects(address).sizes() if name.endswith(".parquet"))
    assert files == ["shard-000000.parquet", "shard-000001.parquet"]
    table = pq.read_table(io.BytesIO(objects(address).read_one(files[0]) or b""))
    rows = table.to_pylist()
    assert [(row["seed"], row["index"], row["worker"]) for row in rows] == [(i, i, "gpu-0") for i in range(3)]
    assert rows[0]["image"]["bytes"] == encoded(image(0).output, image(0).recipe)
    assert json.loads(rows[0]["recipe"]) == json.loads(json.dumps(image(0).recipe.as_json()))
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    assert set(features) == set(table.column_names)
    later = existing_outputs(address)
    for entry in later.entries():
        with later.local_file(entry.file) as path:
            assert path.read_bytes() == encoded(image(entry.recipe.seed).output, entry.recipe)
    assert list(later.damaged()) == []


def test_a_damaged_shard_is_reported_and_made_again_after_its_removal(tmp_path: Path) -> None:
    address = tmp_path / "outputs"
    place = opened(address)
    for seed in range(3):
        place.write(image(seed, index=seed))
    place.finish()
    shard = address / "shard-000000.tar"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)
    (reason,) = {damaged.reason for damaged in opened(address).damaged()} or {""}
    assert "remove shard-000000.tar and shards/plan-000000.jsonl" in reason
    shard.unlink()
    (address / "shards" / "plan-000000.jsonl").unlink()
    again = opened(address)
    assert again.kept() == {}
    for seed in range(3):
        again.write(image(seed, index=seed))
    again.finish()
    assert seeds_in_tars(address) == [[0, 1, 2]]


def test_a_place_keeps_its_layout(tmp_path: Path) -> None:
    address = tmp_path / "outputs"
    assert isinstance(opened(address), ShardedOutputs)
    with pytest.raises(UserError, match="or with webdataset shards of 4; this one has webdataset shards of 3"):
        declare_layout(address, OutputLayout(LayoutKind.WEBDATASET, 4))
    files = open_outputs(tmp_path / "files")
    files.write(image())
    with pytest.raises(UserError, match="this one has files"):
        declare_layout(tmp_path / "files", OutputLayout(LayoutKind.PARQUET, 4))


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_thumbnails_are_next_to_the_images(tmp_path: Path, where: str) -> None:
    address = tmp_path / "outputs" if where == "folder" else f"memory://{uuid.uuid4().hex}/outputs"
    declare_layout(address, OutputLayout(thumbnail_pixels=4))
    place = open_outputs(address)
    place.write(image())
    content = objects(address).sizes()
    (name,) = (name for name in content if name.startswith("thumbnails/"))
    with Image.open(io.BytesIO(objects(address).read_one(name) or b"")) as thumbnail:
        assert (thumbnail.size, thumbnail.format) == ((4, 4), "WEBP")
    assert len(open_outputs(address).kept()) == 1


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_images_that_differ_in_their_ending_have_a_thumbnail_each(tmp_path: Path, where: str) -> None:
    address = tmp_path / "outputs" if where == "folder" else f"memory://{uuid.uuid4().hex}/outputs"
    declare_layout(address, OutputLayout(thumbnail_pixels=4))
    place = open_outputs(address)
    for ending in ("png", "jpg"):
        recipe = dataclasses.replace(image().recipe, format=ending)
        place.write(dataclasses.replace(image(), recipe=recipe, labels=Labels(name="x")))
    names = {name for name in objects(address).sizes() if name.startswith("thumbnails/")}
    assert names == {"thumbnails/x.png.webp", "thumbnails/x.jpg.webp"}


@pytest.mark.parametrize("kind", [LayoutKind.WEBDATASET, LayoutKind.PARQUET])
def test_the_id_of_a_request_is_the_key_in_a_shard(tmp_path: Path, kind: LayoutKind) -> None:
    """An id that a key cannot have gets digits of the output's key; equal requests have an output each."""
    address = tmp_path / "outputs"
    place = opened(address, kind)
    for label_id in ("cat-17", "a.b/c", "dog"):
        place.write(dataclasses.replace(image(1), labels=Labels(id=label_id, metadata={"row": label_id})))
    place.finish()
    digits = output_key(image(1).recipe.digest, "a.b/c")[:8]
    if kind is LayoutKind.PARQUET:
        rows = pq.read_table(address / "shard-000000.parquet").to_pylist()
        found = {row["key"]: json.loads(row["metadata"])["row"] for row in rows}
    else:
        with tarfile.open(address / "shard-000000.tar") as tar:
            names = [name for name in tar.getnames() if name.endswith(".json")]
            entries = {name.removesuffix(".json"): tar.extractfile(name) for name in names}
            found = {key: json.load(file)["metadata"]["row"] for key, file in entries.items() if file is not None}
    assert found == {"cat-17": "cat-17", f"a-b-c-{digits}": "a.b/c", "dog": "dog"}
    assert len(opened(address, kind).kept()) == 3


def named(seed: int) -> FinishedOutput:
    """An output that asks for the same name and has the same size as others of it."""
    finished = image(seed, index=seed)
    output = ImagePixels(np.full((8, 8, 3), seed, np.uint8))
    return dataclasses.replace(finished, output=output, labels=Labels(name="a"))


def pack_two_and_begin_a_third(address: OutputAddress) -> str:
    """Return the file of the third, which is in no shard."""
    declare_layout(address, OutputLayout(LayoutKind.WEBDATASET, 2))
    place = open_outputs(address)
    for seed in (1, 2):
        place.write(named(seed))
    place.finish()
    return str(place.write(named(3)).path).rpartition("/")[2]


def test_a_name_is_not_used_again_after_its_file_was_packed(tmp_path: Path) -> None:
    address = tmp_path / "outputs"
    file = pack_two_and_begin_a_third(address)
    place = open_outputs(address)
    with place.local_file(file) as path:
        assert read_recipe(path).seed == 3
    assert len({entry.file for entry in place.entries()}) == 3


def test_a_file_that_has_the_name_of_a_packed_one_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In places of earlier versions names were used again. Neither the next run nor another writer removes the file."""
    address = tmp_path / "outputs"
    with monkeypatch.context() as patch:
        patch.setattr(
            OutputStore,
            "_free_names",
            lambda self, finished: possible_names(finished.recipe, finished.labels),
            raising=False,
        )
        file = pack_two_and_begin_a_third(address)
    assert file == "a.png"
    write_all(open_outputs(address), [4])
    assert packed(address) == Counter([1, 2, 3, 4])
    assert loose(address) == []


@pytest.mark.parametrize(
    "ids",
    [["a/b", "a.b", "a b"], ["\u732b", "\u72ac", "\u9ce5"], ["x" * 80 + end for end in "abc"]],
    ids=["punctuation", "other scripts", "long"],
)
def test_equal_requests_with_similar_ids_have_a_key_each(tmp_path: Path, ids: list[str]) -> None:
    address = tmp_path / "outputs"
    place = opened(address)
    for label_id in ids:
        place.write(dataclasses.replace(image(1), labels=Labels(id=label_id)))
    place.finish()
    assert seeds_in_tars(address) == [[1, 1, 1]]


@pytest.mark.parametrize("label_id", ["a.b", ""], ids=["digits of the key", "digits of the digest"])
def test_ids_that_are_the_keys_of_another_output_are_allowed(tmp_path: Path, label_id: str) -> None:
    address = tmp_path / "outputs"
    place = opened(address)
    digits = output_key(image(1).recipe.digest, label_id)[:8]
    for index, label_id in enumerate([f"a-b-{digits}", f"a-b-{digits}-{digits}", "a.b"]):
        place.write(dataclasses.replace(image(1, index=index), labels=Labels(id=label_id)))
    place.finish()
    assert seeds_in_tars(address) == [[1, 1, 1]]


@pytest.mark.parametrize("ending", ["webp", "jpg", "avif"])
def test_labels_are_in_every_image_format(tmp_path: Path, ending: str) -> None:
    labels = Labels(id="cat <17>", metadata={"row": [1, None]}, line=3)
    recipe = dataclasses.replace(image().recipe, format=ending)
    path = tmp_path / f"image.{ending}"
    path.write_bytes(encoded(image().output, recipe, labels))
    assert labels_in(path) == labels


class PackedMeanwhile(Future[None]):
    """A shard that failed; whenever a writer asks for it, another one does so, too."""

    def __init__(self, outputs: ShardedOutputs, problem: Exception) -> None:
        super().__init__()
        self._outputs, self._asks = outputs, True
        self.found: list[str] = []
        self.set_exception(problem)

    def done(self) -> bool:
        if self._asks:
            self._asks = False
            other = threading.Thread(target=self._ask)
            other.start()
            other.join(0.1)
        return True

    def _ask(self) -> None:
        try:
            self._outputs._raise_problem(wait=False)
        except UserError as problem:
            self.found.append(str(problem))


def test_a_failed_shard_concerns_the_place_and_is_reported_by_one_of_its_writers(tmp_path: Path) -> None:
    """A full temporary folder failed the output that was written next, and a second writer at that moment got an
    AttributeError."""
    outputs = opened(tmp_path / "outputs")
    assert isinstance(outputs, ShardedOutputs)
    outputs._packed = packed = PackedMeanwhile(outputs, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(FolderFailed, match="no shard can be created"):
        outputs._raise_problem(wait=False)
    outputs._raise_problem(wait=False)
    assert packed.found == []


def test_a_place_of_parquet_shards_needs_their_library_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was missed when the first shard was full."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="pyarrow"):
        opened(tmp_path / "outputs", LayoutKind.PARQUET)
