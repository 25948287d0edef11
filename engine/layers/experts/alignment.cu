// Sorts pairs (token, expert) by expert, and cuts each expert's pairs into tiles.
//
// Every block counts the pairs of all experts, so that none waits for another. It then places the pairs of its own OWN
// experts: each thread takes contiguous pairs, and a scan over threads of OWN counters in one number gives their
// places. Sums of counts do not depend on order, so the result is always the same.
//
// `experts` is not __restrict__: the compiler could read it before the wait for earlier kernels.
//
// Macros for NVRTC:
//   EXPERTS  experts with weights here, at most THREADS
//   THREADS  threads of a block
//   OWN      experts of a block, at most 4

// One counter of 16 bits per own expert.
typedef unsigned long long Counters;
constexpr int WARPS = THREADS / 32;
constexpr int PAIRS = 8;

// Returns the sum of the values of this and earlier threads, and in `total` of all.
template <typename T>
__device__ __forceinline__ T scan(T value, T* of_warps, T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += before;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = value;
    __syncthreads();
    T of_earlier = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) of_earlier = total;
        total += of_warps[w];
    }
    return value + of_earlier;
}

extern "C" __global__ void __launch_bounds__(THREADS) alignment(
    const int* experts,  // (num_pairs,)
    int* pairs,          // (num_pairs,) out: pairs by expert
    int* tiles,          // (3, max_tiles) out: expert, first place in `pairs`, and end of the expert's places
    int* num_tiles,      // (1,) out
    int num_pairs,       // less than 65536
    int tile_rows,
    int max_tiles,
    int first_expert) {
    __shared__ int counts[EXPERTS];
    __shared__ int starts[OWN];
    __shared__ unsigned int of_warps[WARPS];
    __shared__ Counters counters_of_warps[WARPS];
    const int thread = threadIdx.x;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    if (thread < EXPERTS) counts[thread] = 0;
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = thread; i < num_pairs; i += THREADS) {
        const int expert = experts[i] - first_expert;
        if (expert >= 0 && expert < EXPERTS) atomicAdd(counts + expert, 1);
    }
    __syncthreads();
    // Tiles in the high half, pairs in the low one.
    const int count = thread < EXPERTS ? counts[thread] : 0;
    const int num_own_tiles = (count + tile_rows - 1) / tile_rows;
    const unsigned int mine = (unsigned int)num_own_tiles << 16 | count;
    unsigned int total;
    const unsigned int before = scan(mine, of_warps, total) - mine;
    const int first_own = blockIdx.x * OWN;
    if (thread >= first_own && thread < min(first_own + OWN, EXPERTS)) {
        const int start = before & 0xffff, first_tile = before >> 16;
        starts[thread - first_own] = start;
        for (int t = 0; t < num_own_tiles; t++) {
            tiles[first_tile + t] = thread;
            tiles[max_tiles + first_tile + t] = start + t * tile_rows;
            tiles[2 * max_tiles + first_tile + t] = start + count;
        }
        if (thread == 0) *num_tiles = total >> 16;
    }
    Counters placed = 0;
    for (int begin = 0; begin < num_pairs; begin += THREADS * PAIRS) {
        const int first = begin + thread * PAIRS;
        int owns[PAIRS];
        Counters found = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int expert = first + i < num_pairs ? experts[first + i] - first_expert : -1;
            // As unsigned, other experts are at least OWN. EXPERTS may end within the last block's.
            owns[i] = expert < EXPERTS ? expert - first_own : -1;
            if ((unsigned int)owns[i] < OWN) found += 1ull << 16 * owns[i];
        }
        Counters all;
        Counters place = placed + scan(found, counters_of_warps, all) - found;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if ((unsigned int)owns[i] >= OWN) continue;
            pairs[starts[owns[i]] + (int)(place >> 16 * owns[i] & 0xffff)] = first + i;
            place += 1ull << 16 * owns[i];
        }
        placed += all;
    }
}
