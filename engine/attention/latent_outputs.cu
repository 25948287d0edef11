// Few queries behind attention over latents: adds up the parts of each query's sum of latents, and multiplies it by its
// head's projection to values.
//
// A cluster of blocks computes one head, for all tokens. Each block adds up a share of the latents' numbers, sends it to
// the others, and multiplies a share of the projection's rows. Parts are merged by their sums' logarithms, in a fixed
// order. Weights and plans do not depend on earlier kernels and are requested before the kernel waits for its inputs
// (programmatic dependent launch). Buffers of earlier kernels are not __restrict__: the compiler could read them too
// early.
//
// Macros for NVRTC:
//   TOKENS     at least the tokens, at most 8
//   NUM_HEADS  heads
//   RANK       numbers of a latent, a multiple of 64
//   VALUE      numbers of a head's value, a multiple of 8
//   TILE_ROWS  rows of a part
//   MAX_PARTS  parts that a query may have, a multiple of 32

#include "bfloat16.cuh"

constexpr unsigned int ALL = 0xffffffffu;
constexpr int THREADS = 256, WARPS = THREADS / 32, CLUSTER = 8;
// Latents' numbers of a block, four of them per thread.
constexpr int COLUMNS = RANK / CLUSTER, QUADS = COLUMNS / 4, GROUPS = THREADS / QUADS;
// The projection's rows of a block; LANES threads share one.
constexpr int ROWS = VALUE / CLUSTER, LANES = RANK / 8 < 16 ? RANK / 8 : 16, AT_ONCE = THREADS / LANES;
constexpr int TIMES = (ROWS + AT_ONCE - 1) / AT_ONCE, CHUNKS = RANK / 8 / LANES;

__device__ __forceinline__ float low(unsigned int pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned int pair) { return __uint_as_float(pair & 0xffff0000u); }

// Not moved behind the wait.
__device__ __forceinline__ Chunk load_weights(const unsigned short* p) {
    Chunk c;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.v[0]), "=r"(c.v[1]), "=r"(c.v[2]), "=r"(c.v[3])
                 : "l"(p));
    return c;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) latent_outputs(
    const float* parts,                         // (num_parts, TILE_ROWS, RANK)
    const float* log_sums,                      // (num_parts, TILE_ROWS), base 2
    const unsigned short* whole,                // (NUM_HEADS, num_tokens, RANK): sums of queries of one part
    const int4* __restrict__ merges,            // (num_tiles,), see LatentPlan
    const unsigned short* __restrict__ values,  // (NUM_HEADS, VALUE, RANK), heads head_stride apart
    unsigned short* out,                        // (num_tokens, NUM_HEADS, VALUE)
    int num_tokens, int num_tiles, int head_stride) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
    __shared__ float shares[TOKENS][MAX_PARTS];
    __shared__ int first_places[TOKENS], nums_parts[TOKENS];
    __shared__ __align__(16) float sums[TOKENS][WARPS][COLUMNS];
    __shared__ __align__(16) unsigned short latents[TOKENS][RANK];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;

    if (threadIdx.x < TOKENS) {
        const int row = threadIdx.x * NUM_HEADS + head;
        int place = 0, num_parts = 1;
        for (int tile = 0; tile < num_tiles; tile++) {
            const int4 merge = merges[tile];
            if (merge.x <= row && row < merge.x + merge.y) {
                place = merge.z * TILE_ROWS + row - merge.x;
                num_parts = merge.w;
            }
        }
        first_places[threadIdx.x] = place;
        nums_parts[threadIdx.x] = num_parts;
    }
    const int own_lane = threadIdx.x % LANES, own_row = threadIdx.x / LANES;
    Chunk weights[TIMES][CHUNKS];
