"""`python -m multitudes`, which is the command `multitudes`."""

from multitudes.cli import main

if __name__ == "__main__":
    main()
