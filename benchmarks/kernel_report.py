#!/usr/bin/env python3
"""README's table of the GPU kernels, from a machine's newest results in benchmarks/results, named <machine>-<date>-<what>.json.

    python benchmarks/kernel_report.py                        # print it
    python benchmarks/kernel_report.py --machine rtx-4090     # of another machine
    python benchmarks/kernel_report.py --write                # put it into README.md between its marks
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = "h200"  # README's
NOTES = {"fa3": " dense", "fa4 pages of 1": " (without gather, scatter and tail)"}  # to names of others
BEGIN, END = "<!-- kernels: begin (benchmarks/kernel_report.py) -->\n", "<!-- kernels: end -->\n"


def newest(what: str, machine: str = MACHINE) -> dict:
    """The machine's latest results."""
    dated = "[0-9]" * 4 + "-[0-9][0-9]-[0-9][0-9]"
    found = sorted(RESULTS.glob(f"{machine}-{dated}-{what}.json"))
    if not found:
        raise SystemExit(f"no results of {machine}: {RESULTS.name}/{machine}-<date>-{what}.json is missing; README says what makes it")
    return json.loads(found[-1].read_text())


def dense_ms(row: dict) -> float:
    """Of FlashAttention-3, or of the fastest dense attention where that is missing."""
    return next(value for name, value in row.items() if name.endswith("_ms"))


def size(row: dict) -> str:
    return f"{row['S']} x {row['H']} x {row['D']}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2g} %"


def shown(row: dict) -> bool:
    """Whether README shows a row of the attention: at the largest size others' and ours with a tail, elsewhere density 0.15."""
    largest = row["S"] == 75600 and row["dtype"] == "bfloat16"
    if "density" not in row:
        low = row["backend"].startswith(("sol_attn", "comfy_kitchen", "sageattention"))
        return largest and (row["selection"] == "random" or low)
    if row["precision"] != "half":
        return largest and (row["selection"] == "random" or row["residual"] == "rank-8")
    if row["selection"] == "demo":
        return row["residual"] == "rank-8"
    return row["selection"] != "random" or (row["tail"] > 0 and (largest or row["density"] == 0.15))


def attention_lines(rows: list[dict]) -> list[str]:
    """error: of the arithmetic, against float32 with the same selection; from dense: of what is left out too, where data are not random."""
    columns = "attention (ours: a whole reuse call)", "tokens x heads x dim", "density + tail", "ms", "dense (FA3) ms", "efficiency"
    lines = [f"| {' | '.join((*columns, 'error', 'from dense, without a residual'))} |", "|---" * 8 + "|"]
    for r in filter(shown, rows):
        if "density" in r:
            computed = r["dtype"] if r["precision"] == "half" else r["precision"]
            name = f"{r['backend']}, {computed}, {r['selection']}, {r['grouping']} groups, {r['granularity']}, residual {r['residual']}"
            keys = f"{r['density']:.2f}" + (f" + {r['executed'] - r['realised_density']:.3f}" if r["tail"] else "")
        else:
            name, keys = r["backend"] + NOTES.get(r["backend"].split(" 0.")[0], ""), f"{r['executed']:.3f}"
            name += f", {r['selection']}" * (r["executed"] < 1)
        if "commit" in r:  # not of this run
            name += f" (commit {r['commit']})"
        error = percent(r["error"] if "density" in r or r["executed"] == 1 else None)
        from_dense = percent(r["dense_error"] if r["selection"] != "random" else None)
        speed = f"{r['ms']:.2f} | {dense_ms(r):.1f} | {r['efficiency']:.2f}"
        lines.append(f"| {name} | {size(r)} | {keys} | {speed} | {error} | {from_dense} |")
    return lines


def selection_lines(rows: list[dict]) -> list[str]:
    """Rows on clustered data, by tokens at most sizes; those on random data differ by the noise of their times."""
    lines = ["| selection | tokens x heads x dim | density | ms | of dense (FA3) | extra memory GB | agreement |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in rows:
        if r["kind"] != "clustered" or (r["S"] != 75600 and r.get("granularity") == "cell32"):
            continue
        name = f"{r['backend']}, {r['mode']}" + (f", {r['granularity']}" if "granularity" in r else "")
        density = f"{r['density']:.2f}" if "density" in r else ""
        memory = f"{r['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in r else ""
        share = r.get("agreement", r.get("recall"))
        agreement = "" if share is None else f"{share:.4f}"
        lines.append(f"| {name} | {size(r)} | {density} | {r['ms']:.1f} | {r['ratio']:.2f} | {memory} | {agreement} |")
    return lines


def grouping_lines(rows: list[dict]) -> list[str]:
    lines = ["| grouping | tokens x heads x dim | ms | flash-kmeans, 50 iterations | 2 iterations | variance against the reference |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for r in rows:
        means = [("" if r.get(k) is None else f"{r[k]:.1f}") for k in ("kmeans50_ms", "kmeans2_ms")]
        lines.append(f"| {r['backend']} | {size(r)} | {r['ms']:.2f} | {means[0]} | {means[1]} | {r['variance_ratio']:.4f} |")
    return lines


def wan_lines(rows: list[dict]) -> list[str]:
    """Seconds of a step; the run's are sums of its steps."""
    lines = ["| model step | preset | plain s | dense s | anchor s | reuse s | steps dense / anchor / reuse | run against plain |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in rows:
        name = f"{r['model']}, {r['layers']} of {r['of_layers']} layers, {r['tokens']} tokens"
        steps = " | ".join(f"{r[kind]:.2f}" for kind in ("plain", "dense", "anchor", "reuse"))
        counts = " / ".join(str(r["run_steps"][kind]) for kind in ("dense", "anchor", "reuse"))
        lines.append(f"| {name} | {r['preset']} | {steps} | {counts} | {r['run_seconds_plain'] / r['run_seconds']:.2f}x |")
    return lines


def table(machine: str = MACHINE) -> str:
    makers = {"attention": attention_lines, "selection": selection_lines, "grouping": grouping_lines, "wan-step": wan_lines}
    parts = {what: newest(what, machine) for what in makers}
    facts = parts["attention"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    made = "; ".join(f"{what} {part['date']}, commit {part['commit']}" for what, part in parts.items())
    lines = [f"{facts['gpu']}; {versions}. {made}.", ""]
    for what, make in makers.items():
        lines += [*make(parts[what]["rows"]), ""]
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """README's text with today's table between the marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=MACHINE, help=f"whose results are printed (default {MACHINE})")
    parser.add_argument("--write", action="store_true", help=f"put the table of {MACHINE} into README.md")
    args = parser.parse_args()
    if args.write:
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text()))
    else:
        print(table(args.machine))


if __name__ == "__main__":
    main()
