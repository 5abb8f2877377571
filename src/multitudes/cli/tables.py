"""`methods`, `bench` and `data prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from typer import Argument, Option

from multitudes import data
from multitudes.cli.options import Common, DataOptions, located, model_place, words, writable
from multitudes.cli.reading import say_columns
from multitudes.cli.screen import say, say_dropped, show, table
from multitudes.core.multitude import Multitude
from multitudes.core.seeding import seeded
from multitudes.study.costs import inference_cost, multiply_adds, parameters, training_cost, with_ratios
from multitudes.study.job_data import device_of
from multitudes.study.methods import METHODS, Method, method_of, methods_for
from multitudes.study.networks import build_network
from multitudes.study.trained import mixed_precision
from multitudes.training.recorder import Recorder

__all__ = ["bench", "methods", "prepare"]


def methods(*, common: Common) -> None:
    """List the methods: what each costs, and when to pick it."""
    rows = [[each.name, each.costs, each.pick] for each in METHODS.values()]
    settings = [
        f"{each.name}: {', '.join(f'{key}={value}' for key, value in each.settings.items())}"
        for each in METHODS.values()
        if each.settings
    ]
    show(table(["method", "what it costs", "when to pick it"], rows, words=3))
    show("", "Settings, with their defaults:", *settings)


def prepare(
    source: Annotated[str, Argument(help="What to read; see `multitudes compare --help`.")],
    to: Annotated[Path, Option(metavar="FILE.mtdata", help="Where to write.")],
    *,
    reading: DataOptions,
    common: Common,
) -> None:
    """Read data once into one compact file, which jobs then read with NumPy and Pillow alone."""
    writable(to, ".mtdata")
    found = data.load(located(source, reading.data_root), seed=common.seed or 0, **reading.arguments())
    data.save(found, to)
    say_dropped(found.dropped, show)
    say_columns(found.reading)
    show(repr(found), f"Prepared: {to}")


def bench(
    model: Annotated[str, Option(metavar="NAME", help="One of multitudes.models, or FILE.py:FUNCTION.")] = "small_cnn",
    shape: Annotated[str, Option(metavar="C,H,W", help="Of an input; one number is a row of a table.")] = "1,8,8",
    outputs: Annotated[int, Option(min=2, help="How many classes there are.")] = 10,
    chosen: Annotated[str, Option("--methods", metavar="A,B|all", help="See `multitudes methods`.")] = "all",
    batch: Annotated[int, Option(min=2, help="Inputs at a time, at most.")] = 64,
    draws: Annotated[int, Option(min=1, help="Predictions of a method that draws.")] = 20,
    *,
    common: Common,
) -> None:
    """Measure what the methods cost here, on random inputs: nothing is learned."""
    sides = _shape(shape)
    names = methods_for(sides) if chosen == "all" else words(chosen)
    every = {name: method_of(name) for name in ["single", *names]}
    device, precision = device_of(common.device), common.precision or "float32"
    file, _, function = model_place(model).rpartition(":")
    network = {"file": file, "name": function} if file else {"name": function}
    costs: dict[str, dict[str, float]] = {}
    with seeded(common.seed or 0):
        x, y = torch.randn(batch, *sides), torch.randint(outputs, (batch,))
        for name, method in every.items():
            say(f"Measuring {name}")
            net = method.build(build_network(network, sides, outputs), x, method.complete(), 0).to(device)
            costs[name] = _costs(net, x.to(device), y.to(device), method, precision, draws)
    single = costs["single"]
    rows = [[name, *(_cost(with_ratios(own, single), kind) for kind in single)] for name, own in costs.items()]
    head = ["method", "parameters", "multiply-adds", "ms a training step", "inputs a second", "peak MB"]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    about = f"{model} on inputs {list(sides)}, batches of {batch}; {where}; {precision}; torch {torch.__version__}"
    show(about, table(head, rows))


def _shape(text: str) -> tuple[int, ...]:
    try:
        sides = tuple(int(word) for word in words(text))
    except ValueError:
        sides = ()
    if len(sides) not in (1, 3) or min(sides) < 1:
        raise ValueError(f"--shape must be C,H,W, or one number, got {text!r}")
    return sides


def _costs(net: Multitude, x: Tensor, y: Tensor, method: Method, precision: str, draws: int) -> dict[str, float]:
    def how(net: Multitude) -> dict[str, Any]:
        training = {"epochs": 1, "optimizer": "sgd", "lr": 0.01, "precision": precision, "dataset_size": len(x)}
        arguments = method.train(net, training, method.complete())
        return {key: value for key, value in arguments.items() if key != "epochs"}

    step = training_cost(net, x, y, how)
    net = _finished(net, x, method)
    net.draws = draws
    with mixed_precision(x.device, precision):
        return {
            "parameters": parameters(net),
            "multiply_adds": multiply_adds(net, x),
            "training": 1000 * step.seconds,
            "speed": inference_cost(net, x).per_second,
            "memory": step.peak_bytes / 1e6,
        }


def _finished(net: Multitude, x: Tensor, method: Method) -> Multitude:
    """What predicts: of a method that is made of checkpoints, with random ones."""
    settings = method.complete()
    times = method.times(1000, settings)
    if not times:
        return net
    recorder = Recorder(net, keep=len(times))
    for _ in times:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        recorder.record()
    return method.finish(net, recorder, x, settings, 0)


def _cost(costs: dict[str, float], kind: str) -> str:
    value = f"{costs[kind]:,.0f}" if costs[kind] >= 100 else f"{costs[kind]:.2f}"
    return f"{value} ({costs[f'{kind}_ratio']:.2f} x)"
