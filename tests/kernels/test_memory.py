"""Temporary memory stays bounded: an anchor step of a long sequence in its own process."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ANCHOR = Path(__file__).with_name("anchor_memory.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_an_anchor_of_16k_tokens_stays_small():
    """One head. q, k, v, O and R are 8 MB each; one matrix of all scores would be 1 GB.

    By hand, 32768 tokens and 8 heads: 1.1 GB for the whole process, of which 0.22 GB is torch.
    """
    run = subprocess.run(
        [sys.executable, str(ANCHOR), "16384", "1"], capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    extra = json.loads(run.stdout)["extra_mb"]
    assert 50 < extra < 250
