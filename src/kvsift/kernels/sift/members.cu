// Blocks that share a row tell each other numbers through memory, and each merges a share of what all have left. A word
// that others read brings the number of its launch, so that they wait for the word itself, without a flag or a fence:
// launches of a row are counted, and every launch writes all the words that others will read in it.

// The number of this launch. All members have read it when they have told something, and the last one counts it then.
__device__ __forceinline__ u32 launch_after(const u32 *launches) { return __ldcg(launches) + 1; }

__device__ __forceinline__ void tell(u64 *to, float x, u32 launch) {
    u64 word = (u64)launch << 32 | __float_as_uint(x);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// Counts of tokens bring the last bits of the number of their launch: many are told, and none is older than one launch.
constexpr int COUNT_BITS = 20;  // of a member's tokens, at most 2^19 (MOST_TOKENS)
__device__ __forceinline__ u32 counted(u32 count, u32 launch) { return launch << COUNT_BITS | count; }
__device__ __forceinline__ void tell_count(u32 *to, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void tell_counts(u32 *to, const u32 *words) {  // four
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3]) : "memory");
}

// Reads words; `told` says whether all that were read since it was set are of this launch.
struct Listener {
    u32 launch;
    bool told;
    __device__ __forceinline__ float hear(const u64 *from) {
        u64 word;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
        told &= (u32)(word >> 32) == launch;
        return __uint_as_float((u32)word);
    }
    __device__ __forceinline__ u32 hear_count(const u32 *from) {
        u32 word;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
        told &= (word ^ launch << COUNT_BITS) >> COUNT_BITS == 0;
        return word & (1 << COUNT_BITS) - 1;
    }
};

// This member's share of a row's output, merged from the records of all.
__device__ __forceinline__ void merge_records(const Arguments &a, int row, u32 launch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, members = a.members, member = blockIdx.x % members;
    const u64 *records = a.parts + (i64)row * members * RECORD;
    constexpr int QUADS = G * D / 4;  // of the output
    int begin = QUADS * member / members, end = QUADS * (member + 1) / members;
    int lanes = members > 16 ? 32 : members > 8 ? 16 : members > 4 ? 8 : members > 2 ? 4 : members;  // of a quad
    for (int start = begin + warp * 32 / lanes; start < end; start += THREADS / lanes) {
        int quad = min(start + lane / lanes, end - 1), g = quad * 4 / D;
        float best, total, sums[4];
        Listener others{launch};
        do {
            others.told = true, best = NEGATIVE_INFINITY, total = 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = 0.f;
            for (int m = lane % lanes; m < members; m += lanes) {
                const u64 *record = records + (i64)m * RECORD;
                float top = others.hear(record + G * D + g), own = others.hear(record + G * D + G + g), x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = others.hear(record + quad * 4 + i);
                float larger = fmaxf(best, top);
                if (larger == NEGATIVE_INFINITY) continue;
                float keep = exp2f(best - larger), weight = exp2f(top - larger);
                best = larger, total = total * keep + own * weight;
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] = sums[i] * keep + x[i] * weight;
            }
        } while (!others.told);
        float largest = best;
        for (int other = lanes / 2; other; other >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
        float keep = best == NEGATIVE_INFINITY ? 0.f : exp2f(best - largest);
        total *= keep;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] *= keep;
        for (int other = lanes / 2; other; other >>= 1) {
            total += __shfl_xor_sync(~0u, total, other);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
        }
        keep = 1.f;
        if (SINK) {
            float sink = a.sink[row % a.num_kv_heads * G + g] * LOG2E, larger = fmaxf(largest, sink);
            keep = largest == NEGATIVE_INFINITY ? 0.f : exp2f(largest - larger);
            total = total * keep + exp2f(sink - larger);
        }
        keep = total > 0.f ? keep / total : 0.f;
        if (start + lane / lanes < end && lane % lanes == 0)
            *(uint2 *)(a.out + (i64)row * G * D + quad * 4) =
                make_uint2(rounded2(sums[0] * keep, sums[1] * keep), rounded2(sums[2] * keep, sums[3] * keep));
    }
}
