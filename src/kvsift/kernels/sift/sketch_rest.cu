// What is not visible, as subs: each the sum of its tokens' shares and the mean of its values. The sums are products of
// float16 matrices, 16 channels by 16 subs by 8 query heads: values become 1152 more than their codes, weights two
// float16 numbers each.

__device__ __forceinline__ void multiply16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

struct alignas(D / 8) Codes {  // of a lane's channels of one sub
    u32 words[D / 32];
};

// This warp's part of the estimate into arrays.parts.
__device__ __forceinline__ void add_rest(
    const Arguments &a, const Arrays &arrays, const Shared &s, const Span &span, const u8 *rows
) {
    constexpr int MEMBERS = 16, TILES = D / 16, OWN = D / 8;  // subs at once; of 16 channels; channels of a lane
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, group = lane / 4, t = lane % 4;
    float sums[TILES][4], share = 0.f, weight_sum = 0.f, largest = 1e-20f;
#pragma unroll
    for (int c = 0; c < TILES; ++c) sums[c][0] = sums[c][1] = sums[c][2] = sums[c][3] = 0.f;
    for (int start = warp * MEMBERS; start < span.count; start += WARPS * MEMBERS)
        if (start + lane % MEMBERS < span.count) largest = fmaxf(largest, arrays.scales[start + lane % MEMBERS]);
    // shares are at most one: a power of two that keeps weights below 2^11
    u32 exponent = __float_as_uint(warp_max(largest)) >> 23;
    float unit = __uint_as_float((254 + 10 - exponent) << 23), inverse = __uint_as_float((exponent - 10) << 23);
    Codes next[4];
    auto load = [&](int start) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int there = min(start + 2 * t + i % 2 + i / 2 * 8, span.count - 1);
            next[i] = *(const Codes *)(rows + arrays.pages[there] * a.row_page + VALUE_MEAN + group * OWN);
        }
    };
    if (warp * MEMBERS < span.count) load(warp * MEMBERS);
    for (int start = warp * MEMBERS; start < span.count; start += WARPS * MEMBERS) {
        u32 values[4][OWN / 4];
        float weights[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int w = 0; w < OWN / 4; ++w) values[i][w] = next[i].words[w] ^ 0x80808080u;
        load(start + WARPS * MEMBERS);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int sub = start + 2 * t + i % 2 + i / 2 * 8, there = min(sub, span.count - 1);
            float own = group < G && sub < span.count ? arrays.unseen[there * G + group] : 0.f;
            share += own, weights[i] = own * (arrays.scales[there] * unit);
        }
        u32 high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] = to_half2(weights[2 * i], weights[2 * i + 1]);
            float one = from_half(high[i] & 0xffff), two = from_half(high[i] >> 16);
            low[i] = to_half2(weights[2 * i] - one, weights[2 * i + 1] - two);
            weight_sum += one + from_half(low[i] & 0xffff) + (two + from_half(low[i] >> 16));
        }
#pragma unroll
        for (int w = 0; w < OWN / 4; ++w) {
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
                multiply16(sums[2 * w + c], operand[c], high[0], high[1]);
                multiply16(sums[2 * w + c], operand[c], low[0], low[1]);
            }
        }
    }
#pragma unroll
    for (int other = 1; other < 4; other <<= 1) {
        share += __shfl_xor_sync(~0u, share, other);
        weight_sum += __shfl_xor_sync(~0u, weight_sum, other);
    }
    float *part = arrays.parts + warp * PART;
    if (t == 0 && group < G) part[G * D + group] = s.lse[group], part[G * D + G + group] = share;
    float excess[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) excess[i] = 1152.f * __shfl_sync(~0u, weight_sum, (2 * t + i) * 4);
#pragma unroll
    for (int c = 0; c < TILES; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (2 * t + i < G)
                *(float2 *)(part + (2 * t + i) * D + group * OWN + 2 * c) = make_float2(
                    (sums[c][i] - excess[i]) * inverse, (sums[c][2 + i] - excess[i]) * inverse
                );
}

// The estimated shares of all query heads of a row, by the block that has merged its records.
__device__ __forceinline__ void add_estimated(const Arguments &a, const Shared &s, int row) {
    int lane = threadIdx.x & 31;
    if (threadIdx.x >= 32) return;
    const float *records = a.parts + (i64)row * a.members * RECORD + G * (D + 2) + 1;
    float shares = 0.f;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        float rest = 0.f;
        for (int m = lane; m < a.members; m += 32) rest += __ldcg(records + (i64)m * RECORD + g);
#pragma unroll
        for (int other = 16; other; other >>= 1) rest += __shfl_xor_sync(~0u, rest, other);
        shares += rest * exp2f(s.lse[g] - s.queries[G + g]) / s.queries[2 * G + g];
    }
    if (lane == 0) atomicAdd(a.estimated + row / a.num_kv_heads, (u64)((double)shares * 4294967296.0));
}
