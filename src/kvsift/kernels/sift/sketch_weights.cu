// Weights of tokens as their codes tell them. Codes meet bits of the queries' whole numbers, mean keys their bytes. All
// products are exact.

__device__ __forceinline__ void multiply_bytes(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of 8 rows and 16 bytes.
__device__ __forceinline__ void multiply_few_bytes(int (&sums)[2], u32 a, u32 b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(sums[0]), "+r"(sums[1])
        : "r"(a), "r"(b));
}

// Adds how many of 128 bits both have, for 16 rows and 8 columns.
__device__ __forceinline__ void count_common(int (&sums)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// What a lane multiplies codes with: bits of the whole numbers of query head lane / 8 of a pass. A column is a digit of
// two bits, of which the upper one is counted twice; the last one is the sign.
struct QueryBits {
    u32 lower[2][LAPS], upper[2][LAPS];

    __device__ __forceinline__ QueryBits(const Shared &s, int pass) {
        int lane = threadIdx.x & 31, odd = lane / 4 % 2;
        const auto &bits = s.bits[pass * 4 + lane / 8];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int lap = 0; lap < LAPS; ++lap) {
                int word = 4 * lap + lane % 4, first = 4 * n + 2 * odd;
                lower[n][lap] = bits[first][word], upper[n][lap] = bits[first + 1][word];
            }
    }

    // Sums of query head lane % 4 over the bits that are set in two codes of each of eight lanes / 4, added to 2 `dots`.
    __device__ __forceinline__ void add_products(int (&dots)[2], const u32 (&codes)[LAPS][2]) const {
        int sums[2][4] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int lap = 0; lap < LAPS; ++lap) {
                count_common(sums[n], codes[lap][0], codes[lap][1], lower[n][lap]);
                count_common(sums[n], codes[lap][0], codes[lap][1], upper[n][lap]);
                count_common(sums[n], codes[lap][0], codes[lap][1], upper[n][lap]);
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int high = sums[1][2 * i] - 4 * sums[1][2 * i + 1], low = sums[0][2 * i] + 4 * sums[0][2 * i + 1];
            dots[i] = 2 * dots[i] + (16 * high + low);
        }
    }
};

// The queries times the rotation of kernels.sketch, as whole numbers: bits, and bytes. Warps that share a query head place
// a part of them each.
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
            if (i % SHARES != share) continue;
            u32 word = 0;
#pragma unroll
            for (int bit = 0; bit < QUERY_BITS; ++bit) {
                u32 all = __ballot_sync(~0u, whole >> bit & 1);
                word = lane == bit ? all : word;
            }
            if (lane <= QUERY_BITS) s.bits[g][lane][i] = word;
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
            s.noise[g] = fmaxf(square * ERROR * 0.5f * LOG2E, 1e-30f);  // infinite where a factor is
        }
    }
}

// What turns products with a query head into weights next to sinks and window; no weight where there is no such head.
struct Head {
    float unit, offset, noise, past, cap;
    __device__ __forceinline__ Head(const Arguments &a, const Shared &s, int g) : cap(a.softcap * LOG2E) {
        bool there = g < G;
        unit = there ? s.unit[g] * LOG2E : 0.f, offset = there ? -unit * s.sum[g] * (BITS == 1 ? 1.f : 3.f) : 0.f;
        unit *= 2.f;  // a code is twice its bits, less 1 or 3
        noise = there ? s.noise[g] : 1.f, past = there ? s.past[g] : -NEGATIVE_INFINITY;
    }

    // What the weights of a page's tokens begin with: log2 of that of its mean key; the mean's logit if logits are capped.
    __device__ __forceinline__ float base_of(float logit) const { return CAPPED ? logit : fminf(logit - past, MOST_BASE); }

    __device__ __forceinline__ float weight(int dot, float factor, float base) const {
        float product = fmaf((float)dot, unit, offset);
        if (!CAPPED) return power(fmaf(factor, fmaf(-noise, factor, product), base));
        return factor > 65504.f ? 0.f : power(cap * tanhf(fmaf(factor, product, base) / cap) - past);
    }
};

