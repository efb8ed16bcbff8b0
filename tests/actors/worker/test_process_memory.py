"""The host memory of a process is added up from what the kernel says of each mapping."""

from __future__ import annotations

import mmap

from modelpool.actors.worker.process_memory import process_memory, read_smaps

SMAPS = """\
7f0000000000-7f0000100000 r--p 00000000 08:01 12   /models/my model.safetensors
Size:               1024 kB
Rss:                 800 kB
Pss:                 200 kB
Anonymous:             8 kB
VmFlags: rd mr mw me
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
Rss:                 500 kB
Pss:                 500 kB
Anonymous:           500 kB
7f0000400000-7f0000500000 r-xp 00000000 08:01 13   /lib/libtorch.so
Rss:                1000 kB
Pss:                 100 kB
Anonymous:             0 kB
7f0000600000-7f0000700000 r--p 00000000 08:01 14   /loras/light.safetensors
Rss:                  40 kB
Pss:                  40 kB
Anonymous:             0 kB
"""


def test_weights_and_anonymous_memory_are_told_apart() -> None:
    memory = read_smaps(SMAPS.splitlines(keepends=True), pid=7)
    assert memory.pid == 7
    assert memory.weights_rss_bytes == 840 * 1024
    assert memory.weights_pss_bytes == 240 * 1024
    assert memory.anonymous_bytes == 508 * 1024


def test_a_mapped_weights_file_of_this_process_is_seen(tmp_path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(1 << 20))
    before = process_memory()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        during = process_memory()
    assert during.weights_rss_bytes - before.weights_rss_bytes == 1 << 20
    assert 0 < during.weights_pss_bytes - before.weights_pss_bytes <= 1 << 20
