// Attention over lists that another layer has chosen, in one launch. The files are compiled as one
// (kernels/listed_attention.py).
//
// The rows (sequence, KV head) are shared out among the blocks of a cluster each: a member attends a share of the list,
// every warp through a ring of its own, and merges a share of the output, reading the other members' shared memory.
// Lists, the table and all but the newest token lie in memory before the kernel in front has begun, so they are
// requested before it has ended.
//
// Compiled for: G query heads per list, D head_dim, PAGE tokens, LIST_UNIT tokens of a unit of the lists, HALF (float16,
// else bfloat16), KV8 (keys and values of one byte per number), WARPS, STAGES, MEMBERS of a cluster, CAPPED, SINK.

__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ float of_member(const float *at, int member) {  // what lies there in its shared memory
    u32 address = shared_address(at);
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(member));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// This member's share of the output, merged from all records.
__device__ __forceinline__ void merge_cluster(const Arguments &a, const Shared &s, int row, int member) {
    constexpr int OWN = G * D / MEMBERS;
    for (int n = member * OWN + threadIdx.x; n < (member + 1) * OWN; n += THREADS) {
        int g = n / D;
        float top[MEMBERS], total[MEMBERS], x[MEMBERS], best = NEGATIVE_INFINITY, sum = 0.f, output = 0.f;
#pragma unroll
        for (int m = 0; m < MEMBERS; ++m) {
            top[m] = of_member(s.record + G * D + g, m), total[m] = of_member(s.record + G * D + G + g, m);
            x[m] = of_member(s.record + n, m), best = fmaxf(best, top[m]);
        }
        if (best != NEGATIVE_INFINITY) {
            if (SINK) best = fmaxf(best, a.sink[row % a.num_kv_heads * G + g] * LOG2E);
#pragma unroll
            for (int m = 0; m < MEMBERS; ++m) {
                float weight = exp2f(top[m] - best);
                sum += weight * total[m], output += weight * x[m];
            }
            if (SINK) sum += exp2f(a.sink[row % a.num_kv_heads * G + g] * LOG2E - best);
            output /= sum;
        }
        a.out[(i64)row * G * D + n] = rounded(output);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, HEAD_TILES * D <= 128 ? 2 : 1) listed(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char rings[];
    __shared__ Shared s;
    int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
    int row = blockIdx.x / MEMBERS, member = blockIdx.x % MEMBERS;
    int batch = row / a.num_kv_heads, head = row % a.num_kv_heads, length = a.lengths[batch];
    if (a.dense_below && length < a.dense_below[batch]) {  // the kernel behind this one waits for all before
        asm volatile("griddepcontrol.wait;" ::: "memory");
        return;
    }
    int source = row - head + (a.heads ? a.heads[head] : head), count = a.counts[source], begin = member * a.share;
    const int *list = a.lists + (i64)source * a.capacity;
    int last = count ? list[count - 1] * LIST_UNIT : 0;
    int *own = (int *)(rings + WARPS * RING_BYTES), *physical = own + a.share;
    for (int i = thread; i < a.share; i += THREADS) {
        int unit = (begin + i) / LIST_UNIT;
        if (unit >= count) break;
        int token = list[unit] * LIST_UNIT + (begin + i) % LIST_UNIT;
        own[i] = token, physical[i] = a.table[batch * a.max_pages + token / PAGE];
    }
    int tokens = count ? (count - 1) * LIST_UNIT + min(LIST_UNIT, length - last) : 0;
    int held = max(0, min(a.share, tokens - begin)), items = ((held + UNIT - 1) / UNIT - warp + WARPS - 1) / WARPS;
    __syncthreads();

    char *ring = rings + warp * RING_BYTES;
    const char *keys = (const char *)a.keys + head * a.key_head, *values = (const char *)a.values + head * a.value_head;
    auto request = [&](int item) {
        u32 to = shared_address(ring + item % STAGES * STAGE_BYTES);
        if (CODED && lane < 2 * UNIT) {
            int at = min((warp + item * WARPS) * UNIT + lane % UNIT, held - 1), slot = own[at] % PAGE;
            i64 page = physical[at];
            const char *start = lane < UNIT ? keys + page * a.key_page : values + page * a.value_page;
            copy_scale(to + ROWS_BYTES + lane * 4, start + SCALES_OF_PAGE + slot * 4);
        }
#pragma unroll
        for (int i = 0; i < 2 * PARTS; ++i) {
            Copied part(i);
            int at = min((warp + item * WARPS) * UNIT + part.token, held - 1);
            i64 page = physical[at];
            int within = own[at] % PAGE;
            const char *from = i < PARTS ? keys + page * a.key_page + within * a.key_token
                                         : values + page * a.value_page + within * a.value_token;
            copy_packed(to + part.slot * (int)sizeof(Packed), from + part.byte);
        }
    };
    // The newest token may not be written yet.
    bool ends = items && begin + held == tokens && (warp + (items - 1) * WARPS + 1) * UNIT >= held;
    int newest = ends ? items - 1 : items;
    int ready = min(STAGES, newest), stages = min(STAGES, items);
#pragma unroll 1
    for (int i = 0; i < ready; ++i) request(i);
    // What is above does not depend on the kernel before, what is below may.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    place_queries(s.queries, a.queries + (i64)row * G * D);
#pragma unroll 1
    for (int i = ready; i < stages; ++i) request(i);
    commit();
    if (CODED) turn_queries(s.queries);
    else __syncthreads();
    Softmax softmax;
    softmax.clear();
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
        if (i == 0) wait_for_all_but<0>();
        else wait_for_all_but<STAGES - 1>();
        const char *stage = ring + i % STAGES * STAGE_BYTES;
        const Packed *from = (const Packed *)stage;
        softmax.add(
            s.queries, min(UNIT, held - (warp + i * WARPS) * UNIT), a.scale, a.softcap,
            [=](int j) { return from[slot_of(j)]; }, scales_of(stage + ROWS_BYTES)
        );
        __syncwarp();
        if (i + STAGES < items) request(i + STAGES);
        commit();
    }
    __syncthreads();

    leave_record((float *)rings, softmax, [&](int n, float x) { s.record[n] = x; });
    wait_for_cluster();
    merge_cluster(a, s, row, member);
    if (member == 0 && thread == 0 && a.visible) atomicAdd(a.visible + batch, (u64)tokens);
    wait_for_cluster();  // others may still read this member's record
}
