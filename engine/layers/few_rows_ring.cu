// Matrix products of few tokens, y = x W^T, bound by the time to read W, which is copied to shared memory.
//
// A unit of work is 8 rows of W, for all tokens. A block takes every gridDim.x-th unit. One warp copies weights to a ring
// of stages in shared memory. Weights do not depend on earlier kernels, so it begins before they end (programmatic
// dependent launch). Few registers and bounded shared memory let blocks run beside those of earlier kernels. The other
// warps share each stage's inputs: a product is one mma.m16n8k16 of 8 tokens by 8 rows of W. Sums of the warps are added
// up behind every UNITS units. Inputs may map to mma indices in any order as long as both operands agree, so a thread reads
// 16 contiguous bytes of a row of W for two mma, or for four with FP8.
//
// FP8 weights (float8_e4m3fn) become bfloat16 in registers, as few_rows.cu says.
//
// Buffers of earlier kernels are not __restrict__: the compiler could read them too early.
//
// Macros for NVRTC:
//   TOKENS   at least the tokens: 1, 2, 4 or 8
//   IN_SIZE  inputs, a multiple of 64, or of 128 with FP8
//   SPLIT    stages of a unit, each of IN_SIZE / SPLIT inputs
//   STAGES   stages of the ring
//   UNITS    units whose sums are added up together
//   WARPS    warps that multiply
//   NORM     1: RMS-normalize x first
//   ADD      1: y += x W^T
//   PAIR     1: two matrices multiply the same tokens, without ADD, FP8 and biases
//   FP8      0: W is bfloat16; 1: FP8 with a scale per row; 2: FP8 with a scale per 128 x 128

#include "bfloat16.cuh"
#include "copies.cuh"

#if FP8
typedef unsigned char Weight;
#else
typedef unsigned short Weight;
#endif
constexpr int NUM_OF_THREAD = 16 / sizeof(Weight);
constexpr int INPUT_CHUNKS = NUM_OF_THREAD / 8;
// Pairs of inputs in 16 bytes of W.
constexpr int PAIRS = NUM_OF_THREAD / 2;
// A stretch is 128 bytes of a row: two chunks of a thread.
constexpr int STRETCH = 8 * NUM_OF_THREAD, STRETCHES = IN_SIZE / STRETCH / SPLIT;
constexpr int OF_WARP = (STRETCHES + WARPS - 1) / WARPS;
constexpr int ROWS = 8, ROW_BYTES = STRETCHES * 128;
constexpr int SCALE_BYTES = FP8 ? 256 : 0;
static_assert(STRETCHES * 4 <= 256, "a stage has room for the scales of 64 blocks");
constexpr int STAGE_BYTES = ROWS * ROW_BYTES + SCALE_BYTES;
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

// Not moved behind the wait.
__device__ __forceinline__ float load_number(const float* p) {
    float x;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
    return x;
}

constexpr float DOWN = 1152921504606846976.0f;  // 2^(120 - 60)
#if FP8
constexpr float UP = DOWN;  // 2^60

// Unpacks four FP8 numbers as bfloat16, 2^-120 times as large: numbers 0 and 2, and numbers 1 and 3.
__device__ __forceinline__ void unpack(unsigned int four, unsigned int& even, unsigned int& odd) {
    even = (four << 8 & 0x80008000u) | (four << 4 & 0x07f007f0u);
    odd = (four & 0x80008000u) | (four >> 4 & 0x07f007f0u);
}

__device__ __forceinline__ unsigned int up(unsigned int pair) {
    unsigned int larger;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(larger) : "r"(pair), "r"(0x5d805d80u), "r"(0x80008000u));
    return larger;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32) few_rows_ring(
    const Weight* __restrict__ weight,               // (num_out, IN_SIZE), num_out a multiple of 8
    const float* __restrict__ weight_scale,          // null, (num_out,), or (num_out / 128, IN_SIZE / 128)
    const unsigned short* x,                         // (num_tokens, IN_SIZE)
    const unsigned short* __restrict__ norm_weight,  // (IN_SIZE,) if NORM
    const unsigned short* __restrict__ bias,         // (num_out,) or null
    unsigned short* y,                               // (num_tokens, num_out)
    const Weight* __restrict__ second_weight,        // (second_out, IN_SIZE) if PAIR
    unsigned short* second_y,                        // (num_tokens, second_out) if PAIR
    int num_tokens, int num_out, int second_out, float eps) {
    asm volatile("griddepcontrol.launch_dependents;");
    // The stages, then the tokens as operands.
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    // Two buffers: one is added up while the other is filled.
    __shared__ float parts[2][WARPS][UNITS][TOKENS][ROWS];
    __shared__ float part_squares[WARPS][TOKENS];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    const int first_units = num_out / ROWS, all_units = first_units + (PAIR ? second_out / ROWS : 0);
    const int num_units = (all_units - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    auto unit_at = [&](int i) { return (int)blockIdx.x + i * (int)gridDim.x; };
    if (threadIdx.x < STAGES) {
        // With block scales each lane of the copying warp arrives after its scales.
        init(full + threadIdx.x, FP8 == 2 ? 33 : 1);
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
            const Weight* rows = PAIR && unit >= first_units
                                     ? second_weight + (long long)(unit - first_units) * ROWS * IN_SIZE
                                     : weight + (long long)unit * ROWS * IN_SIZE;
            return rows + (long long)(lane * IN_SIZE) + step % SPLIT * (IN_SIZE / SPLIT);
        };
        auto ask = [&](int step) {
            const int stage = step % STAGES;
            unsigned char* to = ring + stage * STAGE_BYTES;
            if (lane == 0) expect(full + stage, ROWS * ROW_BYTES);
            __syncwarp();
            if (lane < ROWS && lane % TOGETHER == 0)
                copy(to + lane * ROW_BYTES, weights_at(step), TOGETHER * ROW_BYTES, full + stage);
#if FP8 == 2
            const float* scales =
                weight_scale + unit_at(step / SPLIT) * ROWS / 128 * (IN_SIZE / 128) + step % SPLIT * STRETCHES;
            for (int column = lane; column < STRETCHES; column += 32)
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                                 shared_address(to + ROWS * ROW_BYTES + column * 4)),
                             "l"(scales + column)
                             : "memory");
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full + stage))
                         : "memory");
