"""The rooms of each package and the folders in them, lowest first: each imports only what comes before it.

A room is a folder of a package, such as pool/weights. "." in the order of a room are the modules in the room itself.
"""

from __future__ import annotations

#: package -> room -> its folders, both lowest first
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "pool": {
        "values": ("specs", "core"),
        "devices": ("torch_api", "sim", "."),
        "files": ("formats", "fetch"),
        "weights": (
            "plan", "keymaps", "ops", "quant", "tracing", "patches", "options", "patcher/blocks", "patcher", "vram",
        ),
        "families": ("detection/layouts", "parts", "definitions", "detection", "."),
        "models": (
            "text", "components/common", "lora_names", "components/diffusion", "components/vae", "components/text",
            "components/vision", "components", "loading", "saving",
        ),
        "inference": (
            "sampling", "pixels", "conditioning", "guidance", "extensions", "controlnets", "upscalers", "image_prompts",
            "gang", "operations",
        ),
        "catalog": ("estimates", "registry", "."),
        "engine": (".",),
    },
    "scheduler": {
        "model": (".",),
        "decisions": ("costs", "queue", "placement"),
        "autoscaling": (".",),
        "core": (".",),
        "simulator": ("workloads", "record", "."),
    },
    "actors": {
        "request": (".", "job_files"),
        "config": (".",),
        "graph": ("common", "features", "."),
        "outputs": (".", "results"),
        "worker": ("wire", "step_checkpoints", "."),
        "control": ("metrics", "inputs", "history", ".", "detached"),
        "ray": (".",),
        "client": (".",),
        "http": ("service", "comfy", "native", "openai", "a1111", "page", ".", "ray_serve"),
        "cli": ("terminal", "cluster", "models", "simulate", "run", "."),
    },
}  # fmt: skip
#: folders that a reader meets in one room, at most
FOLDERS_IN_ROOM = 9
#: package -> its folders, lowest first
LAYERS: dict[str, tuple[str, ...]] = {
    package: tuple(room if inner == "." else f"{room}/{inner}" for room, order in rooms.items() for inner in order)
    for package, rooms in ROOMS.items()
}
