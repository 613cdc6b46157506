"""The passes before the Hopper kernel, in CuTeDSL: keys and values side by side in cell order with the means of their cells, and int8.

Needed to build the cubins, never at run time. A warp takes 128 places of one head, 32 at a time; a thread has 16 bytes of keys or values,
from row to row, and keeps their sums. int8 as in kernels/quantise.py: a row of keys, less their mean, has one float32 scale, as has a
group of queries, which a program takes whole.

For the attention that copies cells, rows come in blocks of 32 as it wants them in shared memory: K, then V, each as 8 rows of 128 bytes of
columns, the same 8 rows of the next 128 bytes, the next 8 rows; piece i of 16 bytes of row r lies at i ^ r % 8. Rows past an end are zeros.
In int8 the scales of a head's keys follow its rows; 1 past an end.
"""
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cute_sm90_mainloop import (
    CELL,
    M,
    choose,
    fma,
    load_i32,
    load_shared_f32x2,
    load_words,
    load_words_if,
    magnitude,
    nearly_reciprocal,
    of_halves,
    other_type,
    packed,
    packed_bytes,
    product_plus,
    store_f32,
    store_shared_f32,
    store_two_words,
    store_words,
    unpacked,
)  # fmt: skip
from cutlass import Float32, Int32, Int64, const_expr

PLACES = 128  # of a warp
ROUNDER = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number, whose lowest byte is the sum's

