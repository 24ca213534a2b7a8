// Attention over listed tokens wherever they are: of those of a block, a warp takes eight at a time, from the cache into
// registers.
struct Gather {
    static constexpr int AHEAD = G <= 4 ? 2 * TOKEN_STEPS : TOKEN_STEPS;  // what registers have room for
    const Arguments &a;
    const int *tokens, *physical;  // ascending, and the pages they are in
    int listed, unit;              // tokens of the block, and the first of this warp's eight
    const char *keys, *values;
    Packed rows[AHEAD];

    __device__ __forceinline__ Gather(
        const Arguments &a, const int *tokens, const int *physical, int head, int listed
    ) : a(a), tokens(tokens), physical(physical), listed(listed), unit(threadIdx.x / 32 * UNIT) {
        int part = (threadIdx.x & 31) % TOKEN_LANES * sizeof(Packed);
        keys = (const char *)a.keys + head * a.key_head + part;
        values = (const char *)a.values + head * a.value_head + part;
    }

    __device__ __forceinline__ bool holds() const { return unit < listed; }

    __device__ __forceinline__ Packed load(int i) const {
        int at = min(unit + i % TOKEN_STEPS * TOKENS_AT_ONCE + (threadIdx.x & 31) / TOKEN_LANES, listed - 1);
        int within = tokens[at] % PAGE;
        i64 page = physical[at];
        return __ldcs((const Packed *)(i < TOKEN_STEPS ? keys + page * a.key_page + within * a.key_token
                                                       : values + page * a.value_page + within * a.value_token));
    }

    __device__ __forceinline__ void request() {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) rows[i] = load(i);
    }

    __device__ __forceinline__ void attend(const Shared &s, Softmax &softmax) {
#pragma unroll 1
        while (holds()) {
            softmax.add(s.queries, min(UNIT, listed - unit), a.softcap, [&](int i) {
                return i < AHEAD ? rows[i % AHEAD] : load(i);
            });
            unit += WARPS * UNIT;
            if (holds()) request();
        }
    }
};
