"""The compiled Hopper kernels that are committed: made from the sources beside them, and what the compiler made of these."""
import itertools
import json
import re

import pytest
import torch

from mc_sparse.kernels import Geometry, cubin, cubin_build
from mc_sparse.kernels.attention import cute_sm90
from mc_sparse.kernels.quantise import quantised

NAMES = sorted(path.stem for path in cute_sm90.CUBINS.glob("*.cubin"))
SPARSE = [name for name in NAMES if name.startswith("sparse")]
HOPPER = Geometry(1, 2, 300, 300, 128, torch.bfloat16, "cuda", (9, 0))


def file(name):
    return cute_sm90.CUBINS / f"{name}.cubin"


def facts(name):
    return json.loads(file(name).with_suffix(".json").read_text(encoding="utf-8"))


def test_every_dtype_and_head_dim_has_its_cubins_and_no_other_is_shipped():
    assert sorted({name for cubins in cute_sm90.CHOSEN.values() for name in filter(None, cubins)}) == NAMES
    for (dtype, dim, kind), cubins in cute_sm90.CHOSEN.items():
        rows, fixed, online, *others = [facts(name)["variant"] for name in filter(None, cubins)]
        short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        assert {(v["dtype"], v["dim"]) for v in (rows, fixed, online, *others)} == {(short, dim)}
        assert (fixed["online"], online["online"]) == (False, True)
        assert {(v["qk"], v["cells"]) for v in (fixed, online)} == {("int8" if "int8" in kind else "half", "cells" in kind)}
        assert rows["what"] == {"half": "rows"}.get(kind, f"rows_{kind}")
        assert [v["what"] for v in others] == (["queries_int8"] if "int8" in kind else [])
    assert sum(path.stat().st_size for path in cute_sm90.CUBINS.iterdir()) < 3 << 20


@pytest.mark.parametrize("name", NAMES)
def test_cubin_is_of_the_sources_beside_it(name):
    source = cubin_build.SOURCES["mainloop" if name in SPARSE else "rows"]
    assert facts(name)["hash"] == source.hash(facts(name)["variant"]), "run scripts/build_cubins.py"


@pytest.mark.parametrize("name", NAMES)
def test_no_registers_are_spilled(name, dumped):
    assert re.search(r"STACK:(\d+)", dumped(file(name), "--dump-resource-usage"))[1] == "0"
    assert not re.search(r"\b(STL|LDL)\b", dumped(file(name), "--dump-sass"))


@pytest.mark.parametrize("name", SPARSE)
def test_the_fast_instructions_of_attention_are_there(name, dumped):
    sass, variant = dumped(file(name), "--dump-sass"), facts(name)["variant"]
    tile, dim, int8 = variant["tile"], variant["dim"], variant["qk"] == "int8"
    # Products of the first tile, of a plain and of a biased step, in steps of 16 or, int8, 32; the last values once more; 16 factor rows.
    shape = f"IGMMA.64x{tile}x32" if int8 else f"HGMMA.64x{tile}x16"
    assert len(re.findall(rf"{re.escape(shape)}.*RZ, !UPT", sass)) == 3
    assert len(re.findall(r"[HI]GMMA\.", sass)) == 3 * dim // (32 if int8 else 16) + 3 * tile // 16 + 1
    # 96 threads copy 16 bytes each, consecutive rows: K of the first tile, K and V of a step, V of the last tile, the queries and 16 factor
    # rows. The first warp may take more rows of a tile. Cells are copied whole: K and V of a step, V of the last tile.
    cells = variant["cells"]
    most = tile - 2 * (tile // 48 * 16)
    pieces, qk_pieces = dim // 8, dim // (16 if int8 else 8)
    queries = -(-128 * qk_pieces // 96 // 4) * 4
    copies = queries + -(-16 * pieces // 96) + (0 if cells else 2 * most * (qk_pieces + pieces) // 32)
    assert len(re.findall(r"LDGSTS\S*\.128\b", sass)) == copies
    assert len(re.findall(r"\bUBLKCP\b", sass)) == (3 * tile // 32 if cells else 0)
    # After barriers are set up, and where copies of these threads have to be made visible: Q and K of the first tile, K, V of a plain and
    # of a biased step, the last values and the factors. Cells come by the copy engine, so that Q and the factors are left.
    assert len(re.findall(r"FENCE\.VIEW\.ASYNC", sass)) == (3 if cells else 8)
    assert "USETMAXREG.DEALLOC" in sass and "USETMAXREG.TRY_ALLOC" in sass


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SPARSE)))
def test_rows_move_in_pieces_of_16_bytes(name, dumped):
    sass = dumped(file(name), "--dump-sass")
    written = "64" if "queries" in name else "128"  # codes are half of what they are of
    assert re.search(r"LDG\S*\.128\b", sass) and re.search(rf"STG\S*\.{written}\b", sass)
    assert not re.search(r"\b(LDG|STG)\S*\.(U16|U8|S16|S8)\b", sass)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_lie_where_the_host_puts_them(name, parameter_places):
    found, expected = parameter_places(file(name))
    assert found == expected


def test_shared_memory_fits():
    assert all(facts(name)["shared"] <= 232_448 - 1024 for name in NAMES)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"capability": (8, 0)}, "compute capability 9.0"),
        ({"capability": (12, 0)}, "compute capability 9.0"),
        ({"device_type": "cpu", "capability": None}, "compute capability 9.0"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 96}, "head dims 64 and 128"),
        ({"head_dim": 64, "precision": "int8"}, "head dim 128 for products in int8"),
        ({"precision": "fp8"}, "products in fp8"),
    ],
)
def test_why_not_names_what_is_missing(changed, reason):
    assert reason in cute_sm90.why_not(Geometry(**(vars(HOPPER) | changed)))


