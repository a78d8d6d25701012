"""The chart and the tables of speed are what the bench measured, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench import chart

ROOT = Path(__file__).parent.parent


def _ran(*speeds):
    samples = [{"frames": round(speed), "seconds": 1.0} for speed in speeds]
    return {"samples": samples, "frames_per_second": sorted(speeds)[len(speeds) // 2]}


def _results():
    """What `make bench` writes, as far as the chart reads it."""
    work = {
        "title": "CartPole-v1 x 8",
        "placement": "inline",
        "contestants": {
            "swath": _ran(1000, 8000, 4000),
            "TorchRL": _ran(100, 200, 400),
            "hand loop": _ran(2000, 2000, 2000),
            "absent": {"samples": [], "reason": "not here"},
        },
    }
    return {
        "machine": {"cpu": "a CPU", "cores": 3, "torch": "9.9"},
        "plan": {"rounds": 3},
        "works": {"cartpole-8": work},
    }


@pytest.fixture
def root(tmp_path):
    """A copy of the pages that are written."""
    for name in ("README.md", "docs/benchmarks.md", "docs/figures/speed.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_pages_and_charts_are_those_of_the_figures(root):
    assert chart.main(["--root", str(root)]) == 0
    for path in root.rglob("*"):
        if path.is_file():
            assert path.read_text() == (ROOT / path.relative_to(root)).read_text(), path.name


def test_figures_of_a_run_reach_the_chart_and_both_pages(root, tmp_path):
    results = tmp_path / "results.json"
    results.write_text(json.dumps(_results()))
    assert chart.main([str(results), "--root", str(root)]) == 0

    figures = json.loads((root / chart.FIGURES).read_text())
    assert figures["works"]["cartpole-8"]["speeds"] == {
        "swath": 4000,
        "TorchRL": 200,
        "hand loop": 2000,
    }
    # Within the rounds: 10, 40 and 10 times TorchRL; the ratio of the medians would be 20.
    assert figures["works"]["cartpole-8"]["ratios"] == {"TorchRL": 10.0, "hand loop": 2.0}
    assert figures["works"]["cartpole-1"], "what was not measured keeps its figures"
    assert (
        "| 8 CartPoles, one process | 4,000 | 200 | **10.0x** | 2.00x |"
        in (root / "README.md").read_text()
    )
    assert "| CartPole-v1 x 8 | 4,000 |" in (root / "docs/benchmarks.md").read_text()
    assert ">4,000</text>" in (root / "docs/figures/speed-dark.svg").read_text()
    assert "3 cores of a CPU, torch 9.9" in (root / "docs/figures/speed-light.svg").read_text()


def test_bars_are_as_long_as_speeds_and_ours_alone_is_in_colour():
    figures = chart.taken_over(_results(), {})
    for theme in (chart.LIGHT, chart.DARK):
        svg = ElementTree.fromstring(chart.drawn(figures, theme))
        bars = [node.attrib for node in svg if node.tag.endswith("rect")]
        widths = [float(bar["width"]) for bar in bars]
        assert [width / widths[0] for width in widths] == pytest.approx([1, 0.5, 0.05], rel=1e-3)
        assert [bar["fill"] for bar in bars] == [theme.ours, theme.others, theme.others]


def test_a_page_without_the_comments_is_refused(root):
    (root / "README.md").write_text("no table here\n")
    with pytest.raises(SystemExit, match="are missing"):
        chart.main(["--root", str(root)])


def test_the_readme_is_short_and_has_its_two_commands():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 130
    assert "\nmake run " in text
    assert "\nmake test " in text
    rows = re.search(r"written by python -m bench.chart -->(.*?)<!--", text, re.DOTALL).group(1)
    assert rows.strip().count("\n") <= 9, "two lines of head and at most eight rows"
