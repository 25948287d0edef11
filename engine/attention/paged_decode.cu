// Decode attention: one new token per sequence over pages. Normalizes and rotates queries and keys, writes the new
// key and value into their page, and attends to all tokens so far.
//
// A block computes one key head with its GROUP query heads, for several items in turn. An item is a range of one
// sequence's tokens. The warps of a block share the item, one tile of 16 tokens at a time. The last block of a
// sequence to finish adds up the parts of all its items.
//
// Scores are mma.m16n8k16 with tokens as the 16 rows and queries as the 8 columns (GROUP of them real). Outputs are
// mma with dimensions as the rows. Between them, the weights (8 tokens by 8 heads) are transposed in registers.
// Dimensions may map to mma indices in any order as long as both operands agree, so a thread loads 16 contiguous
// bytes (8 bytes for values of 64 dimensions in FP8). FP8 numbers become float16 just before the mma, as do queries
// and weights. The scales of keys and values apply to scores and output.
//
// The plan, the pages of earlier steps and the constants do not depend on earlier kernels of this step. So a block
// requests its first pages before it waits for its inputs (programmatic dependent launch). Only the newest token's key
// and value are new: a block attends to its own copy in shared memory. Buffers that earlier kernels write are not
// __restrict__: the compiler could read them too early.
//
// Macros for NVRTC:
//   HEAD_DIM     64 or 128
//   GROUP        query heads per key head, at most 8
//   NUM_KV       key heads
//   PAGE_SIZE    tokens per page
//   NORM         1: RMS-normalize each head of queries and keys
//   FP8          1: pages hold e4m3; 0: bfloat16
//   WARPS        warps per block
//   BLOCKS       blocks per multiprocessor

#define HALF (HEAD_DIM / 2)
#define LANE_DIMS (HALF / 32)
// Heads of an item that a warp prepares: the queries, the newest key and the newest value.
#define WARP_HEADS ((GROUP + 2 + WARPS - 1) / WARPS)
// Outputs are added up four at a time.
#define HEAD_QUADS (HEAD_DIM / 4)
#define TILE 16
#define ITEM_SIZE 8
#define NEGATIVE -1e30f
// Parts that a thread reads together, in the registers that the kernel has anyway.
#define AT_ONCE (BLOCKS == 1 ? 10 : 8)

#include "bfloat16.cuh"

#if FP8
typedef unsigned char Stored;
#define KEY_WIDTH 16
#define VALUE_WIDTH (HEAD_DIM / 8)
// Fetch a key into the L2 cache with its neighbor's: another block reads the neighbor at about the same time.
#define NEIGHBOURS ".L2::256B"
#else
typedef unsigned short Stored;
#define KEY_WIDTH 8
#define VALUE_WIDTH 8
#define NEIGHBOURS ""
#endif
#define KEY_LOADS (HEAD_DIM / (4 * KEY_WIDTH))
#define VALUE_LOADS (HEAD_DIM / (8 * VALUE_WIDTH))

// First dimension of chunk `s` (8 dimensions) for one of the 4 threads that share a key.
__device__ __forceinline__ constexpr int key_dim(int part, int s) {
    return s * 8 / KEY_WIDTH * 4 * KEY_WIDTH + part * KEY_WIDTH + s * 8 % KEY_WIDTH;
}

// Likewise, 8 threads share a value.
__device__ __forceinline__ constexpr int value_dim(int group, int s) {
    return s * 8 / VALUE_WIDTH * 8 * VALUE_WIDTH + group * VALUE_WIDTH + s * 8 % VALUE_WIDTH;
}

#if FP8
#define OPERAND "f16"

// Converts two e4m3 numbers to float16, exactly.
__device__ __forceinline__ unsigned int widen(unsigned short two) {
    unsigned int pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
    return pair;
}

