"""What names of files say of the two models of a pair."""

from __future__ import annotations

import pytest

from modelpool.pool.values.core.expert_names import expert_named


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise", "high"),
        ("folder/Wan22-LowNoise-style.safetensors", "low"),
        ("low_noise/style", ""),
        ("high_noise_and_low_noise", ""),
        ("highlights", ""),
    ],
)
def test_names_of_files_hint_at_one_model(name: str, half: str) -> None:
    assert expert_named(name) == half
