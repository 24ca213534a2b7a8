// One decode step of page-sparse attention in one launch: score, choose, attend, merge. The files of this folder are
// compiled as one (kernels/sifted_attention.py).
//
// The rows (sequence, KV head) are shared out among MEMBERS blocks each. A row's members
//   1. score a share of its pages each, and wait for one another,
//   2. choose its best pages, each for itself: cheaper than to pass the list on,
//   3. attend a share of the listed tokens each, wait for one another, and merge a share of the output each.
// Every warp streams stages of at most 4 KiB through a ring of its own in shared memory, so that enough bytes are in flight and
// no barrier stands between memory and arithmetic.
//
// Compiled for: G query heads per KV head, D head_dim, PAGE tokens, FIRST_FEATURE and SECOND_FEATURE of the
// summary kind, HALF (float16, else bfloat16), KV8 (keys and values of one byte per number), CODED (which are codes with
// scales), FP8 (summary rows of one), WARPS, STAGES, KEYS, CAPACITY of a list, CAPPED, SINK. Budgets (as spans) and
// whether a sequence takes part (dense_below) are its own, read on the device.

// Tells the other members of a row that this one has scored its pages, and shows them what its threads wrote.
__device__ __forceinline__ void arrive(u32 *arrived, int members) {
    __syncthreads();
    if (members > 1 && threadIdx.x == 0)
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}

// Waits until so many have ever arrived, of whom the last are those of this launch; all they wrote is then seen.
__device__ __forceinline__ void await(const u32 *arrived, u32 number, int members) {
    if (members > 1 && threadIdx.x == 0) {
        u32 seen;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
        while ((int)(seen - number) < 0);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sift(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char rings[];
    __shared__ Shared s;
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    int row = blockIdx.x / a.members, member = blockIdx.x % a.members;
    int batch = row / a.num_kv_heads, head = row % a.num_kv_heads;
    if (a.dense_below && a.lengths[batch] < a.dense_below[batch]) {  // the kernel behind this one waits for all before
        asm volatile("griddepcontrol.wait;" ::: "memory");
        return;
    }
    u32 *launches = a.launches + row * 2;
    int first = a.spans[batch * 4], stop = a.spans[batch * 4 + 1], held = a.spans[batch * 4 + 3];
    int count = stop - first, chosen = min(a.spans[batch * 4 + 2], count);
    int place = member * WARPS + warp, step = a.members * WARPS;
    char *ring = rings + warp * RING_BYTES;

    bool ranks = chosen < count && chosen > 0;
    int blocks = ranks ? (count + BLOCK_PAGES - 1) / BLOCK_PAGES : 0;
    int items = place < blocks ? ((blocks - place + step - 1) / step) * STAGES_PER_BLOCK : 0;
    u64 policy = read_once();
    Scorer scorer{a, ring, policy, row, head, first, count, place, step, lane, batch * a.max_pages, 0};
#pragma unroll 1  // of requests in unrolled loops, and behind a condition, ptxas 13.0 makes illegal instructions
    for (int i = 0; i < min(STAGES, items); ++i) scorer.request(i), commit();
    for (int i = items; i < STAGES; ++i) commit();
    for (int i = thread; i < PASSES * STEPS * 32; i += THREADS) s.features[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    // What is above does not depend on the kernel before, what is below may.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    u32 launch = launch_after(launches);
    place_queries(s.queries, a.queries + (i64)row * G * D);
    for (int i = thread; i < G * D; i += THREADS) {
        float q = as_float(a.queries[(i64)row * G * D + i]) * a.scale;
        place_feature(s, i / D, i % D, first_feature(q));
        place_feature(s, i / D, D + i % D, second_feature(q));
    }
    __syncthreads();
    if (CODED) turn_queries(s.queries);  // for the attention, while summaries are on their way
    {
        uint4 features[HELD ? STEPS : 1];
#pragma unroll
        for (int i = 0; HELD && i < STEPS; ++i) features[i] = s.features[i * 32 + lane];
        for (int i = 0; i < items; ++i) {
            wait_for_all_but<STAGES - 1>();
            scorer.consume(i, [&](int pass, int n) {
                return HELD ? features[n % STEPS] : s.features[(pass * STEPS + n) * 32 + lane];
            });
            __syncwarp();
            if (i + STAGES < items) scorer.request(i + STAGES);
            commit();
        }
    }
    arrive(launches + 1, a.members);
    if (ranks) await(launches + 1, launch * a.members, a.members);  // all scores
    for (int i = thread; i < BINS / 4; i += THREADS) s.bins[i] = make_uint4(0, 0, 0, 0);

    int listed = choose(a, s, row, first, stop, chosen, held);
    for (int i = thread; i < listed; i += THREADS) {
        s.physical[i] = a.table[batch * a.max_pages + s.pages[i]];
        if (member == 0) a.pages[(i64)row * CAPACITY + i] = s.pages[i];
    }
    int length = a.lengths[batch];
    int last = length - (held - 1) * PAGE;  // tokens of the last page
    if (member == 0 && thread == 0) {
        a.counts[row] = listed;
        if (a.visible && listed > 0) atomicAdd(a.visible + batch, (u64)((listed - 1) * PAGE + last));
    }
    __syncthreads();

    // before a first step spans are zero
    int units = listed > 0 ? (listed - 1) * (PAGE / UNIT) + (last + UNIT - 1) / UNIT : 0;
    items = place < units ? (units - place + step - 1) / step : 0;
    Attender attender{a, s, ring, head, length, place, step, lane};
    Softmax softmax;
    softmax.clear();
    int stages = items * Attender::PIECES;
    for (int i = 0; i < STAGES; ++i) {
        if (i < stages) attender.request(i);
        commit();
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
        int here = min(UNIT, length - attender.position(i / Attender::PIECES));
        wait_for_all_but<STAGES - 1>();
        attender.consume(i, here, softmax);
        __syncwarp();
        if (i + STAGES < stages) attender.request(i + STAGES);
        commit();
    }
    __syncthreads();

    u64 *record = a.parts + (i64)blockIdx.x * RECORD;
    leave_record((float *)rings, softmax, [&](int n, float x) { tell(record + n, x, launch); });
    merge_records(a, row, launch);
    if (member == a.members - 1 && thread == 0) launches[0] = launch;
}
