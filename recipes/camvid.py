"""Temporal and spatial smoothing: U-Net on CamVid.

Park & Kim, *Blurs behave like ensembles: spatial smoothings to improve accuracy, uncertainty, and robustness*, 2022,
Table E.4: U-Net and MC dropout, each with and without spatial smoothing, each with and without temporal smoothing.

Each piece trains one network and evaluates it on two videos, frame by frame. `test` has the test frames, one per
second. `val` has the validation frames, 15 per second, close to the setting of the paper, whose temporal smoothing uses
the unlabelled frames too. No setting is selected on either of them. `dnn_aligned` is our variant: a three-point blur,
which does not shift maps by half a point.

    python -m recipes.camvid --data-root DIR --only dnn,dnn_smooth
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes import metrics
from multitudes.lab.study.run.costs import parameters
from recipes.camvid_data import CLASSES, UNLABELLED, Crops, Frames, balanced, place, read, sequences
from recipes.recipe import Recipe, rounded

SEED = 0
DROPOUT = 0.5
REMEMBERED = 6
"""The frame itself and the 5 before it."""
DECAYS = (0.8, 1.6)
"""The paper's decay per frame, and twice that, which is the paper's for a fifteenth of a second."""
VIDEOS = ("test", "val")


@dataclass(frozen=True)
class Scale:
    """Amount of work."""

    shrink: int
    """Factor by which frames are shrunk."""
    every: int
    """Use one in this many training frames."""
    first: int | None
    """Number of frames from the start of each video."""
    width: int
    crop: tuple[int, int]
    batch_size: int
    epochs: int
    lr: float
    draws: int


SCALES = {
    "smoke": Scale(4, every=9, first=6, width=8, crop=(72, 96), batch_size=2, epochs=8, lr=5e-3, draws=4),
    "full": Scale(1, every=1, first=None, width=64, crop=(240, 320), batch_size=3, epochs=130, lr=1e-3, draws=30),
}


def work(recipe: Recipe, piece: str) -> dict[str, Any]:
    """Train a network, and measure it on both videos."""
    scale = SCALES[recipe.scale]
    start = time.time()
    train = frames_of(recipe, "train", every=scale.every, shrink=scale.shrink)
    videos = {name: frames_of(recipe, name, first=scale.first, shrink=scale.shrink) for name in VIDEOS}
    std, mean = torch.std_mean(train.images.float(), (0, 2, 3), keepdim=True)
    read_at = time.time()
    net = network(piece, scale.width).to(recipe.device)
    history = trained(net, train, mean, std, scale, recipe, piece)
    trained_at = time.time()
    if recipe.device.type == "cuda":
        convolve_in_bfloat16(net)
    rows = [
        {"video": name, "draws": draws, "decay": decay} | measured(net, video, mean, std, draws, decay)
        for name, video in videos.items()
        for draws, decay in passes(piece, scale.draws)
    ]
    return {
        "settings": asdict(scale) | {"size": list(train.labels.shape[1:]), "frames": len(train), "seed": SEED},
        "parameters": parameters(net),
        "loss": rounded(history[-1].loss),
        "seconds": rounded(
            {
                "read": read_at - start,
                "train": sum(epoch.seconds for epoch in history),
                "measure": time.time() - trained_at,
            }
        ),
        "videos": {name: described(video) for name, video in videos.items()},
        "rows": rows,
    }


def frames_of(recipe: Recipe, part: str, **options: Any) -> Frames:
    """Read the frames of a part onto the device; record their fingerprint with the piece."""
    frames = read(recipe.data_root / "camvid" / f"{part}.parquet", **options)
    recipe.saw(f"camvid/{part}", frames.fingerprint)
    return frames.to(recipe.device)


# -- networks ----------------------------------------------------------------------------------------------


def network(piece: str, width: int) -> mt.Multitude:
    """Build the network of a piece. All start with the same weights."""
    draws = piece.startswith("mc_dropout")
    torch.manual_seed(SEED)
    model: nn.Module = mt.models.unet(CLASSES, width=width, dropout=DROPOUT if draws else 0.0)
    if piece.endswith("smooth"):
        model = mt.smooth(model)
    elif piece.endswith("aligned"):
        model = mt.smooth(model, kernel=(1, 2, 1))
    return mt.mc_dropout(model) if draws else mt.Multitude(model)


def trained(
    net: mt.Multitude, train: Frames, mean: Tensor, std: Tensor, scale: Scale, recipe: Recipe, piece: str
) -> list[Any]:
    """Train with the paper's recipe: Adam, learning rate cut to a fifth after 100 of 130 epochs, balanced classes."""
    return mt.fit(
        net,
        Crops(train, mean, std, scale.crop, scale.batch_size),
        scale.epochs,
        optimizer="adam",
        lr=scale.lr,
        schedule={"name": "multistep", "milestones": [100 / 130], "factor": 0.2},
        criterion=partial(F.cross_entropy, weight=balanced(train.labels), ignore_index=UNLABELLED),
        **recipe.fast,
        seed=SEED,
        checkpoint=recipe.networks / f"{piece}.safetensors",
    )


