"""What predictions are of where nobody said it: clear from targets and shapes, told by the head, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.core.tasks import criterion_for

transformers = pytest.importorskip("transformers")


def reshaped(*shape: int) -> nn.Module:
    """Any input `[B, 8]` as predictions `[B, *shape]`."""
    return nn.Sequential(nn.Linear(8, torch.Size(shape).numel()), nn.Unflatten(1, shape))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def classes(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


# Targets and shapes -----------------------------------------------------------------------------------------


def test_targets_tell_where_the_classes_are() -> None:
    net = mt.Multitude(reshaped(5, 3))
    first, last = classes(4, 3, high=5), classes(4, 5, high=3)
    torch.testing.assert_close(net.loss(X, first), F.cross_entropy(net(X)[0], first))
    with pytest.raises(ValueError, match=r"have their classes last: pass task='tokens'"):
        net.loss(X, last)
    want = F.cross_entropy(net(X)[0].movedim(-1, 1), last)
    torch.testing.assert_close(net.loss(X, last, task="tokens"), want)
    with pytest.raises(ValueError, match=r"have their classes last: pass task='tokens'"):
        net.loss(X, torch.randn(4, 5, 3).softmax(-1))
    square = mt.Multitude(reshaped(3, 3))
    y = classes(4, 3, high=3)
    with pytest.raises(
        ValueError, match=r"may have their classes in dim 1 or last, and no task was chosen: pass task="
    ):
        square.loss(X, y)
    for criterion in (nn.CrossEntropyLoss(), F.cross_entropy):
        with pytest.raises(ValueError, match="may have their classes in dim 1 or last"):
            square.loss(X, y, criterion)
    a, b = (square.loss(X, y, task=task).item() for task in ("classification", "tokens"))
    assert a == pytest.approx(F.cross_entropy(square(X)[0], y).item())
    assert b == pytest.approx(F.cross_entropy(square(X)[0].movedim(-1, 1), y).item()) and a != pytest.approx(b)


@pytest.mark.parametrize("shape", [(5, 3), (3, 3)])
def test_predictions_of_two_axes_need_a_task(shape: tuple[int, int]) -> None:
    net = mt.deep_ensemble(reshaped(*shape), 2)
    for run in (net.predict, lambda x: mt.predict(net, x), lambda x: mt.temporal(net)(x)):
        with pytest.raises(ValueError, match="may have their classes in dim 2 or last, and no task was chosen: pass"):
            run(X)
    y = classes(4, shape[0], high=3)
    for verb in (mt.evaluate, mt.calibrate):
        with pytest.raises(ValueError, match="may have their classes in dim 2 or last"):
            verb(net, (X, y))
    assert net.predict(X, task="classification").probs.sum(1).allclose(torch.ones(4, shape[1]))
    assert net.predict(X, task="tokens").probs.sum(2).allclose(torch.ones(4, shape[0]))
    net.task = "tokens"
    assert mt.evaluate(net, (X, y)).counts["nll"] == y.numel()


@pytest.mark.parametrize(
    ("channels", "size", "clear"),
    [
        ((3, 6), (8, 8), True),
        ((6,), (4, 4), True),  # a stride of 2
        ((8,), (8, 8), False),  # as many classes as pixels
    ],
)
def test_images_of_classes_are_clear_where_the_inputs_size_tells(
    channels: tuple[int, ...], size: tuple[int, int], clear: bool
) -> None:
    images = torch.randn(2, 3, 8, 8)
    net = mt.Multitude(nn.Conv2d(3, channels[-1], 3, stride=8 // size[0], padding=1))
    if clear:
        p = net.predict(images)
        assert p.task == "classification" and p.probs.shape == (2, channels[-1], *size)
    else:
        with pytest.raises(ValueError, match="do not tell where their classes are"):
            net.predict(images)

    class Last(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).movedim(1, -1)

    channels_last = mt.Multitude(Last(3, channels[-1], 3, padding=1))
    with pytest.raises(ValueError, match="do not tell where their classes are.*task='tokens' for classes last"):
        channels_last.predict(images)
    y = torch.randint(channels[-1], (2, 8, 8))
    p = channels_last.predict(images, task="tokens")
    assert p.probs.sum(-1).allclose(torch.ones(2, 8, 8))
    assert mt.evaluate(channels_last, (images, y), task="tokens").counts["nll"] == y.numel()


@pytest.mark.parametrize("last", [[], [nn.Flatten(0)]])
def test_one_number_for_each_input_is_binary_or_a_value(last: list[nn.Module]) -> None:
    net = mt.Multitude(nn.Sequential(nn.Linear(8, 1), *last))
    y = torch.tensor([0.0, 1.0, 1.0, 0.0])
    for use in (lambda: net.predict(X), lambda: net.loss(X, y), lambda: net.loss(X, y.long())):
        with pytest.raises(
            ValueError, match=r"pass task='binary' for the logit of yes or no; for values pass task='reg"
        ):
            use()
    assert net.predict(X, task="binary").probs.shape == (4,)
    assert net.predict(X, task="regression").mean.shape == net(X).shape[1:]


@pytest.mark.parametrize(
    ("task", "net", "y", "sentence"),
    [
        ("binary", reshaped(1), torch.tensor([0, 1, 2, 0]), "y must hold 0 or 1.* for task 'binary', got 2"),
        ("binary", reshaped(1), torch.zeros(4, 2), r"shape \[4, 1\] or that without the single channel, got \[4, 2\]"),
        ("multilabel", reshaped(3), torch.zeros(4), r"y must have the predictions' shape \[4, 3\], got \[4\]"),
        ("multilabel", reshaped(3), torch.full((4, 3), -100), "y must hold 0 or 1.* got -100"),
        ("tokens", reshaped(5, 3), classes(4, 5, high=3) + 2, "y must hold classes 0 to 2, got"),
        ("tokens", reshaped(5, 3), classes(4, 3, high=3), r"shape without classes, \[4, 5\], got \[4, 3\]"),
        ("tokens", reshaped(5, 3), torch.full((4, 5), -100), "not ignored, got -100 throughout"),
        ("tokens", reshaped(5), classes(4, high=3), r"must be \[S, B, T, C\], classes last, got shape \[1, 4, 5\]"),
    ],
)
def test_targets_that_do_not_fit_are_one_sentence(task: str, net: nn.Module, y: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mt.Multitude(net).loss(X, y, task=task)


@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_criteria_belong_to_their_tasks(task: str) -> None:
    for criterion in (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()):
        assert criterion_for(task, criterion) is criterion
        with pytest.raises(ValueError, match=r"is for task 'binary' or 'multilabel', and the task is 'classification'"):
            criterion_for(None, criterion)
    with pytest.raises(ValueError, match="takes probabilities, and a network must give logits"):
        criterion_for(task, nn.BCELoss())
    with pytest.raises(ValueError, match=f"is for task 'classification' or 'tokens', and the task is '{task}'"):
        criterion_for(task, nn.CrossEntropyLoss())
    assert criterion_for("tokens", nn.CrossEntropyLoss())


# Hugging Face's heads ---------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def bert(head: str, **options: Any) -> nn.Module:
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **SMALL, **options)
    return getattr(transformers, f"BertFor{head}")(config).eval()


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def vit(**options: Any) -> nn.Module:
    config = transformers.ViTConfig(image_size=8, patch_size=4, **SMALL, **options)
    return transformers.ViTForImageClassification(config).eval()


def texts(high: int = 11) -> dict[str, Tensor]:
    return {"input_ids": classes(3, 7, high=high)}


HEADS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: bert("TokenClassification", num_labels=5), "tokens"),
    (lambda: bert("MaskedLM"), "tokens"),
    (gpt2, "tokens"),
    (lambda: bert("SequenceClassification", num_labels=5), "classification"),
    (lambda: bert("SequenceClassification", num_labels=1), "regression"),
    (lambda: bert("SequenceClassification", num_labels=3, problem_type="regression"), "regression"),
    (lambda: bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"), "multilabel"),
    (lambda: vit(num_labels=4), "classification"),
    (lambda: vit(num_labels=4, problem_type="multi_label_classification"), "multilabel"),
]


@pytest.mark.parametrize(("build", "task"), HEADS)
def test_a_head_tells_its_task_to_every_kind_of_multitude(build: Callable[[], nn.Module], task: str) -> None:
    model = build()
    nets = [mt.Multitude(model), mt.deep_ensemble(model, 2, init="fresh"), mt.fuse([model, model])]
    nets += [mt.deep_ensemble(mt.Multitude(model), 2, init="fresh")]
    assert [net.task for net in nets] == [task] * len(nets)
    nets[0].task = "quantiles"
    assert nets[0].task == "quantiles"  # an explicit one wins


@pytest.mark.parametrize("members", [1, 2])
def test_token_classifiers_and_language_models_learn_as_hugging_face_has_them(members: int) -> None:
    for model, x in (
        (bert("TokenClassification", num_labels=5), texts()),
        (gpt2(), texts()),
        (bert("MaskedLM"), texts()),
    ):
        y = classes(3, 7, high=5)
        y[0, 4:] = y[1, 0] = -100
        net = mt.fuse([model] * members)
        want = model(**x, labels=y).loss  # shifted by one position where it is a causal language model
        torch.testing.assert_close(net.loss(x, y), members * want)
        p = net.predict(x)
        torch.testing.assert_close(p.probs, model(**x).logits.softmax(-1))
        result = mt.evaluate(net, [({**x, "labels": y})])
        assert result["nll"] == pytest.approx(want.item(), rel=1e-5)
        assert result["perplexity"] == pytest.approx(want.exp().item(), rel=1e-5)
        shifts = isinstance(model, transformers.GPT2LMHeadModel)
        assert net.next_tokens == p.next_tokens == shifts
        assert result.counts["nll"] == int((y[:, 1:] != -100).sum() if shifts else (y != -100).sum())
        calibrated = mt.calibrate(net, [({**x, "labels": y})], conformal=None)
        assert mt.evaluate(calibrated, [({**x, "labels": y})])["nll"] <= result["nll"] + 1e-6
        if shifts:
            net.next_tokens = False
            moved = torch.cat([y[:, 1:], torch.full_like(y[:, :1], -100)], 1)
            torch.testing.assert_close(net.loss(x, moved), members * want)


def test_multilabel_and_regression_heads_have_hugging_faces_loss() -> None:
    x = texts()
    model = bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification")
    y = classes(3, 3, high=2)
    torch.testing.assert_close(mt.Multitude(model).loss(x, y), model(**x, labels=y.float()).loss)
    model = bert("SequenceClassification", num_labels=1)
    values = torch.randn(3, 1)
    torch.testing.assert_close(mt.Multitude(model).loss(x, values), model(**x, labels=values).loss)


def test_masks_of_another_size_than_the_logits_are_told_to_be_scaled() -> None:
    net = mt.Multitude(nn.Conv2d(3, 5, 3, stride=2, padding=1))
    with pytest.raises(ValueError, match=r"of size \[4, 4\] and y of size \[8, 8\]: scale one.*size=\(8, 8\)"):
        net.loss(torch.randn(2, 3, 8, 8), classes(2, 8, 8, high=5), task="classification")


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
def test_the_chosen_output_counts_for_every_method(kind: str, output: Any, method: str, tmp_path: Path) -> None:
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


def test_an_output_that_is_not_chosen_or_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"a dict with 'score' \[4, 3\], 'aside' \[4, 2\]; say which.*output="):
        mt.Multitude(Several())(X)
    with pytest.raises(ValueError, match=r"a tuple with 0 \[4, 2\], 1 \[4, 3\]; say which"):
        mt.deep_ensemble(Several("tuple"), 2)(X)
    with pytest.raises(ValueError, match=r"output='logits' is not in what the network returned, a dict with 'score'"):
        mt.Multitude(Several(), output="logits")(X)
    with pytest.raises(ValueError, match="output must be a key, an attribute, a position or a function"):
        mt.Multitude(Several(), output=1.5)
    with pytest.raises(ValueError, match=r"'start_logits' \[3, 7\], 'end_logits' \[3, 7\]; say which.*output="):
        mt.Multitude(bert("QuestionAnswering"))(texts())
    net = mt.Multitude(bert("QuestionAnswering"), output="start_logits")
    assert net.predict(texts()).probs.shape == (3, 7)


# Export -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "shape", "probs"),
    [("binary", (1,), (4,)), ("multilabel", (3,), (4, 3)), ("tokens", (5, 3), (4, 5, 3)), ("quantiles", (3,), (4,))],
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
    assert f'"task": "{task}"' in session.get_modelmeta().custom_metadata_map["multitudes"]
    loaded = mt.load(mt.save(net, tmp_path / "net.safetensors"))
    assert loaded.task == task and torch.equal(loaded.predict(X).predictions, p.predictions)
    with (
        pytest.raises(ValueError, match="task was chosen") if task in ("binary", "tokens") else pytest.raises(KeyError)
    ):
        mt.to_onnx(mt.Multitude(reshaped(*shape)), tmp_path / "no.onnx", X)
        raise KeyError
