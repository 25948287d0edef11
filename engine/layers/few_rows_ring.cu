// Matrix products of few tokens, y = x W^T, bound by the time to read W, which is copied to shared memory.
//
// A unit of work is 8 rows of W, for all tokens. A block takes every gridDim.x-th unit. One warp copies weights to a ring
// of stages in shared memory. Weights do not depend on earlier kernels, so it begins before they end (programmatic
// dependent launch). Few registers let blocks run beside those of earlier kernels. The other warps share each stage's
// inputs: a product is one mma.m16n8k16 of 8 tokens by 8 rows of W. Sums of the warps are added up behind every UNITS
// units. Inputs may map to mma indices in any order as long as both operands agree, so a thread reads 16 contiguous bytes
// of a row of W for two mma, or for four with FP8.
//
// FP8 weights (float8_e4m3fn) become bfloat16 in registers, exactly, as in few_rows.cu: 2^-120 times as large. Tokens are
// held 2^60 times as large and in the order of `unpack`, and sums are corrected at the end.
//
// Buffers of earlier kernels are not __restrict__: the compiler could read them too early.
//
// Macros for NVRTC:
//   TOKENS   at least the tokens: 1, 2, 4 or 8
//   IN_SIZE  inputs, a multiple of 64
//   SPLIT    stages of a unit, each of IN_SIZE / SPLIT inputs
//   STAGES   stages of the ring
//   UNITS    units whose sums are added up together
//   WARPS    warps that multiply
//   NORM     1: RMS-normalize x first
//   ADD      1: y += x W^T
//   PAIR     1: two matrices multiply the same tokens, without ADD and biases
//   FP8      0: W is bfloat16; without PAIR 1: FP8 with a scale per row; 2: FP8 with a scale per 128 x 128

#include "bfloat16.cuh"
#include "copies.cuh"

#if FP8
typedef unsigned char Weight;
#else
typedef unsigned short Weight;
#endif
// A stretch is 128 bytes of a row: two chunks of a thread.
constexpr int STRETCH = 128 / sizeof(Weight), STRETCHES = IN_SIZE / STRETCH / SPLIT;
constexpr int INPUT_CHUNKS = 2 / sizeof(Weight);
constexpr int OF_WARP = (STRETCHES + WARPS - 1) / WARPS;
constexpr int ROWS = 8, ROW_BYTES = STRETCHES * 128, STAGE_BYTES = ROWS * ROW_BYTES;
constexpr int THREADS = WARPS * 32;
// Chunks of a token per thread. Tokens are padded so that eight threads read different banks.
constexpr int OWN = (IN_SIZE / 8 + THREADS - 1) / THREADS, TOKEN_BYTES = IN_SIZE * 2 + (FP8 ? 16 : 64);
constexpr int OUTPUTS = UNITS * ROWS * TOKENS, OF_THREAD = (OUTPUTS + THREADS - 1) / THREADS;

__device__ __forceinline__ float low(unsigned int pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned int pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rows 8 to 15 of the first operand are zero.
__device__ __forceinline__ void multiply(float* sum, unsigned int a0, unsigned int a2, unsigned int b0, unsigned int b1) {
    float unused0 = 0, unused1 = 0;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(unused0), "+f"(unused1)
                 : "r"(a0), "r"(0u), "r"(a2), "r"(0u), "r"(b0), "r"(b1));
}

#if FP8
#include "fp8_pairs.cuh"

constexpr float DOWN = 1152921504606846976.0f;  // 2^(120 - 60)
#endif

