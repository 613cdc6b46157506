"""The device side of the Hopper kernel of token-sparse attention, in CuTeDSL. Needed to build the cubins, never at run time.

One persistent program per multiprocessor takes groups `block, block + grid, ...`, head after head. Its four producer warps gather the
group's queries and its rows of keys and values with cp.async into rings of stages; each of its two consumer warpgroups multiplies 64
queries with them (wgmma), so that the products of one tile run under the exponentials of another.

Exponentials are taken relative to the row's largest logit of the first tile: no running maximum, no rescaling of the accumulator. Groups
in which a row leaves the range of the format are flagged in `again`, to be computed online by another kernel.

Shared memory: Q (128, D) | K stages (N, D) | V stages (N, D) | biases (stages, N) float32 | barriers. A matrix is stored as D/64 blocks of
64 columns; in a block each row is 128 bytes, whose 16-byte pieces are permuted by (piece ^ row % 8): what wgmma calls 128-byte swizzle,
for K (rows are the outputs' columns) as well as for V (rows are summed over).
"""
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import arith, llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

M = 128  # queries of a group
WARPGROUP = 128  # threads
THREADS = 3 * WARPGROUP
MINUS_INFINITY = float("-inf")
LN_2 = 0.6931471805599453
# What happens at the end, by residual format; as in triton_sparse.py.
BF16, FP8, INT4, INT2, RANK, DIFFERENCE = 1, 2, 3, 4, 5, 6
INT2_INNER, INT2_OUTER = 0.45, 1.7
PINGPONG_BARRIER = 1  # named barriers 1 and 2: a warpgroup may issue its products

# Parameters of the kernel, in order: name and type; "p" is a pointer. The host side launches by this list.
PARAMETERS = (
    ("q", "p"), ("rows", "p"), ("out", "p"), ("lse", "p"), ("order", "p"), ("numbers", "p"), ("counts", "p"), ("bias", "p"),
    ("values", "p"), ("scales", "p"), ("dense", "p"), ("again", "p"), ("minus", "p"),
    ("q_h", "i64"), ("rows_h", "i64"), ("out_h", "i64"), ("dense_h", "i64"), ("order_h", "i64"),
    ("q_s", "i32"), ("out_s", "i32"), ("dense_s", "i32"), ("first", "i32"), ("groups", "i32"), ("total", "i32"), ("length", "i32"),
    ("wide", "i32"), ("cells", "i32"), ("rank", "i32"), ("epilogue", "i32"), ("with_lse", "i32"), ("scale", "f32"),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One cubin. tile: keys in one step (a multiple of 16); stages: tiles in flight; producer, consumer: registers per thread."""

    dtype: str = "bf16"
    dim: int = 128
    tile: int = 128
    stages: int = 3
    pingpong: bool = True
    fence: bool = True  # cp.async writes by one proxy, wgmma reads by the other
    producer: int = 56
    consumer: int = 224
    cache: str = ""  # of K and V loads: "", "L2::128B", "L2::256B"

    @property
    def name(self) -> str:
        flags = ("" if self.pingpong else "_nopong") + ("" if self.fence else "_nofence")
        flags += "_" + self.cache.replace("::", "").lower() if self.cache else ""
        return f"sparse_{self.dtype}_d{self.dim}_n{self.tile}_s{self.stages}{flags}"

    @property
    def element(self):
        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[self.dtype]

    @property
    def lost_above(self) -> float:
        """Sums of exponentials beyond this are computed again: some exponential may not fit the format."""
        return {"bf16": 1e30, "fp16": 6e4}[self.dtype]

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes from the start of shared memory, and the total."""
        matrix = 2 * self.dim
        k = M * matrix
        v = k + self.stages * self.tile * matrix
        bias = v + self.stages * self.tile * matrix
        barriers = bias + self.stages * self.tile * 4
        return {"q": 0, "k": k, "v": v, "bias": bias, "barriers": barriers, "total": barriers + 8 * (4 * self.stages + 2)}


# By measurement on an H200 (benchmarks/ladder/hopper_sparse.md).
SHIPPED = (
    Variant(tile=144, stages=2), Variant("fp16", tile=144, stages=2),
    Variant(dim=64, tile=192, stages=4), Variant("fp16", dim=64, tile=192, stages=4),
)  # fmt: skip


def swizzled(row: int, column: int, rows: int) -> int:
    """Byte of an element of a matrix in shared memory; what `produce` writes to and the layouts of `consume` read from."""
    return (column // 64) * rows * 128 + row * 128 + ((column % 64 // 8) ^ (row % 8)) * 16 + column % 8 * 2


# --- single instructions -------------------------------------------------------------------------------------------------------------


def _asm(result, operands, text, constraints, pure, loc, ip):
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=not pure, is_align_stack=False, loc=loc, ip=ip)


@dsl_user_op
def copy16(to: Int32, source: Int64, to_offset: int, source_offset: int, cache: str, *, loc=None, ip=None):
    """16 bytes from global to shared memory, asynchronously."""
    cache = f".{cache}" if cache else ""
    text = f"cp.async.cg.shared.global{cache} [$0 + {to_offset}], [$1 + {source_offset}], 16;"
    _asm(None, [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip)], text, "r,l", False, loc, ip)


