"""Compiles the Hopper kernel of sparse attention into kernels/attention/cubins. Needs nvidia-cutlass-dsl 4.8, but no GPU. Run by path.

Beside each cubin a JSON file of the same name says how to launch it and what it was made from: a hash of the device source and of the
variant, and the compiler's version. tests/kernels/test_cubins.py compares the hash.
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

ATTENTION = Path(__file__).resolve().parents[1] / "kernels" / "attention"
SOURCE = ATTENTION / "cute_sm90_mainloop.py"


def source_hash(variant: dict) -> str:
    """Of the device source and the variant's fields, whatever line ends the checkout has."""
    text = SOURCE.read_text(encoding="utf-8") + json.dumps(variant, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def build(variant, folder: Path, dump: Path) -> None:
    import cute_sm90_mainloop as device
    import cutlass
    from cutlass import Float32, Int32, Int64, cute

    kinds = {"p": Int64, "i64": Int64, "i32": Int32, "f32": Float32}
    arguments = tuple(kinds[kind](1) for _, kind in device.PARAMETERS)
    made = cute.compile(device.Sparse(variant).launch, arguments, Int32(1))
    (ptx,) = [line for line in made.__ptx__.splitlines() if ".entry" in line]
    facts = {
        "entry": ptx.split(".entry")[1].split("(")[0].strip(),
        "parameters": device.PARAMETERS,
        "threads": device.THREADS,
        "shared": variant.offsets["total"],
        "tile": variant.tile,
        "variant": dataclasses.asdict(variant),
        "hash": source_hash(dataclasses.asdict(variant)),
        "cutlass_dsl": cutlass.__version__,
    }
    (folder / f"{variant.name}.cubin").write_bytes(made.__cubin__)
    (folder / f"{variant.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(variant.name, len(made.__cubin__), "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ATTENTION / "cubins")
    parser.add_argument("--variant", action="append", help="fields of a Variant instead of the shipped ones: 'tile=160,stages=2'")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as dump:
        os.environ |= {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin,ptx", "CUTE_DSL_DUMP_DIR": dump}
        sys.path.insert(0, str(ATTENTION))  # by itself: the package around it would import torch
        from cute_sm90_mainloop import SHIPPED, Variant

        args.folder.mkdir(parents=True, exist_ok=True)
        for variant in SHIPPED if not args.variant else [eval(f"Variant({text})", {"Variant": Variant}) for text in args.variant]:
            build(variant, args.folder, Path(dump))


if __name__ == "__main__":
    main()
