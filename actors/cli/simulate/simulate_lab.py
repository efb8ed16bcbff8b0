"""Locates the research code of a checkout: policies of other systems, and workloads modelled on published traces.

It is not part of an installed wheel: `modelpool.benchmarks.lab` exists in a checkout or an editable install only.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from modelpool.pool.values.core.errors import UserError

if TYPE_CHECKING:
    from modelpool.scheduler.simulator.policy import Policy
    from modelpool.scheduler.simulator.workloads.built_in import BuiltIn

#: names of the workloads that `workloads` adds in a checkout
LAB_WORKLOADS = ("katz", "katz-a", "katz-b")


def has_lab() -> bool:
    """Whether the research code can be imported."""
    return find_spec("modelpool.benchmarks") is not None and find_spec("modelpool.benchmarks.lab") is not None


def policies() -> Mapping[str, Policy]:
    """Return all policies by name, modelpool first; only modelpool without the research code."""
    if has_lab():
        from modelpool.benchmarks.lab.policies import POLICIES

        return POLICIES
    from modelpool.scheduler.simulator.policy import OUR_POLICY

    return {OUR_POLICY.name: OUR_POLICY}


def workloads() -> Mapping[str, BuiltIn]:
    """Return all built-in workloads by name, including the research code's if it exists."""
    from modelpool.scheduler.simulator.workloads.built_in import BUILT_IN

    if has_lab():
        from modelpool.benchmarks.lab.built_in import WORKLOADS

        return {**BUILT_IN, **WORKLOADS}
    return BUILT_IN


def lab_missing(field: str, value: str) -> UserError:
    """Return the error for a policy or workload that only a checkout has."""
    return UserError(
        f"{field}: {value!r} is part of the repository's benchmarks, which are not installed. Clone the modelpool "
        "repository and run the command there (./scripts/demo installs it), or use the policy modelpool"
    )
