// Copies to shared memory by one thread, and the barriers that tell of their end.

__device__ __forceinline__ unsigned int shared_address(const void* p) {
    return (unsigned int)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void init(unsigned long long* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void expect(unsigned long long* barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void wait(unsigned long long* barrier, int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
}

// Addresses and the size are multiples of 16 bytes.
__device__ __forceinline__ void copy(void* to, const void* from, int num_bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(num_bytes), "r"(shared_address(barrier))
                 : "memory");
}

// As copy(). With ONCE the L2 cache evicts the numbers before others.
template <bool ONCE>
__device__ __forceinline__ void copy_weights(void* to, const void* from, int num_bytes, unsigned long long* barrier) {
    if (!ONCE) {
        copy(to, from, num_bytes, barrier);
        return;
    }
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(num_bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}
