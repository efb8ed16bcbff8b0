"""Trains a small IP-Adapter and T2I-Adapter for the example model: python -m scripts.train_shape_adapters --out FOLDER

Writes ipadapter/shapes.safetensors with its vision encoder in clip_vision/shapes/, and
t2i_adapter/silhouette.safetensors (layouts of h94/IP-Adapter and TencentARC). The diffusion model does not change.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import T2IAdapter
from diffusers.models.embeddings import ImageProjection
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from examples.shapes import drawing
from modelpool.pool.models.components.vision.preprocess import DEVIATIONS, MEANS
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from scripts.shapes_training import diffusion, evaluate, text, vae

SEED, IMAGES, BATCH, RATE = 20261124, 768, 16, 2e-3
#: share of steps in which the adapter sees no image, and no text
WITHOUT_IMAGE, WITHOUT_TEXT = 0.1, 0.5
PROJECTED, TOKENS = 64, 4


def draw_pairs(model: Any, count: int) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Return latents, pixels from 0 to 1, silhouettes and captions of random scenes with one shape anywhere."""
    rng = np.random.default_rng(SEED)
    scenes = []
    for _ in range(count):
        scene = drawing.random_scene(rng)
        (shape,) = scene.shapes
        x, y = rng.uniform(20, 44, size=2)
        moved = drawing.ShapeInScene(shape.colour, shape.shape, x, y, rng.uniform(11, 18))
        scenes.append(drawing.Scene((moved,)))
    images = np.stack([drawing.draw(scene) for scene in scenes])
    masks = np.stack([drawing.signed_distance(scene.shapes[0], drawing.SIDE_PIXELS) < 0 for scene in scenes])
    latents = [
        vae.encode_all(model.vae, vae.to_tensor(list(images[start : start + 64]))) * evaluate.LATENT_SCALE
        for start in range(0, count, 64)
    ]
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    silhouettes = torch.from_numpy(masks).float()[:, None].expand(-1, 3, -1, -1)
    return torch.cat(latents), pixels, silhouettes, [drawing.caption(scene) for scene in scenes]


def contexts(model: Any, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Return the states of the distinct captions, the empty one first, and the row of each caption."""
    tokenizer = ClipTokenizer.load()
    distinct = ["", *sorted(set(captions))]
    rows = text.token_rows(distinct, evaluate_encode(tokenizer))
    with torch.no_grad():
        states = model.encoder(rows).last_hidden_state
    place = {caption: row for row, caption in enumerate(distinct)}
    return states, torch.tensor([place[caption] for caption in captions])


def evaluate_encode(tokenizer: ClipTokenizer) -> text.Encode:
    """Return the encoding of a caption as the training of the model uses it."""
    return tokenizer.encode


def normalised(pixels_BCHW: Tensor) -> Tensor:
    """Return pixels as CLIP's vision encoders read them."""
    means, deviations = (torch.tensor(values)[:, None, None] for values in (MEANS, DEVIATIONS))
    return (pixels_BCHW - means) / deviations


def new_encoder() -> CLIPVisionModelWithProjection:
    """Return a vision encoder for images of the example model, from random weights."""
    config = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, hidden_act="gelu",
        image_size=drawing.SIDE_PIXELS, patch_size=16, projection_dim=PROJECTED,
    )  # fmt: skip
    return CLIPVisionModelWithProjection(config)


