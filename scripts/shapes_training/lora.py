"""Trains LoRAs on the frozen example model, and names their tensors as kohya does.

Knows which layers a LoRA of the example changes, how the low-rank pair enters a forward pass, and the layer names of
sd-scripts. Does not know styles: it gets examples of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from scripts.shapes_training import diffusion, text

BATCH = 32
LEARNING_RATE = 3e-3
# Trained at several strengths, so that 0.8 and 1.0 both give the full effect.
WEAKEST, STRONGEST = 0.7, 1.1


class LoraPair(nn.Module):
    """The low-rank change of one Linear or Conv2d: up(down(x)) * alpha / rank, added to the layer's output."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, alpha: float) -> None:
        super().__init__()
        self.scale = alpha / rank
        self.down: nn.Linear | nn.Conv2d
        self.up: nn.Linear | nn.Conv2d
        if isinstance(layer, nn.Conv2d):
            height, width = layer.kernel_size
            down, across = layer.stride
            assert (height, down) == (width, across), "the example's kernels and strides are square"
            self.down = nn.Conv2d(layer.in_channels, rank, height, down, padding=height // 2, bias=False)
            self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the change of the layer's output at strength 1."""
        return torch.as_tensor(self.up(self.down(inputs))) * self.scale


@dataclass(eq=False)
class Lora:
    """The pairs of one LoRA by kohya name, and the strength at which their hooks add them."""

    pairs: dict[str, LoraPair]
    rank: int
    alpha: float
    strength: float = 0.0
    owner: Lora | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Return all trained parameters."""
        return [parameter for pair in self.pairs.values() for parameter in pair.parameters()]

    def include(self, other: Lora) -> None:
        """Add another LoRA's pairs, for one strength and one file. Effects: other uses the strength of this one."""
        other.owner = self
        self.pairs |= other.pairs

    def state(self) -> dict[str, torch.Tensor]:
        """Return both weights of every pair in training precision, for load()."""
        return {
            f"{name}.{part}": value for name, pair in self.pairs.items() for part, value in pair.state_dict().items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load weights from state(). Effects: the pairs' weights."""
        for name, pair in self.pairs.items():
            pair.load_state_dict({part: state[f"{name}.{part}"] for part in ("down.weight", "up.weight")})

    @property
    def active_strength(self) -> float:
        """The strength that its hooks use: the owner's if it was included in another."""
        return self.strength if self.owner is None else self.owner.active_strength

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the file's tensors, float16, three per layer."""
        found: dict[str, torch.Tensor] = {}
        for name, pair in self.pairs.items():
            found[f"{name}.lora_down.weight"] = pair.down.weight.detach().half().contiguous()
            found[f"{name}.lora_up.weight"] = pair.up.weight.detach().half().contiguous()
            found[f"{name}.alpha"] = torch.tensor(self.alpha, dtype=torch.float16)
        return found


def attach(model: nn.Module, prefix: str, targets: Sequence[str], rank: int, alpha: float) -> Lora:
    """Create a LoRA for every Linear and Conv2d whose path contains one of targets, and add its hooks.

    Effects: adds forward hooks to those layers; they read its strength, initially 0, at every call.
    Names are prefix + path with underscores.
    """
    lora = Lora({}, rank, alpha)
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and any(target in path for target in targets):
            pair = LoraPair(layer, rank, alpha)
            lora.pairs[f"{prefix}_{path.replace('.', '_')}"] = pair
            layer.register_forward_hook(_adder(lora, pair))
    return lora


def _adder(lora: Lora, pair: LoraPair):  # type: ignore[no-untyped-def]
    def add(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        strength = lora.active_strength
        return output if strength == 0 else output + pair(inputs[0]) * strength

    return add


@dataclass(frozen=True, slots=True)
class Lesson:
    """The training data of a step: examples of a style, and the other LoRAs that are active during it."""

    examples: diffusion.Examples
    others_on: tuple[Lora, ...] = ()


def train(
    unet: nn.Module,
    encoder: nn.Module,
    lora: Lora,
    lessons: Sequence[Lesson],
    others: Sequence[Lora],
    encode: text.Encode,
    steps: int,
    stage: str,
    log: diffusion.Log,
) -> None:
    """Train one attached LoRA, with the lessons in turn. Effects: lora's weights and strength; log.

    The base stays frozen. `others` are all other attached LoRAs; each lesson specifies which of them are active.
    """
    alphas = diffusion.signal_shares()
    distinct = ["", *sorted({caption for lesson in lessons for caption in lesson.examples.captions})]
    position = {caption: index for index, caption in enumerate(distinct)}
    tokens = text.token_rows(distinct, encode)
    turns = itertools.cycle(lessons)

    def loss_of_step() -> torch.Tensor:
        lesson = next(turns)
        lora.strength = WEAKEST + (STRONGEST - WEAKEST) * float(torch.rand(()))
        for other in others:
            other.strength = 0.9 if other in lesson.others_on else 0.0
        chosen = torch.randint(0, len(lesson.examples.captions), (BATCH,))
        captions = torch.tensor([position[lesson.examples.captions[index]] for index in chosen.tolist()])
        captions[torch.rand(BATCH) < diffusion.SHARE_WITHOUT_CAPTION] = 0
        different, which = torch.unique(captions, return_inverse=True)
        context = encoder(tokens[different]).last_hidden_state[which]
        return diffusion.noise_loss(unet, lesson.examples.latents[chosen], context, alphas)

    diffusion.optimise(lora.parameters(), loss_of_step, steps, LEARNING_RATE, stage, log)
    for each in (lora, *others):
        each.strength = 0.0
