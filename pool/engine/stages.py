"""The three stages of an image on components that are ready to run, for one image or for several at once. Plain
functions; no memory is managed here.

Shape legend: B batch, L tokens, D text width, V width of a pooled text, C latent channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import Condition
from modelpool.pool.conditioning.first_frame import told_of_beginning
from modelpool.pool.conditioning.image_concat import ToldImages, repeats_image, told_of_images
from modelpool.pool.conditioning.image_embeds import texts_read
from modelpool.pool.conditioning.micro_conditioning import extras_of
from modelpool.pool.conditioning.regions import NO_REGIONS, Regions, region_weights
from modelpool.pool.conditioning.starts import start_of
from modelpool.pool.controlnets.controlnet_run import controls_of
from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.core.family_facts import PLAIN_TEXT, LatentFacts, TextFacts
from modelpool.pool.core.sampling_facts import PLAIN_SAMPLING, SamplingFacts
from modelpool.pool.core.stage_params import (
    AudioSamples,
    Encoded,
    EncodeWork,
    Halfway,
    ImagePixels,
    Latent,
    Made,
    Mask,
    PixelArray,
    Result,
    RunHooks,
    SampleWork,
    Seen,
    VideoFrames,
)
from modelpool.pool.core.stopping import stop_check
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.guidance.call_model import ask, tokens_of, told_beside, video_cells
from modelpool.pool.guidance.model_guiders import own_ways
from modelpool.pool.guidance.run import denoise_images
from modelpool.pool.models.text.text_conditioning import told_of
from modelpool.pool.models.text.vision_prompt import seeing
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.pixels.image_ops import HALF
from modelpool.pool.pixels.latent_pixels import decoded, encoded, sampled_shape
from modelpool.pool.sampling.noise import ImageNoise
from modelpool.pool.sampling.partial_run import handed_on, part_of
from modelpool.pool.sampling.schedules import sigma_table
from modelpool.pool.specs.spec import Division
from modelpool.pool.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.text.embeddings import Embedding
from modelpool.pool.text.encode import AnyTokenizer, ReadText, match_lengths, read_texts
from modelpool.pool.text.image_tokens import SeenImage
from modelpool.pool.text.reading import Reading, with_layers_skipped


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """One of a model's text encoders, and how it is read. `place` is its place among those that models of its family
    have, `name` what embeddings call it; `tokenizer` is what it reads with where that is not CLIP's."""

    patcher: ModelPatcher
    facts: TextFacts | Reading = PLAIN_TEXT
    place: int = 0
    tokenizer: AnyTokenizer | None = None
    name: str = "clip_l"


def encode(
    work: EncodeWork, encoders: Sequence[TextEncoder], tokenizer: ClipTokenizer, hooks: RunHooks, text_set: str = ""
) -> Encoded:
    """The text of `work` as the diffusion model reads it: what `encoders` read, side by side or, with `text_set`, put
    together as that family of models has it. One step. Raises Stopped at a layer."""
    return encode_together((work,), encoders, tokenizer, hooks, text_set)[0]


def encode_together(
    works: Sequence[EncodeWork],
    encoders: Sequence[TextEncoder],
    tokenizer: ClipTokenizer,
    hooks: RunHooks,
    text_set: str = "",
    embeddings: Sequence[Embedding] = (),
    images: Sequence[Seen] = (),
) -> tuple[Encoded, ...]:
    """`encode` for each of `works`, which differ in their texts, in one run. `embeddings` are those that the texts
    name, `pictures` those that the text encoders are shown among the words."""
    texts, negative, read = [work.text for work in works], [work.is_negative for work in works], []
    for encoder in encoders:
        facts = with_layers_skipped(encoder.facts, works[0].layers_skipped)
        if isinstance(facts, Reading):
            facts = seeing(facts, len(images), works[0].numbered)
        with encoder.patcher.running(stop_check(hooks)) as module:
            own, known = encoder.tokenizer or tokenizer, {}
            if embeddings and isinstance(own, ClipTokenizer):
                config: Any = module.config  # transformers is not typed
                known = {each.name: each.for_encoder(encoder.name, config.hidden_size) for each in embeddings}
            device = encoder.patcher.device
            shown = [SeenImage(torch.from_numpy(each.states_LD.copy()), *each.grid) for each in images]
            sees = isinstance(facts, Reading) and facts.sees
            how: dict[str, Any] = {"embeddings": known, "negative": negative, "images": shown if sees else ()}
            read.append(read_texts(module, own, texts, device, facts, **how))
    hooks.on_step(1, 1)
    by_text = list(zip(*read, strict=True))
    if text_set:
        places = [encoder.place for encoder in encoders]
        return tuple(_told(text_set, dict(zip(places, parts, strict=True))) for parts in by_text)
    return tuple(_encoded(parts) for parts in by_text)


