// Parts of different tokens into one: of the lanes and warps of a block, then of a row's members.

constexpr int PART = (G * (D + 2) + 3) / 4 * 4;  // floats a warp leaves in shared memory

// What parts weigh when they become one: weights[p] = 2^(top of p - best), and their sum. By one warp per query head.
template <typename Top, typename Total>
__device__ __forceinline__ void weigh(int parts, Top top, Total total, float *weights, float &best, float &sum) {
    int lane = threadIdx.x & 31;
    best = NEGATIVE_INFINITY, sum = 0.f;
    for (int p = lane; p < parts; p += 32) best = fmaxf(best, top(p));
    float first_total = lane < parts ? total(lane) : 0.f;  // under way while the largest is found
    best = warp_max(best);
    for (int p = lane; p < parts; p += 32) {
        float weight = best == NEGATIVE_INFINITY ? 0.f : exp2f(top(p) - best);
        weights[p] = weight, sum += weight * (p == lane ? first_total : total(p));
    }
#pragma unroll
    for (int other = 16; other; other >>= 1) sum += __shfl_xor_sync(~0u, sum, other);
}

// A block's part into its record; `parts` is shared memory, where `before` parts of other tokens may lie already.
__device__ __forceinline__ void leave_record(
    const Arguments &a, Shared &s, float *parts, Softmax &softmax, u32 seen, int before = 0
) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    auto &[top, total, acc] = softmax;
    float *own = parts + (before + warp) * PART;
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int other = 16; other >= TOKEN_LANES; other >>= 1) {
            total[g] += __shfl_xor_sync(~0u, total[g], other);
#pragma unroll
            for (int n = 0; n < 8; ++n) acc[g][n] += __shfl_xor_sync(~0u, acc[g][n], other);
        }
        if (lane < TOKEN_LANES) {
            float4 *to = (float4 *)(own + g * D + lane * 8);
            to[0] = make_float4(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
            to[1] = make_float4(acc[g][4], acc[g][5], acc[g][6], acc[g][7]);
        }
        if (lane == 0) own[G * D + g] = top[g], own[G * D + G + g] = total[g];
    }
    if (lane == 0) s.of_warp[warp] = seen;
    __syncthreads();
    float *record = a.parts + (i64)blockIdx.x * RECORD, *weights = parts + (before + WARPS) * PART;
    for (int g = warp; g < G; g += WARPS) {
        float best, sum;
        const float *of_head = parts + G * D + g;
        weigh(before + WARPS, [&](int w) { return of_head[w * PART]; }, [&](int w) { return of_head[w * PART + G]; },
              weights + g * (before + WARPS), best, sum);
        if (lane == 0) record[G * D + g] = best, record[G * D + G + g] = sum;
    }
    __syncthreads();
    for (int n = thread; n < G * D; n += THREADS) {
        const float *of_parts = weights + n / D * (before + WARPS);
        float sum = 0.f;
#pragma unroll 16
        for (int w = 0; w < before + WARPS; ++w) sum = fmaf(parts[w * PART + n], of_parts[w], sum);
        record[n] = sum;
    }
    if (thread == 0) {
        float shown = 0;
        for (int w = 0; w < WARPS; ++w) shown += s.of_warp[w];
        record[G * D + 2 * G] = shown;
    }
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
