"""Every architecture can be copied, stored, and turned into multitudes."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import multitudes as mt
from tests import test_models, test_models_plain

Build = Callable[[], nn.Module]
NETWORKS: dict[str, tuple[Build, tuple[int, ...]]] = {
    **{name: (build, (3, 16, 16)) for name, build in test_models.TINY.items()},
    **test_models_plain.TINY,
}
networks = pytest.mark.parametrize("name", NETWORKS)


def seen_some_data(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A network whose statistics are not those of a new one, and a batch."""
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    model = build()
    model(torch.randn(8, *shape) * 2 + 0.5)
    return model.eval(), torch.randn(3, *shape)


@networks
def test_copies_and_stored_networks_are_equal(name: str) -> None:
    model, x = seen_some_data(name)
    loaded = NETWORKS[name][0]().eval()
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(other(x), model(x))
    assert model.double()(x.double()).dtype == torch.float64


@networks
@pytest.mark.parametrize("method", [mt.deep_ensemble, mt.batch_ensemble])
def test_ensembles_of_every_architecture_are_right(method: Callable[..., mt.Multitude], name: str) -> None:
    model, x = seen_some_data(name)
    net = method(model, 2, seed=0)
    assert net(x).shape == (2, *model(x).shape)
    mt.check(net, x)


# A pyramid's shortcuts fix its widths, and a linear model has no hidden width.
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("pyramid", "linear")])
def test_packed_ensembles_of_every_architecture_are_right(name: str) -> None:
    model, x = seen_some_data(name)
    net = mt.packed(model, members=2, alpha=1.5, example=x, seed=0)
    assert net(x).shape == (2, *model(x).shape)
    assert sum(p.numel() for p in net.member(0).parameters()) < sum(p.numel() for p in model.parameters())
    mt.check(net, x)


def test_a_pyramid_whose_shortcuts_pad_by_fixed_widths_is_not_narrowed() -> None:
    model, x = seen_some_data("pyramid")
    with pytest.raises(ValueError, match=r"\(PyramidNet\) cannot be narrowed, since its forward fixes a hidden width"):
        mt.packed(model, members=2, alpha=1.5, example=x)


@networks
def test_architectures_run_packed(name: str) -> None:
    model, x = seen_some_data(name)
    net = mt.deep_ensemble(model, 2, seed=0).eval()
    net.runner = "loop"
    expected = net(x)
    net.runner = "packed"  # which is refused where a network cannot be traced
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
