"""What this process takes of the host's memory, as the kernel counts it (/proc/self/smaps). Linux only.

Rule: judge sharing by PSS. A page that N processes map counts as 1/N in PSS and fully in RSS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES

WEIGHTS_SUFFIXES = (*PLAIN_SUFFIXES, *PICKLE_SUFFIXES)
SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """One process. Bytes.

    weights_rss, weights_pss  of the weights files that it maps
    anonymous                 memory of its own that no file backs
    """

    pid: int
    weights_rss_bytes: int
    weights_pss_bytes: int
    anonymous_bytes: int


def host_memory() -> HostMemory:
    """This process, now. Takes some milliseconds."""
    with SMAPS.open() as lines:
        return read_smaps(lines, os.getpid())


def read_smaps(lines: Iterable[str], pid: int) -> HostMemory:
    """Add up what smaps says; `lines` are as the kernel writes them."""
    rss_bytes = pss_bytes = anonymous_bytes = 0
    in_weights = False
    for line in lines:
        name, _, rest = line.partition(":")
        if " " in name:  # a mapping's own line, "7f00-7f10 r--p 00000000 08:01 12   /path"; field names have no blank
            in_weights = line.rstrip().endswith(WEIGHTS_SUFFIXES)
        elif name == "Anonymous":
            anonymous_bytes += _kilobytes(rest)
        elif in_weights and name == "Rss":
            rss_bytes += _kilobytes(rest)
        elif in_weights and name == "Pss":
            pss_bytes += _kilobytes(rest)
    return HostMemory(pid, rss_bytes, pss_bytes, anonymous_bytes)


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024
