"""`save` and `load`: a multitude as one safetensors file, with its structure in the header."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.archives import read_tensors, write_tensors
from multitudes.base.sealed_files import DamagedError
from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.calibrate import Calibrated, Calibration
from multitudes.evaluation.conformal import Conformal, ConformalScore
from multitudes.evaluation.temperature import SCALINGS
from multitudes.files.structure import describe, rebuild

HEADER = "multitudes"
"""Header key of the structure, as JSON."""

FORMAT = 6
CALIBRATION = "calibration/"
"""Name prefix of a calibration's tensors; names of a network's tensors contain no slash."""


def save(net: Multitude | Calibrated, path: str | os.PathLike[str]) -> Path:
    """Save a multitude, of any composition of methods, as one safetensors file.

    The file holds the tensors by name and, in its header, the structure: each layer's class and settings, the settings
    of the multitude (`task`, `draws`, `runner` and so on), a calibration, and a checksum. Writing is atomic: an
    existing file is kept or replaced as a whole.

    Args:
        net: A multitude, calibrated or not.
        path: The file to write.

    Returns:
        The path.

    Raises:
        ValueError: The network contains something that the file cannot store, such as a hook of yours.

    Example:
        >>> import tempfile, torch
        >>> from multitudes.methods.deep_ensemble import deep_ensemble
        >>> net = deep_ensemble(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), members=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = load(save(net, f"{folder}/net.safetensors"))
        >>> torch.equal(loaded(torch.ones(5, 3)), net(torch.ones(5, 3)))
        True
    """
    if not isinstance(net, (Multitude, Calibrated)):
        raise ValueError(
            f"net must be a multitude, got {type(net).__name__}: wrap a network as mt.Multitude(model); "
            "save the network of a stream, stream.net"
        )
    path = check_path(path)
    header, state = to_parts(net)
    return write_tensors(path, state, HEADER, {"format": FORMAT, **header}, "saving a multitude")


def to_parts(net: Multitude | Calibrated) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split a multitude into its structure, as plain values, and tensors by name."""
    header: dict[str, Any] = {}
    fitted: dict[str, Tensor] = {}
    if isinstance(net, Calibrated):
        header["calibration"] = net.calibration.settings
        fitted = {CALIBRATION + name: tensor for name, tensor in net.calibration.tensors.items()}
        net = net.net
    header["nodes"], tensors = describe(net)
    header["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    state, header["forms"] = plain_parts(tensors | fitted)
    return header, state


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Multitude | Calibrated:
    """Load a multitude that `save` wrote, on the CPU, with the same predictions, draws, task and settings.

    Layers and networks of torch and of this library are rebuilt from the file. Nothing is unpickled or run.

    Args:
        path: The file.
        model: A network like the one that was converted, with any weights. It is needed if the network's class is your
            own, since the file contains no code; it does not change. Plain values in configurations, dataclasses and
            the like come from the file; attributes that cannot be saved, such as functions, must be the same.

    Returns:
        The multitude, or a `Calibrated` if one was saved.

    Raises:
        ValueError: The file is missing, damaged or of another format, or `model` is missing or does not fit it.
    """
    path = Path(path)
    wrong = f"path must be a file that mt.save wrote, got {str(path)!r}, which"
    if not path.is_file():
        raise ValueError(f"{wrong} does not exist")
    again = "use another copy of the file, or save the network again"
    try:
        tensors, header = read_tensors(path, HEADER, "loading a multitude")
    except DamagedError as error:
        raise ValueError(f"{wrong} is damaged or of another kind: {error.what}; {again}") from error
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} has format {header.get('format')}, but this version reads format {FORMAT} only"
        )
    try:
        return from_parts(header, tensors, model)
    except (LookupError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise ValueError(f"{wrong} is damaged: its structure does not fit its tensors; {again}") from error


def from_parts(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module | None = None
) -> Multitude | Calibrated:
    """Rebuild a multitude from the result of `to_parts`; `model` is as in `load`."""
    tensors = restore_tensors(tensors, header["forms"])
    _check_shapes(header.get("shapes", {}), tensors)
    net = rebuild(header["nodes"], dict(tensors), model)
    assert isinstance(net, Multitude)
    if "calibration" not in header:
        return net
    fitted = {name.removeprefix(CALIBRATION): t for name, t in tensors.items() if name.startswith(CALIBRATION)}
    return Calibrated(net, read_calibration(header["calibration"], fitted))


def _check_shapes(shapes: Mapping[str, list[int]], tensors: Mapping[str, Tensor]) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"the file is damaged: tensor {name!r} of its header is missing")
        if list(tensors[name].shape) != shape:
            got = list(tensors[name].shape)
            raise ValueError(f"the file is damaged: tensor {name!r} has shape {got}, but its header has {shape}")


def read_calibration(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Calibration:
    """Rebuild a calibration from its attributes `settings` and `tensors`."""
    fitted, conformal = dict(tensors), None
    if "score" in settings:
        conformal = Conformal(ConformalScore(**settings["score"]), fitted.pop("scores"), fitted.pop("shares"))
    kinds: dict[str, Any] = {kind.__name__: kind for kind in SCALINGS.values()}
    scaling = None if settings["scaling"] is None else kinds[settings["scaling"]](**fitted)
    others = {name: value for name, value in settings.items() if name not in ("scaling", "score")}
    return Calibration(scaling=scaling, conformal=conformal, **others)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path if a file can be written there."""
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"path must be a file in a folder that exists, got {str(path)!r}")
    return path


# -- converting tensors to plain ones ----------------------------------------------------------------------

Form = dict[str, Any]
"""Layout and shape of a converted tensor, and whether it is complex."""

_SPARSE = {"sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr, "sparse_csc": torch.sparse_csc}


def plain_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Form]]:
    """Convert tensors to real, dense ones on the CPU; also return the forms of converted ones."""
    parts: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        layout = str(tensor.layout).removeprefix("torch.")
        if tensor.is_quantized or (layout != "strided" and layout not in _SPARSE):
            kind = "quantized" if tensor.is_quantized else layout
            raise ValueError(f"tensor {name!r} is {kind}, which a file cannot store")
        if layout == "strided" and not tensor.is_complex():
            parts[name] = tensor
            continue
        forms[name] = {"layout": layout, "shape": list(tensor.shape), "complex": tensor.is_complex()}
        if layout != "strided":
            tensor = tensor.to_sparse_coo().coalesce()
            parts[f"{name}#indices"], tensor = tensor.indices(), tensor.values()
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        parts[f"{name}#values"] = tensor
    return parts, forms


def restore_tensors(parts: Mapping[str, Tensor], forms: Mapping[str, Form]) -> dict[str, Tensor]:
    """Invert `plain_parts`; raise if parts do not fit together."""
    tensors = {name: tensor for name, tensor in parts.items() if name.rpartition("#")[0] not in forms}
    for name, form in forms.items():
        values = parts[f"{name}#values"]
        try:
            values = torch.view_as_complex(values) if form["complex"] else values
            if form["layout"] != "strided":
                indices, shape = parts[f"{name}#indices"], form["shape"]
                values = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=True)
                values = values if form["layout"] == "sparse_coo" else values.to_sparse(layout=_SPARSE[form["layout"]])
        except RuntimeError as error:
            raise ValueError(
                f"the file is damaged: the parts of tensor {name!r} do not fit together ({error})"
            ) from error
        tensors[name] = values
    return tensors
