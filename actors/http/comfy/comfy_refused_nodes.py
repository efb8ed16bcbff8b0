"""Why nodes that the pool does not have are refused: ComfyUI's own nodes by group, and everything else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.actors.http.comfy.node_errors import NodeError

_MERGING = "the pool merges Stable Diffusion's UNets by block, and other models as a whole: ModelMergeSimple"
_3D = "the pool makes no 3D models"
_REMOTE = "it calls a service of another company, and not a model of the pool"
_HOOKS = "LoRAs over the steps are written as name:0.8@0-0.5 in the pool's own requests"
_FILES = "the pool writes outputs, and no files of weights or latents"
_TRAINING = "the pool trains no models"
_USER_MEDIA = "the pool reads videos and audio of users in its own requests alone"
_DETECTION = "the pool has no model that detects or segments"
#: of ComfyUI's own nodes, by name
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("GLIGENLoader", "GLIGENTextBoxApply"),
            "the pool has no GLIGEN; regions with texts are ConditioningSetArea and ConditioningSetMask",
        ),
        "HypernetworkLoader": "the pool reads no hypernetworks; LoRAs have replaced them",
        "PerpNegGuider": "the pool has no guidance by a perpendicular negative text; CFGGuider has guidance",
        "PerpNeg": "the pool has no guidance by a perpendicular negative text",
        "PatchModelAddDownscale": "the pool does not scale the features inside of a model; use a second pass",
        **dict.fromkeys(
            ("PhotoMakerLoader", "PhotoMakerEncode"), "the pool has no PhotoMaker; IP-Adapters are image prompts"
        ),
        **dict.fromkeys(("NAGuidance", "TCFG", "Mahiro", "APG", "EpsilonScaling", "ScaleROPE2"), (
            "the pool does not have this kind of guidance"
        )),
        **dict.fromkeys(
            ("ConditioningSetAreaPercentageVideo", "ConditioningSetPropertiesAndCombine", "ConditioningSetProperties",
             "ConditioningSetDefaultCombine", "ConditioningTimestepsRange", "PairConditioningSetProperties",
             "PairConditioningSetPropertiesAndCombine", "PairConditioningCombine", "SetClipHooks", "CreateHookLora",
             "CreateHookLoraModelOnly", "CreateHookModelAsLora", "CreateHookModelAsLoraModelOnly", "SetHookKeyframes",
             "CreateHookKeyframe", "CreateHookKeyframesInterpolated", "CreateHookKeyframesFromFloats", "CombineHooks2",
             "CombineHooks4", "CombineHooks8"),
            _HOOKS,
        ),
        **dict.fromkeys(
            ("StableCascade_StageC_VAEEncode", "StableCascade_SuperResolutionControlnet"),
            "Stable Cascade generates images from texts here: the encoder of stage C is not run",
        ),
        **dict.fromkeys(
            ("SaveLatent", "LoadLatent", "CheckpointSave", "CLIPSave", "VAESave", "ModelSave", "LoraSave",
             "ImageOnlyCheckpointSave", "SaveLoRA", "SaveLoRANode", "ExtractLoRA"),
            _FILES,
        ),
        **dict.fromkeys(
            ("TrainLoraNode", "LoraModelLoader", "LossGraphNode", "LoadImageSetFromFolderNode",
             "LoadImageTextSetFromFolderNode", "LoadTrainingDataset", "SaveTrainingDataset", "MakeTrainingDataset"),
            _TRAINING,
        ),
        **dict.fromkeys(("RecordAudio", "LoadVideo", "Video Slice", "VHS_LoadVideo", "VHS_LoadVideoPath",
                         "VHS_LoadAudio", "VHS_LoadImagesPath"), _USER_MEDIA),
        **dict.fromkeys(("WebcamCapture", "Painter"), "it needs the editor's page"),
        **dict.fromkeys(
            ("VAEDecodeHunyuan3D", "EmptyLatentHunyuan3Dv2", "Hunyuan3Dv2Conditioning",
             "Hunyuan3Dv2ConditioningMultiView", "VoxelToMeshBasic", "VoxelToMesh", "SaveGLB", "Load3D",
             "Load3DAnimation", "Preview3D", "Preview3DAnimation", "SaveGLBMesh"),
            _3D,
        ),
        **dict.fromkeys(
            ("ModelPatchLoader", "QwenImageDiffsynthControlnet", "USOStyleReference", "ZImageFunControlnet"),
            "the pool reads no patches of models in a file of their own but LoRAs and ControlNets",
        ),
        **dict.fromkeys(("OptimalStepsScheduler",), "the pool does not have its levels; ManualSigmas lists levels"),
        **dict.fromkeys(
            ("LTXVLatentUpsampler", "LatentUpscaleModelLoader", "HunyuanVideoLatentUpscaleWithModel"),
            "the pool has no upscalers of latents",
        ),
        **dict.fromkeys(("SAM3_Detect", "SAM2", "LoadBackgroundRemovalModel", "RemoveBackground"), _DETECTION),
    }
)  # fmt: skip
#: of groups of nodes, by the beginning of the name
_PREFIXES: tuple[tuple[str, str], ...] = (
    ("ModelMerge", _MERGING),
    ("CLIPMerge", _MERGING),
    ("CLIPAdd", _MERGING),
    ("CLIPSubtract", _MERGING),
    ("ModelAdd", _MERGING),
    ("ModelSubtract", _MERGING),
    *((prefix, _REMOTE) for prefix in (
        "BFL", "FluxPro", "FluxKontextPro", "FluxKontextMax", "FluxProUltra", "Flux2Pro", "Ideogram", "Kling", "Luma",
        "Minimax", "OpenAI", "Pika", "PixVerse", "Pixverse", "Recraft", "Runway", "Rodin", "Stability", "Tripo", "Veo",
        "Gemini", "Vidu", "Moonvalley", "ByteDance", "Bytedance", "WanTextToVideoApi", "WanImageToVideoApi",
        "WanReference", "Topaz", "Meshy", "ElevenLabs", "Grok", "Magnific", "HitPaw", "Bria", "Sora", "LtxvApi",
    )),
    ("IPAdapter", "the pool's image prompts are IP-Adapters: the field image_prompts of its own requests"),
    ("Hunyuan3D", _3D),
    ("GroundingDino", _DETECTION),
    ("SAM", _DETECTION),
    ("BRIA_RMBG", _DETECTION),
    ("ImageRemoveBackground", _DETECTION),
    ("RemBG", _DETECTION),
)  # fmt: skip
_UNKNOWN = "a node of another kind, which is not among those of the pool (GET /object_info lists them)"


def reason_for(kind: str) -> str:
    """Return why a kind of node that the pool does not have is refused."""
    if kind in _REASONS:
        return _REASONS[kind]
    if kind.endswith(("Api", "ApiNode")):
        return _REMOTE
    return next((reason for prefix, reason in _PREFIXES if kind.startswith(prefix)), _UNKNOWN)


def unknown_node(node_id: str, kind: str) -> NodeError:
    """Return the error of a node that the pool does not have."""
    name = kind[:100]
    return NodeError(node_id, name, "missing_node_type", "unknown node", f"{name}: {reason_for(kind)}")
