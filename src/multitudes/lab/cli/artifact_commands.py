"""`explain`, `report` and `export`: write pages and files from a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from multitudes.base.checks import needed
from multitudes.lab.cli.options import Common, words, writable
from multitudes.lab.cli.prediction_commands import JOB, ModelFile
from multitudes.lab.cli.screen import say, show, table
from multitudes.lab.study.run.store import Job, Run

if TYPE_CHECKING:
    from torch import nn

    from multitudes.lab.study.run.trained_network import Trained


def report(run: Annotated[Path, Argument(help="A run directory.")], *, common: Common) -> None:
    """Rewrite a run's report.html, also while jobs are missing."""
    from multitudes.lab.report import write

    show(f"Report: {write(run)}")


# -- explain -----------------------------------------------------------------------------------------------


def explain(
    path: Annotated[Path, Argument(metavar="RUN|JOB", help="A run directory, or one job to compare its members.")],
    methods: Annotated[str | None, Option(metavar="A,B", help="For a run: compare only these methods.")] = None,
    to: Annotated[Path | None, Option(metavar="FILE.html", help="Output file; default RUN|JOB/explain.html.")] = None,
    inputs: Annotated[int, Option(min=2, help="Number of test inputs.")] = 400,
    points: Annotated[int, Option(min=2, help="Points of the loss plane in each direction.")] = 25,
    model_file: ModelFile = None,
    *,
    common: Common,
) -> None:
    """Compare trained networks: weights, predictions, and the loss between them.

    For a run, this compares the largest group of networks with the same architecture.
    """
    needed("plotly", "plots", "a page of figures")  # fail before the work
    writable(to, ".html")
    one_job = not (path / "study.toml").is_file()
    jobs = [Job(path)] if one_job else Run(path).done
    labels = list(dict.fromkeys(job.label for job in jobs))
    chosen = labels if methods is None else words(methods)
    for name in chosen:
        if name not in labels:
            raise ValueError(f"--methods must be among {', '.join(labels)}, got {name!r}")
    from multitudes.lab.study.run.trained_network import Trained, mixed_precision
    from multitudes.landscape.explanation import explain as explained

    trained = [Trained.read(job.directory, common.device, None, model_file) for job in jobs if job.label in chosen]
    if not trained:
        raise ValueError(f"the run {str(path)!r} has no finished job")
    networks = _same_architecture(trained)
    say(f"Comparing {len(networks)} networks: {'; '.join(networks)}")
    first = trained[0]
    test = first.data.test
    x, y = first.data.normalised(test.x[:inputs]), first.data.standardised(test.y[:inputs])
    data = x.to(first.device), (y if first.data.classes else y[:, None]).to(first.device)
    with mixed_precision(first.device, common.precision):
        why = explained(networks, data, points=points, seed=common.seed or 0, folder=path / "explain")
    show(f"Explanation: {why.save(to or path / 'explain.html')}")


def _same_architecture(trained: list[Trained]) -> dict[str, nn.Module]:
    """Return the largest group of networks with one architecture, by name; stochastic ones only for a single job."""
    from multitudes.ensemble.multitude import Multitude, plain
    from multitudes.networks.stochastic import stochastic_layers

    groups: dict[str, dict[str, nn.Module]] = {}
    for each in trained:
        net: Any = each.multitude
        for index in range(net.members):
            network = plain(net.member(index))
            if stochastic_layers(network) and len(trained) > 1:
                continue
            name = each.job.name if net.members == 1 else f"{each.job.name}, member {index}"
            alone = Multitude(network)
            alone.task = net.task
            groups.setdefault(_architecture(network), {})[name] = alone
    largest = max(groups.values(), key=len, default={})
    if len(largest) < 2:
        raise ValueError("explain requires two networks of one architecture: several seeds, or several members")
    return largest


def _architecture(network: nn.Module) -> str:
    kinds = [(name, type(module).__name__) for name, module in network.named_modules()]
    shapes = [(name, list(tensor.shape)) for name, tensor in network.state_dict().items()]
    return json.dumps([kinds, shapes])


# -- export ------------------------------------------------------------------------------------------------


def export(
    job: Annotated[Path, Argument(help=JOB)],
    to: Annotated[Path, Option(metavar="FILE.onnx", help="Output file.")],
    draws: Annotated[int, Option(min=1, help="Number of fixed draws, for methods that draw.")] = 8,
    model_file: ModelFile = None,
    *,
    common: Common,
) -> None:
    """Export a trained network to one ONNX file, verified with onnxruntime.

    Inputs are raw: the columns of a table, the pixels of images, or the tokens of texts
    (the tokenizer is written next to the file).
    Outputs are calibrated; numbers are in the units of the target.
    """
    if common.precision == "bfloat16":
        raise ValueError("--precision must be float32 for export: ONNX files are float32")
    writable(to, ".onnx")
    from multitudes.lab.study.run.trained_network import Trained, export_inputs, tokenizer_path
    from multitudes.lab.study.run.trained_network import export as export_trained

    trained = Trained.read(job, "cpu", None, model_file)
    export_trained(trained, to, draws=draws, seed=common.seed or 0)
    rows = [[name, *about] for name, about in export_inputs(trained.data).items()]
    units = "" if trained.data.classes else ", in the units of the target"
    show(table(["input", "type", "content"], rows, words=3))
    show(f"Outputs: {', '.join(trained.data.network_task.outputs)}{units}")
    if tokenizer := tokenizer_path(trained.data, to):
        show(f"Tokenizer: {tokenizer} (load it with tokenizers.Tokenizer.from_file)")
    show(f"Exported: {to}")
