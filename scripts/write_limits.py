"""Writes docs/reference/limits.md from the table of bounds.

python scripts/write_limits.py           after a change of a bound
python scripts/write_limits.py --check   exit code 1 if the page is out of date (a test runs this)
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from modelpool.actors.http.bound_table import BOUNDS, Bound  # noqa: E402 - the script may be run from anywhere
from modelpool.actors.request.field_table import REQUEST_FIELDS, RequestField  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "limits.md"
HEAD = """# Limits

<!-- written by scripts/write_limits.py -->

What one caller may cost the others is bounded. A refusal names the field, the value found and the bound. Defaults are
in the tables; a name in the column "setting" is a key of [`[serve]`](configuration.md#serve), all others are fixed.
`/metrics` counts how often a limit acts (`modelpool_http_limits_total`, by the name in the column "limit"), and the log
has a line for each, at most every 10 s; limits without such a name are not counted. Job files, Python and detached
submissions have the same bounds of a request.
"""
FIELDS = """## Fields of a request

Bounds of texts in characters and of lists in entries, with the name of each field; numbers have their range in
[Requests](requests.md).

| characters | fields |
| --- | --- |
"""


def number(value: float, unit: str) -> str:
    """Return a bound as it is read: bytes in binary units, thousands apart."""
    if unit == "bytes":
        for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value >= size and value % size == 0:
                return f"{value / size:,.0f} {name}"
    return f"{value:,.10g} {unit}".rstrip()


def row(bound: Bound) -> str:
    """Return a row of the table."""
    setting = f"`{bound.setting}`" if bound.setting else ""
    limit = f"`{bound.limit}`" if bound.limit else ""
    return f"| {bound.what} | {number(bound.value, bound.unit)} | {bound.acts or 'refused'} | {setting} | {limit} |"


def fields(most: dict[int, list[str]]) -> str:
    """Return rows of bounds with the fields that have them, the largest bound first."""
    return "\n".join(
        f"| {bound:,} | {', '.join(f'`{name}`' for name in names)} |"
        for bound, names in sorted(most.items(), reverse=True)
    )


def by_bound(attribute: str) -> dict[int, list[str]]:
    """Return the fields of a request by their bound."""
    found: dict[int, list[str]] = {}
    each: RequestField
    for each in REQUEST_FIELDS.values():
        found.setdefault(getattr(each, attribute), []).append(each.name)
    return found


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for heading, bounds in BOUNDS.items():
        rows = "\n".join(map(row, bounds))
        parts.append(
            f"## {heading}\n\n| bound | default | more | setting | limit |\n| --- | --- | --- | --- | --- |\n{rows}\n"
        )
    parts.append(
        FIELDS
        + fields(by_bound("most_characters"))
        + "\n\n| entries | fields |\n| --- | --- |\n"
        + fields(by_bound("most_entries"))
        + "\n"
    )
    return "\n".join(parts)


def main() -> None:
    """Write the page, or compare it."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(None if PAGE.exists() and PAGE.read_text() == text else f"{PAGE.name} is out of date")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
