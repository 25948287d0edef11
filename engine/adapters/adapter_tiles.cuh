// Tiles of rows that share an adapter, and products of 16 by 8 by 16 numbers of a warp.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int ROWS = 16, RANKS = 16;

// Of earlier kernels, once. A grid of which no block waits could end before them, and kernels behind rely on its end.
struct Wait {
    bool is_over = false;

    __device__ __forceinline__ void operator()() {
        if (!is_over) asm volatile("griddepcontrol.wait;" ::: "memory");
        is_over = true;
    }
};

// Rows at two places of the order, -1 from the end on.
__device__ __forceinline__ void load_rows(int (&rows)[2], const int* order, int place, int end) {
    rows[0] = place < end ? order[place] : -1, rows[1] = place + 8 < end ? order[place + 8] : -1;
}

// Eight numbers of an adapter.
__device__ __forceinline__ uint4 load_constants(const u16* from, bool is_there) {
    return is_there ? __ldg((const uint4*)from) : make_uint4(0, 0, 0, 0);
}

// Eight numbers that an earlier kernel may have written.
__device__ __forceinline__ uint4 load_written(const u16* from, bool is_there) {
    return is_there ? __ldcg((const uint4*)from) : make_uint4(0, 0, 0, 0);
}

// sums += left * right: of bfloat16, left has 16 rows of 16, right 16 rows of 8. Lane 4 * g + q has rows g and g + 8 of
// left and of sums, and column g of right. It has columns 2 * q and 2 * q + 1 of sums.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
