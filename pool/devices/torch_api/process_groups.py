"""torch's names for process groups that are private or behave unlike their documentation. Only gangs import it."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import TCPStore as TCPStore

#: without it, torch ends the process when an operation of NCCL takes too long
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
#: between two looks at operations of a group that was left
_LOOK_SECONDS = 0.05


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


def abandon_group(pending: Sequence[dist.Work] = ()) -> None:
    """Leave the default group, whatever its other members do. Kernels of NCCL that wait for them end. Of `pending`
    operations among hosts, those that wait for a member that does not answer end by their own limit, until when torch
    would wait for them: a thread does."""
    if not dist.is_initialized():
        return
    endless = [each for each in pending if not each.is_completed()]
    groups = list(dist.distributed_c10d._world.pg_map) if endless else []
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_nccl_available() and "nccl" in dist.get_backend_config():
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()
    if endless:
        threading.Thread(target=_hold_until_over, args=(groups, endless), name="gang end", daemon=True).start()


def _hold_until_over(groups: list[dist.ProcessGroup], operations: list[dist.Work]) -> None:
    """Keep groups until their operations have ended: whoever drops the last reference to one waits for these."""
    while not all(each.is_completed() for each in operations):
        time.sleep(_LOOK_SECONDS)
    groups.clear()
