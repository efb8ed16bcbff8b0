"""The client webuiapi against a real pool, and the conversion of A1111's bodies."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
import webuiapi
from PIL import Image

from examples.shapes.checker import matches, read_image
from modelpool import GenerateRequest
from modelpool.actors.http.a1111.a1111_api import sampling_facts
from modelpool.actors.http.a1111.a1111_requests import (
    Options,
    fitting_warnings,
    in_its_words,
    not_read,
    parse_call,
    requests_of,
)
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.clip_layers import layers_left_out, skipped_by_layer
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.errors import UserError


@pytest.fixture
def client(server: str) -> webuiapi.WebUIApi:
    return webuiapi.WebUIApi(baseurl=f"{server}/sdapi/v1", sampler="Euler", steps=6)


def test_txt2img_generates_what_the_prompt_says(client: webuiapi.WebUIApi) -> None:
    result = client.txt2img(prompt="a blue square", width=64, height=64, seed=7, batch_size=2, cfg_scale=5)
    assert len(result.images) == 2
    assert all(matches(read_image(np.asarray(image)), "a blue square") for image in result.images)
    assert result.info["all_seeds"] == [7, 8]


def test_a_lora_in_the_prompt_changes_the_image(client: webuiapi.WebUIApi) -> None:
    plain = client.txt2img(prompt="a red circle", width=64, height=64, seed=1).image
    patched = client.txt2img(prompt="a red circle <lora:light:1>", width=64, height=64, seed=1).image
    assert plain.tobytes() != patched.tobytes()


def test_the_parameters_in_an_image_are_read(client: webuiapi.WebUIApi) -> None:
    image = client.txt2img(prompt="a red circle", width=64, height=64, seed=3).image
    assert "a red circle" in client.png_info(image).info
    assert client.png_info(Image.new("RGB", (8, 8))).info == ""
    assert client.get_memory()["cuda"]["system"]["total"] > 0
    assert client.get_cmd_flags() == {}
    with pytest.raises(RuntimeError, match="base64"):
        client.custom_post("png-info", {"image": "no image"}, baseurl=True)


def test_img2img_starts_from_the_image(client: webuiapi.WebUIApi) -> None:
    start = Image.new("RGB", (64, 64), "blue")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    result = client.img2img(
        images=[start], mask_image=mask, mask_blur=0, width=64, height=64, prompt="a red circle",
        denoising_strength=0.9,
    )  # fmt: skip
    kept = (40, 0, 64, 64)
    assert result.image.convert("RGB").crop(kept).tobytes() == start.crop(kept).tobytes()


def test_lists_name_what_the_pool_has(client: webuiapi.WebUIApi) -> None:
    assert client.util_get_model_names() == ["shapes"]
    assert {"light", "outline"} <= {lora["name"] for lora in client.get_loras()}
    assert "Euler a" in client.util_get_sampler_names()
    client.util_set_model("shapes")
    assert client.util_get_current_model() == "shapes"


def test_interrupt_ends_a_call_that_runs(client: webuiapi.WebUIApi, server: str) -> None:
    """The call returns what was finished."""
    found: list[Any] = []
    body = {"prompt": "a red circle", "steps": 999, "width": 128, "height": 128, "sampler_name": "Euler"}
    caller = threading.Thread(
        target=lambda: found.append(requests.post(f"{server}/sdapi/v1/txt2img", json=body, timeout=200))
    )
    caller.start()
    while not client.get_progress()["state"]["sampling_step"]:
        assert caller.is_alive()
    assert 0 < client.get_progress()["progress"] < 1
    client.interrupt()
    caller.join(200)
    assert (found[0].status_code, found[0].json()["images"]) == (200, [])
    assert client.get_progress()["progress"] == 0


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"restore_faces": True}, "restore_faces"),
        ({"script_name": "x/y/z plot"}, "script_name"),
        ({"alwayson_scripts": {"ADetailer": {"args": [True]}}}, "ADetailer"),
        ({"sampler_name": "no such"}, "no such"),
        ({"steps": "many"}, "steps"),
        ({"override_settings": {"sd_model_checkpoint": "nothing"}}, "nothing"),
    ],
)
def test_what_the_pool_does_not_do_is_refused_by_name(server: str, body: dict[str, Any], named: str) -> None:
    answer = requests.post(f"{server}/sdapi/v1/txt2img", json={"prompt": "x", **body}, timeout=60)
    assert answer.status_code == 400
    assert named in answer.json()["detail"]


def test_fields_become_those_of_a_request() -> None:
    body = {
        "prompt": "x", "negative_prompt": "y", "sampler_name": "DPM++ 2M", "scheduler": "Karras", "seed": 5,
        "steps": 9, "cfg_scale": 3.5, "width": 64, "height": 96, "n_iter": 2, "enable_hr": True, "hr_scale": 2,
        "hr_upscaler": "Lanczos", "denoising_strength": 0.4, "eta": 0.5, "s_churn": None, "s_noise": 1.1,
    }  # fmt: skip
    made = requests_of(parse_call(body, is_img2img=False), "shapes", 2, CallerImages((), 1 << 20))
    assert [(one.seed, one.negative, one.cfg, one.height, one.clip_skip) for one in made] == [
        (5, "y", 3.5, 96, 1),
        (6, "y", 3.5, 96, 1),
    ]
    assert made[0].hires is not None
    assert (made[0].hires.via, made[0].hires.strength) == ("image", 0.4)
    assert (made[0].eta, made[0].s_churn, made[0].s_noise) == (None, 0.0, 1.1), "the sampler has no eta"


def test_the_eta_that_clients_always_send_is_for_samplers_that_have_one() -> None:
    for sampler, eta in (("Euler a", 1.0), ("DDIM", 1.0), ("Euler", None), ("LCM", None)):
        body = {"prompt": "x", "sampler_name": sampler, "eta": 1.0}
        (made,) = requests_of(parse_call(body, is_img2img=False), "shapes", 1, CallerImages((), 1 << 20))
        assert made.eta == eta, sampler


def test_the_scale_of_forge_is_guidance_or_shift_and_an_explicit_shift_is_read() -> None:
    """It was ignored: Flux dev had the guidance of `cfg_scale`, which is 1 in Forge. UNets have no use for it."""
    body = {"prompt": "x", "cfg_scale": 1.0, "distilled_cfg_scale": 2.5}
    for family, given, expected in (
        ("flux_dev", body, (2.5, None)),
        ("qwen_image", body, (1.0, 2.5)),
        ("sdxl", body, (1.0, None)),
        ("sd3", {"prompt": "x", "shift": 6.0}, (7.0, 6.0)),
        ("flux_dev", body | {"shift": 6.0}, (2.5, 6.0)),
        ("flux_schnell", body, (1.0, None)),  # Forge ignores it
        ("cosmos2_t2i", body, (1.0, None)),  # refuses a shift: its levels do not follow from one
        ("z_image", body | {"shift": 6.0}, (1.0, 6.0)),
    ):
        call, facts = parse_call(given, is_img2img=False), running_families()[family].sampling
        (made,) = requests_of(call, "some", 1, CallerImages((), 1 << 20), facts)
        assert (made.cfg, made.shift) == expected, family


def test_the_scale_of_forge_is_read_for_a_model_under_any_of_its_names() -> None:
    """It was ignored for a name in other letters or with a folder, and Flux dev had the guidance of `cfg_scale`."""
    asked: list[str] = []

    def recipes(wanted: list[GenerateRequest]) -> tuple[Any, ...]:
        asked.append(wanted[0].model)
        known = wanted[0].model.lower().endswith("flux1-dev")
        return (SimpleNamespace(model="flux1-dev") if known else UserError("unknown model"),)

    async def listings() -> Any:
        return SimpleNamespace(models=(SimpleNamespace(name="flux1-dev", family="Flux dev"),))

    services: Any = SimpleNamespace(listings=listings, pool=SimpleNamespace(recipes=recipes))
    expected = running_families()["flux_dev"].sampling
    for name, facts in (("flux1-dev", expected), ("Flux/Flux1-Dev", expected), ("other", None)):
        assert asyncio.run(sampling_facts(services, name)) is facts, name
    assert asked == ["Flux/Flux1-Dev", "other"]


def test_a_wrong_scale_of_forge_is_named_as_the_caller_does() -> None:
    """A wrong one was reported as `cfg_scale`, which was right."""
    for family in ("flux_dev", "qwen_image"):
        call = parse_call({"prompt": "x", "cfg_scale": 1.0, "distilled_cfg_scale": -1.0}, is_img2img=False)
        with pytest.raises(UserError, match=r"^distilled_cfg_scale: found -1\.0"):
            requests_of(call, "some", 1, CallerImages((), 1 << 20), running_families()[family].sampling)
    call = parse_call({"prompt": "x", "distilled_cfg_scale": 3.0, "shift": -1.0}, is_img2img=False)
    with pytest.raises(UserError, match=r"^shift: found -1\.0"):
        requests_of(call, "some", 1, CallerImages((), 1 << 20), running_families()["qwen_image"].sampling)


def test_a_second_pass_with_another_guidance_is_refused_by_name() -> None:
    body = {"prompt": "x", "cfg_scale": 5.0, "distilled_cfg_scale": 3.5, "enable_hr": True}
    for name, own, other in (("hr_cfg", 5.0, 1.0), ("hr_distilled_cfg", 3.5, 2.0)):
        parse_call(body | {name: own}, is_img2img=False)
        parse_call(body | {name: other, "enable_hr": False}, is_img2img=False)
        with pytest.raises(UserError, match=f"{name}: found {other}, expected {own}, that of the first pass"):
            parse_call(body | {name: other}, is_img2img=False)
    del body["distilled_cfg_scale"]
    with pytest.raises(UserError, match=r"hr_distilled_cfg: found 3\.5, expected no value"):
        parse_call(body | {"hr_distilled_cfg": 3.5}, is_img2img=False)


def test_the_title_of_a_model_has_its_hash_and_ending_removed() -> None:
    assert Options().changed({"sd_model_checkpoint": "shapes.safetensors [abc123]"}).model == "shapes"


def sent_by_a_client(**arguments: Any) -> dict[str, Any]:
    """Return the body that webuiapi sends for a call with `arguments`."""
    bodies: list[dict[str, Any]] = []
    client = webuiapi.WebUIApi(baseurl="http://127.0.0.1:9/sdapi/v1", sampler="Euler", steps=6)
    client.post_and_get_api_result = lambda url, body, use_async: bodies.append(body)
    (client.img2img if "images" in arguments else client.txt2img)(prompt="x", **arguments)
    return bodies[0]


def test_a_field_that_is_not_used_is_told_with_the_images_and_fields_of_clients_are_not() -> None:
    """Unknown fields, settings and masks without an image changed nothing, and nobody was told."""
    image = Image.new("RGB", (64, 64))
    for body in (sent_by_a_client(), sent_by_a_client(images=[image]), sent_by_a_client(enable_hr=True)):
        assert not_read(body, parse_call(body, "init_images" in body)) == []
    for field, value, told in (
        ("stepz", 4, "unknown field 'stepz'; did you mean 'steps'?"),
        ("s_tmin", 2.0, "s_tmin: found 2.0"),
        ("disable_extra_networks", True, "disable_extra_networks: found True"),
        ("mask", "AAAA", "mask: not used"),
        ("override_settings", {"sd_vae": "other.safetensors", "sd_model_checkpoint": "shapes"}, "found sd_vae, not"),
    ):
        body = {"prompt": "x", field: value}
        (message,) = not_read(body, parse_call(body, is_img2img=False))
        assert told in message


def test_fields_that_change_images_in_the_web_ui_alone_are_told_of() -> None:
    """Each of them made the same image as without it, and nobody was told."""
    image = "AAAA"
    masked = {"init_images": [image], "mask": image}
    for more, told in (
        ({"firstphase_width": 32}, "firstphase_width: found 32"),
        ({"firstpass_image": image * 100, "enable_hr": True}, "firstpass_image: found 'AAAA"),
        ({"hr_additional_modules": ["t5xxl"]}, "hr_additional_modules: found ['t5xxl']"),
        ({"latent_mask": image, "init_images": [image]}, "latent_mask: found 'AAAA'"),
        ({**masked, "inpaint_full_res": True}, "inpaint_full_res: found True, expected False: the masked area"),
        ({**masked, "inpainting_fill": 2}, "inpainting_fill: found 2, expected 1: the masked area"),
        ({"init_images": [image], "enable_hr": True}, "enable_hr: not used"),
        ({"override_settings": {"enable_emphasis": False}}, "override_settings: found enable_emphasis, not used"),
        (
            {"enable_hr": True, "hr_upscaler": "Latent (nearest)"},
            "hr_upscaler: found Latent (nearest), latents are scaled",
        ),
        ({"enable_hr": True, "hr_upscaler": "Nearest"}, "hr_upscaler: found Nearest, the image is scaled with Lanczos"),
        ({"enable_hr": True, "hr_resize_x": 100}, "hr_resize_x: found 100, which the image has in whole cells of 8"),
        ({"prompt": "a [red] circle"}, "prompt: found '[red]', expected (red:0.91)"),
        ({"negative_prompt": "[[blurry]]"}, "negative_prompt: found '[blurry]', expected (blurry:0.91)"),
    ):
        body = {"prompt": "x", **more}
        (message,) = not_read(body, parse_call(body, "init_images" in body))
        assert told in message
        assert len(message) < 500
    second = {"enable_hr": True, "hr_upscaler": "Lanczos", "hr_resize_x": 96}
    whole = {**masked, "inpaint_full_res": False, "inpainting_fill": 1}
    for silent in (second, {"hr_upscaler": "Nearest"}, whole, {"prompt": r"a \[red] [a:b:0.5] []"}):
        body = {"prompt": "x", **silent}
        assert not_read(body, parse_call(body, "init_images" in body)) == []


def test_a_call_that_takes_its_fields_from_an_infotext_is_refused() -> None:
    """It was an image of an empty prompt."""
    with pytest.raises(UserError, match="infotext: found 'a red circle"):
        parse_call({"infotext": "a red circle\nSteps: 4"}, is_img2img=False)


def test_layers_of_clip_are_counted_as_the_web_ui_counts_them() -> None:
    """`CLIP_stop_at_last_layers` 2 with SDXL, which reads the layer before the last anyway, skipped one more; the text
    in an image with the same setting did not."""
    call = parse_call({"prompt": "x"}, is_img2img=False)
    for family, layers, skipped in (
        ("Stable Diffusion 1", 1, 0),
        ("Stable Diffusion 1", 2, 1),
        ("Stable Diffusion XL", 1, 0),
        ("Stable Diffusion XL", 2, 0),
        ("Stable Diffusion XL", 3, 1),
        ("Playground 2.5", 2, 0),
        ("Stable Diffusion 3", 2, 0),
        ("Stable Diffusion 2", 2, 0),
        ("Flux dev", 2, 1),
        ("", 2, 1),
    ):
        (made,) = requests_of(call, "some", layers, CallerImages((), 1 << 20), family=family)
        assert made.clip_skip == skipped, (family, layers)
        assert skipped_by_layer(skipped + 1 + layers_left_out(family), family) == skipped


def test_settings_that_have_no_effect_are_told_with_the_images(client: webuiapi.WebUIApi) -> None:
    """They were accepted without a word."""
    client.set_options({"sd_vae": "other.safetensors", "eta_ancestral": 0})
    told = client.txt2img(prompt="a red circle", width=64, height=64, seed=3).info["warnings"]
    client.set_options({"sd_model_checkpoint": "shapes"})
    silent = client.txt2img(prompt="a red circle", width=64, height=64, seed=3).info["warnings"]
    assert told == [
        "options: found sd_vae, eta_ancestral, not used; expected sd_model_checkpoint or CLIP_stop_at_last_layers"
    ]
    assert silent == []


def test_a_unit_that_asks_for_what_the_pool_does_not_do_is_refused_with_its_place() -> None:
    """Unknown fields of units were ignored, and so was a preprocessor without a model."""
    own = webuiapi.ControlNetUnit(image=Image.new("RGB", (64, 64)), model="canny").to_dict()

    def controls(**unit: Any) -> Any:
        body = {"prompt": "x", "alwayson_scripts": {"ControlNet": {"args": [None, {**own, **unit}]}}}
        return requests_of(parse_call(body, is_img2img=False), "shapes", 1, CallerImages((), 1 << 20))[0].controls

    assert [control.model for control in controls()] == ["canny"]
    assert controls(model="None") == ()
    assert controls(enabled=False, modul="x", control_mode=2) == (), "what is not enabled may ask for anything"
    place = r"alwayson_scripts\.ControlNet\.args\.1"
    for unit, told in (
        ({"modul": "canny"}, f"unknown field of {place} 'modul'; did you mean 'module'"),
        ({"module": "canny", "model": "None"}, rf"{place}\.module: found 'canny', expected \"none\""),
        ({"weight": "much"}, rf"{place}\.weight: found 'much'"),
        ({"control_mode": "ControlNet is more important"}, rf"{place}\.control_mode: found"),
        ({"image": "nothing"}, rf"{place}\.image: found 'nothing'"),
    ):
        with pytest.raises(UserError, match=told):
            controls(**unit)


def test_a_control_image_that_is_cropped_is_told_where_the_unit_asks_for_another_way() -> None:
    for mode, size, is_told in (("Resize and Fill", (64, 32), True), ("Resize and Fill", (64, 64), False)):
        unit = webuiapi.ControlNetUnit(image=Image.new("RGB", size), model="canny", resize_mode=mode).to_dict()
        body = {"prompt": "x", "width": 64, "height": 64, "alwayson_scripts": {"ControlNet": {"args": [unit]}}}
        call = parse_call(body, is_img2img=False)
        found = fitting_warnings(call, requests_of(call, "shapes", 1, CallerImages((), 1 << 20)))
        assert [f"found {mode!r} and an image of 64x32" in each for each in found] == [True] * is_told


@pytest.mark.parametrize(
    ("image", "enabled"), [("aaaa", True), ({"image": "aaaa"}, True), ("aaaa", False), (None, True)]
)
def test_a_unit_with_an_image_and_without_a_model_is_told_of(image: object, enabled: bool) -> None:
    """Before: it did nothing, and nobody was told; the web UI does not run such a call."""
    units = [{"image": image, "model": "None", "enabled": enabled}]
    call = parse_call({"prompt": "x", "alwayson_scripts": {"ControlNet": {"args": units}}}, is_img2img=False)
    found = fitting_warnings(call, requests_of(call, "shapes", 1, CallerImages((), 1 << 20)))
    told = "alwayson_scripts.ControlNet.args.0.model: found 'None', expected a ControlNet: the unit is not used"
    assert found == [told] * bool(image and enabled)


def test_an_error_of_the_pool_names_fields_as_the_caller_does() -> None:
    """A second pass without a step was reported as `hires.strength`, which the caller had not set."""
    problem = in_its_words(UserError("hires.strength: found 0.7, expected more; also steps: found 1"))
    assert str(problem) == "denoising_strength: found 0.7, expected more; also steps: found 1"
