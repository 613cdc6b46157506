"""Compiles the Hopper kernel of key selection into kernels/selection/cubins; arguments and output as those of build_cubins.py."""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
ATTENTION, SELECTION = SCRIPTS.parent / "kernels" / "attention", SCRIPTS.parent / "kernels" / "selection"
SOURCES = (SELECTION / "cute_sm90_mass.py", ATTENTION / "cute_sm90_mainloop.py")  # of the second, the single instructions


def source_hash(variant: dict) -> str:
    """Of the device source, of the instructions that it imports and of the variant's fields, whatever line ends the checkout has."""
    kernel, other = (path.read_text(encoding="utf-8") for path in SOURCES)
    instructions = other.partition("# --- single instructions")[2].partition("# --- the kernel")[0]
    return hashlib.sha256((kernel + instructions + json.dumps(variant, sort_keys=True)).encode()).hexdigest()


def build(variant, folder: Path, dump: Path, ptxas: str | None, suffix: str, keep_ptx: bool) -> None:
    import cute_sm90_mass as device
    import cutlass
    from build_cubins import assemble
    from cutlass import Float32, Int32, Int64, cute

    kinds = {"p": Int64, "i64": Int64, "i32": Int32, "f32": Float32}
    arguments = tuple(kinds[kind](1) for _, kind in device.PARAMETERS)
    made = cute.compile(device.Masses(variant).launch, arguments, Int32(1))
    cubin = assemble(made.__ptx__, ptxas, dump) if ptxas else made.__cubin__
    (entry,) = [line for line in made.__ptx__.splitlines() if ".entry" in line]
    facts = {
        "entry": entry.split(".entry")[1].split("(")[0].strip(),
        "parameters": device.PARAMETERS,
        "threads": variant.threads,
        "shared": variant.shared,
        "variant": dataclasses.asdict(variant),
        "hash": source_hash(dataclasses.asdict(variant)),
        "cutlass_dsl": cutlass.__version__,
        "ptxas": subprocess.check_output([ptxas, "--version"], text=True).split()[-1] if ptxas else "the compiler's own",
    }
    name = variant.name + suffix
    (folder / f"{name}.cubin").write_bytes(cubin)
    (folder / f"{name}.json").write_text(json.dumps(facts) + "\n")
    if keep_ptx:
        (folder / f"{name}.ptx").write_text(made.__ptx__)
    print(name, len(cubin), "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=SELECTION / "cubins")
    parser.add_argument("--variant", action="append", help="fields of a Variant instead of the shipped ones: 'stages=2'")
    parser.add_argument("--ptxas")
    parser.add_argument("--suffix", default="", help="appended to the names, to tell builds apart")
    parser.add_argument("--ptx", action="store_true", help="keep the PTX beside the cubins")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as dump:
        os.environ |= {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin,ptx", "CUTE_DSL_DUMP_DIR": dump}
        sys.path[:0] = [str(SELECTION), str(ATTENTION), str(SCRIPTS)]  # by themselves: the packages around them would import torch
        from cute_sm90_mass import SHIPPED, Variant

        args.folder.mkdir(parents=True, exist_ok=True)
        for variant in SHIPPED if not args.variant else [eval(f"Variant({text})", {"Variant": Variant}) for text in args.variant]:
            build(variant, args.folder, Path(dump), args.ptxas, args.suffix, args.ptx)


if __name__ == "__main__":
    main()