@dsl_user_op
def copy16_or_zero(to: Int32, source: Int64, size: Int32, to_offset: int, *, loc=None, ip=None):
    """The same, or zeros where size is 0."""
    operands = [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, f"cp.async.cg.shared.global [$0 + {to_offset}], [$1], 16, $2;", "r,l,r", False, loc, ip)


@dsl_user_op
def copy4_or_zero(to: Int32, source: Int64, size: Int32, *, loc=None, ip=None):
    operands = [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r", False, loc, ip)


@dsl_user_op
def wait_for_copies(*, loc=None, ip=None):
    """Of this thread."""
    _asm(None, [], "cp.async.wait_all;", "", False, loc, ip)


@dsl_user_op
def load_i32(source: Int64, *, loc=None, ip=None) -> Int32:
    """Stays where it is written, so that it can be waited for later."""
    return Int32(_asm(T.i32(), [Int64(source).ir_value(loc=loc, ip=ip)], "ld.global.nc.b32 $0, [$1];", "=r,l", False, loc, ip))


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
def store_words(to: Int64, words, *, loc=None, ip=None):
    """Four words of 32 bits."""
    operands = [Int64(to).ir_value(loc=loc, ip=ip)] + [Int32(w).ir_value(loc=loc, ip=ip) for w in words]
    _asm(None, operands, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", False, loc, ip)


@dsl_user_op
def store_f32(to: Int64, value: Float32, *, loc=None, ip=None):
    operands = [Int64(to).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.global.f32 [$0], $1;", "l,f", False, loc, ip)


@dsl_user_op
def store_i32(to: Int64, value: Int32, *, loc=None, ip=None):
    operands = [Int64(to).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "st.global.b32 [$0], $1;", "l,r", False, loc, ip)


@dsl_user_op
def load_shared_f32x2(source: Int32, offset: int, *, loc=None, ip=None):
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    got = _asm(struct, [Int32(source).ir_value(loc=loc, ip=ip)], text, "=f,=f,r", False, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), got, [i], loc=loc, ip=ip)) for i in range(2)]


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
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(_asm(T.f32(), operands, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", True, loc, ip))


@dsl_user_op
def maximum(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(_asm(T.f32(), operands, "max.f32 $0, $1, $2;", "=f,f,f", True, loc, ip))


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


@dsl_user_op
def mma_16x8x16(c, a, b, *, loc=None, ip=None):
    """c + a b for fragments c (4 float32), a (4 words), b (2 words) of bfloat16."""
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in c] + [Int32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)]
    text = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
    got = _asm(struct, operands, text, "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r", True, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), got, [i], loc=loc, ip=ip)) for i in range(4)]


