"""`LiveBoard`: the latest values that viewers of the web page see, and what has changed since a viewer's version.

Values are in entries, entries in sections. Each field of an entry remembers the version at which it last changed, so a
viewer receives changed fields only, however long ago it looked. Viewers that have the same version share the bytes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

#: section -> key -> field -> JSON value
Entries: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Any]]]
#: removed entries that are remembered; a viewer with an older version receives everything
MOST_REMOVED = 1000


class LiveBoard:
    """The entries that one owner may see. `version` is 0 before the first `update`."""

    def __init__(self) -> None:
        self.version = 0
        #: section -> key -> field -> (version, value)
        self._sections: dict[str, dict[str, dict[str, tuple[int, Any]]]] = {}
        #: (section, key) -> version, oldest first
        self._removed: OrderedDict[tuple[str, str], int] = OrderedDict()
        #: removals up to this version may be forgotten
        self._forgotten = 0
        self._texts: dict[int, str] = {}

    def update(self, entries: Entries) -> bool:
        """Replace all entries. Return whether anything has changed; if so, the version has increased."""
        version, changed = self.version + 1, False
        for section, new in entries.items():
            known = self._sections.setdefault(section, {})
            for key in [key for key in known if key not in new]:
                del known[key]
                self._removed[section, key] = version
                changed = True
            for key, fields in new.items():
                entry = known.get(key)
                if entry is None:
                    known[key] = {name: (version, value) for name, value in fields.items()}
                    self._removed.pop((section, key), None)
                    changed = True
                    continue
                for name, value in fields.items():
                    if name not in entry or entry[name][1] != value:
                        entry[name] = (version, value)
                        changed = True
        while len(self._removed) > MOST_REMOVED:
            self._forgotten = self._removed.popitem(last=False)[1]
        if changed:
            self.version = version
            self._texts.clear()
        return changed

    def changes(self, since: int) -> str:
        """Return what has changed since a version as JSON: {"version":, "all":, "set":, "removed":}. "all" is true if
        everything is in "set": for version 0, and for one that is too old.
        """
        known = self._texts.get(since)
        if known is None:
            complete = since < max(1, self._forgotten)
            after = -1 if complete else since
            found = {
                "version": self.version,
                "all": complete,
                "set": self._set_since(after),
                "removed": {} if complete else self._removed_since(since),
            }
            known = self._texts[since] = json.dumps(found, separators=(",", ":"))
        return known

    def _set_since(self, version: int) -> dict[str, dict[str, dict[str, Any]]]:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for section, entries in self._sections.items():
            for key, fields in entries.items():
                new = {name: value for name, (at, value) in fields.items() if at > version}
                if new:
                    found.setdefault(section, {})[key] = new
        return found

    def _removed_since(self, version: int) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for (section, key), at in self._removed.items():
            if at > version:
                found.setdefault(section, []).append(key)
        return found
