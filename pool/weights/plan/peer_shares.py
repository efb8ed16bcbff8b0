"""Divides the weights that do not fit among the members of a gang: which member holds which module for all of them, and
when that is faster than reading it from the host. Pure and torch-free.

The tier "peer GPU" is between the memory of a GPU and the host. All members use all weights. A module is either
resident on every member, or held by one of them, in the form of its file, and sent to all when it is needed; what
neither has room for streams from the host. With W bytes of weights, B bytes of room on each of n members, and stored
bytes u times the resident ones, R bytes are resident everywhere where R + (W - R) u / n = B.

Shares are held for a run if a pass is faster with them than without: the time is linear in the bytes that are shared,
so either all of the room that this needs is for shares, or none. Without shares (W - B) u bytes come from the host in
each pass; with them, (W - R) u bytes go over the link between GPUs, which is more. The share is also read once for each
run. Of the modules that could be shared, one comes from a member if that alone is faster than a copy from the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse
from modelpool.pool.weights.plan.partial_loads import ModuleBytes, choose_modules

#: each tensor that is sent begins at a multiple of it, as in memory of its own: kernels are chosen by alignment, too
ALIGNED_BYTES = 512
#: to start a copy from the host: as `partial_loads.TINY_BYTES` assumes
COPY_SECONDS = 1e-5


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The way of a tensor from the GPU of one member to all others: stated by the operator, or measured.

    latency_seconds  until the first byte has come; 0 if the speed is stated
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def seconds(self, size_bytes: float, tensors: float = 1) -> float:
        """Return the time of so many exchanges of `size_bytes` together."""
        return tensors * self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class ShareCosts:
    """A gang with shares, against one that streams from the host.

    share_bytes             stored bytes that each member holds for all
    exchanged_bytes         stored bytes that are sent in each pass
    host_bytes              stored bytes that each member still reads from the host in each pass
    pass_seconds            of all moves of a pass, with the reading of the share divided by the passes
    streaming_pass_seconds  the same without shares
    """

    share_bytes: int
    exchanged_bytes: int
    host_bytes: int
    pass_seconds: float
    streaming_pass_seconds: float

    @property
    def pays(self) -> bool:
        """Whether a pass is faster with shares."""
        return self.pass_seconds < self.streaming_pass_seconds


def share_costs(
    spec: ComponentSpec,
    room_bytes: int,
    degree: int,
    passes: int,
    host_bytes_per_second: float,
    link: PeerLink,
    modules: int = 0,
) -> ShareCosts | None:
    """Return what shares cost for a component of `modules` modules on `degree` members with `room_bytes` for weights
    each, as if modules could be divided. None if all of it fits on each, or if a share would take as much room as it
    spares."""
    stored = spec.upload_bytes / spec.weight_bytes if spec.weight_bytes else 0.0
    if room_bytes >= spec.weight_bytes or degree < 2 or stored >= degree or room_bytes <= 0:
        return None
    each = stored / degree
    streamed = spec.weight_bytes - max(0.0, (room_bytes - spec.weight_bytes * each) / (1 - each))
    share = min(float(room_bytes), streamed * each)
    exchanged = min(streamed * stored, degree * share)
    from_host = streamed * stored - exchanged
    host_seconds = (from_host + share / max(passes, 1)) / host_bytes_per_second
    return ShareCosts(
        ceil(share),
        int(exchanged),
        int(from_host),
        host_seconds + link.seconds(exchanged, modules * exchanged / spec.upload_bytes),
        (spec.weight_bytes - room_bytes) * stored / host_bytes_per_second,
    )


def run_share(
    uses: Sequence[ComponentUse],
    specs: Mapping[ComponentKey, ComponentSpec],
    room_bytes: int,
    degree: int,
    host_bytes_per_second: float,
    link: PeerLink,
) -> int:
    """Return the bytes that each of `degree` members holds for all in a run with `room_bytes` for weights, by sizes
    alone: of the first of `uses`, the model. 0 if the run is not faster with shares."""
    if degree < 2 or not uses:
        return 0
    model, *others = uses
    others_bytes = sum([specs[use.component].weight_bytes for use in others])
    spec, room = specs[model.component], max(0, room_bytes - others_bytes)
    costs = share_costs(spec, room, degree, model.passes, host_bytes_per_second, link)
    return costs.share_bytes if costs is not None and costs.pays else 0


def exchanged_in_run(use: ComponentUse, spec: ComponentSpec, resident_bytes: int, share_bytes: int, degree: int) -> int:
    """Return the stored bytes of a model that go over the link among members in all passes of a run, where each has
    `resident_bytes` of it and holds `share_bytes`."""
    away_bytes = -(-(spec.weight_bytes - resident_bytes) * spec.upload_bytes // spec.weight_bytes)
    shared_bytes = degree * share_bytes
    # each share, and the resident bytes, are rounded to a byte
    return use.passes * (away_bytes if away_bytes <= shared_bytes + degree else shared_bytes)


def exchange_seconds(received_bytes: int, degree: int, link_bytes_per_second: float) -> float:
    """Return the seconds in which a member received so much over the link: what it holds itself went there, too."""
    if received_bytes <= 0 or degree < 2 or link_bytes_per_second <= 0.0:
        return 0.0
    return received_bytes * degree / (degree - 1) / link_bytes_per_second


def fitting_share(modules: Sequence[ModuleBytes], room_bytes: int, degree: int) -> int:
    """Return the least bytes with which each member has room for its share of the modules that are not resident in the
    rest of `room_bytes`; all of it if there is none."""
    share_bytes = 0
    while share_bytes < room_bytes:
        resident = choose_modules(modules, room_bytes - share_bytes, frozenset())
        streamed = [(m.name, m.upload_bytes) for m in modules if m.name not in resident]
        most_bytes = sum(size_bytes for _, size_bytes in streamed)
        _, left_bytes = _packed(streamed, [most_bytes] * degree)
        wanted_bytes = most_bytes - min(left_bytes)
        if wanted_bytes <= share_bytes:
            return share_bytes
        share_bytes = wanted_bytes
    return room_bytes


@dataclass(frozen=True, slots=True)
class ShareOffer:
    """What a member says at the meeting.

    streamed    names and stored bytes of its modules that are not resident, in a fixed order
    room_bytes  what it has for its share
    host_bytes_per_second  over its link from the host
    """

    streamed: tuple[tuple[str, int], ...]
    room_bytes: int
    host_bytes_per_second: float


def divide_modules(offers: Sequence[ShareOffer], link: PeerLink) -> dict[str, int]:
    """Return the rank of the member that holds each shared module: the same on every member, which all have all offers.

    A module is shared if it streams on all members, if it comes faster from a member than to the slowest of them from
    the host, and if one has room.
    """
    slowest = min(offer.host_bytes_per_second for offer in offers)
    others = [dict(offer.streamed) for offer in offers[1:]]
    shared = [
        (name, size_bytes)
        for name, size_bytes in offers[0].streamed
        if all(each.get(name) == size_bytes for each in others)
        and link.seconds(size_bytes) < COPY_SECONDS + size_bytes / slowest
    ]
    return _packed(shared, [offer.room_bytes for offer in offers])[0]


def _packed(modules: Sequence[tuple[str, int]], room_bytes: Sequence[int]) -> tuple[dict[str, int], list[int]]:
    """The rank of each module that finds room, the largest first, each where most room is left; and what is left."""
    left_bytes, owners = list(room_bytes), {}
    for name, size_bytes in sorted(modules, key=lambda module: -module[1]):
        rank = max(range(len(left_bytes)), key=lambda each: (left_bytes[each], -each))
        if size_bytes <= left_bytes[rank]:
            owners[name] = rank
            left_bytes[rank] -= size_bytes
    return owners, left_bytes
