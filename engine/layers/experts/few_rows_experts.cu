// Products of few rows with the experts that they chose, bound by the time to read these experts' weights.
//
// Gate and up: h[t, j] = silu(gate[e] x[t]) * (up[e] x[t]) for e = experts[t, j].
// Down: y[t] += sum over j of shares[t, j] * (down[e] h[t, j]), in ascending order of experts.
//
// A unit of work is 16 rows of one expert's matrix: 16 outputs, or with gate and up 8 rows of each. It serves all
// rows of the batch that chose the expert, so each chosen expert is read once. A block takes every gridDim.x-th unit;
// for down every gridDim.x-th tile of outputs, with all chosen experts in turn. One warp copies weights to a ring of
// stages in shared memory. A stage holds CHUNK inputs of the unit's rows. The other warps share a stage's inputs:
// a product is one mma.m16n8k16 of 16 matrix rows by 8 batch rows. Rows that did not choose the expert are zero and
// are not read. Inputs may map to mma indices in any order as long as both operands agree, so a thread reads 16
// contiguous bytes of a matrix row for two mma, or for four with FP8. A sum's order depends only on its own row.
//
// FP8 weights (float8_e4m3fn) become bfloat16 in registers, exactly; inputs are not quantized. Moving FP8 bits into
// bfloat16 position makes the number 2^-120 times as large, by the different exponent bias. Inputs are scaled by
// 2^60, which keeps sums far from the smallest numbers, and sums are corrected at the end.
//
// Programmatic dependent launch: gate and up releases the next kernel only after the router has ended. So down may
// read experts and shares at once and fills its ring while gate and up still runs. Buffers of earlier kernels are not
// __restrict__: the compiler could read them too early.
//
// Macros for NVRTC:
//   DOWN      0: gate and up; 1: down
//   FP8       0: weights are bfloat16; 1: FP8 with a scale per row; 2: FP8 with a scale per 128 x 128
//   IN_SIZE   inputs of a matrix row
//   CHUNK     inputs of a stage, a multiple of 32, or 64 for FP8
//   STAGES    stages of the ring
//   WARPS     warps that multiply
//   PREFETCH  stages after the ring's first to prefetch into the L2 cache

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
constexpr int NUM_CHUNKS = (IN_SIZE + CHUNK - 1) / CHUNK;
constexpr int STRETCHES = CHUNK / STRETCH;
constexpr int OF_WARP = (STRETCHES + WARPS - 1) / WARPS;
// Padded so that the two matrix rows that a quarter of a warp reads lie in different banks.
constexpr int ROW_BYTES = (CHUNK * (int)sizeof(Weight) + 127) / 128 * 128 + 64;
constexpr int STAGE_BYTES = 16 * ROW_BYTES;
constexpr int MAX_ROWS = 8, MAX_CHOSEN = 128, MAX_EXPERTS = 512;
constexpr int OUTPUTS = DOWN ? 16 : 8;
constexpr int THREADS = WARPS * 32;

