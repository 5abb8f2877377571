"""Saved multitudes: what is loaded equals what was saved, and damaged or foreign files are refused."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import multitudes as mt
from multitudes.base.archives import write_tensors
from multitudes.evaluation.calibrate import Calibrated, calibrate
from multitudes.files.save import load, save
from multitudes.networks.stochastic import stochastic_layers
from multitudes.surgery.observe import example_for
from tests.files.test_freeze import Jitter
from tests.zoo import cases, drawing_cases
from tests.zoo.of_parts import Of

SETTINGS = ("members", "task", "draws", "training_draws", "memory", "notes", "training")


def same(net: mt.Multitude, loaded: mt.Multitude, x: Tensor) -> None:
    """Check that predictions, seeded draws, state dict and settings are equal bit by bit."""
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
Z = torch.randn(4, 3, 8, 8)

COMPOSED: dict[str, Callable[[], mt.Multitude]] = {
    "packed dropout smooth": lambda: mt.packed(
        mt.mc_dropout(mt.smooth(image_net(), example=Z), 0.2, "block", example=Z), 3, example=Z
    ),
    "smooth growing": lambda: mt.deep_ensemble(mt.smooth(image_net(), (1, 2, 1), growing=True, example=Z), 2),
    "head": lambda: mt.Multitude(mt.head(image_net(), "mlp", hidden=16, example=Z)),
    "deep variance": lambda: mt.deep_ensemble(mt.variance(mlp()), 3),
    "deep batch_ensemble dropout": lambda: mt.deep_ensemble(mt.batch_ensemble(mt.mc_dropout(mlp()), 2), 3),
    "masksembles dropout": lambda: mt.masksembles(mt.mc_dropout(mlp()), 3),
    "mimo dropout": lambda: mt.mimo(mt.mc_dropout(mlp()), 3, repetition=0.2, batch_repetition=2),
    "patched dropout": lambda: mt.patched(mt.mc_dropout(mlp()), 3, "output", weight_precision=2.0),
    "one learned assignment": lambda: mt.family(mlp(), 3, "network", mixing="learned"),
    "deep, one assignment": lambda: mt.deep_ensemble(mt.family(mlp(), 3, "network"), 2),
    "zero component": lambda: mt.family(mlp(), 2, "row", zero_component=True, mixing=[0.9, 0.1]),
    "subspace random": lambda: mt.subspace(mlp(), "random", scale=0.1),
    "fused swag": lambda: mt.fuse([mt.swag(m := mlp(), drawing_cases.trajectory(m)) for _ in range(2)]),
    "swa": lambda: mt.swa(m := mlp(), drawing_cases.trajectory(m)),
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


@pytest.mark.parametrize("name", ["small_cnn", "lenet5", "preact_resnet18", "unet", "mlp", "vgg_like"])
def test_the_librarys_own_networks_load_without_a_model(name: str, tmp_path: Path) -> None:
    options = {"mlp": {"inputs": 12, "outputs": 5, "norm": "batch", "dropout": 0.1}, "unet": {"classes": 5, "width": 4}}
    model = getattr(mt.models, name)(**options.get(name, {})).eval()
    net = mt.Multitude(model)
    loaded = load(save(net, tmp_path / "net.safetensors"))
    x = torch.randn(2, 12) if name == "mlp" else example_for(model)
    assert torch.equal(loaded(x), net(x)) and str(loaded) == str(net)


def test_settings_and_those_of_each_member_are_saved(tmp_path: Path) -> None:
    net = mt.packed(mt.mc_dropout(mlp()), 3, example=X).train()
    net.draws, net.training_draws, net.task, net.memory, net.runner = 7, 3, "gaussian", "1GB", "loop"
    for member, p in zip(net.network, (0.5, 0.25, 0.1), strict=True):
        member[0].weight.requires_grad_(False)
        member[1].eval()
        member[2].p = p
    loaded = load(save(net, tmp_path / "net.safetensors"))
    same(net, loaded, X)
    assert loaded.runner == "loop" and [member[2].p for member in loaded.network] == [0.5, 0.25, 0.1]


def test_a_sparse_variance_network_stays_sparse(tmp_path: Path) -> None:
    net = mt.variance(mlp())
    layer = net.network[0]
    layer.fix(torch.rand(layer.weight.shape) < 0.5, torch.zeros_like(layer.weight))
    loaded = load(save(net, tmp_path / "net.safetensors"))
    same(net, loaded, X)
    assert torch.equal(loaded.network[0].fixed, layer.fixed)


SCALINGS = ["temperature", "member_temperature", "vector", "isotonic", None, "gaussian"]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_calibrated_network_is_saved_with_its_calibration(scaling: str | None, tmp_path: Path) -> None:
    x, y = torch.randn(80, 6), torch.arange(80) % 5
    if scaling == "gaussian":
        net = mt.deep_ensemble(nn.Linear(6, 2), 3, task="gaussian").eval()
        calibrated = calibrate(net, (x, torch.randn(80, 1)), seed=0)
    else:
        calibrated = calibrate(mt.deep_ensemble(mlp(), 3).eval(), (x, y), scaling=scaling, conformal="raps", seed=0)
    loaded = load(save(calibrated, tmp_path / "net.safetensors"))
    assert isinstance(loaded, Calibrated) and loaded.calibration == calibrated.calibration
    one, two = calibrated.predict(x), loaded.predict(x)
    quantity = "std" if scaling == "gaussian" else "probs"
    assert torch.equal(getattr(one, quantity), getattr(two, quantity))
    torch.testing.assert_close(one.set(0.9), two.set(0.9), rtol=0, atol=0)


# -- networks of the user's own ----------------------------------------------------------------------------


class Tied(nn.Module):
    """A tied weight, a non-persistent buffer, an LSTM, and a function among the attributes."""

    shares = wraps = 3  # attribute names that the library uses too

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.again = self.one
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 5)
        self.gain = self.plain = self.network = 1.0  # these too
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
    )  # the tied weight is saved once


def test_a_users_own_layer_that_draws_is_loaded_from_the_model(tmp_path: Path) -> None:
    net = mt.deep_ensemble(nn.Sequential(Jitter(), nn.Linear(6, 5)), 2)
    model = nn.Sequential(Jitter(), nn.Linear(6, 5))
    same(net, load(save(net, tmp_path / "a.safetensors"), model), X)
    frozen = mt.freeze(net, 2)
    same(frozen, load(save(frozen, tmp_path / "b.safetensors"), model), X)


def test_a_users_block_after_an_inserted_layer_is_found_in_the_model(tmp_path: Path) -> None:
    def build() -> nn.Module:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
        block = Of(lambda net, x: net.conv(x), conv=nn.Conv2d(4, 4, 3, padding=1))
        return Of(lambda net, x: net.head(net.block(net.stem(x))), stem=nn.Conv2d(3, 4, 3), block=block, head=head)

    net = mt.mc_dropout(build(), 0.3, ["block"], example=Z)
    assert type(net.network.block).__name__ == "Inserted"
    same(net, load(save(net, tmp_path / "net.safetensors"), build()), Z)


# -- files that are refused ----------------------------------------------------------------------------------


def double(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return 2 * output


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(double)
    return model


def jitters(count: int) -> nn.Module:
    return nn.Sequential(*[Jitter() for _ in range(count)], nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("saved", "model", "message"),
    [
        (cases.Mlp(), None, "model must be given: .* the network is a Mlp"),
        (cases.Mlp(), nn.Linear(6, 5), "the network is a Mlp in the file and a Linear in model"),
        (cases.Mlp(), "mlp", "model must be an nn.Module, got str"),
        (jitters(1), None, "model must be given.*layer '0' is a Jitter"),
        (jitters(3), jitters(2), "layer '2' is a Jitter in the file and a Linear in model"),
        (hooked(), mlp(), "layer '0' .Linear. has 1 forward hooks in the file and 0 in model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(saved: nn.Module, model: object, message: str, tmp_path: Path) -> None:
    path = save(mt.Multitude(saved), tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match=message):
        load(path, model)  # type: ignore[arg-type]


def test_a_model_with_the_saved_hooks_fits(tmp_path: Path) -> None:
    net = mt.Multitude(hooked())
    same(net, load(save(net, tmp_path / "net.safetensors"), hooked()), X)


class Own(mt.Multitude):
    pass


def changed(net: mt.Multitude, change: Callable[[mt.Multitude], object]) -> mt.Multitude:
    change(net)
    return net


def own_divergence(net: mt.Multitude) -> None:
    net.divergences += (lambda network: torch.zeros(()),)


def swag_with_data() -> mt.Multitude:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    return mt.swag(model, drawing_cases.trajectory(model), data=torch.randn(20, 6))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (swag_with_data, r"the data .* cannot be saved: save mt.freeze\(net, draws=...\)"),
    (lambda: changed(mt.variance(mlp()), own_divergence), "divergences .*lambda"),
    (lambda: Own(mlp()), "the network .Own. has a class of your own"),
    (lambda: changed(mt.Multitude(mlp()), lambda net: net.register_forward_hook(print)), "has forward hooks"),
    (lambda: changed(mt.Multitude(mlp()), lambda net: setattr(net, "extra", object())), "has 'extra', a object"),
    (lambda: mt.temporal(mlp()), "net must be a multitude, got Stream.*stream.net"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_networks_that_a_file_cannot_store_are_refused(build: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        save(build(), tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match="path must be a file in a folder that exists"):
        save(mt.Multitude(mlp()), tmp_path / "nowhere" / "net.safetensors")
    assert not os.listdir(tmp_path)


def test_swag_with_data_is_saved_once_frozen(tmp_path: Path) -> None:
    frozen = mt.freeze(swag_with_data(), 2)
    same(frozen, load(save(frozen, tmp_path / "frozen.safetensors")), X)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which does not exist"):
        load(tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="path must be a file that mt.save wrote"):
        load(tmp_path / "text.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "tensors.safetensors")
    with pytest.raises(ValueError, match="it has no checksum, or an earlier version wrote it"):
        load(tmp_path / "tensors.safetensors")


@pytest.mark.parametrize(
    "header", ["{", "null", "3", "{}", '{"format": 6}', '{"format": 6, "nodes": []}', '{"format": 6, "nodes": [{}]}']
)
def test_a_damaged_header_is_refused(header: str, tmp_path: Path) -> None:
    path = save(mt.deep_ensemble(mlp(), 2), tmp_path / "net.safetensors")
    save_file(load_file(path), path, {"multitudes": header})
    with pytest.raises(ValueError, match=r"path must be a file that mt.save wrote, got .*, which is damaged"):
        load(path)
    if not header.startswith('{"'):
        return
    write_tensors(path, load_file(path), "multitudes", json.loads(header), "a test")
    with pytest.raises(ValueError, match=r"path must be a file that mt.save wrote, got .*, which is damaged"):
        load(path)


ALIEN = ("os.system", "torch.hub.load", "multitudes.files.save.save", "multitudes.__main__.main")


@pytest.mark.parametrize(
    "entry, names, message",
    [
        ("class", (*ALIEN, "torch.nn.modules.no.Layer"), "which is not a layer of torch or of this library"),
        (
            "function",
            (*ALIEN, "multitudes.methods.variance.kl.approximate_kl"),
            "which is not a divergence of",
        ),
    ],
)
def test_files_may_name_layers_and_divergences_only(
    entry: str, names: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = save(mt.variance(mlp()), tmp_path / "net.safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["multitudes"])
    for name in names:
        changed = header["nodes"][2] if entry == "class" else header["nodes"][0]["divergences"][0]
        changed[entry] = name
        write_tensors(path, load_file(path), "multitudes", header, "a test")
        with pytest.raises(ValueError, match=message):
            load(path)


def test_loaded_tensors_have_aligned_memory_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    tensors = list(load(save(mt.Multitude(model), tmp_path / "net.safetensors")).state_dict().values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(net := mt.deep_ensemble(mlp(), 2), tmp_path / "net.safetensors")

    def failing(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(OSError, match="no space left"):
        save(mt.Multitude(mlp()), path)
    monkeypatch.undo()
    same(net, load(path), X)
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_a_file_has_the_names_and_structure_of_the_network(tmp_path: Path) -> None:
    net = mt.deep_ensemble(mlp(), 2)
    tensors = load_file(save(net, tmp_path / "net.safetensors"))
    assert net.state_dict().keys() == tensors.keys() and tensors["1.0.weight"].shape == (24, 6)
    with safetensors.safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["multitudes"])
    assert (
        header["nodes"][0]["class"] == "multitudes.ensemble.members.Members"
        and header["nodes"][0]["settings"]["members"] == 2
    )


class Graph(nn.Module):
    """A network with a fixed sparse matrix, or with complex weights."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        if dtype is None:
            self.register_buffer("edges", torch.eye(3).to_sparse())
        else:
            self.turn = nn.Parameter(torch.ones(3, dtype=dtype))
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.edges @ x.T).T if hasattr(self, "edges") else (x * self.turn).real.to(x.dtype))


@pytest.mark.parametrize("dtype", [None, torch.complex64, torch.complex128])
def test_sparse_and_complex_tensors_are_saved(dtype: torch.dtype | None, tmp_path: Path) -> None:
    net, x = mt.fuse([Graph(dtype), Graph(dtype)]), torch.randn(4, 3)
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"), Graph(dtype))
    assert torch.equal(loaded(x), net(x))


def test_sparse_tensors_are_not_averaged() -> None:
    model = Graph(None)
    states = [{k: v + i if k.startswith("out") else v for k, v in model.state_dict().items()} for i in range(3)]
    torch.testing.assert_close(mt.swa(model, states).member(0).out.weight, model.out.weight + 1)
    torch.testing.assert_close(mt.swa(model, states).member(0).edges.to_dense(), torch.eye(3))