def convolve_in_bfloat16(net: nn.Module) -> None:
    """Run convolutions in bfloat16; norm statistics keep their precision."""
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            layer.bfloat16()


# -- measuring ---------------------------------------------------------------------------------------------


def passes(piece: str, draws: int) -> list[tuple[int, float | None]]:
    """Return the passes over each video: draws per frame, and decay of previous frames."""
    several = [(draws, None)] if piece.startswith("mc_dropout") else []
    return [(1, None), *several, *[(1, decay) for decay in DECAYS]]


def measured(
    net: mt.Multitude, video: Frames, mean: Tensor, std: Tensor, draws: int, decay: float | None
) -> dict[str, float]:
    """Score the predictions for a video; with a `decay`, each is averaged with those of previous frames."""
    scores: dict[str, Any] = {
        "nll": metrics.NLL(),
        "accuracy": metrics.Accuracy(),
        "ece": metrics.ECE(bins=10),
        "mean_iou": metrics.MeanIoU(CLASSES),
    }
    consistency = metrics.Consistency()
    dtype = next(layer.weight.dtype for layer in net.modules() if isinstance(layer, nn.Conv2d))
    for sequence in sequences(video.names):
        predictor = net if decay is None else mt.temporal(net, frames=REMEMBERED, decay=decay)
        before: list[Tensor] = []
        for index in sequence:
            x, y = (video.images[index, None] - mean) / std, video.labels[index, None].long()
            x = x.to(dtype, memory_format=torch.channels_last)
            p = predictor.predict(x, draws=draws, seed=SEED + index)  # separate draws per frame
            rows = metrics.read_rows(p, y, ignore=UNLABELLED)
            for metric in scores.values():
                metric.update(rows)
            if before:
                consistency.update([*before, p.probs], video.labels[index - 1 : index + 1, None] != UNLABELLED)
            before = [p.probs]
    scores["consistency"] = consistency
    return rounded({name: float(metric.compute()) for name, metric in scores.items()})


def described(video: Frames) -> dict[str, Any]:
    """Describe a video: sequence lengths, camera frames between its frames, and consistency of its labels."""
    found = sequences(video.names)
    truth = metrics.Consistency()
    for sequence in found:
        labels = video.labels[sequence.start : sequence.stop, None].long()
        if len(labels) > 1:
            frames = (F.one_hot(label, CLASSES + 1).movedim(-1, 1).float() for label in labels)
            truth.update(frames, labels != UNLABELLED)
    steps = {place(video.names[i + 1])[1] - place(video.names[i])[1] for sequence in found for i in sequence[:-1]}
    return {
        "sequences": [len(sequence) for sequence in found],
        "step": max(steps),
        "consistency": rounded(float(truth.compute())),
    }


PIECES = ("dnn", "dnn_smooth", "dnn_aligned", "mc_dropout", "mc_dropout_smooth")
recipe = Recipe("camvid", __doc__, {piece: partial(work, piece=piece) for piece in PIECES})

if __name__ == "__main__":
    recipe.run()
