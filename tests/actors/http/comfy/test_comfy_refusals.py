"""Nodes that the pool does not have are refused with what they would need, and a model that a company publishes is not
taken for its paid service."""

from __future__ import annotations

from modelpool.actors.http.comfy.comfy_refused_nodes import reason_for
from tests.each_case import each_case

PAID = "it calls a paid service of another company, which the pool does not do"
REASONS = {
    PAID: (
        *("KlingVideoNode", "ByteDance2ReferenceNodeV2", "BytedanceSeedream", "GeminiImage2Node", "OpenAIGPTImage1"),
        *("RecraftV4TextToVectorNode", "RunwayImageToVideoNodeGen4", "MinimaxHailuo03ReferenceNode", "Veo3VideoNode"),
        *("LtxApi25TextToVideo", "LtxvApiImageToVideo", "Wan2TextToVideoApi", "HappyHorseTextToVideoApi", "ClaudeNode"),
        *("IdeogramV3", "Flux3ImageToVideoNode", "FluxKontextMaxImageNode", "Krea2ImageNode", "TripoTextToModelNode"),
        *("ElevenLabsVoiceSelector", "OpenRouterLLMNode", "Rodin3D_Gen2", "SoniloTextToMusic", "MireloTextToSFX"),
    ),
    "the pool has no model of this kind (MiniMax-H3)": ("MiniMaxH3ImageToVideo", "MiniMaxH3SigmaShift"),
    "the pool has no model of this kind (Wan S2V)": ("WanSoundImageToVideo",),
    "the pool makes no 3D models": ("SaveGLB", "Trellis2ShapeStage", "SAM3DBody_Predict", "TripoSplatConditioning"),
    "the pool has no model that detects or segments, or that finds depth and poses in images": (
        *("SAM3_Detect", "DA3Inference", "SDPoseKeypointExtractor", "RemoveBackground"),
    ),
    "the pool has windows of frames of Wan and Hunyuan Video: ContextWindowsManual": ("LTXVContextWindows",),
    "the pool runs no language models that write texts": ("TextGenerate", "Qwen2_Zho"),
    "the pool has no model of this kind (frame interpolation)": ("FrameInterpolate", "GMFSS Fortuna VFI"),
    "it reads files of a server, which the pool does not have; write the text itself": ("PresetText", "Load Text File"),
}


@each_case("reason", REASONS)
def test_a_node_is_refused_with_what_it_needs(reason: str) -> None:
    assert {kind: reason_for(kind) for kind in REASONS[reason]} == dict.fromkeys(REASONS[reason], reason)


def test_nodes_of_published_models_call_no_service() -> None:
    """`Ideogram4Scheduler` was refused as a node of the company's service."""
    published = ("Ideogram4Scheduler", "Flux3LayoutPrompt", "QwenImage21Cache", "MiniMaxMusic3TextEncode", "SamplerLCM")
    assert [kind for kind in published if reason_for(kind) == PAID] == []
