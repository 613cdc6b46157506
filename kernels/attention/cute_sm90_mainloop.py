"""The device side of the Hopper kernel of token-sparse attention, in CuTeDSL. Needed to build the cubins, never at run time.

One persistent program per multiprocessor takes groups `block, block + grid, ...`, head after head. One warp turns the group's selection
bits into lists of row numbers, a tile of N to a slot of a ring; after the keys come the tail's pooled rows with their biases. Three warps
gather the group's queries and the listed rows of keys and values with cp.async into rings of stages; each of two consumer warpgroups
multiplies 64 queries with them (wgmma), so that the products of one tile run under the exponentials of another.

Exponentials are taken relative to the row's largest logit of the first tile: no running maximum, no rescaling of the accumulator. Groups
in which a row leaves the range of the format are listed in `again`; the online variant, with a running maximum, computes those.

With qk="int8" queries and keys are multiplied in int8: a row of keys and values is [K int8 (D)][V 16 bits (D)], whole lines of 128 bytes;
the scales of a head's keys, float32, follow its rows. A group's queries, in its order, have one scale. A logit is scale * queries' scale *
key's scale * product: what is the same for all queries is multiplied once a tile, by those who gather.

Shared memory: Q (128, D) | K stages (N, D) | V stages (N, D) | factor rows of a rank residual (16, D) | row numbers
(slots, N) int32 | biases (slots, N) float32 | with int8: scales of keys (slots, N) float32 | barriers. A matrix is
stored as blocks of 128 bytes of columns; in a block each row is 128 bytes, whose 16-byte pieces are permuted by (piece ^ row % 8): what
wgmma calls 128-byte swizzle, for K (rows are the outputs' columns) as well as for V and the factors (rows are summed over).

Where a bit stands for a cell of 32 keys, the variants with `cells` find rows laid out as shared memory wants them, 32 to a block. One warp
reads the bits and has blocks copied whole by the copy engine, which also says when they are there; the three others gather queries and
factors alone. There are no lists then, and biases go with the stages of K. In a stage, 8 rows of one 128 bytes of columns are followed by
the same 8 rows of the next. With int8 the scales of keys have slots of their own, as have biases.
"""
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int8, Int32, Int64, const_expr
from cutlass._mlir.dialects import arith, llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

M = 128  # queries of a group
WARPGROUP = 128  # threads
THREADS = 3 * WARPGROUP
GATHERING = 96  # threads that gather: all but the first warp of the first warpgroup
RANKS = 16  # factor rows in one step
CHUNK = 1024  # keys whose bits are decoded together: a word for each lane
CELL = 32  # keys of a cell, rows of a block
AHEAD = 3  # chunks that are loaded before they are needed
MINUS_INFINITY = float("-inf")
LN_2 = 0.6931471805599453
# What happens at the end, by residual format; as in triton_sparse.py.
BF16, FP8, INT4, INT2, RANK, DIFFERENCE = 1, 2, 3, 4, 5, 6
INT2_INNER, INT2_OUTER = 0.45, 1.7
TURNS = 1  # named barriers 1 and 2: a warpgroup may issue its products

# Parameters of the kernel, in order: name and type; "p" is a pointer. The host side launches by this list.
#
# out, dense (H, length, D) by their strides in 16-bit elements, as q (heads of the launch, length, D). In int8 q has a head's codes (groups
# * 128, D) in the order of groups, slack rows 0, then the groups' scales float32, heads q_h apart. order (H, groups * 128) order_h apart;
# bits (H, groups, bits_row) a bit per key or, where in_cells, per 32 keys; counts (H, groups); lse (H, length) and the residual (values,
# scales) contiguous. The launch is for `total` groups from head `first` on, and rows (heads of the launch, keys + cells, 2, D) has only
# these heads too: keys and values in cell order, then the pooled ones of `cells` cells of `size` keys, in int8 then their scales. For the
# variants with cells these are blocks of 32 rows as cute_sm90_rows.py says: ceil(keys / 32) of keys, then ceil(cells / 32).
# size 0: their biases are in bias (heads of the launch, groups, cells); else they are counted; with cells, size is 1024 at most.
# again (1 + 2 total) int32: number of groups to run again, these groups, then 1 for each group that is among them; 0 at first.
PARAMETERS = (
    ("q", "p"), ("rows", "p"), ("out", "p"), ("lse", "p"), ("order", "p"), ("bits", "p"), ("counts", "p"), ("bias", "p"),
    ("values", "p"), ("scales", "p"), ("dense", "p"), ("again", "p"),
    ("q_h", "i64"), ("rows_h", "i64"), ("out_h", "i64"), ("dense_h", "i64"), ("order_h", "i64"),
    ("q_s", "i32"), ("out_s", "i32"), ("dense_s", "i32"), ("first", "i32"), ("groups", "i32"), ("total", "i32"), ("length", "i32"),
    ("keys", "i32"), ("bits_row", "i32"), ("in_cells", "i32"), ("cells", "i32"), ("size", "i32"),
    ("rank", "i32"), ("epilogue", "i32"), ("with_lse", "i32"), ("scale", "f32"),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One cubin. tile: keys in one step; stages: tiles in flight; producer, consumer: registers; online: with a running maximum.

    qk: what queries and keys are, "half", of dtype, or "int8"; cells: rows come in blocks of 32.
    """

    dtype: str = "bf16"
    dim: int = 128
    tile: int = 144
    stages: int = 2
    producer: int = 56
    consumer: int = 224
    online: bool = False
    qk: str = "half"
    cells: bool = False

    @property
    def name(self) -> str:
        flags = ("" if self.qk == "half" else f"_{self.qk}") + "_cells" * self.cells + "_online" * self.online
        return f"sparse_{self.dtype}_d{self.dim}_n{self.tile}_s{self.stages}{flags}"

    @property
    def element(self):
        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[self.dtype]

    @property
    def lost_above(self) -> float:
        """Sums of exponentials beyond this are computed again: some exponential may not fit the format."""
        return {"bf16": 1e30, "fp16": 6e4}[self.dtype]

    @property
    def qk_row(self) -> int:
        """Bytes of a row of Q or K."""
        return self.dim * (1 if self.qk == "int8" else 2)

    @property
    def slots(self) -> int:
        """Lists of a tile each. A chunk whose keys are all selected must fit behind a begun list and one that is held for its values.

        With cells: biases and scales of keys of each stage of K, which are needed for longer than the stage where they are fused.
        """
        return self.stages + self.fused if self.cells else -(-CHUNK // self.tile) + 2

    @property
    def fused(self) -> bool:
        """Whether scales of keys are multiplied by in the exponents only, when their stage may long be another's."""
        return self.qk == "int8" and not self.online

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes from the start of shared memory, and the total."""
        keys, int8 = self.stages * self.tile, self.qk == "int8"
        k = M * self.qk_row
        v = k + keys * self.qk_row
        factors = v + keys * 2 * self.dim
        numbers = factors + RANKS * 2 * self.dim
        bias = numbers + self.slots * self.tile * 4 * (not self.cells)
        k_scales = bias + self.slots * self.tile * 4
        barriers = k_scales + self.slots * self.tile * 4 * int8
        total = barriers + 8 * 2 * (2 * self.stages + 2 + self.slots)
        return {
            "q": 0, "k": k, "v": v, "factors": factors, "numbers": numbers, "bias": bias, "k_scales": k_scales,
            "barriers": barriers, "total": total,
        }  # fmt: skip

    @property
    def kernel(self) -> type:
        return Sparse

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        return PARAMETERS

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared(self) -> int:
        return self.offsets["total"]


# By measurement on an H200 (benchmarks/ladder/hopper_sparse.md).
# Producer and consumer registers; the second where cells are copied whole and a running maximum would spill.
_SPLIT = (56, 224), (40, 232)
SHIPPED = tuple(
    Variant(dtype, dim, tile, stages, *_SPLIT[cells and online], online=online, qk=qk, cells=cells)
    for dim, tile, stages, qk, cells in (
        (128, 144, 2, "half", False), (64, 192, 4, "half", False), (128, 144, 2, "int8", False),
        (128, 160, 2, "half", True), (64, 192, 4, "half", True), (128, 160, 3, "int8", True),
    )
    for dtype in ("bf16", "fp16") for online in (False, True)
)  # fmt: skip


def swizzled(row: int, column: int, rows: int) -> int:
    """Byte of an element of a matrix in shared memory; what `produce` writes to and the layouts of `consume` read from."""
    return (column // 64) * rows * 128 + row * 128 + ((column % 64 // 8) ^ (row % 8)) * 16 + column % 8 * 2


# --- single instructions -------------------------------------------------------------------------------------------------------------


def _asm(result, operands, text, constraints, pure, loc, ip):
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=not pure, is_align_stack=False, loc=loc, ip=ip)


@dsl_user_op
def copy16(to: Int32, source: Int64, to_offset: int, source_offset: int, *, loc=None, ip=None):
    """16 bytes from global to shared memory, asynchronously."""
    text = f"cp.async.cg.shared.global [$0 + {to_offset}], [$1 + {source_offset}], 16;"
    _asm(None, [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip)], text, "r,l", False, loc, ip)


@dsl_user_op
def copy16_or_zero(to: Int32, source: Int64, size: Int32, to_offset: int, *, loc=None, ip=None):
    """The same, or zeros where size is 0."""
    operands = [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, f"cp.async.cg.shared.global [$0 + {to_offset}], [$1], 16, $2;", "r,l,r", False, loc, ip)


@dsl_user_op
def copy_block(to: Int32, source: Int64, count: int, barrier: Int32, *, loc=None, ip=None):
    """count bytes from global to shared memory by the copy engine, counted by the barrier; addresses and count are multiples of 16."""
    operands = [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip), Int32(barrier).ir_value(loc=loc, ip=ip)]
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {count}, [$2];"
    _asm(None, operands, text, "r,l,r", False, loc, ip)


@dsl_user_op
def wait_for_copies(*, loc=None, ip=None):
    """Of this thread."""
    _asm(None, [], "cp.async.wait_all;", "", False, loc, ip)


@dsl_user_op
def load_i32(source: Int64, *, loc=None, ip=None) -> Int32:
    """Stays where it is written, so that it can be waited for later."""
    return Int32(_asm(T.i32(), [Int64(source).ir_value(loc=loc, ip=ip)], "ld.global.nc.b32 $0, [$1];", "=r,l", False, loc, ip))


@dsl_user_op
def load_f32(source: Int64, *, loc=None, ip=None) -> Float32:
    return Float32(_asm(T.f32(), [Int64(source).ir_value(loc=loc, ip=ip)], "ld.global.nc.f32 $0, [$1];", "=f,l", False, loc, ip))


@dsl_user_op
def load_if(source: Int64, condition: Boolean, kind: str, *, loc=None, ip=None) -> Int32:
    """A "b32" or "u16" where condition holds, else 0. Stays where it is written."""
    operands = [Int64(source).ir_value(loc=loc, ip=ip), Int32(Boolean(condition)).ir_value(loc=loc, ip=ip)]
    text = f"{{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\nmov.b32 $0, 0;\n@p ld.global.nc.{kind} $0, [$1];\n}}"
    return Int32(_asm(T.i32(), operands, text, "=&r,l,r", False, loc, ip))


@dsl_user_op
def load_u16(source: Int64, *, loc=None, ip=None) -> Int32:
    text = "{\n.reg .b16 h;\nld.global.nc.b16 h, [$1];\ncvt.u32.u16 $0, h;\n}"
    return Int32(_asm(T.i32(), [Int64(source).ir_value(loc=loc, ip=ip)], text, "=r,l", True, loc, ip))


@dsl_user_op
def load_words(source: Int64, count: int, *, loc=None, ip=None):
    """count (2 or 4) words of 32 bits, aligned together."""
    struct = llvm.StructType.get_literal([T.i32()] * count)
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.global.nc.v{count}.b32 {{{names}}}, [${count}];"
    got = _asm(struct, [Int64(source).ir_value(loc=loc, ip=ip)], text, ",".join(["=r"] * count + ["l"]), True, loc, ip)
    return [Int32(llvm.extractvalue(T.i32(), got, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def load_words_if(source: Int64, condition: Boolean, *, loc=None, ip=None):
    """Four words where condition holds, else 0. Stays where it is written."""
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    operands = [Int64(source).ir_value(loc=loc, ip=ip), Int32(Boolean(condition)).ir_value(loc=loc, ip=ip)]
    zeros = "".join(f"mov.b32 ${i}, 0;\n" for i in range(4))
    text = f"{{\n.reg .pred p;\nsetp.ne.s32 p, $5, 0;\n{zeros}@p ld.global.nc.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4];\n}}"
    got = _asm(struct, operands, text, "=&r,=&r,=&r,=&r,l,r", False, loc, ip)
    return [Int32(llvm.extractvalue(T.i32(), got, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def store_words(to: Int64, words, *, loc=None, ip=None):
    """Four words of 32 bits."""
    operands = [Int64(to).ir_value(loc=loc, ip=ip)] + [Int32(w).ir_value(loc=loc, ip=ip) for w in words]
    _asm(None, operands, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", False, loc, ip)


@dsl_user_op
def store_two_words(to: Int64, words, *, loc=None, ip=None):
    operands = [Int64(to).ir_value(loc=loc, ip=ip)] + [Int32(w).ir_value(loc=loc, ip=ip) for w in words]
    _asm(None, operands, "st.global.v2.b32 [$0], {$1, $2};", "l,r,r", False, loc, ip)


@dsl_user_op
def store_f32(to: Int64, value: Float32, *, loc=None, ip=None):
    operands = [Int64(to).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.global.f32 [$0], $1;", "l,f", False, loc, ip)


@dsl_user_op
def store_i32(to: Int64, value: Int32, *, loc=None, ip=None):
    operands = [Int64(to).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.global.b32 [$0], $1;", "l,r", False, loc, ip)


@dsl_user_op
def load_shared_i32(source: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(_asm(T.i32(), [Int32(source).ir_value(loc=loc, ip=ip)], "ld.shared.b32 $0, [$1];", "=r,r", False, loc, ip))


@dsl_user_op
def load_shared_f32x2(source: Int32, offset: int, *, loc=None, ip=None):
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    got = _asm(struct, [Int32(source).ir_value(loc=loc, ip=ip)], text, "=f,=f,r", False, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), got, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def load_shared_i32x4(source: Int32, offset: int, *, loc=None, ip=None):
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    got = _asm(struct, [Int32(source).ir_value(loc=loc, ip=ip)], text, "=r,=r,=r,=r,r", False, loc, ip)
    return [Int32(llvm.extractvalue(T.i32(), got, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def store_shared_i32(to: Int32, value: Int32, *, loc=None, ip=None):
    operands = [Int32(to).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.shared.b32 [$0], $1;", "r,r", False, loc, ip)


@dsl_user_op
def store_shared_if(to: Int32, value: Int32, condition: Boolean, *, loc=None, ip=None):
    """Without a branch."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (to, value, Boolean(condition))]
    text = "{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p st.shared.b32 [$0], $1;\n}"
    _asm(None, operands, text, "r,r,r", False, loc, ip)


@dsl_user_op
def store_shared_f32(to: Int32, value: Float32, *, loc=None, ip=None):
    operands = [Int32(to).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.shared.f32 [$0], $1;", "r,f", False, loc, ip)


@dsl_user_op
def exchanged(at: Int64, value: Int32, *, loc=None, ip=None) -> Int32:
    """What was there before, in global memory."""
    operands = [Int64(at).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, "atom.global.exch.b32 $0, [$1], $2;", "=r,l,r", False, loc, ip))


@dsl_user_op
def added(at: Int64, value: Int32, *, loc=None, ip=None) -> Int32:
    """What was there before, in global memory."""
    operands = [Int64(at).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, "atom.global.add.u32 $0, [$1], $2;", "=r,l,r", False, loc, ip))


