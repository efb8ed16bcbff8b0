"""Runs that real processes share: the same latents as on one worker, and nobody left behind when a member ends."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.pool.engine.gang.members import Answer, Members, Wish, members
from tests.pool.families.definitions import (
    test_allegro,
    test_bria,
    test_cogvideox,
    test_cogview3_plus,
    test_cogview4,
    test_ernie_image,
    test_glm_image,
    test_joyimage,
    test_kandinsky5_image,
    test_kandinsky5_video,
    test_kandinsky6,
    test_krea2,
    test_longcat_image,
    test_ovis_image,
    test_sana,
)
from tests.pool.families.definitions.test_ltx2 import SOUNDING
from tests.pool.families.test_videos_from_images import CONCATENATED, KEPT
from tests.pool.families.tiny_relatives import ALL_FAMILIES, SMALL_FAMILIES
from tests.pool.families.tiny_transformers import TinyFamily

#: of the largest value: tokens are summed in another order, which guidance enlarges
TOLERANCE = 1e-5
#: of a step, at least, in runs that somebody ends
STEP_SECONDS = 0.1


def assert_shared(alone: Answer, shared: list[Answer], *, exact: bool = False) -> None:
    """All members have the latent of one worker."""
    assert not any(each.error for each in (alone, *shared)), [each.error for each in (alone, *shared)]
    for each in shared:
        np.testing.assert_array_equal(each.latent, shared[0].latent)
    if exact:
        np.testing.assert_array_equal(shared[0].latent, alone.latent)
    else:
        assert alone.latent is not None
        largest = float(np.abs(alone.latent).max())
        np.testing.assert_allclose(shared[0].latent, alone.latent, atol=TOLERANCE * largest, rtol=0)


def test_two_workers_share_a_run_and_survive_each_other(tmp_path: Path) -> None:
    """Tokens with a LoRA, texts of guidance byte for byte, other weights on one member, a kill, a stop: after each, a
    member alone makes the bytes that it made before."""
    with members(3, tmp_path, ALL_FAMILIES["wan_t2v"]) as pool:
        alone = {texts: pool.alone(Wish(None, texts=texts)) for texts in (1, 2)}
        assert_shared(alone[2], pool.sample(Wish(None), [0, 1]), exact=True)
        assert_shared(alone[1], pool.sample(Wish(None, texts=1)))  # 3 members: shares of unequal length
        patched = pool.alone(Wish(None, texts=1, lora=True))
        assert patched.latent is not None
        assert not np.array_equal(patched.latent, alone[1].latent)
        assert_shared(patched, pool.sample(Wish(None, texts=1, lora=True), [0, 2]))

        _one_member_differs(pool)
        _another_controller(pool, alone[2])
        _ended(pool, signal.SIGSTOP, 1, alone[2])
        _ended(pool, signal.SIGKILL, 2, alone[2])


def test_one_member_streams_what_another_one_has_on_its_gpu(tmp_path: Path) -> None:
    """They make the same, and other weights are named, on whichever they are: only what was resident on both was
    compared, and other weights made a wrong image without an error."""
    with members(2, tmp_path, ALL_FAMILIES["flux_dev"], streams=(False, True)) as pool:
        assert_shared(pool.alone(Wish(None, lora=True)), pool.sample(Wish(None, lora=True)))
        for place in (0, 1):
            pool.alone(Wish(None), place)  # without the LoRA
            _one_member_differs(pool, place)


def _one_member_differs(pool: Members, changed: int = 1) -> None:
    for place, gang in enumerate(pool.gangs()):
        pool.each[place].ask(Wish(gang, patched=place == changed))
    for answer in pool.answers():
        assert "GangsDiffer: gpu-1 (rank 1) has other patched weights" in answer.error, answer.error


def _another_controller(pool: Members, alone: Answer) -> None:
    """One member after the other serves another controller, and its run stops: all leave after the same step, one that
    waits for a part that was never sent stops too, and the next gang makes the same."""
    slow = Wish(None, steps=60, step_seconds=STEP_SECONDS / 10)
    for place, gang in enumerate(pool.gangs()):
        pool.each[place].ask(replace(slow, texts=1, gang=gang, stops_after=1.0 if place == 1 else 0.0))
    assert [answer.error.partition(":")[0] for answer in pool.answers()] == ["Stopped"] * 3
    pool.each[0].ask(replace(slow, gang=pool.gangs([0, 1])[0], stops_after=0.3))
    assert pool.each[0].value().error.startswith("Stopped"), "it waits for the other one"
    assert_shared(alone, pool.sample(Wish(None), [0, 1]), exact=True)


def _ended(pool: Members, number: int, place: int, alone: Answer) -> None:
    """A member is killed or stopped in the middle of a run: the other one suspects it, in time, and has the state after
    the last complete step."""
    pool.begin(Wish(None, steps=60, step_seconds=STEP_SECONDS / 10), [0, place])
    time.sleep(1.5)
    began = time.monotonic()
    pool.each[place].signal(number)
    (broken,) = pool.answers([0])
    assert broken.error.startswith("GangBroken"), broken.error
    assert broken.suspects == (1,)
    assert f"gpu-{place}" in broken.error
    assert broken.state is not None
    assert 0 < broken.state.step < broken.state.steps
    assert time.monotonic() - began < 60.0, "as after the first timeout, which is for loading"
    np.testing.assert_array_equal(pool.alone(Wish(None)).latent, alone.latent)
    if number == signal.SIGSTOP:
        assert "its process is stopped" in broken.error
        pool.each[place].signal(signal.SIGCONT)
        (continued,) = pool.answers([place])
        assert continued.error.startswith("GangBroken"), continued.error
        np.testing.assert_array_equal(pool.alone(Wish(None), place).latent, alone.latent)


#: by name: the family, what it samples, and whether two members that divide two texts make its bytes
SHARED: dict[str, tuple[TinyFamily, Wish]] = {
    **{
        name: (ALL_FAMILIES[name], Wish(None))
        for name in ("flux_dev", "flux2", "qwen_image", "wan_t2v", "z_image", "ltxv", "hunyuan_video")
    },
    "hunyuan_video_15": (ALL_FAMILIES["hunyuan_video_15"], Wish(None)),
    "ltx2": (SOUNDING, Wish(None)),
    "ltx2 from an image": (SOUNDING, Wish(None, begins=True)),
    "ltxv from an image": (ALL_FAMILIES["ltxv"], Wish(None, begins=True)),
    "wan22_ti2v from an image": (KEPT, Wish(None, begins=True)),
    "wan22_i2v, the first of two experts": (CONCATENATED, Wish(None, begins=True, switch=2)),
}


@pytest.mark.nightly(usually="tests/pool/engine/gang/test_gang_runs.py")
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", SHARED)
def test_each_family_with_a_plan_makes_the_same_on_several_workers(name: str, degree: int, tmp_path: Path) -> None:
    """Resident and streamed, with and without a LoRA, with one text and with guidance, of which two members that divide
    the texts make the bytes."""
    family, wanted = SHARED[name]
    for streams in (False, True):
        with members(degree, tmp_path, family, streams=streams) as pool:
            guided = pool.texts() > 1
            for texts in (1, 2) if guided else (1,):
                for lora in (False, True):
                    wish = replace(wanted, texts=texts, lora=lora)
                    alone = pool.alone(wish)
                    assert_shared(alone, pool.sample(wish), exact=texts == degree == 2)
                    np.testing.assert_array_equal(pool.alone(wish).latent, alone.latent)


UNDIVIDED = {"sana": test_sana.CASES["sana"].tiny, "hidream_i1": SMALL_FAMILIES["hidream_i1"]}
#: families of which one call is compared in `test_token_plans`; the tiny model of Stable Diffusion 3, without norms of
#: queries and keys, enlarges differences of 2e-6 in a call to more than the tolerance in three steps with guidance 7
WHOLE_RUNS = {
    **{
        name: ALL_FAMILIES[name]
        for name in (
            "sd35_large", "sd35_medium", "chroma", "lumina2", "auraflow", "pixart_sigma", "hunyuan_dit", "cosmos_t2v",
            "cosmos2_t2i", "mochi", "hunyuan_image_21",
        )
    },
    **{
        name: module.CASES[name].tiny
        for name, module in {
            "allegro": test_allegro, "bria": test_bria, "cogvideox": test_cogvideox,
            "cogview3_plus": test_cogview3_plus, "cogview4": test_cogview4, "ernie_image": test_ernie_image,
            "glm_image": test_glm_image, "joyimage": test_joyimage, "kandinsky5_image": test_kandinsky5_image,
            "kandinsky5_video": test_kandinsky5_video, "kandinsky6": test_kandinsky6, "krea2": test_krea2,
            "longcat_image": test_longcat_image, "ovis_image": test_ovis_image,
        }.items()
    },
}  # fmt: skip


@pytest.mark.nightly(usually="tests/pool/engine/gang/test_token_plans.py")
@pytest.mark.filterwarnings("ignore:In (CPU|sim) autocast:UserWarning")
@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_whole_runs_of_real_processes_are_those_of_one(name: str, tmp_path: Path) -> None:
    """Two and four members, which divide tokens, and texts too where the model is guided."""
    with members(4, tmp_path, WHOLE_RUNS[name]) as pool:
        for texts in range(1, pool.texts() + 1):
            alone = pool.alone(Wish(None, texts=texts))
            assert_shared(alone, pool.sample(Wish(None, texts=texts)))
            assert_shared(alone, pool.sample(Wish(None, texts=texts), [0, 1]), exact=texts == 2)


@pytest.mark.nightly(usually="tests/pool/engine/gang/test_gang_runs.py")
@pytest.mark.parametrize("name", UNDIVIDED)
def test_texts_of_families_without_a_plan_are_divided_byte_for_byte(name: str, tmp_path: Path) -> None:
    with members(2, tmp_path, UNDIVIDED[name]) as pool:
        assert_shared(pool.alone(Wish(None)), pool.sample(Wish(None)), exact=True)
        (answer, _) = pool.sample(Wish(None, texts=1))
        assert "UnusableField: gpus: found 2" in answer.error


@pytest.mark.nightly(usually="tests/pool/engine/gang/test_gang_runs.py")
def test_stopped_members_are_noticed_within_three_steps(tmp_path: Path) -> None:
    """Stops at random steps, of the leader and of another member, where they divide texts and where they divide tokens.
    Each run goes on from the state; where texts were divided, it ends with the same bytes."""
    choose = random.Random(7)
    with members(2, tmp_path, ALL_FAMILIES["wan_t2v"], device="cpu") as pool:
        for texts in (2, 1):
            wish = Wish(None, steps=8, step_seconds=STEP_SECONDS / 10, texts=texts)
            begun = time.monotonic()
            shared = pool.sample(wish)
            step_seconds = (time.monotonic() - begun) / wish.steps
            assert not any(each.error for each in shared), [each.error for each in shared]
            for stopped, other in ((0, 1), (1, 0)):
                pool.begin(wish)
                time.sleep((2 + choose.random() * (wish.steps - 4)) * step_seconds)
                pool.each[stopped].signal(signal.SIGSTOP)
                began = time.monotonic()
                (broken,) = pool.answers([other])
                noticed_seconds = time.monotonic() - began
                pool.each[stopped].signal(signal.SIGCONT)
                pool.answers([stopped])
                assert "its process is stopped" in broken.error, broken.error
                assert broken.suspects == (stopped,)
                assert noticed_seconds < 3 * step_seconds
                rest = pool.alone(replace(wish, resume=broken.state), other)
                assert not rest.error, rest.error
                if texts == 2:  # divided tokens have other last bits
                    np.testing.assert_array_equal(rest.latent, shared[0].latent)
