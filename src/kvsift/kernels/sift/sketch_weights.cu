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

    // Weighs the query heads of a pass; the largest base and the sum of weights over it of this lane in `top`, `total`.
    // Behind the last sub the last one is weighed again, and hidden.
    __device__ __forceinline__ void weigh(
        const Loaded &from, int tile, int pass, const Shared &s, float &top, float &total
    ) const {
        int group = lane / 4, t = lane % 4, g = pass * 4 + t;
        bool there = G % 4 == 0 || g < G;
        float unit = there ? s.unit[g] * LOG2E : 0.f, noise = there ? s.noise[g] : 0.f;
        float offset = there ? -unit * s.sum[g] * (BITS == 1 ? 1.f : 3.f) : 0.f;
        unit *= 2.f;  // a code is twice its bits, less 1 or 3
        float base = mean_logits(from, s.halves[group % 2][pass * 4 + group / 2]) * (there ? s.fine_unit[g] * LOG2E : 0.f);
        float cap = a.softcap * LOG2E, best = top, bases[TILE / 2], uncapped[TILE / 2];
#pragma unroll
        for (int i = 0; CAPPED && i < TILE / 2; ++i) uncapped[i] = __shfl_sync(~0u, base, (2 * i + group / 4) * 4 + t);
        if (CAPPED) base = cap * tanhf(base / cap);
        if (there) arrays.bases[(tile * TILE + group) * G + g] = base;
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
            bases[i] = __shfl_sync(~0u, base, (2 * i + group / 4) * 4 + t);
            best = fmaxf(best, bases[i]);
        }
        total *= power(top - best), top = best;
        QueryBits query(s, pass);
        u16 *own = arrays.weights + (tile * TILE + group / 4) * G * SUB + group % 4 * 4;
#pragma unroll
        for (int i = 0; i < TILE / 2; ++i) {
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
                    float f = from_half(k ? pair >> 16 : pair & 0xffff), product = fmaf((float)dots[k], unit, offset);
                    if (CAPPED) {
                        product = cap * tanhf((uncapped[i] + f * product) / cap) - bases[i];
                        product = f > 65504.f ? NEGATIVE_INFINITY : product;
                    } else {
                        product = f * fmaf(-noise, f, product);
                    }
                    weights[j + k] = power(product);
                }
            }
            total += (weights[0] + weights[1] + (weights[2] + weights[3])) * power(bases[i] - top);
            if (there)
                *(uint2 *)(own + (2 * i * G + slot(2 * i + group / 4, g)) * SUB) =
                    make_uint2(to_bfloat2(weights[0], weights[1]), to_bfloat2(weights[2], weights[3]));
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
