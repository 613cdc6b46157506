"""README's kernel numbers are those of the committed results, and these hold what we say of them."""
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def report(script):
    return script("benchmarks/kernel_report.py")


def test_readme_holds_the_newest_results(report):
    readme = (ROOT / "README.md").read_text()
    assert report.BEGIN in readme and report.END in readme
    assert report.with_table(readme) == readme, "run python benchmarks/kernel_report.py --write"


@pytest.mark.parametrize("what", ["attention", "selection", "grouping", "wan-step"])
def test_results_say_where_they_are_from(report, what):
    results = report.newest(what)
    assert results["gpu"] and results["versions"]["torch"] and results["versions"]["triton"]
    assert results["command"].startswith("python ") and results["commit"] and results["rows"]


def test_attention_rows_are_consistent(report):
    for r in report.newest("attention")["rows"]:
        assert r["efficiency"] == pytest.approx(r["executed"] * r["fa3_ms"] / r["ms"], rel=1e-6)
        if "density" in r:
            allowed = {"half": 6e-3, "int8": 3e-2, "fp8": 0.25}[r["precision"]]
            assert r["realised_density"] >= r["density"] - 1e-3 and r["error"] < allowed
