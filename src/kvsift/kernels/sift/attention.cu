// Attention over single keys and values: a warp takes eight tokens at a time and keeps a softmax of its own. Both sums are
// products of 16-bit matrices: the query heads by the tokens, then the channels of values by the query heads.

constexpr int QUERY_ROW = D + 32;  // numbers; two rows are read without a conflict
constexpr int CHAINS = 4;          // products of keys that do not wait for one another
constexpr float CODE_UNIT = CODED ? 128.f : 1.f;  // weights times scales times this are as large as weights of numbers
constexpr int QUERY_NUMBERS = HEAD_TILES * 8 * QUERY_ROW;

// The queries of a row as they are, zero beyond the last.
__device__ __forceinline__ void place_query(u16 *queries, int g, int d, u16 bits) { queries[g * QUERY_ROW + d] = bits; }
__device__ __forceinline__ void place_queries(u16 *queries, const u16 *from) {
    for (int i = threadIdx.x; i < HEAD_TILES * 8 * D; i += THREADS)
        place_query(queries, i / D, i % D, i < G * D ? from[i] : (u16)0);
}

// The same, turned as keys in 8 bits are.
__device__ __forceinline__ void turn_queries(u16 *queries) {
    int lane = threadIdx.x & 31;
    __syncthreads();
    for (int g = threadIdx.x / 32; g < G; g += WARPS) {
        u16 *own = queries + g * QUERY_ROW + lane;
        float x[D / 32];
#pragma unroll
        for (int i = 0; i < D / 32; ++i) x[i] = as_float(own[i * 32]);
        turn(x);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) own[i * 32] = rounded(x[i]);
    }
    __syncthreads();
}

// Which of eight tokens this lane's part i is of, and where in the token's row; parts of values are behind those of keys.
__device__ __forceinline__ int token_of(int i) {
    int lane = threadIdx.x & 31;
    return i < PARTS ? lane / 4 : lane % 4 * 2 + i % 2;
}
__device__ __forceinline__ int byte_of(int i) {
    int lane = threadIdx.x & 31;
    return (i < PARTS ? i * 4 + lane % 4 : (i - PARTS) / 2 * 8 + lane / 4) * (int)sizeof(Packed);
}

// Which of a lane's parts lies where in a ring, in units of a part.
__device__ __forceinline__ int slot_of(int i) {
    int lane = threadIdx.x & 31;
    return i * 32 + (i < PARTS ? lane : lane % 4 * 8 + (lane / 4 ^ lane % 4 * 2));
}
// What a lane copies into a ring, and where: eight lanes copy neighbouring parts of a value to one line of 128 bytes,
// since only then is a warp's copy one request (docs/log.md). Parts change places within the line, so that they are read
// without a conflict.
struct Copied {
    int token, byte, slot;
    __device__ __forceinline__ Copied(int i) {
        int lane = threadIdx.x & 31;
        bool key = i < PARTS;
        token = key ? token_of(i) : lane / 8 * 2 + i % 2;
        byte = key ? byte_of(i) : ((i - PARTS) / 2 * 8 + lane % 8) * (int)sizeof(Packed);
        slot = i * 32 + (key ? lane : lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2));
    }
};

// The scales of a stage, of eight keys and of eight values, that this lane needs.
__device__ __forceinline__ Scales scales_of(const char *stage) {
    Scales scales;
    const float *own = (const float *)stage + threadIdx.x % 4 * 2;
    if (CODED) scales.keys = *(const float2 *)own, scales.values = *(const float2 *)(own + UNIT);
    return scales;
}

