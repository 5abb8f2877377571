"""Studies of Hugging Face models: on texts and images, from folders, with and without weights."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from multitudes.files.save import load as load_net
from multitudes.lab.data import load
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.assignment import Assignment
from multitudes.lab.study.spec.hub_models import HubModel, build_hub_model
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from multitudes.models import FromTokens
from tests.lab.cli.test_cli import run_cli, sentence
from tests.zoo.tiny_text import reviews, text_model, tokenizer, transformers, vit_model, write_csv

KINDS = ("bert", "roberta", "distilbert", "gpt2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for kind in KINDS:
        text_model(folder / kind, kind)
    text_model(folder / "trained", weights=True)
    vit_model(folder / "vit")
    vit_model(folder / "trained_vit", weights=True)
    write_csv(folder / "reviews.csv", reviews(200))
    return folder


def spec(place: Path, model: str = "bert", data: str = "reviews.csv", **options: Any) -> Spec:
    given = {"target": "label", "methods": ["single"], "epochs": 2, "device": "cpu", "draws": 3} | options
    return Spec.of(data=place / data, model=f"hf:{place / model}", **given)


def says(part: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(part))


def built(folder: Path, outputs: int = 3, shape: tuple[int, ...] = (32,)) -> Any:
    return build_hub_model(HubModel.read(f"hf:{folder}").plain({}, 0), shape, outputs)


# -- networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_network_computes_what_transformers_does(place: Path, kind: str) -> None:
    network = built(place / kind).eval()
    fast = transformers.AutoTokenizer.from_pretrained(place / kind)
    fast.pad_token = fast.pad_token or fast.eos_token
    texts = [text for text, _ in reviews(6)]
    batch = fast(texts, padding=True, return_tensors="pt")
    want = network.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    tokens = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -1).int()
    torch.testing.assert_close(network(tokens), want)
    for row, text in enumerate(texts):  # padding changes nothing
        alone = network.model(**fast(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(network(torch.nn.functional.pad(tokens, (0, 5), value=-1))[row], alone)


def test_a_pretrained_model_keeps_its_weights_except_its_head(place: Path) -> None:
    plain = HubModel.read(f"hf:{place / 'trained'}").plain({}, 0)
    base = transformers.AutoModel.from_pretrained(place / "trained").state_dict()
    torch.manual_seed(0)
    first, second = (build_hub_model(plain, (32,), 3) for _ in range(2))
    for name, tensor in base.items():
        torch.testing.assert_close(first.model.bert.state_dict()[name], tensor)
    assert not torch.equal(first.model.classifier.weight, second.model.classifier.weight)
    alone = {key: value for key, value in plain.items() if key != "weights"}
    embedding = build_hub_model(alone, (32,), 3).model.bert.embeddings.word_embeddings.weight
    assert not torch.equal(embedding, base["embeddings.word_embeddings.weight"])


def test_a_trained_head_is_reinitialised(place: Path, tmp_path: Path) -> None:
    text_model(tmp_path / "tuned")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "tuned", num_labels=3)
    tuned = transformers.AutoModelForSequenceClassification.from_config(config)
    tuned.save_pretrained(tmp_path / "tuned")
    for outputs in (3, 5):
        network = built(tmp_path / "tuned", outputs)
        assert network.model.classifier.weight.shape == (outputs, 16)
        torch.testing.assert_close(
            network.model.bert.pooler.dense.weight, tuned.bert.pooler.dense.weight, rtol=0, atol=0
        )
    assert not torch.equal(built(tmp_path / "tuned", 3).model.classifier.weight, tuned.classifier.weight)


def test_members_of_a_pretrained_model_differ_in_their_heads(place: Path, tmp_path: Path) -> None:
    methods = {"deep": {"members": 2}, "batch_ensemble": {"members": 2}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning that it looks trained
        run = prepare(spec(place, "trained", methods=methods), tmp_path / "run")
    config = json.loads((run.jobs[0].directory / "config.json").read_text())
    assert config["model"]["weights"]["folder"] == str(place / "trained") and config["training"]["lr"] == 5e-5
    job = Assignment.read(run.jobs[0].directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = job.convert(job.network())
    one, other = net.member(0), net.member(1)
    torch.testing.assert_close(one.model.bert.state_dict(), other.model.bert.state_dict())
    assert not torch.equal(one.model.classifier.weight, other.model.classifier.weight)


def test_a_configuration_alone_starts_from_random_weights(place: Path, tmp_path: Path) -> None:
    model = HubModel.read(f"hf:{place / 'trained' / 'config.json'}")
    assert not model.pretrained and "weights" not in model.plain({}, 0)
    run = prepare(spec(place, "trained/config.json"), tmp_path / "run")
    config = json.loads((run.jobs[0].directory / "config.json").read_text())
    assert config["training"]["lr"] == 5e-4 and "weights" not in config["model"]


@pytest.mark.parametrize(("kind", "most"), [("bert", 32), ("roberta", 33), ("gpt2", 32)])
def test_the_longest_text_is_known(place: Path, kind: str, most: int) -> None:
    assert HubModel.read(f"hf:{place / kind}").longest == most
    network = built(place / kind).eval()
    assert network(torch.full((1, most), 4)).shape == (1, 3)
    with pytest.raises((IndexError, RuntimeError)):
        network(torch.full((1, most + 1), 4))


def test_changed_weights_are_refused(place: Path, tmp_path: Path) -> None:
    text_model(tmp_path / "model", weights=True)
    plain = HubModel.read(f"hf:{tmp_path / 'model'}").plain({}, 0)
    text_model(tmp_path / "model", weights=True)
    with pytest.raises(ValueError, match="were changed since the study was prepared"):
        build_hub_model(plain, (32,), 3)


# -- studies -----------------------------------------------------------------------------------------------


def test_compare_and_predict_texts(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New texts get the predictions that transformers computes from the job's weights."""
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    folder = tmp_path / "bert"
    shutil.copytree(place / "bert", folder)
    run = prepare(spec(place.parent / place.name, data="reviews.csv").model_copy(
        update={"model": Spec.of(model=f"hf:{folder}").model}), tmp_path / "run")  # fmt: skip
    run_job(run.jobs[0].directory, "cpu")
    fast = tokenizer(tmp_path / "again")
    shutil.rmtree(folder)  # the run has everything needed
    texts = ["The film was great", "an awful book, and the meal came late", "?!"]
    new = write_csv(tmp_path / "new.csv", [[text] for text in texts[:2]], ["review"])
    ran = run_cli("predict", run.directory, new, "--text", texts[2], "--probs", "--device", "cpu")
    assert ran.code == 0, ran.err
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert [row["input"] for row in rows] == [texts[2], f"{new} line 2", f"{new} line 3"]
    trained = Trained.read(run.jobs[0].directory, "cpu")
    model = trained.multitude.member(0)
    assert isinstance(model, FromTokens) and type(model.model).__name__ == "BertForSequenceClassification"
    temperature = 1.0
    if trained.net is not trained.multitude:
        temperature = float(trained.net.calibration.scaling.temperature)
    for row, text in zip(rows, [texts[2], *texts[:2]], strict=True):
        logits = model.model(**fast(text, return_tensors="pt")).logits[0] / temperature
        want = logits.detach().softmax(0)
        assert float(row["p(bad)"]) == pytest.approx(float(want[0]), abs=1e-5)
        assert row["label"] == ("bad", "good")[int(want.argmax())]


