"""Weights that a member of a gang gets from the GPU of another one when it needs them, instead of from its host.

Members agree at their meeting who holds which module (`pool.weights.plan.peer_shares`). A module is sent to all when
the first of its weights is used: in the order in which the model is called, which is the same on all members. They
compare that order after each step, as weights of other modules of the same size would make a wrong image without an
error. Weights are sent as they are stored, and each member converts and patches what it receives, as it does with what
it reads from its host: the bytes that it computes with are the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from modelpool.pool.devices.uploads import HostKey, key_of
from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.values.core.gang_errors import GangsDiffer
from modelpool.pool.weights.ops.context import with_peers
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.plan.peer_shares import ALIGNED_BYTES, PeerLink, ShareOffer, divide_modules
from modelpool.pool.weights.vram.gang_share import GangShare, MeasuredLink

#: sent twice to measure the link, or the largest module if that is less: a run has memory for a module
PROBE_BYTES, PROBES = 8 << 20, 2
#: digests of the order are exact as float64
_DIGEST_RANGE, _DIGEST_FACTOR = 1 << 48, 1_000_003


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of a module: its host copy, and its place among the bytes that are sent."""

    host: Tensor
    begin: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the tensor in `flat`, as a view."""
        own = flat[self.begin : self.begin + self.host.nbytes]
        return own.view(self.host.dtype).view(self.host.shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Module:
    """A shared module: its holder, and the pieces to send."""

    place: int
    owner: int
    pieces: tuple[_Piece, ...]
    size_bytes: int


@dataclass(slots=True)
class _Arrived:
    """The bytes of a module on this member's device, with the pieces that were not read yet."""

    module: _Module
    flat: Tensor
    left: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Told:
    """What each member says at the meeting: its offer, the link as its operator states it, the last measurement of
    these members, its life, and its memory for copies ahead of use."""

    offer: ShareOffer
    stated: PeerLink | None
    measured: MeasuredLink | None
    life: str
    ahead_bytes: int


class PeerWeights:
    """The weights that members hold for each other, as one of them uses them. In the thread of the run."""

    def __init__(self, group: GangGroup, modules: list[_Module], share: GangShare, ahead_bytes: int) -> None:
        """At most one module of `ahead_bytes` is sent before it is used."""
        self._group, self._modules, self._share, self._ahead_bytes = group, modules, share, ahead_bytes
        self._pieces: dict[HostKey, tuple[_Module, int]] = {
            key_of(piece.host): (module, place) for module in modules for place, piece in enumerate(module.pieces)
        }
        #: what this member holds, by the place of the module
        self._held: dict[int, Tensor] = {}
        self._arrived: _Arrived | None = None
        self._ahead: tuple[_Module, Callable[[], Tensor]] | None = None
        #: the module that was sent after each, the last time
        self._following: dict[int, _Module] = {}
        self._last: _Module | None = None
        self._order = 0

    def hold(self, bring: Callable[[Tensor], Tensor]) -> None:
        """Bring this member's share to its device."""
        for module in self._modules:
            if module.owner != self._group.gang.rank:
                continue
            flat = torch.zeros(module.size_bytes, dtype=torch.uint8, device=self._group.device)
            for piece in module.pieces:
                piece.of(flat).copy_(bring(piece.host))
                self._share.loaded_bytes += piece.host.nbytes
            self._held[module.place] = flat

    @property
    def most_ahead_bytes(self) -> int:
        """Device memory of the largest module that may be sent before it is used."""
        fitting = [module.size_bytes for module in self._modules if module.size_bytes <= self._ahead_bytes]
        return max(fitting, default=0)

    @property
    def hosts(self) -> list[Tensor]:
        """The host copies of all shared tensors."""
        return [piece.host for module in self._modules for piece in module.pieces]

    def get(self, host: Tensor) -> Tensor | None:
        """Return a new copy on the device of a shared tensor; None if it is not shared. All members call this in the
        same order. Raises GangBroken."""
        found = self._pieces.get(key_of(host))
        if found is None:
            return None
        module, place = found
        arrived = self._arrived
        if arrived is None or arrived.module is not module or place not in arrived.left:
            arrived = self._arrived = None  # frees it
            arrived = self._arrived = _Arrived(module, self._exchanged(module), set(range(len(module.pieces))))
        arrived.left.discard(place)
        if not arrived.left:
            self._arrived = None
        piece = module.pieces[place].of(arrived.flat)
        if module.owner == self._group.gang.rank:
            return piece.clone()  # patches are computed in place
        self._share.exchanged_bytes += piece.nbytes
        return piece

    def expect_same_order(self) -> None:
        """Compare with all members which modules were sent so far. Raises GangsDiffer, GangBroken."""
        orders = self._group.agree([float(self._order)])
        if not bool((orders == orders[0]).all()):
            raise GangsDiffer("the members of a gang have sent weights to each other in different orders")

    def close(self, is_over: bool) -> None:
        """Give up the share. `is_over`: all members come here, as the run has ended for them."""
        ahead, self._ahead = self._ahead, None
        try:
            if ahead is not None and is_over:
                ahead[1]()
        finally:
            self._held.clear()
            self._pieces.clear()
            self._arrived = None

    def _exchanged(self, module: _Module) -> Tensor:
        """Return the bytes of a module, and have the next one sent."""
        ahead, self._ahead = self._ahead, None
        expected, end = (None, None) if ahead is None else ahead
        sent = None if end is None else end()  # all members have begun to send it, needed or not
        flat = sent if sent is not None and expected is module else self._begun(module)()
        self._order = (self._order * _DIGEST_FACTOR + module.place + 1) % _DIGEST_RANGE
        if self._last is not None:
            self._following[self._last.place] = module
        self._last = module
        following = self._following.get(module.place)
        if following is not None and following is not module and following.size_bytes <= self._ahead_bytes:
            self._ahead = following, self._begun(following)
        return flat

    def _begun(self, module: _Module) -> Callable[[], Tensor]:
        own = self._held.get(module.place)
        return self._group.begin_send(own, module.size_bytes, module.owner)


