"""Data, networks and interruptions that the tests of training share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
HELD_X = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
HELD_Y = (HELD_X[:, 0] > 0).long() + (HELD_X[:, 1] > 1).long()
HELD = [(HELD_X[:24], HELD_Y[:24]), (HELD_X[24:], HELD_Y[24:])]
WRONG = [(HELD_X, (HELD_Y + 1) % 3)]
"""Targets that the training data do not teach, so that early epochs are the best."""


def network(dropout: float = 0.0, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, outputs))


def loader(shuffle: bool = True) -> DataLoader:
    """Six batches."""
    return DataLoader(TensorDataset(X, Y), 16, shuffle=shuffle)


class Stream:
    """Batches of unknown number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return zip(X.split(self.size), Y.split(self.size), strict=True)


def own_loader(x: torch.Tensor = X, y: torch.Tensor = Y, size: int = 16) -> mt.data.Loader:
    """The library's loader of rows."""
    part = mt.data.Part(x, y)
    data = mt.data.Data("rows", part, part, part, classes=("a", "b", "c"), columns=tuple("abcdefgh"))
    return mt.data.Loader(part, data, size)


METHODS: dict[str, Callable[[], nn.Module]] = {
    "network": lambda: network(0.3),
    "deep ensemble": lambda: mt.deep_ensemble(network(0.3), 3, seed=0),
    "packed": lambda: mt.packed(network(0.3), 4, 2, seed=0),
    "batch ensemble": lambda: mt.batch_ensemble(network(), 4, seed=0),
    "masksembles": lambda: mt.masksembles(network(), 4, 2.0, seed=0),
    "dropout": lambda: mt.mc_dropout(network(0.3)),
    "variance": lambda: mt.variance(network(), seed=0),
    "mimo": lambda: mt.mimo(network(), 2, seed=0),
    "dropout members": lambda: mt.deep_ensemble(mt.mc_dropout(network(0.3)), 2, seed=0),
}


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, b.state_dict()[name]) for name, p in a.state_dict().items())


class Killed(Exception):
    pass


def kill_at(step: int, epoch_ended: bool = False) -> Callable[[mt.Progress], None]:
    def callback(p):
        if p.step == step and p.epoch_ended == epoch_ended:
            raise Killed

    return callback


def run_in_two_processes(code: str, folder: Path) -> None:
    """Run code with RANK and the folder as its argument in two processes, after a preamble that connects them."""
    preamble = """
import os, sys, torch
from accelerate import Accelerator
from safetensors.torch import save_file
from multitudes.training.fit import fit
from tests.training.training_cases import *

folder, rank = sys.argv[1], int(os.environ["RANK"])
# The processes meet at a file: a port found free could be taken before it is bound.
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
torch.manual_seed(rank)  # a different state must not lead to different weights
batches = list(zip(X.split(16), Y.split(16)))
"""
    end = "accelerator.wait_for_everyone()\ntorch.distributed.destroy_process_group()\n"
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env |= {"PYTHONPATH": os.pathsep.join([str(Path(mt.__file__).parents[1]), str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", preamble + code + end, str(folder)]
    workers = [subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()  # if one has failed, the other still waits for it
