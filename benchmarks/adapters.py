"""Costs of heads and adapters on one trunk: time relative to a single network, and memory of training.

    python benchmarks/adapters.py                                      # times on this machine's CPU
    python benchmarks/adapters.py --device cuda --batch 256 --calls 5
    python benchmarks/adapters.py --memory                             # of adapters on a BERT-base, on a CPU

All rows of a table run in one process and take turns. Times are medians over the turns, in multiples of the single
network's. Memory is that of parameters, gradients, Adam's two moments and tensors saved for the backward pass; each
storage counts once. `members=1` trains one adapter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from speed import medians
from torch import Tensor, nn

import multitudes as mt

LENGTH = 64


def bert(**sizes: int) -> nn.Module:
    """Build a BERT classifier of 10 classes without dropout; by default much smaller than BERT-base."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024} | sizes
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=10, **sizes, **still))


def bert_base() -> nn.Module:
    return bert(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32)


def texts(batch: int) -> dict[str, Tensor]:
    mask = torch.ones(batch, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH // 2 :] = 0
    return {"input_ids": torch.randint(1, 1000, (batch, LENGTH)), "attention_mask": mask}


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "resnet18": (mt.models.resnet18, images),
    "bert": (bert, texts),
}


def rows_of(network: str, model: nn.Module) -> dict[str, mt.Multitude]:
    """Return the networks of the table, by row name."""
    last = "fc" if network == "resnet18" else "classifier"
    rows = {
        "single": mt.Multitude(model),
        "heads, 8": mt.heads(model, 8),
        f"BatchEnsemble of {last}, 4": mt.batch_ensemble(model, 4, layers=[last]),
    }
    if network == "resnet18":
        return rows | {"heads from layer4, 8": mt.heads(model, 8, from_layer="layer4", example=images(2))}
    half = [f"encoder.layer.{number}" for number in range(3, 6)]
    return rows | {
        "heads from layer 5, 8": mt.heads(model, 8, from_layer="bert.encoder.layer.5", example=texts(2)),
        "LoRA of all layers, 8": mt.lora(model, 8),
        "LoRA of the last three, 8": mt.lora(model, 8, layers=lambda name, _: any(each in name for each in half)),
    }


def step(net: mt.Multitude, x: Any, y: Tensor, training: bool) -> None:
    net.train(training)
    if not training:
        with torch.no_grad():
            net(x)
        return
    net.loss(x, y).backward()
    for parameter in net.parameters():
        parameter.grad = None


def times(args: argparse.Namespace) -> None:
    for name in args.networks:
        model, inputs = NETWORKS[name]
        nets = {row: net.to(args.device) for row, net in rows_of(name, model()).items()}
        for batch in args.batch:
            x: Any = inputs(batch)
            x = x.to(args.device) if isinstance(x, Tensor) else {key: each.to(args.device) for key, each in x.items()}
            y = torch.randint(10, (batch,), device=args.device)
            print(
                f"\n{name}, batch {batch}".ljust(41)
                + "".join(f"{kind:>14}{'x':>8}" for kind in ("inference", "training"))
            )
            taken = []
            for training in (False, True):
                if training and batch == 1:  # batch norm needs two rows
                    continue
                functions = {row: partial(step, net, x, y, training) for row, net in nets.items()}
                taken.append(medians(functions, args.device == "cuda", args.repeats, args.calls))
            for row in nets:
                columns = (f"{own[row]:11.1f} ms{own[row] / own['single']:8.2f}" for own in taken)
                print(f"{row:40}" + "".join(columns), flush=True)


# -- memory ------------------------------------------------------------------------------------------------


def mebibytes(net: mt.Multitude, x: Any, y: Tensor) -> tuple[float, float]:
    """Return the MiB of parameters, gradients and moments, and of other tensors saved for the backward pass."""
    net.train()
    net(x)  # selects the runner
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in [*net.parameters(), *net.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net.loss(x, y).backward()
    trained = sum(p.nbytes for p in net.parameters() if p.requires_grad)
    return (sum(held.values()) + 3 * trained) / 2**20, sum(kept.values()) / 2**20


def memory(args: argparse.Namespace) -> None:
    model, x = bert_base(), texts(args.batch[-1])
    y = torch.randint(10, (args.batch[-1],))
    size = sum(p.numel() for p in model.parameters())
    print(f"BERT-base, {size:,} parameters; batch {args.batch[-1]} of {LENGTH} tokens; rank 8")
    print(f"{'members':40}{'states MiB':>14}{'x one':>8}{'activations':>14}{'for each':>10}")
    one = 0.0
    for members in (1, 4, 16):
        states, activations = mebibytes(mt.lora(model, members), x, y)
        one = one or states
        print(
            f"{members:<40}{states:14.0f}{states / one:8.2f}{activations:14.0f}{activations / members:10.0f}",
            flush=True,
        )
    whole = mt.Multitude(model)
    states, activations = mebibytes(whole, x, y)
    print(f"{'fine-tuning all of it':40}{states:14.0f}{states / one:8.2f}{activations:14.0f}{activations:10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1, help="calls timed together; more for a GPU")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.memory:
        memory(args)
        return
    threads = f"CPU, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if args.device == "cuda" else threads
    print(f"{where}; torch {torch.__version__}; medians of {args.repeats}")
    times(args)


if __name__ == "__main__":
    main()
