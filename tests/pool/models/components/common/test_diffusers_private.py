"""The installed diffusers still converts what this project needs, and a converter that drifts is noticed."""

from __future__ import annotations

import pytest

from modelpool.pool.families.definitions.stable_diffusion_1 import SD1
from modelpool.pool.models.components.common import diffusers_private as private_names
from modelpool.pool.models.components.common.diffusers_private import ConverterChangedError, self_test
from tests.pool.models.loading import layouts


def test_the_installed_diffusers_converts_sd1() -> None:
    self_test(SD1, layouts.sd15())
    self_test(SD1, layouts.tiny_sd1())


def test_a_converter_that_drifts_is_told_from_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    real = private_names.convert_ldm_unet_checkpoint

    def drifted(tensors: object, config: object) -> dict[str, object]:
        return {key.replace("conv_in", "first_conv"): value for key, value in real(tensors, config).items()}

    monkeypatch.setattr(private_names, "convert_ldm_unet_checkpoint", drifted)
    with pytest.raises(ConverterChangedError, match=r"diffusion_model: .*2 parameters have no source, such as conv_in"):
        self_test(SD1, layouts.tiny_sd1())
