"""From a model that predicts noise to a `denoise` that a sampler can step with, guided by a text.

Knows how a model is asked (scaled input, timestep), classifier-free guidance, and which sampler
functions of the run's options are called when; knows no sampler and no architecture.

Shape legend: B batch, C latent channels, H W latent height and width, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import COND, UNCOND, ApplyHooks, Batch, Condition, batches, joined_extras
from modelpool.pool.conditioning.micro_conditioning import Extras
from modelpool.pool.conditioning.regions import NO_REGIONS, Regions
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import KeptLength, Prediction
from modelpool.pool.guidance.apg import Lead, plainly_led
from modelpool.pool.guidance.cfg_rescale import with_length_of
from modelpool.pool.options.model_options import Args, ModelOptions
from modelpool.pool.options.run_context import call_facts
from modelpool.pool.options.transformer_options import TransformerOptions
from modelpool.pool.options.wrappers import WrapperPoint
from modelpool.pool.sampling.predictions import clean_latent, input_scale
from modelpool.pool.sampling.samplers import Denoise
from modelpool.pool.sampling.schedules import SigmaTable

#: (x_BCHW float32 of unit variance, timestep_B float32, context_BLD, extras by name) -> what the model predicts
#: [B, C, H, W], in any float dtype
PredictNoise: TypeAlias = Callable[..., Tensor]
Conditions: TypeAlias = Sequence[Condition | None]

#: wrappers that see predictions as clean latents
_CLEAN_POINTS = (WrapperPoint.CALC_COND_BATCH, WrapperPoint.APPLY_MODEL)


@dataclass(frozen=True, slots=True)
class WithoutImage:
    """The negative prompt as a model reads it that sees no image, and how strongly the image counts: so many times
    the way from what is guessed without it. Source: Brooks et al. 2023 (InstructPix2Pix), equation 3."""

    condition: Condition
    strength: float


def guided_denoiser(
    predict_noise: PredictNoise,
    table: SigmaTable,
    cond: Tensor | Condition,
    uncond: Tensor | Condition | None,
    cfg: float,
    options: ModelOptions | None = None,
    apply_hooks: ApplyHooks | None = None,
    most_at_once: int = 0,
    prediction: Prediction = Prediction.NOISE,
    regions: Regions = NO_REGIONS,
    kept_length: KeptLength = KeptLength.NOTHING,
    without_image: WithoutImage | None = None,
    strengths: Tensor | None = None,
    lead: Lead | None = None,
    told_anew: Callable[[], Extras] | None = None,
) -> Denoise:
    """A `denoise` that predicts noise for both texts and goes `cfg` times the way from `uncond` to `cond`.

    Texts are [B, L, D] with the B of x_BCHW. Both run as one batch, `uncond` first; apart if they differ in length, so
    that neither is padded with what the model was not trained on, or in their hooks, or when `most_at_once` is 1, which
    takes less memory. With `cfg` 1 only `cond` runs, unless the options say otherwise, and `uncond` may be None.
    `apply_hooks` is called before each batch. The sampler functions of `options` are called as in ComfyUI; they see
    predictions as clean latents, which rounds otherwise than the plain run, in the last bits. `prediction` is what the
    model predicts; `regions` are texts beside `cond` that guide a part of the image each. `without_image` is asked
    wherever `uncond` is. `strengths` are in place of `cfg` in each cell, on the device of the latents; functions of the
    options are told `cfg`. `lead` is another way than plainly from two guesses to one. `told_anew` gives what the model
    is told in place of its namesakes, in each guess anew for each text, `cond` first.
    """
    assert cfg == 1.0 or uncond is not None, f"cfg {cfg} needs the unconditional context"
    options = options or ModelOptions()
    runs_uncond = uncond is not None and (cfg != 1.0 or options.disable_cfg1_optimization)
    conditions = (_condition(cond), _condition(uncond) if runs_uncond else None)
    guider = _Guider(
        predict_noise,
        table,
        conditions,
        cfg,
        options,
        apply_hooks,
        most_at_once,
        prediction,
        regions,
        kept_length,
        without_image if runs_uncond else None,
        strengths,
        lead,
        told_anew,
    )
    sees_clean = options.guides or options.model_function_wrapper is not None
    sees_clean = sees_clean or any(options.wrappers.at(point) for point in _CLEAN_POINTS)
    denoise: Denoise = options.wrappers.around(
        WrapperPoint.PREDICT_NOISE, guider.guess_by_functions if sees_clean else guider.guess
    )
    return denoise


def _condition(text: Tensor | Condition | None) -> Condition | None:
    return Condition(text) if isinstance(text, Tensor) else text


class _Guider:
    """The two ways to a guided guess: plain, and through the functions of a run's options."""

    def __init__(
        self,
        predict_noise: PredictNoise,
        table: SigmaTable,
        conditions: tuple[Condition | None, Condition | None],
        cfg: float,
        options: ModelOptions,
        apply_hooks: ApplyHooks | None,
        most_at_once: int,
        prediction: Prediction,
        regions: Regions,
        kept_length: KeptLength,
        without_image: WithoutImage | None,
        strengths: Tensor | None,
        lead: Lead | None,
        told_anew: Callable[[], Extras] | None,
    ) -> None:
        self._prediction = prediction
        self._regions, self._kept_length = regions, kept_length
        self._predict_noise, self._table, self._cfg = predict_noise, table, cfg
        self._strength = cfg if strengths is None else strengths
        self._lead, self._told_anew = lead, told_anew
        self._conditions: tuple[Condition | None, ...] = (*conditions, *regions.conditions)
        self._image_strength, self._blank = 1.0, len(self._conditions)
        if without_image is not None:
            self._conditions = (*self._conditions, without_image.condition)
            self._image_strength = without_image.strength
        self._options, self._apply_hooks = options, apply_hooks
        self._most_at_once = most_at_once
        self._batches = batches(self._conditions, most_at_once)
        #: someone may look at the facts of a call
        self._tells = not options.transformer.is_empty or bool(options.wrappers.entries) or apply_hooks is not None

    def guess(self, x_BCHW: Tensor, sigma: float) -> Tensor:
        """The guided guess by plain classifier-free guidance, in terms of what the model predicts."""
        # times the inverse: dividing by a number may round differently on another device
        scaled_BCHW = x_BCHW * input_scale(sigma, self._table.sigma_data, self._prediction)
        noises: dict[int, Tensor] = {}
        for batch in self._told_now(self._batches):
            self._prepare(batch, sigma)
            copies = _repeated(scaled_BCHW, len(batch.context_BLD))
            predicted = self._predict(copies, sigma, batch.context_BLD, batch)
            noises |= zip(batch.members, predicted.chunk(len(batch.members)), strict=True)
        cond_BCHW = self._regions.joined(noises)
        if UNCOND not in noises:
            return self._clean(x_BCHW, cond_BCHW, sigma)
        guided_BCHW = self._led(cond_BCHW, noises[UNCOND], sigma)
        if self._blank in noises:
            guided_BCHW = self._towards_image(guided_BCHW, noises)
        guided_BCHW = with_length_of(guided_BCHW, cond_BCHW, self._kept_length)
        return self._clean(x_BCHW, guided_BCHW, sigma)

    def guess_by_functions(self, x_BCHW: Tensor, sigma: float) -> Tensor:
        """The guided guess through the sampler functions of the options, in terms of clean latents."""
        options = self._options
        sigma_B = torch.full((len(x_BCHW),), sigma, dtype=torch.float32, device=x_BCHW.device)
        common: Args = {
            "input": x_BCHW,
            "sigma": sigma_B,
            "timestep": sigma_B,
            "cond_scale": self._cfg,
            "model": self._predict_noise,
            "model_options": options,
        }
        if options.sampler_calc_cond_batch_function is not None:
            guesses = options.sampler_calc_cond_batch_function({**common, "conds": list(self._conditions)})
        else:
            calc = options.wrappers.around(WrapperPoint.CALC_COND_BATCH, self._calc_cond_batch)
            guesses = calc(list(self._conditions), x_BCHW, sigma)
        asked, guesses = guesses, [self._regions.joined(guesses), guesses[UNCOND]]
        for pre_cfg in options.sampler_pre_cfg_function:
            guesses = pre_cfg({**common, "conds": list(self._conditions), "conds_out": guesses})
        cond, uncond = guesses[COND], guesses[UNCOND]
        clean: Args = {**common, "cond_denoised": cond, "uncond_denoised": uncond}
        denoised_BCHW = self._combined(clean, sigma)
        if self._blank < len(self._conditions):
            denoised_BCHW = self._towards_image(denoised_BCHW, asked)
        for post_cfg in options.sampler_post_cfg_function:
            args = {"cond": self._conditions[COND], "uncond": self._conditions[UNCOND], "denoised": denoised_BCHW}
            denoised_BCHW = post_cfg({**clean, **args})
        return denoised_BCHW

    def _led(self, cond_BCHW: Tensor, uncond_BCHW: Tensor, sigma: float) -> Tensor:
        """One guess of what the model predicts, of the two for the texts."""
        if self._lead is not None:
            return self._lead(cond_BCHW, uncond_BCHW, sigma)
        return plainly_led(cond_BCHW, uncond_BCHW, self._strength)

    def _told_now(self, asked: Sequence[Batch]) -> Sequence[Batch]:
        """`asked`, each text with what it is told anew in this guess."""
        if self._told_anew is None:
            return asked
        told = {place: self._told_anew() for place in sorted(place for batch in asked for place in batch.members)}
        return [
            replace(batch, extras={**batch.extras, **joined_extras([told[place] for place in batch.members])})
            for batch in asked
        ]

    def _towards_image(self, guided_BCHW: Tensor, guesses: Mapping[int, Tensor] | Sequence[Tensor]) -> Tensor:
        """What is guided by the text, led on by the image: the text's guidance begins at `UNCOND`, which sees it."""
        return guided_BCHW + (guesses[UNCOND] - guesses[self._blank]) * (self._image_strength - 1.0)

    def _combined(self, clean: Args, sigma: float) -> Tensor:
        x_BCHW, cond, uncond = clean["input"], clean["cond_denoised"], clean["uncond_denoised"]
        if self._options.sampler_cfg_function is None:
            if self._lead is not None:  # it goes by what the model predicts: noise, or the flow
                predicted, away = ((x_BCHW - guess) * (1.0 / sigma) for guess in (cond, uncond))
                led_BCHW: Tensor = x_BCHW - self._lead(predicted, away, sigma) * sigma
                return led_BCHW
            combined_BCHW = plainly_led(cond, uncond, self._strength)
            if self._kept_length is KeptLength.NOTHING:
                return combined_BCHW
            kept_BCHW: Tensor = x_BCHW - with_length_of(x_BCHW - combined_BCHW, x_BCHW - cond, self._kept_length)
            return kept_BCHW
        texts = {"input_cond": self._conditions[COND], "input_uncond": self._conditions[UNCOND]}
        args = {**clean, **texts, "cond": x_BCHW - cond, "uncond": x_BCHW - uncond}
        removed_BCHW: Tensor = self._options.sampler_cfg_function(args)
        guided_BCHW: Tensor = x_BCHW - removed_BCHW
        return guided_BCHW

    def _calc_cond_batch(self, conditions: Conditions, x_BCHW: Tensor, sigma: float) -> list[Tensor]:
        """The clean guess of each condition; zeros for None."""
        same = len(conditions) == len(self._conditions) and all(map(_is, conditions, self._conditions))
        guesses: dict[int, Tensor] = {}
        for batch in self._told_now(self._batches if same else batches(conditions, self._most_at_once)):
            self._prepare(batch, sigma)
            predicted = self._ask(_repeated(x_BCHW, len(batch.context_BLD)), sigma, batch)
            guesses |= zip(batch.members, predicted.chunk(len(batch.members)), strict=True)
        return [guesses.get(place, torch.zeros_like(x_BCHW)) for place in range(len(conditions))]

    def _ask(self, x_BCHW: Tensor, sigma: float, batch: Batch) -> Tensor:
        """The clean guesses of one batch, through the wrappers that are around a model call."""
        sigma_B = torch.full((len(x_BCHW),), sigma, dtype=torch.float32, device=x_BCHW.device)

        def level(asked_B: Tensor | float) -> float:
            # reading a number back from the device waits for it: only when a wrapper changed it
            return sigma if asked_B is sigma_B else float(torch.as_tensor(asked_B).flatten()[0])

        def apply_model(x: Tensor, t: Tensor | float, context_BLD: Tensor, extras: Extras = batch.extras) -> Tensor:
            at = level(t)
            if any(len(value) != len(x) for value in extras.values()):
                expected = (
                    f"{len(batch.context_BLD)}, or its own {' and '.join(extras)} of a model function wrapper's c"
                )
                raise unusable_field("batch that a wrapper gives to a model told more than a text", len(x), expected)
            scaled_BCHW = x * input_scale(at, self._table.sigma_data, self._prediction)
            predicted_BCHW = self._predict(scaled_BCHW, at, context_BLD, replace(batch, extras=extras))
            return self._clean(x, predicted_BCHW, at)

        apply = self._options.wrappers.around(WrapperPoint.APPLY_MODEL, apply_model)
        wrapper = self._options.model_function_wrapper
        if wrapper is None:
            guesses: Tensor = apply(x_BCHW, sigma_B, batch.context_BLD)
            return guesses
        options = {"transformer_options": self._options.transformer}
        context = {"c_crossattn": batch.context_BLD, **options, **batch.extras}
        args = {"input": x_BCHW, "timestep": sigma_B, "c": context, "cond_or_uncond": self._sides(batch)}
        return wrapper(_of_keywords(apply, self._options.transformer, batch.extras), args)

    def _clean(self, x_BCHW: Tensor, predicted_BCHW: Tensor, sigma: float) -> Tensor:
        return clean_latent(self._prediction, x_BCHW, predicted_BCHW, sigma, self._table.sigma_data)

    def _sides(self, batch: Batch) -> list[int]:
        """Which of the members of `batch` are for the prompt, regions of it included, and which for the negative one,
        seeing an image or none."""
        return [UNCOND if place in (UNCOND, self._blank) else COND for place in batch.members]

    def _prepare(self, batch: Batch, sigma: float) -> None:
        if self._apply_hooks is not None:
            self._apply_hooks(batch.hooks, sigma)

    def _predict(self, scaled_BCHW: Tensor, sigma: float, context_BLD: Tensor, batch: Batch) -> Tensor:
        count, device = len(context_BLD), scaled_BCHW.device
        timestep_B = torch.full((count,), self._table.told(sigma), dtype=torch.float32, device=device)
        if not self._tells:
            return self._predict_noise(scaled_BCHW, timestep_B, context_BLD, **batch.extras).to(scaled_BCHW.dtype)
        sigmas_B = torch.full((count,), sigma, dtype=torch.float32, device=device)
        with call_facts(sigmas=sigmas_B, cond_or_uncond=self._sides(batch)):
            return self._predict_noise(scaled_BCHW, timestep_B, context_BLD, **batch.extras).to(scaled_BCHW.dtype)


