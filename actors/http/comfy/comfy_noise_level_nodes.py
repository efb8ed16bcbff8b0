"""ComfyUI nodes of noise levels and of samplers with settings, for samplers of parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_SIDE,
    Builder,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    flag,
    link,
    number,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_values import NoiseLevels, SamplerValue
from modelpool.actors.request.number_fields import finite_number
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS, NOISY

#: ends of the levels of Stable Diffusion 1 and XL, which the nodes propose
_HIGH, _LOW = 14.614642, 0.0291675
_ENDS = (number("sigma_max", _HIGH, 0.0, 5000.0), number("sigma_min", _LOW, 0.0, 5000.0))
_STEPS, _DENOISE = whole("steps", 20, 1, MAX_STEPS), number("denoise", 1.0, 0.0, 1.0)
_MODEL = link("model", "MODEL")
#: Align Your Steps: names of the models that levels were published for
_ALIGNED = {"SD1": "ays_sd1", "SDXL": "ays_sdxl", "SVD": "ays_svd"}
#: coefficient of the levels that GITS has here; usual shape of the beta distribution, and its range in a request
_GITS, _BETA = 1.2, 0.6
_LEAST_BETA, _MOST_BETA = 0.1, 10.0
#: side of the area of one token of Flux 2, in pixels
_FLUX_2_SIDE = 16
_MOST_LISTED = 100


def _listed(levels: Sequence[float]) -> tuple[NoiseLevels]:
    """Return levels that end at 0. Raises NodeUnsupported unless they fall."""
    if not levels or any(one <= other for one, other in zip(levels, [*levels[1:], 0.0], strict=True)):
        raise NodeUnsupported("sigmas: expected levels that fall, to 0")
    return (NoiseLevels("", len(levels), len(levels), tuple(levels)),)


def _between(given: Mapping[str, Any], level_at: Callable[[float], float]) -> tuple[NoiseLevels]:
    """Return levels at equal shares of a range, from 0 to 1."""
    steps = given["steps"]
    return _listed([level_at(step / max(steps - 1, 1)) for step in range(steps)])


def _karras_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    """Even in sigma ** (1 / rho). Source: Karras et al. 2022, equation 5."""
    high, low = (given[name] ** (1 / given["rho"]) for name in ("sigma_max", "sigma_min"))
    return _between(given, lambda share: float((high + (low - high) * share) ** given["rho"]))


def _exponential_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    """Even in log(sigma)."""
    return _polyexponential_levels({**given, "rho": 1.0})


def _polyexponential_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    """Even in log(sigma), in the power `rho` of the share that is left."""
    if not given["sigma_min"] or not given["sigma_max"]:
        raise NodeUnsupported("sigma_min, sigma_max: found 0, expected more")
    high, low = math.log(given["sigma_max"]), math.log(given["sigma_min"])
    return _between(given, lambda share: math.exp(low + (high - low) * (1 - share) ** given["rho"]))


def _aligned_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    return _last_part(_ALIGNED[given["model_type"]], given)


def _gits_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    if abs(given["coeff"] - _GITS) > 1e-6:
        raise NodeUnsupported(f"coeff: found {given['coeff']:g}, expected {_GITS:g}, whose levels the pool has")
    return _last_part("gits", given)


def _last_part(schedule: str, given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    """Return the last steps of a schedule of `steps`."""
    steps, run_steps = given["steps"], round(given["steps"] * given["denoise"])
    if not run_steps and given["denoise"] > 0:
        raise NodeUnsupported(f"denoise: {given['denoise']:g} of {steps} steps is none")
    return (NoiseLevels(schedule, steps, run_steps),)


def _beta_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    shape = given["alpha"], given["beta"]
    for name, found in zip(("alpha", "beta"), shape, strict=True):
        if not _LEAST_BETA <= found <= _MOST_BETA:
            raise NodeUnsupported(f"{name}: found {found:g}, expected {_LEAST_BETA:g} to {_MOST_BETA:g}")
    beta = None if shape == (_BETA, _BETA) else shape
    return (NoiseLevels("beta", given["steps"], given["steps"], beta=beta, model=given["model"]),)


def _manual_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    words = given["sigmas"].replace(",", " ").split()
    levels = [finite_number(word) for word in words]
    numbers = [level for level in levels if level is not None]
    if len(numbers) != len(levels):
        raise NodeUnsupported(f"sigmas: found {given['sigmas'][:_MOST_LISTED]!r}, expected numbers with commas")
    if not numbers or numbers[-1] != 0:
        raise NodeUnsupported("sigmas: expected 0 at the end; the pool leaves no noise")
    return _listed(numbers[:-1])


def _flux_2_levels(given: Mapping[str, Any]) -> tuple[NoiseLevels]:
    """Even shares of noise, shifted for the size and the number of steps as Flux 2 is by itself."""
    from modelpool.pool.families.supported import running_families  # when it is needed: it imports every family
    from modelpool.pool.inference.sampling.schedules import shifted

    by_size = running_families()["flux2_dev"].sampling.noise.shift_by_size
    assert by_size is not None, "the shift of Flux 2 depends on the size"
    steps, tokens = given["steps"], round(given["width"] * given["height"] / _FLUX_2_SIDE**2)
    shift = by_size.shift(tokens, steps)
    return _listed([shifted(1.0 - step / steps, shift) for step in range(steps)])


def _noisy(name: str, given: Mapping[str, Any]) -> tuple[SamplerValue]:
    """Return a sampler with the noise that a node sets; an eta that is the sampler's own is not set."""
    eta = given.get("eta")
    return (SamplerValue(name, None if eta == (1.0 if name in NOISY else 0.0) else eta, given.get("s_noise", 1.0)),)


