"""Specifications are read, checked with line numbers, filled in and written."""

from __future__ import annotations

import re
import tomllib
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes.lab.data.loader import AUGMENTATIONS
from multitudes.lab.study.spec.method_rows import METHODS
from multitudes.lab.study.spec.sections import TrainingSection
from multitudes.lab.study.spec.specification import Spec, SpecError
from multitudes.lab.study.spec.toml import TomlText, to_toml
from multitudes.shift import CORRUPTIONS
from multitudes.training.optimizers import OPTIMIZERS
from multitudes.training.precision import PRECISIONS

DIGITS, SMALL_IMAGE, TABLE = (1, 8, 8), (3, 4, 4), (13,)


def written(tmp_path, text):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


# -- lines -------------------------------------------------------------------------------------------------

# Every value is the number of the line on which its key begins.
LINES = """top = 1
"quoted key" = 2  # a comment = 3
text = \'\'\'
a = 1
[not.a.table]
\'\'\'
after = 7
[table] # [no.table]
key = 9
a.b.c = 10
inline = { x = 11, y.z = 11 }
list = [  # ]
  12, { deep = 12 },
]
[table.sub]
key = 16
[[many]]
key = 18
[[many]]
[[many.nested]]
key = 21
[ spaced . "out" ]
key = 23
"""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*path, key))
    else:
        yield path, value


def test_every_key_is_found_on_its_line():
    found = TomlText(LINES, "study.toml")
    numbers = {path: value for path, value in leaves(tomllib.loads(LINES)) if isinstance(value, int)}
    assert len(numbers) == 13
    assert {path: found.line(path) for path in numbers} == numbers
    assert [found.line(path) for path in (("table",), ("table", "a", "b"), ("many",), ("many", 1))] == [8, 10, 17, 19]
    assert found.line(("table", "no such key")) == 8 and found.line(("nowhere",)) is None


# -- writing -----------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
NAMES = st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=9)


@settings(deadline=None)
@given(st.dictionaries(NAMES, VALUES))
def test_written_toml_reads_back(table):
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize("shape", [DIGITS, (3, 32, 32), (1, 28, 28), TABLE])
def test_a_resolved_specification_reads_back(tmp_path, shape):
    spec = Spec.of(seeds=[3, 1], schedule={"name": "multistep", "milestones": [0.5]}).resolved(shape)
    again = Spec.load(written(tmp_path, spec.to_toml()))
    assert again == spec
    assert again.resolved(shape) == spec


# -- errors ------------------------------------------------------------------------------------------------

WRONG = [
    ("seeds = 0", 1, ["seeds", "1 to 10000", "0"]),
    ("seeds = [0, 1, 0]", 1, ["seeds", "must not repeat"]),
    ("seeds = [0,\n -1]", 1, ["seeds[1]", "greater than or equal to 0", "-1"]),
    ("\ndevice = 'gpu'", 2, ["device", "'auto', 'cpu' or 'cuda'", "'gpu'"]),
    ("epochs = 3", 1, ["'epochs'", "[training] epochs", "seeds"]),
    ("[training]\nepoch = 3", 2, ["'training.epoch'", "did you mean epochs", "batch_size"]),
    ("[training]\n\nepochs = 0", 3, ["training.epochs", "greater than or equal to 1", "0"]),
    ("\ntraining = { epochs = 3, batch_size = '64' }", 2, ["training.batch_size", "integer", "'64'"]),
    ("[training]\nlr = nan", 2, ["training.lr", "nan"]),
    ("[training]\nschedule = 'cosin'", 2, ["training.schedule", "cosine, cyclic", "'cosin'"]),
    ("[training.schedule]\nname = 'cyclic'\ncycels = 3", 1, ["training.schedule", "cycels"]),
    ("[data]\nood = 'svhn'", 2, ["data.ood", "a valid list", "'svhn'"]),
    ("[data]\nsize = [1, 2, 3]", 2, ["data.size", "at most 2"]),
    ("[evaluation]\nshift = ['fog',\n'frog']", 2, ["evaluation.shift[1]", "gaussian_noise, shot_noise", "'frog'"]),
    ("[evaluation]\nseverities = [1, 6]", 2, ["evaluation.severities[1]", "less than or equal to 5", "6"]),
    ("[model]\nname = 'resnet'", 2, ["model.name", "resnet18", "'resnet'"]),
    ("[model]\nfile = 'nowhere.py'\nname = 'build'", 2, ["model.file", "'nowhere.py'"]),
    ("[model]\nname = 'mlp'\n[model.settings]\nhidden = [3]\n[model.setting]", 5, ["'model.setting'", "settings"]),
    ("methods = 'single'", 1, ["methods", "'single'"]),
    ("methods = []", 1, ["methods", "[]"]),
    ("methods = ['single',\n'single']", 1, ["methods", "lists 'single' twice"]),
    ("methods = ['single',\n'packd']", 1, ["methods", "single, deep, tabm, packed", "did you mean packed"]),
    ("[methods.single]\n[methods.packed]\nmembres = 4", 3, ["methods.packed", "'membres'", "members, alpha, gamma"]),
    ("[methods.packed]\nmembers = '4'", 2, ["methods.packed.members", "a number", "'4'"]),
    ("[methods.smooth]\ngrowing = 1", 2, ["methods.smooth.growing", "true or false", "1"]),
    ("[methods.eight]\nmembers = 8", 1, ["methods", "'eight'"]),
    ("[methods.eight]\nmethod = 'pack'", 2, ["methods.eight.method", "packed", "'pack'"]),
    ("[methods.'a/b']\nmethod = 'packed'", 1, ["methods", "letters", "'a/b'"]),
    ("methods.packed = 4", 1, ["methods.packed", "a table", "4"]),
]


