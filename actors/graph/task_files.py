"""The files that a task reads, by component. Pure."""

from __future__ import annotations

from modelpool.pool.core.stage_params import EncodeParams, SampleParams, StageParams, control_key, lora_key, roles_of
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import ComponentKey, Role, TaskSpec


def task_files(task: TaskSpec, work: StageParams) -> dict[ComponentKey, FilePart]:
    """Return the file of each component that the task uses, LoRAs and ControlNets included."""
    files: dict[ComponentKey, FilePart] = {}
    for use, role in zip(task.uses, roles_of(work, len(task.uses)), strict=True):
        if role is Role.CONTROLNET:
            files[use.component] = FilePart(_control_path(work, use.component))
            continue
        files[use.component] = FilePart(work.model.path, role, work.model.assembly)
        if use.adapters and isinstance(work, (EncodeParams, SampleParams)):
            paths = {lora_key(lora): lora.path for lora in work.loras}
            for key in use.adapters:
                files[key] = FilePart(paths[key])
    return files


def _control_path(work: StageParams, key: ComponentKey) -> str:
    """Return the path of a ControlNet."""
    assert isinstance(work, SampleParams), f"{key} is used by {work}"
    return next(control.path for control in work.controls if control_key(control) == key)
