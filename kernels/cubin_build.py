"""Compiles the Hopper kernels' device sources with nvidia-cutlass-dsl 4.8. Needs no GPU, and nothing else of this package.

Used by scripts/build_*.py, which make the cubins that ship, and by cubin_jit.py, which runs it by its path: `cubin_build.py NAME FOLDER`
compiles one kernel of those into FOLDER. Beside each cubin a JSON file of the same name says how to launch it and what it was made from:
a hash of the device source and of the variant, and the compiler's version.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

KERNELS = Path(__file__).resolve().parent
MAINLOOP, ROWS = KERNELS / "attention" / "cute_sm90_mainloop.py", KERNELS / "attention" / "cute_sm90_rows.py"
MASS = KERNELS / "selection" / "cute_sm90_mass.py"


class Source(NamedTuple):
    """A device source: its file, the text that its cubins depend on, and how a Variant of it is compiled."""

    path: Path
    text: Callable[[], str]
    parts: Callable[[ModuleType, object], tuple[tuple, Callable]]  # module, variant -> parameters, function

    def load(self) -> ModuleType:
        """Inside `compiler`: by itself, for the packages around it would import torch."""
        return import_module(self.path.stem)

    def hash(self, variant: dict) -> str:
        """Of all that a cubin is made from; variant: its fields."""
        return hashlib.sha256((self.text() + json.dumps(variant, sort_keys=True)).encode()).hexdigest()


def _attention() -> str:
    return _read(MAINLOOP) + _read(ROWS)


def _mass() -> str:
    """With the single instructions that it imports."""
    return _read(MASS) + _read(MAINLOOP).partition("# --- single instructions")[2].partition("# --- the kernel")[0]


def _read(path: Path) -> str:
    """Whatever line ends the checkout has."""
    return path.read_text(encoding="utf-8")


def _attention_parts(device: ModuleType, variant) -> tuple[tuple, Callable]:
    return variant.parameters, variant.kernel(variant).launch


def _mass_parts(device: ModuleType, variant) -> tuple[tuple, Callable]:
    return device.PARAMETERS, device.Masses(variant).launch


SOURCES = {
    "mainloop": Source(MAINLOOP, _attention, _attention_parts),
    "rows": Source(ROWS, _attention, _attention_parts),
    "mass": Source(MASS, _mass, _mass_parts),
}


@contextmanager
def compiler() -> Iterator[Path]:
    """The compiler set up for Hopper, and where it dumps. Device sources can be imported inside."""
    with tempfile.TemporaryDirectory() as dump:
        os.environ |= {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "cubin,ptx", "CUTE_DSL_DUMP_DIR": dump}
        sys.path += sorted({str(source.path.parent) for source in SOURCES.values()})
        yield Path(dump)


def build(
    source: Source, device: ModuleType, variant, folder: Path, dump: Path, *,
    ptxas: str | None = None, suffix: str = "", with_ptx: bool = False,
) -> Path:  # fmt: skip
    """One cubin and its facts into folder; returns the cubin's path.

    device: the loaded source; dump: from `compiler`; ptxas: an assembler to use instead of the compiler's own; suffix: of the files' names;
    with_ptx: the PTX is kept beside them.
    """
    import cutlass
    from cutlass import Float32, Int32, Int64, cute

    parameters, launch = source.parts(device, variant)
    kinds = {"p": Int64, "i64": Int64, "i32": Int32, "f32": Float32}
    ones = tuple(kinds[kind](1) for _, kind in parameters)
    made = cute.compile(launch, ones, Int32(1))
    cubin = _assemble(made.__ptx__, ptxas, dump) if ptxas else made.__cubin__
    if not _is_whole(cubin):
        raise RuntimeError(f"the compiler made no whole cubin; is {tempfile.gettempdir()} full?")
    (entry,) = [line for line in made.__ptx__.splitlines() if ".entry" in line]
    facts = {
        "entry": entry.split(".entry")[1].split("(")[0].strip(),
        "parameters": parameters,
        "threads": variant.threads,
        "shared": variant.shared,
        "variant": dataclasses.asdict(variant),
        "hash": source.hash(dataclasses.asdict(variant)),
        "cutlass_dsl": cutlass.__version__,
        "ptxas": subprocess.check_output([ptxas, "--version"], text=True).split()[-1] if ptxas else "the compiler's own",
    }
    name = variant.name + suffix
    path = folder / f"{name}.cubin"
    path.write_bytes(cubin)
    (folder / f"{name}.json").write_text(json.dumps(facts) + "\n")
    if with_ptx:
        (folder / f"{name}.ptx").write_text(made.__ptx__)
    return path


def _is_whole(cubin: bytes) -> bool:
    """Whether an ELF file reaches as far as its table of segments, which is last. The compiler dumps it and says nothing of a full disk."""
    if cubin[:4] != b"\x7fELF" or len(cubin) < 64:
        return False
    (start,), (size, count) = struct.unpack_from("<Q", cubin, 32), struct.unpack_from("<HH", cubin, 54)
    return len(cubin) >= start + size * count


def _assemble(ptx: str, ptxas: str, dump: Path) -> bytes:
    """A cubin of the PTX, of which nothing is newer than its version 8.6 but the number."""
    source, cubin = dump / "kernel.ptx", dump / "kernel.cubin"
    source.write_text(re.sub(r"^\.version .*", ".version 8.6", ptx, count=1, flags=re.MULTILINE))
    subprocess.run([ptxas, "-arch=sm_90a", "-O3", source, "-o", cubin], check=True)
    return cubin.read_bytes()


def main(name: str, folder: str) -> None:
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != KERNELS]  # our modules' names are not to hide others
    with compiler() as dump:
        for source in SOURCES.values():
            device = source.load()
            for variant in device.SHIPPED:
                if variant.name == name:
                    build(source, device, variant, Path(folder), dump)
                    return
    sys.exit(f"there is no kernel {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