// Packs two numbers as operands, saturating at the largest float16.
__device__ __forceinline__ float within(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

__device__ __forceinline__ unsigned int pack_operands(float low, float high) {
    unsigned int pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(within(high)), "f"(within(low)));
    return pair;
}
#else
#define OPERAND "bf16"

__device__ __forceinline__ unsigned int pack_operands(float low, float high) { return pack(low, high); }
#endif

// Divides by the scale and rounds as pages do, saturating; NaN stays NaN.
__device__ __forceinline__ Stored stored(float x, float inverse_scale) {
#if FP8
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x * inverse_scale));
    return pair & 0xffu;
#else
    return pack(x, 0.0f) & 0xffffu;
#endif
}

__device__ __forceinline__ Chunk load(const Stored* p) {
    Chunk c;
    asm volatile("ld.global" NEIGHBOURS ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.v[0]), "=r"(c.v[1]), "=r"(c.v[2]), "=r"(c.v[3])
                 : "l"(p)
                 : "memory");
    return c;
}

__device__ __forceinline__ Chunk load_value(const Stored* p) {
#if FP8 && HEAD_DIM == 64
    Chunk c = {};
    asm volatile("ld.global" NEIGHBOURS ".v2.u32 {%0, %1}, [%2];" : "=r"(c.v[0]), "=r"(c.v[1]) : "l"(p) : "memory");
    return c;
#else
    return load(p);
#endif
}

// Likewise from shared memory.
__device__ __forceinline__ Chunk load_own(const Stored* p) { return *reinterpret_cast<const Chunk*>(p); }

__device__ __forceinline__ Chunk load_own_value(const Stored* p) {
#if FP8 && HEAD_DIM == 64
    const uint2 two = *reinterpret_cast<const uint2*>(p);
    return Chunk{two.x, two.y};
#else
    return load_own(p);
#endif
}

__device__ __forceinline__ void multiply(float* sum, unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                                         unsigned int b0, unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes a warp's 8 by 8 numbers; each thread holds two adjacent numbers of a row.
__device__ __forceinline__ unsigned int transpose(unsigned int pair) {
    unsigned int transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A lane's dimensions in one half of a head.
struct __align__(2 * LANE_DIMS) Lane {
    unsigned short x[LANE_DIMS];
};

struct Head {
    Lane low, high;
};

__device__ __forceinline__ Head head_at(const unsigned short* head, int lane) {
    const Lane* lanes = reinterpret_cast<const Lane*>(head);
    return Head{lanes[lane], lanes[32 + lane]};
}

struct Turn {
    float cos[LANE_DIMS], sin[LANE_DIMS];
};

// One warp normalizes and rotates a head, and calls put(dimension, number).
template <class Put>
__device__ __forceinline__ void turn(const Head& head, const unsigned short* norm, float eps, const Turn& angle, int lane, Put put) {
    float scale = 1.0f;
#if NORM
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const float a = number(head.low.x[i]), b = number(head.high.x[i]);
        square += a * a + b * b;
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) square += __shfl_xor_sync(0xffffffffu, square, mask);
    scale = rsqrtf(square / HEAD_DIM + eps);
    const Head weight = head_at(norm, lane);
#endif
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int dim = lane * LANE_DIMS + i;
        float first = number(head.low.x[i]), second = number(head.high.x[i]);
#if NORM
        first *= scale * number(weight.low.x[i]);
        second *= scale * number(weight.high.x[i]);
#endif
        put(dim, first * angle.cos[i] - second * angle.sin[i]);
        put(HALF + dim, second * angle.cos[i] + first * angle.sin[i]);
    }
}

__device__ __forceinline__ float4 add(float4 a, float4 b, float share) {
    return make_float4(a.x + b.x * share, a.y + b.y * share, a.z + b.z * share, a.w + b.w * share);
}

