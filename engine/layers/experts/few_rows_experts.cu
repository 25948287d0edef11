// Products of few rows with the experts that they chose, bound by the time to read these experts' weights.
//
// Gate and up: h[t, j] = silu(gate[e] x[t]) * (up[e] x[t]) for e = experts[t, j].
// Down: y[t] += sum over j of shares[t, j] * (down[e] h[t, j]), in ascending order of experts.
//
// With SHARED the expert that every row takes is computed too, before the others: SHARED parts of an expert's size, with
// a share of 1. Its weights do not depend on the router, so gate and up requests them while the router runs.
//
// A unit of work is 16 rows of one expert's matrix: 16 outputs, or with gate and up 8 rows of each. It serves all
// rows of the batch that chose the expert, so each chosen expert is read once. A block takes every gridDim.x-th unit;
// for down every gridDim.x-th tile of outputs, with all chosen experts in turn. One warp copies weights to a ring of
// stages in shared memory. A stage holds CHUNK numbers of the unit's matrix rows. For down it also holds those of the
// batch rows that chose the expert; gate and up keeps all of x. The other warps share a stage's numbers: a product is
// one mma.m16n8k16 of 16 matrix rows by 8 batch rows. Batch rows that did not choose the expert are zero. Numbers may
// map to mma indices in any order as long as both operands agree, so a thread reads 16 contiguous bytes of a matrix
// row for two mma, or for four with FP8. The order of a batch row's sums depends only on its own experts.
//
// FP8 weights (float8_e4m3fn) become wider in registers, exactly; inputs are not quantized. For gate and up, weights
// become float16, which hardware converts. A block makes its copy of x float16 once, scaled by a power of two of each
// row so that no number overflows; only numbers below 2^-29 of a row's largest lose bits. For down, where each stage
// has its own inputs, weights become bfloat16. Moving FP8 bits into bfloat16 position makes the number 2^-120 times as
// large, by the different exponent bias. Inputs are scaled by 2^60, which keeps sums far from the smallest numbers,
// and sums are corrected at the end.
//
// Programmatic dependent launch: gate and up releases the next kernel only after the router has ended. So down may
// read experts and shares at once and fills its ring while gate and up still runs. Buffers of earlier kernels are not
// __restrict__: the compiler could read them too early.
//
// Macros for NVRTC:
//   DOWN      0: gate and up; 1: down
//   FP8       0: weights are bfloat16; 1: FP8 with a scale per row; 2: FP8 with a scale per 128 x 128
//   ROWS      at least the rows of the batch, at most 8
//   IN_SIZE   numbers of a matrix row
//   CHUNK     numbers of a matrix row per stage, a multiple of 64, or 128 for FP8, at most 2048
//   STAGES    stages of the ring
//   WARPS     warps that multiply
//   PREFETCH  stages after the ring's first to prefetch into the L2 cache
//   RELEASE   gate and up releases down so many stages before its last
//   SHARED    parts of the shared expert; 0: none

#include "bfloat16.cuh"
#include "copies.cuh"

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
// Whole rows are copied together, because a multiprocessor starts a copy only every 60 ns or so. Others are padded,
// so that the two matrix rows that a quarter of a warp reads lie in different banks.
constexpr bool WHOLE = NUM_CHUNKS == 1;
constexpr int ROW_BYTES = WHOLE ? IN_SIZE * sizeof(Weight) : (CHUNK * sizeof(Weight) + 127) / 128 * 128 + 64;
constexpr int INPUT_ROW_BYTES = ((DOWN ? CHUNK : IN_SIZE) * 2 + 127) / 128 * 128 + (FP8 ? 16 : 64);
constexpr int MATRIX_BYTES = 16 * ROW_BYTES;
constexpr int SCALE_BYTES = FP8 ? 128 : 0;
constexpr int STAGE_BYTES = (MATRIX_BYTES + (DOWN ? ROWS * INPUT_ROW_BYTES : 0) + SCALE_BYTES + 127) / 128 * 128;
constexpr int MAX_ROWS = 8, MAX_CHOSEN = 128 + SHARED, MAX_EXPERTS = 512;
constexpr int OUTPUTS = DOWN ? 16 : 8;
constexpr int THREADS = WARPS * 32;

#if FP8 && !DOWN
#define HALF 1
#define OPERAND "f16"
#else
#define HALF 0
#define OPERAND "bf16"
#endif

