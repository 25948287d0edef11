// Rows that some ranks send, and some receive: columns of a matrix to the leader, or the leader's numbers to all.
//
// Macros for NVRTC, beside round.cuh's:
//   UNIT_BYTES   16, 8, 4 or 2: divides all widths

#include "round.cuh"

#if UNIT_BYTES == 16
typedef uint4 Unit;
#elif UNIT_BYTES == 8
typedef uint2 Unit;
#elif UNIT_BYTES == 4
typedef unsigned int Unit;
#else
typedef unsigned short Unit;
#endif

__device__ __forceinline__ Unit fetch(const Unit* from) {
#if UNIT_BYTES == 16
    return peek(from);
#elif UNIT_BYTES == 8
    Unit v;
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
#elif UNIT_BYTES == 4
    Unit v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
#else
    Unit v;
    asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
    return v;
#endif
}

// Widths are in units.
extern "C" __global__ void __launch_bounds__(THREADS) exchange(
    MEMBERS, Flag* state, Flag* aborted,
    const Unit* part,  // (num_rows, part_width): what this rank sends; null: nothing
    Unit* whole,       // (num_rows, num_columns): what it receives; null: nothing
    int num_rows,
    int part_width,
    int share_width,  // columns of each sending rank, except the last
    int num_columns,
    int num_senders) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    unsigned char* const members[MAX_DEGREE] = MEMBER_LIST;
    const Round round(members, state, aborted);
    // The same on all ranks, so that blocks of the same index have the same units.
    const int num_units = num_rows * share_width, of_block = (num_units + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * of_block, last = min(first + of_block, num_units);
    if (part != nullptr) {
        Unit* own = round.staging<Unit>(RANK);
        for (int u = first + threadIdx.x; u < last; u += THREADS) {
            const int row = u / share_width, column = u % share_width;
            if (column < part_width) own[u] = part[(long long)row * part_width + column];
        }
    }
    if (!round.meet(0)) return;
    if (whole != nullptr) {
        for (int u = first + threadIdx.x; u < last; u += THREADS) {
            const int row = u / share_width, column = u % share_width;
#pragma unroll
            for (int rank = 0; rank < DEGREE; rank++) {
                const int to = rank * share_width + column;
                if (rank < num_senders && to < num_columns) {
                    whole[(long long)row * num_columns + to] = fetch(round.staging<const Unit>(rank) + u);
                }
            }
        }
    }
    round.end();
}