// Writes four outputs.
__device__ __forceinline__ void put_out(unsigned short* target, float4 value, float total, float value_scale) {
    *reinterpret_cast<uint2*>(target) =
        make_uint2(pack(value.x / total * value_scale, value.y / total * value_scale),
                   pack(value.z / total * value_scale, value.w / total * value_scale));
}

// One block adds up the parts of a row's key head. Args: first_item: the row's first.
__device__ __forceinline__ void add_up(const float* parts, const float* part_scales, long long first_item, int num_parts,
                                       int kv_head, float value_scale, unsigned short* target) {
    for (int i = threadIdx.x; i < GROUP * HEAD_QUADS; i += WARPS * 32) {
        float top = NEGATIVE, total = 0.0f;
        float4 value = {};
        for (int first = 0; first < num_parts; first += AT_ONCE) {
            float2 scales[AT_ONCE];
            float4 values[AT_ONCE];
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) {
                const bool exists = first + p < num_parts;
                const long long head = ((first_item + first + p) * NUM_KV + kv_head) * GROUP + i / HEAD_QUADS;
                scales[p] = exists ? __ldcg(reinterpret_cast<const float2*>(part_scales) + head) : make_float2(NEGATIVE, 0.0f);
                values[p] = exists ? __ldcg(reinterpret_cast<const float4*>(parts) + head * HEAD_QUADS + i % HEAD_QUADS)
                                   : float4{};
            }
            float highest = top;
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) highest = fmaxf(highest, scales[p].x);
            const float keep = exp2(top - highest);
            total *= keep;
            value = add(float4{}, value, keep);
            top = highest;
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) {
                const float share = exp2(scales[p].x - top);
                total += scales[p].y * share;
                value = add(value, values[p], share);
            }
        }
        put_out(target + i * 4, value, total, value_scale);
    }
}

