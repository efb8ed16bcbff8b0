"""Every kind of file against every other: exactly one kind claims a file, the loaders of the others refuse it by its
name, and `modelpool inspect` says what it is and whether it runs.

Failures are collected, so that one run names all files that are taken for something else.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import (
    CLIPConfig,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from modelpool.actors.cli.models.inspect_weights import file_facts, verdict
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.registry import hashes
from modelpool.pool.catalog.registry.file_purpose import MODELS, kind_of_keys
from modelpool.pool.catalog.registry.hashes import FileHashes
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.detection.file_facts import Contents, Kind
from modelpool.pool.families.detection.file_kinds import FileKind
from modelpool.pool.families.detection.other_files import (
    LORA,
    OTHER_FILES,
    UNCERTAIN,
    KeyNames,
    control_kind,
    other_file,
)
from modelpool.pool.families.detection.recognize import recognise_contents, what_is
from modelpool.pool.inference.controlnets.open_controlnet import plan_controlnet
from modelpool.pool.inference.image_prompts.adapter import plan_adapter
from modelpool.pool.inference.upscalers.build_upscaler import plan_upscaler
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.text.embeddings import read_embedding
from modelpool.pool.values.core.errors import UnknownArchitecture, UserError
from tests.pool.families.detection.file_examples import diffusers_controls, models, named, others, parts_of_models
from tests.pool.families.detection.published import Shapes, shapes_of
from tests.pool.models.loading.test_detect_family import refusal
from tests.pool.models.loading.tiny_checkpoint import write_hollow_checkpoint, write_tiny_checkpoint
from tests.pool.zoo.case import quiet_libraries


def test_every_controlnet_of_diffusers_is_an_example() -> None:
    """A new class has to be added to the examples, and to the table."""
    missing = {f"diffusers {name}" for name in diffusers_controls()} - others().keys()
    assert not missing


def test_exactly_one_kind_claims_each_file() -> None:
    """Found: ControlNets of Qwen-Image and of HunyuanDiT, FaceID, ControlNet-XS, SparseCtrl, Control-LoRAs."""
    failures = []
    for name, example in others().items():
        names = KeyNames(example.shapes)
        claims = [each.title for each in OTHER_FILES if each.fits(names)]
        claims += [LORA.title] * (LORA.fits(names) and example.kind is not FileKind.IMAGE_PROMPT)
        claims = claims or [each.title for each in UNCERTAIN if each.fits(names)][:1]
        if example.title == LORA.title:  # a LoRA has the names of what it is for
            claims = [title for title in claims if title == LORA.title]
        if claims != [example.title]:
            failures.append((name, claims))
        found = other_file(example.shapes)
        if found is None or (found.title, found.kind, found.runs) != (example.title, example.kind, example.runs):
            failures.append((name, found and (found.title, found.kind, found.runs)))
        if recognise_diffusion(example.shapes) is not None:
            failures.append((name, "a diffusion model"))
        if kind_of_keys(example.shapes, is_diffusion_model=True) is not example.kind and example.kind is not None:
            failures.append((name, kind_of_keys(example.shapes, is_diffusion_model=True)))
    assert not failures


def test_no_model_and_no_part_of_one_is_taken_for_something_else() -> None:
    failures = []
    for name, shapes in {**models(), **parts_of_models()}.items():
        names = KeyNames(shapes)
        if claims := [each.title for each in (*OTHER_FILES, *UNCERTAIN, LORA) if each.fits(names)]:
            failures.append((name, claims))
        if name in models() and kind_of_keys(shapes, is_diffusion_model=True) not in MODELS:
            failures.append((name, kind_of_keys(shapes, is_diffusion_model=True)))
        if name in models() and recognise_diffusion(shapes) is None:
            failures.append((name, "no diffusion model"))
    assert not failures


def test_each_loader_takes_its_own_kind_and_says_what_the_others_are() -> None:
    loaders: dict[FileKind, Callable[[Shapes], object]] = {
        FileKind.CONTROLNET: plan_controlnet,
        FileKind.UPSCALER: plan_upscaler,
        FileKind.IMAGE_PROMPT: plan_adapter,
    }
    titles = {name: example.title for name, example in others().items()}
    titles |= dict.fromkeys(("model flux_dev", "model sd15", "model qwen_image"), "a diffusion model of ")
    files = {**{name: example.shapes for name, example in others().items()}, **models()}
    failures = []
    for name, title in titles.items():
        example = others().get(name)
        for kind, load in loaders.items():
            if example is not None and example.kind is kind:
                continue
            try:
                load(files[name])
                failures.append((name, kind, "accepted"))
            except UnknownArchitecture as error:
                if title not in str(error):
                    failures.append((name, kind, str(error)))
        if example is not None and example.title not in refusal(dict(example.shapes)):
            failures.append((name, "a model", refusal(dict(example.shapes))))
        bare = {key.removeprefix("control_model."): shape for key, shape in files[name].items()}
        is_control = example is not None and example.kind is FileKind.CONTROLNET and example.runs
        if (control_kind(bare) is not None) != is_control:
            failures.append((name, "ControlNet", control_kind(bare)))
    assert not failures


def test_controlnets_and_adapters_that_run_are_planned_for_the_models_of_their_titles() -> None:
    failures = []
    for name, example in others().items():
        if example.kind is not FileKind.CONTROLNET or not example.runs:
            continue
        try:
            title = plan_controlnet(example.shapes).kind.title
        except UnknownArchitecture as error:
            title = str(error)
        if title not in (example.title.removeprefix("a ControlNet for "), "UNets (T2I-Adapter)"):
            failures.append((name, title))
    assert not failures


def test_files_named_by_path_for_another_use_are_refused_as_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ControlNet as a model, a model as a ControlNet, a LoRA as an upscaler, and so on: by the calls of a request."""
    # the hollow files have gigabytes of zeros
    monkeypatch.setattr(hashes, "_hash", lambda file, *rest: FileHashes(sha256(file.name.encode()).hexdigest()))
    model = write_tiny_checkpoint(tmp_path / "model.safetensors")
    names = {"control tiny flux", "t2i light_adapter", "prompt plus", "redux", "lora peft", "upscaler realesrgan_4x"}
    names |= {"motion module", "inversion sdxl", "gligen", "diffusers SanaControlNetModel"}
    files = {name: others()[name] for name in sorted(names)}
    paths = {
        name: write_hollow_checkpoint(tmp_path / f"{place}.safetensors", example.shapes)
        for place, (name, example) in enumerate(files.items())
    }
    catalog = Catalog((tmp_path,), (), "cpu")
    opened = OpenModel(catalog.find_model(str(model)), "cpu")
    uses: dict[FileKind, Callable[[str], object]] = {
        FileKind.CHECKPOINT: lambda path: catalog.components(catalog.find_model(path)),
        FileKind.CONTROLNET: lambda path: catalog.controls.find(path, 1.0, 0.0, 1.0),
        FileKind.UPSCALER: catalog.upscalers.find,
        FileKind.IMAGE_PROMPT: lambda path: catalog.image_prompts.find(path, 1),
        FileKind.LORA: lambda path: opened.match(catalog.find_lora(path, 1.0)),
        FileKind.EMBEDDING: read_embedding,
    }
    failures = []
    for kind, use in uses.items():
        for name, title in {**{each: files[each].title for each in files}, "model": "a checkpoint of "}.items():
            if name in files and files[name].kind is kind and files[name].runs:
                continue
            if name == "model" and kind is FileKind.CHECKPOINT:
                continue
            try:
                use(str(paths.get(name, model)))
                failures.append((name, kind, "accepted"))
            except UserError as error:
                if f"this is {title}" not in str(error):
                    failures.append((name, kind, str(error)))
    assert not failures