def train_ip_adapter(model: Any, steps: int, out: Path) -> None:
    """Train an IP-Adapter and its encoder to reproduce the image that they see."""
    latents, pixels, _, captions = draw_pairs(model, IMAGES)
    states, caption_of = contexts(model, captions)
    encoder, unet = new_encoder(), model.unet.requires_grad_(False)
    width = unet.config.cross_attention_dim
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    table: dict[str, Tensor] = {}
    for place, name in enumerate(names):
        attention = unet.get_submodule(name.removesuffix(".processor"))
        table[f"{2 * place + 1}.to_k_ip.weight"] = attention.to_k.weight.detach().clone()
        table[f"{2 * place + 1}.to_v_ip.weight"] = torch.zeros_like(attention.to_v.weight)
    projection = ImageProjection(PROJECTED, width, TOKENS)
    plain = {k.replace("image_embeds", "proj"): v.detach() for k, v in projection.state_dict().items()}
    unet._load_ip_adapter_weights([{"image_proj": plain, "ip_adapter": table}], low_cpu_mem_usage=False)
    processors = [unet.attn_processors[name] for name in names]
    own = [*unet.encoder_hid_proj.parameters(), *(p for each in processors for p in each.parameters())]
    parameters = [p.requires_grad_(True) for p in (*own, *encoder.parameters())]
    alphas = diffusion.signal_shares()

    def loss_of_step() -> Tensor:
        chosen = torch.randint(0, len(latents), (BATCH,))
        rows = caption_of[chosen].clone()
        rows[torch.rand(BATCH) < WITHOUT_TEXT] = 0
        embeds = encoder(normalised(pixels[chosen])).image_embeds
        seen = embeds * (torch.rand(BATCH, 1) >= WITHOUT_IMAGE)
        given = {"added_cond_kwargs": {"image_embeds": [seen[:, None]]}}
        return noise_loss(unet, latents[chosen], states[rows], alphas, given)

    optimise(parameters, loss_of_step, steps, "ip-adapter")
    found = {
        f"image_proj.{k.replace('image_projection_layers.0.', '').replace('image_embeds', 'proj')}": v
        for k, v in unet.encoder_hid_proj.state_dict().items()
    }
    for place, processor in enumerate(processors):
        found[f"ip_adapter.{2 * place + 1}.to_k_ip.weight"] = processor.to_k_ip[0].weight
        found[f"ip_adapter.{2 * place + 1}.to_v_ip.weight"] = processor.to_v_ip[0].weight
    save({k: v.detach() for k, v in found.items()}, out / "ipadapter" / "shapes.safetensors")
    level = "" if any(k.startswith("vision_model.") for k in encoder.state_dict()) else "vision_model."
    named = {k if k.startswith("visual_projection") else level + k: v for k, v in encoder.state_dict().items()}
    save(named, out / "clip_vision" / "shapes" / "model.safetensors")
    (out / "clip_vision" / "shapes" / "config.json").write_text(json.dumps({"num_attention_heads": 4}) + "\n")


def train_t2i_adapter(model: Any, steps: int, out: Path) -> None:
    """Train a T2I-Adapter that places and shapes the object by a silhouette."""
    latents, _, silhouettes, captions = draw_pairs(model, IMAGES)
    states, caption_of = contexts(model, captions)
    unet = model.unet.requires_grad_(False)
    adapter = T2IAdapter(3, list(unet.config.block_out_channels), 2, 8, "full_adapter")
    alphas = diffusion.signal_shares()

    def loss_of_step() -> Tensor:
        chosen = torch.randint(0, len(latents), (BATCH,))
        given = {"down_intrablock_additional_residuals": list(adapter(silhouettes[chosen]))}
        return noise_loss(unet, latents[chosen], states[caption_of[chosen]], alphas, given)

    optimise(list(adapter.parameters()), loss_of_step, steps, "t2i-adapter")
    found = {}
    for key, tensor in adapter.state_dict().items():
        name = key.removeprefix("adapter.")
        if match := re.match(r"body\.(\d+)\.resnets\.(\d+)\.(.*)", name):
            name = f"body.{2 * int(match[1]) + int(match[2])}.{match[3]}"
        elif match := re.match(r"body\.(\d+)\.in_conv\.(.*)", name):
            name = f"body.{2 * int(match[1])}.in_conv.{match[2]}"
        found[name] = tensor
    save(found, out / "t2i_adapter" / "silhouette.safetensors")


def noise_loss(unet: Any, latents: Tensor, context: Tensor, alphas: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the mean squared error of the predicted noise, with the adapter's inputs `given`."""

    class Adapted(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return unet(*inputs, **given)

    return diffusion.noise_loss(Adapted(), latents, context, alphas)


def optimise(parameters: list[Any], loss_of_step: Any, steps: int, stage: str) -> None:
    """Run the steps; print every 50th loss."""

    def log(name: str, step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"{name} step {step}: loss {loss:.4f}", flush=True)

    diffusion.optimise(parameters, loss_of_step, steps, RATE, stage, log)


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file in half precision. Creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, path)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def main() -> None:
    """Train both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("examples/shapes"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", choices=("ip", "t2i"))
    options = parser.parse_args()
    torch.manual_seed(SEED)
    for kind, train in (("t2i", train_t2i_adapter), ("ip", train_ip_adapter)):
        if options.only in (None, kind):
            train(evaluate.load_model(Path("examples/shapes/models/shapes.safetensors")), options.steps, options.out)


if __name__ == "__main__":
    main()
