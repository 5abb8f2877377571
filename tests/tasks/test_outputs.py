"""Networks with several outputs, and files that name their outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from tests.tasks.task_cases import X, bert, classes, reshaped, texts

# Which output counts ----------------------------------------------------------------------------------------


class Several(nn.Module):
    """Answers of several kinds."""

    def __init__(self, kind: str = "dict", dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout))
        self.head, self.other = nn.Linear(16, 3), nn.Linear(16, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        z = self.body(x)
        one, two = self.head(z), self.other(z)
        if self.kind == "dict":
            return {"score": one, "aside": two}
        return (two, one) if self.kind == "tuple" else SimpleNamespace(score=one, aside=two)


OUTPUTS = [("dict", "score"), ("tuple", 1), ("object", "score"), ("dict", lambda answer: 2 * answer["score"] / 2)]
METHODS: dict[str, Callable[[nn.Module], mt.Multitude]] = {
    "deep_ensemble": lambda model: mt.deep_ensemble(model, 2, seed=0),
    "batch_ensemble": lambda model: mt.batch_ensemble(model, 2, seed=0),
    "packed": lambda model: mt.packed(model, 2, alpha=1, example=X),
    "mc_dropout": lambda model: mt.mc_dropout(model),
}


@pytest.mark.parametrize(("kind", "output"), OUTPUTS, ids=["key", "position", "attribute", "function"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_uses_the_chosen_output(kind: str, output: Any, method: str, tmp_path: Path) -> None:
    model = Several(kind, 0.2 if method == "mc_dropout" else 0.0)
    net = METHODS[method](mt.Multitude(model, output=output)).eval()
    options = {"draws": 3, "seed": 0} if method == "mc_dropout" else {}
    p = net.predict(X, **options)
    assert p.predictions.shape[1:] == (4, 3)
    assert net.loss(X, classes(4, high=3)).isfinite()
    if method != "mc_dropout":
        member = net.member(1)
        assert type(member) is Several
        answer = member(X)
        score = answer["score"] if kind == "dict" else answer[1] if kind == "tuple" else answer.score
        torch.testing.assert_close(p.predictions[1], score)  # the network's own answer, all of it
        torch.testing.assert_close(mt.fuse([net.member(0), member]).eval()(X), p.predictions)
    if method == "deep_ensemble" and not callable(output) and kind != "object":
        net.runner = "packed"
        torch.testing.assert_close(net(X), p.predictions)
    path = mt.save(net, tmp_path / "net.safetensors")
    given = mt.Multitude(Several(kind, 0.2 if method == "mc_dropout" else 0.0), output=output)
    torch.testing.assert_close(mt.load(path, given).predict(X, **options).predictions, p.predictions)


def test_two_multitudes_may_use_different_outputs_of_one_network() -> None:
    model = Several("dict")
    before = dict(vars(model))
    nets = [mt.Multitude(model, output=output).eval() for output in ("score", "aside")]
    assert vars(model).keys() == before.keys()
    answer = model.eval()(X)
    for net, name in zip(nets, ("score", "aside"), strict=True):
        torch.testing.assert_close(net(X)[0], answer[name])
        assert all(one is two for one, two in zip(net.parameters(), model.parameters(), strict=True))
    nets[0].loss(X, classes(4, high=3)).backward()
    assert model.head.weight.grad is not None and model.other.weight.grad is None
    model.to(torch.float64)
    torch.testing.assert_close(nets[1](X.double())[0], model(X.double())["aside"])
    with pytest.raises(ValueError, match="output='score' is for a network, got a multitude: Members"):
        mt.Multitude(mt.fuse([nn.Linear(8, 3)]), output="score")


def test_a_missing_or_ambiguous_output_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a dict with 'score' \[4, 3\], 'aside' \[4, 2\].*output="):
        mt.Multitude(Several())(X)
    with pytest.raises(ValueError, match=r"a tuple with 0 \[4, 2\], 1 \[4, 3\].*output="):
        mt.deep_ensemble(Several("tuple"), 2)(X)
    with pytest.raises(ValueError, match=r"output='logits' is missing from the network's output, a dict with 'score'"):
        mt.Multitude(Several(), output="logits")(X)
    with pytest.raises(ValueError, match="output must be a key, an attribute, a position or a function"):
        mt.Multitude(Several(), output=1.5)
    with pytest.raises(ValueError, match=r"'start_logits' \[3, 7\], 'end_logits' \[3, 7\].*output="):
        mt.Multitude(bert("QuestionAnswering"))(texts())
    net = mt.Multitude(bert("QuestionAnswering"), output="start_logits")
    assert net.predict(texts()).probs.shape == (3, 7)


class Auxiliary(nn.Linear):
    """Answers with more than its logits in training."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return SimpleNamespace(logits=logits, aside=-logits) if self.training else logits


