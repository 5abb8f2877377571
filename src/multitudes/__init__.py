"""Multitudes: any PyTorch network becomes one that answers with many predictions.

import multitudes as mt

net = mt.packed(model, members=4, alpha=2)   # a multitude: [B, ...] -> [S, B, ...]
loss = net.loss(x, y)                        # the method's own objective
p = net.predict(x)                           # p.probs, p.confidence, p.entropy, p.mutual_information
"""

from multitudes import models
from multitudes.inference import predict
from multitudes.members import Members, fuse
from multitudes.methods.batch_ensemble import batch_ensemble
from multitudes.methods.deep_ensemble import deep_ensemble
from multitudes.methods.masksembles import masksembles
from multitudes.methods.mimo import mimo
from multitudes.methods.packed import packed
from multitudes.multitude import Multitude
from multitudes.narrow import narrow
from multitudes.predictive import Predictive, gaussian_nll
from multitudes.surgery import check

__all__ = [
    "Members",
    "Multitude",
    "Predictive",
    "batch_ensemble",
    "check",
    "deep_ensemble",
    "fuse",
    "gaussian_nll",
    "masksembles",
    "mimo",
    "models",
    "narrow",
    "packed",
    "predict",
]