// Eight inputs as operands.
__device__ __forceinline__ Chunk operands(const Chunk& c) {
#if FP8
    return Chunk{enlarge(__byte_perm(c.v[0], c.v[1], 0x5410)), enlarge(__byte_perm(c.v[0], c.v[1], 0x7632)),
                 enlarge(__byte_perm(c.v[2], c.v[3], 0x5410)), enlarge(__byte_perm(c.v[2], c.v[3], 0x7632))};
#else
    return c;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS + 32) few_rows_ring(
    const Weight* __restrict__ weight,                 // (num_out, IN_SIZE), num_out a multiple of 8
    const float* __restrict__ weight_scale,            // null, (num_out,), or (num_out / 128, IN_SIZE / 128)
    const unsigned short* x,                           // (num_tokens, IN_SIZE)
    const unsigned short* __restrict__ norm_weight,    // (IN_SIZE,) if NORM
    const unsigned short* __restrict__ bias,           // (num_out,) or null
    unsigned short* y,                                 // (num_tokens, num_out)
    const Weight* __restrict__ second_weight,          // (second_out, IN_SIZE) if PAIR
    unsigned short* second_y,                          // (num_tokens, second_out) if PAIR
    int num_tokens, int num_out, int second_out, float eps) {
    asm volatile("griddepcontrol.launch_dependents;");
    // The stages, then the tokens as operands.
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    // Two buffers: one is added up while the other is filled.
    __shared__ __align__(16) float parts[2][WARPS][UNITS][TOKENS][ROWS];
    __shared__ float part_squares[WARPS][TOKENS];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    const int first_units = num_out / ROWS, all_units = first_units + (PAIR ? second_out / ROWS : 0);
    const int num_units = (all_units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    auto unit_at = [&](int i) { return (int)blockIdx.x + i * (int)gridDim.x; };
    if (threadIdx.x < STAGES) {
        init(full + threadIdx.x, 1);
        init(empty + threadIdx.x, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp == WARPS) {
        const int num_steps = num_units * SPLIT;
        // A unit's rows are one stretch of memory, unless they are cut.
        constexpr int TOGETHER = SPLIT == 1 ? ROWS : 1;
        auto weights_at = [&](int step) {
            const int unit = unit_at(step / SPLIT);
            const bool is_second = PAIR && unit >= first_units;
            const long long row = (long long)(is_second ? unit - first_units : unit) * ROWS + lane;
            return (is_second ? second_weight : weight) + row * IN_SIZE + step % SPLIT * (IN_SIZE / SPLIT);
        };
        auto ask = [&](int step) {
            const int stage = step % STAGES;
            unsigned char* to = ring + stage * STAGE_BYTES;
            if (lane == 0) expect(full + stage, ROWS * ROW_BYTES);
            __syncwarp();
            if (lane < ROWS && lane % TOGETHER == 0)
                copy_weights<FP8 != 0>(to + lane * ROW_BYTES, weights_at(step), TOGETHER * ROW_BYTES, full + stage);
        };
        const int num_first = min(STAGES, num_steps);
        for (int step = 0; step < num_first; step++) ask(step);
        for (int step = num_first; step < num_steps; step++) {
            wait(empty + step % STAGES, (step / STAGES - 1) & 1);
            ask(step);
        }
        return;
    }

    // A thread has every THREADS-th chunk of 8 inputs, of all tokens.
    unsigned char* const tokens = ring + STAGES * STAGE_BYTES;
#if NORM
    Chunk scales[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int chunk = threadIdx.x + i * THREADS;
        scales[i] = Chunk{};
        if (chunk < IN_SIZE / 8)
            asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(scales[i].v[0]), "=r"(scales[i].v[1]), "=r"(scales[i].v[2]), "=r"(scales[i].v[3])
                         : "l"(norm_weight + chunk * 8));
    }
#endif
    auto target_of = [&](int first, int i, int& out, bool& exists) {
        const int row = i % ROWS, token = i / ROWS % TOKENS, u = i / ROWS / TOKENS, unit = unit_at(first + u);
        exists = u < min(UNITS, num_units - first) && token < num_tokens;
        const bool is_second = PAIR && unit >= first_units;
        out = (is_second ? unit - first_units : unit) * ROWS + row;
        return is_second ? second_y + (long long)token * second_out + out : y + (long long)token * num_out + out;
    };
#if FP8 == 1
    float row_scales[OF_THREAD];
#elif FP8 == 2
    float block_scales[UNITS][SPLIT][OF_WARP];
#endif
    // Early, because they come from memory.
    auto ask_scales = [&](int first) {
#if FP8 == 1
#pragma unroll
        for (int n = 0; n < OF_THREAD; n++) {
            int out;
            bool exists;
            target_of(first, threadIdx.x + n * THREADS, out, exists);
            row_scales[n] = exists ? weight_scale[out] : 0;
        }
#elif FP8 == 2
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int s = 0; s < SPLIT; s++)
#pragma unroll
                for (int j = 0; j < OF_WARP; j++) {
                    const int stretch = warp + j * WARPS, row = unit_at(first + u) * ROWS;
                    const bool exists = first + u < num_units && stretch < STRETCHES;
                    const float* scale = weight_scale + row / 128 * (IN_SIZE / 128) + s * STRETCHES + stretch;
                    block_scales[u][s][j] = exists ? *scale : 0;
                }
#endif
    };
    ask_scales(0);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Chunk own[TOKENS][OWN];
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int chunk = threadIdx.x + i * THREADS;
            own[t][i] = Chunk{};
            if (t < num_tokens && chunk < IN_SIZE / 8)
                own[t][i] = *reinterpret_cast<const Chunk*>(x + (long long)t * IN_SIZE + chunk * 8);
        }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
#if NORM
        float square = 0;
