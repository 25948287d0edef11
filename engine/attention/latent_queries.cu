// Few queries before attention over latents: multiplies each head's query by its keys' projection, rotates the rest of
// the query, and writes normalized latents (quantized if pages are FP8) and rotated keys into pages.
//
// A block computes COLUMNS numbers of one head's absorbed queries, for all tokens. The blocks behind the last head write
// pages. Weights do not depend on earlier kernels and are requested before the kernel waits for its inputs (programmatic
// dependent launch). Buffers of earlier kernels are not __restrict__: the compiler could read them too early.
//
// Macros for NVRTC:
//   TOKENS     at least the tokens, at most 8
//   NUM_HEADS  heads
//   NOPE       numbers of a query that are not rotated, a multiple of 32, at most 256
//   ROPE       numbers that are rotated, in pairs of neighbors: at most 64
//   RANK       numbers of a latent, a multiple of 64
//   PAGE_SIZE  tokens per page
//   FP8        1: pages have latents as e4m3; 0: as bfloat16

#include "bfloat16.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int COLUMNS = 64, CHUNKS = COLUMNS / 8;
// Rows of the projection that the threads read at a time.
constexpr int AT_ONCE = THREADS / CHUNKS, TIMES = NOPE / AT_ONCE;
constexpr int Q_SIZE = NOPE + ROPE, KV_SIZE = RANK + ROPE, PAIRS = ROPE / 2;
constexpr int LATENT_BYTES = RANK * (FP8 ? 1 : 2), ROW_BYTES = LATENT_BYTES + ROPE * 2;

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

__device__ __forceinline__ unsigned int turned(unsigned int pair, float cos, float sin) {
    return pack(low(pair) * cos - high(pair) * sin, high(pair) * cos + low(pair) * sin);
}

// Saturates; NaN stays NaN.
__device__ __forceinline__ unsigned short quantized(float first, float second) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

