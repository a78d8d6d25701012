"""The pages of the site: programs that run as printed, links, and tables made from the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from swath.collectors import Options
from swath.collectors.base import BaseCollector
from swath.data.replay import ReplayBuffer

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NEEDS = {"atari.md": ("ale_py", "cv2"), "mujoco.md": ("mujoco",), "logging.md": ("tensorboard",)}
CLUSTER = {"clusters.md", "distributed.md"}
NOT_RUN = "<!-- not run"
BLOCK = re.compile(rf"({NOT_RUN}[^\n]*-->\n+)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _pages(*folders: str) -> list[Path]:
    found = [DOCS / "getting-started.md"]
    for folder in folders:
        found += [page for page in sorted((DOCS / folder).glob("*.md")) if page.stem != "index"]
    return found


def _marked(pages):
    return [
        pytest.param(
            page, id=page.stem, marks=[pytest.mark.cluster] if page.name in CLUSTER else []
        )
        for page in pages
    ]


def _blocks(page: Path) -> list[str]:
    """The programs of a page, shortened; those with prompts are run as doctests."""
    codes = [code for not_run, code in BLOCK.findall(page.read_text()) if not not_run]
    codes = [code for code in codes if not code.startswith(">>>")]
    return [re.sub(r"total_frames=([\d_]+)", _fewer, code) for code in codes]


def _fewer(found: re.Match[str]) -> str:
    return f"total_frames={min(int(found[1]), 2_048)}"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Run programs as a script would, in a folder of their own, and leave nothing behind."""
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "__main__"}
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    environment = dict(os.environ)

    def run(code: str, page: Path) -> dict:
        exec(compile(code, str(page), "exec"), scope)
        return scope

    yield run
    for value in scope.values():
        if isinstance(value, BaseCollector):
            value.shutdown()
        elif isinstance(value, ReplayBuffer):
            value.close()
    scope.clear()  # a batch that is held keeps its memory
    torch.set_num_threads(threads)
    torch.set_rng_state(random)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", _marked(_pages("recipes", "coming-from")))
def test_programs_of_a_page_run_one_after_the_other(page, script):
    for name in NEEDS.get(page.name, ()):
        pytest.importorskip(name)
    blocks = _blocks(page)
    assert blocks, f"{page} has no program"
    for code in blocks:
        script(code, page)


GUIDE = [
    *(f"guide/{name}.md" for name in ("envs", "policies", "batches", "processes", "replay")),
    *(f"guide/{name}.md" for name in ("state", "failures", "datasets")),
    *("devices.md", "distributed.md"),
]


@pytest.mark.parametrize("page", _marked([DOCS / name for name in GUIDE]))
def test_a_guide_page_opens_with_a_program_that_runs(page, script):
    _run_first(page, script)


@pytest.mark.cluster
def test_the_page_about_ray_opens_with_a_program_that_runs(cluster, script):
    _run_first(DOCS / "ray.md", script)


def _run_first(page, script):
    text = page.read_text()
    first = BLOCK.search(text)
    assert first, f"{page} has no program"
    assert text[: first.start()].count("\n") <= 16, "it opens the page"
    if not first[2].startswith(">>>"):  # else it is run as a doctest
        script(re.sub(r"total_frames=([\d_]+)", _fewer, first[2]), page)


def test_links_of_pages_outside_of_the_site_lead_to_files():
    for page in (*ROOT.glob("*.md"), ROOT / "bench" / "README.md"):
        for link in re.findall(r"(?:\]\(|srcset=\"|src=\")([^)\"#]+)", page.read_text()):
            if "://" not in link and not link.startswith("mailto:"):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_page_has_a_card_on_the_home_page_or_on_that_of_its_section():
    home = (DOCS / "index.md").read_text()
    pages = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for name in re.findall(r"[\w/-]+\.md", pages):
        overview = (DOCS / name).parent / "index.md"
        near = overview.read_text() if overview.exists() else ""
        assert f"({name})" in home or f"({Path(name).name})" in near or name == "index.md", name


def _site():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_options_has_all_of_them_with_their_text_and_collectors():
    site = _site()
    table = site.options_table().splitlines()[2:]
    options = [field for field in fields(Options) if field.metadata.get("scopes") != ()]
    for row, field in zip(table, options, strict=True):
        name, text, _, which = re.split(r"(?<!\\) \| ", row.strip("| "), maxsplit=3)
        assert name == f"`{field.name}`"
        assert which in site.SCOPES.values(), f"{field.name} is for {which}"
        assert text.endswith("."), f"{field.name} has no sentence"
    page = site.on_page_markdown((DOCS / "reference" / "options.md").read_text())
    assert re.search(r"\n\| `frames_per_batch` \| .+ \| required \| all \|\n", page)