@pytest.mark.parametrize("text, line, parts", WRONG)
def test_an_error_names_the_key_its_line_and_the_choices(tmp_path, text, line, parts):
    with pytest.raises(SpecError) as caught:
        Spec.load(written(tmp_path, text))
    assert caught.value.lines == [line]
    message = str(caught.value)
    assert message.startswith(f"study.toml, line {line}: ")
    assert not [part for part in parts if part not in message], message


def test_all_errors_are_listed_in_order_of_lines(tmp_path):
    text = (
        "seeds = 0\n[methods.packed]\nmembres = 2\n[training]\nepochs = 0\n[model]\nname = 'x'\n[evaluation]\ndraws = 0"
    )
    with pytest.raises(SpecError) as caught:
        Spec.load(written(tmp_path, text))
    assert caught.value.lines == [1, 3, 5, 7, 9]
    assert len(str(caught.value).splitlines()) == 5


def test_unreadable_files_and_unknown_keys_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"study.toml: .*line 2"):
        Spec.load(written(tmp_path, "seeds = 1\nepochs =\n"))
    with pytest.raises(ValueError, match="cannot be read"):
        Spec.load(tmp_path / "nowhere.toml")
    with pytest.raises(SpecError, match=r"^training.epochs must be greater than or equal to 1, got 0$"):
        Spec.of(epochs=0)
    with pytest.raises(SpecError, match=r"^unknown key 'epoch'"):
        Spec.of(epoch=3)


# -- values ------------------------------------------------------------------------------------------------


def test_methods_are_a_list_or_tables_with_names_of_their_own(tmp_path):
    listed = Spec.load(written(tmp_path, "methods = ['single', 'packed']"), data="digits").methods
    assert listed["packed"].settings == METHODS["packed"].settings
    text = "[methods.packed]\nalpha = 3\n[methods.packed_8]\nmethod = 'packed'\nmembers = 8"
    tables = Spec.load(written(tmp_path, text), data="digits").methods
    assert [(label, each.method) for label, each in tables.items()] == [("packed", "packed"), ("packed_8", "packed")]
    assert tables["packed"].settings == {"members": 4, "alpha": 3, "gamma": 1, "layers": None}
    assert tables["packed_8"].settings == {"members": 8, "alpha": 2, "gamma": 1, "layers": None}


def test_options_replace_values_of_the_file(tmp_path):
    path = written(tmp_path, "seeds = 5\n[training]\nepochs = 9\nlr = 0.5\n[data]\nsource = 'a/b'\nlimit = 7")
    spec = Spec.load(path, epochs=2, seeds=[4], data="c/d", model="mlp", precision=None)
    assert (spec.training.epochs, spec.training.lr, spec.seeds) == (2, 0.5, [4])
    assert (spec.data.source, spec.data.limit, spec.model.name) == ("c/d", 7, "mlp")


def test_files_are_relative_to_the_specification(tmp_path):
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n")
    (tmp_path / "net.py").write_text("")
    text = "[data]\nsource = 'rows.csv'\nood = ['owner/name']\n[model]\nfile = 'net.py'\nname = 'build'"
    spec = Spec.load(written(tmp_path, text))
    assert spec.data.source == str(tmp_path / "rows.csv")
    assert spec.data.ood == ["owner/name"]
    assert spec.model.file == str(tmp_path / "net.py")
    assert Spec.of(model=f"{tmp_path}/net.py:build").model == spec.model


def test_only_the_complete_digits_are_embedded():
    assert Spec.of(data="digits").data.embedded
    assert not Spec.of(data="digits", limit=100).data.embedded
    assert not Spec.of(data="owner/name").data.embedded


def test_defaults_depend_on_the_data():
    images, table = Spec.of(epochs=3).resolved(DIGITS), Spec.of(epochs=3).resolved(TABLE)
    assert (images.model.name, table.model.name) == ("small_cnn", "tabular")
    assert images.training.epochs == table.training.epochs == 3
    assert set(images.methods) == set(METHODS) - {"tabm", "lora"}
    assert set(METHODS) - set(table.methods) == {"lora", "smooth", "smooth_dropout"}
    assert images.evaluation.shift and not table.evaluation.shift
    assert not Spec.of().resolved(SMALL_IMAGE).evaluation.shift
    assert not Spec.of().resolved(DIGITS, "regression").evaluation.shift
    assert Spec.of(shift="all").evaluation.shift == list(CORRUPTIONS)


