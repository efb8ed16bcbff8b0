"""What every family with a module of its own has to show, on a tiny model: texts, latents and images of its pipeline in
diffusers, both namings of its file, folders that diffusers loads, LoRAs, and the file again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.loading.build_checkpoint import Checkpoint, open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.stage_params import Encoded
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_transformers_as_folders import assert_loaded, assert_same_model
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, seeded
from tests.pool.families.whole_transformer import PROMPT, SEED, STEPS, Whole


@dataclass(frozen=True)
class Compared:
    """A family, and its pipeline.

    tiny      a tiny model
    pipeline  the class, which folders of this family name
    latent    the latent that the pipeline samples, of the same model, texts and noise
    texts     what the pipeline's `encode_prompt` returns for a prompt, by our names, given the text encoders
    lora      a weight under its published name, and the form of the names in LoRA files
    steps     of the run
    decode    pixels of a latent [1,C,H,W], as the pipeline decodes it, [1,3,H,W]; None: what its VAE makes of the
              latent without its scale
    """

    tiny: TinyFamily
    pipeline: type
    latent: Callable[[Whole, tuple[Encoded, ...]], Tensor]
    texts: Callable[[list[Any], str], dict[str, Tensor]]
    lora: tuple[str, str]
    steps: int = STEPS
    decode: Callable[[Whole, Tensor], Tensor] | None = None

    def check_run(self, folder: Path) -> None:
        """Texts, latents and images are those of the pipeline."""
        whole = Whole(folder, self.tiny)
        texts = whole.texts()
        modules = [whole.module(role) for role in whole.family.text_encoders]
        with torch.no_grad():
            theirs = self.texts(modules, PROMPT)
            expected = self.latent(whole, texts)
        own = {"context": texts[0].context_LD, "pooled": texts[0].pooled_V, **texts[0].others}
        for name, states in theirs.items():
            np.testing.assert_allclose(own[name], states[0].numpy(), rtol=1e-4, atol=2e-5, err_msg=name)
        latent = whole.latent(texts, steps=self.steps)
        # guidance scales rounding, and the weights of text encoders follow from the vocabularies of all families
        atol = 2e-4 * max(1.0, float(expected.std()))
        np.testing.assert_allclose(latent.samples_CHW, expected[0], atol=atol)
        facts = whole.opened.latent
        with torch.no_grad():
            if self.decode is not None:
                decoded = self.decode(whole, expected)
            else:
                decoded = whole.module(Role.VAE).decode(expected / facts.scaling_factor + facts.shift).sample
        pixels = (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
        assert np.abs(whole.pixels(latent) / 255 - pixels).max() <= 1 / 255
        whole.engine.close()

    def check_namings(self) -> None:
        """Both namings give the same class, arguments and weights; none of the published tensors is left over."""
        module = seeded(self.tiny.model, 1)
        state = module.state_dict()
        for naming, file in (("published", self.tiny.publish(state)), ("diffusers", dict(state))):
            plan = plan_diffusion_model({key: tuple(value.shape) for key, value in file.items()})
            assert plan.recognised.name == self.tiny.name, naming
            assert issubclass(plan.architecture.module, type(module)), naming
            assert not plan.key_map.unused, naming
            theirs: Any = module.config
            differing = {
                name: (value, theirs[name]) for name, value in plan.config.items() if not _is_equal(value, theirs[name])
            }
            assert not differing, naming
            built = plan.build(file).state_dict()
            assert built.keys() == state.keys(), naming
            assert all(torch.equal(built[key], state[key]) for key in state), naming

    def check_files(self, folder: Path) -> None:
        """The file saved again is that file; saved as a folder of diffusers, its classes load every tensor, and this
        project reads the folder as what the file was."""
        path = folder / "tiny.safetensors"
        save_file(self.tiny.file(), path)
        write_tokenizers(folder, self.tiny)
        checkpoint: Checkpoint = open_checkpoint(path)
        again = folder / "again.safetensors"
        save_checkpoint(checkpoint, again)
        before, after = load_file(path), load_file(again)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        save_diffusers(checkpoint, folder / "folder")
        index = json.loads((folder / "folder/model_index.json").read_text())
        assert index["_class_name"] == self.pipeline.__name__
        assert_loaded(checkpoint, folder / "folder")
        assert_same_model(checkpoint, open_checkpoint(folder / "folder"))

    def check_lora(self, folder: Path) -> None:
        """A LoRA on the diffusion model gives what the file with the merged LoRA gives."""
        weight, form = self.lora
        for name in ("plain", "loras", "merged"):
            (folder / name).mkdir()
        whole = Whole(folder / "plain", self.tiny)
        prefix = whole.family.prefixes[Role.DIFFUSION_MODEL]
        rows, columns = whole.opened.checkpoint.shapes[f"{prefix}{weight}.weight"]
        generator = torch.Generator().manual_seed(3)
        up, down = torch.randn(rows, 2, generator=generator) * 0.05, torch.randn(2, columns, generator=generator)
        base = form.format(weight)
        save_file({f"{base}.lora_B.weight": up, f"{base}.lora_A.weight": down}, folder / "loras/some.safetensors")
        lora = Catalog((folder / "plain",), (folder / "loras",), "cpu").find_lora("some", 0.8)
        texts = whole.texts()
        without, patched = (whole.latent(texts, loras, steps=2).samples_CHW for loras in ((), (lora,)))
        save_checkpoint(whole.opened, folder / "merged/tiny.safetensors", loras=(lora,))
        whole.engine.close()
        merged = Whole(folder / "merged", self.tiny, write=False)
        expected = merged.latent(texts, steps=2).samples_CHW
        merged.engine.close()
        assert not np.allclose(without, expected, atol=1e-3)
        np.testing.assert_allclose(patched, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


def check_lora_of_requests(folder: Path, tiny: TinyFamily, lora: tuple[str, str], **fields: Any) -> None:
    """`Compared.check_lora` for a model that requires an image or a video: by requests with these fields."""
    for name in ("plain", "loras", "merged"):
        (folder / name).mkdir()
    plain = TinyFamilyModel(folder / "plain", tiny, loras=(folder / "loras",))
    weight, form = lora
    opened, generator = plain.engine._opened(plain.model), torch.Generator().manual_seed(3)
    rows, columns = opened.checkpoint.shapes[f"{plain.family.prefixes[Role.DIFFUSION_MODEL]}{weight}.weight"]
    up, down = torch.randn(rows, 2, generator=generator) * 0.2, torch.randn(2, columns, generator=generator) * 0.2
    base = form.format(weight)
    save_file({f"{base}.lora_B.weight": up, f"{base}.lora_A.weight": down}, folder / "loras/some.safetensors")
    without, patched = (plain.made(**fields, **how).latents[0] for how in ({}, {"loras": ["some:0.8"]}))
    found = Catalog((folder / "plain",), (folder / "loras",), "cpu").find_lora("some", 0.8)
    save_checkpoint(opened, folder / "merged/tiny.safetensors", loras=(found,))
    plain.close()
    write_tokenizers(folder / "merged", tiny)
    merged = TinyModel.of_folder(folder / "merged")
    expected = merged.made(**fields).latents[0]
    merged.close()
    assert not torch.allclose(without, expected, atol=1e-3)
    torch.testing.assert_close(patched, expected, rtol=0.0, atol=2e-5 * max(1.0, float(expected.abs().max())))


class FamilyTests:
    """The tests of a family; a class of its test module inherits them and sets `case`."""

    case: Compared

    @pytest.mark.counted
    @pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
    def test_texts_latents_and_images_are_those_of_the_pipeline(self, tmp_path: Path) -> None:
        self.case.check_run(tmp_path)

    def test_both_namings_are_one_model(self) -> None:
        self.case.check_namings()

    def test_files_and_folders_are_the_same_model(self, tmp_path: Path) -> None:
        self.case.check_files(tmp_path)

    def test_a_lora_gives_what_the_merged_file_gives(self, tmp_path: Path) -> None:
        self.case.check_lora(tmp_path)


def noise_of(whole: Whole) -> Tensor:
    """The noise that a run starts from, [1,C,H,W]."""
    width, height, duration = whole.extent
    frames = whole.frames + duration.get("leading", 0) * whole.opened.latent.frames_per_cell
    return ImageNoise(SEED).draw((1, *latent_shape(width, height, frames, whole.opened.latent)))


def states(text: Encoded) -> Tensor:
    """The states of a text, [1,L,D]."""
    return torch.from_numpy(text.context_LD)[None]


def timestep_read(
    forward: Callable[..., Tensor], module: Any, x_BCHW: Tensor, level_B: Tensor, kwargs: dict[str, Tensor]
) -> Tensor:
    """The timesteps that `forward` passes to `module`."""
    read: list[Tensor] = []

    def call(**inputs: Any) -> tuple[Tensor]:
        read.append(inputs["timestep"])
        return (inputs["hidden_states"],)

    module.forward = call
    forward(module, x_BCHW, level_B, kwargs)
    return read[0]


def _is_equal(ours: object, theirs: object) -> bool:
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return ours == theirs


def check_texts_of_a_batch(
    module: Any, tokenizer: TextTokenizer, reading: Reading, alone: Callable[[list[Any], str], dict[str, Tensor]]
) -> None:
    """Texts of a batch are those that `alone` returns for each, also of an empty text, and of one that is padded."""
    prompts = ("a cat", "", "two cats and a dog " * 9)
    for prompt, found in zip(
        prompts, read_texts(module, tokenizer, prompts, torch.device("cpu"), reading), strict=True
    ):
        torch.testing.assert_close(found.context_LD, alone([module], prompt)["context"][0], rtol=1e-4, atol=2e-5)


def check_texts_of_two_lengths(forward: Callable[..., Tensor], module: Any, channels: int) -> None:
    """A prediction for a text that is padded, next to a longer one, is that for the text alone."""
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, channels, 4, 6, generator=generator), torch.randn(2, 9, WIDTH, generator=generator)
    level, mask = torch.tensor([0.4, 0.7]), torch.arange(9)[None] < torch.tensor([[9], [4]])
    both = forward(module, x, level, {"context": text, "context_mask": mask})
    alone = forward(module, x[1:], level[1:], {"context": text[1:, :4]})
    torch.testing.assert_close(both[1:], alone)
