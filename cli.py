"""`mc-sparse demo` and `mc-sparse doctor`."""
from __future__ import annotations

import sys

USAGE = "usage: mc-sparse demo|doctor [options]"


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "demo":
        from .demo.compare import main as demo

        return demo(arguments)
    if command == "doctor":
        from .doctor import main as doctor

        return doctor()
    print(USAGE)
    return 0 if command in ("-h", "--help") else 2
