"""pyproject.toml and constraints.txt name everything that the repository holds and needs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_folder_is_installed():
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {name: ROOT / mapped.get(name, name.replace(".", "/")) for name in packages}
    assert [name for name, folder in folders.items() if not (folder / "__init__.py").is_file()] == []
    found = {
        ".".join((name, *init.parent.relative_to(ROOT / folder).parts))
        for name, folder in mapped.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == packages


def test_every_dependency_is_pinned():
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *extras["train"], *extras["test"]]
    wanted = {re.match(r"[\w-]+", line).group() for line in lines} - {"shardc"}  # shardc[train] names the extra above
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    normal = lambda names: {name.lower().replace("_", "-") for name in names}  # noqa: E731
    assert normal(wanted) <= normal(pinned)