__device__ __forceinline__ void multiply(float* sum, const unsigned int* a, unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if HALF
constexpr float CORRECTION = 1.0f;
// A row's largest number becomes at least 2^14 and less than 2^15, unless it is below 2^-86.
constexpr int TOP_EXPONENT = 15 + 126, MAX_SHIFT = 100;

// Unpacks four FP8 numbers as float16: numbers 0 and 1, and numbers 2 and 3.
__device__ __forceinline__ void unpack(unsigned int four, unsigned int& first, unsigned int& second) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(first), "=r"(second)
        : "r"(four));
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((unsigned int)(exponent + 127) << 23); }

// One warp makes a row of bfloat16 float16, in place, and returns the power of two that sums must be multiplied by.
__device__ __forceinline__ float make_half(Chunk* row, int lane) {
    int top = 0;
    for (int i = lane; i < IN_SIZE / 8; i += 32)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const unsigned int pair = row[i].v[v];
            top = max(top, max((int)(pair >> 23 & 0xffu), (int)(pair >> 7 & 0xffu)));
        }
    const int shift = min(TOP_EXPONENT - (int)__reduce_max_sync(0xffffffffu, top), MAX_SHIFT);
    const float scale = power_of_two(shift);
    for (int i = lane; i < IN_SIZE / 8; i += 32)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const unsigned int pair = row[i].v[v];
            const float low = __uint_as_float(pair << 16) * scale, high = __uint_as_float(pair & 0xffff0000u) * scale;
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(row[i].v[v]) : "f"(high), "f"(low));
        }
    return power_of_two(-shift);
}
#elif FP8
#include "fp8_pairs.cuh"

constexpr float CORRECTION = 1152921504606846976.0f;  // 2^(120 - 60)
#endif

