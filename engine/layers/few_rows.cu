// Matrix products of few tokens, y = x W^T, bound by the time to read W.
//
// One block computes ROW_TILES * 16 outputs of every token. Each of its warps takes every WARPS-th stretch of 32
// inputs (64 for FP8), and the block adds up their sums in shared memory. A product is one mma.m16n8k16: 16 rows of
// W by 8 tokens. Inputs may map to mma indices in any order as long as W and x agree. So a thread loads 16
// contiguous bytes of W for two mma, or for four with FP8.
//
// With HELD a block takes several tiles in turn. A warp keeps the same inputs in registers for all tiles. It
// requests the next tile's weights before it finishes a tile, so that memory stays busy.
//
// FP8 weights (float8_e4m3fn) become bfloat16 in registers, exactly; x is not quantized. Moving FP8 bits into
// bfloat16 position makes the number 2^-120 times as large, by the different exponent bias. Inputs are scaled by
// 2^60, which keeps sums far from the smallest numbers, and sums are corrected at the end.
//
// Weights do not depend on earlier kernels. The first are requested before the kernel waits for its inputs
// (programmatic dependent launch). Buffers of earlier kernels are not __restrict__: the compiler could read them too
// early.
//
// Macros for NVRTC:
//   TOKEN_TILES  tokens / 8, rounded up
//   ROW_TILES    16 rows of W each
//   WARPS        warps per block
//   BLOCKS       blocks per multiprocessor; 0: as many as fit
//   DEPTH        stretches of inputs that a warp requests at a time
//   PREFETCH     inputs of each row, after the first stretches, to prefetch into the L2 cache; 0: none
//   HELD         stretches of inputs that a warp keeps, a multiple of DEPTH; W then has HELD * WARPS stretches, and
//                TOKEN_TILES is 1; 0: none
//   NORM         1: RMS-normalize x first
//   GATED        1: W is [gate; up], y = silu(x gate^T) * (x up^T); a tile is 8 rows of each
//   ADD          1: y += x W^T
//   FP8          0: W is bfloat16; 1: FP8 with a scale per row; 2: FP8 with a scale per 128 x 128

#include "bfloat16.cuh"

#if FP8
typedef unsigned char Weight;
#else
typedef unsigned short Weight;
#endif
constexpr int NUM_OF_THREAD = 16 / sizeof(Weight);
constexpr int STRETCH = 4 * NUM_OF_THREAD;
constexpr int INPUT_CHUNKS = NUM_OF_THREAD / 8;
// Pairs of a token's inputs per thread and stretch.
constexpr int PAIRS = NUM_OF_THREAD / 2;
// Outputs of a tile: with GATED, two rows belong to each.
constexpr int OUTPUTS = GATED ? 8 : 16;

#if BLOCKS
#define BOUNDS __launch_bounds__(WARPS * 32, BLOCKS)
#else
#define BOUNDS __launch_bounds__(WARPS * 32)
#endif
#if FP8 == 2
// Scale blocks that a thread's rows of a tile lie in: one, or two with GATED.
constexpr int BLOCK_SCALES = GATED ? 2 : 1;
#endif

__device__ __forceinline__ Chunk load_weights(const Weight* p) {
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

#if FP8
#include "fp8_pairs.cuh"

constexpr float UP = 1152921504606846976.0f;  // 2^60
constexpr float DOWN = UP;                    // 2^(120 - 60)
#endif

// A thread's part of W for one stretch.
struct Weights {
    Chunk rows[ROW_TILES][2];
#if FP8 == 2
    float block_scale[ROW_TILES][BLOCK_SCALES];
#endif
};

// A thread's part of x for one stretch.
struct Inputs {
    Chunk of[TOKEN_TILES][INPUT_CHUNKS];
#if NORM
    Chunk scale[INPUT_CHUNKS];
#endif
};

extern "C" __global__ void BOUNDS few_rows(
    const Weight* __restrict__ weight,               // (num_out [* 2 if GATED], num_in)
    const float* __restrict__ weight_scale,          // null, (rows,), or (rows / 128, num_in / 128)
    const unsigned short* x,                         // (num_tokens, num_in)
    const unsigned short* __restrict__ norm_weight,  // (num_in,) if NORM
    const unsigned short* __restrict__ bias,         // (num_out [* 2 if GATED],) or null
    unsigned short* y,                               // (num_tokens, num_out)
    int num_tokens, int num_out, int num_in, float eps) {
    asm volatile("griddepcontrol.launch_dependents;");
    constexpr int TOKENS = TOKEN_TILES * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    int first_tile = blockIdx.x * ROW_TILES;

    // This thread reads rows `group` and `group + 8` of each tile.
    const Weight* rows[ROW_TILES][2];
#if FP8 == 2
    const float* block_scales[ROW_TILES][BLOCK_SCALES];
#endif
    auto go_to = [&](int first) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const int tile = first + t;
#if GATED
            const int upper = min(tile * 8 + group, num_out - 1), lower = num_out + upper;
#else
            const int upper = min(tile * 16 + group, num_out - 1), lower = min(tile * 16 + group + 8, num_out - 1);
#endif
            rows[t][0] = weight + (long long)upper * num_in + part * NUM_OF_THREAD;
            rows[t][1] = weight + (long long)lower * num_in + part * NUM_OF_THREAD;
#if FP8 == 2
            block_scales[t][0] = weight_scale + upper / 128 * (num_in / 128);
            if (GATED) block_scales[t][BLOCK_SCALES - 1] = weight_scale + lower / 128 * (num_in / 128);
#endif
        }
    };
    auto ask_weights = [&](Weights& w, int step) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            w.rows[t][0] = load_weights(rows[t][0] + step * STRETCH);
            w.rows[t][1] = load_weights(rows[t][1] + step * STRETCH);
