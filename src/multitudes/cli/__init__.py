"""The command line: `multitudes compare digits`."""

from multitudes.core.checks import needed

needed("typer", "study", "the command line")  # names the extra to install, where the import below would not

from multitudes.cli.app import main  # noqa: E402

__all__ = ["main"]
