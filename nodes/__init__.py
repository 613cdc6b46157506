"""The ComfyUI side: nodes, and how a plan gets into a sampling run. Only `host.py` and `schema.py` know versions of ComfyUI."""


def extension():
    """The ComfyExtension with all nodes of this pack."""
    from comfy_api.latest import ComfyExtension

    from .demo_nodes import MCSparseDemoDecode, MCSparseDemoModel, MCSparseDemoPrompt
    from .patch_model import MCSparsePatchModel
    from .report import MCSparseStats
    from .schedule_node import MCSparseSchedule

    class MCSparseExtension(ComfyExtension):
        async def get_node_list(self):
            return [MCSparsePatchModel, MCSparseSchedule, MCSparseStats, MCSparseDemoModel, MCSparseDemoPrompt, MCSparseDemoDecode]

    return MCSparseExtension()
