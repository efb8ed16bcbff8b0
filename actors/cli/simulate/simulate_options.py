"""Options that `modelpool simulate` and `modelpool plan-cluster` share.

Knows words on a command line, as `actors.cli.terminal.options`; `actors.cli.simulate.simulate_runs` and
`actors.cli.simulate.simulate_workload` parse them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelpool.actors.cli.terminal.options import _option

#: the default policy
OURS = "modelpool"
CLUSTER = "Cluster"
WORK = "Workload"
#: names are listed here and defined in `scheduler.simulator.workloads.built_in`; a test compares the two
_TRACE = (
    "A trace file, or a built-in workload: batch, bursts, katz, katz-a, katz-b, shifting, sizes, "
    "users, zipf; with parameters as in zipf:jobs=2000,models=12."
)
_NODE = "Nodes: GPUs per node, memory for files, disk speed (default: 8:512GiB:3GB); none: all files are in memory."
_REFERENCE = "GPU kind on which the run times of the trace were measured (default: H100)."
_CONFIG = "Scheduler and user settings for the modelpool policy (default: built-in values)."
_PRICE = "Price per hour of a GPU kind; repeatable."
_SEED = "First seed of a built-in workload (default: 0)."

Trace = Annotated[str, typer.Argument(metavar="TRACE", help=_TRACE, show_default=False)]
Node = Annotated[str | None, _option("--node", _NODE, CLUSTER, "SHAPE")]
Price = Annotated[list[str] | None, _option("--price", _PRICE, CLUSTER, "KIND=X")]
Reference = Annotated[str, _option("--measured-on", _REFERENCE, CLUSTER, "KIND")]
Config = Annotated[Path | None, _option("--config", _CONFIG, WORK, "FILE")]
Seed = Annotated[int, _option("--seed", _SEED, WORK, "N")]