def _told(text_set: str, parts: Mapping[int, ReadText]) -> Encoded:
    """What a family of models is told of one text, read by the encoders that are there."""
    members = readings_of(text_set)
    assert members is not None, f"nothing says how the texts of {text_set} are read"
    told = {
        name: value[0].to("cpu")
        for name, value in told_of(text_set, [parts.get(i) for i in range(len(members))]).items()
    }
    context, pooled = told.pop("context"), told.pop("pooled", None)
    others = {name: value.numpy() for name, value in told.items()}
    return Encoded(context.numpy(), None if pooled is None else pooled.numpy(), others)


def _encoded(parts: Sequence[ReadText]) -> Encoded:
    """What the text encoders read of one text."""
    context_LD = torch.cat([part.context_LD.to("cpu") for part in parts], dim=-1)
    pooled = [part.pooled_V.to("cpu") for part in parts if part.pooled_V is not None]
    return Encoded(context_LD.numpy(), torch.cat(pooled).numpy() if pooled else None)


def sample(
    work: SampleWork,
    inputs: tuple[Result, ...],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
) -> Latent:
    """Denoise the latent of `work` from its seed, and from what it starts from. Raises Stopped at a step or layer.

    With `division.batch` 1 the two texts run apart, each at its own length. `facts` are those of the model.
    """
    (made,) = sample_together((work,), (inputs,), diffusion_model, latent, hooks, division, facts)
    assert isinstance(made, Latent), f"a part of a run leaves no latent that can be decoded: {work}"
    return made


def sample_together(
    works: Sequence[SampleWork],
    inputs: Sequence[Sequence[Result]],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
    controls: Sequence[ModelPatcher] = (),
) -> tuple[Latent | Halfway, ...]:
    """`sample` for each of `works`, which differ in their seeds and texts, in one run: `denoise_images`. `controls`
    are the ControlNets that the works name. What is to go on with another model is `Halfway`.

    All prompts have one length, and so have all negative prompts. Raises CorruptFile when one of the latents is not
    finite, whichever that is.
    """
    work = works[0]
    most_at_once = 0 if division is None else division.batch
    shape_CHW = sampled_shape(work, latent)
    cells = latent.sides(work.width, work.height)
    start, shown = start_of(works, inputs, cells), told_of_images(works, inputs, facts, latent, cells)
    cond, uncond, regions = _conditions(works, inputs, most_at_once != 1, facts, shown, cells)
    speaking = controls_of(works, inputs, controls, latent, cond, stop_check(hooks))
    dtype = diffusion_model.compute_dtype
    with diffusion_model.running(stop_check(hooks)) as module:

        def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, **told: Tensor) -> Tensor:
            x_BCHW, context_BLD = x_BCHW.to(dtype), context_BLD.to(dtype)
            said = speaking.residuals(module, x_BCHW, timestep_B, context_BLD, told)
            return ask(facts, module, x_BCHW, timestep_B, context_BLD, told, said)

        device = diffusion_model.device
        options, part = diffusion_model.model_options, part_of(works, inputs, device)
        samples_BCHW = denoise_images(
            predict_noise,
            work,
            [each.seed for each in works],
            shape_CHW,
            cond,
            uncond,
            device,
            speaking.counting(hooks),
            table=sigma_table(facts.noise, tokens_of(facts, work), work.steps),
            options=options,
            most_at_once=most_at_once,
            inpainting=start.inpainting,
            prediction=facts.prediction,
            start_BCHW=start.latent_BCHW,
            regions=regions,
            without_image=shown.without,
            ways=own_ways(facts, work, cond, len(works), shape_CHW[1], device),
            part=part,
        )
    if not torch.isfinite(samples_BCHW).all():
        loras = "".join(f" with LoRA {lora.name!r} at {lora.strength}" for lora in work.loras)
        raise CorruptFile(f"model {work.model.name!r}{loras}: found a latent with NaN or infinity, expected numbers")
    if part is not None and not work.low_noise:
        return handed_on(samples_BCHW, part.memory)
    kept_BCHW = samples_BCHW[:, :, work.leading - work.leading_made :].contiguous()
    return tuple(Latent(samples_CHW.numpy()) for samples_CHW in kept_BCHW.unbind())


