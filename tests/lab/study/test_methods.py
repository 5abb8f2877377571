"""The methods of a study, trained from plain settings, and the networks they start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multitudes import models
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude
from multitudes.lab.study.results.leaderboard import leaderboard
from multitudes.lab.study.run.execution import run_local
from multitudes.lab.study.spec.method_rows import METHODS, Method, method_of, methods_for, unfit
from multitudes.lab.study.spec.network_sources import build_network, defaults, network_names, outputs_of
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from multitudes.methods.catalog import list_methods
from multitudes.methods.dropout import Dropout
from multitudes.methods.subspace import Subspace
from multitudes.networks.stochastic import stochastic_layers
from multitudes.training.fit import fit
from multitudes.training.recorder import Recorder
from multitudes.training.schedules import schedule_of
from multitudes.training.trainer import Progress

NAMES = [
    "single", "deep", "tabm", "packed", "heads", "batch_ensemble", "lora", "masksembles", "laplace", "mimo",
    "mc_dropout",
    "drop_connect", "patched", "cross_patched", "variance", "smooth", "smooth_dropout", "swag", "subspace", "snapshots",
]  # fmt: skip
SHAPE = (1, 8, 8)


def small() -> nn.Module:
    torch.manual_seed(0)
    return build_network(defaults(SHAPE)["model"], SHAPE, 10)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def batches(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 16, *SHAPE, generator=generator)
    return [(part, (part.mean((1, 2, 3)) > 0).long()) for part in x]


def test_the_catalog_lists_the_rows_of_all_methods():
    rows = [(row.name, dict(row.settings), row.costs, row.pick, row.place) for row in METHODS.values()]
    assert [(each.name, each.settings, each.costs, each.pick, each.place) for each in list_methods()] == rows


def trained(method: Method, network: nn.Module, given: dict[str, Any] | None = None, epochs: int = 4) -> Multitude:
    """Train a network by the steps of a method, as a job does."""
    settings, data = method.complete(given), batches()
    net = method.build(network, data[0][0], settings, 0)
    arguments = method.train(net, {"epochs": epochs, "optimizer": "adam", "lr": 0.01, "schedule": "cosine"}, settings)
    times = method.times(arguments["epochs"] * len(data), settings)
    recorder = Recorder(net, keep=len(times)) if times else None

    def record(progress: Progress) -> None:
        if recorder is not None and progress.step in times and not progress.epoch_ended:
            recorder.record()

    fit(net, data, **arguments, dataset_size=192, callbacks=[record], seed=0)
    finished = method.finish(net, recorder, torch.cat([x for x, _ in data]), settings, 0)
    return method.after(finished, data, None, settings, 0)


# -- the table ---------------------------------------------------------------------------------------------


def test_all_methods_are_registered_in_order() -> None:
    assert list(METHODS) == NAMES
    assert all(METHODS[name].name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_json_and_descriptions_are_sentences(name: str) -> None:
    method = METHODS[name]
    assert json.loads(json.dumps(method.complete())) == method.complete()
    for sentence in (method.costs, method.pick):
        assert sentence.endswith(".") and 20 < len(sentence) < 120


@pytest.mark.parametrize("name", NAMES)
def test_every_method_trains_and_predicts(name: str) -> None:
    network = small()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    method = METHODS[name]
    net = trained(method, network, json.loads(json.dumps(method.complete())))
    predicted = net.predict(torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1)), seed=0)
    assert len(predicted) == 3 and predicted.predictions.isfinite().all()
    assert predicted.member_probs.var(0, correction=0).max() > 0 or name in ("single", "smooth")
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_unknown_methods_and_settings_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'packed' has no setting 'member'; its settings are: members, alpha, gamma"):
        METHODS["packed"].complete({"member": 4})
    with pytest.raises(ValueError, match=r"'single' has no setting 'members'; its settings are: none"):
        METHODS["single"].complete({"members": 4})
    with pytest.raises(ValueError, match=r"method must be one of single, deep, .*snapshots, got 'bagging'"):
        method_of("bagging")


def test_methods_are_chosen_by_the_kind_of_data_and_network() -> None:
    assert set(NAMES) - set(methods_for((13,))) == {"smooth", "smooth_dropout", "lora"}
    assert methods_for(SHAPE) == [name for name in NAMES if name not in ("tabm", "lora")]
    assert methods_for(SHAPE, pretrained=True) == [name for name in NAMES if name != "tabm"]
    assert "needs a pretrained network" in str(unfit(METHODS["lora"], SHAPE))
    assert "needs images, got rows of 13" in str(unfit(METHODS["smooth"], (13,)))


def test_the_seed_determines_the_members() -> None:
    x = torch.randn(2, *SHAPE)
    for name in ("deep", "packed", "batch_ensemble", "masksembles", "mimo", "patched", "variance"):
        method = METHODS[name]
        one, same, other = (method.build(small(), x, method.complete(), seed) for seed in (0, 0, 1))
        values = [torch.cat([p.flatten() for p in net.state_dict().values()]) for net in (one, same, other)]
        assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


BLURRED = ("smooth", "smooth_dropout")
"""They blur small maps and learn more slowly: accuracy 0.934 after the 35 epochs of this study."""


@pytest.mark.slow
def test_every_method_learns_the_digits(tmp_path: Path) -> None:
    run = prepare(Spec.of(data="digits", seeds=1, shift=[]), tmp_path / "run")
    assert not run_local(run, workers=2).failed
    rows = {row.name: row for row in leaderboard(run)}
    assert rows.keys() == METHODS.keys() - {"lora", "tabm"}  # for trained networks and for tables
    for name, row in rows.items():
        assert row["accuracy"] > (0.92 if name in BLURRED else 0.94), name
    assert rows["deep"]["nll"] < rows["single"]["nll"]
    assert rows["deep"]["ood/photographs/mutual_information/auroc"] > 0.9


# -- choices that depend on the network --------------------------------------------------------------------


def dropouts(net: Multitude) -> list[float]:
    return [layer.p for layer in net.network.modules() if isinstance(layer, Dropout)]


def built(name: str, network: nn.Module, example: Tensor | None = None, **given: Any) -> Multitude:
    method = METHODS[name]
    return method.build(network, torch.randn(2, *SHAPE) if example is None else example, method.complete(given), 0)


@pytest.mark.parametrize(
    ("network", "given", "rates"),
    [
        (models.small_cnn(channels=1, size=8, dropout=0.3), {}, [0.3] * 3),
        (normed(), {}, [0.1]),
        (normed(), {"p": 0.25}, [0.25]),
        (models.resnet20(channels=1), {}, [0.1] * 9),  # three stages of three blocks
    ],
    ids=["its own rate", "after activations", "chosen rate", "residual blocks"],
)
def test_dropout_is_kept_or_inserted(network: nn.Module, given: dict[str, Any], rates: list[float]) -> None:
    assert dropouts(built("mc_dropout", network, **given)) == pytest.approx(rates)


def test_dropout_of_rate_zero_counts_as_none() -> None:
    assert 0.1 in dropouts(built("mc_dropout", models.small_cnn(channels=1, size=8, dropout=0.0)))
    net = built("mc_dropout", normed())
    assert isinstance(net.network[2], nn.ReLU) and isinstance(net.network[3], Dropout)


def test_norm_layers_and_outputs_are_patched() -> None:
    def patched_layers(net: Multitude) -> set[str]:
        return {name for name, note in net.notes.items() if "versions" in note or "component" in note}

    assert patched_layers(built("patched", normed())) == {"1", "5"}
    assert patched_layers(built("patched", small())) == {"fc"}
    assert patched_layers(built("cross_patched", small(), layers="input+output")) == {"features.0", "fc"}


def test_swag_of_a_network_with_batch_norm_draws_fixed_members() -> None:
    net = trained(METHODS["swag"], normed())
    assert isinstance(net, Members) and net.members == 20 and not stochastic_layers(net.network)
    assert isinstance(trained(METHODS["swag"], small()), Subspace)


# -- training ----------------------------------------------------------------------------------------------


def test_checkpoints_are_recorded_evenly_in_the_last_part_of_training() -> None:
    settings = METHODS["swag"].complete({"checkpoints": 4, "share": 0.4})
    assert METHODS["swag"].times(100, settings) == [70, 80, 90, 100]
    assert METHODS["swag"].times(5, settings) == [2, 3, 4, 5]  # too few steps for the last part
    with pytest.raises(ValueError, match="checkpoints=10 do not fit into 5 training steps"):
        METHODS["swag"].times(5, METHODS["swag"].complete())


def test_the_learning_rate_of_swag_has_a_floor() -> None:
    method = METHODS["swag"]
    schedule = method.train(Multitude(small()), {"schedule": "linear"}, method.complete({"floor_rate": 0.3}))[
        "schedule"
    ]
    assert [schedule(done) for done in (0.0, 0.5, 0.9)] == [1.0, 0.5, 0.3]


def test_snapshots_are_taken_at_the_end_of_each_cycle() -> None:
    method = METHODS["snapshots"]
    settings = method.complete({"members": 3})
    times = method.times(30, settings)
    assert times == [10, 20, 30]
    rate = schedule_of(method.train(Multitude(small()), {}, settings)["schedule"])
    for step in times:  # the rate of the last step of a cycle is the lowest, that of the next step the highest
        assert rate((step - 1) / 30) < 0.05
        assert step == 30 or rate(step / 30) == pytest.approx(1.0)
    assert method.times(10, settings) == [4, 7, 10]
    with pytest.raises(ValueError, match="members=3 do not fit into 2 training steps"):
        method.times(2, settings)


def test_variance_networks_have_learning_rates_of_their_own() -> None:
    method = METHODS["variance"]
    net = built("variance", small())

    def rates(**given: Any) -> list[float]:
        training = {"epochs": 10, "optimizer": "adam", "lr": 0.02}
        optimizer = method.train(net, training, method.complete(given))["optimizer"]
        assert isinstance(optimizer, torch.optim.Adam)
        return [group["lr"] for group in optimizer.param_groups]

    assert rates() == [0.02]
    assert rates(lr=0.003, log_alpha_lr=0.1) == [0.003, 0.1]
    by_sgd = method.train(net, {"epochs": 10, "optimizer": "sgd", "lr": 0.05}, method.complete({"epochs_factor": 1.5}))
    assert by_sgd["optimizer"].param_groups[0]["lr"] == 0.001 and by_sgd["epochs"] == 15


# -- networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 12), (1, 28, 28), (3, 32, 32), (3, 30, 20), (13,)])
def test_the_default_network_fits_its_data(shape: tuple[int, ...]) -> None:
    network = build_network(defaults(shape)["model"], shape, 7).eval()
    assert network(torch.zeros(2, *shape)).shape == (2, 7)


def test_defaults_are_plain_values_and_copies() -> None:
    for shape in [(1, 8, 8), (1, 28, 28), (3, 64, 64), (4,)]:
        assert json.loads(json.dumps(defaults(shape))) == defaults(shape)
    defaults((4,))["training"]["epochs"] = 1
    assert defaults((4,))["training"]["epochs"] > 1
    assert (outputs_of("classification", 10), outputs_of("regression", 1)) == (10, 2)


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ({"name": "resnet"}, SHAPE, r"model must be one of .*small_cnn.*got 'resnet'"),
        ({"name": "small_cnn", "settings": {"width": 2}}, SHAPE, r"no setting 'width'; its settings are classes, ch"),
        ({"name": "small_cnn"}, (13,), "'small_cnn' is for images, but the inputs are rows of 13"),
        ({"name": "small_cnn"}, (1, 8, 9), "needs square images, got 8 x 9"),
        ({"name": "mlp", "setting": {}}, (13,), "no key 'setting'"),
        ({"settings": {}}, (13,), "must have a name"),
        ({"file": "nowhere.py", "name": "build"}, (13,), "the file 'nowhere.py' does not exist"),
    ],
)
def test_a_wrong_network_is_refused(model: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(model, shape, 3)


def test_a_custom_function_builds_a_network(tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n"
        "def build(shape, outputs, width=4):\n"
        "    return nn.Sequential(nn.Linear(shape[0], width), nn.ReLU(), nn.Linear(width, outputs))\n"
        "def number(shape, outputs):\n"
        "    return 1\n"
    )
    model = {"file": "my_net.py", "name": "build", "settings": {"width": 6}}
    assert build_network(model, (5,), 3, tmp_path)(torch.zeros(2, 5)).shape == (2, 3)
    with pytest.raises(ValueError, match="has no function 'made'; it has build, number"):
        build_network({**model, "name": "made"}, (5,), 3, tmp_path)
    with pytest.raises(ValueError, match="must return an nn.Module, got int"):
        build_network({"file": "my_net.py", "name": "number"}, (5,), 3, tmp_path)
    with pytest.raises(ValueError, match="cannot be built with .*depth"):
        build_network({**model, "settings": {"depth": 6}}, (5,), 3, tmp_path)


def test_named_networks_are_the_models() -> None:
    assert "small_cnn" in network_names() and "CNN" not in network_names()
    assert all(callable(getattr(models, name)) for name in network_names())
