// One decode step of sketches in one launch: weigh, vote, choose tokens, estimate the others, attend, merge. The files
// are compiled as one (kernels/sketch_launch.py).
//
// The rows (sequence, KV head) are shared out among a.members blocks each. A member
//   1. weighs sinks and window exactly: all of them, since to wait for the others' shares would take longer, or a share
//      where they come over the bus,
//   2. weighs its tokens by their codes next to these, and leaves a histogram of their votes; waits for the others,
//   3. lists those of its tokens that reach the common threshold, and attends these, where they are, a share of sinks and
//      window, and the means of the pages for what is not visible; waits for the others, and merges a share of the output.
//
// Compiled for: G query heads per KV head, D head_dim, PAGE tokens, BITS and the places of a row's parts, ERROR of codes,
// HALF (float16, else bfloat16), KV8 (keys and values of one byte per number), CODED (which are codes with scales), REST
// (estimate what is not visible), SPILL (1: bases lie in global memory, 2: own_bins too, 3: unseen and scales),
// WARPS, CAPACITY of a list and LIST in shared memory, MORE floats of a record, CAPPED, SINK, OVER_BUS (keys and values
// lie in host memory, and no cache keeps them).

// The tokens that are visible anyway, sinks and window, and this member's share of them.
struct Ends {
    int batch, first, stop, all, begin, end;  // sinks, first token of the window; how many; own share
    __device__ __forceinline__ Ends(const Arguments &a, int batch, int first, int stop, int held)
        : batch(batch), first(first), stop(stop), all(first + held - stop) {
        int member = blockIdx.x % a.members;
        begin = (u32)all * member / a.members, end = (u32)all * (member + 1) / a.members;
    }
    __device__ __forceinline__ int count() const { return end - begin; }
    __device__ __forceinline__ int token(int i) const { return i < first ? i : stop + i - first; }

    __device__ __forceinline__ void place(const Arguments &a, const Arrays &arrays) const {
        for (int i = threadIdx.x; i < all; i += THREADS) {
            arrays.listed[i] = token(i), arrays.physical[i] = a.table[batch * a.max_pages + token(i) / PAGE];
        }
    }

    // Into the row's list, around `chosen` others.
    __device__ __forceinline__ void list(int *to, int chosen) const {
        for (int i = begin + threadIdx.x; i < end; i += THREADS) to[i < first ? i : i + chosen] = token(i);
    }
};

// Keys and values of `listed` tokens, eight at a time, of which a warp has the `turn`-th first: of `near` that are listed
// from `begin` on, and of the others, which are listed from `ends` on.
struct Gather {
    static constexpr int ROOM = (WARPS <= 8 ? 40 : 16) - HEAD_TILES * D / 16;  // parts that registers have room for
    static constexpr int AHEAD = 2 * PARTS < ROOM ? 2 * PARTS : ROOM;
    const Arguments &a;
    const Arrays &arrays;
    int begin, near, ends, listed, unit;
    const char *keys, *values;
    Packed rows[AHEAD];
    Scales scales;

    __device__ __forceinline__ Gather(
        const Arguments &a, const Arrays &arrays, int head, int turn, int begin, int near, int ends, int listed
    )
        : a(a), arrays(arrays), begin(begin), near(near), ends(ends), listed(listed), unit(turn * UNIT) {
        keys = (const char *)a.keys + head * a.key_head, values = (const char *)a.values + head * a.value_head;
        if (unit < listed) request();
    }

    // Where the n-th token is listed.
    __device__ __forceinline__ int place(int n) const {
        n = min(n, listed - 1);
        return n < near ? begin + n : ends + n - near;
    }

    __device__ __forceinline__ Packed load(int i) const {
        int at = place(unit + token_of(i)), within = arrays.listed[at] % PAGE;
        i64 page = arrays.physical[at];
        const char *from = i < PARTS ? keys + page * a.key_page + within * a.key_token
                                     : values + page * a.value_page + within * a.value_token;
        return __ldcs((const Packed *)(from + byte_of(i)));
    }

