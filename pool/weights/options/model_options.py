"""`ModelOptions`: all options of a run except its weights, as one immutable value.

A patcher keeps one and passes it to the run; clones share it and copy on write. Defines the options;
`pool.inference` and `pool.weights.patcher.blocks` apply them. Names are ComfyUI's.

Sampler functions get one dictionary. Shape legend of its tensors: B images, C latent channels, H W cells. "input" is
the noisy x_BCHW, "sigma" and "timestep" both its noise level as float32 [B], "model" an object that the run provides,
"predict_prompt" and "predict_negative" functions of a noisy latent that return its clean prediction for one side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.options.wrappers import Wrapper, WrapperPoint, Wrappers

Args: TypeAlias = dict[str, Any]
#: args with "cond" and "uncond" (x - denoised), "cond_scale", "cond_denoised", ... -> x - guided prediction
CfgFunction: TypeAlias = Callable[[Args], Tensor]
#: args with "conds", "conds_out" (denoised predictions), "cond_scale", ... -> list of denoised predictions
PreCfgFunction: TypeAlias = Callable[[Args], list[Tensor]]
#: args with "denoised" (the guided prediction), "cond_denoised", "uncond_denoised", ... -> guided prediction
PostCfgFunction: TypeAlias = Callable[[Args], Tensor]
#: args with "conds", "input", "sigma", ... -> list of denoised predictions, one for each condition
CalcCondBatchFunction: TypeAlias = Callable[[Args], list[Tensor]]
#: (apply_model, {"input", "timestep", "c", "cond_or_uncond"}) -> denoised predictions of the batch
ModelFunctionWrapper: TypeAlias = Callable[[Callable[..., Tensor], Args], Tensor]
#: (sigma_B, denoise_mask, {"model", "sigmas"}) -> mask for this noise level
DenoiseMaskFunction: TypeAlias = Callable[[Tensor, Tensor, Args], Tensor]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of a run. The empty value, `ModelOptions()`, is a plain run.

    sampler_cfg_function               combines the predictions; None: classifier-free guidance
    sampler_pre_cfg_function           called in order before that
    sampler_post_cfg_function          called in order after it
    sampler_calc_cond_batch_function   computes the predictions of all conditions instead of the run
    model_function_wrapper             wraps every call of the model
    denoise_mask_function              changes the mask at each step; used only with a mask
    disable_cfg1_optimization          evaluate the negative prompt even if cfg is 1
    """

    transformer: TransformerOptions = field(default_factory=TransformerOptions)
    wrappers: Wrappers = field(default_factory=Wrappers)
    sampler_cfg_function: CfgFunction | None = None
    sampler_pre_cfg_function: tuple[PreCfgFunction, ...] = ()
    sampler_post_cfg_function: tuple[PostCfgFunction, ...] = ()
    sampler_calc_cond_batch_function: CalcCondBatchFunction | None = None
    model_function_wrapper: ModelFunctionWrapper | None = None
    denoise_mask_function: DenoiseMaskFunction | None = None
    disable_cfg1_optimization: bool = False

    def with_sampler_cfg_function(
        self, function: Callable[..., Tensor], disable_cfg1_optimization: bool = False
    ) -> ModelOptions:
        """Use `function` for guidance. One that takes three arguments gets (cond, uncond, cond_scale) of the
        dictionary."""
        return replace(
            self,
            sampler_cfg_function=_of_one_argument(function),
            disable_cfg1_optimization=self.disable_cfg1_optimization or disable_cfg1_optimization,
        )

    def with_sampler_pre_cfg_function(
        self, function: PreCfgFunction, disable_cfg1_optimization: bool = False
    ) -> ModelOptions:
        """Add `function` after the others that run before guidance."""
        return replace(
            self,
            sampler_pre_cfg_function=(*self.sampler_pre_cfg_function, function),
            disable_cfg1_optimization=self.disable_cfg1_optimization or disable_cfg1_optimization,
        )

    def with_sampler_post_cfg_function(
        self, function: PostCfgFunction, disable_cfg1_optimization: bool = False
    ) -> ModelOptions:
        """Add `function` after the others that run after guidance."""
        return replace(
            self,
            sampler_post_cfg_function=(*self.sampler_post_cfg_function, function),
            disable_cfg1_optimization=self.disable_cfg1_optimization or disable_cfg1_optimization,
        )

    def with_sampler_calc_cond_batch_function(self, function: CalcCondBatchFunction | None) -> ModelOptions:
        """Use `function` for the predictions, replacing the previous one."""
        return replace(self, sampler_calc_cond_batch_function=function)

    def with_model_function_wrapper(self, wrapper: ModelFunctionWrapper | None) -> ModelOptions:
        """Wrap every call of the model in `wrapper`, replacing the previous one."""
        return replace(self, model_function_wrapper=wrapper)

    def with_denoise_mask_function(self, function: DenoiseMaskFunction | None) -> ModelOptions:
        """Use `function` for the mask of each step, replacing the previous one."""
        return replace(self, denoise_mask_function=function)

    def with_disable_cfg1_optimization(self, disabled: bool = True) -> ModelOptions:
        """Set whether the negative prompt is evaluated even if cfg is 1."""
        return replace(self, disable_cfg1_optimization=disabled)

    def with_wrapper(self, point: WrapperPoint, wrapper: Wrapper, key: str = "") -> ModelOptions:
        """Add `wrapper` inside the others of `point`."""
        return replace(self, wrappers=self.wrappers.with_wrapper(point, wrapper, key))

    def with_transformer(self, change: Callable[[TransformerOptions], TransformerOptions]) -> ModelOptions:
        """Apply `change` to the transformer options: `with_transformer(lambda t: t.with_attn1_patch(f))`."""
        return replace(self, transformer=change(self.transformer))

    @property
    def changes_guidance(self) -> bool:
        """Whether an option changes how predictions are computed or combined, so that they must be denoised latents."""
        return bool(
            self.sampler_cfg_function
            or self.sampler_pre_cfg_function
            or self.sampler_post_cfg_function
            or self.sampler_calc_cond_batch_function
        )


def _of_one_argument(function: Callable[..., Tensor]) -> CfgFunction:
    try:
        count = len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        count = 1
    if count != 3:
        return function
    return lambda args: function(args["cond"], args["uncond"], args["cond_scale"])