@pytest.mark.parametrize("runner", ["loop", "packed", "vmapped"])
def test_a_single_tensor_is_the_logits_and_has_no_other_parts(runner: str) -> None:
    net = mt.deep_ensemble(mt.Multitude(Auxiliary(8, 3), output="logits"), 2)
    torch.testing.assert_close(net.train()(X), net.eval()(X))
    for output in ("aside", 1):
        net = mt.deep_ensemble(mt.Multitude(nn.Linear(8, 3), output=output), 2).eval()
        with pytest.raises(ValueError, match=f"output={output!r} does not exist: the network returned a single tensor"):
            net.runner = runner
            net(X)


# Export -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "shape", "probs"),
    [
        ("binary", (1,), (4,)),
        ("tokens", (5, 3), (4, 5, 3)),
        pytest.param("multilabel", (3,), (4, 3), marks=pytest.mark.slow),
        pytest.param("quantiles", (3,), (4,), marks=pytest.mark.slow),
    ],
)
def test_exported_files_have_the_tasks_outputs_and_name_it(
    task: str, shape: tuple[int, ...], probs: tuple[int, ...], tmp_path: Path
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    net = mt.deep_ensemble(reshaped(*shape), 2, task=task)
    session = runtime.InferenceSession(str(mt.to_onnx(net, tmp_path / "net.onnx", X)))
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": X.numpy()}), strict=True))
    p = net.predict(X)
    want = p.mean if task == "quantiles" else p.probs
    got = torch.from_numpy(found["mean" if task == "quantiles" else "probs"])
    assert got.shape == probs
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.from_numpy(found["members"]), p.member_values)
    assert f'"task": "{task}"' in session.get_modelmeta().custom_metadata_map["multitudes"]
    if task in ("binary", "tokens"):
        with pytest.raises(ValueError, match="no task was chosen"):
            mt.to_onnx(mt.Multitude(reshaped(*shape)), tmp_path / "no.onnx", X)


@pytest.mark.parametrize("task", ["binary", "multilabel", "tokens", "quantiles"])
def test_saved_networks_keep_their_task_and_its_settings(task: str, tmp_path: Path) -> None:
    shape = {"binary": (1,), "tokens": (5, 3)}.get(task, (3,))
    net = mt.deep_ensemble(reshaped(*shape), 2, task=task)
    if task == "quantiles":
        net.quantiles = (0.2, 0.5, 0.7)
    net.next_tokens = task == "tokens"
    y = classes(4, 5, high=3) if task == "tokens" else torch.tensor([0.0, 1.0, 1.0, 0.0])
    y = y[:, None].expand(4, 3) if task == "multilabel" else y
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"))
    assert (loaded.task, loaded.quantiles, loaded.next_tokens) == (task, net.quantiles, net.next_tokens)
    assert torch.equal(loaded.loss(X, y), net.loss(X, y))
    one, two = loaded.predict(X), net.predict(X)
    assert repr(one) == repr(two) and torch.equal(one.member_values, two.member_values)
    calibrated = mt.calibrate(net, (X.repeat(9, 1), y.repeat(9, *[1] * (y.dim() - 1))), seed=0)
    again = mt.load(mt.save(calibrated, tmp_path / "calibrated.safetensors")).predict(X)
    assert again.task == task
    for one, two in zip(again.set(0.7), calibrated.predict(X).set(0.7), strict=True):
        assert torch.equal(one, two)
