#!/usr/bin/env python3
"""What the study says: the presets it leads to, README's table, and charts.

    python benchmarks/study_report.py                  # the choices and the table of the newest study in benchmarks/results
    python benchmarks/study_report.py --charts         # also writes charts beside it (needs matplotlib)
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def newest() -> Path:
    """The latest study in the results folder; names are <machine>-<date>-study.json."""
    return max(RESULTS.glob("*-study.json"), key=lambda p: p.stem.split("-", 1)[1])


class Study:
    """Rows of a study by (factor, value)."""

    def __init__(self, path: Path):
        self.facts = json.loads(path.read_text())
        self.rows = {(r["factor"], r["value"]): r for r in self.facts["rows"]}

    def psnr(self, factor: str, value: str) -> float:
        return self.rows[factor, value]["psnr_db"]

    def of(self, factor: str) -> dict[str, dict]:
        return {value: r for (f, value), r in self.rows.items() if f == factor}


def choices(study: Study) -> dict[str, object]:
    """The rules that chose the presets, applied to a study. Work is attention work relative to dense; the paper is its own preset.

    tail: the cheapest whose PSNR at density 0.10 is within 1 dB of the best. granularity: cell32 where it costs under 1 dB at the same
    density, else token. grouping: cells, unless pddp is better by more than the paired seed spread. residual auto stays if it loses under
    0.5 dB against bf16. dense layers: none, unless they beat spending at least as much work on density. auto: the fewest anchors with which
    density 0.10 is at least as close to dense as the paper at 0.25. speed: the least work within 1.5 dB of the paper. quality: the most
    anchors that were measured, at density 0.15, if that takes no more work than the paper.
    """
    paper = study.rows["preset", "paper"]
    block = study.of("block")
    tails = {t: block[f"0.10 tail {t or 'none'} token"] for t in (0, 128, 64, 32)}
    best = max(r["psnr_db"] for r in tails.values())
    tail = min((t for t, r in tails.items() if r["psnr_db"] >= best - 1), key=lambda t: tails[t]["attention_work"])
    cell32_cost = tails[tail]["psnr_db"] - block[f"0.10 tail {tail} cell32"]["psnr_db"]
    pddp = study.rows["grouping", "pddp"]
    residual = study.rows["residual", "auto"]
    layers = study.rows["dense layers", "0, -1"]
    affordable = [r for r in block.values() if r["attention_work"] <= layers["attention_work"]]
    denser = max(r["against_base_db"] for r in affordable) > layers["against_base_db"]
    by_anchors = {1: study.psnr("anchors", "5"), 2: study.psnr("anchors", "5, 14"), 3: study.psnr("anchors", "5, 11, 18"),
                  4: study.psnr("more anchors", "0.10 anchors 5, 9, 14, 20")}  # fmt: skip
    close = {value: r for value, r in study.of("speed").items() if r["psnr_db"] >= paper["psnr_db"] - 1.5}
    quality = study.rows["more anchors", "0.15 anchors 5, 9, 14, 20"]
    return {
        "tail": tail,
        "granularity": "cell32" if cell32_cost < 1 else "token",
        "grouping": "pddp" if pddp["against_base_db"] > pddp["against_base_spread_db"] else "cells",
        "residual": "auto" if residual["against_base_db"] > -0.5 else "bf16",
        "dense_layers": () if denser else (0, -1),
        "auto_anchors": min(n for n, db in by_anchors.items() if db >= paper["psnr_db"]),
        "speed": min(close, key=lambda value: close[value]["attention_work"]),
        "quality_anchors": 4 if quality["attention_work"] <= paper["attention_work"] else 3,
    }


TABLE = (  # factor, value, words
    ("floor", "dense, unfused attention", "dense, unfused arithmetic (the floor)"),
    ("preset", "quality", "**quality**: 0.15, tail 64, four anchors, last step dense"),
    ("preset", "auto", "**auto**: 0.10, tail 64, three anchors"),
    ("speed", "0.10 tail 64 token, anchors 2, 7, 14", "**speed**: 0.10, tail 64, 10 % dense start, three anchors"),
    ("preset", "paper", "**paper**: 0.25, PDDP, no tail, two anchors, layer 0 dense"),
    ("base", "base", "base case: 0.10, tail 64, cells, token, two anchors"),
    ("block", "0.10 tail none token", "- without tail"),
    ("block", "0.10 tail 32 token", "- tail 32"),
    ("block", "0.10 tail 64 cell32", "- cells of 32 instead of tokens"),
    ("grouping", "pddp", "- PDDP groups"),
    ("grouping", "raster", "- groups and cells in raster order"),
    ("residual", "off", "- without residual"),
    ("residual", "rank-8", "- residual rank 8 (a twelfth of the memory)"),
    ("residual", "int4", "- residual int4 (a third)"),
    ("anchors", "5", "- one anchor"),
    ("more anchors", "0.10 anchors 5, 9, 14, 20", "- four anchors"),
    ("block", "0.05 tail 64 token", "- density 0.05"),
    ("block", "0.25 tail 64 token", "- density 0.25"),
    ("paper", "0.25", "paper without its dense layer"),
    ("vanilla block-sparse", "0.25", "vanilla block-sparse 0.25 (same warm-up)"),
)


def table(study: Study) -> str:
    """README's table in Markdown."""
    lines = ["| configuration | PSNR dB | against base, same seeds | SSIM | attention work | seeds |", "|---|---|---|---|---|---|"]
    for factor, value, words in TABLE:
        r = study.rows[factor, value]
        paired = "" if factor in ("base", "floor") else f"{r['against_base_db']:+.1f} ± {r['against_base_spread_db']:.1f}"
        work = f"{r['attention_work']:.2f}" if r.get("attention_work") else ("1" if factor == "floor" else "")
        lines.append(f"| {words} | {r['psnr_db']:.1f} | {paired} | {r['ssim']:.3f} | {work} | {r['seeds']} |")
    return "\n".join(lines)