// Sums of four numbers over four lanes, `step` apart; each of these lanes gets the one of its place among them.
__device__ __forceinline__ float sum_of_four(const float (&x)[4], int step) {
    bool odd = threadIdx.x & step, upper = threadIdx.x & 2 * step;
    float one = odd ? x[1] : x[0], two = odd ? x[3] : x[2];
    one += __shfl_xor_sync(~0u, odd ? x[0] : x[1], step);
    two += __shfl_xor_sync(~0u, odd ? x[2] : x[3], step);
    return (upper ? two : one) + __shfl_xor_sync(~0u, upper ? one : two, 2 * step);
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
    const int *table;                          // of the sequence
    int lane;
    u64 policy;                                // of what is read once
    const u8 *codes, *factors, *mean, *scales;  // what this lane reads of the KV head's first row

    __device__ __forceinline__ Weigher(
        const Arguments &a, const Arrays &arrays, const Span &span, const u8 *rows, const int *table
    )
        : a(a), arrays(arrays), span(span), table(table), lane(threadIdx.x & 31), policy(read_once()) {
        int t = lane % 4, four = lane / 4 % 4 * 4;  // of the codes, one of four words of four tokens
        codes = rows + (t % WORDS * PAGE + four) * 4, factors = rows + FACTORS + four * 2;
        mean = rows + KEY_MEAN + t * (D / 8), scales = rows + SCALES;
    }

    struct Loaded {
        uint4 codes[BITS][LAPS][TILE / 2];
        uint2 factors[TILE / 2];
        u32 mean[D / 32];
        u32 scales;  // of mean key and mean value
    };
    static constexpr bool AHEAD = sizeof(Loaded) <= 400;  // registers have room for the next tile

    // Physical page of sub lane % 8 of a tile.
    __device__ __forceinline__ int page_of(int tile) const {
        u32 sub = min(tile * TILE + lane % TILE, span.count - 1);
        return table[(span.begin + sub) / PAGE_SUBS];
    }

    __device__ __forceinline__ void load(Loaded &to, int tile, int page) const {
        int group = lane / 4, pages[TILE / 2];
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) pages[i] = __shfl_sync(~0u, page, 2 * i + group / 4);
        int own = __shfl_sync(~0u, page, group);  // all before the first load
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            int token = within(tile * TILE + 2 * i + group / 4);
#pragma unroll
            for (int bit = 0; bit < BITS; ++bit)
#pragma unroll
                for (int lap = 0; lap < LAPS; ++lap)
                    to.codes[bit][lap][i] =
                        load_once(of_page(codes, a, pages[i]) + ((bit * WORDS + 4 * lap) * PAGE + token) * 4, policy);
            to.factors[i] = __ldg((const uint2 *)(of_page(factors, a, pages[i]) + token * 2));
        }
        const u8 *from = of_page(mean, a, own);
#pragma unroll
        for (int i = 0; i < D / 128; ++i) {
            uint4 x = load_once(from + i * 16, policy);
            to.mean[4 * i] = x.x, to.mean[4 * i + 1] = x.y, to.mean[4 * i + 2] = x.z, to.mean[4 * i + 3] = x.w;
        }
        if (D == 64) {
            uint2 x = __ldg((const uint2 *)from);
            to.mean[0] = x.x, to.mean[1] = x.y;
        }
        to.scales = __ldg((const u32 *)of_page(scales, a, own));
    }

    // Tokens that may not be chosen get an infinite factor, and so no weight.
    __device__ __forceinline__ void hide(Loaded &of, int tile) const {
        if (span.inside(tile)) return;
        int group = lane / 4;
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            int sub = tile * TILE + 2 * i + group / 4;
            u32 hidden = ~(sub < span.count ? span.candidates((span.begin + sub) * SUB + group % 4 * 4) : 0);
            auto hide = [](u32 pair, u32 which) {
                return which & 1 ? which & 2 ? 0x7c007c00u : pair & 0xffff0000u | 0x7c00u
                                 : which & 2 ? pair & 0xffffu | 0x7c000000u : pair;
            };
            of.factors[i] = make_uint2(hide(of.factors[i].x, hidden), hide(of.factors[i].y, hidden >> 2));
        }
    }

    // Tokens of the page before a sub.
    __device__ __forceinline__ int within(int sub) const {
        return (span.begin + min(sub, span.count - 1)) % PAGE_SUBS * SUB;
    }

    // Weighs the query heads of a pass: leaves bases and sums of weights of the subs, and adds to the votes of tokens of
    // TILE / 2 subs. Behind the last sub the last one is weighed again, and hidden.
    __device__ __forceinline__ void weigh(
        const Loaded &from, int tile, int pass, const Shared &s, float (&votes)[TILE / 2][4]
    ) const {
        int group = lane / 4, t = lane % 4, g = pass * 4 + t;
        bool there = G % 4 == 0 || g < G;
        Head head(a, s, there ? g : G);
        float fine_unit = there ? s.fine_unit[g] * LOG2E : 0.f;
        float base = head.base_of(mean_logits(from, s.halves[group % 2][pass * 4 + group / 2]) * fine_unit);
        if (there) arrays.bases[(tile * TILE + group) * G + g] = base;
        QueryBits query(s, pass);
        float sums[TILE / 2];
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            float own_base = __shfl_sync(~0u, base, (2 * i + group / 4) * 4 + t);
            float weights[4];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {  // neighbours, which lie in neighbouring registers
                int dots[2] = {0, 0};
#pragma unroll
                for (int bit = BITS - 1; bit >= 0; --bit) {
                    u32 codes[LAPS][2];
#pragma unroll
                    for (int lap = 0; lap < LAPS; ++lap) {
                        const uint4 &four = from.codes[bit][lap][i];
                        codes[lap][0] = j ? four.z : four.x, codes[lap][1] = j ? four.w : four.y;
                    }
                    query.add_products(dots, codes);
                }
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    u32 pair = j ? from.factors[i].y : from.factors[i].x;
                    weights[j + k] = head.weight(dots[k], from_half(k ? pair >> 16 : pair & 0xffff), own_base);
                }
            }
            sums[i] = weights[0] + weights[1] + (weights[2] + weights[3]);