#if FP8 == 2
#pragma unroll
            for (int b = 0; b < BLOCK_SCALES; b++) w.block_scale[t][b] = block_scales[t][b][step * STRETCH / 128];
#endif
        }
    };
    auto ask_inputs = [&](Inputs& s, int step) {
        const int place = step * STRETCH + part * NUM_OF_THREAD;
#pragma unroll
        for (int c = 0; c < INPUT_CHUNKS; c++) {
#if NORM
            s.scale[c] = load(norm_weight + place + c * 8);
#endif
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
                const int token = n * 8 + group;
                s.of[n][c] = Chunk{};
                if (token < num_tokens) s.of[n][c] = load(x + (long long)token * num_in + place + c * 8);
            }
        }
    };

    float squares[TOKEN_TILES] = {};
    // Operands for mma, scaled by the norm's weight; with FP8 in the order of `unpack`.
    auto prepare = [&](const Inputs& s, unsigned int (&pairs)[TOKEN_TILES][PAIRS]) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
#if FP8
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2) {
                const unsigned int first = s.of[n][i / 4].v[i % 4], second = s.of[n][i / 4].v[i % 4 + 1];
#if NORM
                const unsigned int scale0 = s.scale[i / 4].v[i % 4], scale1 = s.scale[i / 4].v[i % 4 + 1];
                const float a0 = low(first), a1 = high(first), a2 = low(second), a3 = high(second);
                squares[n] += a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3;
                pairs[n][i] = pack(a0 * low(scale0) * UP, a2 * low(scale1) * UP);
                pairs[n][i + 1] = pack(a1 * high(scale0) * UP, a3 * high(scale1) * UP);
#else
                pairs[n][i] = enlarge(__byte_perm(first, second, 0x5410));
                pairs[n][i + 1] = enlarge(__byte_perm(first, second, 0x7632));
#endif
            }
#else
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                pairs[n][i] = s.of[n][0].v[i];
#if NORM
                const float a = low(pairs[n][i]), b = high(pairs[n][i]);
                squares[n] += a * a + b * b;
                pairs[n][i] = pack(a * low(s.scale[0].v[i]), b * high(s.scale[0].v[i]));
#endif
            }
#endif
        }
    };

    float sums[ROW_TILES][TOKEN_TILES][4] = {};
    auto compute = [&](const Weights& w, const unsigned int (&pairs)[TOKEN_TILES][PAIRS]) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const Chunk &upper = w.rows[t][0], &lower = w.rows[t][1];
#if FP8 == 2
            float products[TOKEN_TILES][4] = {};
#else
            float(&products)[TOKEN_TILES][4] = sums[t];
#endif
#pragma unroll
            for (int i = 0; i < PAIRS / 2; i++) {
#if FP8
                unsigned int a[4];
                unpack(upper.v[i], a[0], a[2]);
                unpack(lower.v[i], a[1], a[3]);
#else
                const unsigned int a[4] = {upper.v[2 * i], lower.v[2 * i], upper.v[2 * i + 1], lower.v[2 * i + 1]};
#endif
#pragma unroll
                for (int n = 0; n < TOKEN_TILES; n++) multiply(products[n], a, pairs[n][2 * i], pairs[n][2 * i + 1]);
            }