# --- the kernel ----------------------------------------------------------------------------------------------------------------------


class Sparse:
    """Token-sparse attention of one variant; call `launch` through cute.compile."""

    def __init__(self, variant: Variant):
        self.v = variant
        v = variant
        if v.tile % 16 or v.dim not in (64, 128) or v.offsets["total"] > 232_448:
            raise ValueError(f"{v} does not fit")
        self.pieces = v.dim // 8  # 16-byte pieces of a row of K or V
        self.warp_rows = 32 // self.pieces  # rows a warp copies at once
        self.pass_rows = 4 * self.warp_rows
        self.number_words = -(-v.tile // 128)  # row numbers of a tile that a lane keeps
        s = v.stages
        # Barriers, in shared memory after `offsets["barriers"]`.
        self.k_full, self.v_full, self.k_empty, self.v_empty, self.q_full, self.q_empty = 0, s, 2 * s, 3 * s, 4 * s, 4 * s + 1

    @cute.jit
    def launch(self, args: tuple, grid: Int32):
        self.kernel(*args).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], smem=self.v.offsets["total"], min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        q: Int64, rows: Int64, out: Int64, lse: Int64, order: Int64, numbers: Int64, counts: Int64, bias: Int64,
        values: Int64, scales: Int64, dense: Int64, again: Int64, minus: Int64,
        q_h: Int64, rows_h: Int64, out_h: Int64, dense_h: Int64, order_h: Int64,
        q_s: Int32, out_s: Int32, dense_s: Int32, first: Int32, groups: Int32, total: Int32, length: Int32,
        wide: Int32, cells: Int32, rank: Int32, epilogue: Int32, with_lse: Int32, scale: Float32,
    ):  # fmt: skip
        at = self.v.offsets
        smem = cute.arch.get_dyn_smem(self.v.element, alignment=1024)
        start = smem.toint()
        bars = cute.make_ptr(Int64, start + at["barriers"], cute.AddressSpace.smem, assumed_align=8)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            for i in cutlass.range_constexpr(self.v.stages):
                cute.arch.mbarrier_init(bars + self.k_full + i, WARPGROUP)
                cute.arch.mbarrier_init(bars + self.v_full + i, WARPGROUP)
                cute.arch.mbarrier_init(bars + self.k_empty + i, 8)  # consumer warps
                cute.arch.mbarrier_init(bars + self.v_empty + i, 8)
            cute.arch.mbarrier_init(bars + self.q_full, WARPGROUP)
            cute.arch.mbarrier_init(bars + self.q_empty, 8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.v.producer)
            self.produce(
                start, bars, thread, block, grid, q, rows, order, numbers, counts, bias, minus,
                q_h, rows_h, order_h, q_s, first, groups, total, wide, cells,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.v.consumer)
            self.consume(
                smem, start, bars, thread - WARPGROUP, block, grid, out, lse, order, counts, values, scales, dense, again,
                out_h, dense_h, order_h, out_s, dense_s, first, groups, total, length, cells, rank, epilogue, with_lse, scale,
            )  # fmt: skip

    # Producer ........................................................................................................................

    @cute.jit
    def load_numbers(self, source: Int64, lane_at: Int32, tile: Int32, tiles: Int32):
        """This lane's row numbers of a tile, if there is such a tile."""
        got = []
        for i in cutlass.range_constexpr(self.number_words):
            number = Int32(0)
            if tile < tiles and lane_at + i * 128 < self.v.tile:
                number = load_i32(source + Int64(tile * self.v.tile + lane_at + i * 128) * 4)
            got.append(number)
        return got

    @cute.jit
    def gather(self, numbers: list, base: Int64, to: Int32, in_warp: Int32, source_offset: cutlass.Constexpr):
        """A tile of K or V. base: of the head, with this thread's piece; to: this thread's first piece in the stage."""
        for p in cutlass.range_constexpr(self.v.tile // self.pass_rows):
            lane = p * self.warp_rows
            number = cute.arch.shuffle_sync(numbers[lane // 32], lane % 32 + in_warp)
            source = base + Int64(number) * (4 * self.v.dim)
            copy16(to, source, p * self.pass_rows * 128, source_offset, self.v.cache)

    @cute.jit
    def produce(
        self, start, bars, thread, block, grid, q, rows, order, numbers, counts, bias, minus,
        q_h, rows_h, order_h, q_s, first, groups, total, wide, cells,
    ):  # fmt: skip
        v, at = self.v, self.v.offsets
        N, STAGE = v.tile, v.tile * v.dim * 2
        warp, lane = thread // 32, thread % 32
        piece, in_warp = lane % self.pieces, lane // self.pieces
        row = warp * self.warp_rows + in_warp  # + pass * pass_rows, a multiple of 8
        swizzle = ((piece % 8) ^ (row % 8)) * 16
        to_kv = start + (piece // 8) * (N * 128) + row * 128 + swizzle
        to_q = start + at["q"] + (piece // 8) * (M * 128) + row * 128 + swizzle
        # Lane i keeps the number of the row that lanes `i % warp_rows` of pass `i // warp_rows` copy.
        lane_at = (lane // self.warp_rows) * self.pass_rows + warp * self.warp_rows + lane % self.warp_rows

        local = block
        head, group = local // groups, local % groups
        count = Int32(0)
        token = Int32(-1)
        if local < total:
            count = load_i32(counts + Int64(first * groups + local) * 4)
            token = load_i32(order + (Int64(first + head) * order_h + Int64(group * M + lane_at)) * 4)
        ahead = self.load_numbers(numbers + Int64(local) * wide * 4, lane_at, Int32(0), total - local)
        k_stage, k_phase, v_stage, v_phase, q_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(1)
        while local < total:
            keys = count + cells
            tiles = cutlass.max((keys + N - 1) // N, 1)
            list_at = numbers + Int64(local) * wide * 4
            bias_at = bias + Int64(local) * cells * 4
            base = rows + Int64(head) * rows_h * 2 + piece * 16
            now = ahead
            ahead = self.load_numbers(list_at, lane_at, Int32(1), tiles)

            # K of the first tile
            cute.arch.mbarrier_wait(bars + self.k_empty + k_stage, k_phase)
            self.gather(now, base, to_kv + at["k"] + k_stage * STAGE, in_warp, 0)
            self.gather_bias(start, thread, bias_at, minus, Int32(0), count, cells, k_stage)
            cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.k_full + k_stage)
            k_stage += 1
            if k_stage == v.stages:
                k_stage, k_phase = Int32(0), k_phase ^ 1

            # Q
            q_at = q + Int64(first + head) * q_h * 2 + piece * 16
            cute.arch.mbarrier_wait(bars + self.q_empty, q_phase)
            q_phase ^= 1
            for p in cutlass.range_constexpr(M // self.pass_rows):
                one = cute.arch.shuffle_sync(token, p * self.warp_rows % 32 + in_warp)
                size = Int32(16) if one >= 0 else Int32(0)
                source = q_at + Int64(cutlass.max(one, 0)) * q_s * 2
                copy16_or_zero(to_q, source, size, p * self.pass_rows * 128)
            cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.q_full)

            # What the next group needs first
            local += grid
            head, group = local // groups, local % groups
            next_count = Int32(0)
            if local < total:
                next_count = load_i32(counts + Int64(first * groups + local) * 4)
                token = load_i32(order + (Int64(first + head) * order_h + Int64(group * M + lane_at)) * 4)
            next_ahead = self.load_numbers(numbers + Int64(local) * wide * 4, lane_at, Int32(0), total - local)

            for tile in cutlass.range(1, tiles, unroll=1):
                after = self.load_numbers(list_at, lane_at, tile + 1, tiles)
                cute.arch.mbarrier_wait(bars + self.k_empty + k_stage, k_phase)
                self.gather(ahead, base, to_kv + at["k"] + k_stage * STAGE, in_warp, 0)
                self.gather_bias(start, thread, bias_at, minus, tile, count, cells, k_stage)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.k_full + k_stage)
                k_stage += 1
                if k_stage == v.stages:
                    k_stage, k_phase = Int32(0), k_phase ^ 1
                cute.arch.mbarrier_wait(bars + self.v_empty + v_stage, v_phase)
                self.gather(now, base, to_kv + at["v"] + v_stage * STAGE, in_warp, 2 * v.dim)
                cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.v_full + v_stage)
                v_stage += 1
                if v_stage == v.stages:
                    v_stage, v_phase = Int32(0), v_phase ^ 1
                now, ahead = ahead, after

            cute.arch.mbarrier_wait(bars + self.v_empty + v_stage, v_phase)
            self.gather(now, base, to_kv + at["v"] + v_stage * STAGE, in_warp, 2 * v.dim)
            cute.arch.cp_async_mbarrier_arrive_noinc(bars + self.v_full + v_stage)
            v_stage += 1
            if v_stage == v.stages:
                v_stage, v_phase = Int32(0), v_phase ^ 1
            count, ahead = next_count, next_ahead
        wait_for_copies()

    @cute.jit
    def gather_bias(self, start, thread, bias_at, minus, tile, count, cells, stage):
        """What a tile with pooled rows or padding adds to its logits: 0 for keys, the cell's bias, -inf past the end."""
        N = self.v.tile
        if (tile + 1) * N > count:
            for i in cutlass.range_constexpr(self.number_words):
                column = thread + i * 128
                if column < N:
                    cell = tile * N + column - count
                    source = minus
                    if cell >= 0 and cell < cells:
                        source = bias_at + Int64(cell) * 4
                    size = Int32(4) if cell >= 0 else Int32(0)
                    copy4_or_zero(start + self.v.offsets["bias"] + (stage * N + column) * 4, source, size)

    # Consumer ........................................................................................................................

    @cute.jit
    def consume(
        self, smem, start, bars, thread, block, grid, out, lse, order, counts, values, scales, dense, again,
        out_h, dense_h, order_h, out_s, dense_s, first, groups, total, length, cells, rank, epilogue, with_lse, scale,
    ):  # fmt: skip
        v, at = self.v, self.v.offsets
        N, D, element = v.tile, v.dim, v.element
        group_of_warps = cute.arch.make_warp_uniform(thread // WARPGROUP)  # 0 or 1
        lane, warp = thread % 32, thread % WARPGROUP // 32
        qk = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                element, Float32, (64, N, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
            )
        )
        pv = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                element, Float32, (64, D, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
            )
        )
        s_q = self.matrix(smem, at["q"], M)
        s_k = self.staged(smem, at["k"])
        s_v = self.staged(smem, at["v"])
        s_v = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, mode=[1, 0, 2]))  # (D, N, stages)
        own_q = cute.local_tile(s_q, (64, D), (group_of_warps, 0))
        qk_thread, pv_thread = qk.get_slice(0), pv.get_slice(0)
        frag_q = qk_thread.make_fragment_A(qk_thread.partition_A(own_q))
        frag_k = qk_thread.make_fragment_B(qk_thread.partition_B(s_k))
        frag_v = pv_thread.make_fragment_B(pv_thread.partition_B(s_v))
        s = cute.make_rmem_tensor(qk_thread.partition_shape_C((64, N)), Float32)
        o = cute.make_rmem_tensor(pv_thread.partition_shape_C((64, D)), Float32)
        p = cute.make_rmem_tensor(pv_thread.partition_shape_A((64, N)), element)
        p_words = cute.recast_tensor(p, Int32)
        my_bias = start + at["bias"] + lane % 4 * 8

        if const_expr(v.pingpong):  # noqa: SIM102 -- the outer one is decided by the compiler
            if group_of_warps == 1:
                cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER, number_of_threads=2 * WARPGROUP)

        local = block
        count = Int32(0)
        if local < total:
            count = load_i32(counts + Int64(first * groups + local) * 4)
        k_stage, k_phase, v_stage, v_phase, q_phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        while local < total:
            following = local + grid
            next_count = Int32(0)
            if following < total:
                next_count = load_i32(counts + Int64(first * groups + following) * 4)
            keys = count + cells
            tiles = cutlass.max((keys + N - 1) // N, 1)
            plain = cutlass.max(cutlass.min(count // N, tiles), 1)  # tiles from here on have biases; the first is looked at anyway
            o.fill(0.0)

            # First tile: its largest logits are the reference.
            cute.arch.mbarrier_wait(bars + self.q_full, q_phase)
            q_phase ^= 1
            cute.arch.mbarrier_wait(bars + self.k_full + k_stage, k_phase)
            self.see_copies()
            self.multiply_qk(qk, s, frag_q, frag_k, k_stage)
            warpgroup.wait_group(0)
            factor = scale
            if count < N:
                self.add_bias(s, my_bias + k_stage * (N * 4), scale)
                factor = Float32(1.0)
            self.release(bars + self.k_empty + k_stage, lane)
            k_stage += 1
            if k_stage == v.stages:
                k_stage, k_phase = Int32(0), k_phase ^ 1
            m0, m1 = self.largest(s, factor)
            l0, l1, l2, l3 = self.exponentials(s, factor, m0, m1, Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
            self.pack(s, p_words)

            for _ in cutlass.range(1, plain, unroll=1):
                k_stage, k_phase, v_stage, v_phase, l0, l1, l2, l3 = self.step(
                    qk, pv, s, o, p, p_words, frag_q, frag_k, frag_v, bars, my_bias, lane, group_of_warps, scale, m0, m1,
                    k_stage, k_phase, v_stage, v_phase, l0, l1, l2, l3, False,
                )  # fmt: skip
            for _ in cutlass.range(plain, tiles, unroll=1):
                k_stage, k_phase, v_stage, v_phase, l0, l1, l2, l3 = self.step(
                    qk, pv, s, o, p, p_words, frag_q, frag_k, frag_v, bars, my_bias, lane, group_of_warps, scale, m0, m1,
                    k_stage, k_phase, v_stage, v_phase, l0, l1, l2, l3, True,
                )  # fmt: skip
            self.release(bars + self.q_empty, lane)

            head, group = local // groups, local % groups
            slot = group * M + group_of_warps * 64 + warp * 16 + lane // 4  # this thread's rows: this one, and 8 below
            order_at = order + (Int64(first + head) * order_h + Int64(slot)) * 4
            token0, token1 = load_i32(order_at), load_i32(order_at + 32)

            cute.arch.mbarrier_wait(bars + self.v_full + v_stage, v_phase)
            self.see_copies()
            self.multiply_pv(pv, o, p, frag_v, v_stage)
            warpgroup.wait_group(0)
            self.release(bars + self.v_empty + v_stage, lane)
            v_stage += 1
            if v_stage == v.stages:
                v_stage, v_phase = Int32(0), v_phase ^ 1

            l0, l1 = self.across_quad(l0 + l2), self.across_quad(l1 + l3)
            self.finish(
                o, l0, l1, m0, m1, token0, token1, slot, first + head, local, lane, out, lse, values, scales, dense, again,
                out_h, dense_h, out_s, dense_s, groups, length, keys, rank, epilogue, with_lse,
            )  # fmt: skip
            local, count = following, next_count

    def matrix(self, smem, offset, rows):
        """A (rows, D) matrix in shared memory, K-major."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.v.element)
        layout = cute.tile_to_shape(atom, (rows, self.v.dim), order=(0, 1))
        return cute.make_tensor(cute.recast_ptr(smem + offset // 2, layout.inner, self.v.element), layout.outer)

    def staged(self, smem, offset):
        """(N, D, stages)"""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.v.element)
        layout = cute.tile_to_shape(atom, (self.v.tile, self.v.dim, self.v.stages), order=(0, 1, 2))
        return cute.make_tensor(cute.recast_ptr(smem + offset // 2, layout.inner, self.v.element), layout.outer)

    @cute.jit
    def see_copies(self):
        """After waiting for a full barrier: what cp.async wrote becomes visible to wgmma, which reads through another proxy."""
        if const_expr(self.v.fence):
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release(self, barrier, lane):
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def multiply_qk(self, qk, s, frag_q, frag_k, stage):
        atom = cute.make_mma_atom(qk.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(frag_q, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(atom, s, frag_q[None, None, k], frag_k[None, None, k, stage], s)
        warpgroup.commit_group()

    @cute.jit
    def multiply_pv(self, pv, o, p, frag_v, stage):
        atom = cute.make_mma_atom(pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(p, mode=[2])):
            cute.gemm(atom, o, p[None, None, k], frag_v[None, None, k, stage], o)
        warpgroup.commit_group()

    @cute.jit
    def step(
        self, qk, pv, s, o, p, p_words, frag_q, frag_k, frag_v, bars, my_bias, lane, group_of_warps, scale, m0, m1,
        k_stage, k_phase, v_stage, v_phase, l0, l1, l2, l3, biased: cutlass.Constexpr,
    ):  # fmt: skip
        """The logits of one tile and the values of the tile before."""
        v = self.v
        cute.arch.mbarrier_wait(bars + self.k_full + k_stage, k_phase)
        self.see_copies()
        if const_expr(v.pingpong):
            cute.arch.barrier(barrier_id=PINGPONG_BARRIER + group_of_warps, number_of_threads=2 * WARPGROUP)
        self.multiply_qk(qk, s, frag_q, frag_k, k_stage)
        cute.arch.mbarrier_wait(bars + self.v_full + v_stage, v_phase)
        self.see_copies()
        self.multiply_pv(pv, o, p, frag_v, v_stage)
        if const_expr(v.pingpong):
            cute.arch.barrier_arrive(barrier_id=PINGPONG_BARRIER + 1 - group_of_warps, number_of_threads=2 * WARPGROUP)
        warpgroup.wait_group(1)
        factor = scale
        if const_expr(biased):
            self.add_bias(s, my_bias + k_stage * (v.tile * 4), scale)
            factor = Float32(1.0)
        self.release(bars + self.k_empty + k_stage, lane)
        l0, l1, l2, l3 = self.exponentials(s, factor, m0, m1, l0, l1, l2, l3)
        warpgroup.wait_group(0)
        self.release(bars + self.v_empty + v_stage, lane)
        self.pack(s, p_words)
        k_stage += 1
        if k_stage == v.stages:
            k_stage, k_phase = Int32(0), k_phase ^ 1
        v_stage += 1
        if v_stage == v.stages:
            v_stage, v_phase = Int32(0), v_phase ^ 1
        return k_stage, k_phase, v_stage, v_phase, l0, l1, l2, l3

    @cute.jit
    def add_bias(self, s, source, scale):
        """s * scale + bias. A thread has columns 8 j + 2 (lane % 4) and the next, of two rows."""
        for j in cutlass.range_constexpr(self.v.tile // 8):
            b = load_shared_f32x2(source, j * 32)
            for i in cutlass.range_constexpr(4):
                s[4 * j + i] = fma(s[4 * j + i], scale, b[i % 2])
        cute.arch.sync_warp()

    @cute.jit
    def largest(self, s, factor):
        """Minus the largest logit of both rows, 0 where there is none."""
        m0, m1 = Float32(MINUS_INFINITY), Float32(MINUS_INFINITY)
        for j in cutlass.range_constexpr(self.v.tile // 8):
            m0, m1 = maximum(m0, s[4 * j] * factor), maximum(m1, s[4 * j + 2] * factor)
            m0, m1 = maximum(m0, s[4 * j + 1] * factor), maximum(m1, s[4 * j + 3] * factor)
        for step in cutlass.range_constexpr(1, 3):
            m0 = maximum(m0, cute.arch.shuffle_sync_bfly(m0, step))
            m1 = maximum(m1, cute.arch.shuffle_sync_bfly(m1, step))
        zero, nothing = Float32(0.0), Float32(MINUS_INFINITY)
        return choose(m0 == nothing, zero, -m0), choose(m1 == nothing, zero, -m1)

    @cute.jit
    def exponentials(self, s, factor, m0, m1, l0, l1, l2, l3):
        """s becomes 2^(s * factor + m); its sums over this thread's columns are added to l0 + l2 and l1 + l3."""
        for j in cutlass.range_constexpr(self.v.tile // 8):
            for i in cutlass.range_constexpr(4):
                s[4 * j + i] = exp2(fma(s[4 * j + i], factor, m0 if i < 2 else m1))
            l0, l1 = l0 + s[4 * j], l1 + s[4 * j + 2]
            l2, l3 = l2 + s[4 * j + 1], l3 + s[4 * j + 3]
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
    def finish(
        self, o, l0, l1, m0, m1, token0, token1, slot, head, local, lane, out, lse, values, scales, dense, again,
        out_h, dense_h, out_s, dense_s, groups, length, keys, rank, epilogue, with_lse,
    ):  # fmt: skip
        D, quad = self.v.dim, lane % 4
        lost = l0 > self.v.lost_above or l1 > self.v.lost_above or not l0 >= 1e-30 or not l1 >= 1e-30
        if lost and keys > 0:
            store_i32(again + Int64(local) * 4, 1)
        if with_lse != 0 and quad == 0:
            for row in cutlass.range_constexpr(2):
                token, l, m = (token0, l0, m0) if const_expr(row == 0) else (token1, l1, m1)
                if token >= 0:
                    total = Float32(MINUS_INFINITY)
                    if l != 0.0:
                        total = (log2(l) - m) * LN_2
                    store_f32(lse + (Int64(head) * length + token) * 4, total)
        one, zero = Float32(1.0), Float32(0.0)
        r0, r1 = reciprocal(choose(l0 == zero, one, l0)), reciprocal(choose(l1 == zero, one, l1))
        for j in cutlass.range_constexpr(D // 8):
            o[4 * j], o[4 * j + 1] = o[4 * j] * r0, o[4 * j + 1] * r0
            o[4 * j + 2], o[4 * j + 3] = o[4 * j + 2] * r1, o[4 * j + 3] * r1
        if epilogue == RANK:
            self.add_rank(o, values, scales, Int64(head) * groups * M + slot, head, lane, rank)

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

    @cute.jit
    def add_rank(self, o, values, scales, slots, head, lane, rank):
        """U V, U (rows, rank), V (rank, D) bfloat16, by tensor cores whose accumulators are laid out as `o`."""
        D = self.v.dim
        for block in cutlass.range((rank + 15) // 16, unroll=1):
            k = block * 16 + lane % 4 * 2
            a = []
            for i in cutlass.range_constexpr(4):  # rows 0, 8, then the same 8 columns further
                u_at = values + ((slots + i % 2 * 8) * rank + k + i // 2 * 8) * 2
                a.append(self.pair(u_at, u_at + 2, k + i // 2 * 8, rank))
            for j in cutlass.range_constexpr(D // 8):
                b = []
                for i in cutlass.range_constexpr(2):
                    v_at = scales + ((Int64(head) * rank + k + i * 8) * D + 8 * j + lane // 4) * 2
                    b.append(self.pair(v_at, v_at + 2 * D, k + i * 8, rank))
                c = mma_16x8x16([o[4 * j + i] for i in range(4)], a, b)
                for i in cutlass.range_constexpr(4):
                    o[4 * j + i] = c[i]

    @cute.jit
    def pair(self, low_at, high_at, k, rank):
        """bfloat16 values number k and k + 1, 0 from rank on."""
        low, high = Int32(0), Int32(0)
        if k < rank:
            low = load_u16(low_at)
        if k + 1 < rank:
            high = load_u16(high_at)
        return low | (high << 16)

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
