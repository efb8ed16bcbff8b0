"""What a member of a gang is about to compute, as digests: of the request, and of the patched weights on its device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from modelpool.pool.values.core.gang_errors import GangsDiffer
from modelpool.pool.values.core.stage_params import RunState, SampleParams
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: values of each weight that are compared: as many places from end to end
SAMPLED = 61


def request_digest(works: Sequence[SampleParams], inputs: Sequence[TaskInputs], resumed: Sequence[RunState]) -> str:
    """Return a digest of the requests, of their inputs and of the states that they resume from."""
    found = hashlib.sha256()
    for work, read in zip(works, inputs, strict=True):
        found.update(repr(work).encode())
        for name in sorted(read):
            found.update(name.encode())
            for array in getattr(read[name], "arrays", ()):
                found.update(array.tobytes())
    for state in resumed:
        found.update(repr((state.step, state.steps)).encode())
        for array in state.arrays:
            found.update(array.tobytes())
    return found.hexdigest()[:16]


def weight_digests(model: ModelPatcher, module: nn.Module) -> dict[str, str]:
    """Return a digest for the identity of the weights with their patches, under "", and one for some values of each
    weight that is on the device with its patches, by name. What streams is compared by the identity alone."""
    found = {"": f"{model.key} {model.patches.digest}"}
    resident = model.resident_modules()
    sampled: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        if name.rpartition(".")[0] in resident and not isinstance(weight.data, PackedWeight) and weight.numel():
            flat = weight.detach().reshape(-1)
            sampled[name] = flat[:: max(1, flat.numel() // SAMPLED)].to(torch.float32)
    if sampled:
        values = torch.cat(list(sampled.values())).to("cpu")
        pieces = values.split([each.numel() for each in sampled.values()])
        for name, piece in zip(sampled, pieces, strict=True):
            found[name] = hashlib.sha256(piece.numpy().tobytes()).hexdigest()[:16]
    return found


def expect_equal(gang: Gang, requests: Sequence[str], weights: Sequence[Mapping[str, str]]) -> None:
    """Raise GangsDiffer, which names the members that differ from most others, and where: `requests` and `weights` are
    the digests of all members, by rank."""
    if differing := _differing(dict(enumerate(requests))):
        raise GangsDiffer(f"{_named(gang, differing)} was asked for another run than the rest of its gang")
    for name in sorted({name for each in weights for name in each}):
        own = {rank: each[name] for rank, each in enumerate(weights) if name in each}
        if differing := _differing(own):
            where = f"in {name}" if name else f"({', '.join(sorted(set(own.values())))})"
            raise GangsDiffer(f"{_named(gang, differing)} has other patched weights than the rest of its gang {where}")


def _differing(digests: Mapping[int, str]) -> list[int]:
    """Return the ranks with another digest than most, the first one's of those that are as frequent."""
    usual = Counter(digests.values()).most_common(1)[0][0] if digests else ""
    return [rank for rank, digest in digests.items() if digest != usual]


def _named(gang: Gang, ranks: Sequence[int]) -> str:
    return ", ".join(f"{gang.members[rank]} (rank {rank})" for rank in ranks)
