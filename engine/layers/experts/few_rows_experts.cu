// Products of few rows with the experts that they chose, bound by the time to read these experts' weights.
//
// Gate and up: h[t, j] = silu(gate[e] x[t]) * (up[e] x[t]) for e = experts[t, j].
// Down: y[t] += sum over j of shares[t, j] * (down[e] h[t, j]), in ascending order of experts.
//
// A unit of work is 16 rows of one expert's matrix: 16 outputs, or with gate and up 8 rows of each. It serves all
// rows of the batch that chose the expert, so each chosen expert is read once. A block takes every gridDim.x-th unit;
// for down every gridDim.x-th tile of outputs, with all chosen experts in turn. The warps share a unit's steps of 128
// bytes of each matrix row. A product is one mma.m16n8k16 of 16 matrix rows by 8 batch rows, of which rows that did
// not choose the expert are zero. Numbers may map to mma indices in any order as long as both operands agree, so a
// thread reads 16 contiguous bytes of a matrix row for two mma, or for four with FP8. Each warp copies the operands
// of its next DEPTH steps to shared memory, where a thread reads only its own copies, so that warps do not wait for
// each other. The order of a row's sums depends only on its own experts.
//
// FP8 weights (float8_e4m3fn) become bfloat16 in registers, exactly; inputs are not quantized. Moving FP8 bits into
// bfloat16 position makes the number 2^-120 times as large, by the different exponent bias. Inputs are scaled by
// 2^60, which keeps sums far from the smallest numbers, and sums are corrected at the end.
//
// Programmatic dependent launch: gate and up releases the next kernel only after the router has ended. So down may
// read experts and shares at once and request weights while gate and up still runs. Buffers of earlier kernels are not
// __restrict__: the compiler could read them too early.
//
// Macros for NVRTC:
//   DOWN      0: gate and up; 1: down
//   FP8       0: weights are bfloat16; 1: FP8 with a scale per row; 2: FP8 with a scale per 128 x 128
//   ROWS      at least the rows of the batch, at most 8
//   IN_SIZE   numbers of a matrix row
//   WARPS     warps of a block
//   DEPTH     steps that a warp requests ahead
//   PREFETCH  units for down to prefetch into the L2 cache, after those that are requested ahead
//   RELEASE   gate and up releases down so many steps of a warp before its last

#include "bfloat16.cuh"

#if FP8
typedef unsigned char Weight;
#else
typedef unsigned short Weight;
#endif
constexpr int NUM_OF_THREAD = 16 / sizeof(Weight);
constexpr int STRETCH = 4 * NUM_OF_THREAD;
constexpr int INPUT_CHUNKS = NUM_OF_THREAD / 8;
// Pairs of a batch row's inputs per thread and stretch.
constexpr int PAIRS = NUM_OF_THREAD / 2;
// Numbers of a matrix row per step, and steps of a unit.
constexpr int STEP = 2 * STRETCH;
constexpr int STEPS = (IN_SIZE + STEP - 1) / STEP;
// Bytes of a warp's step: matrix rows, inputs and scales.
constexpr int MATRIX_BYTES = 4 * 32 * 16;
constexpr int INPUT_BYTES = 2 * INPUT_CHUNKS * ROWS * 4 * 16;
constexpr int STEP_BYTES = MATRIX_BYTES + INPUT_BYTES + (FP8 ? 64 : 0);
constexpr int MAX_ROWS = 8, MAX_CHOSEN = 128, MAX_EXPERTS = 512;
constexpr int OUTPUTS = DOWN ? 16 : 8;
constexpr int THREADS = WARPS * 32;

__device__ __forceinline__ unsigned int shared_address(const void* p) { return (unsigned int)__cvta_generic_to_shared(p); }

