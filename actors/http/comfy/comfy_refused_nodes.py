"""Why nodes that the pool does not have are refused: ComfyUI's own nodes by group, and everything else. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from modelpool.actors.http.comfy.node_errors import NodeError

_MERGING = "the pool merges Stable Diffusion's UNets by block, and other models as a whole: ModelMergeSimple"
_3D = "the pool makes no 3D models"
_REMOTE = "it calls a paid service of another company, which the pool does not do"
_HOOKS = "LoRAs over the steps are written as name:0.8@0-0.5 in the pool's own requests"
_FILES = "the pool writes outputs, and no files of weights or latents"
_TRAINING = "the pool trains no models"
_USER_MEDIA = "videos and audio of users are uploaded, and read as a whole by LoadVideo and LoadAudio"
_DETECTION = "the pool has no model that detects or segments, or that finds depth and poses in images"
_WRAPPED = (
    "it samples by itself, besides ComfyUI; ComfyUI's own nodes are supported: UNETLoader or UnetLoaderGGUF, "
    "ModelSamplingSD3, WanImageToVideo, KSamplerAdvanced"
)
_SAMPLERS = "the pool does not have its samplers; KSampler has euler, heun, dpmpp_2m, res_multistep and others"
_IN_TILES = "the pool samples a latent in one piece; UltimateSDUpscale redraws an image tile by tile"
_BETWEEN = "the pool has no model of this kind (frame interpolation)"
_MOTION = "the pool has no motion modules of AnimateDiff; it makes videos with Wan, Hunyuan Video, LTX and others"
_ON_DISK = "it reads files of a server, which the pool does not have; write the text itself"
_LANGUAGE = "the pool runs no language models that write texts"
#: nodes of companies that run models for money, by the beginning of the name. Some companies also publish models, of
#: which the nodes have other names
_PARTNERS = re.compile(
    r"(Anthropic|BFL|Beeble|Bria|Byte[Dd]ance|Claude|ClarityCrystal|ComfyCloud|ElevenLabs|FishAudio"
    r"|Flux(Pro|KontextPro|KontextMax|2Pro|2Max|VTO|Erase|Video(Edit|Upscale)|3(Max)?(Image|Text|Frames)ToVideo"
    r"|3VideoContinuation|[23]ImageNode)|Freepik|Gemini|Google|Grok|HappyHorse|HeyGen|Higgsfield|HitPaw|Ideogram(?!4)|Kling"
    r"|Krea\d+(Image|Edit|StyleReference)Node|L(tx|TX)[vV]?Api|Luma|Magnific|Meshy|MetaMuse|Minimax|Mirelo|Moonvalley|OpenAI"
    r"|OpenRouter|Pika|Pix[Vv]erse|Pruna|Quiver|Recraft|Reve[A-Z0-9]|Rodin3D|Runway|Sonilo|Sora|Stability|SyncLipSync|SyncTalking"
    r"|Tencent|Topaz|Tripo(?!SG|Splat)|Veed|Veo\d?[A-Z]|Vidu|Wavespeed).*|.*(Api|ApiNode)"
)


def _no_model(name: str) -> str:
    return f"the pool has no model of this kind ({name})"


#: of ComfyUI's own nodes, by name
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "HypernetworkLoader": "the pool reads no hypernetworks; LoRAs have replaced them",
        "PerpNeg": "PerpNegGuider has replaced it",
        **dict.fromkeys(
            ("PhotoMakerLoader", "PhotoMakerEncode"), "the pool has no PhotoMaker; IP-Adapters are image prompts"
        ),
        **dict.fromkeys(("NAGuidance", "Mahiro", "ScaleROPE2"), (
            "the pool does not have this kind of guidance"
        )),
        "ConditioningSetAreaPercentageVideo": "the pool has no areas of videos: a text is for all frames",
        **dict.fromkeys(
            ("ConditioningSetDefaultCombine", "PairConditioningSetDefaultCombine"),
            "the pool predicts for each text everywhere, and for none where others are not: ConditioningCombine",
        ),
        **dict.fromkeys(
            ("SetClipHooks", "CreateHookLora", "CreateHookLoraModelOnly",
             "CreateHookModelAsLora", "CreateHookModelAsLoraModelOnly", "SetHookKeyframes",
             "CreateHookKeyframe", "CreateHookKeyframesInterpolated", "CreateHookKeyframesFromFloats", "CombineHooks2",
             "CombineHooks4", "CombineHooks8"),
            _HOOKS,
        ),
        "StableCascade_SuperResolutionControlnet": "the pool has no ControlNets that read latents of stage C; "
        "StableCascade_StageC_VAEEncode begins with an image",
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
        **dict.fromkeys(("RecordAudio", "Video Slice", "VHS_LoadVideoPath",
                         "VHS_LoadAudio", "VHS_LoadImagesPath"), _USER_MEDIA),
        **dict.fromkeys(("WebcamCapture", "Painter"), "it needs the editor's page"),
        **dict.fromkeys(
            ("VAEDecodeHunyuan3D", "EmptyLatentHunyuan3Dv2", "Hunyuan3Dv2Conditioning",
             "Hunyuan3Dv2ConditioningMultiView", "VoxelToMeshBasic", "VoxelToMesh", "SaveGLB", "Load3D",
             "Load3DAnimation", "Preview3D", "Preview3DAnimation", "SaveGLBMesh"),
            _3D,
        ),
        **dict.fromkeys(
            ("USOStyleReference", "SUPIRApply", "WanUni3CControlnetApply", "MiniMaxH3FunControlNetApply"),
            "the pool reads no patches of models in a file of their own but LoRAs, and ControlNets of Z-Image and "
            "Qwen-Image",
        ),
        **dict.fromkeys(
            ("CreateBoundingBoxes", "Flux3LayoutPrompt", "BuildJsonPromptIdeogram", "ImageCompositor"),
            "it needs the editor's page; write the prompt as a text",
        ),
        "SaveSVGNode": "the pool makes no vector graphics",
        **dict.fromkeys(
            ("StartLoop", "EndLoop", "CreateList", "GetItemFromList", "MergeImageLists", "MergeTextLists"),
            "the pool runs no loops and lists of nodes; rows of a batch over one workflow are `modelpool batch`",
        ),
        "SkipLayerGuidanceDiTSimple": "the pool skips layers next to guidance: SkipLayerGuidanceDiT",
        "BlockSparseAttention": "the pool computes attention in full, and has none of the models for it",
        **dict.fromkeys(("ChromaRadianceOptions", "EmptyChromaRadianceLatentImage"), "the pool has no Chroma Radiance"),
        "ReferenceMultiLatent": "one ReferenceLatent for each image says the same",
        "SaveText": "the pool writes images, videos and audio, and no texts; PreviewAny shows a text in the editor",
        **dict.fromkeys(("ConditioningLoader", "SaveConditioning"), "the pool reads and writes no encoded texts"),
        **dict.fromkeys(("GLSLShader", "CurveEditor", "ColorToRGBInt"), "the pool runs no shaders"),
        **dict.fromkeys(("OptimalStepsScheduler",), "the pool does not have its levels; ManualSigmas lists levels"),
        **dict.fromkeys(
            ("LTXVModalityGuidance", "LTXVSpatioTemporalGuidance"),
            "the pool has guidance of frames and audio apart as the option isolation of its own requests",
        ),
        "LTXVDurationPredictor": "the pool does not predict the length of a video; frames are a number",
        **dict.fromkeys(
            ("LTXVAddLatentGuide", "LTXVAddGeneratedKeyframes", "LTXVGeneratedKeyframesToGuides",
             "LTXVSeparateGeneratedKeyframes"),
            "images and frames guide videos of LTX in the pool, by LTXVAddGuide; latents and generated frames do not",
        ),
        "WanMoveVisualizeTracks": "the pool draws no tracks into images; GenerateTracks and WanMoveTrackToVideo run",
        "LTXVContextWindows": "the pool has windows of frames of Wan and Hunyuan Video: ContextWindowsManual",
        **dict.fromkeys(
            ("HunyuanVideoLatentUpscaleWithModel",), "the pool has upscalers of the latents of LTX alone",
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
    ("IPAdapter", "the pool has IPAdapter, IPAdapterAdvanced, IPAdapterApply and their loaders; FaceID, embeddings and "
                  "weights over time are in the field image_prompts of its own requests, or not there"),
    *((prefix, _3D) for prefix in (
        "Hunyuan3D", "Trellis", "EmptyTrellis", "VaeDecodeShapeTrellis", "VaeDecodeStructureTrellis",
        "VaeDecodeTextureTrellis", "Pixal3D", "TripoSG", "TripoSplat", "Save3D", "SaveGLB", "Load3D", "Preview3D",
        "Mesh", "SAM3DBody", "Voxel", "BakeTexture", "BakeNormalMap", "BakeAmbient", "PaintMesh", "RemeshMesh",
        "DecimateMesh", "UnwrapMesh", "RenderUVAtlas", "GetMeshInfo", "ApplyTextureToMesh", "DA3GeometryToMesh",
        "SavePointCloud", "PreviewPointCloud", "BuildPoseFile", "CameraAngle",
    )),
    *((prefix, _no_model(model)) for prefix, model in (
        ("MiniMaxH3", "MiniMax-H3"), ("MiniMaxMusic", "MiniMax Music"), ("EmptyMiniMaxMusic", "MiniMax Music"),
        ("EmptyMiniMaxH3", "MiniMax-H3"), ("SeedVR2", "SeedVR2"), ("WanAnimate2", "Wan Animate 2"),
        ("WanSCAIL", "Wan SCAIL"), ("SCAIL", "Wan SCAIL"), ("WanSound", "Wan S2V"), ("WanDancer", "Wan Dancer"),
        ("WanPhantom", "Phantom"), ("WanHuMo", "HuMo"), ("Bernini", "Bernini"),
        ("WanInfiniteTalk", "InfiniteTalk"), ("WanUni3C", "Uni3C"),
        ("AudioEncoder", "an encoder of audio that conditions videos"), ("FrameInterpolat", "frame interpolation"),
        ("OpticalFlow", "optical flow"), ("VOID", "VOID"), ("SUPIR", "SUPIR"), ("ARVideo", "autoregressive video"),
        ("EmptyARVideo", "autoregressive video"), ("SamplerARVideo", "autoregressive video"), ("YuE2", "YuE 2"),
        ("EmptyYuE2", "YuE 2"), ("SheetSage2", "Sheet Sage 2"), ("HiDreamO1", "HiDream O1"),
        ("EmptyHiDreamO1", "HiDream O1"), ("AnimaLLLite", "LLLite"), ("PiD", "PiD"), ("Marigold", "Marigold"),
        ("TextEncodeMageFlow", "Mage Flow"), ("TextEncodeMOSS", "MOSS-Image"), ("MOSSImage", "MOSS-Image"),
        ("TextEncodeFibo2", "FIBO 2"), ("TextEncodeMing", "Ming-Image"), ("SenseNova", "SenseNova"),
    )),
    ("GroundingDino", _DETECTION),
    ("SAM", _DETECTION),
    ("BRIA_RMBG", _DETECTION),
    ("ImageRemoveBackground", _DETECTION),
    ("RemBG", _DETECTION),
    *((prefix, _DETECTION) for prefix in (
        "SDPose", "RTDETR", "DA3", "LoadDA3", "MoGe", "LoadMoGe", "RemoveBackground", "LoadBackgroundRemoval",
        "BiRefNet", "DrawBBoxes", "MediaPipe",
    )),
    *((prefix, _LANGUAGE) for prefix in (
        "TextGenerate", "AILab_QwenVL", "Qwen2_", "Florence2", "DownloadAndLoadFlorence2", "JoyCaption", "LLM",
        "CLIPtextinterrogator", "WD14Tagger", "Ollama",
    )),
    *((prefix, _WRAPPED) for prefix in ("WanVideo", "LoadWanVideo", "HyVideo", "HunyuanVideoSampler", "CogVideo")),
    *((prefix, _SAMPLERS) for prefix in ("Clownshar", "ClownSampler", "ClownGuide", "ClownOptions", "SharkSampler")),
    *((prefix, _IN_TILES) for prefix in ("BNK_TiledKSampler", "TiledDiffusion", "Tiled KSampler",
                                          "TiledUpscaler")),
    *((prefix, _DETECTION) for prefix in (
        "FaceDetailer", "DetailerForEach", "ToDetailerPipe", "EditDetailerPipe", "UltralyticsDetector", "BboxDetector",
        "SegsTo", "ReActor", "LivePortrait", "DownloadAndLoadLivePortrait", "BatchCLIPSeg", "DownloadAndLoadCLIPSeg",
        "DWPreprocessor", "OpenposePreprocessor", "LineArtPreprocessor", "DepthAnything", "MiDaS", "Zoe_",
        "AIO_Preproc",
    )),
    *((prefix, _BETWEEN) for prefix in ("GMFSS", "RIFE", "FILM VFI", "IFRNet", "IFUnet", "M2M", "STMFNet",
                                         "FLAVR", "AMT VFI", "Sepconv", "GIMMVFI", "DownloadAndLoadGIMMVFI")),
    *((prefix, _MOTION) for prefix in ("ADE_", "AnimateDiff")),
    *((prefix, _ON_DISK) for prefix in ("PresetText", "Load Text File", "Text Load Line", "Prompt Styles",
                                         "easy styles", "StylesImage_Zho", "ArtistsImage_Zho", "MovementsImage_Zho",
                                         "PortraitMaster", "Text Random Prompt", "Load Image Batch")),
    ("NNLatentUpscale", "the pool has no upscalers of latents"),
    ("ACN_", "ControlNets are applied by ControlNetApplyAdvanced: the pool has no weights by block of them"),
    ("ScaledSoftControlNetWeights", "the pool has no weights by block of ControlNets"),
    ("Krea2", "the pool has no styles and controls of Krea 2 in files of their own"),
    ("ComfyUI-Krea2T", "the pool does not change the text encoder of Krea 2"),
    ("WidgetToString", "the text of a widget is not read; write it, or link both nodes to one that has it"),
    ("Impact", "the pool has the switches, comparisons, values and pipes of this kind of node, and no lists"),
)  # fmt: skip
_UNKNOWN = "a node of another kind, which is not among those of the pool (GET /object_info lists them)"


def reason_for(kind: str) -> str:
    """Return why a kind of node that the pool does not have is refused."""
    if kind in _REASONS:
        return _REASONS[kind]
    if _PARTNERS.fullmatch(kind):
        return _REMOTE
    return next((reason for prefix, reason in _PREFIXES if kind.startswith(prefix)), _UNKNOWN)


def unknown_node(node_id: str, kind: str) -> NodeError:
    """Return the error of a node that the pool does not have."""
    name = kind[:100]
    return NodeError(node_id, name, "missing_node_type", "unknown node", f"{name}: {reason_for(kind)}")
