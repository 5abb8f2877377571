"""The command line: `multitudes compare digits`.

Its modules import torch, and all that needs it, inside the commands, so that `multitudes --help` is there at once.
"""

from multitudes.core.checks import needed

needed("typer", "study", "the command line")  # says which extra has it, where the import below would not

from multitudes.cli.app import main  # noqa: E402

__all__ = ["main"]
