// Argmax of each row of logits; the lowest id wins ties.
//
// Several blocks share a row. Each encodes its best candidate as one number, with the logit in the high bits and the
// inverted id in the low bits, so that the larger number is the better token. Blocks combine candidates by atomicMax,
// and a row's last block writes the token.
//
// Macros for NVRTC:
//   VOCAB_SIZE   tokens of a row
//   THREADS      threads per block

typedef unsigned long long Candidate;

// Maps a bfloat16 to an integer of the same order.
__device__ __forceinline__ Candidate candidate(unsigned short logit, int token) {
    // Both zeros are equal.
    if (logit == 0x8000u) logit = 0;
    const unsigned int ordered = logit & 0x8000u ? 0xffffu & ~(unsigned int)logit : logit | 0x8000u;
    return (Candidate)ordered << 32 | (0xffffffffu - token);
}

__device__ __forceinline__ Candidate better(Candidate a, Candidate b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(THREADS) most_likely(
    const unsigned short* logits,               // (num_rows, VOCAB_SIZE)
    Candidate* best,                            // (num_rows,), zero between launches
    unsigned int* arrivals,                     // (num_rows,), zero between launches
    long long* tokens) {                        // (num_rows,)
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const int row = blockIdx.y;
    const unsigned short* from = logits + (long long)row * VOCAB_SIZE;
    const int first = blockIdx.x * THREADS + threadIdx.x, stride = gridDim.x * THREADS;
    Candidate mine = 0;
    if (VOCAB_SIZE % 8 == 0) {
        const uint4* chunks = reinterpret_cast<const uint4*>(from);
        for (int i = first; i < VOCAB_SIZE / 8; i += stride) {
            const uint4 chunk = chunks[i];
            const unsigned int pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
            for (int p = 0; p < 4; p++) {
                mine = better(mine, candidate(pairs[p] & 0xffffu, i * 8 + p * 2));
                mine = better(mine, candidate(pairs[p] >> 16, i * 8 + p * 2 + 1));
            }
        }
    } else {
        for (int i = first; i < VOCAB_SIZE; i += stride) mine = better(mine, candidate(from[i], i));
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) mine = better(mine, __shfl_xor_sync(0xffffffffu, mine, mask));
    __shared__ Candidate of_warps[THREADS / 32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < THREADS / 32; warp++) mine = better(mine, of_warps[warp]);
    atomicMax(best + row, mine);
    __threadfence();
    if (atomicAdd(arrivals + row, 1) != gridDim.x - 1) return;
    __threadfence();
    tokens[row] = 0xffffffffu - (unsigned int)atomicExch(best + row, 0);
    arrivals[row] = 0;
}
