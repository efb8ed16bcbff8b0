"""`modelpool inspect` of weights that this version does not run: named and measured, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.actors.cli.conftest import Command
from tests.actors.cli.test_looking import LIGHT, MODEL, weights_file
from tests.pool.checkpoints import layouts
from tests.pool.checkpoints.recognition.published import shapes_of
from tests.pool.checkpoints.recognition.test_reading import model_folder


def listed(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F16") -> str:
    path.write_text(json.dumps({key: [list(shape), dtype] for key, shape in shapes.items()}))
    return str(path)


def test_a_family_without_an_architecture_is_named_with_what_is_missing(command: Command, tmp_path: Path) -> None:
    keys = listed(tmp_path / "ace.json", shapes_of("ace_step", "model.diffusion_model."))
    ended = command("inspect", keys)
    assert ended.code == 0
    assert "recognised as ACE-Step 1 (3.3 B parameters, F16); this version has no architecture for it" in ended.out
    assert re.search(
        r"^diffusion model +ACE-Step 1 +874 +3,305,659,264 +6\.2 GiB +F16 6\.2 GiB +model\.", ended.out, re.M
    )
    for line in ("family +ace_step_1 \\(ACEStep in ComfyUI\\)", "patch_size +\\[16, 1\\]", "latents +ace_step"):
        assert re.search(f"^{line}$", ended.out, re.MULTILINE), line
    [found] = command("inspect", keys, "--json").objects
    [model] = found["components"]
    assert (found["kind"], model["name"], model["runs"]) == ("diffusion model", "ace_step_1", "")
    assert (model["config"]["num_layers"], model["dtypes"]) == (24, {"F16": 2 * 3_305_659_264})


def test_a_list_without_types_has_no_bytes(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({key: list(shape) for key, shape in shapes_of("flux_dev").items()}))
    ended = command("inspect", str(path))
    assert "recognised as Flux dev (11.9 B parameters)\n" in ended.out
    assert re.search(r"^architecture +FluxTransformer2DModel of diffusers$", ended.out, re.MULTILINE)


def test_a_model_that_this_version_does_not_run_says_why(command: Command, tmp_path: Path) -> None:
    path = weights_file(tmp_path / "sd3.safetensors", **_small("sd3_medium"))
    [found] = command("inspect", str(path), "--json").objects
    assert (found["title"], found["components"][0]["name"]) == ("Stable Diffusion 3", "sd3")
    assert found["problem"].startswith("recognised as Stable Diffusion 3, which this version cannot run yet")
    assert re.search(r"^to run it +recognised as Stable Diffusion 3, which", command("inspect", str(path)).out, re.M)


def _small(model: str) -> dict[str, tuple[int, ...]]:
    """A published model's tensors but for its blocks after the first, a sixteenth as large each way."""
    shapes = {key: shape for key, shape in shapes_of(model).items() if not re.search(r"\.[1-9]\d*\.", key)}
    kept = {"x_embedder.proj.weight": (96, 16, 2, 2), "pos_embed": (1, 144, 96), "final_layer.linear.weight": (64, 96)}
    divided = {key: tuple(max(1, size // 16) for size in shape) for key, shape in shapes.items()}
    return {**divided, **kept}


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"control_model.input_blocks.0.0.weight": (4, 4, 3, 3)}, "a ControlNet (1 tensor)"),
        ({"emb_params": (2, 768)}, "a textual inversion embedding (1 tensor)"),
    ],
)
def test_what_is_no_model_is_told_as_what_it_is(
    shapes: dict[str, tuple[int, ...]], said: str, command: Command, tmp_path: Path
) -> None:
    ended = command("inspect", str(weights_file(tmp_path / "x.safetensors", **shapes)))
    assert ended.code == 0
    assert re.search(rf"^what it is +{re.escape(said)}$", ended.out, re.MULTILINE)
    assert f"this is {said.partition(' (')[0]}" in ended.out


def test_a_vae_alone_is_told_with_its_name(command: Command, tmp_path: Path) -> None:
    tensors = {
        key.removeprefix("first_stage_model."): torch.zeros(shape, dtype=torch.float16)
        for key, shape in layouts.tiny_sd1().items()
        if key.startswith("first_stage_model.")
    }
    save_file(tensors, tmp_path / "vae.safetensors")
    [found] = command("inspect", str(tmp_path / "vae.safetensors"), "--json").objects
    [vae] = found["components"]
    assert (found["kind"], vae["name"], vae["config"]["latent_channels"]) == ("VAE", "kl", 4)


def test_a_stranger_is_refused_in_one_line(command: Command, tmp_path: Path) -> None:
    ended = command("inspect", str(weights_file(tmp_path / "x.safetensors", strange=(2, 2))))
    assert (ended.code, ended.out) == (2, "")
    assert "match no known architecture (the first are strange)" in ended.err


def test_a_checkpoint_that_runs_tells_what_was_recognised_too(command: Command) -> None:
    [found] = command("inspect", str(MODEL), "--json").objects
    recognised: dict[str, Any] = found["recognised"]
    assert recognised["kind"] == "checkpoint"
    assert recognised["components"][0]["name"] == found["family"] == "sd1"
    assert re.search(r"^context_dim +32$", command("inspect", str(MODEL)).out, re.MULTILINE)


def test_a_folder_of_diffusers_is_told_by_component(command: Command, tmp_path: Path) -> None:
    root = model_folder(tmp_path / "model")
    ended = command("inspect", str(root))
    assert ended.code == 0
    for line in (
        "what it is +Stable Diffusion 1",
        "pipeline +StableDiffusionPipeline",
        "prediction +v \\(configuration of scheduler\\)",
        "scheduler +DDIMScheduler",
        "naming +diffusers",
    ):
        assert re.search(f"^{line}$", ended.out, re.MULTILINE), line
    [found] = command("inspect", str(root), "--json").objects
    assert (found["kind"], list(found["components"])) == ("folder", ["unet", "vae"])


def test_a_folder_of_files_is_told_by_file(command: Command) -> None:
    ended = command("inspect", str(LIGHT.parent))
    assert re.search(r"^light\.safetensors +LoRA +a LoRA \(\d+ tensors\)$", ended.out, re.MULTILINE)
    [found] = command("inspect", str(MODEL.parent), "--json").objects
    assert found["files"][MODEL.name]["title"] == "Stable Diffusion 1"


def test_a_shard_list_is_read_as_the_files_that_it_names(command: Command, tmp_path: Path) -> None:
    index = model_folder(tmp_path / "model") / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    [found] = command("inspect", str(index), "--json").objects
    assert (found["title"], found["components"][0]["naming"]) == ("Stable Diffusion 1", "diffusers")
