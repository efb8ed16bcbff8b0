"""LoRAs as products next to linear layers: also of plain weights, if wanted; their factors are part of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelpool.pool.devices.copy_streams import CopyStreams
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.ops.low_rank_linear import LOW_RANK_ATTRIBUTE
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.quantize import quantize
from modelpool.pool.weights.vram.vram_manager import VramManager, with_dependents
from tests.pool.devices.fake_streams import Trace
from tests.pool.toy import Toy, make_toy, patches_for, reference

PLENTY_BYTES = 1 << 24
IDS_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]])
LINEARS = ("wide.weight", "narrow.weight")
EVERYTHING = frozenset({"table", "wide", "narrow", "norm", "gain", "conv"})


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, PLENTY_BYTES)


def packed_toy() -> Toy:
    toy = make_toy(3, torch.float32)
    for layer in (toy.wide, toy.narrow):
        layer.weight = torch.nn.Parameter(quantize(layer.weight.detach(), "float8_e4m3fn"), requires_grad=False)
    return toy


def patcher_of(toy: Toy, form: WeightForm, device: str = "sim:0", with_streams: bool = False) -> ModelPatcher:
    place = torch.device(device)
    streams = CopyStreams(Trace().maker) if with_streams else None
    tools = RunTools(pipeline=TransferPipeline(place, streams, ahead_bytes=8))  # too little for any factor
    return ModelPatcher.of(ComponentKey("toy"), Role.DIFFUSION_MODEL, toy, place, form, tools)


def output(patcher: ModelPatcher, passes: int = 1) -> torch.Tensor:
    with patcher.running() as module:
        return [module(IDS_BL.to(patcher.device)).to("cpu") for _ in range(passes)][-1]


@pytest.mark.parametrize("resident", [EVERYTHING, frozenset({"narrow", "norm"}), frozenset[str]()], ids=len)
def test_loras_at_run_time_move_their_factors_only_and_give_the_same_within_rounding(resident: frozenset[str]) -> None:
    """Linear layers; a patch of a convolution or a table is merged, and so is one with a product that would cost
    much."""
    form = WeightForm(torch.float32, patches_at_run_time=True)
    toy, some, names = make_toy(), patches_for(make_toy(), "a", LINEARS, 0.7), {"wide", "narrow"}
    patcher = patcher_of(toy, form)
    patcher.realize(WeightsTarget(resident, PatchSet()))
    patcher.patches = some
    report = patcher.realize(WeightsTarget(resident, some))
    assert (report.uploaded_bytes, report.freed_bytes) == (0, 0)
    assert {n for n, m in toy.named_modules() if LOW_RANK_ATTRIBUTE in m.__dict__} == names
    assert patcher.use().patched_bytes == 0
    assert patcher.product_bytes == 4 * sum(2 * (16 + 64) for _ in LINEARS)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(output(patcher), reference(make_toy(), some, IDS_BL), **close)

    mixed = patches_for(make_toy(), "b", (*LINEARS, "conv.weight", "table.weight"), 0.5)
    patcher.patches = mixed
    patcher.realize(WeightsTarget(resident, mixed))
    torch.testing.assert_close(output(patcher), reference(make_toy(), mixed, IDS_BL), **close)
    many = PatchSet(tuple(patch for n in "abcdef" for patch in patches_for(make_toy(), n, LINEARS[:1]).patches))
    patcher.patches = many
    patcher.realize(WeightsTarget(resident, many))
    assert not any(LOW_RANK_ATTRIBUTE in m.__dict__ for m in toy.modules()), "rank 12 of 16"
    assert torch.equal(output(patcher), reference(make_toy(), many, IDS_BL))
    patcher.unload()
    assert sim.memory_stats(0).used_bytes == 0


@pytest.mark.parametrize("with_streams", [False, True])
def test_factors_stay_on_the_device_for_a_run_if_the_plan_has_room_for_them(with_streams: bool) -> None:
    """Found in a review: those beyond 192 MiB were uploaded again in every step, whatever memory was free."""
    patcher = patcher_of(packed_toy(), WeightForm(torch.float32), with_streams=with_streams)
    patcher.patches = patches_for(make_toy(), "a", LINEARS)
    factor_bytes, spec, use = patcher.product_bytes, patcher.spec(), patcher.use()
    assert factor_bytes > 0
    activation_bytes = 1 << 16
    outputs = []
    for room_bytes, kept_bytes in ((factor_bytes - 1, 0), (factor_bytes, factor_bytes)):
        capacity_bytes = spec.weight_bytes + use.scratch_bytes + activation_bytes + room_bytes
        vram = VramManager(capacity_bytes)
        with vram.lease(with_dependents(patcher), activation_bytes) as lease:
            assert lease.plan.streamed_bytes == 0
            assert lease.kept_bytes == kept_bytes
            assert lease.planned_bytes == spec.weight_bytes + use.scratch_bytes + activation_bytes + kept_bytes
            before_bytes, resident_bytes = sim.memory_stats(0).h2d_bytes, sim.memory_stats(0).used_bytes
            sim.reset_peak(0)
            outputs.append(output(patcher, passes=3))
            moved_bytes = sim.memory_stats(0).h2d_bytes - before_bytes - 3 * IDS_BL.nbytes
            assert moved_bytes == (1 if kept_bytes else 3) * factor_bytes
            assert sim.memory_stats(0).peak_bytes - resident_bytes <= capacity_bytes - spec.weight_bytes
            assert sim.memory_stats(0).used_bytes == resident_bytes, "they leave with the run"
        output(patcher)
        vram.close()
    assert torch.equal(*outputs)


def test_weights_do_not_stream_for_factors() -> None:
    """Both cross the bus in each pass. Idle components may leave for them."""
    patcher = patcher_of(packed_toy(), WeightForm(torch.float32))
    patcher.patches = patches_for(make_toy(), "a", LINEARS)
    form = WeightForm(torch.float32)
    idle = ModelPatcher.of(ComponentKey("idle"), Role.VAE, make_toy(), torch.device("sim", 0), form)
    spec, use = patcher.spec(), patcher.use()
    needed_bytes = spec.weight_bytes + use.scratch_bytes + 100
    vram = VramManager(needed_bytes + max(idle.spec().weight_bytes, patcher.product_bytes))
    vram.load(idle)
    with vram.lease(with_dependents(patcher), 100) as lease:
        assert lease.plan.streamed_bytes == 0
        assert lease.kept_bytes == patcher.product_bytes
    vram.close()
    vram = VramManager(needed_bytes - spec.weight_bytes // 2)
    with vram.lease(with_dependents(patcher), 100) as lease:
        assert lease.plan.streamed_bytes > 0
        assert lease.kept_bytes == 0
    vram.close()


def test_a_patch_of_a_weight_that_a_module_lacks_is_refused_by_name() -> None:
    """Found in a review: a lease for it raised KeyError, which names nothing and is not the request's fault."""
    patcher = patcher_of(make_toy(), WeightForm(torch.float32))
    patch = replace(patches_for(make_toy(), "a", ("wide.weight",)).patches[0], parameter="gain.weight")
    patcher.patches = PatchSet((patch,))
    with (
        pytest.raises(PatchFailed, match=r"'gain\.weight': found no such parameter"),
        VramManager(PLENTY_BYTES).lease(with_dependents(patcher), 0),
    ):
        pass