def _conditions(
    works: Sequence[SampleWork],
    inputs: Sequence[Sequence[Result]],
    matched: bool,
    facts: SamplingFacts,
    shown: ToldImages,
    cells: tuple[int, int],
) -> tuple[Condition, Condition | None, Regions]:
    """What guides the run of these works: the prompts, the negative prompts and the texts of regions, with what the
    model is told beside."""
    read = [texts_read(work, each, facts) for work, each in zip(works, inputs, strict=True)]
    # repeating a text changes nothing where it is only looked at, as by UNets, and much where it looks back
    count = len(works[0].regions)
    own = [each[: len(each) - count] for each in read]
    texts = [_texts(each, matched and not facts.model) for each in own]
    cond_BLD, uncond_BLD = _stacked([cond for cond, _ in texts]), _stacked([uncond for _, uncond in texts])
    assert cond_BLD is not None, "sampling reads a prompt"
    width, height = works[0].width, works[0].height
    if facts.model:
        extras = [told_beside(facts, [each[place] for each in read], works[0]) for place in range(len(read[0]))]
    else:
        pooled = [_stacked([_pooled(each[place]) for each in read]) for place in range(len(read[0]))]
        extras = [extras_of(facts.size_conditions, p, width, height, 0 < n < len(own[0])) for n, p in enumerate(pooled)]
    extras = [{**told, **shown.told} for told in extras]
    if len(own[0]) > 1:
        extras[len(own[0]) - 1] |= shown.negative
    if works[0].imaged and facts.video is not None and not repeats_image(facts):
        first = torch.stack([torch.from_numpy(_latent_of(each).samples_CHW.copy()) for each in inputs])
        cells_of_time = video_cells(facts.video, works[0].frames) + works[0].leading
        beginning = told_of_beginning(facts.video, first, cells_of_time, works[0].ends)
        extras = [{**told, **beginning} for told in extras]
    cond, places = Condition(cond_BLD, extras=extras[0]), range(len(own[0]), len(read[0]))
    uncond = None if uncond_BLD is None else Condition(uncond_BLD, extras=extras[len(own[0]) - 1])
    regional = tuple(
        Condition(_stacked_texts([each[place] for each in read]), extras=extras[place]) for place in places
    )
    if not regional:
        return cond, uncond, NO_REGIONS
    holes = int(works[0].has_hole)
    masks = [[one for one in each if isinstance(one, Mask)][holes:] for each in inputs]
    return cond, uncond, Regions(regional, region_weights(works[0].regions, masks, cells))


def _latent_of(read: Sequence[Result]) -> Latent:
    """The one latent that a video is begun with; another number of them is our mistake."""
    (found,) = [one for one in read if isinstance(one, Latent)]
    return found


def _stacked_texts(texts: Sequence[Encoded]) -> Tensor:
    """Texts of one length, one for each image, as a batch."""
    return torch.stack([torch.from_numpy(text.context_LD.copy()) for text in texts])


def decode(
    sampled: Latent, vae: ModelPatcher, latent: LatentFacts, hooks: RunHooks, division: Division | None = None
) -> ImagePixels:
    """Turn a latent into pixels. One step, or one for each tile. Raises Stopped at a tile or layer.

    With `division.tile` by tiles of that edge, which share a quarter of it; a tile as large as the latent changes
    nothing.
    """
    image = decode_together((sampled,), vae, latent, hooks, division)[0]
    assert isinstance(image, ImagePixels), "a video's latent is decoded to a video: `decode_together`"
    return image


def decode_together(
    sampled: Sequence[Latent],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
    frame_rate: float = 0.0,
    seconds: float = 0.0,
    leading: int = 0,
) -> tuple[Made, ...]:
    """`decode` for each of `sampled`, latents of one size, in one run; those of videos become videos, those of audio
    audio clips of so many `seconds`. So many frames at the beginning, `leading`, are left out."""
    scaled_BC = torch.stack([torch.from_numpy(each.samples_CHW.copy()) for each in sampled])
    pixels_BC = decoded(scaled_BC, vae, latent, hooks, division)
    if latent.audio is not None:
        rate = latent.audio.samples_per_second
        return tuple(_audio(audio_CS, int(seconds * rate), rate) for audio_CS in pixels_BC.unbind())
    if pixels_BC.dim() == 5:
        videos_BC = pixels_BC[:, :, leading:].unbind()
        return tuple(VideoFrames(_bytes(video_CTHW.permute(1, 2, 3, 0)), frame_rate) for video_CTHW in videos_BC)
    return tuple(ImagePixels(_bytes(image_CHW.permute(1, 2, 0))) for image_CHW in pixels_BC.unbind())


