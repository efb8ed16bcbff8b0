"""Parts of a run: ControlNets equal diffusers', and all kinds agree where a share is a whole number of steps."""

from __future__ import annotations

from modelpool.pool.values.core.refs import ImagePromptRef, LoraRef
from modelpool.pool.values.core.run_options import PerturbedAttention
from modelpool.pool.values.core.step_shares import begins_within, lies_within

STEPS = (1, 7, 10, 30, 50)


def kept(start: float, end: float, count: int) -> list[bool]:
    """`controlnet_keep` of diffusers' pipelines."""
    return [1.0 - float(i / count < start or (i + 1) / count > end) == 1.0 for i in range(count)]


def test_controlnets_act_in_the_steps_of_diffusers() -> None:
    shares = [number / 40 for number in range(41)] + [1 / 3, 2 / 3, 0.07, 0.29]
    for count in STEPS:
        for start in shares:
            for end in shares:
                found = [lies_within(step, count, start, end) for step in range(count)]
                assert found == kept(start, end, count), (count, start, end)


def test_whole_steps_mean_the_same_for_everything_that_has_parts() -> None:
    """Found in a review: options from 0.07 of 100 steps began one step late, since 0.07 * 100 is above 7."""
    for count in STEPS:
        for first in range(count):
            for last in range(first + 1, count + 1):
                start, end = first / count, last / count
                lora = LoraRef("l", "l", "0", 1.0, start=start, end=end)
                prompt = ImagePromptRef("p", "p", "0", 1.0, start=start, end=end)
                option = PerturbedAttention(start=start, end=end)
                for step in range(count):
                    wanted = first <= step < last
                    acting = [each(step, count) for each in (lora.is_on, prompt.is_on, option.acts)]
                    assert [*acting, lies_within(step, count, start, end)] == [wanted] * 4, (count, first, last, step)


def test_an_end_within_a_step_is_where_they_differ() -> None:
    """As the table of docs/explanation/step_shares.md says."""
    assert [step for step in range(10) if lies_within(step, 10, 0.0, 0.25)] == [0, 1]
    assert [step for step in range(10) if begins_within(step, 10, 0.0, 0.25)] == [0, 1, 2]
