"""A multitude in a file: what is loaded is what was saved."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import multitudes as mt
from multitudes.evaluation.calibrate import Calibrated, calibrate
from multitudes.files.save import load, save
from multitudes.networks.stochastic import stochastic_layers
from multitudes.surgery.observe import example_for
from tests.files.test_freeze import Jitter
from tests.zoo import cases, drawing_cases

SETTINGS = ("members", "task", "draws", "training_draws", "memory", "notes", "training")


def same(net: mt.Multitude, loaded: mt.Multitude, x: Tensor) -> None:
    """Bit for bit: predictions in evaluation, seeded draws, the state dict, and the settings."""
    assert type(loaded) is type(net)
    assert {name: getattr(loaded, name) for name in SETTINGS} == {name: getattr(net, name) for name in SETTINGS}
    assert [module.training for module in loaded.modules()] == [module.training for module in net.modules()]
    one, two = net.state_dict(), loaded.state_dict()
    assert list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)
    grads = {name: p.requires_grad for name, p in net.named_parameters()}
    assert {name: p.requires_grad for name, p in loaded.named_parameters()} == grads
    options = {"draws": 3, "seed": 1} if stochastic_layers(net.network) else {}
    one, two = copy.deepcopy(net).eval(), copy.deepcopy(loaded).eval()
    with torch.no_grad():
        assert torch.equal(one(x, **options), two(x, **options))
        assert str(one) == str(two) and one.summary() == two.summary()
        for index in range(net.members):
            assert str(net.member(index)) == str(loaded.member(index))


@pytest.mark.parametrize("method, network", cases.CASES)
def test_members_load_as_they_were_saved(method: str, network: str, tmp_path: Path) -> None:
    case = cases.NETWORKS[network]
    net = cases.build(method, case.model(), network)
    path = save(net, tmp_path / "net.safetensors")
    same(net, load(path, case.model(seed=5)), case.batch()[0])
    assert os.listdir(tmp_path) == ["net.safetensors"]


@pytest.mark.parametrize("method, network", drawing_cases.CASES)
def test_networks_that_draw_load_as_they_were_saved(method: str, network: str, tmp_path: Path) -> None:
    case = drawing_cases.NETWORKS[network]
    net = drawing_cases.build(method, network)
    loaded = load(save(net, tmp_path / "net.safetensors"), case.model(seed=5))
    same(net, loaded, case.batch()[0])
    torch.manual_seed(0)
    kl = net.kl()
    torch.manual_seed(0)
    assert torch.equal(loaded.kl(), kl)
    frozen = mt.freeze(net, 2, seed=0)
    same(frozen, load(save(frozen, tmp_path / "frozen.safetensors"), case.model(seed=5)), case.batch()[0])


def mlp(dropout: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(dropout), nn.Linear(24, 5))


def image_net() -> nn.Module:
    return mt.models.ResNet(mt.models.resnet.BasicBlock, (1, 1, 1, 1), 5, width=8)


X = torch.randn(2, 6)
Z = torch.randn(4, 3, 16, 16)

COMPOSED: dict[str, Callable[[], mt.Multitude]] = {
    "packed dropout smooth": lambda: mt.packed(
        mt.mc_dropout(mt.smooth(image_net(), example=Z), 0.2, "block", example=Z), 3, example=Z
    ),
    "smooth growing": lambda: mt.deep_ensemble(mt.smooth(image_net(), (1, 2, 1), growing=True, example=Z), 2),
    "head": lambda: mt.Multitude(mt.head(image_net(), "mlp", hidden=16, example=Z)),
    "deep variance": lambda: mt.deep_ensemble(mt.variance(mlp()), 3),
    "deep batch_ensemble dropout": lambda: mt.deep_ensemble(mt.batch_ensemble(mt.mc_dropout(mlp()), 2), 3),
    "batch_ensemble dropout": lambda: mt.batch_ensemble(mt.mc_dropout(mlp()), 3),
    "masksembles dropout": lambda: mt.masksembles(mt.mc_dropout(mlp()), 3),
    "mimo dropout": lambda: mt.mimo(mt.mc_dropout(mlp()), 3, repetition=0.2, batch_repetition=2),
    "patched dropout": lambda: mt.patched(mt.mc_dropout(mlp()), 3, "output", weight_precision=2.0),
    "one assignment": lambda: mt.family(mlp(), 3, "network", sigma=0.1),
    "one learned assignment": lambda: mt.family(mlp(), 3, "network", mixing="learned"),
    "deep, one assignment": lambda: mt.deep_ensemble(mt.family(mlp(), 3, "network"), 2),
    "zero component": lambda: mt.family(mlp(), 2, "row", zero_component=True, mixing=[0.9, 0.1]),
    "subspace random": lambda: mt.subspace(mlp(), "random", scale=0.1),
    "subspace dropout": lambda: mt.subspace(mlp(), "dropout", p=(0.1, 0.3)),
    "fused swag": lambda: mt.fuse([mt.swag(m := mlp(), drawing_cases.trajectory(m)) for _ in range(2)]),
    "swa": lambda: mt.swa(m := mlp(), drawing_cases.trajectory(m)),
    "snapshots": lambda: mt.snapshots(m := mlp(), drawing_cases.trajectory(m)),
    "fuse": lambda: mt.fuse([mlp(), mlp()]),
    "narrow": lambda: mt.deep_ensemble(mt.narrow(mlp(), 0.5, example=X), 2),
    "plain": lambda: mt.Multitude(mlp()),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_compositions_of_known_layers_load_without_a_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = COMPOSED[name]()
    loaded = load(save(net, tmp_path / "net.safetensors"))
    x = Z if name in ("packed dropout smooth", "smooth growing", "head") else X
    same(net, loaded, x)
    same(loaded, load(save(loaded, tmp_path / "again.safetensors")), x)
    if stochastic_layers(net.network):
        frozen = mt.freeze(net, 2)
        inner = net.template.members if isinstance(net.template, mt.Multitude) else 1
        assert frozen.members == 2 * net.members * inner and frozen.task == net.task and frozen.divergences == ()
        same(frozen, load(save(frozen, tmp_path / "frozen.safetensors")), x)
    torch.manual_seed(1)
    y = torch.arange(len(x)) % 5
    want = net.train().loss(x, y, dataset_size=10)
    torch.manual_seed(1)
    assert torch.equal(loaded.train().loss(x, y, dataset_size=10), want)


@pytest.mark.parametrize("name", ["resnet20", "small_cnn", "lenet5", "preact_resnet18", "unet", "mlp", "vgg_like"])
def test_the_librarys_own_networks_load_without_a_model(name: str, tmp_path: Path) -> None:
    arguments = {
        "mlp": {"inputs": 12, "outputs": 5, "norm": "batch", "dropout": 0.1},
        "unet": {"classes": 5, "width": 4},
    }
    model = getattr(mt.models, name)(**arguments.get(name, {})).eval()
    net = mt.Multitude(model)
    loaded = load(save(net, tmp_path / "net.safetensors"))
    x = torch.randn(2, 12) if name == "mlp" else example_for(model)
    assert torch.equal(loaded(x), net(x)) and str(loaded) == str(net)


def test_settings_are_saved_as_they_are_now(tmp_path: Path) -> None:
    net = mt.packed(mt.mc_dropout(mlp()), 2, example=X)
    net.draws, net.training_draws, net.task, net.memory, net.runner = 7, 3, "gaussian", "1GB", "vmapped"
    net.train()
    for member in net.network:
        member[0].weight.requires_grad_(False)
        member[1].eval()
    loaded = load(save(net, tmp_path / "net.safetensors"))
    same(net, loaded, X)
    assert loaded.runner == "vmapped" and loaded.memory == "1GB"
    assert [module.training for module in loaded.modules()] == [module.training for module in net.modules()]


def test_each_member_is_saved_with_its_own_settings(tmp_path: Path) -> None:
    net = mt.deep_ensemble(mlp(), 3).eval()
    net.member(1)[2].p = 0.25
    net.member(2)[1].train()
    loaded = load(save(net, tmp_path / "net.safetensors"))
    same(net, loaded, X)
    assert [loaded.member(index)[2].p for index in range(3)] == [0.5, 0.25, 0.5]
    assert [loaded.member(index)[1].training for index in range(3)] == [False, False, True]


def test_a_sparse_variance_network_stays_sparse(tmp_path: Path) -> None:
    net = mt.variance(mlp())
    layer = net.network[0]
    layer.fix(torch.rand(layer.weight.shape) < 0.5, torch.zeros_like(layer.weight))
    loaded = load(save(net, tmp_path / "net.safetensors"))
    same(net, loaded, X)
    assert torch.equal(loaded.network[0].fixed, layer.fixed)


@pytest.mark.parametrize("scaling", ["temperature", "member_temperature", "vector", "isotonic", None])
def test_a_calibrated_network_is_saved_with_its_calibration(scaling: str | None, tmp_path: Path) -> None:
    net = mt.deep_ensemble(mlp(), 3).eval()
    x, y = torch.randn(80, 6), torch.arange(80) % 5
    calibrated = calibrate(net, (x, y), scaling=scaling, conformal="raps", seed=0)
    loaded = load(save(calibrated, tmp_path / "net.safetensors"))
    assert isinstance(loaded, Calibrated) and loaded.calibration == calibrated.calibration
    one, two = calibrated.predict(x), loaded.predict(x)
    assert torch.equal(one.probs, two.probs) and torch.equal(one.set(0.9), two.set(0.9))


def test_calibrated_regression_is_saved(tmp_path: Path) -> None:
    net = mt.deep_ensemble(nn.Linear(6, 2), 3).eval()
    net.task = "gaussian"
    x, y = torch.randn(80, 6), torch.randn(80, 1)
    calibrated = calibrate(net, (x, y), seed=0)
    loaded = load(save(calibrated, tmp_path / "net.safetensors"))
    assert torch.equal(loaded.predict(x).std, calibrated.predict(x).std)
    assert torch.equal(loaded.predict(x).set(0.9)[0], calibrated.predict(x).set(0.9)[0])


# -- networks of the user's own ----------------------------------------------------------------------------


class Tied(nn.Module):
    """A weight used twice, a buffer left out of checkpoints, an LSTM, a function among the attributes."""

    shares = wraps = 3  # names that the library has a use for as well

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.again = self.one
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 5)
        self.gain = self.plain = self.network = 1.0  # and these
        self.function = torch.tanh
        self.register_buffer("shift", torch.randn(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.function(self.again(self.two(self.one(x)))) * self.gain * self.plain * self.network + self.shift
        return self.head(self.lstm(x.unsqueeze(1))[0][:, 0])


def networks(net: mt.Multitude) -> list[nn.Module]:
    return list(net.network) if isinstance(net, mt.Members) else [net.network]


@pytest.mark.parametrize("build", [mt.Multitude, lambda m: mt.deep_ensemble(m, 3)])
def test_ties_buffers_and_attributes_of_a_users_network_are_kept(build: Callable, tmp_path: Path) -> None:
    net = build(Tied())
    for network in networks(net):
        network.gain = network.plain = network.network = 2.0
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    loaded = load(save(net, tmp_path / "net.safetensors"), model)
    same(net, loaded, X)
    same(net, load(tmp_path / "net.safetensors", Tied(width=8)), X)  # its weights and widths do not matter
    for network in networks(loaded):
        assert network.two.weight is network.one.weight and network.again is network.one
        assert network.gain == 2.0 and model.gain == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not {p.data_ptr() for p in loaded.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert len(load_file(tmp_path / "net.safetensors")) == net.members * (
        3 + 4 + 2 + 1
    )  # the shared weight is there once


def test_a_users_own_layer_that_draws_is_loaded_from_the_model(tmp_path: Path) -> None:
    net = mt.deep_ensemble(nn.Sequential(Jitter(), nn.Linear(6, 5)), 2)
    model = nn.Sequential(Jitter(), nn.Linear(6, 5))
    same(net, load(save(net, tmp_path / "a.safetensors"), model), X)
    frozen = mt.freeze(net, 2)
    same(frozen, load(save(frozen, tmp_path / "b.safetensors"), model), X)
    with pytest.raises(ValueError, match="model must be given.*layer '0' is a Jitter"):
        load(tmp_path / "a.safetensors")


def test_a_users_block_with_a_layer_before_it_is_found_in_the_model(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Conv2d(3, 4, 3), Block()
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(self.stem(x)))

    net = mt.mc_dropout(Net(), 0.3, ["block"], example=Z)
    assert type(net.network.block).__name__ == "Inserted"
    same(net, load(save(net, tmp_path / "net.safetensors"), Net()), Z)


def test_hugging_face_networks_load_into_a_network_of_the_same_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=50, num_labels=5, **options)
    net = mt.deep_ensemble(transformers.BertForSequenceClassification(config), 2).eval()
    model = transformers.BertForSequenceClassification(config)
    loaded = load(save(net, tmp_path / "net.safetensors"), model).eval()
    x = {"input_ids": torch.randint(50, (3, 7))}
    assert torch.equal(loaded(x), net(x))


# -- what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, message",
    [
        (None, "model must be given, a network like the one that was converted.*it is a Mlp"),
        (nn.Linear(6, 5), "model does not fit the file, in which it is a Mlp: in model .Linear. it is a Linear"),
        (cases.Cnn(), "model does not fit the file, in which it is a Mlp: in model .Cnn. it is a Cnn"),
        ("mlp", "model must be an nn.Module, got str"),
    ],
)
def test_a_wrong_model_is_one_error(model: object, message: str, tmp_path: Path) -> None:
    path = save(mt.deep_ensemble(cases.Mlp(), 2), tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match=message):
        load(path, model)  # type: ignore[arg-type]


def test_a_model_that_lacks_a_layer_of_its_own_is_one_error(tmp_path: Path) -> None:
    def deep(blocks: int) -> nn.Module:
        return nn.Sequential(*[Jitter() for _ in range(blocks)], nn.Linear(6, 5))

    path = save(mt.Multitude(deep(3)), tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match="in which layer '2' is a Jitter: in model .Sequential. it is a Linear"):
        load(path, deep(2))


def test_what_a_file_cannot_hold_is_said_when_saving(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    net = mt.variance(mlp())
    net.divergences += (lambda network: torch.zeros(()),)
    with pytest.raises(ValueError, match="net.divergences holds a function of your own .*lambda"):
        save(net, path)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    swag = mt.swag(model, drawing_cases.trajectory(model), data=torch.randn(20, 6))
    with pytest.raises(ValueError, match=r"the data .* cannot be saved: save mt.freeze\(net, draws=...\)"):
        save(swag, path)
    same(frozen := mt.freeze(swag, 2), load(save(frozen, tmp_path / "frozen.safetensors")), X)

    class Own(mt.Multitude):
        pass

    with pytest.raises(ValueError, match="the network .Own. is a class of your own"):
        save(Own(mlp()), path)
    hooked = mt.Multitude(mlp())
    hooked.register_forward_hook(print)
    with pytest.raises(ValueError, match="the network .Multitude. has forward hooks"):
        save(hooked, path)
    hooked = mt.Multitude(mlp())
    hooked.extra = object()
    with pytest.raises(ValueError, match="the network .Multitude. has 'extra', a object"):
        save(hooked, path)
    with pytest.raises(ValueError, match="net must be a multitude, got Stream.*stream.net"):
        save(mt.temporal(mlp()), path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path must be a file in a folder that exists"):
        save(mt.Multitude(mlp()), tmp_path / "nowhere" / "net.safetensors")
    assert not path.exists()


def test_hooks_that_the_model_lacks_are_not_lost_in_silence(tmp_path: Path) -> None:
    def doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return 2 * output

    net = mt.Multitude(mlp())
    net.network[0].register_forward_hook(doubled)
    path = save(net, tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match="layer '0' .Linear. has 1 forward hooks: in model it has 0"):
        load(path, mlp())
    model = mlp()
    model[0].register_forward_hook(doubled)
    same(net, load(path, model), X)
