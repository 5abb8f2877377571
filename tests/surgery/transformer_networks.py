"""Tiny Hugging Face models, and what their members of half the width are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 5}
_TEXT = {"vocab_size": 100, "max_position_embeddings": 16, "pad_token_id": 0}
_PAD = {"pad_token_id": 0}
_IMAGE = {"image_size": 32, "patch_size": 8}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, **_TEXT}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "num_labels": 5, "vocab_size": 100, **_PAD}
_SWIN = {
    "image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4,
    "num_labels": 5,
}  # fmt: skip
_SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 4], "mlp_ratios": [2, 2], "num_labels": 5, "decoder_hidden_size": 24,
}  # fmt: skip

_NARROW = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", _SIZES | _IMAGE, _NARROW),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _SIZES | _IMAGE, _NARROW),
    "deit_teacher": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", _SIZES | _IMAGE, _NARROW),
    "bert": ("BertForSequenceClassification", "BertConfig", _SIZES | _TEXT, _NARROW),
    "bert_eager": (
        "BertForTokenClassification", "BertConfig", _SIZES | _TEXT | {"attn_implementation": "eager"}, _NARROW,
    ),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _SIZES | _TEXT, _NARROW),
    "distilbert": (
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "num_labels": 5, **_TEXT},
        {"dim": 16, "n_heads": 2, "hidden_dim": 32},
    ),
    "gpt2": ("GPT2ForSequenceClassification", "GPT2Config", _GPT, {"n_embd": 16, "n_head": 2}),
    "gpt2_language": ("GPT2LMHeadModel", "GPT2Config", _GPT, {"n_embd": 16, "n_head": 2}),
    "llama": (
        "LlamaForSequenceClassification", "LlamaConfig", _LLAMA, {**_NARROW, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "llama_language": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, {**_NARROW, "num_key_value_heads": 1, "head_dim": 8}),
    "swin": ("SwinForImageClassification", "SwinConfig", _SWIN, {"embed_dim": 16, "num_heads": [2, 4]}),
    "segformer": (
        "SegformerForImageClassification", "SegformerConfig", _SEGFORMER,
        {"hidden_sizes": [16, 16], "num_attention_heads": [1, 2]},
    ),
    "segformer_maps": (
        "SegformerForSemanticSegmentation", "SegformerConfig", _SEGFORMER,
        {"hidden_sizes": [16, 16], "num_attention_heads": [1, 2], "decoder_hidden_size": 12},
    ),
    "convnext": (
        "ConvNextForImageClassification", "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24], "depths": [1, 1, 1], "num_stages": 3, "num_labels": 5},
        {"hidden_sizes": [4, 8, 12]},
    ),
    "mobilenet1": (
        "MobileNetV1ForImageClassification", "MobileNetV1Config", {"depth_multiplier": 0.25, "num_labels": 5},
        {"depth_multiplier": 0.125, "min_depth": 4},
    ),
    "mobilenet2": (
        "MobileNetV2ForImageClassification", "MobileNetV2Config",
        {"depth_multiplier": 0.5, "num_labels": 5, "finegrained_output": False},
        {"depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4},
    ),
}  # fmt: skip
"""The class of a model, that of its configuration, what that is given, and what it is for half the width."""

STRANGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": (
        "T5ForSequenceClassification", "T5Config",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100, "num_labels": 5,
         "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
    ),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", {**_SIZES, **_TEXT, "embedding_size": 12}),
    "mobilevit": (
        "MobileViTForImageClassification", "MobileViTConfig",
        {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 12, 16, 16, 24, 32],
         "num_attention_heads": 4, "num_labels": 5},
    ),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", _SWIN),
    "qwen3": ("Qwen3ForSequenceClassification", "Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "phi3": ("Phi3ForSequenceClassification", "Phi3Config", {**_LLAMA, "eos_token_id": 2}),
    "neox": ("GPTNeoXForSequenceClassification", "GPTNeoXConfig", {**_SIZES, **_TEXT}),
    "mpnet": ("MPNetForSequenceClassification", "MPNetConfig", {**_SIZES, **_TEXT}),
    "dinov2": (
        "Dinov2ForImageClassification", "Dinov2Config",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 5, **_IMAGE},
    ),
    "convnextv2": (
        "ConvNextV2ForImageClassification", "ConvNextV2Config",
        {"hidden_sizes": [8, 16, 24], "depths": [1, 1, 1], "num_stages": 3, "num_labels": 5},
    ),
    "bart": (
        "BartForSequenceClassification", "BartConfig",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100,
         "max_position_embeddings": 16, "num_labels": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 2},
    ),
}  # fmt: skip


def hugging_face(model: str, config: str, values: dict[str, Any]) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**values)).eval()


def build(name: str) -> tuple[nn.Module, Inputs]:
    """A model of either table, and a batch for it."""
    kinds = MODELS[name] if name in MODELS else STRANGE[name]
    model = hugging_face(*kinds[:3])
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return model, {"pixel_values": torch.randn(3, 3, 32, 32, generator=generator)}
    ids = torch.randint(5, 90, (3, 7), generator=generator)
    ids[:, -1] = 2
    mask = torch.ones_like(ids)
    if name not in ("t5", "bart"):
        mask[1, 5:] = 0
    return model, {"input_ids": ids, "attention_mask": mask}


class Beside(nn.Module):
    """A network of one's own around a Hugging Face model."""

    def __init__(self, trunk: nn.Module, width: int, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.trunk, self.read = trunk, read
        self.hidden, self.head = nn.Linear(width, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.read(self.trunk(x))).relu())
