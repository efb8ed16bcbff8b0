"""A real S3-compatible server (moto) over HTTP, which s3fs finds by the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def s3_server() -> Iterator[Any]:
    """Run a server with a bucket named "bucket"; yield a boto3 client. Skips the test without moto or s3fs."""
    pytest.importorskip("moto", reason="needs moto and s3fs; ./scripts/setup dev installs them")
    pytest.importorskip("s3fs", reason="needs moto and s3fs; ./scripts/setup dev installs them")
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-test-key")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        s3fs.S3FileSystem.clear_instance_cache()  # one that has the endpoint of an earlier server
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="bucket")
        try:
            yield client
        finally:
            server.stop()
