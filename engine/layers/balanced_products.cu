// Products of tens to about a thousand rows of tokens, on Hopper's tensor cores: out = tokens * weight^T.
//
// A tile is OUTPUTS weight rows by TOKENS tokens. Weight rows are the side of 64 of the tensor cores' instruction, so
// that TOKENS may be any multiple of 16. Clusters of CLUSTER blocks take neighboring outputs of the same tokens; each
// block fetches a share of the tokens for all. One thread fetches up to STAGES steps ahead, two warp groups multiply.
//
// Every cluster gets the same number of steps: the first tiles are cut into units of `unit` steps and dealt out evenly,
// the rest are whole waves. A cluster that begins within a tile leaves its sums in `partials`. The cluster that began
// the tile adds them in the order of the steps, so the same inputs give the same bits.
//
// With PARTS, a cluster has one tile and each block an equal part of its steps. Blocks read each other's sums from shared
// memory, in the same order, and each finishes every PARTS-th 16 tokens.
//
// Macros for NVRTC:
//   FP8          0: bfloat16; 1: FP8 with scales per token and per weight row
//   GATED        1: outputs are silu(gate) * up; in a tile, 8 rows of gate and 8 of up take turns
//   OUTPUTS      weight rows of a tile: 128 or 192 (a group has 64 of them) or 64 (a group has half of the tokens)
//   TOKENS, CLUSTER, STAGES
//   PARTS        1, or blocks of a cluster that share a tile's steps, instead of clusters that share its tokens
//   COLUMNS      tokens of a group, 16 * BLOCKS
//   OPERAND_A, OPERAND_B, OPERAND_ADDS    COLUMNS / 2 and the next two numbers

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

// Bytes of a row per step: one swizzle pattern is 8 rows.
constexpr int STEP = 128, DEPTH = STEP / (FP8 ? 1 : 2);
static_assert(COLUMNS == (OUTPUTS == 64 ? TOKENS / 2 : TOKENS) && COLUMNS == 16 * BLOCKS, "tokens of a group");
static_assert(PARTS == 1 || (CLUSTER == 1 && OUTPUTS > 64), "a cluster shares tokens or steps");
static_assert(PARTS > 1 || OUTPUTS < 192, "room for partial sums");
static_assert(TOKENS % (8 * CLUSTER) == 0, "a block's share of the tokens has whole swizzle patterns");
constexpr int A_BYTES = OUTPUTS * STEP, B_BYTES = TOKENS * STEP, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int NUM_SUMS = COLUMNS / 2;
// Blocks of a cluster, and groups of 16 tokens that each finishes.
constexpr int NUM_BLOCKS = CLUSTER * PARTS, NUM_FINISHED = (BLOCKS + PARTS - 1) / PARTS;
// Rows of a block's results in shared memory.
constexpr int NUM_RESULTS = PARTS > 1 ? 16 * NUM_FINISHED : TOKENS;
// Results of a tile in shared memory: rows of tokens, with a gap against bank conflicts.
constexpr int WIDTH = GATED ? OUTPUTS / 2 : OUTPUTS, ROW_BYTES = WIDTH * 2 + 16, CHUNKS = WIDTH / 8;
// The last warp group fetches.
constexpr int NUM_WORKERS = OUTPUTS == 192 ? 384 : 256, NUM_THREADS = NUM_WORKERS + 128;
// All sums of a block take the place of its stages.
static_assert(PARTS == 1 || NUM_SUMS * 4 * NUM_WORKERS <= STAGES * STAGE_BYTES, "room for sums");

struct __align__(64) TensorMap { u64 opaque[16]; };

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count));
}
__device__ void expect_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// At the same barrier of another block of the cluster.
__device__ void arrive_at(u32 barrier, int rank) {
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
                 :: "r"(barrier), "r"(rank) : "memory");
}
__device__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" :: "r"(barrier), "r"(parity) : "memory");
}
__device__ void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
__device__ void synchronize_workers() { asm volatile("bar.sync 1, %0;" :: "n"(NUM_WORKERS) : "memory"); }
// Other blocks of the cluster see what this one wrote to shared memory.
__device__ void exchange() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ u32 address_in(u32 address, int rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
__device__ float4 load_remote(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ void fetch_weights(u32 target, const TensorMap* map, u32 barrier, int x, int row) {
#if GATED
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], [%2];"
        :: "r"(target), "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(row / 16) : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(target), "l"(map), "r"(barrier), "r"(x), "r"(row) : "memory");
#endif
}
// This block's share, to the same place in all blocks of the cluster.
__device__ void fetch_tokens(u32 target, const TensorMap* map, u32 barrier, int x, int row) {
#if CLUSTER > 1
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(target), "l"(map), "r"(barrier), "r"(x), "r"(row), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(target), "l"(map), "r"(barrier), "r"(x), "r"(row) : "memory");
#endif
}

