"""ComfyUI workflows that load audio of users: uploads, its edits, starts of songs, and sound of videos."""

from __future__ import annotations

import io
import math
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from modelpool import GenerateRequest, PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.request.audio_fields import MAX_AUDIO_SAMPLES, audio_facts, checked_audio, read_audio
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import Graph, node
from tests.actors.http.comfy.test_videos_of_users import clip
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import write_transformer

CONFIG = Path(__file__).parents[4] / "configs" / "laptop.toml"
RATE, SECONDS = 44100, 0.5
MODEL = "wan_vace"


def tone(rate: int = RATE, channels: int = 2, seconds: float = SECONDS) -> npt.NDArray[np.float32]:
    """A tone for each channel."""
    times = np.arange(int(seconds * rate)) / rate
    found = [0.5 * np.sin(2 * math.pi * 220 * (2 + one) * times) for one in range(channels)]
    return np.stack(found, 1).astype(np.float32)


def sound_file(
    samples: npt.NDArray[np.float32], rate: int = RATE, kind: str = "wav", codec: str = "pcm_s16le"
) -> bytes:
    """An audio file."""
    content = io.BytesIO()
    with av.open(content, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=rate, layout={1: "mono", 2: "stereo", 6: "5.1"}[samples.shape[1]])
        values = (samples * 32767).round().astype(np.int16).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(values, format="s16", layout=stream.layout.name)
        frame.sample_rate = rate
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return content.getvalue()


def names(uploads: Uploads) -> PoolNames:
    return PoolNames(
        {"song": "ACE-Step 1.5"},
        [],
        video_facts=lambda name: uploads.video("", name),
        audio_facts=lambda name: uploads.audio("", name),
    )


def requests_for(graph: Graph, uploads: Uploads) -> tuple[list[GenerateRequest], tuple[str, ...]]:
    known = names(uploads)
    (output,) = outputs_of(graph, known)
    return requests_of(output, known, lambda name: Image.new("RGB", (64, 48), "red")), output.warnings


def song() -> Graph:
    """A song that begins with audio of the user."""
    return {
        "heard": node("LoadAudio", audio="a.wav"),
        "model": node("CheckpointLoaderSimple", ckpt_name="song"),
        "text": node("TextEncodeAceStepAudio", clip=["model", 1], tags="jazz", lyrics="la la", lyrics_strength=1.0),
        "none": node("ConditioningZeroOut", conditioning=["text", 0]),
        "e": node("VAEEncodeAudio", audio=["heard", 0], vae=["model", 2]),
        "s": node(
            "KSampler", model=["model", 0], positive=["text", 0], negative=["none", 0], latent_image=["e", 0], seed=5,
            steps=10, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=0.3,
        ),
        "d": node("VAEDecodeAudio", samples=["s", 0], vae=["model", 2]),
        "saved": node("SaveAudioMP3", audio=["d", 0], filename_prefix="audio", quality="V0"),
    }  # fmt: skip


def test_a_song_is_sampled_from_the_latent_of_audio(tmp_path: Path) -> None:
    """Refused before: "the pool reads no audio of users"."""
    uploads = Uploads(tmp_path)
    uploads.add("", "a.wav", sound_file(tone()))
    ((request,), _) = requests_for(song(), uploads)
    assert request.workflow is not None
    nodes = request.workflow.nodes
    assert (nodes["heard"].kind, nodes["heard"].audio) == ("audio", uploads.audio("", "a.wav").path)
    assert (nodes["e"].kind, nodes["e"].model, nodes["e"].inputs) == ("encode", "song", {"audio": "heard"})
    sampled = nodes["s"]
    # ComfyUI has int(10 / 0.3) levels, and runs the last 10
    assert (sampled.inputs["latent"], sampled.request.steps, sampled.first_step) == ("e", 33, 23)
    assert (sampled.request.lyrics, request.format) == ("la la", "mp3")


