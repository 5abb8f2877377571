"""The command `multitudes`, also `python -m multitudes`."""

import signal


def main() -> None:
    """Run the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C during imports
    from multitudes.lab.cli import main as run

    run()


if __name__ == "__main__":
    main()