@pytest.mark.parametrize(("model", "way"), [("bert", "from_config"), ("trained", "from_config"), ("trained", "whole")])
def test_a_saved_network_loads_into_an_equal_model(place: Path, tmp_path: Path, model: str, way: str) -> None:
    run = prepare(spec(place, model, methods={"deep": {"members": 2}}, epochs=1), tmp_path / "run")
    run_job(run.jobs[0].directory, "cpu")
    fast = transformers.AutoTokenizer.from_pretrained(place / "bert")
    config = transformers.AutoConfig.from_pretrained(place / model, num_labels=2)
    auto = transformers.AutoModelForSequenceClassification
    like = FromTokens(auto.from_config(config) if way == "from_config" else auto.from_pretrained(place / model))
    net = load_net(run.jobs[0].directory / "model.safetensors", like).eval()
    tokens = fast("the song was dull", return_tensors="pt")["input_ids"]
    want = Trained.read(run.jobs[0].directory, "cpu").net.predict(tokens).probs
    torch.testing.assert_close(net.predict(tokens).probs, want)


def test_texts_can_have_numeric_targets(place: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "lengths.csv", [(text, len(text) + 0.5) for text, _ in reviews(100)])
    own = spec(tmp_path, data="lengths.csv", task="regression")
    own = own.model_copy(update={"model": Spec.of(model=f"hf:{place / 'bert'}").model})
    run = prepare(own, tmp_path / "run")
    run_job(run.jobs[0].directory, "cpu")
    ran = run_cli("predict", run.directory, "--text", "the film was great", "--device", "cpu")
    assert ran.out.splitlines()[0] == "input,mean,std,low,high" and ran.code == 0


