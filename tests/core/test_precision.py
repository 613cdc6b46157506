"""What a plan's precision means on a card, for a model, at a call."""
import pytest
import torch

from mc_sparse.kernels import Geometry
from mc_sparse.mcsparse_core import precision
from mc_sparse.mcsparse_core.precision import choose_precision, wanted_precision

ON_CPU = Geometry(1, 2, 4096, 4096, 128, torch.float32, "cpu")


def test_auto_is_half_on_every_card():
    for capability in (None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert wanted_precision("auto", capability, "WanModel") == "half"


def test_auto_is_what_was_measured_but_never_low_for_3d_shapes(monkeypatch):
    monkeypatch.setitem(precision.MEASURED, (8, 9), "int8")
    assert wanted_precision("auto", (8, 9), "WanModel") == "int8"
    assert wanted_precision("auto", (9, 0), "WanModel") == wanted_precision("auto", None, "WanModel") == "half"
    assert wanted_precision("auto", (8, 9), "Hunyuan3Dv2") == "half"
    assert wanted_precision("fp8", (8, 9), "Hunyuan3Dv2") == "fp8"  # who asks for it gets it
    assert wanted_precision("bf16", (8, 9), "WanModel") == "half"


@pytest.mark.parametrize(
    ("asked", "allowed", "backend", "expected"),
    [
        ("int8", True, "auto", ("int8", None)),
        ("fp8", True, "reference", ("fp8", None)),
        ("int8", False, "auto", ("half", "the model rules low precision out")),
        ("bf16", False, "auto", ("half", None)),
        ("auto", False, "auto", ("half", None)),
    ],
)
def test_choice_on_the_cpu(asked, allowed, backend, expected):
    assert choose_precision(asked, ON_CPU, "WanModel", allowed, backend) == expected
