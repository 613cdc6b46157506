"""The passes before the Hopper kernel, in CuTeDSL: keys and values side by side in cell order with the means of their cells, and int8.

Needed to build the cubins, never at run time. A warp takes 128 places of one head, 32 at a time; a thread has 16 bytes of keys, values or
queries, from row to row, and keeps their sums. int8 as in kernels/quantise.py: a row has one float32 scale, and keys are less their mean,
which comes from a pass of its own.

For the attention that copies cells, rows come in blocks of 32 as it wants them in shared memory: K, then V, each as 8 rows of 128 bytes of
columns, the same 8 rows of the next 128 bytes, the next 8 rows; piece i of 16 bytes of row r lies at i ^ r % 8. Rows past an end are zeros.
In int8 the 32 scales of the keys follow, 1 past an end.
"""
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cute_sm90_mainloop import (
    CELL,
    choose,
    fma,
    load_words,
    load_words_if,
    magnitude,
    nearly_reciprocal,
    other_type,
    packed,
    packed_bytes,
    product_plus,
    store_f32,
    store_two_words,
    store_words,
    unpacked,
)  # fmt: skip
from cutlass import Boolean, Float32, Int32, Int64, const_expr

PLACES = 128  # of a warp
ROUNDER = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number, whose lowest byte is the sum's

# Parameters of the kernels, in order: name and type; "p" is a pointer. Strides count elements of 16 bits.
#
# k, v (heads, length, D) by their strides; order (length,) int64: token at each place; rows (heads, length + cells, 2 D) rows_h apart, or
# with int8 of 3 D + 32 bytes: keys, values, the key's scale, zeros to 16 bytes and nothing. In cells, rows (heads, blocks, 32 * 2 D), or
# with int8 of 32 * (3 D + 4) bytes, are blocks: first those of keys. mean (heads, D) float32, with int8: of the keys. size: keys of a cell,
# 32, 64 or 128; 0: no means. Parts: heads * ceil(length / places), heads fastest: where the model keeps (B, S, H, D), their rows are
# neighbours. A launch may have fewer programs than parts.
ROWS = (
    ("k", "p"), ("v", "p"), ("order", "p"), ("mean", "p"), ("rows", "p"),
    ("k_h", "i64"), ("v_h", "i64"), ("rows_h", "i64"),
    ("k_s", "i32"), ("v_s", "i32"), ("heads", "i32"), ("length", "i32"), ("size", "i32"), ("parts", "i32"),
)  # fmt: skip
# rows (heads, length, D + 16) bytes, contiguous: x in int8, the scale and zeros.
QUERIES = (("x", "p"), ("rows", "p"), ("x_h", "i64"), ("x_s", "i32"), ("heads", "i32"), ("length", "i32"), ("parts", "i32"))
# sums (heads, ceil(length / 128), D) float32, contiguous: of the finite values of 128 rows of x each.
SUMS = (("x", "p"), ("sums", "p"), ("x_h", "i64"), ("x_s", "i32"), ("heads", "i32"), ("length", "i32"), ("parts", "i32"))


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
        return 0


SHIPPED = (
    *(Variant(what, dtype, dim) for what in ("rows", "rows_cells") for dim in (128, 64) for dtype in ("bf16", "fp16")),
    *(Variant(what, dtype, blocks=5) for what in ("rows_int8", "rows_int8_cells", "queries_int8", "sums") for dtype in ("bf16", "fp16")),
)


