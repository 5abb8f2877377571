"""`predict` and `evaluate`: what a trained network says, and how right it is."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from multitudes.cli.options import Common, EvaluationOptions, located, writable

if TYPE_CHECKING:
    from torch import Tensor

    from multitudes.core.tasks.predictive import Predictive
    from multitudes.study.trained import Trained

__all__ = ["evaluate", "predict"]

Cell = str | float | int
JOB = "RUN/jobs/METHOD-SEED, or a run directory that train wrote."
ModelFile = Annotated[
    str | None,
    Option(metavar="FILE.py[:FUNCTION]", help="Your code, if the network is of it. A run's own code is never run."),
]


def predict(
    job: Annotated[Path, Argument(help=JOB)],
    inputs: Annotated[
        list[Path] | None, Argument(help="Image files or folders of them, or CSV or Parquet files.")
    ] = None,
    text: Annotated[
        list[str] | None, Option(metavar="TEXT", help="A text itself, of a network of texts; may be repeated.")
    ] = None,
    to: Annotated[Path | None, Option(metavar="FILE", help="Where to write, .csv or .json; by default stdout.")] = None,
    form: Annotated[
        Literal["csv", "json"] | None, Option("--format", help="Told by the name of --to, else csv.")
    ] = None,
    probs: Annotated[bool, Option("--probs", help="Also the probability of each class.")] = False,
    level: Annotated[float, Option(help="How much of the probability the interval of a number holds.")] = 0.95,
    draws: Annotated[int | None, Option(min=1, help="Predictions of a method that draws.")] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave out what cannot be read, and say how much.")] = False,
    model_file: ModelFile = None,
    *,
    common: Common,
) -> None:
    """Predict new inputs, and say how sure the answer is.

    For classes: label, confidence, entropy (all uncertainty) and mutual_information (what more data could settle),
    both in nats. For numbers: mean, std and the interval from low to high.
    """
    from multitudes.cli.screen import say
    from multitudes.data.new_inputs import read_inputs, remarks
    from multitudes.study.trained import Trained

    chosen = _format(to, form)
    if not 0 < level < 1:
        raise ValueError(f"--level must lie between 0 and 1, got {level}")
    if not inputs and not text:
        raise ValueError("INPUTS must be given: image files or folders of them, CSV or Parquet files, or --text TEXT")
    trained = Trained.read(job, common.device, draws, model_file)
    data = trained.data
    found = read_inputs(inputs or [], data, skip_bad, text or [])
    if found.bad:
        say(f"Left out {found.bad} of {found.bad + len(found.names)} inputs that cannot be used")
    for remark in (*remarks(found.unknown, found.filled), *found.notes):
        say(remark)
    answer = trained.predict(found.x, seed=common.seed or 0, precision=common.precision)
    table = _rows(answer, trained, found.names, level, probs)
    _write(_as_csv(table) if chosen == "csv" else json.dumps(table, indent=1, ensure_ascii=False) + "\n", to)


def _format(to: Path | None, form: str | None) -> str:
    writable(to, *(() if form else (".csv", ".json")))
    return form or ("csv" if to is None else to.suffix.lower().removeprefix("."))


def _rows(answer: Predictive, trained: Trained, names: list[str], level: float, probs: bool) -> list[dict[str, Cell]]:
    """An answer for each input, by the names of the columns."""
    data = trained.data
    columns: dict[str, list[Any]] = {"input": list(names)}
    if data.classes:
        columns["label"] = [data.classes[label] for label in answer.label.tolist()]
        columns["confidence"] = _rounded(answer.confidence)
        columns["entropy"] = _rounded(answer.entropy)
        columns["mutual_information"] = _rounded(answer.mutual_information)
        if probs:
            columns |= {f"p({name})": _rounded(answer.probs[:, c]) for c, name in enumerate(data.classes)}
    else:
        low, high = answer.interval(level)
        columns["mean"] = _rounded(data.in_units(answer.mean[:, 0]))
        columns["std"] = _rounded(answer.std[:, 0] * data.target_std)
        columns["low"] = _rounded(data.in_units(low[:, 0]))
        columns["high"] = _rounded(data.in_units(high[:, 0]))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _rounded(values: Tensor) -> list[float]:
    """Numbers to six digits, as many as float32 has."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def _as_csv(rows: list[dict[str, Cell]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _write(text: str, to: Path | None) -> None:
    from multitudes.cli.screen import say
    from multitudes.core.files import replacing

    if to is None:
        sys.stdout.write(text)
        return
    with replacing(to) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    say(f"Wrote {to}")


def evaluate(
    job: Annotated[Path, Argument(help=JOB)],
    source: Annotated[
        str | None, Argument(metavar="[DATA]", help="Like the data of the training; by default its test part.")
    ] = None,
    to: Annotated[Path | None, Option(metavar="FILE.json", help="Also write the scores here.")] = None,
    target: Annotated[str | None, Option(metavar="COLUMN", help="What is right.")] = None,
    image: Annotated[str | None, Option(metavar="COLUMN", help="The images, where there are several.")] = None,
    ood: Annotated[
        list[str] | None, Option(metavar="SOURCE", help="Out-of-distribution inputs; may be repeated.")
    ] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave bad rows out, and say how many.")] = False,
    data_root: Annotated[
        Path | None,
        Option(metavar="FOLDER", envvar="MULTITUDES_DATA", help="Where sources are looked for that are not found."),
    ] = None,
    model_file: ModelFile = None,
    *,
    evaluation: EvaluationOptions,
    common: Common,
) -> None:
    """Score a trained network: on its own test part, or on other data of the same kind.

    Of other data, the test part is used where they have one, and else every row.
    """
    from multitudes.cli.screen import say, show
    from multitudes.data.new_inputs import labelled
    from multitudes.evaluation.evaluate import evaluate as score
    from multitudes.study.job_data import ScaledBatches
    from multitudes.study.trained import Trained, mixed_precision

    chosen = evaluation.arguments()
    writable(to, ".json")
    trained = Trained.read(job, common.device, chosen.get("draws"), model_file)
    data = trained.data
    if source is None:
        x, y = data.test.x, data.test.y
    else:
        x, y, told = labelled(located(source, data_root), data, target, image, skip_bad)
        for remark in told:
            say(remark)
    others = _ood(trained, [located(each, data_root) for each in ood or []])
    shift = True if chosen.get("shift") == "all" else chosen.get("shift") or None
    with mixed_precision(trained.device, common.precision):
        result = score(
            trained.net, ScaledBatches(data, x, y), shift=shift, severities=chosen.get("severities", (1, 3, 5)),
            ood={name: ScaledBatches(data, own) for name, own in others.items()}, preprocess=data.preprocess,
            scale=data.target_std, seed=common.seed or 0, device=trained.device,
        )  # fmt: skip
    if to is not None:
        result.save(to)
    show(str(result))


def _ood(trained: Trained, sources: list[str]) -> dict[str, Tensor]:
    """The out-of-distribution inputs of the training's data, and those of other sources."""
    from multitudes.data.assemble import add_ood

    if trained.data.classes:
        return dict(add_ood(trained.data, sources).ood)
    if sources:
        raise ValueError(f"--ood is for classes, and {trained.job.name} predicts numbers")
    return {}
