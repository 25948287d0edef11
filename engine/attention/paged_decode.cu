// Attention of one new token per sequence over pages, with what stands before it: normalises queries and keys, turns
// them, writes the new key and value into their page, and attends to all tokens so far.
//
// A block has one item (a stretch of one sequence) and one head of keys with its GROUP heads of queries; its warps share
// the stretch, 16 tokens at a time. Scores are mma.m16n8k16 with queries as the 16 rows (GROUP of them real) and tokens
// as the columns; their layout is the one that the second product wants for its first operand. Which dimension is which
// number inside an mma is free as long as both operands agree: threads take 16 bytes that lie side by side, which are 8
// numbers of bfloat16 or 16 of 8 bits. (Of values of 64 dimensions in 8 bits they take 8 bytes.) Numbers of 8 bits
// become float16 just before they are multiplied, because there is an instruction for two of them, and so do queries and
// weights; what they were divided by comes in with the scale of the scores and with the output.
//
// Of sequences with several items the last block to finish adds up the parts.
//
// The plan and the pages of earlier steps depend on no kernel before this one in the step, and a step begins with a
// kernel that waits for all before it: the first pages are asked for before this one waits for its inputs (programmatic
// dependent launch). What a kernel before it writes is not __restrict__: the compiler could read that too early.
//
// Compiled by NVRTC with these macros:
//   HEAD_DIM     64 or 128
//   GROUP        heads of queries for each of keys, at most 8
//   NUM_KV       heads of keys
//   PAGE_SIZE    tokens of a page
//   NORM         1: queries and keys are RMS-normalised, each head by itself
//   FP8          1: pages have 8 bits for a number (e4m3); 0: they have bfloat16
//   WARPS        in a block

#define HALF (HEAD_DIM / 2)
#define LANE_DIMS (HALF / 32)
#define TILE 16
#define NEGATIVE -1e30f
// Parts of a sequence that are added up together.
#define AT_ONCE 8

#include "bfloat16.cuh"

// What pages have; how many of that a thread loads at a time of a key and of a value; and how many such loads there are.
#if FP8
typedef unsigned char Stored;
#define KEY_WIDTH 16
#define VALUE_WIDTH (HEAD_DIM / 8)
#else
typedef unsigned short Stored;
#define KEY_WIDTH 8
#define VALUE_WIDTH 8
#endif
#define KEY_LOADS (HEAD_DIM / (4 * KEY_WIDTH))
#define VALUE_LOADS (HEAD_DIM / (8 * VALUE_WIDTH))

// The first of the 8 dimensions that are number `s` of those of one of the 4 threads that share a key.
__device__ __forceinline__ constexpr int key_dim(int part, int s) {
    return s * 8 / KEY_WIDTH * 4 * KEY_WIDTH + part * KEY_WIDTH + s * 8 % KEY_WIDTH;
}

// Likewise of the 8 threads that share a value.
__device__ __forceinline__ constexpr int value_dim(int group, int s) {
    return s * 8 / VALUE_WIDTH * 8 * VALUE_WIDTH + group * VALUE_WIDTH + s * 8 % VALUE_WIDTH;
}

#if FP8
#define OPERAND "f16"

// Two e4m3 numbers as float16, which is exact.
__device__ __forceinline__ unsigned int widen(unsigned short two) {
    unsigned int pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(two));
    return pair;
}

// Two numbers as operands; what is beyond the largest float16 becomes that.
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

// A number into a page: divided by its scale, at most the largest there is; NaN stays NaN.
__device__ __forceinline__ void store(Stored* p, float x, float inverse_scale) {
#if FP8
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x * inverse_scale));
    *p = pair & 0xffu;
#else
    *p = pack(x, 0.0f) & 0xffffu;
#endif
}

__device__ __forceinline__ Chunk load(const Stored* p) {
    Chunk c;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.v[0]), "=r"(c.v[1]), "=r"(c.v[2]), "=r"(c.v[3])
                 : "l"(p)
                 : "memory");
    return c;
}

