"""The command line: `multitudes compare digits`.

Imports every other package, and is imported by none. To add a command, add a function and a row of `COMMANDS` in
`app.py`; options shared by several commands are in `options.py`.
"""

from multitudes.core.checks import needed

needed("typer", "study", "the command line")  # names the extra to install; the import below would not

from multitudes.cli.app import main  # noqa: E402

__all__ = ["main"]
