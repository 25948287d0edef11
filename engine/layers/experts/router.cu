// Routing of rows to experts: the rows' norm, the router's logits and each row's best experts.
//
// A cluster of blocks computes the logits of ROWS rows, y = rms_norm(x) W^T. Each block takes a part of the experts, and
// its warps share the inputs. A product is one mma.m16n8k16 of 16 experts by 8 rows. The blocks of a cluster write a
// row's logits to the shared memory of one of them, where a warp chooses the row's experts. Without FUSED the logits
// are given, and every warp chooses for a row.
//
// With INPUTS the normalized rows leave as FP8 numbers with scales, rounded to bfloat16 first as the logits' inputs are.
//
// Weights do not depend on earlier kernels and are requested before the kernel waits for its inputs (programmatic
// dependent launch).
//
// Macros for NVRTC:
//   FUSED        1: normalize and compute logits too
//   ROWS         rows of a cluster if FUSED: 8 or 16
//   INPUTS       if FUSED, normalized rows are 0: bfloat16; FP8 with 1: a given scale, 2: a scale per row, 3: a scale
//                per 128 numbers
//   IN_SIZE      inputs of a row, a multiple of 32
//   NUM_EXPERTS  at most 512
//   NUM_CHOSEN   experts of a row, at most 32
//   SIGMOID      0: scores are the softmax of all logits; 1: each logit's sigmoid, and a bias added for the choice
//   NORMALIZE    1: divide a row's scores by their sum
//   GROUPS       groups of consecutive experts, at most 32, each of at least 2 experts
//   GROUPS_USED  groups that a row chooses from: those whose two best scores have the greatest sums
//   WARPS        warps per block
//   CLUSTER      blocks of a cluster if FUSED: a power of two, at most 8

#include "bfloat16.cuh"

constexpr unsigned int ALL = 0xffffffffu;
constexpr float FP8_MAX = 448.0f, SMALLEST_AMAX = 1e-10f;
constexpr int OF_LANE = (NUM_EXPERTS + 31) / 32;
#if FUSED
constexpr int ROW_TILES = ROWS / 8;
constexpr int TILES = (NUM_EXPERTS + 16 * CLUSTER - 1) / (16 * CLUSTER);
constexpr int OF_WARP = (IN_SIZE / 32 + WARPS - 1) / WARPS;
// Whether registers hold weights and the norm.
constexpr bool HELD = OF_WARP * (2 * TILES + 1) <= 12;
constexpr int CHOOSING_WARPS = ROWS / CLUSTER;
// Whether a block has one row and all its threads choose.
#define BLOCK_CHOOSES (ROWS == CLUSTER && GROUPS_USED == GROUPS && NUM_EXPERTS <= WARPS * 32)
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
constexpr int CHOOSING_WARPS = WARPS;
#define BLOCK_CHOOSES 0
#define CLUSTER_DIMS
#endif

// Maps a number to an integer of the same order; none to 0, which is left for experts that cannot be chosen.
__device__ __forceinline__ unsigned int ordered(float x) {
    // Adding makes both zeros equal.
    const unsigned int bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(ALL, x, mask);
    return x;
}

__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float score_of(float logit) { return SIGMOID ? 1.0f / (1.0f + expf(-logit)) : logit; }

// The first lanes of a warp weigh a row's chosen experts, one each, the best first.
__device__ __forceinline__ void weigh(const float* logits, int expert, float scaling, float* shares, int* experts,
                                      unsigned long long* counts) {
    const int lane = threadIdx.x % 32;
    float score = lane < NUM_CHOSEN ? score_of(logits[expert]) : 0.0f, total = 0;
#if !SIGMOID
    // Softmax.
    const float largest = __shfl_sync(ALL, score, 0);
    score = lane < NUM_CHOSEN ? expf(score - largest) : 0.0f;
#if !NORMALIZE
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
        if (lane + i * 32 < NUM_EXPERTS) total += expf(logits[lane + i * 32] - largest);
    score /= sum_of_warp(total);
#endif
#endif
#if NORMALIZE
    total = sum_of_warp(score);
    score /= SIGMOID ? total + 1e-20f : total;
#endif
    if (lane >= NUM_CHOSEN) return;
    shares[lane] = score * scaling;
    experts[lane] = expert;
    if (counts) atomicAdd(counts + expert, 1ull);
}

