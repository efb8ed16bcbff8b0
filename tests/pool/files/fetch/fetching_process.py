"""A process that fetches files, for tests that kill it: `python fetching_process.py CACHE URL TOKEN [PEER...]`.

Prints the address of its file server, then one line of JSON with what it fetched. Waits for a line before it ends.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.node_files import NodeFiles
from modelpool.pool.files.fetch.open_source import open_source


def main(cache: str, url: str, token: str, sha256: str, peers: list[str]) -> None:
    """Fetch all files of a source."""
    nodes = NodeFiles(CacheSettings(Path(cache), None, token), "127.0.0.1" if token else "", cache)
    print(nodes.address, flush=True)
    files = [replace(file, sha256=sha256) for file in open_source(url).files()]
    found = nodes.bring(files, peers=peers)
    assert found is not None
    facts = {
        "folder": str(found.folder),
        "source_bytes": found.source_bytes,
        "peer_bytes": found.peer_bytes,
        "seconds": found.seconds,
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()
    nodes.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
