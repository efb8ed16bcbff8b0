"""Guidance asks the model as it was trained to be asked, and combines the answers as the formula says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.conditions import Condition, batches
from modelpool.pool.inference.sampling.schedules import sd1_sigma_table
from modelpool.pool.weights.options.model_options import ModelOptions
from tests.pool.inference.sampling.one_image import guided

TABLE = sd1_sigma_table()
SIGMA = 3.0


class Recorder:
    """A noise predictor whose answer is the mean of the context, and which remembers how it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
        self.calls.append((x_BCHW, timestep_B, context_BLD))
        return torch.ones_like(x_BCHW) * context_BLD.mean(dim=(1, 2))[:, None, None, None]


def context(value: float, tokens: int = 77, batch: int = 1) -> Tensor:
    return torch.full((batch, tokens, 8), value)


def latents(batch: int = 1) -> Tensor:
    return torch.randn(batch, 4, 2, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch", [1, 3])
def test_both_texts_run_as_one_batch_uncond_first(batch: int) -> None:
    predict, x = Recorder(), latents(batch)
    denoise = guided(predict, TABLE, context(2.0, batch=batch), context(0.5, batch=batch), cfg=7.0)
    guess = denoise(x, SIGMA)
    ((asked, timestep_B, context_BLD),) = predict.calls
    torch.testing.assert_close(asked, torch.cat([x, x]) / (1 + SIGMA**2) ** 0.5)
    assert context_BLD[:, 0, 0].tolist() == [0.5] * batch + [2.0] * batch
    assert (timestep_B.dtype, timestep_B.shape) == (torch.float32, (2 * batch,))
    assert timestep_B.tolist() == pytest.approx([TABLE.timestep(SIGMA)] * 2 * batch)
    torch.testing.assert_close(guess, x - SIGMA * (0.5 + 7.0 * (2.0 - 0.5)))


@pytest.mark.parametrize("uncond", [None, context(0.5)])
def test_cfg_1_runs_only_the_conditional(uncond: Tensor | None) -> None:
    predict, x = Recorder(), latents()
    guess = guided(predict, TABLE, context(2.0), uncond, cfg=1.0)(x, SIGMA)
    ((asked, _, context_BLD),) = predict.calls
    assert (len(asked), float(context_BLD[0, 0, 0])) == (1, 2.0)
    torch.testing.assert_close(guess, x - SIGMA * 2.0)


def test_texts_of_different_length_run_apart_unpadded() -> None:
    predict, x = Recorder(), latents()
    guess = guided(predict, TABLE, context(2.0, tokens=154), context(0.5), cfg=3.0)(x, SIGMA)
    assert [tuple(context_BLD.shape) for _, _, context_BLD in predict.calls] == [(1, 77, 8), (1, 154, 8)]
    torch.testing.assert_close(guess, x - SIGMA * (0.5 + 3.0 * 1.5))


def test_a_model_that_answers_in_half_precision_does_not_lower_the_state() -> None:
    def predict(x: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
        return torch.full_like(x, 0.5, dtype=torch.float16)

    guess = guided(predict, TABLE, context(1.0), context(0.0), cfg=2.0)(latents(), SIGMA)
    assert guess.dtype == torch.float32
    torch.testing.assert_close(guess, latents() - SIGMA * 0.5)


def test_the_true_noise_gives_back_the_clean_latent() -> None:
    clean, noise = latents(), torch.full((1, 4, 2, 2), 0.7)
    guess = guided(lambda x, t, c: noise, TABLE, context(1.0), None, cfg=1.0)(clean + noise * SIGMA, SIGMA)
    torch.testing.assert_close(guess, clean)


@pytest.mark.parametrize(("most", "sizes"), [(0, [2]), (1, [1, 1]), (2, [2])])
def test_texts_run_at_most_so_many_at_once(most: int, sizes: list[int]) -> None:
    predict, x = Recorder(), latents()
    denoise = guided(predict, TABLE, context(2.0), context(0.5), cfg=7.0, max_batch=most)
    guess = denoise(x, SIGMA)
    assert [len(asked) for asked, _, _ in predict.calls] == sizes
    assert [float(c) for _, _, context_BLD in predict.calls for c in context_BLD[:, 0, 0]] == [0.5, 2.0]
    torch.testing.assert_close(guess, x - SIGMA * (0.5 + 7.0 * (2.0 - 0.5)))


def test_texts_run_one_at_a_time_through_sampler_functions_too() -> None:
    predict = Recorder()
    options = ModelOptions().with_sampler_post_cfg_function(lambda args: args["denoised"])
    denoise = guided(predict, TABLE, context(2.0), context(0.5), 7.0, options, max_batch=1)
    torch.testing.assert_close(denoise(latents(), SIGMA), latents() - SIGMA * (0.5 + 7.0 * (2.0 - 0.5)))
    assert [len(asked) for asked, _, _ in predict.calls] == [1, 1]


class ModelKwargs:
    """A model that is told a vector beside its text, and answers with its first number and the text's mean."""

    def __call__(self, x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, text_embeds: Tensor) -> Tensor:
        told_B = text_embeds[:, 0] + context_BLD.mean(dim=(1, 2))
        return torch.ones_like(x_BCHW) * told_B[:, None, None, None]


def told(value: float, text: float) -> Condition:
    return Condition(context(text), model_kwargs={"text_embeds": torch.full((1, 6), value)})


def one_row_at_a_time(model, args):
    """A model function wrapper that asks for each row by itself."""
    rows = range(len(args["input"]))
    parts = [
        model(
            args["input"][n : n + 1],
            args["timestep"][n : n + 1],
            **{k: v[n : n + 1] if isinstance(v, Tensor) else v for k, v in args["c"].items()},
        )
        for n in rows
    ]
    return torch.cat(parts)


def test_each_text_goes_with_what_the_model_is_told_beside_it() -> None:
    x = latents()
    guess = guided(ModelKwargs(), TABLE, told(1.0, 2.0), told(3.0, 0.5), cfg=2.0)(x, SIGMA)
    torch.testing.assert_close(guess, x - (3.5 + (3.0 - 3.5) * 2.0) * SIGMA)


def test_a_wrapper_may_ask_for_a_part_of_the_batch_with_its_part_of_what_is_told() -> None:
    """Found in review: what is told was always that of the whole batch."""
    x, texts = latents(), (told(1.0, 2.0), told(3.0, 0.5))
    plain = guided(ModelKwargs(), TABLE, *texts, cfg=2.0)(x, SIGMA)
    options = ModelOptions(model_function_wrapper=one_row_at_a_time)
    torch.testing.assert_close(guided(ModelKwargs(), TABLE, *texts, 2.0, options)(x, SIGMA), plain)


def test_conditions_that_are_told_different_things_run_apart() -> None:
    short = Condition(context(2.0), model_kwargs={"text_embeds": torch.zeros(1, 4)})
    assert [b.members for b in batches((told(1.0, 2.0), short))] == [(1,), (0,)]
    assert [b.members for b in batches((told(1.0, 2.0), Condition(context(2.0))))] == [(1,), (0,)]
