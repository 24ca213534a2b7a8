// What is not visible, as subs: each the sum of its tokens' shares and the mean of its values. The sums are products of
// bytes, 16 channels by 32 subs by four query heads. Weights are whole numbers of 16 bits, in units of the largest of a
// query head: columns n and n + 4 have the two bytes of head n.

constexpr int MEANS = 32;  // subs that are multiplied at once, and read ahead: twice as many take longer
constexpr int CHANNELS = D < 128 ? D : 128, HEAD_PASSES = D * HEAD_TILES < 256 ? 2 : 1;  // for which registers have room

// A lane's channels of the mean values of MEANS subs: as many channels as of values that it attends.
struct Means {
    u32 rows[8][CHANNELS / 64];  // of eight channels
    __device__ __forceinline__ void load(
        const Arguments &a, const Arrays &arrays, const Span &span, const u8 *rows_of_head, int start, int channel
    ) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int there = min(start + lane % 4 * 4 + i % 4 + i / 4 * 16, span.count - 1);
            const u8 *from = of_page(rows_of_head + VALUE_MEAN + channel / 2 + lane / 4 * 4, a, arrays.pages[there]);
#pragma unroll
            for (int w = 0; w < CHANNELS / 64; ++w) rows[i][w] = *(const u32 *)(from + w * 32);
        }
    }

    // Of four subs from 4 `four` on, the bytes of each of the four pairs of channels of a word.
    __device__ __forceinline__ void transpose(u32 (&to)[4], int word, int four) const {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = rows[4 * four + i][word];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 one = __byte_perm(x[0], x[1], half ? 0x7362 : 0x5140), two = __byte_perm(x[2], x[3], half ? 0x7362 : 0x5140);
            to[2 * half] = __byte_perm(one, two, 0x5410), to[2 * half + 1] = __byte_perm(one, two, 0x7632);
        }
    }
};

// This warp's part of the estimate into its softmax, and the sums of its shares into s.rest. ``means`` are the first
// channels of its first subs.
__device__ __forceinline__ void add_rest(
    const Arguments &a, const Arrays &arrays, Shared &s, const Span &span, const u8 *rows, Means &means,
    Softmax &softmax
) {
    constexpr float MOST_WEIGHT = 32512.f;
    int lane = threadIdx.x & 31, warp = warp_number(), group = lane / 4, t = lane % 4, own_head = group % 4;
    float share[PASSES], largest[PASSES];
    auto share_of_sub = [&](int sub, int pass) {
        int g = pass * 4 + own_head;
        return g < G && sub < span.count ? arrays.unseen[sub * G + g] : 0.f;
    };
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) share[pass] = 0.f, largest[pass] = 1e-20f;
    for (int start = warp * MEANS; start < span.count; start += WARPS * MEANS)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int sub = start + group / 4 * 16 + t * 4 + i;
            float scale = arrays.scales[min(sub, span.count - 1)];
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                float own = share_of_sub(sub, pass);
                share[pass] += own, largest[pass] = fmaxf(largest[pass], own * scale);
            }
        }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int other = 1; other < 32; other <<= other == 2 ? 3 : 1) {
            share[pass] += __shfl_xor_sync(~0u, share[pass], other);
            largest[pass] = fmaxf(largest[pass], __shfl_xor_sync(~0u, largest[pass], other));
        }
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
        int g = tile * 8 + group;
        float own = group / 4 == 0 ? share[2 * tile] : share[min(2 * tile + 1, PASSES - 1)];
        if (t == 0 && g < G) s.rest[warp * G + g] = own;
        softmax.top[tile] = g < G ? s.past[g] : 0.f, softmax.total[tile] = t == 0 && g < G ? own : 0.f;
    }
