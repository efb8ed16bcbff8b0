"""Writes docs/reference/requests.md from the table of request fields, and docs/reference/options.md from that of the
options of a run.

python scripts/write_requests.py           after changing a table (modelpool.actors.request.field_table,
                                           modelpool.pool.values.core.run_options), or the families with an option
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
from modelpool.pool.families.option_support import families_with  # noqa: E402
from modelpool.pool.families.teacache_facts import TEACACHE_FACTS  # noqa: E402
from modelpool.pool.values.core.run_options import MAIN_SETTING, RUN_OPTIONS, Limits, limits_of  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "requests.md"
OPTIONS_PAGE = ROOT / "docs" / "reference" / "options.md"
WIDTH = 120
OPTIONS_HEAD = """# Options

Options of a sampling run: extensions of the guidance, changes inside the diffusion model, and caches over the steps.
All are off by default, and then cost nothing.

In Python and over HTTP they are in the field `options` of a request: `{"freeu": true, "pag": {"scale": 3}}`, or
`{"pag.scale": 3}`; in job files likewise. On the command line: `--option freeu=on --option pag.scale=3`. A number alone
sets the setting that is marked as the main one: `--option pag=3`.

An option that the family of the model does not have is refused before anything runs; the message names the families
that have it. Options are part of the recipe. They work together, with LoRAs, ControlNets, regions and batches, with
these exceptions: a run has at most one cache, `tiled` is not combined with ControlNets, regions, masks of image
prompts, SAG or DeepCache, and `cfg_zero` and `rescale_cfg` need a `cfg` other than 1. Runs with `fbcache` or `teacache`
are not batched, and are not continued from a checkpoint after an interruption, since the steps that they skip depend on
the image; runs with `deepcache` continue from a step whose deep layers are computed. Options are data; functions of
one's own are for Python programs ([The patcher](../explanation/patcher.md#in-requests)). `start` and `end` are
[shares of the steps](../explanation/step_shares.md) of the schedule.

This page is written by `scripts/write_requests.py`.
"""
HEAD = """# Requests

The fields of a request, in Python (`pool.submit(GenerateRequest(...))`), in the lines of job files, and as options of
`modelpool generate`. Only `model` and `prompt` are required, and on the command line the model may be left out if the
pool has only one. Unless its text says otherwise, a field that a model does not support is refused, with the reason.
Fields for some models may be written as `options={"motion": 127}`, too.

This page is written by `scripts/write_requests.py`.
"""


def main() -> int:
    """Write the pages, or check them; return the exit code."""
    pages = {PAGE: "\n".join(page()) + "\n", OPTIONS_PAGE: "\n".join(options_page()) + "\n"}
    if "--check" in sys.argv[1:]:
        return int(any(not path.exists() or path.read_text() != text for path, text in pages.items()))
    for path, text in pages.items():
        path.write_text(text)
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


def options_page() -> Iterator[str]:
    """Yield the lines of the page of options."""
    first, *paragraphs = OPTIONS_HEAD.strip().split("\n\n")
    yield first
    for paragraph in paragraphs:
        yield from ("", *textwrap.wrap(paragraph.replace("\n", " "), WIDTH, break_on_hyphens=False))
    for name, kind in RUN_OPTIONS.items():
        assert kind.__doc__ is not None, f"{name} has no docstring"
        yield from ("", f"## `{name}`", "")
        yield from textwrap.wrap(" ".join(kind.__doc__.split()), WIDTH, break_on_hyphens=False)
        yield from ("", "| setting | default | values | meaning |", "|---|---|---|---|")
        defaults = kind()
        for setting, limits in limits_of(kind).items():
            main = " (main)" if MAIN_SETTING.get(name) == setting else ""
            default = getattr(defaults, setting)
            written = ", ".join(map(str, default)) or "none" if isinstance(default, tuple) else str(default)
            yield f"| `{setting}`{main} | {written} | {_values(limits)} | {limits.meaning} |"
        families = ", ".join(f"`{family}`" for family in families_with(name))
        yield from ("", *textwrap.wrap(f"Families: {families}.", WIDTH, break_on_hyphens=False))
        if name == "teacache":
            yield from ("", *textwrap.wrap(_published_thresholds(), WIDTH, break_on_hyphens=False))


def _published_thresholds() -> str:
    """Return the sentences on the thresholds of TeaCache that were published."""
    listed = []
    for row, found in sorted(TEACACHE_FACTS.items()):
        sizes = {facts.blocks: facts.threshold for facts in found}
        listed += [
            f"`{row}`{f' with {blocks} blocks' if blocks else ''} {threshold:g}" for blocks, threshold in sizes.items()
        ]
    return (
        f"The smallest published thresholds, with the best quality: {', '.join(listed)}. A size without its own is "
        "refused. Of Wan 2.1, the coefficients with retention steps are used: the first five steps are always "
        "computed; of `wan21_i2v`, those of the closer of the two sizes, 832 x 480 and 1280 x 720. Models of Wan 2.2 "
        "have no published coefficients; a file with one of its experts alone cannot be distinguished from Wan 2.1."
    )


def _values(limits: Limits) -> str:
    match limits.kind:
        case "name":
            return " or ".join(f"`{name}`" for name in limits.names)
        case "blocks":
            return f"factors from {limits.least:g} to {limits.most:g} by block, such as `IN04*0.5,MID*0`"
        case "wholes":
            return f"whole numbers from {limits.least:g} to {limits.most:g}"
        case "whole":
            return f"{limits.least:g} to {limits.most:g}, whole"
        case "number":
            return f"{limits.least:g} to {limits.most:g}"


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