extern "C" __global__ void __launch_bounds__(THREADS) latent_queries(
    unsigned short* q,                              // (num_tokens, NUM_HEADS, NOPE + ROPE); the rest is rotated in place
    const unsigned short* kv,                       // (num_tokens, RANK + ROPE)
    const unsigned short* __restrict__ keys,        // (NUM_HEADS, NOPE, RANK), heads head_stride apart
    const unsigned short* __restrict__ norm_weight, // (RANK,)
    const float* __restrict__ cos_table,            // (num_positions, PAIRS)
    const float* __restrict__ sin_table,            // (num_positions, PAIRS)
    const int* __restrict__ positions,              // (num_tokens,)
    const long long* __restrict__ slots,            // (num_tokens,), page * PAGE_SIZE + offset in the page
    unsigned short* absorbed,                       // (NUM_HEADS, num_tokens, RANK)
    unsigned char* pool,                            // (num_pages, num_layers, PAGE_SIZE, ROW_BYTES)
    int num_tokens, int head_stride, int page_stride, int layer_offset, float eps, float inverse_scale) {
    asm volatile("griddepcontrol.launch_dependents;");
    __shared__ __align__(16) unsigned short queries[TOKENS][NOPE];
    __shared__ float parts[WARPS][TOKENS][COLUMNS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y, first_column = blockIdx.x * COLUMNS;

    if (head >= NUM_HEADS) {
        const int token = (head - NUM_HEADS) * gridDim.x + blockIdx.x;
        if (token >= num_tokens) return;
        const long long slot = slots[token];
        unsigned char* target = pool + slot / PAGE_SIZE * page_stride + layer_offset + slot % PAGE_SIZE * ROW_BYTES;
        const unsigned int* source = reinterpret_cast<const unsigned int*>(kv + (long long)token * KV_SIZE);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        // A pair per thread, and a second one where latents are long.
        constexpr int OWN = (RANK / 2 + THREADS - 1) / THREADS;
        unsigned int pairs[OWN];
        float square = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int place = threadIdx.x + i * THREADS;
            pairs[i] = place < RANK / 2 ? source[place] : 0;
            square += low(pairs[i]) * low(pairs[i]) + high(pairs[i]) * high(pairs[i]);
        }
        __shared__ float squares[WARPS];
#pragma unroll
        for (int mask = 16; mask; mask /= 2) square += __shfl_xor_sync(0xffffffffu, square, mask);
        if (lane == 0) squares[warp] = square;
        __syncthreads();
        square = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) square += squares[w];
        const float scale = rsqrtf(square / RANK + eps);
        const unsigned int* weights = reinterpret_cast<const unsigned int*>(norm_weight);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int place = threadIdx.x + i * THREADS;
            if (place < RANK / 2) {
                const float first = low(pairs[i]) * scale * low(weights[place]);
                const float second = high(pairs[i]) * scale * high(weights[place]);
                if (FP8)
                    reinterpret_cast<unsigned short*>(target)[place] =
                        quantized(first * inverse_scale, second * inverse_scale);
                else
                    reinterpret_cast<unsigned int*>(target)[place] = pack(first, second);
            }
        }
        if (threadIdx.x < PAIRS) {
            const long long angle = (long long)positions[token] * PAIRS + threadIdx.x;
            reinterpret_cast<unsigned int*>(target + LATENT_BYTES)[threadIdx.x] =
                turned(source[RANK / 2 + threadIdx.x], cos_table[angle], sin_table[angle]);
        }
        return;
    }

    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    Chunk weights[TIMES];
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const long long place = (long long)head * head_stride + (row + i * AT_ONCE) * RANK + first_column + chunk * 8;
        weights[i] = load_weights(keys + place);
    }
    // The first block of a head rotates its queries: a pair per thread.
    const int turned_token = threadIdx.x / PAIRS, own_pair = threadIdx.x % PAIRS;
    const bool turns = blockIdx.x == 0 && turned_token < num_tokens;
    float cos = 0, sin = 0;
    if (turns) {
        const long long angle = (long long)positions[turned_token] * PAIRS + own_pair;
        cos = cos_table[angle], sin = sin_table[angle];
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    auto query_at = [&](int token) { return q + ((long long)token * NUM_HEADS + head) * Q_SIZE; };
    if (threadIdx.x < num_tokens * (NOPE / 8)) {
        const int token = threadIdx.x / (NOPE / 8), place = threadIdx.x % (NOPE / 8) * 8;
        *reinterpret_cast<Chunk*>(queries[token] + place) = *reinterpret_cast<const Chunk*>(query_at(token) + place);
    }
    if (turns) {
        unsigned int* pair = reinterpret_cast<unsigned int*>(query_at(turned_token) + NOPE) + own_pair;
        *pair = turned(*pair, cos, sin);
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= num_tokens) break;
        float sums[8] = {};
#pragma unroll
        for (int i = 0; i < TIMES; i++) {
            const float x = number(queries[t][row + i * AT_ONCE]);
#pragma unroll
            for (int v = 0; v < 4; v++) {
                sums[2 * v] += x * low(weights[i].v[v]);
                sums[2 * v + 1] += x * high(weights[i].v[v]);
            }
        }
        // Over the rows of a warp, whose lanes with equal chunks are CHUNKS apart.
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
            for (int mask = CHUNKS; mask < 32; mask *= 2) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], mask);
        if (lane < CHUNKS)
#pragma unroll
            for (int k = 0; k < 8; k++) parts[warp][t][chunk * 8 + k] = sums[k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens * (COLUMNS / 2); i += THREADS) {
        const int token = i / (COLUMNS / 2), pair = i % (COLUMNS / 2);
        float first = 0, second = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            first += parts[w][token][pair * 2];
            second += parts[w][token][pair * 2 + 1];
        }
        const long long place = ((long long)head * num_tokens + token) * RANK + first_column;
        reinterpret_cast<unsigned int*>(absorbed + place)[pair] = pack(first, second);
    }
}