// Copies 16 bytes, or zeros if nothing exists there.
__device__ __forceinline__ void copy(void* to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_scale(void* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void multiply(float* sum, const unsigned int* a, unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if FP8
constexpr float CORRECTION = 1152921504606846976.0f;  // 2^(120 - 60)

// Unpacks four FP8 numbers as bfloat16, 2^-120 times as large: numbers 0 and 2, and numbers 1 and 3.
__device__ __forceinline__ void unpack(unsigned int four, unsigned int& even, unsigned int& odd) {
    even = (four << 8 & 0x80008000u) | (four << 4 & 0x07f007f0u);
    odd = (four & 0x80008000u) | (four >> 4 & 0x07f007f0u);
}

// Multiplies two bfloat16 by 2^60.
__device__ __forceinline__ unsigned int enlarge(unsigned int pair) {
    unsigned int larger;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(larger) : "r"(pair), "r"(0x5d805d80u), "r"(0x80008000u));
    return larger;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, WARPS > 8 ? 1 : 2) few_rows_experts(
    const Weight* __restrict__ weight,       // (num_experts, out_size [* 2 unless DOWN], IN_SIZE)
    const float* __restrict__ weight_scale,  // null, (num_experts, rows), or (num_experts, rows / 128, IN_SIZE / 128)
    const unsigned short* inputs,            // (num_rows, IN_SIZE); for DOWN (num_rows, num_chosen, IN_SIZE)
    const int* experts,                      // (num_rows, num_chosen)
    const float* shares,                     // (num_rows, num_chosen) for DOWN
    unsigned short* outputs,                 // (num_rows, num_chosen, out_size); for DOWN (num_rows, out_size)
    int num_rows, int num_chosen, int out_size, int first_expert, int num_experts) {
    extern __shared__ __align__(128) unsigned char ring[];
    // One bit per expert.
    __shared__ unsigned int is_chosen[MAX_EXPERTS / 32];
    // The chosen experts in ascending order, and each row's j of such an expert, or -1.
    __shared__ short expert_at[MAX_CHOSEN];
    __shared__ signed char place_at[MAX_CHOSEN][MAX_ROWS];
#if DOWN
    __shared__ float share_at[MAX_CHOSEN][MAX_ROWS];
#endif
    // (warp, matrix row, batch row), two buffers.
    __shared__ float parts[2][WARPS][16][MAX_ROWS];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    if (threadIdx.x < MAX_EXPERTS / 32) is_chosen[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < MAX_CHOSEN * MAX_ROWS / 4; i += THREADS)
        reinterpret_cast<unsigned int*>(place_at)[i] = 0xffffffffu;
#if DOWN
    asm volatile("griddepcontrol.launch_dependents;");
#else
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    __syncthreads();
    int expert = -1;
    if (threadIdx.x < num_rows * num_chosen) {
        expert = __ldcg(experts + threadIdx.x) - first_expert;
        if (expert < 0 || expert >= num_experts) expert = -1;
    }
    if (expert >= 0) atomicOr(is_chosen + expert / 32, 1u << expert % 32);
    __syncthreads();
    int num_distinct = 0, before = 0;
#pragma unroll
    for (int i = 0; i < MAX_EXPERTS / 32; i++) {
        if (expert >= 0 && i == expert / 32) before = num_distinct + __popc(is_chosen[i] & ((1u << expert % 32) - 1));
        num_distinct += __popc(is_chosen[i]);
    }
    if (expert >= 0) {
        const int row = threadIdx.x / num_chosen;
        expert_at[before] = expert;
        place_at[before][row] = threadIdx.x % num_chosen;
#if DOWN
        share_at[before][row] = __ldcg(shares + threadIdx.x);
#endif
    }
    __syncthreads();

    const int num_tiles = out_size / OUTPUTS;
    const int num_matrix_rows = DOWN ? out_size : 2 * out_size;
    const int num_shared_out = DOWN ? num_tiles : num_tiles * num_distinct;
    const int num_own = max(0, (num_shared_out - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
    const int num_units = DOWN ? num_own * num_distinct : num_own;
    // The last 8 of a unit's matrix rows begin this many rows after the first 8.
    const int lower_row = DOWN ? 8 : out_size;

    // A unit, by its place in expert_at and its tile of outputs, and a step of this warp.
    struct Cursor {
        int unit, at, tile, step;
    };
    // Which warp takes which step depends on no other row of the batch.
    auto first_step = [&](const Cursor& c) {
        const int shift = (DOWN ? first_expert + expert_at[c.at] : c.tile) * STEPS;
        return (unsigned int)(warp - shift) % WARPS;
    };
    auto start = [&] {
        Cursor c{0, DOWN ? 0 : (int)blockIdx.x / num_tiles, DOWN ? (int)blockIdx.x : (int)blockIdx.x % num_tiles, 0};
        if (num_units > 0) c.step = first_step(c);
        return c;
    };
    auto go_on = [&](Cursor& c) {
        if (DOWN) {
            if (++c.at == num_distinct) c.at = 0, c.tile += gridDim.x;
        } else {
            c.tile += gridDim.x;
            c.at += c.tile / num_tiles;
            c.tile %= num_tiles;
        }
        if (++c.unit < num_units) c.step = first_step(c);
    };
    auto to_step = [&](Cursor& c) {
        while (c.unit < num_units && c.step >= STEPS) go_on(c);
    };
    auto matrix_row = [&](const Cursor& c) { return (long long)expert_at[c.at] * num_matrix_rows + c.tile * OUTPUTS; };

    unsigned char* const own = ring + warp * DEPTH * STEP_BYTES;
    Chunk* const own_matrix = reinterpret_cast<Chunk*>(own) + lane;
    // (stretch and part of 8 numbers, lane); lanes of absent rows copy nothing.
    Chunk* const own_inputs = reinterpret_cast<Chunk*>(own + MATRIX_BYTES) + lane;
    constexpr int INPUT_LANES = ROWS * 4;
    auto ask_matrix = [&](const Cursor& c, int slot) {
        const Weight* row = weight + (matrix_row(c) + group) * IN_SIZE;
        Chunk* to = reinterpret_cast<Chunk*>(reinterpret_cast<unsigned char*>(own_matrix) + slot * STEP_BYTES);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int place = c.step * STEP + i * STRETCH + part * NUM_OF_THREAD;
            const bool exists = place < IN_SIZE;
            copy(to + i * 64, row + (exists ? place : 0), exists);
            copy(to + i * 64 + 32, row + (exists ? place : 0) + (long long)lower_row * IN_SIZE, exists);
        }
#if FP8
        float* scale = reinterpret_cast<float*>(own + slot * STEP_BYTES + MATRIX_BYTES + INPUT_BYTES) + lane;
#if FP8 == 2
        if (lane < (DOWN ? 1 : 2)) {
            const int block_row = (c.tile * OUTPUTS + lane * lower_row) / 128;
            const long long first = (long long)expert_at[c.at] * (num_matrix_rows / 128) + block_row;
            copy_scale(scale, weight_scale + first * STEPS + c.step);
        }
#else
        if (lane < 16) copy_scale(scale, weight_scale + matrix_row(c) + lane % 8 + lane / 8 * lower_row);
#endif
#endif
    };
    auto ask_inputs = [&](const Cursor& c, int slot) {
        if (lane >= INPUT_LANES) return;
        const int chosen = place_at[c.at][group];
        const unsigned short* row = inputs + (long long)(DOWN ? group * num_chosen + chosen : group) * IN_SIZE;
        Chunk* to = reinterpret_cast<Chunk*>(reinterpret_cast<unsigned char*>(own_inputs) + slot * STEP_BYTES);
#pragma unroll
        for (int i = 0; i < 2 * INPUT_CHUNKS; i++) {
            const int place = c.step * STEP + i / INPUT_CHUNKS * STRETCH + part * NUM_OF_THREAD + i % INPUT_CHUNKS * 8;
            const bool exists = place < IN_SIZE && chosen >= 0;
            copy(to + i * INPUT_LANES, exists ? row + place : inputs, exists);
        }
    };

    // Multiplies the step in the slot.
    auto multiply_step = [&](int slot, float (&products)[4], float (&scales)[2]) {
        const unsigned char* from = own + slot * STEP_BYTES;
        const Chunk* matrix = reinterpret_cast<const Chunk*>(from) + lane;
        const Chunk* numbers = reinterpret_cast<const Chunk*>(from + MATRIX_BYTES) + lane;
#if FP8
        const float* scale = reinterpret_cast<const float*>(from + MATRIX_BYTES + INPUT_BYTES);
        scales[0] = scale[FP8 == 2 ? 0 : group] * CORRECTION;
        scales[1] = FP8 == 2 && DOWN ? scales[0] : scale[FP8 == 2 ? 1 : group + 8] * CORRECTION;
#endif
        Chunk rows[4], row[2 * INPUT_CHUNKS];
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i] = matrix[i * 32];
#pragma unroll
        for (int i = 0; i < 2 * INPUT_CHUNKS; i++) row[i] = lane < INPUT_LANES ? numbers[i * INPUT_LANES] : Chunk{};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Chunk &upper = rows[2 * i], &lower = rows[2 * i + 1];
#pragma unroll
            for (int p = 0; p < PAIRS / 2; p++) {
                const Chunk& of = row[i * INPUT_CHUNKS + p / 2];
                const unsigned int first = of.v[p % 2 * 2], second = of.v[p % 2 * 2 + 1];
#if FP8
                unsigned int a[4];
                unpack(upper.v[p], a[0], a[2]);
                unpack(lower.v[p], a[1], a[3]);
                multiply(products, a, enlarge(__byte_perm(first, second, 0x5410)),
                         enlarge(__byte_perm(first, second, 0x7632)));
#else
                const unsigned int a[4] = {upper.v[2 * p], lower.v[2 * p], upper.v[2 * p + 1], lower.v[2 * p + 1]};
                multiply(products, a, first, second);
#endif
            }
        }
    };

    int buffer = 0;
    auto share = [&](const float* own_sums) {
#pragma unroll
        for (int s = 0; s < 4; s++) parts[buffer][warp][group + s / 2 * 8][part * 2 + s % 2] = own_sums[s];
        __syncthreads();
    };
    auto add_up = [&](int matrix_row, int row) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += parts[buffer][w][matrix_row][row];
        return sum;
    };

    Cursor ahead = start();
    auto ask = [&](int slot) {
        to_step(ahead);
        if (ahead.unit < num_units) {
            ask_matrix(ahead, slot);
            ask_inputs(ahead, slot);
            ahead.step += WARPS;
        }
        commit();
    };
#if DOWN
    Cursor first = ahead;
    for (int slot = 0; slot < DEPTH; slot++) {
        to_step(first);
        if (first.unit < num_units) ask_matrix(first, slot);
        first.step += WARPS;
    }
#if PREFETCH
    constexpr int NUM_ASKED = DEPTH * WARPS / STEPS;
    if (warp == WARPS - 1 && lane < min(PREFETCH, num_units - NUM_ASKED)) {
        Cursor c = ahead;
        for (int i = 0; i < NUM_ASKED + lane; i++) go_on(c);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(weight + matrix_row(c) * IN_SIZE),
                     "r"(16 * IN_SIZE * (int)sizeof(Weight)));
    }
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int slot = 0; slot < DEPTH; slot++) {
        to_step(ahead);
        if (ahead.unit < num_units) ask_inputs(ahead, slot);
        ahead.step += WARPS;
        commit();
    }
    float totals[4] = {};
    const int out_of_tile = threadIdx.x % OUTPUTS, out_row = threadIdx.x / OUTPUTS;
    float residual = 0;
