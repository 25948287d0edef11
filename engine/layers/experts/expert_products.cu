// Products of sorted rows with their experts' matrices, on Hopper's tensor cores.
//
// One block per multiprocessor takes tiles of ROWS places and COLUMNS weight rows in turn. One warp group fetches the
// inputs and weights of up to STAGES steps. Two compute 64 places each, and nothing if all are beyond the tile's end.
//
// Macros for NVRTC:
//   KIND         0: bfloat16; FP8: 1 scales per row, 2 scales per 128x128 block of weights and 128 numbers of a row
//   GATED        1: rows of `a` are gathered by token, and outputs are silu(gate) * up
//   OUT          0: bfloat16 outputs; 1: FP8 with a scale per 128 outputs; 2: FP8 with a given scale
//   STAGES
//   CLUSTER      blocks of a cluster, 1 or 2. The two take neighboring row tiles. If both are of one expert, each fetches half
//                of the weights for both.
//
// By the strides of b_map, row i of 32 in shared memory is weight row 8 * (i / 2 % 4) + 2 * (i / 8) + i % 2: a thread
// then holds 8 consecutive outputs.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

constexpr int ROWS = 128, COLUMNS = 256, OUTPUTS = GATED ? COLUMNS / 2 : COLUMNS;
// Bytes of a row per step: one swizzle pattern is 8 rows.
constexpr int STEP = 128;
constexpr int A_BYTES = ROWS * STEP, B_BYTES = COLUMNS * STEP, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SIZE = KIND == 0 ? 2 : 1, DEPTH = STEP / SIZE;
// Row tiles of clusters that share weights in turn.
constexpr int GROUP = 8 / CLUSTER;
constexpr float FP8_MAX = 448.0f, SMALLEST_AMAX = 1e-10f;

struct __align__(64) TensorMap { u64 opaque[16]; };
struct Work { int expert, first, end, output; bool is_shared; };

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count));
}
// At the same barrier of a block of the cluster.
__device__ void arrive_at(u32 barrier, int block) {
#if CLUSTER > 1
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" :: "r"(barrier), "r"(block) : "memory");
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
#endif
}
__device__ void expect_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" :: "r"(barrier), "r"(parity) : "memory");
}
__device__ void fetch(u32 target, const TensorMap* map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(target), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
// From a group of 32 weight rows on.
__device__ void fetch_weights(u32 target, const TensorMap* map, u32 barrier, int x, int group) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %4, %4, %5}], [%2];"
        :: "r"(target), "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(group) : "memory");
}

// The same for all blocks of the cluster.
__device__ void fetch_shared_weights(u32 target, const TensorMap* map, u32 barrier, int x, int group) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %4, %4, %5}], [%2], %6;"
        :: "r"(target), "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(group), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
}
// Memory of a block must outlive what other blocks do with it. Exited threads count as arrived.
__device__ void end_together() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
#endif
}

// K-major, swizzled by 128 bytes; patterns of 8 rows are 1024 bytes apart.
__device__ u64 descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F64(i) F16(i), F16(i + 16), F16(i + 32), F16(i + 48)
#define N64 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
    "%56,%57,%58,%59,%60,%61,%62,%63"
#define N128 N64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
    "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#if KIND == 0
#define TYPES "k16.f32.bf16.bf16"
#define MAJOR ", 0, 0"
#else
#define TYPES "k32.f32.e4m3.e4m3"
#define MAJOR ""
#endif

// d = (adds ? d : 0) + a * b^T, of 64 rows of a and 256 of b, 32 bytes of each.
__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, int adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256" TYPES " {" N128 "}, %128, %129, adds, 1, 1" MAJOR ";\n}"
                 : F64(0), F64(64) : "l"(a), "l"(b), "r"(adds));
}
// Of 128 rows of b.
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int adds) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128" TYPES " {" N64 "}, %64, %65, adds, 1, 1" MAJOR ";\n}"
                 : F64(0) : "l"(a), "l"(b), "r"(adds));
}
__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// Args: index: of the cluster's work; rank: of the block in the cluster.
__device__ Work work_of(const int4* tiles, int num_row_tiles, int num_output_tiles, int index, int rank) {
    const int num_together = (num_row_tiles + CLUSTER - 1) / CLUSTER, group_size = GROUP * num_output_tiles;
    index = min(index, num_together * num_output_tiles - 1);
    const int first = index / group_size * GROUP, of_group = index % group_size;
    const int width = min(num_together - first, GROUP);
    const int begin = (first + of_group % width) * CLUSTER;
    const int4 tile = tiles[1 + min(begin + rank, num_row_tiles - 1)];
    Work work = {tile.x, tile.y, tile.z, of_group / width * OUTPUTS, false};
    if (CLUSTER > 1) {
        work.is_shared = tile.x == tiles[1 + min(begin + 1 - rank, num_row_tiles - 1)].x;
        // Without a tile, the last block only fetches.
        if (begin + rank >= num_row_tiles) work.end = work.first;
    }
    return work;
}

