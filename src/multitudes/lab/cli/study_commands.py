"""`compare` runs a study; `train` runs a study of one job."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from multitudes.base.checks import needed, plural
from multitudes.lab.cli.options import Common, DataOptions, EvaluationOptions, TrainingOptions, located, words
from multitudes.lab.cli.screen import (
    clock,
    console,
    leaderboard_tables,
    say,
    say_columns,
    say_dropped,
    show,
    table,
    watching,
)
from multitudes.lab.study.run.monitor import Outcome
from multitudes.lab.study.run.store import Run

if TYPE_CHECKING:
    from multitudes.lab.study.spec.specification import Spec

SEEDS = [0, 1, 2]
"""Default seeds."""
PATIENCE = 600
"""Maximum seconds for two more seeds of each method, if the user did not request seeds."""
SOURCE = "digits; a Hugging Face id; a CSV, Parquet, .npz or .mtdata file; or a folder of images, CSV or Parquet files"
Rerun = Annotated[bool, Option("--rerun-stale", help="Rerun jobs that were done with another specification.")]


def compare(
    source: Annotated[str | None, Argument(metavar="DATA|STUDY.toml", help=f"{SOURCE}; or a study.toml.")] = None,
    data: Annotated[str | None, Option(metavar="SOURCE", help="Data to use instead of those in a study.toml.")] = None,
    methods: Annotated[
        str | None, Option(metavar="A,B|all", help="See `multitudes methods`; default: all that fit the data.")
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="Number of trainings per method; default 3, or 1 if they would take too long.")
    ] = None,
    by: Annotated[
        str | None,
        Option(metavar="SCORE", help="Score to rank by: nll, brier or accuracy; for numbers nll, crps or rmse."),
    ] = None,
    scale: Annotated[str | None, Option(metavar="NAME", help="Apply the table scales.NAME of the study.toml.")] = None,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Run directory; default runs/NAME.")] = None,
    workers: Annotated[int | None, Option(min=1, help="Number of parallel jobs; default: one per core or GPU.")] = None,
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="Run jobs on a Ray cluster; auto finds it.")] = None,
    gpus: Annotated[float | None, Option(min=0, help="With --ray: GPUs per job; may be a fraction.")] = None,
    rerun_stale: Rerun = False,
    *,
    reading: DataOptions,
    training: TrainingOptions,
    evaluation: EvaluationOptions,
    common: Common,
) -> None:
    """Train and compare methods on your data, and recommend one.

    Results go to the run directory; open its report.html.
    Repeat the command to resume an interrupted study.
    """
    file = source if source and source.lower().endswith(".toml") else None
    if scale is not None and file is None:
        raise ValueError(f"--scale={scale} requires a study.toml, got none")
    if gpus is not None and ray is None:
        raise ValueError(f"--gpus={gpus:g} requires --ray")
    if file is None and source and data:
        raise ValueError(f"the data must be given once, got {source!r} and --data {data!r}")
    found = data if file else source or data
    if not (file or found):
        raise ValueError(f"DATA must be given: {SOURCE}; or a study.toml")
    options = _options(reading, training, evaluation, common, found)
    options["by"] = by
    if methods is not None and methods != "all":
        options["methods"] = words(methods)
    spec = _rooted(_spec(file, options, seeds, common.seed, scale), reading.data_root)
    if methods == "all":
        spec = spec.model_copy(update={"methods": {}})
    from multitudes.lab.data.sources import short_name

    name = Path(file).stem if file else short_name(found or "")
    directory = out or Path("runs") / (f"{name}-{scale}" if scale else name)
    if ray is None:
        _check_device(spec)
    run = _prepared(spec, directory, rerun_stale)
    outcome = _run(run, workers, ray, gpus)
    if "seeds" not in spec.model_fields_set and not outcome.failed and _time_for_seeds(run, workers):
        run = _prepared(spec.model_copy(update={"seeds": SEEDS}), directory, rerun_stale)
        outcome = _run(run, workers, ray, gpus)
    _conclude(run, outcome.failed)


def train(
    source: Annotated[str, Argument(metavar="DATA", help=SOURCE + ".")],
    method: Annotated[str, Option(help="A name from `multitudes methods`.")] = "packed",
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting of the method; may be repeated.")
    ] = None,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Run directory; default runs/NAME-METHOD.")] = None,
    rerun_stale: Rerun = False,
    *,
    reading: DataOptions,
    training: TrainingOptions,
    evaluation: EvaluationOptions,
    common: Common,
) -> None:
    """Train and evaluate one method.

    The output is a run directory with one job, for evaluate, predict, serve, explain and export.
    Repeat the command to resume an interrupted training.
    """
    options = _options(reading, training, evaluation, common, source)
    options["methods"] = {method: dict(map(_setting, settings or []))}
    spec = _spec(None, options, None, common.seed)
    from multitudes.lab.data.sources import short_name

    directory = out or Path("runs") / f"{short_name(source)}-{method}"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _train_together(spec, directory, rerun_stale)
        return
    _check_device(spec)
    run = _prepared(spec, directory, rerun_stale)
    outcome = _run(run, 1, None, None)
    _show_trained(run, outcome.failed)


# -- the specification -------------------------------------------------------------------------------------


def _options(
    reading: DataOptions, training: TrainingOptions, evaluation: EvaluationOptions, common: Common, source: str | None
) -> dict[str, Any]:
    """Collect all options of a specification."""
    found = {**reading.arguments(), **training.arguments(), **evaluation.arguments()}
    found |= {"device": common.device, "precision": common.precision}
    return found | ({"data": located(source, reading.data_root)} if source else {})


def _spec(
    file: str | None, options: dict[str, Any], count: int | None, first: int | None, scale: str | None = None
) -> Spec:
    """Build the specification, with `count` seeds starting at `first` if given."""
    from multitudes.lab.study.spec.specification import Spec

    spec = Spec.load(file, scale, **options) if file else Spec.of(**options)
    if count is None and first is None:
        return spec
    if count is not None and spec.data.folds:
        raise ValueError(f"--seeds={count} must be left out with --folds={spec.data.folds}: each fold has one seed")
    first = first or 0
    return spec.model_copy(update={"seeds": list(range(first, first + (count or len(spec.seeds))))})


def _rooted(spec: Spec, root: Path | None) -> Spec:
    """Resolve the sources of a study.toml in the data root."""
    if root is None:
        return spec
    found = {"source": located(spec.data.source, root), "ood": [located(each, root) for each in spec.data.ood]}
    return spec.model_copy(update={"data": spec.data.model_copy(update=found)})


def _setting(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE; the value is TOML, or else a string.

    >>> _setting("members=8"), _setting("layers=norm")
    (('members', 8), ('layers', 'norm'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set must be KEY=VALUE, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _check_device(spec: Spec) -> None:
    """Check that this machine has the device and supports the precision, before preparing data."""
    from multitudes.lab.study.spec.assignment import precision_on
    from multitudes.networks.devices import device_of
    from multitudes.training.precision import check_precision

    device = device_of(spec.device)
    check_precision(precision_on(spec.training.precision, device), device)


def _prepared(spec: Spec, out: Path, rerun_stale: bool) -> Run:
    from multitudes.lab.data.tables.column_types import ColumnReading
    from multitudes.lab.study.spec.planning import prepare

    run = prepare(spec, out, rerun_stale=rerun_stale, notify=say)
    about = run.about or {}
    say_dropped(about.get("dropped") or {})
    say_columns([ColumnReading(**each) for each in about.get("columns") or []])
    done = len(run.done)
    if done:
        say(f"{done} of {len(run.jobs)} jobs are already done in {run.directory}")
    return run


# -- the jobs ----------------------------------------------------------------------------------------------


def _run(run: Run, workers: int | None, ray: str | None, gpus: float | None) -> Outcome:
    from multitudes.lab.study.run.execution import run_cluster, run_local

    with watching() as listener:
        if ray is not None:
            return run_cluster(run, ray, gpus=gpus, on_event=listener)
        return run_local(run, workers=workers, on_event=listener)


def _time_for_seeds(run: Run, workers: int | None) -> bool:
    """Return True if two more seeds of each method fit in the time limit, judged by the first seed."""
    from multitudes.lab.study.run.execution import cores

    seconds = (len(SEEDS) - 1) * sum(job.metrics["seconds"] for job in run.done) / (workers or cores())
    if seconds > PATIENCE:
        say(f"Training two more seeds per method would take about {clock(seconds)}; request it with --seeds 3")
        return False
    if any(not run.job(job.label, seed).done for job in run.done for seed in SEEDS):
        say(f"Training two more seeds per method, about {clock(seconds)}; skip it with --seeds 1")
    return True


def _conclude(run: Run, failed: dict[str, str]) -> None:
    """Show the leaderboard, the recommendation, failed jobs and the path of the report."""
    from multitudes.lab.report import read_results, write
    from multitudes.lab.study.results.importance import importance_sentence
    from multitudes.lab.study.results.score_columns import caption
    from multitudes.lab.study.run.conclusion import measure_all

    measure_all(run, say)
    results = read_results(run.directory) if run.done else None
    if results is not None:
        board, tiny, uneven, answer = results.board, results.tiny, results.imbalance, results.recommendation
        tables = leaderboard_tables(board, answer.by, console().width, tiny, bool(uneven))
        show(*tables, f"{caption(board, tiny)}\n")
        more = [line for line in (uneven, importance_sentence(results.importance)) if line]
        show(answer.headline, *map(str, answer.advice), *answer.notes, *answer.warnings, *more, "")
    for name, reason in failed.items():
        say(f"{name} failed: {reason}")
    if results is not None:
        show(f"Report: {write(run.directory)}")
    if failed:
        raise ValueError(f"{plural(len(failed), 'job')} failed; see output.txt in the job's directory, then retry")


def _show_trained(run: Run, failed: dict[str, str]) -> None:
    job = run.jobs[0]
    if failed:
        raise ValueError(f"{job.directory} failed: {failed[job.name]}")
    scores = {name: score["value"] for name, score in job.metrics["scores"].items() if "/" not in name}
    show(table(["score", "value"], [[name, f"{value:.4f}"] for name, value in scores.items() if value is not None]))
    show(f"Trained: {job.directory}")


def _train_together(spec: Spec, out: Path, rerun_stale: bool) -> None:
    """Train in each process that Accelerate started; the main process prepares, measures and writes."""
    from multitudes.lab.study.run.worker import run as run_job

    accelerator = needed("accelerate", "accelerate", "training in several processes").Accelerator()
    with accelerator.main_process_first():
        run = _prepared(spec, out, rerun_stale) if accelerator.is_main_process else Run(out)
    run_job(run.jobs[0].directory, accelerator=accelerator)
    if accelerator.is_main_process:
        _show_trained(run, {})
