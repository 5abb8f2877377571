"""`predict`, `evaluate` and `serve`: use a trained network."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from multitudes.lab.cli.options import Common, EvaluationOptions, located, writable

if TYPE_CHECKING:
    from torch import Tensor

    from multitudes.lab.study.run.trained_network import Trained

Draws = Annotated[int | None, Option(min=1, help="Number of draws, for methods that draw.")]
JOB = "A job, RUN/jobs/METHOD-SEED, or a directory written by `multitudes train`."
ModelFile = Annotated[
    str | None,
    Option(
        metavar="FILE.py[:FUNCTION]",
        help="Code that builds the network, if it is your own. Code stored in a run is never executed.",
    ),
]


def predict(
    job: Annotated[Path, Argument(help=JOB)],
    inputs: Annotated[
        list[Path] | None, Argument(help="Image files, folders of images, CSV files or Parquet files.")
    ] = None,
    text: Annotated[
        list[str] | None, Option(metavar="TEXT", help="A text to classify, for text networks; may be repeated.")
    ] = None,
    to: Annotated[Path | None, Option(metavar="FILE", help="Output file, .csv or .json; default stdout.")] = None,
    form: Annotated[
        Literal["csv", "json"] | None,
        Option("--format", help="Inferred from the extension of --to; default csv."),
    ] = None,
    probs: Annotated[bool, Option("--probs", help="Add the probability of each class.")] = False,
    level: Annotated[float, Option(help="Probability that the interval of a number covers.")] = 0.95,
    draws: Draws = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip unreadable inputs and report their number.")] = False,
    model_file: ModelFile = None,
    *,
    common: Common,
) -> None:
    """Predict new inputs with uncertainty.

    Columns for classes: label, confidence, entropy (total uncertainty) and mutual_information
    (uncertainty that more data could reduce), both in nats.
    Columns for numbers: mean, std and an interval from low to high.
    """
    from multitudes.base.sealed_files import replacing
    from multitudes.lab.cli.screen import say
    from multitudes.lab.data.new_inputs import read_inputs
    from multitudes.lab.serve.json_answers import answer_columns, rounded, rows_of
    from multitudes.lab.study.run.trained_network import Trained

    writable(to, *(() if form else (".csv", ".json")))
    if not 0 < level < 1:
        raise ValueError(f"--level must lie between 0 and 1, got {level}")
    if not inputs and not text:
        raise ValueError("INPUTS must be given: image files or folders of them, CSV or Parquet files, or --text TEXT")
    trained = Trained.read(job, common.device, draws, model_file)
    data = trained.data
    found = read_inputs(inputs or [], data, skip_bad, text or [])
    if found.bad:
        say(f"Left out {found.bad} of {found.bad + len(found.names)} inputs that cannot be used")
    for note in found.notes:
        say(note)
    answer = trained.predict(found.x, seed=common.seed or 0, precision=common.precision)
    columns = {"input": found.names, **answer_columns(answer, data, level)}
    if probs and data.classes:
        columns |= {f"p({name})": rounded(answer.probs[:, at]) for at, name in enumerate(data.classes)}
    as_json = form == "json" or (form is None and to is not None and to.suffix.lower() == ".json")
    shown = json.dumps(rows_of(columns), indent=1, ensure_ascii=False) + "\n" if as_json else _as_csv(columns)
    if to is None:
        sys.stdout.write(shown)
        return
    with replacing(to) as unfinished:
        unfinished.write_text(shown, encoding="utf-8")
    say(f"Wrote {to}")


def _as_csv(columns: Mapping[str, list[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()


def evaluate(
    job: Annotated[Path, Argument(help=JOB)],
    source: Annotated[
        str | None, Argument(metavar="[DATA]", help="Data like the training data; default: their test part.")
    ] = None,
    to: Annotated[Path | None, Option(metavar="FILE.json", help="Also write the scores to this file.")] = None,
    target: Annotated[str | None, Option(metavar="COLUMN", help="Column with the true values.")] = None,
    image: Annotated[str | None, Option(metavar="COLUMN", help="Image column, if there are several.")] = None,
    ood: Annotated[
        list[str] | None, Option(metavar="SOURCE", help="Out-of-distribution inputs; may be repeated.")
    ] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip bad rows and report their number.")] = False,
    data_root: Annotated[
        Path | None,
        Option(metavar="FOLDER", envvar="MULTITUDES_DATA", help="Folder to search for data that are not found."),
    ] = None,
    model_file: ModelFile = None,
    *,
    evaluation: EvaluationOptions,
    common: Common,
) -> None:
    """Score a trained network on its test part, or on other data of the same kind.

    Other data are scored on their test part if they have one, otherwise on all rows.
    """
    from multitudes.evaluation.evaluate import evaluate as score
    from multitudes.lab.cli.screen import say, show
    from multitudes.lab.data.new_inputs import labelled
    from multitudes.lab.study.run.trained_network import Trained, mixed_precision
    from multitudes.lab.study.spec.assignment import Batches

    chosen = evaluation.arguments()
    writable(to, ".json")
    trained = Trained.read(job, common.device, chosen.get("draws"), model_file)
    data = trained.data
    if source is None:
        x, y = data.test.x, data.test.y
    else:
        x, y, notes = labelled(located(source, data_root), data, target, image, skip_bad)
        for remark in notes:
            say(remark)
    others = _ood(trained, [located(each, data_root) for each in ood or []])
    shift = True if chosen.get("shift") == "all" else chosen.get("shift") or None
    with mixed_precision(trained.device, common.precision):
        result = score(
            trained.net, Batches(data, x, y), shift=shift, severities=chosen.get("severities", (1, 3, 5)),
            ood={name: Batches(data, own) for name, own in others.items()}, preprocess=data.preprocess,
            scale=data.target_std, seed=common.seed or 0, device=trained.device,
        )  # fmt: skip
    if to is not None:
        result.save(to)
    show(str(result))


def _ood(trained: Trained, sources: list[str]) -> dict[str, Tensor]:
    """Return the out-of-distribution inputs of the training data and of other sources."""
    from multitudes.lab.data.assembly import add_ood

    if trained.data.classes:
        return dict(add_ood(trained.data, sources).ood)
    if sources:
        raise ValueError(f"--ood is for classification, and {trained.job.name} predicts numbers")
    return {}


def serve(
    job: Annotated[Path, Argument(help=JOB)],
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is all addresses of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        Option(
            envvar="MULTITUDES_TOKEN",
            metavar="TOKEN",
            help="Require the header 'Authorization: Bearer TOKEN' in requests.",
        ),
    ] = None,
    level: Annotated[float, Option(help="Default coverage of conformal sets and intervals.")] = 0.95,
    draws: Draws = None,
    wait: Annotated[float, Option(min=0, help="Milliseconds to wait for more requests to batch.")] = 3.0,
    max_size: Annotated[float, Option(help="Maximum size of a request in megabytes.")] = 10.0,
    max_rows: Annotated[int, Option(min=1, help="Maximum number of rows, images or texts in a request.")] = 256,
    max_seconds: Annotated[float, Option(help="Maximum seconds per request.")] = 30.0,
    max_requests: Annotated[int, Option(min=1, help="Maximum number of concurrent requests.")] = 128,
    model_file: ModelFile = None,
    *,
    common: Common,
) -> None:
    """Serve a trained network over HTTP.

    POST /predict is the API, / is a page to try it in a browser, /docs is the reference.
    Responses contain the label, probabilities, entropy, mutual information,
    the conformal set or interval, and the prediction of each member.
    Concurrent requests are batched.
    """
    from multitudes.base.checks import check_number, needed

    for module in ("fastapi", "uvicorn"):
        needed(module, "serve", "multitudes serve")
    from multitudes.lab.cli.screen import say
    from multitudes.lab.serve.http_app import create_app
    from multitudes.lab.serve.requests import Limits
    from multitudes.lab.serve.served_network import ServedNetwork
    from multitudes.lab.serve.server import is_loopback, listen, run
    from multitudes.lab.study.run.trained_network import Trained

    check_number("level", level, 0, above=True, below=1)
    check_number("wait", wait, 0, high=1000)
    check_number("max_size", max_size, 0, above=True)
    check_number("max_seconds", max_seconds, 0, above=True)
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
        raise ValueError("--token must be printable ASCII characters without spaces around them")
    limits = Limits(size=max(1, int(1e6 * max_size)), rows=max_rows, seconds=max_seconds, requests=max_requests)
    trained = Trained.read(job, common.device, draws, model_file)
    network = ServedNetwork(trained, draws=draws, seed=common.seed or 0, precision=common.precision)
    with listen(host, port) as listening:
        at, number = listening.getsockname()[:2]
        local = is_loopback(listening)
        app = create_app(network, level=level, limits=limits, token=token, local=local, wait=wait / 1000)
        if token is None and not local:
            say(f"Warning: anyone who can reach {at}:{number} can use the network; --token restricts access")
        say(f"Serving {trained.job.name} at http://{f'[{at}]' if ':' in at else at}:{number} until Ctrl+C")
        run(app, listening, max_seconds)
    say("Stopped after answering all requests in progress")
