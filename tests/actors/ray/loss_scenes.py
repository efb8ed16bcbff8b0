"""Scenes with workers that end in all ways, for drivers on a local Ray: a fleet without a controller."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from modelpool.actors.ray.actor_options import WorkerNeeds
from modelpool.actors.ray.ray_fleet import NewWorker, RayFleet
from modelpool.actors.ray.ray_losses import LossExaminer, take_evidence, trace_folder
from modelpool.actors.ray.ray_nodes import RayNodes
from modelpool.actors.worker.crash_trace import CrashEvidence, CrashTrace
from modelpool.pool.specs.spec import NodeId, WorkerId, WorkerSpec