@dsl_user_op
def set_bits(word: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(_asm(T.i32(), [Int32(word).ir_value(loc=loc, ip=ip)], "popc.b32 $0, $1;", "=r,r", True, loc, ip))


@dsl_user_op
def bits_from(low: Int32, high: Int32, shift: Int32, *, loc=None, ip=None) -> Int32:
    """32 bits of both words from bit `shift`, 0 to 31, on."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (low, high, shift)]
    return Int32(_asm(T.i32(), operands, "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", True, loc, ip))


@dsl_user_op
def highest_bit(word: Int32, *, loc=None, ip=None) -> Int32:
    """Number of the highest set bit."""
    return Int32(_asm(T.i32(), [Int32(word).ir_value(loc=loc, ip=ip)], "bfind.u32 $0, $1;", "=r,r", True, loc, ip))


@dsl_user_op
def lanes_with(word: Int32, *, loc=None, ip=None) -> Int32:
    """A bit for each lane whose word is not 0."""
    text = "{\n.reg .pred p;\nsetp.ne.s32 p, $1, 0;\nvote.sync.ballot.b32 $0, p, -1;\n}"
    return Int32(_asm(T.i32(), [Int32(word).ir_value(loc=loc, ip=ip)], text, "=r,r", False, loc, ip))


@dsl_user_op
def largest_of_lanes(x: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(_asm(T.i32(), [Int32(x).ir_value(loc=loc, ip=ip)], "redux.sync.max.s32 $0, $1, -1;", "=r,r", False, loc, ip))


@dsl_user_op
def shuffle_up(x: Int32, step: int, *, loc=None, ip=None) -> Int32:
    """x of the lane `step` below; of the first lanes their own."""
    text = f"shfl.sync.up.b32 $0, $1, {step}, 0, -1;"
    return Int32(_asm(T.i32(), [Int32(x).ir_value(loc=loc, ip=ip)], text, "=r,r", False, loc, ip))


def _unary(text, x, loc, ip):
    return Float32(_asm(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], text, "=f,f", True, loc, ip))


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None) -> Float32:
    return _unary("ex2.approx.ftz.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None) -> Float32:
    return _unary("lg2.approx.ftz.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def reciprocal(x: Float32, *, loc=None, ip=None) -> Float32:
    return _unary("rcp.rn.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def nearly_reciprocal(x: Float32, *, loc=None, ip=None) -> Float32:
    """But for the last digit."""
    return _unary("rcp.approx.ftz.f32 $0, $1;", x, loc, ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(_asm(T.f32(), operands, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", True, loc, ip))


@dsl_user_op
def maximum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(_asm(T.f32(), operands, "max.f32 $0, $1, $2;", "=f,f,f", True, loc, ip))


@dsl_user_op
def lower(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(_asm(T.f32(), operands, "min.f32 $0, $1, $2;", "=f,f,f", True, loc, ip))


@dsl_user_op
def magnitude(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The larger of |a| and |b|, NaN if one is."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    text = "{\n.reg .f32 x, y;\nabs.f32 x, $1;\nabs.f32 y, $2;\nmax.NaN.f32 $0, x, y;\n}"
    return Float32(_asm(T.f32(), operands, text, "=f,f,f", True, loc, ip))


@dsl_user_op
def know(x: Float32, *, loc=None, ip=None):
    """Nothing after this is done before x, which is at least 0, is known: by a branch that is never taken."""
    text = "{\n.reg .pred p;\nsetp.lt.f32 p, $0, 0fBF800000;\nvote.sync.any.pred p, p, 0xffffffff;\n@p trap;\n}"
    _asm(None, [Float32(x).ir_value(loc=loc, ip=ip)], text, "f", False, loc, ip)


@dsl_user_op
def of_halves(what: str, a: Int32, b: Int32, kind: str, *, loc=None, ip=None) -> Int32:
    """The "max" or "min" of both halves of two words with two of "bf16" or "fp16" each, NaN if one is."""
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[kind]
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Int32(_asm(T.i32(), operands, f"{what}.NaN.{kind} $0, $1, $2;", "=r,r,r", True, loc, ip))


@dsl_user_op
def product_plus(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded after both."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    text = "{\n.reg .f32 x;\nmul.rn.f32 x, $1, $2;\nadd.rn.f32 $0, x, $3;\n}"
    return Float32(_asm(T.f32(), operands, text, "=f,f,f,f", True, loc, ip))


@dsl_user_op
def other_type(x, *, loc=None, ip=None):
    """The same 32 bits as the other type, Float32 of an Int32 or Int32 of a Float32."""
    to, kind = (Int32, T.i32()) if isinstance(x, Float32) else (Float32, T.f32())
    return to(arith.bitcast(kind, x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def packed_bytes(four, *, loc=None, ip=None) -> Int32:
    """The lowest bytes of four float32."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in four]
    text = "{\n.reg .b32 l, h;\nprmt.b32 l, $1, $2, 0x0040;\nprmt.b32 h, $3, $4, 0x0040;\nprmt.b32 $0, l, h, 0x5410;\n}"
    return Int32(_asm(T.i32(), operands, text, "=r,r,r,r,r", True, loc, ip))


@dsl_user_op
def choose(condition: Boolean, a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    operands = [Boolean(condition).ir_value(loc=loc, ip=ip)] + [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(arith.select(*operands, loc=loc, ip=ip))


@dsl_user_op
def packed(low: Float32, high: Float32, kind: str, *, loc=None, ip=None) -> Int32:
    """Two values rounded to 16 bits; kind is "bf16" or "fp16"."""
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[kind]
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", True, loc, ip))


@dsl_user_op
def unpacked(word: Int32, kind: str, *, loc=None, ip=None):
    """The two values of a word: "bf16", "fp16" or "e4m3" (the word's lower half)."""
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    text = {
        "bf16": "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xffff0000;",
        "fp16": "{\n.reg .b16 l, h;\nmov.b32 {l, h}, $2;\ncvt.f32.f16 $0, l;\ncvt.f32.f16 $1, h;\n}",
        "e4m3": "{\n.reg .b16 e, x, l, h;\n.reg .b32 w;\nmov.b32 {e, x}, $2;\ncvt.rn.f16x2.e4m3x2 w, e;\nmov.b32 {l, h}, w;\n"
        "cvt.f32.f16 $0, l;\ncvt.f32.f16 $1, h;\n}",
    }[kind]
    got = _asm(struct, [Int32(word).ir_value(loc=loc, ip=ip)], text, "=f,=f,r", True, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), got, [i], loc=loc, ip=ip)) for i in range(2)]


