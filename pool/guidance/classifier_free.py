"""Classifier-free guidance: makes the `denoise` function of a sampler from a model's predictions for several texts.

Knows the scaling of the model's inputs, guidance, and when the sampler functions of the run's options are called; knows
neither samplers nor architectures.
Shape legend: B batch, C latent channels, H W latent height and width, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.conditioning.conditions import COND, UNCOND, ApplyHooks, Batch, Condition, batches, join_kwargs
from modelpool.pool.conditioning.micro_conditioning import ModelKwargs
from modelpool.pool.conditioning.regions import NO_REGIONS, Regions
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import CfgRescale, Prediction
from modelpool.pool.guidance.apg import GuidanceFn, classifier_free_guidance
from modelpool.pool.guidance.cfg_rescale import rescale
from modelpool.pool.options.model_options import Args, ModelOptions
from modelpool.pool.options.run_context import call_facts
from modelpool.pool.options.transformer_options import TransformerOptions
from modelpool.pool.options.wrappers import WrapperPoint
from modelpool.pool.sampling.predictions import clean_latent, input_scale
from modelpool.pool.sampling.samplers import Denoise
from modelpool.pool.sampling.schedules import SigmaTable

#: (x_BCHW float32 of unit variance, timestep_B float32, context_BLD, model inputs by name) -> prediction [B, C, H, W],
#: in any float dtype
PredictNoise: TypeAlias = Callable[..., Tensor]
Conditions: TypeAlias = Sequence[Condition | None]

#: wrappers that receive predictions as clean latents
_CLEAN_POINTS = (WrapperPoint.CALC_COND_BATCH, WrapperPoint.APPLY_MODEL)


@dataclass(frozen=True, slots=True)
class ImageGuidance:
    """The negative prompt without an image, for models guided by text and image, and the image guidance scale. Source:
    Brooks et al. 2023 (InstructPix2Pix), equation 3."""

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
    max_batch: int = 0,
    prediction: Prediction = Prediction.NOISE,
    regions: Regions = NO_REGIONS,
    cfg_rescale: CfgRescale = CfgRescale.NOTHING,
    without_image: ImageGuidance | None = None,
    guidance_scales: Tensor | None = None,
    guidance_fn: GuidanceFn | None = None,
    drawn_inputs: Callable[[], ModelKwargs] | None = None,
) -> Denoise:
    """Return a `denoise` that predicts for both texts and applies classifier-free guidance with scale `cfg`.

    Texts are [B, L, D] with the B of x_BCHW. Both run as one batch, `uncond` first. They run separately if they differ
    in length, so that neither is padded with tokens that the model was not trained on, or in their hooks, or if
    `max_batch` is 1, which takes less memory. With `cfg` 1 only `cond` runs, unless the options say otherwise, and
    `uncond` may be None. `apply_hooks` is called before each batch. The sampler functions of `options` are called as in
    ComfyUI; they receive predictions as clean latents, which rounds differently from a run without functions, in the
    last bits. `prediction` is the model's prediction type; `regions` are prompts for parts of the image in addition to
    `cond`. `without_image` is predicted whenever `uncond` is. `guidance_scales` replace `cfg` for each latent position,
    on the device of the latents; functions of the options receive `cfg`. `guidance_fn` replaces CFG as the combination
    of the two predictions. `drawn_inputs` returns model inputs that replace those of the same names, new for each
    prediction and text, `cond` first.
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
        max_batch,
        prediction,
        regions,
        cfg_rescale,
        without_image if runs_uncond else None,
        guidance_scales,
        guidance_fn,
        drawn_inputs,
    )
    sees_clean = options.changes_guidance or options.model_function_wrapper is not None
    sees_clean = sees_clean or any(options.wrappers.at(point) for point in _CLEAN_POINTS)
    denoise: Denoise = options.wrappers.around(
        WrapperPoint.PREDICT_NOISE, guider.predict_with_functions if sees_clean else guider.predict
    )
    return denoise


def _condition(text: Tensor | Condition | None) -> Condition | None:
    return Condition(text) if isinstance(text, Tensor) else text


