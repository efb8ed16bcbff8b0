"""CPU seconds of a process and its descendants, by what they do for a pool."""

from __future__ import annotations

import contextlib

import psutil

#: what a process does, by a part of its command line; the first that fits
PARTS = {
    "ray::ControllerActor": "controller",
    "ray::JobServiceActor": "job service",
    "ray::GpuWorkerActor": "workers",
    "raylet/raylet --": "raylet",
    "ray::": "other actors",
    "catalog_main": "catalog",
    "fork_client": "fork clients",
    "fork_server": "fork server, and the catalog where it is a fork",
    "gcs_server": "control service (GCS)",
    "/ray/": "Ray's other processes",
}
COMMAND = "command"


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a process and its descendants until now, with those that have ended, by part."""
    found: dict[str, float] = {}
    with contextlib.suppress(psutil.Error):
        command = psutil.Process(pid)
        for process in [command, *command.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times, line = process.cpu_times(), " ".join(process.cmdline())
                part = next((name for text, name in PARTS.items() if text in line), "others")
                part = COMMAND if process == command else part
                spent = times.user + times.system + times.children_user + times.children_system
                found[part] = found.get(part, 0.0) + spent
    return found
