"""What `modelpool events` and `modelpool costs` share: where the history of a pool is, and since when to read it."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.pool.values.core.errors import UserError, unusable_field

if TYPE_CHECKING:
    import typer

    from modelpool.actors.control.history.history_reader import HistoryReader

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_AGE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([smhdw])")
_EXPECTED = "an age such as 90m, 12h, 2d or 3w, or a date such as 2026-01-31 or 2026-01-31T18:00"
_SUFFIX = ".history.sqlite"
#: less than a year: the month of a time without a year is not the present one
_YEAR_SECONDS = 330 * 86400.0


@dataclass(frozen=True, slots=True)
class FoundHistory:
    """The history of the pool called `name`. `trouble` is why its running pool does not write it; "" if it does."""

    name: str
    reader: HistoryReader
    trouble: str = ""


def parse_since(text: str, now: float) -> float:
    """Return the Unix seconds that `text` names: an age before `now`, or a local date. Raises UnusableField."""
    if (age := _AGE.fullmatch(text.strip())) is not None:
        return now - float(age[1]) * _UNITS[age[2]]
    try:
        at = datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise unusable_field("--since", text, _EXPECTED) from None
    if at > now:
        raise unusable_field("--since", text, f"a time that has passed; {_EXPECTED}")
    return at


def find_history(context: typer.Context, pool: str | None, config: Path | None) -> FoundHistory:
    """Return the history of a pool that runs on this machine, or ran here: `pool`, the latest one that runs, or the one
    that the configuration names. Raises UserError."""
    from modelpool.actors.cli.terminal.session import session_of
    from modelpool.actors.control.history.history_reader import HistoryReader
    from modelpool.actors.ray.run_file import running_pool

    if pool is not None and (":" in pool or pool == "auto"):
        raise unusable_field("--pool", pool, "a name: a history is read on the machine of the pool's controller")
    running = running_pool(pool)
    if running is not None and config is None:
        if not running.history:
            raise UserError(
                f"pool {running.name!r} keeps no history: it has [pool] journal = false, or an earlier version of "
                "modelpool started it"
            )
        now = session_of(context).ask_status(running.name)
        reader = HistoryReader(Path(running.history))
        return FoundHistory(running.name, reader, "" if now is None else now.history_trouble)
    name, path = _configured(pool, config)
    if not path.is_file():
        known = sorted(each.name.removesuffix(_SUFFIX) for each in path.parent.glob(f"*{_SUFFIX}"))
        others = f"; this folder has histories of: {', '.join(known)} (--pool)" if known else ""
        raise UserError(
            f"pool {name!r} has no history on this machine: {path} does not exist; pools of `modelpool up` write one"
            f"{others}"
        )
    return FoundHistory(name, HistoryReader(path))


def _configured(pool: str | None, config: Path | None) -> tuple[str, Path]:
    """Return the name of a pool that does not run, and the file of its history."""
    from modelpool.actors.config.config import CONFIG_NAME, CONFIG_VARIABLE, PoolConfig
    from modelpool.actors.control.history.pool_history import history_path
    from modelpool.actors.ray.state_folder import journal_path

    is_configured = config is not None or bool(os.environ.get(CONFIG_VARIABLE)) or Path(CONFIG_NAME).is_file()
    settings = PoolConfig.find(config) if is_configured else PoolConfig()
    name = pool or settings.cluster.name
    if name != settings.cluster.name:
        return name, history_path(journal_path(None, name))
    if settings.pool.journal is False:
        raise UserError(f"pool {name!r} keeps no history: it has [pool] journal = false")
    return name, history_path(journal_path(settings.pool.journal, name))


def local_time(at: float) -> str:
    """Return a time as users read it, in the zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def time_of_year(at: float, now: float) -> str:
    """Return a time of the past months without its year, and any other one with it."""
    return local_time(at)[5:] if 0.0 <= now - at < _YEAR_SECONDS else local_time(at)
