"""What our own policy is measured against: placement as others do it, over the same simulated workers, ideal policies,
and bounds."""

from scheduler.peers.policies import POLICIES, Policy

__all__ = ["POLICIES", "Policy"]
