"""`compare` and `train`: a study, and a study of one job."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from multitudes.cli.options import Common, DataOptions, EvaluationOptions, TrainingOptions, located, words

if TYPE_CHECKING:
    from multitudes.study.local import Outcome
    from multitudes.study.spec import Spec
    from multitudes.study.store import Run

__all__ = ["compare", "train"]

SOURCE = "digits; a Hugging Face id; a CSV, Parquet, .npz or .mtdata file; or a folder of images, CSV or Parquet files"


def compare(
    source: Annotated[str | None, Argument(metavar="DATA|STUDY.toml", help=f"{SOURCE}; or what to do as TOML.")] = None,
    data: Annotated[str | None, Option(metavar="SOURCE", help="The data, in place of those of a study.toml.")] = None,
    methods: Annotated[
        str | None,
        Option(metavar="A,B|all", help="See `multitudes methods`; by default all that fit the data."),
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="Train each method this many times; --seed is the first seed.")
    ] = None,
    scale: Annotated[
        str | None, Option(metavar="NAME", help="A scale of the study.toml, one of its tables [scales.NAME].")
    ] = None,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="The run directory; by default runs/NAME.")] = None,
    workers: Annotated[int | None, Option(min=1, help="Jobs at a time; by default one a core, or a GPU.")] = None,
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="Run the jobs on a Ray cluster: auto, or where.")] = None,
    gpus: Annotated[float | None, Option(min=0, help="With --ray, the share of a GPU for each job.")] = None,
    rerun_stale: Annotated[
        bool, Option("--rerun-stale", help="Do again what was done with another specification.")
    ] = False,
    *,
    reading: DataOptions,
    training: TrainingOptions,
    evaluation: EvaluationOptions,
    common: Common,
) -> None:
    """Train every method on your data, measure it, and show which is worth its price.

    The run directory holds what was done; the same command again does what is missing. Its report.html is the answer.
    """
    options = {**reading.arguments(), **training.arguments(), **evaluation.arguments(), **_computing(common)}
    file = source if source and source.lower().endswith(".toml") else None
    if scale is not None and file is None:
        raise ValueError(f"--scale={scale} is one of a study.toml, and there is none")
    if gpus is not None and ray is None:
        raise ValueError(f"--gpus={gpus:g} is a job's share on a cluster: it needs --ray")
    if file is None and source and data:
        raise ValueError(f"the data must be given once, got {source!r} and --data {data!r}")
    if not (source or data):
        raise ValueError(f"DATA must be given: {SOURCE}; or a study.toml")
    found = data if file else source or data
    if found:
        options["data"] = located(found, reading.data_root)
    if methods is not None and methods != "all":
        options["methods"] = words(methods)
    spec = _rooted(_spec(file, options, seeds, common.seed, scale), reading.data_root)
    if methods == "all":
        spec = spec.model_copy(update={"methods": {}})
    if ray is None:
        _check_device(spec.device)
    name = _name(file or found or "") + (f"-{scale}" if scale else "")
    run = _prepared(spec, out or Path("runs") / name, rerun_stale)
    outcome = _run(run, workers, ray, gpus)
    _conclude(run, outcome.failed)


def train(
    source: Annotated[str, Argument(metavar="DATA", help=SOURCE + ".")],
    method: Annotated[str, Option(help="See `multitudes methods`.")] = "packed",
    settings: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="A setting of the method; may be repeated.")
    ] = None,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="By default runs/NAME-METHOD.")] = None,
    rerun_stale: Annotated[
        bool, Option("--rerun-stale", help="Train again what was trained with other options.")
    ] = False,
    *,
    reading: DataOptions,
    training: TrainingOptions,
    evaluation: EvaluationOptions,
    common: Common,
) -> None:
    """Train one method, and measure it; an interrupted training is taken up where it was.

    The folder is a run directory with one job, for evaluate, predict and export.
    """
    options = {**reading.arguments(), **training.arguments(), **evaluation.arguments(), **_computing(common)}
    options["data"] = located(source, reading.data_root)
    options["methods"] = {method: dict(map(_setting, settings or []))}
    spec = _spec(None, options, None, common.seed)
    directory = out or Path("runs") / f"{_name(source)}-{method}"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        _train_together(spec, directory, rerun_stale)
        return
    _check_device(spec.device)
    run = _prepared(spec, directory, rerun_stale)
    outcome = _run(run, 1, None, None)
    _trained(run, outcome.failed)


# -- what to do --------------------------------------------------------------------------------------------


def _computing(common: Common) -> dict[str, Any]:
    chosen = {"device": common.device, "precision": common.precision}
    return {name: value for name, value in chosen.items() if value is not None}


def _spec(
    file: str | None, options: dict[str, Any], count: int | None, first: int | None, scale: str | None = None
) -> Spec:
    """The specification, with `count` seeds from `first` on, where they are given."""
    from multitudes.study.spec import Spec

    spec = Spec.load(file, scale, **options) if file else Spec.of(**options)
    if count is None and first is None:
        return spec
    first = first or 0
    seeds = list(range(first, first + (count or len(spec.seeds))))
    return spec.model_copy(update={"seeds": seeds})


def _rooted(spec: Spec, root: Path | None) -> Spec:
    """With the sources that a file names found within the data root too."""
    if root is None:
        return spec
    found = {"source": located(spec.data.source, root), "ood": [located(each, root) for each in spec.data.ood]}
    return spec.model_copy(update={"data": spec.data.model_copy(update=found)})


def _name(source: str) -> str:
    from multitudes.data.sources import short_name

    return Path(source).stem if source.lower().endswith(".toml") else short_name(source)


def _setting(text: str) -> tuple[str, Any]:
    """A setting, its value read as TOML has it, or else as a text.

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


