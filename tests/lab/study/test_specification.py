"""The specification of a study: read, checked with lines, filled in, written."""

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

# Every number is that of the line on which its key begins.
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
def test_what_is_written_reads_back(table):
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize("shape", [DIGITS, (3, 32, 32), (1, 28, 28), TABLE])
def test_a_filled_in_specification_reads_back_and_is_filled_in_already(tmp_path, shape):
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
    ("training.epochs = 2.5", 1, ["training.epochs", "integer", "2.5"]),
    ("\ntraining = { epochs = 3, batch_size = '64' }", 2, ["training.batch_size", "integer", "'64'"]),
    ("[training]\noptimizer = 'sdg'", 2, ["training.optimizer", "'sgd', 'adam' or 'adamw'", "'sdg'"]),
    ("[training]\nmomentum = 1", 2, ["training.momentum", "less than 1", "1"]),
    ("[training]\nlr = nan", 2, ["training.lr", "nan"]),
    ("[training]\nschedule = 'cosin'", 2, ["training.schedule", "cosine, cyclic", "'cosin'"]),
    ("[training.schedule]\nname = 'cyclic'\ncycels = 3", 1, ["training.schedule", "cycels"]),
    ("training = 3", 1, ["training", "a valid dictionary", "3"]),
    ("[data]\nvalidation = 1.5", 2, ["data.validation", "less than 1", "1.5"]),
    ("[data]\nood = 'svhn'", 2, ["data.ood", "a valid list", "'svhn'"]),
    ("[data]\nsize = [1, 2, 3]", 2, ["data.size", "at most 2"]),
    ("[data]\ntask = 'ranking'", 2, ["data.task", "'classification' or 'regression'", "'ranking'"]),
    ("[evaluation]\nshift = ['fog',\n'frog']", 2, ["evaluation.shift[1]", "gaussian_noise, shot_noise", "'frog'"]),
    ("[evaluation]\nseverities = [1, 6]", 2, ["evaluation.severities[1]", "less than or equal to 5", "6"]),
    ("[evaluation]\nsizes = []", 2, ["evaluation.sizes", "at least 1"]),
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


@pytest.mark.parametrize("text, line, told", WRONG)
def test_an_error_names_the_key_its_line_and_the_choices(tmp_path, text, line, told):
    with pytest.raises(SpecError) as caught:
        Spec.load(written(tmp_path, text))
    assert caught.value.lines == [line]
    message = str(caught.value)
    assert message.startswith(f"study.toml, line {line}: ")
    assert not [part for part in told if part not in message], message


def test_all_errors_are_told_from_the_first_line_to_the_last(tmp_path):
    text = (
        "seeds = 0\n[methods.packed]\nmembres = 2\n[training]\nepochs = 0\n[model]\nname = 'x'\n[evaluation]\ndraws = 0"
    )
    with pytest.raises(SpecError) as caught:
        Spec.load(written(tmp_path, text))
    assert caught.value.lines == [1, 3, 5, 7, 9]
    assert len(str(caught.value).splitlines()) == 5


def test_what_is_no_toml_or_no_key_is_told_with_the_file_if_there_is_one(tmp_path):
    with pytest.raises(ValueError, match=r"study.toml: .*line 2"):
        Spec.load(written(tmp_path, "seeds = 1\nepochs =\n"))
    with pytest.raises(ValueError, match="cannot be read"):
        Spec.load(tmp_path / "nowhere.toml")
    with pytest.raises(SpecError, match=r"^training.epochs must be greater than or equal to 1, got 0$"):
        Spec.of(epochs=0)
    with pytest.raises(SpecError, match=r"^unknown key 'epoch'"):
        Spec.of(epoch=3)


# -- what it says ------------------------------------------------------------------------------------------


def test_methods_are_a_list_or_tables_and_one_may_come_twice(tmp_path):
    listed = Spec.load(written(tmp_path, "methods = ['single', 'packed']"), data="digits").methods
    assert listed["packed"].settings == METHODS["packed"].settings
    text = "[methods.packed]\nalpha = 3\n[methods.packed_8]\nmethod = 'packed'\nmembers = 8"
    tables = Spec.load(written(tmp_path, text), data="digits").methods
    assert [(label, each.method) for label, each in tables.items()] == [("packed", "packed"), ("packed_8", "packed")]
    assert tables["packed"].settings == {"members": 4, "alpha": 3, "gamma": 1, "layers": None}
    assert tables["packed_8"].settings == {"members": 8, "alpha": 2, "gamma": 1, "layers": None}


