"""The package as others get it: metadata, the page on PyPI, workflows, files of the project."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
SOURCE = re.search(r'^Source = "(.*)"$', PYPROJECT, re.MULTILINE)[1]


def load(path):
    """Return a Python file of the project, which no package has, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def workflow(path):
    loaded = yaml.safe_load(path.read_text())
    return {**loaded, "on": loaded.pop(True)}  # YAML 1.1 reads a bare `on` as true


def steps():
    for path in WORKFLOWS:
        for name, job in workflow(path)["jobs"].items():
            for step in job["steps"]:
                yield path.name, name, step


# -- the page on PyPI -----------------------------------------------------------------------------


@pytest.fixture
def absolute_links(monkeypatch):
    """Return what makes the links of a README absolute; what builds packages need not be here."""
    stand_in = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", stand_in)
    return load(ROOT / "hatch_build.py").absolute_links


def test_links_of_the_readme_are_absolute_where_pypi_shows_it(absolute_links):
    shown = absolute_links((ROOT / "README.md").read_text(), SOURCE)
    links = re.findall(r"\]\(([^)]*)\)|(?:src|srcset|href)=\"([^\"]*)\"", shown)
    found = [one or other for one, other in links]
    assert len(found) > 10
    raw = SOURCE.replace("https://github.com", "https://raw.githubusercontent.com")
    for link in found:
        assert link.startswith(("https://", "#")), link
        for start in (f"{SOURCE}/blob/main/", f"{raw}/main/"):
            if link.startswith(start):
                assert (ROOT / link.removeprefix(start).partition("#")[0]).exists(), link
        if link.endswith((".png", ".svg")):
            assert link.startswith(f"{raw}/main/")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](docs/a.md#b)", "[a](S/blob/main/docs/a.md#b)"),
        ("![a](docs/a.png)", "![a](R/main/docs/a.png)"),
        ('<img src="docs/a.svg">', '<img src="R/main/docs/a.svg">'),
        ("[a](#b) [c](https://d.e)", "[a](#b) [c](https://d.e)"),
    ],
)
def test_links_become_absolute(text, shown, absolute_links):
    source, raw = "https://github.com/a/b", "https://raw.githubusercontent.com/a/b"
    expected = shown.replace("(S", f"({source}").replace("(R", f"({raw}").replace('"R', f'"{raw}')
    assert absolute_links(text, source) == expected


# -- what the project says of itself --------------------------------------------------------------


def test_all_addresses_of_the_project_are_those_of_the_package():
    owner = SOURCE.removeprefix("https://github.com/").partition("/")[0]
    pages = f"https://{owner}.github.io/swath/"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in (".md", ".yml", ".toml", ".cff") and path.is_file():
            for link in re.findall(
                r"https://[\w.]*github[\w.]*/[\w./-]*swath[\w./-]*", path.read_text()
            ):
                raw = SOURCE.replace("github.com", "raw.githubusercontent.com")
                assert link.startswith((SOURCE, pages, raw)), (name, link)


def test_the_version_is_the_same_wherever_it_stands():
    version = re.search(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)[1]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version
    assert f"## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_and_the_classifiers_name_the_same_pythons():
    named = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    lowest = re.search(r'requires-python = ">=(.*)"', PYPROJECT)[1]
    assert named[0] == lowest
    for os, jobs in (("linux", "linux"), ("others", "elsewhere")):
        job = workflow(ROOT / ".github/workflows/tests.yml")["jobs"][jobs]
        assert job["strategy"]["matrix"]["python"] == named, os


# -- workflows ------------------------------------------------------------------------------------


def test_workflows_are_made_of_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = set()
    for file, job, step in steps():
        assert ("uses" in step) != ("run" in step), (file, job, step)
        if "run" in step:
            command, target, *_ = step["run"].split()
            assert command == "make", (file, step["run"])
            assert target in targets, (file, target)
            ran.add(target)
        else:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", step["uses"]), step["uses"]
    assert ran == {"check", "test", "test-in-process", "docs", "dist"}


def test_workflows_have_what_they_refer_to():
    for path in WORKFLOWS:
        loaded = workflow(path)
        assert loaded["name"] == path.stem
        assert loaded["permissions"], "what a workflow may do is said"
        for job in loaded["jobs"].values():
            assert job["runs-on"]
            assert set(job.get("needs", "").split()) <= set(loaded["jobs"])
            matrix = set(job.get("strategy", {}).get("matrix", {}))
            assert set(re.findall(r"matrix\.(\w+)", str(job))) == matrix
        assert path.read_text().count("${{") == path.read_text().count("}}")


def test_a_release_is_published_by_trust_in_the_workflow_and_not_by_a_secret():
    release = workflow(ROOT / ".github/workflows/release.yml")
    assert release["on"] == {"push": {"tags": ["v*"]}}
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_forms_and_hooks_can_be_read():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or {"name", "description", "body"} <= set(form)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "mypy", "lint-imports"}


# -- scripts --------------------------------------------------------------------------------------


def test_fragments_become_a_part_of_the_changelog(tmp_path, monkeypatch):
    script = load(ROOT / "scripts" / "changelog.py")
    (tmp_path / "changes").mkdir()
    for name, text in {
        "README.md": "how",
        "b.added.md": "- A thing\n  is there.\n",
        "a.added.md": "Another.\n",
        "c.fixed.md": "- It works.\n- So does\n  that.\n",
    }.items():
        (tmp_path / "changes" / name).write_text(text)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.1.0] - 2026-01-01\n\nOld.\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    script.main("0.2.0")
    text = (tmp_path / "CHANGELOG.md").read_text()
    assert re.sub(r"\d{4}-\d\d-\d\d", "DATE", text) == (
        "# Changelog\n\n## [0.2.0] - DATE\n\n### Added\n\n- Another.\n- A thing is there.\n\n"
        "### Fixed\n\n- It works.\n- So does that.\n\n## [0.1.0] - DATE\n\nOld.\n"
    )
    assert [path.name for path in (tmp_path / "changes").iterdir()] == ["README.md"]


def test_the_fragments_that_are_there_are_right_and_a_wrong_one_is_refused(tmp_path):
    script = load(ROOT / "scripts" / "changelog.py")
    script.collected(ROOT / "changes")
    (tmp_path / "a.new.md").write_text("text")
    with pytest.raises(ValueError, match=r"a\.new\.md: name it"):
        script.collected(tmp_path)


def test_the_lowest_versions_are_those_that_are_declared():
    script = load(ROOT / "scripts" / "matrix.py")
    assert script.lowest("torch>=2.8") == "torch==2.8"
    assert script.lowest("pydantic>=2.5,<3") == "pydantic==2.5"
    assert script.lowest('minari>=0.5; python_version >= "3.11"') == (
        'minari==0.5; python_version >= "3.11"'
    )
    if sys.version_info >= (3, 11):
        project = script.declared()
        assert all(">=" in one for one in script.requirements(project))
        assert project["requires-python"].startswith(">=")
