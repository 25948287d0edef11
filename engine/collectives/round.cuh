// Meetings of the blocks of all ranks, each on a device of its own or all on one.
//
// Every rank has one allocation that all ranks map: flags, then two areas of staging. A kernel is one round. Its blocks
// copy this rank's numbers into the staging area, meet the blocks of the same index on the other ranks, and read the
// others' areas. Rounds alternate between the areas. A rank that has met the others in round n knows that their kernels
// of round n - 1 have ended, so in round n + 1 it may overwrite what they read then. This needs that no kernel of this
// kind begins before the one before has ended: each waits for its predecessors first, and none triggers the launch of
// its successor early.
//
// The number of the round is in device memory, so that graphs count too. Flags only grow. They have 64 bits because a
// block that only large rounds have may not see a flag for long.
//
// A block that waits also watches a word of host memory: if it is not zero, another rank has ended, and the kernel ends
// without a result. A wait longer than TIMEOUT_NS sets the word for all ranks.
//
// Macros for NVRTC:
//   DEGREE         number of ranks
//   RANK           this rank
//   THREADS        threads per block
//   MAX_BLOCKS     blocks of the largest grid
//   STAGING_BYTES  of one area
//   TIMEOUT_NS     longest wait for another rank

typedef unsigned long long Flag;

constexpr int MAX_DEGREE = 8;
constexpr int SPINS_PER_LOOK = 1024;

#define MEMBERS                                                                                                     \
    unsigned char *member0, unsigned char *member1, unsigned char *member2, unsigned char *member3,                 \
        unsigned char *member4, unsigned char *member5, unsigned char *member6, unsigned char *member7

#define MEMBER_LIST {member0, member1, member2, member3, member4, member5, member6, member7}

__device__ __forceinline__ void post(Flag* flag, Flag value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ Flag look(const Flag* flag) {
    Flag value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

// Reads what another rank has written. The L1 cache may have an older copy.
__device__ __forceinline__ uint4 peek(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ Flag nanoseconds() {
    Flag now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

struct Round {
    unsigned char* const* members;  // [MAX_DEGREE]
    Flag* state;                    // rounds that have ended; then, as 32 bits, blocks that have ended this one
    Flag* aborted;                  // in host memory
    Flag number;

    __device__ Round(unsigned char* const* members, Flag* state, Flag* aborted)
        : members(members), state(state), aborted(aborted), number(*(volatile Flag*)state) {}

    template <typename T>
    __device__ T* staging(int rank) const {
        return reinterpret_cast<T*>(members[rank] + MAX_BLOCKS * MAX_DEGREE * sizeof(Flag) +
                                    (number & 1) * STAGING_BYTES);
    }

    // Waits for the blocks of this index on all ranks, for the first (0) or second (1) time of the round. Afterwards
    // this block sees what those wrote before. Returns false if the ranks were aborted.
    __device__ bool meet(int time) const {
        const Flag value = 2 * number + 1 + time;
        bool is_lost = false;
        // All of the block's writes come before the flags.
        __syncthreads();
        const int peer = threadIdx.x;
        if (peer < DEGREE && peer != RANK) {
            unsigned char* of_peer = members[0];
#pragma unroll
            for (int rank = 1; rank < DEGREE; rank++) {
                if (peer == rank) of_peer = members[rank];
            }
            post(reinterpret_cast<Flag*>(of_peer) + blockIdx.x * MAX_DEGREE + RANK, value);
            const Flag* flag = reinterpret_cast<const Flag*>(members[RANK]) + blockIdx.x * MAX_DEGREE + peer;
            Flag since = 0;
            for (int spins = 1; look(flag) < value; spins++) {
                if (spins % SPINS_PER_LOOK) continue;
                const Flag now = nanoseconds();
                if (since == 0) since = now;
                if (now - since > TIMEOUT_NS) post(aborted, 1);
                if (look(aborted)) {
                    is_lost = true;
                    break;
                }
            }
        }
        return !__syncthreads_or(is_lost);
    }

    // Call it once, behind the last meeting.
    __device__ void end() const {
        if (threadIdx.x != 0) return;
        if (atomicInc(reinterpret_cast<unsigned int*>(state + 1), gridDim.x - 1) == gridDim.x - 1) *state = number + 1;
    }
};
