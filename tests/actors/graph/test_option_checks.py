"""Options of a run are checked against the model's family before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.graph.features.option_checks import check_options
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.families.option_support import families_with, family_name, supported_options
from modelpool.pool.families.supported import running_families
from modelpool.pool.families.two_experts import TWO_EXPERTS
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.run_options import RUN_OPTIONS

FAMILIES = running_families()


def check(family: str, options: Any, **fields: Any) -> None:
    check_options(GenerateRequest(model="m", prompt="p", options=options, **fields), FAMILIES[family].sampling)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("sd1", {"freeu": True, "pag": 3, "sag": True, "hypertile": True, "deepcache": True, "rescale_cfg": True}),
        ("sdxl", {"tiled": True, "rescale_cfg": 0.7}),
        ("sd3", {"slg": True, "fbcache": True, "cfg_zero": True}),
        ("flux_dev", {"teacache": 0.3, "rope.scale_x": 0.5}),
        ("wan_t2v", {"slg.layers": 9, "cfg_zero": True, "fbcache": 0.1}),
        ("wan_t2v", {"teacache": True}),
        ("cogvideox", {"teacache": 0.1}),
        ("cogvideox_15_i2v", {"fbcache": True}),
    ],
    ids=str,
)
def test_a_family_takes_its_options(family: str, options: Any) -> None:
    check(family, options)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("sd3", {"freeu": True}, r"options\.freeu: not supported by model 'm' of the family sd3; families .*sd1.*sdxl"),
        ("sd1", {"slg": True}, r"options\.slg: not supported by model 'm' of the family sd1; families .*sd3"),
        (
            "sd3",
            {"rope.scale_x": 2},
            r"options\.rope: not supported by model 'm' of the family sd3; families .*flux_dev",
        ),
        ("sd3", {"attention_scale.image": "IN*0"}, r"options\.attention_scale: not supported .* sd3; families .*sd1"),
        ("sd1", {"block_scale.blocks": "D*0"}, r"options\.block_scale: not supported .* sd1; families .*flux_dev"),
        ("sd1", {"fbcache": True}, r"options\.fbcache: not supported"),
        ("flux_dev", {"cfg_zero": True}, r"options\.cfg_zero: not supported by model 'm' of the family flux_dev"),
        ("flux_dev", {"rescale_cfg": True}, r"options\.rescale_cfg: not supported"),
        (
            "sd3",
            {"teacache": True},
            r"options\.teacache: not supported by model 'm' of the family sd3 \(no known coefficients of TeaCache were "
            r"published for it\); families .*cogvideox_2b, .*flux_dev, .*ltxv, .*wan_t2v$",
        ),
        ("wan22_i2v", {"teacache": True}, r"options\.teacache: not supported by model 'm' of the family wan22_i2v"),
        ("sd1_inpaint", {"tiled": True}, r"options\.tiled: not supported"),
        ("cascade_c", {"pag": True}, r"options\.pag: not supported by model 'm' of the family cascade_c"),
        ("flux_dev", {"fbcache": True, "teacache": True}, r"options\.teacache: found together with fbcache"),
        ("sd1", {"tiled": True, "sag": True}, r"options\.tiled: found together with options\.sag"),
    ],
    ids=str,
)
def test_another_family_refuses_them_by_name(family: str, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(family, options)


def test_two_experts_of_wan_2_2_have_no_teacache() -> None:
    """The message tells them from the model of the same family that has it: both were called wan_t2v."""
    request = GenerateRequest(model="m", prompt="p", options={"teacache": True})
    with pytest.raises(UserError, match=r"model 'm' of the family wan_t2v with two experts \(no .*\); .* wan_t2v$"):
        check_options(request, TWO_EXPERTS["wan_t2v"].sampling)


def test_options_of_guidance_need_guidance() -> None:
    check("sd1", {"rescale_cfg": True}, cfg=5)
    with pytest.raises(UserError, match=r"options\.rescale_cfg: found cfg 1, expected guidance"):
        check("sd1", {"rescale_cfg": True}, cfg=1)


def test_every_option_has_a_family_and_every_family_is_listed_for_its_options() -> None:
    for option in RUN_OPTIONS:
        named = families_with(option)
        assert named
        assert named == tuple(sorted(n for n, f in FAMILIES.items() if option in supported_options(f.sampling)))
    assert {family_name(FAMILIES[name].sampling) for name in ("sd1", "sdxl", "sd3")} == {"sd1", "sdxl", "sd3"}
