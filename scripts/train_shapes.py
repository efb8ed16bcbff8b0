"""Trains the example model and its LoRAs from scratch: python -m scripts.train_shapes --out examples/shapes

Defines the stages, their seeds and their budgets in steps. A stage writes a file to the work folder, and is skipped if
the file exists. The training itself is in `scripts.shapes_training`.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from examples.shapes.drawing import Background
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from scripts.shapes_training import diffusion, evaluate, ldm_names, lora, text, vae

LATENT_SCALE = evaluate.LATENT_SCALE
STAGES = ("model", "light", "outline", "report")
LORA_RANK = 8
LORA_ALPHA = 8.0
UNET_TARGETS = ("attentions.", "resnets.")
TEXT_TARGETS = ("self_attn.", "mlp.")


@dataclass(frozen=True, slots=True)
class Budget:
    """The seed, the steps of each stage and the number of drawn images they learn from."""

    seed: int = 20261121
    vae_steps: int = 1700
    vae_polish_steps: int = 400
    decoder_steps: int = 300
    unet_steps: int = 2200
    images: int = 5120
    lora_images: int = 1536


@dataclass(frozen=True, slots=True)
class LoraRecipe:
    """The style of a LoRA, the steps of each of its rounds, and whether it also changes the text encoder.

    shipped_alpha  written to the file; below the alpha of training where that measured better
    """

    number: int
    background: Background
    filled: bool
    text_too: bool
    round_steps: tuple[int, ...]
    shipped_alpha: float = LORA_ALPHA


RECIPES = {
    "light": LoraRecipe(4, "light", True, False, (300, 900, 900)),
    "outline": LoraRecipe(5, "dark", False, True, (1000, 700), shipped_alpha=7.0),
}


class LossLog:
    """Writes the mean loss of every 50 steps to a CSV file (stage, step, loss) and to the terminal."""

    EVERY = 50

    def __init__(self, path: Path, stage: str) -> None:
        rows = list(csv.reader(path.open())) if path.exists() else [["stage", "step", "loss"]]
        self.path, self.losses, self.started = path, list[float](), time.monotonic()
        self.rows = [row for row in rows if row[0] != stage]

    def __call__(self, stage: str, step: int, loss: float) -> None:
        """Record the loss of a step. Every 50 steps, rewrites the file and prints a line."""
        self.losses.append(loss)
        if step % self.EVERY:
            return
        mean = sum(self.losses) / len(self.losses)
        self.losses.clear()
        self.rows.append([stage, str(step), f"{mean:.5f}"])
        with self.path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(self.rows)
        print(f"{stage} step {step}: loss {mean:.4f}, {time.monotonic() - self.started:.0f} s", flush=True)


@dataclass(frozen=True, slots=True)
class Workshop:
    """Folders of the stages, their budget, and the tokenizer."""

    work: Path
    out: Path
    budget: Budget
    encode: text.Encode

    def log(self, stage: str) -> LossLog:
        """The loss curve of a stage, appended to those of the stages before it."""
        return LossLog(self.out / "training" / "loss.csv", stage)

    def description(self, title: str) -> dict[str, str]:
        """Metadata common to every file."""
        return {
            "format": "pt",
            "modelspec.title": title,
            "modelspec.license": "Apache-2.0",
            "modelspec.resolution": "64x64",
            "training.seed": str(self.budget.seed),
            "training.budget": str(asdict(self.budget)),
        }


def trained_vae(shop: Workshop) -> AutoencoderKL:
    """Stage 1: the autoencoder, with its latent scale folded in: unit-variance latents divided by LATENT_SCALE."""
    path, stage = shop.work / "vae.safetensors", "vae"
    model = AutoencoderKL(**vae.CONFIG).eval().requires_grad_(False)
    if path.exists():
        model.load_state_dict(load_file(path))
        return model
    seed = shop.budget.seed
    images = vae.training_images(4096, np.random.default_rng(seed))
    trained = vae.train(images, shop.budget.vae_steps, seed, shop.log(stage))
    trained.requires_grad_(True).train()
    vae.polish(trained, shop.budget.vae_polish_steps, 0.006, images, seed + 1, shop.log("vae polish"))
    trained.eval().requires_grad_(False)
    images = vae.training_images(512, np.random.default_rng(shop.budget.seed + 1))
    print(f"vae: {vae.psnr_decibels(trained, images):.1f} dB on unseen images")
    fold_scale(trained, 1 / (float(vae.encode_all(trained, images).std()) * LATENT_SCALE))
    save_file({name: value.contiguous() for name, value in trained.state_dict().items()}, path)
    model.load_state_dict(load_file(path))
    return model


def refined_vae(shop: Workshop) -> AutoencoderKL:
    """Stage 1b: the same latents, with a refined decoder; the module of stage 1 if the budget is 0."""
    path, steps = shop.work / "decoder.safetensors", shop.budget.decoder_steps
    model = trained_vae(shop)
    if steps and not path.exists():
        images = vae.training_images(2048, np.random.default_rng(shop.budget.seed + 7))
        latents = vae.encode_all(model, images)
        vae.refine_decoder(model, latents, images, steps, 0.004, shop.budget.seed + 7, shop.log("decoder"))
        unseen = vae.training_images(256, np.random.default_rng(shop.budget.seed + 8))
        print(f"decoder: {vae.psnr_decibels(model, unseen):.1f} dB on unseen images")
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    if path.exists():
        model.load_state_dict(load_file(path))
    return model


@torch.no_grad()
def fold_scale(model: AutoencoderKL, factor: float) -> None:
    """Multiply the latents by factor without changing a reconstruction. Modifies quant_conv and post_quant_conv."""
    channels = model.config.latent_channels
    model.quant_conv.weight[:channels] *= factor
    model.quant_conv.bias[:channels] *= factor
    model.quant_conv.bias[channels:] += 2 * math.log(factor)
    model.post_quant_conv.weight /= factor


def trained_base(shop: Workshop, autoencoder: AutoencoderKL) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """Stage 2: UNet and text encoder."""
    path, stage = shop.work / "base.safetensors", "text+unet"
    if not path.exists():
        rng = np.random.default_rng(shop.budget.seed + 2)
        examples = diffusion.make_examples(autoencoder, shop.budget.images, rng, LATENT_SCALE)
        modules = diffusion.train(examples, shop.encode, shop.budget.unet_steps, shop.budget.seed, shop.log(stage))
        state = {
            f"{number}.{name}": value.contiguous()
            for number, module in enumerate(modules)
            for name, value in module.state_dict().items()
        }
        save_file(state, path)
    stored = load_file(path)
    unet, encoder = UNet2DConditionModel(**diffusion.CONFIG), text.new_encoder()
    for number, module in enumerate((unet, encoder)):
        prefix = f"{number}."
        module.load_state_dict({name[2:]: value for name, value in stored.items() if name.startswith(prefix)})
        module.eval().requires_grad_(False)
    return unet, encoder


def export_model(shop: Workshop) -> None:
    """Stage 3: the SD1-layout file, from stages 1 and 2."""
    unet, encoder = trained_base(shop, trained_vae(shop))
    autoencoder = refined_vae(shop)
    tensors = ldm_names.single_file(
        unet.state_dict(),
        autoencoder.state_dict(),
        encoder.state_dict(),
        diffusion.CONFIG["layers_per_block"],
        len(vae.CONFIG["block_out_channels"]),
    )
    about = shop.description("Shapes") | {
        "modelspec.architecture": "stable-diffusion-v1",
        "modelspec.description": "A small example model: coloured circles, squares and triangles on a dark background.",
    }
    save(tensors, shop.out / "models" / "shapes.safetensors", about)


def export_lora(shop: Workshop, name: str) -> None:
    """Stages 4 and 5: one LoRA on the frozen base, in rounds with separate warm-up and cosine."""
    recipe = RECIPES[name]
    autoencoder = trained_vae(shop)
    unet, encoder = trained_base(shop, autoencoder)
    torch.manual_seed(shop.budget.seed + recipe.number)
    trained = lora.attach(unet, "lora_unet", UNET_TARGETS, LORA_RANK, LORA_ALPHA)
    if recipe.text_too:
        trained.include(lora.attach(encoder, "lora_te_text_model", TEXT_TARGETS, LORA_RANK, LORA_ALPHA))
    rng = np.random.default_rng(shop.budget.seed + recipe.number)
    count = shop.budget.lora_images
    lesson = lora.Lesson(
        diffusion.make_examples(autoencoder, count, rng, LATENT_SCALE, recipe.background, recipe.filled)
    )
    for number, steps in enumerate(recipe.round_steps, start=1):
        path, stage = shop.work / f"{name}-{number}.safetensors", f"lora {name} {number}"
        if not path.exists():
            torch.manual_seed(shop.budget.seed + 10 * recipe.number + number)
            lora.train(unet, encoder, trained, [lesson], [], shop.encode, steps, stage, shop.log(stage))
            save_file(trained.state(), path)
        trained.load(load_file(path))
        save_lora(shop, name, trained)


def save_lora(shop: Workshop, name: str, trained: lora.Lora) -> None:
    """Write one LoRA in kohya's layout and metadata. Sets the alpha of `trained` to the shipped one."""
    trained.alpha = RECIPES[name].shipped_alpha
    about = shop.description(f"Shapes: {name}") | {
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(trained.rank),
        "ss_network_alpha": str(trained.alpha),
        "ss_network_args": f'{{"conv_dim": "{trained.rank}", "conv_alpha": "{trained.alpha}"}}',
        "ss_base_model_version": "sd_v1",
        "ss_output_name": name,
        "ss_seed": str(shop.budget.seed),
    }
    save(trained.tensors(), shop.out / "loras" / f"{name}.safetensors", about)