def test_a_missing_cubin_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(cute_sm90, "CUBINS", tmp_path)
    assert "lacks its compiled kernel's" in cute_sm90.why_not(HOPPER)


@pytest.mark.parametrize(("precision", "kind"), [("half", "cells"), ("int8", "int8_cells")])
def test_cubins_for_cells_are_asked_for(precision, kind, monkeypatch, tmp_path):
    for name in NAMES:
        if "cells" not in name:
            for ending in ("cubin", "json"):
                (tmp_path / f"{name}.{ending}").touch()
    monkeypatch.setattr(cute_sm90, "CUBINS", tmp_path)
    reason = cute_sm90.why_not(Geometry(**(vars(HOPPER) | {"precision": precision})))
    assert f"lacks its compiled kernel's rows_{kind}_bf16_d128" in reason


def test_given_pooled_rows_lie_in_blocks_as_the_kernels_read_them():
    """Byte by byte, in int8: K, V; past the end codes and values are 0, scales 1."""
    cells, k, v, mean = 40, torch.randn(2, 40, 128), torch.randn(2, 40, 128).bfloat16(), torch.randn(2, 128)
    rows, scales = torch.full((2, 96, 192), torch.nan, dtype=torch.bfloat16), torch.full((2, 96), torch.nan)
    cute_sm90._put_pooled(rows[:, 32:], scales[:, 32:], k, v, mean, True)
    assert rows[:, :32].isnan().all() and scales[:, :32].isnan().all()
    codes, scale = quantised(k - mean[:, None], "int8")
    assert torch.equal(scales[:, 32 : 32 + cells], scale[..., 0]) and (scales[:, 32 + cells :] == 1).all()
    blocks = rows[:, 32:].reshape(2, 2, -1).view(torch.uint8)
    for h, row in itertools.product(range(2), range(64)):
        block, r = blocks[h, row // 32], row % 32
        got = [block[r * 128 + (i ^ r % 8) * 16 :][:16] for i in range(8)]
        got += [block[4096 + r // 8 * 2048 + i // 8 * 1024 + r % 8 * 128 + (i % 8 ^ r % 8) * 16 :][:16] for i in range(16)]
        wanted = (codes[h, row], v[h, row]) if row < cells else (torch.zeros(384, dtype=torch.uint8),)
        assert torch.equal(torch.cat(got), torch.cat([x.view(torch.uint8) for x in wanted]))


def test_rows_with_gaps_or_off_16_bytes_are_copied():
    x = torch.randn(1, 2, 40, 128).bfloat16()
    assert cubin.aligned(x) is x
    for view in (x[..., ::2], x[..., 4:68]):
        copy = cubin.aligned(view)
        assert torch.equal(copy, view) and copy.stride(-1) == 1 and copy.data_ptr() % 16 == 0
