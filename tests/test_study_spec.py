"""The specification of a study: read, checked with lines, filled in, written."""

from __future__ import annotations

import tomllib
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multitudes.data.loader import AUGMENTATIONS
from multitudes.shift import CORRUPTIONS
from multitudes.study.methods import METHODS
from multitudes.study.sections import TrainingSection
from multitudes.study.spec import Spec, SpecError
from multitudes.study.toml import key_lines, to_toml
from multitudes.training.fit import PRECISIONS
from multitudes.training.optimizers import OPTIMIZERS

DIGITS, SMALL_IMAGE, TABLE = (1, 8, 8), (3, 4, 4), (13,)


def written(tmp_path, text):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return path


# -- lines -------------------------------------------------------------------------------------------------

# Every value is the number of the line on which its key is.
LINES = '''top = 1
"quoted key" = 2  # a comment = 3
'literal' = 3
text = """
a = 1
[not.a.table]
\\""" still = "the text" """
raw = \'\'\'
b = "
\'\'\'
after = 11
[table] # [no.table]
key = 13
a.b.c = 14
a."d.e" = 15
inline = { x = 16, y.z = 16, list = [16, 16] }
list = [  # ]
  18, # ,
  19,
  { deep = 20 }, [20,
  21],
]
[table.sub]
key = 24
[[many]]
key = 26
[many.below]
key = 28
[[many.nested]]
key = 30
[[many]]
key = 32
[[many.nested]]
key = 34
[ spaced . "out" ]
key = 36
when = 1979-05-27 07:32:00
path = 'C:\\' # "
last = 39'''


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*path, key))
    else:
        yield path, value


def test_every_key_is_found_on_its_line():
    found = key_lines(LINES)
    numbers = {path: value for path, value in leaves(tomllib.loads(LINES)) if isinstance(value, int)}
    assert len(numbers) == 24
    assert {path: found[path] for path in numbers} == numbers


def test_windows_line_ends_count_like_others():
    assert key_lines(LINES.replace("\n", "\r\n")) == key_lines(LINES)


@pytest.mark.parametrize(
    "path, line", [(("table",), 12), (("table", "a", "b"), 14), (("many",), 25), (("many", 1), 31)]
)
def test_a_table_is_found_where_it_begins(path, line):
    assert key_lines(LINES)[path] == line


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
    assert set(key_lines(to_toml(table))) >= {path for path, _ in leaves(table)}


@pytest.mark.parametrize("shape", [DIGITS, (3, 32, 32), (1, 28, 28), TABLE])
def test_a_filled_in_specification_reads_back_and_is_filled_in_already(tmp_path, shape):
    spec = Spec.of(seeds=[3, 1], schedule={"name": "multistep", "milestones": [0.5]}).resolved(shape)
    again = Spec.load(written(tmp_path, spec.to_toml()))
    assert again == spec
    assert again.resolved(shape) == spec


# -- errors ------------------------------------------------------------------------------------------------

