"""The compiled Hopper kernels of selection that are committed: made from the sources beside them, and what the compiler made of these."""
import json
import re

import pytest
import torch

from mc_sparse.kernels import Geometry, cubin_build
from mc_sparse.kernels.selection import cute_sm90

NAMES = sorted(path.stem for path in cute_sm90.CUBINS.glob("*.cubin"))
HOPPER = Geometry(1, 2, 300, 300, 128, torch.bfloat16, "cuda", (9, 0))


def file(name):
    return cute_sm90.CUBINS / f"{name}.cubin"


def facts(name):
    return json.loads(file(name).with_suffix(".json").read_text(encoding="utf-8"))


def test_every_dtype_and_head_dim_has_its_cubin_and_no_other_is_shipped():
    assert sorted(cute_sm90.CHOSEN.values()) == NAMES
    for (dtype, dim), name in cute_sm90.CHOSEN.items():
        variant = facts(name)["variant"]
        assert (variant["dtype"], variant["dim"]) == ({torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], dim)


@pytest.mark.parametrize("name", NAMES)
def test_cubin_is_of_the_sources_beside_it(name):
    assert facts(name)["hash"] == cubin_build.SOURCES["mass"].hash(facts(name)["variant"]), "run scripts/build_mass_cubins.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_is_for_products_alone_and_no_registers_are_spilled(name, dumped):
    """From the wait for the turn to its passing on no exponentials; they follow the wait for the products."""
    assert re.search(r"STACK:(\d+)", dumped(file(name), "--dump-resource-usage"))[1] == "0"
    sass, dim = dumped(file(name), "--dump-sass"), facts(name)["variant"]["dim"]
    assert not re.search(r"\b(STL|LDL)\b", sass)
    letters = {"BAR.SYNC.DEFER_BLOCKING R": "(", "HGMMA": "p", "BAR.ARV R": ")", "WARPGROUP.DEPBAR": "w", "MUFU.EX2": "e"}
    steps = "".join(letters[name] for name in re.findall("|".join(map(re.escape, letters)), sass))
    assert steps == 2 * ("(" + dim // 16 * "p" + ")w" + 64 * "e")


@pytest.mark.parametrize("name", NAMES)
def test_a_tile_is_one_copy(name, dumped):
    assert len(re.findall(r"UBLKCP", dumped(file(name), "--dump-sass"))) == 1


@pytest.mark.parametrize("name", NAMES)
def test_parameters_lie_where_the_host_puts_them(name, parameter_places):
    found, expected = parameter_places(file(name))
    assert found == expected


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_are_laid_out_in_pieces_of_16_bytes(dim):
    triton_compile = pytest.importorskip("mc_sparse.kernels.triton_compile")
    from mc_sparse.kernels.selection import triton_steps

    types = {"x": "*bf16:16", "order": "*i64", "tiles": "*bf16:16", "x_h": "i32:16", "x_s": "i32:16", "length": "i32", "first": "i32"}
    report = triton_compile.compile_for(90, triton_steps.swizzle, types, {"D": dim, "TILE": 128}, 4, 3)
    assert report.stack == 0 and report.count(r"LDG\S*\.128") == report.count(r"STG\S*\.128") == report.count("STG") == dim // 8


def test_shared_memory_fits():
    assert all(facts(name)["shared"] <= 232_448 - 1024 for name in NAMES)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"capability": (8, 0)}, "compute capability 9.0"),
        ({"device_type": "cpu", "capability": None}, "compute capability 9.0"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 96}, "head dims 64 and 128, not"),
    ],
)
def test_why_not_names_what_is_missing(changed, reason):
    assert reason in cute_sm90.why_not(Geometry(**(vars(HOPPER) | changed)))


def test_a_missing_cubin_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(cute_sm90, "CUBINS", tmp_path)
    assert "lacks its compiled kernel's" in cute_sm90.why_not(HOPPER)
