"""Hugging Face text models as networks of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FromTokens(nn.Module):
    """Wrapper of a Hugging Face text model that maps token numbers `[B, T]` to logits `[B, C]`.

    Negative numbers are padding after the end of a shorter text. They are masked and replaced by `pad`.

    Args:
        model: Model such as `AutoModelForSequenceClassification.from_pretrained("./my-bert")`.
        pad: Token number for padding.

    Example:
        >>> from collections import namedtuple
        >>> class Mean(nn.Module):  # stands in for a model
        ...     def forward(self, input_ids, attention_mask):
        ...         total = (input_ids * attention_mask).sum(1, keepdim=True)
        ...         return namedtuple("Output", "logits")(total / attention_mask.sum(1, keepdim=True))
        >>> FromTokens(Mean(), pad=7)(torch.tensor([[2, 4, 6], [5, -1, -1]]))
        tensor([[4.],
                [5.]])
    """

    def __init__(self, model: nn.Module, pad: int = 0) -> None:
        super().__init__()
        self.model = model
        self.pad = pad

    def forward(self, tokens: Tensor) -> Tensor:
        known = tokens >= 0
        ids = torch.where(known, tokens, self.pad).long()
        logits: Tensor = self.model(input_ids=ids, attention_mask=known.long()).logits
        return logits
