"""ComfyUI workflows in which a video of LTX-2 follows audio of the user: rendered with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from modelpool import GenerateRequest, PoolConfig
from modelpool.actors.http.comfy.comfy_graph import PoolNames
from modelpool.actors.http.comfy.comfy_workflow import outputs_of, requests_of
from modelpool.actors.http.comfy.node_errors import WorkflowRejected
from modelpool.actors.http.service.uploads import Uploads
from modelpool.actors.request.workflow_fields import SampleNode
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.comfy.comfy_examples import Graph, node
from tests.actors.http.comfy.test_audio_of_users import MODEL, sound_file, tone
from tests.actors.http.comfy.test_public_kinds import CONFIG
from tests.actors.http.comfy.test_rendered_ltx import graph
from tests.actors.loop_connection import open_real_pool
from tests.actors.unchanged_outputs import write_transformer
from tests.pool.families.definitions.test_ltx2 import SOUNDING
from tests.pool.families.tiny_pairs import write_tokenizers

RATE = 16000


def uploaded(folder: Path, seconds: float = 0.4, loudness: float = 0.0) -> Uploads:
    """A tone, or noise of this loudness."""
    uploads = Uploads(folder)
    samples = tone(RATE, seconds=seconds)
    if loudness:
        samples = np.random.default_rng(3).normal(0, loudness, samples.shape).clip(-1, 1).astype(np.float32)
    uploads.add("", "a.wav", sound_file(samples, RATE))
    return uploads


def compiled(prompt: Graph, uploads: Uploads) -> tuple[GenerateRequest, tuple[str, ...]]:
    known = PoolNames(
        {"ltx2": "LTX-2", "other": "LTX-2"},
        [],
        video_facts=lambda name: uploads.video("", name),
        audio_facts=lambda name: uploads.audio("", name),
    )
    (output,) = outputs_of(prompt, known)
    (made,) = requests_of(output, known, lambda name: Image.new("RGB", (64, 48), "red"))
    return made, output.warnings


def refusals(prompt: Graph, uploads: Uploads) -> str:
    with pytest.raises(WorkflowRejected) as rejected:
        compiled(prompt, uploads)
    return " ".join(each.details for each in rejected.value.errors)


def kept_by_runs(made: GenerateRequest) -> list[str | None]:
    """The nodes of the audio that the runs of a workflow keep, in order."""
    assert made.workflow is not None
    return [each.inputs.get("sound") for _, each in made.workflow.in_order if isinstance(each, SampleNode)]


def following(level: float | None = 0.0, **changes: Any) -> Graph:
    """A video that follows audio: with a noise mask of this level, or without one."""
    nodes: dict[str, Any] = {
        "heard": node("LoadAudio", audio="a.wav"),
        "sound": node("LTXVAudioVAEEncode", audio=["heard", 0], audio_vae=["sound_vae", 0]),
        "solid": node("SolidMask", value=level or 0.0, width=64, height=64),
        "kept": node("SetLatentNoiseMask", samples=["sound", 0], mask=["solid", 0]),
        "both__audio_latent": ["sound" if level is None else "kept", 0],
    }
    return graph(1.0, **{**nodes, **changes})


def two_passes(**changes: Any) -> Graph:
    """The second pass has the audio of the first one, and its noise mask."""
    more: dict[str, Any] = {
        "both2": node("LTXVConcatAVLatent", video_latent=["apart", 0], audio_latent=["apart", 1]),
        "levels2": node("ManualSigmas", sigmas="0.5, 0.0"),
        "run2": node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=["guider", 0], sampler=["sampler", 0],
            sigmas=["levels2", 0], latent_image=["both2", 0],
        ),
        "apart2": node("LTXVSeparateAVLatent", av_latent=["run2", 0]),
        "images__samples": ["apart2", 0],
        "audio__samples": ["apart2", 1],
    }  # fmt: skip
    return following(**{**more, **changes})


def test_audio_that_a_mask_keeps_is_an_input_of_all_runs(tmp_path: Path) -> None:
    """Refused before: "the pool makes the audio of a video of LTX-2 itself: it encodes none of users for it"."""
    uploads = uploaded(tmp_path)
    made, warnings = compiled(following(), uploads)
    assert kept_by_runs(made) == ["heard"]
    assert not warnings
    frozen, _ = compiled(following(kept=node("LTXVFreezeLatent", latent=["sound", 0])), uploads)
    assert kept_by_runs(frozen) == ["heard"]
    twice, _ = compiled(two_passes(), uploads)
    assert kept_by_runs(twice) == ["heard", "run"]
    given_again, _ = compiled(two_passes(both2__audio_latent=["kept", 0]), uploads)
    assert kept_by_runs(given_again) == ["heard", "heard"]
    # a mask of 1 has it regenerated again, from the second pass on
    solid, freed = node("SolidMask", value=1.0, width=8, height=8), node("SetLatentNoiseMask", mask=["solid2", 0])
    freed["inputs"]["samples"] = ["apart", 1]
    changes = {"solid2": solid, "freed": freed, "both2__audio_latent": ["freed", 0]}
    assert kept_by_runs(compiled(two_passes(**changes), uploads)[0]) == ["heard", None]


def test_audio_that_no_mask_keeps_is_told_of_or_refused(tmp_path: Path) -> None:
    uploads = uploaded(tmp_path)
    for level in (None, 1.0):
        made, warnings = compiled(following(level), uploads)
        assert made.workflow is None or kept_by_runs(made) == [None]
        assert any("does not act: the run begins with noise alone" in each for each in warnings), warnings
    # as in ComfyUI, a run of all noise levels makes what it makes of empty audio
    assert "SetLatentNoiseMask with a mask of 0" in refusals(following(None, levels__sigmas="0.8, 0.3, 0.0"), uploads)
    assert "a mask of 0.5 for audio of a video" in refusals(following(0.5), uploads)
    inverted = node("InvertMask", mask=["solid", 0])
    assert "another mask for audio" in refusals(following(inverted=inverted, kept__mask=["inverted", 0]), uploads)
    empty = node("LTXVEmptyLatentAudio", audio_vae=["sound_vae", 0], frames_number=9, frame_rate=24, batch_size=1)
    assert "a mask that keeps them" in refusals(following(sound=empty), uploads)
    frozen = node("LTXVFreezeLatent", latent=["frames", 0])
    assert "frames by guides alone" in refusals(following(frozen=frozen, both__video_latent=["frozen", 0]), uploads)
    made, warnings = compiled(following(sound_vae=node("LTXVAudioVAELoader", ckpt_name="other")), uploads)
    assert any("the VAE of model 'ltx2' encodes it" in each for each in warnings), warnings
    with pytest.raises(WorkflowRejected):
        compiled(following(images__samples=["sound", 0]), uploads)


def speaking(scale: float = 3.0, **changes: Any) -> Graph:
    """A video of which the audio has the voice of audio of the user."""
    nodes: dict[str, Any] = {
        "heard": node("LoadAudio", audio="a.wav"),
        "voiced": node(
            "LTXVReferenceAudio", model=["model", 0], positive=["texts", 0], negative=["texts", 1],
            reference_audio=["heard", 0], audio_vae=["sound_vae", 0], identity_guidance_scale=scale,
            start_percent=0.0, end_percent=1.0,
        ),
        "guider": node("CFGGuider", model=["voiced", 0], positive=["voiced", 1], negative=["voiced", 2], cfg=1.0),
    }  # fmt: skip
    return graph(1.0, **{**nodes, **changes})


def test_reference_audio_is_the_voice_of_a_run(tmp_path: Path) -> None:
    uploads = uploaded(tmp_path)

    def voices(prompt: Graph) -> list[tuple[str | None, float]]:
        made, warnings = compiled(prompt, uploads)
        assert not warnings
        assert made.workflow is not None
        runs = [each for _, each in made.workflow.in_order if isinstance(each, SampleNode)]
        return [(each.inputs.get("voice"), each.voice_scale) for each in runs]

    assert voices(speaking()) == [("heard", 3.0)]
    assert voices(speaking(0.0)) == [("heard", 0.0)]
    guided = speaking(guider__cfg=4.0)
    assert voices(guided) == [("heard", 3.0)]
    assert voices(speaking(guider__model=["model", 0])) == [("heard", 0.0)]
    assert "for both" in refusals(speaking(guider__cfg=4.0, guider__negative=["texts", 1]), uploads)
    assert "acts in all steps" in refusals(speaking(voiced__end_percent=0.5), uploads)
    other = node("LTXVAudioVAELoader", ckpt_name="other")
    _, warnings = compiled(speaking(sound_vae=other, audio__audio_vae=["mine", 0], mine=graph()["sound_vae"]), uploads)
    assert any("found the one of 'other' for the audio" in each for each in warnings), warnings
    _, warnings = compiled(speaking(guider__positive=["texts", 0]), uploads)
    assert any("does not act without reference audio" in each for each in warnings), warnings


@pytest.mark.filterwarnings("ignore:negative. ignored without guidance")  # as `modelpool run` does with workflows
def test_videos_follow_audio_and_have_it(tmp_path: Path) -> None:
    """One pass and two; the audio is the audio of the file as the VAE decodes it, whatever the seed; frames depend on
    it."""
    save_file(SOUNDING.file(), tmp_path / "ltx2.safetensors")
    write_tokenizers(tmp_path, SOUNDING)
    calm, noisy = uploaded(tmp_path / "calm", 9 / 24), uploaded(tmp_path / "noisy", 9 / 24, loudness=0.3)
    short, plain = uploaded(tmp_path / "short", 0.1), graph(1.0)
    wanted = [
        compiled(following(), calm)[0],
        compiled(following(noise__noise_seed=6), calm)[0],
        compiled(following(), noisy)[0],
        compiled(two_passes(), calm)[0],
        compiled(plain, calm)[0],
        compiled(following(None), calm)[0],
    ]
    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1, vram="512 MiB")
    with open_real_pool(config) as pool:
        found: dict[int, Any] = {each.index: each for each in pool.submit(wanted).results()}
        voiced = pool.submit([compiled(speaking(scale), calm)[0] for scale in (0.0, 3.0)]).results()
        first, guided = sorted(voiced, key=lambda each: each.index)
        with pytest.warns(UserWarning, match="audio of 0.1 seconds for a video of 0.375: silence follows it"):
            (silent,) = pool.submit(compiled(following(), short)[0]).results()
    one, seeded, other, twice, without, unkept = (found[place] for place in range(len(wanted)))
    assert not np.array_equal(first.sound.samples_SC, without.sound.samples_SC), "the voice acts"
    assert not np.array_equal(guided.sound.samples_SC, first.sound.samples_SC), "its guidance acts"
    np.testing.assert_array_equal(seeded.sound.samples_SC, one.sound.samples_SC)
    np.testing.assert_array_equal(twice.sound.samples_SC, one.sound.samples_SC)
    assert not np.array_equal(seeded.frames, one.frames)
    assert not np.array_equal(other.frames, one.frames), "frames depend on the audio"
    assert not np.allclose(other.sound.samples_SC, one.sound.samples_SC, atol=1e-4)
    assert not np.array_equal(twice.frames, one.frames)
    np.testing.assert_array_equal(unkept.frames, without.frames)
    np.testing.assert_array_equal(unkept.sound.samples_SC, without.sound.samples_SC)
    assert silent.sound.samples_SC.shape == one.sound.samples_SC.shape


def test_runs_without_steps_and_models_without_audio_keep_none(tmp_path: Path) -> None:
    save_file(SOUNDING.file(), tmp_path / "ltx2.safetensors")
    write_tokenizers(tmp_path, SOUNDING)
    write_transformer(tmp_path, MODEL)
    heard = {"kind": "audio", "audio": (tone(RATE), RATE)}

    def kept(model: str, **more: Any) -> GenerateRequest:
        request = {"model": model, "prompt": "a fox", "steps": 2, "width": 96, "height": 64, "frames": 9}
        run = {"kind": "sample", "request": request, "inputs": {"sound": "heard"}, **more}
        made = {"kind": "decode", "model": model, "inputs": {"latent": "run"}}
        workflow = {"nodes": {"heard": heard, "run": run, "made": made}, "output": "made"}
        return GenerateRequest(model=model, workflow=workflow, format="mp4", seed=1)

    config = PoolConfig.load(CONFIG).override(device="cpu", models=[tmp_path], workers=1, vram="512 MiB")
    with open_real_pool(config) as pool:
        for wrong, problem in (
            (kept("ltx2", first_step=2), "sound: expected none in a run of no step"),
            (kept(MODEL), "keeps no audio in its videos"),
            (kept(MODEL, inputs={"voice": "heard"}), "reads no voice of other audio"),
            (kept("ltx2", voice_scale=2.0), "voice_scale"),
        ):
            with pytest.raises(UserError, match=problem):
                pool.submit([wrong])
