// The best tokens of a row by the votes of its query heads, found by a histogram over all its members: bins are 1/128
// of an octave wide, about as wide as the rounding of the weights. Of tokens in the bin of the worst, the first are taken.

// Weights of four neighbouring tokens over their base for each query head, what the base weighs, and votes.
struct Votes {
    float weights[G][4], bases[G], votes[4];

    // Four tokens as they lie in memory.
    struct Packed {
        uint2 weights[G];
        __device__ __forceinline__ void load(const Arrays &arrays, const Span &span, int tile) {
            int lane = threadIdx.x & 31, sub = min(tile * TILE + lane / 4, span.count - 1);
#pragma unroll
            for (int g = 0; g < G; ++g)
                weights[g] = *(const uint2 *)(arrays.weights + (sub * G + slot(sub, g)) * SUB + lane % 4 * 4);
        }
    };

    __device__ __forceinline__ Votes(const Packed &packed, const float *of_sub, const float *lse) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            bases[g] = power(of_sub[g] - lse[g]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pair = j < 2 ? packed.weights[g].x : packed.weights[g].y;
                weights[g][j] = __uint_as_float(j % 2 ? pair & 0xffff0000u : pair << 16);
                votes[j] = g ? __fmaf_rn(weights[g][j], bases[g], votes[j]) : weights[g][j] * bases[g];
            }
        }
    }
};

__device__ __forceinline__ int bin_of(float vote) {
    int bin = (int)(__float_as_uint(vote) / (0x800000 / BINS_PER_OCTAVE)) - (int)LOWEST;
    return min(max(bin, 0), BINS - 1);
}

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
__device__ __forceinline__ void leave_bins(const Arguments &a, const Arrays &arrays, Shared &s, const Span &span) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    float lse[G];
#pragma unroll
    for (int g = 0; g < G; ++g) lse[g] = s.lse[g];
    Votes::Packed next;
    if (warp * TILE < span.count) next.load(arrays, span, warp);
    for (int tile = warp; tile * TILE < span.count; tile += WARPS) {
        int sub = tile * TILE + lane / 4;
        Votes::Packed packed = next;
        next.load(arrays, span, tile + WARPS);
        if (sub >= span.count) continue;
        Votes v(packed, arrays.bases + sub * G, lse);
        u32 candidates = span.inside(tile) ? 15 : span.candidates((span.begin + sub) * SUB + lane % 4 * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (candidates >> j & 1) atomicAdd(arrays.bins + bin_of(v.votes[j]), 1);
    }
    __syncthreads();
    u32 own[OWN_BINS], all = 0;
#pragma unroll
    for (int i = 0; i < OWN_BINS; i += 4) *(uint4 *)(own + i) = *(const uint4 *)(arrays.bins + thread * OWN_BINS + i);
#pragma unroll
    for (int i = OWN_BINS - 1; i >= 0; --i) own[i] = all += own[i];
    u32 after = sum_after(all, s);
#pragma unroll
    for (int i = 0; i < OWN_BINS; ++i) {
        own[i] += after;
        if (i % 4 == 3)
            *(uint4 *)(a.bins + (i64)blockIdx.x * BINS + thread * OWN_BINS + i - 3) =
                make_uint4(own[i - 3], own[i - 2], own[i - 1], own[i]);
    }
    if (thread % (FINE / OWN_BINS) == 0) a.coarse[blockIdx.x * COARSE + thread / (FINE / OWN_BINS)] = own[0];
}

