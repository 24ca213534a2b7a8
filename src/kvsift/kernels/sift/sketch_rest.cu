// What is not visible, as subs: each the sum of its tokens' shares and the mean of its values. The sums are products of
// float16 matrices, 16 channels by 16 subs by 8 query heads: values become 1152 more than their codes, weights two
// float16 numbers each.

constexpr int MEANS = 16;  // subs that are multiplied at once
constexpr int MEANS_AHEAD = 2;

// A lane's channels of the mean values of so many subs: as many channels as of values that it attends.
struct Means {
    uint2 rows[4][D / 64];
    __device__ __forceinline__ void load(
        const Arguments &a, const Arrays &arrays, const Span &span, const u8 *rows_of_head, int start
    ) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int there = min(start + 2 * (lane % 4) + i % 2 + i / 2 * 8, span.count - 1);
            const u8 *from = rows_of_head + arrays.pages[there] * a.row_page + VALUE_MEAN + lane / 4 * 8;
#pragma unroll
            for (int w = 0; w < D / 64; ++w) rows[i][w] = *(const uint2 *)(from + w * 64);
        }
    }
};

// This warp's part of the estimate into its softmax, and the sums of its shares into s.rest. ``next`` holds what its first
// subs need.
__device__ __forceinline__ void add_rest(
    const Arguments &a, const Arrays &arrays, Shared &s, const Span &span, const u8 *rows, Means (&next)[MEANS_AHEAD],
    Softmax &softmax
) {
    int lane = threadIdx.x & 31, warp = warp_number(), group = lane / 4, t = lane % 4;
    float share[HEAD_TILES], weight_sum[HEAD_TILES], largest = 1e-20f;
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) share[tile] = weight_sum[tile] = 0.f;
    for (int start = warp * MEANS; start < span.count; start += WARPS * MEANS)
        if (start + lane % MEANS < span.count) largest = fmaxf(largest, arrays.scales[start + lane % MEANS]);
    // shares are at most one: a power of two that keeps weights below 2^11
    u32 exponent = __float_as_uint(warp_max(largest)) >> 23;
    float unit = __uint_as_float((254 + 10 - exponent) << 23), inverse = __uint_as_float((exponent - 10) << 23);
    auto add = [&](int start, const Means &own) {
        u32 values[4][D / 32], high[HEAD_TILES][2], low[HEAD_TILES][2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int w = 0; w < D / 64; ++w)
                values[i][2 * w] = own.rows[i][w].x ^ 0x80808080u, values[i][2 * w + 1] = own.rows[i][w].y ^ 0x80808080u;
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            int g = tile * 8 + group;
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int sub = start + 2 * t + i % 2 + i / 2 * 8, there = min(sub, span.count - 1);
                float own = g < G && sub < span.count ? arrays.unseen[there * G + g] : 0.f;
                share[tile] += own, weights[i] = own * (arrays.scales[there] * unit);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32 bits = high[tile][i] = to_half2(weights[2 * i], weights[2 * i + 1]);
                float one = from_half(bits & 0xffff), two = from_half(bits >> 16);
                bits = low[tile][i] = to_half2(weights[2 * i] - one, weights[2 * i + 1] - two);
                weight_sum[tile] += one + from_half(bits & 0xffff) + (two + from_half(bits >> 16));
            }
        }
#pragma unroll
        for (int w = 0; w < D / 32; ++w) {
            u32 operand[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // subs 2t and 2t + 1, then those eight behind
                u32 first = __byte_perm(values[2 * i][w], values[2 * i + 1][w], 0x5140);
                u32 second = __byte_perm(values[2 * i][w], values[2 * i + 1][w], 0x7362);
                operand[0][2 * i] = __byte_perm(first, 0x64646464u, 0x4140);
                operand[0][2 * i + 1] = __byte_perm(first, 0x64646464u, 0x4342);
                operand[1][2 * i] = __byte_perm(second, 0x64646464u, 0x4140);
                operand[1][2 * i + 1] = __byte_perm(second, 0x64646464u, 0x4342);
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const u32 (&x)[4] = operand[c];
#pragma unroll
                for (int tile = 0; tile < HEAD_TILES; ++tile) {
                    float (&sums)[4] = softmax.acc[tile][2 * w + c];
                    multiply16<true>(sums, x[0], x[1], x[2], x[3], high[tile][0], high[tile][1]);
                    multiply16<true>(sums, x[0], x[1], x[2], x[3], low[tile][0], low[tile][1]);
                }
            }
        }
    };
#pragma unroll 1
    for (int start = warp * MEANS; start < span.count;) {
#pragma unroll
        for (int i = 0; i < MEANS_AHEAD; ++i) add(start + i * WARPS * MEANS, next[i]);
        start += MEANS_AHEAD * WARPS * MEANS;
        if (start < span.count)
#pragma unroll
            for (int i = 0; i < MEANS_AHEAD; ++i) next[i].load(a, arrays, span, rows, start + i * WARPS * MEANS);
    }
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
#pragma unroll
        for (int other = 1; other < 4; other <<= 1) {
            share[tile] += __shfl_xor_sync(~0u, share[tile], other);
            weight_sum[tile] += __shfl_xor_sync(~0u, weight_sum[tile], other);
        }
        int g = tile * 8 + group;
        if (t == 0 && g < G) s.rest[warp * G + g] = share[tile];
        softmax.top[tile] = g < G ? s.lse[g] : 0.f, softmax.total[tile] = t == 0 ? share[tile] : 0.f;
        float excess[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) excess[i] = 1152.f * __shfl_sync(~0u, weight_sum[tile], (2 * t + i) * 4);
#pragma unroll
        for (int n = 0; n < D / 16; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                softmax.acc[tile][n][i] = (softmax.acc[tile][n][i] - excess[i % 2]) * (inverse * CODE_UNIT);
    }
}

// The estimated shares of all query heads of a row, by its first member, once the records are merged.
__device__ __forceinline__ void add_estimated(const Arguments &a, const Shared &s, int row) {
    int lane = threadIdx.x & 31;
    if (threadIdx.x >= 32) return;
    const float *records = a.parts + (i64)row * a.members * RECORD + G * (D + 2) + 1;
    float shares = 0.f;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        float rest = 0.f;
        for (int m = lane; m < a.members; m += 32) rest += __ldcg(records + (i64)m * RECORD + g);
        shares += warp_sum(rest) * exp2f(s.lse[g] - s.best[g]) / s.total[g];
    }
    if (lane == 0) atomicAdd(a.estimated + row / a.num_kv_heads, (u64)((double)shares * 4294967296.0));
}
