"""Detection rows of the models for video, audio and 3D shapes. Torch-free; see `signatures`."""

from __future__ import annotations

from modelpool.pool.detection.layouts import newer, other
from modelpool.pool.detection.layouts import video as videos
from modelpool.pool.detection.layouts.signature import Row, Signature, having, rows

VIDEOS: tuple[Signature, ...] = (
    *rows(videos.LTX, "", "LTX2VideoTransformer3DModel", Row("ltx2", "LTX-2", "LTXAV", having(audio=True))),
    *rows(videos.COSMOS_PREDICT_2, "wan21", "", Row("anima", "Anima", "Anima", having(language_adapter=True))),
    *rows(
        videos.WAN,
        "wan21",
        "WanAnimateTransformer3DModel",
        Row("wan22_animate", "Wan 2.2 animate", "WAN22_Animate", having(model_type="animate")),
    ),
    *rows(
        videos.WAN,
        "wan21",
        "",
        Row("wan21_camera", "Wan 2.1 camera", "WAN21_Camera", having(model_type="camera")),
        Row("wan22_camera", "Wan 2.2 camera", "WAN22_Camera", having(model_type="camera_2.2")),
        Row("wan22_s2v", "Wan 2.2 speech-to-video", "WAN22_S2V", having(model_type="s2v")),
        Row("wan21_humo", "HuMo on Wan 2.1", "WAN21_HuMo", having(model_type="humo")),
    ),
    *rows(newer.WAN_ANIMATE_2, "", "WanAnimate2Transformer3DModel", Row("wan_animate_2", "Wan animate 2")),
    *rows(newer.KANDINSKY_6, "", "Kandinsky6Transformer3DModel", Row("kandinsky6", "Kandinsky 6")),
    *rows(
        videos.KANDINSKY_5,
        "hunyuan_video",
        "Kandinsky5Transformer3DModel",
        Row("kandinsky5_video", "Kandinsky 5 video", "Kandinsky5"),
    ),
    *rows(newer.MINIMAX_H3, "", "MiniMaxH3Transformer3DModel", Row("minimax_h3", "MiniMax H3")),
    *rows(newer.SEED_VR_2, "", "", Row("seedvr2", "SeedVR2 (restores video)", "SeedVR2")),
    *rows(newer.COG_VIEW_4, "", "CogView4Transformer2DModel", Row("cogview4", "CogView 3+ or 4")),
    *rows(
        newer.COG_VIDEO_X,
        "",
        "CogVideoXTransformer3DModel",
        Row("cogvideox_inpaint", "CogVideoX inpainting", "CogVideoX_Inpaint", having(in_channels=48)),
        Row("cogvideox_i2v", "CogVideoX image-to-video", "CogVideoX_I2V", having(in_channels=32)),
        Row("cogvideox", "CogVideoX", "CogVideoX_T2V"),
    ),
)

AUDIOS_AND_SHAPES: tuple[Signature, ...] = (
    *rows(other.STABLE_AUDIO, "", "StableAudio3DiTModel", Row("stable_audio_3", "Stable Audio 3", "StableAudio3")),
    *rows(other.ACE_STEP, "ace_step", "", Row("ace_step_1", "ACE-Step 1", "ACEStep")),
    *rows(other.ACE_STEP_15, "", "AceStepTransformer1DModel", Row("ace_step_15", "ACE-Step 1.5", "ACEStep15")),
    *rows(other.HUNYUAN_3D_21, "hunyuan3d_21", "", Row("hunyuan3d_21", "Hunyuan3D 2.1", "Hunyuan3Dv2_1")),
    *rows(newer.TRIPO_SPLAT, "", "", Row("triposplat", "TripoSplat", "TripoSplat")),
)
