"""`python -m multitudes`, which is the command `multitudes`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the program is being imported is no traceback

from multitudes.cli import main

if __name__ == "__main__":
    main()
