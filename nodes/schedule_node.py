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
            description="Changes a preset's schedule: which steps run dense, which ones renew the cached selection (anchors) and which "
            "reuse it. Connect it to MC-Sparse Patch Model. Shares are of the full noise range, also in a sampler that runs a part of it.",
            search_aliases=["anchor steps", "dense steps", "mc sparse schedule"],
            inputs=[
                declare(
                    io.String.Input, "dense_start", default="auto",
                    tooltip="Dense steps at the start, where the layout of the picture forms: whole steps (6) or a share of the noise "
                    "range (20% or 0.2). More is closer to the original and slower. The last of them is the first anchor, at no extra "
                    "cost. 0 anchors at the first step. auto: the preset's own.",
                ),
                declare(
                    io.String.Input, "anchors", default="auto",
                    tooltip="Steps that renew what the others reuse: 'first' (one anchor), 'every 8', 0-based steps like '9, 25', or "
                    "places in the noise range like '35%, 60%' (then the end of the dense start anchors too). Each costs more than a dense "
                    "step; more anchors follow the picture more closely. auto: the preset's own.",
                ),
                declare(
                    io.String.Input, "dense_end", default="auto",
                    tooltip="Dense steps at the end, for the finest detail: whole steps or a share, 0 for none. Each costs a full dense "
                    "step. auto: the preset's own.",
                ),
                declare(
                    io.String.Input, "dense_layers", default="auto",
                    tooltip="Blocks that stay dense, like '0, 1, 38-40, -1' (-1 is the last), or none. They cost full time and need no "
                    "cache. auto: the preset's own.",
                ),
                declare(
                    io.String.Input, "density_curve", default="auto",
                    tooltip="Density by progress, read at anchors, like '0:0.40 0.5:0.25 1:0.15'. It replaces the density of the patch "
                    "node. Lower is faster and less exact. auto or none: the same density throughout.",
                ),
            ],
            outputs=[Schedule.Output(display_name="schedule")],
        )  # fmt: skip

    @classmethod
    def execute(cls, dense_start, anchors, dense_end, dense_layers, density_curve):
        return io.NodeOutput(parse_schedule(dense_start, anchors, dense_end, dense_layers, density_curve))
