// Parts of different tokens into one: of the warps of a block, then of a row's members.

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
    sum = warp_sum(sum);
}

// A block's part into its record, number by number; `parts` is shared memory.
template <typename Leave>
__device__ __forceinline__ void leave_record(float *parts, Softmax &softmax, Leave leave) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, group = lane / 4, t = lane % 4;
    float *own = parts + warp * PART;
    constexpr float U = 1.f / CODE_UNIT;
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
        float total = softmax.total[tile];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        int g = tile * 8 + group;
        if (t == 0 && g < G) own[G * D + g] = softmax.top[tile], own[G * D + G + g] = total;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            g = tile * 8 + 2 * t + j;
            if (g >= G) continue;
#pragma unroll
            for (int n = 0; n < D / 16; n += 2) {
                const auto &one = softmax.acc[tile][n], &two = softmax.acc[tile][n + 1];
                *(float4 *)(own + g * D + n / 4 * 64 + group * 8 + n % 4 * 2) =
                    make_float4(one[j] * U, one[2 + j] * U, two[j] * U, two[2 + j] * U);
            }
        }
    }
    __syncthreads();
    float *weights = parts + WARPS * PART;
    for (int g = warp; g < G; g += WARPS) {
        float best, sum;
        const float *of_head = parts + G * D + g;
        weigh(WARPS, [&](int w) { return of_head[w * PART]; }, [&](int w) { return of_head[w * PART + G]; },
              weights + g * WARPS, best, sum);
        if (lane == 0) leave(G * D + g, best), leave(G * D + G + g, sum);
    }
    __syncthreads();
    for (int n = thread; n < G * D; n += THREADS) {
        const float *of_parts = weights + n / D * WARPS;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum = fmaf(parts[w * PART + n], of_parts[w], sum);
        leave(n, sum);
    }
}
