// Stable counting sort of pairs (token, expert) by expert; second half, after count_pairs.cu.
//
// A block has PAIRS consecutive pairs, one per thread, and adds up the counts of earlier blocks. Sums of integers do
// not depend on the order of atomic operations.
//
// Macros for NVRTC:
//   EXPERTS      experts of this device
//   PAIRS        pairs per block

constexpr int WARPS = PAIRS / 32;
constexpr unsigned int ALL = 0xffffffffu;

__device__ int local_expert(const int* experts, int pair, int num_pairs, int first_expert) {
    const int expert = pair < num_pairs ? experts[pair] - first_expert : -1;
    return expert >= 0 && expert < EXPERTS ? expert : -1;
}

// Inclusive.
__device__ int sum_of_warp(int value, int lane) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL, value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

// Exclusive, of EXPERTS numbers by one warp; sums[EXPERTS] is the total.
__device__ void sum_experts(const int* numbers, int divisor, int* sums, int lane) {
    int carry = 0;
    for (int first = 0; first < EXPERTS; first += 32) {
        const int expert = first + lane;
        const int number = expert < EXPERTS ? (numbers[expert] + divisor - 1) / divisor : 0;
        const int sum = sum_of_warp(number, lane);
        if (expert < EXPERTS) sums[expert] = carry + sum - number;
        carry += __shfl_sync(ALL, sum, 31);
    }
    if (lane == 0) sums[EXPERTS] = carry;
}

extern "C" __global__ void __launch_bounds__(PAIRS) place_pairs(
    const int* experts,                         // (num_pairs,)
    const int* counts,                          // (num_blocks, EXPERTS)
    int* order,                                 // (num_pairs,): pair of each place
    int* places,                                // (num_pairs,): place of each pair; -1: another device's expert
    int* offsets,                               // (EXPERTS + 1,): first place of each expert
    int4* tiles,                                // number of tiles; then expert, first place, end of each
    int num_pairs,
    int first_expert,
    int tile_rows) {
    __shared__ int before[EXPERTS], totals[EXPERTS], starts[EXPERTS + 1], first_tiles[EXPERTS + 1];
    __shared__ unsigned short of_warp[WARPS][EXPERTS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = threadIdx.x; i < WARPS * EXPERTS; i += PAIRS) of_warp[i / EXPERTS][i % EXPERTS] = 0;
    for (int e = threadIdx.x; e < EXPERTS; e += PAIRS) before[e] = totals[e] = 0;
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int pair = blockIdx.x * PAIRS + threadIdx.x;
    const int expert = local_expert(experts, pair, num_pairs, first_expert);
    const unsigned int same = __match_any_sync(ALL, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (expert >= 0 && rank == 0) of_warp[warp][expert] = __popc(same);
    // Groups of threads take blocks in turn.
    constexpr int GROUPS = PAIRS / EXPERTS;
    if (threadIdx.x < GROUPS * EXPERTS) {
        const int e = threadIdx.x % EXPERTS;
        int sum_before = 0, sum = 0;
#pragma unroll 4
        for (int block = threadIdx.x / EXPERTS; block < gridDim.x; block += GROUPS) {
            const int count = counts[block * EXPERTS + e];
            sum += count;
            if (block < blockIdx.x) sum_before += count;
        }
        atomicAdd(&totals[e], sum);
        atomicAdd(&before[e], sum_before);
    }
    __syncthreads();
    if (warp == 0) sum_experts(totals, 1, starts, lane);
    if (warp == 1) sum_experts(totals, tile_rows, first_tiles, lane);
    for (int e = threadIdx.x - 64; e >= 0 && e < EXPERTS; e += PAIRS - 64) {
        int sum = 0;
        for (int w = 0; w < WARPS; w++) {
            const int count = of_warp[w][e];
            of_warp[w][e] = sum;
            sum += count;
        }
    }
    __syncthreads();
    if (pair < num_pairs) {
        const int place = expert < 0 ? -1 : starts[expert] + before[expert] + of_warp[warp][expert] + rank;
        places[pair] = place;
        if (place >= 0) order[place] = pair;
    }
    if (blockIdx.x != 0) return;
    for (int e = threadIdx.x; e <= EXPERTS; e += PAIRS) offsets[e] = starts[e];
    const int num_tiles = first_tiles[EXPERTS];
    if (threadIdx.x == 0) tiles[0] = make_int4(num_tiles, 0, 0, 0);
    for (int tile = threadIdx.x; tile < num_tiles; tile += PAIRS) {
        // The last expert that starts at this tile or before it: those without pairs have no tiles.
        int low = 0, high = EXPERTS;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_tiles[middle] <= tile) low = middle; else high = middle;
        }
        const int first = starts[low] + (tile - first_tiles[low]) * tile_rows;
        tiles[1 + tile] = make_int4(low, first, min(first + tile_rows, starts[low + 1]), 0);
    }
}
