"""Name types of the pool: strings that only the type checker distinguishes."""

from __future__ import annotations

from typing import NewType

ComponentKey = NewType("ComponentKey", str)  #: one loadable set of weights, "shapes/vae@3f2a91c04b"
WorkerId = NewType("WorkerId", str)  #: the actor that owns one GPU, "gpu-0"; survives restarts
JobId = NewType("JobId", str)  #: one job of a driver
UserId = NewType("UserId", str)  #: user for fair-share scheduling; "" is anonymous
NodeId = NewType("NodeId", str)  #: one machine; its workers share memory and disks
TaskId = NewType("TaskId", str)  #: one stage; a digest of everything that its result depends on
