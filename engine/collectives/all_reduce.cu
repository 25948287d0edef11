// The sum of a tensor over all ranks, in rank order and in float32, so that every rank gets the same bits.
//
// In one shot every rank reads the whole tensor of all others. In two shots it sums one part, and reads the sums of
// the other parts from the ranks that made them. It reads less from several others, but meets them twice. Both give
// the same bits.
//
// Macros for NVRTC, beside round.cuh's:
//   BFLOAT16   0: float32; 1: bfloat16
//   TWO_SHOT   0 or 1

#include "bfloat16.cuh"
#include "round.cuh"

#if BFLOAT16
typedef unsigned short Number;
#else
typedef float Number;
#endif
// Numbers of a vector of 16 bytes.
constexpr int WIDTH = 16 / sizeof(Number);

// Reads a vector; numbers behind the end are 0.
__device__ __forceinline__ uint4 load(const Number* from, int vector, int count) {
    if ((vector + 1) * WIDTH <= count) return reinterpret_cast<const uint4*>(from)[vector];
    __align__(16) Number numbers[WIDTH] = {};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (vector * WIDTH + i < count) numbers[i] = from[vector * WIDTH + i];
    }
    return *reinterpret_cast<const uint4*>(numbers);
}

__device__ __forceinline__ void store(Number* to, int vector, int count, uint4 value) {
    if ((vector + 1) * WIDTH <= count) {
        reinterpret_cast<uint4*>(to)[vector] = value;
        return;
    }
    __align__(16) Number numbers[WIDTH];
    *reinterpret_cast<uint4*>(numbers) = value;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (vector * WIDTH + i < count) to[vector * WIDTH + i] = numbers[i];
    }
}

__device__ __forceinline__ void add(float (&sums)[WIDTH], uint4 vector) {
    const unsigned int words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if BFLOAT16
        sums[2 * i] += number(words[i] & 0xffffu);
        sums[2 * i + 1] += number(words[i] >> 16);
#else
        sums[i] += __uint_as_float(words[i]);
#endif
    }
}

__device__ __forceinline__ uint4 rounded(const float (&sums)[WIDTH]) {
#if BFLOAT16
    return {pack(sums[0], sums[1]), pack(sums[2], sums[3]), pack(sums[4], sums[5]), pack(sums[6], sums[7])};
#else
    return {__float_as_uint(sums[0]), __float_as_uint(sums[1]), __float_as_uint(sums[2]), __float_as_uint(sums[3])};
#endif
}

__device__ __forceinline__ uint4 sum(const Round& round, int vector, const Number* residual, int count) {
    uint4 parts[DEGREE];
#pragma unroll
    for (int rank = 0; rank < DEGREE; rank++) parts[rank] = peek(round.staging<const uint4>(rank) + vector);
    float sums[WIDTH] = {};
#pragma unroll
    for (int rank = 0; rank < DEGREE; rank++) add(sums, parts[rank]);
    if (residual != nullptr) add(sums, load(residual, vector, count));
    return rounded(sums);
}

extern "C" __global__ void __launch_bounds__(THREADS) all_reduce(
    MEMBERS, Flag* state, Flag* aborted,
    const Number* x,         // (count,)
    const Number* residual,  // (count,) or null: added to the sum
    Number* out,             // (count,), may be x or residual
    int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    unsigned char* const members[MAX_DEGREE] = MEMBER_LIST;
    const Round round(members, state, aborted);
    const int num_vectors = (count + WIDTH - 1) / WIDTH, of_block = (num_vectors + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * of_block, last = min(first + of_block, num_vectors);
    uint4* own = round.staging<uint4>(RANK);
    for (int v = first + threadIdx.x; v < last; v += THREADS) own[v] = load(x, v, count);
    if (!round.meet(0)) return;
#if TWO_SHOT
    const int of_rank = (of_block + DEGREE - 1) / DEGREE;
    const int own_last = min(first + (RANK + 1) * of_rank, last);
    for (int v = first + RANK * of_rank + threadIdx.x; v < own_last; v += THREADS) {
        const uint4 total = sum(round, v, residual, count);
        own[v] = total;
        store(out, v, count, total);
    }
    if (!round.meet(1)) return;
    for (int i = threadIdx.x; i < of_rank; i += THREADS) {
#pragma unroll
        for (int rank = 0; rank < DEGREE; rank++) {
            const int v = first + rank * of_rank + i;
            if (rank != RANK && v < last) store(out, v, count, peek(round.staging<const uint4>(rank) + v));
        }
    }
#else
    for (int v = first + threadIdx.x; v < last; v += THREADS) store(out, v, count, sum(round, v, residual, count));
#endif
    round.end();
}
