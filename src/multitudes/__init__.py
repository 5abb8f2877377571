"""Multitudes: turn any PyTorch network into one that returns many predictions.

import multitudes as mt

net = mt.packed(model, members=4, alpha=2)   # a multitude: [B, ...] -> [S, B, ...]
loss = net.loss(x, y)                        # the method's training loss
p = net.predict(x)                           # p.probs, p.confidence, p.entropy, p.mutual_information
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitudes.base.lazy import lazy_names

if TYPE_CHECKING:  # the names of `HOMES`, for type checkers
    from multitudes import landscape, layers, metrics, models, shift
    from multitudes.deployment.deploy import deploy
    from multitudes.ensemble.members import Members, fuse
    from multitudes.ensemble.multitude import Multitude
    from multitudes.evaluation.calibrate import Calibrated, calibrate
    from multitudes.evaluation.evaluate import evaluate
    from multitudes.evaluation.predict import predict
    from multitudes.evaluation.scores import Evaluation
    from multitudes.files.freeze import freeze
    from multitudes.files.onnx import to_onnx
    from multitudes.files.save import load, save
    from multitudes.lab import data
    from multitudes.landscape import explain
    from multitudes.methods.batch_ensemble import batch_ensemble
    from multitudes.methods.deep_ensemble import deep_ensemble
    from multitudes.methods.dropout import drop_connect, mc_dropout
    from multitudes.methods.heads import heads
    from multitudes.methods.laplace import laplace
    from multitudes.methods.lora import lora
    from multitudes.methods.masksembles import masksembles
    from multitudes.methods.mimo import mimo
    from multitudes.methods.packed import narrow, packed
    from multitudes.methods.patching import family, patched
    from multitudes.methods.smoothing import head, smooth
    from multitudes.methods.snapshots import cyclic_lr, cyclic_sgmcmc, snapshots
    from multitudes.methods.subspace import subspace, swa, swag
    from multitudes.methods.tabm import tabm
    from multitudes.methods.temporal import temporal
    from multitudes.methods.variance import variance
    from multitudes.networks.stochastic import Stochastic
    from multitudes.surgery.check import check
    from multitudes.tasks.gaussian import gaussian_nll
    from multitudes.tasks.predictive import Predictive
    from multitudes.training.fit import fit
    from multitudes.training.recorder import Recorder

__all__ = [
    "Calibrated", "Evaluation", "Members", "Multitude", "Predictive", "Recorder", "Stochastic", "batch_ensemble",
    "calibrate", "check", "cyclic_lr", "cyclic_sgmcmc", "data", "deep_ensemble", "deploy", "drop_connect",
    "evaluate", "explain", "family", "fit", "freeze", "fuse", "gaussian_nll", "head", "heads", "landscape",
    "laplace", "layers", "load", "lora", "masksembles", "mc_dropout", "metrics", "mimo", "models", "narrow",
    "packed", "patched", "predict", "save", "shift", "smooth", "snapshots", "subspace", "swa", "swag", "tabm",
    "temporal", "to_onnx", "variance",
]  # fmt: skip

PACKAGES = (
    *("base", "networks", "tasks", "draws", "ensemble", "surgery", "training", "methods", "layers", "models"),
    *("metrics", "shift", "evaluation", "files", "deployment", "landscape", "lab", "sklearn"),
)
HOMES = {
    "networks.stochastic": "Stochastic",
    "ensemble.members": "Members fuse",
    "ensemble.multitude": "Multitude",
    "tasks.gaussian": "gaussian_nll",
    "tasks.predictive": "Predictive",
    "deployment.deploy": "deploy",
    "evaluation.calibrate": "Calibrated calibrate",
    "evaluation.evaluate": "evaluate",
    "evaluation.predict": "predict",
    "evaluation.scores": "Evaluation",
    "landscape": "explain",
    "methods.batch_ensemble": "batch_ensemble",
    "methods.deep_ensemble": "deep_ensemble",
    "methods.dropout": "drop_connect mc_dropout",
    "methods.heads": "heads",
    "methods.laplace": "laplace",
    "methods.lora": "lora",
    "methods.masksembles": "masksembles",
    "methods.mimo": "mimo",
    "methods.packed": "narrow packed",
    "methods.patching": "family patched",
    "methods.smoothing": "head smooth",
    "methods.snapshots": "cyclic_lr cyclic_sgmcmc snapshots",
    "methods.subspace": "subspace swa swag",
    "methods.tabm": "tabm",
    "methods.temporal": "temporal",
    "methods.variance": "variance",
    "files.freeze": "freeze",
    "files.onnx": "to_onnx",
    "files.save": "load save",
    "surgery.check": "check",
    "training.fit": "fit",
    "training.recorder": "Recorder",
}
"""Modules of the public names. Each is imported on first access, since torch alone takes a second."""

__getattr__, __dir__ = lazy_names(__name__, HOMES, {**dict(zip(PACKAGES, PACKAGES, strict=True)), "data": "lab.data"})
