// Products of rows with A of their adapters, for tiles of at most 16 rows: sums over stretches of inputs.
//
// A warp multiplies 16 rows of A, each with STEPS * 32 of its inputs, by the rows of a tile. Blocks take tiles in turn,
// and load A of the first while earlier kernels run. A thread has 8 consecutive inputs of A and of a row, as parts of two
// products.
//
// Macros for NVRTC:
//   PARTS   merged projections
//   STEPS   32 inputs each
//   WARPS   of a block, each with another stretch: at least 4

#include "adapter_tiles.cuh"

constexpr int BLOCK_INPUTS = WARPS * STEPS * 32;

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) shrink_rows(
    const u16* x,      // (num_rows, in_size)
    const u16* a,      // (slots, PARTS, max_rank, in_size)
    const int* ranks,  // (slots, PARTS)
    const int* order, const int* tile_slots, const int* tile_begins, const int* tile_ends, const int* num_tiles,
    float* shrunk,     // (splits, PARTS, num_rows, held_rank)
    int num_rows, int in_size, int max_rank, int held_rank) {
    asm volatile("griddepcontrol.launch_dependents;");
    const int num_rank_tiles = held_rank / RANKS, count = num_tiles[0];
    const int part = blockIdx.x / num_rank_tiles % PARTS, split = blockIdx.x / (num_rank_tiles * PARTS);
    const int first_rank = blockIdx.x % num_rank_tiles * RANKS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int first = split * BLOCK_INPUTS + warp * STEPS * 32 + q * 8;
    // Of each warp, row and rank.
    __shared__ float of_warps[WARPS][ROWS][RANKS + 1];
    Wait wait;
    for (int tile = blockIdx.y; tile < count; tile += gridDim.y) {
        const int matrix = tile_slots[tile] * PARTS + part, begin = tile_begins[tile], end = tile_ends[tile];
        const int rank = ranks[matrix] - first_rank;
        const bool has_more = begin + 8 < end;
        int rows[2];
        load_rows(rows, order, begin + g, end);
        const u16* const of_matrix = a + ((u64)matrix * max_rank + first_rank + g) * in_size;
        uint4 factors[STEPS], factors_8[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int k = first + s * 32;
            factors[s] = load_constants(of_matrix + k, k < in_size && g < rank);
            factors_8[s] = load_constants(of_matrix + 8 * (u64)in_size + k, k < in_size && g + 8 < rank);
        }
        wait();
        if (rank <= 0) continue;

        float sums[2][4] = {};
        const u16 *const of_row = x + (u64)rows[0] * in_size, *const of_row_8 = x + (u64)rows[1] * in_size;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int k = first + s * 32;
            const uint4 m = factors[s], m_8 = factors_8[s], v = load_written(of_row + k, k < in_size && rows[0] >= 0);
            multiply(sums[0], m.x, m_8.x, m.y, m_8.y, v.x, v.y);
            multiply(sums[0], m.z, m_8.z, m.w, m_8.w, v.z, v.w);
            if (has_more) {
                const uint4 v_8 = load_written(of_row_8 + k, k < in_size && rows[1] >= 0);
                multiply(sums[1], m.x, m_8.x, m.y, m_8.y, v_8.x, v_8.y);
                multiply(sums[1], m.z, m_8.z, m.w, m_8.w, v_8.z, v_8.w);
            }
        }

        // The sums of the tile before have been read.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; i++) of_warps[warp][i / 4 * 8 + q * 2 + i % 2][g + i / 2 % 2 * 8] = sums[i / 4][i % 4];
        __syncthreads();
        const int place = begin + threadIdx.x / 8, r = threadIdx.x % 8 * 2;
        if (threadIdx.x < 8 * ROWS && place < end) {
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                sum.x += of_warps[w][threadIdx.x / 8][r], sum.y += of_warps[w][threadIdx.x / 8][r + 1];
            }
            const u64 row = ((u64)split * PARTS + part) * num_rows + order[place];
            *(float2*)(shrunk + row * held_rank + first_rank + r) = sum;
        }
    }
    if (count == 0) wait();
}
