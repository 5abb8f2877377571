"""Costs of an ensemble of transformers: inference and training of each runner, in multiples of the single network's.

    python benchmarks/attention.py --batch 4 --repeats 3                       # this machine's CPU, float32
    python benchmarks/attention.py --device cuda --batch 512 --calls 10        # bfloat16 weights
    python benchmarks/attention.py --device cuda --batch 512 --calls 10 --compile

The networks are ViT-S/4 for 32 x 32 images, of this library and of Hugging Face's transformers. A training step is
forward, loss, backward and AdamW. As in `speed.py`, all rows of a table run in one process and take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from speed import medians
from torch import nn

import multitudes as mt


def library(depth: int) -> nn.Module:
    return mt.models.vit(depth=depth)


def hugging_face(depth: int) -> nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=depth, num_attention_heads=6, intermediate_size=1536,
        image_size=32, patch_size=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[int], nn.Module]] = {"vit": library, "transformers": hugging_face}
METHODS: dict[str, Callable[[nn.Module], mt.Members]] = {
    "packed-(2,4)": partial(mt.packed, members=4, alpha=2, example=torch.zeros(2, 3, 32, 32)),
    "deep ensemble, 4": partial(mt.deep_ensemble, members=4),
}


def networks(model: nn.Module, args: argparse.Namespace) -> dict[str, nn.Module]:
    """Return the networks of the table, by row name."""
    rows = {"single": model}
    for name in args.methods:
        for runner in args.runners:
            rows[f"{name}: {runner}"] = net = METHODS[name](model)
            net.runner = runner
    return {name: net for name, net in rows.items() if args.row in ("", name)}


class Case:
    """A row of the table: a network for inference and training steps."""

    def __init__(self, net: nn.Module, args: argparse.Namespace, x: torch.Tensor, y: torch.Tensor) -> None:
        self.net = net.to(args.device)
        if args.precision == "weights":
            self.net, x = self.net.bfloat16(), x.bfloat16()
        self.x, self.y, self.args = x, y, args
        self.optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
        self.predictions: Callable[[], torch.Tensor] = self._predictions
        self.loss: Callable[[], torch.Tensor] = self._loss
        if args.compile:
            if isinstance(self.net, mt.Members):
                self._prove()
            self.predictions, self.loss = torch.compile(self._predictions), torch.compile(self._loss)

    def _predictions(self) -> torch.Tensor:
        answer = self.net(self.x)
        return answer if isinstance(answer, torch.Tensor) else answer.logits

    def _loss(self) -> torch.Tensor:
        """Return the sum of the members' losses."""
        rows = self._predictions().flatten(0, -2).float()
        members = len(rows) // len(self.y)
        return F.cross_entropy(rows, self.y.repeat(members)) * members

    def _prove(self) -> None:
        """Verify the runner before compiling, as `fit` does; a compiled runner cannot be compared with the loop."""
        for training in (False, True):
            with torch.no_grad(), self.precision():
                self.net.train(training)._prepare(self.x)

    def precision(self) -> torch.autocast | nullcontext[None]:
        autocast = self.args.precision == "autocast"
        return torch.autocast(self.args.device, torch.bfloat16) if autocast else nullcontext()

    def inference(self) -> None:
        self.net.eval()
        with torch.no_grad(), self.precision():
            self.predictions()

    def training(self) -> None:
        self.net.train()
        with self.precision():
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--runners", nargs="+", default=["auto"])
    parser.add_argument("--kinds", nargs="+", default=["inference", "training"])
    parser.add_argument("--precision", choices=["full", "weights", "autocast"], help="the default on a GPU is weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1, help="calls timed together; more for a GPU")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--row", default="", help="one row alone, which fills the compiler's caches")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.precision = args.precision or ("weights" if cuda else "full")

    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; batch {args.batch}; {args.precision}; {args.compile=}; {args.depth=}")
    x, y = torch.randn(args.batch, 3, 32, 32, device=args.device), torch.randint(10, (args.batch,), device=args.device)
    for model in args.models:
        cases = {name: Case(net, args, x, y) for name, net in networks(MODELS[model](args.depth), args).items()}
        results = {}
        for kind in args.kinds:
            functions = {name: getattr(case, kind) for name, case in cases.items()}
            results[kind] = medians(functions, cuda, args.repeats, args.calls)
        print(f"\n{model:32}" + "".join(f"{kind + ' ms':>16}{'x single':>10}" for kind in args.kinds))
        for name in cases:
            single = {kind: results[kind].get("single", float("nan")) for kind in args.kinds}
            print(f"{name:32}" + "".join(f"{r[name]:16.2f}{r[name] / single[k]:10.2f}" for k, r in results.items()))


if __name__ == "__main__":
    main()