class _Guider:
    """The two forms of a guided prediction: plain, and through the functions of a run's options."""

    def __init__(
        self,
        predict_noise: PredictNoise,
        table: SigmaTable,
        conditions: tuple[Condition | None, Condition | None],
        cfg: float,
        options: ModelOptions,
        apply_hooks: ApplyHooks | None,
        max_batch: int,
        prediction: Prediction,
        regions: Regions,
        cfg_rescale: CfgRescale,
        without_image: ImageGuidance | None,
        guidance_scales: Tensor | None,
        guidance_fn: GuidanceFn | None,
        drawn_inputs: Callable[[], ModelKwargs] | None,
    ) -> None:
        self._prediction = prediction
        self._regions, self._cfg_rescale = regions, cfg_rescale
        self._predict_noise, self._table, self._cfg = predict_noise, table, cfg
        self._strength = cfg if guidance_scales is None else guidance_scales
        self._guidance_fn, self._told_anew = guidance_fn, drawn_inputs
        self._conditions: tuple[Condition | None, ...] = (*conditions, *regions.conditions)
        self._image_strength, self._blank = 1.0, len(self._conditions)
        if without_image is not None:
            self._conditions = (*self._conditions, without_image.condition)
            self._image_strength = without_image.strength
        self._options, self._apply_hooks = options, apply_hooks
        self._most_at_once = max_batch
        self._batches = batches(self._conditions, max_batch)
        #: whether options, wrappers or hooks may read the facts of a call
        self._records_facts = (
            not options.transformer.is_empty or bool(options.wrappers.entries) or apply_hooks is not None
        )

    def predict(self, x_BCHW: Tensor, sigma: float) -> Tensor:
        """Return the guided prediction as a clean latent, by plain classifier-free guidance."""
        # times the inverse: dividing by a number may round differently on another device
        scaled_BCHW = x_BCHW * input_scale(sigma, self._table.sigma_data, self._prediction)
        noises: dict[int, Tensor] = {}
        for batch in self._with_drawn_inputs(self._batches):
            self._prepare(batch, sigma)
            copies = _repeated(scaled_BCHW, len(batch.context_BLD))
            predicted = self._predict(copies, sigma, batch.context_BLD, batch)
            noises |= zip(batch.members, predicted.chunk(len(batch.members)), strict=True)
        cond_BCHW = self._regions.combine(noises)
        if UNCOND not in noises:
            return self._clean(x_BCHW, cond_BCHW, sigma)
        guided_BCHW = self._combine(cond_BCHW, noises[UNCOND], sigma)
        if self._blank in noises:
            guided_BCHW = self._guide_by_image(guided_BCHW, noises)
        guided_BCHW = rescale(guided_BCHW, cond_BCHW, self._cfg_rescale)
        return self._clean(x_BCHW, guided_BCHW, sigma)

    def predict_with_functions(self, x_BCHW: Tensor, sigma: float) -> Tensor:
        """Return the guided prediction as a clean latent, through the sampler functions of the options."""
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
            predictions = options.sampler_calc_cond_batch_function({**common, "conds": list(self._conditions)})
        else:
            calc = options.wrappers.around(WrapperPoint.CALC_COND_BATCH, self._calc_cond_batch)
            predictions = calc(list(self._conditions), x_BCHW, sigma)
        all_predictions, predictions = predictions, [self._regions.combine(predictions), predictions[UNCOND]]
        for pre_cfg in options.sampler_pre_cfg_function:
            predictions = pre_cfg({**common, "conds": list(self._conditions), "conds_out": predictions})
        cond, uncond = predictions[COND], predictions[UNCOND]
        clean: Args = {**common, "cond_denoised": cond, "uncond_denoised": uncond}
        denoised_BCHW = self._combine_clean(clean, sigma)
        if self._blank < len(self._conditions):
            denoised_BCHW = self._guide_by_image(denoised_BCHW, all_predictions)
        for post_cfg in options.sampler_post_cfg_function:
            args = {"cond": self._conditions[COND], "uncond": self._conditions[UNCOND], "denoised": denoised_BCHW}
            denoised_BCHW = post_cfg({**clean, **args})
        return denoised_BCHW

    def _combine(self, cond_BCHW: Tensor, uncond_BCHW: Tensor, sigma: float) -> Tensor:
        """Combine the predictions for the two texts."""
        if self._guidance_fn is not None:
            return self._guidance_fn(cond_BCHW, uncond_BCHW, sigma)
        return classifier_free_guidance(cond_BCHW, uncond_BCHW, self._strength)

    def _with_drawn_inputs(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return `batches` with the inputs that are drawn again for each prediction."""
        if self._told_anew is None:
            return batches
        drawn = {place: self._told_anew() for place in sorted(place for batch in batches for place in batch.members)}
        return [
            replace(
                batch, model_kwargs={**batch.model_kwargs, **join_kwargs([drawn[place] for place in batch.members])}
            )
            for batch in batches
        ]

    def _guide_by_image(self, guided_BCHW: Tensor, predictions: Mapping[int, Tensor] | Sequence[Tensor]) -> Tensor:
        """Add image guidance: text guidance starts at `UNCOND`, which reads the image."""
        return guided_BCHW + (predictions[UNCOND] - predictions[self._blank]) * (self._image_strength - 1.0)

    def _combine_clean(self, clean: Args, sigma: float) -> Tensor:
        x_BCHW, cond, uncond = clean["input"], clean["cond_denoised"], clean["uncond_denoised"]
        if self._options.sampler_cfg_function is None:
            if self._guidance_fn is not None:  # it combines the model's prediction type: noise, or the flow
                predicted, away = ((x_BCHW - clean_BCHW) * (1.0 / sigma) for clean_BCHW in (cond, uncond))
                combined: Tensor = x_BCHW - self._guidance_fn(predicted, away, sigma) * sigma
                return combined
            combined_BCHW = classifier_free_guidance(cond, uncond, self._strength)
            if self._cfg_rescale is CfgRescale.NOTHING:
                return combined_BCHW
            rescaled_BCHW: Tensor = x_BCHW - rescale(x_BCHW - combined_BCHW, x_BCHW - cond, self._cfg_rescale)
            return rescaled_BCHW
        texts = {"input_cond": self._conditions[COND], "input_uncond": self._conditions[UNCOND]}
        args = {**clean, **texts, "cond": x_BCHW - cond, "uncond": x_BCHW - uncond}
        removed_BCHW: Tensor = self._options.sampler_cfg_function(args)
        guided_BCHW: Tensor = x_BCHW - removed_BCHW
        return guided_BCHW

    def _calc_cond_batch(self, conditions: Conditions, x_BCHW: Tensor, sigma: float) -> list[Tensor]:
        """Return the clean prediction of each condition; zeros for None."""
        same = len(conditions) == len(self._conditions) and all(map(_is, conditions, self._conditions))
        predictions: dict[int, Tensor] = {}
        for batch in self._with_drawn_inputs(self._batches if same else batches(conditions, self._most_at_once)):
            self._prepare(batch, sigma)
            predicted = self._predict_clean(_repeated(x_BCHW, len(batch.context_BLD)), sigma, batch)
            predictions |= zip(batch.members, predicted.chunk(len(batch.members)), strict=True)
        return [predictions.get(place, torch.zeros_like(x_BCHW)) for place in range(len(conditions))]

    def _predict_clean(self, x_BCHW: Tensor, sigma: float, batch: Batch) -> Tensor:
        """Return the clean predictions of one batch, through the wrappers around a model call."""
        sigma_B = torch.full((len(x_BCHW),), sigma, dtype=torch.float32, device=x_BCHW.device)

        def level(t: Tensor | float) -> float:
            # reading a number back synchronises the device: only if a wrapper changed it
            return sigma if t is sigma_B else float(torch.as_tensor(t).flatten()[0])

        def apply_model(
            x: Tensor, t: Tensor | float, context_BLD: Tensor, model_kwargs: ModelKwargs = batch.model_kwargs
        ) -> Tensor:
            at = level(t)
            if any(len(value) != len(x) for value in model_kwargs.values()):
                names = " and ".join(batch.model_kwargs)
                expected = f"{len(batch.context_BLD)}, or new {names} in the wrapper's c for another batch size"
                field = "batch size that a wrapper passes to a model with inputs other than the text"
                raise unusable_field(field, len(x), expected)
            scaled_BCHW = x * input_scale(at, self._table.sigma_data, self._prediction)
            predicted_BCHW = self._predict(scaled_BCHW, at, context_BLD, replace(batch, model_kwargs=model_kwargs))
            return self._clean(x, predicted_BCHW, at)

        apply = self._options.wrappers.around(WrapperPoint.APPLY_MODEL, apply_model)
        wrapper = self._options.model_function_wrapper
        if wrapper is None:
            predictions: Tensor = apply(x_BCHW, sigma_B, batch.context_BLD)
            return predictions
        options = {"transformer_options": self._options.transformer}
        context = {"c_crossattn": batch.context_BLD, **options, **batch.model_kwargs}
        args = {"input": x_BCHW, "timestep": sigma_B, "c": context, "cond_or_uncond": self._sides(batch)}
        return wrapper(_of_keywords(apply, self._options.transformer, batch.model_kwargs), args)

    def _clean(self, x_BCHW: Tensor, predicted_BCHW: Tensor, sigma: float) -> Tensor:
        return clean_latent(self._prediction, x_BCHW, predicted_BCHW, sigma, self._table.sigma_data)

    def _sides(self, batch: Batch) -> list[int]:
        """Return for each member of `batch` whether it is for the prompt (including regions) or for the negative prompt
        (with or without image)."""
        return [UNCOND if place in (UNCOND, self._blank) else COND for place in batch.members]

    def _prepare(self, batch: Batch, sigma: float) -> None:
        if self._apply_hooks is not None:
            self._apply_hooks(batch.hooks, sigma)

    def _predict(self, scaled_BCHW: Tensor, sigma: float, context_BLD: Tensor, batch: Batch) -> Tensor:
        count, device = len(context_BLD), scaled_BCHW.device
        timestep_B = torch.full((count,), self._table.time_input(sigma), dtype=torch.float32, device=device)
        if not self._records_facts:
            return self._predict_noise(scaled_BCHW, timestep_B, context_BLD, **batch.model_kwargs).to(scaled_BCHW.dtype)
        sigmas_B = torch.full((count,), sigma, dtype=torch.float32, device=device)
        with call_facts(sigmas=sigmas_B, cond_or_uncond=self._sides(batch)):
            return self._predict_noise(scaled_BCHW, timestep_B, context_BLD, **batch.model_kwargs).to(scaled_BCHW.dtype)


def _of_keywords(
    apply: Callable[..., Tensor], installed: TransformerOptions, model_kwargs: ModelKwargs
) -> Callable[..., Tensor]:
    """Return `apply` with the keywords of a model function wrapper's "c"; wrappers around a model call receive only
    `model_kwargs`, the model inputs other than the text.

    Raises UnusableField for other options than those installed on the model, and for an unknown keyword.
    """

    def call(
        x_BCHW: Tensor,
        sigma_B: Tensor | float,
        c_crossattn: Tensor,
        transformer_options: TransformerOptions = installed,
        **others: Any,
    ) -> Tensor:
        if transformer_options is not installed:
            expected = "the options of the run; change them before the run, or by the hooks of a condition"
            raise unusable_field("transformer_options of a model function wrapper", "other ones", expected)
        if unknown := others.keys() - model_kwargs.keys():
            expected = " and ".join(("c_crossattn", "transformer_options", *model_kwargs))
            raise unusable_field("arguments of a model function wrapper's model", sorted(unknown), expected)
        inputs = ({**model_kwargs, **others},) if model_kwargs else ()
        return apply(x_BCHW, sigma_B, c_crossattn, *inputs)

    return call


def _repeated(x_BCHW: Tensor, count: int) -> Tensor:
    return x_BCHW.repeat(count // len(x_BCHW), *[1] * (x_BCHW.dim() - 1))


def _is(left: object, right: object) -> bool:
    return left is right