def test_options_replace_what_the_file_says(tmp_path):
    path = written(tmp_path, "seeds = 5\n[training]\nepochs = 9\nlr = 0.5\n[data]\nsource = 'a/b'\nlimit = 7")
    spec = Spec.load(path, epochs=2, seeds=[4], data="c/d", model="mlp", precision=None)
    assert (spec.training.epochs, spec.training.lr, spec.seeds) == (2, 0.5, [4])
    assert (spec.data.source, spec.data.limit, spec.model.name) == ("c/d", 7, "mlp")


def test_files_are_relative_to_the_specification_and_a_model_may_be_a_function_of_one(tmp_path):
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n")
    (tmp_path / "net.py").write_text("")
    text = "[data]\nsource = 'rows.csv'\nood = ['owner/name']\n[model]\nfile = 'net.py'\nname = 'build'"
    spec = Spec.load(written(tmp_path, text))
    assert spec.data.source == str(tmp_path / "rows.csv")
    assert spec.data.ood == ["owner/name"]
    assert spec.model.file == str(tmp_path / "net.py")
    assert Spec.of(model=f"{tmp_path}/net.py:build").model == spec.model


def test_only_digits_as_they_are_come_with_the_package():
    assert Spec.of(data="digits").data.embedded
    assert not Spec.of(data="digits", limit=100).data.embedded
    assert not Spec.of(data="owner/name").data.embedded


def test_defaults_depend_on_the_data_and_what_is_given_stays():
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
        ({"epochs": 1}, (3, 32, 32), "warmup", 0),  # too short a training for the usual one
        ({}, DIGITS, "optimizer", "adam"),
        ({"optimizer": "sgd"}, DIGITS, "lr", 0.05),  # another optimizer brings its own rate
        ({"optimizer": "sgd", "lr": 0.2}, DIGITS, "lr", 0.2),
        ({"optimizer": "adamw"}, (3, 32, 32), "lr", 1e-3),
    ],
)
def test_a_default_of_training_fits_the_others(options, shape, key, value):
    assert getattr(Spec.of(**options).resolved(shape).training, key) == value


@pytest.mark.parametrize(
    "text, shape, line, told",
    [
        ("[evaluation]\nshift = ['fog']", TABLE, 2, "evaluation.shift"),
        ("[training]\naugment = 'crop'", TABLE, 2, "training.augment"),
        ("[training]\nepochs = 2\nwarmup = 2", DIGITS, 3, "training.warmup"),
        ("[methods.single]\n[methods.smooth]", TABLE, 2, "methods.smooth"),
    ],
)
def test_what_the_data_cannot_have_is_told_with_its_line(tmp_path, text, shape, line, told):
    with pytest.raises(SpecError, match=rf"line {line}: {told}"):
        Spec.load(written(tmp_path, text), data="digits").resolved(shape)


@pytest.mark.parametrize("text", ["", "seeds = 3", "[data]\ntarget = 'y'"])
def test_a_file_must_say_what_to_learn_unless_the_command_line_does(tmp_path, text):
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


def test_a_scale_changes_what_it_names_and_nothing_else(tmp_path):
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
def test_a_wrong_scale_gets_a_sentence(tmp_path, text, scale, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape('study.toml' + sentence)}"):
        Spec.load(written(tmp_path, text), scale)


def test_a_score_that_the_task_has_not_is_refused_before_anything_is_trained():
    assert Spec.of(by="nll").resolved((4,), "regression").by == "nll"
    with pytest.raises(SpecError, match="--by must be one of nll, brier, accuracy for classification, got 'rmse'"):
        Spec.of(by="rmse").resolved((1, 8, 8), "classification")
    with pytest.raises(SpecError, match="--by must be one of log_density, crps, rmse for regression, got 'accuracy'"):
        Spec.of(by="accuracy").resolved((4,), "regression")
