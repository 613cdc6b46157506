"""The text side of the demo model: eight prompts and the empty prompt, with fixed embeddings in place of a text encoder.

The embeddings are seeded noise; the model has learned what each one means. `prompts.safetensors` holds one tensor `embeddings`
(9, L, 4096) float16 and, in its metadata, `names`: a JSON list in the same order, the empty prompt last.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FILE = Path(__file__).with_name("prompts.safetensors")
TOKENS, WIDTH, SEED = 8, 4096, 20


def names() -> list[str]:
    """The eight prompts the model knows, in the order of the scenes in `clips`."""
    return [name for name in _read()[0] if name]


def embedding(name: str) -> torch.Tensor:
    """Embedding (1, L, 4096) float32 of a prompt of `names()`, or of "" for the negative side of classifier-free guidance."""
    known, table = _read()
    if name not in known:
        raise ValueError(f"the demo model knows no prompt {name!r}; it knows {known}")
    return table[known.index(name)].float().unsqueeze(0)


def table() -> torch.Tensor:
    """All embeddings (9, L, 4096) float32: the prompts of `names()`, then the empty one."""
    return _read()[1].float()


def write(prompts: list[str], file: Path = FILE):
    """Make the embeddings of `prompts` and of the empty prompt."""
    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn(len(prompts) + 1, TOKENS, WIDTH, generator=generator).half()
    save_file({"embeddings": values}, file, metadata={"names": json.dumps([*prompts, ""])})


def _read():
    with safe_open(FILE, "pt") as file:
        return json.loads(file.metadata()["names"]), file.get_tensor("embeddings")
