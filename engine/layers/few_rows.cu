// Matrix products of few tokens: y = x W^T, where reading W is all the time there is.
//
// One block computes ROW_TILES * 16 outputs of every token; its warps share the inputs among them, each taking every
// WARPS-th stretch of 32, and add up what they have in shared memory. A product is one mma.m16n8k16: 16 rows of W by 8
// tokens. Which input is which number inside an mma is free as long as W and x agree, so that a thread takes 8 numbers
// that lie side by side (16 bytes) for two mmas.
//
// Weights depend on no kernel before: the first are asked for before the kernel waits for its inputs, while the kernels
// before it still run (programmatic dependent launch). What those write is not __restrict__: the compiler could read it
// too early.
//
// Compiled by NVRTC with these macros:
//   TOKEN_TILES  tokens / 8, rounded up
//   ROW_TILES    16 rows of W each
//   WARPS        in a block
//   DEPTH        stretches of 32 inputs that a warp asks for at a time
//   PREFETCH     inputs of each row, beyond the first stretches, that are fetched into the L2 cache at once; 0: none
//   NORM         1: x is RMS-normalised first
//   GATED        1: W is [gate; up], y = silu(x gate^T) * (x up^T); a tile is 8 rows of each
//   ADD          1: y += x W^T

#include "bfloat16.cuh"

__device__ __forceinline__ Chunk load_weights(const unsigned short* p) {
    Chunk c;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.v[0]), "=r"(c.v[1]), "=r"(c.v[2]), "=r"(c.v[3])
                 : "l"(p));
    return c;
}

__device__ __forceinline__ Chunk load(const unsigned short* p) {
    return *reinterpret_cast<const Chunk*>(p);
}

__device__ __forceinline__ float low(unsigned int pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned int pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void multiply(float* sum, const unsigned int* a, unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What a thread needs for one stretch of 32 inputs.
struct Stretch {
    Chunk weights[ROW_TILES][2];
    Chunk inputs[TOKEN_TILES];
#if NORM
    Chunk scale;
#endif
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) few_rows(
    const unsigned short* __restrict__ weight,       // (num_out [* 2 if GATED], num_in)
    const unsigned short* x,                         // (num_tokens, num_in)
    const unsigned short* __restrict__ norm_weight,  // (num_in,) if NORM
    const unsigned short* __restrict__ bias,         // (num_out [* 2 if GATED],) or null
    unsigned short* y,                               // (num_tokens, num_out)
    int num_tokens, int num_out, int num_in, float eps) {
    asm volatile("griddepcontrol.launch_dependents;");
    constexpr int TOKENS = TOKEN_TILES * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    const int first_tile = blockIdx.x * ROW_TILES;
    const int num_steps = num_in / 32;

    // The rows of W that this thread reads: `group` and `group + 8` of each tile.
    const unsigned short* rows[ROW_TILES][2];
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        const int tile = first_tile + t;
#if GATED
        const int upper = min(tile * 8 + group, num_out - 1), lower = num_out + upper;
#else
        const int upper = min(tile * 16 + group, num_out - 1), lower = min(tile * 16 + group + 8, num_out - 1);
#endif
        rows[t][0] = weight + (long long)upper * num_in + part * 8;
        rows[t][1] = weight + (long long)lower * num_in + part * 8;
    }

    float sums[ROW_TILES][TOKEN_TILES][4] = {};
    float squares[TOKEN_TILES] = {};
    // Step i of this warp is in ahead[i % DEPTH], asked for DEPTH steps before.
    Stretch ahead[DEPTH];

    auto ask_weights = [&](Stretch& s, int step) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            s.weights[t][0] = load_weights(rows[t][0] + step * 32);
            s.weights[t][1] = load_weights(rows[t][1] + step * 32);
        }
    };
    auto ask_inputs = [&](Stretch& s, int step) {
        const int place = step * 32 + part * 8;
#if NORM
        s.scale = load(norm_weight + place);
#endif
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            const int token = n * 8 + group;
            s.inputs[n] = Chunk{};
            if (token < num_tokens) s.inputs[n] = load(x + (long long)token * num_in + place);
        }
    };
    auto compute = [&](Stretch& s) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            Chunk& input = s.inputs[n];
