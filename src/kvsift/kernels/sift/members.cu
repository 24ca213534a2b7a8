// Blocks that share a row: they wait for each other through memory, and the last merges what all have left.

// Waits until every member of a row has come here, `flag` being zero before the first; all they wrote is then seen.
__device__ __forceinline__ void wait_for_members(u32 *flag, int members) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 seen;
        __threadfence();  // for the whole block: the barrier came before
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen < members);
    }
    __syncthreads();
}

// Whether this block is the last member of its row to come here.
__device__ __forceinline__ bool last_of_members(u32 *flag, int members, u32 &word) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 before;
        __threadfence();
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(flag) : "memory");
        word = before;
    }
    __syncthreads();
    return word == members - 1;
}

// The records of all members of a row into its output, by the block that was last.
__device__ __forceinline__ void merge_records(const Arguments &a, Shared &s, float *weights, int row) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, head = row % a.num_kv_heads;
    const float *records = a.parts + (i64)row * a.members * RECORD;
    constexpr int AHEAD = 16;  // parts of a number that are under way while they are weighed
    float ahead[AHEAD];
#pragma unroll
    for (int m = 0; m < AHEAD; ++m)
        ahead[m] = m < a.members && thread < G * D ? __ldcg(records + (i64)m * RECORD + thread) : 0.f;
    for (int g = warp; g < G; g += WARPS) {
        float best, sum;
        const float *of_head = records + G * D + g;
        weigh(a.members, [&](int m) { return __ldcg(of_head + (i64)m * RECORD); },
              [&](int m) { return __ldcg(of_head + (i64)m * RECORD + G); }, weights + g * a.members, best, sum);
        if (lane == 0) s.queries[G + g] = best, s.queries[2 * G + g] = sum;  // the queries have done their work
        float keep = 1.f;
        if (SINK) {
            float sink = a.sink[head * G + g] * LOG2E, larger = fmaxf(best, sink);
            keep = best == NEGATIVE_INFINITY ? 0.f : exp2f(best - larger);
            sum = sum * keep + exp2f(sink - larger);
        }
        if (lane == 0) s.queries[g] = sum > 0.f ? keep / sum : 0.f;
    }
    __syncthreads();
    for (int n = thread; n < G * D; n += THREADS) {
        float sum = 0.f;
#pragma unroll
        for (int m = 0; m < AHEAD; ++m)
            if (n == thread && m < a.members) sum = fmaf(ahead[m], weights[n / D * a.members + m], sum);
#pragma unroll 16
        for (int m = n == thread ? AHEAD : 0; m < a.members; ++m)
            sum = fmaf(__ldcg(records + (i64)m * RECORD + n), weights[n / D * a.members + m], sum);
        a.out[(i64)row * G * D + n] = rounded(sum * s.queries[n / D]);
    }
    if (warp == 0 && a.visible) {
        float shown = 0;
        for (int m = lane; m < a.members; m += 32) shown += __ldcg(records + (i64)m * RECORD + G * D + 2 * G);
#pragma unroll
        for (int other = 16; other; other >>= 1) shown += __shfl_xor_sync(~0u, shown, other);
        if (lane == 0) atomicAdd(a.visible + row / a.num_kv_heads, (u64)shown);
    }
}
