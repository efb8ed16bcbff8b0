"""Folders of diffusers with transformers draw what the single file of the same weights draws."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.transformer_folder import _noise
from modelpool.pool.models.text.text_tokenizer import KINDS
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import ShiftBySize
from tests.pool.families.tiny_transformers import FAMILIES, seeded
from tests.pool.families.whole_transformer import Whole
from tests.pool.models.text.tiny_tokenizers import tiny

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

_QWEN_SHIFT = {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
#: the scheduler that each family was published with
SCHEDULERS: Mapping[str, Mapping[str, Any]] = {
    "sd35_large": {"shift": 3.0},
    "flux_dev": {"use_dynamic_shifting": True},
    "qwen_image": {"use_dynamic_shifting": True, **_QWEN_SHIFT},
    "wan_t2v": {"shift": 8.0},
    "hunyuan_video": {"shift": 7.0},
}
#: folders of text encoders in the order of the family's readings
TEXT_FOLDERS = {"hunyuan_video": ("text_encoder_2", "text_encoder")}
USUAL_FOLDERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")


def write_folder(folder: Path, name: str) -> None:
    """The parts of the tiny model as their libraries save them."""
    family = FAMILIES[name]
    index: dict[str, Any] = {"_class_name": "DiffusionPipeline"}

    def save(part: Any, place: str, library: str) -> None:
        part.save_pretrained(folder / place)
        index[place] = [library, type(part).__name__]

    save(seeded(family.model, 1), "transformer", "diffusers")
    vae = seeded(family.vae, 2)
    if type(vae).__name__ == "AutoencoderKL":
        own = TRANSFORMERS[name]
        vae.register_to_config(scaling_factor=own.scaling_factor, shift_factor=own.latent_shift)
    save(vae, "vae", "diffusers")
    save(FlowMatchEulerDiscreteScheduler(**SCHEDULERS[name]), "scheduler", "diffusers")
    for place, (member, (make, _)) in zip(TEXT_FOLDERS.get(name, USUAL_FOLDERS), family.encoders.items(), strict=False):
        save(make(), place, "transformers")
        if member in KINDS:
            tokenizer = folder / place.replace("text_encoder", "tokenizer")
            tokenizer.mkdir()
            tiny(KINDS[member]).save(str(tokenizer / "tokenizer.json"))
    (folder / "model_index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_folder_draws_what_the_file_draws(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "folders" / "tiny").mkdir(parents=True)
    write_folder(tmp_path / "folders" / "tiny", name)
    drawn = []
    for whole in (
        Whole(tmp_path / "file", FAMILIES[name]),
        Whole(tmp_path / "folders", FAMILIES[name], write=False),
    ):
        assert whole.family.name == name
        assert whole.family.sampling.noise.last_share == TRANSFORMERS[name].sampling.noise.last_share
        latent = whole.latent(whole.texts())
        drawn.append((latent.samples_CHW, whole.pixels(latent)))
        whole.engine.close()
    np.testing.assert_allclose(drawn[0][0], drawn[1][0], atol=1e-5 * max(1.0, float(np.abs(drawn[0][0]).max())))
    assert np.abs(drawn[0][1].astype(int) - drawn[1][1]).max() <= 1


def test_a_scheduler_says_another_shift(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_folder(folder, "sd35_large")
    FlowMatchEulerDiscreteScheduler(shift=5.5).save_pretrained(folder / "scheduler")
    assert open_checkpoint(folder).family.sampling.noise.shift == 5.5
    scheduler = folder / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps({**json.loads(scheduler.read_text()), "shift": "a lot"}))
    with pytest.raises(UnknownArchitecture, match="configuration of scheduler: shift: found 'a lot'"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("place", "said", "refusal"),
    [
        ("scheduler", {"shift": 1e-300}, "shift: found 1e-300, expected a number from 0.001 to 1000.0"),
        ("scheduler", {"shift": 10**400}, "shift: found .*, expected a number"),
        ("scheduler", {"max_shift": 1e6}, "max_shift: found 1000000.0, expected a number from -20.0 to 20.0"),
        ("scheduler", {"base_shift": -1e6}, "base_shift: found -1000000.0, expected a number from -20.0 to 20.0"),
        (
            "scheduler",
            {"base_image_seq_len": 1, "max_image_seq_len": 1.5},
            "max_image_seq_len: found 1.5, expected a whole",
        ),
        ("scheduler", {"max_image_seq_len": 1e300}, "max_image_seq_len: found 1e[+]300, expected a whole number"),
        ("scheduler", {"max_image_seq_len": 256}, "found [(]256, 256[)], expected rising numbers"),
        ("vae", {"scaling_factor": 0.0}, "scaling_factor: found 0.0, expected a number above 0"),
        ("vae", {"scaling_factor": -0.5}, "scaling_factor: found -0.5, expected a number above 0"),
    ],
)
def test_numbers_that_make_no_image_are_refused(tmp_path: Path, place: str, said: Any, refusal: str) -> None:
    """They would divide by nothing or leave what floats hold, when a job runs."""
    folder = tmp_path / "tiny"
    write_folder(folder, "flux_dev")
    (path,) = (folder / place).glob("*config.json")
    own = json.loads(path.read_text())
    path.write_text(json.dumps({**own, "use_dynamic_shifting": "shift" not in said, **said}))
    with pytest.raises(UnknownArchitecture, match=f"configuration of {place}: .*{refusal}"):
        open_checkpoint(folder)


def test_a_scheduler_may_say_sizes_as_floats(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_folder(folder, "flux_dev")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_image_seq_len": 8192.0}))
    assert open_checkpoint(folder).family.sampling.noise.shift_by_size == ShiftBySize((256, 8192), (0.5, 1.15))


def test_sd3_runs_without_t5(tmp_path: Path) -> None:
    """As the folder of `sd3_medium_incl_clips` has it."""
    folder = tmp_path / "tiny"
    write_folder(folder, "sd35_large")
    for part in (folder / "text_encoder_3").iterdir():
        part.unlink()
    (folder / "text_encoder_3").rmdir()
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "text_encoder_3": [None, None]}))
    assert [role.value for role in open_checkpoint(folder).family.text_encoders] == ["text_encoder", "text_encoder_2"]


def test_a_scheduler_that_turns_levels_around_says_nothing_of_the_shift() -> None:
    """Found: Mochi's says 1 beside levels that its pipeline has by itself, and other schedules ran without a shift."""
    said = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0, "invert_sigmas": True}
    noise = TRANSFORMERS["mochi"].sampling.noise
    assert noise.shift > 1.0
    assert _noise(noise, said) == noise
    assert _noise(noise, {**said, "invert_sigmas": False}).shift == 1.0