__device__ __forceinline__ unsigned int shared_address(const void* p) { return (unsigned int)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(unsigned long long* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void expect(unsigned long long* barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(unsigned long long* barrier, int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void copy(void* to, const Weight* from, int num_bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(num_bytes), "r"(shared_address(barrier))
                 : "memory");
}

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

// A thread's part of a stage's inputs.
struct Inputs {
    Chunk of[OF_WARP][INPUT_CHUNKS];
#if FP8 == 2
    float scales[OF_WARP][2];
#elif FP8
    float scales[2];
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 2) few_rows_experts(
    const Weight* __restrict__ weight,       // (num_experts, out_size [* 2 unless DOWN], IN_SIZE)
    const float* __restrict__ weight_scale,  // null, (num_experts, rows), or (num_experts, rows / 128, IN_SIZE / 128)
    const unsigned short* inputs,            // (num_rows, IN_SIZE); for DOWN (num_rows, num_chosen, IN_SIZE)
    const int* experts,                      // (num_rows, num_chosen)
    const float* shares,                     // (num_rows, num_chosen) for DOWN
    unsigned short* outputs,                 // (num_rows, num_chosen, out_size); for DOWN (num_rows, out_size)
    int num_rows, int num_chosen, int out_size, int first_expert, int num_experts) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
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
    if (threadIdx.x < STAGES) {
        init(full + threadIdx.x, 1);
        init(empty + threadIdx.x, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < MAX_EXPERTS / 32) is_chosen[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < MAX_CHOSEN * MAX_ROWS / 4; i += THREADS + 32)
        reinterpret_cast<unsigned int*>(place_at)[i] = 0xffffffffu;
#if DOWN
    asm volatile("griddepcontrol.launch_dependents;");
#else
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    __syncthreads();
#if !DOWN
    asm volatile("griddepcontrol.launch_dependents;");
#endif
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
    // Sets the place of the unit's expert in expert_at, and its tile of outputs.
    auto find = [&](int unit, int& at, int& tile) {
        if (DOWN) {
            at = unit % num_distinct;
            tile = blockIdx.x + unit / num_distinct * gridDim.x;
        } else {
            const int place = blockIdx.x + unit * gridDim.x;
            at = place / num_tiles;
            tile = place % num_tiles;
        }
    };
    // First of the unit's matrix rows; the last 8 begin at lower_row.
    auto upper_row = [&](int at, int tile) { return (long long)expert_at[at] * num_matrix_rows + tile * OUTPUTS; };
    const int lower_row = DOWN ? 8 : out_size;

    if (warp == WARPS) {
        const int num_steps = num_units * NUM_CHUNKS;
        auto row_at = [&](int unit) {
            int at, tile;
            find(unit, at, tile);
            return weight + (upper_row(at, tile) + lane % 8 + lane / 8 * lower_row) * IN_SIZE;
        };
        if (lane >= 16) return;
        const Weight* row = nullptr;
        for (int step = 0; step < num_steps; step++) {
            const int unit = step / NUM_CHUNKS, chunk = step % NUM_CHUNKS, stage = step % STAGES;
            if (chunk == 0) row = row_at(unit);
            if (step >= STAGES) wait(empty + stage, (step / STAGES - 1) & 1);
            const int num_bytes = min(CHUNK, IN_SIZE - chunk * CHUNK) * sizeof(Weight);
            if (lane == 0) expect(full + stage, 16 * num_bytes);
            __syncwarp(0xffffu);
            copy(ring + stage * STAGE_BYTES + lane * ROW_BYTES, row + chunk * CHUNK, num_bytes, full + stage);
#if PREFETCH
            if (step == min(STAGES, num_steps) - 1) {
                for (int next = step + 1; next < min(num_steps, STAGES + PREFETCH); next++) {
                    const int first = next % NUM_CHUNKS * CHUNK;
                    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row_at(next / NUM_CHUNKS) + first),
                                 "r"(min(CHUNK, IN_SIZE - first) * (int)sizeof(Weight)));
                }
            }
#endif
        }
        return;
    }

    // Whether this thread has inputs in its i-th stretch of a chunk.
    auto exists = [&](int chunk, int i) {
        const int place = (warp + i * WARPS) * STRETCH + part * NUM_OF_THREAD;
        return place < CHUNK && chunk * CHUNK + place < IN_SIZE;
    };
    auto ask = [&](Inputs& in, int unit, int chunk) {
        int at, tile;
        find(unit, at, tile);
        const int place = place_at[at][group];
        const unsigned short* row = inputs + (long long)(DOWN ? group * num_chosen + place : group) * IN_SIZE;
#if FP8 == 2
        const long long block_row = (long long)expert_at[at] * (num_matrix_rows / 128);
        const float* upper = weight_scale + (block_row + tile * OUTPUTS / 128) * (IN_SIZE / 128);
        const float* lower = upper;
        if (!DOWN) lower = weight_scale + (block_row + (out_size + tile * OUTPUTS) / 128) * (IN_SIZE / 128);
#elif FP8
        if (chunk == 0) {
            const long long matrix_row = upper_row(at, tile) + group;
            in.scales[0] = weight_scale[matrix_row];
            in.scales[1] = weight_scale[matrix_row + lower_row];
        }
#endif
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            const int first = chunk * CHUNK + (warp + i * WARPS) * STRETCH;
#if FP8 == 2
            in.scales[i][0] = in.scales[i][1] = 0;
            if ((warp + i * WARPS) < STRETCHES && first < IN_SIZE) {
                in.scales[i][0] = upper[first / 128];
                in.scales[i][1] = DOWN ? in.scales[i][0] : lower[first / 128];
            }
#endif
#pragma unroll
            for (int c = 0; c < INPUT_CHUNKS; c++) {
                in.of[i][c] = Chunk{};
                if (place >= 0 && exists(chunk, i))
                    in.of[i][c] = *reinterpret_cast<const Chunk*>(row + first + part * NUM_OF_THREAD + c * 8);
            }
        }
    };

    float sums[4] = {};
    auto compute = [&](const Inputs& in, int chunk, int stage) {
        const unsigned char* matrix = ring + stage * STAGE_BYTES + group * ROW_BYTES;
        Chunk weights[OF_WARP][2];
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            weights[i][0] = weights[i][1] = Chunk{};
            if (exists(chunk, i)) {
                const unsigned char* from = matrix + (warp + i * WARPS) * 64 + part * 16;
                weights[i][0] = *reinterpret_cast<const Chunk*>(from);
                weights[i][1] = *reinterpret_cast<const Chunk*>(from + 8 * ROW_BYTES);
            }
        }
        __syncwarp();
        if (lane == 0) arrive(empty + stage);
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            const Chunk &upper = weights[i][0], &lower = weights[i][1];
#if FP8 == 2
            float products[4] = {};
#else
            float(&products)[4] = sums;
#endif
#pragma unroll
            for (int p = 0; p < PAIRS / 2; p++) {
                const unsigned int first = in.of[i][p / 2].v[p % 2 * 2], second = in.of[i][p / 2].v[p % 2 * 2 + 1];
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
#if FP8 == 2
#pragma unroll
            for (int s = 0; s < 4; s++) sums[s] += products[s] * (in.scales[i][s / 2] * CORRECTION);
#endif
        }
    };

    int buffer = 0;
    // Adds up the warps' sums and returns those of this thread's output and row, after gate in `first` up in `second`.
    auto share = [&](const float* own) {
#pragma unroll
        for (int s = 0; s < 4; s++) parts[buffer][warp][group + s / 2 * 8][part * 2 + s % 2] = own[s];
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    };
    auto add_up = [&](int matrix_row, int row) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += parts[buffer][w][matrix_row][row];
        return sum;
    };