WRONG = [
    ("seeds = 0", 1, ["seeds", "1 or more", "0"]),
    ("seeds = [0, 1, 0]", 1, ["seeds", "twice"]),
    ("seeds = [0,\n -1]", 2, ["seeds[1]", "0 or more", "-1"]),
    ("\ndevice = 'gpu'", 2, ["device", "'auto', 'cpu' or 'cuda'", "'gpu'"]),
    ("epochs = 3", 1, ["'epochs'", "[training] epochs", "seeds"]),
    ("[training]\nepoch = 3", 2, ["'training.epoch'", "did you mean epochs", "batch_size"]),
    ("[training]\n\nepochs = 0", 3, ["training.epochs", "1 or more", "0"]),
    ("training.epochs = 2.5", 1, ["training.epochs", "whole number", "2.5"]),
    ("\ntraining = { epochs = 3, batch_size = '64' }", 2, ["training.batch_size", "whole number", "'64'"]),
    ("[training]\noptimizer = 'sdg'", 2, ["training.optimizer", "'sgd', 'adam' or 'adamw'", "'sdg'"]),
    ("[training]\nmomentum = 1", 2, ["training.momentum", "below 1", "1"]),
    ("[training]\nlr = nan", 2, ["training.lr", "nan"]),
    ("[training]\nschedule = 'cosin'", 2, ["training.schedule", "cosine, cyclic", "'cosin'"]),
    ("[training.schedule]\nname = 'cyclic'\ncycels = 3", 1, ["training.schedule", "cycels"]),
    ("training = 3", 1, ["training", "a table", "3"]),
    ("[data]\nvalidation = 1.5", 2, ["data.validation", "below 1", "1.5"]),
    ("[data]\nood = 'svhn'", 2, ["data.ood", "a list", "'svhn'"]),
    ("[data]\nsize = [1, 2, 3]", 2, ["data.size", "at most 2"]),
    ("[data]\ntask = 'ranking'", 2, ["data.task", "'classification' or 'regression'", "'ranking'"]),
    ("[evaluation]\nshift = ['fog',\n'frog']", 3, ["evaluation.shift[1]", "gaussian_noise, shot_noise", "'frog'"]),
    ("[evaluation]\nseverities = [1, 6]", 2, ["evaluation.severities[1]", "5 at most", "6"]),
    ("[evaluation]\nsizes = []", 2, ["evaluation.sizes", "at least 1"]),
    ("[model]\nname = 'resnet'", 2, ["model.name", "resnet18", "'resnet'"]),
    ("[model]\nfile = 'nowhere.py'\nname = 'build'", 2, ["model.file", "'nowhere.py'"]),
    ("[model]\nname = 'mlp'\n[model.settings]\nhidden = [3]\n[model.setting]", 5, ["'model.setting'", "settings"]),
    ("methods = 'single'", 1, ["methods", "'single'"]),
    ("methods = []", 1, ["methods", "[]"]),
    ("methods = ['single',\n'single']", 2, ["methods", "'single' twice"]),
    ("methods = ['single',\n'packd']", 2, ["methods", "single, deep, packed", "did you mean packed"]),
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


def test_what_is_no_toml_is_told_with_its_line(tmp_path):
    with pytest.raises(ValueError, match=r"study.toml: .*line 2"):
        Spec.load(written(tmp_path, "seeds = 1\nepochs =\n"))
    with pytest.raises(ValueError, match="cannot be read"):
        Spec.load(tmp_path / "nowhere.toml")


def test_options_have_no_lines():
    with pytest.raises(SpecError, match=r"^training.epochs must be 1 or more, got 0$"):
        Spec.of(epochs=0)
    with pytest.raises(SpecError, match=r"^unknown key 'epoch'"):
        Spec.of(epoch=3)


# -- what it says ------------------------------------------------------------------------------------------


def test_methods_are_a_list_or_tables_and_one_may_come_twice(tmp_path):
    listed = Spec.load(written(tmp_path, "methods = ['single', 'packed']")).methods
    assert listed["packed"].settings == METHODS["packed"].settings
    text = "[methods.packed]\nalpha = 3\n[methods.packed_8]\nmethod = 'packed'\nmembers = 8"
    tables = Spec.load(written(tmp_path, text)).methods
    assert [(label, each.method) for label, each in tables.items()] == [("packed", "packed"), ("packed_8", "packed")]
    assert tables["packed"].settings == {"members": 4, "alpha": 3, "gamma": 1, "layers": None}
    assert tables["packed_8"].settings == {"members": 8, "alpha": 2, "gamma": 1, "layers": None}


def test_options_come_before_what_the_file_says(tmp_path):
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


def test_a_network_of_ones_own_is_a_file_and_a_function(tmp_path):
    (tmp_path / "net.py").write_text("")
    model = Spec.of(model=f"{tmp_path}/net.py:build").model
    assert (model.file, model.name) == (str(tmp_path / "net.py"), "build")


def test_only_digits_as_they_are_come_with_the_package():
    assert Spec.of(data="digits").data.embedded
    assert not Spec.of(data="digits", limit=100).data.embedded
    assert not Spec.of(data="owner/name").data.embedded


def test_defaults_depend_on_the_data_and_what_is_given_stays():
    images, table = Spec.of(epochs=3).resolved(DIGITS), Spec.of(epochs=3).resolved(TABLE)
    assert (images.model.name, table.model.name) == ("small_cnn", "mlp")
    assert images.training.epochs == table.training.epochs == 3
    assert set(images.methods) == set(METHODS)
    assert set(METHODS) - set(table.methods) == {"smooth", "smooth_dropout"}
    assert images.evaluation.shift and not table.evaluation.shift
    assert not Spec.of().resolved(SMALL_IMAGE).evaluation.shift
    assert not Spec.of().resolved(DIGITS, "regression").evaluation.shift
    assert Spec.of(shift="all").evaluation.shift == list(CORRUPTIONS)


def test_a_training_too_short_for_the_usual_warm_up_has_none():
    assert Spec.of().resolved((3, 32, 32)).training.warmup == 1
    assert Spec.of(epochs=1).resolved((3, 32, 32)).training.warmup == 0


def test_another_optimizer_brings_its_own_rate():
    assert Spec.of().resolved(DIGITS).training.optimizer == "adam"
    assert Spec.of(optimizer="sgd").resolved(DIGITS).training.lr == 0.05
    assert Spec.of(optimizer="sgd", lr=0.2).resolved(DIGITS).training.lr == 0.2
    assert Spec.of(optimizer="adamw").resolved((3, 32, 32)).training.lr == 1e-3


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
        Spec.load(written(tmp_path, text)).resolved(shape)


def test_the_choices_are_those_of_training_and_data():
    def choices(name: str) -> set[str]:
        return {each for part in get_args(TrainingSection.model_fields[name].annotation) for each in get_args(part)}

    assert choices("optimizer") == set(OPTIMIZERS)
    assert choices("precision") == set(PRECISIONS)
    assert choices("augment") == {"none", *AUGMENTATIONS}