def _sampler(name: str) -> Callable[[Mapping[str, Any]], tuple[SamplerValue]]:
    return lambda given: _noisy(name, given)


def _expect(given: Mapping[str, Any], **own: Any) -> None:
    """Raise NodeUnsupported for a setting that the sampler of the pool has another value of."""
    for name, value in own.items():
        if given[name] != value:
            raise NodeUnsupported(f"{name}: found {given[name]}, expected {value}")


def _euler_cfg_pp(given: Mapping[str, Any]) -> tuple[SamplerValue]:
    _expect(given, version="regular")
    return (SamplerValue("euler_cfg_pp"),)


def _dpmpp_2m_sde(given: Mapping[str, Any]) -> tuple[SamplerValue]:
    return _noisy("dpmpp_2m_sde_heun" if given["solver_type"] == "heun" else "dpmpp_2m_sde", given)


def _with_own(name: str, **own: Any) -> Callable[[Mapping[str, Any]], tuple[SamplerValue]]:
    """Return the builder of a sampler: the node's other settings must be the sampler's `own`."""

    def build(given: Mapping[str, Any]) -> tuple[SamplerValue]:
        _expect(given, **own)
        return _noisy(name, given)

    return build


def _lcm(given: Mapping[str, Any]) -> tuple[SamplerValue]:
    """The factor of the noise is the same in all steps here."""
    if given["s_noise_end"] != given["s_noise"]:
        raise NodeUnsupported(f"s_noise_end: found {given['s_noise_end']:g}, expected s_noise, {given['s_noise']:g}")
    return _with_own("lcm", noise_clip_std=0.0)(given)


def _sa_solver(given: Mapping[str, Any]) -> tuple[SamplerValue]:
    _expect(given, **_SA_SOLVER)
    return _noisy("sa_solver_pece" if given["use_pece"] else "sa_solver", given)


#: settings that the samplers of the pool have
_SA_SOLVER = {
    "sde_start_percent": 0.2, "sde_end_percent": 0.8, "predictor_order": 3, "corrector_order": 4,
    "simple_order_2": False,
}  # fmt: skip
_ADAPTIVE = {
    "order": 3, "rtol": 0.05, "atol": 0.0078, "h_init": 0.05, "pcoeff": 0.0, "icoeff": 1.0, "dcoeff": 0.0,
    "accept_safety": 0.81,
}  # fmt: skip


def _row(name: str, output: str, build: Builder, *inputs: NodeInput) -> NodeType:
    return NodeType(name, "sampling", inputs, (output,), build)


def _noise(eta: float = 1.0) -> tuple[NodeInput, NodeInput]:
    """Return the inputs of a sampler that draws noise."""
    return number("eta", eta, 0.0, 1.0, is_required=False), number("s_noise", 1.0, 0.0, 2.0, is_required=False)


#: where ComfyUI draws the noise: not read, since the noise of the pool is the same everywhere
_DEVICE = combo("noise_device", ("gpu", "cpu"), is_required=False)

