"""How many keys the selection with the log-sum-exp of the step before shares with the exact one, on the demo's trained model. Run by path.

Runs anywhere: on the CPU in about two minutes. At each anchor of the `auto` preset (steps 5, 10, 17 of 30) every layer's keys are selected
twice; recall is the share of the exact selection's keys that the lagged one has too, retained the attention mass that each holds.
"""
from __future__ import annotations

import argparse

import harness
import torch

from mc_sparse.demo import model as demo
from mc_sparse.demo import prompts
from mc_sparse.kernels import cell_order, dense_attention, group_queries, select_keys, unpack_bits
from mc_sparse.mcsparse_core.diffusers_host import self_attention

STEPS, ANCHORS, DENSITIES = 30, (5, 10, 17), (0.10, 0.15)


class Recorder:
    """The attention function of `self_attention`: dense, and at anchors it selects with both log-sum-exps."""

    def __init__(self, device: torch.device):
        self.cells = cell_order(demo.token_grid()).to(device)
        self.calls, self.before, self.rows = 0, {}, []

    def __call__(self, block: int, q, k, v, mask):
        step = self.calls // demo.CONFIG["num_layers"]
        self.calls += 1
        output, lse = dense_attention(q, k, v)
        if step in ANCHORS:
            groups = group_queries(q, method="cells", cells=self.cells)
            for density in DENSITIES:
                exact, lagged = (select_keys(q, k, x, groups, density=density, cells=self.cells) for x in (lse, self.before[block]))
                chosen, also = (unpack_bits(s.bits, len(self.cells)) for s in (exact, lagged))
                self.rows.append({
                    "step": step, "block": block, "density": density, "recall": ((chosen & also).sum() / chosen.sum()).item(),
                    "lse_change": (lse - self.before[block]).abs().mean().item(), "retained_exact": exact.retained.mean().item(),
                })  # fmt: skip
        self.before[block] = lse
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, recorder = demo.load().to(device), Recorder(device)
    with torch.inference_mode(), self_attention(network, recorder):
        demo.sample(network, prompts.embedding(prompts.names()[2]).to(device), steps=STEPS, seed=2)
    for density in DENSITIES:
        recalls = [r["recall"] for r in recorder.rows if r["density"] == density]
        print(f"density {density}: recall {sum(recalls) / len(recalls):.4f}, least {min(recalls):.4f} of {len(recalls)} layers and steps")
    if args.out:
        harness.write(args.out, recorder.rows)


if __name__ == "__main__":
    main()
