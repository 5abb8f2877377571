"""What the networks ask of their arguments."""


def check_counts(**counts: int) -> None:
    """Each argument, by its name, must be a whole number, 1 or more."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, got {value!r}.")


def check_dropout(dropout: float) -> None:
    """A rate of dropout must leave something to learn from."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be 0 or more and below 1, got {dropout!r}.")
