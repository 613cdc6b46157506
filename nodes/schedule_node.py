"""Node "MC-Sparse Schedule": five text fields to a Schedule."""
from __future__ import annotations

from comfy_api.latest import io

from ..mcsparse_core.schedule_text import parse_schedule
from .schema import Schedule, declare, schema


class MCSparseSchedule(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "MCSparseSchedule",
            "MC-Sparse Schedule",
            description="Which steps run dense, which ones renew the cached selection (anchors) and which reuse it. Connect it to "
            "MC-Sparse Patch Model. Shares are of the full noise range, also in a sampler that runs only a part of it.",
            search_aliases=["sparse attention schedule", "anchor steps", "dense steps"],
            inputs=[
                declare(
                    io.String.Input, "dense_start", default="20%",
                    tooltip="Dense steps at the start, where the layout of the picture forms: whole steps (6) or a share of the noise "
                    "range (20% or 0.2). More is closer to the original and slower. The last of them is the first anchor, at no extra "
                    "cost. 0 anchors at the first step.",
                ),
                declare(
                    io.String.Input, "anchors", default="first",
                    tooltip="Steps that renew what the others reuse: 'first' (one anchor), 'every 8', or 0-based steps like '9, 25'. "
                    "Each costs more than a dense step; more anchors follow the picture more closely.",
                ),
                declare(
                    io.String.Input, "dense_end", default="0",
                    tooltip="Dense steps at the end, for the finest detail: whole steps or a share. Each costs a full dense step.",
                ),
                declare(
                    io.String.Input, "dense_layers", default="",
                    tooltip="Blocks that stay dense, like '0, 1, 38-40, -1' (-1 is the last). They cost full time and need no cache.",
                ),
                declare(
                    io.String.Input, "density_curve", default="",
                    tooltip="Density by progress, read at anchors, like '0:0.40 0.5:0.25 1:0.15'. It replaces the density of the patch "
                    "node. Lower is faster and less exact. Empty: the same density throughout.",
                ),
            ],
            outputs=[Schedule.Output(display_name="schedule")],
        )  # fmt: skip

    @classmethod
    def execute(cls, dense_start, anchors, dense_end, dense_layers, density_curve):
        return io.NodeOutput(parse_schedule(dense_start, anchors, dense_end, dense_layers, density_curve))
