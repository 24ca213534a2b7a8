// The best tokens of a row by the votes of its query heads, found by a histogram over all its members: bins are 1/128
// of an octave wide, about what rounding the queries does to a vote. Of tokens in the bin of the worst, the first are taken.

// Sums over the threads behind this one, in `after`, of numbers with room for all in a word; ends with a barrier.
__device__ __forceinline__ u32 sum_after(u32 own, Shared &s) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u32 from = own;
#pragma unroll
    for (int other = 1; other < 32; other <<= 1) {
        u32 behind = __shfl_down_sync(~0u, from, other);
        if (lane + other < 32) from += behind;
    }
    if (lane == 0) s.of_warp[warp] = from;
    __syncthreads();
    return from - own + __reduce_add_sync(~0u, lane > warp && lane < WARPS ? s.of_warp[lane] : 0);
}

// How many of this member's tokens vote for each bin and those above, into its places in a.bins and a.coarse.
__device__ __forceinline__ void leave_bins(const Arguments &a, const Arrays &arrays, Shared &s, u32 launch) {
    int thread = threadIdx.x;
    __syncthreads();
    u32 own[OWN_BINS], all = 0;
#pragma unroll
    for (int i = 0; i < OWN_BINS; i += 4) *(uint4 *)(own + i) = *(const uint4 *)(arrays.bins + thread * OWN_BINS + i);
#pragma unroll
    for (int i = OWN_BINS - 1; i >= 0; --i) own[i] = all += own[i];
    u32 after = sum_after(all, s);
#pragma unroll
    for (int i = 0; i < OWN_BINS; ++i) {
        own[i] = counted(own[i] + after, launch);
        if (i % 4 == 3)
            tell_counts(a.bins + (i64)blockIdx.x * BINS + thread * OWN_BINS + i - 3, own + i - 3);
    }
    if (thread % (FINE / OWN_BINS) == 0) tell_count(a.coarse + blockIdx.x * COARSE + thread / (FINE / OWN_BINS), own[0]);
}

// Numbers of COARSE bins, summed over the members of a row; the last that `wanted` tokens reach.
__device__ __forceinline__ int last_that_reach(
    const u32 *from, int stride, int members, u32 wanted, Shared &s, u32 launch
) {
    static_assert(COARSE == 64 && FINE == 64, "lanes take two bins each");
    int thread = threadIdx.x;
    u32 sum;
    Listener others{launch};
    do {
        sum = 0, others.told = true;
#pragma unroll 2
        for (int m = thread / COARSE; m < members; m += THREADS / COARSE)
            sum += others.hear_count(from + (i64)m * stride + thread % COARSE);
    } while (!others.told);
    s.sums[thread] = sum;
    __syncthreads();
    if (thread < 32) {
        u32 low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < THREADS / COARSE; ++i) low += s.sums[i * COARSE + thread], high += s.sums[i * COARSE + 32 + thread];
        // sums fall from bin to bin
        u32 reached = __popc(__ballot_sync(~0u, low >= wanted)) + __popc(__ballot_sync(~0u, high >= wanted));
        if (thread == 0) s.word[0] = max(reached, 1) - 1;  // NaN may hide tokens
    }
    __syncthreads();
    return s.word[0];
}

// The bin of the worst token to choose.
__device__ __forceinline__ u32 find_threshold(const Arguments &a, Shared &s, int row, u32 wanted, u32 launch) {
    const u32 *bins = a.bins + (i64)row * a.members * BINS, *coarse_bins = a.coarse + (i64)row * a.members * COARSE;
    int coarse = last_that_reach(coarse_bins, COARSE, a.members, wanted, s, launch);
    int fine = last_that_reach(bins + coarse * FINE, BINS, a.members, wanted, s, launch);
    return max(coarse * FINE + fine, (int)NO_BIN + 1);
}

