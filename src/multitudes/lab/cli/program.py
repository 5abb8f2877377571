"""The program `multitudes`: commands and error handling.

Errors print one sentence to stderr and exit with code 2; `--debug` adds a traceback. Ctrl-C exits with code 130.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import metadata
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from multitudes.lab.cli import artifact_commands as artifacts
from multitudes.lab.cli import listing_commands as tables
from multitudes.lab.cli import prediction_commands as answers
from multitudes.lab.cli import study_commands as study
from multitudes.lab.cli.options import grouped

ERROR, INTERRUPTED = 2, 130
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""

app = typer.Typer(
    name="multitudes",
    help="Train, compare and deploy neural networks that quantify their uncertainty.",
    epilog="Start with: multitudes compare digits",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data = typer.Typer(name="data", help="Prepare data.", no_args_is_help=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program, and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("GITHUB_ACTIONS") and not sys.stdout.isatty():
        os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"  # otherwise Typer writes colours into logs
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="multitudes", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # wrong usage: Typer's errors have no public base class
        if not hasattr(error, "format_message"):
            raise
        if message := error.format_message():  # empty if the help was shown because no command was given
            _say(f"Error: {message}")
        code = ERROR if message else 0
    sys.exit(code if isinstance(code, int) else 0)


def _version(requested: bool) -> None:
    if requested:
        print(f"multitudes {metadata.version('multitudes')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program."""


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that its errors become one sentence and an exit code."""

    @wraps(command)
    def run(**values: Any) -> None:
        debug = values["debug"]
        try:
            with warnings.catch_warnings():
                if not debug:
                    warnings.showwarning = lambda message, *_, **__: _say(f"Warning: {message}")
                command(**values)
        except (typer.Exit, BrokenPipeError):
            raise
        except KeyboardInterrupt as stopped:
            reason = str(stopped) or "stopped; repeat the command to start again"
            _say(f"\n{reason[0].upper()}{reason[1:]}")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # one sentence for the user; the traceback with --debug
            if hasattr(error, "format_message"):
                raise
            if debug:
                traceback.print_exc()
            else:
                message = _sentence(error)
                in_file = getattr(error, "in_file", False)
                _say(f"Error: {message if in_file else as_typed(message, flags_of(command))}")
            raise typer.Exit(ERROR) from None

    return run


def _sentence(error: Exception) -> str:
    """Return the message of an error; mention --debug for unexpected types, which may be bugs."""
    if isinstance(error, (ValueError, ImportError, FloatingPointError)) and str(error):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}".rstrip(": ") + " (--debug shows the traceback)"


# -- error messages in terms of command-line options ------------------------------------------------------


def flags_of(command: Callable[..., None]) -> dict[str, str]:
    """Return the command-line flag of each parameter of a command."""
    found = {}
    for name, parameter in inspect.signature(command).parameters.items():
        declared = next((each for each in get_args(parameter.annotation) if isinstance(each, OptionInfo)), None)
        if declared is not None:
            words = (declared.default, *(declared.param_decls or ()))  # Typer stores the first flag here
            flags = [word for word in map(str, words) if word.startswith("--")]
            found[name] = flags[0] if flags else f"--{name.replace('_', '-')}"
    return found


def as_typed(sentence: str, flags: Mapping[str, str]) -> str:
    """Replace Python arguments in a sentence by command-line options.

    An argument is followed by an equals sign, or is at the start of the sentence. Quoted text is not changed.

    >>> flags = {"target": "--target", "skip_bad": "--skip-bad", "read_as": "--as", "epochs": "--epochs"}
    >>> as_typed("target='a=b' is no column. skip_bad=True leaves them out", flags)
    "--target 'a=b' is no column. --skip-bad leaves them out"
    >>> as_typed("target= must say what to predict", flags), as_typed("training.epochs must be 1 or more", flags)
    ('--target must say what to predict', '--epochs must be 1 or more')
    >>> as_typed("read_as of 'epochs' must be date; there are target, epochs", flags)
    "--as of 'epochs' must be date; there are target, epochs"
    """
    if not flags:
        return sentence
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    pattern = re.compile(
        rf"(?P<quoted>{QUOTED})|^(?:data|training|evaluation)\.(?P<key>{names})\b(?P<key_equals>=?)"
        rf"|(?<![\w.-])(?P<name>{names})=(?P<true>True\b)?(?P<value>(?=[^\s.,;:)]))?"
        rf"|^(?P<first>{names})(?= must | of )"
    )

    def typed(found: re.Match[str]) -> str:
        if found["quoted"] is not None:
            return found["quoted"]
        if found["key"]:
            return flags[found["key"]] + (" " if found["key_equals"] else "")
        if found["name"]:
            return flags[found["name"]] + (" " if found["value"] is not None and not found["true"] else "")
        return flags[found["first"]]

    return pattern.sub(typed, sentence)


COMMANDS: list[tuple[typer.Typer, str, Callable[..., None], str]] = [
    (app, "compare", study.compare, """
        multitudes compare digits
        multitudes compare study.toml --seeds 3
        multitudes compare uoft-cs/cifar10 --ood ufldl-stanford/svhn --methods single,deep,packed --seeds 3
        multitudes compare wine.csv --target quality --out runs/wine
        multitudes compare reviews.csv --target label --model hf:./my-bert"""),
    (app, "train", study.train, """
        multitudes train digits --method packed
        multitudes train ./images --method packed --set members=8 --model resnet50 --out trained
        accelerate launch -m multitudes train uoft-cs/cifar10 --method packed"""),
    (app, "evaluate", answers.evaluate, """
        multitudes evaluate runs/digits/jobs/packed-0
        multitudes evaluate trained ./other_images --shift all --ood ufldl-stanford/svhn --to scores.json"""),
    (app, "predict", answers.predict, """
        multitudes predict runs/digits/jobs/packed-0 one.png two.png
        multitudes predict trained ./images --to answers.csv
        multitudes predict runs/wine/jobs/deep-0 new.csv --to answers.json --level 0.9
        multitudes predict runs/reviews/jobs/deep-0 --text "What a film." """),
    (app, "serve", answers.serve, """
        multitudes serve runs/digits/jobs/packed-0
        multitudes serve trained --port 9000 --level 0.9
        MULTITUDES_TOKEN=... multitudes serve trained --host 0.0.0.0"""),
    (app, "explain", artifacts.explain, """
        multitudes explain runs/digits
        multitudes explain runs/digits/jobs/deep-0 --to why.html"""),
    (app, "report", artifacts.report, """
        multitudes report runs/digits"""),
    (app, "export", artifacts.export, """
        multitudes export runs/digits/jobs/packed-0 --to model.onnx
        multitudes export runs/digits/jobs/mc_dropout-0 --to model.onnx --draws 16"""),
    (app, "methods", tables.methods, """
        multitudes methods"""),
    (app, "bench", tables.bench, """
        multitudes bench
        multitudes bench --model resnet18 --shape 3,32,32 --methods single,deep,packed --device cuda --batch 512"""),
    (data, "prepare", tables.prepare, """
        multitudes data prepare uoft-cs/cifar10 --ood ufldl-stanford/svhn --to cifar10.mtdata
        multitudes data prepare wine.csv --target quality --to wine.mtdata --skip-bad"""),
]  # fmt: skip
"""Commands, each with examples for its `--help`."""

for group, name, function, examples in COMMANDS:
    shown = "\n\n".join(["[bold]Examples[/bold]", *(f"  {line.strip()}" for line in examples.strip().splitlines())])
    group.command(name, epilog=shown)(_guarded(grouped(function)))
app.add_typer(data)
