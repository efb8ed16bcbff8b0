"""`GangShare`: the memory of one GPU for weights that it holds for the other members of a gang, for one run.

It is planned with as the run's own memory, so that resident weights leave room for it, and ends with the lease.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from modelpool.pool.values.specs.spec import ComponentUse
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.plan.peer_shares import ALIGNED_BYTES, PeerLink, fitting_share, share_costs


class GangShare:
    """What an engine knows of the links to other GPUs, and the share of its current run.

    room_bytes       of the device, planned for the share of the current run
    loaded_bytes     of the share, moved from the host once
    exchanged_bytes  received from the other members
    staged_bytes     moved to the device because members exchange over their hosts, as simulated devices do
    """

    def __init__(self, stated: PeerLink | None = None) -> None:
        """`stated` is by the operator; None: gangs measure."""
        self._stated = stated
        #: by the number of members
        self._measured: dict[int, PeerLink] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the share of the last run."""
        self.room_bytes = self.loaded_bytes = self.exchanged_bytes = self.staged_bytes = 0

    @property
    def stated(self) -> PeerLink | None:
        """The link as the operator states it."""
        return self._stated

    def link(self, degree: int) -> PeerLink | None:
        """Return the link among `degree` members; None if it is not known yet."""
        return self._stated or self._measured.get(degree)

    def learn(self, degree: int, measured: PeerLink) -> None:
        """Note what a gang has measured."""
        self._measured[degree] = measured

    def plan(
        self, patcher: ModelPatcher, use: ComponentUse, degree: int, room_bytes: int, host_bytes_per_second: float
    ) -> int:
        """Plan the share for a run with `room_bytes` for weights; return its bytes, 0 if there is none."""
        link, spec = self.link(degree), patcher.spec()
        if link is None or room_bytes >= spec.weight_bytes:
            return 0
        tensors = Counter(name.rpartition(".")[0] for name in patcher.host_parameters)
        modules = [  # as residency is decided
            replace(module, upload_bytes=module.upload_bytes + tensors[module.name] * ALIGNED_BYTES)
            for module in patcher.modules_with_flops
        ]
        costs = share_costs(spec, room_bytes, degree, use.passes, host_bytes_per_second, link, len(modules))
        self.room_bytes = fitting_share(modules, room_bytes, degree) if costs is not None and costs.pays else 0
        return self.room_bytes
