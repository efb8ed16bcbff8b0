"""Placement as others do it, over the same simulated workers, and bounds: what our own policy is measured against."""

from scheduler.peers.policies import POLICIES, Policy

__all__ = ["POLICIES", "Policy"]
