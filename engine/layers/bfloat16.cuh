// Bit patterns of bfloat16.

struct __align__(16) Chunk {
    unsigned int v[4];  // 8 bfloat16
};

__device__ __forceinline__ float number(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }

__device__ __forceinline__ unsigned int pack(float first, float second) {
    unsigned int pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