__device__ __forceinline__ u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ u32 pack_fp8(float first, float second) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

// Output of a tile that a lane's sum 4 * j is.
__device__ __forceinline__ int column_of(int j, int lane) { return j / 4 * 32 + lane % 4 * 8 + j % 4 * 2; }

extern "C" __global__ void __launch_bounds__(384, 1) expert_products(
    const __grid_constant__ TensorMap a_map,    // (num_places, in_size); unused if GATED
    const __grid_constant__ TensorMap b_map,    // (experts * weight rows / 32, 4, 4, 2, in_size)
    const u8* a,                                // (num_tokens, in_size), if GATED
    const int* order,                           // (num_places,): pair of each place, if GATED
    const int4* tiles,                          // number of tiles; then expert, first place, end of each
    const float* a_scales,                      // KIND 1: num_a_scales apart; 2: (in_size / 128, num_a_scales)
    const float* b_scales,                      // KIND 1: (experts, GATED ? 2 * out_size : out_size); 2: of blocks
    u8* out,                                    // (num_places, out_size)
    float* out_scales,                          // OUT 1: (out_size / 128, num_out_scales); 2: (1,)
    int k, int out_size, int in_size, int num_a_scales, int num_out_scales) {
    extern __shared__ u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 stages = shared_address(memory) + 1023 & ~1023;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            init_barrier(full + 8 * s, GATED ? 129 : 1);
            init_barrier(empty + 8 * s, 8 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
#else
    __syncthreads();
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    const int num_row_tiles = tiles[0].x, num_output_tiles = (out_size + OUTPUTS - 1) / OUTPUTS;
    const int num_works = (num_row_tiles + CLUSTER - 1) / CLUSTER * num_output_tiles, num_steps = (in_size + DEPTH - 1) / DEPTH;
    if (num_works == 0) return;
    const int lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CLUSTER, first_index = blockIdx.x / CLUSTER, num_clusters = gridDim.x / CLUSTER;
    int index = first_index, stage = 0;
    u32 parity = 0;

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (!GATED && threadIdx.x != 0) return;
        Work next = work_of(tiles, num_row_tiles, num_output_tiles, index, rank);
        for (; index < num_works; index += num_clusters) {
            const Work work = next;
            next = work_of(tiles, num_row_tiles, num_output_tiles, index + num_clusters, rank);
            // A thread fetches 16 bytes of every 16th row; a warp's instruction has 4 rows.
            const int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
            const u8* from[8];
            if (GATED) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int place = work.first + row + 16 * i;
                    from[i] = place < work.end ? a + (u64)(order[place] / k) * (in_size * SIZE) + chunk * 16 : nullptr;
                }
            }
            for (int step = 0; step < num_steps; step++) {
                const u32 target = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
                wait(empty + 8 * stage, parity ^ 1);
                if (threadIdx.x == 0) {
                    const u32 b = target + A_BYTES;
                    const int x = step * DEPTH;
                    expect_bytes(barrier, GATED ? B_BYTES : STAGE_BYTES);
                    if (!GATED) fetch(target, &a_map, barrier, x, work.first);
                    // Halves: of the weight rows, or gate and up.
                    for (int half = 0; half < 2; half++) {
                        if (work.is_shared && half != rank) continue;
                        const int first = GATED ? (2 * work.expert + half) * out_size + work.output
                                                : work.expert * out_size + work.output + half * (COLUMNS / 2);
                        const u32 to = b + half * (B_BYTES / 2);
                        if (work.is_shared) {
                            fetch_shared_weights(to, &b_map, barrier, x, first / 32);
                        } else {
                            fetch_weights(to, &b_map, barrier, x, first / 32);
                        }
                    }
                }
                if (GATED) {
                    const u32 to = target + row * STEP + ((chunk ^ row % 8) * 16);
                    // Zeros beyond the row.
                    const int size = (step * STEP + chunk * 16 < in_size * SIZE) * 16;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        if (from[i]) {
                            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                                         :: "r"(to + i * 16 * STEP), "l"(from[i] + (size ? step * STEP : 0)), "r"(size)
                                         : "memory");
                        }
                    }
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        // Shared memory must outlive the copies.
        if (GATED) asm volatile("cp.async.wait_all;" ::: "memory");
        end_together();
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = threadIdx.x / 128 - 1;
    const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    Work next = work_of(tiles, num_row_tiles, num_output_tiles, index, rank);
    for (; index < num_works; index += num_clusters) {
        const Work work = next;
        if (KIND == 0) next = work_of(tiles, num_row_tiles, num_output_tiles, index + num_clusters, rank);
        const bool is_used = work.first + group * 64 < work.end;
        const int places[2] = {work.first + row, work.first + row + 8};
        float sums[128];
#if KIND != 0
        int a_rows[2];
        for (int i = 0; i < 2; i++) {
            const int place = max(min(places[i], work.end - 1), 0);
            a_rows[i] = GATED ? order[place] / k : place;
        }
#endif
#if KIND == 2
        const int num_blocks = in_size / 128;
        const float* of_blocks[2];
        for (int half = 0; half < 2; half++) {
            const int block = GATED ? ((2 * work.expert + half) * out_size + work.output) / 128
                                    : (work.expert * out_size + min(work.output + half * 128, out_size - 128)) / 128;
            of_blocks[half] = b_scales + (u64)block * num_blocks;
        }
        for (int i = 0; i < 128; i++) sums[i] = 0;
        for (int step = 0; step < num_steps; step++) {
            float a_scale[2], b_scale[2];
            for (int i = 0; i < 2; i++) {
                a_scale[i] = a_scales[(u64)step * num_a_scales + a_rows[i]];
                b_scale[i] = of_blocks[i][step];
            }
            wait(full + 8 * stage, parity);
            if (is_used) {
                if (GATED) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                const u32 from = stages + stage * STAGE_BYTES;
                const u64 a_rows_of = descriptor(from + group * 64 * STEP), b_rows = descriptor(from + A_BYTES);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float part[64];
                    begin_multiplying();
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        multiply(part, a_rows_of + 2 * i, b_rows + half * (128 * STEP / 16) + 2 * i, i > 0);
                    }
                    commit();
                    await_products<0>();
                    const float low = a_scale[0] * b_scale[half], high = a_scale[1] * b_scale[half];
#pragma unroll
                    for (int i = 0; i < 64; i++) sums[half * 64 + i] += part[i] * (i & 2 ? high : low);
                }
            }
            if (lane < CLUSTER) arrive_at(empty + 8 * stage, lane);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
#else
        int last = 0;
        for (int step = 0; step < num_steps; step++) {
            wait(full + 8 * stage, parity);
            if (is_used) {
                if (GATED) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                const u32 from = stages + stage * STAGE_BYTES;
                const u64 a_rows_of = descriptor(from + group * 64 * STEP), b_rows = descriptor(from + A_BYTES);
                begin_multiplying();
#pragma unroll
                for (int i = 0; i < 4; i++) multiply(sums, a_rows_of + 2 * i, b_rows + 2 * i, step > 0 || i > 0);
                commit();
                await_products<1>();
            }
            if (step > 0 && lane < CLUSTER) arrive_at(empty + 8 * last, lane);
            last = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        await_products<0>();
        if (lane < CLUSTER) arrive_at(empty + 8 * last, lane);
#endif
        // There are too few registers to have it earlier.
        if (KIND != 0) next = work_of(tiles, num_row_tiles, num_output_tiles, index + num_clusters, rank);
        if (!is_used) continue;
#if KIND == 1
        const float* scales = b_scales + (u64)work.expert * out_size * (GATED ? 2 : 1);
        const float low = a_scales[a_rows[0] * num_a_scales], high = a_scales[a_rows[1] * num_a_scales];
#pragma unroll
        for (int j = 0; j < 32; j++) {
            const int column = work.output + column_of(GATED ? j % 16 : j, lane);
            float2 scale = make_float2(0, 0);
            if (column < out_size) scale = *(const float2*)(scales + (GATED && j >= 16 ? out_size : 0) + column);
            sums[4 * j] *= low * scale.x, sums[4 * j + 1] *= low * scale.y;
            sums[4 * j + 2] *= high * scale.x, sums[4 * j + 3] *= high * scale.y;
        }
#endif
        if (GATED) {
#pragma unroll
            for (int i = 0; i < 64; i++) sums[i] = __fdividef(sums[i], 1 + __expf(-sums[i])) * sums[64 + i];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int place = places[half];
            u8* to = out + (u64)place * out_size * (OUT == 0 ? 2 : 1);
#if OUT == 0
#pragma unroll
            for (int j = 0; j < OUTPUTS / 8; j += 4) {
                u32 v[4];
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] = pack(sums[4 * (j + i) + 2 * half], sums[4 * (j + i) + 2 * half + 1]);
                const int column = work.output + column_of(j, lane);
                if (place < work.end && column < out_size) {
                    *(uint4*)(to + column * 2) = make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
#else
            float scale;
            if (OUT == 1) {
                float amax = SMALLEST_AMAX;
#pragma unroll
                for (int i = 0; i < 64; i++) if ((i & 2) == 2 * half) amax = fmaxf(amax, fabsf(sums[i]));
                amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
                amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
                scale = amax / FP8_MAX;
                float* to_scale = out_scales + (u64)(work.output / 128) * num_out_scales + place;
                if (lane % 4 == 0 && place < work.end) *to_scale = scale;
            } else {
                scale = *out_scales;
            }
            const float inverse = 1 / scale;
#pragma unroll
            for (int j = 0; j < OUTPUTS / 8; j += 4) {
                u32 v[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* s = sums + 4 * (j + i) + 2 * half;
                    v[i] = pack_fp8(s[0] * inverse, s[1] * inverse);
                }
                const int column = work.output + column_of(j, lane);
                if (place < work.end && column < out_size) {
                    *(uint2*)(to + column) = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
                }
            }
#endif
        }
    }
    end_together();
}