// How many tokens of the threshold's bin this member gives, and how many tokens of the row come before its own, into
// s.own_quota and s.own_offset. By one warp.
__device__ __forceinline__ void find_quota(const Arguments &a, Shared &s, int row, u32 wanted, u32 bin, u32 launch) {
    int member = blockIdx.x % a.members, lane = threadIdx.x & 31;
    const u32 *bins = a.bins + (i64)row * a.members * BINS;
    u32 above_all = 0, above = 0, equal = 0, offset = 0, quota = 0;
    auto read = [&](int m) {
        Listener others{launch};
        do {
            others.told = true;
            equal = m < a.members ? others.hear_count(bins + (i64)m * BINS + bin) : 0;
            above = m < a.members && bin + 1 < BINS ? others.hear_count(bins + (i64)m * BINS + bin + 1) : 0;
        } while (!others.told);
        equal -= above;
    };
    for (int start = a.members - 1 & ~31; start >= 0; start -= 32) read(start + lane), above_all += above;
    u32 room = wanted - __reduce_add_sync(~0u, above_all);
    for (int start = 0; start <= member; start += 32) {
        int m = start + lane;
        if (start) read(m);
        u32 upto = equal;
#pragma unroll
        for (int other = 1; other < 32; other <<= 1) {
            u32 before = __shfl_up_sync(~0u, upto, other);
            if (lane >= other) upto += before;
        }
        u32 before = upto - equal, given = before < room ? min(equal, room - before) : 0;
        offset += __reduce_add_sync(~0u, m < member ? above + given : 0);
        if (start + 32 > member) quota = __shfl_sync(~0u, given, member - start);
        room -= min(room, __shfl_sync(~0u, upto, 31));
    }
    if (lane == 0) s.own_quota = quota, s.own_offset = offset;
}

// Which of eight tokens have a bin above this one.
__device__ __forceinline__ u32 reach(const uint4 &bins, u32 bin) {
    u32 least = bin * 0x10001 + 0x80008000u, above = 0;
    const u32 pairs[4] = {bins.x, bins.y, bins.z, bins.w};  // tokens 0 and 2, 1 and 3, 4 and 6, 5 and 7
#pragma unroll
    for (int i = 0; i < 4; ++i) above |= (~(least - pairs[i]) >> 15 & 0x10001) << (i % 2 + i / 2 * 4);
    return (above | above >> 14) & 255;
}

// Lists this member's tokens that reach the threshold, ascending, in arrays.listed behind `ends` others and in the row's
// list; of the threshold's bin as many as the row has room for. Returns how many.
__device__ __forceinline__ int list_tokens(
    const Arguments &a, const Arrays &arrays, Shared &s, const Span &span, int row, u32 wanted, u32 threshold, u32 launch,
    int ends, int *list
) {
    int thread = threadIdx.x, lane = thread & 31, warp = warp_number(), tokens = span.count * SUB;
    int *listed = arrays.listed + ends, *physical = arrays.physical + ends;
    // A lane takes up to 64 neighbouring tokens at a time, and keeps in the place of their bins which of them are better
    // than the worst, and which are in its bin.
    int eights = min(8, (tokens + THREADS * 8 - 1) / (THREADS * 8)), laps = (tokens + THREADS * 64 - 1) / (THREADS * 64);
    auto start_of = [&](int lap) { return ((warp * laps + lap) * 32 + lane) * eights * 8; };
    if (warp == WARPS - 1) find_quota(a, s, row, wanted, threshold, launch);
    u32 above = 0, equal = 0;
    for (int lap = 0; lap < laps; ++lap) {
        int start = start_of(lap);
        if (start >= tokens) break;
        u64 better = 0, tied = 0;
        int i = lane % eights;  // lanes start at different places, which lie in different banks
        for (int n = 0; n < eights; ++n, i = i + 1 == eights ? 0 : i + 1) {
            if (start + i * 8 >= tokens) continue;
            uint4 bins = *(const uint4 *)(arrays.own_bins + start + i * 8);
            u32 found = reach(bins, threshold);
            better |= (u64)found << i * 8, tied |= (u64)(reach(bins, threshold - 1) ^ found) << i * 8;
        }
        *(uint4 *)(arrays.own_bins + start) = make_uint4((u32)better, (u32)(better >> 32), (u32)tied, (u32)(tied >> 32));
        above += __popcll(better), equal += __popcll(tied);
    }
    above = __reduce_add_sync(~0u, above), equal = __reduce_add_sync(~0u, equal);
    if (lane == 0) s.of_warp[warp] = above, s.of_warp[WARPS + warp] = equal;
    __syncthreads();
    above = sum_before(s.of_warp), equal = sum_before(s.of_warp + WARPS);
    u32 quota = s.own_quota, offset = s.own_offset;
#pragma unroll 1
    for (int lap = 0; lap < laps; ++lap) {
        int start = start_of(lap);
        uint4 found = start < tokens ? *(const uint4 *)(arrays.own_bins + start) : make_uint4(0, 0, 0, 0);
        u64 better = (u64)found.y << 32 | found.x, both = better | (u64)found.w << 32 | found.z;
        u32 own = __popcll(better) + (__popcll(both ^ better) << 16), upto = own;
#pragma unroll
        for (int other = 1; other < 32; other <<= 1) {
            u32 before = __shfl_up_sync(~0u, upto, other);
            if (lane >= other) upto += before;
        }
        u32 all = __shfl_sync(~0u, upto, 31), at_better = above + (upto - own & 0xffff), at_tied = equal + (upto - own >> 16);
        above += all & 0xffff, equal += all >> 16;
        for (; both; both &= both - 1) {
            int i = __ffsll(both) - 1, token = start + i;
            u32 at = at_better + min(at_tied, quota);
            bool is_better = better >> i & 1;
            if (is_better || at_tied < quota) {
                listed[at] = span.begin * SUB + token, physical[at] = arrays.pages[token / SUB];
                list[offset + at] = listed[at];
            }
            at_better += is_better, at_tied += !is_better;
        }
    }
    if (thread == THREADS - 1) s.own_listed = above + min(equal, quota);
    __syncthreads();
    return s.own_listed;
}

