"""Tensors of every kind as plain ones, for a file that holds no others: complex and sparse ones in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["plain_parts", "whole_tensors"]

Form = dict[str, Any]
"""How a tensor was taken apart: its layout, its shape, and whether its numbers are complex."""

_PARTS: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
}


def plain_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Form]]:
    """The tensors as real and dense ones on the CPU, each in memory of its own, and the forms of those taken apart."""
    parts: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        layout = str(tensor.layout).removeprefix("torch.")
        if tensor.is_quantized or (layout != "strided" and layout not in _PARTS):
            kind = "quantized" if tensor.is_quantized else layout
            raise ValueError(f"tensor {name!r} is {kind}, which a file cannot hold")
        if layout == "strided" and not tensor.is_complex():
            parts[name] = tensor.contiguous().clone()
            continue
        forms[name] = {"layout": layout, "shape": list(tensor.shape), "complex": tensor.is_complex()}
        if layout == "strided":
            parts[f"{name}#values"] = _real(tensor)
            continue
        tensor = tensor.coalesce() if layout == "sparse_coo" else tensor
        parts |= {f"{name}#{part}": _real(getattr(tensor, part)()) for part in _PARTS[layout]}
    return parts, forms


def _real(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.contiguous().clone()


def whole_tensors(parts: Mapping[str, Tensor], forms: Mapping[str, Form]) -> dict[str, Tensor]:
    """The tensors that `plain_parts` took apart, and all others as they are; an error where parts do not fit."""
    try:
        return _joined(parts, forms)
    except RuntimeError as error:
        raise ValueError(f"the file is damaged: the parts of a tensor do not fit together ({error})") from error


def _joined(parts: Mapping[str, Tensor], forms: Mapping[str, Form]) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in parts.items() if name.rpartition("#")[0] not in forms}
    for name, form in forms.items():
        values = parts[f"{name}#values"]
        values = torch.view_as_complex(values) if form["complex"] else values
        if form["layout"] == "strided":
            tensors[name] = values
        elif form["layout"] == "sparse_coo":
            indices = parts[f"{name}#indices"]
            tensors[name] = torch.sparse_coo_tensor(
                indices, values, form["shape"], is_coalesced=True, check_invariants=True
            )
        else:
            inner, outer = (parts[f"{name}#{part}"] for part in _PARTS[form["layout"]][:-1])
            make: Any = torch.sparse_csr_tensor if form["layout"] == "sparse_csr" else torch.sparse_csc_tensor
            tensors[name] = make(inner, outer, values, form["shape"], check_invariants=True)
    return tensors