#if FP8 == 2
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[t][n][i] += products[n][i] * w.block_scale[t][i / 2 * (BLOCK_SCALES - 1)];
#endif
        }
    };

    // (warp, tile, row, token), two buffers with HELD; and the tokens' sums of squares.
    constexpr int BUFFERS = HELD ? 2 : 1;
    __shared__ float parts[BUFFERS][WARPS][ROW_TILES][16][TOKENS];
    __shared__ float part_squares[WARPS][TOKENS];
    auto share_squares = [&] {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float s = squares[n];
            s += __shfl_xor_sync(0xffffffffu, s, 1);
            s += __shfl_xor_sync(0xffffffffu, s, 2);
            if (part == 0) part_squares[warp][n * 8 + group] = s;
        }
    };
    auto finish = [&](int buffer) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    parts[buffer][warp][t][group + i / 2 * 8][n * 8 + part * 2 + i % 2] = sums[t][n][i];
                    sums[t][n][i] = 0;
                }
        __syncthreads();
        // Alternate threads, so that none is always behind.
        const int thread = (threadIdx.x + buffer * WARPS * 16) % (WARPS * 32);
        for (int i = thread; i < ROW_TILES * OUTPUTS * TOKENS; i += WARPS * 32) {
            const int row = i % OUTPUTS, token = i / OUTPUTS % TOKENS, t = i / OUTPUTS / TOKENS;
            const int out = (first_tile + t) * OUTPUTS + row;
            if (token >= num_tokens || out >= num_out) continue;
            float sum = 0, gated = 0, scale = 1;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                sum += parts[buffer][w][t][row][token];
                if (GATED) gated += parts[buffer][w][t][(row + 8) % 16][token];
            }
#if NORM
            float square = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) square += part_squares[w][token];
            scale = rsqrtf(square / num_in + eps);
#endif
#if FP8
            scale *= DOWN;
#endif
            sum *= scale;
#if FP8 == 1
            sum *= weight_scale[out];
#endif
            if (bias) sum += number(bias[out]);
#if GATED
            gated *= scale;
#if FP8 == 1
            gated *= weight_scale[num_out + out];
#endif
            if (bias) gated += number(bias[num_out + out]);
            sum = sum / (1.0f + __expf(-sum)) * gated;
#endif
            unsigned short* target = y + (long long)token * num_out + out;
#if ADD
            sum += number(*target);
#endif
            *target = pack(sum, 0.0f) & 0xffffu;
        }
    };

    // Step i of this warp is in ahead[i % DEPTH], requested DEPTH steps before.
    Weights ahead[DEPTH];
    go_to(first_tile);
#if HELD
    const int all_tiles = (num_out + OUTPUTS - 1) / OUTPUTS, stride = gridDim.x * ROW_TILES;
#pragma unroll
    for (int h = 0; h < DEPTH; h++) ask_weights(ahead[h], warp + h * WARPS);
    unsigned int pairs[HELD][1][PAIRS];
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        Inputs inputs;
        ask_inputs(inputs, warp + h * WARPS);
        prepare(inputs, pairs[h]);
    }
    if (NORM) share_squares();
    for (int buffer = 0; first_tile < all_tiles; first_tile += stride, buffer ^= 1) {
        const bool has_next = first_tile + stride < all_tiles;
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            compute(ahead[h % DEPTH], pairs[h]);
            const int next = h + DEPTH;
            if (next == HELD) go_to(first_tile + stride);
            if (next < HELD || has_next) ask_weights(ahead[h % DEPTH], warp + next % HELD * WARPS);
        }
        finish(buffer);
    }
#else
    const int num_steps = num_in / STRETCH;
    Inputs inputs[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (warp + d * WARPS < num_steps) ask_weights(ahead[d], warp + d * WARPS);
#if PREFETCH
    // Prefetch the rest into the L2 cache.
    if (threadIdx.x < ROW_TILES * 16) {
        const int t = threadIdx.x / 16, r = threadIdx.x % 16;
#if GATED
        const int row = min((first_tile + t) * 8 + r % 8, num_out - 1) + (r < 8 ? 0 : num_out);
#else
        const int row = min((first_tile + t) * 16 + r, num_out - 1);
#endif
        const int skip = DEPTH * WARPS * STRETCH;
        const int size = min(num_in - skip, PREFETCH);
        if (size > 0)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(weight + (long long)row * num_in + skip),
                         "r"(size * (int)sizeof(Weight)));
    }
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (warp + d * WARPS < num_steps) ask_inputs(inputs[d], warp + d * WARPS);
    for (int first = warp; first < num_steps; first += DEPTH * WARPS) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int step = first + d * WARPS, next = step + DEPTH * WARPS;
            if (step < num_steps) {
                unsigned int pairs[TOKEN_TILES][PAIRS];
                prepare(inputs[d], pairs);
                compute(ahead[d], pairs);
            }
            if (next < num_steps) {
                ask_weights(ahead[d], next);
                ask_inputs(inputs[d], next);
            }
        }
    }
    if (NORM) share_squares();
    finish(0);
#endif
}
