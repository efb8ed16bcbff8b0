"""`PeerList`: addresses of the file servers of other nodes, as the processes of this node learned them.

One empty file per address, so that what the file server of one process learns is known to a fetch in another one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from math import inf
from pathlib import Path
from urllib.parse import quote, unquote

from modelpool.pool.files.fetch.fetch_errors import CacheFull

#: addresses that are remembered; the least recently seen ones are forgotten
MAX_PEERS = 256
#: an address that was not seen for this long may be of a node that is gone
FORGOTTEN_SECONDS = 3600.0
#: an address is written at most this often
_RENEWED_SECONDS = 30.0


class PeerList:
    """The other nodes, as files in one folder of the cache."""

    def __init__(self, folder: Path) -> None:
        """Create the folder. Raises CacheFull if that is impossible."""
        self._folder = folder
        self._own: set[str] = set()
        self._noted: dict[str, float] = {}
        try:
            self.create_folder()
        except OSError as error:
            raise CacheFull(f"{folder}: cannot be created ({error.strerror})") from None

    def create_folder(self) -> None:
        """Create the folder if somebody has removed it. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def is_own(self, address: str) -> None:
        """Leave out an address: it is of this node."""
        self._own.add(address)
        (self._folder / quote(address, safe="")).unlink(missing_ok=True)

    def add(self, addresses: Iterable[str]) -> None:
        """Note addresses of other nodes."""
        now = time.monotonic()
        for address in addresses:
            if address in self._own or now - self._noted.get(address, -inf) < _RENEWED_SECONDS:
                continue
            if len(self._noted) > 4 * MAX_PEERS:
                self._noted.clear()
            self._noted[address] = now
            with contextlib.suppress(OSError):  # a full disk: then it is not remembered
                path = self._folder / quote(address, safe="")
                path.touch()

    def remove(self, address: str) -> None:
        """Forget an address that does not answer."""
        self._noted.pop(address, None)
        (self._folder / quote(address, safe="")).unlink(missing_ok=True)

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses, the most recently noted first; forget old ones."""
        found = []
        with os.scandir(self._folder) as listing:
            for entry in listing:
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.stat().st_mtime, unquote(entry.name)))
        found.sort(reverse=True)
        now = time.time()
        for _, address in found[MAX_PEERS:] + [item for item in found if now - item[0] > FORGOTTEN_SECONDS]:
            self.remove(address)
        known = [address for at, address in found[:MAX_PEERS] if now - at <= FORGOTTEN_SECONDS]
        return tuple(address for address in known if address not in self._own)