@contextmanager
def peer_weights(
    group: GangGroup, model: ModelPatcher, module: nn.Module, share: GangShare, host_bytes_per_second: float
) -> Iterator[PeerWeights | None]:
    """Inside the block, calls of `module`, which runs, get from other members what these hold; None if nothing is
    shared. Raises GangsDiffer if members do not agree about it, GangBroken."""
    named = _streamed_tensors(model, module)
    sizes = {name: _placed(tensors)[1] for name, tensors in named.items()}
    offer = ShareOffer(tuple(sizes.items()), share.room_bytes, host_bytes_per_second)
    known = share.measured(group.gang.members)
    told = group.tell(_Told(offer, share.stated, known, share.life, model.ahead_bytes))
    offers = [each.offer for each in told]
    if not all(each.streamed for each in offers):
        yield None
        return
    link = _link_among(group, told, share)
    mean_bytes = sum(size for _, size in offers[0].streamed) / len(offers[0].streamed)
    share.link_bytes_per_second = mean_bytes / link.seconds(mean_bytes)
    owners = divide_modules(offers, link)
    modules: list[_Module] = []
    for place, (name, owner) in enumerate(owners.items()):
        pieces, size_bytes = _placed(named[name])
        modules.append(_Module(place, owner, pieces, size_bytes))
    _expect_agreed(group, owners, modules)
    if not modules:
        yield None
        return
    group.connect_everyone()
    # all members send the same modules ahead: each begins every exchange in the same order
    peers = PeerWeights(group, modules, share, min(each.ahead_bytes for each in told))
    is_over = False
    try:
        peers.hold(model.bring)
        with with_peers(peers) as uploader:
            if uploader is not None:
                uploader.forget(peers.hosts)
                uploader.leave(peers.most_ahead_bytes)
            yield peers
        is_over = True
    finally:
        peers.close(is_over)


def _link_among(group: GangGroup, told: list[_Told], share: GangShare) -> PeerLink:
    """The link among the members: as stated, as these members measured it in an earlier run, or measured now. One that
    was replaced since has another life, and an unknown link: all measure again."""
    stated = [each.stated for each in told if each.stated is not None]
    if len(stated) == len(told):
        return min(stated, key=lambda each: each.bytes_per_second)
    lives = tuple(each.life for each in told)
    known = [each.measured for each in told if each.measured is not None and each.measured.lives == lives]
    if len(known) == len(told):
        return known[0].link  # all had the same measurement
    link = measured_link(group, min(max(size for _, size in each.offer.streamed) for each in told))
    share.learn(group.gang.members, MeasuredLink(link, lives))
    return link


def measured_link(group: GangGroup, most_bytes: int = PROBE_BYTES) -> PeerLink:
    """Measure how fast the slowest member gets a tensor of another one, of at most `most_bytes`; all members return the
    same. Raises GangBroken."""
    probe_bytes = min(most_bytes, PROBE_BYTES)
    group.connect_everyone()

    def seconds(size_bytes: int) -> float:
        own = torch.zeros(size_bytes, dtype=torch.uint8, device=group.device)
        taken = []
        for _ in range(PROBES):
            group.agree([0.0])  # all begin together
            began = time.perf_counter()
            group.begin_send(own if group.gang.leads else None, size_bytes, 0)()
            group.await_device()
            taken.append(time.perf_counter() - began)
        return min(taken)

    latency_seconds, probe_seconds = seconds(min(ALIGNED_BYTES, probe_bytes)), seconds(probe_bytes)
    latency_seconds, probe_seconds = group.agree([latency_seconds, probe_seconds]).amax(0).tolist()
    return PeerLink(probe_bytes / max(probe_seconds - latency_seconds, 1e-9), latency_seconds)


def _streamed_tensors(model: ModelPatcher, module: nn.Module) -> dict[str, list[Tensor]]:
    """The host tensors of each module that is not resident, without tables: only the rows that are read are moved."""
    resident = model.resident_modules()
    found: dict[str, list[Tensor]] = {}
    seen: set[HostKey] = set()
    for full_name, host in model.host_parameters.items():
        name = full_name.rpartition(".")[0]
        if name in resident or isinstance(module.get_submodule(name), nn.Embedding):
            continue
        parts: Mapping[str, Tensor] = host.parts if isinstance(host, PackedWeight) else {"": host}
        for part in (parts[each] for each in sorted(parts)):
            if not part.nbytes or not part.is_contiguous() or key_of(part) in seen:
                continue  # the last: weights that modules have in common belong to the first
            seen.add(key_of(part))
            found.setdefault(name, []).append(part)
    return found


def _placed(tensors: list[Tensor]) -> tuple[tuple[_Piece, ...], int]:
    """The tensors of a module with their places, and the bytes of all."""
    pieces, end = [], 0
    for host in tensors:
        pieces.append(_Piece(host, end))
        end += -(-host.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return tuple(pieces), end


def _expect_agreed(group: GangGroup, owners: Mapping[str, int], modules: list[_Module]) -> None:
    """Raise GangsDiffer unless all members will send the same."""
    found = hashlib.sha256(repr(tuple(owners.items())).encode())
    for module in modules:
        for piece in module.pieces:
            found.update(repr((piece.begin, piece.host.dtype, tuple(piece.host.shape))).encode())
    if len(set(group.tell(found.hexdigest()))) > 1:
        raise GangsDiffer("the members of a gang do not agree about the weights that each holds")
