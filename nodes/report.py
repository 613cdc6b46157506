"""Node "MC-Sparse Stats": what the runs of a patched MODEL did, as text, JSON and a chart."""
from __future__ import annotations

import json

import torch
from comfy_api.latest import io, ui

from ..mcsparse_core.stats import report_text
from . import host
from .chart import blank, chart, stacked
from .schema import declare, schema


def select(reports: list[dict], prompt: str | None) -> tuple[list[dict], str]:
    """Reports of this prompt, oldest first, and a heading; without one the last report, and the heading says so."""
    if not reports:
        return [], "No run of this model has ended yet. Connect 'any value' to the sampler's output, so that this node runs after it."
    own = [r for r in reports if r.get("prompt_id") == prompt]
    if own:
        return own, f"{len(own)} sampling run{'s' if len(own) > 1 else ''} of this model in this prompt"
    return reports[-1:], "No run of this model in this prompt (its sampler's result was cached); the last one, from an earlier prompt:"


def text_of(report: dict) -> str:
    """A report to read, with what ComfyUI adds to it."""
    return f"{report_text(report)}\n  model {report.get('model')}, dense calls by {report.get('dense_path') or 'nobody'}"


class MCSparseStats(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "MCSparseStats",
            "MC-Sparse Stats",
            description="Shows what MC-Sparse did in the sampling runs of this model since the prompt began: attention calls by kind, why "
            "calls stayed dense, time and memory. Connect the sampler's output to 'any value', so that it runs after it.",
            search_aliases=["mc sparse report", "mc sparse statistics"],
            is_output_node=True,
            inputs=[
                declare(io.Model.Input, "model", tooltip="The patched model that the sampler used."),
                declare(
                    io.AnyType.Input, "value", display_name="any value",
                    tooltip="Passed through unchanged. Take it from the sampler, so that this node runs after it.",
                ),
            ],
            outputs=[
                io.AnyType.Output(display_name="value"),
                io.String.Output(display_name="report"),
                io.String.Output(display_name="json"),
                io.Image.Output(display_name="chart"),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, model, value=None):
        holder = host.reports_of(model)
        if holder is None:
            runs, heading = [], "MC-Sparse never patched this model. Connect the output of MC-Sparse Patch Model, as the sampler does."
        else:
            runs, heading = select(holder.latest(), host.prompt_id())
        text = "\n".join([heading, *map(text_of, runs)])
        picture = stacked([chart(r) for r in runs]) if runs else blank(heading)
        image = torch.from_numpy(picture).float().div(255).unsqueeze(0)
        shown = ui.PreviewImage(image, cls=cls).as_dict() | ui.PreviewText(text).as_dict()
        return io.NodeOutput(value, text, json.dumps(runs, indent=1), image, ui=shown)