def vae_encode(
    image: ImagePixels,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    seed: int | None = None,
    division: Division | None = None,
    hidden: Mask | None = None,
    shaken: tuple[float, int] = (0.0, 0),
    bright: bool = False,
    black: bool = False,
) -> Latent:
    """Turn pixels into a latent in the diffusion model's own scale: the mean of what the VAE says, or, with `seed`, a
    sample of it by that seed's noise. One step, or one for each tile; `division.tile` is in latent cells here too.
    Pixels where `hidden` is at least half white are taken for grey, or `black`. `shaken` is how much noise is on the
    pixels, which go from -1 to 1, and its seed; `bright` as of `EncodeImageWork`.

    Raises UnusableField for a size that is no whole number of latent cells, CorruptFile for a result with NaN or
    infinity, and Stopped at a tile or layer.
    """
    pixels_BCHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1)[None].float()
    # Source: the inference code of Stability-AI/sd3.5, for edges: 255 times an image from 0 to 1, halved, and a half
    pixels_BCHW = pixels_BCHW * 0.5 + 0.5 if bright else pixels_BCHW / 127.5 - 1.0
    strength, own_seed = shaken
    if strength:
        pixels_BCHW = pixels_BCHW + strength * ImageNoise(own_seed).draw(tuple(pixels_BCHW.shape))
    if hidden is not None:
        pixels_BCHW = pixels_BCHW.masked_fill(torch.from_numpy(hidden.values_HW >= HALF), -1.0 if black else 0.0)
    noise = None if seed is None else ImageNoise(seed)
    return _finite_latent(encoded(pixels_BCHW, vae, latent, hooks, noise, division), vae)


def vae_encode_beginning(
    image: ImagePixels,
    frames: int,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
    last: ImagePixels | None = None,
) -> Latent:
    """The latent of a video of so many frames, of which `image` is the first, `last` the last, and the others are
    grey. As `vae_encode`."""
    first_CHW = torch.from_numpy(image.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    video_BCTHW = torch.zeros((1, first_CHW.shape[0], frames, *first_CHW.shape[1:]))
    video_BCTHW[0, :, 0] = first_CHW
    if last is not None:
        video_BCTHW[0, :, -1] = torch.from_numpy(last.pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    return _finite_latent(encoded(video_BCTHW, vae, latent, hooks, None, division), vae)


def _finite_latent(samples_BC: Tensor, vae: ModelPatcher) -> Latent:
    if not torch.isfinite(samples_BC).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected numbers")
    return Latent(samples_BC[0].contiguous().numpy())


def _texts(inputs: tuple[Encoded, ...], matched: bool) -> tuple[Tensor, Tensor | None]:
    """The prompt and the negative prompt of one image; `matched` brings them to one length where that can be."""
    contexts = [torch.from_numpy(i.context_LD.copy()) for i in inputs]
    cond_LD, uncond_LD = contexts[0], contexts[1] if len(contexts) > 1 else None
    if uncond_LD is None or not matched:
        return cond_LD, uncond_LD
    return match_lengths(cond_LD, uncond_LD)


def _pooled(text: Encoded) -> Tensor | None:
    return None if text.pooled_V is None else torch.from_numpy(text.pooled_V.copy())


def _stacked(texts: Sequence[Tensor | None]) -> Tensor | None:
    """Texts of one length as a batch; None when there are none."""
    found = [text_LD for text_LD in texts if text_LD is not None]
    assert len(found) in (0, len(texts)), "some images of a batch are told what others are not"
    return torch.stack(found) if found else None


def _audio(samples_CS: Tensor, count: int, samples_per_second: int) -> AudioSamples:
    """The first `count` samples of what a VAE made, or all where there are fewer."""
    return AudioSamples(samples_CS[:, :count].T.float().contiguous().numpy(), samples_per_second)


def _bytes(pixels: Tensor) -> PixelArray:
    """Pixels of what a VAE made, which goes from -1 to 1."""
    found: PixelArray = pixels.add(1).mul(127.5).clamp(0, 255).round().to(torch.uint8).contiguous().numpy()
    return found
