"""Recorded checkpoints, and recomputed batch-norm statistics."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.training.batch_norm import accuracy, statistics
from multitudes.training.batches import Batches
from multitudes.training.fit import fit
from multitudes.training.recorder import Recorder, Trajectory
from tests.zoo.drawing_cases import Jitter
from tests.zoo.of_parts import Of


class Scalar(nn.Module):
    """One weight, a running statistic, a mask and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("running_mean", torch.zeros(()))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("count", torch.tensor(0))

    def at(self, value: float) -> Scalar:
        with torch.no_grad():
            self.weight.fill_(value)
            self.running_mean.fill_(10 * value)
            self.count += 1
        return self


def recorded(net: Scalar, *values: float, **options: object) -> Recorder:
    """Record the network at these values."""
    recorder = Recorder(net, **options)
    for value in values:
        net.at(value)
        recorder.record()
    return recorder


def normed(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 4), nn.BatchNorm1d(4)
    )


# -- the recorder ------------------------------------------------------------------------------------------


def test_recorded_moments_equal_those_by_hand() -> None:
    net = Scalar()
    recorder = Recorder(net, keep=2)
    means, squares = [], []
    for value in (1.0, 2.0, 3.0):
        net.at(value)
        recorder.record()
        means.append(recorder.mean["weight"].item())
        squares.append(recorder.second_moment["weight"].item())
    assert means == [1.0, 1.5, 2.0]
    assert squares == pytest.approx([1.0, 5 / 2, 14 / 3])
    assert recorder.variance["weight"].item() == pytest.approx(2 / 3)
    assert recorder.mean["running_mean"].item() == pytest.approx(20.0)
    assert recorder.mean["mask"].tolist() == [0.0, -torch.inf]
    assert recorder.variance["mask"].tolist() == [0.0, 0.0]
    assert "count" not in recorder.mean  # a counter


def test_the_last_checkpoints_are_kept_unchanged(tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        net = Scalar()
        recorder = recorded(net, 0, 1, 2, 3, 4, keep=3, folder=directory)
        net.at(100.0)
        assert (recorder.count, len(recorder)) == (5, 3)
        assert [state["weight"].item() for state in recorder] == [2.0, 3.0, 4.0]
        assert [state["count"].item() for state in recorder] == [3, 4, 5]
        assert recorder[-1]["running_mean"].item() == 40.0
        assert recorder.mean["weight"].item() == 2.0
        net.load_state_dict(recorder[0])
        assert net.weight.item() == 2.0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"checkpoint-0000000{i}.safetensors" for i in (3, 4, 5)), "moments.safetensors"]


def test_moments_agree_with_numpy_for_large_means() -> None:
    net = nn.Linear(20, 10)
    recorder = Recorder(net, keep=4)
    seen = []
    for step in range(30):
        nn.init.normal_(net.weight, mean=1000.0, std=0.1 + step / 100)
        recorder.record()
        seen.append(net.weight.detach().double().numpy())
    np.testing.assert_allclose(recorder.mean["weight"], np.mean(seen, 0), rtol=1e-6)
    np.testing.assert_allclose(recorder.variance["weight"], np.var(seen, 0), rtol=1e-2)


def test_low_precision_weights_are_averaged_in_float32() -> None:
    recorder = Recorder(net := nn.Linear(1, 1).bfloat16(), keep=1)
    for value in (1.0, 1.0078125):  # neighbors in bfloat16
        nn.init.constant_(net.weight, value)
        recorder.record()
    assert recorder.mean["weight"].dtype == torch.float32 and recorder.mean["weight"].item() == 1.00390625
    assert recorder[0]["weight"].dtype == torch.bfloat16


def test_every_nth_step_is_recorded_also_as_a_callback() -> None:
    recorder = Recorder(net := Scalar(), every=3)
    for step in range(1, 8):
        net.at(step)
        recorder.step()
        assert recorder.count == step // 3
    assert [state["weight"].item() for state in recorder] == [3.0, 6.0]
    recorder = Recorder(linear := nn.Linear(2, 2))
    history = fit(linear, [(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))], 3, callbacks=[lambda _: recorder.step()])
    assert len(history) == 3 and recorder.count == 6  # after each step, and after each epoch


def test_a_recording_on_disk_is_continued_only_when_asked(tmp_path: Path) -> None:
    net = Scalar()
    recorded(net, 1, 2, 3, keep=2, folder=tmp_path / "new" / "run")
    with pytest.raises(ValueError, match="already holds a recording: pass resume=True"):
        Recorder(net, keep=2, folder=tmp_path / "new" / "run")
    again = recorded(net, 4, keep=2, folder=tmp_path / "new" / "run", resume=True)
    assert [state["weight"].item() for state in again] == [3.0, 4.0]
    assert (again.count, again.mean["weight"].item()) == (4, 2.5)
    with pytest.raises(ValueError, match="does not fit the model"):
        Recorder(nn.Linear(1, 1), folder=tmp_path / "new" / "run", resume=True)
    assert Recorder(net, folder=tmp_path / "other", resume=True).count == 0


