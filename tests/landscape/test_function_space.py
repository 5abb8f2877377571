"""Solutions, their similarity, and the map of functions."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape.function_space import function_map, similarity
from multitudes.landscape.solutions import last_checkpoint, read_solutions, subspaces


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def way(seed: int, length: int = 8) -> mt.Recorder:
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


def test_similarity_is_what_loops_over_weights_labels_and_probabilities_give() -> None:
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
    found = similarity({"a": way(0, 3), "b": way(1, 2)}, X)
    d = found.disagreement
    assert found.runs == ("a", "a", "a", "b", "b")
    within = [d[0, 1], d[0, 2], d[1, 2], d[3, 4]]
    assert found.mean(same_run=True) == pytest.approx(float(torch.stack(within).mean()))
    assert found.mean(same_run=False) == pytest.approx(float(d[:3, 3:].mean()))


def test_a_mean_can_be_of_one_kind_alone() -> None:
    found = similarity({"a": {"first": [net(0), net(1)], "second": net(2)}}, X)
    assert found.mean("cosine", same_run=True, kind="first") == pytest.approx(float(found.cosine[0, 1]))
    assert np.isnan(found.mean(same_run=True, kind="second"))


def test_networks_of_different_tensors_have_no_cosine_but_a_disagreement() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    found = similarity([net(0), wide, net(1)], X)
    assert found.cosine.isnan().tolist() == [[False, True, False], [True, False, True], [False, True, False]]
    assert found.disagreement[0, 1] == pytest.approx(np.mean(labels(net(0)) != labels(wide)))


# -- what solutions may be ---------------------------------------------------------------------------------


def test_checkpoints_read_alike_from_a_recorder_from_state_dicts_and_from_networks() -> None:
    recorder = way(0, 3)
    networks = [copy.deepcopy(recorder.net) for _ in recorder]
    for network, state in zip(networks, recorder, strict=True):
        network.load_state_dict(state)
    want = torch.stack([network(X) for network in networks]).detach()
    for source in (recorder, list(recorder), networks):
        read = read_solutions({"run": source}, X, model=net())
        assert torch.equal(read.predictive.predictions, want)
        assert set(read.runs) == {"run"}


def test_members_that_share_no_weight_are_runs_of_their_own_and_others_are_not() -> None:
    ensemble = mt.deep_ensemble(net(), members=3)
    read = read_solutions({"e": ensemble}, X)
    assert read.runs == ("e, member 0", "e, member 1", "e, member 2") == read.labels
    torch.testing.assert_close(read.predictive.predictions, ensemble.predict(X).predictions)
    shared = mt.batch_ensemble(net(), members=3)
    read = read_solutions({"e": shared}, X)
    assert read.runs == ("e",) * 3
    torch.testing.assert_close(read.predictive.predictions, shared.predict(X).predictions)


def test_draws_from_a_subspace_are_its_samples_with_weights_of_their_own() -> None:
    recorder = way(0)
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


def test_all_solutions_see_the_inputs_of_a_shuffling_loader_in_one_order() -> None:
    data = torch.utils.data.TensorDataset(X, torch.arange(len(X)) % 3)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model = net()
    read = read_solutions([model, copy.deepcopy(model)], loader)
    assert similarity(read).disagreement.max() == 0
    assert read.target is not None and read.target.bincount().tolist() == [14, 13, 13]


def test_the_last_checkpoint_is_a_network_with_its_weights() -> None:
    recorder = way(0)
    last = last_checkpoint(recorder)
    assert torch.equal(last.state_dict()["0.weight"], recorder[-1]["0.weight"])
    assert last is not recorder.net


def test_options_of_subspaces_are_for_all_kinds_or_for_one() -> None:
    recorder = way(0)
    near = subspaces(recorder, kinds=["random", "dropout"], scale=1e-3, dropout={"p": 0.0})
    model = last_checkpoint(recorder)
    for drawn in near.values():
        with torch.no_grad():
            drawn_ones = drawn.eval()(X, draws=3, seed=0)
            torch.testing.assert_close(drawn_ones, model(X).expand(3, -1, -1), atol=0.02, rtol=0)


# -- the map -----------------------------------------------------------------------------------------------


def test_on_the_map_each_solution_is_nearest_to_one_of_its_run() -> None:
    pytest.importorskip("sklearn")
    found = function_map({f"run {seed}": way(seed) for seed in range(3)}, X, seed=0)
    assert found.points.shape == (24, 2)
    distance = torch.cdist(found.points, found.points) + torch.diag(torch.full((24,), torch.inf))
    nearest = distance.argmin(1).tolist()
    assert [found.runs[index] for index in nearest] == list(found.runs)
    again = function_map({f"run {seed}": way(seed) for seed in range(3)}, X, seed=0)
    assert torch.equal(found.points, again.points)


def test_figures_show_every_solution() -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("sklearn")
    read = read_solutions({"a": {"checkpoint": way(0, 3)}, "b": {"checkpoint": way(1, 3), "other": net(5)}}, X)
    heats = similarity(read).plot().data
    assert [trace.type for trace in heats] == ["heatmap", "heatmap"]
    assert heats[1].y == read.labels
    traces = function_map(read).plot().data
    assert [trace.name for trace in traces] == ["a, checkpoint", "b, checkpoint", "b, other"]
    assert sum(len(trace.x) for trace in traces) == 7
    assert traces[0].marker.color != traces[1].marker.color == traces[2].marker.color
    assert traces[0].marker.symbol == traces[1].marker.symbol != traces[2].marker.symbol


# -- the paper's findings on digits --------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """700 digits to train on, and 1097 to compare functions on."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]
    return x[:700], y[:700], x[700:], y[700:]