__device__ __forceinline__ Chunk load_value(const Stored* p) {
#if FP8 && HEAD_DIM == 64
    // It is half a chunk.
    Chunk c = {};
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(c.v[0]), "=r"(c.v[1]) : "l"(p) : "memory");
    return c;
#else
    return load(p);
#endif
}

// Rows 8 to 15 of the first operand are zero.
__device__ __forceinline__ void multiply(float* sum, unsigned int a0, unsigned int a2, unsigned int b0,
                                         unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// One warp: a head, normalised and turned; each number is put(dimension, number).
template <class Put>
__device__ __forceinline__ void turn(const unsigned short* head, const unsigned short* norm_weight, float eps,
                                     const float* cos, const float* sin, int lane, Put put) {
    float a[LANE_DIMS], b[LANE_DIMS], scale = 1.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        a[i] = number(head[lane * LANE_DIMS + i]);
        b[i] = number(head[HALF + lane * LANE_DIMS + i]);
    }
#if NORM
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) square += a[i] * a[i] + b[i] * b[i];
#pragma unroll
    for (int mask = 16; mask; mask /= 2) square += __shfl_xor_sync(0xffffffffu, square, mask);
    scale = rsqrtf(square / HEAD_DIM + eps);
#endif
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int dim = lane * LANE_DIMS + i;
        float first = a[i], second = b[i];
#if NORM
        first *= scale * number(norm_weight[dim]);
        second *= scale * number(norm_weight[HALF + dim]);
#endif
        const float c = cos[dim], s = sin[dim];
        put(dim, first * c - second * s);
        put(HALF + dim, second * c + first * s);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) paged_decode(
    const unsigned short* qkv,                       // (num_rows, (GROUP + 2) * NUM_KV, HEAD_DIM)
    Stored* pool,                                    // (num_pages, num_layers, 2, PAGE_SIZE, NUM_KV, HEAD_DIM)
    const int* __restrict__ plan,                    // see DecodePlan
    const float* __restrict__ cos_table,             // (num_positions, HALF)
    const float* __restrict__ sin_table,             // likewise
    const unsigned short* __restrict__ norm_weight,  // (2, HEAD_DIM) if NORM
    unsigned short* out,                             // (num_rows, GROUP * NUM_KV, HEAD_DIM)
    float* parts,                                    // (max_items, NUM_KV, GROUP, HEAD_DIM)
    float* part_scales,                              // (max_items, NUM_KV, GROUP, 2): the largest score, and the sum
    unsigned int* arrivals,                          // (max_rows, NUM_KV), zero between launches
    int page_stride, int layer_offset, int num_rows, int max_items, float eps,
    float score_scale,                               // that of quantized keys is part of it
    float value_scale, float inverse_key_scale, float inverse_value_scale) {
    asm volatile("griddepcontrol.launch_dependents;");
    __shared__ __align__(16) unsigned short queries[8][HEAD_DIM];
    __shared__ float warp_max[WARPS][8], warp_sum[WARPS][8];
    __shared__ float warp_out[WARPS][GROUP][HEAD_DIM];
    __shared__ bool is_last;

    // Heads of one item run side by side, because their keys and values lie side by side in memory.
    const int item = blockIdx.y, kv_head = blockIdx.x;
    if (item >= plan[0]) return;
    // Its row, the tokens from begin to end of it, all the row's tokens, where its page table is among the tables, which
    // of the row's items it is, and of how many.
    const int4 *items = reinterpret_cast<const int4*>(plan + 4), what = items[item * 2], which = items[item * 2 + 1];
    const int row = what.x, begin = what.y, end = what.z, length = what.w;
    const int number_in_row = which.y, num_parts = which.z;
    const int* table = plan + 4 + max_items * 8 + num_rows + which.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
    const int half_page = PAGE_SIZE * NUM_KV * HEAD_DIM;

    // Where a token's key is; its value lies half a page further.
    auto place = [&](int token) {
        return pool + (long long)table[token / PAGE_SIZE] * page_stride + layer_offset +
               (token % PAGE_SIZE * NUM_KV + kv_head) * HEAD_DIM;
    };

    Chunk keys[2][KEY_LOADS], values[4][VALUE_LOADS];
    // A tile may have tokens beyond the end: zeros stand for whatever their slots hold.
    auto ask_keys = [&](int tile) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int token = tile + j * 8 + group;
            const bool exists = token < end;
            const Stored* key = exists ? place(token) + part * KEY_WIDTH : nullptr;
#pragma unroll
            for (int s = 0; s < KEY_LOADS; s++) keys[j][s] = exists ? load(key + s * 4 * KEY_WIDTH) : Chunk{};
        }
    };
    auto ask_values = [&](int tile) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int token = tile + part * 2 + j % 2 + j / 2 * 8;
            const bool exists = token < end;
            const Stored* value = exists ? place(token) + half_page + group * VALUE_WIDTH : nullptr;
