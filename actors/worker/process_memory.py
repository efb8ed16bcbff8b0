"""Measures the host memory of this process, as the kernel counts it (/proc/self/smaps). Linux only.

Rule: judge sharing by PSS. A page that N processes map counts as 1/N in PSS and fully in RSS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from modelpool.pool.files.formats.weights_file import PICKLE_SUFFIXES, PLAIN_SUFFIXES

WEIGHTS_SUFFIXES = (*PLAIN_SUFFIXES, *PICKLE_SUFFIXES)
SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process, in bytes.

    weights_rss, weights_pss  of the weights files that it maps
    anonymous                 memory that no file backs
    """

    pid: int
    weights_rss_bytes: int
    weights_pss_bytes: int
    anonymous_bytes: int


def process_memory() -> ProcessMemory:
    """Measure this process. Takes some milliseconds."""
    with SMAPS.open() as lines:
        return read_smaps(lines, os.getpid())


def read_smaps(lines: Iterable[str], pid: int) -> ProcessMemory:
    """Sum up the lines of an smaps file."""
    rss_bytes = pss_bytes = anonymous_bytes = 0
    in_weights = False
    for line in lines:
        name, _, rest = line.partition(":")
        if (
            " " in name
        ):  # the header of a mapping, "7f00-7f10 r--p 00000000 08:01 12   /path"; field names have no blank
            in_weights = line.rstrip().endswith(WEIGHTS_SUFFIXES)
        elif name == "Anonymous":
            anonymous_bytes += _kilobytes(rest)
        elif in_weights and name == "Rss":
            rss_bytes += _kilobytes(rest)
        elif in_weights and name == "Pss":
            pss_bytes += _kilobytes(rest)
    return ProcessMemory(pid, rss_bytes, pss_bytes, anonymous_bytes)


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024
