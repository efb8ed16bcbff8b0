"""The files that a task reads, by component. Pure."""

from __future__ import annotations

from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.stage_params import (
    ControlRef,
    EmbeddingRef,
    EncodeParams,
    GligenRef,
    ImagePromptRef,
    LoraRef,
    OperationParams,
    SampleParams,
    StageParams,
    UpscaleParams,
    control_key,
    embedding_key,
    image_prompt_key,
    lora_key,
    roles_of,
)
from modelpool.pool.values.specs.spec import ComponentKey, Role, TaskSpec


def task_files(task: TaskSpec, work: StageParams) -> dict[ComponentKey, FilePart]:
    """Return the file of each component that the task uses, LoRAs, textual inversions, ControlNets, image prompt
    adapters and GLIGEN models included."""
    if isinstance(work, UpscaleParams):
        own = {task.uses[0].component: FilePart(work.model.path, files=work.model.files, sha256=work.model.sha256)}
        if (vae := work.vae) is not None:
            own[task.uses[1].component] = FilePart(vae.path, Role.VAE, vae.assembly, vae.files, vae.sha256)
        return own
    files: dict[ComponentKey, FilePart] = {}
    if isinstance(work, OperationParams):
        return files
    for use, role in zip(task.uses, roles_of(work, len(task.uses)), strict=True):
        if role is Role.CONTROLNET:
            control = _control(work, use.component)
            files[use.component] = FilePart(control.path, files=control.files, sha256=control.sha256)
            continue
        if role is Role.IMAGE_PROMPT:
            prompt = _image_prompt(work, use.component)
            files[use.component] = FilePart(prompt.path, files=prompt.files, sha256=prompt.sha256)
            continue
        if role is Role.GLIGEN:
            gligen = _gligen(work, use.component)
            files[use.component] = FilePart(gligen.path, files=gligen.files, sha256=gligen.sha256)
            continue
        model = work.model
        files[use.component] = FilePart(model.path, role, model.assembly, model.files, model.sha256)
        if use.adapters and isinstance(work, (EncodeParams, SampleParams)):
            read: dict[ComponentKey, LoraRef | EmbeddingRef] = {lora_key(lora): lora for lora in work.loras}
            if isinstance(work, EncodeParams):
                read |= {embedding_key(each): each for each in work.embeddings}
            for key in use.adapters:
                files[key] = FilePart(read[key].path, files=read[key].files, sha256=read[key].sha256)
    return files


def _control(work: StageParams, key: ComponentKey) -> ControlRef:
    """Return a ControlNet of a run."""
    assert isinstance(work, SampleParams), f"{key} is used by {work}"
    return next(control for control in work.controls if control_key(control) == key)


def _image_prompt(work: StageParams, key: ComponentKey) -> ImagePromptRef:
    """Return an image prompt of a run."""
    assert isinstance(work, SampleParams), f"{key} is used by {work}"
    return next(prompt for prompt in work.image_prompts if image_prompt_key(prompt) == key)


def _gligen(work: StageParams, key: ComponentKey) -> GligenRef:
    """Return the GLIGEN model of a run."""
    assert isinstance(work, SampleParams), f"{key} is used by {work}"
    return next(iter(work.all_of(GligenRef)))
