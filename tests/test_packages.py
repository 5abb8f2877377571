"""The packages of the library: imports go one way only, and no function hides a module."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import multitudes

PACKAGES = multitudes.PACKAGES
"""From the lowest to the highest: each may import from those before it, so the library never imports `lab`."""
LAB = ("data", "study", "report", "serve", "cli")
"""The packages of `lab`, in the same order."""

PACKAGE = Path(multitudes.__file__).parent
NAMES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(path: Path) -> Iterator[str]:
    """The library's modules that a file imports: anywhere in it, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "multitudes":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in NAMES else node.module


GRAPH = {name: set(imports(path)) - {name} for name, path in NAMES.items()}


def test_the_library_has_only_the_listed_packages() -> None:
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert files == {"__init__.py", "__main__.py", "py.typed"}
    assert packages == set(PACKAGES)


@pytest.mark.parametrize(
    ("package", "before"),
    [
        *((f"multitudes.{package}", PACKAGES[:place]) for place, package in enumerate(PACKAGES)),
        *((f"multitudes.lab.{part}", [f"lab.{one}" for one in LAB[:place]]) for place, part in enumerate(LAB)),
    ],
)
def test_a_package_imports_only_from_lower_packages(package: str, before: Sequence[str]) -> None:
    parent = package.rpartition(".")[0] if package.count(".") > 1 else "multitudes"
    allowed = tuple(f"multitudes.{each}." for each in before)
    upwards = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others
        if f"{name}.".startswith(f"{package}.") and f"{other}.".startswith(f"{parent}.") and other != "multitudes"
        if not f"{other}.".startswith((f"{package}.", *allowed))
    ]
    assert not upwards


def test_no_module_imports_itself_by_way_of_others() -> None:
    # The package itself imports every package, and is imported by none for anything but its namespaces.
    graph = {name: {other for other in others if other != "multitudes"} for name, others in GRAPH.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_describes_its_contents_and_imports(package: str) -> None:
    words = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text(encoding="utf-8")))
    assert words and "imports" in words.lower() and len(words.splitlines()) >= 3, f"{package}/__init__.py: {words}"


def test_no_function_or_class_hides_a_module() -> None:
    for module in pkgutil.walk_packages(multitudes.__path__, "multitudes."):
        importlib.import_module(module.name)
    hidden = [
        name
        for name in NAMES
        if "." in name
        and getattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2]) is not sys.modules[name]
    ]
    assert not hidden


def test_public_names_are_few() -> None:
    assert len(multitudes.__all__) <= 50
    assert all(hasattr(multitudes, name) for name in multitudes.__all__)


def test_public_names_are_those_that_type_checkers_see_and_are_found_when_asked_for() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    homes = {(f"multitudes.{home}", name) for home, names in multitudes.HOMES.items() for name in names.split()}
    packages = {("multitudes", name) for name in multitudes.__all__ if name in multitudes.PACKAGES}
    assert seen == homes | packages | {("multitudes.lab", "data")} and {name for _, name in seen} == set(
        multitudes.__all__
    )
    every: dict[str, object] = {}
    exec("from multitudes import *", every)
    assert set(multitudes.__all__) <= set(every) and set(multitudes.__all__) <= set(dir(multitudes))
    with pytest.raises(AttributeError, match="no attribute 'packd'"):
        multitudes.packd  # noqa: B018


LIGHT = """
import sys
from multitudes.lab.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print(ended.code)
heavy = {"torch", "torchmetrics", "numpy", "pandas", "plotly", "ray"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 0), (["--help"], 0), (["--version"], 0), (["methods"], 0), (["compare", "--help"], 0), (["compare"], 2),
        (["data", "prepare", "--help"], 0), (["compare", "digits", "--sedes", "3"], 2), (["predict"], 2),
        (["bench", "--shape", "x"], 2), (["export", "--help"], 0), (["serve", "--help"], 0),
        (["compare", "digits", "--methods", "pakced"], 2), (["compare", "nowhere.toml"], 2),
        (["train", "digits", "--method", "packed", "--set", "member=3"], 2),
    ],
)  # fmt: skip
def test_what_needs_no_torch_does_not_wait_for_it(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(code)
    assert not any(line.strip(" \t").rstrip() == "Error:" for line in done.stderr.splitlines()), done.stderr


def test_files_that_the_map_names_exist_and_the_way_of_an_image_names_each_once() -> None:
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = [PACKAGE.parents[1], PACKAGE]
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|html|md))`", page)
    assert len(named) > 40
    assert not [name for name in named if not any((place / name).is_file() for place in places)]
    section = page.partition("### One image, from command to report")[2].partition("\n## ")[0]
    walk = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|html))`", section)
    assert len(walk) > 20
    assert len(walk) == len(set(walk))