def _check_device(device: str) -> None:
    from multitudes.study.job_data import device_of

    device_of(device)


def _prepared(spec: Spec, out: Path, rerun_stale: bool) -> Run:
    from multitudes.cli.screen import say
    from multitudes.study.planning import prepare

    run = prepare(spec, out, rerun_stale=rerun_stale, say=say)
    for reason, count in ((run.about or {}).get("dropped") or {}).items():
        say(f"Left out {count} bad row{'' if count == 1 else 's'}: {reason}")
    done = len(run.done)
    if done:
        say(f"{done} of {len(run.jobs)} jobs were done before, in {run.directory}")
    return run


# -- doing it ----------------------------------------------------------------------------------------------


def _run(run: Run, workers: int | None, ray: str | None, gpus: float | None) -> Outcome:
    from multitudes.cli.screen import watching

    with watching() as listener:
        if ray is not None:
            from multitudes.study.cluster import run_cluster

            return run_cluster(run, ray, gpus=gpus, on_event=listener)
        from multitudes.study.local import run_local

        return run_local(run, workers=workers, on_event=listener)


def _conclude(run: Run, failed: dict[str, str]) -> None:
    """The leaderboard, the answer, what failed and where the page is."""
    from multitudes import report
    from multitudes.cli.screen import console, leaderboard_tables, say, show
    from multitudes.study.landscape import write_landscape
    from multitudes.study.leaderboard import leaderboard, verdict

    rows = leaderboard(run)
    if rows:
        show(*leaderboard_tables(rows, console().width))
        show("* the best, ~ within noise of it; costs are multiples of the single network's\n")
        show(f"{verdict(rows)}\n")
    for name, why in failed.items():
        say(f"{name} failed: {why}")
    if rows:
        write_landscape(run)
        show(f"Report: {report.write(run.directory)}")
    if failed:
        count = "1 job" if len(failed) == 1 else f"{len(failed)} jobs"
        raise ValueError(f"{count} failed; the same command tries again (output.txt in the job's directory has more)")


def _trained(run: Run, failed: dict[str, str]) -> None:
    from multitudes.cli.screen import show, table

    job = run.jobs[0]
    if failed:
        raise ValueError(f"{job.directory} failed: {failed[job.name]}")
    scores = {name: score["value"] for name, score in job.metrics["scores"].items() if "/" not in name}
    show(table(["score", "value"], [[name, f"{value:.4f}"] for name, value in scores.items() if value is not None]))
    show(f"Trained: {job.directory}")


def _train_together(spec: Spec, out: Path, rerun_stale: bool) -> None:
    """In each of the processes that Accelerate started: one of them prepares, tells and measures, all of them train."""
    from multitudes.core.checks import needed
    from multitudes.study.store import Run
    from multitudes.study.worker import run as run_job

    accelerator = needed("accelerate", "accelerate", "training in several processes").Accelerator()
    with accelerator.main_process_first():
        run = _prepared(spec, out, rerun_stale) if accelerator.is_main_process else Run(out)
    run_job(run.jobs[0].directory, accelerator=accelerator)
    if accelerator.is_main_process:
        _trained(run, {})
