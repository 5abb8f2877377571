"""Hugging Face's text models as networks of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FromTokens(nn.Module):
    """A Hugging Face text model that is called with token numbers `[B, T]`, and answers with its logits `[B, C]`.

    A number below 0 is no token: it stands behind the end of a shorter text. It is masked, and the model sees `pad`.

        from transformers import AutoModelForSequenceClassification
        network = FromTokens(AutoModelForSequenceClassification.from_pretrained("./my-bert"))

    >>> from collections import namedtuple
    >>> class Mean(nn.Module):  # in the place of a model
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