#pragma unroll
    for (int j = 0; j < TIMES; j++) {
        const int row = own_row + j * AT_ONCE;
        const long long first = (long long)head * head_stride + ((int)blockIdx.x * ROWS + row) * RANK;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            weights[j][i] = Chunk{};
            if (row < ROWS) weights[j][i] = load_weights(values + first + (own_lane + i * LANES) * 8);
        }
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");

    // A warp per token: shares of its parts.
    if (warp < num_tokens && nums_parts[warp] > 1) {
        const int num_parts = nums_parts[warp];
        float logs[MAX_PARTS / 32], top = __uint_as_float(0xff800000u), total = 0;  // negative infinity
#pragma unroll
        for (int i = 0; i < MAX_PARTS / 32; i++) {
            const int part = lane + i * 32;
            logs[i] = part < num_parts ? __ldcg(log_sums + first_places[warp] + (long long)part * TILE_ROWS)
                                       : __uint_as_float(0xff800000u);
            top = fmaxf(top, logs[i]);
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, mask));
#pragma unroll
        for (int i = 0; i < MAX_PARTS / 32; i++) {
            // The first part is seen by all rows, so the top is finite.
            logs[i] = exp2f(logs[i] - top);
            total += logs[i];
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) total += __shfl_xor_sync(ALL, total, mask);
#pragma unroll
        for (int i = 0; i < MAX_PARTS / 32; i++) shares[warp][lane + i * 32] = logs[i] / total;
    }
    __syncthreads();
    const int quad = threadIdx.x % QUADS, group = threadIdx.x / QUADS, first_column = blockIdx.x * COLUMNS + quad * 4;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float4 sum = {};
        if (t < num_tokens && nums_parts[t] > 1) {
            for (int part = group; part < nums_parts[t]; part += GROUPS) {
                const long long place = first_places[t] + (long long)part * TILE_ROWS;
                const float4 x = __ldcg(reinterpret_cast<const float4*>(parts + place * RANK + first_column));
                const float share = shares[t][part];
                sum = make_float4(sum.x + x.x * share, sum.y + x.y * share, sum.z + x.z * share, sum.w + x.w * share);
            }
        } else if (t < num_tokens && group == 0) {
            const uint2 pairs =
                __ldcg(reinterpret_cast<const uint2*>(whole + ((long long)head * num_tokens + t) * RANK + first_column));
            sum = make_float4(low(pairs.x), high(pairs.x), low(pairs.y), high(pairs.y));
        }
        // Over the groups of a warp.
#pragma unroll
        for (int mask = QUADS; mask < 32; mask *= 2) {
            sum.x += __shfl_xor_sync(ALL, sum.x, mask);
            sum.y += __shfl_xor_sync(ALL, sum.y, mask);
            sum.z += __shfl_xor_sync(ALL, sum.z, mask);
            sum.w += __shfl_xor_sync(ALL, sum.w, mask);
        }
        if (lane < QUADS) *reinterpret_cast<float4*>(&sums[t][warp][quad * 4]) = sum;
    }
    __syncthreads();
    // All blocks of the cluster run.
    asm volatile("barrier.cluster.wait.aligned;");
    for (int i = threadIdx.x; i < num_tokens * (COLUMNS / 2); i += THREADS) {
        const int token = i / (COLUMNS / 2), pair = i % (COLUMNS / 2);
        float first = 0, second = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            first += sums[token][w][pair * 2];
            second += sums[token][w][pair * 2 + 1];
        }
        const unsigned int both = pack(first, second);
        const unsigned int target =
            (unsigned int)__cvta_generic_to_shared(&latents[token][blockIdx.x * COLUMNS + pair * 2]);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            asm volatile(
                "{\n"
                ".reg .b32 remote;\n"
                "mapa.shared::cluster.u32 remote, %0, %1;\n"
                "st.shared::cluster.u32 [remote], %2;\n"
                "}" ::"r"(target),
                "r"(rank), "r"(both)
                : "memory");
        }
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= num_tokens) break;
#pragma unroll
        for (int j = 0; j < TIMES; j++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const Chunk x = *reinterpret_cast<const Chunk*>(&latents[t][(own_lane + i * LANES) * 8]);
#pragma unroll
                for (int v = 0; v < 4; v++)
                    sum += low(x.v[v]) * low(weights[j][i].v[v]) + high(x.v[v]) * high(weights[j][i].v[v]);
            }
#pragma unroll
            for (int mask = LANES / 2; mask; mask /= 2) sum += __shfl_xor_sync(ALL, sum, mask);
            const int row = own_row + j * AT_ONCE;
            if (own_lane == 0 && row < ROWS)
                out[((long long)t * NUM_HEADS + head) * VALUE + blockIdx.x * ROWS + row] = pack(sum, 0.0f) & 0xffffu;
        }
    }
}