class Pass:
    """Common to the kernels of one variant; call `launch` through cute.compile."""

    def __init__(self, variant: Variant):
        self.v = variant

    @cute.jit
    def launch(self, args: tuple, grid: Int32):
        threads, blocks = self.v.threads, self.v.blocks
        self.kernel(*args).launch(grid=[grid, 1, 1], block=[threads, 1, 1], min_blocks_per_mp=blocks, preferred_smem_carveout=100)

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
    def store_quantised(self, to, end, x, live, first, alone: cutlass.Constexpr = False):
        """A row of 16 lanes with 8 values each: this lane's codes at `to`, the scale, alone or before zeros, at `end` by the first."""
        reach = magnitude(x[0], x[1])
        for i in cutlass.range_constexpr(1, 4):
            reach = magnitude(reach, magnitude(x[2 * i], x[2 * i + 1]))
        for step in (1, 2, 4, 8):
            reach = magnitude(reach, cute.arch.shuffle_sync_bfly(reach, step))
        empty, one = reach == Float32(0.0), Float32(1.0)
        scale = choose(empty, one, self.quotient(reach, Float32(127.0))) + reach * Float32(0.0)  # NaN for NaN and infinity
        per_unit = choose(empty, one, self.quotient(Float32(127.0), reach))
        codes = [product_plus(value, per_unit, Float32(ROUNDER)) for value in x]
        if live:
            store_two_words(to, [packed_bytes(codes[:4]), packed_bytes(codes[4:])])
            if first:
                if const_expr(alone):
                    store_f32(end, scale)
                else:
                    store_words(end, [other_type(scale), Int32(0), Int32(0), Int32(0)])


