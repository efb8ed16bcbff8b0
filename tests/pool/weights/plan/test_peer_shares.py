"""Division of weights among the members of a gang: who holds what, and when that is worth it."""

from __future__ import annotations

import random

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.plan.partial_loads import ModuleBytes, choose_modules
from modelpool.pool.weights.plan.peer_shares import (
    PeerLink,
    ShareOffer,
    divide_modules,
    exchanged_in_run,
    fitting_share,
    run_share,
    share_costs,
)

MIB = 1 << 20
HOST = 50e9
NVLINK, SLOW = PeerLink(300e9, 3e-5), PeerLink(60e9, 3e-5)


def spec_of(weight_bytes: int, upload_bytes: int = 0) -> ComponentSpec:
    return ComponentSpec(ComponentKey("model"), Role.DIFFUSION_MODEL, weight_bytes, upload_bytes or weight_bytes)


def test_shares_are_held_where_a_pass_is_faster_with_them() -> None:
    """Of a model of 1.6 times the room, two members need twice the bytes over their link that they read from the host:
    it has to be more than twice as fast."""
    room_bytes = 1000 * MIB
    fast = share_costs(spec_of(1600 * MIB), room_bytes, 2, 50, HOST, NVLINK)
    assert fast is not None
    assert fast.host_bytes == 0
    assert abs(fast.share_bytes - 600 * MIB) <= 1
    assert abs(fast.exchanged_bytes - 1200 * MIB) <= 1
    assert fast.pays
    slow = share_costs(spec_of(1600 * MIB), room_bytes, 2, 50, HOST, SLOW)
    assert slow is not None
    assert not slow.pays
    once = share_costs(spec_of(1600 * MIB), room_bytes, 2, 1, HOST, NVLINK)
    assert once is not None
    assert not once.pays, "a share is read from the host for one pass"
    larger = share_costs(spec_of(3000 * MIB), room_bytes, 2, 50, HOST, NVLINK)
    assert larger is not None
    assert larger.host_bytes == 1000 * MIB, "two members have room for two thirds"
    assert share_costs(spec_of(900 * MIB), room_bytes, 2, 50, HOST, NVLINK) is None, "it fits"
    assert share_costs(spec_of(1600 * MIB, 3200 * MIB), room_bytes, 2, 50, HOST, NVLINK) is None, "stored in twice"


def test_all_modules_find_room_where_a_share_was_planned() -> None:
    """For random models: resident modules and the share fit in the room, and the modules that stream on all members are
    divided among them completely, if the members together have room for them."""
    generator = random.Random(7)
    for _ in range(200):
        degree = generator.choice((2, 4, 8))
        modules = [
            ModuleBytes(f"blocks.{place}", size, size) for place in range(40) for size in (generator.randint(1, 64),)
        ]
        whole = sum(module.resident_bytes for module in modules)
        room = int(whole / generator.uniform(1.1, 1.8))
        share = fitting_share(modules, room, degree)
        resident = choose_modules(modules, room - share, frozenset())
        held = sum(module.resident_bytes for module in modules if module.name in resident)
        assert held + share <= room
        streamed = tuple((module.name, module.upload_bytes) for module in modules if module.name not in resident)
        owners = divide_modules([ShareOffer(streamed, share, 1.0)] * degree, PeerLink(1e12))
        assert set(owners) == {name for name, _ in streamed}
        for rank in range(degree):
            assert sum(size for name, size in streamed if owners[name] == rank) <= share


def test_a_run_exchanges_what_is_not_resident_and_reads_the_rest() -> None:
    """For random models and rooms: what each member holds and has resident fits in its room; all that is not resident
    is exchanged where the members have room for it; stored in half the bytes, half of it."""
    generator, wrong = random.Random(5), []
    key = ComponentKey("model")
    use, other = ComponentUse(key, 0, passes=50), ComponentUse(ComponentKey("other"), 0, passes=50)
    for _ in range(300):
        degree, stored = generator.choice((2, 4, 8)), generator.choice((1, 2))
        weight_bytes, room = generator.randint(2, 4000) * MIB, generator.randint(1, 2000) * MIB + 1
        others = ComponentSpec(other.component, Role.CONTROLNET, generator.randint(1, room), MIB)
        specs = {key: spec_of(weight_bytes, weight_bytes // stored), other.component: others}
        assert run_share((use,), specs, room, 1, HOST, NVLINK) == 0
        for uses, left in (((use,), room), ((use, other), room - others.weight_bytes)):
            share = run_share(uses, specs, room, degree, HOST, NVLINK)
            resident = max(0, min(weight_bytes, left - share))
            away = -(-(weight_bytes - resident) // stored)
            exchanged = exchanged_in_run(use, specs[key], resident, share, degree)
            if share > left:
                wrong.append(f"{share} of {left} bytes")
            if share and exchanged != use.passes * min(away, degree * share) and exchanged != use.passes * away:
                wrong.append(f"{exchanged} exchanged of {away}, of {share} each on {degree}")
            if share and degree * left >= weight_bytes and exchanged < use.passes * away:
                wrong.append(f"{away - exchanged / use.passes} from the host, with room on {degree}")
    assert not wrong, wrong


def test_a_module_is_shared_if_all_stream_it_and_it_is_faster() -> None:
    large, small, alone = ("large", 64 * MIB), ("small", 1024), ("alone", 64 * MIB)
    offers = [ShareOffer((large, small, alone), 128 * MIB, HOST), ShareOffer((large, small), 128 * MIB, HOST)]
    assert divide_modules(offers, NVLINK) == {"large": 0}, "a small one takes longer to send than to read"
    assert divide_modules(offers, PeerLink(HOST / 2, 3e-5)) == {}
    assert divide_modules([ShareOffer((large,), 0, HOST)] * 2, NVLINK) == {}, "nobody has room"
