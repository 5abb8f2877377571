"""Networks and targets for tests of tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def reshaped(*shape: int) -> nn.Module:
    """Any input `[B, 8]` as predictions `[B, *shape]`."""
    return nn.Sequential(nn.Linear(8, torch.Size(shape).numel()), nn.Unflatten(1, shape))


def classes(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def bert(head: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **SMALL, **options)
    return getattr(transformers, f"BertFor{head}")(config).eval()


def texts(high: int = 11) -> dict[str, Tensor]:
    return {"input_ids": classes(3, 7, high=high)}