class Rows(Pass):
    """Keys and values."""

    def __init__(self, variant: Variant):
        super().__init__(variant)
        self.int8, self.cells = "int8" in variant.what, "cells" in variant.what
        self.row = 3 * variant.dim + (4 if self.cells else 32) if self.int8 else 4 * variant.dim  # bytes, on average in a block
        self.pieces = 2 * variant.dim // 8  # 16-byte pieces of a key and its value
        self.at_once = 32 // self.pieces  # rows of a warp

    @cute.kernel
    def kernel(
        self,
        k: Int64, v: Int64, order: Int64, mean: Int64, rows: Int64, k_h: Int64, v_h: Int64, rows_h: Int64,
        k_s: Int32, v_s: Int32, heads: Int32, length: Int32, size: Int32, parts: Int32,
    ):  # fmt: skip
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for part in cutlass.range(block, parts, grid, unroll=1):
            self.lay_out(part, k, v, order, mean, rows, k_h, v_h, rows_h, k_s, v_s, heads, length, size)

    @cute.jit
    def lay_out(self, number, k, v, order, mean, rows, k_h, v_h, rows_h, k_s, v_s, heads, length, size):
        ONCE, FLYING = self.at_once, self.v.flying
        head, start, stop = self.places_of(number, heads, length)
        lane = cute.arch.thread_idx()[0] % 32
        piece, part = lane % self.pieces, lane // self.pieces
        of_values = piece >= self.pieces // 2
        source = k + Int64(head) * k_h * 2 if not of_values else v + Int64(head) * v_h * 2
        source += Int64(piece % (self.pieces // 2)) * 16
        stride = Int64(k_s if not of_values else v_s) * 2
        head_at = rows + Int64(head) * rows_h * 2
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
                    self.store(head_at, place, x, got[j], piece, of_values, live or self.cells)
                    sums = [total + value for total, value in zip(sums, x, strict=True)]
            end = cutlass.min(places + 32, length)
            if size > 0 and (end % size == 0 or end == length):
                cell = (end - 1) // size
                share = self.quotient(Float32(1.0), Float32(end - cell * size))
                x = [total * share for total in self.whole(sums)]
                words = [packed(x[2 * i], x[2 * i + 1], self.v.dtype) for i in range(4)]
                pooled = self.first_pooled(length) + cell
                self.store(head_at, pooled, x, words, piece, of_values, part == 0)
                if const_expr(self.cells):  # noqa: SIM102 -- the outer one is decided by the compiler
                    if end == length:
                        for place in cutlass.range(pooled + 1, (pooled + CELL) // CELL * CELL, unroll=1):
                            self.store(head_at, place, [Float32(0.0)] * 8, [Int32(0)] * 4, piece, of_values, part == 0)
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
    def store(self, head_at, place, x, words, piece, of_values, live):
        """A thread's piece of the row at a place: values as `words`, keys as x quantised, or as words too."""
        D = self.v.dim
        to = head_at + Int64(place) * self.row
        if const_expr(self.cells):
            row, column = place % CELL, piece % (self.pieces // 2)
            block_at = head_at + Int64(place // CELL) * (CELL * self.row)
            to = block_at + piece // (self.pieces // 2) * (CELL * (D if self.int8 else 2 * D))
            to += row // 8 * (D * 16) + column // 8 * 1024 + row % 8 * 128 + (column % 8 ^ row % 8) * 16
            if const_expr(self.int8):
                if live and of_values:
                    store_words(to, words)
                codes_at = block_at + row * D + (column // 2 ^ row % 8) * 16 + column % 2 * 8
                self.store_quantised(codes_at, block_at + CELL * 3 * D + row * 4, x, live and not of_values, piece == 0, True)
            elif live:
                store_words(to, words)
        elif const_expr(self.int8):
            if live and of_values:
                store_words(to + D + (piece - self.pieces // 2) * 16, words)
            self.store_quantised(to + piece * 8, to + 3 * D, x, live and not of_values, piece == 0)
        elif live:
            store_words(to + piece * 16, words)

    def whole(self, sums):
        """Sums over the rows that lanes of the same piece have."""
        if self.at_once == 1:
            return sums
        return [total + cute.arch.shuffle_sync_bfly(total, self.pieces) for total in sums]


class Halves(Pass):
    """What each half of a warp does with the rows of x, of D = 128."""

    @cute.jit
    def words_of(self, x, x_h, x_s, head, place, half_lane, length):
        source = x + (Int64(head) * x_h + Int64(place) * x_s) * 2 + half_lane * 16
        return load_words_if(source, place < length)


class Queries(Halves):
    @cute.kernel
    def kernel(self, x: Int64, rows: Int64, x_h: Int64, x_s: Int32, heads: Int32, length: Int32, parts: Int32):
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        FLYING, ROW = self.v.flying, self.v.dim + 16
        lane = cute.arch.thread_idx()[0] % 32
        half_lane = lane % 16
        for number in cutlass.range(block, parts, grid, unroll=1):
            head, start, stop = self.places_of(number, heads, length)
            for first in cutlass.range(start, stop, 2 * FLYING, unroll=1):
                places = [first + 2 * i + lane // 16 for i in range(FLYING)]
                got = [self.words_of(x, x_h, x_s, head, place, half_lane, length) for place in places]
                for i in cutlass.range_constexpr(FLYING):
                    to = rows + (Int64(head) * length + places[i]) * ROW
                    self.store_quantised(to + half_lane * 8, to + self.v.dim, self.values_of(got[i]), places[i] < length, half_lane == 0)


class Sums(Halves):
    @cute.kernel
    def kernel(self, x: Int64, sums: Int64, x_h: Int64, x_s: Int32, heads: Int32, length: Int32, parts: Int32):
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        FLYING, D = self.v.flying, self.v.dim
        lane = cute.arch.thread_idx()[0] % 32
        half_lane = lane % 16
        for number in cutlass.range(block, parts, grid, unroll=1):
            head, start, stop = self.places_of(number, heads, length)
            total = [Float32(0.0)] * 8
            for first in cutlass.range(start, stop, 2 * FLYING, unroll=1):
                places = [first + 2 * i + lane // 16 for i in range(FLYING)]
                got = [self.words_of(x, x_h, x_s, head, place, half_lane, length) for place in places]
                for i in cutlass.range_constexpr(FLYING):
                    total = [t + self.finite(value) for t, value in zip(total, self.values_of(got[i]), strict=True)]
            total = [t + cute.arch.shuffle_sync_bfly(t, 16) for t in total]
            if lane < 16 and start < length:
                to = sums + ((Int64(head) * ((length + PLACES - 1) // PLACES) + start // PLACES) * D + half_lane * 8) * 4
                for i in cutlass.range_constexpr(2):
                    store_words(to + 16 * i, [other_type(t) for t in total[4 * i : 4 * i + 4]])

    def finite(self, x):
        """x, 0 for NaN and infinities."""
        return choose(Boolean(x - x == Float32(0.0)), x, Float32(0.0))


KERNELS = {
    "rows": (Rows, ROWS), "rows_cells": (Rows, ROWS), "rows_int8": (Rows, ROWS), "rows_int8_cells": (Rows, ROWS),
    "queries_int8": (Queries, QUERIES), "sums": (Sums, SUMS),
}  # fmt: skip