struct Item {
    int row, begin, end;
    int length;         // tokens of the row
    int table;          // start of the row's page table
    int number, parts;  // index among the row's items, and their number
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) paged_decode(
    const unsigned short* qkv,                       // (num_rows, (GROUP + 2) * NUM_KV, HEAD_DIM)
    Stored* pool,                                    // (num_pages, num_layers, 2, PAGE_SIZE, NUM_KV, HEAD_DIM)
    const int* __restrict__ plan,                    // see DecodePlan
    const float* __restrict__ cos_table,             // (num_positions, HALF)
    const float* __restrict__ sin_table,             // (num_positions, HALF)
    const unsigned short* __restrict__ norm_weight,  // (2, HEAD_DIM) if NORM
    unsigned short* out,                             // (num_rows, GROUP * NUM_KV, HEAD_DIM)
    float* parts,                                    // (max_items, NUM_KV, GROUP, HEAD_DIM)
    float* part_scales,                              // (max_items, NUM_KV, GROUP, 2): largest score, sum of weights
    unsigned int* arrivals,                          // (max_rows, NUM_KV), zero between launches
    int page_stride, int layer_offset, int num_rows, int max_items, float eps,
    float score_scale,                               // includes the keys' scale
    float value_scale, float inverse_key_scale, float inverse_value_scale) {
    asm volatile("griddepcontrol.launch_dependents;");
    __shared__ __align__(16) unsigned short queries[8][HEAD_DIM];
    __shared__ __align__(16) Stored newest[2][HEAD_DIM];  // key and value
    __shared__ __align__(16) unsigned short norms[2][HEAD_DIM];
    __shared__ float warp_max[WARPS][8], warp_sum[WARPS][8];
    __shared__ __align__(16) float warp_out[WARPS][GROUP][HEAD_DIM];
    __shared__ bool is_last;

    // Heads of an item run side by side, because their keys and values are adjacent in memory.
    const int block = blockIdx.y, kv_head = blockIdx.x;
    const int* first_items = plan + 4 + max_items * ITEM_SIZE;
    // Read together: one latency.
    const int num_blocks = plan[0];
    int index = first_items[block];
    const int end_index = first_items[block + 1];
    if (block >= num_blocks) return;
    const int* tables = first_items + (gridDim.y + 4) / 4 * 4 + num_rows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    const int half_page = PAGE_SIZE * NUM_KV * HEAD_DIM;

    auto item_at = [&](int index) {
        const int4* numbers = reinterpret_cast<const int4*>(plan + 4 + index * ITEM_SIZE);
        const int4 what = numbers[0], which = numbers[1];
        return Item{what.x, what.y, what.z, what.w, which.x, which.y, which.z};
    };
    // Address of a token's key; its value is half a page further.
    auto place = [&](const Item& item, int token) {
        return pool + (long long)tables[item.table + token / PAGE_SIZE] * page_stride + layer_offset +
               (token % PAGE_SIZE * NUM_KV + kv_head) * HEAD_DIM;
    };
    // If pages hold whole tiles, one table lookup per tile is enough.
    auto place_of = [&](const Item& item, int tile) {
        return PAGE_SIZE % TILE == 0 && tile < item.end ? static_cast<const Stored*>(place(item, tile)) : nullptr;
    };
    auto place_in = [&](const Item& item, const Stored* first, int tile, int i) {
        return PAGE_SIZE % TILE == 0 ? first + i * NUM_KV * HEAD_DIM : place(item, tile + i);
    };

    Chunk keys[2][KEY_LOADS], values[4][VALUE_LOADS];
    // Tokens beyond the item's end, and the newest, read as zeros.
    auto ask_keys = [&](const Item& item, const Stored* first, int tile) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = j * 8 + group;
            const bool exists = tile + i < min(item.end, item.length - 1);
            const Stored* key = exists ? place_in(item, first, tile, i) + part * KEY_WIDTH : nullptr;
#pragma unroll
            for (int s = 0; s < KEY_LOADS; s++) keys[j][s] = exists ? load(key + s * 4 * KEY_WIDTH) : Chunk{};
        }
    };
    auto ask_values = [&](const Item& item, const Stored* first, int tile) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = part * 2 + j % 2 + j / 2 * 8;
            const bool exists = tile + i < min(item.end, item.length - 1);
            const Stored* value = exists ? place_in(item, first, tile, i) + half_page + group * VALUE_WIDTH : nullptr;
#pragma unroll
            for (int s = 0; s < VALUE_LOADS; s++) values[j][s] = exists ? load_value(value + s * 8 * VALUE_WIDTH) : Chunk{};
        }
    };
    // Pair i of chunk `s` of key j.
    auto key_pair = [&](int j, int s, int i) {
#if FP8
        return widen(keys[j][s / 2].v[s % 2 * 2 + i / 2] >> i % 2 * 16);
#else
        return keys[j][s].v[i];
#endif
    };
    // Dimension i of chunk `s` of the values of tokens j and j + 1, as a pair.
    auto value_pair = [&](int j, int s, int i) {
        const Chunk *first = values[j], *second = values[j + 1];
#if FP8
        return widen(__byte_perm(first[0].v[s * 2 + i / 4], second[0].v[s * 2 + i / 4], i % 4 * 0x11 + 0x40));
#else
        return __byte_perm(first[s].v[i / 2], second[s].v[i / 2], i % 2 ? 0x7632 : 0x5410);
#endif
    };

    // The newest token is in the row's last item, in the last tile.
    auto has_newest = [&](const Item& item) { return item.end == item.length; };
    auto is_newest = [&](const Item& item, int tile) { return tile + TILE >= item.length; };

    Item item;
    int tile;
    Turn angle;
    auto begin = [&](int index) {
        item = item_at(index);
        tile = item.begin + warp * TILE;
        const Stored* first = place_of(item, tile);
        ask_keys(item, first, tile);
        ask_values(item, first, tile);
#pragma unroll
        for (int i = 0; i < LANE_DIMS; i++) {
            const long long place = (long long)(item.length - 1) * HALF + lane * LANE_DIMS + i;
            angle.cos[i] = cos_table[place];
            angle.sin[i] = sin_table[place];
        }
    };
    Head heads[WARP_HEADS];
    auto ask_heads = [&] {
        const unsigned short* row = qkv + (long long)item.row * (GROUP + 2) * NUM_KV * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < WARP_HEADS; n++) {
            const int h = warp + n * WARPS;
            if (h < (has_newest(item) ? GROUP + 2 : GROUP))
                heads[n] = head_at(row + (h < GROUP ? kv_head * GROUP + h : h * NUM_KV + kv_head) * HEAD_DIM, lane);
        }
    };

    begin(index);