#pragma unroll
            for (int s = 0; s < VALUE_LOADS; s++)
                values[j][s] = exists ? load_value(value + s * 8 * VALUE_WIDTH) : Chunk{};
        }
    };
    // Of the 8 dimensions `s` of key j those two that are pair i.
    auto key_pair = [&](int j, int s, int i) {
#if FP8
        return widen(keys[j][s / 2].v[s % 2 * 2 + i / 2] >> i % 2 * 16);
#else
        return keys[j][s].v[i];
#endif
    };
    // Dimension i of the 8 dimensions `s` of the values of tokens j and j + 1, which lie side by side.
    auto value_pair = [&](int j, int s, int i) {
#if FP8
        return widen(__byte_perm(values[j][0].v[s * 2 + i / 4], values[j + 1][0].v[s * 2 + i / 4], i % 4 * 0x11 + 0x40));
#else
        return __byte_perm(values[j][s].v[i / 2], values[j + 1][s].v[i / 2], i % 2 ? 0x7632 : 0x5410);
#endif
    };

    int tile = begin + warp * TILE;
    // The new token's page is not written yet.
    const bool is_early = tile + TILE < length;
    if (is_early) {
        ask_keys(tile);
        ask_values(tile);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const float* cos = cos_table + (long long)(length - 1) * HALF;
    const float* sin = sin_table + (long long)(length - 1) * HALF;
    const unsigned short* heads = qkv + (long long)row * (GROUP + 2) * NUM_KV * HEAD_DIM;
    for (int g = warp; g < 8; g += WARPS) {
        if (g < GROUP) {
            turn(heads + (kv_head * GROUP + g) * HEAD_DIM, norm_weight, eps, cos, sin, lane,
                 [&](int dim, float x) { queries[g][dim] = pack_operands(x, 0.0f) & 0xffffu; });
        } else {
            for (int i = lane; i < HEAD_DIM; i += 32) queries[g][i] = 0;
        }
    }
    if (end == length && warp == WARPS - 1) {
        Stored* key = place(length - 1);
        turn(heads + (GROUP * NUM_KV + kv_head) * HEAD_DIM, norm_weight + HEAD_DIM, eps, cos, sin, lane,
             [&](int dim, float x) { store(key + dim, x, inverse_key_scale); });
        const unsigned short* value = heads + ((GROUP + 1) * NUM_KV + kv_head) * HEAD_DIM;
        for (int i = lane; i < HEAD_DIM; i += 32) store(key + half_page + i, number(value[i]), inverse_value_scale);
    }
    __syncthreads();

    Chunk query[HEAD_DIM / 32];
#pragma unroll
    for (int s = 0; s < HEAD_DIM / 32; s++)
        query[s] = *reinterpret_cast<const Chunk*>(&queries[group][key_dim(part, s)]);
    if (!is_early && tile < end) {
        ask_keys(tile);
        ask_values(tile);
    }

    // Of head `group`: scores are in units of log 2.
    float largest = NEGATIVE, sum = 0.0f;
    float outputs[HEAD_DIM / 64][8][4] = {};
    for (; tile < end; tile += WARPS * TILE) {
        const int next = tile + WARPS * TILE;
        float scores[2][4] = {};
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 32; s++) {
                multiply(scores[j], query[s].v[0], query[s].v[1], key_pair(j, s, 0), key_pair(j, s, 1));
                multiply(scores[j], query[s].v[2], query[s].v[3], key_pair(j, s, 2), key_pair(j, s, 3));
            }
        if (next < end) ask_keys(next);
        // This thread's tokens: part * 2, part * 2 + 1, and 8 further on.
        float highest = NEGATIVE;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool exists = tile + j * 8 + part * 2 + i < end;
                scores[j][i] = exists ? scores[j][i] * score_scale : NEGATIVE;
                highest = fmaxf(highest, scores[j][i]);
            }
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        highest = fmaxf(highest, largest);
        const float shrink = exp2(largest - highest);
        largest = highest;
        float weights[2][2], added = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                weights[j][i] = exp2(scores[j][i] - largest);
                added += weights[j][i];
            }
        sum = sum * shrink + added;
        const unsigned int a0 = pack_operands(weights[0][0], weights[0][1]);
        const unsigned int a2 = pack_operands(weights[1][0], weights[1][1]);
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 64; s++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float* output = outputs[s][i];
                output[0] *= shrink;
                output[1] *= shrink;
                multiply(output, a0, a2, value_pair(0, s, i), value_pair(2, s, i));
            }
        if (next < end) ask_values(next);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);

    if (part == 0) {
        warp_max[warp][group] = largest;
        warp_sum[warp][group] = sum;
    }
    if (group < GROUP) {
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 64; s++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                warp_out[warp][group][value_dim(part * 2, s) + i] = outputs[s][i][0];
                warp_out[warp][group][value_dim(part * 2 + 1, s) + i] = outputs[s][i][1];
            }
    }
    __syncthreads();

    const long long first_head = (long long)item * NUM_KV + kv_head;
    unsigned short* target = out + ((long long)row * NUM_KV + kv_head) * GROUP * HEAD_DIM;
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += WARPS * 32) {
        const int g = i / HEAD_DIM, dim = i % HEAD_DIM;
        float top = NEGATIVE, total = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_max[w][g]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float share = exp2(warp_max[w][g] - top);
            total += warp_sum[w][g] * share;
            value += warp_out[w][g][dim] * share;
        }
        if (num_parts == 1) {
            target[i] = pack(value / total * value_scale, 0.0f) & 0xffffu;
        } else {
            parts[first_head * GROUP * HEAD_DIM + i] = value;
            if (dim == 0) {
                part_scales[(first_head * GROUP + g) * 2] = top;
                part_scales[(first_head * GROUP + g) * 2 + 1] = total;
            }
        }
    }
    if (num_parts == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int* arrived = arrivals + row * NUM_KV + kv_head;
        is_last = atomicAdd(arrived, 1) == num_parts - 1;
        if (is_last) *arrived = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const long long first_item = item - number_in_row;
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += WARPS * 32) {
        const int g = i / HEAD_DIM;
        float top = NEGATIVE, total = 0.0f, value = 0.0f;
        for (int first = 0; first < num_parts; first += AT_ONCE) {
            // All asked for before any is used.
            float part_max[AT_ONCE], part_sum[AT_ONCE], part_value[AT_ONCE];
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) {
                const bool exists = first + p < num_parts;
                const long long head = ((first_item + first + p) * NUM_KV + kv_head) * GROUP + g;
                part_max[p] = exists ? __ldcg(part_scales + head * 2) : NEGATIVE;
                part_sum[p] = exists ? __ldcg(part_scales + head * 2 + 1) : 0.0f;
                part_value[p] = exists ? __ldcg(parts + head * HEAD_DIM + i % HEAD_DIM) : 0.0f;
            }
            float highest = top;
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) highest = fmaxf(highest, part_max[p]);
            const float keep = exp2(top - highest);
            total *= keep;
            value *= keep;
            top = highest;
#pragma unroll
            for (int p = 0; p < AT_ONCE; p++) {
                const float share = exp2(part_max[p] - top);
                total += part_sum[p] * share;
                value += part_value[p] * share;
            }
        }
        target[i] = pack(value / total * value_scale, 0.0f) & 0xffffu;
    }
}