SAMPLER_NODES = (
    _row("KarrasScheduler", "SIGMAS", _karras_levels, _STEPS, *_ENDS, number("rho", 7.0, 0.01, 100.0)),
    _row("ExponentialScheduler", "SIGMAS", _exponential_levels, _STEPS, *_ENDS),
    _row(
        "PolyexponentialScheduler", "SIGMAS", _polyexponential_levels, _STEPS, *_ENDS, number("rho", 1.0, 0.01, 100.0)
    ),
    _row(
        "AlignYourStepsScheduler",
        "SIGMAS",
        _aligned_levels,
        combo("model_type", tuple(_ALIGNED)),
        whole("steps", 10, 1, MAX_STEPS),
        _DENOISE,
    ),
    _row(
        "GITSScheduler",
        "SIGMAS",
        _gits_levels,
        number("coeff", _GITS, 0.8, 1.5),
        whole("steps", 10, 2, MAX_STEPS),
        _DENOISE,
    ),
    _row(
        "BetaSamplingScheduler",
        "SIGMAS",
        _beta_levels,
        _MODEL,
        _STEPS,
        number("alpha", _BETA, 0.0, 50.0),
        number("beta", _BETA, 0.0, 50.0),
    ),
    _row("ManualSigmas", "SIGMAS", _manual_levels, text("sigmas", "1, 0.5")),
    _row(
        "Flux2Scheduler",
        "SIGMAS",
        _flux_2_levels,
        _STEPS,
        whole("width", 1024, 16, MAX_SIDE),
        whole("height", 1024, 16, MAX_SIDE),
    ),
    _row("SamplerEulerAncestral", "SAMPLER", _sampler("euler_ancestral"), *_noise()),
    _row("SamplerEulerAncestralCFGPP", "SAMPLER", _sampler("euler_ancestral_cfg_pp"), *_noise()),
    _row("SamplerEulerCFGpp", "SAMPLER", _euler_cfg_pp, combo("version", ("regular", "alternative"))),
    _row(
        "SamplerDPMPP_2M_SDE",
        "SAMPLER",
        _dpmpp_2m_sde,
        combo("solver_type", ("midpoint", "heun")),
        *_noise(),
        _DEVICE,
    ),
    _row("SamplerDPMPP_3M_SDE", "SAMPLER", _sampler("dpmpp_3m_sde"), *_noise(), _DEVICE),
    _row(
        "SamplerDPMPP_SDE",
        "SAMPLER",
        _with_own("dpmpp_sde", r=0.5),
        *_noise(),
        number("r", 0.5, 0.0, 100.0, is_required=False),
        _DEVICE,
    ),
    _row(
        "SamplerER_SDE",
        "SAMPLER",
        _with_own("er_sde", solver_type="ER-SDE", max_stage=3, eta=1.0),
        combo("solver_type", ("ER-SDE", "Reverse-time SDE", "ODE")),
        whole("max_stage", 3, 1, 3),
        *_noise(),
    ),
    _row(
        "SamplerSASolver",
        "SAMPLER",
        _sa_solver,
        _MODEL,
        *_noise(),
        number("sde_start_percent", 0.2, 0.0, 1.0),
        number("sde_end_percent", 0.8, 0.0, 1.0),
        whole("predictor_order", 3, 1, 6),
        whole("corrector_order", 4, 0, 6),
        flag("use_pece"),
        NodeInput("simple_order_2", "BOOLEAN", False),
    ),
    _row("SamplerDPMPP_2S_Ancestral", "SAMPLER", _sampler("dpmpp_2s_ancestral"), *_noise()),
    _row(
        "SamplerLCM",
        "SAMPLER",
        _lcm,
        number("s_noise", 1.0, 0.0, 64.0),
        number("s_noise_end", 1.0, 0.0, 64.0),
        number("noise_clip_std", 0.0, 0.0, 10.0),
    ),
    _row("SamplerLMS", "SAMPLER", _with_own("lms", order=4), whole("order", 4, 1, 100)),
    _row(
        "SamplerDPMAdaptative",
        "SAMPLER",
        _with_own("dpm_adaptive", **_ADAPTIVE),
        whole("order", 3, 2, 3),
        *(number(name, value, 0.0, 100.0) for name, value in _ADAPTIVE.items() if name != "order"),
        *_noise(0.0),
    ),
)