#if NORM
    for (int i = threadIdx.x; i < 2 * HEAD_DIM; i += WARPS * 32) norms[i / HEAD_DIM][i % HEAD_DIM] = norm_weight[i];
    __syncthreads();
#endif
    for (int g = GROUP + warp; g < 8; g += WARPS)
        for (int i = lane; i < HEAD_DIM; i += 32) queries[g][i] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    ask_heads();

    while (true) {
#pragma unroll
        for (int n = 0; n < WARP_HEADS; n++) {
            const int h = warp + n * WARPS;
            if (h < GROUP) {
                turn(heads[n], norms[0], eps, angle, lane,
                     [&](int dim, float x) { queries[h][dim] = pack_operands(x, 0.0f) & 0xffffu; });
            } else if (has_newest(item) && h == GROUP) {
                turn(heads[n], norms[1], eps, angle, lane,
                     [&](int dim, float x) { newest[0][dim] = stored(x, inverse_key_scale); });
            } else if (has_newest(item) && h == GROUP + 1) {
#pragma unroll
                for (int i = 0; i < LANE_DIMS; i++) {
                    newest[1][lane * LANE_DIMS + i] = stored(number(heads[n].low.x[i]), inverse_value_scale);
                    newest[1][HALF + lane * LANE_DIMS + i] = stored(number(heads[n].high.x[i]), inverse_value_scale);
                }
            }
        }
        __syncthreads();
        if (has_newest(item) && warp < 2) {
            Stored* slot = place(item, item.length - 1) + warp * half_page;
            for (int i = lane; i < (int)(HEAD_DIM * sizeof(Stored) / sizeof(int2)); i += 32)
                reinterpret_cast<int2*>(slot)[i] = reinterpret_cast<const int2*>(newest[warp])[i];
        }

        Chunk query[HEAD_DIM / 32];
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 32; s++)
            query[s] = *reinterpret_cast<const Chunk*>(&queries[group][key_dim(part, s)]);

        // This thread's heads are part * 2 and part * 2 + 1. Scores are base 2.
        float largest[2] = {NEGATIVE, NEGATIVE}, sum[2] = {};
        float outputs[HEAD_DIM / 64][4][4] = {};
        for (; tile < item.end; tile += WARPS * TILE) {
            const int next = tile + WARPS * TILE;
            const Stored* first = place_of(item, next);
            if (is_newest(item, tile)) {
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (tile + j * 8 + group == item.length - 1)
#pragma unroll
                        for (int s = 0; s < KEY_LOADS; s++) keys[j][s] = load_own(newest[0] + (part + s * 4) * KEY_WIDTH);
            }
            // Two tokens (group and group + 8) by two heads.
            float scores[4] = {};
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 32; s++)
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    multiply(scores, key_pair(0, s, i), key_pair(1, s, i), key_pair(0, s, i + 1), key_pair(1, s, i + 1),
                             query[s].v[i], query[s].v[i + 1]);
            if (next < item.end) ask_keys(item, first, next);
            float highest[2] = {NEGATIVE, NEGATIVE};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool exists = tile + i / 2 * 8 + group < item.end;
                scores[i] = exists ? scores[i] * score_scale : NEGATIVE;
                highest[i % 2] = fmaxf(highest[i % 2], scores[i]);
            }
            float shrink[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2)
                    highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffffu, highest[h], mask));
                highest[h] = fmaxf(highest[h], largest[h]);
                shrink[h] = exp2(largest[h] - highest[h]);
                largest[h] = highest[h];
                sum[h] *= shrink[h];
            }
            if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
                for (int s = 0; s < HEAD_DIM / 64; s++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int j = 0; j < 4; j++) outputs[s][i][j] *= shrink[j % 2];
            }
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                weights[i] = exp2(scores[i] - largest[i % 2]);
                sum[i % 2] += weights[i];
            }
            const unsigned int b0 = transpose(pack_operands(weights[0], weights[1]));
            const unsigned int b1 = transpose(pack_operands(weights[2], weights[3]));
            if (is_newest(item, tile)) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (tile + part * 2 + j % 2 + j / 2 * 8 == item.length - 1)