#if NORM
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float a = low(input.v[i]), b = high(input.v[i]);
                squares[n] += a * a + b * b;
                input.v[i] = pack(a * low(s.scale.v[i]), b * high(s.scale.v[i]));
            }
#endif
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                const Chunk &upper = s.weights[t][0], &lower = s.weights[t][1];
                const unsigned int a0[4] = {upper.v[0], lower.v[0], upper.v[1], lower.v[1]};
                const unsigned int a1[4] = {upper.v[2], lower.v[2], upper.v[3], lower.v[3]};
                multiply(sums[t][n], a0, input.v[0], input.v[1]);
                multiply(sums[t][n], a1, input.v[2], input.v[3]);
            }
        }
    };

#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (warp + d * WARPS < num_steps) ask_weights(ahead[d], warp + d * WARPS);
#if PREFETCH
    // The rest goes to the L2 cache.
    if (threadIdx.x < ROW_TILES * 16) {
        const int t = threadIdx.x / 16, r = threadIdx.x % 16;
#if GATED
        const int row = min((first_tile + t) * 8 + r % 8, num_out - 1) + (r < 8 ? 0 : num_out);
#else
        const int row = min((first_tile + t) * 16 + r, num_out - 1);
#endif
        const int skip = DEPTH * WARPS * 32;
        const int size = min(num_in - skip, PREFETCH);
        if (size > 0)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(weight + (long long)row * num_in + skip),
                         "r"(size * 2));
    }
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (warp + d * WARPS < num_steps) ask_inputs(ahead[d], warp + d * WARPS);

    for (int first = warp; first < num_steps; first += DEPTH * WARPS) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int step = first + d * WARPS, next = step + DEPTH * WARPS;
            if (step < num_steps) compute(ahead[d]);
            if (next < num_steps) {
                ask_weights(ahead[d], next);
                ask_inputs(ahead[d], next);
            }
        }
    }

    // (warp, tile, row, token), and the tokens' sums of squares.
    __shared__ float parts[WARPS][ROW_TILES][16][TOKENS];
    __shared__ float part_squares[WARPS][TOKENS];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            float* upper = &parts[warp][t][group][n * 8 + part * 2];
            float* lower = &parts[warp][t][group + 8][n * 8 + part * 2];
            upper[0] = sums[t][n][0];
            upper[1] = sums[t][n][1];
            lower[0] = sums[t][n][2];
            lower[1] = sums[t][n][3];
        }
#if NORM
        float s = squares[n];
        s += __shfl_xor_sync(0xffffffffu, s, 1);
        s += __shfl_xor_sync(0xffffffffu, s, 2);
        if (part == 0) part_squares[warp][n * 8 + group] = s;
#endif
    }
    __syncthreads();

    // Rows of a tile that have outputs of their own: with GATED the other 8 belong to the same outputs.
    constexpr int OUTPUTS = GATED ? 8 : 16;
    for (int i = threadIdx.x; i < ROW_TILES * OUTPUTS * TOKENS; i += WARPS * 32) {
        const int row = i % OUTPUTS, token = i / OUTPUTS % TOKENS, t = i / OUTPUTS / TOKENS;
        const int out = (first_tile + t) * OUTPUTS + row;
        if (token >= num_tokens || out >= num_out) continue;
        float sum = 0, gated = 0, scale = 1;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            sum += parts[w][t][row][token];
            if (GATED) gated += parts[w][t][(row + 8) % 16][token];
        }
#if NORM
        float square = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) square += part_squares[w][token];
        scale = rsqrtf(square / num_in + eps);
#endif
        sum *= scale;
        if (bias) sum += number(bias[out]);
#if GATED
        gated *= scale;
        if (bias) gated += number(bias[num_out + out]);
        sum = sum / (1.0f + __expf(-sum)) * gated;
#endif
        unsigned short* target = y + (long long)token * num_out + out;
#if ADD
        sum += number(*target);
#endif
        *target = pack(sum, 0.0f) & 0xffffu;
    }
}