def test_inspect_says_what_each_file_is_and_whether_it_runs() -> None:
    failures = []
    for name, example in others().items():
        facts = recognise_contents(Contents(example.shapes))
        plain, _ = file_facts(Path("x.json"), facts)
        said, beyond = verdict(facts), "recognised, does not run"
        if not said.startswith(f"{example.title} (") or (beyond in said) is example.runs or facts.components:
            failures.append((name, said))
        if plain["kind"] != (Kind.LORA if example.kind is FileKind.LORA else Kind.OTHER).value:
            failures.append((name, plain["kind"]))
    assert not failures


def test_what_is_inside_of_a_wrapper_or_of_one_shard_is_said() -> None:
    flux = shapes_of("flux_dev")
    for wrapper in ("module.", "_orig_mod.", "ema.", "state_dict."):
        said = what_is({wrapper + key: shape for key, shape in flux.items()})
        assert said == f"a diffusion model of Flux dev, in a wrapper of a trainer: all names begin with {wrapper!r}"
    control = others()["control tiny qwen"].shapes
    said = what_is({f"module.{key}": shape for key, shape in control.items()})
    assert said.startswith("a ControlNet for Qwen-Image, in a wrapper of a trainer")
    shard = {key: shape for key, shape in flux.items() if key.startswith(("single_blocks.1", "single_blocks.2"))}
    shard = {key: shape for key, shape in shard.items() if not key.startswith(("single_blocks.1.", "single_blocks.2."))}
    assert what_is(shard).startswith("a part of a model in several files (single_blocks.10 to 29)")
    assert what_is(named("strange", shape=(3, 3))) == ""


def test_parts_that_share_names_with_known_ones_are_not_taken_for_them() -> None:
    """Found: SigLIP and CLIP's vision part as CLIP-H and CLIP-L, the safety checker as a vision encoder, KVAE as Stable
    Diffusion 3, VidTok and the audio VAE of LTX-2 as HunyuanVideo."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    with torch.device("meta"), quiet_libraries():
        built = {
            "KVAE": diffusers.AutoencoderKLKVAE(),
            "KVAE of videos": diffusers.AutoencoderKLKVAEVideo(),
            "VidTok": diffusers.AutoencoderVidTok(),
            "audio of LTX-2": diffusers.AutoencoderKLLTX2Audio(),
            "SigLIP vision": SiglipVisionModel(SiglipVisionConfig(**small, num_hidden_layers=24)),
            "SigLIP text": SiglipTextModel(SiglipTextConfig(**small, num_hidden_layers=3)),
            "SigLIP": SiglipModel(SiglipConfig()),
            "CLIP vision": CLIPVisionModel(CLIPVisionConfig(**small, num_hidden_layers=2)),
            "safety checker": StableDiffusionSafetyChecker(CLIPConfig()),
        }
        known = {
            "CLIP-L": CLIPTextModel(CLIPTextConfig(**small)),
            "CogVideoX": diffusers.AutoencoderKLCogVideoX(),
        }
    failures = []
    for name, module in built.items():
        facts = recognise_contents(Contents({key: tuple(value.shape) for key, value in module.state_dict().items()}))
        if facts.components or "does not run" not in verdict(facts):
            failures.append((name, verdict(facts)))
    for name, module in known.items():
        facts = recognise_contents(Contents({key: tuple(value.shape) for key, value in module.state_dict().items()}))
        if name not in verdict(facts):
            failures.append((name, verdict(facts)))
    assert not failures