def save(tensors: dict[str, torch.Tensor], path: Path, about: dict[str, str]) -> None:
    """Write a safetensors file under a temporary name, then rename it. Creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    save_file(tensors, temporary, metadata=about)
    temporary.chmod(0o644)
    temporary.replace(path)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {len(tensors)} tensors", flush=True)


def report(shop: Workshop, seeds: int) -> None:
    """Measure the exported files with every sampler, one line each. Prints, and writes sheets to the work folder."""
    settings: list[tuple[dict[str, float], Background, bool]] = [
        ({}, "dark", True),
        ({"light": 1.0}, "light", True),
        ({"light": 0.8}, "light", True),
        ({"outline": 1.0}, "dark", False),
        ({"outline": 0.8}, "dark", False),
        ({"light": 0.8, "outline": 0.8}, "light", False),
        ({"light": 1.0, "outline": 1.0}, "light", False),
    ]
    for strengths, background, filled in settings:
        paths = [shop.out / "loras" / f"{name}.safetensors" for name in strengths]
        if not all(path.exists() for path in paths):
            continue
        model = evaluate.load_model(shop.out / "models" / "shapes.safetensors")
        for path, strength in zip(paths, strengths.values(), strict=True):
            evaluate.merge_lora(model, path, strength)
        for sampler in evaluate.SAMPLERS:
            score, images, failures = evaluate.measure(model, shop.encode, sampler, seeds, background, filled)
            label = " + ".join(f"{name} {strength}" for name, strength in strengths.items()) or "model alone"
            print(
                f"{label} | {sampler} | {score.images} images | subject {score.subject:.3f} | "
                f"style {score.style:.3f} | both {score.both:.3f}",
                flush=True,
            )
            for caption, seed, reading in failures[:5]:
                print(f"    {caption!r}, seed {seed}: {reading}")
            sheet = images.reshape(-1, seeds, *images.shape[1:]).transpose(1, 2, 0, 3, 4)
            image = Image.fromarray(np.ascontiguousarray(sheet.reshape(seeds * sheet.shape[1], -1, 3)))
            image.save(shop.work / f"{label} {sampler}.png".replace(" ", "_").replace("+", "p").replace(",", ""))


def main() -> None:
    """Run the requested stages in order; by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("examples/shapes"), help="holds models/, loras/, training/")
    parser.add_argument("--work", type=Path, default=Path("build/shapes"), help="finished stages; remove to start over")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; results are reproducible for one number")
    parser.add_argument("--seeds", type=int, default=5, help="images per caption in the report")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for folder in (arguments.work, arguments.out / "training"):
        folder.mkdir(parents=True, exist_ok=True)
    shop = Workshop(arguments.work, arguments.out, Budget(), ClipTokenizer.load().encode)
    if "model" in arguments.stages:
        export_model(shop)
    for name in RECIPES:
        if name in arguments.stages:
            export_lora(shop, name)
    if "report" in arguments.stages:
        report(shop, arguments.seeds)


if __name__ == "__main__":
    main()
