"""Draws jobs by popularity of models, LoRAs, ControlNets and users. The Random is passed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from modelpool.pool.values.specs.spec import ComponentSpec
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.models import InventedModel

T = TypeVar("T")


def zipf_weights(count: int, exponent: float = 1.0) -> list[float]:
    """Popularity of `count` items, the first the most popular: 1 / rank ** exponent."""
    return [1.0 / float(rank**exponent) for rank in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class Mix:
    """The distribution of jobs. In every list, the first item is the most popular."""

    models: Sequence[InventedModel]
    #: LoRAs of every model; "" is the bare model, "x+y" both of them
    loras: Sequence[str] = ("",)
    model_exponent: float = 1.0
    lora_exponent: float = 1.0
    #: consecutive jobs with one prompt and different seeds
    seeds_per_prompt: int = 1
    steps: Sequence[int] = (20,)
    #: users; consecutive jobs of one prompt have one user
    users: Sequence[str] = ("",)
    user_exponent: float = 1.0
    #: ControlNets of every model; "" is none
    controlnets: Sequence[str] = ("",)
    controlnet_exponent: float = 1.0

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """The components of all models, with their LoRAs and ControlNets."""
        loras = tuple(dict.fromkeys(name for names in self.loras for name in names.split("+")))
        return (
            *(spec for model in self.models for spec in model.components),
            *(spec for model in self.models for spec in model.adapters(loras, self.controlnets)),
        )

    def submissions(
        self, arrivals: Iterator[float], rng: Random, first: int = 0, batch: str = ""
    ) -> Iterator[Submitted]:
        """Return one job for each arrival, numbered from `first` on; a prompt has the number of its first job."""
        model, loras, controlnet, steps, user = self.models[0], "", self.controlnets[0], self.steps[0], self.users[0]
        prompt = ""
        for count, at in enumerate(arrivals):
            number = first + count
            if count % self.seeds_per_prompt == 0:
                prompt = f"prompt {number}"
                model = _popular(self.models, self.model_exponent, rng)
                loras = _popular(self.loras, self.lora_exponent, rng)
                steps = rng.choice(self.steps)
                if len(self.users) > 1:
                    user = _popular(self.users, self.user_exponent, rng)
                if len(self.controlnets) > 1:
                    controlnet = _popular(self.controlnets, self.controlnet_exponent, rng)
            job = model.job(
                f"job-{number}",
                prompt,
                number,
                loras=[name for name in loras.split("+") if name],
                controlnets=[controlnet] if controlnet else [],
                steps=steps,
                user=user,
                batch=batch,
            )
            yield Submitted(at, job)


def _popular(things: Sequence[T], exponent: float, rng: Random) -> T:
    return rng.choices(things, zipf_weights(len(things), exponent))[0]
