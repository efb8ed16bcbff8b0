"""Settings of nodes that were dropped in silence: each is read, or named in a warning."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.comfy.comfy_examples import Graph, basic, node

SD1, NORMED, SD3, SONG = "Stable Diffusion 1", "Qwen-Image", "Stable Diffusion 3", "ACE-Step 1.5"


def compiled(graph: Graph, family: str = SD1) -> tuple[GenerateRequest, str]:
    """The request of a workflow, and its warnings."""
    names = PoolNames(dict.fromkeys(("shapes", "other"), family), [], None)
    (output,) = outputs_of(graph, names)
    (request,) = requests_of(output, names, lambda name: Image.new("RGB", (64, 64)))
    return request, "\n".join(output.warnings)


def with_model(kind: str, **settings: Any) -> Graph:
    return {**basic(model=["changed", 0]), "changed": node(kind, model=["model", 0], **settings)}


def test_levels_of_continuous_sampling_are_told_of() -> None:
    """Also those that the node proposes: the model has its own."""
    for kind, low, high in (("ModelSamplingContinuousEDM", 0.002, 120.0), ("ModelSamplingContinuousV", 0.03, 500.0)):
        _, told = compiled(with_model(kind, sampling="v_prediction", sigma_max=high, sigma_min=low))
        assert f"sigma_max: found {high:g}, which is not read" in told, kind
        assert f"sigma_min: found {low:g}, which is not read" in told, kind
        assert "sampling: found v_prediction" in told, kind


def test_a_norm_of_guidance_that_a_family_has_by_itself_is_told_of() -> None:
    for strength, family, expected in ((1.0, NORMED, ""), (0.5, NORMED, "0.5"), (0.5, SD1, "")):
        request, told = compiled(with_model("CFGNorm", strength=strength), family)
        assert (f"CFGNorm: found strength {expected}" in told) == bool(expected), (strength, family, told)
        assert (request.options is None) == (family == NORMED), (strength, family)
    graph = with_model("CFGNorm", strength=0.5)
    graph["sampler"]["inputs"]["cfg"] = 1.0
    assert "cfg 1 is no guidance" in compiled(graph)[1]


def song(name: str, **settings: Any) -> dict[str, Any]:
    facts = {"bpm": 120, "timesignature": "4", "language": "en", "keyscale": "E minor", "generate_audio_codes": False}
    return node("TextEncodeAceStepAudio1.5", **{
        "clip": ["model", 1], "tags": name, "lyrics": "la", "duration": 12.0, **facts, **settings,
    })  # fmt: skip


def test_facts_of_the_negative_text_of_a_song_are_told_of() -> None:
    """Of one that is set to zero, too: a run has one tempo, of its positive text."""
    graph = basic()
    graph["blank"] = node("EmptyAceStep1.5LatentAudio", seconds=12.0, batch_size=1)
    graph["decoded"] = node("VAEDecodeAudio", samples=["sampler", 0], vae=["model", 2])
    graph["saved"] = node("SaveAudio", audio=["decoded", 0], filename_prefix="x")
    graph["positive"], graph["other"] = song("piano"), song("noise")
    zeroed = {**graph, "negative": node("ConditioningZeroOut", conditioning=["other", 0])}
    assert compiled(zeroed, SONG)[1] == ""
    for name, value in (
        ("bpm", 90),
        ("timesignature", "3"),
        ("keyscale", "C major"),
        ("language", "de"),
        ("lyrics", "hm"),
    ):
        for changed in (zeroed, {**graph, "negative": ["other"]}):
            changed = {**changed, "other": song("noise", **{name: value})}
            if changed["negative"] == ["other"]:
                changed["negative"] = changed["other"]
            assert f"negative: found another {name} than positive" in compiled(changed, SONG)[1], name
    assert "duration: found 99" in compiled({**zeroed, "positive": song("piano", duration=99.0)}, SONG)[1]


def test_a_method_and_a_seed_that_a_second_pass_does_not_have_are_told_of() -> None:
    graph = basic()
    graph["larger"] = node("LatentUpscaleBy", samples=["sampler", 0], upscale_method="bilinear", scale_by=2.0)
    again = {**graph["sampler"]["inputs"], "latent_image": ["larger", 0], "denoise": 0.5}
    graph["again"] = node("KSampler", **again)
    graph["decoded"]["inputs"]["samples"] = ["again", 0]
    request, told = compiled(graph)
    assert (request.hires is not None, told) == (True, "")
    graph["larger"]["inputs"]["upscale_method"] = "nearest-exact"
    graph["again"]["inputs"]["seed"] = 77
    told = compiled(graph)[1]
    assert "upscale_method nearest-exact" in told
    assert "seed 77 is not read" in told
    graph["again"]["inputs"]["sampler_name"] = "heun"
    request, told = compiled(graph)
    assert (request.hires, told) == (None, ""), "a workflow reads both"


def test_the_shift_of_the_model_of_a_schedule_is_read() -> None:
    """The one of the model that is sampled does not choose levels."""
    for shifted, expected in (((), None), (("levels",), 5.0), (("guider",), None), (("levels", "guider"), 5.0)):
        graph = basic()
        graph["shifted"] = node("ModelSamplingSD3", model=["model", 0], shift=5.0)
        models = {name: ["shifted" if name in shifted else "model", 0] for name in ("levels", "guider")}
        graph["levels"] = node("BasicScheduler", model=models["levels"], scheduler="simple", steps=4, denoise=1.0)
        graph["chosen"] = node("KSamplerSelect", sampler_name="euler")
        texts = {name: [name, 0] for name in ("positive", "negative")}
        graph["sampler"] = node(
            "SamplerCustom", model=models["guider"], add_noise=True, noise_seed=9, cfg=4.0, sampler=["chosen", 0],
            sigmas=["levels", 0], latent_image=["blank", 0], **texts,
        )  # fmt: skip
        assert compiled(graph, SD3)[0].shift == expected, shifted


def test_the_vae_of_another_model_encodes() -> None:
    graph = basic(latent_image=["encoded", 0], denoise=0.5)
    graph["loaded"] = node("LoadImage", image="a.png")
    graph["second"] = node("CheckpointLoaderSimple", ckpt_name="other")
    graph["encoded"] = node("VAEEncode", pixels=["loaded", 0], vae=["model", 2])
    assert compiled(graph)[0].workflow is None
    graph["encoded"]["inputs"]["vae"] = ["second", 2]
    request, _ = compiled(graph)
    assert request.workflow is not None
    assert request.workflow.nodes["encoded"].model == "other"


def test_the_file_of_a_vae_beside_a_checkpoint_is_told_of() -> None:
    graph = basic()
    graph["vae"] = node("VAELoader", vae_name="better.safetensors")
    graph["decoded"]["inputs"]["vae"] = ["vae", 0]
    assert "vae_name better.safetensors" in compiled(graph)[1]
    graph["model"] = node("UNETLoader", unet_name="shapes", weight_dtype="default")
    graph["clip"] = node("CLIPLoader", clip_name="t5.safetensors", type="sd3")
    for name in ("positive", "negative"):
        graph[name]["inputs"]["clip"] = ["clip", 0]
    assert compiled(graph, SD3)[1] == "", "a model of several files has the VAE that fits"


def test_empty_texts_of_stable_diffusion_3_have_no_states() -> None:
    """With `empty_padding` none; before, the padding was not read."""
    for texts, padding, expected in (
        (("a", "b", ""), "none", {"has_third": False}), (("a", "a", ""), "none", {"has_third": False}),
        (("", "", "c"), "none", {"has_clip": False}), (("", "", ""), "none", {"has_clip": False, "has_third": False}),
        (("", "b", "c"), "none", {}), (("a", "b", ""), "empty_prompt", {}),
    ):  # fmt: skip
        given = dict(zip(("clip_l", "clip_g", "t5xxl"), texts, strict=True))
        graph = basic()
        graph["positive"] = node("CLIPTextEncodeSD3", clip=["model", 1], empty_padding=padding, **given)
        request, _ = compiled(graph, SD3)
        assert request.workflow is not None, texts
        (made,) = [each for each in request.workflow.nodes.values() if each.kind == "operation"]
        assert (made.name, dict(made.settings)) == ("encoded_of_three", expected), texts
    same = {**basic(), "positive": node("CLIPTextEncodeSD3", clip=["model", 1], clip_l="a", clip_g="a", t5xxl="a")}
    assert compiled(same, SD3)[0].workflow is None


def test_an_output_that_needs_a_missing_input_is_refused() -> None:
    """It was an internal error."""
    names = PoolNames({"shapes": SD1}, [], None)
    graph = basic()
    given = {name: graph["sampler"]["inputs"][name] for name in ("seed", "steps", "cfg", "sampler_name", "scheduler")}
    links = {name: graph["sampler"]["inputs"][name] for name in ("model", "positive", "negative", "latent_image")}
    graph["sampler"] = node(
        "KSampler (Efficient)", denoise=1.0, preview_method="auto", vae_decode="true", **given, **links
    )
    graph["decoded"] = node("VAEDecode", samples=["sampler", 3], vae=["sampler", 4])
    from tests.actors.http.comfy.test_comfy_inputs import errors_of

    found = errors_of(graph, names)
    assert [each["details"] for each in found["decoded"]["errors"]] == [
        "vae: output 4 of node sampler is empty: that node lacks the optional input"
    ]


def counted(graph: Graph, image: list[Any], slot: int = 3, kind: str = "GetImageSizeAndCount") -> int:
    """The number of images that a node gives: it is the seed of another sampler."""
    again = {**graph["sampler"]["inputs"], "seed": ["counted", slot], "latent_image": ["size", 0]}
    graph = {**graph, "counted": node(kind, image=image), "again": node("KSampler", **again)}
    graph["size"] = node("EmptyLatentImage", width=64, height=64, batch_size=1)
    graph["decoded again"] = node("VAEDecode", samples=["again", 0], vae=["model", 2])
    graph["saved"] = node("SaveImage", images=["decoded again", 0], filename_prefix="x")
    return compiled(graph)[0].seed or 0


def test_the_number_of_images_is_given_where_it_is_known() -> None:
    """All were refused; a width that is not known is, where it is read."""
    graph = basic()
    graph["blank"]["inputs"]["batch_size"] = 4
    graph["loaded"] = node("LoadImage", image="a.png")
    graph["film"] = node("EmptyHunyuanLatentVideo", width=64, height=64, length=11, batch_size=1)
    graph["filmed"] = node("KSampler", **{**graph["sampler"]["inputs"], "latent_image": ["film", 0]})
    graph["frames"] = node("VAEDecode", samples=["filmed", 0], vae=["model", 2])
    graph["two"] = node("ImageBatch", image1=["loaded", 0], image2=["loaded", 0])
    graph["six"] = node("RepeatImageBatch", image=["two", 0], amount=3)
    graph["some"] = node("ImageFromBatch", image=["six", 0], batch_index=1, length=4)
    found = {name: counted(graph, [name, 0]) for name in ("decoded", "loaded", "frames", "two", "six", "some")}
    assert found == {"decoded": 4, "loaded": 1, "frames": 9, "two": 2, "six": 6, "some": 4}
    assert counted(graph, ["frames", 0], slot=2, kind="GetImageSize") == 9
    graph["upscaler"] = node("UpscaleModelLoader", model_name="4x")
    graph["large"] = node("ImageUpscaleWithModel", upscale_model=["upscaler", 0], image=["decoded", 0])
    assert counted(graph, ["large", 0]) == 4
    with pytest.raises(WorkflowRejected, match="seed: found 'a size that is known when the image is made"):
        counted(graph, ["large", 0], slot=1)


def test_percents_of_controlnets_are_of_the_noise_in_each_part_of_a_run() -> None:
    """They were shares of the steps, and began anew in each sampler of a schedule that several share."""
    graph = basic()
    graph["net"] = node("ControlNetLoader", control_net_name="canny")
    graph["loaded"] = node("LoadImage", image="a.png")
    use = {"control_net": ["net", 0], "image": ["loaded", 0], "strength": 1.0, "start_percent": 0.2, "end_percent": 0.6}
    graph["use"] = node("ControlNetApplyAdvanced", positive=["positive", 0], negative=["negative", 0], **use)
    graph["sampler"]["inputs"] |= {"positive": ["use", 0], "negative": ["use", 1]}
    (control,) = compiled(graph)[0].controls
    assert (control.start, control.end, control.shares_of) == (0.2, 0.6, "noise")
    parts = {**graph["sampler"]["inputs"], "noise_seed": 5}
    del parts["seed"], parts["denoise"]
    first = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 4, "return_with_leftover_noise": "enable"}
    last = {"add_noise": "disable", "start_at_step": 4, "end_at_step": 10000, "return_with_leftover_noise": "disable"}
    graph["begun"] = node("KSamplerAdvanced", **{**parts, **first})
    graph["sampler"] = node("KSamplerAdvanced", **{**parts, **last, "latent_image": ["begun", 0], "cfg": 5.0})
    request = compiled(graph)[0]
    assert request.workflow is not None
    found = {name: request.workflow.nodes[name].request.controls[0] for name in ("begun", "sampler")}
    assert {each.shares_of for each in found.values()} == {"noise"}
    assert {(each.start, each.end) for each in found.values()} == {(0.2, 0.6)}
    graph["use"]["inputs"] |= {"start_percent": 0.0, "end_percent": 1.0}
    assert compiled(graph)[0].workflow.nodes["begun"].request.controls[0].shares_of == "steps"  # type: ignore[union-attr]


def test_an_input_that_a_node_does_not_have_is_told_of() -> None:
    """Nodes of other versions have some more; without a missing one next to it, it was not misspelt."""
    graph = basic()
    assert compiled(graph)[1] == ""
    graph["saved"]["inputs"] |= {"video_preview": {"format": "x"}, "upload": "image", "quality": 3, "empty": ""}
    graph["sampler"]["inputs"] |= {"batch_index": ["blank", 0]}
    told = compiled(graph)[1]
    assert "node saved (SaveImage): quality: not read" in told
    assert "node sampler (KSampler): batch_index: not read" in told
    assert len(told.splitlines()) == 2
