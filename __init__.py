"""MC-Sparse: meta-cached sparse attention for diffusion transformers."""
import logging
import sys
from importlib import import_module

__version__ = "0.1.0"
WEB_DIRECTORY = "./web"
_PUBLIC = {  # name -> module, imported on first use
    "SparsePlan": "mcsparse_core.plan",
    "Schedule": "mcsparse_core.schedule",
    "flow_progress": "mcsparse_core.schedule",
    "SparseRun": "mcsparse_core.run",
    "sparsify": "mcsparse_core.diffusers_host",
}
__all__ = list(_PUBLIC)


def __getattr__(name):
    if name in _PUBLIC:
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


async def comfy_entrypoint():
    """The nodes of this pack, for ComfyUI's loader."""
    # ComfyUI loads this folder under a module name made from its path. Publishing it as
    # `mc_sparse` keeps one copy of every submodule, whoever imports it first.
    package = sys.modules.setdefault("mc_sparse", sys.modules[__name__])
    if package.__file__ != __file__:
        logging.warning("MC-Sparse: %s is used, not %s", package.__file__, __file__)
    from mc_sparse.nodes import extension

    return extension()
