// Products with B of adapters, added to projections, for tiles of at most 16 rows.
//
// A warp computes 64 outputs of a tile, and blocks take tiles in turn. B of the first is loaded while earlier kernels run.
// A thread has 8 consecutive outputs of each of four rows of B, as columns of eight products, and 16 consecutive outputs
// of two rows of sums.
//
// Macros for NVRTC:
//   PARTS   merged projections
//   SPLITS  of sums of products with A
//   WARPS   of a block
//   GATED   1: writes silu(first half of the projections) * second half, of all rows; PARTS is 2

#include "adapter_tiles.cuh"
#include "bfloat16.cuh"

constexpr int OUTPUTS = 64, NUM_PRODUCTS = GATED ? 2 : 1;

// Rows 2 * q + (0, 1, 8, 9) of B.
struct Factors { uint4 of_rows[4]; };

__device__ __forceinline__ Factors load_factors(const u16* matrix, int row_size, int rank, int q) {
    Factors factors;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = q * 2 + i % 2 + i / 2 * 8;
        factors.of_rows[i] = load_constants(matrix + (u64)r * row_size, r < rank);
    }
    return factors;
}

__device__ __forceinline__ void add_products(float (&sums)[8][4], const u32 (&left)[4], const Factors& factors) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 right[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32* first = (const u32*)&factors.of_rows[2 * half];
            const u32* second = (const u32*)&factors.of_rows[2 * half + 1];
            right[half] = __byte_perm(first[j / 2], second[j / 2], j % 2 ? 0x7632 : 0x5410);
        }
        multiply(sums[j], left[0], left[1], left[2], left[3], right[0], right[1]);
    }
}

// Adds up the splits: of rows g and g + 8, ranks 2 * q + (0, 1, 8, 9). Args: rows: -1 for none.
__device__ __forceinline__ void load_shrunk(
    u32 (&left)[4], const float* of_part, u64 split_size, int held_rank, const int (&rows)[2], int q) {
    float2 sums[4] = {};
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (rows[i % 2] < 0) continue;
            const float* from = of_part + split * split_size + (u64)rows[i % 2] * held_rank + i / 2 * 8 + 2 * q;
            const float2 v = __ldcg((const float2*)from);
            sums[i].x += v.x, sums[i].y += v.y;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) left[i] = pack(sums[i].x, sums[i].y);
}

__device__ __forceinline__ void unpack(float (&numbers)[8], const uint4& packed) {
    const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 8; i++) numbers[i] = number((u16)(pairs[i / 2] >> i % 2 * 16));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) expand_rows(
    const float* shrunk,  // (SPLITS, PARTS, num_rows, held_rank)
    const u16* b,         // (slots, max_rank * sum of part sizes)
    const int* ranks,     // (slots, PARTS)
    const int* order, const int* tile_slots, const int* tile_begins, const int* tile_ends, const int* num_tiles,
    const u16* projected,  // (num_rows, row_size)
    u16* out,              // `projected`, or (num_rows, row_size / 2) if GATED
    int num_rows, int held_rank, int max_rank, int row_size,
    int end_0, int end_1) {  // of the first two parts in a row
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int out_size = GATED ? row_size / 2 : row_size, count = num_tiles[GATED];
    const int first = (blockIdx.x * WARPS + warp) * OUTPUTS;
    int part = 0, part_begin = 0, part_end = end_0;
    if (!GATED && PARTS > 1 && first >= end_0) part = 1, part_begin = end_0, part_end = end_1;
    if (!GATED && PARTS > 2 && first >= end_1) part = 2, part_begin = end_1, part_end = row_size;
    const int part_size = part_end - part_begin;
    Wait wait;
    for (int tile = blockIdx.y; tile < count && first < out_size; tile += gridDim.y) {
        const int slot = tile_slots[tile], begin = tile_begins[tile], end = tile_ends[tile];
        int most_ranks = 0, of_products[NUM_PRODUCTS];
        const u16* matrices[NUM_PRODUCTS];
        Factors factors[NUM_PRODUCTS];
#pragma unroll
        for (int p = 0; p < NUM_PRODUCTS; p++) {
            const int rank = slot >= 0 ? ranks[slot * PARTS + part + p] : 0;
            // Of an upper half, its part begins a part's size behind.
            const u64 part_of_slot = (u64)max(slot, 0) * row_size + part_begin + p * part_size;
            matrices[p] = b + part_of_slot * max_rank + first - part_begin + g * 8;
            factors[p] = load_factors(matrices[p], part_size, rank, q);
            of_products[p] = rank, most_ranks = max(most_ranks, rank);
        }
        int rows[2];
        load_rows(rows, order, begin + g, end);
        wait();
        if (!GATED && most_ranks == 0) continue;

        // Sum i of product j is of row g + i / 2 * 8 and output 16 * q + i % 2 * 8 + j.
        float sums[NUM_PRODUCTS][8][4] = {};
        for (int first_rank = 0; first_rank < most_ranks; first_rank += RANKS) {
#pragma unroll
            for (int p = 0; p < NUM_PRODUCTS; p++) {
                if (first_rank >= of_products[p]) continue;
                if (first_rank > 0) {
                    const u16* matrix = matrices[p] + (u64)first_rank * part_size;
                    factors[p] = load_factors(matrix, part_size, of_products[p] - first_rank, q);
                }
                u32 left[4];
                const float* of_part = shrunk + (u64)(part + p) * num_rows * held_rank + first_rank;
                load_shrunk(left, of_part, (u64)PARTS * num_rows * held_rank, held_rank, rows, q);
                add_products(sums[p], left, factors[p]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = rows[half];
            if (r < 0) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u64 place = (u64)r * row_size + first + q * 16 + i * 8;
                float before[NUM_PRODUCTS][8];
#pragma unroll
                for (int p = 0; p < NUM_PRODUCTS; p++) {
                    unpack(before[p], load_written(projected + place + p * out_size, true));
                }
                float v[8];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    v[j] = before[0][j] + sums[0][j][half * 2 + i];
                    if (GATED) {
                        const float up = before[NUM_PRODUCTS - 1][j] + sums[NUM_PRODUCTS - 1][j][half * 2 + i];
                        v[j] = v[j] / (1 + __expf(-v[j])) * up;
                    }
                }
                Chunk written;
#pragma unroll
                for (int j = 0; j < 4; j++) written.v[j] = pack(v[2 * j], v[2 * j + 1]);
                *(Chunk*)(out + (u64)r * out_size + first + q * 16 + i * 8) = written;
            }
        }
    }
    if (count == 0) wait();
}
