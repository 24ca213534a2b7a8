// Weights of tokens as their codes tell them. Codes and mean keys meet the queries as whole numbers of two bytes each, in
// products of bytes. All products are exact.

__device__ __forceinline__ void multiply_bytes(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Codes of 32 channels become the operands of four products without being unpacked one by one: product m takes bits 2m
// and 2m + 1 of each byte, the latter where they are, as twos. So digits of even channels are doubled, and all sums are.
__device__ __forceinline__ void add_products(int (&sums)[4], u32 first, u32 second, const uint4 (&digits)[2]) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        u32 one = first >> 2 * m, two = second >> 2 * m;
        multiply_bytes(
            sums, one & 0x01010101u, two & 0x01010101u, one & 0x02020202u, two & 0x02020202u,
            m % 2 ? digits[m / 2].z : digits[m / 2].x, m % 2 ? digits[m / 2].w : digits[m / 2].y
        );
    }
}

// Two digits of a query's whole number, where `add_products` finds that of its channel, 32 word + lane.
__device__ __forceinline__ void place_digits(Shared &s, int g, int word, int whole) {
    int bit = threadIdx.x & 31, high = (whole + 32) >> 6, low = whole - 64 * high, factor = 2 - bit % 2;
#pragma unroll
    for (int half = 0; half < 2; ++half)
        ((char *)&s.digits[bit / 4 % 2][2 * g + half][word])[bit % 4 * 4 + bit / 8] = (half ? low : high) * factor;
}

// The queries times the rotation of kernels.sketch, as whole numbers in bytes. Warps that share a query head place a part
// of them each.
__device__ __forceinline__ void rotate_queries(const Arguments &a, Shared &s, int row) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    constexpr int HEADS = PASSES * 4, SHARES = WARPS >= 4 * HEADS ? 4 : WARPS >= 2 * HEADS ? 2 : 1;
    for (int item = warp; item < HEADS * SHARES; item += WARPS) {
        int g = item % HEADS, share = item / HEADS;
        float x[D / 32], largest = 0.f, square = 0.f;
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            u32 channel = i * 32 + lane;
            float q = g < G ? as_float(a.queries[((i64)row * G + g) * D + channel]) * a.scale : 0.f;
            x[i] = q;
        }
        turn(x);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) largest = fmaxf(largest, fabsf(x[i])), square += x[i] * x[i];
        largest = fmaxf(warp_max(largest), 1e-30f);
        float coarse = MOST / largest, fine = 32512.f / largest;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4 * LAPS; ++i) {
            int whole = i < D / 32 ? __float2int_rn(x[i % (D / 32)] * coarse) : 0;
            sum += whole;
            if (i % SHARES == share) place_digits(s, g, i, whole);
        }
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            if (i % SHARES != share) continue;
            int whole = __float2int_rn(x[i] * fine), high = (whole + 128) >> 8;
            int at = i * 32 + lane / 8 * 8 + lane % 2 * 4 + lane % 8 / 2;  // eight channels as `mean_bytes` has them
            s.halves[0][g][at] = high, s.halves[1][g][at] = whole - 256 * high;
        }
        sum = __reduce_add_sync(~0u, sum);
        square = warp_sum(square);
        if (lane == 0 && g < G && share == 0) {
            s.unit[g] = largest * (1.f / MOST), s.fine_unit[g] = largest * (1.f / (32512 * MEAN_UNIT)), s.sum[g] = sum;
            s.noise[g] = square * ERROR * 0.5f * LOG2E;
        }
    }
}

__device__ __forceinline__ uint4 load_once(const u8 *from, u64 policy) {
    uint4 x;
    asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from), "l"(policy));
    return x;
}

struct Weigher {
    const Arguments &a;
    const Arrays &arrays;
    const Span &span;
    const u8 *rows;    // of the KV head
    const int *table;  // of the sequence
    int lane;
    u64 policy;        // of what is read once

    struct Loaded {
        uint4 codes[BITS][LAPS][TILE / 2];
        uint2 factors[TILE / 2];
        u32 mean[D / 32];
        u32 scales;  // of mean key and mean value
    };
    static constexpr bool AHEAD = sizeof(Loaded) <= 400;  // registers have room for the next tile

    // Physical page of sub lane % 8 of a tile.
    __device__ __forceinline__ int page_of(int tile) const {
        int sub = min(tile * TILE + lane % TILE, span.count - 1);
        return table[(span.begin + sub) / PAGE_SUBS];
    }

