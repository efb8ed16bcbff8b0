"""Latent formats of each family of diffusion models: scale, shift, means and deviations. Torch-free.

A diffusion model reads `(latent - mean) * scale / std` of its VAE encoder's output, and the VAE's decoder reads `latent
* std / scale + mean` of the model's output. Numbers only; the VAE of each family is not known here.

Sources: the configurations that the models' authors published, and golden outputs of another implementation
(tests/golden/misc.json, `latent_formats`), which the tests compare with. Means and deviations of Cosmos, LTX-Video and
Flux 2 are tensors in their VAE's files.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.pool.families.parts.latent_format import LatentFormat

_MOCHI_MEAN = (
    -0.06730895953510081, -0.038011381506090416, -0.07477820912866141, -0.05565264470995561,
    0.012767231469026969, -0.04703542746246419, 0.043896967884726704, -0.09346305707025976,
    -0.09918314763016893, -0.008729793427399178, -0.011931556316503654, -0.0321993391887285,
)  # fmt: skip
_MOCHI_STD = (
    0.9263795028493863, 0.9248894543193766, 0.9393059390890617, 0.959253732819592,
    0.8244560132752793, 0.917259975397747, 0.9294154431013696, 1.3720942357788521,
    0.881393668867029, 0.9168315692124348, 0.9185249279345552, 0.9274757570805041,
)  # fmt: skip
_WAN_21_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
_WAN_21_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip
_WAN_22_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
_WAN_22_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip
_QWEN_IMAGE_21_MEAN = (
    0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722, 1.8873, -1.7177, -0.6510, 0.2732, 0.7562,
    -0.6163, -1.0277, 3.8363, 2.0210, 0.0472, 0.9320, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464, -0.5236, 1.2826,
    3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955, -0.0342, -1.0265, -0.7636, 3.0555, 0.0746, -3.0751, -0.1076,
    1.7376, -1.0914, -1.9435, -0.2784, -1.3680, 0.4809, -0.4433, 0.3764, 0.5729, -2.0595, 1.0960, -1.3260, -2.0211,
    -5.0179, 0.5275, 4.0162, 1.8505, 0.3026, 1.9373, 1.4937, 0.2632, 0.5547, -1.7121, -0.1562, 0.0304,
)  # fmt: skip
_QWEN_IMAGE_21_STD = (
    3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.7910, 3.0785, 3.6500, 3.9308, 3.0904, 2.8778, 3.7675,
    3.7320, 5.0756, 3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489, 3.4896, 3.8513, 3.9323, 3.4719,
    3.7498, 4.2830, 3.5694, 4.2467, 3.9037, 3.2947, 5.0770, 3.5075, 3.2700, 3.4767, 2.8063, 5.1125, 3.5327, 4.7833,
    3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875, 3.9624, 4.0168, 3.5643, 4.0550, 5.5614, 4.2963, 4.4080, 3.4959,
    3.8747, 3.7608, 3.5735, 3.1490, 3.7662, 3.6746, 3.4563, 3.8161,
)  # fmt: skip

_GLM_IMAGE_MEAN = (
    -0.2080078125, 1.875, -0.470703125, -1.265625, -1.421875, 0.77734375, -0.3671875, -0.9453125,
    0.318359375, 0.7734375, -0.1884765625, -0.022216796875, -0.220703125, -1.59375, -0.81640625, -0.255859375,
)  # fmt: skip
_GLM_IMAGE_STD = (
    3.0625, 2.203125, 2.265625, 4.84375, 2.5, 3.9375, 2.203125, 3.03125,
    2.1875, 2.046875, 2.71875, 2.390625, 2.390625, 2.453125, 2.25, 2.15625,
)  # fmt: skip

#: by the name of the family whose latents they are
LATENT_FORMATS: Mapping[str, LatentFormat] = {
    "sd1": LatentFormat(4, scale=0.18215, tiny="taesd"),
    "sdxl": LatentFormat(4, scale=0.13025, tiny="taesdxl"),
    "playground_25": LatentFormat(
        4, scale=0.5, mean=(-1.6574, 1.886, -1.383, 2.5155), std=(8.4927, 5.9022, 6.5498, 5.2299), tiny="taesdxl"
    ),
    "sd_x4": LatentFormat(4, scale=0.08333),
    "sd3": LatentFormat(16, scale=1.5305, mean=(0.0609,), tiny="taesd3"),
    "flux": LatentFormat(16, scale=0.3611, mean=(0.1159,), tiny="taef1"),
    "flux2": LatentFormat(128),
    "cascade_b": LatentFormat(4, scale=1 / 0.43),
    "cascade_c": LatentFormat(16),
    "stable_audio": LatentFormat(64, 1),
    "mochi": LatentFormat(12, 3, mean=_MOCHI_MEAN, std=_MOCHI_STD),
    "ltxv": LatentFormat(128, 3),
    "hunyuan_video": LatentFormat(16, 3, scale=0.476986, tiny="taehv"),
    "hunyuan_video_15": LatentFormat(32, 3, scale=1.03682, tiny="lighttaehy1_5"),
    "hunyuan_image": LatentFormat(64, scale=0.75289),
    "hunyuan_image_refiner": LatentFormat(64, 3, scale=1.03682),
    "cogvideox": LatentFormat(16, 3, scale=0.7),
    "cogvideox_2b": LatentFormat(16, 3, scale=1.15258426),
    "cogview4": LatentFormat(16),
    "glm_image": LatentFormat(16, mean=_GLM_IMAGE_MEAN, std=_GLM_IMAGE_STD),
    "allegro": LatentFormat(4, 3, scale=0.13),
    "sana": LatentFormat(32, scale=0.41407),
    "cosmos": LatentFormat(16, 3),
    "wan21": LatentFormat(16, 3, mean=_WAN_21_MEAN, std=_WAN_21_STD, tiny="lighttaew2_1"),
    "wan22": LatentFormat(48, 3, mean=_WAN_22_MEAN, std=_WAN_22_STD, tiny="lighttaew2_2"),
    # those of Wan 2.1, of an autoencoder with a channel of transparency
    "qwen_image_layered": LatentFormat(16, 3, mean=_WAN_21_MEAN, std=_WAN_21_STD),
    "qwen_image_21": LatentFormat(64, mean=_QWEN_IMAGE_21_MEAN, std=_QWEN_IMAGE_21_STD),
    "hunyuan3d_2": LatentFormat(64, 1, scale=0.9990943042622529),
    "hunyuan3d_21": LatentFormat(64, 1, scale=1.0039506158752403),
    "hunyuan3d_2_mini": LatentFormat(64, 1, scale=1.0188137142395404),
    "ace_step": LatentFormat(8),
    "ace_step_15": LatentFormat(64, 1),
    "pixels": LatentFormat(3),
}
