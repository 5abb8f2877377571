"""Tasks of Hugging Face's heads, recognized by class name."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from multitudes.networks.calls import chosen_output

TOKEN_HEADS = ("ForTokenClassification", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
LABEL_HEADS = (
    *("ForSequenceClassification", "ForImageClassification"),
    *("ForAudioClassification", "ForVideoClassification"),
)
DENSE_HEADS = ("ForSemanticSegmentation",)
PROBLEMS = {
    "regression": "regression",
    "multi_label_classification": "multilabel",
    "single_label_classification": "classification",
}
"""Hugging Face's `config.problem_type`, and the corresponding tasks."""


def head_task(network: nn.Module) -> str | None:
    """Return the task of a Hugging Face head; None for other classes, or for a chosen output other than the logits.

    >>> class TinyForTokenClassification(nn.Linear):
    ...     config = None
    >>> head_task(TinyForTokenClassification(2, 3)), head_task(nn.Linear(2, 3))
    ('tokens', None)
    """
    network = _inside(network)
    if not hasattr(network, "config") or chosen_output(network) not in (None, "logits"):
        return None
    if _is_a(network, TOKEN_HEADS):
        return "tokens"
    if _is_a(network, LABEL_HEADS):
        problem = getattr(network.config, "problem_type", None)
        if problem is None and getattr(network.config, "num_labels", None) == 1:
            return "regression"  # Hugging Face's own default
        return PROBLEMS.get(str(problem), "classification")
    return "classification" if _is_a(network, DENSE_HEADS) else None


def predicts_next_tokens(network: nn.Module) -> bool:
    """Return whether position t predicts the label at t + 1, as in Hugging Face's causal language models.

    Encoder-decoders (T5), masked models, and causal models whose own loss does not shift labels (the decoders of BART
    and similar models, XLNet) predict the label at t.
    """
    network = _inside(network)
    if head_task(network) != "tokens" or _is_a(network, ("ForTokenClassification", "ForMaskedLM")):
        return False
    kind: Any = type(network)  # hashable, which mypy denies
    return not getattr(network.config, "is_encoder_decoder", False) and _shifts_labels(kind)


@functools.cache
def _shifts_labels(kind: Any) -> bool:
    """Return whether the loss in Hugging Face's forward shifts labels, by the names in its code."""
    for each in kind.__mro__:
        forward = vars(each).get("forward")
        if forward is not None and each.__module__.startswith("transformers."):
            code = inspect.unwrap(forward).__code__
            shifted = any(name.startswith("shift") for name in code.co_varnames)
            return "loss_function" in code.co_names or shifted
    return True


def _inside(network: nn.Module) -> Any:
    """Return the user's network without the wrappers of the library and of `torch.compile`."""
    while True:
        own = type(network).__module__.startswith("multitudes.")
        inner = getattr(network, "network", None) if own else network._modules.get("_orig_mod")
        if not isinstance(inner, nn.Module):
            return network
        network = inner


def _is_a(network: nn.Module, names: tuple[str, ...]) -> bool:
    return any(kind.__name__.endswith(names) for kind in type(network).__mro__)
