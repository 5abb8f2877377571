"""Solutions, their similarity, the map of functions, and functions drawn from a prior."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape import function_prior
from multitudes.landscape.function_space import function_map, similarity
from multitudes.landscape.solutions import last_checkpoint, read_solutions, subspaces


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def walk(seed: int, length: int = 8) -> mt.Recorder:
    """A random walk in weight space."""
    model = net(seed)
    recorder = mt.Recorder(model, keep=length)
    for _ in range(length):
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        recorder.step()
    return recorder


X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


def labels(network: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return network(X).argmax(1).numpy()


# -- similarity --------------------------------------------------------------------------------------------


def test_similarity_equals_loops_over_weights_labels_and_probabilities() -> None:
    nets = [net(seed) for seed in range(4)]
    found = similarity(nets, X)
    for i, one in enumerate(nets):
        for j, other in enumerate(nets):
            a, b = (np.concatenate([p.detach().double().numpy().ravel() for p in n.parameters()]) for n in (one, other))
            assert found.cosine[i, j] == pytest.approx(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b), abs=1e-12)
            assert found.disagreement[i, j] == pytest.approx(np.mean(labels(one) != labels(other)))
            p, q = (F.softmax(n(X), 1).detach().double().numpy() for n in (one, other))
            m = (p + q) / 2
            js = np.mean(np.sum(p * np.log(p / m) + q * np.log(q / m), 1) / 2)
            assert found.divergence[i, j] == pytest.approx(js, abs=1e-7)


def test_means_over_pairs_are_within_a_run_or_between_runs() -> None:
    found = similarity({"a": walk(0, 3), "b": walk(1, 2)}, X)
    d = found.disagreement
    assert found.runs == ("a", "a", "a", "b", "b")
    within = [d[0, 1], d[0, 2], d[1, 2], d[3, 4]]
    assert found.mean(same_run=True) == pytest.approx(float(torch.stack(within).mean()))
    assert found.mean(same_run=False) == pytest.approx(float(d[:3, 3:].mean()))


def test_a_mean_can_be_restricted_to_one_kind() -> None:
    found = similarity({"a": {"first": [net(0), net(1)], "second": net(2)}}, X)
    assert found.mean("cosine", same_run=True, kind="first") == pytest.approx(float(found.cosine[0, 1]))
    assert np.isnan(found.mean(same_run=True, kind="second"))


def test_networks_with_different_tensors_have_a_disagreement_but_no_cosine() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    found = similarity([net(0), wide, net(1)], X)
    assert found.cosine.isnan().tolist() == [[False, True, False], [True, False, True], [False, True, False]]
    assert found.disagreement[0, 1] == pytest.approx(np.mean(labels(net(0)) != labels(wide)))


# -- kinds of solutions -----------------------------------------------------------------------------------


def test_checkpoints_are_read_from_a_recorder_state_dicts_or_networks() -> None:
    recorder = walk(0, 3)
    networks = [copy.deepcopy(recorder.net) for _ in recorder]
    for network, state in zip(networks, recorder, strict=True):
        network.load_state_dict(state)
    want = torch.stack([network(X) for network in networks]).detach()
    for source in (recorder, list(recorder), networks):
        read = read_solutions({"run": source}, X, model=net())
        assert torch.equal(read.predictive.predictions, want)
        assert set(read.runs) == {"run"}


def test_members_are_separate_runs_unless_they_share_weights() -> None:
    ensemble = mt.deep_ensemble(net(), members=3)
    read = read_solutions({"e": ensemble}, X)
    assert read.runs == ("e, member 0", "e, member 1", "e, member 2") == read.labels
    torch.testing.assert_close(read.predictive.predictions, ensemble.predict(X).predictions)
    shared = mt.batch_ensemble(net(), members=3)
    read = read_solutions({"e": shared}, X)
    assert read.runs == ("e",) * 3
    torch.testing.assert_close(read.predictive.predictions, shared.predict(X).predictions)


def test_draws_from_a_subspace_are_its_samples() -> None:
    recorder = walk(0)
    drawn = mt.subspace(recorder.net, "diagonal", recorder)
    found = read_solutions({"run": {"diagonal": drawn}}, X, draws=4, seed=7)
    samples = drawn.networks(4, seed=7)
    torch.testing.assert_close(found.predictive.predictions, samples.predict(X).predictions)
    assert all(
        torch.equal(found.networks[i].state_dict()["0.weight"], samples.member(i).state_dict()["0.weight"])
        for i in range(4)
    )
    assert found.labels == tuple(f"run, diagonal {i}" for i in range(4))


def test_subspaces_of_members_trained_together_belong_to_their_members() -> None:
    ensemble = mt.deep_ensemble(net(), members=2)
    recorder = mt.Recorder(ensemble, keep=7)
    for _ in range(7):
        for parameter in ensemble.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        recorder.step()
    drawn = subspaces(recorder, kinds=["diagonal"])["diagonal"]
    read = read_solutions({"run": {"checkpoint": recorder, "diagonal": drawn}}, X, draws=3)
    assert read.runs[-6:] == ("run, member 0",) * 3 + ("run, member 1",) * 3
    assert len(read) == 2 * 7 + 2 * 3
    # Draws around a member are nearer to its own weights than to the other's.
    found = similarity(read)
    at = read.index("run, member 0, diagonal 0")
    assert found.cosine[at, read.index("run, member 0, checkpoint 6")] > 0.9
    assert found.cosine[at, read.index("run, member 1, checkpoint 6")] < 0.9


def test_draws_of_layers_share_the_weights_of_their_network() -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    dropped = mt.mc_dropout(model)
    read = read_solutions(dropped, X, draws=5, seed=3)
    torch.testing.assert_close(read.predictive.predictions, dropped.predict(X, draws=5, seed=3).predictions)
    found = similarity(read)
    torch.testing.assert_close(found.cosine, torch.ones(5, 5, dtype=torch.float64))
    assert found.mean(same_run=True) > 0


def test_a_shuffling_loader_gives_all_solutions_the_same_order() -> None:
    data = torch.utils.data.TensorDataset(X, torch.arange(len(X)) % 3)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model = net()
    read = read_solutions([model, copy.deepcopy(model)], loader)
    assert similarity(read).disagreement.max() == 0
    assert read.target is not None and read.target.bincount().tolist() == [14, 13, 13]


def test_the_last_checkpoint_is_a_network_with_its_weights() -> None:
    recorder = walk(0)
    last = last_checkpoint(recorder)
    assert torch.equal(last.state_dict()["0.weight"], recorder[-1]["0.weight"])
    assert last is not recorder.net


def test_options_of_subspaces_apply_to_all_kinds_or_to_one() -> None:
    recorder = walk(0)
    near = subspaces(recorder, kinds=["random", "dropout"], scale=1e-3, dropout={"p": 0.0})
    model = last_checkpoint(recorder)
    for drawn in near.values():
        with torch.no_grad():
            drawn_ones = drawn.eval()(X, draws=3, seed=0)
            torch.testing.assert_close(drawn_ones, model(X).expand(3, -1, -1), atol=0.02, rtol=0)


# -- the map -----------------------------------------------------------------------------------------------


def test_on_the_map_solutions_are_nearest_to_their_own_run() -> None:
    pytest.importorskip("sklearn")
    found = function_map({f"run {seed}": walk(seed) for seed in range(3)}, X, seed=0)
    assert found.points.shape == (24, 2)
    distance = torch.cdist(found.points, found.points) + torch.diag(torch.full((24,), torch.inf))
    nearest = distance.argmin(1).tolist()
    assert [found.runs[index] for index in nearest] == list(found.runs)
    again = function_map({f"run {seed}": walk(seed) for seed in range(3)}, X, seed=0)
    assert torch.equal(found.points, again.points)


def test_figures_show_every_solution() -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("sklearn")
    read = read_solutions({"a": {"checkpoint": walk(0, 3)}, "b": {"checkpoint": walk(1, 3), "other": net(5)}}, X)
    heats = similarity(read).plot().data
    assert [trace.type for trace in heats] == ["heatmap", "heatmap"]
    assert heats[1].y == read.labels
    traces = function_map(read).plot().data
    assert [trace.name for trace in traces] == ["a, checkpoint", "b, checkpoint", "b, other"]
    assert sum(len(trace.x) for trace in traces) == 7
    assert traces[0].marker.color != traces[1].marker.color == traces[2].marker.color
    assert traces[0].marker.symbol == traces[1].marker.symbol != traces[2].marker.symbol


# -- priors ------------------------------------------------------------------------------------------------


def covariance(kind: str, x: Tensor, hidden: int, rate: float = 0.5) -> Tensor:
    """`Cov(y(x), y(x'))` in closed form, `[G, G]`.

    Signs of two normal variables of correlation r agree in the mean by `2 / pi arcsin r`. Without its w, with
    probability p, a unit is the sign of b for both; and dropout keeps W with probability `1 - p`.
    """
    size = 20 + 5 * x.square()
    r = (20 + 5 * x[:, None] * x) / (size[:, None] * size).sqrt()
    p = rate if kind == "dropout" else 0.0
    return 20 + hidden * (1 - p) * 5 * (p + (1 - p) * 2 / math.pi * torch.arcsin(r.clamp(-1, 1)))


@pytest.mark.parametrize("kind", ["gaussian", "dropout", "patching"])
def test_functions_of_a_prior_have_the_covariance_of_the_closed_form(kind: str) -> None:
    x = torch.tensor([-3.0, 0.0, 0.5, 4.0])
    found = function_prior(kind, 20_000, x, hidden=20).functions
    want = covariance(kind, x, 20)
    deviations = want.diagonal().sqrt()
    # Four standard errors of the covariance of nearly normal variables.
    error = ((want.square() + (deviations[:, None] * deviations).square()) / 20_000).sqrt()
    assert ((found.T.cov() - want).abs() < 4 * error).all()
    assert (found.mean(0).abs() < 4 * deviations / 20_000**0.5).all()


def test_one_hidden_unit_gives_a_step_function() -> None:
    """One function of one hidden unit: two values, with the step where the unit's sign changes."""
    values = function_prior("gaussian", 1, torch.linspace(-50, 50, 1001), hidden=1, seed=3).functions[0]
    assert len(values.unique()) == 2
    assert (values.diff() != 0).sum() == 1


def test_a_seed_chooses_the_functions() -> None:
    one, same, other = (function_prior("dropout", seed=seed).functions for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    pytest.importorskip("plotly")
    assert len(function_prior("dropout").plot().data) == 3