    __device__ __forceinline__ void load(Loaded &to, int tile, int page) const {
        int group = lane / 4, t = lane % 4, pages[TILE / 2];
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) pages[i] = __shfl_sync(~0u, page, 2 * i + group / 4);
        int own = __shfl_sync(~0u, page, group);  // all before the first load
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            int of_tile = 2 * i + group / 4;
            const u8 *from = start(tile * TILE + of_tile, pages[i]);
            int token = within(tile * TILE + of_tile) + group % 4 * 4;
#pragma unroll
            for (int bit = 0; bit < BITS; ++bit)
#pragma unroll
                for (int lap = 0; lap < LAPS; ++lap)
                    to.codes[bit][lap][i] =
                        load_once(from + ((bit * WORDS + (4 * lap + t) % WORDS) * PAGE + token) * 4, policy);
            to.factors[i] = __ldg((const uint2 *)(from + FACTORS + token * 2));
        }
        const u8 *from = start(tile * TILE + group, own);
#pragma unroll
        for (int i = 0; i < D / 128; ++i) {
            uint4 x = load_once(from + KEY_MEAN + t * (D / 8) + i * 16, policy);
            to.mean[4 * i] = x.x, to.mean[4 * i + 1] = x.y, to.mean[4 * i + 2] = x.z, to.mean[4 * i + 3] = x.w;
        }
        if (D == 64) {
            uint2 x = __ldg((const uint2 *)(from + KEY_MEAN + t * 8));
            to.mean[0] = x.x, to.mean[1] = x.y;
        }
        to.scales = __ldg((const u32 *)(from + SCALES));
    }

    __device__ __forceinline__ const u8 *start(int, int page) const { return rows + page * a.row_page; }
    // Tokens of the page before a sub.
    __device__ __forceinline__ int within(int sub) const {
        return (span.begin + min(sub, span.count - 1)) % PAGE_SUBS * SUB;
    }

    // Weighs the query heads of a pass; the largest base and the sum of weights over it of this lane in `top`, `total`.
    // Full tiles have no token that may not be chosen.
    template <bool FULL>
    __device__ __forceinline__ void weigh(
        const Loaded &from, int tile, int pass, const Shared &s, float &top, float &total
    ) const {
        int group = lane / 4, t = lane % 4, g = pass * 4 + t;
        bool there = g < G;
        float unit = there ? s.unit[g] * LOG2E : 0.f, noise = there ? s.noise[g] : 0.f;
        float offset = there ? -unit * s.sum[g] * (BITS == 1 ? 1.f : 3.f) : 0.f;
        int count = FULL ? TILE : span.count - tile * TILE;  // of subs from here on
        float base = mean_logits(from, s.halves[group % 2][pass * 4 + group / 2]) * (there ? s.fine_unit[g] * LOG2E : 0.f);
        float cap = a.softcap * LOG2E, best = top, bases[TILE / 2];
        int sub = tile * TILE + group;
        if (there && group < count) arrays.bases[sub * G + g] = CAPPED ? cap * tanhf(base / cap) : base;
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            bases[i] = __shfl_sync(~0u, base, (2 * i + group / 4) * 4 + t);
            if (FULL || 2 * i + group / 4 < count) best = fmaxf(best, CAPPED ? cap * tanhf(bases[i] / cap) : bases[i]);
        }
        total *= power(top - best), top = best;
        uint4 digits[LAPS][2];
#pragma unroll
        for (int lap = 0; lap < LAPS; ++lap)
#pragma unroll
            for (int i = 0; i < 2; ++i) digits[lap][i] = s.digits[i][pass * 8 + group][4 * lap + t];
