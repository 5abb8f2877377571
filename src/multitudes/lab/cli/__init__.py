"""The command line: `multitudes compare digits`.

Imports every other package, and no package imports it. To add a command, add a function and a row of `COMMANDS` in
`program.py`. Options of several commands are in `options.py`.
"""

from multitudes.base.checks import needed

needed("typer", "study", "the command line")  # names the extra to install; the import below would not

from multitudes.lab.cli.program import main  # noqa: E402

__all__ = ["main"]
