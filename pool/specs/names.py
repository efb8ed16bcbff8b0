"""Names of what the pool serves: strings, which only the type checker keeps apart. Knows nothing of what they name."""

from __future__ import annotations

from typing import NewType

ComponentKey = NewType("ComponentKey", str)  #: one loadable set of weights, "shapes/vae@3f2a91c04b"
WorkerId = NewType("WorkerId", str)  #: the actor that owns one GPU, "gpu-0"; survives restarts
JobId = NewType("JobId", str)  #: what a driver asked for
UserId = NewType("UserId", str)  #: who pays for a job in the account of fair shares; "" is whoever has no name
NodeId = NewType("NodeId", str)  #: one machine, whose memory and disks its workers share
TaskId = NewType("TaskId", str)  #: one stage of work; a digest of all that its result depends on
