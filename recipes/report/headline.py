"""Quality numbers in the project's README: a few rows of the results, inserted between two marks."""

from __future__ import annotations

from recipes.report.packed_cifar10 import METHODS, cost, results_of, score
from recipes.report.raw import Raw, mean_of, number, percent, table

__all__ = ["headline", "with_headline"]

BEGIN, END = "<!-- made from results/ by `make results` -->", "<!-- until here -->"
SHOWN = ("single", "packed", "masksembles", "deep")


def headline(raw: Raw) -> str:
    """Compare methods with the single network, from the runs of Packed-Ensembles' Table 1, and name the machines."""
    rows = []
    for method in SHOWN:
        if found := results_of(raw, method):
            right, nll, ece = (mean_of(map(score(name), found)) for name in ("accuracy", "nll", "ece"))
            size, time = (mean_of(map(cost(f"{name}_ratio"), found)) for name in ("parameters", "training_seconds"))
            numbers = [percent(right), number(nll), number(ece), number(size, 2), number(time, 2)]
            rows.append([METHODS[method], *numbers, str(len(found))])
    header = ["ResNet-18 on CIFAR-10", "accuracy %", "NLL", "ECE", "parameters, x", "training time, x", "seeds"]
    machines = ", ".join(sorted({piece["machine"]["name"] for piece in raw.pieces.values()}))
    return f"{table(header, rows)}\n\nTraining time is that of a step, not compiled; measured on: {machines}."


def with_headline(text: str, raw: Raw) -> str:
    """Regenerate the text between the marks.

    >>> from pathlib import Path
    >>> print(with_headline(f"before\\n{BEGIN}\\nold\\n{END}\\nafter", Raw(Path("nowhere"))).count("old"))
    0
    """
    before, found, rest = text.partition(BEGIN)
    _, also, after = rest.partition(END)
    if not (found and also):
        raise ValueError(f"text must have the marks {BEGIN!r} and {END!r}, got neither or one of them")
    return f"{before}{BEGIN}\n\n{headline(raw)}\n\n{END}{after}"
