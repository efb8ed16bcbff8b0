"""`modelpool inspect` of weights that this version does not run: named and measured, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.registry import registry
from modelpool.pool.catalog.registry.registry_store import RegistryStore
from modelpool.pool.weights.quant.file_hash import file_sha256, weights_sha256
from tests.actors.cli.conftest import Command
from tests.actors.cli.test_looking import LIGHT, MODEL, weights_file
from tests.pool.families.detection.published import shapes_of
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.components.text import cases as texts
from tests.pool.models.loading import layouts
from tests.pool.models.loading.test_recognition_input import model_folder
from tests.pool.models.loading.tiny_checkpoint import write_hollow_checkpoint


def listed(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F16") -> str:
    path.write_text(json.dumps({key: [list(shape), dtype] for key, shape in shapes.items()}))
    return str(path)


def test_a_family_without_an_architecture_is_named_with_what_is_missing(command: Command, tmp_path: Path) -> None:
    keys = listed(tmp_path / "ace.json", shapes_of("ace_step", "model.diffusion_model."))
    ended = command("inspect", keys)
    assert ended.code == 0
    assert "recognised as ACE-Step 1 (3.3 B parameters, F16); recognised, does not run: no dependency" in ended.out
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
    assert "recognised as Flux dev (11.9 B parameters); its family runs\n" in ended.out
    assert re.search(r"^architecture +FluxTransformer2DModel \(diffusers\)$", ended.out, re.MULTILINE)


def test_a_model_that_this_version_does_not_run_says_why(command: Command, tmp_path: Path) -> None:
    path = weights_file(tmp_path / "image.safetensors", **_small("hunyuan_image_2.1"))
    [found] = command("inspect", str(path), "--json").objects
    assert found["components"][0]["name"] == "hunyuan_image_21"
    assert found["problem"].startswith(f"recognised as {found['title']}, ")
    assert re.search(rf"^problem +recognised as {found['title']}, ", command("inspect", str(path)).out, re.M)


def test_what_is_used_beside_a_model_says_how(command: Command, tmp_path: Path) -> None:
    """And asks for no whole checkpoint in its place."""
    encoder = {key: tuple(tensor.shape) for key, tensor in texts.clip_file(texts.clip()).items()}
    uses = {
        "in a prompt: embedding:NAME": {"emb_params": (2, 32)},
        "--control NAME=IMAGE": ldm_controlnet(layouts.TINY_UNET),
        "modelpool models assemble NAME --vae FILE": layouts.ldm_vae(layouts.LdmVae(), ""),
        "modelpool models assemble NAME --text-encoder FILE": encoder,
    }
    for place, (use, shapes) in enumerate(uses.items()):
        path = write_hollow_checkpoint(tmp_path / f"{place}.safetensors", shapes)
        shown = command("inspect", str(path)).out
        assert re.search(rf"^usage +.*{re.escape(use)}", shown, re.M), shown
        assert "expected a complete checkpoint" not in shown


def _small(model: str) -> dict[str, tuple[int, ...]]:
    """A published model's tensors but for its blocks after the first, a sixteenth as large each way."""
    shapes = {key: shape for key, shape in shapes_of(model).items() if not re.search(r"\.[1-9]\d*\.", key)}
    return {key: tuple(max(1, size // 16) for size in shape) for key, shape in shapes.items()}


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
    assert re.search(rf"^description +{re.escape(said)}$", ended.out, re.MULTILINE)
    assert re.search(r"^usage +", ended.out, re.MULTILINE)


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
    assert "its 1 tensor matches no known architecture (the first are strange)" in ended.err


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
        "description +Stable Diffusion 1",
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


def test_the_hash_is_the_registrys_and_a_file_is_read_for_it_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(registry, "SETTLED_NS", -(10**12))  # as if the file had been there for long
    [found] = command("inspect", str(MODEL), "--json").objects
    assert found["sha256"] == file_sha256(MODEL)
    record = RegistryStore(tmp_path / "state" / "modelpool").hash_record(str(MODEL))
    assert record is not None
    assert record.hashes.sha256 == found["sha256"]
    monkeypatch.setattr(registry, "hash_file", lambda *_: pytest.fail("hashes again"))
    [again] = command("inspect", str(MODEL), "--json").objects
    assert again == found


def test_shards_that_run_are_told_with_the_hash_of_their_contents(command: Command, tmp_path: Path) -> None:
    tensors = load_file(MODEL)
    places = {key: f"{number % 2}.safetensors" for number, key in enumerate(sorted(tensors))}
    for name in set(places.values()):
        save_file({key: tensors[key] for key in tensors if places[key] == name}, tmp_path / name)
    index = tmp_path / "cut.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    [found] = command("inspect", str(index), "--json").objects
    [whole] = command("inspect", str(MODEL), "--json").objects
    assert (found["kind"], found["components"]) == ("checkpoint", whole["components"])
    assert found["sha256"] == weights_sha256(index)


def test_a_pickle_is_read_where_that_is_allowed(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": load_file(MODEL)}, path)
    ended = command("inspect", str(path))
    assert (ended.code, ended.out) == (2, "")
    assert "a PyTorch pickle, which can contain code" in ended.err
    for ended in (
        command("inspect", str(path), "--allow-pickle", "--check", "--json"),
        command("inspect", str(path), "--config", _allowing(tmp_path / "mine.toml"), "--check", "--json"),
    ):
        [found] = ended.objects
        assert (found["kind"], found["family"], found["finite"]) == ("checkpoint", "sd1", True)


def _allowing(path: Path) -> str:
    path.write_text("[models]\nallow_pickle = true\n")
    return str(path)


def test_a_weight_that_is_no_finite_number_is_found_when_all_are_read(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    tensors = load_file(MODEL)
    key = sorted(tensors)[3]
    tensors[key].flatten()[1] = float("nan")
    save_file(tensors, path)
    assert command("inspect", str(path)).code == 0, "headers know nothing of it"
    for place in (path, tmp_path):
        ended = command("inspect", str(place), "--check")
        assert (ended.code, ended.out) == (2, "")
        assert f"bad.safetensors: 1 tensor holds infinite or undefined numbers: {key} (1 of" in ended.err
    ended = command("inspect", str(MODEL), "--check")
    assert re.search(r"^checked +all weights are finite numbers$", ended.out, re.MULTILINE)


def test_all_components_of_a_folder_of_diffusers_are_checked(command: Command, tmp_path: Path) -> None:
    root = model_folder(tmp_path / "model")
    assert command("inspect", str(root), "--check", "--json").objects[0]["finite"] is True
    weights = next(file for file in sorted((root / "vae").glob("*.safetensors")))
    tensors = load_file(weights)
    tensors[sorted(tensors)[0]].fill_(float("inf"))
    save_file(tensors, weights)
    ended = command("inspect", str(root), "--check")
    assert ended.code == 2
    assert "infinite" in ended.err
    keys = listed(tmp_path / "keys.json", shapes_of("flux_dev"))
    assert "--check: " in command("inspect", keys, "--check").err


def test_what_strangers_wrote_is_shown_and_not_obeyed(command: Command, tmp_path: Path) -> None:
    """Names that would clear the screen, forge a line or turn the text around; and rich's markup, which is text too."""
    evil = "\x1b[2J\x9b1m\nto run it  yes\u202e [red]"
    path = tmp_path / "x.safetensors"
    save_file({f"{evil}.emb_params": torch.zeros(2), "emb_params": torch.zeros(2, 8)}, path, {evil: evil})
    light = tmp_path / "light.safetensors"
    lora = load_file(LIGHT)
    save_file({**lora, evil: torch.zeros(2)}, light, {evil: evil, "[/]": "[bold]no[/]"})
    for file, said in ((light, "not recognised"), (path, "description")):
        ended = command("inspect", str(file))
        assert ended.code == 0, ended.err
        assert said in ended.out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", ended.out + ended.err)
        assert not re.search("^problem +yes", ended.out, re.MULTILINE)
    shown = command("inspect", str(light)).out
    assert re.search(r"^\[/\] +\[bold\]no\[/\]$", shown, re.MULTILINE)
    assert r"\x1b[2J\x9b1m\nto run it  yes\u202e [red]" in shown
    save_file({evil: torch.zeros(2)}, path)
    ended = command("inspect", str(path))
    assert ended.code == 2
    assert "\x1b" not in ended.err
    assert "\u202e" not in ended.err


def test_endings_in_capitals_are_checked_too(command: Command, tmp_path: Path) -> None:
    save_file({"emb_params": torch.full((2, 8), float("nan"))}, tmp_path / "BAD.SAFETENSORS")
    save_file({"emb_params": torch.zeros(2, 8)}, tmp_path / "good.safetensors")
    assert list(command("inspect", str(tmp_path), "--json").objects[0]["files"]) == [
        "BAD.SAFETENSORS",
        "good.safetensors",
    ]
    ended = command("inspect", str(tmp_path), "--check")
    assert ended.code == 2
    assert "BAD.SAFETENSORS: 1 tensor holds infinite or undefined numbers" in ended.err


def test_a_link_out_of_a_folder_is_told_of_and_not_followed(command: Command, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    save_file({"emb_params": torch.zeros(2, 8)}, tmp_path / "outside.safetensors")
    save_file({"emb_params": torch.zeros(2, 8)}, tmp_path / "models" / "own.safetensors")
    (tmp_path / "models" / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    [found] = command("inspect", str(tmp_path / "models"), "--json").objects
    assert "a link that leads to" in found["files"]["link.safetensors"]
    assert found["files"]["own.safetensors"]["title"] == "a textual inversion embedding"
    ended = command("inspect", str(tmp_path / "models"), "--check")
    assert ended.code == 2
    assert "link.safetensors: a link that leads to" in ended.err
