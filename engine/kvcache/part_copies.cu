// Copies some heads of pages: equal pieces at equal distances, from one page format to another.
//
// A bounded number of blocks walks through all words, so that a copy leaves most multiprocessors to the model. Each
// thread loads several words before it stores them, because a load takes long and a store to a peer's memory even longer.
//
// Macros for NVRTC:
//   WORD_BYTES   16, 8, 4, 2 or 1: divides all lengths and distances
//   THREADS      threads per block
//   BATCH        words in flight per thread

#if WORD_BYTES == 16
typedef uint4 Word;
#elif WORD_BYTES == 8
typedef uint2 Word;
#elif WORD_BYTES == 4
typedef unsigned int Word;
#elif WORD_BYTES == 2
typedef unsigned short Word;
#else
typedef unsigned char Word;
#endif

extern "C" __global__ void __launch_bounds__(THREADS) part_copies(
    const long long* pages,      // (num_pages, 2): addresses of the first destination and source word of each page
    int num_pages,
    int num_pieces,              // of a page
    int piece_words,
    int dst_stride,              // in words
    int src_stride) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // The caller sees to it that these do not overflow.
    const unsigned int page_words = num_pieces * piece_words, num_words = num_pages * page_words;
    const unsigned int step = gridDim.x * THREADS;
    for (unsigned int first = blockIdx.x * THREADS + threadIdx.x; first < num_words; first += BATCH * step) {
        Word words[BATCH];
        Word* destinations[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const unsigned int i = first + b * step;
            if (i < num_words) {
                const unsigned int page = i / page_words, rest = i % page_words;
                const unsigned int piece = rest / piece_words, word = rest % piece_words;
                destinations[b] = reinterpret_cast<Word*>(pages[2 * page]) + (long long)piece * dst_stride + word;
                words[b] = reinterpret_cast<const Word*>(pages[2 * page + 1])[(long long)piece * src_stride + word];
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            if (first + b * step < num_words) *destinations[b] = words[b];
        }
    }
}
