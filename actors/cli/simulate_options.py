"""The options that `modelpool simulate` and `modelpool plan-cluster` share.

Knows words on a command line, as `actors.cli.options` does; what they mean is read in `actors.cli.simulate_runs` and
`actors.cli.simulate_workload`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelpool.actors.cli.options import _option

#: the policy that decides where nothing else was said
OURS = "modelpool"
CLUSTER = "The cluster"
WORK = "The work"
#: names are told here and defined in `scheduler.workloads.built_in`; a test compares
_TRACE = (
    "A trace file, or a built-in workload: batch, bursts, katz, katz-a, katz-b, shifting, sizes, users, zipf; with "
    "parameters as in zipf:jobs=2000,models=12."
)
_NODE = "Machines: GPUs in each, memory for files, disks (default: 8:512GiB:3GB); none: all files are in memory."
_REFERENCE = "The kind of GPU whose run seconds the trace has (default: H100)."
_CONFIG = "For modelpool, use the scheduler and users of this configuration (default: built-in values)."
_PRICE = "Price of an hour of a kind; may be given again."
_SEED = "The first seed of a built-in workload (default: 0)."

Trace = Annotated[str, typer.Argument(metavar="TRACE", help=_TRACE, show_default=False)]
Node = Annotated[str | None, _option("--node", _NODE, CLUSTER, "SHAPE")]
Price = Annotated[list[str] | None, _option("--price", _PRICE, CLUSTER, "KIND=X")]
Reference = Annotated[str, _option("--measured-on", _REFERENCE, CLUSTER, "KIND")]
Config = Annotated[Path | None, _option("--config", _CONFIG, WORK, "FILE")]
Seed = Annotated[int, _option("--seed", _SEED, WORK, "N")]
