"""The command line: `multitudes compare digits`.

Imports every other room, and is imported by none. A new command is a function and a row of `COMMANDS` in `app.py`;
options that several commands share are in `options.py`.
"""

from multitudes.core.checks import needed

needed("typer", "study", "the command line")  # names the extra to install, where the import below would not

from multitudes.cli.app import main  # noqa: E402

__all__ = ["main"]