#endif
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int chunk = threadIdx.x + i * THREADS;
#if NORM
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const float a = low(own[t][i].v[v]), b = high(own[t][i].v[v]);
                square += a * a + b * b;
                own[t][i].v[v] = pack(a * low(scales[i].v[v]), b * high(scales[i].v[v]));
            }
#endif
            if (chunk < IN_SIZE / 8)
                *reinterpret_cast<Chunk*>(tokens + t * TOKEN_BYTES + chunk * 16) = operands(own[t][i]);
        }
#if NORM
#pragma unroll
        for (int mask = 16; mask; mask /= 2) square += __shfl_xor_sync(0xffffffffu, square, mask);
        if (lane == 0) part_squares[warp][t] = square;
#endif
    }
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");

    int stage = 0, phase = 0, buffer = 0;
    for (int first = 0; first < num_units; first += UNITS, buffer ^= 1) {
        if (first) ask_scales(first);
#if ADD
        unsigned short residual[OF_THREAD];
#pragma unroll
        for (int n = 0; n < OF_THREAD; n++) {
            int out;
            bool exists;
            const unsigned short* target = target_of(first, threadIdx.x + n * THREADS, out, exists);
            residual[n] = exists ? *target : 0;
        }
#endif
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            if (first + u >= num_units) break;
            // Chains of the two halves, because a product waits for the one before it.
            float sums[2][2] = {};
#pragma unroll
            for (int s = 0; s < SPLIT; s++) {
                wait(full + stage, phase);
                const unsigned char* from = ring + stage * STAGE_BYTES;
#pragma unroll
                for (int j = 0; j < OF_WARP; j++) {
                    const int stretch = warp + j * WARPS;
                    if (OF_WARP * WARPS > STRETCHES && stretch >= STRETCHES) continue;
                    // Odd rows read their halves in the other order, so that eight threads read different banks.
                    const unsigned char* row = from + group * ROW_BYTES + stretch * 128 + part * 16;
                    const Chunk one = *reinterpret_cast<const Chunk*>(row + group % 2 * 64);
                    const Chunk other = *reinterpret_cast<const Chunk*>(row + (1 - group % 2) * 64);
                    Chunk inputs[2][INPUT_CHUNKS];
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int c = 0; c < INPUT_CHUNKS; c++) {
                            const int place = ((s * STRETCHES + stretch) * 128 + half * 64 + part * 16) * INPUT_CHUNKS;
                            inputs[half][c] = Chunk{};
                            if (group < num_tokens)
                                inputs[half][c] = *reinterpret_cast<const Chunk*>(tokens + group * TOKEN_BYTES + place + c * 16);
                        }
#if FP8 == 2
                    float products[2][2] = {};
#else
                    float(&products)[2][2] = sums;
#endif
#pragma unroll
                    for (int v = 0; v < 4; v += 2 / INPUT_CHUNKS)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            const bool is_one = half == group % 2;
#if FP8
                            const Chunk& x = inputs[half][v / 2];
                            unsigned int even, odd;
                            unpack(is_one ? one.v[v] : other.v[v], even, odd);
                            multiply(products[half], x.v[v % 2 * 2], x.v[v % 2 * 2 + 1], even, odd);
#else
                            const Chunk& x = inputs[half][0];
                            multiply(products[half], x.v[v], x.v[v + 1], is_one ? one.v[v] : other.v[v],
                                     is_one ? one.v[v + 1] : other.v[v + 1]);
#endif
                        }
#if FP8 == 2
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int i = 0; i < 2; i++) sums[half][i] += products[half][i] * block_scales[u][s][j];
#endif
                }
                __syncwarp();
                if (lane == 0) arrive(empty + stage);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            if (group < TOKENS)
                *reinterpret_cast<float2*>(&parts[buffer][warp][u][group][part * 2]) =
                    make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
        }
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#pragma unroll
        for (int n = 0; n < OF_THREAD; n++) {
            const int i = threadIdx.x + n * THREADS;
            int out;
            bool exists;
            unsigned short* target = target_of(first, i, out, exists);
            if (!exists) continue;
            const int row = i % ROWS, token = i / ROWS % TOKENS, u = i / ROWS / TOKENS;
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += parts[buffer][w][u][token][row];
#if NORM
            float all_squares = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) all_squares += part_squares[w][token];
            sum *= rsqrtf(all_squares / IN_SIZE + eps);
#endif
#if FP8
            sum *= DOWN;
#endif
#if FP8 == 1
            sum *= row_scales[n];
#endif
            if (bias) sum += number(bias[out]);
#if ADD
            sum += number(residual[n]);
#endif
            *target = pack(sum, 0.0f) & 0xffffu;
        }
    }
}
