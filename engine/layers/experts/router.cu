// Routing of rows to experts: the rows' norm, the router's logits and each row's best experts.
//
// A block computes the logits of 8 experts for 8 rows, y = rms_norm(x) W^T, and its warps share the inputs. A product
// is one mma.m16n8k16 of which half of the matrix rows are zero. The last block to arrive of those with the same 8
// rows chooses their experts, one warp per row. Without FUSED the logits are given, and every warp chooses for a row.
//
// Weights do not depend on earlier kernels and are requested before the kernel waits for its inputs (programmatic
// dependent launch).
//
// Macros for NVRTC:
//   FUSED        1: normalize and compute logits too
//   IN_SIZE      inputs of a row, a multiple of 32
//   NUM_EXPERTS  at most 512
//   NUM_CHOSEN   experts of a row, at most 32
//   SIGMOID      0: scores are the softmax of all logits; 1: each logit's sigmoid, and a bias added for the choice
//   NORMALIZE    1: divide a row's scores by their sum
//   GROUPS       groups of consecutive experts, at most 32, each of at least 2 experts
//   GROUPS_USED  groups that a row chooses from: those whose two best scores have the greatest sums
//   WARPS        warps per block

#include "bfloat16.cuh"

constexpr unsigned int ALL = 0xffffffffu;
constexpr int OF_LANE = (NUM_EXPERTS + 31) / 32;
constexpr int TILE = 8;
constexpr int OF_WARP = (IN_SIZE / 32 + WARPS - 1) / WARPS;
// Registers hold the norm's weights of no more inputs.
constexpr bool HELD = OF_WARP <= 8;

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

// One warp chooses a row's experts. Lane l has experts l, l + 32, and so on.
__device__ __forceinline__ void choose(const float* logits, const float* bias, float scaling, float* shares, int* experts,
                                       unsigned long long* counts, float* scratch) {
    const int lane = threadIdx.x % 32;
    float scores[OF_LANE];
    unsigned int keys[OF_LANE];
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        const int expert = lane + i * 32;
        scores[i] = expert < NUM_EXPERTS ? __ldcg(logits + expert) : 0.0f;
    }
#if SIGMOID
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        const int expert = lane + i * 32;
        keys[i] = 0;
        if (expert < NUM_EXPERTS) {
            scores[i] = 1.0f / (1.0f + expf(-scores[i]));
            const float for_choice = scores[i] + (bias ? bias[expert] : 0.0f);
            keys[i] = ordered(for_choice);
            if (GROUPS_USED < GROUPS) scratch[expert] = for_choice;
        }
    }
    if (GROUPS_USED < GROUPS) {
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
        const unsigned int own = ordered(best + second);
        int num_better = 0;
        for (int other = 0; other < GROUPS; other++) {
            const unsigned int key = __shfl_sync(ALL, own, other);
            num_better += key > own || (key == own && other < lane);
        }
        const unsigned int is_used = __ballot_sync(ALL, lane < GROUPS && num_better < GROUPS_USED);
#pragma unroll
        for (int i = 0; i < OF_LANE; i++)
            if (!(is_used >> min((lane + i * 32) / SIZE, 31) & 1)) keys[i] = 0;
    }
#else
    unsigned int largest = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        keys[i] = lane + i * 32 < NUM_EXPERTS ? ordered(scores[i]) : 0;
        largest = max(largest, keys[i]);
    }
    largest = __reduce_max_sync(ALL, largest);
    const float highest = __uint_as_float(largest & 0x80000000u ? largest ^ 0x80000000u : ~largest);
    float total = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        scores[i] = lane + i * 32 < NUM_EXPERTS ? expf(scores[i] - highest) : 0.0f;
        total += scores[i];
    }
    total = sum_of_warp(total);
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) scores[i] /= total;
#endif
    float own_score = 0, chosen_total = 0;
    int own_expert = 0;
    for (int j = 0; j < NUM_CHOSEN; j++) {
        unsigned int best = 0;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(ALL, best);
        unsigned int expert = ALL;
#pragma unroll
        for (int i = OF_LANE - 1; i >= 0; i--)
            if (keys[i] == best) expert = lane + i * 32;
        expert = __reduce_min_sync(ALL, expert);
        float score = 0;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) {
            if (lane + i * 32 == expert) {
                score = scores[i];
                keys[i] = 0;
            }
        }
        score = __shfl_sync(ALL, score, expert % 32);
        chosen_total += score;
        if (lane == j) own_score = score, own_expert = expert;
    }
    if (lane >= NUM_CHOSEN) return;
#if NORMALIZE
    own_score /= SIGMOID ? chosen_total + 1e-20f : chosen_total;
#endif
    shares[lane] = own_score * scaling;
    experts[lane] = own_expert;
    if (counts) atomicAdd(counts + own_expert, 1ull);
}

