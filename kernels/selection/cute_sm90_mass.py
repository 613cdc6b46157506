"""The device side of the Hopper kernel of key selection, in CuTeDSL: the mass of every key. Needed to build the cubins, never at run time.

A program takes two neighbouring groups of a head, whose queries stay in shared memory, and streams all keys of the head past them in tiles
of 128. Products are keys by queries, so that the sum over a group's queries stays inside a thread but for the quad's. One thread copies
the tiles, each with one bulk copy, into a ring of stages; each of four warpgroups multiplies the keys of every other tile, 64 at a time,
with the queries of its group (wgmma). They take turns in issuing products, so that those of one run under the exponentials of the others.

Shared memory: queries (256, D) | key stages (128, D) | -lse of the queries, float32 | barriers. A matrix is stored as D/64 blocks of 64
columns; in a block each row is 128 bytes, whose 16-byte pieces are permuted by (piece ^ row % 8): what wgmma calls 128-byte swizzle. Tiles
lie in global memory just so (cute_sm90.py). The 64 keys of one product are rows 0-7, 16-23, 32-39, ... of a tile, those of the second the
others: after both, a warp has the masses of 32 consecutive keys, one cell.
"""
from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cute_sm90_mainloop import (
    choose,
    copy16_or_zero,
    copy_block,
    exp2,
    fma,
    load_f32,
    load_i32,
    load_shared_f32x2,
    store_f32,
    store_shared_f32,
    wait_for_copies,
)
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

GROUP = 128  # queries of a group
GROUPS = 2  # of one program
QUERIES = GROUP * GROUPS
TILE = 128  # keys of a stage
WARPGROUP = 128  # threads
CONSUMERS = 4  # warpgroups: w computes group w % GROUPS with the tiles w // GROUPS, that + AT_ONCE, ...
AT_ONCE = CONSUMERS // GROUPS  # tiles
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 112
MINUS_INFINITY = float("-inf")
LOG2_E = 1.4426950408889634
TURN_BARRIER = 1  # named barriers from here on, one a warpgroup of consumers: it may issue its products
QUERIES_BARRIER = 8  # the queries are there

