"""The table of docs/networks.md: the networks that each method takes, determined by running them.

    python -m benchmarks.families                                    # all rows; updates docs/networks.md
    python -m benchmarks.families --only BERT                        # one row; updates docs/networks.md
    python -m benchmarks.families --only BERT --method packed        # one cell, with the full reason

"ok" is a verdict of `tests/campaigns/random_judge.py`: predictions, gradients, buffers and draws equal those of the
members run one by one. Otherwise a cell gives the reason for a refusal in a few words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from benchmarks.family_networks import FAMILIES, family
from benchmarks.networks_page import PAGE, written
from tests.campaigns.random_judge import Verdict, judged
from tests.campaigns.random_methods import CHECKS, ROWS

COLUMNS = {
    "fuse, loop": ("fuse", "loop"),
    "fuse, packed": ("fuse", "packed"),
    "fuse, vmapped": ("fuse", "vmapped"),
    **{method: (method, runner) for method, runner in ROWS if method != "fuse" and runner in ("", "loop")},
}
"""Columns of the table: method and runner. Independent members run in the loop, those of `fuse` by each runner."""

SENTENCE = re.compile(r"^\w+: | \[\w+\.py:\d+\]$")
"""The judge's additions to an error message: the exception's name, and the line that raised it."""

REASONS = {
    r"share a weight|which shares them": "weights are tied",
    r"the predictions are not the outputs": "outputs are changed",
    r"must select the one layer": "several output layers",
    r"does not run on the example": "layer not run",
    r"not a multiple of its head size": "no whole heads",
    r"rank=\d+ must be at most": "rank too high",
    r"has frozen parameters": "frozen in part",
    r"with a computed weight": "weight is computed",
    r"computes with the \w+ of layer": "weight read directly",
    r"aten::(gru|lstm|rnn)": "recurrence under vmap",
    r"control flow|\.item\(\)|dynamic shape|inspects values|reads numbers": "branches on values",
    r"autograd\.Function": "own autograd function",
    r"requires_grad_\(\)|not differentiable": "gradient under vmap",
    r"has hooks": "hooks on layers",
    r"vmap cannot run": "not under vmap",
    r"(GRU|LSTM|RNN)\b.*(narrowed|plain convolution)": "recurrence is whole",
    r"[Aa]ttention.*plain convolution": "attention is whole",
    r"Parametri[sz]ed\w+, which cannot be narrowed": "weights are parametrised",
    r"channels are mixed|cannot narrow|cannot be narrowed": "channels are mixed",
    r"x must be one tensor": "not one tensor",
    r"its input must be read by": "input not direct",
    r"must be a plain convolution or linear": "no plain layer",
    r"no down-sampling": "nothing is down-sampled",
    r"no dropout layer": "has no dropout",
    r"'norm' selects nothing": "has no norm",
    r"has only one layer": "only one layer",
    r"no layer that can be converted|has no linear layer": "no such layer",
    r"first axis does not hold the rows": "batch not first",
    r"same network before and after|stay the same network": "members stay alike",
    r"": "for another reason",
}
"""Short reasons for a refusal, by a pattern in its message; the first match counts."""


def verdicts(name: str, methods: tuple[str, ...]) -> dict[str, Verdict]:
    """Return the verdict on one family for each column."""
    torch.set_num_threads(1)
    make = partial(family, name)
    rows = {column: row for column, row in COLUMNS.items() if row[0] in methods}
    return {column: judged(lambda row=row: CHECKS[row[0]](make, row[1])) for column, row in rows.items()}


def three_words(found: Verdict) -> str:
    if found.kind != "refused":
        return {"right": "ok"}.get(found.kind, found.kind.upper())
    return next(words for part, words in REASONS.items() if re.search(part, found.why))


def table(found: dict[str, dict[str, Verdict]]) -> Iterator[str]:
    yield f"| | network | {' | '.join(COLUMNS)} |"
    yield f"|---|---|{'---|' * len(COLUMNS)}"
    for name in FAMILIES:
        yield row(name, found[name])


def row(name: str, found: dict[str, Verdict]) -> str:
    return f"| {FAMILIES[name]} | {name} | {' | '.join(three_words(found[column]) for column in COLUMNS)} |"


def with_row(text: str, name: str, found: dict[str, Verdict]) -> str:
    """Return the page with one family's row replaced."""
    start = f"| {FAMILIES[name]} | {name} |"
    lines = text.split("\n")
    return "\n".join(row(name, found) if line.startswith(start) else line for line in lines)


def reasons(found: dict[str, dict[str, Verdict]]) -> Iterator[str]:
    """Yield one full message per short reason, the first that occurs."""
    first: dict[str, str] = {}
    for of_all in found.values():
        for verdict in of_all.values():
            if verdict.kind == "refused":
                first.setdefault(three_words(verdict), verdict.why)
    yield "Each of the reasons in full, as the first network in the table got it:"
    yield ""
    for words, why in sorted(first.items()):
        yield f"- *{words}*: {SENTENCE.sub('', why)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", choices=FAMILIES, help="one family, by its name")
    parser.add_argument("--method", choices=CHECKS, action="append", help="one method; may be given again")
    args = parser.parse_args()
    names, methods = [args.only] if args.only else list(FAMILIES), tuple(args.method or CHECKS)
    one = partial(verdicts, methods=methods)
    found: dict[str, dict[str, Verdict]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, of_all in zip(names, pool.map(one, names), strict=True):
            found[name] = of_all
            for column, (kind, why) in of_all.items():
                if kind in ("crashed", "wrong") or args.only or args.method:
                    print(f"{name}, {column}: {kind}: {why}", file=sys.stderr, flush=True)
    if args.only and not args.method:
        PAGE.write_text(with_row(PAGE.read_text(), args.only, found[args.only]))
    elif not args.method:
        PAGE.write_text(written(PAGE.read_text(), "families", [*table(found), "", *reasons(found)]))


if __name__ == "__main__":
    main()
