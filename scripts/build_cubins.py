"""Compiles the Hopper kernels of sparse attention into kernels/attention/cubins. Needs nvidia-cutlass-dsl 4.8, but no GPU. Run by path.

--ptxas names an assembler to use instead of the compiler's own: that of CUDA 12.8 (Triton 3.6 carries it) makes cubins that older drivers
load. Beside each cubin a JSON file of the same name says how to launch it and what it was made from: a hash of the device source and of the
variant, and the compiler's version. tests/kernels/test_cubins.py compares the hash.
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ATTENTION = Path(__file__).resolve().parents[1] / "kernels" / "attention"
SOURCES = [ATTENTION / "cute_sm90_mainloop.py", ATTENTION / "cute_sm90_rows.py"]


def source_hash(variant: dict) -> str:
    """Of the device sources and the variant's fields, whatever line ends the checkout has."""
    text = "".join(source.read_text(encoding="utf-8") for source in SOURCES) + json.dumps(variant, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def assemble(ptx: str, ptxas: str, dump: Path) -> bytes:
    """A cubin of the PTX, of which nothing is newer than its version 8.6 but the number."""
    source, cubin = dump / "kernel.ptx", dump / "kernel.cubin"
    source.write_text(re.sub(r"^\.version .*", ".version 8.6", ptx, count=1, flags=re.MULTILINE))
    subprocess.run([ptxas, "-arch=sm_90a", "-O3", source, "-o", cubin], check=True)
    return cubin.read_bytes()


def build(variant, parameters: tuple, launch, hashed: str, args: argparse.Namespace, dump: Path) -> None:
    """One cubin and its facts into args.folder. parameters, launch: of the device source; hashed: what it is made from."""
    import cutlass
    from cutlass import Float32, Int32, Int64, cute

    kinds = {"p": Int64, "i64": Int64, "i32": Int32, "f32": Float32}
    ones = tuple(kinds[kind](1) for _, kind in parameters)
    made = cute.compile(launch, ones, Int32(1))
    cubin = assemble(made.__ptx__, args.ptxas, dump) if args.ptxas else made.__cubin__
    (entry,) = [line for line in made.__ptx__.splitlines() if ".entry" in line]
    facts = {
        "entry": entry.split(".entry")[1].split("(")[0].strip(),
        "parameters": parameters,
        "threads": variant.threads,
        "shared": variant.shared,
        "variant": dataclasses.asdict(variant),
        "hash": hashed,
        "cutlass_dsl": cutlass.__version__,
        "ptxas": subprocess.check_output([args.ptxas, "--version"], text=True).split()[-1] if args.ptxas else "the compiler's own",
    }
    name = variant.name + args.suffix
    (args.folder / f"{name}.cubin").write_bytes(cubin)
    (args.folder / f"{name}.json").write_text(json.dumps(facts) + "\n")
    if args.ptx:
        (args.folder / f"{name}.ptx").write_text(made.__ptx__)
    print(name, len(cubin), "bytes")


def arguments(description: str, folder: Path) -> argparse.ArgumentParser:
    """Of the command line: what building any kernel takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--variant", action="append", help="fields of a Variant, to build instead of what ships: 'stages=1'")
    parser.add_argument("--ptxas")
    parser.add_argument("--suffix", default="", help="appended to the names, to tell builds apart")
    parser.add_argument("--ptx", action="store_true", help="keep the PTX beside the cubins")
    return parser


@contextmanager
def compiler(*folders: Path) -> Iterator[Path]:
    """The compiler set up for Hopper, and where it dumps. Device sources in `folders` can be imported, by themselves: the packages around
    them would import torch."""
    with tempfile.TemporaryDirectory() as dump:
        os.environ |= {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin,ptx", "CUTE_DSL_DUMP_DIR": dump}
        sys.path[:0] = map(str, folders)
        yield Path(dump)


def variants(device, texts: list[str] | None) -> list:
    """The Variants of a device source that are asked for by their fields."""
    return [eval(f"Variant({text})", {"Variant": device.Variant}) for text in texts or ()]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], ATTENTION / "cubins")
    parser.add_argument("--rows", action="append", help="as --variant, of a pass before the attention: 'warps=1'")
    args = parser.parse_args()
    with compiler(ATTENTION) as dump:
        import cute_sm90_mainloop as attention
        import cute_sm90_rows as rows

        args.folder.mkdir(parents=True, exist_ok=True)
        for device, texts in ((attention, args.variant), (rows, args.rows)):
            for variant in variants(device, texts) if args.variant or args.rows else device.SHIPPED:
                hashed = source_hash(dataclasses.asdict(variant))
                build(variant, variant.parameters, variant.kernel(variant).launch, hashed, args, dump)


if __name__ == "__main__":
    main()