extern "C" __global__ void __launch_bounds__(THREADS + 32, WARPS > 8 ? 1 : 2) few_rows_experts(
    const Weight* __restrict__ weight,       // (num_experts, out_size [* 2 unless DOWN], IN_SIZE)
    const float* __restrict__ weight_scale,  // null, (num_experts, rows), or (num_experts, rows / 128, IN_SIZE / 128)
    const Weight* __restrict__ shared,       // (2 * SHARED * out_size, IN_SIZE); for DOWN (out_size, SHARED * IN_SIZE)
    const float* __restrict__ shared_scale,  // likewise null, (rows,), or (rows / 128, columns / 128)
    const unsigned short* inputs,            // (num_rows, IN_SIZE); for DOWN (num_rows, num_chosen + SHARED, IN_SIZE)
    const int* experts,                      // (num_rows, num_chosen)
    const float* shares,                     // (num_rows, num_chosen) for DOWN
    unsigned short* outputs,                 // (num_rows, num_chosen + SHARED, out_size); for DOWN (num_rows, out_size)
    int num_rows, int num_chosen, int out_size, int first_expert, int num_experts) {
    extern __shared__ __align__(128) unsigned char ring[];
    unsigned char* const held_inputs = ring + STAGES * STAGE_BYTES;
    __shared__ unsigned long long full[STAGES], empty[STAGES], held;
    // One bit per expert.
    __shared__ unsigned int is_chosen[MAX_EXPERTS / 32];
    // The parts of the shared expert, the chosen experts in ascending order, and each row's j of such an expert, or -1.
    __shared__ short expert_at[MAX_CHOSEN];
    __shared__ __align__(4) signed char place_at[MAX_CHOSEN][MAX_ROWS];
#if DOWN
    __shared__ float share_at[MAX_CHOSEN][MAX_ROWS];
#endif
#if HALF
    __shared__ float row_scales[MAX_ROWS];
#endif
    // (warp, matrix row, batch row), two buffers.
    __shared__ float parts[2][WARPS][16][MAX_ROWS];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    if (threadIdx.x < STAGES) {
        // With FP8 each lane of the copying warp arrives after its scales.
        init(full + threadIdx.x, FP8 ? 33 : 1);
        init(empty + threadIdx.x, WARPS);
        if (threadIdx.x == 0) init(&held, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < MAX_EXPERTS / 32) is_chosen[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < MAX_CHOSEN * MAX_ROWS; i += THREADS + 32) {
        const int at = i / MAX_ROWS, row = i % MAX_ROWS;
        place_at[at][row] = SHARED && at < SHARED && row < num_rows ? num_chosen + at : -1;
#if DOWN
        if (at < SHARED) share_at[at][row] = 1.0f;
#endif
    }
#if DOWN
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    // Also makes the barriers known to the copies.
    __syncthreads();

    const int num_tiles = out_size / OUTPUTS;
    const int num_matrix_rows = DOWN ? out_size : 2 * out_size;
    // The unit's place in expert_at, and its tile of outputs.
    const int first_at = DOWN ? 0 : blockIdx.x / num_tiles, first_tile = DOWN ? blockIdx.x : blockIdx.x % num_tiles;
    // The last 8 of a unit's matrix rows begin this many rows after the first 8.
    const int lower_row = DOWN ? 8 : out_size;
    auto numbers_of = [&](int chunk) { return min(CHUNK, IN_SIZE - chunk * CHUNK); };
    // Row of a shared matrix, and the part's first column.
    auto shared_row = [&](int part, int tile, int i) {
        return DOWN ? tile * 16 + i : part * out_size + tile * 8 + i % 8 + i / 8 * SHARED * out_size;
    };
    constexpr int SHARED_SIZE = DOWN ? SHARED * IN_SIZE : IN_SIZE;
    // Numbers of the i-th of a unit's matrix rows.
    auto matrix_at = [&](int at, int tile, int chunk, int i) {
        if (SHARED && at < SHARED)
            return shared + (long long)shared_row(at, tile, i) * SHARED_SIZE + (DOWN ? at * IN_SIZE : 0) + chunk * CHUNK;
        const long long row = (long long)expert_at[at] * num_matrix_rows + tile * OUTPUTS + i % 8 + i / 8 * lower_row;
        return weight + row * IN_SIZE + chunk * CHUNK;
    };
    // Whether the unit's rows are one stretch of memory, or two.
    auto is_whole = [&](int at) { return WHOLE && !(DOWN && SHARED > 1 && at < SHARED); };
    // Requests the unit's matrix. Args: num_copied: batch rows whose inputs are copied too.
    auto ask_matrix = [&](int at, int tile, int chunk, int stage, int num_copied) {
        unsigned char* to = ring + stage * STAGE_BYTES;
        if (lane == 0) {
            const int row_bytes = 16 * sizeof(Weight) + num_copied * 2;
            expect(full + stage, numbers_of(chunk) * row_bytes);
        }
        __syncwarp();
        const int together = is_whole(at) ? (DOWN ? 16 : 8) : 1;
        if (lane < 16 && lane % together == 0) {
            copy_weights<FP8 != 0>(to + lane * ROW_BYTES, matrix_at(at, tile, chunk, lane), together * numbers_of(chunk) * sizeof(Weight),
                 full + stage);
        }
#if FP8
        const float* scale = nullptr;
#if FP8 == 2
        const int column = chunk * CHUNK / 128 + lane % 16, columns = IN_SIZE / 128;
        if (column < columns && column * 128 < (chunk + 1) * CHUNK && lane < (DOWN ? 16 : 32)) {
            if (SHARED && at < SHARED) {
                const int row = shared_row(at, tile, lane / 16 * 8);
                scale = shared_scale + row / 128 * (SHARED_SIZE / 128) + (DOWN ? at * columns : 0) + column;
            } else {
                const int row = tile * OUTPUTS + lane / 16 * lower_row;
                const long long block_row = (long long)expert_at[at] * (num_matrix_rows / 128) + row / 128;
                scale = weight_scale + block_row * columns + column;
            }
        }
#else
        if (chunk == NUM_CHUNKS - 1 && lane < 16) {
            scale = SHARED && at < SHARED ? shared_scale + shared_row(at, tile, lane)
                                : weight_scale + (long long)expert_at[at] * num_matrix_rows + tile * OUTPUTS + lane % 8 +
                                      lane / 8 * lower_row;
        }
#endif
        if (scale) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                             shared_address(to + STAGE_BYTES - SCALE_BYTES + lane * 4)),
                         "l"(scale)
                         : "memory");
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full + stage)) : "memory");
#endif
    };
    auto move_on = [&](int& at, int& tile, int num_distinct) {
        if (DOWN) {
            if (++at == num_distinct) at = 0, tile += gridDim.x;
        } else {
            tile += gridDim.x;
            at += tile / num_tiles;
            tile %= num_tiles;
        }
    };