# Parameters of the kernels, in order: name and type; "p" is a pointer. Strides count elements of 16 bits.
#
# k, v (heads, length, D) by their strides; order (length,) int64: token at each place; rows (heads, total, 2 D) rows_h apart, or with int8
# of 3 D bytes, keys and values, and after them `total` float32, the scales. With cells, rows are blocks (heads, total / 32, 32 * 2 D or, in
# int8, 32 * 3 D bytes): first those of keys. mean (heads, D) float32, with int8: of the keys. size: keys of a cell, 32, 64 or 128; 0: no
# means. Parts: heads * ceil(length / places), heads fastest: where the model keeps (B, S, H, D), their rows are neighbours. A launch may
# have fewer programs than parts.
ROWS = (
    ("k", "p"), ("v", "p"), ("order", "p"), ("mean", "p"), ("rows", "p"),
    ("k_h", "i64"), ("v_h", "i64"), ("rows_h", "i64"),
    ("k_s", "i32"), ("v_s", "i32"), ("heads", "i32"), ("length", "i32"), ("total", "i32"), ("size", "i32"), ("parts", "i32"),
)  # fmt: skip
# rows (heads, groups * 128, D) int8, in the order of groups, order (heads, groups * 128) int32 with -1 for none; a head's scales (groups)
# float32 come after its codes. x (heads, length, D) by its strides. Programs: heads * groups, heads fastest.
QUERIES = (
    ("x", "p"), ("order", "p"), ("rows", "p"), ("x_h", "i64"), ("order_h", "i64"), ("rows_h", "i64"),
    ("x_s", "i32"), ("heads", "i32"), ("groups", "i32"),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One cubin. what: a key of KERNELS; warps: of a program; flying: loads of a thread; blocks: programs that an SM must have room for."""

    what: str = "rows"
    dtype: str = "bf16"
    dim: int = 128
    warps: int = 4
    flying: int = 4
    blocks: int = 8

    @property
    def name(self) -> str:
        return f"{self.what}_{self.dtype}_d{self.dim}"

    @property
    def kernel(self) -> type:
        return KERNELS[self.what][0]

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        return KERNELS[self.what][1]

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def places(self) -> int:
        """Of a program."""
        return PLACES * self.warps

    @property
    def shared(self) -> int:
        return 4 * self.warps * (self.what == "queries_int8")


SHIPPED = (
    *(Variant(what, dtype, dim) for what in ("rows", "rows_cells") for dim in (128, 64) for dtype in ("bf16", "fp16")),
    *(Variant(what, dtype, blocks=5) for what in ("rows_int8", "rows_int8_cells", "queries_int8") for dtype in ("bf16", "fp16")),
)


class Pass:
    """Common to the kernels of one variant; call `launch` through cute.compile."""

    def __init__(self, variant: Variant):
        self.v = variant

    @cute.jit
    def launch(self, args: tuple, grid: Int32):
        threads, blocks, shared = self.v.threads, self.v.blocks, self.v.shared
        self.kernel(*args).launch(
            grid=[grid, 1, 1], block=[threads, 1, 1], smem=shared, min_blocks_per_mp=blocks, preferred_smem_carveout=100
        )

    @cute.jit
    def places_of(self, number, heads, length):
        """The head of part `number` and this warp's places, first and end."""
        start = number // heads * self.v.places + cute.arch.thread_idx()[0] // 32 * PLACES
        return number % heads, start, cutlass.min(start + PLACES, length)

    def values_of(self, words):
        return [x for word in words for x in unpacked(word, self.v.dtype)]

    def quotient(self, a, b):
        """a / b to nearest, where 1 / b is a normal number. A division of the compiler's is a call."""
        y = nearly_reciprocal(b)
        y = fma(y, fma(-b, y, Float32(1.0)), y)
        q = a * y
        return fma(fma(-q, b, a), y, q)

    @cute.jit
    def scales_of(self, reach):
        """The scale of numbers up to `reach`, and codes per unit."""
        empty, one = reach == Float32(0.0), Float32(1.0)
        scale = choose(empty, one, self.quotient(reach, Float32(127.0))) + reach * Float32(0.0)  # NaN for NaN and infinity
        return scale, choose(empty, one, self.quotient(Float32(127.0), reach))

    def codes_of(self, x, per_unit):
        """Of eight numbers, two words."""
        codes = [product_plus(value, per_unit, Float32(ROUNDER)) for value in x]
        return [packed_bytes(codes[:4]), packed_bytes(codes[4:])]

    @cute.jit
    def largest_of_half_warp(self, reach):
        for step in (1, 2, 4, 8):
            reach = magnitude(reach, cute.arch.shuffle_sync_bfly(reach, step))
        return reach


class Rows(Pass):
    """Keys and values."""

    def __init__(self, variant: Variant):
        super().__init__(variant)
        self.int8, self.cells = "int8" in variant.what, "cells" in variant.what
        self.row = 3 * variant.dim if self.int8 else 4 * variant.dim  # bytes, on average in a block
        self.pieces = 2 * variant.dim // 8  # 16-byte pieces of a key and its value
        self.at_once = 32 // self.pieces  # rows of a warp

    @cute.kernel
    def kernel(
        self,
        k: Int64, v: Int64, order: Int64, mean: Int64, rows: Int64, k_h: Int64, v_h: Int64, rows_h: Int64,
        k_s: Int32, v_s: Int32, heads: Int32, length: Int32, total: Int32, size: Int32, parts: Int32,
    ):  # fmt: skip
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for part in cutlass.range(block, parts, grid, unroll=1):
            self.lay_out(part, k, v, order, mean, rows, k_h, v_h, rows_h, k_s, v_s, heads, length, total, size)

    @cute.jit
    def lay_out(self, number, k, v, order, mean, rows, k_h, v_h, rows_h, k_s, v_s, heads, length, total, size):
        ONCE, FLYING = self.at_once, self.v.flying
        head, start, stop = self.places_of(number, heads, length)
        lane = cute.arch.thread_idx()[0] % 32
        piece, part = lane % self.pieces, lane // self.pieces
        of_values = piece >= self.pieces // 2
        source = k + Int64(head) * k_h * 2 if not of_values else v + Int64(head) * v_h * 2
        source += Int64(piece % (self.pieces // 2)) * 16
        stride = Int64(k_s if not of_values else v_s) * 2
        head_at = rows + Int64(head) * rows_h * 2
        scales_at = head_at + Int64(total) * self.row
        means = self.mean_of_keys(mean, head, piece, of_values)

        sums = [Float32(0.0)] * 8
        for places in cutlass.range(start, stop, 32, unroll=1):
            token = Int32(0)
            if places + lane < length:
                token = load_words(order + Int64(places + lane) * 8, 2)[0]  # lower half of an int64
            for i in cutlass.range(0, 32, FLYING * ONCE, unroll=1):
                got = []
                for j in cutlass.range_constexpr(FLYING):
                    own = i + j * ONCE + part
                    one = cute.arch.shuffle_sync(token, own)
                    got.append(load_words_if(source + Int64(one) * stride, places + own < length))
                for j in cutlass.range_constexpr(FLYING):
                    place = places + i + j * ONCE + part
                    live = place < length
                    x = self.less(self.values_of(got[j]), means, live)
                    self.store(head_at, scales_at, place, x, got[j], piece, of_values, live or self.cells)
                    sums = [so_far + value for so_far, value in zip(sums, x, strict=True)]
            end = cutlass.min(places + 32, length)
            if size > 0 and (end % size == 0 or end == length):
                cell = (end - 1) // size
                share = self.quotient(Float32(1.0), Float32(end - cell * size))
                x = [one * share for one in self.whole(sums)]
                words = [packed(x[2 * i], x[2 * i + 1], self.v.dtype) for i in range(4)]
                pooled = self.first_pooled(length) + cell
                self.store(head_at, scales_at, pooled, x, words, piece, of_values, part == 0)
                if const_expr(self.cells):  # noqa: SIM102 -- the outer one is decided by the compiler
                    if end == length:
                        for place in cutlass.range(pooled + 1, (pooled + CELL) // CELL * CELL, unroll=1):
                            self.store(head_at, scales_at, place, [Float32(0.0)] * 8, [Int32(0)] * 4, piece, of_values, part == 0)
                sums = [Float32(0.0)] * 8

    @cute.jit
    def mean_of_keys(self, mean, head, piece, of_values):
        """In this thread's columns; 0 for values."""
        got = [Float32(0.0)] * 8
        if const_expr(self.int8):  # noqa: SIM102 -- the outer one is decided by the compiler
            if not of_values:
                at = mean + (Int64(head) * self.v.dim + piece * 8) * 4
                got = [other_type(word) for i in range(2) for word in load_words(at + 16 * i, 4)]
        return got

    def less(self, x, means, live):
        """x less the means, 0 for what is not there."""
        return [choose(live, value - m, Float32(0.0)) for value, m in zip(x, means, strict=True)] if self.int8 else x

    def first_pooled(self, length):
        """The place after the keys'."""
        return (length + CELL - 1) // CELL * CELL if self.cells else length

    @cute.jit
    def store(self, head_at, scales_at, place, x, words, piece, of_values, live):
        """A thread's piece of the row at a place: values as `words`, keys as x quantised, or as words too."""
        D = self.v.dim
        to = head_at + Int64(place) * self.row
        row, column = place % CELL, piece % (self.pieces // 2)
        if const_expr(self.cells):
            to = head_at + Int64(place // CELL) * (CELL * self.row)
        if const_expr(self.int8):
            codes_at, values_at = to + piece * 8, to + D + column * 16
            if const_expr(self.cells):
                codes_at = to + row * D + (column // 2 ^ row % 8) * 16 + column % 2 * 8
                values_at = to + CELL * D + self.in_block(row, column)
            if live and of_values:
                store_words(values_at, words)
            reach = Float32(0.0)
            for i in cutlass.range_constexpr(4):
                reach = magnitude(reach, magnitude(x[2 * i], x[2 * i + 1]))
            scale, per_unit = self.scales_of(self.largest_of_half_warp(reach))
            codes = self.codes_of(x, per_unit)
            if live and not of_values:
                store_two_words(codes_at, codes)
                if piece == 0:
                    store_f32(scales_at + Int64(place) * 4, scale)
        elif live:
            at = to + piece * 16
            if const_expr(self.cells):
                at = to + piece // (self.pieces // 2) * (CELL * 2 * D) + self.in_block(row, column)
            store_words(at, words)

    def in_block(self, row, column):
        """Where the 16-byte piece of a column of 32 rows of 16 bits is."""
        return row // 8 * (self.v.dim * 16) + column // 8 * 1024 + row % 8 * 128 + (column % 8 ^ row % 8) * 16

    def whole(self, sums):
        """Sums over the rows that lanes of the same piece have."""
        if self.at_once == 1:
            return sums
        return [total + cute.arch.shuffle_sync_bfly(total, self.pieces) for total in sums]


class Queries(Pass):
    """A program takes a group of 128 queries, of D = 128, whose numbers stay in registers until the largest of them is known."""

    @cute.kernel
    def kernel(
        self, x: Int64, order: Int64, rows: Int64, x_h: Int64, order_h: Int64, rows_h: Int64, x_s: Int32, heads: Int32, groups: Int32,
    ):  # fmt: skip
        number, lane, D = cute.arch.block_idx()[0], cute.arch.thread_idx()[0] % 32, self.v.dim
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cute.arch.get_dyn_smem(Float32, alignment=16).toint()
        head, group, half_lane = number % heads, number // heads, lane % 16
        first = group * M + warp * 32
        token = load_i32(order + (Int64(head) * order_h + Int64(first + lane)) * 4)
        source, to = x + Int64(head) * x_h * 2 + half_lane * 16, rows + Int64(head) * rows_h * 2
        got = []
        for i in cutlass.range_constexpr(16):
            one = cute.arch.shuffle_sync(token, 2 * i + lane // 16)
            got.append(load_words_if(source + Int64(cutlass.max(one, 0)) * x_s * 2, one >= 0))
        low = high = Int32(0)
        for words in got:
            for word in words:
                low, high = of_halves("min", low, word, self.v.dtype), of_halves("max", high, word, self.v.dtype)
        reach = magnitude(magnitude(*unpacked(low, self.v.dtype)), magnitude(*unpacked(high, self.v.dtype)))
        reach = self.largest_of_half_warp(reach)
        reach = magnitude(reach, cute.arch.shuffle_sync_bfly(reach, 16))
        if lane == 0:
            store_shared_f32(smem + warp * 4, reach)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(2):
            two = load_shared_f32x2(smem, 8 * i)
            reach = magnitude(reach, magnitude(two[0], two[1]))
        scale, per_unit = self.scales_of(reach)
        for i in cutlass.range_constexpr(16):
            at = to + Int64(first + 2 * i + lane // 16) * D + half_lane * 8
            store_two_words(at, self.codes_of(self.values_of(got[i]), per_unit))
        if warp == 0 and lane == 0:
            store_f32(to + Int64(groups) * (M * D) + Int64(group) * 4, scale)


KERNELS = {
    "rows": (Rows, ROWS), "rows_cells": (Rows, ROWS), "rows_int8": (Rows, ROWS), "rows_int8_cells": (Rows, ROWS),
    "queries_int8": (Queries, QUERIES),
}  # fmt: skip
