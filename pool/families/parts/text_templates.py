"""Prompt templates that several families share. Torch-free.

Source: the chat templates of the tokenizers, and the pipelines of diffusers 0.42.
"""

from __future__ import annotations

#: a turn of the user for Qwen 3, and the begin of the answer
QWEN3_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
#: the same, without the thoughts before the answer
QWEN3_WITHOUT_THINKING = QWEN3_CHAT + "<think>\n\n</think>\n\n"
#: Qwen-Image's, which HunyuanImage shares but for its end
QWEN_IMAGE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
#: tokens of it before the prompt
QWEN_IMAGE_BEFORE = 34