#pragma unroll
                        for (int s = 0; s < VALUE_LOADS; s++)
                            values[j][s] = load_own_value(newest[1] + (group + s * 8) * VALUE_WIDTH);
            }
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 64; s++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    multiply(outputs[s][i], value_pair(0, s, i * 2), value_pair(0, s, i * 2 + 1),
                             value_pair(2, s, i * 2), value_pair(2, s, i * 2 + 1), b0, b1);
            if (next < item.end) ask_values(item, first, next);
        }

        const Item done = item;
        const int done_index = index++;
        const bool is_over = index == end_index;
        if (!is_over) {
            begin(index);
            ask_heads();
        }

#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], mask);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int g = part * 2 + h;
            if (group == 0) {
                warp_max[warp][g] = largest[h];
                warp_sum[warp][g] = sum[h];
            }
            if (g < GROUP) {
#pragma unroll
                for (int s = 0; s < HEAD_DIM / 64; s++)
#pragma unroll
                    for (int i = 0; i < 4; i += 2)
                        *reinterpret_cast<float4*>(&warp_out[warp][g][value_dim(group, s) + i * 2]) =
                            make_float4(outputs[s][i][h], outputs[s][i][h + 2], outputs[s][i + 1][h], outputs[s][i + 1][h + 2]);
            }
        }
        __syncthreads();

        const long long first_head = (long long)done_index * NUM_KV + kv_head;
        unsigned short* target = out + ((long long)done.row * NUM_KV + kv_head) * GROUP * HEAD_DIM;
        for (int i = threadIdx.x; i < GROUP * HEAD_QUADS; i += WARPS * 32) {
            const int g = i / HEAD_QUADS, quad = i % HEAD_QUADS;
            float top = NEGATIVE, total = 0.0f;
            float4 value = {};
#pragma unroll
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_max[w][g]);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float share = exp2(warp_max[w][g] - top);
                total += warp_sum[w][g] * share;
                value = add(value, reinterpret_cast<const float4*>(warp_out[w][g])[quad], share);
            }
            if (done.parts == 1) {
                put_out(target + i * 4, value, total, value_scale);
            } else {
                reinterpret_cast<float4*>(parts)[first_head * GROUP * HEAD_QUADS + i] = value;
                if (quad == 0) reinterpret_cast<float2*>(part_scales)[first_head * GROUP + g] = make_float2(top, total);
            }
        }
        if (done.parts > 1) {
            __syncthreads();
            if (threadIdx.x == 0) {
                unsigned int* arrived = arrivals + done.row * NUM_KV + kv_head;
                // With the barriers, one thread orders the accesses of its block. Nobody waits for the zero.
                unsigned int before;
                asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
                is_last = before == done.parts - 1;
                if (is_last) *arrived = 0;
            }
            __syncthreads();
            if (is_last) add_up(parts, part_scales, done_index - done.number, done.parts, kv_head, value_scale, target);
        }
        if (is_over) return;
    }
}