// Lane 4 r + t has logits of head r and of tokens 2t and 2t + 1, but sums of heads 2t and 2t + 1 and of channels 8 r to
// 8 r + 7 of every 64.
struct Softmax {
    float top[HEAD_TILES], total[HEAD_TILES], acc[HEAD_TILES][D / 16][4];
    float sums[CHAINS][4];
    u32 weights[HEAD_TILES], mask;  // which of a lane's two tokens are there

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            top[tile] = NEGATIVE_INFINITY, total[tile] = 0.f;
#pragma unroll
            for (int n = 0; n < D / 16; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[tile][n][i] = 0.f;
        }
    }

    // All parts of the first `seen` of eight tokens, at least one; row(i) is part i of this lane.
    template <typename Row>
    __device__ __forceinline__ void add(
        const u16 *queries, int seen, float scale, float softcap, Row row, const Scales &scales
    ) {
        add_parts<0, PARTS>(queries, row);
        weigh(seen, scale, softcap, scales);
        add_parts<PARTS, 2 * PARTS>(queries, row);
    }

    // Parts FIRST to LAST of keys or of values; in order, and `weigh` between them.
    template <int FIRST, int LAST, typename Row>
    __device__ __forceinline__ void add_parts(const u16 *queries, Row row) {
        int lane = threadIdx.x & 31;
        if (FIRST == 0)
#pragma unroll
            for (int chain = 0; chain < CHAINS; ++chain)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[chain][i] = 0.f;
        if (FIRST < PARTS) {
            const u16 *from = queries + lane / 4 * QUERY_ROW + lane % 4 * 8;
#pragma unroll
            for (int i = FIRST; i < LAST; ++i) {
                uint4 pairs = pairs_of(row(i)), q = *(const uint4 *)(from + i * 32), more = make_uint4(0, 0, 0, 0);
                if (HEAD_TILES > 1) more = *(const uint4 *)(from + 8 * QUERY_ROW + i * 32);
                multiply16<HALF>(sums[i * 2 % CHAINS], q.x, more.x, q.y, more.y, pairs.x, pairs.y);
                multiply16<HALF>(sums[i * 2 % CHAINS + 1], q.z, more.z, q.w, more.w, pairs.z, pairs.w);
            }
        } else {
#pragma unroll
            for (int i = FIRST; i < LAST; i += 2) {
                uint4 one = pairs_of(row(i)), two = pairs_of(row(i + 1));
                const u32 ones[4] = {one.x, one.y, one.z, one.w}, twos[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {  // what was never written may be NaN
                    u32 even = __byte_perm(ones[w], twos[w], 0x5410) & mask;
                    u32 odd = __byte_perm(ones[w], twos[w], 0x7632) & mask;
#pragma unroll
                    for (int tile = 0; tile < HEAD_TILES; ++tile)
                        multiply8(acc[tile][(i - PARTS) * 2 + w], even, odd, weights[tile]);
                }
            }
        }
    }

    // ``scales`` are those of codes, of this lane's two tokens.
    __device__ __forceinline__ void weigh(int seen, float scale, float softcap, const Scales &scales) {
        int lane = threadIdx.x & 31, token = lane % 4 * 2;
        mask = (token < seen ? 0xffffu : 0) | (token + 1 < seen ? 0xffff0000u : 0);
        float shrink[HEAD_TILES];
        bool same = true;
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            float logits[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float sum = 0.f;
#pragma unroll
                for (int chain = 0; chain < CHAINS; ++chain) sum += sums[chain][2 * tile + j];
                sum *= scale;
                if (CODED) sum *= j ? scales.keys.y : scales.keys.x;
                if (CAPPED) sum = softcap * tanhf(sum / softcap);
                logits[j] = token + j < seen ? sum * LOG2E : NEGATIVE_INFINITY;
            }
            float best = fmaxf(logits[0], logits[1]);
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            best = fmaxf(best, top[tile]);
            shrink[tile] = exp2f(top[tile] - best);  // there is a token, so best is finite
            same &= top[tile] == best;
            float one = exp2f(logits[0] - best), two = exp2f(logits[1] - best);
            top[tile] = best, total[tile] = total[tile] * shrink[tile] + (one + two);
            if (CODED) {  // what was never written may be NaN
                one *= token < seen ? scales.values.x * CODE_UNIT : 0.f;
                two *= token + 1 < seen ? scales.values.y * CODE_UNIT : 0.f;
            }
            weights[tile] = rounded2(one, two);
        }
        if (__all_sync(~0u, same)) return;
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; ++tile) {
            float one = __shfl_sync(~0u, shrink[tile], token * 4), two = __shfl_sync(~0u, shrink[tile], token * 4 + 4);
#pragma unroll
            for (int n = 0; n < D / 16; ++n)
                acc[tile][n][0] *= one, acc[tile][n][1] *= two, acc[tile][n][2] *= one, acc[tile][n][3] *= two;
        }
    }
};
