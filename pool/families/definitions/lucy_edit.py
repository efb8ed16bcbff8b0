"""Lucy Edit: edits a video by an instruction. Wan 2.2 text-to-video of 5B that reads the latent of the given video.
Torch-free.

Every patch has the level of the step: the pipeline keeps nothing of the given video unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.families.definitions import wan
from modelpool.pool.families.parts import vocabulary as fam

_TI2V_22 = next(family for family in wan.FAMILIES if family.name == "wan22_ti2v")

FAMILIES = (
    replace(
        _TI2V_22,
        name="lucy_edit",
        title="Lucy Edit",
        detect=replace(_TI2V_22.detect, when=fam.having(model_type="t2v", in_dim=96, out_dim=48), comfyui="WAN22_T2V"),
        build=replace(_TI2V_22.build, forward=wan.forward, optional_inputs=frozenset({"context_mask"})),
        sampling=replace(
            _TI2V_22.sampling,
            reads=frozenset({"context", "context_mask", "followed"}),
            video=fam.video_like(_TI2V_22.sampling, frames=81, begins=None),
        ),
        size=(832, 480),
        sources="diffusers' LucyEditPipeline; decart-ai/Lucy-Edit-Dev has the scheduler of Wan 2.2 5B and 24 frames a "
        "second",
        folder=replace(_TI2V_22.folder, pipeline="LucyEditPipeline"),
    ),
)