# Parameters of the kernel, in order: name and type; "p" is a pointer. The host side launches by this list.
#
# q (B, H, q_length, D) by its strides; lse (B * H, q_length) contiguous; members (B, H, groups * 128), -1 for none, by its strides. The
# launch is for programs from first_program on; mass (rows from first_row on, width) are masses of keys or, where in_cells, of cells of
# 32; keys (heads from first_head on, tiles, 128, D) are as described above. heads: of a batch row; scale: of exponents to base 2.
PARAMETERS = (
    ("q", "p"), ("keys", "p"), ("lse", "p"), ("members", "p"), ("mass", "p"),
    ("q_batch", "i64"), ("q_head", "i64"), ("members_batch", "i64"), ("members_head", "i64"), ("q_token", "i32"),
    ("first_program", "i32"), ("first_row", "i32"), ("first_head", "i32"), ("heads", "i32"), ("groups", "i32"),
    ("q_length", "i32"), ("k_length", "i32"), ("width", "i32"), ("in_cells", "i32"), ("scale", "f32"),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One cubin. stages: tiles in flight, a power of 2."""

    dtype: str = "bf16"
    dim: int = 128
    stages: int = 4

    @property
    def name(self) -> str:
        return f"mass_{self.dtype}_d{self.dim}_s{self.stages}"

    @property
    def element(self):
        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[self.dtype]

    @property
    def threads(self) -> int:
        return (CONSUMERS + 1) * WARPGROUP

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.offsets["total"]

    @property
    def offsets(self) -> dict[str, int]:
        """Bytes from the start of shared memory, and the total."""
        row = 2 * self.dim
        keys = QUERIES * row
        minus = keys + self.stages * TILE * row
        barriers = minus + QUERIES * 4
        return {"queries": 0, "keys": keys, "minus": minus, "barriers": barriers, "total": barriers + 16 * self.stages}


SHIPPED = (Variant("bf16"), Variant("fp16"), Variant("bf16", 64, 8), Variant("fp16", 64, 8))


# --- the kernel ----------------------------------------------------------------------------------------------------------------------


class Masses:
    """Masses by one variant; call `launch` through cute.compile."""

    def __init__(self, variant: Variant):
        self.v = variant
        v = variant
        if v.dim not in (64, 128) or v.stages & (v.stages - 1) or v.shared > 231_424:
            raise ValueError(f"{v} does not fit")
        self.tile_bytes = TILE * v.dim * 2

    @cute.jit
    def launch(self, args: tuple, grid: Int32):
        v = self.v
        self.kernel(*args).launch(grid=[grid, 1, 1], block=[v.threads, 1, 1], smem=v.shared, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q: Int64, keys: Int64, lse: Int64, members: Int64, mass: Int64,
        q_batch: Int64, q_head: Int64, members_batch: Int64, members_head: Int64, q_token: Int32,
        first_program: Int32, first_row: Int32, first_head: Int32, heads: Int32, groups: Int32,
        q_length: Int32, k_length: Int32, width: Int32, in_cells: Int32, scale: Float32,
    ):  # fmt: skip
        v, at = self.v, self.v.offsets
        smem = cute.arch.get_dyn_smem(v.element, alignment=1024)
        start = smem.toint()
        full = cute.make_ptr(Int64, start + at["barriers"], cute.AddressSpace.smem, assumed_align=8)
        empty = full + v.stages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            for i in cutlass.range_constexpr(v.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, 4 * GROUPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        program = first_program + cute.arch.block_idx()[0]
        programs_each = (groups + GROUPS - 1) // GROUPS
        head = program // programs_each
        group = (program - head * programs_each) * GROUPS
        rounds = (k_length + (TILE * AT_ONCE - 1)) // (TILE * AT_ONCE)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if thread == 0:
                tiles = (k_length + (TILE - 1)) // TILE
                source = keys + Int64(head - first_head) * tiles * self.tile_bytes
                self.copy_tiles(start + at["keys"], full, empty, source, tiles, rounds * AT_ONCE)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            b, h = head // heads, head % heads
            members_at = members + (Int64(b) * members_batch + Int64(h) * members_head + group * GROUP) * 4
            q_at = q + (Int64(b) * q_batch + Int64(h) * q_head) * 2
            lse_at = lse + Int64(head) * q_length * 4
            mine = thread - WARPGROUP
            self.load_queries(start, mine, q_at, lse_at, members_at, q_token, groups - group)
            rows_at = mass + Int64(head * groups + group - first_row) * width * 4
            self.consume(smem, start, full, empty, mine, rows_at, width, groups - group, k_length, rounds, in_cells, scale)

    @cute.jit
    def copy_tiles(self, to, full, empty, source, tiles, count):
        """The keys' tiles, one after the other; behind the last the last again."""
        for tile in cutlass.range(count, unroll=1):
            stage, turn = self.place(tile)
            cute.arch.mbarrier_wait(empty + stage, turn ^ 1)
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile_bytes)
            from_tile = source + Int64(cutlass.min(tile, tiles - 1)) * self.tile_bytes
            copy_block(to + stage * self.tile_bytes, from_tile, self.tile_bytes, (full + stage).toint())

    def place(self, tile):
        """Stage of a tile, and the parity of the stage's use."""
        stages = self.v.stages
        return tile & (stages - 1), (tile >> (stages.bit_length() - 1)) & 1

    @cute.jit
    def load_queries(self, start, thread, q_at, lse_at, members_at, q_token, live_groups):
        """Queries of both groups, 0 where there is none, and their -lse to base 2, -inf where there is nothing to count."""
        v, at = self.v, self.v.offsets
        threads, pieces = CONSUMERS * WARPGROUP, v.dim // 8
        if thread < QUERIES:
            token = self.token(members_at, thread, live_groups)
            minus = load_f32(lse_at + Int64(cutlass.max(token, 0)) * 4) * -LOG2_E
            counts = token >= 0 and minus < Float32(-MINUS_INFINITY)
            store_shared_f32(start + at["minus"] + thread * 4, choose(counts, minus, Float32(MINUS_INFINITY)))
        for i in cutlass.range_constexpr(QUERIES * pieces // threads):
            row, piece = (i * threads + thread) // pieces, thread % pieces
            token = self.token(members_at, row, live_groups)
            to = start + (piece // 8) * (QUERIES * 128) + row * 128 + ((piece % 8) ^ (row % 8)) * 16
            filled = Int32(16) if token >= 0 else Int32(0)
            copy16_or_zero(to, q_at + (Int64(cutlass.max(token, 0)) * q_token + piece * 8) * 2, filled, 0)
        wait_for_copies()
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=threads)

    @cute.jit
    def token(self, members_at, row, live_groups):
        token = Int32(-1)
        if row < live_groups * GROUP:
            token = load_i32(members_at + Int64(row) * 4)
        return token

    @cute.jit
    def consume(self, smem, start, full, empty, thread, rows_at, width, live_groups, k_length, rounds, in_cells, scale):
        v = self.v
        number = cute.arch.make_warp_uniform(thread // WARPGROUP)
        group, first = number % GROUPS, number // GROUPS
        lane, warp = thread % 32, thread % WARPGROUP // 32
        mma = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(
                v.element, Float32, (64, GROUP, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
            )
        )
        slice_ = mma.get_slice(0)
        queries = cute.local_tile(self.queries(smem), (GROUP, v.dim), (group, 0))
        frag_q = slice_.make_fragment_B(slice_.partition_B(queries))
        frag_k = [slice_.make_fragment_A(slice_.partition_A(self.keys(smem, half))) for half in range(2)]
        scores = cute.make_rmem_tensor(slice_.partition_shape_C((64, GROUP)), Float32)
        minus_at = start + v.offsets["minus"] + group * (GROUP * 4) + lane % 4 * 8
        minus = []
        for j in cutlass.range_constexpr(GROUP // 8):
            minus += load_shared_f32x2(minus_at, j * 32)
        rows_at += Int64(group) * width * 4

        if number == CONSUMERS - 1:
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
        for step in cutlass.range(rounds, unroll=1):
            tile = step * AT_ONCE + first
            stage, turn = self.place(tile)
            self.multiply(mma, scores, frag_k[0], frag_q, full, stage, turn, number)
            even = self.exponentials(scores, minus, scale)
            self.multiply(mma, scores, frag_k[1], frag_q, full, stage, turn, number)
            self.release(empty + stage, lane)
            odd = self.exponentials(scores, minus, scale)
            self.store(even, odd, rows_at, width, group < live_groups, tile, warp, lane, k_length, in_cells)

    def queries(self, smem):
        """(QUERIES, D) in shared memory."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.v.element)
        layout = cute.tile_to_shape(atom, (QUERIES, self.v.dim), order=(0, 1))
        return cute.make_tensor(cute.recast_ptr(smem, layout.inner, self.v.element), layout.outer)

    def keys(self, smem, half: int):
        """(64, D, stages): every other 8 rows of a tile, from row 8 * half on."""
        v = self.v
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, v.element)
        layout = cute.make_layout(((8, 8), (64, v.dim // 64), v.stages), stride=((64, 2 * 8 * 64), (1, TILE * 64), TILE * v.dim))
        start = smem + v.offsets["keys"] // 2 + half * (8 * 64)
        return cute.make_tensor(cute.recast_ptr(start, atom.inner, v.element), layout)

    @cute.jit
    def multiply(self, mma, scores, frag_k, frag_q, full, stage, turn, number):
        """The products of 64 keys of a stage, issued at this warpgroup's turn.

        Waiting again for a stage that is there keeps the compiler from moving exponentials to where the turn is held.
        """
        cute.arch.mbarrier_wait(full + stage, turn)
        cute.arch.barrier(barrier_id=TURN_BARRIER + number, number_of_threads=2 * WARPGROUP)
        atom = cute.make_mma_atom(mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(frag_q, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(atom, scores, frag_k[None, None, k, stage], frag_q[None, None, k], scores)
        warpgroup.commit_group()
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + (number + 1) % CONSUMERS, number_of_threads=2 * WARPGROUP)
        warpgroup.wait_group(0)

    @cute.jit
    def exponentials(self, scores, minus, scale):
        """Sums of 2^(score * scale + minus) over this thread's columns: of its row and of the one 8 below."""
        sums = [Float32(0.0), Float32(0.0)]
        for j in cutlass.range_constexpr(GROUP // 8):
            for i in cutlass.range_constexpr(4):
                sums[i // 2] += exp2(fma(scores[4 * j + i], scale, minus[2 * j + i % 2]))
        return sums

    @cute.jit
    def store(self, even, odd, rows_at, width, live, tile, warp, lane, k_length, in_cells):
        """Masses of a warp's 32 keys of a tile by the sums of both products."""
        quad, sums = lane % 4, [even[0], odd[0], even[1], odd[1]]  # of keys 8 apart
        # Each step halves what a lane has and doubles the columns that it has summed.
        for bit in cutlass.range_constexpr(1, 3):
            upper = (quad & bit) != 0
            pairs = [(sums[2 * i], sums[2 * i + 1]) for i in range(len(sums) // 2)]
            sums = [choose(upper, high, low) + cute.arch.shuffle_sync_bfly(choose(upper, low, high), bit) for low, high in pairs]
        key = tile * TILE + warp * 32 + quad * 8 + lane // 4
        total = choose(key < k_length, sums[0], Float32(0.0))
        if in_cells != 0:
            for step in (1, 2, 4, 8, 16):
                total += cute.arch.shuffle_sync_bfly(total, step)
        if live and key < k_length and (lane == 0 or in_cells == 0):
            store_f32(rows_at + Int64(key >> (5 * in_cells)) * 4, total)

    @cute.jit
    def release(self, barrier, lane):
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
