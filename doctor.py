"""What this machine can run, and why not."""
from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

from . import __version__

OPTIONAL = {  # distribution -> what it is for
    "triton": "kernels for NVIDIA cards from Ampere on",
    "nvidia-cutlass-dsl": "only to compile the Hopper kernels, which are shipped",
    "fa3-fwd": "the fastest anchors on Hopper",
    "flash-attn-4": "fast anchors on Hopper and Blackwell",
    "flash-attn": "fast anchors",
    "diffusers": "the demo, and the pack outside ComfyUI",
    "imageio": "the demo's GIF",
}
HEAD_DIMS = (64, 128)
LOW_PRECISIONS = ("int8", "fp8")


def main() -> int:
    """Prints the report; 0 if MC-Sparse can be sparse on this machine's GPU, or CPU without one, else 1."""
    print(f"MC-Sparse {__version__}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    try:
        import torch
    except ImportError as e:
        print(f"PyTorch: {e}. Nothing runs without. ComfyUI brings it: run this with ComfyUI's Python.")
        return 1
    from .kernels import registry
    from .kernels.shapes import Geometry

    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    devices = [("cpu", torch.float32, None)]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            print(f"GPU {i}: {p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB")
            devices.append((f"cuda:{i}", torch.bfloat16, (p.major, p.minor)))
    else:
        built = torch.version.cuda or torch.version.hip
        print("GPU: none" + (f" that PyTorch (built for {built}) can use" if built else "; this PyTorch is built for the CPU only"))
    print("\nKernels, by operation: what auto takes by what is installed (checked when first used), then the others")
    for device, dtype, capability in devices:
        sparse = False
        for head_dim in HEAD_DIMS:
            geometry = Geometry(1, 12, 32760, 32760, head_dim, dtype, torch.device(device).type, capability)
            why = registry.why_none(geometry)
            sparse |= why is None
            print(f"  {device}, head dim {head_dim}, {str(dtype).removeprefix('torch.')}: {'sparse' if why is None else 'dense, ' + why}")
            if head_dim == HEAD_DIMS[-1]:
                for op in registry.operations():
                    print(_choice(op, registry.reasons(op, geometry)))
                for precision in LOW_PRECISIONS:
                    asked = replace(geometry, precision=precision)
                    print(_choice(f"{registry.SPARSE} in {precision}", registry.reasons(registry.SPARSE, asked)))
    print(f"\nTriton: {_triton()}")
    print(f"Hopper kernels: {_hopper_kernels()}")
    print("\nOptional packages:")
    for name, purpose in OPTIONAL.items():
        print(f"  {name}: {_version(name)} ({purpose})")
    found = ", ".join(map(str, comfyui_folders()))
    print("\nComfyUI: " + (found or "none found (COMFYUI_PATH, ~/ComfyUI*); the nodes load wherever it runs"))
    return 0 if sparse else 1


def _choice(op: str, reasons: dict[str, str | None]) -> str:
    """What auto takes and what it would take next, and a line for each of the others."""
    able = ", then ".join(name for name, reason in reasons.items() if reason is None) or "nothing"
    return "\n".join([f"    {op}: {able}", *(f"      not {name}: {reason}" for name, reason in reasons.items() if reason)])


def _triton() -> str:
    """Triton's version and where it keeps compiled kernels, or why it does not load."""
    try:
        import triton

        if hasattr(triton, "knobs"):
            cache = triton.knobs.cache.dir
        else:
            cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
        return f"{triton.__version__}, compiled kernels in {cache}"
    except Exception as e:  # a broken installation can raise anything
        return (
            f"does not load ({type(e).__name__}: {e}). On H100 and H200 queries are grouped and keys chosen with PyTorch: slower anchors. "
            "Other NVIDIA cards stay dense."
        )


def _hopper_kernels() -> str:
    """Whether they are compiled here."""
    from .kernels import cubin_jit

    why_not = cubin_jit.why_not()
    if why_not is not None:
        return f"as shipped, not compiled here: {why_not}"
    try:
        return f"compiled here when first used ({cubin_jit.VARIABLE}), kept in {cubin_jit.folder()}"
    except RuntimeError as e:  # no home
        return f"as shipped, not compiled here: there is no folder to keep them in ({e})"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def comfyui_folders() -> list[Path]:
    """ComfyUI checkouts: those in COMFYUI_PATH (separated like PATH), else ~/ComfyUI*, else the one this pack lies in."""
    named = os.environ.get("COMFYUI_PATH")
    try:
        if named:
            found = [Path(p).expanduser() for p in named.split(os.pathsep) if p]
        else:
            found = sorted(Path.home().glob("ComfyUI*")) or list(Path(__file__).resolve().parents)
        return [p for p in found if (p / "comfy" / "sd.py").is_file() and (p / "main.py").is_file()]
    except (OSError, RuntimeError) as e:  # no such user, no home, a name that is too long
        print(f"COMFYUI_PATH: {e}")
        return []
