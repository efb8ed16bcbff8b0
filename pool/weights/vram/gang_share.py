"""`GangShare`: the memory of one GPU for weights that it holds for the other members of a gang, for one run.

It is planned with as the run's own memory, so that resident weights leave room for it, and ends with the lease.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, replace

from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.specs.spec import ComponentUse, WorkerId
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.plan.peer_shares import ALIGNED_BYTES, PeerLink, fitting_share, share_costs

#: sets of members with a measured link that are remembered, the last used last
MOST_LINKS = 64


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link that a gang has measured; `lives` of its members then (`GangShare.life`), in the order of their ranks."""

    link: PeerLink
    lives: tuple[str, ...]


class GangShare:
    """What an engine knows of the links to other GPUs, and the share of its current run.

    room_bytes       of the device, planned for the share of the current run
    loaded_bytes     of the share, moved from the host once
    exchanged_bytes  received from the other members
    staged_bytes     moved to the device because members exchange over their hosts, as simulated devices do
    link_bytes_per_second  among the members of the current run, for modules of its size; 0 if nothing streams
    life             of this engine: another one has another. A link is measured once for the lives of its members
    """

    def __init__(self, stated: PeerLink | None = None) -> None:
        """`stated` is by the operator; None: gangs measure."""
        self._stated = stated
        self._measured: LruCache[tuple[WorkerId, ...], MeasuredLink] = LruCache(MOST_LINKS)
        self.life = secrets.token_hex(8)
        self.link_bytes_per_second = 0.0
        self.begin()

    def begin(self) -> None:
        """Forget the share of the last run."""
        self.room_bytes = self.loaded_bytes = self.exchanged_bytes = self.staged_bytes = 0
        self.link_bytes_per_second = 0.0

    def state(self, bytes_per_second: float) -> None:
        """Take every link to be so fast, in place of what gangs measure."""
        self._stated = PeerLink(bytes_per_second)

    @property
    def stated(self) -> PeerLink | None:
        """The link as the operator states it."""
        return self._stated

    def link(self, members: tuple[WorkerId, ...]) -> PeerLink | None:
        """Return the link among these workers, in the order of their ranks; of ones that have not met, the last
        measured link among as many. None if none is known yet."""
        measured = self.measured(members)
        if self._stated is None and measured is None:
            alike = [other for known, other in self._measured.items() if len(known) == len(members)]
            measured = alike[-1] if alike else None
        return self._stated or (None if measured is None else measured.link)

    def measured(self, members: tuple[WorkerId, ...]) -> MeasuredLink | None:
        """Return the last measurement of these workers. One of them may be another engine now: they compare lives when
        they meet."""
        return self._measured.kept(members)

    def learn(self, members: tuple[WorkerId, ...], measured: MeasuredLink) -> None:
        """Note what a gang has measured."""
        self._measured.put(members, measured)

    def plan(
        self,
        patcher: ModelPatcher,
        use: ComponentUse,
        members: tuple[WorkerId, ...],
        room_bytes: int,
        host_bytes_per_second: float,
    ) -> int:
        """Plan the share for a run of `members` with `room_bytes` for weights; return its bytes, 0 if there is none."""
        link, spec, degree = self.link(members), patcher.spec(), len(members)
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