#if BLOCK_CHOOSES
// The rank of each expert, by all threads of a block. Writes the best to `chosen`.
__device__ __forceinline__ void rank(const float* logits, const float* bias, unsigned int* keys, int* chosen) {
    // Threads of an expert compare it with a share of the others, four at a time. Those beyond the last expert have no key.
    constexpr int QUADS = (NUM_EXPERTS + 3) / 4, THREADS = WARPS * 32 / NUM_EXPERTS;
    constexpr int SHARES = THREADS >= 4 ? 4 : THREADS >= 2 ? 2 : 1;
    for (int i = threadIdx.x; i < QUADS * 4; i += WARPS * 32)
        keys[i] = i < NUM_EXPERTS ? ordered(score_of(logits[i]) + (SIGMOID && bias ? bias[i] : 0.0f)) : 0;
    __syncthreads();
    const int expert = threadIdx.x / SHARES, share = threadIdx.x % SHARES;
    const unsigned int own = keys[min(expert, NUM_EXPERTS - 1)];
    int num_better = 0;
#pragma unroll
    for (int i = 0; i < (QUADS + SHARES - 1) / SHARES; i++) {
        const int quad = i * SHARES + share;
        if (QUADS % SHARES && quad >= QUADS) continue;
        const uint4 other = reinterpret_cast<const uint4*>(keys)[quad];
        const int first = quad * 4;
        num_better += other.x > own || (other.x == own && first < expert);
        num_better += other.y > own || (other.y == own && first + 1 < expert);
        num_better += other.z > own || (other.z == own && first + 2 < expert);
        num_better += other.w > own || (other.w == own && first + 3 < expert);
    }
#pragma unroll
    for (int mask = 1; mask < SHARES; mask *= 2) num_better += __shfl_xor_sync(ALL, num_better, mask);
    if (expert < NUM_EXPERTS && share == 0 && num_better < NUM_CHOSEN) chosen[num_better] = expert;
    __syncthreads();
}
#endif

// One warp chooses a row's experts. Lane l has experts l, l + 32, and so on.
__device__ __forceinline__ void choose(const float* logits, const float* bias, float scaling, float* shares,
                                       int* experts, unsigned long long* counts, float* scratch) {
    const int lane = threadIdx.x % 32;
    unsigned int keys[OF_LANE];
    int own[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        own[i] = lane + i * 32;
        keys[i] = 0;
        if (own[i] < NUM_EXPERTS) {
            const float score = score_of(logits[own[i]]) + (SIGMOID && bias ? bias[own[i]] : 0.0f);
            keys[i] = ordered(score);
            if (GROUPS_USED < GROUPS) scratch[own[i]] = score;
        }
    }
#if GROUPS_USED < GROUPS
    constexpr int SIZE = NUM_EXPERTS / GROUPS;
    __syncwarp();
    float best = __uint_as_float(0xff800000u), second = best;  // negative infinity
    if (lane < GROUPS) {
        for (int i = 0; i < SIZE; i++) {
            const float score = scratch[lane * SIZE + i];
            second = fmaxf(second, fminf(best, score));
            best = fmaxf(best, score);
        }
    }
    const unsigned int of_group = ordered(best + second);
    int num_better = 0;
    for (int other = 0; other < GROUPS; other++) {
        const unsigned int key = __shfl_sync(ALL, of_group, other);
        num_better += key > of_group || (key == of_group && other < lane);
    }
    const unsigned int is_used = __ballot_sync(ALL, lane < GROUPS && num_better < GROUPS_USED);
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
        if (!(is_used >> min(own[i] / SIZE, 31) & 1)) keys[i] = 0;
#endif
    // Sort the lane's experts, the best first.
#pragma unroll
    for (int round = 0; round < OF_LANE; round++)
#pragma unroll
        for (int i = round % 2; i + 1 < OF_LANE; i += 2) {
            const bool swaps = keys[i] < keys[i + 1];
            const unsigned int key = keys[i];
            const int expert = own[i];
            keys[i] = swaps ? keys[i + 1] : key;
            own[i] = swaps ? own[i + 1] : expert;
            keys[i + 1] = swaps ? key : keys[i + 1];
            own[i + 1] = swaps ? expert : own[i + 1];
        }
    int expert = 0;
#pragma unroll
    for (int j = 0; j < NUM_CHOSEN; j++) {
        const unsigned int key = __reduce_max_sync(ALL, keys[0]);
        unsigned int winners = __ballot_sync(ALL, keys[0] == key);
        if (winners & (winners - 1)) {
            const int lowest = __reduce_min_sync(ALL, keys[0] == key ? own[0] : 1 << 30);
            winners = __ballot_sync(ALL, keys[0] == key && own[0] == lowest);
        }
        const int winner = __ffs(winners) - 1;
        const int chosen = __shfl_sync(ALL, own[0], winner);
        if (lane == j) expert = chosen;
        if (lane == winner) {
#pragma unroll
            for (int i = 0; i + 1 < OF_LANE; i++) keys[i] = keys[i + 1], own[i] = own[i + 1];
            keys[OF_LANE - 1] = 0;
        }
    }
    // Only fewer candidates than chosen experts, which are not numbers, could leave an expert out of range.
    expert = min(expert, NUM_EXPERTS - 1);
    weigh(logits, expert, scaling, shares, experts, counts);
}