@pytest.mark.parametrize("when", ["before the moments", "before the removal"])
def test_an_interrupted_recording_counts_every_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    net = Scalar()
    recorder = recorded(net, 1, 2, keep=2, folder=tmp_path)
    if when == "before the moments":
        monkeypatch.setattr("multitudes.training.recorder._Disk.write_moments", killed)
    else:
        monkeypatch.setattr(Path, "unlink", killed)
    net.at(6.0)
    with pytest.raises(KeyboardInterrupt):
        recorder.record()
    monkeypatch.undo()
    again = Recorder(net, keep=2, folder=tmp_path, resume=True)
    assert (again.count, again.mean["weight"].item()) == (3, 3.0)
    assert [state["weight"].item() for state in again] == [2.0, 6.0]


def test_only_a_folder_needs_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    Recorder(Scalar()).record()
    with pytest.raises(ImportError, match=r"pip install 'multitudes\[safetensors\]'"):
        Recorder(Scalar(), folder=tmp_path)


def test_any_network_is_recorded_also_with_tied_or_strided_weights(tmp_path: Path) -> None:
    tied = nn.ModuleList(
        [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Embedding(5, 4), nn.Linear(4, 5)]
    )
    tied[2].weight = tied[1].weight
    for net in (tied, mt.deep_ensemble(normed(), members=3), mt.batch_ensemble(normed(), members=2)):
        for recorder in (Recorder(net), Recorder(net, folder=tmp_path / type(net).__name__)):
            recorder.record()
            assert recorder[0].keys() == net.state_dict().keys()
            for name, tensor in net.state_dict().items():
                assert torch.equal(recorder[0][name], tensor)
        copy.deepcopy(net).load_state_dict(recorder[0])


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda: Recorder(Scalar(), keep=0), "keep must be a whole number, 1 or more"),
        (lambda: Recorder(Scalar(), every=1.5), "every must be a whole number, 1 or more"),
        (lambda: Recorder(Scalar(), keep=True), "keep must be a whole number, 1 or more"),
        (lambda: Recorder({}), "net must be an nn.Module, got dict"),
        (lambda: Recorder(Scalar(), resume=True), "resume=True needs folder="),
        (lambda: Recorder(Scalar()).mean, "nothing has been recorded yet"),
        (lambda: Recorder(nn.LazyLinear(3)).record(), "parameter 'weight' has no shape yet"),
    ],
)
def test_wrong_uses_of_a_recorder_are_refused(use: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        use()


def test_weights_that_are_not_finite_are_not_recorded() -> None:
    recorder = Recorder(net := Scalar())
    net.at(torch.nan)
    with pytest.raises(ValueError, match="parameter 'weight' holds NaN or infinite values, so nothing was recorded"):
        recorder.record()
    assert recorder and len(recorder) == 0


LINEAR = nn.Linear(2, 3)
STATE = LINEAR.state_dict()


@pytest.mark.parametrize(
    ("checkpoints", "sentence"),
    [
        (STATE, "checkpoints must be a Recorder or a list of state dicts, got OrderedDict"),
        (LINEAR, "checkpoints must be a Recorder or a list of state dicts, got Linear"),
        (3, "checkpoints must be a Recorder or a list of state dicts, got int"),
        ([STATE, LINEAR], r"checkpoints\[1\] must be a state dict, got Linear"),
        ([], "checkpoints must be 1 or more, got 0"),
        (Recorder(LINEAR), "checkpoints must be 1 or more, got 0"),
        ([STATE, {"weight": STATE["weight"]}], r"checkpoints\[1\] does not fit the model: 'bias' is missing"),
        ([STATE | {"more": STATE["bias"]}], r"checkpoints\[0\] does not fit the model: 'more' is unexpected"),
        ([nn.Linear(2, 4).state_dict()], r"'weight' has shape \[4, 2\], not \[3, 2\]"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(checkpoints: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Trajectory.of(checkpoints, LINEAR)


# -- batch norm --------------------------------------------------------------------------------------------


def batches_in_every_form(x: Tensor, y: Tensor) -> dict[str, object]:
    """Return two batches of four rows in every form."""
    return {
        "list": [x[:4], x[4:]],
        "pairs": [(x[:4], y[:4]), [x[4:], y[4:]]],
        "mappings": [{"input": x[:4], "labels": y[:4]}, {"input": x[4:]}],
        "arguments": [((x[:4],), y[:4]), ([x[4:]], y[4:])],
        "iterator": iter([x[:4], x[4:]]),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
    }


@pytest.mark.parametrize("form", list(batches_in_every_form(torch.zeros(8), torch.zeros(8))))
def test_statistics_equal_those_of_torchs_update_bn(form: str) -> None:
    x, y = torch.randn(8, 3) * 2 + 1, torch.randint(4, (8,))
    network = normed(dropout=0.5).eval()
    with torch.no_grad():
        network[1].running_mean.fill_(7.0)
    want = copy.deepcopy(network).eval()
    update_bn([x[:4], x[4:]], want[:3])
    inner = want[4](torch.cat([_by_batch(network, x[:4]), _by_batch(network, x[4:])]))
    before = copy.deepcopy(network.state_dict())
    modes = [module.training for module in network.modules()]
    batches = Batches(batches_in_every_form(x, y)[form])
    for _ in range(2):  # also for an iterator
        got = statistics(network, {}, batches)
        torch.testing.assert_close(got["1.running_mean"], want[1].running_mean)
        torch.testing.assert_close(got["1.running_var"], want[1].running_var)
        assert got["1.num_batches_tracked"].item() == 2
        # The input of the second norm comes from the first in training mode, without dropout.
        torch.testing.assert_close(got["5.running_mean"], inner.mean(0))
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert [module.training for module in network.modules()] == modes
    assert network[1].momentum == 0.1


def _by_batch(network: nn.Sequential, x: Tensor) -> Tensor:
    z = network[0](x)
    z = (z - z.mean(0)) / (z.var(0, unbiased=False) + network[1].eps).sqrt()
    return (z * network[1].weight + network[1].bias).relu()


def test_a_tensor_is_cut_into_equal_parts_and_one_batch_is_exact() -> None:
    x = torch.randn(1000, 3)
    sizes = [len(part) for part, _ in Batches(x).on(torch.device("cpu"))]
    assert sizes == [250] * 4
    x = torch.randn(200, 3) + 2
    got = statistics(nn.BatchNorm1d(3), {}, Batches((x, torch.zeros(200))))
    torch.testing.assert_close(got["running_mean"], x.mean(0))
    torch.testing.assert_close(got["running_var"], x.var(0))


def test_statistics_use_the_given_weights_and_expectations() -> None:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), Jitter(), nn.BatchNorm1d(2))
    x, weight = torch.randn(6, 2), torch.randn(2, 2)
    got = statistics(network, {"0.weight": weight}, Batches(x))
    torch.testing.assert_close(got["2.running_mean"], (x @ weight.T).mean(0))


def test_norms_that_do_not_run_get_no_statistics() -> None:
    free = nn.BatchNorm1d(2, track_running_stats=False)
    norms = {"used": nn.BatchNorm1d(2), "unused": nn.BatchNorm1d(2), "free": free}
    got = statistics(Of(lambda net, x: net.free(net.used(x)), **norms), {}, Batches(torch.randn(5, 2)))
    assert {name.split(".")[0] for name in got} == {"used"}


def test_accuracy_is_the_share_of_correct_classes() -> None:
    x = torch.eye(3)
    assert accuracy(nn.Identity(), {}, Batches((x, torch.tensor([0, 1, 1])))) == pytest.approx(2 / 3)
    dense, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    assert accuracy(nn.Identity(), {}, Batches((dense, labels))) == pytest.approx(
        (dense.argmax(1) == labels).float().mean().item()
    )
    for data in (x, (x, torch.zeros(3))):
        with pytest.raises(ValueError, match="accuracy needs classes as targets"):
            accuracy(nn.Identity(), {}, Batches(data))
    with pytest.raises(ValueError, match=r"classes of shape \[3, 1\], predictions have \[3\]"):
        accuracy(nn.Identity(), {}, Batches((x, torch.zeros(3, 1, dtype=torch.int64))))


ROWS = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (TensorDataset(ROWS), "data must come in batches, got a TensorDataset: wrap it in a DataLoader"),
        (3, "data must be a tensor, a batch or an iterable of batches, got int"),
        ((ROWS, torch.zeros(3)), "data must have one target for each of the 4 inputs, got 3"),
        (ROWS[:0], r"data must hold at least one input, got shape \[0, 3\]"),
        ([], "data must hold at least one batch, got none"),
        (ROWS[:, :2], r"x of shape \[4, 2\] \(torch.float32\) does not fit the network"),
        (["no tensor"], "a batch must be, or start with, a tensor"),
    ],
)
def test_invalid_data_is_refused(data: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        statistics(normed(), {}, Batches(data))
