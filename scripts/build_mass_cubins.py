"""Compiles the Hopper kernel of key selection into kernels/selection/cubins; arguments and output as those of build_cubins.py."""
from __future__ import annotations

from build_cubins import KERNELS, arguments, build


def main() -> None:
    args = arguments(__doc__.splitlines()[0], KERNELS / "selection" / "cubins").parse_args()
    build(args, {"mass": args.variant})


if __name__ == "__main__":
    main()
