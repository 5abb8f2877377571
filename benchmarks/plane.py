"""Costs of a loss plane, which evaluates several points at a time, and of a loop over the points.

    python benchmarks/plane.py                 # SmallCNN on 512 images, 25 x 25 points, two threads
    python benchmarks/plane.py --size 8 --channels 1
    python benchmarks/plane.py --device cuda

The loop is what one writes by hand: for each point, it loads the weights and iterates over the data without gradients,
summing loss, right labels and labels that agree with three solutions. It runs with batches of 128, with all images at
once, and in channels-last. All versions take turns. Loops run on some of the points, and their time is extrapolated to
the whole plane.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.weight_space.planes import Plane, plane
from multitudes.training.recorder import unflattened


@torch.no_grad()
def by_hand(network: nn.Module, found: Plane, x: Tensor, y: Tensor, batch: int, count: int) -> Tensor:
    """Return the losses of the first `count` points, computed one by one."""
    network = copy.deepcopy(network).eval()
    grid = torch.cartesian_prod(*found.axes)
    labels = torch.stack([network(x).argmax(1)] * 3)
    losses = []
    for at in grid[:count]:
        network.load_state_dict(unflattened(found.frame.weights(at).to(x.device), network), strict=False)
        loss, right, agree = 0.0, 0, torch.zeros(3, device=x.device)
        for start in range(0, len(x), batch):
            answer = network(x[start : start + batch])
            target = y[start : start + batch]
            loss += F.cross_entropy(answer, target, reduction="sum").item()
            right += int((answer.argmax(1) == target).sum())
            agree += (answer.argmax(1) == labels[:, start : start + batch]).sum(1)
        losses.append(loss / len(x))
    return torch.tensor(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--points", type=int, default=25)
    parser.add_argument("--looped", type=int, default=60, help="how many points the loops measure")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter  # process time ignores other processes
    torch.manual_seed(0)
    device = torch.device(args.device)
    torch.backends.cudnn.allow_tf32 = False  # its rounding is larger than the tolerance below
    networks = [mt.models.small_cnn(channels=args.channels, size=args.size).to(device).eval() for _ in range(3)]
    x = torch.randn(args.images, args.channels, args.size, args.size, device=device)
    y = torch.randint(10, (args.images,), device=device)
    data, total = (x, y), args.points**2
    found = plane(networks[0], data, through=networks, points=args.points)

    last = copy.deepcopy(networks[0]).to(memory_format=torch.channels_last)
    laid = x.contiguous(memory_format=torch.channels_last)
    ways = {
        "plane": lambda: plane(networks[0], data, through=networks, points=args.points).loss.flatten(),
        "loop, batches of 128": lambda: by_hand(networks[0], found, x, y, 128, args.looped),
        "loop, all images": lambda: by_hand(networks[0], found, x, y, len(x), args.looped),
        "loop, 128, channels last": lambda: by_hand(last, found, laid, y, 128, args.looped),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.turns):
        for name, way in ways.items():
            start = clock()
            losses = way()
            times[name].append((clock() - start) * total / len(losses))
            error = (losses - found.loss.flatten()[: len(losses)]).abs().max().item()
            assert error < 1e-5 * found.loss.max(), f"{name} differs by {error:.2e}"
    print(
        f"SmallCNN, {args.images} images of {args.channels} x {args.size} x {args.size}, {args.points} x {args.points}"
    )
    ours = sorted(times["plane"])[args.turns // 2]
    for name, taken in times.items():
        median = sorted(taken)[args.turns // 2]
        print(f"{name:28}{median:8.1f} s  {median / ours:6.2f} x the plane   ({min(taken):.1f} to {max(taken):.1f})")


if __name__ == "__main__":
    main()
