"""ComfyUI workflows that load videos of users: uploads, what models follow, and files of changed videos."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import requests
from PIL import Image

from modelpool import GenerateRequest, PoolConfig
from modelpool.actors.cli.run.run_workflow import read_workflow, workflow_requests
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_request_fields import makes_videos
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.http.read_requests import video_next_to
from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.request.control_video_fields import read_frames
from modelpool.pool.families.definitions import defined_families
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.sampling_facts import FirstFrameMode
from tests.actors.http.comfy.comfy_examples import Graph, basic, node
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import write_transformer

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
WIDTH, HEIGHT, FRAMES, RATE = 64, 48, 9, 8
MODEL = "wan_vace"


def clip(frames: int = FRAMES, sound: bool = False) -> bytes:
    """A video file with a moving edge."""
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=RATE, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        heard = file.add_stream("aac", rate=8000) if sound else None
        for place in range(frames):
            pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            pixels[:, : 4 + 4 * place] = (200, 40 * (place % 4), 90)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
        if heard is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 8000
            file.mux(heard.encode(silence))
            file.mux(heard.encode())
    return content.getvalue()


def names(uploads: Uploads) -> PoolNames:
    return PoolNames(
        {MODEL: "Wan VACE", "animate": "Wan 2.2 animate", "fun": "Wan 2.1 Fun control"},
        [],
        video_facts=lambda name: uploads.video("", name),
        image_size=lambda name: (64, 64),
    )


def following(kind: str = "WanVaceToVideo", model: str = MODEL, **inputs: Any) -> Graph:
    """A video that follows one of the user."""
    graph = basic(model, steps=2, cfg=5.0)
    graph["loaded"] = node("LoadVideo", file="clip.mp4")
    graph["parts"] = node("GetVideoComponents", video=["loaded", 0])
    texts = {"positive": ["positive", 0], "negative": ["negative", 0], "vae": ["model", 2]}
    size = {"width": WIDTH, "height": HEIGHT, "length": 5, "batch_size": 1}
    graph["blank"] = node(kind, **texts, **size, **inputs)
    graph["sampler"]["inputs"] |= {"positive": ["blank", 0], "negative": ["blank", 1], "latent_image": ["blank", 2]}
    graph["made"] = node("CreateVideo", images=["decoded", 0], fps=["parts", 2])
    graph["saved"] = node("SaveVideo", video=["made", 0], filename_prefix="v", format="auto", codec="auto")
    return graph


def requests_for(graph: Graph, uploads: Uploads) -> tuple[list[GenerateRequest], tuple[str, ...]]:
    known = names(uploads)
    (output,) = outputs_of(graph, known)
    return requests_of(output, known, lambda name: Image.new("RGB", (64, 48), "red")), output.warnings


def test_a_video_that_a_model_follows_is_that_of_a_request(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "uploads")
    uploads.add("", "clip.mp4", clip())
    write_transformer(tmp_path / "models", MODEL)
    frames = np.stack(list(read_frames("video", uploads.video("", "clip.mp4").path, False)))
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    control = {"strength": 1.0000000000000002, "control_video": ["parts", 0]}
    plain = following(**control)
    outpainted = following(**{**control, "control_video": ["padded", 0], "control_masks": ["masks", 0]})
    sides = {"left": 0, "top": 0, "right": 0, "bottom": 16, "feathering": 0}
    outpainted["padded"] = node("ImagePadForOutpaint", image=["parts", 0], **sides)
    outpainted["shown"] = node("MaskToImage", mask=["padded", 1])
    outpainted["many"] = node("RepeatImageBatch", image=["shown", 0], amount=5)
    outpainted["masks"] = node("ImageToMask", image=["many", 0], channel="red")
    padded = np.full((FRAMES, HEIGHT + 16, WIDTH, 3), 128, np.uint8)
    padded[:, :HEIGHT] = frames
    mask = np.zeros((5, HEIGHT + 16, WIDTH), np.uint8)
    mask[:, HEIGHT:] = 255
    fields = {
        "model": MODEL, "prompt": "a red circle", "negative": "blurry", "steps": 2, "frames": 5, "cfg": 5.0,
        "seed": 5, "width": WIDTH, "height": HEIGHT, "schedule": "normal",
    }  # fmt: skip
    wanted = [
        GenerateRequest(**fields, video=frames),
        GenerateRequest(**fields, video=padded[:5], video_mask=mask),
    ]
    made = [one for graph in (plain, outpainted) for one in requests_for(graph, uploads)[0]]
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path / "models"], workers=1)
    with open_real_pool(config) as pool:
        found = {each.index: each for each in pool.submit([*wanted, *made], output=tmp_path / "out").videos()}
    for place in range(2):
        np.testing.assert_array_equal(found[place].frames, found[place + 2].frames)
        assert found[place + 2].frame_rate == RATE
    assert not np.array_equal(found[0].frames, found[1].frames)


def test_what_a_workflow_cannot_say_of_a_video_is_refused_by_its_node(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.add("", "clip.mp4", clip(sound=True))
    followed = {"control_video": ["parts", 0], "strength": 1.0}
    graph = following(**followed)
    graph["heard"] = node("AudioAdjustVolume", audio=["parts", 1], volume=3)
    graph["made"]["inputs"]["audio"] = ["heard", 0]
    assert requests_for(graph, uploads)[0]
    cases: list[tuple[Graph, str, str]] = []
    graph = following("WanAnimateToVideo", "animate", pose_video=["parts", 0], face_video=["parts", 0])
    graph["blank"]["inputs"]["length"] = 13
    cases.append((graph, "blank", "pose_video: found 9, expected at least length, 13"))
    graph = following(control_masks=["mask", 0], strength=1.0)
    graph["mask"] = node("SolidMask", value=1.0, width=WIDTH, height=HEIGHT)
    cases.append((graph, "blank", "control_masks: found masks, expected them with a control_video"))
    graph = following(**followed)
    graph["loaded"]["inputs"]["file"] = "other.mp4"
    cases.append((graph, "loaded", "other.mp4 was not uploaded"))
    graph = following("WanAnimateToVideo", "animate", background_video=["parts", 0], pose_video=["parts", 0])
    cases.append((graph, "blank", "background_video: found images, expected none"))
    graph = following("HunyuanImageToVideo", start_image=["parts", 0], guidance_type="v1 (concat)")
    cases.append((graph, "blank", "start_image: found 9 frames, expected one image"))
    graph = following(**followed)
    graph["saved"]["inputs"]["video"] = ["loaded", 0]
    cases.append((graph, "saved", "found one of the user, which the pool does not write again"))
    for graph, place, problem in cases:
        with pytest.raises(WorkflowRejected) as refused:
            requests_for(graph, uploads)
        told = {error.node_id: error.details for error in refused.value.errors}
        assert problem in told.get(place, ""), told


def test_an_animated_character_has_the_poses_and_the_face_of_videos(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.add("", "clip.mp4", clip())
    graph = following(
        "WanAnimateToVideo", "animate", pose_video=["parts", 0], face_video=["parts", 0], reference_image=["photo", 0]
    )
    graph["photo"] = node("LoadImage", image="a.png")
    (request,) = requests_for(graph, uploads)[0]
    assert request.workflow is not None
    nodes = request.workflow.nodes
    sampled = nodes["sampler"].inputs
    assert set(sampled) == {"video", "face_video", "reference.0"}
    for name in ("video", "face_video"):
        first = nodes[sampled[name]]
        assert (first.name, first.settings) == ("image_from_batch", {"start": 0, "length": 5})
        assert nodes[first.inputs["image"]].kind == "video"
    shown = nodes[sampled["reference.0"]]
    assert (shown.name, shown.settings["width"], shown.settings["crop"]) == ("image_scale", WIDTH, True)


def test_control_videos_that_are_shorter_than_the_output(tmp_path: Path) -> None:
    """Fun control: nothing follows the last frame. VACE: white masks follow the masks of the user, up to the last frame
    of the video, behind which all is regenerated anyway."""
    uploads = Uploads(tmp_path)
    uploads.add("", "clip.mp4", clip())
    for length, stops in ((13, True), (9, False), (5, False)):
        graph = following("WanFunControlToVideo", "fun", control_video=["parts", 0])
        graph["blank"]["inputs"]["length"] = length
        (request,) = requests_for(graph, uploads)[0]
        assert request.workflow is not None
        assert request.workflow.nodes["sampler"].video_stops is stops, length
    sides = {"left": 0, "top": 0, "right": 0, "bottom": 16, "feathering": 0}
    graph = following(strength=1.0, control_video=["padded", 0], control_masks=["padded", 1])
    graph["padded"] = node("ImagePadForOutpaint", image=["parts", 0], **sides)
    for length, joined in ((13, False), (9, False)):
        graph["blank"]["inputs"]["length"] = length
        (request,) = requests_for(graph, uploads)[0]
        assert request.workflow is not None
        assert ("blank/masks/all" in request.workflow.nodes) is joined, length
    graph["first"] = node("ImageFromBatch", image=["padded", 0], batch_index=0, length=1)
    graph["one"] = node("ImageToMask", image=["first", 0], channel="red")
    graph["blank"]["inputs"]["control_masks"] = ["one", 0]
    (request,) = requests_for(graph, uploads)[0]
    assert request.workflow is not None
    nodes = request.workflow.nodes
    assert nodes["blank/masks/white"].settings == {"width": WIDTH, "height": HEIGHT, "colour": 0xFFFFFF, "count": 8}
    assert (nodes["blank/masks/all"].name, nodes["blank/masks"].name) == ("image_batch", "mask_from_image")
    assert nodes["sampler"].inputs["video_mask"] == "blank/masks"


def test_uploads_of_videos_are_checked(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    facts = uploads.video("", uploads.add("", "clip.mp4", clip()))
    assert (facts.width, facts.height, facts.frames, facts.frame_rate) == (WIDTH, HEIGHT, FRAMES, RATE)
    with pytest.raises(UserError, match=r"broken\.mp4 cannot be read as a video"):
        uploads.add("", "broken.mp4", clip()[:200])
    with pytest.raises(UserError, match="image"):
        uploads.add("", "clip.png", clip())
    assert uploads.names("") == ("clip.mp4",)


def test_a_video_of_a_user_is_changed_and_saved(server: str) -> None:
    files = {"image": ("clip.mp4", clip())}
    uploaded = requests.post(f"{server}/upload/image", files=files, timeout=60).json()
    shown = requests.get(f"{server}/object_info", timeout=60).json()
    assert uploaded["name"] in shown["LoadVideo"]["input"]["required"]["file"][0]
    assert uploaded["name"] not in shown["LoadImage"]["input"]["required"]["image"][0]
    graph = {
        "loaded": node("LoadVideo", file=uploaded["name"]),
        "parts": node("GetVideoComponents", video=["loaded", 0]),
        "dark": node("ImageInvert", image=["parts", 0]),
        "made": node("CreateVideo", images=["dark", 0], fps=["parts", 2]),
        "saved": node("SaveVideo", video=["made", 0], filename_prefix="v", format="auto", codec="auto"),
    }
    prompt = requests.post(f"{server}/prompt", json={"prompt": graph}, timeout=60).json()
    history: dict[str, Any] = {}
    for _ in range(600):
        history = requests.get(f"{server}/history/{prompt['prompt_id']}", timeout=60).json()
        if history:
            break
        time.sleep(0.1)
    assert history, prompt
    ((output,),) = [
        each for found in history[prompt["prompt_id"]]["outputs"].values() for each in found.values()
        if isinstance(each, list) and each and isinstance(each[0], dict)
    ]  # fmt: skip
    content = requests.get(f"{server}/view", params={"filename": output["filename"]}, timeout=60).content
    with av.open(io.BytesIO(content)) as video:
        rate = float(video.streams.video[0].average_rate or 0)
        found = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]).astype(int)
    with av.open(io.BytesIO(clip())) as video:
        given = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]).astype(int)
    assert (found.shape, rate) == ((FRAMES, HEIGHT, WIDTH, 3), RATE)
    assert np.abs(found - (255 - given)).mean() < 8


def test_a_workflow_in_a_file_reads_the_videos_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "clip.mp4").write_bytes(clip())
    place = tmp_path / "workflow.json"
    facts = video_next_to(place, "clip.mp4")
    assert (facts.path, facts.frames) == (str(tmp_path / "input" / "clip.mp4"), FRAMES)
    graph = following(control_video=["parts", 0], strength=1.0)
    place.write_text(json.dumps(graph))
    (request,) = workflow_requests(read_workflow(place, lambda kind: False), place, NamesOnly())  # type: ignore[arg-type]
    assert request.workflow is not None
    (video,) = (each for each in request.workflow.nodes.values() if each.kind == "video")
    assert video.video == facts.path
    for name in ("/etc/clip.mp4", "../clip.mp4", "other.mp4"):
        with pytest.raises(UserError, match="a file next to"):
            video_next_to(place, name)


class NamesOnly:
    """The names of a pool that has one model."""

    def models(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=MODEL, family="Wan VACE", problem="")]

    def loras(self) -> list[SimpleNamespace]:
        return []

    def file_names(self) -> SimpleNamespace:
        return SimpleNamespace(nodes=())


def test_a_video_is_sampled_again_as_one_latent(tmp_path: Path) -> None:
    """Found: each frame was a video of one frame, sampled on its own. Latents that other nodes have changed are refused
    for a model of videos, and frames are a batch of images for a model of images."""
    uploads = Uploads(tmp_path / "uploads")
    uploads.add("", "clip.mp4", clip())
    write_transformer(tmp_path / "models", "wan_t2v")
    graph = following(strength=1.0)
    graph["latent"] = node("VAEEncode", pixels=["parts", 0], vae=["model", 2])
    graph["model"]["inputs"]["ckpt_name"] = "wan_t2v"
    sampler = graph["sampler"]["inputs"]
    sampler |= {"positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0], "denoise": 0.5}
    del graph["blank"]
    known = PoolNames(
        {"wan_t2v": "Wan text-to-video", "sd": "Stable Diffusion 1"}, [],
        video_facts=lambda name: uploads.video("", name),
    )  # fmt: skip

    def made() -> list[GenerateRequest]:
        (output,) = outputs_of(graph, known)
        return requests_of(output, known, lambda name: Image.new("RGB", (64, 48)))

    (request,) = made()
    assert request.workflow is not None
    (encode,) = (each for each in request.workflow.nodes.values() if each.kind == "encode")
    assert encode.inputs.keys() == {"video"}
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path / "models"], workers=1)
    with open_real_pool(config) as pool:
        (found,) = pool.submit([request]).videos()
    assert found.frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    graph["flipped"] = node("LatentFlip", samples=["latent", 0], flip_method="x-axis: vertically")
    sampler["latent_image"] = ["flipped", 0]
    with pytest.raises(WorkflowRejected) as refused:
        made()
    assert "a model of videos reads them as frames" in refused.value.errors[0].details
    graph["model"]["inputs"]["ckpt_name"], sampler["latent_image"] = "sd", ["latent", 0]
    del graph["made"], graph["saved"]
    graph["saved"] = node("SaveImage", images=["decoded", 0], filename_prefix="i")
    assert len(made()) == FRAMES


@pytest.mark.parametrize("blank", ["EmptyLatentImage", "EmptySD3LatentImage"])
def test_empty_latents_of_images_are_one_frame_of_a_video(blank: str) -> None:
    """As in ComfyUI, and as one frame of an empty video. Before: a video of the usual length for each image."""
    known = PoolNames({MODEL: "Wan text-to-video"}, [])

    def made(kind: str, count: int, **more: int) -> list[GenerateRequest]:
        graph = basic(MODEL)
        graph["blank"] = node(kind, width=64, height=48, batch_size=count, **more)
        (output,) = outputs_of(graph, known)
        return requests_of(output, known, lambda name: Image.new("RGB", (64, 48)))

    found = made(blank, 2)
    assert [[(each.request.frames, each.request.seed) for each in one.workflow.samplings] for one in found] == [
        [(1, 5)], [(1, 6)],
    ]  # fmt: skip
    assert all(one.workflow.nodes[one.workflow.output].name == "image_from_batch" for one in found)
    (one,), (video,) = made(blank, 1), made("EmptyHunyuanLatentVideo", 1, length=1)
    assert one.workflow == video.workflow


def test_one_image_is_the_only_frame_that_a_model_of_videos_begins_with() -> None:
    """Before: refused for images of users, and an internal error for the ones that nodes make."""
    known = PoolNames({MODEL: "Wan text-to-video"}, [])
    for source in ("photo", "made"):
        graph = basic(MODEL, latent_image=["latent", 0], denoise=0.5)
        graph["photo"] = node("LoadImage", image="a.png")
        graph["made"] = node("ImageBlur", image=["photo", 0], blur_radius=1, sigma=1.0)
        graph["latent"] = node("VAEEncode", pixels=[source, 0], vae=["model", 2])
        (output,) = outputs_of(graph, known)
        (request,) = requests_of(output, known, lambda name: Image.new("RGB", (64, 48)))
        nodes = request.workflow.nodes
        encode = nodes[nodes["sampler"].inputs["latent"]]
        frame = nodes[encode.inputs["video"]]
        assert (frame.name, frame.settings) == ("image_repeat", {"amount": 1})
        graph["masked"] = node("SetLatentNoiseMask", samples=["latent", 0], mask=["photo", 1])
        graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
        with pytest.raises(WorkflowRejected) as refused:
            outputs_of(graph, known)[0].as_graph()
        assert "found a mask, expected none" in refused.value.errors[0].details


def test_families_of_videos_are_known_by_their_titles() -> None:
    for family in defined_families():
        video = family.sampling.video
        titles = [family.title] + ([] if family.two_experts is None else [family.two_experts.title])
        one_latent = video is not None and not video.layers and video.begins is not FirstFrameMode.REPEATED
        assert all(makes_videos(title) is one_latent for title in titles), titles


def test_videos_that_begin_with_several_frames(tmp_path: Path) -> None:
    """Refused before. The first frame is what the vision encoder of a model reads; no more are read than are made."""
    uploads = Uploads(tmp_path)
    uploads.add("", "clip.mp4", clip())
    for kind in ("WanImageToVideo", "HunyuanVideo15ImageToVideo", "WanFirstLastFrameToVideo", "WanFunInpaintToVideo"):
        for length, cut in ((13, False), (5, True)):
            graph = following(kind, start_image=["parts", 0])
            graph["blank"]["inputs"]["length"] = length
            (request,) = requests_for(graph, uploads)[0]
            assert request.workflow is not None
            nodes = request.workflow.nodes
            inputs = nodes["sampler"].inputs
            first, frames = nodes[inputs["image"]], nodes[inputs["first_frames"]]
            assert (first.name, first.settings) == ("image_from_batch", {"start": 0, "length": 1}), kind
            assert frames.kind == ("operation" if cut else "video"), kind


def test_a_video_with_the_path_of_a_camera(tmp_path: Path) -> None:
    """Size and length come from the camera, by links."""
    uploads = Uploads(tmp_path)
    uploads.add("", "clip.mp4", clip())
    graph = following("WanCameraImageToVideo", start_image=["photo", 0], camera_conditions=["camera", 0])
    graph["photo"] = node("LoadImage", image="a.png")
    size = {"width": WIDTH, "height": HEIGHT, "length": 9}
    path = {"speed": 2.0, "fx": 0.4, "fy": 0.5, "cx": 0.5, "cy": 0.6}
    graph["camera"] = node("WanCameraEmbedding", camera_pose="Zoom In", **size, **path)
    graph["blank"]["inputs"] |= {name: ["camera", place] for place, name in enumerate(size, start=1)}
    (request,) = requests_for(graph, uploads)[0]
    assert request.workflow is not None
    sampled = request.workflow.nodes["sampler"]
    assert sampled.camera is not None
    assert sampled.camera.model_dump() == {"motion": "Zoom In", **path}
    assert (sampled.request.frames, list(sampled.inputs)) == (9, ["image"])
    graph["blank"]["inputs"]["length"] = 13
    with pytest.raises(WorkflowRejected) as refused:
        requests_for(graph, uploads)
    assert "camera_conditions: found one for 64x48x9, expected 64x48x13" in refused.value.errors[0].details
