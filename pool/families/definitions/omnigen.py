"""OmniGen: a language model that reads words, reference images and the patches of the output. Torch-free.

There is no text encoder: the table of words of the model is one here. A prompt names each reference image, which takes
the place of its name; a prompt without names gets them in front. Words attend to what precedes them, patches of an
image to each other too. Each text runs by itself, as in the original code. diffusers' pipeline runs all as a batch,
and gives each the positions of the first: if that is shorter than another one, their predictions differ from the
original.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import OMNIGEN
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import references
from modelpool.pool.values.core.errors import UnknownArchitecture

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of a head, which no shape determines
_HEAD = 96
#: row of the padding token in the table of words
_PAD = 32000
#: most tokens, and pixels along a side of a reference image
_TOKENS, _MOST_SIDE = 131072, 1024
_TEMPLATE = (
    "<|user|>\nGenerate an image according to the following instructions\n{}<|end|>\n<|assistant|>\n<|diffusion|>"
)
#: what the pipeline avoids in all images
_NEGATIVE = (
    "low quality, jpeg artifacts, ugly, duplicate, morbid, mutilated, extra fingers, mutated hands, poorly drawn hands,"
    " poorly drawn face, mutation, deformed, blurry, dehydrated, bad anatomy, bad proportions, extra limbs, cloned"
    " face, disfigured, gross proportions, malformed limbs, missing arms, missing legs, extra arms, extra legs, fused"
    " fingers, too many fingers."
)
#: factors of the wavelengths of positions, in sequences up to 4,096 tokens and in longer ones. Source: config.json of
#: microsoft/Phi-3-mini-128k-instruct, from which the model was trained
_SHORT_FACTORS = (
    *(1.05, 1.05, 1.05, 1.1, 1.1, 1.1, 1.2500000000000002, 1.2500000000000002, 1.4000000000000004),
    *(1.4500000000000004, 1.5500000000000005, 1.8500000000000008, 1.9000000000000008, *(2.000000000000001,) * 19),
    *(2.1000000000000005, 2.1000000000000005, 2.2, *(2.3499999999999996,) * 4, 2.3999999999999995, 2.3999999999999995),
    *(2.6499999999999986, 2.6999999999999984, 2.8999999999999977, 2.9499999999999975, *(3.049999999999997,) * 3),
)
_LONG_FACTORS = (
    *(1.0299999713897705, 1.0499999523162842, 1.0499999523162842, 1.0799999237060547, 1.2299998998641968),
    *(1.2299998998641968, 1.2999999523162842, 1.4499999284744263, 1.5999999046325684, 1.6499998569488525),
    *(1.8999998569488525, 2.859999895095825, 3.68999981880188, 5.419999599456787, 5.489999771118164),
    *(5.489999771118164, 9.09000015258789, 11.579999923706055, 15.65999984741211, 15.769999504089355),
    *(15.789999961853027, 18.360000610351562, 21.989999771118164, 23.079999923706055, 30.009998321533203),
    *(32.35000228881836, 32.590003967285156, 35.56000518798828, 39.95000457763672, 53.840003967285156),
    *(56.20000457763672, 57.95000457763672, 59.29000473022461, 59.77000427246094, 59.920005798339844),
    *(61.190006256103516, 61.96000671386719, 62.50000762939453, 63.3700065612793, 63.48000717163086),
    *(63.48000717163086, 63.66000747680664, 63.850006103515625, 64.08000946044922, 64.760009765625),
    *(64.80001068115234, 64.81001281738281, 64.81001281738281),
)
#: published names, and names in diffusers
_OUTER: tuple[tuple[str, str], ...] = (
    ("pos_embed", "patch_embedding.pos_embed"),
    ("x_embedder.proj.", "patch_embedding.output_image_proj."),
    ("input_x_embedder.proj.", "patch_embedding.input_image_proj."),
    ("final_layer.adaLN_modulation.1.", "norm_out.linear."),
    ("final_layer.linear.", "proj_out."),
    ("time_token.mlp.0.", "time_token.linear_1."),
    ("time_token.mlp.2.", "time_token.linear_2."),
    ("t_embedder.mlp.0.", "t_embedder.linear_1."),
    ("t_embedder.mlp.2.", "t_embedder.linear_2."),
)
_LANGUAGE, _QUERIES = "llm.", ".self_attn.qkv_proj."


def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters. Source: diffusers' `convert_omnigen_to_diffusers.py`."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        bare = key.removeprefix(_LANGUAGE)
        if bare == key:
            old, new = next(((old, new) for old, new in _OUTER if key.startswith(old)), ("", ""))
            converted[new + key.removeprefix(old)] = tensor
        elif _QUERIES in bare:
            start, end = bare.split(_QUERIES)
            names = (f"{start}.self_attn.to_{part}.{end}" for part in "qkv")
            converted |= zip(names, tensor.chunk(3), strict=True)
        else:
            converted[bare.replace(".self_attn.o_proj.", ".self_attn.to_out.0.")] = tensor
    return converted


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.OmniGenTransformer2DModel`. Raises UnknownArchitecture for a width that is no
    multiple of a head's."""
    sizes: dict[str, Any] = dict(found)
    hidden, vocabulary = sizes["hidden_size"], sizes["vocabulary"]
    if hidden % _HEAD:
        raise UnknownArchitecture(f"OmniGen: found a width of {hidden}, expected a multiple of {_HEAD}")
    return {
        "in_channels": sizes["in_channels"],
        "patch_size": sizes["patch_size"],
        "hidden_size": hidden,
        "num_attention_heads": hidden // _HEAD,
        "num_key_value_heads": shapes["layers.0.self_attn.to_k.weight"][0] // _HEAD,
        "intermediate_size": shapes["layers.0.mlp.down_proj.weight"][1],
        "num_layers": sizes["depth"],
        "pad_token_id": min(_PAD, vocabulary - 1),
        "vocab_size": vocabulary,
        "rope_scaling": {"short_factor": list(_SHORT_FACTORS), "long_factor": list(_LONG_FACTORS), "type": "su"},
        "pos_embed_max_size": math.isqrt(shapes["patch_embedding.pos_embed"][1]),
        "time_step_dim": shapes["time_token.linear_1.weight"][1],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean; the module predicts clean - noise. Texts of a batch that name images in different places
    run one after the other."""
    import torch

    places = kwargs.get("image_places")
    rows: list[list[list[int]]] = [[]] if places is None else places.tolist()
    if all(row == rows[0] for row in rows):
        return _call(module, x_BCHW, level_B, kwargs, rows[0])
    alone = []
    for number, row in enumerate(rows):
        own = {name: value[number : number + 1] for name, value in kwargs.items()}
        alone.append(_call(module, x_BCHW[number : number + 1], level_B[number : number + 1], own, row))
    return torch.cat(alone)


def _call(
    module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs, places: Sequence[Sequence[int]]
) -> Tensor:
    """Predict noise - clean for texts that name images at these `places`: position and number of each."""
    import torch

    words_BLD, known, side = kwargs["context"], references(kwargs), fam.config_of(module).patch_size
    images = [known[number - 1] for _, number in places]
    length, spans = words_BLD.shape[1], list[tuple[int, int]]()
    for (place, _), image in zip(places, images, strict=True):
        start = place + length - words_BLD.shape[1]
        patches = _patches(image, side)
        spans.append((start, start + patches))
        length += patches - 1
    # the noise level is a token between the words and the patches of the output
    total = length + 1 + _patches(x_BCHW, side)
    return -fam.sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=1 - level_B,
            input_ids=words_BLD,
            input_img_latents=images,
            input_image_sizes=[place for place, _ in places],
            attention_mask=_mask(total, length, spans, x_BCHW.device),
            position_ids=torch.arange(total, device=x_BCHW.device)[None],
            return_dict=False,
        )
    )


def _patches(latent_BCHW: Tensor, side: int) -> int:
    height, width = latent_BCHW.shape[-2:]
    return int((height // side) * (width // side))


def _mask(total: int, length: int, spans: Sequence[tuple[int, int]], device: Any) -> Tensor:
    """Return which tokens each of `total` attends to, [1,1,N,N]: the tokens before it; images at `spans` to all of
    themselves, and patches of the output, which follow `length` tokens and the noise level, to all."""
    import torch

    place = torch.arange(total, device=device)
    attends_NN = (place[None] <= place[:, None]) | (place[:, None] > length)
    for start, stop in spans:
        inside = (place >= start) & (place < stop)
        attends_NN |= inside[:, None] & inside[None]
    return attends_NN[None, None]


FAMILIES = (
    fam.Family(
        name="omnigen",
        title="OmniGen",
        detect=fam.Detection(OMNIGEN, fam.anything, ""),
        build=fam.ModelBuild(
            "OmniGenTransformer2DModel",
            config,
            convert,
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"image_places", "reference"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "omnigen_words",
                    3072,
                    _TEMPLATE,
                    most_tokens=_TOKENS,
                    padding=fam.Padding.DROPPED,
                    names_images=True,
                ),
            ),
            words={fam.Naming.PUBLISHED: "llm.embed_tokens.", fam.Naming.DIFFUSERS: "embed_tokens."},
        ),
        latent="sdxl",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW),
            reads=frozenset({"context", "image_places", "reference"}),
            side_multiple=16,
            several_references=True,
            reference_side=_MOST_SIDE,
            defaults=fam.SamplingDefaults(
                steps=50,
                cfg=2.5,
                sampler="euler",
                schedule="simple",
                guidance=fam.Guidance.TEXT_AND_IMAGE,
                image_cfg=1.6,
                negative=_NEGATIVE,
            ),
            not_divided="its words see only the words before them",
        ),
        sources="diffusers' OmniGenPipeline; Shitao/OmniGen-v1",
        folder=fam.DiffusersFolder(
            "OmniGenPipeline",
            text_folders={fam.Role.TEXT_ENCODER: "transformer.embed_tokens"},
            scheduler_entries={"invert_sigmas": True, "num_train_timesteps": 1},
            shifts_by_size=False,
        ),
        lora=fam.TRANSFORMER,
    ),
)