def _of_keywords(apply: Callable[..., Tensor], installed: TransformerOptions, extras: Extras) -> Callable[..., Tensor]:
    """`apply` with the keywords of a model function wrapper's "c"; the wrappers around a model call see none of them
    but `extras`, what the model is told beside the text.

    Raises UnusableField for other options than those that are on the model by now, and for an unknown keyword.
    """

    def asked(
        x_BCHW: Tensor,
        sigma_B: Tensor | float,
        c_crossattn: Tensor,
        transformer_options: TransformerOptions = installed,
        **others: Any,
    ) -> Tensor:
        if transformer_options is not installed:
            expected = "those of the run; change them before it, or by a condition's hooks"
            raise unusable_field("transformer_options of a model function wrapper", "other ones", expected)
        if unknown := others.keys() - extras.keys():
            expected = " and ".join(("c_crossattn", "transformer_options", *extras))
            raise unusable_field("arguments of a model function wrapper's model", sorted(unknown), expected)
        told = ({**extras, **others},) if extras else ()
        return apply(x_BCHW, sigma_B, c_crossattn, *told)

    return asked


def _repeated(x_BCHW: Tensor, count: int) -> Tensor:
    return x_BCHW.repeat(count // len(x_BCHW), *[1] * (x_BCHW.dim() - 1))


def _is(left: object, right: object) -> bool:
    return left is right
