"""Samplers and schedules agree with `tests/golden/samplers.json`: results of ComfyUI's sampler functions, in double
precision, on a model with a known exact denoiser."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.inference.sampling import samplers
from modelpool.pool.inference.sampling.noise_path import EXPLODING, flow_path
from modelpool.pool.inference.sampling.sampler_names import SCHEDULES
from modelpool.pool.inference.sampling.sampler_step import SamplerSettings
from modelpool.pool.inference.sampling.schedules import edm_sigma_table, flow_table, make_sigmas, sd1_sigma_table

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[3] / "golden" / "samplers.json").read_text())
SHAPE = (1, 4, 2, 2)
TOLERANCE = 1e-6
#: where the reference computes in single precision: coefficients of DEIS, and the times of DPM-Solver, whose adaptive
#: steps follow from an error that is then known to 1e-5
SINGLE_PRECISION = {("deis", "eps"): 2e-5, ("dpm_fast", "eps"): 1e-5, ("dpm_adaptive", "eps"): 2e-3}


class AnalyticModel:
    """The exact denoiser of a mixture of two isotropic Gaussians, and its noise by request."""

    def __init__(self, kind: str, noise_sigmas: Sequence[Sequence[float]]) -> None:
        self.is_flow, self.calls, self.draws, self.intervals = kind == "flow", 0, 0, noise_sigmas
        self.unguided = torch.zeros(SHAPE, dtype=torch.float64)

    def denoise(self, x: Tensor, sigma: float) -> Tensor:
        self.calls += 1
        self.unguided = self._expected(x, sigma, (0.7, 0.3))
        return self._expected(x, sigma, GOLDEN["weights"])

    def unconditional(self) -> Tensor:
        return self.unguided

    def _expected(self, x: Tensor, sigma: float, weights: Sequence[float]) -> Tensor:
        image = 1.0 - sigma if self.is_flow else 1.0
        logits, guesses = [], []
        for weight, numbers, std in zip(weights, GOLDEN["means"], GOLDEN["stds"], strict=True):
            mean = torch.tensor(numbers, dtype=torch.float64).reshape(SHAPE)
            variance = image**2 * std**2 + sigma**2
            away = x - mean * image
            logits.append(math.log(weight) - 8.0 * math.log(variance) - float(away.square().sum()) / (2.0 * variance))
            guesses.append(mean + away * (image * std**2 / variance))
        shares = torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0)
        return guesses[0] * shares[0] + guesses[1] * shares[1]

    def noise(self) -> Tensor:
        found = _number(self.draws)
        if self.draws and self.intervals and self.intervals[self.draws][0] == self.intervals[self.draws - 1][0]:
            # the golden noise covers the whole interval; a sampler combines it from the part before and fresh noise
            begin, middle = self.intervals[self.draws - 1]
            share = (begin - middle) / (begin - self.intervals[self.draws][1])
            found = (found - _number(self.draws - 1) * math.sqrt(share)) * (1.0 / math.sqrt(1.0 - share))
        self.draws += 1
        return found


def _number(index: int) -> Tensor:
    return torch.tensor(GOLDEN["noise"][index], dtype=torch.float64).reshape(SHAPE)


def run(case: dict[str, Any]) -> tuple[float, int]:
    """Return the error of a case, relative to its largest number, and the number of model calls."""
    name, kind, options = case["sampler"], case["model"], dict(case["options"])
    model = AnalyticModel(kind, case["noise_sigmas"])
    levels = GOLDEN["sigmas"][kind]
    x = torch.tensor(GOLDEN["start"], dtype=torch.float64).reshape(SHAPE) * levels[0]
    if kind == "flow":
        x = x + torch.tensor(GOLDEN["means"][0], dtype=torch.float64).reshape(SHAPE) * (1.0 - levels[0])
    solver = options.pop("solver_type", None)
    if solver is not None:
        name = "dpmpp_2m_sde_heun" if solver == "heun" else "dpmpp_2m_sde"
    order = options.pop("order", None) or options.pop("max_order", None)
    own_steps = name in ("dpm_fast", "dpm_adaptive")
    settings = SamplerSettings(
        **options,
        order=order,
        path=flow_path(flow_table(3.0)) if kind == "flow" else EXPLODING,
        table=None if own_steps else flow_table(3.0) if kind == "flow" else sd1_sigma_table(),
        unconditional=model.unconditional,
    )
    sigmas = torch.tensor(levels, dtype=torch.float64)
    if own_steps:
        sigmas = torch.tensor([levels[0], *[levels[-2]] * 11, 0.0], dtype=torch.float64)
    functions = {**samplers.FUNCTIONS, **(samplers.FLOW_FUNCTIONS if kind == "flow" else {})}
    found = functions[name](model.denoise, x, sigmas, model.noise, lambda done, steps: None, settings=settings)
    expected = torch.tensor(case["result"], dtype=torch.float64).reshape(SHAPE)
    return float((found - expected).abs().max() / expected.abs().max()), model.calls


def test_every_sampler_agrees_with_the_reference() -> None:
    failures = []
    for case in GOLDEN["cases"]:
        error, calls = run(case)
        allowed = SINGLE_PRECISION.get((case["sampler"], case["model"]), TOLERANCE)
        if not error <= allowed or calls != case["model_calls"]:
            failures.append((case["sampler"], case["model"], case["options"], error, calls, case["model_calls"]))
    assert not failures


def test_every_schedule_agrees_with_the_reference() -> None:
    tables = {
        "sd1": sd1_sigma_table(),
        "SD1": sd1_sigma_table(),
        "SDXL": sd1_sigma_table(),
        "SVD": edm_sigma_table(0.002, 700.0, 1.0),
        "flow_shift_3": flow_table(3.0),
        "sigmas 0.03 to 14.6": edm_sigma_table(0.03, 14.6, 1.0),
    }
    failures = []
    for case in GOLDEN["schedules"]:
        name = f"ays_{case['model'].lower()}" if case["schedule"] == "align_your_steps" else case["schedule"]
        if name not in SCHEDULES:
            assert name == "vp", "levels above those of every model of the pool"
            continue
        if name == "ddim_uniform" and case["steps"] == 33:
            continue  # 34 steps in the reference; ours always has the requested number
        expected = torch.tensor(case["sigmas"], dtype=torch.float64)
        found = make_sigmas(name, case["steps"], tables[case["model"]]).double()
        if len(found) != len(expected) or float((found - expected).abs().max() / expected.max()) > TOLERANCE:
            failures.append((case["model"], name, case["steps"], found, expected))
    assert not failures