#else
    for (int slot = 0; slot < DEPTH; slot++) ask(slot);
    int until_release = max(0, num_units * STEPS / WARPS - RELEASE - DEPTH);
    if (until_release == 0) asm volatile("griddepcontrol.launch_dependents;");
#endif
    int slot = 0;
    float sums[4] = {}, scales[2] = {1, 1};
    for (Cursor now = start(); now.unit < num_units; go_on(now)) {
#if DOWN
        unsigned short* target = outputs + (long long)out_row * out_size + now.tile * OUTPUTS + out_of_tile;
        if (now.at == 0 && out_row < num_rows) residual = number(*target);
#endif
        for (; now.step < STEPS; now.step += WARPS) {
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#if FP8
            __syncwarp();
#endif
#if DOWN || FP8 == 2
            float products[4] = {};
            multiply_step(slot, products, scales);
#if DOWN
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const int row = part * 2 + s % 2;
                if (place_at[now.at][row] >= 0) totals[s] += share_at[now.at][row] * scales[s / 2] * products[s];
            }
#else
#pragma unroll
            for (int s = 0; s < 4; s++) sums[s] += scales[s / 2] * products[s];
#endif
#else
            multiply_step(slot, sums, scales);
#endif
#if FP8
            __syncwarp();
#endif
            ask(slot);
            if (++slot == DEPTH) slot = 0;
#if !DOWN
            if (--until_release == 0) asm volatile("griddepcontrol.launch_dependents;");
#endif
        }
