"""Random networks through every method and runner: a sample and a campaign, and tests of the judge."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from benchmarks import families, random_networks
from benchmarks.families import COLUMNS, REASONS
from benchmarks.family_networks import FAMILIES
from benchmarks.networks_page import PAGE, table_in, written
from tests.campaigns.random_floor import FLOORS, below, sample
from tests.campaigns.random_judge import Wrong, is_refusal, judge_members, judge_shared, judged, left_alone, same
from tests.campaigns.random_methods import CHECKS, ROWS, Verdict, verdict
from tests.campaigns.random_networks import INPUTS, Case, Network, Pool, case, run

MANY = range(1000, 1150)
BAD = ("crashed", "wrong")


def check_sample(method: str) -> None:
    """Check that each network of a method's sample is right or refused, and that enough are right."""
    rows = [row for row in ROWS if row[0] == method]
    verdicts = {(number, *row): verdict(number, *row) for number in sample(method) for row in rows}
    bad = [f"{number} {runner}: {v.kind}: {v.why}" for (number, _, runner), v in verdicts.items() if v.kind in BAD]
    assert not bad, f"{method}\n" + "\n".join(bad)
    right = {row: sum(v.kind == "right" for key, v in verdicts.items() if key[1:] == row) for row in rows}
    assert not below(right, {method: FLOORS[method][1]})


@pytest.mark.parametrize("method", CHECKS)
def test_every_method_is_right_or_refuses(method: str) -> None:
    check_sample(method)


@pytest.mark.campaign
@pytest.mark.parametrize("number", MANY)
def test_every_method_is_right_or_refuses_many_more(number: int) -> None:
    verdicts = {row: verdict(number, *row) for row in ROWS}
    bad = [f"{' '.join(row)}: {v.kind}: {v.why}" for row, v in verdicts.items() if v.kind in BAD]
    assert not bad, f"{case(number)}\n" + "\n".join(bad)


# -- the floor ---------------------------------------------------------------------------------------------


def test_every_method_has_a_floor() -> None:
    assert FLOORS.keys() == CHECKS.keys()
    assert all(floor.best > 0 and floor.all >= floor.best for floors in FLOORS.values() for floor in floors)
    assert all(small.best <= len(sample(method)) for method, (_, small) in FLOORS.items())


def test_the_page_is_not_below_the_floor() -> None:
    _, *rows = table_in(PAGE.read_text(), "random networks")
    right = {(row[0].strip("`"), row[1]): int(row[2]) for row in rows[:-1]}
    assert not below(right, {method: campaign for method, (campaign, _) in FLOORS.items()})


def campaign(monkeypatch: pytest.MonkeyPatch, kind: str, *options: str) -> int:
    """Return the exit code of the campaign if every network gets the same verdict."""
    monkeypatch.setattr(random_networks, "verdicts", lambda number, methods: dict.fromkeys(ROWS, Verdict(kind, "")))
    monkeypatch.setattr(sys, "argv", ["random_networks", *options])
    with pytest.raises(SystemExit) as ended:
        random_networks.main()
    return int(ended.value.code or 0)


def test_a_library_that_refuses_everything_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert campaign(monkeypatch, "refused") == 1
    errors = capsys.readouterr().err
    assert all(f"{method}: 0 right by its best runner" in errors for method in CHECKS)
    assert campaign(monkeypatch, "right") == 0
    assert campaign(monkeypatch, "refused", "--seed", "1000", "--count", "10") == 0  # networks without a floor
    assert campaign(monkeypatch, "wrong", "--seed", "1000", "--count", "10") == 1
    monkeypatch.setattr(sys.modules[__name__], "verdict", lambda *_: Verdict("refused", ""))
    for method in CHECKS:
        with pytest.raises(AssertionError, match=f"{method}: 0 right by its best runner"):
            check_sample(method)


def test_runners_may_change_their_names() -> None:
    floors = {method: campaign for method, (campaign, _) in FLOORS.items()}
    as_before = {("fuse", "loop"): 1000, ("fuse", "packed"): 220, ("fuse", "vmapped"): 710}
    assert not below(as_before, floors)
    assert below(as_before | {("fuse", "vmapped"): 709}, floors)
    assert below({("fuse", "loop"): 999, ("fuse", "packed"): 999}, floors)


# -- the generator -----------------------------------------------------------------------------------------


def test_a_number_determines_a_network() -> None:
    for number in range(30):
        one, other = case(number), case(number)
        assert one.parts == other.parts
        torch.testing.assert_close(run(one.model, one.x), run(other.model, other.x), rtol=0, atol=0)
        torch.testing.assert_close(one.y, other.y, rtol=0, atol=0)


def test_noise_changes_nothing_else() -> None:
    for number in range(30):
        noisy, quiet = case(number), case(number, noise=())
        assert noisy.parts == quiet.parts
        torch.testing.assert_close(run(noisy.model, noisy.x), run(quiet.model, quiet.x), rtol=0, atol=0)


def test_all_kinds_of_inputs_occur() -> None:
    assert {case(number).parts[0] for number in range(200)} == set(INPUTS)


# -- the judge ---------------------------------------------------------------------------------------------