    __device__ __forceinline__ void request() {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) rows[i] = load(i);
        if (CODED) {
            int token = threadIdx.x % 4 * 2;
            scales.keys = make_float2(load_scale(keys, a.key_page, token), load_scale(keys, a.key_page, token + 1));
            scales.values =
                make_float2(load_scale(values, a.value_page, token), load_scale(values, a.value_page, token + 1));
        }
    }

    __device__ __forceinline__ float load_scale(const char *rows, i64 page_bytes, int token) const {
        int at = place(unit + token);
        const char *scales = rows + arrays.physical[at] * page_bytes + SCALES_OF_PAGE;
        return __ldcs((const float *)scales + arrays.listed[at] % PAGE);
    }

    // Their weights alone.
    __device__ __forceinline__ void weigh(const Shared &s, Softmax &softmax) {
#pragma unroll 1
        while (unit < listed) {
            softmax.add_parts<0, PARTS>(s.queries, [&](int i) { return i < AHEAD ? rows[i % AHEAD] : load(i); });
            softmax.weigh(min(UNIT, listed - unit), a.scale, a.softcap, scales);
            unit += WARPS * UNIT;
            if (unit < listed) request();
        }
    }

    __device__ __forceinline__ void attend(const Shared &s, Softmax &softmax) {
#pragma unroll 1
        while (unit < listed) {
            softmax.add(
                s.queries, min(UNIT, listed - unit), a.scale, a.softcap,
                [&](int i) { return i < AHEAD ? rows[i % AHEAD] : load(i); }, scales
            );
            unit += WARPS * UNIT;
            if (unit < listed) request();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) sketch(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char dynamic[];
    __shared__ Shared s;
    int thread = threadIdx.x, lane = thread & 31, warp = warp_number();
    int row = blockIdx.x / a.members, member = blockIdx.x % a.members;
    int batch = row / a.num_kv_heads, head = row % a.num_kv_heads;
    if (a.dense_below && a.lengths[batch] < a.dense_below[batch]) {  // the kernel behind this one waits for all before
        asm volatile("griddepcontrol.wait;" ::: "memory");
        return;
    }
    int first = a.spans[batch * 4], stop = a.spans[batch * 4 + 1], held = a.spans[batch * 4 + 3];
    int chosen = min(a.spans[batch * 4 + 2], stop - first);
    bool ranks = chosen < stop - first && (chosen > 0 || REST);
    int begin = first / SUB, subs = (stop + SUB - 1) / SUB - begin;
    int own = (subs + a.members * TILE - 1) / (a.members * TILE) * TILE;  // whole tiles
    Span span{first, stop, begin + member * own, ranks ? max(0, min(own, subs - member * own)) : 0};
    Arrays arrays(a, dynamic);
    const u8 *rows = a.rows + head * a.row_head;
    Weigher weigher(a, arrays, span, rows, a.table + batch * a.max_pages);
    Weigher::Loaded loaded[2];
    bool busy = warp * TILE < span.count;
    int page = 0, next_page = 0;
    if (busy) {
        page = weigher.page_of(warp), next_page = weigher.page_of(warp + WARPS);
        weigher.load(loaded[0], warp, page);
    }
    for (int i = thread; i < BINS / 4; i += THREADS) ((uint4 *)arrays.bins)[i] = make_uint4(0, 0, 0, 0);
    bool all = !ranks && chosen > 0;  // are visible, and none is chosen
    if (all) stop = first, chosen = 0;
    Ends ends(a, batch, first, stop, held);
    ends.place(a, arrays);
    __syncthreads();
    // What is above does not depend on the kernel before, what is below may.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    u32 *launches = a.launches + row * 2, launch = launch_after(launches), ranked = launch_after(launches + 1);
    Softmax softmax;
    softmax.clear();
    int turn = OVER_BUS ? warp * a.members + member : threadIdx.x / 32;  // of the row: its sum is the same
    Gather past(a, arrays, head, turn, 0, ends.all, ends.all, ranks && turn < WARPS ? ends.all : 0);
    place_queries(s.queries, a.queries + (i64)row * G * D);
    if (ranks) rotate_queries(a, s, row);  // while keys are under way
    __syncthreads();
    if (CODED) turn_queries(s.queries);

    int *list = a.tokens + (i64)row * CAPACITY;
    int listed = ends.count();
    Means means;
    if (ranks) {
        past.weigh(s, softmax);
        sum_past(a, s, softmax, row, turn, launch);
        softmax.clear();
        auto weigh = [&](Weigher::Loaded &now, Weigher::Loaded &next, int tile) {
            if (lane < TILE) arrays.pages[tile * TILE + lane] = page;
            if (lane % 4 == 0) arrays.scales[tile * TILE + lane / 4] = from_half(now.scales >> 16);
            page = next_page, next_page = weigher.page_of(tile + 2 * WARPS);
            if (Weigher::AHEAD) weigher.load(next, tile + WARPS, page);
            weigher.hide(now, tile);
            float votes[TILE / 2][4] = {};
#pragma unroll 1  // else operands of one pass are kept for the next, in local memory
            for (int pass = 0; pass < PASSES; ++pass) weigher.weigh(now, tile, pass, s, votes);
            weigher.count(tile, votes);
            if (!Weigher::AHEAD) weigher.load(next, tile + WARPS, page);
        };
        for (int tile = warp; tile * TILE < span.count; tile += WARPS) {
            weigh(loaded[0], loaded[Weigher::AHEAD], tile);
            if (!Weigher::AHEAD) continue;
            tile += WARPS;
            if (tile * TILE < span.count) weigh(loaded[1], loaded[0], tile);
        }
        leave_bins(a, arrays, s, ranked);
        if (REST && warp * MEANS < span.count) means.load(a, arrays, span, rows, warp * MEANS, 0);
        if (chosen > 0) {
            u32 threshold = find_threshold(a, s, row, chosen, ranked);
            listed += list_tokens(a, arrays, s, span, row, chosen, threshold, ranked, ends.all, list + first);
        }
    }
    ends.list(list, chosen);
    if (member == 0 && thread == 0) {
        int visible = first + held - stop + chosen;
        a.counts[row] = visible;
        if (a.visible) atomicAdd(a.visible + batch, (u64)visible);
    }
    __syncthreads();
    bool estimates = REST && ranks;
    if (estimates) see(a, arrays, s, span, rows, ends.all, listed - ends.count());
    Gather gather(a, arrays, head, threadIdx.x / 32, ends.begin, ends.count(), ends.all, listed);  // a share of them, and the chosen
    if (estimates) add_rest(a, arrays, s, span, rows, means, softmax);
    gather.attend(s, softmax);
    __syncthreads();

    u64 *record = a.parts + (i64)blockIdx.x * RECORD;
    leave_record(arrays.parts, softmax, [&](int n, float x) { tell(record + n, x, launch); });
    if (estimates && thread < G) {
        float rest = 0.f;
        for (int w = 0; w < WARPS; ++w) rest += s.rest[w * G + thread];
        tell(record + G * (D + 2) + thread, rest, launch);
    }
    if (estimates && a.estimated && member == 0) add_estimated(a, s, row, launch);
    merge_records(a, row, launch);
    if (member == a.members - 1 && thread == 0) {
        launches[0] = launch;
        if (ranks) launches[1] = ranked;
    }
}
