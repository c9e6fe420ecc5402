"""Real pictures and sounds, and processors that are made by hand: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

RATE = 16000


def photographs() -> list[Any]:
    """Three photographs of scikit-image, as PIL images of different sizes."""
    from PIL import Image
    from skimage import data

    return [Image.fromarray(photograph()) for photograph in (data.astronaut, data.coffee, data.cat)]


def tones(*seconds: float) -> list[np.ndarray]:
    """Tones that rise, each its own way."""
    sounds = []
    for i, length in enumerate(seconds):
        t = np.arange(int(length * RATE)) / RATE
        sounds.append(np.sin(2 * np.pi * (200 * (i + 1) + 300 * t) * t).astype(np.float32))
    return sounds


def image_processor(class_name: str, side: int = 56) -> Any:
    """A processor of transformers that makes square images."""
    import transformers

    size = {"height": side, "width": side}
    if class_name == "Siglip2ImageProcessor":
        return transformers.Siglip2ImageProcessor(patch_size=14, max_num_patches=16)
    if class_name in ("CLIPImageProcessor", "BitImageProcessor"):
        return getattr(transformers, class_name)(size={"shortest_edge": side}, crop_size=size)
    return getattr(transformers, class_name)(size=size)


def word_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer of a few words, which ends each text as CLIP's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def mel(sounds: Sequence[np.ndarray], device: str, *, whole: bool) -> dict[str, torch.Tensor]:
    """Log-mel frames as Whisper's processor makes them: of the first second, or of all."""
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    lengths = {"truncation": False, "padding": "longest"} if whole else {}
    batch = extract(
        sounds, sampling_rate=RATE, return_tensors="pt", return_attention_mask=whole, **lengths
    )
    return {name: tensor.to(device) for name, tensor in batch.items()}