#endif
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
    // Scales and biases of the outputs that this thread adds up.
    float row_scales[OF_THREAD], row_biases[OF_THREAD];
    auto ask_rows = [&](int first) {
#pragma unroll
        for (int n = 0; n < OF_THREAD; n++) {
            int out;
            bool exists;
            target_of(first, threadIdx.x + n * THREADS, out, exists);
            row_scales[n] = FP8 ? DOWN : 1.0f;
            if (FP8 == 1 && exists) row_scales[n] *= load_number(weight_scale + out);
            row_biases[n] = bias && exists ? number(bias[out]) : 0.0f;
        }
    };
    ask_rows(0);
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
        float square = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int chunk = threadIdx.x + i * THREADS;
            Chunk operand;
#pragma unroll
            for (int v = 0; v < 4; v += 2) {
                const unsigned int first = own[t][i].v[v], second = own[t][i].v[v + 1];
#if NORM
                const unsigned int scale0 = scales[i].v[v], scale1 = scales[i].v[v + 1];
                const float a0 = low(first), a1 = high(first), a2 = low(second), a3 = high(second);
                square += a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3;
#if FP8
                operand.v[v] = pack(a0 * low(scale0) * UP, a2 * low(scale1) * UP);
                operand.v[v + 1] = pack(a1 * high(scale0) * UP, a3 * high(scale1) * UP);
#else
                operand.v[v] = pack(a0 * low(scale0), a1 * high(scale0));
                operand.v[v + 1] = pack(a2 * low(scale1), a3 * high(scale1));
#endif
#elif FP8
                operand.v[v] = up(__byte_perm(first, second, 0x5410));
                operand.v[v + 1] = up(__byte_perm(first, second, 0x7632));
#else
                operand.v[v] = first;
                operand.v[v + 1] = second;
#endif
            }
            if (chunk < IN_SIZE / 8) *reinterpret_cast<Chunk*>(tokens + t * TOKEN_BYTES + chunk * 16) = operand;
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
                            const int place = (s * STRETCHES + stretch) * STRETCH + half * (STRETCH / 2) + part * NUM_OF_THREAD;
                            inputs[half][c] = Chunk{};
                            if (group < num_tokens)
                                inputs[half][c] =
                                    *reinterpret_cast<const Chunk*>(tokens + group * TOKEN_BYTES + (place + c * 8) * 2);
                        }
#if FP8 == 2
                    const float scale = reinterpret_cast<const float*>(from + ROWS * ROW_BYTES)[stretch];
                    float products[2][2] = {};
#else
                    float(&products)[2][2] = sums;
#endif
#pragma unroll
                    for (int p = 0; p < PAIRS / 2; p++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            unsigned int b0, b1;
                            const unsigned int a0 = inputs[half][p / 2].v[p % 2 * 2], a2 = inputs[half][p / 2].v[p % 2 * 2 + 1];
                            const bool is_one = half == group % 2;
#if FP8
                            unpack(is_one ? one.v[p] : other.v[p], b0, b1);
#else
                            b0 = is_one ? one.v[2 * p] : other.v[2 * p];
                            b1 = is_one ? one.v[2 * p + 1] : other.v[2 * p + 1];
#endif
                            multiply(products[half], a0, a2, b0, b1);
                        }
#if FP8 == 2
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int k = 0; k < 2; k++) sums[half][k] += products[half][k] * scale;
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
            sum = sum * row_scales[n] + row_biases[n];
#if ADD
            sum += number(residual[n]);
#endif
            *target = pack(sum, 0.0f) & 0xffffu;
        }
        ask_rows(first + UNITS);
    }
}