__device__ __forceinline__ void multiply(float* sum, const Chunk& upper, const Chunk& lower, int v, unsigned int b0,
                                         unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(upper.v[v]), "r"(lower.v[v]), "r"(upper.v[v + 1]), "r"(lower.v[v + 1]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float low(unsigned int pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned int pair) { return __uint_as_float(pair & 0xffff0000u); }

// As Triton divides.
__device__ __forceinline__ float divide(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

__device__ __forceinline__ unsigned int pack_fp8(float first, float second) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(WARPS * 32) router(
    const unsigned short* x,                         // (num_rows, IN_SIZE) if FUSED
    const unsigned short* __restrict__ norm_weight,  // (IN_SIZE,) if FUSED
    const unsigned short* __restrict__ weight,       // (NUM_EXPERTS, IN_SIZE) if FUSED
    const float* __restrict__ bias,                  // (NUM_EXPERTS,) or null
    unsigned short* normed,                          // (num_rows, IN_SIZE) if FUSED; unless INPUTS
    uint2* numbers,                                  // (num_rows, IN_SIZE) FP8 if INPUTS
    float* scales,                                   // (num_rows,) if INPUTS; 3: (IN_SIZE / 128, scales_stride)
    const float* __restrict__ given_scale,           // (1,) if INPUTS is 1
    const float* given_logits,                       // (num_rows, NUM_EXPERTS) unless FUSED
    float* shares,                                   // (num_rows, NUM_CHOSEN)
    int* experts,                                    // (num_rows, NUM_CHOSEN)
    unsigned long long* counts,                      // (NUM_EXPERTS,) or null
    const int* real_rows,                            // (3,) or null: rows [0, first) and [second, third) are real
    int num_rows, int scales_stride, float eps, float scaling) {
#if BLOCK_CHOOSES
    __shared__ __align__(16) unsigned int keys[(NUM_EXPERTS + 3) / 4 * 4];
    __shared__ int chosen[NUM_CHOSEN];
#else
    __shared__ float scratch[CHOOSING_WARPS][GROUPS_USED < GROUPS ? NUM_EXPERTS : 1];
#endif
    const int warp = threadIdx.x / 32;
    // Read early, because it takes as long as the choice.
    bool is_real = true;
    auto ask_real = [&](int row) {
        if (!real_rows) return;
        const int first = real_rows[0], second = real_rows[1], third = real_rows[2];
        is_real = row < first || (row >= second && row < third);
    };
    auto choose_for = [&](int row, const float* logits) {
        float* row_shares = shares + (long long)row * NUM_CHOSEN;
        int* row_experts = experts + (long long)row * NUM_CHOSEN;
        if (is_real) {
#if BLOCK_CHOOSES
            weigh(logits, chosen[threadIdx.x % 32 % NUM_CHOSEN], scaling, row_shares, row_experts, counts);
#else
            choose(logits, bias, scaling, row_shares, row_experts, counts, scratch[warp]);
#endif
        } else if (threadIdx.x % 32 < NUM_CHOSEN) {
            row_shares[threadIdx.x % 32] = 0;
            row_experts[threadIdx.x % 32] = NUM_EXPERTS;
        }
    };
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
#if !FUSED
    wait_for_earlier();
    const int row = blockIdx.x * WARPS + warp;
    ask_real(row);
    if (row < num_rows) choose_for(row, given_logits + (long long)row * NUM_EXPERTS);
#else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
    const int lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    auto row_of = [&](int n) { return (int)blockIdx.y * ROWS + n * 8 + group; };
    auto place_of = [&](int i) { return (warp + i * WARPS) * 32 + part * 8; };
    auto load = [&](const unsigned short* from, int i) {
        return place_of(i) < IN_SIZE ? *reinterpret_cast<const Chunk*>(from + place_of(i)) : Chunk{};
    };
    const int first_expert = blockIdx.x * TILES * 16;
    auto ask = [&](Chunk (&weights)[TILES][2], int i) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int expert = min(first_expert + t * 16 + half * 8 + group, NUM_EXPERTS - 1);
                weights[t][half] = load(weight + (long long)expert * IN_SIZE, i);
            }
    };
    Chunk weights[HELD ? OF_WARP : 1][TILES][2], norms[HELD ? OF_WARP : 1], rows[OF_WARP][ROW_TILES];
    if (HELD) {
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            ask(weights[i], i);
            norms[i] = load(norm_weight, i);
        }
    } else if (threadIdx.x < TILES * 16 && first_expert + threadIdx.x < NUM_EXPERTS) {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                         weight + (long long)(first_expert + threadIdx.x) * IN_SIZE),
                     "r"(IN_SIZE * 2));
    }
    wait_for_earlier();