def charts(study: Study, path: Path):
    """Two pictures beside the JSON: closeness over attention work (seeds 1 to 3, which all cases have), and the one-factor changes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def db(row: dict) -> float:
        return sum(row["psnr_by_seed"][:3]) / 3

    figure, axes = plt.subplots(figsize=(9, 5.2))
    densities = ("0.05", "0.10", "0.15", "0.20", "0.25")
    lines = [("paper (PDDP, no tail, two anchors)", [study.rows["paper", d] for d in densities], "#7c3aed", "-")]
    for tail, colour in (("none", "#94a3b8"), ("128", "#f59e0b"), ("64", "#0f9d6b"), ("32", "#2a7fff")):
        lines.append((f"tail {tail}", [study.rows["block", f"{d} tail {tail} token"] for d in densities], colour, "-"))
        lines.append((f"tail {tail}, cell32", [study.rows["block", f"{d} tail {tail} cell32"] for d in densities], colour, ":"))
    for label, rows, colour, style in lines:
        axes.plot([r["attention_work"] for r in rows], [db(r) for r in rows], style, marker="o", ms=4, color=colour, label=label)
    for name, where in (("auto", ("preset", "auto")), ("speed", ("speed", "0.10 tail 64 token, anchors 2, 7, 14")),
                        ("quality", ("preset", "quality")), ("paper preset", ("preset", "paper"))):  # fmt: skip
        r = study.rows[where]
        axes.plot(r["attention_work"], db(r), "*", ms=13, color="#d6336c")
        axes.annotate(name, (r["attention_work"], db(r)), xytext=(7, 4), textcoords="offset points")
    axes.axhline(db(study.rows["vanilla block-sparse", "0.25"]), color="#c2410c", lw=1, ls="--", label="vanilla block-sparse 0.25")
    axes.set_xlabel("attention work of the whole run, dense = 1 (lines: densities 0.05 to 0.25)")
    axes.set_ylabel("PSNR against dense, dB, seeds 1 to 3")
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path.with_name(path.stem + "-work.png"), dpi=110)

    factors = ("grouping", "anchors", "residual", "dense layers", "dense end", "warm-up")
    rows = [r for r in study.facts["rows"] if r["factor"] in factors and r["against_base_db"] is not None and "paper" not in r["value"]]
    figure, axes = plt.subplots(figsize=(9, 0.27 * len(rows) + 1))
    axes.barh(range(len(rows)), [r["against_base_db"] for r in rows], xerr=[r["against_base_spread_db"] or 0 for r in rows],
              color=["#0f9d6b" if r["against_base_db"] > 0 else "#c2410c" for r in rows], ecolor="#94a3b8")  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"{r['factor']}: {r['value']}" for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("PSNR against the base case, dB, paired by seed (lines: spread over seeds)")
    figure.tight_layout()
    figure.savefig(path.with_name(path.stem + "-factors.png"), dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=newest())
    parser.add_argument("--charts", action="store_true")
    args = parser.parse_args()
    study = Study(args.study)
    if args.charts:
        charts(study, args.study)
    print(json.dumps(choices(study), indent=1))
    print(table(study))


if __name__ == "__main__":
    main()
