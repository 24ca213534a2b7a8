// Blocks that share a row: they wait for each other through memory, and each merges a share of what all have left.

// Tells the other members of a row that this one has come here, and shows them all that its threads wrote before.
__device__ __forceinline__ void arrive(u32 *flag, int members) {
    __syncthreads();
    if (members > 1 && threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
}

// Waits until every member has arrived, `flag` being zero before the first; all they wrote is then seen.
__device__ __forceinline__ void await(u32 *flag, int members) {
    if (members > 1 && threadIdx.x == 0) {
        u32 seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (seen < members);
    }
    __syncthreads();
}

__device__ __forceinline__ void wait_for_members(u32 *flag, int members) { arrive(flag, members), await(flag, members); }

// Says that this member reads none of a row's flags any more; how many have said so before.
__device__ __forceinline__ u32 leave_flags(u32 *flags, int number, int members) {
    u32 before = 0;
    if (members > 1 && threadIdx.x == 0)
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(flags + number) : "memory");
    return before;
}

// Makes the flags of a row zero, if this member was the last to leave them.
__device__ __forceinline__ void reset_flags(u32 *flags, int number, int members, u32 before) {
    if (members > 1 && threadIdx.x == 0 && before == members - 1)
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
    int lanes = members > 16 ? 32 : members > 8 ? 16 : members > 4 ? 8 : members > 2 ? 4 : members;  // of a quad
    int first_start = begin + warp * 32 / lanes, first_quad = first_start + lane / lanes, first_member = lane % lanes;
    auto load = [&](int quad, int m) { return __ldcg((const float4 *)(records + (i64)m * RECORD) + quad); };
    float4 under_way;  // while weights are computed
    if (first_quad < end && first_member < members) under_way = load(first_quad, first_member);
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
    if (member == 0 && warp == WARPS - 1 && a.visible) {
        float shown = 0;
        for (int m = lane; m < members; m += 32) shown += __ldcg(records + (i64)m * RECORD + G * D + 2 * G);
        shown = warp_sum(shown);
        if (lane == 0) atomicAdd(a.visible + row / a.num_kv_heads, (u64)shown);
    }
    __syncthreads();
    for (int start = first_start; start < end; start += THREADS / lanes) {
        int quad = start + lane / lanes;
        float sums[4] = {0.f, 0.f, 0.f, 0.f};
        if (quad < end)
#pragma unroll 4
            for (int m = first_member; m < members; m += lanes) {
                float4 x = quad == first_quad && m == first_member ? under_way : load(quad, m);
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
}
