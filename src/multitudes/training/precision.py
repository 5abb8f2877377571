"""Precisions to train in, and a check that the machine supports them."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from multitudes.base.checks import check_choice

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}
"""Precisions, and the dtype of automatic mixed precision."""

AUTO = "auto"
"""bfloat16 on a GPU that supports it, otherwise float32."""

_TRIAL = """
import torch
with torch.autocast("cpu", torch.bfloat16):
    torch.nn.Conv2d(16, 16, 3)(torch.randn(4, 16, 16, 16)).sum().backward()
    torch.nn.Linear(256, 256)(torch.randn(64, 256)).sum().backward()
"""
_TRIED = "MULTITUDES_BFLOAT16_TRIED"
"""Environment variable that keeps child processes from repeating a successful trial."""


def check_precision(precision: str, device: torch.device | str) -> None:
    """Raise an error if `precision` is unknown, or if it would crash the process on this device.

    Some virtual machines report AMX but crash on bfloat16 matrix products with an illegal instruction. So a small
    convolution runs in a child process first.
    """
    check_choice("precision", precision, (AUTO, *PRECISIONS))
    if precision != "bfloat16" or torch.device(device).type != "cpu" or _TRIED in os.environ:
        return
    trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, check=False)
    if trial.returncode:
        reason = f"signal {-trial.returncode}" if trial.returncode < 0 else trial.stderr.strip().splitlines()[-1:]
        raise ValueError(
            f"precision='bfloat16' does not work on this CPU: a small convolution failed with {reason}; use 'float32', "
            "or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, which avoids AMX"
        )
    os.environ[_TRIED] = "1"


def precision_dtype(precision: str, device: torch.device | str) -> torch.dtype | None:
    """Return the dtype of automatic mixed precision on a device; None for float32.

    >>> precision_dtype("auto", "cpu"), precision_dtype("bfloat16", "cuda")
    (None, torch.bfloat16)
    """
    check_precision(precision, device)
    if precision != AUTO:
        return PRECISIONS[precision]
    on_gpu = torch.device(device).type == "cuda"
    return torch.bfloat16 if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else None