// K-major, swizzled by 128 bytes; patterns of 8 rows are 1024 bytes apart.
__device__ u64 descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(i) F4(i), F4(i + 4)
#define REGISTERS_1 F8(0)
#define REGISTERS_2 REGISTERS_1, F8(8)
#define REGISTERS_3 REGISTERS_2, F8(16)
#define REGISTERS_4 REGISTERS_3, F8(24)
#define REGISTERS_5 REGISTERS_4, F8(32)
#define REGISTERS_6 REGISTERS_5, F8(40)
#define REGISTERS_7 REGISTERS_6, F8(48)
#define REGISTERS_8 REGISTERS_7, F8(56)
#define REGISTERS_9 REGISTERS_8, F8(64)
#define REGISTERS_10 REGISTERS_9, F8(72)
#define REGISTERS_11 REGISTERS_10, F8(80)
#define REGISTERS_12 REGISTERS_11, F8(88)
#define REGISTERS_13 REGISTERS_12, F8(96)
#define REGISTERS_14 REGISTERS_13, F8(104)
#define REGISTERS_15 REGISTERS_14, F8(112)
#define REGISTERS_16 REGISTERS_15, F8(120)
#define NAMES_1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_2 NAMES_1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_3 NAMES_2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NAMES_4 NAMES_3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_5 NAMES_4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_6 NAMES_5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_7 NAMES_6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_8 NAMES_7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_9 NAMES_8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define NAMES_10 NAMES_9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_11 NAMES_10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define NAMES_12 NAMES_11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_13 NAMES_12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define NAMES_14 NAMES_13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES_15 NAMES_14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define NAMES_16 NAMES_15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define JOINED(a, b) a##b
#define OF_SIZE(list, size) JOINED(list, size)
#define QUOTED(x) #x
#define TEXT(x) QUOTED(x)
#if FP8
#define TYPES "k32.f32.e4m3.e4m3"
#define MAJOR ""
#else
#define TYPES "k16.f32.bf16.bf16"
#define MAJOR ", 0, 0"
#endif

// d = (adds ? d : 0) + a * b^T, of 64 weight rows and COLUMNS tokens, 32 bytes of each.
__device__ __forceinline__ void multiply(float (&d)[NUM_SUMS], u64 a, u64 b, int adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" TEXT(OPERAND_ADDS) ", 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(COLUMNS) TYPES
                 " {" OF_SIZE(NAMES_, BLOCKS) "}, %" TEXT(OPERAND_A) ", %" TEXT(OPERAND_B) ", adds, 1, 1" MAJOR ";\n}"
                 : OF_SIZE(REGISTERS_, BLOCKS) : "l"(a), "l"(b), "r"(adds));
}
__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// Four matrices of 8 outputs by 8 tokens, a row of shared memory per token.
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 from, u32 (&v)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from) : "memory");
}

struct Sizes {
    // Of clusters' tiles. The first `num_cut` tiles are cut into units.
    int num_token_tiles, num_tiles, num_cut, unit, num_units, num_steps, num_clusters;
};

// A cluster's stretches of steps, one after the other.
struct Walk {
    int cluster, at, end, tile;
    int first_unit, end_unit;

    __device__ Walk(const Sizes& sizes, int cluster) : cluster(cluster) {
        at = begin_of(sizes, cluster), end = begin_of(sizes, cluster + 1), tile = -1;
    }
    static __device__ int begin_of(const Sizes& sizes, int cluster) {
        return (u64)sizes.num_cut * sizes.num_units * cluster / sizes.num_clusters;
    }
    __device__ bool next(const Sizes& sizes) {
        if (at < end) {
            tile = at / sizes.num_units, first_unit = at % sizes.num_units;
            end_unit = min(sizes.num_units, first_unit + end - at);
            at += end_unit - first_unit;
            return true;
        }
        tile = tile < sizes.num_cut ? sizes.num_cut + cluster : tile + sizes.num_clusters;
        first_unit = 0, end_unit = sizes.num_units;
        return tile < sizes.num_tiles;
    }
    __device__ int first_step(const Sizes& sizes, int part) const {
        return PARTS > 1 ? sizes.num_steps * part / PARTS : first_unit * sizes.unit;
    }
    __device__ int end_step(const Sizes& sizes, int part) const {
        return PARTS > 1 ? sizes.num_steps * (part + 1) / PARTS : min(end_unit * sizes.unit, sizes.num_steps);
    }
};