#pragma unroll
        for (int pair = 0; pair < TILE / 4; ++pair) {
            float weights[2][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int dots[2] = {0, 0};
#pragma unroll
                for (int bit = BITS - 1; bit >= 0; --bit) {
                    int sums[4] = {0, 0, 0, 0};
#pragma unroll
                    for (int lap = 0; lap < LAPS; ++lap) {
                        const uint4 *codes = from.codes[bit][lap] + 2 * pair;
                        add_products(sums, ((const u32 *)codes)[j], ((const u32 *)(codes + 1))[j], digits[lap]);
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) dots[i] = 2 * dots[i] + (64 * sums[2 * i] + sums[2 * i + 1]);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 pairs = j < 2 ? from.factors[2 * pair + half].x : from.factors[2 * pair + half].y;
                    float f = from_half(j % 2 ? pairs >> 16 : pairs & 0xffff);
                    float product = fmaf((float)dots[half], unit, offset);
                    if (CAPPED) {
                        float start = bases[2 * pair + half];
                        product = cap * (tanhf((start + f * product) / cap) - tanhf(start / cap));
                    } else {
                        product = f * fmaf(-noise, f, product);
                    }
                    weights[half][j] = power(product);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int i = 2 * pair + half, of_tile = 2 * i + group / 4;
                sub = tile * TILE + of_tile;
                if (!FULL) {
                    u32 candidates = of_tile < count ? span.candidates((span.begin + sub) * SUB + group % 4 * 4) : 0;
#pragma unroll
                    for (int j = 0; j < 4; ++j) weights[half][j] = candidates >> j & 1 ? weights[half][j] : 0.f;
                }
                float start = CAPPED ? cap * tanhf(bases[i] / cap) : bases[i];
                float sum = weights[half][0] + weights[half][1] + (weights[half][2] + weights[half][3]);
                if (FULL || of_tile < count) total += sum * power(start - top);
                if (there && of_tile < count)
                    *(uint2 *)(arrays.weights + (sub * G + slot(sub, g)) * SUB + group % 4 * 4) = make_uint2(
                        to_bfloat2(weights[half][0], weights[half][1]), to_bfloat2(weights[half][2], weights[half][3])
                    );
            }
        }
    }

    // Products of mean key number lane / 4 of a tile with query head lane % 4 of a pass, in units of the query's.
    __device__ __forceinline__ float mean_logits(const Loaded &from, const char *queries) const {
        int sums[4] = {0, 0, 0, 0};
        const uint4 *q = (const uint4 *)(queries + lane % 4 * (D / 4));
#pragma unroll
        for (int i = 0; i < STEPS / 2; ++i) {
            uint4 x = q[i];
            u32 one = from.mean[2 * i], two = from.mean[2 * i + 1];
            multiply_bytes(sums, mean_bytes(one, false), 0, mean_bytes(one, true), 0, x.x, x.y);
            multiply_bytes(sums, mean_bytes(two, false), 0, mean_bytes(two, true), 0, x.z, x.w);
        }
        return (float)(256 * sums[0] + sums[1]) * from_half(from.scales & 0xffff);
    }
};

// log2 of each query head's sum of weights of this member, into its place in a.shares.
__device__ __forceinline__ void leave_shares(
    const Arguments &a, float *scratch, float (&top)[PASSES], float (&total)[PASSES], u32 launch
) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
        for (int other = 4; other < 32; other <<= 1) {
            float their_top = __shfl_xor_sync(~0u, top[pass], other);
            float theirs = __shfl_xor_sync(~0u, total[pass], other), best = fmaxf(top[pass], their_top);
            if (best > NEGATIVE_INFINITY)
                total[pass] = total[pass] * power(top[pass] - best) + theirs * power(their_top - best), top[pass] = best;
        }
        int g = pass * 4 + lane;
        if (lane < 4 && g < G) scratch[(g * 2) * WARPS + warp] = top[pass], scratch[(g * 2 + 1) * WARPS + warp] = total[pass];
    }
    __syncthreads();
    for (int g = warp; g < G; g += WARPS) {
        float best, sum, mine = lane < WARPS ? scratch[g * 2 * WARPS + lane] : NEGATIVE_INFINITY;
        best = warp_max(mine);
        sum = lane < WARPS && best > NEGATIVE_INFINITY ? scratch[(g * 2 + 1) * WARPS + lane] * power(mine - best) : 0.f;
        sum = warp_sum(sum);
        if (lane == 0) tell(a.shares + (i64)blockIdx.x * G + g, sum > 0.f ? best + log2f(sum) : NEGATIVE_INFINITY, launch);
    }
}

// The same over all members, into s.lse.
__device__ __forceinline__ void sum_shares(const Arguments &a, Shared &s, int row, u32 launch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    for (int g = warp; g < G; g += WARPS) {
        float best, sum;
        Listener others{launch};
        do {
            others.told = true, best = NEGATIVE_INFINITY, sum = 0.f;
            for (int m = lane; m < a.members; m += 32) {
                float theirs = others.hear(a.shares + ((i64)row * a.members + m) * G + g), larger = fmaxf(best, theirs);
                if (larger > NEGATIVE_INFINITY) sum = sum * power(best - larger) + power(theirs - larger), best = larger;
            }
        } while (!others.told);
        float top = warp_max(best);
        sum = warp_sum(top > NEGATIVE_INFINITY ? sum * power(best - top) : 0.f);
        if (lane == 0) s.lse[g] = sum > 0.f ? top + log2f(sum) : 0.f;
    }
    __syncthreads();
}
