// FP8 numbers (float8_e4m3fn) as pairs of bfloat16, 2^-120 times as large by the different exponent bias. Other factors
// are made 2^60 times as large, and sums corrected at the end.

// Unpacks four FP8 numbers: numbers 0 and 2, and numbers 1 and 3.
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
