"""`methods`, `bench` and `data prepare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from multitudes.lab.cli.options import Common, DataOptions, located, model_place, words, writable
from multitudes.lab.cli.screen import say, say_columns, say_dropped, show, table
from multitudes.methods.catalog import list_methods

if TYPE_CHECKING:
    from torch import Tensor

    from multitudes.ensemble.multitude import Multitude
    from multitudes.methods.registry import Method


def methods(*, common: Common) -> None:
    """List the methods, their costs and when to use them."""
    every = list_methods()
    rows = [[each.name, each.costs, each.pick] for each in every]
    show(table(["method", "costs", "when to use it"], rows, words=3), "", "Settings and defaults:")
    for each in every:
        if each.settings:
            show(f"{each.name}: {', '.join(f'{key}={value}' for key, value in each.settings.items())}")


def prepare(
    source: Annotated[str, Argument(help="Data to read; see `multitudes compare --help`.")],
    to: Annotated[Path, Option(metavar="FILE.mtdata", help="Output file.")],
    *,
    reading: DataOptions,
    common: Common,
) -> None:
    """Convert data to one compact file that loads fast, with NumPy and Pillow only."""
    writable(to, ".mtdata")
    from multitudes.lab import data

    found = data.load(located(source, reading.data_root), seed=common.seed or 0, **reading.arguments())
    data.save(found, to)
    say_dropped(found.dropped, show)
    say_columns(found.reading)
    show(repr(found), f"Prepared: {to}")


def bench(
    model: Annotated[
        str, Option(metavar="NAME", help="A name in multitudes.models, FILE.py:FUNCTION, or hf:FOLDER.")
    ] = "small_cnn",
    shape: Annotated[
        str, Option(metavar="C,H,W", help="Shape of an input; one number for rows of a table or for texts.")
    ] = "1,8,8",
    outputs: Annotated[int, Option(min=2, help="Number of classes.")] = 10,
    chosen: Annotated[str, Option("--methods", metavar="A,B|all", help="See `multitudes methods`.")] = "all",
    batch: Annotated[int, Option(min=2, help="Batch size.")] = 64,
    draws: Annotated[int, Option(min=1, help="Number of draws, for methods that draw.")] = 20,
    *,
    common: Common,
) -> None:
    """Measure the costs of methods on this machine, with random inputs and without training."""
    sides = _shape(shape)

    import torch

    from multitudes.lab.study.run.costs import TimedPrediction, TrainingStep, in_turns, multiply_adds, parameters
    from multitudes.lab.study.run.trained_network import mixed_precision
    from multitudes.lab.study.spec.assignment import precision_on
    from multitudes.lab.study.spec.method_rows import build, method_of, methods_for
    from multitudes.lab.study.spec.network_sources import build_network
    from multitudes.networks.devices import device_of
    from multitudes.networks.seeds import seeded

    network, kind = _network(model_place(model))
    names = methods_for(sides, kind, "weights" in network) if chosen == "all" else words(chosen)
    every = {name: method_of(name) for name in ["single", *names]}
    device = device_of(common.device)
    precision = precision_on(common.precision, device)
    plan = {"epochs": 1, "optimizer": "sgd", "lr": 0.01, "precision": precision, "dataset_size": batch}
    nets: dict[str, Multitude] = {}
    steps: dict[str, TrainingStep] = {}
    with seeded(common.seed or 0), mixed_precision(device, precision):
        x, y = torch.randn(batch, *sides).to(device), torch.randint(outputs, (batch,)).to(device)
        if kind == "text":
            x = torch.randint(network["config"]["vocab_size"], (batch, *sides), dtype=torch.int32).to(device)
        for name, method in every.items():
            say(f"Building {name}")
            built = build_network(network, sides, outputs, kind=kind)
            net = build(method, built, x.cpu(), method.complete(), 0, network).to(device)
            steps[name] = TrainingStep(net, x, y, partial(_arguments, method, plan))
            nets[name] = _finished(net, x, y, method)
            nets[name].draws = draws
        say("Measuring in turns")
        predictions = {name: TimedPrediction(net, x, batch) for name, net in nets.items()}
        inference = in_turns({name: each.seconds for name, each in predictions.items()}, "single")
        training = in_turns({name: each.seconds for name, each in steps.items()}, "single")
        fixed = {
            name: (parameters(net), multiply_adds(net, x), steps[name].peak_bytes() / 1e6) for name, net in nets.items()
        }
    rows = []
    for name, own in fixed.items():
        count, products, memory = ((each, each / base) for each, base in zip(own, fixed["single"], strict=True))
        step, speed = ((1000 * times[name].seconds, times[name].ratio) for times in (training, inference))
        rows.append([name, *(_cost(*each) for each in (count, products, step, speed, memory))])
    head = ["method", "parameters", "multiply-adds", "ms / training step", "ms / prediction", "peak MB"]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    about = f"{model} on inputs {list(sides)}, batches of {batch}; {where}; {precision}; torch {torch.__version__}"
    show(about, table(head, rows))


def _network(model: str) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of `build_network` for a model, and the kind of its inputs if the shape is ambiguous."""
    from multitudes.lab.study.spec.hub_models import HubModel, is_hub

    if is_hub(model):
        found = HubModel.read(model)
        return found.plain({}, 0), found.kind
    file, _, function = model.rpartition(":")
    return {"file": file, "name": function} if file else {"name": function}, None


def _arguments(method: Method, plan: dict[str, Any], net: Multitude) -> dict[str, Any]:
    """Return the arguments of `fit`."""
    return method.train(net, plan, method.complete())


def _shape(text: str) -> tuple[int, ...]:
    sides = tuple(int(word) if word.isdecimal() else 0 for word in words(text))
    if len(sides) not in (1, 3) or min(sides) < 1:
        raise ValueError(f"--shape must be C,H,W, or one number, got {text!r}")
    return sides


def _finished(net: Multitude, x: Tensor, y: Tensor, method: Method) -> Multitude:
    """Finish a network for prediction; methods made of checkpoints get random ones."""
    settings = method.complete()
    times = method.times(1000, settings)
    if not times:
        return method.after(net, [(x, y)], None, settings, 0)
    import torch

    from multitudes.training.recorder import Recorder

    recorder = Recorder(net, keep=len(times))
    for _ in times:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        recorder.record()
    return method.after(method.finish(net, recorder, x, settings, 0), [(x, y)], None, settings, 0)


def _cost(cost: float, ratio: float) -> str:
    value = f"{cost:,.0f}" if cost >= 100 else f"{cost:.2f}"
    return f"{value} ({ratio:.2f} x)"
