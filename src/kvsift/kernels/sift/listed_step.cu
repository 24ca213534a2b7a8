// Attention over lists that another layer has chosen, in one launch (kernels/listed_attention.py). The files are compiled
// as one.
//
// The rows (sequence, KV head) are shared out among a.members blocks each: a member attends a share of the list, and the
// last to finish merges the parts. Lists, the table and all but the newest token lie in memory before the kernel in front
// has begun, so they are requested before it has ended.
//
// Compiled for: G query heads per list, D head_dim, PAGE tokens, LIST_UNIT tokens of a unit of the lists, HALF (float16,
// else bfloat16), KV8 (keys and values of one byte per number), WARPS, MORE floats of a record, CAPPED, SINK.

extern "C" __global__ void __launch_bounds__(THREADS, G <= 4 ? 2 : 1) listed(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) char dynamic[];
    __shared__ Shared s;
    int thread = threadIdx.x, row = blockIdx.x / a.members, member = blockIdx.x % a.members;
    int batch = row / a.num_kv_heads, head = row % a.num_kv_heads, length = a.lengths[batch];
    if (a.dense_below && length < a.dense_below[batch]) {  // the kernel behind this one waits for all before
        asm volatile("griddepcontrol.wait;" ::: "memory");
        return;
    }
    int source = row - head + (a.heads ? a.heads[head] : head), count = a.counts[source];
    const int *list = a.lists + (i64)source * a.capacity;
    int tokens = count ? (count - 1) * LIST_UNIT + min(LIST_UNIT, length - list[count - 1] * LIST_UNIT) : 0;
    int units = (tokens + UNIT - 1) / UNIT;
    int begin = units * member / a.members * UNIT, end = min(units * (member + 1) / a.members * UNIT, tokens);
    int *own = (int *)dynamic, *physical = own + a.share;
    float *parts = (float *)(physical + a.share);
    for (int i = begin + thread; i < end; i += THREADS) {
        int token = list[i / LIST_UNIT] * LIST_UNIT + i % LIST_UNIT;
        own[i - begin] = token, physical[i - begin] = a.table[batch * a.max_pages + token / PAGE];
    }
    __syncthreads();
    Gather gather(a, own, physical, head, end - begin);
    bool newest = end == tokens && begin + gather.unit + UNIT >= tokens;  // it may not be written yet
    if (gather.holds() && !newest) gather.request();
    // What is above does not depend on the kernel before, what is below may.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = thread; i < G * D; i += THREADS) s.queries[i] = as_float(a.queries[(i64)row * G * D + i]) * a.scale;
    if (gather.holds() && newest) gather.request();
    __syncthreads();
    Softmax softmax;
    softmax.clear();
    gather.attend(s, softmax);
    __syncthreads();

    leave_record(a, s, parts, softmax, thread < 32 ? end - begin : 0);
    if (!last_of_members(a.arrived + row, a.members, s.word[3])) return;
    merge_records(a, s, parts, row);
    if (thread == 0) a.arrived[row] = 0;
}