def trained(seed: int, x: Tensor, y: Tensor) -> mt.Recorder:
    """SmallCNN by the paper's recipe: Adam, 1.6e-3 halved every 10 of 40 epochs; the last 10 epochs recorded."""
    torch.manual_seed(seed)
    model = mt.models.small_cnn(channels=1, size=8)
    optimizer = torch.optim.Adam(model.parameters(), 1.6e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    recorder = mt.Recorder(model, keep=10)
    for _ in range(40):
        for rows in torch.randperm(len(x)).split(16):  # as many steps for 700 images as needed to fit them
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
        recorder.step()
    return recorder


@pytest.mark.slow
def test_independent_runs_differ_more_than_a_trajectory_and_than_every_subspace_of_it() -> None:
    """Sections 4.1, 4.2 and 5, in miniature.

    As in section 5, weights drawn from a subspace count where they keep about the accuracy of their run: there 0.65,
    an error 1.2 times that of the network (0.71). Steps of length 1 in principal directions leave this small network
    little of its accuracy (0.1 to 0.7), so that hardly any would count; of length 0.1, they do.
    """
    x, y, x_test, y_test = digits()
    solutions = {}
    for seed in range(5):
        recorder = trained(seed, x, y)
        network = last_checkpoint(recorder).eval()
        error = float((network(x_test).argmax(1) != y_test).float().mean())
        drawn = subspaces(
            recorder,
            data=(x_test, y_test),
            floor=1 - 1.2 * error,
            tries=300,
            dropout={"p": (0.0, 0.05)},
            low_rank={"scale": 0.1},
        )
        solutions[f"run {seed}"] = {"solution": network, "trajectory": list(recorder)[1::2], **drawn}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each draw found weights that are accurate enough
        read = read_solutions(solutions, (x_test, y_test), model=network, draws=5, seed=0)
    found = similarity(read)

    between = {matrix: found.mean(matrix, same_run=False, kind="solution") for matrix in ("disagreement", "divergence")}
    together = float(read.chosen("solution", solutions).mutual_information.mean())
    for kind in ("trajectory", "random", "dropout", "diagonal", "low_rank"):
        for matrix, apart in between.items():
            assert found.mean(matrix, same_run=True, kind=kind) < apart, (kind, matrix)
        # The divergence of five solutions together (Fig. 9), mean over the runs that they are drawn around.
        own = [float(read.chosen(kind, [run]).mutual_information.mean()) for run in solutions]
        assert sum(own) / len(own) < together, kind
    # Weights of different runs are nearly orthogonal, those of a trajectory nearly parallel (Fig. 2, 3).
    assert found.mean("cosine", same_run=False, kind="solution") < 0.2
    assert found.mean("cosine", same_run=True, kind="trajectory") > 0.95
