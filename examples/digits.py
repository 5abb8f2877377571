"""A single network and a packed ensemble, compared on handwritten digits.

The data are scikit-learn's digits, 1,797 images of 8 x 8 pixels: the first half for training, the second half for
testing. Run it with `python examples/digits.py`. It takes about twenty seconds on two CPU cores.
"""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchmetrics.classification import MulticlassCalibrationError

import multitudes as mt

EPOCHS, BATCH, LEARNING_RATE, SEED = 40, 64, 1e-2, 0
SHADES = " .:-=+*#%@"


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images `[899, 1, 8, 8]` and labels `[899]`, then test images and labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    half = (len(images) + 1) // 2
    return images[:half], labels[:half], images[half:], labels[half:]


def network() -> nn.Module:
    """Build a plain convolutional network; it needs no code for ensembles."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def train(net: mt.Multitude, images: Tensor, labels: Tensor) -> float:
    """Train any multitude, and return the seconds that it took."""
    start = time.perf_counter()
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE)
    steps = EPOCHS * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    net.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH):
            net.loss(images[batch], labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return time.perf_counter() - start


def row(name: str, net: mt.Multitude, p: mt.Predictive, labels: Tensor, seconds: float) -> str:
    """Format a line of the table: accuracy, NLL, ECE, parameters and training time."""
    accuracy = (p.label == labels).float().mean()
    nll = F.nll_loss(p.log_probs, labels)
    ece = MulticlassCalibrationError(num_classes=10, n_bins=15)(p.probs, labels)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return f"{name:<18}{accuracy:>9.2%}{nll:>9.4f}{ece:>9.4f}{parameters:>12,}{seconds:>10.1f} s"


def picture(image: Tensor) -> list[str]:
    """Format an image `[1, 8, 8]` as eight lines of text with two characters per pixel."""
    levels = (image[0] * (len(SHADES) - 1)).round().int().tolist()
    return ["".join(SHADES[level] * 2 for level in line) for line in levels]


def show(images: Tensor, labels: Tensor, p: mt.Predictive) -> str:
    """Format images side by side, each with its label, prediction and uncertainties."""
    columns = [
        [
            *picture(image),
            f"true {label}",
            f"predicted {p.label[i]}",
            f"confidence {p.confidence[i]:.2f}",
            f"entropy {p.entropy[i]:.2f}",
            f"mutual inf {p.mutual_information[i]:.2f}",
        ]
        for i, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    return "\n".join("".join(f"{part:<16}" for part in line).rstrip() for line in zip(*columns, strict=True))


def main() -> None:
    torch.manual_seed(SEED)
    train_images, train_labels, test_images, test_labels = digits()
    model = network()
    nets = {
        "single network": mt.deep_ensemble(model, members=1, seed=SEED),
        "packed, 4 members": mt.packed(model, members=4, alpha=2, seed=SEED),
    }
    print(f"{'':<18}{'accuracy':>9}{'NLL':>9}{'ECE':>9}{'parameters':>12}{'training':>12}")
    for name, net in nets.items():
        seconds = train(net, train_images, train_labels)
        p = mt.predict(net, test_images)
        print(row(name, net, p, test_labels, seconds), flush=True)

    most = p.mutual_information.topk(5).indices
    print(f"\nWhat the ensemble knows least about, of {len(p)} test digits:\n")
    print(show(test_images[most], test_labels[most], p[most]))


if __name__ == "__main__":
    main()
