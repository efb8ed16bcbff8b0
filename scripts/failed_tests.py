"""Prints the ids of the tests that failed in pytest's caches below a folder; for scripts/test.

Exits with 1, printing nothing, if none failed, more than two did, or a failed id is a whole file (which then could not
be collected).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

#: more failures than this are no accident of timing
_MOST = 2


def failed_tests(folder: Path) -> list[str]:
    """Return the ids of the tests that failed, from all caches below `folder`."""
    files = sorted(folder.glob("*/v/cache/lastfailed"))
    return [test_id for file in files for test_id in json.loads(file.read_text())]


def main() -> int:
    """Print the ids, one per line."""
    found = failed_tests(Path(sys.argv[1]))
    if not 1 <= len(found) <= _MOST or not all("::" in test_id for test_id in found):
        return 1
    print("\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