def a_case() -> Case:
    torch.manual_seed(0)
    model = Network(nn.Linear(6, 8), nn.Identity(), Pool("mean"), "tensor").double().eval()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    return Case(0, model, x, y, "classification", (), ())


def networks() -> list[nn.Module]:
    return [a_case().model, case(3).model.__class__(nn.Linear(6, 8), nn.Identity(), Pool("mean"), "tensor").double()]


class ChangesTraining(mt.Members):
    """Members with a fault in evaluation, in training or in their gradients."""

    fault = ""

    def _predictions(self, x: Any) -> Tensor:
        answers = super()._predictions(x)
        if self.fault == "evaluation":
            return answers.flip(0)
        if self.training and self.fault == "training":
            return answers + 1e-5 * answers[:1]
        if self.training and self.fault == "gradient":
            return answers.detach() + 0.5 * (answers - answers.detach())
        return answers


@pytest.mark.parametrize("fault", ["", "evaluation", "training", "gradient"])
def test_the_judge_finds_wrong_members(fault: str) -> None:
    of = a_case()
    given = networks()
    net = ChangesTraining(copy.deepcopy(given), 2)
    net.fault = fault
    found = judged(lambda: judge_members(net, given, of, "loop"))
    assert found.kind == ("wrong" if fault else "right"), found
    assert fault in found.why or (fault == "training" and "loss" in found.why)


def test_the_judge_finds_wrong_shared_members(monkeypatch: pytest.MonkeyPatch) -> None:
    of = a_case()
    net = mt.batch_ensemble(of.model, 2, init="fresh", seed=0)
    judge_shared(net, of)
    whole = type(net)._predictions
    monkeypatch.setattr(type(net), "_predictions", lambda self, x: whole(self, x) * (1 + 1e-5 * self.training))
    with pytest.raises(Wrong, match="training of member 0"):
        judge_shared(net, of)


def test_the_judge_finds_changes_to_the_given_model() -> None:
    of = a_case()
    with pytest.raises(Wrong, match="attributes"), left_alone(of):
        of.model.left_behind = 1
    with pytest.raises(Wrong, match="head.linear.bias"), left_alone(of):
        of.model.head.linear.bias.data.add_(1e-9)


def test_only_errors_of_the_library_are_refusals() -> None:
    def refusal(error: type[Exception], call: Any) -> bool:
        with pytest.raises(error) as caught:
            call()
        return is_refusal(caught.value)

    of = a_case()
    assert refusal(ValueError, lambda: mt.deep_ensemble(of.model, members=0))
    assert not refusal(ValueError, lambda: int("one"))
    assert not refusal(RuntimeError, lambda: torch.ones(2) + torch.ones(3))
    assert not refusal(ValueError, lambda: mt.deep_ensemble(of.model, members=2, init="fresh")(of.x[:, :2]))


def test_tensors_are_compared_within_rounding() -> None:
    one = torch.ones(2, dtype=torch.float64)
    same("these", one, one + 1e-9)
    same("gradients", None, torch.zeros(2))
    for other in (one + 1e-6, one[:1], one * torch.nan):
        with pytest.raises(Wrong, match="these"):
            same("these", other, one)
    with pytest.raises(Wrong, match="gradients"):
        same("gradients", None, one)


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_has_every_family_and_every_method() -> None:
    pytest.importorskip("transformers")
    head, *rows = table_in(PAGE.read_text(), "families")
    assert head == ["", "network", *COLUMNS]
    assert [tuple(row[:2]) for row in rows] == [(group, name) for name, group in FAMILIES.items()]
    cells = {cell for row in rows for cell in row[2:]}
    assert cells <= {"ok", *REASONS.values()}
    assert {name for name, row in zip(FAMILIES, rows, strict=True) if row[2] != "ok"} == set()  # fused, by the loop
    assert len(FAMILIES) >= 20


def test_the_page_counts_every_method_and_runner() -> None:
    head, *rows = table_in(PAGE.read_text(), "random networks")
    assert head == ["method", "runner", "right", "refused", "crashed", "wrong"]
    assert [(row[0].strip("`"), row[1]) for row in rows[:-1]] == [(method, runner or "-") for method, runner in ROWS]
    assert len({sum(map(int, row[2:])) for row in rows[:-1]}) == 1
    assert {tuple(row[4:]) for row in rows} == {("0", "0")}


def test_the_page_names_its_commands() -> None:
    for module in (families, random_networks):
        assert f"python -m {module.__name__}" in PAGE.read_text()
        assert f"python -m {module.__name__}" in (module.__doc__ or "")


def test_a_refusal_has_three_words() -> None:
    assert all(len(words.split()) == 3 for words in REASONS.values())


def test_a_section_of_the_page_is_replaced() -> None:
    page = "a\n<!-- one: generated -->\nold\n<!-- end of one -->\nb"
    new = written(page, "one", ["| x | y |", "|---|---|", "| 1 | |"])
    assert (new[:2], new[-2:], "old" in new) == ("a\n", "\nb", False)
    assert table_in(new, "one") == [["x", "y"], ["1", ""]]
    with pytest.raises(ValueError, match="two"):
        written(page, "two", [])