#if DOWN
        if (now.at == num_distinct - 1) {
            share(totals);
            if (threadIdx.x < OUTPUTS * MAX_ROWS && out_row < num_rows)
                *target = pack(residual + add_up(out_of_tile, out_row), 0.0f) & 0xffffu;
            buffer ^= 1;
#pragma unroll
            for (int s = 0; s < 4; s++) totals[s] = 0;
        }
#else
#if FP8 == 1
#pragma unroll
        for (int s = 0; s < 4; s++) sums[s] *= scales[s / 2];
#endif
        share(sums);
        // Alternate threads, so that none is always behind.
        const int thread = (threadIdx.x + now.unit % 4 * 64) % THREADS, out = thread % OUTPUTS, row = thread / OUTPUTS;
        if (thread < OUTPUTS * MAX_ROWS && place_at[now.at][row] >= 0) {
            const float gate = add_up(out, row), up = add_up(out + 8, row);
            outputs[((long long)row * num_chosen + place_at[now.at][row]) * out_size + now.tile * OUTPUTS + out] =
                pack(gate / (1.0f + __expf(-gate)) * up, 0.0f) & 0xffffu;
        }
        buffer ^= 1;
#pragma unroll
        for (int s = 0; s < 4; s++) sums[s] = 0;
#endif
    }
}
