// Attention over listed pages.

struct Attender {
    static constexpr int STEP = 32 * sizeof(Packed);  // bytes that a warp copies at a time
    const Arguments &a;
    const Shared &s;
    char *ring;
    u64 policy;
    int head, length, warp, step, lane;

    __device__ __forceinline__ int position(int item) {
        int unit = warp + item * step;
        return s.pages[unit / (PAGE / UNIT)] * PAGE + unit % (PAGE / UNIT) * UNIT;
    }

    __device__ __forceinline__ void request(int item) {
        int unit = warp + item * step;
        i64 page = s.physical[unit / (PAGE / UNIT)];
        int token = unit % (PAGE / UNIT) * UNIT + lane / TOKEN_LANES, byte = lane % TOKEN_LANES * sizeof(Packed);
        const char *key = (const char *)a.keys + head * a.key_head + page * a.key_page + byte;
        const char *value = (const char *)a.values + head * a.value_head + page * a.value_page + byte;
        u32 to = shared_address(ring + item % STAGES * STAGE_BYTES + lane * sizeof(Packed));
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS; ++i) {
            copy_packed(to + i * STEP, key + (token + i * TOKENS_AT_ONCE) * a.key_token, policy);
            copy_packed(to + (TOKEN_STEPS + i) * STEP, value + (token + i * TOKENS_AT_ONCE) * a.value_token, policy);
        }
    }

    __device__ __forceinline__ void consume(int item, Softmax &softmax) {
        const char *from = ring + item % STAGES * STAGE_BYTES + lane * sizeof(Packed);
        int seen = min(UNIT, length - position(item));
        softmax.add(s.queries, seen, a.softcap, [=](int i) { return *(const Packed *)(from + i * STEP); });
    }
};
