// Attention over listed pages.

struct Attender {
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
        int token = unit % (PAGE / UNIT) * UNIT + lane / TOKEN_LANES, byte = lane % TOKEN_LANES * 16;
        const char *key = (const char *)a.keys + head * a.key_head + page * a.key_page + byte;
        const char *value = (const char *)a.values + head * a.value_head + page * a.value_page + byte;
        u32 to = shared_address(ring + item % STAGES * STAGE_BYTES + lane * 16);
#pragma unroll
        for (int i = 0; i < TOKEN_STEPS; ++i) {
            copy16(to + i * 512, key + (token + i * TOKENS_AT_ONCE) * a.key_token, policy);
            copy16(to + (TOKEN_STEPS + i) * 512, value + (token + i * TOKENS_AT_ONCE) * a.value_token, policy);
        }
    }

    __device__ __forceinline__ void consume(int item, Softmax &softmax) {
        const char *from = ring + item % STAGES * STAGE_BYTES + lane * 16;
        int seen = min(UNIT, length - position(item));
        softmax.add(s.queries, seen, a.softcap, [=](int i) { return *(const uint4 *)(from + i * 512); });
    }
};
