"""Verdicts on random networks under every method and runner, by a judge with its own loop.

    python -m benchmarks.random_networks --count 1000 --seed 0 [--jobs 2] [--write]  # from the root of the repository
    python -m benchmarks.random_networks --only 123 --method packed                  # one network again, with reasons

Each network has a number; seed S means the numbers from S on. Under a method and a runner it is *right*, *refused* for
a reason, *crashed*, or silently *wrong* (`tests/campaigns/random_judge.py`). The last two must be 0. For the first
thousand networks, each method has a minimum of right ones (`tests/campaigns/random_floor.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from benchmarks.networks_page import PAGE, written
from tests.campaigns.random_floor import CAMPAIGN, FLOORS, below
from tests.campaigns.random_methods import CHECKS, ROWS, Verdict, verdict
from tests.campaigns.random_networks import case

KINDS = ("right", "refused", "crashed", "wrong")
Verdicts = dict[tuple[str, str], Verdict]


def verdicts(number: int, methods: tuple[str, ...]) -> Verdicts:
    """Return the verdict on one network for each method and runner."""
    torch.set_num_threads(1)
    return {(method, runner): verdict(number, method, runner) for method, runner in ROWS if method in methods}


def through_all(numbers: list[int], methods: tuple[str, ...], jobs: int) -> Iterator[tuple[int, Verdicts]]:
    one = partial(verdicts, methods=methods)
    if jobs == 1:
        yield from zip(numbers, map(one, numbers), strict=True)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from zip(numbers, pool.map(one, numbers, chunksize=8), strict=True)


def table(counts: dict[tuple[str, str], Counter[str]]) -> Iterator[str]:
    """Yield a Markdown table of counts by method and runner."""
    yield f"| method | runner | {' | '.join(KINDS)} |"
    yield f"|---|---|{'---:|' * len(KINDS)}"
    for (method, runner), counter in counts.items():
        yield f"| `{method}` | {runner or '-'} | {' | '.join(str(counter[kind]) for kind in KINDS)} |"
    total = sum(counts.values(), Counter[str]())
    yield f"| all | | {' | '.join(str(total[kind]) for kind in KINDS)} |"


def too_few(numbers: list[int], counts: dict[tuple[str, str], Counter[str]]) -> list[str]:
    """Return the rows below the floor; only the whole campaign has one."""
    if numbers != list(CAMPAIGN):
        return []
    right = {row: counter["right"] for row, counter in counts.items()}
    return below(right, {method: campaign for method, (campaign, _) in FLOORS.items()})


def one_again(number: int, methods: Iterable[str]) -> None:
    print(case(number))
    for (method, runner), (kind, why) in verdicts(number, tuple(methods)).items():
        print(f"{method:16}{runner:10}{kind:10}{why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="how many networks")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, help="one network, by its number")
    parser.add_argument("--method", choices=CHECKS, action="append", help="one method; may be given again")
    parser.add_argument("--write", action="store_true", help="put the table into docs/networks.md")
    args = parser.parse_args()
    methods = tuple(args.method or CHECKS)
    if args.only is not None:
        one_again(args.only, methods)
        return
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    bad: list[str] = []
    numbers = list(range(args.seed, args.seed + args.count))
    for number, of_all in through_all(numbers, methods, args.jobs):
        for row, (kind, why) in of_all.items():
            counts[row][kind] += 1
            if kind in ("crashed", "wrong"):
                bad.append(f"{number} {' '.join(row).strip()}: {kind}: {why}")
                print(bad[-1], file=sys.stderr, flush=True)
    lines = [f"{args.count} networks, the numbers from {args.seed} on:", "", *table(counts)]
    print("\n".join(lines))
    if args.write:
        PAGE.write_text(written(PAGE.read_text(), "random networks", lines))
    missing = too_few(numbers, counts)
    print("\n".join(missing), file=sys.stderr)
    raise SystemExit(bool(bad or missing))


if __name__ == "__main__":
    main()