// Numbers of COARSE bins, summed over the members of a row; the last that `wanted` tokens reach.
__device__ __forceinline__ int last_that_reach(
    const u32 *from, int stride, int members, u32 wanted, Shared &s
) {
    static_assert(COARSE == 64 && FINE == 64, "lanes take two bins each");
    int thread = threadIdx.x;
    u32 sum = 0;
    for (int m = thread / COARSE; m < members; m += THREADS / COARSE)
        sum += __ldcg(from + (i64)m * stride + thread % COARSE);
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

// The bin of the worst token to choose, how many of that bin this member gives, and how many tokens of the row come
// before its own, into s.threshold, s.own_quota and s.own_offset.
__device__ __forceinline__ void find_threshold(const Arguments &a, Shared &s, int row, u32 wanted) {
    int member = blockIdx.x % a.members, lane = threadIdx.x & 31;
    const u32 *bins = a.bins + (i64)row * a.members * BINS;
    int coarse = last_that_reach(a.coarse + (i64)row * a.members * COARSE, COARSE, a.members, wanted, s);
    int bin = coarse * FINE + last_that_reach(bins + coarse * FINE, BINS, a.members, wanted, s);
    if (threadIdx.x < 32) {
        u32 above_all = 0, above = 0, equal = 0, offset = 0, quota = 0;
        auto read = [&](int m) {
            equal = m < a.members ? __ldcg(bins + (i64)m * BINS + bin) : 0;
            above = m < a.members && bin + 1 < BINS ? __ldcg(bins + (i64)m * BINS + bin + 1) : 0;
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
        if (lane == 0) s.threshold = bin, s.own_quota = quota, s.own_offset = offset;
    }
    __syncthreads();
}

// Marks the tokens that reach the threshold, and sums the shares of a sub's others into arrays.unseen.
__device__ __forceinline__ void mark_tokens(const Arrays &arrays, const Shared &s, const Span &span, int threshold) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    float lse[G];
#pragma unroll
    for (int g = 0; g < G; ++g) lse[g] = s.lse[g];
    Votes::Packed next;
    if (warp * TILE < span.count) next.load(arrays, span, warp);
    for (int tile = warp; tile * TILE < span.count; tile += WARPS) {
        int sub = tile * TILE + lane / 4;
        bool there = sub < span.count;
        Votes::Packed packed = next;
        next.load(arrays, span, tile + WARPS);
        Votes v(packed, arrays.bases + (there ? sub : 0) * G, lse);
        u32 candidates = span.inside(tile) ? 15 : span.candidates((span.begin + sub) * SUB + lane % 4 * 4), marks = 0;
        float left[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int bin = candidates >> j & 1 ? bin_of(v.votes[j]) : -1;
            marks |= bin > threshold ? 1 << j : bin == threshold ? 16 << j : 0;
            left[j] = bin < threshold ? 1.f : 0.f;
        }
        if (there) arrays.marks[sub * 4 + lane % 4] = marks;
        if (!REST) continue;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < 4; ++j) sum = fmaf(v.weights[g][j], left[j], sum);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (there && lane % 4 == 0) arrays.unseen[sub * G + g] = sum * v.bases[g];
        }
    }
    __syncthreads();
}

// Lists this member's marked tokens, ascending, in arrays.listed and in the row's list; the tokens of the threshold's bin that
// are too many join the unseen.
__device__ __forceinline__ void list_tokens(const Arguments &a, const Arrays &arrays, Shared &s, const Span &span, int *list) {
    int thread = threadIdx.x, each = (span.count + THREADS - 1) / THREADS, begin = thread * each;
    int end = min(begin + each, span.count);
    const u32 *marks = (const u32 *)arrays.marks;
    u32 above = 0, equal = 0;
    for (int sub = begin; sub < end; ++sub) above += __popc(marks[sub] & 0x0f0f0f0f), equal += __popc(marks[sub] & 0xf0f0f0f0);
    u32 upto = above;
    int lane = thread & 31, warp = thread / 32;
#pragma unroll
    for (int other = 1; other < 32; other <<= 1) {
        u32 before = __shfl_up_sync(~0u, upto, other);
        if (lane >= other) upto += before;
    }
    u32 ties = equal;
#pragma unroll
    for (int other = 1; other < 32; other <<= 1) {
        u32 before = __shfl_up_sync(~0u, ties, other);
        if (lane >= other) ties += before;
    }
    if (lane == 31) s.of_warp[warp] = upto, s.of_warp[WARPS + warp] = ties;
    __syncthreads();
    above = upto - above + sum_before(s.of_warp), equal = ties - equal + sum_before(s.of_warp + WARPS);
    u32 quota = s.own_quota;
    for (int sub = begin; sub < end; ++sub) {
        u32 word = marks[sub];
        for (u32 left = (word | word >> 4) & 0x0f0f0f0f; left; left &= left - 1) {
            int place = __ffs(left) - 1, token = place / 8 * 4 + place % 8;
            bool better = word >> place & 1;
            u32 at = above + min(equal, quota);
            if (better || equal < quota) {
                arrays.listed[at] = (span.begin + sub) * SUB + token, arrays.physical[at] = arrays.pages[sub];
                list[s.own_offset + at] = arrays.listed[at];
            } else if (REST) {
                for (int g = 0; g < G; ++g)
                    arrays.unseen[sub * G + g] +=
                        __uint_as_float((u32)arrays.weights[(sub * G + slot(sub, g)) * SUB + token] << 16) *
                        power(arrays.bases[sub * G + g] - s.lse[g]);
            }
            above += better, equal += !better;
        }
    }
    if (thread == THREADS - 1) s.own_listed = above + min(equal, quota);
    __syncthreads();
}
