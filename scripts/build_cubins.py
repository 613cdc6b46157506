"""Compiles the Hopper kernels of sparse attention into kernels/attention/cubins. Needs nvidia-cutlass-dsl 4.8, but no GPU. Run by path.

--ptxas names an assembler to use instead of the compiler's own: that of CUDA 12.8 (Triton 3.6 carries it) makes cubins that older drivers
load. kernels/cubin_build.py says what is written; tests/kernels/test_cubins.py compares the hashes.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
sys.path.append(str(KERNELS))
import cubin_build  # noqa: E402


def arguments(description: str, folder: Path) -> argparse.ArgumentParser:
    """Of the command line: what building any kernel takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--variant", action="append", help="fields of a Variant, to build instead of what ships: 'stages=1'")
    parser.add_argument("--ptxas")
    parser.add_argument("--suffix", default="", help="appended to the names, to tell builds apart")
    parser.add_argument("--ptx", action="store_true", help="keep the PTX beside the cubins")
    return parser


def build(args: argparse.Namespace, asked: dict[str, list[str] | None]) -> None:
    """Raises SystemExit where other variants would be put among those that ship.

    asked: by name of a source in cubin_build.SOURCES the fields of Variants, as text; all that ships if none asks for any."""
    if any(asked.values()) and args.folder.name == "cubins" and KERNELS in args.folder.resolve().parents:
        sys.exit("name a --folder for other variants: this one holds the kernels that ship")
    args.folder.mkdir(parents=True, exist_ok=True)
    with cubin_build.compiler() as dump:
        for name, texts in asked.items():
            source = cubin_build.SOURCES[name]
            device = source.load()
            wanted = [eval(f"Variant({text})", {"Variant": device.Variant}) for text in texts or ()]
            for variant in wanted if any(asked.values()) else device.SHIPPED:
                cubin = cubin_build.build(
                    source, device, variant, args.folder, dump, ptxas=args.ptxas, suffix=args.suffix, with_ptx=args.ptx
                )
                print(cubin.stem, cubin.stat().st_size, "bytes")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], KERNELS / "attention" / "cubins")
    parser.add_argument("--rows", action="append", help="as --variant, of a pass before the attention: 'warps=1'")
    args = parser.parse_args()
    build(args, {"mainloop": args.variant, "rows": args.rows})


if __name__ == "__main__":
    main()