#pragma unroll
    for (int i = 0; i < OF_WARP; i++)
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
            rows[i][n] = row_of(n) < num_rows ? load(x + (long long)row_of(n) * IN_SIZE, i) : Chunk{};
    const int own_row = blockIdx.y * ROWS + warp * CLUSTER + blockIdx.x;
    ask_real(own_row);
    __shared__ float squares[ROWS][WARPS];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        float square = 0;
#pragma unroll
        for (int i = 0; i < OF_WARP; i++)
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const float a = low(rows[i][n].v[v]), b = high(rows[i][n].v[v]);
                square += a * a + b * b;
            }
        square += __shfl_xor_sync(ALL, square, 1);
        square += __shfl_xor_sync(ALL, square, 2);
        if (part == 0) squares[n * 8 + group][warp] = square;
    }
    __syncthreads();
    float scale[ROW_TILES];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        float square = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) square += squares[n * 8 + group][w];
        scale[n] = rsqrtf(square / IN_SIZE + eps);
    }

#if INPUTS >= 2
    // Largest numbers of a row's stretches of 32; 2: of those of a warp.
    constexpr int PEAKS = INPUTS == 3 ? OF_WARP * WARPS : WARPS;
    __shared__ float peaks[ROWS][PEAKS];
    float peak[ROW_TILES] = {};