# --- the kernel ----------------------------------------------------------------------------------------------------------------------


class Sparse:
    """Token-sparse attention of one variant; call `launch` through cute.compile."""

    def __init__(self, variant: Variant):
        self.v = variant
        v = variant
        self.int8 = v.qk == "int8"
        self.row = 3 * v.dim if self.int8 else 4 * v.dim  # bytes of a row of K and V, on average in a block
        # Whether there is something of a tile that its stage's barriers do not release.
        self.lists = v.fused or not v.cells
        self.pieces, self.qk_pieces = v.dim // 8, v.qk_row // 16  # 16-byte pieces of a row of V, and of Q or K
        # Each warp gathers 16 n rows of a tile, the first one what is left over too.
        self.share = v.tile // 48 * 16
        self.extra = v.tile - 3 * self.share
        self.q_each = -(-M * self.qk_pieces // GATHERING // 4) * 4  # consecutive queries that a thread copies its piece of
        wrong = v.tile % (CELL if v.cells else 16) or v.dim not in (64, 128) or v.qk_row < 128
        if wrong or v.offsets["total"] > 232_448:
            raise ValueError(f"{v} does not fit")
        # Barriers, in shared memory after `offsets["barriers"]`.
        number = 0
        for name, count in (("k", v.stages), ("v", v.stages), ("q", 1), ("factors", 1), ("list", v.slots)):
            setattr(self, f"{name}_full", number)
            setattr(self, f"{name}_empty", number + count)
            number += 2 * count

    @cute.jit
    def launch(self, args: tuple, grid: Int32):
        self.kernel(*args).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], smem=self.v.shared, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q: Int64, rows: Int64, out: Int64, lse: Int64, order: Int64, bits: Int64, counts: Int64, bias: Int64,
        values: Int64, scales: Int64, dense: Int64, again: Int64,
        q_h: Int64, rows_h: Int64, out_h: Int64, dense_h: Int64, order_h: Int64,
        q_s: Int32, out_s: Int32, dense_s: Int32, first: Int32, groups: Int32, total: Int32, length: Int32,
        keys: Int32, bits_row: Int32, in_cells: Int32, cells: Int32, size: Int32,
        rank: Int32, epilogue: Int32, with_lse: Int32, scale: Float32,
    ):  # fmt: skip
        at = self.v.offsets
        smem = cute.arch.get_dyn_smem(self.v.element, alignment=1024)
        start = smem.toint()
        bars = cute.make_ptr(Int64, start + at["barriers"], cute.AddressSpace.smem, assumed_align=8)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            for i in cutlass.range_constexpr(self.v.stages):
                cute.arch.mbarrier_init(bars + self.k_full + i, 1 if self.v.cells else GATHERING + 3 * self.int8)
                cute.arch.mbarrier_init(bars + self.v_full + i, 1 if self.v.cells else GATHERING)
                cute.arch.mbarrier_init(bars + self.k_empty + i, 8)  # consumer warps
                cute.arch.mbarrier_init(bars + self.v_empty + i, 8)
            for i in cutlass.range_constexpr(self.v.slots):
                cute.arch.mbarrier_init(bars + self.list_full + i, 1)
                cute.arch.mbarrier_init(bars + self.list_empty + i, 3 * (not self.v.cells) + 8)  # warps that gather, consumer warps
            cute.arch.mbarrier_init(bars + self.q_full, GATHERING)
            cute.arch.mbarrier_init(bars + self.q_empty, 8)
            cute.arch.mbarrier_init(bars + self.factors_full, GATHERING)
            cute.arch.mbarrier_init(bars + self.factors_empty, 8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        runs = total  # groups that this launch takes
        if const_expr(self.v.online):
            runs = load_i32(again)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.v.producer)
            if const_expr(self.v.cells):
                if warp == 0:
                    self.copy_cells(
                        start, bars, thread, block, grid, q, rows, bits, counts, bias, again,
                        q_h, rows_h, first, groups, runs, keys, bits_row, cells, size, scale,
                    )  # fmt: skip
                else:
                    self.gather_for_groups(
                        start, bars, thread - 32, block, grid, q, order, scales, again,
                        q_h, order_h, q_s, first, groups, runs, rank, epilogue,
                    )  # fmt: skip
            elif warp == 0:
                self.list_rows(
                    start, bars, thread, block, grid, bits, counts, bias, again, first, groups, runs, keys, bits_row, in_cells, cells, size
                )
            else:
                self.gather_rows(
                    start, bars, thread - 32, block, grid, q, rows, order, counts, scales, again,
                    q_h, rows_h, order_h, q_s, first, groups, runs, keys, cells, rank, epilogue, scale,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.v.consumer)
            self.consume(
                smem, start, bars, thread - WARPGROUP, block, grid, out, lse, order, counts, values, scales, dense, again,
                out_h, dense_h, order_h, out_s, dense_s, first, groups, total, runs, length, cells, rank, epilogue, with_lse, scale,
            )  # fmt: skip

    @cute.jit
    def group_of(self, run, again):
        """Which group of the launch is taken `run`-th."""
        local = run
        if const_expr(self.v.online):
            local = load_i32(again + Int64(run + 1) * 4)
        return local

    @cute.jit
    def after(self, index, phase, count: cutlass.Constexpr):
        """The next of `count` stages or slots, and the phase to wait for there."""
        index += 1
        if index == count:
            index, phase = Int32(0), phase ^ 1
        return index, phase

    @cute.jit
    def tiles_of(self, count, cells):
        """Of a group, one at least. With cells, keys and pooled rows are whole blocks each."""
        entries = count + cells
        if const_expr(self.v.cells):
            entries = self.blocks(count) * CELL + self.blocks(cells) * CELL
        return cutlass.max((entries + self.v.tile - 1) // self.v.tile, 1)

    @cute.jit
    def blocks(self, rows):
        """That so many rows fill."""
        return (cutlass.max(rows, 0) + CELL - 1) // CELL

    # The warp that lists rows .........................................................................................................

    @cute.jit
    def load_word(self, bits_at, number, keys, in_cells):
        """Where the bits of keys 32 * number .. + 31 are, for `word`, which may wait for it."""
        at = number >> 5 if in_cells != 0 else number
        return load_if(bits_at + Int64(at) * 4, number * 32 < keys, "b32")

    @cute.jit
    def word(self, loaded, number, keys, in_cells):
        """The selection bits of keys 32 * number .. + 31, 0 past the end."""
        if in_cells != 0:
            loaded = -(loaded >> (number & 31) & 1)
        left = keys - number * 32
        if left < 32:
            loaded = loaded & ((Int32(1) << cutlass.max(left, 0)) - 1)
        return loaded

    @cute.jit
    def list_rows(
        self, start, bars, lane, block, grid, bits, counts, bias, again, first, groups, runs, keys, bits_row, in_cells, cells, size
    ):
        """Row numbers of every tile of every group: selected keys, ascending by 32, then pooled rows, then row 0 up to the tile's end.

        Tiles that are not of keys alone also get what is added to their logits: 0, the log2 of the cell's unselected keys, -inf. Lists
        are as long as counts say, whatever the bits.
        """
        N, SLOTS = self.v.tile, self.v.slots
        RING = SLOTS * N
        numbers_at, bias_at = start + self.v.offsets["numbers"], start + self.v.offsets["bias"]
        numbers_at = cute.arch.shuffle_sync(numbers_at, 0)  # or the compiler finds out anew for every word where shared memory begins
        zero, nothing = Float32(0.0), Float32(MINUS_INFINITY)
        taken, taken_phase, given = Int32(0), Int32(1), Int32(0)  # slots
        run = block
        while run < runs:
            local = self.group_of(run, again)
            at_row = Int64(first * groups + local)
            count = load_i32(counts + at_row * 4)
            bits_at = bits + at_row * bits_row * 4
            total = self.tiles_of(count, cells) * N  # entries, of which those from `plain` on have biases
            plain = cutlass.max(cutlass.min(count // N * N, total), 0)
            origin = given * N  # place of entry 0 in the ring
            room, ready, found = Int32(0), Int32(0), Int32(0)  # entries: of taken slots, of slots given on, listed
            base, place = Int32(0), origin
            loaded = [self.load_word(bits_at, i * 32 + lane, keys, in_cells) for i in range(AHEAD)]
            while found < count and base * 32 < keys:
                later = self.load_word(bits_at, base + AHEAD * 32 + lane, keys, in_cells)
                now = self.word(loaded[0], base + lane, keys, in_cells)
                filled = lanes_with(now)
                if filled != 0:
                    chosen = set_bits(now)
                    before = chosen
                    for step in (1, 2, 4, 8, 16):
                        below = shuffle_up(before, step)
                        if lane >= step:
                            before += below
                    listed = cutlass.min(found + cute.arch.shuffle_sync(before, 31), count)
                    before -= chosen
                    while room < listed:
                        cute.arch.mbarrier_wait(bars + self.list_empty + taken, taken_phase)
                        taken, taken_phase = self.after(taken, taken_phase, SLOTS)
                        room += N
                    words = set_bits(filled)
                    if largest_of_lanes(chosen) < words:
                        self.list_bits(numbers_at, now, (base + lane) * 32, place + before, cutlass.min(chosen, count - found - before))
                    else:
                        self.list_words(numbers_at, now, base * 32, place, before, count - found, filled, words, lane)
                    cute.arch.sync_warp()
                    place += listed - found
                    if place >= RING:
                        place -= RING
                    found = listed
                    while ready + N <= cutlass.min(found, plain):
                        self.release(bars + self.list_full + given, lane)
                        given, _ = self.after(given, Int32(0), SLOTS)
                        ready += N
                loaded = [*loaded[1:], later]
                base += 32

            entry = cutlass.min(found, plain)
            while entry < total:
                stop = cutlass.min(entry + 32, total)
                while room < stop:
                    cute.arch.mbarrier_wait(bars + self.list_empty + taken, taken_phase)
                    taken, taken_phase = self.after(taken, taken_phase, SLOTS)
                    room += N
                mine = entry + lane
                cell = mine - count
                number, more = Int32(0), choose(cell < 0, zero, nothing)
                if cell >= 0 and cell < cells:
                    number = keys + cell
                    if size == 0:
                        more = load_f32(bias + (Int64(local) * cells + cell) * 4)
                    else:
                        more = log2(Float32(self.unselected(bits_at, cell, keys, in_cells, size)))
                if mine < stop:
                    to = (origin + mine) % RING * 4
                    if mine >= found:
                        store_shared_i32(numbers_at + to, number)
                    store_shared_f32(bias_at + to, more)
                cute.arch.sync_warp()
                entry = stop
                while ready + N <= entry:
                    self.release(bars + self.list_full + given, lane)
                    given, _ = self.after(given, Int32(0), SLOTS)
                    ready += N
            run += grid

    @cute.jit
    def list_bits(self, numbers_at, now, key, place, left):
        """`left` of the keys whose bits this lane has, from its place on: all lanes at once."""
        RING = self.v.slots * self.v.tile
        if place >= RING:
            place -= RING
        while left > 0:
            bit = highest_bit(now)
            now = now ^ (Int32(1) << bit)
            store_shared_i32(numbers_at + place * 4, key + bit)
            place += 1
            if place == RING:
                place = Int32(0)
            left -= 1

    @cute.jit
    def list_words(self, numbers_at, now, key, place, before, most, filled, words, lane):
        """The same keys, of which the first `most`, word after word and each lane one bit: for few words, or full ones."""
        RING = self.v.slots * self.v.tile
        below = (Int32(1) << lane) - 1
        for _ in cutlass.range(words):
            owner = highest_bit(filled)
            filled = filled ^ (Int32(1) << owner)
            word = cute.arch.shuffle_sync(now, owner)
            number = cute.arch.shuffle_sync(before, owner) + set_bits(word & below)
            mine = place + number
            if mine >= RING:
                mine -= RING
            wanted = (word >> lane & 1) != 0 and number < most
            store_shared_if(numbers_at + mine * 4, key + owner * 32 + lane, wanted)

    @cute.jit
    def unselected(self, bits_at, cell, keys, in_cells, size):
        """Keys of a cell that are not selected; size is a multiple of 32."""
        words = size // 32
        left = cutlass.min(keys - cell * size, size)
        for i in cutlass.range(0, words, 4, unroll=1):
            numbers = [cell * words + i + j for j in range(4)]
            loaded = [self.load_word(bits_at, number, keys, in_cells) for number in numbers]
            for j in cutlass.range_constexpr(4):
                if i + j < words:
                    left -= set_bits(self.word(loaded[j], numbers[j], keys, in_cells))
        return left

    # With cells: the warp that copies ................................................................................................

    @cute.jit
    def copy_cells(
        self, start, bars, lane, block, grid, q, rows, bits, counts, bias, again,
        q_h, rows_h, first, groups, runs, keys, bits_row, cells, size, scale,
    ):  # fmt: skip
        """Blocks of every tile of every group: selected cells, ascending, then pooled rows, then the last block up to the tile's end.

        Tiles that are not of keys alone also get what is added to their logits, as in list_rows. Lists are as long as counts say, whatever
        the bits. Lane i of `numbers` has the number of the tile's block i.
        """
        v, BLOCKS = self.v, self.v.tile // CELL
        starts_at = start + v.offsets["barriers"], start + v.offsets["k"], start + v.offsets["v"], start + v.offsets["bias"]
        bars_at, k_to, v_to, bias_at = (cute.arch.shuffle_sync(x, 0) for x in starts_at)  # as in list_rows
        scales_at = bars_at + (v.offsets["k_scales"] - v.offsets["barriers"])
        key_blocks, pooled = self.blocks(keys), self.blocks(cells)
        k_stage, k_phase, v_stage, v_phase, slot, slot_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0), Int32(1)
        run = block
        local, count, loaded = self.start_of_group(run, runs, again, bits, counts, bits_row, first, groups, key_blocks, lane)
        q_scale = self.scale_of_queries(run, runs, q, q_h, local, groups)
        while run < runs:
            bits_at = bits + Int64(first * groups + local) * bits_row * 4
            head_at = rows + Int64(local // groups) * rows_h * 2
            tiles, chosen = self.tiles_of(count, cells), self.blocks(count)
            base, now = Int32(0), self.word(loaded, lane, key_blocks, 0)
            later = self.load_word(bits_at, 32 + lane, key_blocks, 0)
            filled = lanes_with(now)
            word, origin, number, numbers = Int32(0), Int32(0), Int32(0), Int32(0)
            factor = scale * q_scale
            run += grid
            following, next_count, loaded = self.start_of_group(run, runs, again, bits, counts, bits_row, first, groups, key_blocks, lane)
            q_scale = self.scale_of_queries(run, runs, q, q_h, following, groups)
            for tile in cutlass.range(tiles, unroll=1):
                before, listed = numbers, tile * BLOCKS
                numbers = number
                for i in cutlass.range(cutlass.min(chosen - listed, BLOCKS), unroll=1):
                    number, word, origin, filled, base, now, later = self.next_cell(
                        number, word, origin, filled, base, now, later, bits_at, key_blocks, lane
                    )
                    if lane >= i:
                        numbers = number
                if pooled > 0 and listed + lane >= chosen:
                    numbers = key_blocks + cutlass.min(listed + lane - chosen, pooled - 1)
                biased = (listed + BLOCKS) * CELL > count
                biases = [Float32(0.0)] * BLOCKS
                if biased:
                    biases = self.biases_of(listed * CELL + lane, chosen, count, bits_at, bias, local, keys, key_blocks, cells, size)

                each = self.addresses(numbers, head_at)
                k_scales = self.load_block_scales(numbers, self.scales_of(head_at, keys, cells), lane)

                cute.arch.mbarrier_wait(bars + self.k_empty + k_stage, k_phase)
                if const_expr(self.lists):
                    cute.arch.mbarrier_wait(bars + self.list_empty + slot, slot_phase)
                place = slot * v.tile + lane
                if biased:
                    for i in cutlass.range_constexpr(BLOCKS):
                        store_shared_f32(bias_at + (place + i * CELL) * 4, biases[i])
                for i in cutlass.range_constexpr(len(k_scales)):
                    store_shared_f32(scales_at + (place + i * CELL) * 4, k_scales[i] * factor)
                cute.arch.sync_warp()
                self.copy_blocks(bars, bars_at, self.k_full + k_stage, k_to + k_stage * (v.tile * v.qk_row), each, lane, 0, v.qk_row)
                k_stage, k_phase = self.after(k_stage, k_phase, v.stages)
                slot, slot_phase = self.after(slot, slot_phase, v.slots)
                if tile > 0:
                    v_stage, v_phase = self.copy_values(bars, bars_at, v_to, before, head_at, lane, v_stage, v_phase)
            v_stage, v_phase = self.copy_values(bars, bars_at, v_to, numbers, head_at, lane, v_stage, v_phase)
            local, count = following, next_count

    @cute.jit
    def start_of_group(self, run, runs, again, bits, counts, bits_row, first, groups, key_blocks, lane):
        """Number and count of the group that is taken run-th, and this lane's word of its first chunk of bits."""
        local, count, loaded = Int32(0), Int32(0), Int32(0)
        if run < runs:
            local = self.group_of(run, again)
            at_row = Int64(first * groups + local)
            count = load_i32(counts + at_row * 4)
            loaded = self.load_word(bits + at_row * bits_row * 4, lane, key_blocks, 0)
        return local, count, loaded

    @cute.jit
    def next_cell(self, number, word, origin, filled, base, now, later, bits_at, key_blocks, lane):
        """The next selected cell, or the same number where there is none.

        word: what is left of that of cells origin .. + 31; filled: lanes whose words of the chunk, `now`, are still to come; base: the
        number of the chunk's first word; later: the next chunk.
        """
        while word == 0 and base * 32 < key_blocks:
            if filled != 0:
                owner = highest_bit(filled & -filled)
                filled = filled & (filled - 1)
                word, origin = cute.arch.shuffle_sync(now, owner), (base + owner) * 32
            else:
                base += 32
                now = self.word(later, base + lane, key_blocks, 0)
                later = self.load_word(bits_at, base + 32 + lane, key_blocks, 0)
                filled = lanes_with(now)
        if word != 0:
            number = origin + highest_bit(word & -word)
            word = word & (word - 1)
        return number, word, origin, filled, base, now, later

    @cute.jit
    def biases_of(self, row, chosen, count, bits_at, bias, local, keys, key_blocks, cells, size):
        """What is added to the logits of this lane's row of each block of a tile. row: that of the first block, counted in the group."""
        rows = [row + i * CELL for i in range(self.v.tile // CELL)]
        got = [choose(r < count, Float32(0.0), Float32(MINUS_INFINITY)) for r in rows]
        if cells > 0:
            numbers = [cutlass.min(cutlass.max(r - chosen * CELL, 0), cells - 1) for r in rows]
            more = got
            if size == 0:
                more = [load_f32(bias + (Int64(local) * cells + cell) * 4) for cell in numbers]
            else:
                more = self.logs_of_unselected(bits_at, numbers, keys, key_blocks, size)
            got = [choose(r - chosen * CELL == cell, m, g) for r, cell, m, g in zip(rows, numbers, more, got, strict=True)]
        return got

    @cute.jit
    def logs_of_unselected(self, bits_at, numbers, keys, key_blocks, size):
        """log2 of the keys of pooled cells that are not selected; -inf for none. size: a multiple of 32, at most 1024."""
        width = size // CELL  # bits of a pooled cell, of which the last one may have fewer
        words = [[self.load_word(bits_at, (n * width >> 5) + i, key_blocks, 0) for i in range(2)] for n in numbers]
        got = []
        for number, (low, high) in zip(numbers, words, strict=True):
            begin = number * width
            field = bits_from(low, high, begin & 31) << (32 - cutlass.min(width, key_blocks - begin))
            left = cutlass.min(keys - number * size, size) - set_bits(field) * CELL
            if field < 0 and begin + width >= key_blocks:
                left += key_blocks * CELL - keys  # the last cell is selected, which has fewer keys
            got.append(log2(Float32(left)))
        return got

    @cute.jit
    def copy_values(self, bars, bars_at, to, numbers, head_at, lane, v_stage, v_phase):
        """V of a tile's blocks."""
        ROW = self.v.dim * 2
        cute.arch.mbarrier_wait(bars + self.v_empty + v_stage, v_phase)
        each = self.addresses(numbers, head_at)
        to += v_stage * (self.v.tile * ROW)
        self.copy_blocks(bars, bars_at, self.v_full + v_stage, to, each, lane, CELL * self.v.qk_row, ROW)
        return self.after(v_stage, v_phase, self.v.stages)

    @cute.jit
    def addresses(self, numbers, head_at):
        """Of a tile's blocks."""
        each = [cute.arch.shuffle_sync(numbers, i) for i in range(self.v.tile // CELL)]
        return [head_at + Int64(number) * (CELL * self.row) for number in each]

    def scales_of(self, head_at, keys, cells):
        """Where a head's key scales are."""
        rows = self.blocks(keys) * CELL + self.blocks(cells) * CELL if self.v.cells else keys + cells
        return head_at + Int64(rows) * self.row

    @cute.jit
    def load_block_scales(self, numbers, scales_at, lane):
        """With int8: of this lane's key of each block of a tile."""
        if const_expr(self.int8):
            each = [cute.arch.shuffle_sync(numbers, i) for i in range(self.v.tile // CELL)]
            return [load_f32(scales_at + Int64(number * CELL + lane) * 4) for number in each]
        return []

    @cute.jit
    def copy_blocks(self, bars, bars_at, barrier, to, each, lane, begin: cutlass.Constexpr, row: cutlass.Constexpr):
        """32 rows of `row` bytes from byte `begin` of each of a tile's blocks; barrier: number of the one that waits for them."""
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(bars + barrier, self.v.tile * row)
            for i in cutlass.range_constexpr(len(each)):
                copy_block(to + i * (CELL * row), each[i] + begin, CELL * row, bars_at + barrier * 8)
        cute.arch.sync_warp()

    # The warps that gather ............................................................................................................

    @cute.jit
    def gather(self, numbers_at: Int32, base: Int64, to: Int32, parts: cutlass.Constexpr, has_extra, source_offset: cutlass.Constexpr):
        """A tile of K or V, of whose rows `parts` are copied together by a warp.

        numbers_at: of this thread's first row; base: the head's, with its piece; to: where it goes; has_extra: its share is the larger one.
        """
        places = [to ^ (16 * i) for i in range(8)]  # the piece's, by distance from the first row
        each = const_expr(self.share // parts)
        self.gather_some(numbers_at, base, places, 0, each, source_offset)
        if const_expr(self.extra > 0):  # noqa: SIM102 -- the outer one is decided by the compiler
            if has_extra:
                self.gather_some(numbers_at, base, places, each, each + self.extra // parts, source_offset)

    @cute.jit
    def gather_some(self, numbers_at, base, places, begin: cutlass.Constexpr, end: cutlass.Constexpr, source_offset: cutlass.Constexpr):
        numbers = []
        for i in cutlass.range_constexpr(begin, end):
            if const_expr(i % 4 == 0):
                numbers = load_shared_i32x4(numbers_at, 4 * i)
            copy16(places[i % 8], base + Int64(numbers[i % 4]) * self.row, i * 128, source_offset)

    @cute.jit
    def scale_of_queries(self, run, runs, q, q_h, local, groups):
        """With int8: of a group of the launch."""
        got = Float32(1.0)
        if const_expr(self.int8):  # noqa: SIM102 -- the outer one is decided by the compiler
            if run < runs:
                codes = Int64(local // groups) * q_h * 2 + Int64(groups) * (M * self.v.dim)
                got = load_f32(q + codes + Int64(local % groups) * 4)
        return got

    @cute.jit
    def load_key_scales(self, start, thread, scales_at: Int64, slot):
        """With int8: those of this thread's keys of a tile."""
        N, got = self.v.tile, []
        if const_expr(self.int8):
            for i in cutlass.range_constexpr(-(-N // GATHERING)):
                column = cutlass.min(thread + i * GATHERING, N - 1)
                number = load_shared_i32(start + self.v.offsets["numbers"] + (slot * N + column) * 4)
                got.append(load_f32(scales_at + Int64(number) * 4))
        return got

    @cute.jit
    def store_key_scales(self, start, bars, thread, slot, k_stage, scales, factor):
        """Times what all logits of the group are multiplied by."""
        N = self.v.tile
        if const_expr(self.int8):
            for i in cutlass.range_constexpr(len(scales)):
                column = thread + i * GATHERING
                if column < N:
                    store_shared_f32(start + self.v.offsets["k_scales"] + (slot * N + column) * 4, scales[i] * factor)
            cute.arch.sync_warp()
            self.release(bars + self.k_full + k_stage, thread % 32)

    @cute.jit
    def gather_rows(
        self, start, bars, thread, block, grid, q, rows, order, counts, scales, again,
        q_h, rows_h, order_h, q_s, first, groups, runs, keys, cells, rank, epilogue, scale,
    ):  # fmt: skip
        v, at = self.v, self.v.offsets
        N, PARTS, QK_PARTS = v.tile, 32 // self.pieces, 32 // self.qk_pieces  # PARTS: rows that a warp copies at once
        warp, lane = thread // 32, thread % 32
        has_extra = warp == 0
        share = self.share + self.extra if has_extra else Int32(self.share)
        warp_row = Int32(0) if has_extra else self.extra + warp * self.share
        piece, qk_piece = lane % self.pieces, lane % self.qk_pieces
        # This thread's first row of V, of K and of the queries: multiples of 4, so that row % 8 ^ i % 8 is (row + i) % 8.
        v_row = warp_row + lane // self.pieces * (share // PARTS)
        k_row = warp_row + lane // self.qk_pieces * (share // QK_PARTS)
        q_row = thread // self.qk_pieces * self.q_each
        to_v = start + at["v"] + (piece // 8) * (N * 128) + v_row * 128 + (piece % 8 ^ v_row % 8) * 16
        to_k = start + at["k"] + (qk_piece // 8) * (N * 128) + k_row * 128 + (qk_piece % 8 ^ k_row % 8) * 16
        to_q = start + at["q"] + (qk_piece // 8) * (M * 128) + q_row * 128 + (qk_piece % 8 ^ q_row % 8) * 16
        k_numbers_at, v_numbers_at = start + at["numbers"] + k_row * 4, start + at["numbers"] + v_row * 4

        k_stage, k_phase, v_stage, v_phase = Int32(0), Int32(1), Int32(0), Int32(1)
        slot, slot_phase, q_phase, factors_phase = Int32(0), Int32(0), Int32(1), Int32(1)
        run, count, local = block, Int32(0), Int32(0)
        tokens = [Int32(-1)] * -(-self.q_each // self.qk_pieces)
        if run < runs:
            local = self.group_of(run, again)
            count = load_i32(counts + Int64(first * groups + local) * 4)
            tokens = self.queries(order, order_h, first, groups, local, q_row, qk_piece)
        q_scale = self.scale_of_queries(run, runs, q, q_h, local, groups)
        while run < runs:
            head, group = local // groups, local % groups
            factor = scale * q_scale
            tiles = self.tiles_of(count, cells)
            head_at = rows + Int64(head) * rows_h * 2
            k_at, v_at, scales_at = head_at + qk_piece * 16, head_at + piece * 16, self.scales_of(head_at, keys, cells)

            # K of the first tile
            k_stage, k_phase = self.gather_keys(
                start, k_numbers_at, scales_at, k_at, to_k, bars, thread, slot, slot_phase, k_stage, k_phase, has_extra, factor
            )
            self.gather_queries(bars, q + Int64(head) * q_h * 2, q_s, group, to_q, tokens, q_row, qk_piece, lane, q_phase)
            q_phase ^= 1

            # What the next group needs first
            factors = scales + Int64(first + head) * rank * (2 * v.dim)
            run += grid
            next_count = Int32(0)
            if run < runs:
                local = self.group_of(run, again)
                next_count = load_i32(counts + Int64(first * groups + local) * 4)
                tokens = self.queries(order, order_h, first, groups, local, q_row, qk_piece)
            q_scale = self.scale_of_queries(run, runs, q, q_h, local, groups)

            for _ in cutlass.range(1, tiles, unroll=1):
                before = slot
                slot, slot_phase = self.after(slot, slot_phase, v.slots)
                k_stage, k_phase = self.gather_keys(
                    start, k_numbers_at, scales_at, k_at, to_k, bars, thread, slot, slot_phase, k_stage, k_phase, has_extra, factor
                )
                v_stage, v_phase = self.gather_values(v_numbers_at, v_at, to_v, bars, before, v_stage, v_phase, lane, has_extra)
            v_stage, v_phase = self.gather_values(v_numbers_at, v_at, to_v, bars, slot, v_stage, v_phase, lane, has_extra)
            slot, slot_phase = self.after(slot, slot_phase, v.slots)

            if epilogue == RANK:
                factors_phase = self.gather_rank(start, bars, factors, rank, piece, thread, factors_phase)
            count = next_count
        wait_for_copies()

    @cute.jit
    def gather_for_groups(
        self, start, bars, thread, block, grid, q, order, scales, again, q_h, order_h, q_s, first, groups, runs, rank, epilogue
    ):
        """With cells: queries and factors alone."""
        lane, piece = thread % 32, thread % self.qk_pieces
        row = thread // self.qk_pieces * self.q_each
        to = start + self.v.offsets["q"] + (piece // 8) * (M * 128) + row * 128 + (piece % 8 ^ row % 8) * 16
        q_phase, factors_phase = Int32(1), Int32(1)
        run, local = block, Int32(0)
        tokens = [Int32(-1)] * -(-self.q_each // self.qk_pieces)
        if run < runs:
            local = self.group_of(run, again)
            tokens = self.queries(order, order_h, first, groups, local, row, piece)
        while run < runs:
            head, group = local // groups, local % groups
            self.gather_queries(bars, q + Int64(head) * q_h * 2, q_s, group, to, tokens, row, piece, lane, q_phase)
            q_phase ^= 1
            run += grid
            if run < runs:
                local = self.group_of(run, again)
                tokens = self.queries(order, order_h, first, groups, local, row, piece)
            if epilogue == RANK:
                factors = scales + Int64(first + head) * rank * (2 * self.v.dim)
                factors_phase = self.gather_rank(start, bars, factors, rank, thread % self.pieces, thread, factors_phase)
        wait_for_copies()

    @cute.jit
    def gather_rank(self, start, bars, factors, rank, piece, thread, factors_phase):
        """All factor rows of a rank residual, RANKS at a time."""
        for step in cutlass.range((rank + RANKS - 1) // RANKS, unroll=1):
            cute.arch.mbarrier_wait(bars + self.factors_empty, factors_phase)
            factors_phase ^= 1
            self.gather_factors(start, factors, step * RANKS, rank, piece, thread // self.pieces)
            cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.factors_full)
        return factors_phase

    @cute.jit
    def queries(self, order, order_h, first, groups, local, row, piece):
        """The tokens of this lane's share of its part's rows; -1 for none. With int8 queries are in their order."""
        if const_expr(self.int8):
            return [Int32(-1)] * -(-self.q_each // self.qk_pieces)
        at = order + (Int64(first + local // groups) * order_h + Int64(local % groups * M)) * 4
        got = []
        for i in cutlass.range_constexpr(-(-self.q_each // self.qk_pieces)):
            own = i * self.qk_pieces + piece
            place = row + own
            token = Int32(-1)
            if own < self.q_each and place < M:
                token = load_i32(at + Int64(place) * 4)
            got.append(token)
        return got

    @cute.jit
    def gather_queries(self, bars, head_at, q_s, group, to, tokens, row, piece, lane, q_phase):
        """Q of a group. tokens: of this thread's rows from `row` on, spread over the lanes that copy the same rows."""
        EACH, PIECES = self.q_each, self.qk_pieces
        cute.arch.mbarrier_wait(bars + self.q_empty, q_phase)
        for i in cutlass.range_constexpr(EACH):
            if const_expr(self.int8):
                if row + i < M:
                    copy16(to ^ (i % 8 * 16), head_at + (Int64(group) * M + (row + i)) * self.v.dim + piece * 16, i * 128, 0)
            else:
                token = cute.arch.shuffle_sync(tokens[i // PIECES], lane // PIECES * PIECES + i % PIECES)
                if row + i < M:
                    filled = Int32(16) if token >= 0 else Int32(0)
                    source = head_at + Int64(cutlass.max(token, 0)) * q_s * 2 + piece * 16
                    copy16_or_zero(to ^ (i % 8 * 16), source, filled, i * 128)
        cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.q_full)

    @cute.jit
    def gather_keys(self, start, numbers_at, scales_at, base, to, bars, thread, slot, slot_phase, k_stage, k_phase, has_extra, factor):
        """K of the tile listed in slot."""
        N, STAGE = self.v.tile, self.v.tile * self.v.qk_row
        cute.arch.mbarrier_wait(bars + self.list_full + slot, slot_phase)
        cute.arch.mbarrier_wait(bars + self.k_empty + k_stage, k_phase)
        scales = self.load_key_scales(start, thread, scales_at, slot)
        self.gather(numbers_at + slot * (N * 4), base, to + k_stage * STAGE, 32 // self.qk_pieces, has_extra, 0)
        cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.k_full + k_stage)
        self.store_key_scales(start, bars, thread, slot, k_stage, scales, factor)
        return self.after(k_stage, k_phase, self.v.stages)

    @cute.jit
    def gather_values(self, numbers_at, base, to, bars, slot, v_stage, v_phase, lane, has_extra):
        """V of the tile listed in slot, which is done with then."""
        N, STAGE = self.v.tile, self.v.tile * self.v.dim * 2
        cute.arch.mbarrier_wait(bars + self.v_empty + v_stage, v_phase)
        self.gather(numbers_at + slot * (N * 4), base, to + v_stage * STAGE, 32 // self.pieces, has_extra, self.v.qk_row)
        cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.v_full + v_stage)
        cute.arch.sync_warp()
        self.release(bars + self.list_empty + slot, lane)
        return self.after(v_stage, v_phase, self.v.stages)

    @cute.jit
    def gather_factors(self, start, factors, first, rank, piece, part):
        """Factor rows first .. first + RANKS - 1 of a rank residual, zeros from rank on."""
        parts = GATHERING // self.pieces
        for i in cutlass.range_constexpr(-(-RANKS // parts)):
            row = i * parts + part
            if row < RANKS:
                to = start + self.v.offsets["factors"] + (piece // 8) * (RANKS * 128) + row * 128 + ((piece % 8) ^ (row % 8)) * 16
                filled = Int32(16) if first + row < rank else Int32(0)
                source = factors + Int64(cutlass.min(first + row, rank - 1)) * (2 * self.v.dim) + piece * 16
                copy16_or_zero(to, source, filled, 0)

    # Consumer ........................................................................................................................

    @cute.jit
    def consume(
        self, smem, start, bars, thread, block, grid, out, lse, order, counts, values, scales, dense, again,
        out_h, dense_h, order_h, out_s, dense_s, first, groups, total, runs, length, cells, rank, epilogue, with_lse, scale,
    ):  # fmt: skip
        v, at = self.v, self.v.offsets
        N, D, element = v.tile, v.dim, v.element
        group_of_warps = cute.arch.make_warp_uniform(thread // WARPGROUP)  # 0 or 1
        lane, warp = thread % 32, thread % WARPGROUP // 32
        operands = warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
        if const_expr(self.int8):
            qk, qk_element = cute.make_tiled_mma(warpgroup.MmaI8Op(Int8, Int8, Int32, (64, N, 32), *operands)), Int8
        else:
            qk, qk_element = cute.make_tiled_mma(warpgroup.MmaF16BF16Op(element, Float32, (64, N, 16), *operands)), element
        pv = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                element, Float32, (64, D, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
            )
        )
        # The product of a rank residual's factors, which are bfloat16.
        uf = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                cutlass.BFloat16, Float32, (64, D, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
            )
        )
        s_q = self.staged(smem, at["q"], M, 1, qk_element)
        s_k = self.staged(smem, at["k"], N, v.stages, qk_element, v.cells)
        s_v = self.across(self.staged(smem, at["v"], N, v.stages, element, v.cells))
        s_f = self.across(self.staged(smem, at["factors"], RANKS, 1, cutlass.BFloat16))
        own_q = cute.local_tile(s_q, (64, D), (group_of_warps, 0, 0))
        qk_thread, pv_thread = qk.get_slice(0), pv.get_slice(0)
        frag_q = qk_thread.make_fragment_A(qk_thread.partition_A(own_q))
        frag_k = qk_thread.make_fragment_B(qk_thread.partition_B(s_k))
        frag_v = pv_thread.make_fragment_B(pv_thread.partition_B(s_v))
        uf_thread = uf.get_slice(0)
        frag_f = uf_thread.make_fragment_B(uf_thread.partition_B(s_f))
        u = cute.make_rmem_tensor(uf_thread.partition_shape_A((64, RANKS)), cutlass.BFloat16)
        s = cute.make_rmem_tensor(qk_thread.partition_shape_C((64, N)), Float32)
        dots = cute.make_rmem_tensor(qk_thread.partition_shape_C((64, N)), Int32) if const_expr(self.int8) else s
        o = cute.make_rmem_tensor(pv_thread.partition_shape_C((64, D)), Float32)
        p = cute.make_rmem_tensor(pv_thread.partition_shape_A((64, N)), element)
        p_words = cute.recast_tensor(p, Int32)
        my_bias, my_scales = start + at["bias"] + lane % 4 * 8, start + at["k_scales"] + lane % 4 * 8

        if const_expr(not v.online):  # noqa: SIM102 -- the outer one is decided by the compiler
            if group_of_warps == 1:
                cute.arch.barrier_arrive(barrier_id=TURNS, number_of_threads=2 * WARPGROUP)

        logit_factor = Float32(1.0) if const_expr(self.int8) else scale
        run, local, count = block, Int32(0), Int32(0)
        if run < runs:
            local = self.group_of(run, again)
            count = load_i32(counts + Int64(first * groups + local) * 4)
        k_stage, k_phase, v_stage, v_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        slot, slot_phase, q_phase, factors_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        while run < runs:
            run += grid
            following, next_count = Int32(0), Int32(0)
            if run < runs:
                following = self.group_of(run, again)
                next_count = load_i32(counts + Int64(first * groups + following) * 4)
            tiles = self.tiles_of(count, cells)
            plain = cutlass.max(cutlass.min(count // N, tiles), 1)  # tiles from here on have biases; the first is looked at anyway
            o.fill(0.0)

            # First tile: its largest logits are the reference.
            cute.arch.mbarrier_wait(bars + self.q_full, q_phase)
            q_phase ^= 1
            cute.arch.mbarrier_wait(bars + self.k_full + k_stage, k_phase)
            self.see_gathered()
            self.multiply_qk(qk, dots, frag_q, frag_k, k_stage)
            warpgroup.wait_group(0)
            self.apply_key_scales(dots, s, my_scales + slot * (N * 4))
            factor = logit_factor
            if count < N:
                self.add_bias(s, my_bias, bars, slot, slot_phase, factor)
                factor = Float32(1.0)
            self.release(bars + self.k_empty + k_stage, lane)
            self.release_list(bars, slot, lane)
            k_stage, k_phase = self.after(k_stage, k_phase, v.stages)
            slot, slot_phase = self.after(slot, slot_phase, v.slots)
            m0, m1 = self.largest(s, factor)
            zero = Float32(0.0)
            l0, l1, l2, l3 = self.exponentials(s, factor, self.finite(m0), self.finite(m1), zero, zero, zero, zero)
            if const_expr(not v.online):
                m0, m1 = self.finite(m0), self.finite(m1)
            self.pack(s, p_words)

            for _ in cutlass.range(1, plain, unroll=1):
                k_stage, k_phase, v_stage, v_phase, slot, slot_phase, m0, m1, l0, l1, l2, l3 = self.step(
                    qk, pv, dots, s, o, p, p_words, frag_q, frag_k, frag_v, bars, my_bias, my_scales, lane, group_of_warps, logit_factor,
                    k_stage, k_phase, v_stage, v_phase, slot, slot_phase, m0, m1, l0, l1, l2, l3, False,
                )  # fmt: skip
            for _ in cutlass.range(plain, tiles, unroll=1):
                k_stage, k_phase, v_stage, v_phase, slot, slot_phase, m0, m1, l0, l1, l2, l3 = self.step(
                    qk, pv, dots, s, o, p, p_words, frag_q, frag_k, frag_v, bars, my_bias, my_scales, lane, group_of_warps, logit_factor,
                    k_stage, k_phase, v_stage, v_phase, slot, slot_phase, m0, m1, l0, l1, l2, l3, True,
                )  # fmt: skip
            self.release(bars + self.q_empty, lane)

            head, group = local // groups, local % groups
            slot_of_row = group * M + group_of_warps * 64 + warp * 16 + lane // 4  # this thread's rows: this one, and 8 below
            order_at = order + (Int64(first + head) * order_h + Int64(slot_of_row)) * 4
            token0, token1 = load_i32(order_at), load_i32(order_at + 32)
            ranks = rank if epilogue == RANK else Int32(0)
            slots = Int64(first + head) * groups * M + slot_of_row
            left = self.left_factors(values, slots, rank, Int32(0), ranks, lane)

            cute.arch.mbarrier_wait(bars + self.v_full + v_stage, v_phase)
            self.see_copies()
            self.multiply_pv(pv, o, p, frag_v[None, None, None, v_stage])
            warpgroup.wait_group(0)
            self.release(bars + self.v_empty + v_stage, lane)
            v_stage, v_phase = self.after(v_stage, v_phase, v.stages)

            l0, l1 = self.across_quad(l0 + l2), self.across_quad(l1 + l3)
            self.divide(o, l0, l1)
            for step in cutlass.range((ranks + RANKS - 1) // RANKS, unroll=1):
                self.pack_factors(left, u)
                left = self.left_factors(values, slots, rank, (step + 1) * RANKS, ranks, lane)
                cute.arch.mbarrier_wait(bars + self.factors_full, factors_phase)
                factors_phase ^= 1
                self.see_gathered()
                self.multiply_pv(uf, o, u, frag_f[None, None, None, 0])
                warpgroup.wait_group(0)
                self.release(bars + self.factors_empty, lane)
            self.finish(
                o, l0, l1, m0, m1, token0, token1, slot_of_row, first + head, local, lane, out, lse, values, scales, dense, again,
                out_h, dense_h, out_s, dense_s, groups, total, length, count + cells, epilogue, with_lse,
            )  # fmt: skip
            local, count = following, next_count

    @cute.jit
    def left_factors(self, values, slots, rank, first, ranks, lane):
        """Columns first .. first + RANKS - 1 of this thread's two rows of U (rows, rank), 0 from `ranks` on; in the order of an operand."""
        got = []
        for i in cutlass.range_constexpr(RANKS // 4):  # by 8 columns, rows 0 and 8
            column = first + i // 2 * 8 + lane % 4 * 2
            at = values + ((slots + i % 2 * 8) * rank + column) * 2
            for j in cutlass.range_constexpr(2):
                got.append(load_if(at + 2 * j, column + j < ranks, "u16"))
        return got

    @cute.jit
    def pack_factors(self, left, u):
        words = cute.recast_tensor(u, Int32)
        for i in cutlass.range_constexpr(RANKS // 4):
            words[i] = left[2 * i] | (left[2 * i + 1] << 16)

    def staged(self, smem, offset, rows, stages, element, alternating=False):
        """Matrices in shared memory, K-major: (rows, D, stages). alternating: blocks of columns do so every 8 rows."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
        layout = cute.tile_to_shape(atom, (rows, self.v.dim, stages), order=(1, 0, 2) if alternating else (0, 1, 2))
        return cute.make_tensor(cute.recast_ptr(smem + offset // 2, layout.inner, element), layout.outer)

    def across(self, matrices):
        """(D, rows, stages)"""
        return cute.make_tensor(matrices.iterator, cute.select(matrices.layout, mode=[1, 0, 2]))

    @cute.jit
    def see_copies(self):
        """After waiting for K or V. The copy engine writes through the proxy that wgmma reads through."""
        if const_expr(not self.v.cells):
            self.see_gathered()

    @cute.jit
    def see_gathered(self):
        """After waiting for a full barrier: what cp.async wrote becomes visible to wgmma, which reads through another proxy."""
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release(self, barrier, lane):
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def release_list(self, bars, slot, lane):
        """Of a tile of keys; where there is none, biases and scales are released with K."""
        if const_expr(self.lists):
            self.release(bars + self.list_empty + slot, lane)

    @cute.jit
    def apply_key_scales(self, dots, s, source):
        """With int8: s becomes the products times the scales of their keys."""
        if const_expr(self.int8):
            for j in cutlass.range_constexpr(self.v.tile // 8):
                b = load_shared_f32x2(source, j * 32)
                for i in cutlass.range_constexpr(4):
                    s[4 * j + i] = Float32(dots[4 * j + i]) * b[i % 2]
            cute.arch.sync_warp()

    @cute.jit
    def multiply_qk(self, qk, s, frag_q, frag_k, stage):
        atom = cute.make_mma_atom(qk.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(frag_q, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(atom, s, frag_q[None, None, k], frag_k[None, None, k, stage], s)
        warpgroup.commit_group()

    @cute.jit
    def multiply_pv(self, pv, o, p, frag_v):
        atom = cute.make_mma_atom(pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(p, mode=[2])):
            cute.gemm(atom, o, p[None, None, k], frag_v[None, None, k], o)
        warpgroup.commit_group()

    @cute.jit
    def step(
        self, qk, pv, dots, s, o, p, p_words, frag_q, frag_k, frag_v, bars, my_bias, my_scales, lane, group_of_warps, factor,
        k_stage, k_phase, v_stage, v_phase, slot, slot_phase, m0, m1, l0, l1, l2, l3, biased: cutlass.Constexpr,
    ):  # fmt: skip
        """The logits of one tile and the values of the tile before."""
        v = self.v
        fused = const_expr(v.fused and not biased)
        cute.arch.mbarrier_wait(bars + self.k_full + k_stage, k_phase)
        self.see_copies()
        if const_expr(not v.online):
            cute.arch.barrier(barrier_id=TURNS + group_of_warps, number_of_threads=2 * WARPGROUP)
        self.multiply_qk(qk, dots, frag_q, frag_k, k_stage)
        cute.arch.mbarrier_wait(bars + self.v_full + v_stage, v_phase)
        self.see_copies()
        self.multiply_pv(pv, o, p, frag_v[None, None, None, v_stage])
        if const_expr(not v.online):
            cute.arch.barrier_arrive(barrier_id=TURNS + 1 - group_of_warps, number_of_threads=2 * WARPGROUP)
        warpgroup.wait_group(1)
        if const_expr(not fused):
            self.apply_key_scales(dots, s, my_scales + slot * (v.tile * 4))
        if const_expr(biased):
            self.add_bias(s, my_bias, bars, slot, slot_phase, factor)
            factor = Float32(1.0)
        self.release(bars + self.k_empty + k_stage, lane)
        if const_expr(not fused):
            self.release_list(bars, slot, lane)
        if const_expr(v.online):
            warpgroup.wait_group(0)  # before o is rescaled
            n0, n1 = self.largest(s, factor)
            n0, n1 = lower(m0, n0), lower(m1, n1)
            f0, f1 = exp2(self.finite(n0) - m0), exp2(self.finite(n1) - m1)
            m0, m1, l0, l1, l2, l3 = n0, n1, l0 * f0, l1 * f1, l2 * f0, l3 * f1
            self.multiply_rows(o, f0, f1)
            l0, l1, l2, l3 = self.exponentials(s, factor, self.finite(m0), self.finite(m1), l0, l1, l2, l3)
        elif const_expr(fused):
            l0, l1, l2, l3 = self.exponentials_of_dots(dots, s, my_scales + slot * (v.tile * 4), m0, m1, l0, l1, l2, l3)
            self.release_list(bars, slot, lane)
        else:
            l0, l1, l2, l3 = self.exponentials(s, factor, m0, m1, l0, l1, l2, l3)
        if const_expr(v.cells and not v.online):
            know((l0 + l1) + (l2 + l3))  # or the assembler takes most exponentials after the wait for PV
        warpgroup.wait_group(0)
        self.release(bars + self.v_empty + v_stage, lane)
        self.pack(s, p_words)
        k_stage, k_phase = self.after(k_stage, k_phase, v.stages)
        v_stage, v_phase = self.after(v_stage, v_phase, v.stages)
        slot, slot_phase = self.after(slot, slot_phase, v.slots)
        return k_stage, k_phase, v_stage, v_phase, slot, slot_phase, m0, m1, l0, l1, l2, l3

    @cute.jit
    def add_bias(self, s, my_bias, bars, slot, slot_phase, factor):
        """s * factor + bias. A thread has columns 8 j + 2 (lane % 4) and the next, of two rows."""
        if const_expr(not self.v.cells):  # else they came with K
            cute.arch.mbarrier_wait(bars + self.list_full + slot, slot_phase)  # passed by those who gathered the tile; now by its reader
        source = my_bias + slot * (self.v.tile * 4)
        for j in cutlass.range_constexpr(self.v.tile // 8):
            b = load_shared_f32x2(source, j * 32)
            for i in cutlass.range_constexpr(4):
                s[4 * j + i] = fma(s[4 * j + i], factor, b[i % 2])
        cute.arch.sync_warp()

    @cute.jit
    def largest(self, s, factor):
        """Minus the largest logit of both rows, inf where there is none."""
        m0, m1 = Float32(MINUS_INFINITY), Float32(MINUS_INFINITY)
        for j in cutlass.range_constexpr(self.v.tile // 8):
            m0, m1 = maximum(m0, s[4 * j] * factor), maximum(m1, s[4 * j + 2] * factor)
            m0, m1 = maximum(m0, s[4 * j + 1] * factor), maximum(m1, s[4 * j + 3] * factor)
        for step in cutlass.range_constexpr(1, 3):
            m0 = maximum(m0, cute.arch.shuffle_sync_bfly(m0, step))
            m1 = maximum(m1, cute.arch.shuffle_sync_bfly(m1, step))
        return -m0, -m1

    @cute.jit
    def finite(self, m):
        return choose(m == Float32(-MINUS_INFINITY), Float32(0.0), m)

    @cute.jit
    def exponentials(self, s, factor, m0, m1, l0, l1, l2, l3):
        """s becomes 2^(s * factor + m), by rows; its sums over this thread's columns are added to l0 + l2 and l1 + l3."""
        for j in cutlass.range_constexpr(self.v.tile // 8):
            for i in cutlass.range_constexpr(4):
                s[4 * j + i] = exp2(fma(s[4 * j + i], factor, m0 if i < 2 else m1))
            l0, l1 = l0 + s[4 * j], l1 + s[4 * j + 2]
            l2, l3 = l2 + s[4 * j + 1], l3 + s[4 * j + 3]
        return l0, l1, l2, l3

    @cute.jit
    def exponentials_of_dots(self, dots, s, source, m0, m1, l0, l1, l2, l3):
        """The same of products in int8, by the scales of their keys."""
        for j in cutlass.range_constexpr(self.v.tile // 8):
            b = load_shared_f32x2(source, j * 32)
            for i in cutlass.range_constexpr(4):
                s[4 * j + i] = exp2(fma(Float32(dots[4 * j + i]), b[i % 2], m0 if i < 2 else m1))
            l0, l1 = l0 + s[4 * j], l1 + s[4 * j + 2]
            l2, l3 = l2 + s[4 * j + 1], l3 + s[4 * j + 3]
        cute.arch.sync_warp()
        return l0, l1, l2, l3

    @cute.jit
    def pack(self, s, p_words):
        """The accumulator of QK in the order of the left operand of PV: both hold the same four values of 8 columns together."""
        for i in cutlass.range_constexpr(cute.size(s) // 2):
            p_words[i] = packed(s[2 * i], s[2 * i + 1], self.v.dtype)

    @cute.jit
    def across_quad(self, x):
        for step in cutlass.range_constexpr(1, 3):
            x += cute.arch.shuffle_sync_bfly(x, step)
        return x

    # Epilogue ........................................................................................................................

    @cute.jit
    def multiply_rows(self, o, r0, r1):
        """The accumulator's row of this thread, and the one 8 below, by r0 and r1."""
        for j in cutlass.range_constexpr(self.v.dim // 8):
            o[4 * j], o[4 * j + 1] = o[4 * j] * r0, o[4 * j + 1] * r0
            o[4 * j + 2], o[4 * j + 3] = o[4 * j + 2] * r1, o[4 * j + 3] * r1

    @cute.jit
    def divide(self, o, l0, l1):
        one, zero = Float32(1.0), Float32(0.0)
        self.multiply_rows(o, reciprocal(choose(l0 == zero, one, l0)), reciprocal(choose(l1 == zero, one, l1)))

    @cute.jit
    def finish(
        self, o, l0, l1, m0, m1, token0, token1, slot, head, local, lane, out, lse, values, scales, dense, again,
        out_h, dense_h, out_s, dense_s, groups, total, length, entries, epilogue, with_lse,
    ):  # fmt: skip
        D, quad = self.v.dim, lane % 4
        if const_expr(not self.v.online):
            lost = l0 > self.v.lost_above or l1 > self.v.lost_above or not l0 >= 1e-30 or not l1 >= 1e-30
            if lost and entries > 0:  # noqa: SIM102 -- exchanged only then
                if exchanged(again + Int64(1 + total + local) * 4, Int32(1)) == 0:
                    store_i32(again + Int64(1 + added(again, Int32(1))) * 4, local)
        if with_lse != 0 and quad == 0:
            for row in cutlass.range_constexpr(2):
                token, l, m = (token0, l0, m0) if const_expr(row == 0) else (token1, l1, m1)
                if token >= 0:
                    sum_of_logs = Float32(MINUS_INFINITY)
                    if l != 0.0:
                        sum_of_logs = (log2(l) - m) * LN_2
                    store_f32(lse + (Int64(head) * length + token) * 4, sum_of_logs)

        self.quads_to_pieces(o, quad)
        # Now o[8 (2 c + row) + i] is column 32 c + 8 (lane % 4) + i.
        slots = Int64(head) * groups * M + slot
        for row in cutlass.range_constexpr(2):
            token = token0 if const_expr(row == 0) else token1
            live = token >= 0
            if epilogue == DIFFERENCE:
                source = dense + (Int64(head) * dense_h + Int64(cutlass.max(token, 0)) * dense_s + quad * 8) * 2
                self.subtract_from(o, source, row, live)
            elif epilogue != 0 and epilogue != RANK:
                self.add_residual(o, values, scales, slots + row * 8, quad, row, epilogue)
            place = Int64(slot + row * 8 if epilogue == DIFFERENCE else token) * out_s
            if live or epilogue == DIFFERENCE:
                to = out + (Int64(head) * out_h + place + quad * 8) * 2
                for c in cutlass.range_constexpr(D // 32):
                    at = 8 * (2 * c + row)
                    words = [packed(o[at + 2 * i], o[at + 2 * i + 1], self.v.dtype) for i in range(4)]
                    store_words(to + c * 64, words)

    def quads_to_pieces(self, o, quad):
        """Of each 4 blocks of 8 columns, of which each of 4 lanes has 2 columns, every lane gets one block whole."""
        for c in range(self.v.dim // 32):
            pieces = []
            for row in range(2):
                # x[i]: the two columns that this lane has of block 4 c + i; after both steps, that lane i had of this lane's block.
                x = [[o[16 * c + 4 * i + 2 * row], o[16 * c + 4 * i + 2 * row + 1]] for i in range(4)]
                for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
                    upper = (quad & bit) != 0
                    for low, high in pairs:
                        for w in range(2):
                            kept = choose(upper, x[high][w], x[low][w])
                            received = cute.arch.shuffle_sync_bfly(choose(upper, x[low][w], x[high][w]), bit)
                            x[low][w], x[high][w] = choose(upper, received, kept), choose(upper, kept, received)
                pieces.append([value for item in x for value in item])
            for row in range(2):
                for i in range(8):
                    o[8 * (2 * c + row) + i] = pieces[row][i]

    @cute.jit
    def subtract_from(self, o, source, row: cutlass.Constexpr, live):
        """dense - o, 0 where there is no query."""
        for c in cutlass.range_constexpr(self.v.dim // 32):
            at = 8 * (2 * c + row)
            words = load_words(source + c * 64, 4)
            for i in cutlass.range_constexpr(4):
                full = unpacked(words[i], self.v.dtype)
                for w in cutlass.range_constexpr(2):
                    o[at + 2 * i + w] = choose(live, full[w] - o[at + 2 * i + w], Float32(0.0))

    @cute.jit
    def add_residual(self, o, values, scales, slot, quad, row: cutlass.Constexpr, epilogue):
        """Layouts as in kernels/residual/reference.py. slot: of the row, Int64."""
        D = self.v.dim
        if epilogue == BF16:
            for c in cutlass.range_constexpr(D // 32):
                words = load_words(values + (slot * D + quad * 8 + c * 32) * 2, 4)
                for i in cutlass.range_constexpr(4):
                    self.add(o, 8 * (2 * c + row) + 2 * i, unpacked(words[i], "bf16"), Float32(1.0))
        elif epilogue == FP8:
            factor = unpacked(load_u16(scales + slot * 2), "fp16")[0]
            for c in cutlass.range_constexpr(D // 32):
                words = load_words(values + slot * D + quad * 8 + c * 32, 2)
                for i in cutlass.range_constexpr(4):
                    self.add(o, 8 * (2 * c + row) + 2 * i, unpacked(words[i // 2] >> (16 * (i % 2)), "e4m3"), factor)
        elif epilogue == INT4:
            for c in cutlass.range_constexpr(D // 32):
                factor = unpacked(load_u16(scales + (slot * (D // 32) + c) * 2), "fp16")[0]
                word = load_i32(values + slot * (D // 2) + quad * 4 + c * 16)
                for i in cutlass.range_constexpr(4):
                    levels = [Float32(((word >> (8 * i + 4 * w)) & 15) - 8) for w in (0, 1)]
                    self.add(o, 8 * (2 * c + row) + 2 * i, levels, factor)
        else:
            for c in cutlass.range_constexpr(D // 32):
                factor = unpacked(load_u16(scales + (slot * (D // 32) + c) * 2), "fp16")[0]
                codes = load_u16(values + slot * (D // 4) + quad * 2 + c * 8)
                for i in cutlass.range_constexpr(4):
                    levels = [self.level(codes >> (4 * i + 2 * w)) for w in (0, 1)]
                    self.add(o, 8 * (2 * c + row) + 2 * i, levels, factor)

    def level(self, code):
        size = choose((code & 1) != 0, Float32(INT2_OUTER), Float32(INT2_INNER))
        return choose((code & 2) != 0, -size, size)

    def add(self, o, at, two, factor):
        for w in range(2):
            o[at + w] = fma(two[w], factor, o[at + w])