#pragma unroll
            for (int j = 0; j < 4; ++j) votes[i][j] += weights[j];
        }
        float of_sub = sum_of_four(sums, 4);
        if (there) arrays.unseen[(tile * TILE + group % 4 * 2 + group / 4) * G + g] = of_sub;
    }

    // Counts the bins that the votes of a tile's tokens fall in, and keeps them.
    __device__ __forceinline__ void count(int tile, const float (&votes)[TILE / 2][4]) const {
        int group = lane / 4, t = lane % 4;
        u32 candidates = ~0u;
        if (!span.inside(tile))
#pragma unroll
            for (int i = 0; i < TILE / 2; ++i) {
                int sub = tile * TILE + 2 * i + group / 4, token = (span.begin + sub) * SUB + group % 4 * 4 + t;
                if (sub >= span.count || token < span.first || token >= span.stop) candidates &= ~(1u << i);
            }
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            int sub = tile * TILE + 2 * i + group / 4;
            // What may not be chosen counts in NO_BIN, which is no threshold: a branch would take longer.
            int bin = bin_of(sum_of_four(votes[i], 1)) & (int)(0u - (candidates >> i & 1));
            atomicAdd(arrays.bins + bin, 1);
            arrays.own_bins[sub * SUB + group % 4 * 4 + t % 2 * 2 + t / 2] = bin;  // as `reach` reads them
        }
    }

    // Products of mean key number lane / 4 of a tile with query head lane % 4 of a pass, in units of the query's.
    __device__ __forceinline__ float mean_logits(const Loaded &from, const char *queries) const {
        int sums[2] = {0, 0};
        const uint4 *q = (const uint4 *)(queries + lane % 4 * (D / 4));
#pragma unroll
        for (int i = 0; i < STEPS / 2; ++i) {
            uint4 x = q[i];
            u32 one = from.mean[2 * i], two = from.mean[2 * i + 1];
            multiply_few_bytes(sums, mean_bytes(one, false), x.x), multiply_few_bytes(sums, mean_bytes(one, true), x.y);
            multiply_few_bytes(sums, mean_bytes(two, false), x.z), multiply_few_bytes(sums, mean_bytes(two, true), x.w);
        }
        return (float)(256 * sums[0] + sums[1]) * from_half(from.scales & 0xffff);
    }
};

// Codes and factors of tokens lane / 4 and lane / 4 + 8 of sixteen of this member, once more: what they weigh is part of
// sums in a.unseen.
struct Codes {
    u32 codes[BITS][LAPS][2];
    float factors[2];
    __device__ __forceinline__ void load(const Arguments &a, const u8 *rows, int i, int token, int page) {
        const u8 *row = of_page(rows, a, page);
        int within = token % PAGE, t = threadIdx.x % 4;
#pragma unroll
        for (int bit = 0; bit < BITS; ++bit)
#pragma unroll
            for (int lap = 0; lap < LAPS; ++lap) {
                int word = bit * WORDS + (4 * lap + t) % WORDS;
                codes[bit][lap][i] = __ldg((const u32 *)row + word * PAGE + within);
            }
        factors[i] = from_half(__ldg((const u16 *)(row + FACTORS) + within));
    }
};

// log2 of what sinks and window weigh for each query head, exactly, into s.past; 0 where there is neither. `softmax` is
// that of this warp, which is the `turn`-th of those of this member or, OVER_BUS, of the row.
__device__ __forceinline__ void sum_past(
    const Arguments &a, Shared &s, const Softmax &softmax, int row, int turn, u32 launch
) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    float *scratch = (float *)s.sums;  // [G, 2, WARPS]
    u64 *told = a.past + (i64)row * G * 2 * WARPS;  // the same
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
        int g = tile * 8 + lane / 4;
        float total = softmax.total[tile];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (lane % 4 || g >= G || turn >= WARPS) continue;
        int at = g * 2 * WARPS + turn;
        if (OVER_BUS) {
            tell(told + at, softmax.top[tile], launch), tell(told + at + WARPS, total, launch);
        } else {
            scratch[at] = softmax.top[tile], scratch[at + WARPS] = total;
        }
    }
    __syncthreads();
    for (int g = warp; g < G; g += WARPS) {
        int at = g * 2 * WARPS + lane;
        float top = NEGATIVE_INFINITY, total = 0.f;
        if (lane < WARPS && !OVER_BUS) top = scratch[at], total = scratch[at + WARPS];
        if (lane < WARPS && OVER_BUS) {
            Listener others{launch};
            do {
                others.told = true, top = others.hear(told + at), total = others.hear(told + at + WARPS);
            } while (!others.told);
        }
        float best = warp_max(top), sum = warp_sum(best > NEGATIVE_INFINITY ? total * power(top - best) : 0.f);
        if (lane == 0) s.past[g] = sum > 0.f ? best + log2f(sum) : 0.f;
    }
    __syncthreads();
}
