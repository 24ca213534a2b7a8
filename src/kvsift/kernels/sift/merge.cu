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
    float *record, Shared &s, float *parts, Softmax &softmax, u32 seen, int before = 0
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
    float *weights = parts + (before + WARPS) * PART;
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