#endif
    float sums[TILES][ROW_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        const int held = HELD ? i : 0;
        if (!HELD) {
            ask(weights[0], i);
            norms[0] = load(norm_weight, i);
        }
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
            Chunk& own = rows[i][n];
#pragma unroll
            for (int v = 0; v < 4; v++)
                own.v[v] = pack(low(own.v[v]) * scale[n] * low(norms[held].v[v]),
                                high(own.v[v]) * scale[n] * high(norms[held].v[v]));
#if INPUTS >= 2
#pragma unroll
            for (int v = 0; v < 4; v++) peak[n] = fmaxf(peak[n], fmaxf(fabsf(low(own.v[v])), fabsf(high(own.v[v]))));
#endif
#if INPUTS == 3
            peak[n] = fmaxf(peak[n], __shfl_xor_sync(ALL, peak[n], 1));
            peak[n] = fmaxf(peak[n], __shfl_xor_sync(ALL, peak[n], 2));
            if (part == 0) peaks[n * 8 + group][warp + i * WARPS] = peak[n];
            peak[n] = 0;
#elif INPUTS == 0
            // The blocks share the writes.
            if ((warp + i * WARPS) % CLUSTER == blockIdx.x && place_of(i) < IN_SIZE && row_of(n) < num_rows)
                *reinterpret_cast<Chunk*>(normed + (long long)row_of(n) * IN_SIZE + place_of(i)) = own;
#endif
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const Chunk &upper = weights[held][t][0], &lower = weights[held][t][1];
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++) {
                multiply(sums[t][n], upper, lower, 0, rows[i][n].v[0], rows[i][n].v[1]);
                multiply(sums[t][n], upper, lower, 2, rows[i][n].v[2], rows[i][n].v[3]);
            }
        }
    }
#if INPUTS == 2
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        peak[n] = fmaxf(peak[n], __shfl_xor_sync(ALL, peak[n], 1));
        peak[n] = fmaxf(peak[n], __shfl_xor_sync(ALL, peak[n], 2));
        if (part == 0) peaks[n * 8 + group][warp] = peak[n];
    }
#endif
    __shared__ float parts[WARPS][TILES * 16][ROWS];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int s = 0; s < 4; s++)
                parts[warp][t * 16 + group + s / 2 * 8][n * 8 + part * 2 + s % 2] = sums[t][n][s];
    // Logits of the rows that this block chooses for: every CLUSTER-th.
    __shared__ float logits[CHOOSING_WARPS][TILES * 16 * CLUSTER];
    __syncthreads();
    // All blocks of the cluster run.
    asm volatile("barrier.cluster.wait.aligned;");
    for (int i = threadIdx.x; i < TILES * 16 * ROWS; i += WARPS * 32) {
        const int expert = i / ROWS, row = i % ROWS;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += parts[w][expert][row];
        const float* target = &logits[row / CLUSTER][first_expert + expert];
        asm volatile(
            "{\n"
            ".reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "st.shared::cluster.f32 [remote], %2;\n"
            "}" ::"r"((unsigned int)__cvta_generic_to_shared(target)),
            "r"(row % CLUSTER), "f"(sum)
            : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#if INPUTS
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        const int row = row_of(n);
#if INPUTS == 1
        const float of_row = *given_scale;
#elif INPUTS == 2
        float largest = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, peaks[n * 8 + group][w]);
        const float of_row = divide(fmaxf(largest, SMALLEST_AMAX), FP8_MAX);
#endif
#if INPUTS < 3
        if (warp == 0 && part == 0 && blockIdx.x == 0 && row < num_rows) scales[row] = of_row;
#endif
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            const int stretch = warp + i * WARPS;
            // The blocks share the writes.
            if (stretch % CLUSTER != blockIdx.x || place_of(i) >= IN_SIZE || row >= num_rows) continue;
#if INPUTS == 3
            float largest = 0;
#pragma unroll
            for (int s = 0; s < 4; s++) largest = fmaxf(largest, peaks[n * 8 + group][stretch / 4 * 4 + s]);
            const float of_row = divide(fmaxf(largest, SMALLEST_AMAX), FP8_MAX);
            if (stretch % 4 == 0 && part == 0) scales[(long long)(stretch / 4) * scales_stride + row] = of_row;
#endif
            unsigned int pairs[4];
#pragma unroll
            for (int v = 0; v < 4; v++)
                pairs[v] = pack_fp8(divide(low(rows[i][n].v[v]), of_row), divide(high(rows[i][n].v[v]), of_row));
            numbers[((long long)row * IN_SIZE + place_of(i)) / 8] =
                make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
    }
    __syncwarp();
#endif
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#if BLOCK_CHOOSES
    rank(logits[0], bias, keys, chosen);
#endif
    if (warp < CHOOSING_WARPS && own_row < num_rows) choose_for(own_row, logits[warp]);
#endif
}
