"""What a member of a gang is about to compute, as digests: of the request, and of the patched weights on its device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelpool.pool.values.core.gang_errors import GangsDiffer
from modelpool.pool.values.core.stage_params import RunState, SampleParams
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: values of each weight on the device that are compared: as many places from end to end
SAMPLED = 61
#: of each weight on the host, where a place may be a read from a disk
SAMPLED_ON_HOST = 4
_ON_HOST, _AS_USED = " on the host", " as it is used"


def request_digest(works: Sequence[SampleParams], inputs: Sequence[TaskInputs], resumed: Sequence[RunState]) -> str:
    """Return a digest of the requests, of their inputs and of the states that they resume from."""
    found = hashlib.sha256()
    for work, read in zip(works, inputs, strict=True):
        found.update(repr(work).encode())
        for option in fields(work.options):
            if not option.repr:  # so that reports of runs without it stay as they are
                found.update(repr(getattr(work.options, option.name)).encode())
        for name in sorted(read):
            found.update(name.encode())
            _update(found, read[name])
    for state in resumed:
        _update(found, state)
    return found.hexdigest()[:16]


def _update(found: Any, value: Any) -> None:
    """Add all that a result consists of. Raises TypeError for a value without a digest: it would count for nothing."""
    if isinstance(value, np.ndarray):
        found.update(repr((value.shape, value.dtype.str)).encode())
        found.update(value.tobytes())
    elif is_dataclass(value):
        found.update(type(value).__name__.encode())
        for each in fields(value):
            found.update(each.name.encode())
            _update(found, getattr(value, each.name))
    elif isinstance(value, Mapping):
        for name in sorted(value):
            found.update(repr(name).encode())
            _update(found, value[name])
    elif isinstance(value, tuple | list):
        found.update(repr(len(value)).encode())
        for one in value:
            _update(found, one)
    elif value is None or isinstance(value, str | bytes | bool | int | float | np.generic | Enum):
        found.update(repr(value).encode())
    else:
        raise TypeError(f"found a {type(value).__name__}, expected values with a digest")


def weight_digests(model: ModelPatcher, module: nn.Module) -> dict[str, str]:
    """Return digests by name. "" has the identity of the weights with their patches. Each weight has digests of some of
    its values: on the host, which every member has; on the device, with its patches; and without patches, as it is
    used. The last one compares a member that has a weight on its device with one that streams it."""
    found = {"": f"{model.key} {model.patches.digest} {model.compute_dtype}"}
    resident = model.resident_modules()
    on_device: dict[str, Tensor] = {}
    for name, weight in nn.Module.named_parameters(module):  # as they are: a casting layer would bring each
        if name.rpartition(".")[0] in resident:
            on_device |= {f"{name}{part}": _sampled(each, SAMPLED) for part, each in _parts(weight.data)}
    on_host = {
        f"{name}{part}{_ON_HOST}": _sampled(each, SAMPLED_ON_HOST)
        for name, host in model.host_parameters.items()
        for part, each in _parts(host)
    }
    for name, values in _unpatched(model, module, resident):
        is_resident = name.rpartition(".")[0] in resident
        (on_device if is_resident else on_host)[f"{name}{_AS_USED}"] = values
    for sampled in (on_device, on_host):
        if sampled:
            values = torch.cat(list(sampled.values())).to("cpu")
            pieces = values.split([each.numel() for each in sampled.values()])
            for name, piece in zip(sampled, pieces, strict=True):
                found[name] = hashlib.sha256(piece.numpy().tobytes()).hexdigest()[:16]
    return found


def _unpatched(model: ModelPatcher, module: nn.Module, resident: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield some values of each weight without patches, in the precision in which it is used, from where it is."""
    patched, hosts = model.patches.parameters, model.host_parameters
    for name, weight in nn.Module.named_parameters(module):
        host = hosts.get(name)
        if host is None or name in patched or isinstance(host, PackedWeight):
            continue
        is_resident = name.rpartition(".")[0] in resident
        if is_resident and isinstance(weight.data, PackedWeight):  # data of others would be moved to the device
            continue
        used = weight if is_resident else host
        if used.dtype in (host.dtype, model.compute_dtype):  # one rounding, wherever it is
            yield name, _sampled(used, SAMPLED_ON_HOST).to(model.compute_dtype).to(torch.float32)


def _parts(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a weight consists of, each with a suffix of its name."""
    if isinstance(weight, PackedWeight):
        yield from ((f" ({part})", each) for part, each in weight.parts.items())
    else:
        yield "", weight


def _sampled(tensor: Tensor, places: int) -> Tensor:
    """Some values from end to end, float32."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // places)].to(torch.float32)


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