@pytest.mark.parametrize(
    "options, shape, key, value",
    [
        ({}, (3, 32, 32), "warmup", 1),
        ({"epochs": 1}, (3, 32, 32), "warmup", 0),  # training is too short for a warm-up
        ({}, DIGITS, "optimizer", "adam"),
        ({"optimizer": "sgd"}, DIGITS, "lr", 0.05),  # learning rates depend on the optimizer
        ({"optimizer": "sgd", "lr": 0.2}, DIGITS, "lr", 0.2),
        ({"optimizer": "adamw"}, (3, 32, 32), "lr", 1e-3),
    ],
)
def test_training_defaults_fit_each_other(options, shape, key, value):
    assert getattr(Spec.of(**options).resolved(shape).training, key) == value


@pytest.mark.parametrize(
    "text, shape, line, message",
    [
        ("[evaluation]\nshift = ['fog']", TABLE, 2, "evaluation.shift"),
        ("[training]\naugment = 'crop'", TABLE, 2, "training.augment"),
        ("[training]\nepochs = 2\nwarmup = 2", DIGITS, 3, "training.warmup"),
        ("[methods.single]\n[methods.smooth]", TABLE, 2, "methods.smooth"),
    ],
)
def test_values_that_do_not_fit_the_data_are_refused_with_their_line(tmp_path, text, shape, line, message):
    with pytest.raises(SpecError, match=rf"line {line}: {message}"):
        Spec.load(written(tmp_path, text), data="digits").resolved(shape)


@pytest.mark.parametrize("text", ["", "seeds = 3", "[data]\ntarget = 'y'"])
def test_the_data_must_be_named_in_the_file_or_as_an_option(tmp_path, text):
    path = written(tmp_path, text)
    with pytest.raises(SpecError, match="data.source must name the data"):
        Spec.load(path)
    assert Spec.load(path, data="digits").data.source == "digits"


def test_the_choices_are_those_of_training_and_data():
    def choices(name: str) -> set[str]:
        return {each for part in get_args(TrainingSection.model_fields[name].annotation) for each in get_args(part)}

    assert choices("optimizer") == set(OPTIMIZERS)
    assert choices("precision") == {"auto", *PRECISIONS}
    assert choices("augment") == {"none", *AUGMENTATIONS}


# -- scales ------------------------------------------------------------------------------------------------

SCALED = """seeds = 3
[data]
source = "table.csv"
target = "y"
[methods.single]
[methods.packed]
members = 4
alpha = 2
[training]
epochs = 75
lr = 0.1
[scales.smoke]
seeds = 1
[scales.smoke.training]
epochs = 1
[scales.smoke.methods.packed]
members = 2
[scales.long.training]
epochs = 200
"""


def test_a_scale_changes_only_its_own_values(tmp_path):
    path = written(tmp_path, SCALED)
    plain, smoke = Spec.load(path), Spec.load(path, "smoke")
    assert (plain.seeds, plain.training.epochs, plain.methods["packed"].settings["members"]) == ([0, 1, 2], 75, 4)
    assert (smoke.seeds, smoke.training.epochs, smoke.methods["packed"].settings["members"]) == ([0], 1, 2)
    assert smoke.training.lr == plain.training.lr and smoke.methods["packed"].settings["alpha"] == 2
    assert list(smoke.methods) == list(plain.methods)
    assert Spec.load(path, "long").training.epochs == 200
    assert Spec.load(path, "smoke", epochs=7).training.epochs == 7, "options come before the scale"


@pytest.mark.parametrize(
    ("text", "scale", "sentence"),
    [
        (
            SCALED.replace("epochs = 1\n", "epochs = 0\n"),
            "smoke",
            ", line 15: training.epochs must be greater than or equal to 1, got 0",
        ),
        (SCALED, "tiny", ": scale must be one of smoke, long, got 'tiny'"),
        ("seeds = 1", "smoke", ": scale must be a table [scales.NAME] of the file, which has none, got 'smoke'"),
        ("scales = 3", None, ": scales must be tables, [scales.NAME], of what differs at each scale, got 3"),
        (
            "scales.smoke = 3",
            "smoke",
            ": scales must be tables, [scales.NAME], of what differs at each scale, got {'smo",
        ),
    ],
)
def test_a_wrong_scale_is_refused(tmp_path, text, scale, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape('study.toml' + sentence)}"):
        Spec.load(written(tmp_path, text), scale)


def test_a_score_of_another_task_is_refused():
    assert Spec.of(by="nll").resolved((4,), "regression").by == "nll"
    with pytest.raises(SpecError, match="--by must be one of nll, brier, accuracy for classification, got 'rmse'"):
        Spec.of(by="rmse").resolved((1, 8, 8), "classification")
    with pytest.raises(SpecError, match="--by must be one of log_density, crps, rmse for regression, got 'accuracy'"):
        Spec.of(by="accuracy").resolved((4,), "regression")