def test_audio_is_changed_and_saved_and_is_the_sound_of_videos(tmp_path: Path) -> None:
    """Two files of one pool: audio after nodes that change it, and frames of a video with its own sound."""
    uploads = Uploads(tmp_path / "uploads")
    uploads.add("", "a.wav", sound_file(tone()))
    uploads.add("", "clip.mp4", clip(sound=True))
    write_transformer(tmp_path / "models", MODEL)
    changed = {
        "heard": node("LoadAudio", audio="a.wav"),
        "part": node("TrimAudioDuration", audio=["heard", 0], start_index=0.25, duration=60.0),
        "quiet": node("AudioAdjustVolume", audio=["part", 0], volume=-6),
        "both": node("AudioConcat", audio1=["quiet", 0], audio2=["heard", 0], direction="after"),
        "saved": node("SaveAudio", audio=["both", 0], filename_prefix="a"),
    }
    sounding = {
        "loaded": node("LoadVideo", file="clip.mp4"),
        "parts": node("GetVideoComponents", video=["loaded", 0]),
        "made": node("CreateVideo", images=["parts", 0], audio=["parts", 1], fps=["parts", 2]),
        "saved": node("SaveVideo", video=["made", 0], filename_prefix="v", format="auto", codec="auto"),
    }
    wanted = [one for graph in (changed, sounding) for one in requests_for(graph, uploads)[0]]
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path / "models"], workers=1)
    with open_real_pool(config) as pool:
        found = {each.index: each for each in pool.submit(wanted).results()}
    heard = read_audio("audio", uploads.audio("", "a.wav").path).samples
    np.testing.assert_allclose(heard, tone(), atol=1 / 32000)
    expected = np.concatenate([heard[RATE // 4 :] * np.float32(10 ** (-6 / 20)), heard])
    np.testing.assert_allclose(found[0].samples, expected, atol=1e-6)
    sound = found[1].sound
    assert sound is not None
    own = read_audio("audio", uploads.video("", "clip.mp4").path)
    np.testing.assert_allclose(sound.samples_SC, own.samples, atol=1e-6)
    assert (sound.samples_per_second, len(found[1].frames)) == (own.rate, 9)


def test_uploads_of_audio_are_checked(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    for name, kind, codec in (("a.wav", "wav", "pcm_s16le"), ("a.flac", "flac", "flac")):
        uploads.add("", name, sound_file(tone(), kind=kind, codec=codec))
        facts = uploads.audio("", name)
        assert (facts.rate, facts.channels, facts.seconds) == (RATE, 2, pytest.approx(SECONDS)), name
    six = sound_file(np.zeros((800, 6), np.float32), 8000)
    for content, problem in (
        (b"RIFF", "cannot be read as audio"),
        (sound_file(tone())[:40], "cannot be read as audio|no samples"),
        (clip(), "contains no audio stream|cannot be read"),
        (six, "6 channels"),
    ):
        with pytest.raises(UserError, match=problem):
            uploads.add("", "broken.wav", content)
    with pytest.raises(UserError, match=r"other\.wav was not uploaded"):
        uploads.audio("", "other.wav")
    uploads.add("", "clip.mp4", clip())
    with pytest.raises(UserError) as refused:
        uploads.audio("", "clip.mp4")
    assert "contains no audio stream" in str(refused.value)
    assert str(tmp_path) not in str(refused.value), "the place of a file is not told"
    assert uploads.names("") == ("a.flac", "a.wav", "clip.mp4")


def test_audio_in_requests_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(sound_file(tone(channels=1), 8000))
    assert audio_facts("audio", str(path)).channels == 1
    assert checked_audio("audio", path) == str(path)
    samples = tone()
    assert checked_audio("audio", (samples, RATE)) == checked_audio("audio", (samples.copy(), RATE))
    assert checked_audio("audio", (samples, RATE)) != checked_audio("audio", (samples, 48000))
    long = np.zeros((MAX_AUDIO_SAMPLES // 2 + 1, 2), np.float32)
    for value, problem in (
        (tmp_path / "b.wav", "an existing file"),
        ((samples.astype(np.float64), RATE), "float64"),
        ((samples * np.float32(np.nan), RATE), "float32"),
        ((samples, 0), "samples per second"),
        ((samples, 1.5), "a whole number"),
        ((samples[:, :0], RATE), "0 channels"),
        ((samples[:0], RATE), "at least one"),
        ((long, RATE), f"up to {MAX_AUDIO_SAMPLES} samples"),
        (5, "the path of a file with audio"),
        (None, "the path of a file with audio"),
    ):
        with pytest.raises(UserError, match=problem):
            checked_audio("audio", value)


def test_audio_that_is_not_there_is_refused_by_its_node(tmp_path: Path) -> None:
    graph = song()
    with pytest.raises(WorkflowRejected) as refused:
        requests_for(graph, Uploads(tmp_path))
    assert {error.node_id: error.details for error in refused.value.errors} == {
        "heard": "audio: a.wav was not uploaded, or was removed since"
    }
    with pytest.raises(WorkflowRejected) as refused:
        outputs_of(graph, PoolNames({"song": "ACE-Step 1.5"}, []))
    assert "reads audio of users in" in refused.value.errors[0].details
