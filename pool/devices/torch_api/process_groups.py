"""torch's names for process groups that are private or behave unlike their documentation. Only gangs import it."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import TCPStore as TCPStore

#: without it, torch ends the process when an operation of NCCL takes too long
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def backend_for(device: torch.device) -> str:
    """Return the backend of a gang on `device`: members agree over gloo, and CUDA tensors go over NCCL."""
    if device.type != "cuda":
        return "gloo"
    os.environ.setdefault(_HANDLING, "0")
    return "cpu:gloo,cuda:nccl"


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Change the limit of operations of `group` that begin from now on."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def finished_within(operation: dist.Work, seconds: float) -> bool:
    """Wait for an operation among hosts (gloo); return False if it goes on after `seconds`. Raises RuntimeError if it
    has failed."""
    try:
        operation.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not operation.is_completed():
            return False
        operation.wait()  # its own error, if it has not ended well in the meantime
    return True


def abandon_group() -> None:
    """Leave the default group, whatever its other members do. Kernels of NCCL that wait for them end."""
    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_nccl_available() and "nccl" in dist.get_backend_config():
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()
