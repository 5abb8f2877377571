"""Costs of three ways to share a layer between members: change activations, change weights, leave out channels.

    python benchmarks/sharing.py                                                  # this machine's CPU, batch 32
    python benchmarks/sharing.py --device cuda --batch 512 --calls 5 [--compile]  # bf16 autocast, channels-last

The table has the time and memory of a training step. Memory is that of tensors saved for the backward pass on a CPU,
and the increase of the peak on a GPU. The library changes activations on a GPU. On a CPU it changes weights if they are
smaller than activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from speed import Case, batch_for, measure, options
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.member_layer import MemberLayer
from multitudes.methods.masksembles import Masked
from multitudes.surgery.member_affine import AffineMemberLayer


def changing(weights: bool, net: nn.Module) -> nn.Module:
    """Change weights as the library does on a CPU; without `weights`, change activations everywhere."""
    for layer in net.modules():
        if isinstance(layer, MemberLayer) and not weights:
            layer._changes_weight = _never
    return net


def _never(x: Tensor, weight: Tensor) -> bool:
    return False


def with_zeros(net: nn.Module) -> nn.Module:
    """Let members of a Masksembles have zero weights for masked channels, instead of leaving these out."""
    for layer in net.modules():
        if isinstance(layer, Masked):
            layer.run_member = partial(AffineMemberLayer.run_member, layer)
    return net


def ways(model: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    """Return the networks of the table, by row name."""
    return {
        "single": mt.Multitude(model()),
        "BatchEnsemble, activations": changing(False, mt.batch_ensemble(model(), 4)),
        "BatchEnsemble, weights": changing(True, mt.batch_ensemble(model(), 4)),
        "Masksembles, activations": changing(False, mt.masksembles(model(), 4)),
        "Masksembles, weights": with_zeros(changing(True, mt.masksembles(model(), 4))),
        "Masksembles, channels left out": changing(True, mt.masksembles(model(), 4)),
    }


def mebibytes(case: Case) -> float:
    """Return the memory of a training step in MiB."""
    if case.cuda:
        case.training()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.training()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        case.training()
    return sum(kept.values()) / 2**20


def main() -> None:
    args = options(__doc__).parse_args()
    x, y = batch_for(args)
    for model in args.models:
        cases = {name: Case(net, args, x, y) for name, net in ways(getattr(mt.models, model)).items()}
        times = measure(cases, "training", args)
        print(f"\n{model:32}{'training ms':>14}{'x single':>10}{'MiB':>10}{'x single':>10}")
        memory = {name: mebibytes(case) for name, case in cases.items()}
        for name in cases:
            own = (times[name], times[name] / times["single"], memory[name], memory[name] / memory["single"])
            print(f"{name:32}{own[0]:14.1f}{own[1]:10.2f}{own[2]:10.0f}{own[3]:10.2f}", flush=True)


if __name__ == "__main__":
    main()