// Takes the weights of `count` tokens, from `from` on among those that this member attends, out of the unseen.
__device__ __forceinline__ void see(
    const Arguments &a, const Arrays &arrays, const Shared &s, const Span &span, const u8 *rows, int from, int count
) {
    constexpr int AT_ONCE = BINS / G;
    int lane = threadIdx.x & 31, t = lane % 4;
    float *weights = (float *)arrays.bins;  // [AT_ONCE, G], the bins have been told
    for (int start = 0; start < count; start += AT_ONCE) {
        const int *listed = arrays.listed + from + start, *physical = arrays.physical + from + start;
        int now = min(AT_ONCE, count - start);
        for (int first = warp_number() * 16; first < now; first += WARPS * 16) {
            Codes of;
            int at[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                at[i] = min(first + i * 8 + lane / 4, now - 1), of.load(a, rows, i, listed[at[i]], physical[at[i]]);
#pragma unroll 1
            for (int pass = 0; pass < PASSES; ++pass) {
                QueryBits query(s, pass);
                int g = pass * 4 + t, dots[2] = {0, 0};
#pragma unroll
                for (int bit = BITS - 1; bit >= 0; --bit) query.add_products(dots, of.codes[bit]);
#pragma unroll
                for (int i = 0; i < 2 && g < G; ++i) {
                    float base = arrays.bases[(listed[at[i]] / SUB - span.begin) * G + g];
                    weights[at[i] * G + g] = Head(a, s, g).weight(dots[i], of.factors[i], base);  // the last ones alike
                }
            }
        }
        __syncthreads();
        // Those of a sub by one thread: a sum must not depend on who comes first.
        for (int first = threadIdx.x; first < now; first += THREADS) {
            int sub = listed[first] / SUB;
            if (first && listed[first - 1] / SUB == sub) continue;
            float seen[G];
#pragma unroll
            for (int g = 0; g < G; ++g) seen[g] = 0.f;
            for (int at = first; at < now && listed[at] / SUB == sub; ++at)
#pragma unroll
                for (int g = 0; g < G; ++g) seen[g] += weights[at * G + g];
#pragma unroll
            for (int g = 0; g < G; ++g) {
                float &unseen = arrays.unseen[(sub - span.begin) * G + g];
                unseen = fmaxf(unseen - seen[g], 0.f);
            }
        }
        __syncthreads();
    }
}