def test_compare_images_with_a_vision_transformer(place: Path, tmp_path: Path) -> None:
    own = Spec.of(data="digits", model=f"hf:{place / 'trained_vit'}", methods=["single"], epochs=1, device="cpu")
    run = prepare(own, tmp_path / "run")
    run_job(run.jobs[0].directory, "cpu")
    trained = Trained.read(run.jobs[0].directory, "cpu")
    assert type(trained.multitude.member(0)).__name__ == "ViTForImageClassification"
    x = load("digits").normalised(load("digits").test.x[:4])
    torch.testing.assert_close(
        trained.multitude(x)[0], trained.multitude.member(0)(pixel_values=x).logits, rtol=1e-5, atol=1e-6
    )


def test_images_are_prepared_as_for_the_pretrained_model(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    vit_model(tmp_path / "vit", size=16, channels=3, weights=True)
    pixels = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "size": {"height": 16, "width": 16}}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(pixels))
    for index in range(40):
        folder = tmp_path / "images" / ("dark" if index % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        image.new("L", (20, 24), 60 + index + 100 * (index % 2)).save(folder / f"{index}.png")
    own = Spec.of(data=tmp_path / "images", model=f"hf:{tmp_path / 'vit'}", methods=["single"], epochs=1, device="cpu")
    run = prepare(own, tmp_path / "run")
    assert (run.about or {})["shape"] == [3, 16, 16]  # grey images of another size
    from multitudes.lab import data as datasets

    data = datasets.read(run.data_path)
    x = data.test.x[:2]
    want = (x / 255 - torch.tensor(pixels["image_mean"])[:, None, None]) / torch.tensor(pixels["image_std"])[
        :, None, None
    ]
    torch.testing.assert_close(data.normalised(x), want)
    assert (run.about or {})["pixels"]["mean"] == pixels["image_mean"]


def test_a_study_file_names_a_model_its_settings_and_texts(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    text = f"""methods = ["single"]
[data]
source = "{place / "reviews.csv"}"
text = "review"
target = "label"
max_length = 16
[model]
name = "hf:{place / "bert"}"
settings = {{num_hidden_layers = 2}}
"""
    file.write_text(text)
    run = prepare(Spec.load(file), tmp_path / "run")
    assert (run.about or {})["shape"] == [16] and (run.about or {})["text"]["column"] == "review"
    again = Spec.load(run.spec_path)
    assert again.model.name == f"hf:{place / 'bert'}" and again.data.text == "review"
    assert not prepare(again, tmp_path / "run").done
    assert len(Assignment.read(run.jobs[0].directory).network().model.bert.encoder.layer) == 2
    file.write_text(text.replace("num_hidden_layers", "layers"))
    with says("has no setting 'layers'; its settings are"):
        prepare(Spec.load(file), tmp_path / "other")


def test_methods_that_cannot_convert_a_model_are_skipped(place: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    run = prepare(spec(place, methods=None), tmp_path / "run", notify=messages.append)
    labels = {job.label for job in run.jobs}
    assert {"single", "deep", "mc_dropout", "batch_ensemble"} <= labels
    assert not {"smooth", "tabm", "mimo"} & labels
    assert any(line.startswith("Skipping mimo: ") for line in messages)
    wrong = {"mimo": "methods.mimo", "tabm": "is for tables, got texts", "lora": "'lora' needs a pretrained network"}
    for method, message in wrong.items():
        with says(message):
            prepare(spec(place, methods=[method]), tmp_path / "other")


# -- what is wrong -----------------------------------------------------------------------------------------


def test_unreadable_models_are_refused(place: Path, tmp_path: Path) -> None:
    def refusal(model: str, data: Path = place / "reviews.csv") -> str:
        out = tmp_path / "run"
        named = ("--target", "label", "--model", f"hf:{model}", "--methods", "single", "--out", out)
        return sentence(run_cli("compare", data, *named))

    assert "model './nowhere' does not exist" in refusal("./nowhere")
    assert "`hf download nobody/none` fetches it" in refusal("nobody/none")
    (tmp_path / "empty").mkdir()
    assert "must have a config.json" in refusal(str(tmp_path / "empty"))
    shutil.copytree(place / "bert", tmp_path / "pickled")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    assert "has its weights in pytorch_model.bin, a format that can execute code" in refusal(str(tmp_path / "pickled"))
    (tmp_path / "bare").mkdir()
    shutil.copy(place / "bert" / "config.json", tmp_path / "bare")
    assert "has no tokenizer.json" in refusal(str(tmp_path / "bare"))
    config = json.loads((place / "bert" / "config.json").read_text())
    shutil.copytree(place / "bert", tmp_path / "foreign")
    (tmp_path / "foreign" / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": {}}))
    assert "with code of its own, which is not executed" in refusal(str(tmp_path / "foreign"))
    shutil.copytree(place / "bert", tmp_path / "few")
    (tmp_path / "few" / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    assert "has a vocabulary of 5 tokens, but the tokenizer has" in refusal(str(tmp_path / "few"))
    assert "is for images, but" in refusal(str(place / "vit"))


def test_a_model_for_another_kind_of_data_is_refused(place: Path, tmp_path: Path) -> None:
    with says("is for texts, but digits is of kind image"):
        prepare(Spec.of(data="digits", model=f"hf:{place / 'bert'}", methods=["single"]), tmp_path / "run")
    vit_model(tmp_path / "large", size=32, channels=3)
    with says("is for images of 3 channels and 32 x 32 pixels, got 1 x 8 x 8"):
        prepare(Spec.of(data="digits", model=f"hf:{tmp_path / 'large'}", methods=["single"]), tmp_path / "run")
    with says("max_length must be at most 32"):
        prepare(spec(place, max_length=64), tmp_path / "run")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "images" / "a").mkdir(parents=True)
    image.new("L", (8, 8)).save(tmp_path / "images" / "a" / "1.png")
    with says("tokenizer= does not apply to images"):
        prepare(Spec.of(data=tmp_path / "images", model=f"hf:{place / 'bert'}", methods=["single"]), tmp_path / "run")
    with says("does not accept texts: use a Hugging Face model"):
        own = spec(place, tokenizer=str(place / "bert"))
        prepare(own.model_copy(update={"model": Spec.of(model="mlp").model}), tmp_path / "run")


def test_the_baseline_of_texts_is_a_linear_model_of_tf_idf(place: Path) -> None:
    from multitudes.lab.study.run.baselines import measure_baselines

    text = pytest.importorskip("sklearn.feature_extraction.text")
    linear = pytest.importorskip("sklearn.linear_model")
    data = load(place / "reviews.csv", target="label", tokenizer=str(place / "gpt2"), max_length=32)
    found = measure_baselines(data)["baselines"]["linear"]["scores"]
    words = text.TfidfVectorizer(token_pattern=r"\w+")
    model = linear.LogisticRegression(max_iter=1000)
    model.fit(words.fit_transform([file.decode() for file in data.train.files]), data.train.y)
    probs = torch.tensor(model.predict_proba(words.transform([file.decode() for file in data.test.files])))
    want = -probs.gather(1, data.test.y[:, None]).log().mean()
    assert found["nll"] == pytest.approx(float(want), rel=1e-6) and found["accuracy"] == 1.0


@pytest.mark.slow
def test_a_text_network_is_exported_with_its_tokenizer(place: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    tokenizers = pytest.importorskip("tokenizers")
    run = prepare(spec(place, methods={"deep": {"members": 2}}, epochs=1), tmp_path / "run")
    run_job(run.jobs[0].directory, "cpu")
    ran = run_cli("export", run.directory, "--to", tmp_path / "net.onnx")
    assert ran.code == 0 and "net.tokenizer.json" in ran.out, ran.err
    reader = tokenizers.Tokenizer.from_file(str(tmp_path / "net.tokenizer.json"))
    tokens = torch.full((1, 32), -1, dtype=torch.int32)
    ids = reader.encode("the song was dull").ids
    tokens[0, : len(ids)] = torch.tensor(ids)
    session = runtime.InferenceSession(str(tmp_path / "net.onnx"))
    answer = dict(
        zip((each.name for each in session.get_outputs()), session.run(None, {"tokens": tokens.numpy()}), strict=True)
    )
    want = Trained.read(run.jobs[0].directory, "cpu").net.predict(tokens).probs
    torch.testing.assert_close(torch.from_numpy(answer["probs"]), want, rtol=1e-3, atol=1e-4)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("bert", "heads"), ("trained", "heads"), ("trained", "lora"), ("bert", "laplace"), ("trained", "packed"),
        ("bert", "mc_dropout"),
    ],
)  # fmt: skip
def test_methods_train_transformers_and_save_them(place: Path, tmp_path: Path, model: str, method: str) -> None:
    run = prepare(spec(place, model, methods=[method], epochs=1), tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_job(run.jobs[0].directory, "cpu")
    trained = Trained.read(run.jobs[0].directory, "cpu")
    probs = trained.net.predict(trained.data.normalised(trained.data.test.x), seed=0).probs
    kept = torch.from_numpy(run.jobs[0].predictions["probs"])
    assert probs.shape == kept.shape
    if method in ("heads", "lora", "packed"):  # the others draw
        torch.testing.assert_close(probs.float(), kept, rtol=1e-4, atol=1e-5)


def test_evaluate_other_texts_and_out_of_distribution_ones(place: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "strange.csv", [("entirely different words", "x")] * 20)
    own = spec(place, ood=[str(tmp_path / "strange.csv")], epochs=1)
    run = prepare(own, tmp_path / "run")
    run_job(run.jobs[0].directory, "cpu")
    scores = json.loads((run.jobs[0].directory / "metrics.json").read_text())["scores"]
    assert any(name.startswith("ood/strange/") for name in scores)
    other = write_csv(tmp_path / "other.csv", reviews(30, seed=5))
    job, to = run.jobs[0].directory, tmp_path / "scores.json"
    ran = run_cli("evaluate", job, other, "--target", "label", "--device", "cpu", "--to", to)
    assert ran.code == 0, ran.err
    trained = Trained.read(run.jobs[0].directory, "cpu")
    tokens, _ = trained.data.encoder.tokens([text for text, _ in reviews(30, seed=5)])
    label = trained.net.predict(tokens).label.tolist()
    right = [trained.data.classes[each] == want for each, (_, want) in zip(label, reviews(30, seed=5), strict=True)]
    written = json.loads(to.read_text())
    assert json.dumps(written).count("accuracy") and f"{sum(right) / 30:.4f}"[:5] in ran.out


def test_texts_can_have_folds_and_be_prepared_before(place: Path, tmp_path: Path) -> None:
    run = prepare(spec(place, folds=2), tmp_path / "run")
    assert len(run.jobs) == 2 and len((run.about or {})["folds"]) == 2
    ran = run_cli(
        "data", "prepare", place / "reviews.csv", "--target", "label", "--tokenizer", place / "bert",
        "--max-length", "16", "--text-column", "review", "--to", tmp_path / "texts.mtdata",
    )  # fmt: skip
    assert ran.code == 0 and "texts of [16]" in ran.out, ran.err
    for model in ("distilbert", "trained"):
        own = Spec.of(data=tmp_path / "texts.mtdata", model=f"hf:{place / model}", methods=["single"])
        assert (prepare(own, tmp_path / model).about or {})["shape"] == [16]
    shutil.copytree(place / "trained", tmp_path / "changed")
    file = tmp_path / "changed" / "tokenizer.json"
    file.write_text(file.read_text().replace("film", "flim"))
    own = Spec.of(data=tmp_path / "texts.mtdata", model=f"hf:{tmp_path / 'changed'}", methods=["single"])
    with says("source was prepared with another tokenizer than that of"):
        prepare(own, tmp_path / "other")
    with says("model must be a Hugging Face model, hf:FOLDER, for texts, but none is given"):
        prepare(Spec.of(data=tmp_path / "texts.mtdata", methods=["single"]), tmp_path / "third")


@pytest.mark.slow
def test_compare_writes_the_page_of_a_text_study(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = run_cli(
        "compare", place / "reviews.csv", "--target", "label", "--model", f"hf:{place / 'trained'}",
        "--methods", "single,heads", "--seeds", "1", "--epochs", "20", "--lr", "0.01", "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "a linear model (baseline)" in ran.out and "looks trained" not in ran.err
    assert 'id="texts"' in (out / "report.html").read_text(encoding="utf-8")
    scores = json.loads((out / "jobs" / "single-0" / "metrics.json").read_text())["scores"]
    assert scores["accuracy"]["value"] > 0.9  # a word tells the label
    assert run_cli("predict", out / "jobs" / "heads-0", "--text", "the film was superb").out.count("good") == 1
    again = run_cli("bench", "--model", f"hf:{place / 'bert'}", "--shape", "8", "--methods", "heads")
    assert again.code == 0 and "heads" in again.out


def test_a_configuration_loads_no_code_and_nothing_from_the_hub(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "bert", tmp_path / "bert")
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    more = {"attn_implementation": "somebody/kernel", "auto_map": {"AutoModel": "mine.Net"}, "dtype": "bfloat16"}
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config | more))
    (tmp_path / "bert" / "mine.py").write_text("raise SystemExit('this code was run')")
    network = built(tmp_path / "bert")
    assert network.model.config._attn_implementation in ("sdpa", "eager")
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    plain = HubModel.read(f"hf:{tmp_path / 'bert'}").plain({}, 0)
    assert not set(more) & set(plain["config"])
    build_hub_model({**plain, "config": plain["config"] | more}, (32,), 2)  # as in a run of somebody else
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    with says("is quantized"):
        HubModel.read(f"hf:{tmp_path / 'bert'}")
