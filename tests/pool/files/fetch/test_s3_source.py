"""Files of a real S3-compatible server (moto) through s3fs: listed, described and fetched."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.fetch_errors import FileGone, SourceFailed
from modelpool.pool.files.fetch.node_files import NodeFiles
from modelpool.pool.files.fetch.open_source import open_source
from modelpool.pool.files.fetch.source import read_all
from tests.s3_server import s3_server

DATA = random.Random(3).randbytes(5 << 20)


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A server with a bucket of models."""
    with s3_server() as client:
        client.put_object(Bucket="bucket", Key="models/sub/a.safetensors", Body=DATA)
        client.put_object(Bucket="bucket", Key="models/readme.md", Body=b"not a model")
        sums = f"{hashlib.sha256(DATA).hexdigest()}  sub/a.safetensors\n".encode()
        client.put_object(Bucket="bucket", Key="models/SHA256SUMS", Body=sums)
        yield client


def test_a_bucket_is_listed_with_sizes_versions_and_hashes(store: Any) -> None:
    files = {file.path: file for file in open_source("s3://bucket/models/").files()}
    assert set(files) == {"sub/a.safetensors", "SHA256SUMS"}
    file = files["sub/a.safetensors"]
    assert (file.size_bytes, file.sha256) == (len(DATA), hashlib.sha256(DATA).hexdigest())
    assert file.version == store.head_object(Bucket="bucket", Key="models/sub/a.safetensors")["ETag"].strip('"')
    assert file.url == "s3://bucket/models/sub/a.safetensors"
    assert b"".join(open_source("s3://bucket/models/").read(file, 70, 3_000_000)) == DATA[70:3_000_000]


def test_a_file_of_a_bucket_is_fetched(store: Any, tmp_path: Path) -> None:
    nodes = NodeFiles(CacheSettings(tmp_path / "cache", 6 << 20))
    files = [file for file in open_source("s3://bucket/models/").files() if file.sha256]
    found = nodes.bring(files)
    assert found is not None
    assert (found.folder / "sub" / "a.safetensors").read_bytes() == DATA
    assert found.source_bytes == len(DATA)


def test_one_object_is_a_source(store: Any) -> None:
    (file,) = open_source("s3://bucket/models/sub/a.safetensors").files()
    assert (file.path, file.size_bytes) == ("a.safetensors", len(DATA))
    assert read_all(open_source("s3://bucket/models/sub/a.safetensors"), file) == DATA


def test_missing_buckets_and_objects_are_told(store: Any) -> None:
    for url in ("s3://bucket/nothing/", "s3://no-such-bucket/models/"):
        with pytest.raises(SourceFailed, match=url.rstrip("/")):
            open_source(url).files()
    source = open_source("s3://bucket/models/")
    file = next(file for file in source.files() if file.path.endswith("a.safetensors"))
    with pytest.raises(FileGone, match=r"sub/gone\.safetensors: no such file"):
        list(source.read(replace(file, url="s3://bucket/models/sub/gone.safetensors"), 0, 10))


def test_an_object_that_was_replaced_is_told(store: Any, tmp_path: Path) -> None:
    store.put_object(Bucket="bucket", Key="models/changing.safetensors", Body=DATA[:2_000_000])
    source = open_source("s3://bucket/models/")
    file = next(file for file in source.files() if file.path == "changing.safetensors")
    store.put_object(Bucket="bucket", Key="models/changing.safetensors", Body=DATA[1:2_000_001])
    nodes = NodeFiles(CacheSettings(tmp_path / "cache"))
    with pytest.raises(FileGone, match="was replaced"):
        nodes.bring([file])
    assert not any(nodes.cache.content.iterdir())
