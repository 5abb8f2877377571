"""Sentences about arguments of Python, in the words of the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import get_args

from typer.models import OptionInfo

__all__ = ["as_typed", "flags_of"]

QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""


def flags_of(command: Callable[..., None]) -> dict[str, str]:
    """How the options of a command are typed, by the names of its parameters."""
    found = {}
    for name, parameter in inspect.signature(command).parameters.items():
        declared = next((each for each in get_args(parameter.annotation) if isinstance(each, OptionInfo)), None)
        if declared is not None:
            words = (declared.default, *(declared.param_decls or ()))  # in which Typer keeps the first
            flags = [word for word in map(str, words) if word.startswith("--")]
            found[name] = flags[0] if flags else f"--{name.replace('_', '-')}"
    return found


def as_typed(sentence: str, flags: Mapping[str, str]) -> str:
    """A sentence that names arguments of Python, with the options of a command in their place.

    An argument is known by its equals sign, or by the beginning of the sentence; what is quoted is the user's own.

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
