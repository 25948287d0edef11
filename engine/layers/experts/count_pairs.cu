// First half of the sort in place_pairs.cu: counts pairs by expert.
//
// A block has PAIRS consecutive pairs, one per thread.
//
// Macros for NVRTC:
//   EXPERTS      experts of this device
//   PAIRS        pairs per block

__device__ int local_expert(const int* experts, int pair, int num_pairs, int first_expert) {
    const int expert = pair < num_pairs ? experts[pair] - first_expert : -1;
    return expert >= 0 && expert < EXPERTS ? expert : -1;
}

extern "C" __global__ void __launch_bounds__(PAIRS) count_pairs(
    const int* experts,                         // (num_pairs,)
    int* counts,                                // (num_blocks, EXPERTS)
    int num_pairs,
    int first_expert) {
    __shared__ int held[EXPERTS];
    asm volatile("griddepcontrol.launch_dependents;");
    for (int expert = threadIdx.x; expert < EXPERTS; expert += PAIRS) held[expert] = 0;
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int expert = local_expert(experts, blockIdx.x * PAIRS + threadIdx.x, num_pairs, first_expert);
    if (expert >= 0) atomicAdd(&held[expert], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += PAIRS) counts[blockIdx.x * EXPERTS + e] = held[e];
}
