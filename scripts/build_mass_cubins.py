"""Compiles the Hopper kernel of key selection into kernels/selection/cubins; arguments and output as those of build_cubins.py."""
from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
ATTENTION, SELECTION = SCRIPTS.parent / "kernels" / "attention", SCRIPTS.parent / "kernels" / "selection"
SOURCES = (SELECTION / "cute_sm90_mass.py", ATTENTION / "cute_sm90_mainloop.py")  # of the second, the single instructions


def source_hash(variant: dict) -> str:
    """Of the device source, of the instructions that it imports and of the variant's fields, whatever line ends the checkout has."""
    kernel, other = (path.read_text(encoding="utf-8") for path in SOURCES)
    instructions = other.partition("# --- single instructions")[2].partition("# --- the kernel")[0]
    return hashlib.sha256((kernel + instructions + json.dumps(variant, sort_keys=True)).encode()).hexdigest()


def main() -> None:
    sys.path.insert(0, str(SCRIPTS))
    from build_cubins import arguments, build, compiler, variants

    args = arguments(__doc__.splitlines()[0], SELECTION / "cubins").parse_args()
    with compiler(SELECTION, ATTENTION) as dump:
        import cute_sm90_mass as device

        args.folder.mkdir(parents=True, exist_ok=True)
        for variant in variants(device, args.variant) or device.SHIPPED:
            hashed = source_hash(dataclasses.asdict(variant))
            build(variant, device.PARAMETERS, device.Masses(variant).launch, hashed, args, dump)


if __name__ == "__main__":
    main()