FOREIGN = {
    *("Namespace ALE not found", "mat1 and mat2 shapes cannot be multiplied", "expand", "nan"),
    *("Weights only load failed", "No space left on device", "frames_per_second", "torch.load"),
    *("InvalidAuthToken", "Failed to connect to Ray cluster"),
}
"""Words of the page on troubleshooting that are not those of a message of swath."""


def _messages() -> list[str]:
    """All texts in the sources; what is filled in stands as a NUL."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_on_the_page_about_troubleshooting_are_in_the_code():
    text, messages = (DOCS / "troubleshooting.md").read_text(), "\n\n".join(_messages())
    for heading in re.findall(r"^### (.+)$", text, re.MULTILINE):
        for quoted in set(re.findall(r"`([^`]+)`", heading)) - FOREIGN:
            parts = [re.escape(part.strip()) for part in quoted.split("…") if part.strip()]
            assert re.search(r"(?:(?!\n\n).)*?".join(parts), messages, re.DOTALL), quoted


def _referenced():
    """Each entry of the reference, with the programs of its page."""
    for page in sorted((DOCS / "reference").glob("*.md")):
        codes = " ".join(code for _, code in BLOCK.findall(page.read_text()))
        for part in re.split(r"^::: ", page.read_text(), flags=re.MULTILINE)[1:]:
            yield pytest.param(part, codes, id=part.split()[0])


@pytest.mark.parametrize(("part", "codes"), list(_referenced()))
def test_everything_in_the_reference_exists_and_has_an_example(part, codes):
    module, _, name = part.split()[0].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    members = re.search(r"members: \[(.+)\]", part)
    if inspect.isclass(found):
        assert members or "members: false" in part, f"{name}: what is shown of it is said"
    for member in filter(None, members[1].split(", ") if members else []):
        assert inspect.getdoc(getattr(found, member)), f"{name}.{member} has no text"
    if module != "swath.errors":
        assert "Example" in inspect.getdoc(found) or f"{name}(" in codes


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    for module, others in {
        "swath": {"__version__", "filter_warnings_subprocess"},
        "swath.collectors": {"Options", "MultiCollector", "RandomPolicy"},
        "swath.collectors.distributed": {"DEFAULT_SLURM_CONF", "DEFAULT_SLURM_CONF_MAIN"},
        "swath.collectors.utils": set(),
        "swath.data": {"Sampler"},
        "swath.testing": set(),
        "swath.errors": {"nearest"},
    }.items():
        for name in set(importlib.import_module(module).__all__) - others:
            assert re.search(rf"\b{name}\b", text), f"{module}.{name}"


def test_examples_with_prompts_are_shown_as_such():
    shown = _site().on_page_markdown("```python\n>>> 1\n1\n```\n\n```python\nx = 1\n```")
    assert shown == "```pycon\n>>> 1\n1\n```\n\n```python\nx = 1\n```"


def test_llms_txt_lists_every_page_with_its_first_sentence(tmp_path):
    site = _site()
    nav = [{"Home": "index.md"}, {"Guide": [{"Envs": "guide/envs.md"}, "faq.md"]}]
    config = {"nav": nav, "docs_dir": DOCS, "site_dir": tmp_path, "site_url": "https://x.y/"}
    site.on_post_build({**config, "site_name": "swath", "site_description": "It collects."})
    text = (tmp_path / "llms.txt").read_text()
    assert text.startswith("# swath\n\n> It collects.\n")
    assert "](https://x.y/guide/envs/): " in text
    assert "- [Questions](https://x.y/faq/): swath runs a policy in environments" in text
    assert "def make_env" not in text, "a page is described by its text, not by its program"
    assert "# Questions" in (tmp_path / "llms-full.txt").read_text()


def test_llms_full_txt_has_the_docstrings_of_the_reference():
    site = _site()
    whole = site.with_docstrings((DOCS / "reference" / "policies.md").read_text())
    assert ":::" not in whole
    assert "### RecurrentPolicy\n\nCarry a state" in whole


def test_tables_and_files_that_pages_name_are_put_in():
    site = _site()
    assert "| torch | 2." in site.on_page_markdown((DOCS / "versions.md").read_text())
    assert "# Security" in site.on_page_markdown((DOCS / "security.md").read_text())


def test_words_that_people_search_for_are_somewhere():
    text = " ".join(page.read_text().lower() for page in DOCS.rglob("*.md"))
    for word in (
        *("atari", "mujoco", "n-step", "evaluat", "video", "wandb", "tensorboard", "normalis"),
        *("checkpoint", "jupyter", "pettingzoo", "multi-agent", "minigrid", "action mask"),
        *("cleanrl", "troubleshoot", "windows", "macos", "frame stack"),
    ):
        assert word in text, word
