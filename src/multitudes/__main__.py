"""`python -m multitudes`, which is the command `multitudes`."""

import signal


def main() -> None:
    """Run the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it is imported, Ctrl-C ends it without a traceback
    from multitudes.lab.cli import main as run

    run()


if __name__ == "__main__":
    main()
