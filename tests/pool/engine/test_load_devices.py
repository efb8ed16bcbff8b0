"""Where components are loaded and compute, as policy, sizes and free memory say: a table of decisions."""

from __future__ import annotations

import pytest

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.load_devices import (
    MemoryPlace,
    diffusion_first_place,
    diffusion_rest_place,
    text_encoder_place,
    vae_place,
)
from tests.pool.golden_cards import CARDS, GIB, GOLDEN, card

DEVICE, HOST = MemoryPlace.DEVICE, MemoryPlace.HOST
#: policy -> text encoder on a fast device, VAE, idle diffusion model
PLACES = {
    VramPolicy.DISABLED: (HOST, HOST, HOST),
    VramPolicy.NONE: (HOST, DEVICE, HOST),
    VramPolicy.LOW: (HOST, DEVICE, HOST),
    VramPolicy.NORMAL: (DEVICE, DEVICE, HOST),
    VramPolicy.HIGH: (DEVICE, DEVICE, DEVICE),
    VramPolicy.SHARED: (HOST, DEVICE, HOST),
}


@pytest.mark.parametrize("policy", VramPolicy)
def test_places_by_policy(policy: VramPolicy) -> None:
    choices = (text_encoder_place(policy, True), vae_place(policy), diffusion_rest_place(policy))
    assert tuple(choice.value for choice in choices) == PLACES[policy]
    assert all(choice.reason for choice in choices)


@pytest.mark.parametrize("name", CARDS)
def test_texts_are_encoded_on_cards_that_the_golden_table_calls_fast(name: str) -> None:
    found: DeviceCapabilities = card(name)
    expected = DEVICE if GOLDEN["card_flags"][name]["fp16"] else HOST
    assert text_encoder_place(VramPolicy.NORMAL, found.float16).value is expected


@pytest.mark.parametrize(
    ("policy", "size", "free_device", "free_host", "first"),
    [
        (VramPolicy.HIGH, 9 * GIB, 1 * GIB, 64 * GIB, DEVICE),
        (VramPolicy.SHARED, 9 * GIB, 1 * GIB, 64 * GIB, DEVICE),
        (VramPolicy.NONE, 1 * GIB, 20 * GIB, 2 * GIB, HOST),
        (VramPolicy.DISABLED, 1 * GIB, 20 * GIB, 2 * GIB, HOST),
        (VramPolicy.NORMAL, 5 * GIB, 20 * GIB, 20 * GIB, HOST),
        (VramPolicy.NORMAL, 5 * GIB, 20 * GIB, 19 * GIB, DEVICE),
        (VramPolicy.LOW, 5 * GIB, 20 * GIB, 19 * GIB, DEVICE),
        (VramPolicy.NORMAL, 20 * GIB, 20 * GIB, 19 * GIB, HOST),
    ],
)
def test_where_a_diffusion_model_is_loaded_first(
    policy: VramPolicy, size: int, free_device: int, free_host: int, first: MemoryPlace
) -> None:
    found = diffusion_first_place(policy, size, free_device, free_host)
    assert found.value is first
    assert found.reason
