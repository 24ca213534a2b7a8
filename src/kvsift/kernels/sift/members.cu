// Blocks that share a row: they wait for each other through memory, and each merges a share of what all have left.

// Waits until every member of a row has come here, `flag` being zero before the first; all they wrote is then seen.
__device__ __forceinline__ void wait_for_members(u32 *flag, int members) {
    __syncthreads();
    if (members > 1 && threadIdx.x == 0) {
        u32 seen;
        __threadfence();  // for the whole block: the barrier came before
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen < members);
    }
    __syncthreads();
}

// Makes the flags of a row zero, if this block is the last member to come here: none waits for them any more.
__device__ __forceinline__ void reset_flags(u32 *flags, int number, int members) {
    if (members == 1 || threadIdx.x != 0) return;
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(flags + number) : "memory");
    if (before == members - 1)
        for (int i = 0; i <= number; ++i) flags[i] = 0;
}

// This member's share of a row's output, merged from the records of all; the first member counts what is visible, and
// has the largest logit and the sum of weights of all heads in s.best and s.total then. `weights` is shared memory.
__device__ __forceinline__ void merge_records(const Arguments &a, Shared &s, float *weights, int row) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, head = row % a.num_kv_heads;
    int members = a.members, member = blockIdx.x % members;
    const float *records = a.parts + (i64)row * members * RECORD;
    constexpr int QUADS = G * D / 4;  // of the output; their parts are read at once
    int begin = QUADS * member / members, end = QUADS * (member + 1) / members;
    int first = member ? begin * 4 / D : 0, last = member ? (end * 4 + D - 1) / D : G;
    for (int g = first + warp; g < last; g += WARPS) {
        float best, sum;
        const float *of_head = records + G * D + g;
        weigh(members, [&](int m) { return __ldcg(of_head + (i64)m * RECORD); },
              [&](int m) { return __ldcg(of_head + (i64)m * RECORD + G); }, weights + g * members, best, sum);
        if (lane == 0) s.best[g] = best, s.total[g] = sum;
        float keep = 1.f;
        if (SINK) {
            float sink = a.sink[head * G + g] * LOG2E, larger = fmaxf(best, sink);
            keep = best == NEGATIVE_INFINITY ? 0.f : exp2f(best - larger);
            sum = sum * keep + exp2f(sink - larger);
        }
        if (lane == 0) s.keep[g] = sum > 0.f ? keep / sum : 0.f;
    }
    __syncthreads();
    int lanes = members > 16 ? 32 : members > 8 ? 16 : members > 4 ? 8 : members > 2 ? 4 : members;  // of a quad
    for (int start = begin + warp * 32 / lanes; start < end; start += THREADS / lanes) {
        int quad = start + lane / lanes;
        float sums[4] = {0.f, 0.f, 0.f, 0.f};
        if (quad < end)
#pragma unroll 4
            for (int m = lane % lanes; m < members; m += lanes) {
                float4 x = __ldcg((const float4 *)(records + (i64)m * RECORD) + quad);
                float weight = weights[quad * 4 / D * members + m];
                sums[0] = fmaf(x.x, weight, sums[0]), sums[1] = fmaf(x.y, weight, sums[1]);
                sums[2] = fmaf(x.z, weight, sums[2]), sums[3] = fmaf(x.w, weight, sums[3]);
            }
        for (int other = lanes / 2; other; other >>= 1)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
        if (quad < end && lane % lanes == 0) {
            float keep = s.keep[quad * 4 / D];
            *(uint2 *)(a.out + (i64)row * G * D + quad * 4) =
                make_uint2(rounded2(sums[0] * keep, sums[1] * keep), rounded2(sums[2] * keep, sums[3] * keep));
        }
    }
    if (member == 0 && warp == 0 && a.visible) {
        float shown = 0;
        for (int m = lane; m < members; m += 32) shown += __ldcg(records + (i64)m * RECORD + G * D + 2 * G);
        shown = warp_sum(shown);
        if (lane == 0) atomicAdd(a.visible + row / a.num_kv_heads, (u64)shown);
    }
}
