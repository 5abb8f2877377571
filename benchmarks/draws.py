"""Costs of draws: the part of a network that they share, and the number of draws that an input needs.

    python benchmarks/draws.py                      # this machine's CPU
    python benchmarks/draws.py --device cuda --batch 256
    python benchmarks/draws.py --device cuda --batch 256 --only sharing --precision bfloat16

`sharing` times draws of a ResNet-18 with random layers in several places, a loop over the draws, and deployed draws
(in `--precision`), in multiples of one forward of the plain network. `adaptive` trains a digits classifier with MC
dropout. It counts the draws until the standard error of the mean probabilities is below a tolerance, with one count for
all inputs or one per input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from speed import medians
from torch import Tensor, nn

import multitudes as mt

PLACES: dict[str, Callable[[nn.Module], mt.Multitude]] = {
    "dropout before fc": lambda m: mt.mc_dropout(m, 0.3, ["fc"]),
    "dropout in layer4": lambda m: mt.mc_dropout(m, 0.3, r"layer4.*conv2"),
    "dropout in all blocks": lambda m: mt.mc_dropout(m, 0.3, "block"),
    "drop_connect on fc": lambda m: mt.drop_connect(m, 0.3, ["fc"]),
    "patched, norm and output": lambda m: mt.patched(m),
    "variance, layer4": lambda m: mt.variance(m, r"layer4.*conv2", init="pretrained"),
}


@torch.no_grad()
def sharing(args: argparse.Namespace) -> None:
    """Time many draws of a ResNet-18, in multiples of one forward of the plain network."""
    model = mt.models.resnet18().eval()
    x = torch.randn(args.batch, 3, 32, 32, device=args.device)
    functions: dict[str, Callable[[], object]] = {"one forward": lambda: model.to(args.device)(x)}
    for name, convert in PLACES.items():
        net, loop = convert(model).to(args.device).eval(), convert(model).to(args.device).eval()
        loop._draw_cache.runner = "one_by_one"
        functions[name] = lambda net=net: net(x, draws=args.draws)
        functions[f"{name}, looped"] = lambda net=loop: net(x, draws=args.draws)
        net.draws = args.draws
        functions[f"{name}, deployed"] = partial(mt.deploy(net, x, precision=args.precision), x)
    times = medians(functions, args.device == "cuda", args.repeats)
    print(f"ResNet-18, {args.draws} draws, batch {args.batch}, {args.device}")
    print(f"{'':32}{'ms':>9}{'x one':>9}{'looped':>9}{'deployed, ' + args.precision:>20}")
    one = times["one forward"]
    print(f"{'one forward':32}{one:9.1f}{1.0:9.2f}")
    for name in PLACES:
        ratios = [times[f"{name}{way}"] / one for way in ("", ", looped", ", deployed")]
        print(f"{name:32}{times[name]:9.1f}{ratios[0]:9.2f}{ratios[1]:9.2f}{ratios[2]:20.2f}")


def digits_classifier() -> tuple[mt.Multitude, Tensor]:
    """Train a small network with MC dropout on half of scikit-learn's digits; also return the other half's images."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 10),
    )  # fmt: skip
    net = mt.mc_dropout(model).train()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(30):
        for batch in torch.randperm(899).split(64):
            net.loss(images[batch], labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    accuracy = (net.predict(images[899:]).label == labels[899:]).float().mean()
    print(f"\nDigits, MC dropout 0.5, accuracy {100 * accuracy:.1f} % on the 898 held out")
    return net, images[899:]


def fixed_count(net: mt.Multitude, images: Tensor, tolerance: float) -> int:
    """Return the smallest number of draws that brings every input's standard error below the tolerance."""
    probs = net.predict(images, draws=4000, seed=1).member_probs
    return int((probs.var(0).amax(1) / tolerance**2).ceil().max())


def adaptive(args: argparse.Namespace) -> None:
    """Count the draws that inputs need, with one count for all inputs or one per input."""
    torch.manual_seed(0)
    net, images = digits_classifier()
    print(f"{'tolerance':>10}{'fixed count':>13}{'adaptive, mean':>16}{'share':>8}")
    for tolerance in (0.05, 0.02, 0.01):
        fixed = fixed_count(net, images, tolerance)
        p = net.predict(images, draws="auto", tolerance=tolerance, max_draws=2 * fixed, seed=2)
        assert p.draws is not None
        mean = p.draws.float().mean().item()
        print(f"{tolerance:10}{fixed:13}{mean:16.1f}{mean / fixed:8.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--only", choices=["sharing", "adaptive"])
    arguments = parser.parse_args()
    for part in (sharing, adaptive):
        if arguments.only in (None, part.__name__):
            part(arguments)
