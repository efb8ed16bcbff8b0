"""Device memory that libraries take beside tensors: the workspaces of cuBLAS and cuBLASLt, one each per stream, and the
communicators of NCCL. Pure, torch-free.

torch allocates them at the first product on a stream and keeps them until the last engine closes, so plans leave them
out from the start. Sources of the sizes: aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from modelpool.pool.devices.kind_names import DeviceKind

#: streams with products: compute, patched weights (`TransferPipeline.overlapping`), and decodes that overlap
PRODUCT_STREAMS = 3
#: NCCL: buffers of a group, and of each of its members. Source: an assumption, from reports of 0.3 to 1.5 GB for 2 to 8
#: GPUs; a visit measures it (`benchmarks.gpu`, part "gangs")
GROUP_BYTES = MEMBER_BYTES = 128 << 20
_KIB = 1 << 10
#: cuBLAS: buffers of 4 MiB and 16 KiB; on Hopper and data centre Blackwell eight of 4 MiB
_USUAL_BYTES = (2 * 4096 + 8 * 16) * _KIB
_LARGE_BYTES = 8 * 4096 * _KIB
_LARGE_GENERATIONS = ((9, 0), (10, 0))
#: cards from this size have a larger workspace of cuBLASLt
_LT_LARGE_CARD_BYTES = 24 << 30


def workspace_bytes(
    kind: DeviceKind,
    generation: tuple[int, int] | None,
    total_bytes: int,
    environment: Mapping[str, str],
    captures: bool = False,
) -> int:
    """Return the bytes of workspaces on all streams of an engine on a device with `total_bytes`. `captures`: whether it
    also captures graphs, on a stream of its own. 0 for devices other than CUDA."""
    if kind is not DeviceKind.CUDA or generation is None:
        return 0
    per_stream = _cublas_bytes(generation, environment) + _cublaslt_bytes(generation, total_bytes, environment)
    return per_stream * (PRODUCT_STREAMS + captures)


def _cublas_bytes(generation: tuple[int, int], environment: Mapping[str, str]) -> int:
    """As the variable says, such as ":4096:8" for eight buffers of 4096 KiB; else the default."""
    chosen = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if chosen:
        return sum(int(size) * int(count) for size, count in chosen) * _KIB
    return _LARGE_BYTES if generation in _LARGE_GENERATIONS else _USUAL_BYTES


def _cublaslt_bytes(generation: tuple[int, int], total_bytes: int, environment: Mapping[str, str]) -> int:
    """As the variable says, in KiB; else the default. Some releases of torch use the workspace of cuBLAS instead."""
    chosen = environment.get("CUBLASLT_WORKSPACE_SIZE", "").strip()
    if chosen.isdigit():
        return int(chosen) * _KIB
    if generation[0] >= 9:
        return 32768 * _KIB
    return (4096 if generation[0] == 8 and total_bytes >= _LT_LARGE_CARD_BYTES else 1024) * _KIB


def communicator_bytes(kind: DeviceKind, groups: Sequence[int]) -> int:
    """Return the bytes that NCCL takes for groups of so many GPUs. 0 for devices other than CUDA, and for groups of
    one."""
    if kind is not DeviceKind.CUDA:
        return 0
    return sum(GROUP_BYTES + MEMBER_BYTES * size for size in groups if size > 1)
