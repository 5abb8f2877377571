"""Small transformers, and a counter of the rows that a module processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import multitudes as mt

__all__ = ["FAMILIES", "bert", "gpt2", "llama", "rows_through", "swin", "tokens", "vit"]


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, num_labels=3, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config).eval()


def vit() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).eval()


def roberta() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=3,
        max_position_embeddings=16, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.RobertaForSequenceClassification(config).eval()


def distilbert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=50, num_labels=3, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=16
    )
    return transformers.DistilBertForSequenceClassification(config).eval()


def llama() -> nn.Module:
    """Build a Llama with grouped queries, whose blocks all receive the rotary positions."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_labels=3,
        intermediate_size=24, max_position_embeddings=16, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config).eval()


def swin() -> nn.Module:
    """Build a Swin, whose attention treats windows of an image as rows."""
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=3
    )
    return transformers.SwinForImageClassification(config).eval()


FAMILIES = [
    pytest.param(family, marks=pytest.mark.slow, id=family.__name__) for family in (roberta, distilbert, llama, swin)
]
"""More transformers, with other block inputs and heads."""


def tokens(rows: int, length: int = 7) -> dict[str, Tensor]:
    """Return token ids and a mask; the first row is shorter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask}


def rows_through(net: mt.Multitude, name: str, x: Any) -> int:
    """Return the number of rows that a module processes in one warm forward of a network."""
    module, counted = net.network.get_submodule(name), [0]
    forward = module.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        counted[0] += len(next(value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)))
        return forward(*args, **kwargs)

    module.forward = count  # a hook would change the runner
    try:
        net(x)
        counted[0] = 0
        net(x)
    finally:
        del module.forward
    return counted[0]