#if !DOWN
    // Stages that hold units of the shared expert before the router has ended.
    const int num_shared_units = max(0, (SHARED * num_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
    const int num_early = min(STAGES, num_shared_units * NUM_CHUNKS);
    if (SHARED && warp == WARPS) {
        int at = first_at, tile = first_tile, chunk = 0;
        for (int step = 0; step < num_early; step++) {
            ask_matrix(at, tile, chunk, step, 0);
            if (++chunk == NUM_CHUNKS) {
                chunk = 0;
                move_on(at, tile, 0);
            }
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int expert = -1;
    if (threadIdx.x < num_rows * num_chosen) {
        expert = __ldcg(experts + threadIdx.x) - first_expert;
        if (expert < 0 || expert >= num_experts) expert = -1;
    }
    if (expert >= 0) atomicOr(is_chosen + expert / 32, 1u << expert % 32);
    __syncthreads();
    int num_distinct = SHARED, before = 0;
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

    const int num_shared_out = DOWN ? num_tiles : num_tiles * num_distinct;
    const int num_own = max(0, (num_shared_out - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
    const int num_units = DOWN ? num_own * num_distinct : num_own;
    auto advance = [&](int& at, int& tile) { move_on(at, tile, num_distinct); };

    if (warp == WARPS) {
        const int num_steps = num_units * NUM_CHUNKS, num_first = min(STAGES, num_steps);
        // Lanes 16 to 23 copy inputs of down, if their row chose the expert.
        auto place_of_row = [&](int at) { return DOWN && lane / 8 == 2 ? place_at[at][lane - 16] : -1; };
        auto ask = [&](int at, int tile, int chunk, int stage) {
            ask_matrix(at, tile, chunk, stage, __popc(__ballot_sync(0xffffffffu, place_of_row(at) >= 0)));
        };
#if DOWN
        auto ask_inputs = [&](int at, int chunk, int stage) {
            const int place = place_of_row(at), row = lane - 16;
            if (place < 0) return;
            copy(ring + stage * STAGE_BYTES + MATRIX_BYTES + row * INPUT_ROW_BYTES,
                 inputs + (long long)(row * (num_chosen + SHARED) + place) * IN_SIZE + chunk * CHUNK, numbers_of(chunk) * 2,
                 full + stage);
        };
#endif
        int at = first_at, tile = first_tile, chunk = 0;
        auto next = [&] {
            if (++chunk < NUM_CHUNKS) return;
            chunk = 0;
            advance(at, tile);
        };
#if DOWN
        for (int step = 0; step < num_first; step++, next()) ask(at, tile, chunk, step);
        for (int step = num_first; step < min(num_steps, STAGES + PREFETCH); step++, next()) {
            const int together = is_whole(at) ? 16 : 1;
            if (lane < 16 && lane % together == 0) {
                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(matrix_at(at, tile, chunk, lane)),
                             "r"(together * numbers_of(chunk) * (int)sizeof(Weight)));
            }
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
        at = first_at, tile = first_tile, chunk = 0;
        for (int step = 0; step < num_first; step++, next()) ask_inputs(at, chunk, step);
        const int start = num_first;
#else
        const int start = num_early, release = max(0, num_steps - 1 - RELEASE);
        if (release < start || num_steps == 0) asm volatile("griddepcontrol.launch_dependents;");
        for (int step = 0; step < start; step++) next();
        if (lane == 0) expect(&held, num_rows * IN_SIZE * 2);
        __syncwarp();
        if (lane < num_rows) copy(held_inputs + lane * INPUT_ROW_BYTES, inputs + lane * IN_SIZE, IN_SIZE * 2, &held);
#endif
        for (int step = start; step < num_steps; step++, next()) {
            const int stage = step % STAGES;
            if (step >= STAGES) wait(empty + stage, (step / STAGES - 1) & 1);
            ask(at, tile, chunk, stage);
#if DOWN
            ask_inputs(at, chunk, stage);
#else
            if (step == release) asm volatile("griddepcontrol.launch_dependents;");
#endif
        }
        return;
    }

    // Whether this thread has numbers in its i-th stretch of a chunk.
    auto exists = [&](int chunk, int i) {
        const int place = (warp + i * WARPS) * STRETCH + part * NUM_OF_THREAD;
        return place < CHUNK && chunk * CHUNK + place < IN_SIZE;
    };
    // Two chains, because a product waits for the one before it.
    float chains[2][4] = {};
    float(&sums)[4] = chains[0];
    auto compute = [&](int chunk, int stage, bool has_row) {
        const unsigned char* from = ring + stage * STAGE_BYTES;
        const unsigned char *matrix = from + group * ROW_BYTES;
        const unsigned char* first_row = DOWN ? from + MATRIX_BYTES : held_inputs + chunk * CHUNK * 2;
        const unsigned char* row = first_row + group * INPUT_ROW_BYTES;
        Chunk weights[OF_WARP][2], numbers[OF_WARP][INPUT_CHUNKS];
#if FP8
        const float* scale = reinterpret_cast<const float*>(from + STAGE_BYTES - SCALE_BYTES);
#endif
#if FP8 == 2
        float scales[OF_WARP][2];
#endif
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            const int stretch = warp + i * WARPS, place = stretch * 64 + part * 16;
            weights[i][0] = weights[i][1] = Chunk{};
            if (exists(chunk, i)) {
                weights[i][0] = *reinterpret_cast<const Chunk*>(matrix + place);
                weights[i][1] = *reinterpret_cast<const Chunk*>(matrix + place + 8 * ROW_BYTES);
            }
#pragma unroll
            for (int c = 0; c < INPUT_CHUNKS; c++) {
                numbers[i][c] = Chunk{};
                if (has_row && exists(chunk, i))
                    numbers[i][c] = *reinterpret_cast<const Chunk*>(row + place * INPUT_CHUNKS + c * 16);
            }
#if FP8 == 2
            scales[i][0] = scales[i][1] = 0;
            if (exists(chunk, i)) {
                const int column = (chunk * CHUNK + stretch * STRETCH) / 128 - chunk * CHUNK / 128;
                scales[i][0] = scale[column] * CORRECTION;
                scales[i][1] = DOWN ? scales[i][0] : scale[16 + column] * CORRECTION;
            }
#endif
        }
#if HALF
        const float of_rows[2] = {row_scales[part * 2], row_scales[part * 2 + 1]};
#endif
#if FP8 == 1
        const float scales[2] = {scale[group] * CORRECTION, scale[group + 8] * CORRECTION};
#endif
        __syncwarp();
        if (lane == 0) arrive(empty + stage);
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            const Chunk &upper = weights[i][0], &lower = weights[i][1];
#if FP8 == 2
            float products[4] = {};
#else
            float(&products)[4] = chains[i % 2];
#endif
#pragma unroll
            for (int p = 0; p < PAIRS / 2; p++) {
                const unsigned int first = numbers[i][p / 2].v[p % 2 * 2], second = numbers[i][p / 2].v[p % 2 * 2 + 1];
#if HALF
                unsigned int a[4];
                unpack(upper.v[p], a[0], a[2]);
                unpack(lower.v[p], a[1], a[3]);
                multiply(products, a, first, second);
#elif FP8
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
            for (int s = 0; s < 4; s++) sums[s] += products[s] * scales[i][s / 2];
#endif
        }
        if (chunk == NUM_CHUNKS - 1) {
#pragma unroll
            for (int s = 0; s < 4; s++) {
                sums[s] += chains[1][s];
#if FP8 == 1
                sums[s] *= scales[s / 2];
#endif
#if HALF
                sums[s] *= of_rows[s % 2];
#endif
            }
        }
    };

    int buffer = 0;
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
#else
    wait(&held, 0);
#if HALF
    for (int row = warp; row < num_rows; row += WARPS) {
        const float row_scale = make_half(reinterpret_cast<Chunk*>(held_inputs + row * INPUT_ROW_BYTES), lane);
        if (lane == 0) row_scales[row] = row_scale;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#endif
#endif
    int at = first_at, tile = first_tile, stage = 0, phase = 0;
    for (int unit = 0; unit < num_units; unit++, advance(at, tile)) {
#if DOWN
        unsigned short* target = outputs + (long long)out_row * out_size + tile * OUTPUTS + out_of_tile;
        if (at == 0 && out_row < num_rows) residual = number(*target);
#endif
        const bool has_row = place_at[at][group] >= 0;
        for (int chunk = 0; chunk < NUM_CHUNKS; chunk++) {
            wait(full + stage, phase);
            compute(chunk, stage, has_row);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
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
            outputs[((long long)row * (num_chosen + SHARED) + place_at[at][row]) * out_size + tile * OUTPUTS + out] =
                pack(gate / (1.0f + __expf(-gate)) * up, 0.0f) & 0xffffu;
        }
        buffer ^= 1;
#endif
#pragma unroll
        for (int s = 0; s < 4; s++) chains[0][s] = chains[1][s] = 0;
    }
}