__device__ __forceinline__ void multiply(float* sum, unsigned int a0, unsigned int a2, unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float low(unsigned int pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(unsigned int pair) { return __uint_as_float(pair & 0xffff0000u); }

extern "C" __global__ void __launch_bounds__(WARPS * 32) router(
    const unsigned short* x,                         // (num_rows, IN_SIZE) if FUSED
    const unsigned short* __restrict__ norm_weight,  // (IN_SIZE,) if FUSED
    const unsigned short* __restrict__ weight,       // (NUM_EXPERTS, IN_SIZE) if FUSED
    const float* __restrict__ bias,                  // (NUM_EXPERTS,) or null
    unsigned short* normed,                          // (num_rows, IN_SIZE) if FUSED
    float* logits,                                   // (num_rows, NUM_EXPERTS)
    float* shares,                                   // (num_rows, NUM_CHOSEN)
    int* experts,                                    // (num_rows, NUM_CHOSEN)
    unsigned int* arrivals,                          // (num_rows / 8,) if FUSED, zero between launches
    unsigned long long* counts,                      // (NUM_EXPERTS,) or null
    const int* num_counted,                          // (1,) or null
    int num_rows, float eps, float scaling) {
    __shared__ float scratch[WARPS][GROUPS_USED < GROUPS ? NUM_EXPERTS : 1];
    const int warp = threadIdx.x / 32;
    auto choose_for = [&](int row) {
        unsigned long long* row_counts = counts && row < __ldcg(num_counted) ? counts : nullptr;
        choose(logits + (long long)row * NUM_EXPERTS, bias, scaling, shares + row * NUM_CHOSEN,
               experts + row * NUM_CHOSEN, row_counts, scratch[warp]);
    };
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
#if !FUSED
    wait_for_earlier();
    const int row = blockIdx.x * WARPS + warp;
    if (row < num_rows) choose_for(row);
#else
    const int lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    const int row = blockIdx.y * TILE + group;
    const unsigned short* expert = weight + (long long)min((int)blockIdx.x * TILE + group, NUM_EXPERTS - 1) * IN_SIZE;
    auto place_of = [&](int i) { return (warp + i * WARPS) * 32 + part * 8; };
    Chunk weights[OF_WARP], norms[OF_WARP], rows[OF_WARP];
    auto ask_norm = [&](int i) {
        norms[i] = Chunk{};
        if (place_of(i) < IN_SIZE) norms[i] = *reinterpret_cast<const Chunk*>(norm_weight + place_of(i));
    };
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        weights[i] = rows[i] = Chunk{};
        if (place_of(i) < IN_SIZE) weights[i] = *reinterpret_cast<const Chunk*>(expert + place_of(i));
        if (HELD) ask_norm(i);
    }
    wait_for_earlier();
#pragma unroll
    for (int i = 0; i < OF_WARP; i++)
        if (place_of(i) < IN_SIZE && row < num_rows)
            rows[i] = *reinterpret_cast<const Chunk*>(x + (long long)row * IN_SIZE + place_of(i));

    __shared__ float squares[WARPS][TILE];
    float square = 0;
#pragma unroll
    for (int i = 0; i < OF_WARP; i++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const float a = low(rows[i].v[v]), b = high(rows[i].v[v]);
            square += a * a + b * b;
        }
    square += __shfl_xor_sync(ALL, square, 1);
    square += __shfl_xor_sync(ALL, square, 2);
    if (part == 0) squares[warp][group] = square;
    __syncthreads();
    square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) square += squares[w][group];
    const float scale = rsqrtf(square / IN_SIZE + eps);

    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        if (!HELD) ask_norm(i);
#pragma unroll
        for (int v = 0; v < 4; v++)
            rows[i].v[v] = pack(low(rows[i].v[v]) * scale * low(norms[i].v[v]),
                                high(rows[i].v[v]) * scale * high(norms[i].v[v]));
        // The blocks of a row share the writes.
        if ((warp + i * WARPS) % gridDim.x == blockIdx.x && place_of(i) < IN_SIZE && row < num_rows)
            *reinterpret_cast<Chunk*>(normed + (long long)row * IN_SIZE + place_of(i)) = rows[i];
        multiply(sums, weights[i].v[0], weights[i].v[1], rows[i].v[0], rows[i].v[1]);
        multiply(sums, weights[i].v[2], weights[i].v[3], rows[i].v[2], rows[i].v[3]);
    }
    // (warp, expert, row)
    __shared__ float parts[WARPS][TILE][TILE];
    parts[warp][group][part * 2] = sums[0];
    parts[warp][group][part * 2 + 1] = sums[1];
    __syncthreads();
    if (threadIdx.x < TILE * TILE) {
        const int own_expert = blockIdx.x * TILE + threadIdx.x % TILE;
        const int own_row = blockIdx.y * TILE + threadIdx.x / TILE;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += parts[w][threadIdx.x % TILE][threadIdx.x / TILE];
        if (own_expert < NUM_EXPERTS && own_row < num_rows) {
            logits[(long long)own_row * NUM_EXPERTS + own_expert] = sum;
            __threadfence();
        }
    }
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrivals + blockIdx.y, 1) == gridDim.x - 1;
        if (is_last) arrivals[blockIdx.y] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    for (int r = warp; r < TILE; r += WARPS)
        if (blockIdx.y * TILE + r < num_rows) choose_for(blockIdx.y * TILE + r);
#endif
}
