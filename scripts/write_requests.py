"""Writes docs/reference/requests.md from the table of request fields.

python scripts/write_requests.py           after changing the table (modelpool.actors.request.field_table)
python scripts/write_requests.py --check   exit code 1 if the page is out of date (a test runs this)
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from modelpool.actors.request.field_table import (  # noqa: E402 - the script may be run from anywhere
    REQUEST_FIELDS,
    RequestField,
)

PAGE = ROOT / "docs" / "reference" / "requests.md"
WIDTH = 120
HEAD = """# Requests

The fields of a request, in Python (`pool.submit(GenerateRequest(...))`), in the lines of job files, and as options of
`modelpool generate`. Only `model` and `prompt` are required, and on the command line the model may be left out if the
pool has only one. Unless its text says otherwise, a field that a model does not support is refused, with the reason.
Fields for some models may be written as `options={"motion": 127}`, too.

This page is written by `scripts/write_requests.py`.
"""


def main() -> int:
    """Write the page, or check it; return the exit code."""
    text = "\n".join(page()) + "\n"
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    first, *paragraphs = HEAD.strip().split("\n\n")
    yield first
    for paragraph in paragraphs:
        yield from ("", *textwrap.wrap(paragraph.replace("\n", " "), WIDTH, break_on_hyphens=False))
    for row in REQUEST_FIELDS.values():
        yield from ("", f"## `{row.name}`", "")
        yield from textwrap.wrap(row.meaning, WIDTH, break_on_hyphens=False, break_long_words=False)
        facts = list(_facts(row))
        if facts:
            yield ""
            for fact in facts:
                yield from textwrap.wrap(
                    f"- {fact}", WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
                )


def _facts(row: RequestField) -> Iterator[str]:
    unit = f" {row.unit}" if row.unit else ""
    if row.is_required:
        yield "Required."
    elif row.default not in (None, (), ""):
        yield f"Default: {row.default}{unit if row.default is not True else ''}."
    if row.range:
        yield f"Value: {row.range}{f', in {row.unit}' if row.unit else ''}."
    elif row.unit:
        yield f"Unit: {row.unit}."
    if row.requires:
        yield f"Only for models with: {row.requires}."
    if row.option is not None:
        yield f"Option: `{row.option.flag} {row.option.metavar}`".rstrip(" `") + "`."


if __name__ == "__main__":
    sys.exit(main())