#if DOWN
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float totals[4] = {};
    const int out_of_tile = threadIdx.x % OUTPUTS, out_row = threadIdx.x / OUTPUTS;
    float residual = 0;
#endif
    Inputs ahead[2];
    if (num_units > 0) ask(ahead[0], 0, 0);
    int step = 0;
    for (int unit = 0; unit < num_units; unit++) {
        int at, tile;
        find(unit, at, tile);
#if DOWN
        unsigned short* target = outputs + (long long)out_row * out_size + tile * OUTPUTS + out_of_tile;
        if (at == 0 && out_row < num_rows) residual = number(*target);
#endif
#if FP8 == 1
        float scales[2];
#endif
        for (int chunk = 0; chunk < NUM_CHUNKS; chunk++, step++) {
            Inputs& in = ahead[0];
            if (chunk + 1 < NUM_CHUNKS) ask(ahead[1], unit, chunk + 1);
            else if (unit + 1 < num_units) ask(ahead[1], unit + 1, 0);
#if FP8 == 1
            if (chunk == 0) scales[0] = in.scales[0], scales[1] = in.scales[1];
#endif
            const int stage = step % STAGES;
            wait(full + stage, step / STAGES & 1);
            compute(in, chunk, stage);
            ahead[0] = ahead[1];
        }
#if FP8 == 1
#pragma unroll
        for (int s = 0; s < 4; s++) sums[s] *= scales[s / 2] * CORRECTION;
#endif
#if DOWN
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int row = part * 2 + s % 2;
            if (place_at[at][row] >= 0) totals[s] += share_at[at][row] * sums[s];
        }
        if (at == num_distinct - 1) {
            share(totals);
            if (threadIdx.x < OUTPUTS * MAX_ROWS && out_row < num_rows)
                *target = pack(residual + add_up(out_of_tile, out_row), 0.0f) & 0xffffu;
            buffer ^= 1;
#pragma unroll
            for (int s = 0; s < 4; s++) totals[s] = 0;
        }
#else
        share(sums);
        // Alternate threads, so that none is always behind.
        const int thread = (threadIdx.x + unit % 4 * 64) % THREADS, out = thread % OUTPUTS, row = thread / OUTPUTS;
        if (thread < OUTPUTS * MAX_ROWS && place_at[at][row] >= 0) {
            const float gate = add_up(out, row), up = add_up(out + 8, row);
            outputs[((long long)row * num_chosen + place_at[at][row]) * out_size + tile * OUTPUTS + out] =
                pack(gate / (1.0f + __expf(-gate)) * up, 0.0f) & 0xffffu;
        }
        buffer ^= 1;
#endif
#pragma unroll
        for (int s = 0; s < 4; s++) sums[s] = 0;
    }
}
