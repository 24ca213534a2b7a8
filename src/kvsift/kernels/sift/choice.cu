// The best pages of a row, ascending, by a radix search over scores that threads hold in registers.

// Keys lie in registers, 0 where there is none. Finds a threshold that at least `wanted` keys reach, and at most `most`
// unless too many are equal; returns how many do.
__device__ __forceinline__ u32 find_threshold(
    const u32 (&keys)[OWN_KEYS], u32 wanted, u32 most, Shared &s, u32 &threshold
) {
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    u32 low = ~0u, high = 0;
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) low = min(low, keys[j] - 1), high = max(high, keys[j]);
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (lane == 0) s.of_warp[warp] = low, s.of_warp[WARPS + warp] = high;
    __syncthreads();
    low = __reduce_min_sync(~0u, lane < WARPS ? s.of_warp[lane] : ~0u) + 1;
    high = __reduce_max_sync(~0u, lane < WARPS ? s.of_warp[WARPS + lane] : 0);
    u32 larger = 0, last = high;  // keys above the bins, and the last key in them
    int shift = max(0, 32 - BIN_BITS - __clz(high - low));  // the range in at most BINS bins
    u32 *bins = (u32 *)s.bins;  // the largest keys first; all zero
    threshold = low;
    while (true) {
#pragma unroll
        for (int j = 0; j < OWN_KEYS; ++j)
            if (keys[j] >= threshold && keys[j] <= last)
                atomicAdd(bins + (BINS - 1 - ((keys[j] - threshold) >> shift)), 1);
        __syncthreads();
        u32 own[OWN_BINS], all = 0;
#pragma unroll
        for (int i = 0; i < OWN_BINS / 4; ++i) {
            *(uint4 *)(own + 4 * i) = s.bins[thread * (OWN_BINS / 4) + i];
            s.bins[thread * (OWN_BINS / 4) + i] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < OWN_BINS; ++i) all += own[i];
        u32 upto = all;
#pragma unroll
        for (int other = 1; other < 32; other <<= 1) {
            u32 before = __shfl_up_sync(~0u, upto, other);
            if (lane >= other) upto += before;
        }
        if (lane == 31) s.of_warp[2 * WARPS + warp] = upto;
        __syncthreads();
        u32 before = larger + upto - all + sum_before(s.of_warp + 2 * WARPS);
        if (before < wanted && wanted <= before + all) {
#pragma unroll
            for (int i = 0; i < OWN_BINS; ++i) {
                if (before < wanted && wanted <= before + own[i])
                    s.word[0] = BINS - 1 - (thread * OWN_BINS + i), s.word[1] = before, s.word[2] = before + own[i];
                before += own[i];
            }
        }
        __syncthreads();
        larger = s.word[1];
        threshold += s.word[0] << shift;
        if (s.word[2] <= most || shift == 0) return s.word[2];
        last = min(last, threshold + (1u << shift) - 1);
        shift = max(0, shift - BIN_BITS);
    }
}

// Writes place(i) for the `wanted` largest of `count` keys to `out`, ascending in i, ties to the lower i; up to `most`,
// where some come close. Returns how many.
template <typename Key, typename Place>
__device__ __forceinline__ int write_best(Key key, int count, u32 wanted, u32 most, Shared &s, int *out, Place place) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int used = (count + THREADS - 1) / THREADS, start = warp * used * 32 + lane;  // a warp owns consecutive keys
    u32 keys[OWN_KEYS], threshold;
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) keys[j] = j < used && start + j * 32 < count ? key(start + j * 32) : 0;
    u32 reached = find_threshold(keys, wanted, most, s, threshold);
    bool ties = reached > most;  // of keys that equal the threshold only the first are in
    u32 limit = ties ? threshold : threshold - 1, above = 0, equal = 0;
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) above += __popc(__ballot_sync(~0u, keys[j] > limit));
    if (ties)
#pragma unroll
        for (int j = 0; j < OWN_KEYS; ++j) equal += __popc(__ballot_sync(~0u, keys[j] == limit));
    if (lane == 0) s.of_warp[warp] = above, s.of_warp[WARPS + warp] = equal;
    __syncthreads();
    u32 room = ties ? wanted - __reduce_add_sync(~0u, lane < WARPS ? s.of_warp[lane] : 0) : 0;
    above = sum_before(s.of_warp), equal = sum_before(s.of_warp + WARPS);
    u32 lower_lanes = (1u << lane) - 1;
#pragma unroll
    for (int j = 0; j < OWN_KEYS; ++j) {
        u32 above_lanes = __ballot_sync(~0u, keys[j] > limit), tied = 0, equal_lanes = 0;
        if (ties) equal_lanes = __ballot_sync(~0u, keys[j] == limit), tied = equal + __popc(equal_lanes & lower_lanes);
        if (keys[j] > limit || (ties && keys[j] == limit && tied < room))
            out[above + __popc(above_lanes & lower_lanes) + min(tied, room)] = place(start + j * 32);
        above += __popc(above_lanes), equal += __popc(equal_lanes);
    }
    __syncthreads();
    return ties ? wanted : reached;
}

// The visible list of a row into s.pages; returns how many pages it holds.
__device__ __forceinline__ int choose(
    const Arguments &a, Shared &s, int row, int first, int stop, int chosen, int held
) {
    int thread = threadIdx.x, count = stop - first;
    const float *scores = a.scores + (i64)row * a.row_scores;
    const float *maxima = a.maxima + (i64)row * (a.row_scores / GROUP_PAGES);
    if (chosen == count) {
        for (int i = thread; i < count; i += THREADS) s.pages[first + i] = first + i;
    } else if (chosen > 0) {
        // A group without one of the k best maxima holds none of the k best pages: of many pages choose groups first.
        // The passes share one copy of the code: two calls made a step of 32K tokens 1.4 % slower on an H200.
        int number = count, groups = (count + GROUP_PAGES - 1) / GROUP_PAGES;
        bool grouped = count > KEYS;
#pragma unroll 1
        for (bool last = !grouped;; last = true) {
            auto page = [=, &s](int i) {
                return grouped ? s.groups[i / GROUP_PAGES] * GROUP_PAGES + i % GROUP_PAGES : i;
            };
            int written = write_best(
                [=](int i) { return ordered(__ldcg(last ? scores + page(i) : maxima + i)); }, last ? number : groups,
                chosen, last ? chosen : KEYS / GROUP_PAGES, s, last ? s.pages + first : s.groups,
                [=](int i) { return last ? first + page(i) : i; });
            if (last) break;
            number = written * GROUP_PAGES;
        }
    }
    for (int i = thread; i < first; i += THREADS) s.pages[i] = i;
    for (int i = thread; i < held - stop; i += THREADS) s.pages[first + chosen + i] = stop + i;
    __syncthreads();
    return first + chosen + held - stop;
}