// Token in a tile of row `r` of the results.
__device__ __forceinline__ int token_of(int r, int part) {
    return PARTS > 1 ? (r / 16 * PARTS + part) * 16 + r % 16 : r;
}

// Clusters behind that take the rest of the tile.
__device__ __forceinline__ int num_behind(const Sizes& sizes, const Walk& walk) {
    if (walk.end_unit == sizes.num_units) return 0;
    int number = 1;
    while (Walk::begin_of(sizes, walk.cluster + number + 1) < (walk.tile + 1) * sizes.num_units) number++;
    return number;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) balanced_products(
    const __grid_constant__ TensorMap token_map,   // (num_tokens, in_size)
    const __grid_constant__ TensorMap weight_map,  // (weight rows, in_size), or (out_size / 8, 2, 8, in_size) if GATED
    const u8* bias,                                // (weight rows,) bfloat16, or null
    const float* token_scales,                     // (num_tokens,), if FP8
    const float* weight_scales,                    // (weight rows,), if FP8
    const u8* residual,                            // (num_tokens, out_size) bfloat16, or null; may be `out`
    u8* out,                                       // (num_tokens, out_size) bfloat16
    float4* partials,                              // (blocks, NUM_SUMS / 4, NUM_WORKERS)
    int* arrived,                                  // (blocks,); zero between launches
    int num_tokens, int out_size, int num_token_tiles, int num_tiles, int num_cut, int unit, int num_steps) {
    extern __shared__ u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 stages = shared_address(memory) + 1023 & ~1023, results = stages + STAGES * STAGE_BYTES;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" :: "l"(&weight_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" :: "l"(&token_map) : "memory");
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + 8 * s, 1);
            init_barrier(empty + 8 * s, NUM_WORKERS / 32 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    if (CLUSTER > 1) synchronize_cluster();
    else __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    const int num_clusters = gridDim.x / NUM_BLOCKS;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0, part = PARTS > 1 ? blockIdx.x % PARTS : 0;
    // The cluster that adds partial sums waits for blocks launched before it.
    const int cluster = num_clusters - 1 - blockIdx.x / NUM_BLOCKS;
    const Sizes sizes = {
        num_token_tiles, num_tiles, num_cut, unit, (num_steps + unit - 1) / unit, num_steps, num_clusters};
    Walk walk(sizes, cluster);
    int stage = 0;
    u32 parity = 0;

    if (threadIdx.x >= NUM_WORKERS) {
#if OUTPUTS == 192
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
        if (threadIdx.x == NUM_WORKERS) {
            // Weights do not depend on earlier kernels.
            Walk ahead = walk;
            int num_ahead = 0;
            while (num_ahead < STAGES && ahead.next(sizes)) {
                const int row = (ahead.tile / num_token_tiles * CLUSTER + rank) * OUTPUTS;
                for (int step = ahead.first_step(sizes, part); step < ahead.end_step(sizes, part) && num_ahead < STAGES; step++) {
                    expect_bytes(full + 8 * num_ahead, STAGE_BYTES);
                    fetch_weights(stages + num_ahead * STAGE_BYTES, &weight_map, full + 8 * num_ahead, step * DEPTH, row);
                    num_ahead++;
                }
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            int number = 0;
            while (walk.next(sizes)) {
                const int row = (walk.tile / num_token_tiles * CLUSTER + rank) * OUTPUTS;
                const int token = walk.tile % num_token_tiles * TOKENS + rank * (TOKENS / CLUSTER);
                for (int step = walk.first_step(sizes, part); step < walk.end_step(sizes, part); step++, number++) {
                    const u32 target = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
                    if (number >= num_ahead) {
                        wait(empty + 8 * stage, parity ^ 1);
                        expect_bytes(barrier, STAGE_BYTES);
                        fetch_weights(target, &weight_map, barrier, step * DEPTH, row);
                    }
                    const u32 share = target + A_BYTES + rank * (B_BYTES / CLUSTER);
                    fetch_tokens(share, &token_map, barrier, step * DEPTH, token);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        if (PARTS > 1) exchange();
    } else {
#if OUTPUTS == 192
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#else
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
        const int worker = threadIdx.x, group = worker / 128, lane = threadIdx.x % 32;
        const int warp = worker / 32 % 4;
        const u32 a_offset = OUTPUTS == 64 ? 0 : group * 64 * STEP;
        const u32 b_offset = A_BYTES + (OUTPUTS == 64 ? group * COLUMNS * STEP : 0);
        // First weight row of this lane in a tile, the other is 8 behind; first token of the group in a tile.
        const int row = (OUTPUTS == 64 ? 0 : group * 64) + warp * 16 + lane / 4;
        const int column = OUTPUTS == 64 ? group * COLUMNS : 0;
        // Address of this lane's rows for transposed stores and loads.
        const int first = (OUTPUTS == 64 ? 0 : group * 64) + warp * 16;
        const u32 place = GATED ? results + (column + lane) * ROW_BYTES + first
                                : results + (column + lane / 16 * 8 + lane % 8) * ROW_BYTES + (first + lane / 8 % 2 * 8) * 2;
        asm volatile("griddepcontrol.wait;" ::: "memory");
        while (walk.next(sizes)) {
            const int output = (walk.tile / num_token_tiles * CLUSTER + rank) * OUTPUTS / (GATED ? 2 : 1);
            const int token = walk.tile % num_token_tiles * TOKENS;
            const int first_step = walk.first_step(sizes, part), end_step = walk.end_step(sizes, part);
            // The results of the tile before have left.
            synchronize_workers();
            if (residual && walk.first_unit == 0) {
                for (int i = worker; i < NUM_RESULTS * CHUNKS; i += NUM_WORKERS) {
                    const int r = i / CHUNKS, o = i % CHUNKS * 8, t = token_of(r, part);
                    if (t < TOKENS && token + t < num_tokens && output + o < out_size) {
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                                     :: "r"(results + r * ROW_BYTES + o * 2),
                                        "l"(residual + ((u64)(token + t) * out_size + output + o) * 2) : "memory");
                    }
                }
            }
            float sums[NUM_SUMS];
            int last = -1;
            for (int step = first_step; step < end_step; step++) {
                wait(full + 8 * stage, parity);
                const u32 from = stages + stage * STAGE_BYTES;
                const u64 a = descriptor(from + a_offset), b = descriptor(from + b_offset);
                begin_multiplying();
#pragma unroll
                for (int i = 0; i < 4; i++) multiply(sums, a + 2 * i, b + 2 * i, step > first_step || i > 0);
                commit();
                await_products<1>();
                if (last >= 0 && lane < CLUSTER) arrive_at(empty + 8 * last, PARTS > 1 ? part : lane);
                last = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            await_products<0>();
            if (lane < CLUSTER) arrive_at(empty + 8 * last, PARTS > 1 ? part : lane);

#if PARTS > 1
            // Both this block's copies and its products are done.
            synchronize_workers();
#pragma unroll
            for (int i = 0; i < NUM_SUMS / 4; i++) {
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                             :: "r"(stages + (i * NUM_WORKERS + worker) * 16), "f"(sums[4 * i]), "f"(sums[4 * i + 1]),
                                "f"(sums[4 * i + 2]), "f"(sums[4 * i + 3]) : "memory");
            }
            exchange();
#pragma unroll
            for (int i = 0; i < 2 * NUM_FINISHED; i++) {
                const int block = i / 2 * PARTS + part;
                if (block >= BLOCKS) break;
                const u32 place = stages + ((2 * block + i % 2) * NUM_WORKERS + worker) * 16;
                float4 v[PARTS];
#pragma unroll
                for (int other = 0; other < PARTS; other++) v[other] = load_remote(address_in(place, other));
#pragma unroll
                for (int other = 1; other < PARTS; other++) {
                    v[0].x += v[other].x, v[0].y += v[other].y, v[0].z += v[other].z, v[0].w += v[other].w;
                }
                sums[4 * i] = v[0].x, sums[4 * i + 1] = v[0].y, sums[4 * i + 2] = v[0].z, sums[4 * i + 3] = v[0].w;
            }
#else
            if (walk.first_unit > 0) {
                const int block = cluster * CLUSTER + rank;
                float4* part = partials + (u64)block * (NUM_SUMS / 4) * NUM_WORKERS + worker;
#pragma unroll
                for (int i = 0; i < NUM_SUMS / 4; i++) {
                    __stcg(part + i * NUM_WORKERS,
                           make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
                }
                synchronize_workers();
                if (worker == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" :: "l"(arrived + block) : "memory");
                continue;
            }
            const int num_others = num_behind(sizes, walk);
            if (num_others > 0) {
                if (worker < num_others) {
                    int* const flag = arrived + (cluster + 1 + worker) * CLUSTER + rank;
                    int is_there;
                    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_there) : "l"(flag) : "memory");
                    while (!is_there);
                    *flag = 0;
                }
                synchronize_workers();
            }
            for (int other = 1; other <= num_others; other++) {
                const float4* part = partials + (u64)((cluster + other) * CLUSTER + rank) * (NUM_SUMS / 4) * NUM_WORKERS + worker;
#pragma unroll
                for (int i = 0; i < NUM_SUMS / 4; i++) {
                    const float4 v = __ldcg(part + i * NUM_WORKERS);
                    sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
                }
            }
#endif

            // Sum 4 * j + i of a lane is of results' row 8 * j + 2 * (lane % 4) + i % 2 and of weights' row (i / 2) * 8.
            const int num_halves = 2, apart = GATED ? out_size : 8;
            const int weight_row = GATED ? output + row / 16 * 8 + row % 8 : output + row;
            float biases[num_halves] = {};
            if (bias) {
                for (int half = 0; half < num_halves; half++) {
                    const int r = weight_row + half * apart;
                    if (GATED ? weight_row < out_size : r < out_size) biases[half] = low(((const unsigned short*)bias)[r]);
                }
            }
#if FP8
            float of_rows[num_halves];
            for (int half = 0; half < num_halves; half++) {
                const int r = weight_row + half * apart;
                of_rows[half] = (GATED ? weight_row < out_size : r < out_size) ? weight_scales[r] : 0;
            }
#endif
#pragma unroll
            for (int j = 0; j < 2 * NUM_FINISHED; j++) {
#if FP8
                const int t = token + column + token_of(8 * j, part) + lane % 4 * 2;
                const float of_tokens[2] = {t < num_tokens ? token_scales[t] : 0, t + 1 < num_tokens ? token_scales[t + 1] : 0};
#pragma unroll
                for (int i = 0; i < 4; i++) sums[4 * j + i] *= of_tokens[i % 2] * of_rows[i / 2];
#endif
#pragma unroll
                for (int i = 0; i < 4; i++) sums[4 * j + i] += biases[i / 2];
            }
            if (residual) {
                asm volatile("cp.async.wait_all;" ::: "memory");
                synchronize_workers();
            }
#if GATED
            // Four matrices of 8 tokens.
#pragma unroll
            for (int j = 0; j < 2 * NUM_FINISHED; j += 4) {
                u32 v[4] = {};
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    if (j + m >= 2 * NUM_FINISHED) break;
                    float* s = sums + 4 * (j + m);
                    v[m] = pack(__fdividef(s[0], 1 + __expf(-s[0])) * s[2], __fdividef(s[1], 1 + __expf(-s[1])) * s[3]);
                }
                if (2 * NUM_FINISHED - j >= 4) {
                    store_transposed(place + 8 * j * ROW_BYTES, v);
                } else {
                    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                                 :: "r"(place + 8 * j * ROW_BYTES), "r"(v[0]), "r"(v[1]) : "memory");
                }
            }
#else
            // Two matrices of 8 outputs of each of two times 8 tokens.
#pragma unroll
            for (int j = 0; j < 2 * NUM_FINISHED; j += 2) {
                const u32 at = place + 8 * j * ROW_BYTES;
                float* s = sums + 4 * j;
                if (residual) {
                    u32 r[4];
                    load_transposed(at, r);
#pragma unroll
                    for (int m = 0; m < 4; m++) s[2 * m] += low(r[m]), s[2 * m + 1] += high(r[m]);
                }
                const u32 v[4] = {pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7])};
                store_transposed(at, v);
            }
#endif
            synchronize_workers();
            for (int i = worker; i < NUM_RESULTS * CHUNKS; i += NUM_WORKERS) {
                const int r = i / CHUNKS, o = i % CHUNKS * 8, t = token_of(r, part);
                if (t < TOKENS && token + t < num_tokens && output + o < out_size) {
                    u32 v[4];
                    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(results + r * ROW_BYTES + o * 2));
                    *(uint4*)(out + ((u64)(token + t) * out_size + output + o) * 2) = make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
        }
    }
    // Blocks of the cluster still copy and arrive here, or read sums.
    if (NUM_BLOCKS > 1) synchronize_cluster();
}