#pragma unroll
    for (int part = 0; part < D / CHANNELS * ((PASSES + HEAD_PASSES - 1) / HEAD_PASSES); ++part) {
        int channel = part % (D / CHANNELS) * CHANNELS, first_pass = part / (D / CHANNELS) * HEAD_PASSES;
        int sums[HEAD_PASSES][CHANNELS / 16][4];
#pragma unroll
        for (int pass = 0; pass < HEAD_PASSES; ++pass)
#pragma unroll
            for (int n = 0; n < CHANNELS / 16; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[pass][n][i] = 0;
        if (part && warp * MEANS < span.count) means.load(a, arrays, span, rows, warp * MEANS, channel);
#pragma unroll 1
        for (int start = warp * MEANS; start < span.count; start += WARPS * MEANS) {
            u32 weights[HEAD_PASSES][2];
#pragma unroll
            for (int four = 0; four < 2; ++four)
#pragma unroll
                for (int pass = 0; pass < HEAD_PASSES; ++pass) {
                    bool high = group / 4 == (first_pass + pass) % 2;  // the byte of this lane's column
                    float unit = MOST_WEIGHT / largest[min(first_pass + pass, PASSES - 1)];
                    u32 whole[4], select = high ? 0x51 : 0x40;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int sub = start + four * 16 + t * 4 + i;
                        float weight = share_of_sub(sub, first_pass + pass) * arrays.scales[min(sub, span.count - 1)];
                        whole[i] = __float2int_rn(weight * unit) + (high ? 128 : 0);
                    }
                    u32 one = __byte_perm(whole[0], whole[1], select), two = __byte_perm(whole[2], whole[3], select);
                    weights[pass][four] = __byte_perm(one, two, 0x5410);
                }
#pragma unroll
            for (int word = 0; word < CHANNELS / 64; ++word) {
                u32 x[4], y[4];
                means.transpose(x, word, 0), means.transpose(y, word, 1);
#pragma unroll
                for (int pair = 0; pair < 4; ++pair)
#pragma unroll
                    for (int pass = 0; pass < HEAD_PASSES; ++pass)
                        if (first_pass + pass < PASSES)
                            multiply_bytes(
                                sums[pass][4 * word + pair], mean_bytes(x[pair], false), mean_bytes(x[pair], true),
                                mean_bytes(y[pair], false), mean_bytes(y[pair], true), weights[pass][0], weights[pass][1]
                            );
            }
            if (start + WARPS * MEANS < span.count) means.load(a, arrays, span, rows, start + WARPS * MEANS, channel);
        }
        // Of a tile's two passes, lanes of t below 2 have the high bytes of the first one, the others those of the second.
#pragma unroll
        for (int pass = first_pass; pass < min(PASSES, first_pass + HEAD_PASSES); ++pass) {
            float unit[2];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                unit[j] = __shfl_sync(~0u, largest[pass], (2 * t + j) % 4 * 4) * (CODE_UNIT / (MOST_WEIGHT * MEAN_UNIT));
#pragma unroll
            for (int n = 0; n < CHANNELS / 16; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int high = sums[pass - first_pass][n][i], low = __shfl_xor_sync(~0u, high, 2);
                    float &acc = softmax.acc[pass / 2][channel / 16 + n][i];
                    if (t / 2 == pass % 2) acc = fmaf(256.f, (float)high, (float)low) * unit[i % 2];
                }
        }
    }
}

// The estimated shares of all query heads of a row, by one of its members: a warp takes a head, the last warp the first.
__device__ __forceinline__ void add_estimated(const Arguments &a, const Shared &s, int row, u32 launch) {
    int lane = threadIdx.x & 31;
    const u64 *records = a.parts + (i64)row * a.members * RECORD + G * D;
    for (int g = WARPS - 1 - threadIdx.x / 32; g < G; g += WARPS) {
        float rest, all;  // of the weights, over that of s.past
        Listener others{launch};
        do {
            others.told = true, rest = all = 0.f;
            for (int m = lane; m < a.members; m += 32) {
                const u64 *of_head = records + (i64)m * RECORD + g;
                float top = others.hear(of_head), total = others.hear(of_head + G);
                rest += others.hear(of_head + 2 * G), all += total * exp2f(top - s.past[g]);
            }
        } while (!others.told);
        float share = warp_sum(rest) / warp_sum(all);
        if (lane == 0) atomicAdd(a.estimated + row / a.num_kv_heads, (u64)((double)share * 4294967296.0));
    }
}
